"""What layer_norm and rms_norm share around their statistics.

    load        x [+ residual]  ->  held       the statistics are those of the unrounded sum, in float32
    (the statistics and the normalised values: each file's own)
    finish      value · weight + bias  ->  out        or, quantised to int8, first their maximum, then the values once more

A row in registers is read once; a longer one twice, tile by tile, the second time mostly from L2.

The sum of squares may overflow where a float32 holds the values (up to 3e38): then that of the values times 2^-80 holds. A row in
registers is summed again for it; a longer one keeps both sums.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, vector_width
from nbkernels.kernels.int8_rows import LARGEST as LARGEST_INT8
from nbkernels.kernels.int8_rows import divisor_of, int8_put
from nbkernels.kernels.rows import SCRATCH, anew_words, reductions, row_access, row_max_nan

# The square of the largest float32 times this sums up to a finite number; plain squares overflow from 2^64 on.
SHRINK = np.float32(2.0**-80)
LARGEST = np.finfo(np.float32).max
# 16-byte pieces of a row and of its vectors that a block holds: of a multiprocessor's registers some have to do other things.
MOST_KEPT = 6144
# So few blocks have a multiprocessor each, and their time is their wait.
FEW_BLOCKS = 128


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


class Parameters(NamedTuple):
    """weight and bias of the normalised values.

    fetch(weight, bias, first, thread, columns) -> vectors: sent for before the statistics are taken, where they are kept
    scale_chunk(values, vectors, first, thread, columns, c): values = values · weight + bias, of chunk c

    first: the column at which the row or tile begins. Both are rounded together: one operation.
    """

    fetch: object
    scale_chunk: object


@cache
def parameters(dtype, parameter_dtype, walk, threads, chunks, has_weight, has_bias, quantised, kept=False):
    """The Parameters of a kernel; kept: they stay in registers, as they lie in memory, from ``fetch`` on.

    Where they are not, they are read when they are used, mostly from L1 or L2. A quantised row is computed twice and must be
    rounded alike, so that it is not left to the compiler, which does so within a basic block, whether a product and a sum
    become one operation.
    """
    width = vector_width(dtype)
    walk = "wide" if walk == "wide" else "strided"
    one = row_access(parameter_dtype or dtype, width, walk, threads, 1, cached=True)
    words, load, get = one.words, one.load, one.get
    hold_values = ptx.hold(width, "f")
    chunk_columns = threads * width
    given = int(has_weight) + int(has_bias)

    @cuda.jit(device=True, inline="always")
    def left_of(columns, c):
        # what is left of the row from a chunk on: a chunk by itself is one of a row that begins there
        here = uint32(0)
        if uint32(c * chunk_columns) < columns:
            here = uint32(columns - uint32(c * chunk_columns))
        return here

    if kept and given:
        every = row_access(parameter_dtype or dtype, width, walk, threads, chunks, cached=True)
        all_words, load_all, get_all = every.words, every.load, every.get
        kept_words = given * all_words

        @cuda.jit(device=True, inline="always")
        def fetch(weight, bias, first, thread, columns):
            vectors = cuda.local.array(kept_words, uint32)
            raw = cuda.local.array(all_words, uint32)
            if has_weight:
                load_all(weight, first, thread, columns, raw)
                for i in range(all_words):
                    vectors[i] = raw[i]
            if has_bias:
                load_all(bias, first, thread, columns, raw)
                for i in range(all_words):
                    vectors[(given - 1) * all_words + i] = raw[i]
            return vectors

        @cuda.jit(device=True, inline="always")
        def scale_chunk(values, vectors, first, thread, columns, c):
            operand = cuda.local.array(width, float32)
            added = cuda.local.array(width, float32)
            get_all(vectors, c, operand)
            if has_weight and has_bias:
                get_all(vectors, chunks + c, added)
                for j in range(width):
                    values[j] = ptx.fma(values[j], operand[j], added[j])
            elif has_weight:
                for j in range(width):
                    values[j] *= operand[j]
            else:
                hold_values(values, 0)  # the product before is rounded
                for j in range(width):
                    values[j] += operand[j]

        return Parameters(fetch, scale_chunk)

    @cuda.jit(device=True, inline="always")
    def where_they_are(weight, bias, first, thread, columns):
        return weight, bias

    @cuda.jit(device=True, inline="always")
    def scale_chunk(values, vectors, first, thread, columns, c):
        weight, bias = vectors
        raw = cuda.local.array(words, uint32)
        operand = cuda.local.array(width, float32)
        added = cuda.local.array(width, float32)
        here = left_of(columns, c)
        if has_weight and has_bias:
            load(weight, first + int64(c * chunk_columns), thread, here, raw)
            get(raw, 0, operand)
            load(bias, first + int64(c * chunk_columns), thread, here, raw)
            get(raw, 0, added)
            for j in range(width):
                values[j] = ptx.fma(values[j], operand[j], added[j])
        elif has_weight:
            load(weight, first + int64(c * chunk_columns), thread, here, raw)
            get(raw, 0, operand)
            for j in range(width):
                values[j] *= operand[j]
        elif has_bias:
            hold_values(values, 0)  # the product before is rounded
            load(bias, first + int64(c * chunk_columns), thread, here, raw)
            get(raw, 0, operand)
            for j in range(width):
                values[j] += operand[j]

    return Parameters(where_they_are, scale_chunk)


def keeping(dtype, parameter_dtype, vectors, arrays, walk):
    """``rows.plan_rows``'s more: whether a kernel keeps ``vectors`` vectors, of weight and bias.

    A row's own words and theirs must fit into registers. Streamed rows then need not read them row after row; of a few rows each
    waits once instead of twice.
    """

    def more(threads, chunks, blocks, streamed):
        words = chunks * (arrays + vectors)
        fits = vectors > 0 and parameter_dtype.itemsize <= dtype.itemsize and threads * words <= MOST_KEPT
        return (fits and (streamed or (walk == "wide" and blocks <= FEW_BLOCKS)),)

    return more


class Result(NamedTuple):
    """How normalised values are stored: rounded to x's dtype, or quantised to int8 with a scale a row.

    largest(held, vectors, start, thread, columns, statistics): max |normalised value| of the thread's part of a row or tile
    divisor(largest, scales, row, stride, start, thread, columns): of the row, for ``put``; its scale is stored at row · stride
    again(held): the values are computed anew for ``put``: kept, they would take as many registers as there are columns, and
    could be rounded otherwise
    put(pointer, start, thread, columns, c, values, divisor), flush(pointer, start, thread, columns): as ``rows.Access``'s
    y, scales: the types of the kernels' parameters

    Where nothing is quantised, largest, divisor and again do nothing.
    """

    largest: object
    divisor: object
    again: object
    put: object
    flush: object
    y: object
    scales: object
    scales_stride: object


def result(dtype, walk, threads, chunks, cluster, words, access, normalise, quantised):
    """The Result of a kernel that holds ``words`` registers of rows.

    normalise(held, c, values, vectors, start, thread, columns, statistics): values[:width] = chunk c, normalised.
    """
    if not quantised:
        put_plain = access.put

        @cuda.jit(device=True, inline="always")
        def no_largest(held, vectors, start, thread, columns, statistics):
            return float32(0.0)

        @cuda.jit(device=True, inline="always")
        def no_divisor(largest, scales, row, stride, start, thread, columns):
            return float32(0.0)

        @cuda.jit(device=True, inline="always")
        def not_again(held):
            pass

        @cuda.jit(device=True, inline="always")
        def put(pointer, start, thread, columns, c, values, divisor):
            put_plain(pointer, start, thread, columns, c, values)

        return Result(no_largest, no_divisor, not_again, put, access.flush, ptx.pointer(dtype), ptx.absent, ptx.absent)

    width = vector_width(dtype)
    whole, inside = access.whole, access.inside
    row_max = row_max_nan(threads, cluster)
    again = anew_words(words)
    by_chunks = walk == "wide"  # a chunk is inside or outside as a whole
    scratch_size = SCRATCH * cluster

    @cuda.jit(device=True, inline="always")
    def largest(held, vectors, start, thread, columns, statistics):
        values = cuda.local.array(width, float32)
        top = float32(0.0)
        for c in range(chunks):
            again(held)  # a chunk after the other: all at once take too many registers
            normalise(held, c, values, vectors, start, thread, columns, statistics)
            if by_chunks:
                part = float32(0.0)
                for j in range(width):
                    part = ptx.fmax_nan(part, abs(values[j]))
                top = ptx.fmax_nan(top, part if inside(c * width, thread, columns) else float32(0.0))
            else:
                for j in range(width):
                    if whole(c, columns) or inside(c * width + j, thread, columns):
                        top = ptx.fmax_nan(top, abs(values[j]))
        return top

    @cuda.jit(device=True, inline="always")
    def divisor(largest, scales, row, stride, start, thread, columns):
        scratch = cuda.shared.array(scratch_size, float32)
        scale = row_max(largest, scratch) / LARGEST_INT8
        # the first of a row's threads; rows that a last block has too many have no columns
        if thread == uint32(0) and start == int64(0) and columns > uint32(0):
            scales[row * stride] = scale
        return divisor_of(scale)

    @cuda.jit(device=True, inline="always")
    def flush(pointer, start, thread, columns):
        pass

    put_int8 = int8_put(dtype, walk, threads, inside)
    return Result(largest, divisor, again, put_int8, flush, ptx.pointer("int8"), ptx.pointer("float32"), int64)


@cache
def inverse_root(dtype, threads, chunks, cluster, get, inside, row_sum=None):
    """root(held, mean, squares, correction, inverse_columns, eps, thread, columns, scratch) -> 1 / sqrt(variance + eps).

    squares: the row's sum of squares of values - mean; correction: the mean of those differences. Where the sum is infinite, as
    it may be for float32 and bfloat16, the row is summed again, scaled down; scratch is for that.
    """
    width = vector_width(dtype)
    row_sum = row_sum or reductions(threads, cluster)[0]
    may_overflow = str(dtype) != "float16"

    @cuda.jit(device=True, inline="always")
    def root(held, mean, squares, correction, inverse_columns, eps, thread, columns, scratch):
        if may_overflow and ptx.warp_any(uint32(0) if squares <= LARGEST else uint32(1)):  # a NaN is not smaller either
            values = cuda.local.array(width, float32)
            small_mean = mean * SHRINK
            small_squares = float32(0.0)
            for c in range(chunks):
                get(held, c, values)
                for j in range(width):
                    if inside(c * width + j, thread, columns):
                        small = ptx.fma(values[j], SHRINK, -small_mean)  # the difference itself may be infinite
                        small_squares += small * small
            small_squares = row_sum(small_squares, scratch)
            if squares > LARGEST:
                # eps is far below what a float32 can add to such a variance
                return ptx.rsqrt(small_squares * inverse_columns) * SHRINK
        variance = ptx.fma(-correction, correction, squares * inverse_columns)
        return ptx.rsqrt(ptx.fmax_nan(variance, float32(0.0)) + eps)

    return root


@cuda.jit(device=True, inline="always")
def tiled_inverse_root(squares, small_squares, mean, inverse_columns, eps):
    """1 / sqrt(squares / columns - mean² + eps), from the sums of squares of the values and of the values · SHRINK."""
    if squares > float32(LARGEST):
        # eps is far below what a float32 can add to such a variance
        small_mean = mean * SHRINK
        return ptx.rsqrt(ptx.fmax_nan(small_squares * inverse_columns - small_mean * small_mean, float32(0.0))) * SHRINK
    return ptx.rsqrt(ptx.fmax_nan(squares * inverse_columns - mean * mean, float32(0.0)) + eps)


def arguments(x, parameters, residual, out, scales, total, eps):
    """The kernels' arguments in order: arrays [rows, columns] or [columns] (None: address 0), sizes, row strides, numbers.

    Those of scales [rows, 1] come last, and only where there are scales.
    """
    rows, columns = x.shape
    vectors = (0 if p is None else p.pointer for p in parameters)
    if residual is None:
        arrays = (0, out.pointer, 0)
        strides = (x.strides[0], 0, out.strides[0], 0)
    else:
        arrays = (residual.pointer, out.pointer, total.pointer)
        strides = (x.strides[0], residual.strides[0], out.strides[0], total.strides[0])
    quantised = () if scales is None else (scales.pointer, scales.strides[0])
    return x.pointer, *vectors, *arrays, rows, columns, *strides, 1.0 / columns, eps, *quantised


def cost(rows, columns, dtype, *, residual, parameters, flops, quantised):
    """Each input read once, each output written once. parameters: bytes of weight and bias; flops: those of an element.

    quantised: the norm is written in int8 with a scale a row; an absolute value, a maximum, a quotient and a rounding more.
    """
    arrays = 4 if residual else 2
    elements = rows * columns
    moved = arrays * elements * dtype.itemsize + parameters
    if quantised:
        moved += elements - elements * dtype.itemsize + 4 * rows
    return Cost(bytes=moved, flops=(flops + 4 if quantised else flops) * elements)
