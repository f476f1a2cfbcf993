"""Root-mean-square norm over the last axis, with a residual added in front where one is given.

    t = x + residual
    y[i, j] = t[i, j] / sqrt(mean_j(t²) + eps) · weight[j]            (Zhang, Sennrich 2019)

A row in registers, walked as ``rows`` says; x and residual are read once, y and t written once:

    load        x, residual  ->  held          as they lie in memory
    store       x + residual  ->  t            rounded to x's dtype
    squares     (x + residual)²  ->  sums      over the row, of the unrounded sum
    finish      (x + residual) · inverse root · weight  ->  y

A row beyond a block's registers is walked twice, tile by tile: squares first, then the rest.
"""

from functools import lru_cache

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels import norm
from nbkernels.kernels.elements import vector_width
from nbkernels.kernels.norm import inverse_root
from nbkernels.kernels.rows import (
    SCRATCH,
    SHRINK,
    choose_walk,
    entrance,
    has_clusters,
    place,
    plan_rows,
    row_access,
    several_sums,
)
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import launch

SUMS_SCRATCH = 2 * SCRATCH


def rms_norm_kernel(dtype, walk, threads, chunks, rows_per_block, resident, cluster, weight_dtype, has_residual):
    """Rows in registers.

    threads and chunks: of a block's part of one row; resident: blocks that a multiprocessor's registers must hold; cluster:
    blocks that share a row.
    """
    width = vector_width(dtype)
    locate = place(threads, rows_per_block, cluster, width)
    enter, entered = entrance(cluster)
    scratch_size = SUMS_SCRATCH * cluster
    words, read, get, anew = norm.source(dtype, walk, threads, chunks, has_residual, rows_per_block)
    access = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block)
    put, flush = access.put, access.flush
    scale_chunk = norm.finish(dtype, weight_dtype, walk, threads, chunks, weight_dtype is not None, False)
    row_sums = several_sums(threads, 2, cluster)

    @kernel(launch_bounds=(threads * rows_per_block, resident), cluster=cluster)
    def rms_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype or dtype),
        residual: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        total: ptx.pointer(dtype),
        rows: int64,
        columns: uint32,
        x_stride: int64,
        residual_stride: int64,
        y_stride: int64,
        total_stride: int64,
        inverse_columns: float32,
        eps: float32,
    ):
        scratch = cuda.shared.array(scratch_size, float32)
        held = cuda.local.array(words, uint32)
        values = cuda.local.array(width, float32)
        sums = cuda.local.array(2, float32)
        enter()
        row, thread, first, here = locate(rows, columns)
        start = int64(first)
        read(x, row * x_stride + start, residual, row * residual_stride + start, thread, here, held)

        sums[0] = float32(0.0)
        sums[1] = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            if has_residual:
                put(total, row * total_stride + start, thread, here, c, values)
            for j in range(width):  # registers past the row are zero
                small = values[j] * SHRINK
                sums[0] += values[j] * values[j]
                sums[1] += small * small
        if has_residual:
            flush(total, row * total_stride + start, thread, here)
        entered()
        row_sums(sums, scratch)
        scale = inverse_root(sums[0], sums[1], float32(0.0), inverse_columns, eps)

        anew(held)
        for c in range(chunks):
            get(held, c, values)
            for j in range(width):
                values[j] *= scale
            scale_chunk(values, weight, weight, start, thread, here, c)
            put(y, row * y_stride + start, thread, here, c, values)
        flush(y, row * y_stride + start, thread, here)

    return rms_norm


def tiled_rms_norm_kernel(dtype, walk, threads, chunks, weight_dtype, has_residual):
    """A block a row, in two walks over tiles of threads·chunks·width columns."""
    width = vector_width(dtype)
    tile = threads * chunks * width
    words, read, get, _ = norm.source(dtype, walk, threads, chunks, has_residual)
    access = row_access(dtype, width, walk, threads, chunks)
    put, flush = access.put, access.flush
    scale_chunk = norm.finish(dtype, weight_dtype, walk, threads, chunks, weight_dtype is not None, False)
    row_sums = several_sums(threads, 2)

    @kernel(launch_bounds=threads)
    def tiled_rms_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype or dtype),
        residual: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        total: ptx.pointer(dtype),
        rows: int64,
        columns: int64,
        x_stride: int64,
        residual_stride: int64,
        y_stride: int64,
        total_stride: int64,
        inverse_columns: float32,
        eps: float32,
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
        scale = inverse_root(sums[0], sums[1], float32(0.0), inverse_columns, eps)

        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            read(x, x_row + start, residual, residual_row + start, thread, here, held)
            if has_residual:
                for c in range(chunks):
                    get(held, c, values)
                    put(total, row * total_stride + start, thread, here, c, values)
                flush(total, row * total_stride + start, thread, here)
            for c in range(chunks):
                get(held, c, values)
                for j in range(width):
                    values[j] *= scale
                scale_chunk(values, weight, weight, start, thread, here, c)
                put(y, row * y_stride + start, thread, here, c, values)
            flush(y, row * y_stride + start, thread, here)

    return tiled_rms_norm


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, walk, weight_dtype=None, has_residual=False, clusters=False):
    """rows, columns > 0; walk: ``rows.choose_walk``'s; clusters: ``rows.has_clusters``'s; weight_dtype None: no weight."""
    options = (weight_dtype, has_residual)
    arrays = 2 if has_residual else 1
    return plan_rows(rms_norm_kernel, tiled_rms_norm_kernel, rows, columns, dtype, walk, options, arrays, clusters)


def cost(rows, columns, dtype, *, residual=False, parameter_bytes=0):
    """parameter_bytes: the size of the weight. FLOPs an element: square, sum, two products, the residual's sum."""
    return norm.cost(rows, columns, dtype, residual=residual, parameters=parameter_bytes, flops=5 if residual else 4)


def run(x, weight, residual, out, total, eps, device, stream):
    """x, residual, out, total [rows, columns] with contiguous columns; weight [columns]. total: x + residual, rounded.

    weight, and residual with total, may be None. out may be x or residual; total shares memory with nothing else.
    """
    rows, columns = x.shape
    walk = choose_walk(columns, x.dtype, (x, residual, out, total), (weight,))
    weight_dtype = None if weight is None else weight.dtype
    chosen = plan(rows, columns, x.dtype, walk, weight_dtype, residual is not None, has_clusters(device))
    launch(chosen, norm.arguments(x, (weight,), residual, out, total, eps), device, stream)
