"""A split of a KV cache for a few query rows on the tensor cores: 16-bit or int8 keys and values at 16-byte addresses.

A warp walks keys of its own, STEP at a time, and has the copies of its next steps under way in a ring of its own in shared
memory, so that warps meet at the end alone:

    split of 512 keys:   |w0 |w1 |w2 |w3 |w0 |w1 | …        a step: 4 KB of K and 4 KB of V, 16 or 32 keys
    ring of a warp:      | step i: products | i + 1: on its way | i + 2: on its way |

With lane = 4 · g + t, in the terms of ``ptx.mma``: scoresᵀ = K qᵀ has keys g and g + 8 of a tile of 16 and query rows 2t, 2t + 1
in a lane; outᵀ = Vᵀ weightsᵀ has two elements of the head and the same query rows, so the softmax's factors stay in their lanes.
A row of keys or values in shared memory is an odd number of 16-byte pieces, so that ``ldmatrix`` finds eight rows in eight
different banks.

int8 keys and values become float16 whatever q is: byte + 128 as the bits of a float16 below its smallest normal number is that
integer in units of 2^-24, which costs three instructions for four bytes; 128 times the sum of q's elements is what scores begin
at, and 128 times the weights is subtracted by a product with a constant. A row of bfloat16 q is scaled by a power of two for
that, whereby elements below 2^-28 of its largest one lose digits, and the sum of products none that float32 keeps. A key's scale
is a factor of its score, a value's of its weight, and the softmax's reference is the largest weight times scale so that float16
holds the product.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.decode_merge import (
    NOTHING,
    finish_function,
    meet_all,
    row_floats,
    sight_function,
    state_floats,
    task_function,
    vectors_at,
)
from nbkernels.kernels.elements import pair_conversions
from nbkernels.kernels.scores import soft_cap_function
from nbkernels.launch.compile import kernel

STRIP = 8  # query rows of a product
STRIP_ELEMENTS = 256  # strips a block · head_dim at most: the sums of 256 elements are 64 registers
MAX_STRIPS = 4
TILE = 16  # keys of a product, and the smallest page
STEP_BYTES = 4096  # of K, and of V, that a warp works on at once: a tile at least, two at most
PIECE = 16  # bytes of a copy
FLAG_BYTES = 16
# a float16's weights times 2^15, which leaves the small ones 15 more bits
HEADROOM = 15
LEAST_SCALE = 1e-30  # below every scale of values that a float16 could be made of
# ptx.prmt with a zero word: bytes 0 and 1, 2 and 3, 0 and 2, 1 and 3 as 16-bit numbers
BYTES_01, BYTES_23, BYTES_02, BYTES_13 = 0x4140, 0x4342, 0x4240, 0x4341
MINUS_128 = 0x80808080  # two float16 of -128 · 2^-24
UNIT = 2.0**24
# a bfloat16 row's largest element becomes 2^14 to 2^15: bits of the exponent, of 2^-87 and 2^123 (the least and most to divide
# by), and what the bits of a power and of its inverse add up to
QUERY_UNIT = 2.0**14
EXPONENT, LEAST_POWER, MOST_POWER, POWER_SUM = 0x7F800000, 40 << 23, 250 << 23, 254 << 23


def step_keys(head_dim, itemsize):
    """Keys that a warp works on at once."""
    return 2 * TILE if 2 * TILE * head_dim * itemsize <= STEP_BYTES else TILE


def row_pieces(head_dim, itemsize):
    """16-byte pieces of a row of shared memory: an even number as products read them, and one more."""
    pieces = head_dim * itemsize // PIECE
    return pieces + pieces % 2 + 1


def stage_bytes(head_dim, itemsize, keys):
    """Of a step of a warp: its keys, its values, and their scales where they are int8."""
    return 2 * keys * row_pieces(head_dim, itemsize) * PIECE + (8 * keys if itemsize == 1 else 0)


def warp_bytes(head_dim, itemsize, strips, keys, stages):
    """Of a warp's ring, in which it leaves its state in the end."""
    return max(stages * stage_bytes(head_dim, itemsize, keys), 4 * state_floats(strips * STRIP, head_dim))


