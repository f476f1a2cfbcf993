"""int8 rows times an int8 weight on the tensor cores (mma.sync, sm_80 and later), in exact int32 sums: any shape and alignment.

    y[m, n] = epilogue(x_scales[m] · sum_s scales[n, s] · float(sum_(k in span s) x[m, k] · w[n, k]))

A span is all of k where the weight has a scale a row. With a scale a group it is the greatest common divisor of group_size and
STEP, so that spans end where steps or parts of them do: groups of 32, 64 and 128 are one span each. The sums of spans are added
in float32 in the order of k, each by one fused multiplication with its scale.

The walk is that of ``matmul_tiles``: tiles of x and w, STEP columns deep, travel through a ring of shared-memory stages that
cp.async fills while earlier ones are multiplied, and the sums leave through shared memory:

    stage:  | x tile [tile_m, 128 bytes] | w tile [tile_n, 128 bytes] | scales [spans a step, tile_n] |
    warp:   [warp_m, 32 bytes] · [warp_n, 32 bytes]ᵀ by ldmatrix and m16n8k32,  four times a step

The int32 sum of a span of a group begins at the bits of 1.5 · 2^23: as a float it is that number plus the sum, so that one
subtraction takes the place of a conversion. 128 columns add up to at most 2^21, and 2^22 would fit.

Few rows take small tiles, a deep ring and many blocks a multiprocessor: then the weight is read once, as fast as that allows.
"""

from functools import cache, lru_cache
from math import gcd

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.epilogue import finish
from nbkernels.kernels.int8 import scale_of_row
from nbkernels.kernels.matmul_tiles import PAD, blocks, fill_tile, swizzle, tile_of_block
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan

STEP = 128  # k a stage, and bytes of a row of it
PIECE = 32  # k a product; a group is a multiple of it
ROUNDER = np.float32(1.5 * 2**23)
ROUNDER_BITS = int(ROUNDER.view(np.int32))
# Shared memory of a block that every architecture from sm_80 on has
SHARED_BYTES = 99 * 1024
STAGES, STAGES_OF_FEW_ROWS = 4, 8  # at most: a tile of few rows is bound by memory, and has more on its way
# (tile_m, tile_n, warp_m, warp_n)
LARGE_TILE, LARGE_TILE_OF_GROUPS = (128, 128, 64, 32), (128, 64, 32, 32)
# by the rows up to which they serve: the tile, and one half as wide for where the first is too large to be one a multiprocessor
TILES = (
    (16, (16, 64, 16, 16), (16, 32, 16, 16)),
    (32, (32, 64, 16, 32), (32, 32, 16, 16)),
    (1 << 63, (64, 64, 32, 32), (64, 32, 32, 16)),
)
FEW_ROWS, MIDDLE_ROWS = 32, 64


def span_of(group_size):
    """k of a sum in int32: 0, all of it, for one scale a row (group_size 0)."""
    return gcd(group_size, STEP) if group_size else 0


