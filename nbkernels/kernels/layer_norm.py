"""Layer norm over the last axis, with a residual added in front where one is given.

    t = x + residual
    y[i, j] = (t[i, j] - mean_j(t)) / sqrt(var_j(t) + eps) · weight[j] + bias[j]       (Ba, Kiros, Hinton 2016)

A row in registers, walked as ``rows`` says; x and residual are read once, y and t written once:

    load        x + residual  ->  held         float32
    store       held  ->  t                    rounded to x's dtype
    shift       sum held / columns             the mean, as well as a float32 holds it
    deviations  held - shift  ->  held         their sum and squares over the row
    finish      (held - mean of the deviations) · inverse root · weight + bias  ->  y

The mean of a row such as 2000 + N(0, 1) rounds to 1e-4 of its deviation, so the deviations' own mean is taken off as well:
the corrected two-pass algorithm (Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance").

A row beyond a block's registers is walked twice, tile by tile: there the shift is the mean of the first tile. That mean of k
among n elements lies within sqrt(n / k) standard deviations of the row's mean, whatever the row holds (k times the square of the
distance is no more than the n variances), so the sums of deviations lose no more than a factor of 1 + n / k.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels import norm
from nbkernels.kernels.elements import vector_width
from nbkernels.kernels.norm import SHRINK, inverse_root
from nbkernels.kernels.rows import SCRATCH, is_wide, place, plan_rows, reductions, row_access, several_sums
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import launch

SUMS_SCRATCH = 3 * SCRATCH
# With a residual, a float32 row of 1024 threads with 32 registers each spills (sm_80): hold 28.
MOST_FLOAT32_WITH_RESIDUAL = 28672


def layer_norm_kernel(
    dtype, wide, threads, chunks, rows_per_block, parameter_dtype, has_weight, has_bias, has_residual
):
    """Rows in registers. threads and chunks are those of one row."""
    width = vector_width(dtype)
    values = chunks * width
    locate = place(threads, rows_per_block)
    read = norm.source(dtype, wide, threads, chunks, has_residual)
    write = norm.finish(dtype, parameter_dtype, wide, threads, chunks, has_weight, has_bias)
    access = row_access(dtype, width, wide, threads, chunks)
    store, inside = access.store, access.inside
    row_sum, _ = reductions(threads)
    row_sums = several_sums(threads, 3)

    @kernel(launch_bounds=threads * rows_per_block)
    def layer_norm(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(parameter_dtype or dtype),
        bias: ptx.pointer(parameter_dtype or dtype),
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
        shift_scratch = cuda.shared.array(SCRATCH, float32)
        sums_scratch = cuda.shared.array(SUMS_SCRATCH, float32)
        held = cuda.local.array(values, float32)
        sums = cuda.local.array(3, float32)
        row, thread, here = locate(rows, columns)
        read(x, row * x_stride, residual, row * residual_stride, thread, here, held)
        if has_residual:
            store(total, row * total_stride, thread, here, held)

        shift = float32(0.0)
        for i in range(values):  # scaled before they are summed: huge elements may sum to infinity
            shift = ptx.fma(held[i], inverse_columns, shift)
        shift = row_sum(shift, shift_scratch)

        for k in range(3):
            sums[k] = float32(0.0)
        for i in range(values):
            held[i] = held[i] - shift if inside(i, thread, here) else float32(0.0)
            small = held[i] * SHRINK
            sums[0] = ptx.fma(held[i], inverse_columns, sums[0])
            sums[1] += held[i] * held[i]
            sums[2] += small * small
        row_sums(sums, sums_scratch)
        mean = sums[0]
        scale = inverse_root(sums[1], sums[2], mean, inverse_columns, eps)

        for i in range(values):
            held[i] = (held[i] - mean) * scale
        write(held, weight, bias, int64(0), y, row * y_stride, thread, here)

    return layer_norm


def tiled_layer_norm_kernel(dtype, wide, threads, chunks, parameter_dtype, has_weight, has_bias, has_residual):
    """A block a row, in two walks over tiles of threads·chunks·width columns; rows are longer than a tile."""
    width = vector_width(dtype)
    values = chunks * width
    tile = threads * values
    inverse_tile = np.float32(1 / tile)
    read = norm.source(dtype, wide, threads, chunks, has_residual)
    write = norm.finish(dtype, parameter_dtype, wide, threads, chunks, has_weight, has_bias)
    access = row_access(dtype, width, wide, threads, chunks)
    store, inside = access.store, access.inside
    row_sum, _ = reductions(threads)
    row_sums = several_sums(threads, 3)

    @cuda.jit(device=True, inline="always")
    def gather(held, shift, thread, columns, inverse_columns, sums):
        # sums of its own for each tile: the long sums have fewer, larger terms and round less often
        part = float32(0.0)
        squares = float32(0.0)
        small_squares = float32(0.0)
        for i in range(values):
            deviation = held[i] - shift if inside(i, thread, columns) else float32(0.0)
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
        shift_scratch = cuda.shared.array(SCRATCH, float32)
        sums_scratch = cuda.shared.array(SUMS_SCRATCH, float32)
        held = cuda.local.array(values, float32)
        sums = cuda.local.array(3, float32)
        thread = uint32(cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x)
        x_row = row * x_stride
        residual_row = row * residual_stride

        read(x, x_row, residual, residual_row, thread, uint32(tile), held)
        shift = float32(0.0)
        for i in range(values):
            shift = ptx.fma(held[i], inverse_tile, shift)
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
        scale = inverse_root(sums[1], sums[2], mean, inverse_columns, eps)

        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            read(x, x_row + start, residual, residual_row + start, thread, here, held)
            if has_residual:
                store(total, row * total_stride + start, thread, here, held)
            for i in range(values):
                held[i] = (held[i] - shift - mean) * scale
            write(held, weight, bias, start, y, row * y_stride + start, thread, here)

    return tiled_layer_norm


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, wide, parameter_dtype=None, has_weight=False, has_bias=False, has_residual=False):
    """rows, columns > 0; wide: whether 16-byte accesses fit (``rows.is_wide``); parameter_dtype: weight's and bias's."""
    options = (parameter_dtype, has_weight, has_bias, has_residual)
    most_held = MOST_FLOAT32_WITH_RESIDUAL if has_residual and dtype == np.float32 else None
    return plan_rows(layer_norm_kernel, tiled_layer_norm_kernel, rows, columns, dtype, wide, options, most_held)


def cost(rows, columns, dtype, *, residual=False, parameter_bytes=0):
    """parameter_bytes: weight and bias together. FLOPs an element: sum, difference, square, sum, and four to finish."""
    return norm.cost(rows, columns, dtype, residual=residual, parameters=parameter_bytes, flops=9 if residual else 8)


def run(x, weight, bias, residual, out, total, eps, device, stream):
    """x, residual, out, total [rows, columns] with contiguous columns; weight, bias [columns]. total: x + residual, rounded.

    weight, bias, and residual with total, may be None. out may be x or residual; total shares memory with nothing else.
    """
    rows, columns = x.shape
    wide = is_wide(columns, x.dtype, (x, residual, out, total), (weight, bias))
    given = weight if weight is not None else bias
    parameter_dtype = None if given is None else given.dtype
    chosen = plan(
        rows, columns, x.dtype, wide, parameter_dtype, weight is not None, bias is not None, residual is not None
    )
    launch(chosen, norm.arguments(x, (weight, bias), residual, out, total, eps), device, stream)
