"""A split of a KV cache for a few query rows in float32 on the lanes: float32, and rows of any dtype that begin anywhere.

keys of the split:  a warp takes a few keys at a time, then those ``WARPS`` times as many further on; lanes share a key
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.decode_merge import (
    NOTHING,
    finish_function,
    row_floats,
    sight_function,
    state_floats,
    task_function,
    vectors_at,
)
from nbkernels.kernels.elements import access
from nbkernels.kernels.int8 import load_int8
from nbkernels.kernels.scores import soft_cap_function
from nbkernels.launch.compile import kernel

WARPS = 4
THREADS = WARPS * ptx.WARP
# elements of K, then of V, that a lane holds at once; more would spill beside the state of MAX_ROWS rows
IN_FLIGHT = 16
MAX_ROWS = 4  # query rows a block keeps in registers; the compiler leaves the arrays of 8 in memory


@cache
def _layout(head_dim, width):
    """(lanes a key, chunks a lane): chunk c of lane l holds elements (c · lanes + l) · width and the following width - 1."""
    chunks = -(-head_dim // width)
    lanes = 1
    while lanes < min(chunks, ptx.WARP):
        lanes *= 2
    return lanes, -(-chunks // lanes)


@cuda.jit(device=True, inline="always")
def _page_of(block_table, table_at, page_shift, last_page, key):
    """(page, row in it) of a key; table_at: where the sequence's row of the table begins. A page that is none is the last one."""
    page = min(uint32(block_table[table_at + int64(key >> int32(page_shift))]), last_page)
    return int64(page), int64(key & int32((int32(1) << int32(page_shift)) - int32(1)))


