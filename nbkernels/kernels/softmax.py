"""Softmax over the last axis, of scaled scores.

    y[i, j] = exp(scale·x[i, j] - max_j) / sum_j exp(scale·x[i, j] - max_j)          slope = scale·log2 e

A row in registers, walked as ``rows`` says; x is read once and y written once:

    load        x  ->  held                                      each thread its chunks, as they lie in memory
    max         held·sign(slope)  ->  top                        over the row
    exp, sum    2^((held·sign(slope) - top)·|slope|)  ->  total
    store       the same power / total  ->  y

The difference is taken of the elements and not of the scores: it is exact for those that matter, however large they are.

On sm_90 long rows are streamed: the same, row after row, while the next ones are on their way into shared memory.

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
    stream,
    streaming,
)
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import launch

LOG2E = math.log2(math.e)
# Where a running maximum starts: finite, since -inf - -inf is NaN in a thread that has seen nothing or only -inf.
LOWEST = np.finfo(np.float32).min


def _softmax_row(dtype, threads, chunks, cluster, access, entered, kept=False):
    """one_row(held, y, y_start, thread, columns, slope, max_scratch, sum_scratch): y = softmax of the row in ``held``.

    kept: the powers stay in registers, as float32, and are not computed anew to be stored.
    """
    width = vector_width(dtype)
    _, _, _, get, anew, whole, inside, put, flush = access
    row_sum, row_max = reductions(threads, cluster)
    kept_powers = chunks * width if kept else 1

    @cuda.jit(device=True, inline="always")
    def one_row(held, y, y_start, thread, here, slope, max_scratch, sum_scratch):
        values = cuda.local.array(width, float32)
        powers = cuda.local.array(kept_powers, float32)
        sign = float32(-1.0) if slope < float32(0.0) else float32(1.0)
        steepness = slope * sign

        # whole chunks need no conditions, and are all but the last
        top = float32(-np.inf)
        for c in range(chunks):
            get(held, c, values)
            for j in range(width):
                values[j] *= sign
            if not whole(c, here):
                for j in range(width):
                    if not inside(c * width + j, thread, here):
                        values[j] = float32(-np.inf)
            for j in range(width):
                top = ptx.fmax(top, values[j])
        entered()
        top = row_max(top, max_scratch)

        anew(held)
        total = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            for j in range(width):
                values[j] = ptx.ex2(ptx.fma(values[j], sign, -top) * steepness)
            if not whole(c, here):
                for j in range(width):
                    if not inside(c * width + j, thread, here):
                        values[j] = float32(0.0)
            for j in range(width):
                if kept:
                    powers[c * width + j] = values[j]
                total += values[j]
        inverse = ptx.rcp(row_sum(total, sum_scratch))

        anew(held)
        for c in range(chunks):
            if kept:
                for j in range(width):
                    values[j] = powers[c * width + j] * inverse
            else:
                get(held, c, values)
                for j in range(width):
                    values[j] = ptx.ex2(ptx.fma(values[j], sign, -top) * steepness) * inverse
            put(y, y_start, thread, here, c, values)
        flush(y, y_start, thread, here)

    return one_row


def softmax_kernel(dtype, walk, threads, chunks, rows_per_block, resident, cluster):
    """Rows in registers.

    threads and chunks: of a block's part of one row; resident: blocks that a multiprocessor's registers must hold; cluster:
    blocks that share a row.
    """
    width = vector_width(dtype)
    locate = place(threads, rows_per_block, cluster, width)
    enter, entered = entrance(cluster)
    scratch_size = SCRATCH * cluster
    access = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block)
    words, begin, load = access[:3]
    one_row = _softmax_row(dtype, threads, chunks, cluster, access, entered)

    @kernel(launch_bounds=(threads * rows_per_block, resident), cluster=cluster)
    def softmax(
        x: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        rows: int64,
        columns: uint32,
        x_stride: int64,
        y_stride: int64,
        slope: float32,
    ):
        max_scratch = cuda.shared.array(scratch_size, float32)
        sum_scratch = cuda.shared.array(scratch_size, float32)
        held = cuda.local.array(words, uint32)
        enter()
        row, thread, first, here = locate(rows, columns)
        start = int64(first)
        begin(x, row * x_stride + start, thread, here)
        load(x, row * x_stride + start, thread, here, held)
        one_row(held, y, row * y_stride + start, thread, here, slope, max_scratch, sum_scratch)

    return softmax


def streamed_softmax_kernel(dtype, walk, threads, chunks, resident, slots, kept):
    """Long rows, one after the other: a block has ``slots`` of them in shared memory or on their way there.

    Its threads meet twice between two uses of a reduction's shared memory, so that no row needs its own.
    """
    width = vector_width(dtype)
    locate = place(threads, 1, 1, width)
    step, begin, take, target, end, access = stream(dtype, walk, threads, chunks, slots, 1)
    words = access.words
    one_row = _softmax_row(dtype, threads, chunks, 1, access, nothing, kept)

    @kernel(launch_bounds=(threads, resident))
    def streamed_softmax(
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
        held = cuda.local.array(words, uint32)
        row, thread, _, here = locate(rows, columns)
        rows_of = (x, x_stride, x, x_stride)
        ring = begin(rows_of, row, rows, here)
        turn = uint32(0)
        while row < rows:
            slot = take(rows_of, row, rows, here, ring, turn, thread, held)
            start = row * y_stride
            one_row(held, target(y, start, slot, 0), start, thread, here, slope, max_scratch, sum_scratch)
            row += step()
            turn = uint32(turn + uint32(1))
        end()

    return streamed_softmax


def tiled_softmax_kernel(dtype, walk, threads, chunks):
    """A block a row, in two walks over tiles of threads·chunks·width columns."""
    width = vector_width(dtype)
    tile = threads * chunks * width
    words, begin, load, get, anew, _, inside, put, flush = row_access(dtype, width, walk, threads, chunks)
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
        held = cuda.local.array(words, uint32)
        values = cuda.local.array(width, float32)
        thread = uint32(cuda.threadIdx.x)
        x_row = int64(cuda.blockIdx.x) * x_stride
        y_row = int64(cuda.blockIdx.x) * y_stride

        sign = float32(-1.0) if slope < float32(0.0) else float32(1.0)
        steepness = slope * sign

        top = float32(LOWEST)
        total = float32(0.0)
        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            begin(x, x_row + start, thread, here)
            load(x, x_row + start, thread, here, held)
            before = top
            for c in range(chunks):
                get(held, c, values)
                for j in range(width):
                    if inside(c * width + j, thread, here):
                        top = ptx.fmax(top, values[j] * sign)
            anew(held)
            part = float32(0.0)
            for c in range(chunks):
                get(held, c, values)
                for j in range(width):
                    weight = ptx.ex2(ptx.fma(values[j], sign, -top) * steepness)
                    part += weight if inside(c * width + j, thread, here) else float32(0.0)
            total = total * ptx.ex2((before - top) * steepness) + part

        row_top = row_max(top, max_scratch)
        inverse = ptx.rcp(row_sum(total * ptx.ex2((top - row_top) * steepness), sum_scratch))

        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            begin(x, x_row + start, thread, here)
            load(x, x_row + start, thread, here, held)
            for c in range(chunks):
                get(held, c, values)
                for j in range(width):
                    values[j] = ptx.ex2(ptx.fma(values[j], sign, -row_top) * steepness) * inverse
                put(y, y_row + start, thread, here, c, values)
            flush(y, y_row + start, thread, here)

    return tiled_softmax


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, walk, clusters=False, sm_count=0):
    """rows, columns > 0; walk: ``rows.choose_walk``'s; clusters: ``rows.has_clusters``'s; sm_count: ``rows.streaming``'s."""
    return plan_rows(
        softmax_kernel,
        tiled_softmax_kernel,
        rows,
        columns,
        dtype,
        walk,
        clusters=clusters,
        streamed=streamed_softmax_kernel,
        sm_count=sm_count,
        more=lambda threads, chunks, blocks, streamed: (True,) if streamed else (),
    )


def cost(rows, columns, dtype):
    """Each element read and written once; sign, maximum, difference, scale, exp, sum, quotient."""
    return Cost(bytes=2 * rows * columns * dtype.itemsize, flops=7 * rows * columns)


def run(x, out, scale, device, stream):
    """x, out [rows, columns] with contiguous columns; out may be x itself."""
    rows, columns = x.shape
    walk = choose_walk(columns, x.dtype, (x, out))
    chosen = plan(rows, columns, x.dtype, walk, has_clusters(device), streaming(device, walk, (x, out)))
    launch(chosen, (x.pointer, out.pointer, rows, columns, x.strides[0], out.strides[0], scale * LOG2E), device, stream)
