"""Many rows times a dense or int8 weight by bulk tensor copies and wgmma (sm_90a), 16-bit x.

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

A block stays on its multiprocessor and takes one tile of y after another. A warpgroup of it, the producer, has the tiles of x
and w, STEP columns deep, brought into a ring of shared-memory stages, ahead of two warpgroups, the consumers, that multiply:

    producer    |load|load|load|load|  (waits for a free stage, runs ahead into the next tile of y)  |load|load|load| …
                  ↓    ↓    ↓    ↓                                                        ↑ free
    stages      [x, w][x, w][x, w][x, w]       full →      wgmma: sums += a · bᵀ,  one step always in flight
                                                             ↓ after depth / STEP steps
    consumers   sums, 16 bits  →  two boxes [64, 64] a warpgroup in shared memory  →  tensor copy to y, clipped at its edges

wgmma takes b, and a where it need not be changed, from shared memory. Both lie along k there, as in x and w.

    dense    a = 64 rows of x from shared memory, b = up to 256 rows of w
    int8     a = 64 rows of w in registers: bytes become 16-bit floats there, while the product before runs; b = rows of x.
             The sums are y's tile transposed, and turned back on the way out (movmatrix).

An int8 weight with a scale a row is exact until the epilogue, which multiplies the sums. With scales a group the weight is
multiplied by its scale, taken as the sum of two bfloat16, and rounded to bfloat16: at most 2^-8 of each weight, errors of either
sign that average out over a sum. float16, whose range such products may leave, has no kernel for groups here.

Where tiles are few, or don't go round, blocks get equally many steps in place of whole tiles ("Stream-K", Osama et al. 2023, as
in ``matmul_stream``):

    tile 0   |   block 0    | block 1 |
    tile 1   | block 1 |   block 2    |       those that share a tile leave float32 sums in memory; the last one to come
    tile 2   |   block 3    | block 4 …       (it counts them) adds these in the order of k, and finishes the tile

The scheme is CUTLASS' warp-specialised persistent one (Thakkar et al. 2023); turning int8 weights in registers into the first
factor is from its mixed-input product.
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.activation import silu
from nbkernels.kernels.elements import conversions, pair_conversions
from nbkernels.kernels.epilogue import activation_function
from nbkernels.kernels.int8 import pair_from_int8x2
from nbkernels.kernels.matmul_stream import block_of, blocks_for, first_unit_of
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.tensor_map import describes, tensor_map
from nbkernels.ptx.bulk import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    prefetch_tensor_map,
    tensor_load_2d,
    tensor_map_address,
    tensor_store_2d,
)
from nbkernels.ptx.bulk import tensor_map as tensor_map_type
from nbkernels.ptx.mbarrier import (
    barrier_arrive,
    barrier_sync,
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbkernels.ptx.wgmma import (
    descriptor_address,
    descriptor_bits,
    fewer_registers,
    more_registers,
    wgmma_commit,
    wgmma_fence,
    wgmma_update,
    wgmma_wait,
    wgmma_words_until,
)
from nbkernels.ptx.widen import leave_widening_constants, widening_constants

# k a stage: a row of 16-bit elements is as wide as the swizzle, 128 bytes
STEP = 64
X_ROW_BYTES = 2 * STEP
K_STEPS = STEP // 16  # products a stage
A_WORDS = 4 * K_STEPS  # of 64 rows of an int8 weight in registers, a lane
TWO_SETS = 2 * A_WORDS
BOX = 64  # rows and columns of a box of y
BOX_BYTES = BOX * BOX * 2
GATED_ROW_BYTES = BOX  # of a box whose columns are halved, two sums an element
WARPGROUP = 128
MERGED = 64  # sums a thread brings at once where it merges a tile's parts
CONSUMERS = 2
THREADS = (CONSUMERS + 1) * WARPGROUP
# Groups whose scales a copy brings: the least, and from multiples of as many on (others end in an error on an H200)
BOX_GROUPS = 4
SCALE_BYTES = 4 * BOX_GROUPS  # of a row of w a stage
PREFETCHERS = ptx.WARP  # threads of the producer, where scales come without it
# registers a thread: 128 · 40 + 256 · 232 are 63 of the 64 K
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# rows of x whose tiles are taken side by side: with as many columns of w they fill the multiprocessors and share L2
BAND_ROWS = 2048
# rows of the second factor of wgmma in a tile: the more, the fewer bytes pass L2 and shared memory for a product
WIDTHS = (256, 192, 128, 64)
FEW_WIDTHS = (32, 64, 128)  # where the weight comes first and there are no more rows
# What ``cycles`` counts with, clocks of a multiprocessor, as an H200 took for 4096×4096 and 6144×4096 at 64 and 512 rows: a stage
# beyond its products; STEP columns of a row of w, widened, and what of it is not hidden behind products; bytes from memory
STEP_CLOCKS = 180
WIDENING, WIDENING_SEEN = {"dense": 0.0, "rows": 3.8, "groups": 4.8}, {"dense": 0.0, "rows": 0.0, "groups": 2.0}
BYTES_A_CLOCK = 16
# a tile: its first stage, and its sums on their way out; of tiles that blocks share, what is left and merged of each part
TILE_CLOCKS, SUM_CLOCKS, SHARE_CLOCKS, SHARED_SUM_CLOCKS = 1500, 0.1, 7500, 0.115
# more tiles a multiprocessor are not shared: neighbouring blocks no longer have neighbouring tiles, whose bytes pass L2 once more
MOST_SHARED = 2
# fewer rows, and fewer small tiles than a share of the multiprocessors, are better served by matmul's other kernels
LEAST_ROWS, LEAST_SHARE = 128, 4
# from here on rows times a weight of so many bytes or more, too
FEW_ROWS, FEW_ROWS_BYTES = 17, 2 * 2**20
MOST_STAGES = 6  # seven were slower: 64 rows times 6144×4096 in 19.8 µs for 17.2
SHARED_BYTES = 227 * 1024  # of a block, on sm_90


def stage_bytes(weight, tile_m, tile_n, scale_boxes=False):
    """x's and w's tile of a stage, and its scales."""
    return tile_m * X_ROW_BYTES + tile_n * (
        STEP * (2 if weight == "dense" else 1) + (SCALE_BYTES if scale_boxes else 0)
    )


def shared_bytes(weight, tile_m, tile_n, stages, scale_boxes=False):
    """The ring, two boxes of y a consumer, two mbarriers a stage; up to 1023 bytes in front, since stages begin at multiples.

    Then 16 bytes: the constants that widen an int8 weight, and a word a consumer.
    """
    ring_bytes = stages * stage_bytes(weight, tile_m, tile_n, scale_boxes)
    return 1024 + ring_bytes + 2 * CONSUMERS * BOX_BYTES + 16 * stages + 16


def boxed_groups(group_size):
    """Whether the groups of a stage lie in one box of scales."""
    return group_size == STEP // 2 or group_size % STEP == 0


def box_rows_of(tile_m):
    """Rows of y a box."""
    return min(BOX, tile_m)


@cuda.jit(device=True, inline="always")
def tile_at(number, row_tiles, column_tiles, band):
    """(row tile, column tile): ``band`` row tiles walk the columns side by side, then the next."""
    which = uint32(number // uint32(column_tiles * band))
    first = uint32(which * band)
    height = min(uint32(row_tiles - first), band)
    inside = uint32(number - uint32(first * column_tiles))
    return uint32(first + uint32(inside % height)), uint32(inside // height)


@cache
def multiply_dense(dtype, blocks, b_rows):
    """multiply(a_tile, b_tile, sums, step, before, warp, lane, words, extra): sums += a · bᵀ of a stage, in flight.

    The stage before is free then: its mbarrier, ``before``, is told. step 0: sums start from zero, and there is none before.
    """
    update = wgmma_update(str(dtype), b_rows)
    bits = descriptor_bits(16, 8 * X_ROW_BYTES, X_ROW_BYTES)
    count = b_rows // 2

    @cuda.jit(device=True, inline="always")
    def multiply(a_tile, b_tile, sums, step, before, warp, lane, words, extra):
        a_bits = uint64(descriptor_address(a_tile) + uint64(bits))
        b_bits = uint64(descriptor_address(b_tile) + uint64(bits))
        more = uint32(1) if step > uint32(0) else uint32(0)
        wgmma_fence()
        for k in range(K_STEPS):
            for block in range(blocks):
                update(
                    sums,
                    block * count,
                    uint64(a_bits + uint64(2 * k + block * 4 * X_ROW_BYTES)),
                    uint64(b_bits + uint64(2 * k)),
                    more if k == 0 else uint32(1),
                )
        wgmma_commit()
        wgmma_wait(1)
        if step > uint32(0) and lane == uint32(0):
            mbarrier_arrive(before)

    return multiply


@cache
def _multiply_int8(dtype, b_rows, groups, own, other):
    """As multiply_dense with a = 64 rows of int8, 64 bytes each under a swizzle of 64 bytes, and b from x.

    Two sets of A_WORDS words take the stages by turns: those from ``own`` on are widened while the products of the stage before
    read those from ``other`` on. extra: (widening_constants, scales, never). scales, of ``groups``: of the lane's rows g and
    g + 8, for k 0 to 31 and then for k 32 to 63, each twice in a word, as bfloat16; then what these lack. never: as
    ``wgmma_words_until``.
    """
    update = wgmma_update(str(dtype), b_rows, a="registers")
    bits = descriptor_bits(16, 8 * X_ROW_BYTES, X_ROW_BYTES)
    parts, together = pair_from_int8x2(dtype)
    keep = ptx.hold(A_WORDS, "r")

    @cuda.jit(device=True, inline="always")
    def multiply(a_tile, b_tile, sums, step, before, warp, lane, words, extra):
        constants, scales, never = extra
        b_bits = uint64(descriptor_address(b_tile) + uint64(bits))
        more = uint32(1) if step > uint32(0) else uint32(0)
        # a fragment's lane has two neighbours in k, and the two that are 8 further, of rows g and g + 8
        g = uint32(lane >> uint32(2))
        row = uint32(uint32(warp << uint32(4)) + g)
        turned = uint32(uint32(uint32(g >> uint32(1)) & uint32(3)) << uint32(4))
        start = uint32(a_tile + uint32(row << uint32(6)) + uint32(uint32(lane & uint32(3)) << uint32(1)))
        raw = cuda.local.array(A_WORDS, uint32)
        for k in range(K_STEPS):
            for i in range(4):
                place = uint32(start + uint32(uint32(16 * k) ^ turned) + uint32(8 * (i // 2) + 8 * STEP * (i % 2)))
                raw[4 * k + i] = uint32(ptx.ld_shared_u16(place))
        for at in range(A_WORDS):
            first, second = parts(raw[at], constants[0], constants[1])
            word = together(first, second)
            if groups:
                scale = at // 8 * 2 + at % 2
                word = ptx.fma_bf16x2(word, scales[scale], ptx.fma_bf16x2(word, scales[4 + scale], uint32(0x80008000)))
            words[own + at] = word
        keep(words, own)
        wgmma_fence()
        for k in range(K_STEPS):
            update(sums, 0, words, own + 4 * k, uint64(b_bits + uint64(2 * k)), more if k == 0 else uint32(1))
        wgmma_commit()
        wgmma_wait(1)
        for k in range(K_STEPS):
            wgmma_words_until(words, other + 4 * k, never)
        if step > uint32(0) and lane == uint32(0):
            mbarrier_arrive(before)

    return multiply


@cache
def _fill_dense(dtype, epilogue):
    """fill(box, sums, at, row, column, warp, lane, call): 64 × 64 sums of a warpgroup -> a box of y in shared memory.

    The box begins inside y. For what lies beyond y's edges, and is not written, the last bias and residual are read.
    """
    unpack, pack = pair_conversions(dtype)
    activate = activation_function(epilogue)
    has_bias, has_residual = epilogue.bias, epilogue.residual

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, rows, columns, _, _, bias, residual, stride = call
        quad = uint32(uint32(lane & uint32(3)) << uint32(1))
        inside = uint32(uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
        added = cuda.local.array(16, uint32)
        if has_residual:
            for j in range(8):
                for h in range(2):
                    m, n = uint32(row + inside + uint32(8 * h)), uint32(column + quad + uint32(8 * j))
                    at_most = int64(min(m, uint32(rows - uint32(1)))) * stride + int64(
                        min(n, uint32(columns - uint32(2)))
                    )
                    added[2 * j + h] = ptx.ld_global(ptx.address(residual, at_most))
        for j in range(8):
            biases = (float32(0.0), float32(0.0))
            if has_bias:
                n = min(uint32(column + quad + uint32(8 * j)), uint32(columns - uint32(2)))
                biases = unpack(ptx.ld_global_nc(ptx.address(bias, int64(n))))
            for h in range(2):
                first = sums[at + 4 * j + 2 * h]
                second = sums[at + 4 * j + 2 * h + 1]
                if has_bias:
                    first += biases[0]
                    second += biases[1]
                first = activate(first)
                second = activate(second)
                if has_residual:
                    pair = unpack(added[2 * j + h])
                    first += pair[0]
                    second += pair[1]
                chunk = uint32(uint32(uint32(j) ^ uint32(inside & uint32(7))) << uint32(4))
                place = uint32(
                    box + uint32(uint32(inside + uint32(8 * h)) << uint32(7)) + chunk + uint32(quad << uint32(1))
                )
                ptx.st_shared(place, pack(first, second))

    return fill


@cache
def _fill_transposed(dtype, epilogue, box_rows):
    """As _fill_dense, box_rows × 64, where the sums' rows are y's columns, along which movmatrix lays a lane's pair."""
    unpack, pack = pair_conversions(dtype)
    from_storage, _ = conversions(dtype)
    activate = activation_function(epilogue)
    has_scale, has_bias, has_residual = epilogue.row_scale, epilogue.bias, epilogue.residual
    residual_words = box_rows // 4

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, rows, columns, scales, scale_stride, bias, residual, stride = call
        quad = uint32(uint32(lane & uint32(3)) << uint32(1))
        g = uint32(lane >> uint32(2))
        first_column = uint32(column + uint32(warp << uint32(4)))
        added = cuda.local.array(residual_words, uint32)
        if has_residual:
            for j in range(box_rows // 8):
                for h in range(2):
                    m, n = uint32(row + g + uint32(8 * j)), uint32(first_column + quad + uint32(8 * h))
                    at_most = int64(min(m, uint32(rows - uint32(1)))) * stride + int64(
                        min(n, uint32(columns - uint32(2)))
                    )
                    added[2 * j + h] = ptx.ld_global(ptx.address(residual, at_most))
        for h in range(2):
            n = int64(min(uint32(first_column + g + uint32(8 * h)), uint32(columns - uint32(1))))
            scale = float32(1.0)
            added_bias = float32(0.0)
            if has_scale:
                scale = scales[n * scale_stride]
            if has_bias:
                added_bias = from_storage(bias[n])
            for j in range(box_rows // 8):
                first = sums[at + 4 * j + 2 * h]
                second = sums[at + 4 * j + 2 * h + 1]
                if has_scale:
                    first *= scale
                    second *= scale
                if has_bias:
                    first += added_bias
                    second += added_bias
                first = activate(first)
                second = activate(second)
                if has_residual:
                    pair = unpack(ptx.movmatrix_trans(added[2 * j + h]))
                    first += pair[0]
                    second += pair[1]
                chunk = uint32(uint32(uint32(uint32(warp << uint32(1)) + uint32(h)) ^ g) << uint32(4))
                place = uint32(box + uint32(uint32(g + uint32(8 * j)) << uint32(7)) + chunk + uint32(quad << uint32(1)))
                ptx.st_shared(place, ptx.movmatrix_trans(pack(first, second)))

    return fill


@cuda.jit(device=True, inline="always")
def gated_place(box, row, element):
    """Where an element of a gated box lies: rows of 64 bytes, their four pieces exchanged (the swizzle of 64 bytes)."""
    chunk = uint32(uint32(element >> uint32(3)) ^ uint32(uint32(row >> uint32(1)) & uint32(3)))
    inside = uint32(uint32(element & uint32(7)) << uint32(1))
    return uint32(box + uint32(row * uint32(GATED_ROW_BYTES)) + uint32(chunk << uint32(4)) + inside)


@cache
def _fill_dense_gated(dtype, epilogue):
    """As _fill_dense where two columns of sums, which a lane has, make one of y: a box of 64 × 32."""
    unpack, _ = pair_conversions(dtype)
    _, to_storage = conversions(dtype)
    has_bias = epilogue.bias

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, _, columns, _, _, bias, _, _ = call
        quad = uint32(lane & uint32(3))
        inside = uint32(uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
        for j in range(8):
            biases = (float32(0.0), float32(0.0))
            if has_bias:
                n = min(uint32(column + uint32(quad << uint32(1)) + uint32(8 * j)), uint32(columns - uint32(2)))
                biases = unpack(ptx.ld_global_nc(ptx.address(bias, int64(n))))
            for h in range(2):
                gate = sums[at + 4 * j + 2 * h]
                up = sums[at + 4 * j + 2 * h + 1]
                if has_bias:
                    gate += biases[0]
                    up += biases[1]
                place = gated_place(box, uint32(inside + uint32(8 * h)), uint32(quad + uint32(4 * j)))
                ptx.st_shared_u16(place, to_storage(float32(silu(gate) * up)))

    return fill


@cache
def _fill_transposed_gated(dtype, epilogue, box_rows):
    """As _fill_transposed where two rows of sums, which neighbouring lanes have, make one column of y: a box of box_rows × 32.

    The lane of the gate finishes the first of their two rows of y, that of the up the second; nothing is left to turn.
    """
    from_storage, to_storage = conversions(dtype)
    has_scale, has_bias = epilogue.row_scale, epilogue.bias

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, _, columns, scales, scale_stride, bias, _, _ = call
        g = uint32(lane >> uint32(2))
        which = uint32(g & uint32(1))
        is_up = which == uint32(1)
        first_column = uint32(column + uint32(warp << uint32(4)))
        own_row = uint32(uint32(uint32(lane & uint32(3)) << uint32(1)) + which)
        for h in range(2):
            n = int64(min(uint32(first_column + g + uint32(8 * h)), uint32(columns - uint32(1))))
            scale = float32(1.0)
            added_bias = float32(0.0)
            if has_scale:
                scale = scales[n * scale_stride]
            if has_bias:
                added_bias = from_storage(bias[n])
            element = uint32(uint32(warp << uint32(3)) + uint32(4 * h) + uint32(g >> uint32(1)))
            for j in range(box_rows // 8):
                first = sums[at + 4 * j + 2 * h]
                second = sums[at + 4 * j + 2 * h + 1]
                if has_scale:
                    first *= scale
                    second *= scale
                if has_bias:
                    first += added_bias
                    second += added_bias
                other = ptx.shfl_bfly(first if is_up else second, uint32(4))
                gate = other if is_up else first
                up = second if is_up else other
                place = gated_place(box, uint32(own_row + uint32(8 * j)), element)
                ptx.st_shared_u16(place, to_storage(float32(silu(gate) * up)))

    return fill


def matmul_wgmma_kernel(
    dtype, weight, group_size, tile_m, tile_n, stages, ping_pong, weight_first, shared, scale_boxes, epilogue
):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, a scale group_size, a multiple of 32).

    tile_m × tile_n: a tile of y, of a block; with ping_pong of a warpgroup: then one multiplies while the other stores. grid: any
    number of blocks. Columns are even in number, and pairs of them 4-byte aligned in bias and residual.
    weight_first: the weight is wgmma's first factor, as int8 always is, and x the second. shared: blocks have equally many steps,
    and may share a tile. scale_boxes: groups' scales come by copies too, which a tensor map must be able to describe.
    """
    dense, groups = weight == "dense", weight == "groups"
    assert dense or str(dtype) == "bfloat16" or not groups
    assert (weight_first or dense) and not (ping_pong and shared) and (groups or not scale_boxes)
    fetched = groups and not scale_boxes
    two_groups = group_size < STEP  # in a stage, or one: a box has whole stages' groups
    assert not scale_boxes or boxed_groups(group_size)
    # the two factors of wgmma: an int8 one is turned into 16-bit floats in registers
    a_rows, b_rows = (tile_n, tile_m) if weight_first else (tile_m, tile_n)
    a_row_bytes = X_ROW_BYTES if dense else STEP
    a_bytes, b_bytes = a_rows * a_row_bytes, b_rows * X_ROW_BYTES
    both = stage_bytes(weight, tile_m, tile_n, scale_boxes)
    own_rows = a_rows if ping_pong else a_rows // CONSUMERS  # of a, a consumer's
    blocks = own_rows // 64
    count = b_rows // 2
    values = blocks * count
    box_rows, parts = box_rows_of(tile_m), max(b_rows // BOX, 1)
    teams = 1 if ping_pong else CONSUMERS  # consumers of a stage
    assert blocks == 1 or dense
    if dense:
        multiply = multiply_other = multiply_dense(dtype, blocks, b_rows)
    else:
        multiply = _multiply_int8(dtype, b_rows, groups, 0, A_WORDS)
        multiply_other = _multiply_int8(dtype, b_rows, groups, A_WORDS, 0)
    scale_rows = 2  # a lane
    scales_held = 2 * scale_rows
    scale_words = 2 * scales_held
    gated = epilogue.gated
    if weight_first:
        fill = (_fill_transposed_gated if gated else _fill_transposed)(dtype, epilogue, box_rows)
    else:
        fill = (_fill_dense_gated if gated else _fill_dense)(dtype, epilogue)
    keep = ptx.hold(values)
    free = 8 * stages
    constants_at, flag_at = 16 * stages, 16 * stages + 8  # behind ``full``
    store_barrier, turn_barrier = 1, 1 + CONSUMERS
    slot_values = CONSUMERS * WARPGROUP * values
    parts_in_flight = max(1, MERGED // values)
    parts_values = parts_in_flight * values

    @cuda.jit(device=True, inline="always")
    def put_scale(scale, into, i):
        """A scale as ``_multiply_int8`` takes it."""
        rounded = ptx.bf16x2_from_floats(scale, scale)
        rest = scale - ptx.float_from_bits(uint32(rounded << uint32(16)))
        into[i] = rounded
        into[scales_held + i] = ptx.bf16x2_from_floats(rest, rest)

    @cuda.jit(device=True, inline="always")
    def read_scales(stage_scales, row, k, into):
        """The scales of the lane's rows, of which ``row`` is the first, for both halves of the stage at k, from the stage."""
        group = uint32(uint32(k // uint32(group_size)) & uint32(BOX_GROUPS - 1))
        for i in range(scale_rows):
            place = uint32(stage_scales + uint32(row * uint32(SCALE_BYTES)) + uint32(group << uint32(2)))
            place = uint32(place + uint32(8 * SCALE_BYTES * i))
            if two_groups:
                found = ptx.ld_shared_v2(place)
                put_scale(ptx.float_from_bits(found[0]), into, i)
                put_scale(ptx.float_from_bits(found[1]), into, scale_rows + i)
            else:
                found_one = ptx.ld_shared_f32(place)
                put_scale(found_one, into, i)
                put_scale(found_one, into, scale_rows + i)

    @cuda.jit(device=True, inline="always")
    def load_scales(own, k, depth, into):
        """The scales of the lane's rows, which begin at the addresses ``own``, for both halves of the stage at k."""
        for half in range(2):
            group = uint32(min(uint32(k + uint32(STEP // 2 * half)), uint32(depth - uint32(1))) // uint32(group_size))
            for i in range(scale_rows):
                into[scale_rows * half + i] = ptx.ld_global_nc_f32(own[i] + uint64(uint32(group << uint32(2))))

    @cuda.jit(device=True, inline="always")
    def prefetch_scales(scales, scale_stride, column, k, columns, lane):
        """The scales of a stage on their way too: the consumers ask for them only a step before they need them."""
        for i in range(tile_n // ptx.WARP):
            n = min(uint32(column + uint32(ptx.WARP * i) + lane), uint32(columns - uint32(1)))
            ptx.prefetch_l2(ptx.address(scales, int64(n) * scale_stride + int64(uint32(k // uint32(group_size)))))

    @cuda.jit(device=True, inline="always")
    def place_of(slot, group, thread):
        """The first of a thread's sums in a slot of ``partial``: four at a time, the warpgroup's side by side."""
        own = uint32(
            uint32(group * uint32(WARPGROUP * values)) + uint32(uint32(thread & uint32(WARPGROUP - 1)) << uint32(2))
        )
        return uint32(uint32(slot * uint32(slot_values)) + own)

    @cuda.jit(device=True, inline="always")
    def leave(partial, at, sums):
        for i in range(values // 4):
            to = ptx.address(partial, uint32(at + uint32(4 * WARPGROUP * i)))
            ptx.st_global_v4_f32(to, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3])

    @cuda.jit(device=True, inline="always")
    def merge(partial, group, thread, first_block, last_block, sums):
        """sums of a tile from those that the blocks which share it have left, in the order of k."""
        for i in range(values):
            sums[i] = float32(0.0)
        part = first_block
        found = cuda.local.array(parts_values, float32)
        while part <= last_block:
            for p in range(parts_in_flight):
                from_block = min(uint32(part + uint32(p)), last_block)
                # the first block begins the tile: its second slot
                slot = uint32(from_block << uint32(1))
                if from_block == first_block:
                    slot = uint32(slot + uint32(1))
                at = place_of(slot, group, thread)
                for i in range(values // 4):
                    four = ptx.ld_global_v4_f32(ptx.address(partial, uint32(at + uint32(4 * WARPGROUP * i))))
                    for j in range(4):
                        if parts_in_flight > 1:
                            found[values * p + 4 * i + j] = four[j]
                        else:
                            sums[4 * i + j] += four[j]
            for p in range(parts_in_flight if parts_in_flight > 1 else 0):
                if uint32(part + uint32(p)) <= last_block:
                    for i in range(values):
                        sums[i] += found[values * p + i]
            part = uint32(part + uint32(parts_in_flight))

    def boxes_from(number):
        """Code that stores a consumer's boxes from ``number`` on. One function each: a loop as long as this is not unrolled."""
        if number == blocks * parts:

            @cuda.jit(device=True, inline="always")
            def store(sums, boxes, corner, team, call):
                pass

            return store
        part, block = number // blocks, number % blocks
        others = boxes_from(number + 1)

        @cuda.jit(device=True, inline="always")
        def store(sums, boxes, corner, team, call):
            """boxes: (the one to fill, the other's distance); corner: the warpgroup's first row and column in y."""
            box = uint32(boxes[0] + boxes[1]) if number % 2 else boxes[0]
            group, warp, lane, leader = team
            row = uint32(corner[0] + uint32(BOX * (part if weight_first else block)))
            column = uint32(corner[1] + uint32(BOX * (block if weight_first else part)))
            inside = (
                row < call[1] and column < call[2]
            )  # the others' residual is not read: it may be out, and being written
            if inside:
                fill(box, sums, block * count + 32 * part, row, column, warp, lane, call)
                fence_proxy_async_shared()
            if leader:
                bulk_wait_read(0)  # the other box is free again, for those behind the barrier
            barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))
            if leader and inside:
                out_column = uint32(column >> uint32(1)) if gated else column
                tensor_store_2d(call[0], out_column, row, box)
                bulk_commit()
            others(sums, boxes, corner, team, call)

        return store

    store_boxes = boxes_from(0)

    @kernel(launch_bounds=(THREADS, 1))  # setmaxnreg needs a known register count at entry
    def matmul_wgmma(
        x_map: tensor_map_type,
        weight_map: tensor_map_type,
        scale_map: tensor_map_type,
        out_map: tensor_map_type,
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        partial: ptx.pointer("float32"),  # [2 · blocks, consumers, values / 4, 128, 4]
        counters: ptx.pointer("uint32"),  # [tiles, consumers]
        rows: uint32,
        columns: uint32,
        depth: uint32,
        scale_stride: int64,
        residual_stride: int64,
        band: uint32,
        share: uint32,
        extra: uint32,
    ):
        thread = uint32(cuda.threadIdx.x)
        # the warpgroup's number, in a form in which the compiler sees that a warp shares it
        group = ptx.shfl_idx_u32(uint32(thread // uint32(WARPGROUP)), uint32(0))
        ring = uint32(uint32(ptx.shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00))
        boxes = uint32(ring + uint32(stages * both))
        full = uint32(boxes + uint32(2 * CONSUMERS * BOX_BYTES))
        if thread == uint32(0):
            for s in range(stages):
                mbarrier_init(uint32(full + uint32(8 * s)), uint32(1))
                mbarrier_init(uint32(full + uint32(free + 8 * s)), uint32(4 * teams))
            fence_mbarrier_init()
            if not dense:
                leave_widening_constants(uint32(full + uint32(constants_at)))
        cuda.syncthreads()
        steps = uint32(uint32(depth + uint32(STEP - 1)) // uint32(STEP))
        row_tiles = uint32(uint32(rows + uint32(tile_m - 1)) // uint32(tile_m))
        column_tiles = uint32(uint32(columns + uint32(tile_n - 1)) // uint32(tile_n))
        tiles = uint32(row_tiles * column_tiles)
        stride = uint32(cuda.gridDim.x)
        tile = uint32(cuda.blockIdx.x)
        # of the block's first tile; and the end of its steps, tile by tile
        first_step = uint32(0)
        end = uint32(0)
        if shared:
            unit = first_unit_of(tile, share, extra)
            end = first_unit_of(uint32(tile + uint32(1)), share, extra)
            tile = uint32(unit // steps)
            first_step = uint32(unit - uint32(tile * steps))
            tiles = uint32(uint32(end + uint32(steps - uint32(1))) // steps)
            stride = uint32(1)
        stage = uint32(0)
        parity = uint32(0)

        if group == uint32(CONSUMERS):
            fewer_registers(PRODUCER_REGISTERS)
            first = thread == uint32(CONSUMERS * WARPGROUP)
            if thread < uint32(CONSUMERS * WARPGROUP + PREFETCHERS) if fetched else first:
                x_at, weight_at = tensor_map_address(x_map), tensor_map_address(weight_map)
                prefetch_tensor_map(x_at)
                prefetch_tensor_map(weight_at)
                prefetch_tensor_map(tensor_map_address(out_map))
                while tile < tiles:
                    row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, band)
                    row = uint32(row_tile * uint32(tile_m))
                    column = uint32(column_tile * uint32(tile_n))
                    k = uint32(0)
                    k_end = depth
                    if shared:
                        k = uint32(first_step * uint32(STEP))
                        first_step = uint32(0)
                        k_end = min(depth, uint32(min(steps, uint32(end - uint32(tile * steps))) * uint32(STEP)))
                    while k < k_end:
                        barrier = uint32(full + uint32(stage << uint32(3)))
                        mbarrier_wait(uint32(barrier + uint32(free)), uint32(parity ^ uint32(1)))
                        if first:
                            mbarrier_expect(barrier, uint32(both))
                            to = uint32(ring + uint32(stage * uint32(both)))
                            x_to = uint32(to + uint32(a_bytes)) if weight_first else to
                            weight_to = to if weight_first else uint32(to + uint32(a_bytes))
                            tensor_load_2d(x_to, x_at, k, row, barrier)
                            tensor_load_2d(weight_to, weight_at, k, column, barrier)
                            if scale_boxes:
                                scales_to = uint32(to + uint32(a_bytes + b_bytes))
                                group_of_k = uint32(
                                    uint32(k // uint32(group_size)) & uint32(0xFFFFFFFF - BOX_GROUPS + 1)
                                )
                                tensor_load_2d(scales_to, tensor_map_address(scale_map), group_of_k, column, barrier)
                        if fetched:
                            prefetch_scales(scales, scale_stride, column, k, columns, ptx.lane_id())
                            ptx.warp_sync()
                        k = uint32(k + uint32(STEP))
                        stage = uint32(stage + uint32(1))
                        if stage == uint32(stages):
                            stage = uint32(0)
                            parity = uint32(parity ^ uint32(1))
                    tile = uint32(tile + stride)
        else:
            more_registers(CONSUMER_REGISTERS)
            sums = cuda.local.array(values, float32)
            for i in range(values):
                sums[i] = float32(0.0)
            words = cuda.local.array(TWO_SETS, uint32)
            for i in range(TWO_SETS):
                words[i] = uint32(0)
            step_scales = cuda.local.array(scale_words, uint32)
            next_scales = cuda.local.array(scales_held, float32)
            own_scales = cuda.local.array(scale_rows, uint64)
            warp = uint32(uint32(thread >> uint32(5)) & uint32(3))
            lane = ptx.lane_id()
            leader = uint32(thread & uint32(WARPGROUP - 1)) == uint32(0)
            own_a = uint32(0)
            if not ping_pong:
                own_a = uint32(group * uint32(own_rows))
            box = uint32(boxes + uint32(group * uint32(2 * BOX_BYTES)))
            other_box = uint32(BOX_BYTES)
            call = (
                tensor_map_address(out_map),
                rows,
                columns,
                scales,
                scale_stride,
                bias,
                residual,
                residual_stride,
            )
            never = uint32(depth >> uint32(31))  # 0: ``serves``
            widening = (uint32(0), uint32(0))
            if not dense:
                widening = widening_constants(uint32(full + uint32(constants_at)))
            if ping_pong and group == uint32(1):
                # the first consumer's turn
                barrier_arrive(uint32(turn_barrier), uint32(CONSUMERS * WARPGROUP))
                tile = uint32(tile + stride)
                stage = uint32(steps % uint32(stages))
                parity = uint32(uint32(steps // uint32(stages)) & uint32(1))
            while tile < tiles:
                row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, band)
                row = uint32(row_tile * uint32(tile_m))
                column = uint32(column_tile * uint32(tile_n))
                first_k = uint32(0)
                own_steps = steps
                begins = True
                if shared:
                    begins = first_step == uint32(0)
                    first_k = uint32(first_step * uint32(STEP))
                    own_steps = uint32(min(steps, uint32(end - uint32(tile * steps))) - first_step)
                    first_step = uint32(0)
                if ping_pong:
                    barrier_sync(uint32(uint32(turn_barrier) + group), uint32(CONSUMERS * WARPGROUP))
                if fetched:
                    n = uint32(column + own_a + uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
                    for i in range(scale_rows):
                        own = uint32(n + uint32(64 * (i // 2) + 8 * (i % 2)))
                        own = min(own, uint32(columns - uint32(1)))
                        own_scales[i] = ptx.address(scales, int64(own) * scale_stride)
                    load_scales(own_scales, first_k, depth, next_scales)
                keep(sums, 0)
                step = uint32(0)
                before = uint32(0)
                while step < own_steps:
                    barrier = uint32(full + uint32(stage << uint32(3)))
                    mbarrier_wait(barrier, parity)
                    at = uint32(ring + uint32(stage * uint32(both)))
                    if scale_boxes:
                        own_row = uint32(own_a + uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
                        k = uint32(first_k + uint32(step * uint32(STEP)))
                        read_scales(uint32(at + uint32(a_bytes + b_bytes)), own_row, k, step_scales)
                    if fetched:
                        for i in range(scales_held):
                            put_scale(next_scales[i], step_scales, i)
                        following = uint32(first_k + uint32(uint32(step + uint32(1)) * uint32(STEP)))
                        load_scales(own_scales, following, depth, next_scales)
                    multiply(
                        uint32(at + uint32(own_a * uint32(a_row_bytes))),
                        uint32(at + uint32(a_bytes)),
                        sums,
                        step,
                        before,
                        warp,
                        lane,
                        words,
                        (widening, step_scales, never),
                    )
                    before = uint32(barrier + uint32(free))
                    step = uint32(step + uint32(1))
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))
                    if not dense and step < own_steps:
                        barrier = uint32(full + uint32(stage << uint32(3)))
                        mbarrier_wait(barrier, parity)
                        at = uint32(ring + uint32(stage * uint32(both)))
                        if scale_boxes:
                            own_row = uint32(own_a + uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
                            k = uint32(first_k + uint32(step * uint32(STEP)))
                            read_scales(uint32(at + uint32(a_bytes + b_bytes)), own_row, k, step_scales)
                        if fetched:
                            for i in range(scales_held):
                                put_scale(next_scales[i], step_scales, i)
                            following = uint32(first_k + uint32(uint32(step + uint32(1)) * uint32(STEP)))
                            load_scales(own_scales, following, depth, next_scales)
                        multiply_other(
                            uint32(at + uint32(own_a * uint32(a_row_bytes))),
                            uint32(at + uint32(a_bytes)),
                            sums,
                            step,
                            before,
                            warp,
                            lane,
                            words,
                            (widening, step_scales, never),
                        )
                        before = uint32(barrier + uint32(free))
                        step = uint32(step + uint32(1))
                        stage = uint32(stage + uint32(1))
                        if stage == uint32(stages):
                            stage = uint32(0)
                            parity = uint32(parity ^ uint32(1))
                if ping_pong and uint32(tile + stride) < tiles:
                    other = uint32(uint32(turn_barrier) + uint32(group ^ uint32(1)))
                    barrier_arrive(other, uint32(CONSUMERS * WARPGROUP))
                wgmma_wait(0)
                keep(sums, 0)
                if not dense:
                    for k in range(2 * K_STEPS):
                        wgmma_words_until(words, 4 * k, never)
                if lane == uint32(0):
                    mbarrier_arrive(before)

                done = True
                if shared and own_steps < steps:
                    first_unit = uint32(tile * steps)
                    first_block = block_of(first_unit, share, extra)
                    last_block = block_of(uint32(first_unit + uint32(steps - uint32(1))), share, extra)
                    slot = uint32(cuda.blockIdx.x) << uint32(1)
                    leave(partial, place_of(uint32(slot + uint32(begins)), group, thread), sums)
                    flag = uint32(full + uint32(flag_at) + uint32(group << uint32(2)))
                    barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))
                    if leader:
                        counter = ptx.address(counters, int64(uint32(tile * uint32(CONSUMERS)) + group))
                        # it orders what the warpgroup has written, and what it reads after the next barrier
                        came = uint32(ptx.atomic_add(counter, uint32(1)))
                        if came == uint32(last_block - first_block):
                            ptx.st_global(counter, uint32(0))  # for the next launch
                        ptx.st_shared(flag, came)
                    barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))
                    done = ptx.ld_shared(flag) == uint32(last_block - first_block)
                    if done:
                        merge(partial, group, thread, first_block, last_block, sums)
                if done:
                    corner = (row, uint32(column + own_a)) if weight_first else (uint32(row + own_a), column)
                    store_boxes(sums, (box, other_box), corner, (group, warp, lane, leader), call)
                    if blocks * parts % 2:
                        box = uint32(box + other_box)
                        other_box = uint32(uint32(0) - other_box)
                tile = uint32(tile + stride)
                if ping_pong:
                    tile = uint32(tile + stride)
                    passed = uint32(stage + steps)
                    stage = uint32(passed % uint32(stages))
                    parity = uint32(parity ^ uint32(uint32(passed // uint32(stages)) & uint32(1)))
            if leader:
                bulk_wait(0)

    return matmul_wgmma


def tiles(rows, columns, tile_m, tile_n):
    """Tiles of y."""
    return -(-rows // tile_m) * -(-columns // tile_n)


def serves(x, weight, kind, group_size, pairs, out, device, plan_rows=None):
    """Whether the kernel can take a call, and is the fastest: enough rows and tiles. pairs: of matmul's Alignment."""
    rows, columns = max(x.shape[0], plan_rows or 0), weight.shape[0]
    many = rows >= LEAST_ROWS and LEAST_SHARE * tiles(rows, columns, 64 * CONSUMERS, WIDTHS[-1]) >= device.sm_count
    large = rows >= FEW_ROWS and columns * x.shape[1] * weight.itemsize >= FEW_ROWS_BYTES
    return (
        device.arch == "sm_90a"
        and pairs
        and (many or large)
        and x.itemsize == 2
        and (kind != "groups" or (str(x.dtype) == "bfloat16" and group_size % (STEP // 2) == 0))
        and max(rows, columns, x.shape[1]) < 1 << 31
        and all(map(describes, (x, weight, out)))
    )


def shapes(rows, weight):
    """(tile_m, tile_n, weight_first, shared) among which ``plan`` chooses."""
    pair = 64 * CONSUMERS
    if weight == "dense":
        widths = FEW_WIDTHS if rows <= pair else WIDTHS
        first = rows <= pair
    else:
        widths, first = [w for w in (*FEW_WIDTHS, 192, 256) if w == FEW_WIDTHS[0] or w < 2 * rows], True
    for width in widths:
        for shared in (False, True):
            yield (width, pair, True, shared) if first else (pair, width, False, shared)


def cycles(rows, columns, depth, weight, shape, sm_count):
    """What a product takes, about: clocks of the multiprocessor that has most to do."""
    tile_m, tile_n, _, shared = shape
    number, steps = tiles(rows, columns, tile_m, tile_n), -(-depth // STEP)
    weight_bytes = tile_n * STEP * (2 if weight == "dense" else 1)
    # products, widening and copies run beside each other
    brought = (weight_bytes / -(-rows // tile_m)) / BYTES_A_CLOCK
    products = tile_m * tile_n / 32 + STEP_CLOCKS + tile_n * WIDENING_SEEN[weight]
    step = max(products, tile_n * WIDENING[weight], brought)
    if shared:
        if number > MOST_SHARED * sm_count:
            return float("inf")
        own = -(-number * steps // blocks_for(number, steps, sm_count))
        parts = 1 if steps % own == 0 else -(-own // steps) + 1
        return own * step + parts * (TILE_CLOCKS + SHARE_CLOCKS + tile_m * tile_n * SHARED_SUM_CLOCKS)
    turns = -(-number // sm_count)
    return turns * (steps * step + TILE_CLOCKS + tile_m * tile_n * SUM_CLOCKS)


@lru_cache(maxsize=4096)
def plan(rows, columns, depth, dtype, weight, group_size, scale_boxes, epilogue, sm_count, fixed=False):
    """rows, columns, depth > 0; weight, group_size and scale_boxes as ``matmul_wgmma_kernel``.

    fixed: for fewer rows too, whose bits are to be the same: shared tiles are cut alike only where all rows are in one.
    """
    suited = (s for s in shapes(rows, weight) if not (fixed and s[3] and s[0] < rows))
    shape = min(suited, key=lambda shape: cycles(rows, columns, depth, weight, shape, sm_count))
    tile_m, tile_n, weight_first, shared = shape
    stages = most_stages(weight, tile_m, tile_n, scale_boxes)
    constants = (dtype, weight, group_size, tile_m, tile_n, stages, False, weight_first, shared, scale_boxes, epilogue)
    return plan_of(rows, columns, depth, constants, sm_count)


def most_stages(weight, tile_m, tile_n, scale_boxes, most=MOST_STAGES):
    """Of the ring, as far as there is room."""
    stages = most
    while shared_bytes(weight, tile_m, tile_n, stages, scale_boxes) > SHARED_BYTES:
        stages -= 1
    return stages


def plan_of(rows, columns, depth, constants, sm_count):
    """The Plan of given constants."""
    _, weight, _, tile_m, tile_n, stages, _, _, shared, scale_boxes, _ = constants
    number = tiles(rows, columns, tile_m, tile_n)
    blocks = blocks_for(number, -(-depth // STEP), sm_count) if shared else min(number, sm_count)
    shared_size = shared_bytes(weight, tile_m, tile_n, stages, scale_boxes)
    return Plan(matmul_wgmma_kernel, constants, (blocks, 1, 1), (THREADS, 1, 1), shared_size)


def run(x, weight, scales, kind, group_size, bias, residual, epilogue, out, device, stream, plan_rows=None):
    """As ``matmul.multiply``, for calls that this kernel ``serves``."""
    rows, (columns, depth) = x.shape[0], weight.shape
    scale_boxes = kind == "groups" and boxed_groups(group_size) and describes(scales)
    of_rows, fixed = max(rows, plan_rows or 0), plan_rows is not None
    chosen = plan(of_rows, columns, depth, x.dtype, kind, group_size, scale_boxes, epilogue, device.sm_count, fixed)
    if fixed:
        chosen = plan_of(rows, columns, depth, chosen.constants, device.sm_count)
    launch_plan(chosen, x, weight, scales, bias, residual, out, device, stream)


def launch_plan(chosen, x, weight, scales, bias, residual, out, device, stream=None, band_rows=BAND_ROWS):
    """Launch what ``plan`` chose; arrays as ``matmul.multiply``."""
    _, kind, _, tile_m, tile_n, _, _, _, shared, scale_boxes, epilogue = chosen.constants
    rows, (columns, depth) = x.shape[0], weight.shape
    box_rows = box_rows_of(tile_m)
    out_box = ((box_rows, BOX // 2), GATED_ROW_BYTES) if epilogue.gated else ((box_rows, BOX), 128)
    number, steps, blocks = tiles(rows, columns, tile_m, tile_n), -(-depth // STEP), chosen.grid[0]
    share, extra = divmod(number * steps, blocks)
    partial = counters = None
    if shared and (extra or share % steps):
        partial = memory.empty((2 * blocks * tile_m * tile_n,), np.dtype(np.float32), stream)
        counters = memory.counters(CONSUMERS * number, stream)
    weight_map = tensor_map(weight, (tile_n, STEP), 128 if kind == "dense" else 64, device=device)
    arguments = (
        tensor_map(x, (tile_m, STEP), device=device),
        weight_map,
        tensor_map(scales, (tile_n, BOX_GROUPS), 0, device=device) if scale_boxes else weight_map,
        tensor_map(out, *out_box, device=device),
        0 if scales is None else scales.pointer,
        0 if bias is None else bias.pointer,
        0 if residual is None else residual.pointer,
        0 if partial is None else partial.pointer,
        0 if counters is None else counters.pointer,
        rows,
        columns,
        depth,
        0 if scales is None else scales.strides[0],
        0 if residual is None else residual.strides[0],
        max(band_rows // tile_m, 1),
        share,
        extra,
    )
    launch(chosen, arguments, device, stream)
