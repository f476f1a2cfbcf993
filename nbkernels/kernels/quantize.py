"""Symmetric int8 quantisation of a weight, a scale a row or a group of columns of a row.

    scale[o, g]  = max |weight[o, i]| / 127 over the columns i of group g
    values[o, i] = weight[o, i] / scale[o, i // group_size], rounded half to even

A warp takes a group, in two walks: the maximum, then the values; the second walk finds the group in L1 or L2.

    row o:  |group 0 ........|group 1 ........| ... |last, short|
             l0 l1 … l31 l0 …                         lanes of the warp of (o, group)

Both divisions are true ones, so that the bits equal the reference's: a reciprocal rounds some halves the other way.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int8, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, conversions
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

WARPS = 4
THREADS = WARPS * ptx.WARP
LARGEST = np.float32(127)
# A sum with 1.5 · 2^23 is rounded to an integer, half to even, that stands in its lowest bits in two's complement.
ROUNDER = np.float32(1.5 * 2**23)


@cuda.jit(device=True, inline="always")
def _warp_max_nan(x):
    """The largest x over the warp, in every lane; a NaN wins."""
    for step in range(5):
        x = ptx.fmax_nan(x, ptx.shfl_bfly(x, uint32(16) >> uint32(step)))
    return x


def quantize_kernel(dtype):
    """One kernel for every shape and group size."""
    from_storage, _ = conversions(dtype)

    @kernel(launch_bounds=THREADS)
    def quantize(
        weight: ptx.pointer(dtype),
        values: ptx.pointer("int8"),
        scales: ptx.pointer("float32"),
        rows: int64,
        columns: int64,
        groups: int64,
        group_size: int64,
        weight_stride: int64,
        values_stride: int64,
        scales_stride: int64,
    ):
        lane = int64(ptx.lane_id())
        number = int64(cuda.blockIdx.x) * int64(WARPS) + int64(uint32(uint32(cuda.threadIdx.x) >> uint32(5)))
        row = number // groups
        group = number - row * groups
        if row < rows:
            first = group * group_size + lane
            end = min((group + int64(1)) * group_size, columns)
            weight_row = row * weight_stride
            values_row = row * values_stride

            top = float32(0.0)
            i = first
            while i < end:
                top = ptx.fmax_nan(top, abs(from_storage(weight[weight_row + i])))
                i += int64(ptx.WARP)
            scale = _warp_max_nan(top) / LARGEST
            if lane == int64(0):
                scales[row * scales_stride + group] = scale

            divisor = scale if scale > float32(0.0) else float32(1.0)
            i = first
            while i < end:
                quotient = from_storage(weight[weight_row + i]) / divisor
                rounded = ptx.bits_from_float(max(min(quotient, LARGEST), -LARGEST) + ROUNDER)
                values[values_row + i] = int8(rounded)
                i += int64(ptx.WARP)

    return quantize


@lru_cache(maxsize=1024)
def plan(rows, groups, dtype):
    """A warp a group of a row. Nothing overlaps with it: the product behind it may read its weight before it waits."""
    return Plan(quantize_kernel, (dtype,), (-(-rows * groups // WARPS), 1, 1), (THREADS, 1, 1), early=False)


def cost(rows, columns, groups, dtype):
    """The weight read once, values and scales written once; an absolute value, a maximum, a quotient and a rounding each."""
    return Cost(bytes=rows * (columns * (dtype.itemsize + 1) + 4 * groups), flops=4 * rows * columns)


def run(weight, values, scales, group_size, device, stream):
    """weight [rows, columns] with contiguous columns; values int8 [rows, columns]; scales float32 [rows, groups]."""
    rows, columns = weight.shape
    groups = scales.shape[1]
    launch(
        plan(rows, groups, weight.dtype),
        (
            weight.pointer,
            values.pointer,
            scales.pointer,
            rows,
            columns,
            groups,
            columns if group_size is None else group_size,
            weight.strides[0],
            values.strides[0],
            scales.strides[0],
        ),
        device,
        stream,
    )
