"""Symmetric int8 quantisation of a weight or of activations, a scale a row or a group of columns of a row.

    scale[o, g]  = max |weight[o, i]| / 127 over the columns i of group g
    values[o, i] = weight[o, i] / scale[o, i // group_size], rounded half to even

With one scale a row, a row is held in registers and walked as ``rows`` says: it is read once and written once, as bytes. A row
beyond a block's registers is walked twice, tile by tile.

Of several groups a warp takes one, in two walks: the maximum, then the values; the second walk finds the group in L1 or L2.

    row o:  |group 0 ........|group 1 ........| ... |last, short|
             l0 l1 … l31 l0 …                         lanes of the warp of (o, group)

Both divisions round as true ones, so that the bits equal the reference's: a reciprocal rounds some halves the other way.
"""

from dataclasses import replace
from functools import lru_cache

from numba import cuda, float32, int8, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, conversions, vector_width
from nbkernels.kernels.int8_rows import LARGEST, ROUNDER, divisor_of, int8_put
from nbkernels.kernels.rows import (
    SCRATCH,
    choose_walk,
    entrance,
    has_clusters,
    place,
    plan_rows,
    row_access,
    row_max_nan,
)
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

WARPS = 4
THREADS = WARPS * ptx.WARP


@cuda.jit(device=True, inline="always")
def _warp_max_nan(x):
    """The largest x over the warp, in every lane; a NaN wins."""
    for step in range(5):
        x = ptx.fmax_nan(x, ptx.shfl_bfly(x, uint32(16) >> uint32(step)))
    return x


def quantize_rows_kernel(dtype, walk, threads, chunks, rows_per_block, resident, cluster):
    """Rows in registers, a scale each.

    threads and chunks: of a block's part of one row; resident: blocks that a multiprocessor's registers must hold; cluster:
    blocks that share a row.
    """
    width = vector_width(dtype)
    locate = place(threads, rows_per_block, cluster, width)
    enter, entered = entrance(cluster)
    scratch_size = SCRATCH * cluster
    access = row_access(dtype, width, walk, threads, chunks, rows_per_block=rows_per_block)
    words, begin, load, get, anew = access[:5]
    row_max = row_max_nan(threads, cluster)
    put = int8_put(dtype, walk, threads, access.inside)

    @kernel(launch_bounds=(threads * rows_per_block, resident), cluster=cluster)
    def quantize_rows(
        weight: ptx.pointer(dtype),
        values: ptx.pointer("int8"),
        scales: ptx.pointer("float32"),
        rows: int64,
        columns: uint32,
        weight_stride: int64,
        values_stride: int64,
        scales_stride: int64,
    ):
        scratch = cuda.shared.array(scratch_size, float32)
        held = cuda.local.array(words, uint32)
        part = cuda.local.array(width, float32)
        enter()
        row, thread, first, here = locate(rows, columns)
        start = int64(first)
        begin(weight, row * weight_stride + start, thread, here)
        load(weight, row * weight_stride + start, thread, here, held)

        top = float32(0.0)
        for c in range(chunks):
            get(held, c, part)
            for j in range(width):  # registers past the row are zero
                top = ptx.fmax_nan(top, abs(part[j]))
        entered()
        scale = row_max(top, scratch) / LARGEST
        # rows that a last block has too many have no columns
        if thread == uint32(0) and start == int64(0) and here > uint32(0):
            scales[row * scales_stride] = scale

        anew(held)
        divisor = divisor_of(scale)
        for c in range(chunks):
            get(held, c, part)
            put(values, row * values_stride + start, thread, here, c, part, divisor)

    return quantize_rows