@cache
def _multiply(warp_m, warp_n, tile_n, span):
    """multiply(x_tile, w_tile, scales, warp_row, warp_column, lane, exact, sums): a stage's products of this warp.

    exact: int32 sums, of a span where there are spans; these are then added to sums, times ``scales`` (shared).
    """
    m_tiles, n_tiles = warp_m // 16, warp_n // 8
    a_words, b_words = 4 * m_tiles, 2 * n_tiles
    pieces = STEP // PIECE
    pieces_a_span = span // PIECE if span else pieces + 1
    offset = swizzle(STEP)
    update = ptx.mma_update("int8")

    @cuda.jit(device=True, inline="always")
    def multiply_piece(k, x_tile, w_tile, scales, warp_row, warp_column, lane, exact, sums):
        """The products of PIECE columns; k, their number in the stage, is a constant."""
        a = cuda.local.array(a_words, uint32)
        b = cuda.local.array(b_words, uint32)
        for n in range(n_tiles // 2):
            row = uint32(warp_column + uint32(16 * n) + (lane & uint32(7)) + uint32((lane >> uint32(4)) << uint32(3)))
            piece = uint32(uint32(2 * k) + uint32(uint32(lane >> uint32(3)) & uint32(1)))
            words = ptx.ldmatrix_x4(uint32(w_tile + offset(row, piece)))
            for j in range(4):
                b[4 * n + j] = words[j]
        for m in range(m_tiles):
            row = uint32(warp_row + uint32(16 * m) + (lane & uint32(15)))
            piece = uint32(uint32(2 * k) + uint32(lane >> uint32(4)))
            words = ptx.ldmatrix_x4(uint32(x_tile + offset(row, piece)))
            for j in range(4):
                a[4 * m + j] = words[j]
        for m in range(m_tiles):
            for n in range(n_tiles):
                update(exact, 4 * (m * n_tiles + n), a, 4 * m, b[2 * n], b[2 * n + 1])
        if (k + 1) % pieces_a_span == 0:
            for n in range(n_tiles):
                column = uint32(warp_column + uint32(8 * n) + uint32(uint32(lane & uint32(3)) << uint32(1)))
                at = uint32(scales + uint32(uint32(column + uint32(k // pieces_a_span * tile_n)) << uint32(2)))
                pair = ptx.ld_shared_f32(at), ptx.ld_shared_f32(uint32(at + uint32(4)))
                for m in range(m_tiles):
                    for j in range(4):
                        c = 4 * (m * n_tiles + n) + j
                        value = ptx.float_from_bits(uint32(exact[c])) - ROUNDER
                        sums[c] = ptx.fma(value, pair[j % 2], sums[c])
                        exact[c] = int32(ROUNDER_BITS)

    # two by name: the compiler doesn't always unroll a loop as long as this
    @cuda.jit(device=True, inline="always")
    def multiply(x_tile, w_tile, scales, warp_row, warp_column, lane, exact, sums):
        for pair in range(pieces // 2):
            multiply_piece(2 * pair, x_tile, w_tile, scales, warp_row, warp_column, lane, exact, sums)
            multiply_piece(2 * pair + 1, x_tile, w_tile, scales, warp_row, warp_column, lane, exact, sums)

    return multiply


def matmul_tiles_int8_kernel(dtype, group_size, wide, pairs, tile_m, tile_n, warp_m, warp_n, stages, epilogue):
    """dtype: of y, bias and residual. group_size: 0 (a scale a row: the epilogue's) or a multiple of PIECE.

    wide: x's and the weight's rows begin at 16-byte addresses; else they are read byte by byte. pairs: y is 16-bit, and pairs of
    its columns are 4-byte aligned in bias, residual and out, whose columns are even in number.
    """
    warps_n = tile_n // warp_n
    threads = tile_m // warp_m * warps_n * ptx.WARP
    span = span_of(group_size)
    groups = span > 0
    spans = STEP // span if groups else 0
    scale_rounds = -(-spans * tile_n // threads)
    m_tiles, n_tiles = warp_m // 16, warp_n // 8
    values = 4 * m_tiles * n_tiles
    sum_values = values if groups else 1
    start = ROUNDER_BITS if groups else 0
    x_bytes = tile_m * STEP
    scales_at = x_bytes + tile_n * STEP
    stage_bytes = scales_at + 4 * spans * tile_n
    fill_x, fill_weight = (fill_tile(1, STEP, rows, threads, wide) for rows in (tile_m, tile_n))
    multiply = _multiply(warp_m, warp_n, tile_n, span)
    unfinished = stages - 2  # groups of copies that may still fly when a stage is read
    width = 2 if pairs else 1
    pitch = tile_n + PAD
    store = finish(dtype, epilogue, width)

    @cuda.jit(device=True, inline="always")
    def fill_scales(shared, scales, first_column, scale_stride, k, depth, here, thread):
        """A stage's scales, [spans, tile_n]; zeros past the columns and past ``depth``."""
        for i in range(scale_rounds):
            number = uint32(thread + uint32(i * threads))
            if number < uint32(spans * tile_n):
                inside = uint32(number % uint32(tile_n))
                first = uint32(k + uint32(uint32(number // uint32(tile_n)) * uint32(span)))
                valid = inside < here and first < depth
                index = int64(0)
                if valid:
                    index = (first_column + int64(inside)) * scale_stride + int64(uint32(first // uint32(group_size)))
                ptx.cp_async_4_zfill(
                    uint32(shared + uint32(number << uint32(2))),
                    ptx.address(scales, index),
                    uint32(4) if valid else uint32(0),
                )

    @kernel(launch_bounds=threads)
    def matmul_tiles_int8(
        x: ptx.pointer("int8"),
        weight: ptx.pointer("int8"),
        x_scales: ptx.pointer("float32"),
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        out: ptx.pointer(dtype),
        rows: int64,
        columns: int64,
        depth: uint32,
        x_stride: int64,
        weight_stride: int64,
        x_scale_stride: int64,
        scale_stride: int64,
        residual_stride: int64,
        out_stride: int64,
    ):
        y_tile = cuda.shared.array(0, float32)  # [tile_m, pitch], when the ring is done
        memory = ptx.shared_address(y_tile)
        exact = cuda.local.array(values, int32)
        for i in range(values):
            exact[i] = int32(start)
        sums = cuda.local.array(sum_values, float32)
        for i in range(sum_values):
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
                w_start = first_column * weight_stride
                w_at = uint32(fill_at + uint32(x_bytes))
                fill_weight(w_at, weight, w_start, weight_stride, k, depth, columns_here, thread)
                if groups:
                    scales_to = uint32(fill_at + uint32(scales_at))
                    fill_scales(scales_to, scales, first_column, scale_stride, k, depth, columns_here, thread)
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
                    exact,
                    sums,
                )
                step = uint32(step + uint32(1))
                read_at = uint32(read_at + uint32(stage_bytes))
                if read_at == end:
                    read_at = memory

        # the sums go through shared memory, so that whole rows leave together
        cuda.syncthreads()
        for m in range(m_tiles):
            for h in range(2):
                row = uint32(warp_row + uint32(16 * m + 8 * h) + uint32(lane >> uint32(2)))
                x_scale = float32(0.0)
                if row < rows_here:
                    x_scale = scale_of_row(x_scales[(first_row + int64(row)) * x_scale_stride])
                for n in range(n_tiles):
                    for j in range(2):
                        column = uint32(warp_column + uint32(8 * n + j) + uint32(uint32(lane & uint32(3)) << uint32(1)))
                        at = 4 * (m * n_tiles + n) + 2 * h + j
                        value = sums[at] if groups else float32(exact[at])
                        y_tile[uint32(uint32(row * uint32(pitch)) + column)] = value * x_scale
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
                store(
                    values_y,
                    y_column,
                    scales,
                    scale_stride,
                    bias,
                    residual,
                    y_row * residual_stride + y_column,
                    out,
                    y_row * out_stride + y_column,
                )
            number = uint32(number + uint32(threads * width))

    return matmul_tiles_int8


def _stage_bytes(group_size, tile_m, tile_n):
    spans = STEP // span_of(group_size) if group_size else 0
    return (tile_m + tile_n) * STEP + 4 * spans * tile_n


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, group_size, wide, pairs, epilogue, sm_count):
    """rows, columns > 0; group_size, wide and pairs as ``matmul_tiles_int8_kernel``."""
    # sums of a span beside those of all double the registers of a warp's part of y, so it is half as large
    large = LARGE_TILE_OF_GROUPS if group_size else LARGE_TILE
    # small tiles read shared memory and L2 more often, but a large tile only pays where there is one a multiprocessor
    if rows > MIDDLE_ROWS and blocks(rows, columns, *large[:2]) >= sm_count:
        tile = large
    else:
        wider, narrower = next(tiles for most, *tiles in TILES if rows <= most)
        tile = wider if blocks(rows, columns, *wider[:2]) >= sm_count else narrower
    most_stages = STAGES_OF_FEW_ROWS if rows <= FEW_ROWS else STAGES
    stages = min(most_stages, SHARED_BYTES // _stage_bytes(group_size, *tile[:2]))
    return plan_of(rows, columns, (dtype, group_size, wide, pairs, *tile, stages, epilogue))


def plan_of(rows, columns, constants):
    """The Plan of given constants."""
    _, group_size, _, _, tile_m, tile_n, warp_m, warp_n, stages, _ = constants
    threads = tile_m // warp_m * (tile_n // warp_n) * ptx.WARP
    # the ring, or the tile of sums that takes its place
    shared_bytes = max(stages * _stage_bytes(group_size, tile_m, tile_n), 4 * tile_m * (tile_n + PAD))
    grid = (blocks(rows, columns, tile_m, tile_n), 1, 1)
    return Plan(matmul_tiles_int8_kernel, constants, grid, (threads, 1, 1), shared_bytes)


def arguments(x, x_scales, weight, scales, bias, residual, out):
    """What the kernel of a Plan is launched with. x_scales [rows, 1], scales [columns, groups], float32."""
    return (
        x.pointer,
        weight.pointer,
        x_scales.pointer,
        scales.pointer,
        0 if bias is None else bias.pointer,
        0 if residual is None else residual.pointer,
        out.pointer,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x.strides[0],
        weight.strides[0],
        x_scales.strides[0],
        scales.strides[0],
        0 if residual is None else residual.strides[0],
        out.strides[0],
    )
