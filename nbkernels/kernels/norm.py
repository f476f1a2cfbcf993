"""What layer_norm and rms_norm share around their statistics.

    load        x [+ residual]  ->  held       float32: the statistics are those of the unrounded sum
    (the statistics and the normalised values: each file's own)
    finish      held · weight + bias  ->  out

A row in registers is read once; a longer one twice, tile by tile, the second time mostly from L2.

Sums of squares are kept twice, of the values and of the values times 2^-80: where the first overflows (float32 and bfloat16
reach 3e38) the second still holds, and where the second underflows the first is exact.
"""

from functools import cache

import numpy as np
from numba import cuda, float32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, vector_width
from nbkernels.kernels.rows import row_access

# The square of the largest float32 times this sums up to a finite number; plain squares overflow from 2^64 on.
SHRINK = np.float32(2.0**-80)
LARGEST = np.finfo(np.float32).max
REGISTERS = 65536  # of a multiprocessor, the most a block can have


def _has_room(wide, threads, values):
    """Whether a block's registers hold a second array of ``values`` a thread beside the row, so that its loads go out at once.

    Where not, an array is taken chunk by chunk. The strided walk needs the registers for its addresses and conditions.
    """
    return wide and threads * values <= REGISTERS // 4


@cache
def source(dtype, wide, threads, chunks, has_residual):
    """read(x, x_start, residual, residual_start, thread, columns, held): held[:] = x + residual, in float32."""
    width = vector_width(dtype)
    values = chunks * width
    rows = row_access(dtype, width, wide, threads, chunks)
    load, load_chunk = rows.load, rows.load_chunk
    at_once = _has_room(wide, threads, values)
    if not has_residual:

        @cuda.jit(device=True, inline="always")
        def read(x, x_start, residual, residual_start, thread, columns, held):
            load(x, x_start, thread, columns, held)

    elif at_once:

        @cuda.jit(device=True, inline="always")
        def read(x, x_start, residual, residual_start, thread, columns, held):
            other = cuda.local.array(values, float32)
            load(x, x_start, thread, columns, held)
            load(residual, residual_start, thread, columns, other)
            for i in range(values):
                held[i] += other[i]

    else:

        @cuda.jit(device=True, inline="always")
        def read(x, x_start, residual, residual_start, thread, columns, held):
            other = cuda.local.array(values, float32)
            for c in range(chunks):
                load_chunk(x, x_start, thread, columns, held, c)
                load_chunk(residual, residual_start, thread, columns, other, c)
                for j in range(width):
                    held[c * width + j] += other[c * width + j]

    return read


@cache
def finish(dtype, parameter_dtype, wide, threads, chunks, has_weight, has_bias):
    """write(held, weight, bias, first, y, y_start, thread, columns): y = held · weight + bias, those from column ``first`` on."""
    width = vector_width(dtype)
    values = chunks * width
    rows = row_access(dtype, width, wide, threads, chunks)
    parameters = row_access(parameter_dtype or dtype, width, wide, threads, chunks, cached=True)
    store, store_chunk = rows.store, rows.store_chunk
    load, load_chunk = parameters.load, parameters.load_chunk
    if _has_room(wide, threads, values):

        @cuda.jit(device=True, inline="always")
        def write(held, weight, bias, first, y, y_start, thread, columns):
            operand = cuda.local.array(values, float32)
            if has_weight:
                load(weight, first, thread, columns, operand)
                for i in range(values):
                    held[i] *= operand[i]
            if has_bias:
                load(bias, first, thread, columns, operand)
                for i in range(values):
                    held[i] += operand[i]
            store(y, y_start, thread, columns, held)

    else:

        @cuda.jit(device=True, inline="always")
        def write(held, weight, bias, first, y, y_start, thread, columns):
            operand = cuda.local.array(values, float32)
            for c in range(chunks):
                if has_weight:
                    load_chunk(weight, first, thread, columns, operand, c)
                    for j in range(width):
                        held[c * width + j] *= operand[c * width + j]
                if has_bias:
                    load_chunk(bias, first, thread, columns, operand, c)
                    for j in range(width):
                        held[c * width + j] += operand[c * width + j]
                store_chunk(y, y_start, thread, columns, held, c)

    return write


@cuda.jit(device=True, inline="always")
def inverse_root(squares, small_squares, mean, inverse_columns, eps):
    """1 / sqrt(squares / columns - mean² + eps), from the sums of squares of the values and of the values · SHRINK."""
    if squares > float32(LARGEST):
        # eps is far below what a float32 can add to such a variance
        small_mean = mean * SHRINK
        return ptx.rsqrt(ptx.fmax_nan(small_squares * inverse_columns - small_mean * small_mean, float32(0.0))) * SHRINK
    return ptx.rsqrt(ptx.fmax_nan(squares * inverse_columns - mean * mean, float32(0.0)) + eps)


def arguments(x, parameters, residual, out, total, eps):
    """The kernels' arguments in order: arrays [rows, columns] or [columns] (None: address 0), sizes, row strides, numbers."""
    rows, columns = x.shape
    vectors = (0 if p is None else p.pointer for p in parameters)
    if residual is None:
        arrays = (0, out.pointer, 0)
        strides = (x.strides[0], 0, out.strides[0], 0)
    else:
        arrays = (residual.pointer, out.pointer, total.pointer)
        strides = (x.strides[0], residual.strides[0], out.strides[0], total.strides[0])
    return x.pointer, *vectors, *arrays, rows, columns, *strides, 1.0 / columns, eps


def cost(rows, columns, dtype, *, residual, parameters, flops):
    """Each input read once, each output written once. parameters: bytes of weight and bias; flops: those of an element."""
    arrays = 4 if residual else 2
    return Cost(bytes=arrays * rows * columns * dtype.itemsize + parameters, flops=flops * rows * columns)
