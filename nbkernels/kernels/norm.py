"""What layer_norm and rms_norm share around their statistics.

    load        x [+ residual]  ->  held       the statistics are those of the unrounded sum, in float32
    (the statistics and the normalised values: each file's own)
    finish      value · weight + bias  ->  out

A row in registers is read once; a longer one twice, tile by tile, the second time mostly from L2.

Sums of squares are kept twice, of the values and of the values times 2^-80: where the first overflows (float32 and bfloat16
reach 3e38) the second still holds, and where the second underflows the first is exact.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, vector_width
from nbkernels.kernels.rows import SHRINK, anew_words, row_access

LARGEST = np.finfo(np.float32).max


class Source(NamedTuple):
    """The rows x + residual as their kernels read them: ``rows.Access``'s functions of two arrays at once."""

    words: int
    read: object
    get: object
    anew: object


@cache
def source(dtype, walk, threads, chunks, has_residual, rows_per_block=1):
    """Source of x [+ residual] in float32.

    read(x, x_start, residual, residual_start, thread, columns, held): both arrays' parts of a thread, on their way together.
    get(held, c, values): values[:width] = chunk c of the sum. Narrow elements are held apart, since two of them are no
    larger than their sum.
    """
    width = vector_width(dtype)
    first = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block)
    if not has_residual:
        begin, load = first.begin, first.load

        @cuda.jit(device=True, inline="always")
        def read(x, x_start, residual, residual_start, thread, columns, held):
            begin(x, x_start, thread, columns)
            load(x, x_start, thread, columns, held)

        return Source(first.words, read, first.get, first.anew)
    second = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block, slot=1)
    words = first.words
    begin, load, get_one = first.begin, first.load, first.get
    begin_other, load_other = second.begin, second.load
    apart = dtype.itemsize == 2

    @cuda.jit(device=True, inline="always")
    def read(x, x_start, residual, residual_start, thread, columns, held):
        other = cuda.local.array(words, uint32)
        begin(x, x_start, thread, columns)
        begin_other(residual, residual_start, thread, columns)
        load(x, x_start, thread, columns, held)
        load_other(residual, residual_start, thread, columns, other)
        for i in range(words):
            if apart:
                held[words + i] = other[i]
            else:
                held[i] = ptx.bits_from_float(ptx.float_from_bits(held[i]) + ptx.float_from_bits(other[i]))

    if not apart:
        return Source(words, read, get_one, first.anew)

    @cuda.jit(device=True, inline="always")
    def get_sum(held, c, values):
        other = cuda.local.array(width, float32)
        get_one(held, c, values)
        get_one(held, c + chunks, other)
        for j in range(width):
            values[j] += other[j]

    return Source(2 * words, read, get_sum, anew_words(2 * words))


@cache
def finish(dtype, parameter_dtype, walk, threads, chunks, has_weight, has_bias):
    """scale_chunk(values, weight, bias, first, thread, columns, c): values = values · weight + bias, of chunk c.

    first: the column at which the row or tile begins.
    """
    width = vector_width(dtype)
    one = row_access(parameter_dtype or dtype, width, "wide" if walk == "wide" else "strided", threads, 1, cached=True)
    words, load, get = one.words, one.load, one.get
    chunk_columns = threads * width

    @cuda.jit(device=True, inline="always")
    def scale_chunk(values, weight, bias, first, thread, columns, c):
        raw = cuda.local.array(words, uint32)
        operand = cuda.local.array(width, float32)
        # what is left of the row from the chunk on: a chunk by itself is one of a row that begins there
        here = uint32(0)
        if uint32(c * chunk_columns) < columns:
            here = uint32(columns - uint32(c * chunk_columns))
        if has_weight:
            load(weight, first + int64(c * chunk_columns), thread, here, raw)
            get(raw, 0, operand)
            for j in range(width):
                values[j] *= operand[j]
        if has_bias:
            load(bias, first + int64(c * chunk_columns), thread, here, raw)
            get(raw, 0, operand)
            for j in range(width):
                values[j] += operand[j]

    return scale_chunk


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
