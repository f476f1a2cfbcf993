"""Many rows times a dense or int8 weight on the tensor cores (mma.sync, sm_80 and later), 16-bit x.

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

A block owns a tile of y; its warps own warp_m × warp_n of it in float32 registers. Tiles of x and w, STEP columns deep, travel
through a ring of shared-memory stages, filled by cp.async while earlier ones are multiplied:

              w^T  [k, tile_n]                 stage:  | x tile | w tile | group scales |
               |n| | |                         ring:   | step s | s + 1 | s + 2 | (being filled) |
    x   ┌─┐  ┌─┬─┬─┬─┐
    [m, │k│  │w│a│r│p│   y tile
    k]  └─┘  └─┴─┴─┴─┘

In a row of a tile the 16-byte pieces are swizzled (exchanged by XOR with bits of the row number), so that both ldmatrix, eight
rows of one piece, and the 8-byte loads below, four rows of two pieces, meet no bank twice.

Dense: fragments by ldmatrix. int8: ldmatrix brings four consecutive k of a weight row to a lane, which become the lane's two
words of a 16-bit fragment; the product does not care in which order k is summed, so x's fragment is read in the same order,
four consecutive k a lane (one 8-byte load). With a scale a group of columns, a step's products are summed from zero and
then added times the scale, in float32: weights are never rounded.

Every tile shape sums an element of y in the same order. The scheme is CUTLASS's multistage one (Kerr et al. 2017).
"""

from functools import cache, lru_cache

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.epilogue import finish
from nbkernels.kernels.int8 import pairs_from_int8x4
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan

# k a stage: two m16n8k16 products; a group of an int8 weight is a multiple of it
STEP = 32
X_ROW_BYTES = 2 * STEP
PIECE_BYTES = 16
# Three stages on their way while one is multiplied: 48 KB in flight a multiprocessor with two blocks of the large tile.
STAGES = 4
# tile_m, tile_n, warp_m, warp_n
LARGE, LARGE_OF_GROUPS, SMALL = (128, 128, 64, 32), (128, 64, 32, 32), (64, 64, 32, 32)
# float32 between the rows of sums in shared memory, beyond the columns: with it a fragment's writes meet a bank twice at most
PAD = 8
# Row tiles whose blocks are neighbours: they share their weight tiles in L2, and the next column of tiles finds x there.
ROW_TILES_TOGETHER = 16


@cache
def swizzle(row_bytes):
    """offset(row, piece): the bytes from the start of a tile to a 16-byte piece of a row of 128, 64 or 32 bytes."""
    if row_bytes == 128:

        @cuda.jit(device=True, inline="always")
        def offset(row, piece):
            bits = uint32(row & uint32(7))
            return uint32(uint32(row << uint32(7)) + uint32(uint32(piece ^ bits) << uint32(4)))

    elif row_bytes == 64:

        @cuda.jit(device=True, inline="always")
        def offset(row, piece):
            bits = uint32(uint32(row & uint32(2)) | uint32(uint32(row >> uint32(2)) & uint32(1)))
            return uint32(uint32(row << uint32(6)) + uint32(uint32(piece ^ bits) << uint32(4)))

    else:

        @cuda.jit(device=True, inline="always")
        def offset(row, piece):
            bits = uint32(uint32(row >> uint32(2)) & uint32(1))
            return uint32(uint32(row << uint32(5)) + uint32(uint32(piece ^ bits) << uint32(4)))

    return offset


@cache
def _fill_piece(itemsize, wide):
    """fill(shared, pointer, index, count): 16 bytes of shared memory = ``count`` elements and zeros behind them."""
    if wide:

        @cuda.jit(device=True, inline="always")
        def fill(shared, pointer, index, count):
            ptx.cp_async_16_zfill(shared, ptx.address(pointer, index), uint32(count * uint32(itemsize)))

        return fill
    per_word = 4 // itemsize
    bits = 8 * itemsize
    mask = (1 << bits) - 1

    @cuda.jit(device=True, inline="always")
    def fill(shared, pointer, index, count):
        words = cuda.local.array(4, uint32)
        for i in range(4):
            words[i] = uint32(0)
            for j in range(per_word):
                if uint32(per_word * i + j) < count:
                    element = uint32(uint32(pointer[index + int64(per_word * i + j)]) & uint32(mask))
                    words[i] = uint32(words[i] | uint32(element << uint32(bits * j)))
        ptx.st_shared_v4(shared, words[0], words[1], words[2], words[3])

    return fill


