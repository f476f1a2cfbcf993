"""Few rows times a dense or int8 weight at the speed of memory: the weight streams through a ring of bulk copies (sm_90).

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

About one block a multiprocessor lives for the whole product. One of its warps asks for boxes of the weight, tile_n rows of 128
bytes, and of x, long before they are needed; the others multiply what has come, 16 rows of the weight (columns of y) a warp, on
the tensor cores: the weight is the left side, eight rows of x are the narrow right side.

    ring of stages:   |w, x step s| s + 1 | s + 2 | … on their way … | s + stages - 1 |      about 200 KB in flight
                       16 weight rows x 128 bytes a warp

A unit is a tile of columns and one step along k. The units, tile by tile, are cut into equal ranges, one a block ("Stream-K",
Osama et al. 2023), so that every multiprocessor reads equally much:

    tile 0   |  block 0     |  block 1 |
    tile 1   |block 1 |  block 2       |       block 1 has the end of tile 0 and the beginning of tile 1
    tile 2   |  block 3     | block 4 …

Blocks that share a tile leave float32 sums in memory, and the last to come (it counts them) adds these in the order of k.

int8 as in ``matmul_tiles``: ldmatrix brings four consecutive k of a weight row to a lane, which become the lane's two words of a
16-bit fragment, and x's fragment is read in the same order of k. With a scale a group of columns, products of a group are summed
from zero and then added times the scale, in float32.

Where kernels overlap (``launch.overlap``), a block fills its ring with the weight before it waits for the kernel in front of it,
and asks for x after that. Rings stay as large as a multiprocessor allows: with room for two, two blocks of one launch often came
to the same one on an H200, and the launch took 1.4 times as long:

    this kernel      |w w w w: the ring is full    wait|x x x x, multiply …
    the one before   … multiply ............... merge |

How k is cut depends on the weight and the GPU alone: a row of y has the same bits whatever stands in the other rows, and however
many.
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.epilogue import finish
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.tensor_map import tensor_map
from nbkernels.ptx.bulk import (
    EVICT_FIRST,
    prefetch_tensor_map,
    tensor_load_2d,
    tensor_load_2d_hint,
    tensor_map_address,
)
from nbkernels.ptx.bulk import tensor_map as tensor_map_type
from nbkernels.ptx.mbarrier import (
    barrier_sync,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbkernels.ptx.widen import fragments_from_int8, leave_widening_constants, widening_constants

MOST_ROWS = 64
# Of a weight, from which on a ring of bulk copies pays: below it a block's few steps end before the ring is full.
LEAST_BYTES = 2 * 2**20
# Up to FEW_ROWS rows ``matmul_narrow`` reads a less deep weight faster, since a block finishes more of its sums.
FEW_ROWS, LEAST_DEPTH = 16, 1024
ROW_BYTES = 128  # of a box: the swizzle's width
SWIZZLE_BYTES = 1024  # eight rows, after which the swizzle repeats: what boxes are aligned to
X_BOX = 64  # columns of x a box: 128 bytes
FRAGMENT_ROWS = 8  # of x
FRAGMENT_COLUMNS = 16  # of y
FRAGMENT_BYTES = FRAGMENT_COLUMNS * ROW_BYTES
K_PIECE = 32  # bytes of a weight row that an ldmatrix brings for a warp's 16 rows
# memory's latency times its bandwidth is 32 KB a multiprocessor; the rest lets it go on while a tile is finished
RING_BYTES = 200 * 1024
MOST_BYTES = 224 * 1024  # of the ring and the teams' sums
SCALE_BYTES = (
    16  # of a row of the weight a stage: four groups' scales, the most that a step has and the least that a copy brings
)
BOXED_GROUPS = (32, 64, 128)  # whose scales of a step are a box
# Of a block: fragments of 16 columns a warp, warps side by side, and teams of them. The first one's blocks share all tiles
# alike; the others are taken where whole tiles keep the multiprocessors as busy, since nothing is left to be merged then.
SHAPE = (1, 8, 1)
WHOLE_SHAPES = ((1, 7, 1), (1, 6, 1), (1, 5, 1), (1, 4, 2), (1, 3, 3), (1, 2, 4))
# what leaving and merging parts of tiles takes, as bytes of a weight that a multiprocessor reads meanwhile: some 2.5 µs
MERGE_BYTES = 80 * 1024
WHOLE_MORE = 1.04  # so much more work of the busiest block costs less than parts of tiles
MOST_DIRECT = 32  # sums a lane that an epilogue takes out of registers
MERGE_UNROLL = 4  # partial sums a thread has in flight


def step_columns(weight):
    """k of a step: ROW_BYTES of a weight row."""
    return ROW_BYTES // (2 if weight == "dense" else 1)


def _stage_bytes(weight, row_tiles, tile_n, scale_boxes=False):
    return (
        tile_n * (ROW_BYTES + (SCALE_BYTES if scale_boxes else 0))
        + step_columns(weight) // X_BOX * row_tiles * SWIZZLE_BYTES
    )


def _stage_stride(stage_bytes):
    """From one stage to the next."""
    return -(-stage_bytes // SWIZZLE_BYTES) * SWIZZLE_BYTES


@cache
def multiply_dense(dtype, row_tiles, column_tiles):
    """multiply(w, x, w_lane, x_lane, constants, scale, sums): sums += the products of a stage, for one warp.

    w, x: shared addresses of the warp's rows of the weight and of x's boxes; w_lane, x_lane: where a lane reads in them.
    sums: [column_tiles, row_tiles, 4].
    """
    update = ptx.mma_update(str(dtype))
    words = 8 * column_tiles

    @cuda.jit(device=True, inline="always")
    def multiply(w, x, w_lane, x_lane, constants, scale, sums):
        a = cuda.local.array(words, uint32)
        for pair in range(2):
            for s in range(2):
                for c in range(column_tiles):
                    piece = uint32(K_PIECE * (2 * pair + s))
                    found = ptx.ldmatrix_x4(uint32(w + (w_lane ^ piece) + uint32(c * FRAGMENT_BYTES)))
                    for i in range(4):
                        a[4 * (s * column_tiles + c) + i] = found[i]
            for t in range(row_tiles):
                b = ptx.ldmatrix_x4(uint32(x + (x_lane ^ uint32(64 * pair)) + uint32(t * SWIZZLE_BYTES)))
                for s in range(2):
                    for c in range(column_tiles):
                        update(sums, 4 * (c * row_tiles + t), a, 4 * (s * column_tiles + c), b[2 * s], b[2 * s + 1])

    return multiply


@cache
def _multiply_int8(dtype, row_tiles, column_tiles, pieces_a_scale, scale_boxes):
    """As ``multiply_dense`` for int8; pieces_a_scale: of 32 k with one scale, 0 without groups.

    scale[2 · c + h], lane q of a quad: of rows l / 4 + 8 · h of fragment c, for round q; a round is the pieces with one scale.
    With scale_boxes each lane has all: scale[rounds · (2 · c + h) + q].
    """
    update = ptx.mma_update(str(dtype))
    fragments = fragments_from_int8(dtype)
    groups = pieces_a_scale > 0
    pieces = pieces_a_scale if groups else 1
    rounds = ROW_BYTES // K_PIECE // pieces
    pairs = rounds // 2
    words = 8 * pieces * column_tiles
    products = 2 * pieces
    part_values, scale_count = 4 * column_tiles, 2 * column_tiles

    @cuda.jit(device=True, inline="always")
    def one(r, w, x, w_lane, x_lane, constants, scale, sums):
        """Round r, a constant."""
        a = cuda.local.array(words, uint32)
        part = cuda.local.array(part_values, float32)
        scale_here = cuda.local.array(scale_count, float32)
        for p in range(pieces):
            for c in range(column_tiles):
                piece = uint32(K_PIECE * (r * pieces + p))
                at = uint32(w + (w_lane ^ piece) + uint32(c * FRAGMENT_BYTES))
                fragments(a, 8 * (p * column_tiles + c), at, constants[0], constants[1])
        if groups:
            for i in range(scale_count):
                scale_here[i] = scale[rounds * i + r] if scale_boxes else scale[i]
                if rounds > 1 and not scale_boxes:
                    quad_start = uint32(ptx.lane_id() & uint32(28))
                    scale_here[i] = ptx.shfl_idx(scale[i], uint32(quad_start | uint32(r)))
        for t in range(row_tiles):
            if groups:
                for i in range(part_values):
                    part[i] = float32(0.0)
            for p in range(products):
                number = products * r + p  # of a product of 16 k: 32 bytes of a row of x, four of them a box
                box = number >> 2
                b = ptx.ld_shared_v2(
                    uint32(x + (x_lane ^ uint32((number & 3) << 5)) + uint32((box * row_tiles + t) * SWIZZLE_BYTES))
                )
                for c in range(column_tiles):
                    at = 8 * ((p >> 1) * column_tiles + c) + 4 * (p & 1)
                    if groups:
                        update(part, 4 * c, a, at, b[0], b[1])
                    else:
                        update(sums, 4 * (c * row_tiles + t), a, at, b[0], b[1])
            if groups:
                for c in range(column_tiles):
                    for i in range(4):
                        to = 4 * (c * row_tiles + t) + i
                        sums[to] = ptx.fma(part[4 * c + i], scale_here[2 * c + (i >> 1)], sums[to])

    # two rounds by name: the compiler doesn't always unroll a loop as long as this
    @cuda.jit(device=True, inline="always")
    def multiply(w, x, w_lane, x_lane, constants, scale, sums):
        for pair in range(pairs):
            one(2 * pair, w, x, w_lane, x_lane, constants, scale, sums)
            one(2 * pair + 1, w, x, w_lane, x_lane, constants, scale, sums)

    @cuda.jit(device=True, inline="always")
    def multiply_at_once(w, x, w_lane, x_lane, constants, scale, sums):
        one(0, w, x, w_lane, x_lane, constants, scale, sums)

    return multiply if pairs else multiply_at_once


@cache
def _load_scales(group_size, pieces_a_scale, count):
    """load(addresses, step, depth, scale): a lane's scales at a step (``_multiply_int8``), ``count`` rows.

    addresses: of its scales of this step where they come one after another, and moved on by a step; else of the rows' first ones.
    Past the end of depth scales stay as they are: x and the weight are zeros there.
    """
    scale_groups = 4 // pieces_a_scale
    scale_columns = ROW_BYTES // scale_groups
    one_after_another = group_size == scale_columns

    @cuda.jit(device=True, inline="always")
    def load(addresses, step, depth, scale):
        group = uint32(ptx.lane_id() & uint32(scale_groups - 1))
        k = uint32(uint32(step * uint32(ROW_BYTES)) + uint32(group * uint32(scale_columns)))
        if k < depth:
            for i in range(count):
                at = addresses[i]
                if not one_after_another:
                    at += uint64(uint32(uint32(k // uint32(group_size)) << uint32(2)))
                scale[i] = ptx.ld_global_nc_f32(at)
        if one_after_another:
            for i in range(count):
                addresses[i] += uint64(4 * scale_groups)

    return load


@cache
def read_scales_function(scale_groups, count):
    """read(at, scale): a lane's scales at a step from its stage, 8 rows apart and ``count``, as ``_multiply_int8`` takes them."""

    @cuda.jit(device=True, inline="always")
    def read(at, scale):
        for i in range(count):
            place = uint32(at + uint32(8 * SCALE_BYTES * i))
            if scale_groups == 4:
                found = ptx.ld_shared_v4_f32(place)
                for j in range(4):
                    scale[4 * i + j] = found[j]
            elif scale_groups == 2:
                pair = ptx.ld_shared_v2(place)
                for j in range(2):
                    scale[2 * i + j] = ptx.float_from_bits(pair[j])
            else:
                scale[i] = ptx.ld_shared_f32(place)

    return read


