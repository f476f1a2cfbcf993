"""Softmax over the last axis, of scaled scores.

    y[i, j] = exp(scale·x[i, j] - max_j) / sum_j exp(scale·x[i, j] - max_j)          slope = scale·log2 e

A row in registers, walked as ``rows`` says; x is read once and y written once:

    load        x·sign(slope)  ->  held                    each thread its chunks
    max         held  ->  top                              over the row
    exp, sum    2^((held - top)·|slope|)  ->  held, total
    store       held / total  ->  y

The difference is taken of the elements and not of the scores: it is exact for those that matter, however large they are.

A row beyond a block's registers is walked twice, tile by tile. The first walk keeps a running maximum and sum a thread
and rescales the sum when the maximum grows (Milakov, Gimelshein 2018, "Online normalizer calculation for softmax"); the second
computes and stores. The second read mostly finds the row in L2.

-inf scores weigh nothing, and a row of them alone is 0/0 = NaN; NaN and +inf make the row NaN through the sum, as in NumPy.
"""

import math
from functools import lru_cache

import numpy as np
from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, vector_width
from nbkernels.kernels.rows import SCRATCH, is_wide, place, plan_rows, reductions, row_access
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import launch

LOG2E = math.log2(math.e)
# Where a running maximum starts: finite, since -inf - -inf is NaN in a thread that has seen nothing or only -inf.
LOWEST = np.finfo(np.float32).min


def softmax_kernel(dtype, wide, threads, chunks, rows_per_block):
    """Rows in registers. threads and chunks are those of one row."""
    width = vector_width(dtype)
    values = chunks * width
    locate = place(threads, rows_per_block)
    access = row_access(dtype, width, wide, threads, chunks)
    load, store, inside = access.load, access.store, access.inside
    row_sum, row_max = reductions(threads)

    @kernel(launch_bounds=threads * rows_per_block)
    def softmax(
        x: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        rows: int64,
        columns: uint32,
        x_stride: int64,
        y_stride: int64,
        slope: float32,
    ):
        max_scratch = cuda.shared.array(SCRATCH, float32)
        sum_scratch = cuda.shared.array(SCRATCH, float32)
        held = cuda.local.array(values, float32)
        row, thread, here = locate(rows, columns)
        sign = float32(-1.0) if slope < float32(0.0) else float32(1.0)
        steepness = slope * sign
        load(x, row * x_stride, thread, here, held)

        top = float32(-np.inf)
        for i in range(values):
            held[i] *= sign
            if inside(i, thread, here):
                top = ptx.fmax(top, held[i])
        top = row_max(top, max_scratch)

        total = float32(0.0)
        for i in range(values):
            weight = ptx.ex2((held[i] - top) * steepness)
            held[i] = weight if inside(i, thread, here) else float32(0.0)
            total += held[i]
        inverse = ptx.rcp(row_sum(total, sum_scratch))

        for i in range(values):
            held[i] *= inverse
        store(y, row * y_stride, thread, here, held)

    return softmax


def tiled_softmax_kernel(dtype, wide, threads, chunks):
    """A block a row, in two walks over tiles of threads·chunks·width columns."""
    width = vector_width(dtype)
    values = chunks * width
    tile = threads * values
    access = row_access(dtype, width, wide, threads, chunks)
    load, store, inside = access.load, access.store, access.inside
    row_sum, row_max = reductions(threads)

    @kernel(launch_bounds=threads)
    def tiled_softmax(
        x: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        rows: int64,
        columns: int64,
        x_stride: int64,
        y_stride: int64,
        slope: float32,
    ):
        max_scratch = cuda.shared.array(SCRATCH, float32)
        sum_scratch = cuda.shared.array(SCRATCH, float32)
        held = cuda.local.array(values, float32)
        thread = uint32(cuda.threadIdx.x)
        x_row = int64(cuda.blockIdx.x) * x_stride
        y_row = int64(cuda.blockIdx.x) * y_stride

        sign = float32(-1.0) if slope < float32(0.0) else float32(1.0)
        steepness = slope * sign

        top = float32(LOWEST)
        total = float32(0.0)
        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            load(x, x_row + start, thread, here, held)
            before = top
            for i in range(values):
                held[i] *= sign
                if inside(i, thread, here):
                    top = ptx.fmax(top, held[i])
            part = float32(0.0)
            for i in range(values):
                weight = ptx.ex2((held[i] - top) * steepness)
                part += weight if inside(i, thread, here) else float32(0.0)
            total = total * ptx.ex2((before - top) * steepness) + part

        row_top = row_max(top, max_scratch)
        inverse = ptx.rcp(row_sum(total * ptx.ex2((top - row_top) * steepness), sum_scratch))

        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            load(x, x_row + start, thread, here, held)
            for i in range(values):
                held[i] = ptx.ex2((held[i] * sign - row_top) * steepness) * inverse
            store(y, y_row + start, thread, here, held)

    return tiled_softmax


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, wide):
    """rows, columns > 0; wide: whether 16-byte accesses fit (``rows.is_wide``)."""
    return plan_rows(softmax_kernel, tiled_softmax_kernel, rows, columns, dtype, wide)


def cost(rows, columns, dtype):
    """Each element read and written once; sign, maximum, difference, scale, exp, sum, quotient."""
    return Cost(bytes=2 * rows * columns * dtype.itemsize, flops=7 * rows * columns)


def run(x, out, scale, device, stream):
    """x, out [rows, columns] with contiguous columns; out may be x itself."""
    rows, columns = x.shape
    chosen = plan(rows, columns, x.dtype, is_wide(columns, x.dtype, (x, out)))
    launch(chosen, (x.pointer, out.pointer, rows, columns, x.strides[0], out.strides[0], scale * LOG2E), device, stream)