def tiled_quantize_rows_kernel(dtype, walk, threads, chunks):
    """A block a row, in two walks over tiles of threads·chunks·width columns."""
    width = vector_width(dtype)
    tile = threads * chunks * width
    access = row_access(dtype, width, walk, threads, chunks)
    words, begin, load, get, _ = access[:5]
    row_max = row_max_nan(threads)
    put = int8_put(dtype, walk, threads, access.inside)

    @kernel(launch_bounds=threads)
    def tiled_quantize_rows(
        weight: ptx.pointer(dtype),
        values: ptx.pointer("int8"),
        scales: ptx.pointer("float32"),
        rows: int64,
        columns: int64,
        weight_stride: int64,
        values_stride: int64,
        scales_stride: int64,
    ):
        scratch = cuda.shared.array(SCRATCH, float32)
        held = cuda.local.array(words, uint32)
        part = cuda.local.array(width, float32)
        thread = uint32(cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x)
        weight_row = row * weight_stride

        top = float32(0.0)
        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            begin(weight, weight_row + start, thread, here)
            load(weight, weight_row + start, thread, here, held)
            for c in range(chunks):
                get(held, c, part)
                for j in range(width):
                    top = ptx.fmax_nan(top, abs(part[j]))
        scale = row_max(top, scratch) / LARGEST
        if thread == uint32(0):
            scales[row * scales_stride] = scale

        divisor = divisor_of(scale)
        for start in range(int64(0), columns, int64(tile)):
            here = uint32(min(columns - start, int64(tile)))
            begin(weight, weight_row + start, thread, here)
            load(weight, weight_row + start, thread, here, held)
            for c in range(chunks):
                get(held, c, part)
                put(values, row * values_stride + start, thread, here, c, part, divisor)

    return tiled_quantize_rows


def quantize_kernel(dtype):
    """One kernel for every shape and group size."""
    from_storage, _ = conversions(dtype)

    @kernel(launch_bounds=THREADS)
    def quantize(
        weight: ptx.pointer(dtype),
        values: ptx.pointer("int8"),
        scales: ptx.pointer("float32"),
        rows: int64,
        columns: int64,
        groups: int64,
        group_size: int64,
        weight_stride: int64,
        values_stride: int64,
        scales_stride: int64,
    ):
        lane = int64(ptx.lane_id())
        number = int64(cuda.blockIdx.x) * int64(WARPS) + int64(uint32(uint32(cuda.threadIdx.x) >> uint32(5)))
        row = number // groups
        group = number - row * groups
        if row < rows:
            first = group * group_size + lane
            end = min((group + int64(1)) * group_size, columns)
            weight_row = row * weight_stride
            values_row = row * values_stride

            top = float32(0.0)
            i = first
            while i < end:
                top = ptx.fmax_nan(top, abs(from_storage(weight[weight_row + i])))
                i += int64(ptx.WARP)
            scale = _warp_max_nan(top) / LARGEST
            if lane == int64(0):
                scales[row * scales_stride + group] = scale

            divisor = scale if scale > float32(0.0) else float32(1.0)
            i = first
            while i < end:
                quotient = from_storage(weight[weight_row + i]) / divisor
                rounded = ptx.bits_from_float(max(min(quotient, LARGEST), -LARGEST) + ROUNDER)
                if quotient != quotient:
                    rounded = uint32(0)
                values[values_row + i] = int8(rounded)
                i += int64(ptx.WARP)

    return quantize


@lru_cache(maxsize=4096)
def plan(rows, columns, groups, dtype, walk, clusters=False):
    """rows, groups > 0; walk, clusters: of ``rows.choose_walk`` and ``has_clusters``. A warp takes one of several groups.

    Nothing overlaps with it: the product behind it may read its weight before it waits.
    """
    if groups == 1 and columns:
        factories = quantize_rows_kernel, tiled_quantize_rows_kernel
        return replace(plan_rows(*factories, rows, columns, dtype, walk, clusters=clusters), early=False)
    return Plan(quantize_kernel, (dtype,), (-(-rows * groups // WARPS), 1, 1), (THREADS, 1, 1), early=False)


def cost(rows, columns, groups, dtype):
    """The weight read once, values and scales written once; an absolute value, a maximum, a quotient and a rounding each."""
    return Cost(bytes=rows * (columns * (dtype.itemsize + 1) + 4 * groups), flops=4 * rows * columns)


def run(weight, values, scales, group_size, device, stream):
    """weight [rows, columns] with contiguous columns; values int8 [rows, columns]; scales float32 [rows, groups]."""
    rows, columns = weight.shape
    groups = scales.shape[1]
    chosen = plan(
        rows,
        columns,
        groups,
        weight.dtype,
        choose_walk(columns, weight.dtype, (weight,), int8=values),
        has_clusters(device),
    )
    pointers = weight.pointer, values.pointer, scales.pointer
    strides = weight.strides[0], values.strides[0], scales.strides[0]
    if chosen.factory is quantize_kernel:
        sizes = rows, columns, groups, columns if group_size is None else group_size
    else:
        sizes = rows, columns
    launch(chosen, (*pointers, *sizes, *strides), device, stream)
