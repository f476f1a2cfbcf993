"""Root-mean-square norm over the last axis, with a residual added in front where one is given.

    t = x + residual
    y[i, j] = t[i, j] / sqrt(mean_j(t²) + eps) · weight[j]            (Zhang, Sennrich 2019)

A row in registers, walked as ``rows`` says; x and residual are read once, y and t written once:

    load        x, residual  ->  held          as they lie in memory
    store       x + residual  ->  t            rounded to x's dtype
    squares     (x + residual)²  ->  sums      over the row, of the unrounded sum
    finish      (x + residual) · inverse root · weight  ->  y

On sm_90 long rows that begin anywhere are streamed: the same, row after row, while the next ones are on their way into shared
memory.

A row beyond a block's registers is walked twice, tile by tile: squares first, then the rest.
"""

from functools import lru_cache

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

SUMS_SCRATCH = 2 * SCRATCH


def _normalise(width, get, scale_chunk):
    @cuda.jit(device=True, inline="always")
    def normalise(held, c, values, vectors, start, thread, columns, scale):
        get(held, c, values)
        for j in range(width):
            values[j] *= scale
        scale_chunk(values, vectors, start, thread, columns, c)

    return normalise


def _rms_norm_row(dtype, walk, threads, chunks, cluster, source, access, entered, weight_dtype, has_residual, *options):
    """(one_row, fetch, norm.Result): one_row goes on with a row in registers, of ``source`` and to ``access``.

    vectors: what fetch returned; scratch, again_scratch: shared memory of two reductions; start: the block's first column.
    """
    quantised, kept = options
    width = vector_width(dtype)
    words, _, get, anew = source
    put, flush = access.put, access.flush
    has_weight = weight_dtype is not None
    parameters = norm.parameters(dtype, weight_dtype, walk, threads, chunks, has_weight, False, quantised, kept)
    row_sum, _ = reductions(threads, cluster)
    root = norm.inverse_root(dtype, threads, chunks, cluster, get, access.inside)

    normalise = _normalise(width, get, parameters.scale_chunk)
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
        scratch,
        again_scratch,
    ):
        values = cuda.local.array(width, float32)
        squares = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            if has_residual:
                put(total, total_start, thread, here, c, values)
            for j in range(width):  # registers past the row are zero
                squares = ptx.fma(values[j], values[j], squares)
        if has_residual:
            flush(total, total_start, thread, here)
        entered()
        squares = row_sum(squares, scratch)
        zero = float32(0.0)
        scale = root(held, zero, squares, zero, inverse_columns, eps, thread, here, again_scratch)

        anew(held)
        top = largest(held, vectors, start, thread, here, scale)
        step = divisor(top, scales, row, scales_stride, start, thread, here)
        again(held)
        for c in range(chunks):
            normalise(held, c, values, vectors, start, thread, here, scale)
            put_result(y, y_start, thread, here, c, values, step)
        flush_result(y, y_start, thread, here)

    return one_row, parameters.fetch, result


def rms_norm_kernel(
    dtype, walk, threads, chunks, rows_per_block, resident, cluster, weight_dtype, has_residual, quantised, kept
):
    """Rows in registers.

    threads and chunks: of a block's part of one row; resident: blocks that a multiprocessor's registers must hold; cluster:
    blocks that share a row; quantised: whether y is int8 with a scale a row; kept: whether the weight is sent for with the row.
    """
    width = vector_width(dtype)
    locate = place(threads, rows_per_block, cluster, width)
    enter, entered = entrance(cluster)
    scratch_size = SCRATCH * cluster
    source = norm.source(dtype, walk, threads, chunks, has_residual, rows_per_block)
    words, read = source[:2]
    access = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block)
    options = (weight_dtype, has_residual, quantised, kept)
    one_row, fetch, result = _rms_norm_row(dtype, walk, threads, chunks, cluster, source, access, entered, *options)

    @kernel(launch_bounds=(threads * rows_per_block, resident), cluster=cluster)
    def rms_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype or dtype),
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
        scratch = cuda.shared.array(scratch_size, float32)
        again_scratch = cuda.shared.array(scratch_size, float32)
        held = cuda.local.array(words, uint32)
        enter()
        row, thread, first, here = locate(rows, columns)
        start = int64(first)
        vectors = fetch(weight, weight, start, thread, here)
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
            scratch,
            again_scratch,
        )

    return rms_norm


def streamed_rms_norm_kernel(
    dtype, walk, threads, chunks, resident, slots, weight_dtype, has_residual, quantised, kept
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
    options = (weight_dtype, has_residual, quantised, kept)
    one_row, fetch, result = _rms_norm_row(dtype, walk, threads, chunks, 1, source, access, nothing, *options)

    @kernel(launch_bounds=(threads, resident))
    def streamed_rms_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype or dtype),
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
        scratch = cuda.shared.array(SCRATCH, float32)
        again_scratch = cuda.shared.array(SCRATCH, float32)
        held = cuda.local.array(words, uint32)
        row, thread, _, here = locate(rows, columns)
        start = int64(0)
        rows_of = (x, x_stride, residual, residual_stride)
        ring = begin(rows_of, row, rows, here)
        vectors = fetch(weight, weight, start, thread, here)
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
                scratch,
                again_scratch,
            )
            row += step()
            turn = uint32(turn + uint32(1))
        end()

    return streamed_rms_norm


