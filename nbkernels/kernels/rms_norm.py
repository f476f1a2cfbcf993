"""Root-mean-square norm over the last axis, with a residual added in front where one is given.

    t = x + residual
    y[i, j] = t[i, j] / sqrt(mean_j(t²) + eps) · weight[j]            (Zhang, Sennrich 2019)

A row in registers, walked as ``rows`` says; x and residual are read once, y and t written once:

    load        x + residual  ->  held         float32
    store       held  ->  t                    rounded to x's dtype
    squares     held²  ->  sums                over the row
    finish      held · inverse root · weight  ->  y

A row beyond a block's registers is walked twice, tile by tile: squares first, then the rest.
"""

from functools import lru_cache

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels import norm
from nbkernels.kernels.elements import vector_width
from nbkernels.kernels.norm import SHRINK, inverse_root
from nbkernels.kernels.rows import SCRATCH, is_wide, place, plan_rows, row_access, several_sums
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import launch

SUMS_SCRATCH = 2 * SCRATCH


def rms_norm_kernel(dtype, wide, threads, chunks, rows_per_block, weight_dtype, has_residual):
    """Rows in registers. threads and chunks are those of one row."""
    width = vector_width(dtype)
    values = chunks * width
    locate = place(threads, rows_per_block)
    read = norm.source(dtype, wide, threads, chunks, has_residual)
    write = norm.finish(dtype, weight_dtype, wide, threads, chunks, weight_dtype is not None, False)
    store = row_access(dtype, width, wide, threads, chunks).store
    row_sums = several_sums(threads, 2)

    @kernel(launch_bounds=threads * rows_per_block)
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
        scratch = cuda.shared.array(SUMS_SCRATCH, float32)
        held = cuda.local.array(values, float32)
        sums = cuda.local.array(2, float32)
        row, thread, here = locate(rows, columns)
        read(x, row * x_stride, residual, row * residual_stride, thread, here, held)
        if has_residual:
            store(total, row * total_stride, thread, here, held)

        sums[0] = float32(0.0)
        sums[1] = float32(0.0)
        for i in range(values):  # registers past the row are zero
            small = held[i] * SHRINK
            sums[0] += held[i] * held[i]
            sums[1] += small * small
        row_sums(sums, scratch)
        scale = inverse_root(sums[0], sums[1], float32(0.0), inverse_columns, eps)

        for i in range(values):
            held[i] *= scale
        write(held, weight, weight, int64(0), y, row * y_stride, thread, here)

    return rms_norm


def tiled_rms_norm_kernel(dtype, wide, threads, chunks, weight_dtype, has_residual):
    """A block a row, in two walks over tiles of threads·chunks·width columns."""
    width = vector_width(dtype)
    values = chunks * width
    tile = threads * values
    read = norm.source(dtype, wide, threads, chunks, has_residual)
    write = norm.finish(dtype, weight_dtype, wide, threads, chunks, weight_dtype is not None, False)
    store = row_access(dtype, width, wide, threads, chunks).store
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
        held = cuda.local.array(values, float32)
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
            for i in range(values):
                small = held[i] * SHRINK
                part += held[i] * held[i]
                small_part += small * small
            sums[0] += part
            sums[1] += small_part
        row_sums(sums, scratch)
        scale = inverse_root(sums[0], sums[1], float32(0.0), inverse_columns, eps)

        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            read(x, x_row + start, residual, residual_row + start, thread, here, held)
            if has_residual:
                store(total, row * total_stride + start, thread, here, held)
            for i in range(values):
                held[i] *= scale
            write(held, weight, weight, start, y, row * y_stride + start, thread, here)

    return tiled_rms_norm


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, wide, weight_dtype=None, has_residual=False):
    """rows, columns > 0; wide: whether 16-byte accesses fit (``rows.is_wide``); weight_dtype None: no weight."""
    options = (weight_dtype, has_residual)
    return plan_rows(rms_norm_kernel, tiled_rms_norm_kernel, rows, columns, dtype, wide, options)


def cost(rows, columns, dtype, *, residual=False, parameter_bytes=0):
    """parameter_bytes: the size of the weight. FLOPs an element: square, sum, two products, the residual's sum."""
    return norm.cost(rows, columns, dtype, residual=residual, parameters=parameter_bytes, flops=5 if residual else 4)


def run(x, weight, residual, out, total, eps, device, stream):
    """x, residual, out, total [rows, columns] with contiguous columns; weight [columns]. total: x + residual, rounded.

    weight, and residual with total, may be None. out may be x or residual; total shares memory with nothing else.
    """
    rows, columns = x.shape
    wide = is_wide(columns, x.dtype, (x, residual, out, total), (weight,))
    weight_dtype = None if weight is None else weight.dtype
    chosen = plan(rows, columns, x.dtype, wide, weight_dtype, residual is not None)
    launch(chosen, norm.arguments(x, (weight,), residual, out, total, eps), device, stream)