@cuda.jit(device=True, inline="always")
def first_unit_of(block, share, extra):
    """The first unit of a block: the first ``extra`` blocks have one more than ``share``."""
    return uint32(uint32(block * share) + min(block, extra))


@cuda.jit(device=True, inline="always")
def block_of(unit, share, extra):
    """The block that has a unit."""
    longer = uint32(extra * uint32(share + uint32(1)))
    if unit < longer:
        return uint32(unit // uint32(share + uint32(1)))
    return uint32(extra + uint32(uint32(unit - longer) // share))


def matmul_stream_kernel(
    dtype, weight, group_size, row_tiles, column_tiles, consumers, stages, teams, scale_boxes, epilogue, overlap=False
):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, scale a group_size, a multiple of 32).

    row_tiles: of 8 rows of x, all there are; column_tiles: fragments of 16 columns of y a warp, of ``consumers`` warps. There are
    ``teams`` of these, which take stages (a multiple) by turns and add up their sums at a tile's end; one more brings all in.
    scale_boxes: the scales too, of groups of 32, 64 or 128, where a tensor map can describe them.
    overlap: it may start before the kernel in front of it has ended.
    """
    dense, groups = weight == "dense", weight == "groups"
    step_k = step_columns(weight)
    x_boxes = step_k // X_BOX
    tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
    tile_bytes = tile_n * ROW_BYTES
    x_box_bytes = row_tiles * SWIZZLE_BYTES
    stage_bytes = _stage_bytes(weight, row_tiles, tile_n, scale_boxes)
    stage_stride = _stage_stride(stage_bytes)
    consumer_threads = teams * consumers * ptx.WARP
    values = 4 * row_tiles * column_tiles
    pieces_a_scale = 0 if not groups else 4 if group_size % 128 == 0 else 2 if group_size % 64 == 0 else 1
    scale_groups = 4 // pieces_a_scale if groups else 1
    scale_rows = 2 * column_tiles  # of the weight a lane
    scale_count = scale_rows * (scale_groups if scale_boxes else 1)
    fetched = groups and not scale_boxes
    scales_at = tile_bytes + x_boxes * x_box_bytes  # in a stage
    scales_in_order = scale_groups * group_size == step_k
    assert (scales_in_order or not scale_boxes) and stages % teams == 0 and (teams == 1 or not fetched)
    load_scales = _load_scales(group_size, pieces_a_scale, scale_rows) if fetched else None
    read_scales = read_scales_function(scale_groups, scale_rows)
    multiply = (
        multiply_dense(dtype, row_tiles, column_tiles)
        if dense
        else _multiply_int8(dtype, row_tiles, column_tiles, pieces_a_scale, scale_boxes)
    )
    store = finish(dtype, epilogue)
    # with more the compiler leaves the sums in memory: the loop that writes them is too long
    direct = values <= MOST_DIRECT
    gated = epilogue.gated
    direct_gated, direct_one = direct and gated, direct and not gated
    halves = 2 * row_tiles * column_tiles  # of fragments: 8 rows and columns of y, two sums a lane
    element_columns = 2 if gated else 1  # of an element of y
    out_n = tile_n // element_columns
    full_at, free_at, flag_at, constants_at = 0, 8 * stages, 16 * stages, 16 * stages + 8
    ring_at = SWIZZLE_BYTES
    sums_at = ring_at + stages * stage_stride  # of the teams: [team, consumer, value, lane]
    team_bytes = consumers * values * ptx.WARP * 4

    @cuda.jit(device=True, inline="always")
    def bring_scales(scale_map, to, tile, step, full):
        at = uint32(to + uint32(scales_at))
        # from a multiple of four groups on: a copy from elsewhere ends in an illegal instruction on an H200
        first = uint32(uint32(step * uint32(scale_groups)) & uint32(0xFFFFFFFC))
        tensor_load_2d(at, tensor_map_address(scale_map), first, uint32(tile * uint32(tile_n)), full)

    @cuda.jit(device=True, inline="always")
    def prefetch_scales(scales, scale_stride, tile, k, columns, lane):
        """The scales of a unit on their way too: the warps ask for them only a step before they need them."""
        for i in range(-(-tile_n // ptx.WARP)):
            row = min(uint32(uint32(tile * uint32(tile_n)) + uint32(ptx.WARP * i) + lane), columns - uint32(1))
            ptx.prefetch_l2(ptx.address(scales, int64(row) * scale_stride + int64(uint32(k // uint32(group_size)))))

    @cuda.jit(device=True, inline="always")
    def merge(partial, number, here, first_block, last_block):
        """A sum of a tile from those of the blocks that share it, which have ``here`` each."""
        total = float32(0.0)
        part = first_block
        while part <= last_block:
            found = cuda.local.array(MERGE_UNROLL, float32)
            for i in range(MERGE_UNROLL):
                from_block = uint32(part + uint32(i))
                found[i] = float32(0.0)
                if from_block <= last_block:
                    # the first block begins, or has begun before, the tile: its second slot
                    from_slot = uint32(from_block << uint32(1))
                    if from_block == first_block:
                        from_slot = uint32(from_slot + uint32(1))
                    at = uint32(uint32(from_slot * here) + number)
                    found[i] = ptx.ld_global_relaxed_f32(ptx.address(partial, at))
            for i in range(MERGE_UNROLL):
                total += found[i]
            part = uint32(part + uint32(MERGE_UNROLL))
        return total

    @cuda.jit(device=True, inline="always")
    def row_of(quad, t, j):
        """The row of y of a lane's sum j (0 or 1) in row tile t."""
        place = uint32(uint32(quad << uint32(1)) + uint32(j))
        if dense:
            return uint32(place + uint32(8 * t))
        # columns 2q, 2q + 1 of the fragment in the order of x_row
        return uint32(uint32(uint32(place & uint32(3)) << uint32(1)) + uint32(place >> uint32(2)) + uint32(8 * t))

    @cuda.jit(device=True, inline="always")
    def store_gated(sums, lane, first_column, rows, columns, scales, scale_stride, bias, residual, out, out_stride):
        """A warp's y, whose lanes have row l / 4 of the weight, an even one a gate's and the next its up's.

        Two such lanes exchange a sum: the even one finishes the first of their two rows of y, the odd one the second.
        """
        quad = uint32(lane & uint32(3))
        is_up = uint32(uint32(lane >> uint32(2)) & uint32(1)) == uint32(1)
        own_row = row_of(quad, 0, 1) if is_up else row_of(quad, 0, 0)
        own_column = uint32(first_column & uint32(0xFFFFFFFE))
        for i in range(halves):
            c, half, t = i // (2 * row_tiles), i // row_tiles % 2, i % row_tiles
            at = 4 * (c * row_tiles + t) + 2 * half
            other = ptx.shfl_bfly(sums[at] if is_up else sums[at + 1], uint32(4))
            gate = other if is_up else sums[at]
            up = sums[at + 1] if is_up else other
            row = uint32(own_row + uint32(8 * t))
            y_column = uint32(own_column + uint32(FRAGMENT_COLUMNS * c + 8 * half))
            if row < rows and y_column < columns:
                store(
                    (gate, up),
                    int64(y_column),
                    scales,
                    scale_stride,
                    bias,
                    residual,
                    int64(0),
                    out,
                    int64(row) * out_stride + int64(uint32(y_column >> uint32(1))),
                )

    @kernel(launch_bounds=(consumer_threads + ptx.WARP, 1))
    def matmul_stream(
        weight_map: tensor_map_type,
        x_map: tensor_map_type,
        scale_map: tensor_map_type,
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        out: ptx.pointer(dtype),
        partial: ptx.pointer("float32"),  # [2 · blocks, rows, tile_n]
        counters: ptx.pointer("uint32"),  # [tiles]
        rows: uint32,
        columns: uint32,
        depth: uint32,
        steps: uint32,
        share: uint32,
        extra: uint32,
        scale_stride: int64,
        residual_stride: int64,
        out_stride: int64,
    ):
        raw = ptx.shared_address(cuda.shared.array(0, uint8))
        base = uint32(uint32(raw + uint32(SWIZZLE_BYTES - 1)) & uint32(0xFFFFFFFF - SWIZZLE_BYTES + 1))
        ring = uint32(base + uint32(ring_at))
        thread = uint32(cuda.threadIdx.x)
        lane = ptx.lane_id()
        warp = ptx.shfl_idx_u32(uint32(thread >> uint32(5)), uint32(0))  # known to be the same in all lanes
        block = uint32(cuda.blockIdx.x)
        if overlap:
            ptx.launch_dependents()
        if thread == uint32(0):
            for s in range(stages):
                mbarrier_init(uint32(base + uint32(full_at + 8 * s)), uint32(1))
                mbarrier_init(uint32(base + uint32(free_at + 8 * s)), uint32(consumers))
            fence_mbarrier_init()
            leave_widening_constants(uint32(base + uint32(constants_at)))
        cuda.syncthreads()

        unit = first_unit_of(block, share, extra)
        end = first_unit_of(uint32(block + uint32(1)), share, extra)
        tile = uint32(unit // steps)
        step = uint32(unit - uint32(tile * steps))
        stage = uint32(0)
        parity = uint32(0)
        if warp == uint32(teams * consumers):
            weight_at, x_at = tensor_map_address(weight_map), tensor_map_address(x_map)
            prefetch_tensor_map(weight_at)
            prefetch_tensor_map(x_at)
            brought_end = unit
            if overlap:
                # as much of the weight as there is room for
                brought_end = min(end, uint32(unit + uint32(stages)))
                to_bring, at_tile, at_step, at_stage = unit, tile, step, uint32(0)
                while to_bring < brought_end:
                    k = uint32(at_step * uint32(step_k))
                    if lane == uint32(0):
                        full = uint32(base + uint32(at_stage << uint32(3)))
                        to = uint32(ring + uint32(at_stage * uint32(stage_stride)))
                        mbarrier_expect(full, uint32(stage_bytes))
                        tensor_load_2d_hint(
                            to, weight_at, k, uint32(at_tile * uint32(tile_n)), full, uint64(EVICT_FIRST)
                        )
                        if scale_boxes:
                            bring_scales(scale_map, to, at_tile, at_step, full)
                    if fetched:
                        prefetch_scales(scales, scale_stride, at_tile, k, columns, lane)
                    ptx.warp_sync()
                    to_bring = uint32(to_bring + uint32(1))
                    at_stage = uint32(at_stage + uint32(1))
                    at_step = uint32(at_step + uint32(1))
                    if at_step == steps:
                        at_step = uint32(0)
                        at_tile = uint32(at_tile + uint32(1))
                ptx.griddep_wait()
                fence_proxy_async()  # x was written by plain stores, and is read by copies
            while unit < end:
                full = uint32(base + uint32(stage << uint32(3)))
                mbarrier_wait(uint32(full + uint32(free_at - full_at)), uint32(parity ^ uint32(1)))
                k = uint32(step * uint32(step_k))
                if lane == uint32(0):
                    to = uint32(ring + uint32(stage * uint32(stage_stride)))
                    if not overlap or unit >= brought_end:
                        mbarrier_expect(full, uint32(stage_bytes))
                        tensor_load_2d_hint(to, weight_at, k, uint32(tile * uint32(tile_n)), full, uint64(EVICT_FIRST))
                        if scale_boxes:
                            bring_scales(scale_map, to, tile, step, full)
                    for i in range(x_boxes):
                        tensor_load_2d(
                            uint32(to + uint32(tile_bytes + i * x_box_bytes)),
                            x_at,
                            uint32(k + uint32(i * X_BOX)),
                            uint32(0),
                            full,
                        )
                if fetched and (not overlap or unit >= brought_end):
                    prefetch_scales(scales, scale_stride, tile, k, columns, lane)
                ptx.warp_sync()
                unit = uint32(unit + uint32(1))
                step = uint32(step + uint32(1))
                if step == steps:
                    step = uint32(0)
                    tile = uint32(tile + uint32(1))
                stage = uint32(stage + uint32(1))
                if stage == uint32(stages):
                    stage = uint32(0)
                    parity = uint32(parity ^ uint32(1))
            return

        sums = cuda.local.array(values, float32)
        scale = cuda.local.array(scale_count, float32)
        ahead = cuda.local.array(scale_count, float32)
        scale_places = cuda.local.array(scale_rows, uint64)
        quad = uint32(lane & uint32(3))
        quad_row = uint32(lane >> uint32(2))
        # where a lane reads in its warp's rows and in x; pieces are exchanged by XOR with the row's last three bits
        w_row = uint32(lane & uint32(15))
        w_lane = uint32(
            uint32(w_row << uint32(7)) + uint32(uint32(uint32(lane >> uint32(4)) ^ (w_row & uint32(7))) << uint32(4))
        )
        if dense:
            x_row = uint32(lane & uint32(7))
            x_lane = uint32(uint32(x_row << uint32(7)) + uint32(uint32(uint32(lane >> uint32(3)) ^ x_row) << uint32(4)))
        else:
            # rows 0, 2, 4, 6, 1, 3, 5, 7: half a warp's 8-byte loads meet no bank twice
            x_row = uint32(uint32(uint32(quad_row & uint32(3)) << uint32(1)) + uint32(quad_row >> uint32(2)))
            x_lane = uint32(
                uint32(x_row << uint32(7))
                + uint32(uint32(uint32(quad >> uint32(1)) ^ x_row) << uint32(4))
                + uint32(uint32(quad & uint32(1)) << uint32(3))
            )
        constants = widening_constants(uint32(base + uint32(constants_at)))
        team = uint32(0)
        turn = uint32(0)  # of the team that has the block's next stage
        first_team = True
        if teams > 1:
            team = uint32(warp // uint32(consumers))
            first_team = team == uint32(0)
            warp = uint32(warp - uint32(team * uint32(consumers)))
            stage = team
        warp_bytes = uint32(warp * uint32(column_tiles * FRAGMENT_BYTES))
        warp_scales = uint32(
            uint32(uint32(warp * uint32(column_tiles * FRAGMENT_COLUMNS)) + quad_row) * uint32(SCALE_BYTES)
        )
        warp_column = uint32(uint32(warp * uint32(column_tiles * FRAGMENT_COLUMNS)) + quad_row)
        while unit < end:
            first_unit = uint32(unit - step)
            last = min(uint32(end - first_unit), steps)  # the step after this block's last one of the tile
            first_column = uint32(tile * uint32(tile_n))
            whole = step == uint32(0) and last == steps
            slot = uint32(uint32(block << uint32(1)) + (uint32(1) if step == uint32(0) else uint32(0)))
            for i in range(values):
                sums[i] = float32(0.0)
            if fetched:
                for i in range(scale_rows):
                    column = min(uint32(first_column + warp_column + uint32(8 * i)), columns - uint32(1))
                    scale_places[i] = ptx.address(scales, int64(column) * scale_stride)
                    if scales_in_order:
                        in_step = uint32(quad & uint32(scale_groups - 1))
                        first_scale = uint32(uint32(step * uint32(scale_groups)) + in_step)
                        scale_places[i] += uint64(uint32(first_scale << uint32(2)))
                    ahead[i] = float32(0.0)
                load_scales(scale_places, step, depth, ahead)
            if overlap:
                # before anything is written; where x has come it is over
                ptx.griddep_wait()
            unit = uint32(first_unit + last)
            if teams > 1:
                next_turn = uint32(uint32(turn + uint32(last - step)) % uint32(teams))
                step = uint32(step + uint32(uint32(uint32(team + uint32(teams)) - turn) % uint32(teams)))
                turn = next_turn
            while step < last:
                if fetched:
                    for i in range(scale_rows):
                        scale[i] = ahead[i]
                    load_scales(scale_places, uint32(step + uint32(1)), depth, ahead)
                full = uint32(base + uint32(stage << uint32(3)))
                mbarrier_wait(full, parity)
                w = uint32(ring + uint32(stage * uint32(stage_stride)))
                if scale_boxes:
                    own_scales = uint32(w + uint32(scales_at) + warp_scales)
                    if scale_groups < 4:
                        in_box = uint32(uint32(step * uint32(scale_groups)) & uint32(3))
                        own_scales = uint32(own_scales + uint32(in_box << uint32(2)))
                    read_scales(own_scales, scale)
                multiply(uint32(w + warp_bytes), uint32(w + uint32(tile_bytes)), w_lane, x_lane, constants, scale, sums)
                fence_proxy_async_shared()  # loads may be under way, which nothing else orders before the next copy
                ptx.warp_sync()
                if lane == uint32(0):
                    mbarrier_arrive(uint32(full + uint32(free_at - full_at)))
                step = uint32(step + uint32(teams))
                stage = uint32(stage + uint32(teams))
                if stage >= uint32(stages) if teams > 1 else stage == uint32(stages):
                    stage = team
                    parity = uint32(parity ^ uint32(1))

            if teams > 1:
                own = uint32(
                    base + uint32(sums_at) + uint32(uint32(warp * uint32(values * ptx.WARP)) + lane << uint32(2))
                )
                for i in range(values):
                    place = uint32(own + uint32(team * uint32(team_bytes)) + uint32(4 * ptx.WARP * i))
                    ptx.st_shared(place, ptx.bits_from_float(sums[i]))
                barrier_sync(uint32(1), uint32(consumer_threads))
                if first_team:
                    for other in range(1, teams):
                        for i in range(values):
                            sums[i] += ptx.ld_shared_f32(uint32(own + uint32(other * team_bytes + 4 * ptx.WARP * i)))
                barrier_sync(uint32(1), uint32(consumer_threads))
            step = uint32(0)
            if direct_gated and whole:
                warp_first = uint32(first_column + warp_column)
                if first_team:
                    store_gated(
                        sums, lane, warp_first, rows, columns, scales, scale_stride, bias, residual, out, out_stride
                    )
                tile = uint32(tile + uint32(1))
                continue
            for c in range(column_tiles):
                for t in range(row_tiles):
                    for j in range(4):
                        row = row_of(quad, t, j % 2)
                        column = uint32(warp_column + uint32(FRAGMENT_COLUMNS * c + 8 * (j // 2)))
                        y_column = uint32(first_column + column)
                        if row < rows and y_column < columns and first_team:
                            if direct_one and whole:
                                store(
                                    (sums[4 * (c * row_tiles + t) + j],),
                                    int64(y_column),
                                    scales,
                                    scale_stride,
                                    bias,
                                    residual,
                                    int64(row) * residual_stride + int64(y_column),
                                    out,
                                    int64(row) * out_stride + int64(y_column),
                                )
                            else:
                                at = uint32(uint32(uint32(slot * rows) + row) * uint32(tile_n)) + column
                                partial[uint32(at)] = sums[4 * (c * row_tiles + t) + j]
            if not direct or not whole:
                first_block = block_of(first_unit, share, extra)
                last_block = block_of(uint32(uint32(first_unit + steps) - uint32(1)), share, extra)
                flag = uint32(base + uint32(flag_at))
                barrier_sync(uint32(1), uint32(consumer_threads))
                if thread == uint32(0):
                    counter = ptx.address(counters, int64(tile))
                    # it orders what the block has written, and what it reads after the next barrier
                    came = uint32(ptx.atomic_add(counter, uint32(1)))
                    if came == uint32(last_block - first_block):
                        ptx.st_global(counter, uint32(0))  # for the next launch
                    ptx.st_shared(flag, came)
                barrier_sync(uint32(1), uint32(consumer_threads))
                if ptx.ld_shared(flag) == uint32(last_block - first_block):
                    number = thread
                    here = uint32(rows * uint32(tile_n))
                    while number < uint32(rows * uint32(out_n)):
                        row = uint32(number // uint32(out_n))
                        column = uint32(number % uint32(out_n))
                        at = uint32(number * uint32(element_columns))
                        y_column = uint32(first_column + uint32(column * uint32(element_columns)))
                        out_column = uint32(y_column // uint32(element_columns))
                        if y_column < columns:
                            if gated:
                                merged = (
                                    merge(partial, at, here, first_block, last_block),
                                    merge(partial, uint32(at + uint32(1)), here, first_block, last_block),
                                )
                            else:
                                merged = (merge(partial, at, here, first_block, last_block),)
                            store(
                                merged,
                                int64(y_column),
                                scales,
                                scale_stride,
                                bias,
                                residual,
                                int64(row) * residual_stride + int64(y_column),
                                out,
                                int64(row) * out_stride + int64(out_column),
                            )
                        number = uint32(number + uint32(consumer_threads))
                if not direct:
                    # the block's next tile may be left in the same place
                    barrier_sync(uint32(1), uint32(consumer_threads))
            tile = uint32(tile + uint32(1))

    return matmul_stream


@lru_cache(maxsize=4096)
def plan(
    rows,
    columns,
    depth,
    dtype,
    weight,
    group_size,
    epilogue,
    sm_count,
    shape=None,
    ring_bytes=None,
    on_one=1,
    overlap=False,
    scale_maps=False,
):
    """rows up to MOST_ROWS; weight, group_size (0 where there is none) and overlap as ``matmul_stream_kernel``.

    shape: its column_tiles, consumers and teams (None: ``shape_for``); on_one: blocks a multiprocessor, each with ring_bytes
    (None: the constants'). scale_maps: a tensor map can describe the scales.
    """
    scale_boxes = scale_maps and group_size in BOXED_GROUPS
    if shape is None:
        shape = shape_for(columns, depth, weight, sm_count, weight != "groups" or scale_boxes)
    column_tiles, consumers, teams = shape
    tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
    row_tiles = 1
    while FRAGMENT_ROWS * row_tiles < rows:
        row_tiles *= 2
    ring_bytes = ring_bytes or RING_BYTES
    stage_stride = _stage_stride(_stage_bytes(weight, row_tiles, tile_n, scale_boxes))
    team_bytes = teams * consumers * 4 * row_tiles * column_tiles * ptx.WARP * 4 if teams > 1 else 0
    stages = min(ring_bytes, MOST_BYTES - team_bytes) // stage_stride // teams * teams
    blocks = blocks_for(*cut(columns, depth, weight, tile_n), sm_count * on_one)
    # in front of the ring its mbarriers, and what is lost to alignment
    shared_bytes = 2 * SWIZZLE_BYTES + stages * stage_stride + team_bytes
    constants = (
        dtype,
        weight,
        group_size,
        row_tiles,
        column_tiles,
        consumers,
        stages,
        teams,
        scale_boxes,
        epilogue,
        overlap,
    )
    threads = (teams * consumers + 1) * ptx.WARP
    return Plan(matmul_stream_kernel, constants, (blocks, 1, 1), (threads, 1, 1), shared_bytes)


@lru_cache(maxsize=1024)
def shape_for(columns, depth, weight, sm_count, teams_fit):
    """Of a block; it hangs on the weight alone, so that a row's bits do not depend on the others."""
    row_bytes = depth * (2 if weight == "dense" else 1)

    def most_bytes(shape):
        column_tiles, consumers, _ = shape
        tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
        tiles = -(-columns // tile_n)
        return -(-tiles // sm_count) * tile_n * row_bytes

    shape = min((s for s in WHOLE_SHAPES if teams_fit or s[2] == 1), key=most_bytes)
    return shape if most_bytes(shape) < columns * row_bytes // sm_count + MERGE_BYTES else SHAPE


def blocks_for(tiles, steps, most_blocks):
    """How many blocks share the units."""
    blocks = min(most_blocks, tiles * steps)
    share = -(-tiles * steps // blocks)
    # where steps allow it fewer do: nobody has more to do than before, and no block has parts of two tiles
    if steps % share == 0:
        return tiles * steps // share
    turns = -(-share // steps)
    return -(-tiles // turns) if turns * steps <= WHOLE_MORE * share else blocks


def serves(rows, columns, depth, weight):
    """Whether so many rows of x are to be multiplied with a weight here, by its size."""
    large = columns * depth * (2 if weight == "dense" else 1) >= LEAST_BYTES
    return rows <= MOST_ROWS and large and (rows > FEW_ROWS or depth >= LEAST_DEPTH)


def cut(columns, depth, weight, tile_n):
    """(tiles, steps) of a weight."""
    return -(-columns // tile_n), -(-depth // step_columns(weight))


def launch_plan(chosen, x, weight, scales, bias, residual, out, device, stream):
    """Launch what ``plan`` chose; arrays as ``matmul.multiply``, scales float32 [columns, groups] or None."""
    _, kind, _, row_tiles, column_tiles, consumers, _, _, scale_boxes, *_ = chosen.constants
    tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
    rows, depth = x.shape
    columns = weight.shape[0]
    tiles, steps = cut(columns, depth, kind, tile_n)
    blocks = chosen.grid[0]
    share, extra = divmod(tiles * steps, blocks)
    partial = counters = None
    direct = 4 * row_tiles * column_tiles <= MOST_DIRECT
    if not direct or extra or share % steps:
        partial = memory.empty((2 * blocks * rows * tile_n,), np.dtype(np.float32), stream)
        counters = memory.counters(tiles, stream)
    weight_map = tensor_map(weight, (tile_n, step_columns(kind)), device=device)
    launch(
        chosen,
        (
            weight_map,
            tensor_map(x, (FRAGMENT_ROWS * row_tiles, X_BOX), device=device),
            tensor_map(scales, (tile_n, SCALE_BYTES // 4), 0, device=device) if scale_boxes else weight_map,
            0 if scales is None else scales.pointer,
            0 if bias is None else bias.pointer,
            0 if residual is None else residual.pointer,
            out.pointer,
            0 if partial is None else partial.pointer,
            0 if counters is None else counters.pointer,
            rows,
            columns,
            depth,
            steps,
            share,
            extra,
            0 if scales is None else scales.strides[0],
            0 if residual is None else residual.strides[0],
            out.strides[0],
        ),
        device,
        stream,
    )