def tiled_rms_norm_kernel(dtype, walk, threads, chunks, weight_dtype, has_residual, quantised):
    """A block a row, in two walks over tiles of threads·chunks·width columns; three where y is quantised."""
    width = vector_width(dtype)
    tile = threads * chunks * width
    words, read, get, _ = norm.source(dtype, walk, threads, chunks, has_residual)
    access = row_access(dtype, width, walk, threads, chunks)
    put, flush = access.put, access.flush
    has_weight = weight_dtype is not None
    parameters = norm.parameters(dtype, weight_dtype, walk, threads, chunks, has_weight, False, quantised)
    row_sums = several_sums(threads, 2)

    normalise = _normalise(width, get, parameters.scale_chunk)
    result = norm.result(dtype, walk, threads, chunks, 1, words, access, normalise, quantised)
    largest, divisor, _, put_result, flush_result = result[:5]

    @kernel(launch_bounds=threads)
    def tiled_rms_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype or dtype),
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
        scratch = cuda.shared.array(SUMS_SCRATCH, float32)
        held = cuda.local.array(words, uint32)
        values = cuda.local.array(width, float32)
        sums = cuda.local.array(2, float32)
        thread = uint32(cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x)
        x_row = row * x_stride
        residual_row = row * residual_stride

        sums[0] = float32(0.0)
        sums[1] = float32(0.0)
        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            read(x, x_row + start, residual, residual_row + start, thread, here, held)
            # a sum of its own for each tile: the long sum has fewer, larger terms and rounds less often
            part = float32(0.0)
            small_part = float32(0.0)
            for c in range(chunks):
                get(held, c, values)
                for j in range(width):
                    small = values[j] * SHRINK
                    part += values[j] * values[j]
                    small_part += small * small
            sums[0] += part
            sums[1] += small_part
        row_sums(sums, scratch)
        scale = tiled_inverse_root(sums[0], sums[1], float32(0.0), inverse_columns, eps)

        top = float32(0.0)
        if quantised:
            for start in range(int64(0), columns, int64(tile)):
                here = uint32(min(columns - start, int64(tile)))
                read(x, x_row + start, residual, residual_row + start, thread, here, held)
                top = ptx.fmax_nan(top, largest(held, (weight, weight), start, thread, here, scale))
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
                normalise(held, c, values, (weight, weight), start, thread, here, scale)
                put_result(y, row * y_stride + start, thread, here, c, values, step)
            flush_result(y, row * y_stride + start, thread, here)

    return tiled_rms_norm


@lru_cache(maxsize=4096)
def plan(
    rows, columns, dtype, walk, weight_dtype=None, has_residual=False, clusters=False, quantised=False, sm_count=0
):
    """rows, columns > 0; walk: ``rows.choose_walk``'s; clusters: ``rows.has_clusters``'s; weight_dtype None: no weight.

    quantised: y is int8 with a scale a row; sm_count: ``rows.streaming``'s.
    """
    options = (weight_dtype, has_residual, quantised)
    arrays = 2 if has_residual else 1
    vectors = 0 if weight_dtype is None else 1
    # quantised values beside two arrays' words are more than the 64 registers of 1024 threads
    spare = 1 if quantised and has_residual else 0
    return plan_rows(
        rms_norm_kernel,
        tiled_rms_norm_kernel,
        rows,
        columns,
        dtype,
        walk,
        options,
        arrays,
        clusters,
        spare=spare,
        streamed=streamed_rms_norm_kernel if walk == "staged" else None,
        sm_count=sm_count,
        vectors=vectors,
        more=norm.keeping(dtype, weight_dtype, vectors, arrays, walk),
    )


def cost(rows, columns, dtype, *, residual=False, parameter_bytes=0, quantised=False):
    """parameter_bytes: the size of the weight. FLOPs an element: square, sum, two products, the residual's sum."""
    flops = 5 if residual else 4
    return norm.cost(
        rows, columns, dtype, residual=residual, parameters=parameter_bytes, flops=flops, quantised=quantised
    )


def run(x, weight, residual, out, scales, total, eps, device, stream):
    """x, residual, out, total [rows, columns] with contiguous columns; weight [columns]. total: x + residual, rounded.

    weight, and residual with total, may be None. out may be x or residual; total shares memory with nothing else. With scales
    float32 [rows, 1] out is int8, quantised with one scale a row, and shares memory with nothing either.
    """
    rows, columns = x.shape
    quantised = scales is not None
    arrays = (x, residual, None if quantised else out, total)
    walk = choose_walk(columns, x.dtype, arrays, (weight,), int8=out if quantised else None)
    weight_dtype = None if weight is None else weight.dtype
    sm_count = streaming(device, walk, (x, residual, out, total))
    options = (weight_dtype, residual is not None, has_clusters(device), quantised, sm_count)
    chosen = plan(rows, columns, x.dtype, walk, *options)
    launch(chosen, norm.arguments(x, (weight,), residual, out, scales, total, eps), device, stream)
