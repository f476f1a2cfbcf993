"""Layer norm over the last axis, with a residual added in front where one is given.

    t = x + residual
    y[i, j] = (t[i, j] - mean_j(t)) / sqrt(var_j(t) + eps) · weight[j] + bias[j]       (Ba, Kiros, Hinton 2016)

A row in registers, walked as ``rows`` says; x and residual are read once, y and t written once:

    load        x, residual  ->  held          as they lie in memory
    store       x + residual = t               rounded to x's dtype; what follows is of the unrounded sum
    mean        sum t / columns                as well as a float32 holds it
    deviations  t - mean                       their squares over the row, and their own mean
    finish      (t - mean - that mean) · inverse root · weight + bias  ->  y

The mean of a row such as 2000 + N(0, 1) rounds to 1e-4 of its deviation. That is nothing to 16-bit elements; for float32 the mean
of the deviations is taken off as well, and off their squares (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample
variance", corrected two-pass).

On sm_90 long rows that begin anywhere are streamed: the same, row after row, while the next ones are on their way into shared
memory.

A row beyond a block's registers is walked twice, tile by tile: there the mean of the first tile stands for the row's. The mean of
k among n elements lies within sqrt(n / k) standard deviations of the row's, whatever the row holds (k times the square of the
distance is no more than the n variances), so the sums of deviations lose no more than a factor of 1 + n / k.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels import norm
from nbkernels.kernels.elements import vector_width
from nbkernels.kernels.norm import SHRINK, tiled_inverse_root
from nbkernels.kernels.rows import (
    SCRATCH,
    choose_walk,
    entrance,
    has_clusters,
    nothing,
    place,
    plan_rows,
    reductions,
    row_access,
    several_sums,
    stream,
    streaming,
)
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import launch

SUMS_SCRATCH = 3 * SCRATCH


def _layer_norm_row(
    dtype,
    walk,
    threads,
    chunks,
    cluster,
    source,
    access,
    entered,
    parameter_dtype,
    has_weight,
    has_bias,
    has_residual,
    quantised,
    kept,
):
    """(one_row, fetch, sums a row, norm.Result): one_row goes on with a row in registers, of ``source`` and to ``access``.

    vectors: what fetch returned; scratches: shared memory of three reductions, the second of as many sums; start: the block's
    first column.
    """
    width = vector_width(dtype)
    # 16-bit values have so few digits that a float32 holds their mean well enough
    corrected = dtype.itemsize == 4
    sum_count = 2 if corrected else 1
    words, _, get, anew = source
    whole, inside, put, flush = access.whole, access.inside, access.put, access.flush
    vectors_of = (dtype, parameter_dtype, walk, threads, chunks, has_weight, has_bias, quantised)
    fetch, scale_chunk = norm.parameters(*vectors_of, kept)
    row_sum, _ = reductions(threads, cluster)
    row_sums = several_sums(threads, sum_count, cluster)
    root = norm.inverse_root(dtype, threads, chunks, cluster, get, inside)

    @cuda.jit(device=True, inline="always")
    def normalise(held, c, values, vectors, start, thread, columns, statistics):
        mean, correction, scale, offset = statistics
        get(held, c, values)
        for j in range(width):
            if corrected:
                values[j] = (values[j] - mean - correction) * scale
            else:
                values[j] = ptx.fma(values[j], scale, offset)
        scale_chunk(values, vectors, start, thread, columns, c)

    result = norm.result(dtype, walk, threads, chunks, cluster, words, access, normalise, quantised)
    largest, divisor, again, put_result, flush_result = result[:5]

    @cuda.jit(device=True, inline="always")
    def one_row(
        held,
        vectors,
        y,
        y_start,
        total,
        total_start,
        scales,
        scales_stride,
        row,
        start,
        thread,
        here,
        inverse_columns,
        eps,
        scratches,
    ):
        mean_scratch, sums_scratch, again_scratch = scratches
        values = cuda.local.array(width, float32)
        sums = cuda.local.array(sum_count, float32)
        mean = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            if has_residual:
                put(total, total_start, thread, here, c, values)
            for j in range(width):  # scaled before they are summed: huge elements may sum to infinity
                mean = ptx.fma(values[j], inverse_columns, mean)
        if has_residual:
            flush(total, total_start, thread, here)
        entered()
        mean = row_sum(mean, mean_scratch)

        anew(held)
        for k in range(sum_count):
            sums[k] = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            # what is past the row deviates by nothing; whole chunks need no conditions
            if not whole(c, here):
                for j in range(width):
                    if not inside(c * width + j, thread, here):
                        values[j] = mean
            for j in range(width):
                deviation = values[j] - mean
                sums[0] = ptx.fma(deviation, deviation, sums[0])
                if corrected:
                    sums[1] = ptx.fma(deviation, inverse_columns, sums[1])
        row_sums(sums, sums_scratch)
        correction = sums[sum_count - 1] if corrected else float32(0.0)
        scale = root(held, mean, sums[0], correction, inverse_columns, eps, thread, here, again_scratch)

        anew(held)
        statistics = (mean, correction, scale, -mean * scale)
        top = largest(held, vectors, start, thread, here, statistics)
        step = divisor(top, scales, row, scales_stride, start, thread, here)
        again(held)
        for c in range(chunks):
            normalise(held, c, values, vectors, start, thread, here, statistics)
            put_result(y, y_start, thread, here, c, values, step)
        flush_result(y, y_start, thread, here)

    return one_row, fetch, sum_count, result


def layer_norm_kernel(
    dtype,
    walk,
    threads,
    chunks,
    rows_per_block,
    resident,
    cluster,
    parameter_dtype,
    has_weight,
    has_bias,
    has_residual,
    quantised,
    kept,
):
    """Rows in registers.

    threads and chunks: of a block's part of one row; resident: blocks that a multiprocessor's registers must hold; cluster:
    blocks that share a row; quantised: whether y is int8 with a scale a row; kept: whether weight and bias are sent for with the
    row.
    """
    width = vector_width(dtype)
    locate = place(threads, rows_per_block, cluster, width)
    enter, entered = entrance(cluster)
    source = norm.source(dtype, walk, threads, chunks, has_residual, rows_per_block)
    words, read = source[:2]
    access = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block)
    options = (parameter_dtype, has_weight, has_bias, has_residual, quantised, kept)
    one_row, fetch, sum_count, result = _layer_norm_row(
        dtype, walk, threads, chunks, cluster, source, access, entered, *options
    )
    scratch_size, sums_size = SCRATCH * cluster, sum_count * SCRATCH * cluster

    @kernel(launch_bounds=(threads * rows_per_block, resident), cluster=cluster)
    def layer_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(parameter_dtype or dtype),
        bias: ptx.pointer(parameter_dtype or dtype),
        residual: ptx.pointer(dtype),
        y: result.y,
        total: ptx.pointer(dtype),
        rows: int64,
        columns: uint32,
        x_stride: int64,
        residual_stride: int64,
        y_stride: int64,
        total_stride: int64,
        inverse_columns: float32,
        eps: float32,
        scales: result.scales,
        scales_stride: result.scales_stride,
    ):
        mean_scratch = cuda.shared.array(scratch_size, float32)
        sums_scratch = cuda.shared.array(sums_size, float32)
        again_scratch = cuda.shared.array(scratch_size, float32)
        held = cuda.local.array(words, uint32)
        enter()
        row, thread, first, here = locate(rows, columns)
        start = int64(first)
        vectors = fetch(weight, bias, start, thread, here)
        read(x, row * x_stride + start, residual, row * residual_stride + start, thread, here, held)
        one_row(
            held,
            vectors,
            y,
            row * y_stride + start,
            total,
            row * total_stride + start,
            scales,
            scales_stride,
            row,
            start,
            thread,
            here,
            inverse_columns,
            eps,
            (mean_scratch, sums_scratch, again_scratch),
        )

    return layer_norm


def streamed_layer_norm_kernel(
    dtype,
    walk,
    threads,
    chunks,
    resident,
    slots,
    parameter_dtype,
    has_weight,
    has_bias,
    has_residual,
    quantised,
    kept,
):
    """Long rows, one after the other: a block has ``slots`` of them in shared memory or on their way there.

    Its threads meet between two uses of a reduction's shared memory, so that no row needs its own.
    """
    width = vector_width(dtype)
    locate = place(threads, 1, 1, width)
    source = norm.source(dtype, walk, threads, chunks, has_residual)
    words = source.words
    arrays = 2 if has_residual else 1
    step, begin, take, target, end, access = stream(dtype, walk, threads, chunks, slots, arrays)
    options = (parameter_dtype, has_weight, has_bias, has_residual, quantised, kept)
    one_row, fetch, sum_count, result = _layer_norm_row(
        dtype, walk, threads, chunks, 1, source, access, nothing, *options
    )
    sums_size = sum_count * SCRATCH

    @kernel(launch_bounds=(threads, resident))
    def streamed_layer_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(parameter_dtype or dtype),
        bias: ptx.pointer(parameter_dtype or dtype),
        residual: ptx.pointer(dtype),
        y: result.y,
        total: ptx.pointer(dtype),
        rows: int64,
        columns: uint32,
        x_stride: int64,
        residual_stride: int64,
        y_stride: int64,
        total_stride: int64,
        inverse_columns: float32,
        eps: float32,
        scales: result.scales,
        scales_stride: result.scales_stride,
    ):
        mean_scratch = cuda.shared.array(SCRATCH, float32)
        sums_scratch = cuda.shared.array(sums_size, float32)
        again_scratch = cuda.shared.array(SCRATCH, float32)
        held = cuda.local.array(words, uint32)
        row, thread, _, here = locate(rows, columns)
        start = int64(0)
        rows_of = (x, x_stride, residual, residual_stride)
        ring = begin(rows_of, row, rows, here)
        vectors = fetch(weight, bias, start, thread, here)
        turn = uint32(0)
        while row < rows:
            slot = take(rows_of, row, rows, here, ring, turn, thread, held)
            y_start, total_start = row * y_stride + start, row * total_stride + start
            one_row(
                held,
                vectors,
                target(y, y_start, slot, 0),
                y_start,
                target(total, total_start, slot, 1),
                total_start,
                scales,
                scales_stride,
                row,
                start,
                thread,
                here,
                inverse_columns,
                eps,
                (mean_scratch, sums_scratch, again_scratch),
            )
            row += step()
            turn = uint32(turn + uint32(1))
        end()

    return streamed_layer_norm


def tiled_layer_norm_kernel(
    dtype, walk, threads, chunks, parameter_dtype, has_weight, has_bias, has_residual, quantised
):
    """A block a row, in two walks over tiles of threads·chunks·width columns; rows are longer than a tile.

    A third walk, between them, where y is quantised.
    """
    width = vector_width(dtype)
    tile = threads * chunks * width
    inverse_tile = np.float32(1 / tile)
    words, read, get, _ = norm.source(dtype, walk, threads, chunks, has_residual)
    access = row_access(dtype, width, walk, threads, chunks)
    inside, put, flush = access.inside, access.put, access.flush
    vectors_of = (dtype, parameter_dtype, walk, threads, chunks, has_weight, has_bias, quantised)
    _, scale_chunk = norm.parameters(*vectors_of)
    row_sum, _ = reductions(threads)
    row_sums = several_sums(threads, 3)

    @cuda.jit(device=True, inline="always")
    def normalise(held, c, values, vectors, start, thread, columns, statistics):
        shift, mean, scale = statistics
        get(held, c, values)
        for j in range(width):
            values[j] = (values[j] - shift - mean) * scale
        scale_chunk(values, vectors, start, thread, columns, c)

    result = norm.result(dtype, walk, threads, chunks, 1, words, access, normalise, quantised)
    largest, divisor, _, put_result, flush_result = result[:5]

    @cuda.jit(device=True, inline="always")
    def gather(held, shift, thread, columns, inverse_columns, sums):
        # sums of its own for each tile: the long sums have fewer, larger terms and round less often
        part = float32(0.0)
        squares = float32(0.0)
        small_squares = float32(0.0)
        values = cuda.local.array(width, float32)
        for c in range(chunks):
            get(held, c, values)
            for j in range(width):
                deviation = values[j] - shift if inside(c * width + j, thread, columns) else float32(0.0)
                small = deviation * SHRINK
                part = ptx.fma(deviation, inverse_columns, part)
                squares += deviation * deviation
                small_squares += small * small
        sums[0] += part
        sums[1] += squares
        sums[2] += small_squares

    @kernel(launch_bounds=threads)
    def tiled_layer_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(parameter_dtype or dtype),
        bias: ptx.pointer(parameter_dtype or dtype),
        residual: ptx.pointer(dtype),
        y: result.y,
        total: ptx.pointer(dtype),
        rows: int64,
        columns: int64,
        x_stride: int64,
        residual_stride: int64,
        y_stride: int64,
        total_stride: int64,
        inverse_columns: float32,
        eps: float32,
        scales: result.scales,
        scales_stride: result.scales_stride,
    ):
        shift_scratch = cuda.shared.array(SCRATCH, float32)
        sums_scratch = cuda.shared.array(SUMS_SCRATCH, float32)
        held = cuda.local.array(words, uint32)
        values = cuda.local.array(width, float32)
        sums = cuda.local.array(3, float32)
        thread = uint32(cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x)
        x_row = row * x_stride
        residual_row = row * residual_stride

        read(x, x_row, residual, residual_row, thread, uint32(tile), held)
        shift = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            for j in range(width):
                shift = ptx.fma(values[j], inverse_tile, shift)
        shift = row_sum(shift, shift_scratch)

        for k in range(3):
            sums[k] = float32(0.0)
        gather(held, shift, thread, uint32(tile), inverse_columns, sums)
        for start in range(int64(tile), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            read(x, x_row + start, residual, residual_row + start, thread, here, held)
            gather(held, shift, thread, here, inverse_columns, sums)
        row_sums(sums, sums_scratch)
        mean = sums[0]
        scale = tiled_inverse_root(sums[1], sums[2], mean, inverse_columns, eps)
        statistics = (shift, mean, scale)

        top = float32(0.0)
        if quantised:
            for start in range(int64(0), columns, int64(tile)):
                here = uint32(min(columns - start, int64(tile)))
                read(x, x_row + start, residual, residual_row + start, thread, here, held)
                top = ptx.fmax_nan(top, largest(held, (weight, bias), start, thread, here, statistics))
        step = divisor(top, scales, row, scales_stride, int64(0), thread, uint32(tile))

        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            read(x, x_row + start, residual, residual_row + start, thread, here, held)
            if has_residual:
                for c in range(chunks):
                    get(held, c, values)
                    put(total, row * total_stride + start, thread, here, c, values)
                flush(total, row * total_stride + start, thread, here)
            for c in range(chunks):
                normalise(held, c, values, (weight, bias), start, thread, here, statistics)
                put_result(y, row * y_stride + start, thread, here, c, values, step)
            flush_result(y, row * y_stride + start, thread, here)

    return tiled_layer_norm


@lru_cache(maxsize=4096)
def plan(
    rows,
    columns,
    dtype,
    walk,
    parameter_dtype=None,
    has_weight=False,
    has_bias=False,
    has_residual=False,
    clusters=False,
    quantised=False,
    sm_count=0,
):
    """rows, columns > 0; walk, clusters: of ``rows.choose_walk`` and ``has_clusters``; parameter_dtype: weight's and bias's.

    quantised: y is int8 with a scale a row; sm_count: ``rows.streaming``'s.
    """
    options = (parameter_dtype, has_weight, has_bias, has_residual, quantised)
    arrays = 2 if has_residual else 1
    vectors = int(has_weight) + int(has_bias)
    return plan_rows(
        layer_norm_kernel,
        tiled_layer_norm_kernel,
        rows,
        columns,
        dtype,
        walk,
        options,
        arrays,
        clusters,
        spare=1,
        streamed=streamed_layer_norm_kernel if walk == "staged" else None,
        sm_count=sm_count,
        vectors=vectors,
        more=norm.keeping(dtype, parameter_dtype, vectors, arrays, walk),
    )


def cost(rows, columns, dtype, *, residual=False, parameter_bytes=0, quantised=False):
    """parameter_bytes: weight and bias together. FLOPs an element: sum, difference, square, sum, and four to finish."""
    flops = 9 if residual else 8
    return norm.cost(
        rows, columns, dtype, residual=residual, parameters=parameter_bytes, flops=flops, quantised=quantised
    )


def run(x, weight, bias, residual, out, scales, total, eps, device, stream):
    """x, residual, out, total [rows, columns] with contiguous columns; weight, bias [columns]. total: x + residual, rounded.

    weight, bias, and residual with total, may be None. out may be x or residual; total shares memory with nothing else. With
    scales float32 [rows, 1] out is int8, quantised with one scale a row, and shares memory with nothing either.
    """
    rows, columns = x.shape
    quantised = scales is not None
    arrays = (x, residual, None if quantised else out, total)
    walk = choose_walk(columns, x.dtype, arrays, (weight, bias), int8=out if quantised else None)
    given = weight if weight is not None else bias
    parameter_dtype = None if given is None else given.dtype
    chosen = plan(
        rows,
        columns,
        x.dtype,
        walk,
        parameter_dtype,
        weight is not None,
        bias is not None,
        residual is not None,
        has_clusters(device),
        quantised,
        streaming(device, walk, (x, residual, out, total)),
    )
    launch(chosen, norm.arguments(x, (weight, bias), residual, out, scales, total, eps), device, stream)
