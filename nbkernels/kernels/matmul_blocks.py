"""Many rows times a dense or int8 weight by multiply-add in float32, any dtype and alignment.

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

A block of 16 × 16 threads owns a tile of y; a thread owns MICRO rows and columns of every 64. Tiles of x and w, STEP columns
deep, become float32 (int8 times its scale) on the way to shared memory, transposed so that a thread reads four rows at once:

    x tile [STEP, tile]                        y tile, thread (i, j):  rows 4i to 4i + 3 (+ 64), columns 4j to 4j + 3 (+ 64)
    w tile [STEP, tile]

Two tiles each: while one is multiplied the next is on its way in registers. Each y is one float32 sum in ascending k.
The scheme is that of MAGMA's and CUTLASS's SGEMM (Nath, Tomov, Dongarra 2010).
"""

from functools import cache, lru_cache

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.epilogue import finish
from nbkernels.kernels.matmul_lanes import WIDTH, weight_access
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan

STEP = 16
MICRO = 4
SIDE = 16
THREADS = SIDE * SIDE
SPAN = SIDE * MICRO  # rows, and columns, that the threads cover once
LOADERS = STEP // WIDTH  # threads that bring one row of a step
# float32 between the k of a tile beyond its rows: transposed writes meet a bank twice at most, reads stay 16-byte aligned
PAD = 4


