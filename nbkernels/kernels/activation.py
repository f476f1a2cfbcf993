"""Element-wise activations: GELU, the gated units SwiGLU and GeGLU, and the soft cap of logits.

    gelu(x)          = x · Phi(x), Phi the normal distribution function  (Hendrycks, Gimpel 2016), exactly or by its tanh form
    silu_mul(g, u)   = g / (1 + exp(-g)) · u                             (Shazeer 2020, "GLU Variants Improve Transformer")
    gelu_mul(g, u)   = gelu(g) · u, in its tanh form                     (the same)
    soft_cap(x)      = cap · tanh(x / cap)                               (Gemma 2)

A block takes one stretch of a row; each thread has UNROLL wide accesses in flight, a block's width apart:

    row:  |t0 |t1 | … |tN |t0 |t1 | … |tN |   stretch of the next block …
           <---- access 0 ----><- access 1 ->
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int64, uint32
from numba.cuda import libdevice

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, access, aligned, vector_width
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

THREADS = 128
UNROLL = 2  # two 16-byte accesses an array and thread in flight, at up to 16 blocks a multiprocessor, cover the latency
LOG2E = np.float32(np.log2(np.e))
SQRT_HALF = np.float32(np.sqrt(0.5))
TANH_SCALE = np.float32(2 * np.sqrt(2 / np.pi) * np.log2(np.e))
TANH_CUBIC = np.float32(0.044715)


@cuda.jit(device=True, inline="always")
def silu(x):
    """x / (1 + exp(-x)); exp may overflow to infinity, and x / inf is the right 0."""
    return float32(x / (float32(1.0) + ptx.ex2(float32(-x) * LOG2E)))


@cuda.jit(device=True, inline="always")
def gelu_tanh(x):
    """x · (1 + tanh(u)) / 2 = x · sigmoid(2u) with u = sqrt(2 / pi) · (x + 0.044715 x³)."""
    twice_u = (x + TANH_CUBIC * (x * x * x)) * TANH_SCALE  # in units of ln 2
    return float32(x / (float32(1.0) + ptx.ex2(float32(-twice_u))))


@cuda.jit(device=True, inline="always")
def gelu_exact(x):
    """x · (1 + erf(x / sqrt(2))) / 2, by erfc where the sum would cancel."""
    return float32(float32(0.5) * x * libdevice.erfcf(float32(-x) * SQRT_HALF))


@cache
def _map_values(function, width):
    """function over a tuple of ``width`` values."""

    @cuda.jit(device=True, inline="always")
    def one(a):
        return (function(a[0]),)

    @cuda.jit(device=True, inline="always")
    def four(a):
        return (function(a[0]), function(a[1]), function(a[2]), function(a[3]))

    @cuda.jit(device=True, inline="always")
    def eight(a):
        return four(a[:4]) + four(a[4:])

    return {1: one, 4: four, 8: eight}[width]


@cache
def _gated_values(width, function):
    """function(gate) · up over tuples of ``width`` values."""

    @cuda.jit(device=True, inline="always")
    def one(g, u):
        return (function(g[0]) * u[0],)

    @cuda.jit(device=True, inline="always")
    def four(g, u):
        return (function(g[0]) * u[0], function(g[1]) * u[1], function(g[2]) * u[2], function(g[3]) * u[3])

    @cuda.jit(device=True, inline="always")
    def eight(g, u):
        return four(g[:4], u[:4]) + four(g[4:], u[4:])

    return {1: one, 4: four, 8: eight}[width]


@cache
def _capped_values(width):
    """cap · tanh(x / cap) over a tuple of ``width`` values."""

    @cuda.jit(device=True, inline="always")
    def one(a, cap):
        return (float32(cap * libdevice.tanhf(float32(a[0] / cap))),)

    @cuda.jit(device=True, inline="always")
    def four(a, cap):
        return one(a[:1], cap) + one(a[1:2], cap) + one(a[2:3], cap) + one(a[3:], cap)

    @cuda.jit(device=True, inline="always")
    def eight(a, cap):
        return four(a[:4], cap) + four(a[4:], cap)

    return {1: one, 4: four, 8: eight}[width]


def gelu_kernel(dtype, width, approximate):
    """x [rows, columns] -> y; grid: stretches · rows, row-major."""
    load, store = access(dtype, width)
    values = _map_values(gelu_tanh if approximate == "tanh" else gelu_exact, width)

    @kernel(launch_bounds=THREADS)
    def gelu(
        x: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        columns: uint32,
        stretches: uint32,
        x_stride: int64,
        y_stride: int64,
    ):
        block = uint32(cuda.blockIdx.x)
        row = int64(block // stretches)
        start = uint32(uint32(block % stretches) * uint32(UNROLL * THREADS * width))
        for i in range(UNROLL):
            column = uint32(start + uint32(uint32(i * THREADS) + uint32(cuda.threadIdx.x)) * uint32(width))
            if column < columns:
                store(y, row * y_stride + int64(column), values(load(x, row * x_stride + int64(column))))

    return gelu


def soft_cap_kernel(dtype, width):
    """x [rows, columns] -> y; grid: stretches · rows, row-major."""
    load, store = access(dtype, width)
    values = _capped_values(width)

    @kernel(launch_bounds=THREADS)
    def soft_cap(
        x: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        columns: uint32,
        stretches: uint32,
        x_stride: int64,
        y_stride: int64,
        cap: float32,
    ):
        block = uint32(cuda.blockIdx.x)
        row = int64(block // stretches)
        start = uint32(uint32(block % stretches) * uint32(UNROLL * THREADS * width))
        for i in range(UNROLL):
            column = uint32(start + uint32(uint32(i * THREADS) + uint32(cuda.threadIdx.x)) * uint32(width))
            if column < columns:
                store(y, row * y_stride + int64(column), values(load(x, row * x_stride + int64(column)), cap))

    return soft_cap


def gated_kernel(dtype, width, activation):
    """gate, up [rows, columns] -> y; grid: stretches · rows. activation: "silu" or "gelu"; the kernel's name has it."""
    load, store = access(dtype, width)
    values = _gated_values(width, silu if activation == "silu" else gelu_tanh)

    def gated(
        gate: ptx.pointer(dtype),
        up: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        columns: uint32,
        stretches: uint32,
        gate_stride: int64,
        up_stride: int64,
        y_stride: int64,
    ):
        block = uint32(cuda.blockIdx.x)
        row = int64(block // stretches)
        start = uint32(uint32(block % stretches) * uint32(UNROLL * THREADS * width))
        for i in range(UNROLL):
            column = uint32(start + uint32(uint32(i * THREADS) + uint32(cuda.threadIdx.x)) * uint32(width))
            if column < columns:
                g = load(gate, row * gate_stride + int64(column))
                u = load(up, row * up_stride + int64(column))
                store(y, row * y_stride + int64(column), values(g, u))

    gated.__name__ = gated.__qualname__ = f"{activation}_mul"
    return kernel(launch_bounds=THREADS)(gated)


@lru_cache(maxsize=4096)
def plan(factory, constants, rows, columns, width):
    """One block a stretch of UNROLL · THREADS accesses of a row, all in grid.x. ValueError beyond 2^31 - 1 blocks."""
    stretches = -(-columns // (UNROLL * THREADS * width))
    if rows * stretches > 2**31 - 1:
        raise ValueError(f"{rows} rows of {columns} columns need more than 2^31 - 1 blocks")
    return Plan(factory, constants, (rows * stretches, 1, 1), (THREADS, 1, 1)), stretches


def cost(arrays, rows, columns, itemsize):
    """Each of ``arrays`` arrays, the result among them, passes once."""
    return Cost(bytes=arrays * rows * columns * itemsize, flops=8 * rows * columns)


def _width(columns, *arrays):
    width = vector_width(arrays[0].dtype)
    wide = columns % width == 0 and all(aligned(a, width=width) for a in arrays)
    return width if wide else 1


def run_gelu(x, out, approximate, device, stream):
    """x, out: DeviceArrays [rows, columns]."""
    rows, columns = x.shape
    width = _width(columns, x, out)
    chosen, stretches = plan(gelu_kernel, (x.dtype, width, approximate), rows, columns, width)
    launch(chosen, (x.pointer, out.pointer, columns, stretches, x.strides[0], out.strides[0]), device, stream)


def run_soft_cap(x, out, cap, device, stream):
    """x, out: DeviceArrays [rows, columns]."""
    rows, columns = x.shape
    width = _width(columns, x, out)
    chosen, stretches = plan(soft_cap_kernel, (x.dtype, width), rows, columns, width)
    launch(chosen, (x.pointer, out.pointer, columns, stretches, x.strides[0], out.strides[0], cap), device, stream)


def run_gated(gate, up, activation, out, device, stream):
    """activation(gate) · up. gate, up, out: DeviceArrays [rows, columns]."""
    rows, columns = gate.shape
    width = _width(columns, gate, up, out)
    chosen, stretches = plan(gated_kernel, (gate.dtype, width, activation), rows, columns, width)
    strides = (gate.strides[0], up.strides[0], out.strides[0])
    launch(chosen, (gate.pointer, up.pointer, out.pointer, columns, stretches, *strides), device, stream)