def decode_lanes_kernel(
    dtype, head_dim, width, rows, split_keys, causal, windowed, has_lengths, capped=False, has_sinks=False,
    paged=False, int8_pages=False, prefix=None,
):  # fmt: skip
    """As ``decode_tensor_kernel``, for ``rows`` packed query rows, by loads of ``width`` elements."""
    load, _ = access(dtype, width)
    load_kv = load_int8(width) if int8_pages else load
    stored = "int8" if int8_pages else dtype
    task = task_function(rows, causal, windowed, has_lengths)
    sight = sight_function(causal, windowed)
    warp_bytes = 4 * state_floats(rows, head_dim)
    span, leave, climb = finish_function(
        dtype, head_dim, split_keys, rows, WARPS, warp_bytes, has_sinks, prefix == "shared"
    )
    cap = soft_cap_function(exact=True)
    lanes, chunks = _layout(head_dim, width)
    elements = chunks * width  # a lane's share of a head
    groups = ptx.WARP // lanes  # keys a warp takes at once
    unroll = max(1, IN_FLIGHT // elements)  # keys a lane group in flight
    step = WARPS * groups * unroll
    masked = head_dim != lanes * elements
    row_words, first_vector, shared_floats = (
        row_floats(head_dim),
        vectors_at(rows),
        WARPS * state_floats(rows, head_dim),
    )
    state, in_flight, score_count = rows * elements, unroll * elements, unroll * rows

    @kernel(launch_bounds=THREADS)
    def decode_lanes(
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
        shared_states = cuda.shared.array(shared_floats, float32, alignment=16)  # its vectors are read by 16 bytes
        shared_flag = cuda.shared.array(1, uint32)
        query = cuda.local.array(state, float32)
        vector = cuda.local.array(state, float32)
        largest = cuda.local.array(rows, float32)
        total = cuda.local.array(rows, float32)
        first = cuda.local.array(rows, int32)  # keys first to last - 1 are seen by a row
        last = cuda.local.array(rows, int32)
        keys = cuda.local.array(in_flight, float32)
        scores = cuda.local.array(score_count, float32)
        k_factors = cuda.local.array(unroll, float32)  # the scales of int8 keys and values
        v_factors = cuda.local.array(unroll, float32)

        batch, kv_head, tile, split, count, first_key, end_key, _, _ = task(
            uint32(cuda.blockIdx.x),
            uint32(cuda.blockIdx.y),
            int64(uint32(cuda.blockIdx.z)),
            kv_lengths,
            q_len,
            kv_len,
            group,
            row_tiles,
            window,
            first_split,
        )
        split_start = int32(split * uint32(split_keys))
        begin = max(split_start, first_key)
        end = min(int32(split_start + int32(split_keys)), end_key)
        # where no key is seen at all, the first block writes zeros
        if begin >= end and (end_key > first_key or split != first_split):
            return
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        lane = ptx.lane_id()
        sub = uint32(lane % uint32(lanes))
        slot = uint32(lane // uint32(lanes))

        for r in range(rows):
            packed = uint32(uint32(tile * uint32(rows)) + uint32(r))
            token = int32(packed // group)
            head = kv_head * int64(group) + int64(packed % group)
            first[r], last[r] = sight(token, q_len, count, window)
            largest[r] = NOTHING
            total[r] = float32(0.0)
            at = batch * q_batch + int64(token) * q_token + head * q_head
            for c in range(chunks):
                column = uint32((uint32(c * lanes) + sub) * uint32(width))
                for w in range(width):
                    query[r * elements + c * width + w] = float32(0.0)
                    vector[r * elements + c * width + w] = float32(0.0)
                if token < q_len and column < uint32(head_dim):
                    values = load(q, at + int64(column))
                    for w in range(width):
                        query[r * elements + c * width + w] = values[w] * scale_log2

        if paged:
            k_at = kv_head * k_head
            v_at = kv_head * v_head
        else:
            k_at = batch * k_batch + kv_head * k_head
            v_at = batch * v_batch + kv_head * v_head
        start = begin
        while start < end:
            for u in range(unroll):
                key = int32(start + int32((uint32(u * WARPS) + warp) * uint32(groups) + slot))
                # a key past the end stands in for the last one, and is masked below: nothing past the length is read
                key = min(key, end - int32(1))
                if paged:
                    page, inside = _page_of(block_table, batch * table_stride, page_shift, last_page, key)
                    row = k_at + page * k_batch + inside * k_token
                    if int8_pages:
                        scale_at = page * k_scales_page + inside * k_scales_token + kv_head * k_scales_head
                        k_factors[u] = k_scales[scale_at]
                else:
                    row = k_at + int64(key) * k_token
                for c in range(chunks):
                    column = uint32((uint32(c * lanes) + sub) * uint32(width))
                    if masked:
                        for w in range(width):
                            keys[u * elements + c * width + w] = float32(0.0)
                        if column < uint32(head_dim):
                            values = load_kv(k, row + int64(column))
                            for w in range(width):
                                keys[u * elements + c * width + w] = values[w]
                    else:
                        values = load_kv(k, row + int64(column))
                        for w in range(width):
                            keys[u * elements + c * width + w] = values[w]
            for u in range(unroll):
                key = int32(start + int32((uint32(u * WARPS) + warp) * uint32(groups) + slot))
                for r in range(rows):
                    score = float32(0.0)
                    for e in range(elements):
                        score = ptx.fma(query[r * elements + e], keys[u * elements + e], score)
                    for i in range(5):
                        if (1 << i) < lanes:
                            score += ptx.shfl_bfly(score, uint32(1 << i))
                    if int8_pages:
                        score *= k_factors[u]
                    if capped:
                        score = cap(score, cap_log2)
                    if key < first[r] or key >= last[r] or key >= end:
                        score = float32(-np.inf)
                    scores[u * rows + r] = score
            # the registers of K are free: V takes them
            for u in range(unroll):
                key = int32(start + int32((uint32(u * WARPS) + warp) * uint32(groups) + slot))
                key = min(key, end - int32(1))
                if paged:
                    page, inside = _page_of(block_table, batch * table_stride, page_shift, last_page, key)
                    row = v_at + page * v_batch + inside * v_token
                    if int8_pages:
                        scale_at = page * v_scales_page + inside * v_scales_token + kv_head * v_scales_head
                        v_factors[u] = v_scales[scale_at]
                else:
                    row = v_at + int64(key) * v_token
                for c in range(chunks):
                    column = uint32((uint32(c * lanes) + sub) * uint32(width))
                    if masked:
                        for w in range(width):
                            keys[u * elements + c * width + w] = float32(0.0)
                        if column < uint32(head_dim):
                            values = load_kv(v, row + int64(column))
                            for w in range(width):
                                keys[u * elements + c * width + w] = values[w]
                    else:
                        values = load_kv(v, row + int64(column))
                        for w in range(width):
                            keys[u * elements + c * width + w] = values[w]
            for r in range(rows):
                new = largest[r]
                for u in range(unroll):
                    new = ptx.fmax_nan(new, scores[u * rows + r])
                shrink = ptx.ex2(largest[r] - new)
                largest[r] = new
                added = float32(0.0)
                for e in range(elements):
                    vector[r * elements + e] *= shrink
                for u in range(unroll):
                    weight = ptx.ex2(scores[u * rows + r] - new)
                    added += weight
                    if int8_pages:
                        weight *= v_factors[u]
                    for e in range(elements):
                        vector[r * elements + e] = ptx.fma(weight, keys[u * elements + e], vector[r * elements + e])
                total[r] = ptx.fma(total[r], shrink, added)
            start = int32(start + int32(step))

        # the lane groups of a warp, pair by pair
        for i in range(5):
            if (1 << i) >= lanes:
                for r in range(rows):
                    other = ptx.shfl_bfly(largest[r], uint32(1 << i))
                    new = ptx.fmax_nan(largest[r], other)
                    mine = ptx.ex2(largest[r] - new)
                    theirs = ptx.ex2(other - new)
                    total[r] = ptx.fma(total[r], mine, float32(ptx.shfl_bfly(total[r], uint32(1 << i)) * theirs))
                    for e in range(elements):
                        x = vector[r * elements + e]
                        vector[r * elements + e] = ptx.fma(x, mine, float32(ptx.shfl_bfly(x, uint32(1 << i)) * theirs))
                    largest[r] = new
        states = ptx.shared_address(shared_states)
        if slot == uint32(0):
            mine_at = uint32(states + uint32(warp * uint32(warp_bytes)))
            for r in range(rows):
                if sub == uint32(0):
                    ptx.st_shared_f32(uint32(mine_at + uint32(4 * r)), largest[r])
                    ptx.st_shared_f32(uint32(mine_at + uint32(4 * (rows + r))), total[r])
                for c in range(chunks):
                    for w in range(width):
                        column = uint32((uint32(c * lanes) + sub) * uint32(width) + uint32(w))
                        if column < uint32(head_dim):
                            at = uint32(mine_at + uint32(4 * (first_vector + r * row_words)))
                            ptx.st_shared_f32(
                                uint32(at + uint32(column * uint32(4))), vector[r * elements + c * width + w]
                            )
        low, own_low, high, alone = span(first_key, end_key, first_split)
        leave(
            states, out, vectors, weights, sinks, batch, kv_head, tile, split, alone,
            q_len, kv_heads, group, all_places, out_batch, out_token, out_head,
        )  # fmt: skip
        if not alone:
            climb(
                ptx.shared_address(shared_flag), out, vectors, weights, counters, sinks, batch, kv_head, tile, split,
                low, own_low, high, q_len, kv_heads, group, row_tiles, all_splits, all_places,
                out_batch, out_token, out_head,
            )  # fmt: skip

    return decode_lanes