@cache
def _fetch(load, width):
    """fetch(held, first, pointer, start, …): held[first:first + 4] = columns k to k + 3 of a row, zeros from ``depth`` on."""

    @cuda.jit(device=True, inline="always")
    def fetch(held, first, pointer, start, scales, scale_start, k, depth):
        for part in range(WIDTH // width):
            column = uint32(k + uint32(part * width))
            inside = column < depth
            # a column that is there in place of one that is not: no branch, so that all loads go out at once
            column = column if inside else uint32(0)
            values = load(pointer, start + int64(column), scales, scale_start, column)
            for j in range(width):
                held[first + part * width + j] = values[j] if inside else float32(0.0)

    return fetch


def matmul_blocks_kernel(dtype, weight, group_size, width, spans, epilogue):
    """weight, group_size and width as ``matmul_lanes_kernel``; spans: a tile of y is spans · 64 rows and columns."""
    tile = spans * SPAN
    pitch = tile + PAD
    tile_words = STEP * pitch
    held_count = WIDTH * spans
    micro = MICRO * spans
    values = micro * micro
    fetch_x = _fetch(weight_access(dtype, "dense", 0, width), width)
    fetch_weight = _fetch(weight_access(dtype, weight, group_size, width), width)
    weight_dtype = dtype if weight == "dense" else "int8"
    store = finish(dtype, epilogue)
    gated = epilogue.gated
    half = micro // 2

    @cuda.jit(device=True, inline="always")
    def leave(tiles, start, held, row, k):
        """The transposed tile at word ``start`` = held: four consecutive k of rows row, row + 64, …"""
        for i in range(spans):
            for j in range(WIDTH):
                at = uint32(uint32(uint32(k + uint32(j)) * uint32(pitch)) + row + uint32(i * SPAN))
                tiles[uint32(start + at)] = held[WIDTH * i + j]

    @kernel(launch_bounds=THREADS)
    def matmul_blocks(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype),
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        out: ptx.pointer(dtype),
        rows: int64,
        columns: int64,
        depth: uint32,
        x_stride: int64,
        weight_stride: int64,
        scale_stride: int64,
        residual_stride: int64,
        out_stride: int64,
    ):
        tiles = cuda.shared.array(0, float32)  # [2, x or weight, STEP, pitch]
        memory = ptx.shared_address(tiles)
        held_x = cuda.local.array(held_count, float32)
        held_weight = cuda.local.array(held_count, float32)
        a = cuda.local.array(micro, float32)
        b = cuda.local.array(micro, float32)
        sums = cuda.local.array(values, float32)
        for i in range(values):
            sums[i] = float32(0.0)
        thread = uint32(cuda.threadIdx.x)
        # the tiles of one column of tiles are neighbours: they share the weight in L2
        row_tiles = (rows + int64(tile - 1)) // int64(tile)
        block = int64(cuda.blockIdx.x)
        first_row = block % row_tiles * int64(tile)
        first_column = block // row_tiles * int64(tile)
        own_row = uint32(thread // uint32(LOADERS))
        own_k = uint32(uint32(thread % uint32(LOADERS)) * uint32(WIDTH))
        at_row = uint32(uint32(thread // uint32(SIDE)) * uint32(MICRO))
        at_column = uint32(uint32(thread % uint32(SIDE)) * uint32(MICRO))

        step = uint32(0)
        start = uint32(0)
        # one turn more than there are steps: each fetches a step into registers and multiplies the one before it
        while step < uint32(depth + uint32(STEP)):
            k = uint32(step + own_k)
            if step < depth:
                for i in range(spans):
                    # rows and columns beyond the last are read as the last: their sums go nowhere
                    row = min(first_row + int64(uint32(own_row + uint32(i * SPAN))), rows - int64(1))
                    fetch_x(held_x, WIDTH * i, x, row * x_stride, scales, int64(0), k, depth)
                    column = min(first_column + int64(uint32(own_row + uint32(i * SPAN))), columns - int64(1))
                    fetch_weight(
                        held_weight,
                        WIDTH * i,
                        weight,
                        column * weight_stride,
                        scales,
                        column * scale_stride,
                        k,
                        depth,
                    )
            if step > uint32(0):
                before = uint32(memory + uint32(uint32(uint32(2 * tile_words) - start) << uint32(2)))
                for inner in range(STEP):
                    for i in range(spans):
                        at = uint32(before + uint32(4 * (inner * pitch + i * SPAN)))
                        four = ptx.ld_shared_v4_f32(uint32(at + uint32(at_row << uint32(2))))
                        other = ptx.ld_shared_v4_f32(
                            uint32(at + uint32(4 * tile_words) + uint32(at_column << uint32(2)))
                        )
                        for j in range(MICRO):
                            a[MICRO * i + j] = four[j]
                            b[MICRO * i + j] = other[j]
                    for m in range(micro):
                        for n in range(micro):
                            sums[m * micro + n] = ptx.fma(a[m], b[n], sums[m * micro + n])
            if step < depth:
                leave(tiles, start, held_x, own_row, own_k)
                leave(tiles, uint32(start + uint32(tile_words)), held_weight, own_row, own_k)
                start = uint32(uint32(2 * tile_words) - start)
            # what was left is there for all, and what was multiplied may be overwritten
            cuda.syncthreads()
            step = uint32(step + uint32(STEP))

        for m in range(micro):
            row = first_row + int64(uint32(at_row + uint32(m // MICRO * SPAN + m % MICRO)))
            if gated and row < rows:
                for p in range(half):
                    column = first_column + int64(uint32(at_column + uint32(2 * p // MICRO * SPAN + 2 * p % MICRO)))
                    if column < columns:
                        store(
                            (sums[m * micro + 2 * p], sums[m * micro + 2 * p + 1]),
                            column,
                            scales,
                            scale_stride,
                            bias,
                            residual,
                            int64(0),
                            out,
                            row * out_stride + (column >> int64(1)),
                        )
            if not gated and row < rows:
                for n in range(micro):
                    column = first_column + int64(uint32(at_column + uint32(n // MICRO * SPAN + n % MICRO)))
                    if column < columns:
                        store(
                            (sums[m * micro + n],),
                            column,
                            scales,
                            scale_stride,
                            bias,
                            residual,
                            row * residual_stride + column,
                            out,
                            row * out_stride + column,
                        )

    return matmul_blocks


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, weight, group_size, wide, epilogue, sm_count):
    """wide: whether 4-element loads fit (``matmul_lanes_kernel``)."""

    def blocks(spans):
        return -(-rows // (spans * SPAN)) * -(-columns // (spans * SPAN))

    # the large tile reads shared memory half as often, but only pays where it fills the multiprocessors
    spans = 2 if blocks(2) >= 2 * sm_count else 1
    shared_bytes = 4 * 4 * STEP * (spans * SPAN + PAD)
    constants = (dtype, weight, group_size, WIDTH if wide else 1, spans, epilogue)
    return Plan(matmul_blocks_kernel, constants, (blocks(spans), 1, 1), (THREADS, 1, 1), shared_bytes)