def block_bytes(head_dim, itemsize, strips, keys, warps, stages):
    """Shared memory of a block."""
    return FLAG_BYTES + warps * warp_bytes(head_dim, itemsize, strips, keys, stages)


@cache
def walk_function(
    dtype, head_dim, strips, split_keys, keys, warps, stages, causal, windowed, has_lengths,
    capped=False, has_sinks=False, paged=False, int8_pages=False, prefix=None, meet=meet_all,
):  # fmt: skip
    """walk(shared, head_tile, block_split, block_batch, …): ``decode_tensor`` by a block's first ``warps`` warps, of one task.

    shared: the address of block_bytes of shared memory; head_tile, block_split, block_batch: the task's place in the grid. sizes,
    strides: the kernel's q_len to scale_log2, q_batch to out_head; the rest is the kernel's. meet(): the barrier of those warps.
    """
    name = "float16" if int8_pages else str(dtype)
    product = ptx.mma_update(name)
    pack = ptx.bf16x2_from_floats if name == "bfloat16" else ptx.f16x2_from_floats
    unpack, _ = pair_conversions(dtype)
    itemsize = 1 if int8_pages else 2
    rows = STRIP * strips
    task = task_function(rows, causal, windowed, has_lengths)
    sight = sight_function(causal, windowed)
    cap = soft_cap_function(exact=False)
    tiles = keys // TILE
    pieces = head_dim * itemsize // PIECE
    piece = PIECE // itemsize  # elements
    row_bytes = row_pieces(head_dim, itemsize) * PIECE
    of_stage = stage_bytes(head_dim, itemsize, keys)
    of_warp = warp_bytes(head_dim, itemsize, strips, keys, stages)
    span, leave, climb = finish_function(
        dtype, head_dim, split_keys, rows, warps, of_warp, has_sinks, prefix == "shared", meet
    )
    k_scales_in = 2 * keys * row_bytes  # a stage: keys, values, scales of keys, of values
    ring_bytes = stages * of_stage
    lanes = ptx.WARP // TILE  # of a row's copies
    while lanes < pieces:
        lanes *= 2
    together = ptx.WARP // lanes  # rows a warp copies at once
    copies = TILE // together  # of a tile
    # products of a tile of keys, 16 elements each, and of a tile of values, 16 elements each
    depth = -(-head_dim // 16)
    loads = (depth + 1) // 2 if int8_pages else depth  # ldmatrix for them
    q_words, sums, columns = strips * depth * 2, strips * depth * 4, strips * 2
    score_count, bias_count = tiles * strips * 4, strips * 4
    padded = pieces % 2  # the last product reads a piece that no copy writes
    headroom = float(HEADROOM if name == "float16" else 0)
    row_words, first_vector = row_floats(head_dim), vectors_at(rows)
    step = warps * keys
    assert split_keys % step == 0, "a block's first step begins where its first split does"
    asked, pending = stages - 1, stages - 2  # steps on their way before the first is worked on, and beside one that is
    scaled = int8_pages and str(dtype) == "bfloat16"
    factor_count = 2 * tiles
    turned_count = 2 * strips
    table_tiles = split_keys // TILE
    assert table_tiles <= ptx.WARP, "a warp's lanes hold the pages of a split"

    @cuda.jit(device=True, inline="always")
    def copy_rows(to, pointer, at, stride, key, begin, end):
        """A tile of K or V: rows of ``pieces`` pieces from element ``at`` on, zeros where the key is not of begin to end - 1."""
        lane = ptx.lane_id()
        number, row = uint32(lane % uint32(lanes)), uint32(lane // uint32(lanes))
        if number < uint32(pieces):
            source = ptx.address(pointer, at + int64(row) * stride + int64(uint32(number * uint32(piece))))
            following = uint64(int64(together * itemsize) * stride)
            target = uint32(to + uint32(uint32(row * uint32(row_bytes)) + uint32(number * uint32(PIECE))))
            if key >= begin and int32(key + int32(TILE)) <= end:
                for n in range(copies):
                    ptx.cp_async_16(uint32(target + uint32(n * together * row_bytes)), source)
                    source = uint64(source + following)
            else:
                for n in range(copies):
                    here = int32(key + int32(uint32(row + uint32(n * together))))
                    there = uint32(PIECE) if here >= begin and here < end else uint32(0)
                    ptx.cp_async_16_zfill(uint32(target + uint32(n * together * row_bytes)), source, there)
                    source = uint64(source + following)

    @cuda.jit(device=True, inline="always")
    def copy_step(
        stage, key, begin, end, k, v, k_at, v_at, k_batch, v_batch, k_token, v_token, my_page, first_tile, page_mask,
        k_scales, v_scales, k_scales_at, v_scales_at, k_scales_page, v_scales_page, k_scales_token, v_scales_token,
    ):  # fmt: skip
        for i in range(tiles):
            tile_key = int32(key + int32(TILE * i))
            row, page = int64(tile_key), int64(0)
            if paged:
                number = uint32(uint32(uint32(tile_key) // uint32(TILE)) - first_tile)
                of_page = ptx.shfl_idx_u32(my_page, number)
                row, page = int64(tile_key & page_mask), int64(of_page)
            k_to = uint32(stage + uint32(i * TILE * row_bytes))
            copy_rows(k_to, k, k_at + page * k_batch + row * k_token, k_token, tile_key, begin, end)
            v_to = uint32(k_to + uint32(keys * row_bytes))
            copy_rows(v_to, v, v_at + page * v_batch + row * v_token, v_token, tile_key, begin, end)
            if int8_pages:
                lane = ptx.lane_id()
                inside = uint32(lane % uint32(TILE))
                here = int32(tile_key + int32(inside))
                there = uint32(4) if here >= begin and here < end else uint32(0)
                row += int64(inside)
                source = ptx.address(k_scales, k_scales_at + page * k_scales_page + row * k_scales_token)
                if lane >= uint32(TILE):
                    source = ptx.address(v_scales, v_scales_at + page * v_scales_page + row * v_scales_token)
                to = uint32(uint32(uint32(lane // uint32(TILE)) * uint32(4 * keys)) + uint32(inside * uint32(4)))
                ptx.cp_async_4_zfill(uint32(uint32(stage + to) + uint32(k_scales_in + 4 * TILE * i)), source, there)

    @cuda.jit(device=True, inline="always")
    def page_of(block_table, table_at, page_shift, last_page, kv_len, split):
        """The page of tile ``lane`` of a split. A page that is none is the last one."""
        tile = uint32(uint32(split * uint32(table_tiles)) + uint32(ptx.lane_id() % uint32(table_tiles)))
        key = min(uint32(tile * uint32(TILE)), uint32(kv_len - int32(1)))
        return min(ptx.ld_global(ptx.address(block_table, table_at + int64(key >> page_shift))), last_page)

    @cuda.jit(device=True, inline="always")
    def walk(
        shared, head_tile, block_split, block_batch, q, k, v, kv_lengths, out, vectors, weights, counters, sizes, strides,
        cap_log2, sinks, block_table, table_stride, page_shift, last_page, k_scales, v_scales, k_scales_page,
        k_scales_token, k_scales_head, v_scales_page, v_scales_token, v_scales_head,
    ):  # fmt: skip
        q_len, kv_len, kv_heads, group, row_tiles, first_split, all_splits, all_places, window, scale_log2 = sizes
        q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head = strides[:9]
        out_batch, out_token, out_head = strides[9:]
        query = cuda.local.array(q_words, uint32)
        words = cuda.local.array(4, uint32)
        fragment = cuda.local.array(8, uint32)
        scores = cuda.local.array(score_count, float32)
        vector = cuda.local.array(sums, float32)
        bias = cuda.local.array(bias_count, float32)  # int8: what 128 beside each value adds to the vector
        origin = cuda.local.array(bias_count, float32)  # int8: where scores begin
        minus = cuda.local.array(4, uint32)
        largest = cuda.local.array(columns, float32)
        total = cuda.local.array(columns, float32)
        scale = cuda.local.array(columns, float32)
        first = cuda.local.array(columns, int32)  # keys first to last - 1 are seen by a row
        last = cuda.local.array(columns, int32)
        shrink = cuda.local.array(columns, float32)
        v_factors = cuda.local.array(factor_count, float32)  # the scales of int8 values, and their logarithms
        v_logs = cuda.local.array(factor_count, float32)
        turned = cuda.local.array(turned_count, uint32)

        lane = ptx.lane_id()
        my_page = uint32(0)  # of a tile of this split; asked for first, as keys wait
        if paged:
            table_at = block_batch * table_stride
            split = uint32(first_split + block_split)
            my_page = page_of(block_table, table_at, page_shift, last_page, kv_len, split)
        batch, kv_head, tile, split, count, first_key, end_key, first_of_all, last_of_all = task(
            head_tile, block_split, block_batch, kv_lengths, q_len, kv_len, group, row_tiles, window, first_split
        )
        low, own_low, high, alone = span(first_key, end_key, first_split)
        begin = max(int32(split * uint32(split_keys)), first_key)
        end = min(int32(uint32(split + uint32(1)) * uint32(split_keys)), end_key)
        # where no key is seen at all, the first block writes zeros
        if begin >= end and (end_key > first_key or block_split != uint32(0)):
            return
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        states = uint32(shared + uint32(FLAG_BYTES))
        ring = uint32(states + uint32(warp * uint32(of_warp)))
        k_at, v_at = kv_head * k_head, kv_head * v_head
        k_scales_at, v_scales_at = int64(0), int64(0)
        page_mask = int32(0)
        if paged:
            page_mask = int32((int32(1) << int32(page_shift)) - int32(1))
        else:
            k_at += batch * k_batch
            v_at += batch * v_batch
        if int8_pages:
            k_scales_at, v_scales_at = kv_head * k_scales_head, kv_head * v_scales_head
        first_tile = uint32(split * uint32(table_tiles))

        # the first of the block's steps that holds keys from ``begin`` on: the same place in the rings of all warps
        start = int32(uint32(uint32(begin) // uint32(step)) * uint32(step))
        start = int32(start + int32(uint32(warp * uint32(keys))))
        ahead = start  # the next step to ask for
        for stage in range(asked):
            if ahead < end:
                copy_step(
                    uint32(ring + uint32(stage * of_stage)), ahead, begin, end, k, v, k_at, v_at, k_batch, v_batch,
                    k_token, v_token, my_page, first_tile, page_mask, k_scales, v_scales, k_scales_at, v_scales_at,
                    k_scales_page, v_scales_page, k_scales_token, v_scales_token,
                )  # fmt: skip
            ptx.cp_async_commit()
            ahead = int32(ahead + int32(step))
        if padded:
            row = lane
            while row < uint32(2 * keys * stages):
                at = uint32(uint32(row // uint32(2 * keys)) * uint32(of_stage))
                at = uint32(at + uint32(uint32(row % uint32(2 * keys)) * uint32(row_bytes)))
                ptx.st_shared_v4(
                    uint32(uint32(ring + at) + uint32(pieces * PIECE)), uint32(0), uint32(0), uint32(0), uint32(0)
                )
                row = uint32(row + uint32(ptx.WARP))

        for n in range(4):
            minus[n] = uint32(MINUS_128)
        for s in range(strips):
            packed = uint32(uint32(tile * uint32(rows)) + uint32(uint32(s * STRIP) + g))
            token = int64(packed // group)
            head = kv_head * int64(group) + int64(packed % group)
            at = batch * q_batch + token * q_token + head * q_head
            for d in range(depth):
                of = (s * depth + d) * 2
                query[of], query[of + 1] = uint32(0), uint32(0)
                if token < int64(q_len):
                    if int8_pages:
                        pair = ptx.ld_global_v2(
                            ptx.address(q, at + int64(uint32(uint32(16 * d) + uint32(t * uint32(4)))))
                        )
                        query[of], query[of + 1] = pair[0], pair[1]
                    else:
                        column = uint32(uint32(16 * d) + uint32(t * uint32(2)))
                        query[of] = ptx.ld_global(ptx.address(q, at + int64(column)))
                        if 16 * d + 8 < head_dim:
                            query[of + 1] = ptx.ld_global(ptx.address(q, at + int64(uint32(column + uint32(8)))))
            inverse = float32(1.0)
            if scaled:
                most = float32(0.0)
                for w in range(2 * depth):
                    pair = unpack(query[s * depth * 2 + w])
                    most = ptx.fmax_nan(most, ptx.fmax_nan(abs(pair[0]), abs(pair[1])))
                most = ptx.fmax_nan(most, ptx.shfl_bfly(most, uint32(1)))
                most = ptx.fmax_nan(most, ptx.shfl_bfly(most, uint32(2)))
                power = uint32(ptx.bits_from_float(most) & uint32(EXPONENT))
                power = min(max(power, uint32(LEAST_POWER)), uint32(MOST_POWER))
                factor = ptx.float_from_bits(uint32(uint32(POWER_SUM) - power)) * float32(QUERY_UNIT)
                inverse = ptx.float_from_bits(power) * float32(1.0 / QUERY_UNIT)
                for w in range(2 * depth):
                    pair = unpack(query[s * depth * 2 + w])
                    query[s * depth * 2 + w] = pack(pair[0] * factor, pair[1] * factor)
            for n in range(2):
                row = uint32(uint32(t * uint32(2)) + uint32(n))
                packed = uint32(uint32(tile * uint32(rows)) + uint32(uint32(s * STRIP) + row))
                token_of_row = int32(packed // group)
                column = 2 * s + n
                first[column], last[column] = sight(token_of_row, q_len, count, window)
                scale[column] = scale_log2
                if int8_pages:
                    scale[column] *= float32(UNIT)
                if scaled:
                    scale[column] *= ptx.shfl_idx(inverse, uint32(row * uint32(4)))
            for n in range(4):
                origin[4 * s + n] = float32(0.0)
            if int8_pages:
                for d in range(depth):
                    of = (s * depth + d) * 2
                    product(origin, 4 * s, minus, 0, query[of], query[of + 1])

        # this lane's row for ldmatrix: of K 8 keys, the next 8, then both of the next piece; of 16-bit V pieces first
        eight = uint32(uint32(lane >> uint32(3)) & uint32(1))
        sixteen = uint32(lane >> uint32(4))
        row = uint32(uint32(lane & uint32(7)) + uint32(eight * uint32(8)))
        k_lane = uint32(ring + uint32(uint32(row * uint32(row_bytes)) + uint32(sixteen * uint32(PIECE))))
        v_lane = k_lane
        if not int8_pages:
            row = uint32(uint32(lane & uint32(7)) + uint32(sixteen * uint32(8)))
            v_lane = uint32(ring + uint32(uint32(row * uint32(row_bytes)) + uint32(eight * uint32(PIECE))))
        v_lane = uint32(v_lane + uint32(keys * row_bytes))
        scales_lane = uint32(uint32(ring + uint32(k_scales_in)) + uint32(g * uint32(4)))

        at_stage = uint32(0)
        at_free = uint32(asked * of_stage)
        for n in range(columns):
            largest[n], total[n] = float32(NOTHING), float32(0.0)
        for i in range(sums):
            vector[i] = float32(0.0)
        for i in range(bias_count):
            bias[i] = float32(0.0)
        while start < end:
            ptx.cp_async_wait(pending)
            ptx.warp_sync()  # every lane's copies are there, and the stage before has been read
            if ahead < end:
                copy_step(
                    uint32(ring + at_free), ahead, begin, end, k, v, k_at, v_at, k_batch, v_batch,
                    k_token, v_token, my_page, first_tile, page_mask, k_scales, v_scales, k_scales_at, v_scales_at,
                    k_scales_page, v_scales_page, k_scales_token, v_scales_token,
                )  # fmt: skip
            ptx.cp_async_commit()
            ahead = int32(ahead + int32(step))
            at_free = uint32(at_free + uint32(of_stage))
            if at_free == uint32(ring_bytes):
                at_free = uint32(0)

            for i in range(tiles):
                for s in range(strips):
                    for n in range(4):
                        scores[(i * strips + s) * 4 + n] = origin[4 * s + n] if int8_pages else float32(0.0)
                for d in range(loads):
                    loaded = ptx.ldmatrix_x4(
                        uint32(uint32(k_lane + at_stage) + uint32(i * TILE * row_bytes + 2 * PIECE * d))
                    )
                    if int8_pages:
                        for w in range(4):
                            biased = uint32(loaded[w] ^ uint32(0x80808080))
                            of = 4 * (w // 2) + w % 2
                            fragment[of] = ptx.prmt(biased, uint32(0), uint32(BYTES_01))
                            fragment[of + 2] = ptx.prmt(biased, uint32(0), uint32(BYTES_23))
                        for s in range(strips):
                            of = (s * depth + 2 * d) * 2
                            product(scores, (i * strips + s) * 4, fragment, 0, query[of], query[of + 1])
                            if 2 * d + 1 < depth:
                                product(scores, (i * strips + s) * 4, fragment, 4, query[of + 2], query[of + 3])
                    else:
                        for w in range(4):
                            words[w] = loaded[w]
                        for s in range(strips):
                            of = (s * depth + d) * 2
                            product(scores, (i * strips + s) * 4, words, 0, query[of], query[of + 1])
            for i in range(tiles):
                for half in range(2):
                    if int8_pages:
                        at = uint32(uint32(scales_lane + at_stage) + uint32(4 * (TILE * i + 8 * half)))
                        k_factor = ptx.ld_shared_f32(at)
                        v_factors[2 * i + half] = ptx.ld_shared_f32(uint32(at + uint32(4 * keys)))
                    for n in range(columns):
                        of = (i * strips + n // 2) * 4 + 2 * half + n % 2
                        # a bare product could be fused with the difference below, in one variant and not in another
                        score = ptx.fma(scores[of], scale[n], float32(0.0))
                        if int8_pages:
                            score = ptx.fma(score, k_factor, float32(0.0))
                        if capped:
                            score = cap(score, cap_log2)
                        scores[of] = score
            if start < max(begin, first_of_all) or int32(start + int32(keys)) > min(end, last_of_all):
                for i in range(tiles):
                    for half in range(2):
                        key = int32(start + int32(uint32(g + uint32(TILE * i + 8 * half))))
                        for n in range(columns):
                            of = (i * strips + n // 2) * 4 + 2 * half + n % 2
                            if key >= end or key >= last[n] or key < first[n]:
                                scores[of] = float32(-np.inf)

            if int8_pages:
                for i in range(2 * tiles):
                    v_logs[i] = ptx.lg2(ptx.fmax(abs(v_factors[i]), float32(LEAST_SCALE)))
            changed = uint32(0)
            for n in range(columns):
                new = largest[n]
                for i in range(tiles):
                    for half in range(2):
                        score = scores[(i * strips + n // 2) * 4 + 2 * half + n % 2]
                        if int8_pages:
                            score += v_logs[2 * i + half]
                        new = ptx.fmax_nan(new, score)
                for bit in range(2, 5):
                    new = ptx.fmax_nan(new, ptx.shfl_bfly(new, uint32(1 << bit)))
                shrink[n] = ptx.ex2(largest[n] - new)
                if new != largest[n]:
                    changed = uint32(1)
                largest[n] = new
                reference = float32(new - float32(headroom))
                added = float32(0.0)
                for i in range(tiles):
                    for half in range(2):
                        of = (i * strips + n // 2) * 4 + 2 * half + n % 2
                        scores[of] = ptx.ex2(scores[of] - reference)
                        added += scores[of]
                total[n] = ptx.fma(total[n], shrink[n], added)
            if ptx.warp_any(changed) != uint32(0):
                for i in range(sums):
                    vector[i] *= shrink[i // (depth * 4) * 2 + i % 2]
                if int8_pages:
                    for i in range(bias_count):
                        bias[i] *= shrink[i // 4 * 2 + i % 2]
            for i in range(tiles):
                for s in range(strips):
                    of = (i * strips + s) * 4
                    if int8_pages:
                        for n in range(4):
                            scores[of + n] *= v_factors[2 * i + n // 2]
                    for half in range(2):
                        pair = pack(scores[of + 2 * half], scores[of + 2 * half + 1])
                        turned[2 * s + half] = ptx.movmatrix_trans(pair)
                    if int8_pages:
                        product(bias, 4 * s, minus, 0, turned[2 * s], turned[2 * s + 1])
                for d in range(loads):
                    loaded = ptx.ldmatrix_x4_trans(
                        uint32(uint32(v_lane + at_stage) + uint32(i * TILE * row_bytes + 2 * PIECE * d))
                    )
                    if int8_pages:
                        for w in range(4):
                            biased = uint32(loaded[w] ^ uint32(0x80808080))
                            fragment[2 * w] = ptx.prmt(biased, uint32(0), uint32(BYTES_02))
                            fragment[2 * w + 1] = ptx.prmt(biased, uint32(0), uint32(BYTES_13))
                        for s in range(strips):
                            of = (s * depth + 2 * d) * 4
                            product(vector, of, fragment, 0, turned[2 * s], turned[2 * s + 1])
                            if 2 * d + 1 < depth:
                                product(vector, of + 4, fragment, 4, turned[2 * s], turned[2 * s + 1])
                    else:
                        for w in range(4):
                            words[w] = loaded[w]
                        for s in range(strips):
                            product(vector, (s * depth + d) * 4, words, 0, turned[2 * s], turned[2 * s + 1])
            start = int32(start + int32(step))
            at_stage = uint32(at_stage + uint32(of_stage))
            if at_stage == uint32(ring_bytes):
                at_stage = uint32(0)

        # warps may have had unlike numbers of steps, and the state takes the place of the first
        ptx.cp_async_wait(0)
        ptx.warp_sync()
        for n in range(columns):
            row = uint32(uint32(n // 2 * STRIP + n % 2) + uint32(t * uint32(2)))
            for bit in range(2, 5):
                total[n] += ptx.shfl_bfly(total[n], uint32(1 << bit))
            if g == uint32(0):
                at = uint32(ring + uint32(row * uint32(4)))
                ptx.st_shared_f32(at, float32(largest[n] - float32(headroom)))
                ptx.st_shared_f32(uint32(at + uint32(4 * rows)), total[n])
            at = uint32(uint32(ring + uint32(4 * first_vector)) + uint32(row * uint32(4 * row_words)))
            for d in range(depth):
                for half in range(2):
                    x = vector[(n // 2 * depth + d) * 4 + 2 * half + n % 2]
                    if int8_pages:
                        x = float32(x + bias[n // 2 * 4 + n % 2]) * float32(UNIT)
                        column = uint32(uint32(16 * d + half) + uint32(g * uint32(2)))
                    else:
                        column = uint32(uint32(16 * d + 8 * half) + g)
                    ptx.st_shared_f32(uint32(at + uint32(column * uint32(4))), x)
        leave(
            states, out, vectors, weights, sinks, batch, kv_head, tile, split, alone,
            q_len, kv_heads, group, all_places, out_batch, out_token, out_head,
        )  # fmt: skip
        if not alone:
            climb(
                shared, out, vectors, weights, counters, sinks, batch, kv_head, tile, split,
                low, own_low, high, q_len, kv_heads, group, row_tiles, all_splits, all_places, out_batch, out_token, out_head,
            )  # fmt: skip

    return walk


def decode_tensor_kernel(
    dtype, head_dim, strips, split_keys, keys, warps, stages, causal, windowed, has_lengths,
    capped=False, has_sinks=False, paged=False, int8_pages=False, prefix=None,
):  # fmt: skip
    """A split of a KV head for STRIP · strips packed query rows, and the merge of all by the last block.

    grid: as ``task_function`` has it. Packed row r is query token r // group of query head r % group.
    keys: of a warp's step; a warp has room for ``stages`` steps. prefix: None, "shared" for the splits that all sequences have in
    common, their query tokens packed as those of one, or "behind" for each sequence's own, from first_split on.
    """
    threads = warps * ptx.WARP
    stored = "int8" if int8_pages else dtype
    walk = walk_function(
        dtype, head_dim, strips, split_keys, keys, warps, stages, causal, windowed, has_lengths,
        capped, has_sinks, paged, int8_pages, prefix,
    )  # fmt: skip

    # three blocks a multiprocessor leave a thread 168 registers; without a word the assembler keeps to 128, and spills
    @kernel(launch_bounds=(threads, 3) if strips == 1 and head_dim <= 128 else threads)
    def decode_tensor(
        q: ptx.pointer(dtype),
        k: ptx.pointer(stored),
        v: ptx.pointer(stored),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        vectors: ptx.pointer("float32"),
        weights: ptx.pointer("float32"),
        counters: ptx.pointer("uint32"),
        q_len: int32,
        kv_len: int32,
        kv_heads: uint32,
        group: uint32,
        row_tiles: uint32,
        first_split: uint32,
        all_splits: uint32,
        all_places: uint32,
        window: int32,
        scale_log2: float32,
        q_batch: int64,
        q_token: int64,
        q_head: int64,
        k_batch: int64,
        k_token: int64,
        k_head: int64,
        v_batch: int64,
        v_token: int64,
        v_head: int64,
        out_batch: int64,
        out_token: int64,
        out_head: int64,
        cap_log2: float32 if capped else None,
        sinks: ptx.pointer("float32") if has_sinks else None,
        block_table: ptx.pointer("int32") if paged else None,
        table_stride: int64 if paged else None,
        page_shift: uint32 if paged else None,
        last_page: uint32 if paged else None,
        k_scales: ptx.pointer("float32") if int8_pages else None,
        v_scales: ptx.pointer("float32") if int8_pages else None,
        k_scales_page: int64 if int8_pages else None,
        k_scales_token: int64 if int8_pages else None,
        k_scales_head: int64 if int8_pages else None,
        v_scales_page: int64 if int8_pages else None,
        v_scales_token: int64 if int8_pages else None,
        v_scales_head: int64 if int8_pages else None,
    ):
        shared = ptx.shared_address(cuda.shared.array(0, uint8))
        sizes = q_len, kv_len, kv_heads, group, row_tiles, first_split, all_splits, all_places, window, scale_log2
        strides = (
            q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head
        )  # fmt: skip
        walk(
            shared, uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), int64(uint32(cuda.blockIdx.z)),
            q, k, v, kv_lengths, out, vectors, weights, counters, sizes, strides,
            cap_log2, sinks, block_table, table_stride, page_shift, last_page, k_scales, v_scales, k_scales_page,
            k_scales_token, k_scales_head, v_scales_page, v_scales_token, v_scales_head,
        )  # fmt: skip

    return decode_tensor