@cache
def fill_tile(itemsize, row_bytes, tile_rows, threads, wide):
    """fill(shared, pointer, start, stride, k, depth, here, thread): a stage's tile = row_bytes from column k on of ``here`` rows.

    start: the element where the tile's first row begins. Zeros past the rows and past ``depth`` columns.
    """
    row_pieces = row_bytes // PIECE_BYTES
    width = PIECE_BYTES // itemsize
    pieces = tile_rows * row_pieces
    rounds = -(-pieces // threads)
    partial = pieces % threads != 0
    offset = swizzle(row_bytes)
    fill_piece = _fill_piece(itemsize, wide)

    @cuda.jit(device=True, inline="always")
    def fill(shared, pointer, start, stride, k, depth, here, thread):
        for i in range(rounds):
            number = uint32(thread + uint32(i * threads))
            if not partial or number < uint32(pieces):
                row = uint32(number // uint32(row_pieces))
                piece = uint32(number % uint32(row_pieces))
                first = uint32(k + uint32(piece * uint32(width)))
                count = uint32(0)
                index = start
                if row < here and first < depth:
                    count = min(uint32(depth - first), uint32(width))
                    index = start + int64(row) * stride + int64(first)
                fill_piece(uint32(shared + offset(row, piece)), pointer, index, count)

    return fill


@cache
def _multiply_dense(dtype, warp_m, warp_n):
    """multiply(x_tile, w_tile, scales, warp_row, warp_column, lane, sums): sums += a stage's products of this warp."""
    mma = ptx.mma_m16n8k16_bf16 if str(dtype) == "bfloat16" else ptx.mma_m16n8k16_f16
    m_tiles, n_tiles = warp_m // 16, warp_n // 8
    b_words = 2 * n_tiles
    offset = swizzle(X_ROW_BYTES)

    @cuda.jit(device=True, inline="always")
    def multiply(x_tile, w_tile, scales, warp_row, warp_column, lane, sums):
        b = cuda.local.array(b_words, uint32)
        for k in range(STEP // 16):
            for n in range(n_tiles // 2):
                row = uint32(
                    warp_column + uint32(16 * n) + (lane & uint32(7)) + uint32((lane >> uint32(4)) << uint32(3))
                )
                piece = uint32(uint32(2 * k) + uint32(uint32(lane >> uint32(3)) & uint32(1)))
                words = ptx.ldmatrix_x4(uint32(w_tile + offset(row, piece)))
                for j in range(4):
                    b[4 * n + j] = words[j]
            for m in range(m_tiles):
                row = uint32(warp_row + uint32(16 * m) + (lane & uint32(15)))
                piece = uint32(uint32(2 * k) + uint32(lane >> uint32(4)))
                a = ptx.ldmatrix_x4(uint32(x_tile + offset(row, piece)))
                for n in range(n_tiles):
                    c = 4 * (m * n_tiles + n)
                    d = mma(
                        a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1], sums[c], sums[c + 1], sums[c + 2], sums[c + 3]
                    )
                    for j in range(4):
                        sums[c + j] = d[j]

    return multiply


@cache
def _multiply_int8(dtype, warp_m, warp_n, groups):
    """As _multiply_dense for a tile of int8; with ``groups`` the stage's products are added times ``scales`` (shared)."""
    mma = ptx.mma_m16n8k16_bf16 if str(dtype) == "bfloat16" else ptx.mma_m16n8k16_f16
    widen = pairs_from_int8x4(dtype)
    m_tiles, n_tiles = warp_m // 16, warp_n // 8
    b_words = 2 * n_tiles
    values = 4 * m_tiles * n_tiles
    x_offset, w_offset = swizzle(X_ROW_BYTES), swizzle(STEP)

    @cuda.jit(device=True, inline="always")
    def accumulate(x_tile, w_tile, warp_row, warp_column, lane, sums):
        b = cuda.local.array(b_words, uint32)
        quad = uint32(lane & uint32(3))
        for k in range(STEP // 16):
            for n in range(n_tiles // 4):
                row = uint32(warp_column + uint32(32 * n) + lane)
                words = ptx.ldmatrix_x4(uint32(w_tile + w_offset(row, uint32(k))))
                for j in range(4):
                    pair = widen(words[j])
                    b[8 * n + 2 * j] = pair[0]
                    b[8 * n + 2 * j + 1] = pair[1]
            piece = uint32(uint32(2 * k) + uint32(quad >> uint32(1)))
            half = uint32(uint32(quad & uint32(1)) << uint32(3))
            for m in range(m_tiles):
                row = uint32(warp_row + uint32(16 * m) + uint32(lane >> uint32(2)))
                upper = ptx.ld_shared_v2(uint32(x_tile + x_offset(row, piece) + half))
                lower = ptx.ld_shared_v2(uint32(x_tile + x_offset(uint32(row + uint32(8)), piece) + half))
                for n in range(n_tiles):
                    c = 4 * (m * n_tiles + n)
                    d = mma(
                        upper[0],
                        lower[0],
                        upper[1],
                        lower[1],
                        b[2 * n],
                        b[2 * n + 1],
                        sums[c],
                        sums[c + 1],
                        sums[c + 2],
                        sums[c + 3],
                    )
                    for j in range(4):
                        sums[c + j] = d[j]

    if not groups:

        @cuda.jit(device=True, inline="always")
        def multiply(x_tile, w_tile, scales, warp_row, warp_column, lane, sums):
            accumulate(x_tile, w_tile, warp_row, warp_column, lane, sums)

    else:

        @cuda.jit(device=True, inline="always")
        def multiply(x_tile, w_tile, scales, warp_row, warp_column, lane, sums):
            part = cuda.local.array(values, float32)
            for i in range(values):
                part[i] = float32(0.0)
            accumulate(x_tile, w_tile, warp_row, warp_column, lane, part)
            for n in range(n_tiles):
                column = uint32(warp_column + uint32(8 * n) + uint32(uint32(lane & uint32(3)) << uint32(1)))
                first = ptx.ld_shared_f32(uint32(scales + uint32(column << uint32(2))))
                second = ptx.ld_shared_f32(uint32(scales + uint32(column << uint32(2)) + uint32(4)))
                for m in range(m_tiles):
                    c = 4 * (m * n_tiles + n)
                    sums[c] = ptx.fma(part[c], first, sums[c])
                    sums[c + 1] = ptx.fma(part[c + 1], second, sums[c + 1])
                    sums[c + 2] = ptx.fma(part[c + 2], first, sums[c + 2])
                    sums[c + 3] = ptx.fma(part[c + 3], second, sums[c + 3])

    return multiply


@cuda.jit(device=True, inline="always")
def tile_of_block(block, row_tiles, column_tiles):
    """(row tile, column tile): ROW_TILES_TOGETHER row tiles walk the columns side by side, then the next."""
    band = uint32(block // uint32(column_tiles * uint32(ROW_TILES_TOGETHER)))
    first = uint32(band * uint32(ROW_TILES_TOGETHER))
    height = min(uint32(row_tiles - first), uint32(ROW_TILES_TOGETHER))
    inside = uint32(block - uint32(first * column_tiles))
    return uint32(first + uint32(inside % height)), uint32(inside // height)


def matmul_tiles_kernel(dtype, weight, group_size, wide, pairs, tile_m, tile_n, warp_m, warp_n, stages, epilogue):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, a scale group_size, a multiple of STEP).

    wide: x's and the weight's rows begin at 16-byte addresses; else they are read element by element. pairs: pairs of columns are
    4-byte aligned in bias, residual and out, whose columns are even in number. A gated epilogue has pairs in any case.
    """
    pairs = pairs or epilogue.gated
    gated = epilogue.gated
    warps_n = tile_n // warp_n
    threads = tile_m // warp_m * warps_n * ptx.WARP
    weight_dtype = dtype if weight == "dense" else "int8"
    weight_bytes = 2 if weight == "dense" else 1
    groups = weight == "groups"
    m_tiles, n_tiles = warp_m // 16, warp_n // 8
    values = 4 * m_tiles * n_tiles
    x_bytes = tile_m * X_ROW_BYTES
    scales_at = x_bytes + tile_n * STEP * weight_bytes
    stage_bytes = scales_at + (4 * tile_n if groups else 0)
    fill_x = fill_tile(2, X_ROW_BYTES, tile_m, threads, wide)
    fill_weight = fill_tile(weight_bytes, STEP * weight_bytes, tile_n, threads, wide)
    multiply = (
        _multiply_dense(dtype, warp_m, warp_n) if weight == "dense" else _multiply_int8(dtype, warp_m, warp_n, groups)
    )
    unfinished = stages - 2  # groups of copies that may still fly when a stage is read
    width = 2 if pairs else 1
    pitch = tile_n + PAD
    store = finish(dtype, epilogue, width)

    @kernel(launch_bounds=threads)
    def matmul_tiles(
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
        y_tile = cuda.shared.array(0, float32)  # [tile_m, pitch], when the ring is done
        memory = ptx.shared_address(y_tile)
        sums = cuda.local.array(values, float32)
        for i in range(values):
            sums[i] = float32(0.0)
        thread = uint32(cuda.threadIdx.x)
        lane = ptx.lane_id()
        warp = uint32(thread >> uint32(5))
        row_tile, column_tile = tile_of_block(
            uint32(cuda.blockIdx.x),
            uint32((rows + int64(tile_m - 1)) // int64(tile_m)),
            uint32((columns + int64(tile_n - 1)) // int64(tile_n)),
        )
        first_row = int64(row_tile) * int64(tile_m)
        first_column = int64(column_tile) * int64(tile_n)
        rows_here = uint32(min(rows - first_row, int64(tile_m)))
        columns_here = uint32(min(columns - first_column, int64(tile_n)))
        warp_row = uint32(uint32(warp // uint32(warps_n)) * uint32(warp_m))
        warp_column = uint32(uint32(warp % uint32(warps_n)) * uint32(warp_n))
        steps = uint32(uint32(depth + uint32(STEP - 1)) // uint32(STEP))

        ahead = uint32(0)  # the step being fetched
        fill_at = memory
        step = uint32(0)
        read_at = memory
        end = uint32(memory + uint32(stages * stage_bytes))
        while step < steps:
            # first the ring is filled up; after that each turn fetches one stage and multiplies another
            if ahead >= uint32(stages - 1):
                ptx.cp_async_wait(unfinished)
                # the stage has landed for all threads, and all are done with the one that is filled next
                cuda.syncthreads()
            if ahead < steps:
                k = uint32(ahead * uint32(STEP))
                fill_x(fill_at, x, first_row * x_stride, x_stride, k, depth, rows_here, thread)
                fill_weight(
                    uint32(fill_at + uint32(x_bytes)),
                    weight,
                    first_column * weight_stride,
                    weight_stride,
                    k,
                    depth,
                    columns_here,
                    thread,
                )
                if groups and thread < uint32(tile_n):
                    here = thread < columns_here
                    column = first_column + int64(thread if here else uint32(0))
                    ptx.cp_async_4_zfill(
                        uint32(fill_at + uint32(scales_at) + uint32(thread << uint32(2))),
                        ptx.address(scales, column * scale_stride + int64(uint32(k // uint32(group_size)))),
                        uint32(4) if here else uint32(0),
                    )
                fill_at = uint32(fill_at + uint32(stage_bytes))
                if fill_at == end:
                    fill_at = memory
            ptx.cp_async_commit()
            ahead = uint32(ahead + uint32(1))
            if ahead >= uint32(stages):
                multiply(
                    read_at,
                    uint32(read_at + uint32(x_bytes)),
                    uint32(read_at + uint32(scales_at)),
                    warp_row,
                    warp_column,
                    lane,
                    sums,
                )
                step = uint32(step + uint32(1))
                read_at = uint32(read_at + uint32(stage_bytes))
                if read_at == end:
                    read_at = memory

        # the sums go through shared memory, so that whole rows leave together
        cuda.syncthreads()
        for m in range(m_tiles):
            for n in range(n_tiles):
                for j in range(4):
                    row = uint32(warp_row + uint32(16 * m + 8 * (j // 2)) + uint32(lane >> uint32(2)))
                    column = uint32(warp_column + uint32(8 * n + j % 2) + uint32(uint32(lane & uint32(3)) << uint32(1)))
                    y_tile[uint32(uint32(row * uint32(pitch)) + column)] = sums[4 * (m * n_tiles + n) + j]
        cuda.syncthreads()

        number = uint32(thread * uint32(width))
        while number < uint32(tile_m * tile_n):
            row = uint32(number // uint32(tile_n))
            inside = uint32(number % uint32(tile_n))
            if row < rows_here and inside < columns_here:
                at = uint32(uint32(row * uint32(pitch)) + inside)
                y_row = first_row + int64(row)
                y_column = first_column + int64(inside)
                values_y = (y_tile[at], y_tile[uint32(at + uint32(1))]) if pairs else (y_tile[at],)
                out_column = y_column >> int64(1) if gated else y_column
                store(
                    values_y,
                    y_column,
                    scales,
                    scale_stride,
                    bias,
                    residual,
                    y_row * residual_stride + y_column,
                    out,
                    y_row * out_stride + out_column,
                )
            number = uint32(number + uint32(threads * width))

    return matmul_tiles


def blocks(rows, columns, tile_m=64, tile_n=64):
    """Tiles of y, by default of the smallest size."""
    return -(-rows // tile_m) * -(-columns // tile_n)


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, weight, group_size, wide, pairs, epilogue, sm_count):
    """rows, columns > 0; weight, group_size, wide and pairs as ``matmul_tiles_kernel``."""
    # sums of a group double the registers of a warp's part of y, so it is half as large
    large = LARGE_OF_GROUPS if weight == "groups" else LARGE
    # small tiles read shared memory and L2 more often, but a large tile only pays where there is one for each multiprocessor
    tile = large if blocks(rows, columns, *large[:2]) >= sm_count else SMALL
    return _plan(rows, columns, dtype, weight, group_size, wide, pairs, epilogue, tile, STAGES)


def candidates(rows, columns, dtype, weight, group_size, wide, pairs, epilogue, shared_bytes):
    """Plans with every tile and as many stages as may pay, of the same bits; shared_bytes: the most that a block may use."""
    tiles = (LARGE_OF_GROUPS, SMALL) if weight == "groups" else (LARGE, LARGE_OF_GROUPS, SMALL)
    options = (rows, columns, dtype, weight, group_size, wide, pairs, epilogue)
    plans = [_plan(*options, tile, stages) for tile in tiles for stages in (3, 4, 5, 6)]
    return [plan for plan in plans if plan.shared_bytes <= shared_bytes]


def _plan(rows, columns, dtype, weight, group_size, wide, pairs, epilogue, tile, stages):
    tile_m, tile_n, warp_m, warp_n = tile
    stage_bytes = tile_m * X_ROW_BYTES + tile_n * STEP * (2 if weight == "dense" else 1)
    stage_bytes += 4 * tile_n if weight == "groups" else 0
    shared_bytes = max(stages * stage_bytes, 4 * tile_m * (tile_n + PAD))
    constants = (dtype, weight, group_size, wide, pairs, *tile, stages, epilogue)
    threads = tile_m // warp_m * (tile_n // warp_n) * ptx.WARP
    return Plan(
        matmul_tiles_kernel, constants, (blocks(rows, columns, tile_m, tile_n), 1, 1), (threads, 1, 1), shared_bytes
    )
