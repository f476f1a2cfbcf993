"""Attention for few query tokens over a long KV cache: bound by reading K and V once.

    out[b, i, h] = sum_j softmax_j(scale · q[b, i, h] · k[b, j, h / group]) · v[b, j, h / group]        (caps, sinks: ``scores``)

Split-KV decoding (Dao et al. 2023, "Flash-Decoding") with the online softmax of Milakov and Gimelshein (2018): the keys of a
sequence are cut into splits of a fixed length, a block takes one split of one KV head for up to ``rows`` query rows (the query
heads of the KV head's group, times the query tokens, packed so that K and V are read once for them), and a second kernel merges
the splits in their order. The length of a split depends on nothing but this file, so a sequence's bits do not depend on its batch
or on the cache's capacity. For that, products are added by a named fma: the assembler may fuse a bare product and sum in one
variant of a kernel and not in another.

    keys:   |   split 0   |   split 1   | … |  the last split, short  |  beyond the length: never read
    split:  a warp takes a few keys at a time, then those ``WARPS`` times as many further on; warps merge by (max, sum, vector)

Two kernels walk a split. ``tensor_decode`` (16-bit elements at 16-byte addresses) multiplies on the tensor cores, with the keys
as the rows of the product and eight packed query rows as its columns; its loads bring fragments straight into registers, the next
keys while the softmax of these is worked on. ``decode`` (float32, and rows that begin anywhere) works in float32 on the lanes.

Both walk a paged cache too (``paged``; see ``kernels/pages.py``): k and v are pools of pages then, a split is whole pages, and
the 16 keys of a product lie in one of them. A warp has the numbers of a split's pages in its lanes before the first key is due.
int8 pages (``int8_pages``) have a scale a token and head, which is a factor of the key's score, and of its weight where the
weight meets the value: the products take the plain integers.

Where all sequences share their first pages (``prefixed``), the query rows of the whole batch are packed over the prefix's splits,
and each sequence's own walk begins behind them; the merge finds all splits in their places, so that the bits are the same:

    prefix:      |  split 0  |  split 1  |    rows of every sequence, as if they were tokens of one
    sequence b:                          |  split 2  | …
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, access, aligned, conversions, pair_conversions, vector_width
from nbkernels.kernels.int8 import load_int8, pairs_from_int8x4
from nbkernels.kernels.scores import join_sink, score_factors, soft_cap_function
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

SPLIT = 256  # keys a block: short enough that one sequence fills the card from a few thousand keys on
WARPS = 4
THREADS = WARPS * ptx.WARP
# decode: elements of K, then of V, that a lane holds at once; more would spill beside the state of MAX_ROWS rows
IN_FLIGHT = 16
MAX_ROWS = 4  # decode: query rows a block keeps in registers; the compiler leaves the arrays of 8 in memory
STRIP = 8  # tensor_decode: query rows of a product
STRIP_ELEMENTS = 256  # tensor_decode: strips a block · head_dim at most: the sums of 256 elements are 64 registers
MAX_STRIPS = 4
TILE = 16  # tensor_decode: keys of a product, and the smallest page
INT8_PIECE = 16  # int8 elements in 16 bytes
MERGE_WARPS = 8  # merge: a thread an element of the longest head
MERGE_UNROLL = 4  # merge: splits a warp has in flight
# ptx.prmt: the lower, or upper, 16-bit elements of two words
LOWER_HALVES, UPPER_HALVES = 0x5410, 0x7632
LEAST_UNIT = 1e-30  # below every scale of values that a float16 could be made of
# the bytes of two words in turn, of the lower and of the upper halves
LOWER_BYTES, UPPER_BYTES = 0x5140, 0x7362
# where a row has seen nothing: finite, since the difference of two infinities is NaN
NOTHING = np.float32(-1e38)


@cache
def _sight(causal, windowed):
    """sight(token, q_len, count, window) -> (first, last): the query token sees keys first to last - 1 of a sequence's count."""

    @cuda.jit(device=True, inline="always")
    def sight(token, q_len, count, window):
        position = int32(count - q_len + token)
        first = int32(0)
        last = count
        if causal:
            last = int32(position + int32(1))
        if windowed:
            first = max(int32(position - window + int32(1)), int32(0))
        return first, last

    return sight


@cache
def _task(rows, causal, windowed, has_lengths, prefixed):
    """task(…) -> (batch, kv_head, tile, split, count, begin, end): a block's part, of which some row sees keys begin to end - 1.

    Neighbouring blocks are the row tiles of one split: where there are several, K and V come from L2 for all but one.
    """
    sight = _sight(causal, windowed)

    @cuda.jit(device=True, inline="always")
    def task(kv_lengths, q_len, kv_len, kv_heads, group, row_tiles, splits, window, first_split):
        block = uint32(cuda.blockIdx.x)
        tile = uint32(block % row_tiles)
        block = uint32(block // row_tiles)
        split = uint32(block % splits)
        if prefixed:
            split = uint32(split + first_split)
        block = uint32(block // splits)
        kv_head = int64(block % kv_heads)
        batch = int64(block // kv_heads)
        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        # the first token of the tile sees the earliest key, the last one the latest
        first_token = int32(uint32(tile * uint32(rows)) // group)
        last_token = min(
            int32(uint32(uint32(tile * uint32(rows)) + uint32(rows - 1)) // group), int32(q_len - int32(1))
        )
        first, _ = sight(first_token, q_len, count, window)
        _, last = sight(last_token, q_len, count, window)
        start = int32(split * uint32(SPLIT))
        return batch, kv_head, tile, split, count, max(start, first), min(int32(start + int32(SPLIT)), last)

    return task


@cache
def _leave(dtype, head_dim, rows, single, has_sinks):
    """leave(…): the warps' (max, sum, vector) in shared memory, merged in the warps' order and written, a thread an element.

    To out, past the head's sink, where ``single``; else to vectors [query rows, splits, head_dim] and weights
    [query rows, splits, 2] (max, sum).
    """
    _, to_storage = conversions(dtype)

    @cuda.jit(device=True, inline="always")
    def leave(
        shared_max, shared_sum, shared_vector, out, vectors, weights, sinks, batch, kv_head, tile, split,
        q_len, kv_heads, group, splits, out_batch, out_token, out_head,
    ):  # fmt: skip
        for r in range(rows):
            packed = uint32(uint32(tile * uint32(rows)) + uint32(r))
            token = int64(packed // group)
            if token < int64(q_len):
                head = kv_head * int64(group) + int64(packed % group)
                largest = NOTHING
                for w in range(WARPS):
                    largest = ptx.fmax_nan(largest, shared_max[w, r])
                total = float32(0.0)
                for w in range(WARPS):
                    total = ptx.fma(shared_sum[w, r], ptx.ex2(shared_max[w, r] - largest), total)
                if single and has_sinks:
                    factor, total = join_sink(largest, total, sinks[head])
                to = batch * out_batch + token * out_token + head * out_head
                query_row = (batch * int64(q_len) + token) * (int64(kv_heads) * int64(group)) + head
                slot = query_row * int64(splits) + int64(split)
                column = uint32(cuda.threadIdx.x)
                while column < uint32(head_dim):
                    x = float32(0.0)
                    for w in range(WARPS):
                        x = ptx.fma(shared_vector[w, r, column], ptx.ex2(shared_max[w, r] - largest), x)
                    if single:
                        if has_sinks:
                            x *= factor
                        # a row that has seen nothing stays zero
                        if total != float32(0.0):
                            x = x / total
                        out[to + int64(column)] = to_storage(x)
                    else:
                        vectors[slot * int64(head_dim) + int64(column)] = x
                    column = uint32(column + uint32(THREADS))
                if not single and cuda.threadIdx.x == 0:
                    weights[slot * int64(2)] = largest
                    weights[slot * int64(2) + int64(1)] = total

    return leave


@cache
def _layout(head_dim, width):
    """(lanes a key, chunks a lane): chunk c of lane l holds elements (c · lanes + l) · width and the following width - 1."""
    chunks = -(-head_dim // width)
    lanes = 1
    while lanes < min(chunks, ptx.WARP):
        lanes *= 2
    return lanes, -(-chunks // lanes)


@cuda.jit(device=True, inline="always")
def _row_in_page(key, page_shift):
    return int64(key & int32((int32(1) << int32(page_shift)) - int32(1)))


@cuda.jit(device=True, inline="always")
def _page_of(block_table, table_at, page_shift, last_page, key):
    """(page, row in it) of a key; table_at: where the sequence's row of the table begins. A page that is none is the last one."""
    page = min(uint32(block_table[table_at + int64(key >> int32(page_shift))]), last_page)
    return int64(page), _row_in_page(key, page_shift)


def decode_kernel(
    dtype, head_dim, width, rows, causal, windowed, has_lengths, single, capped=False, has_sinks=False,
    paged=False, int8_pages=False, prefixed=False,
):  # fmt: skip
    """A split of a KV head for ``rows`` packed query rows; writes out where ``single``, else (max, sum, vector) a row and split.

    grid: batch · kv_heads · splits · row tiles. Packed row r is query token r // group of query head r % group.
    """
    load, _ = access(dtype, width)
    load_kv = load_int8(width) if int8_pages else load
    stored = "int8" if int8_pages else dtype
    task, sight = _task(rows, causal, windowed, has_lengths, prefixed), _sight(causal, windowed)
    leave = _leave(dtype, head_dim, rows, single, has_sinks)
    cap = soft_cap_function(exact=True)
    lanes, chunks = _layout(head_dim, width)
    elements = chunks * width  # a lane's share of a head
    groups = ptx.WARP // lanes  # keys a warp takes at once
    unroll = max(1, IN_FLIGHT // elements)  # keys a lane group in flight
    step = WARPS * groups * unroll
    padded = lanes * elements
    masked = head_dim != padded
    state, in_flight, score_count = rows * elements, unroll * elements, unroll * rows

    @kernel(launch_bounds=THREADS)
    def decode(
        q: ptx.pointer(dtype),
        k: ptx.pointer(stored),
        v: ptx.pointer(stored),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        vectors: ptx.pointer("float32"),
        weights: ptx.pointer("float32"),
        q_len: int32,
        kv_len: int32,
        kv_heads: uint32,
        group: uint32,
        row_tiles: uint32,
        splits: uint32,
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
        sinks: ptx.pointer("float32") if has_sinks and single else None,
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
        first_split: uint32 if prefixed else None,
        all_splits: uint32 if prefixed else None,
    ):
        shared_max = cuda.shared.array((WARPS, rows), float32)
        shared_sum = cuda.shared.array((WARPS, rows), float32)
        shared_vector = cuda.shared.array((WARPS, rows, padded), float32)
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

        batch, kv_head, tile, split, count, begin, end = task(
            kv_lengths, q_len, kv_len, kv_heads, group, row_tiles, splits, window, first_split
        )
        if begin >= end and not single:
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
        if slot == uint32(0):
            for r in range(rows):
                if sub == uint32(0):
                    shared_max[warp, r] = largest[r]
                    shared_sum[warp, r] = total[r]
                for c in range(chunks):
                    for w in range(width):
                        column = uint32((uint32(c * lanes) + sub) * uint32(width) + uint32(w))
                        shared_vector[warp, r, column] = vector[r * elements + c * width + w]
        cuda.syncthreads()
        leave(
            shared_max, shared_sum, shared_vector, out, vectors, weights, sinks, batch, kv_head, tile, split,
            q_len, kv_heads, group, all_splits if prefixed else splits, out_batch, out_token, out_head,
        )  # fmt: skip

    return decode


def tensor_decode_kernel(
    dtype, head_dim, strips, causal, windowed, has_lengths, single, capped=False, has_sinks=False,
    paged=False, int8_pages=False, prefixed=False,
):  # fmt: skip
    """As ``decode`` for 16-bit elements, STRIP · strips packed query rows a block, by products of 16 keys with 8 rows.

    With lane = 4 · g + t, in the terms of ``ptx.mma``: scoresᵀ = K qᵀ has keys g and g + 8 of a tile and query rows 2t, 2t + 1 in
    a lane; outᵀ = Vᵀ weightsᵀ has two elements of the head and the same query rows, so the softmax's factors stay in their lanes.
    Which elements meet in a product is free as long as both sides agree, so a lane loads 16 bytes at a time:

        K, q:  chunks of 32 elements; lane (g, t) loads elements 8t to 8t + 7 of key (row) g, and they serve two products
        V:     chunks of 64 elements; lane (g, t) loads elements 8g to 8g + 7 of keys 2t, 2t + 1, 2t + 8, 2t + 9, and the
               byte permute pairs those of two keys: element 8g + 2j is row g, and 8g + 2j + 1 row g + 8, of product j

    int8: the same with 16 elements in the place of 8 (V of heads up to 64 elements: 8, by 8 bytes); where a pair of 16-bit
    elements went into a product, two bytes are widened to one.
    """
    product = ptx.mma_m16n8k16_bf16 if str(dtype) == "bfloat16" else ptx.mma_m16n8k16_f16
    _, pack = pair_conversions(dtype)
    rows = STRIP * strips
    task, sight = _task(rows, causal, windowed, has_lengths, prefixed), _sight(causal, windowed)
    leave = _leave(dtype, head_dim, rows, single, has_sinks)
    cap = soft_cap_function(exact=False)
    width = vector_width(dtype)
    k_piece = INT8_PIECE if int8_pages else width  # elements of 16 bytes of K
    v_piece = INT8_PIECE if int8_pages and head_dim > 8 * width else width  # elements that a lane loads of V at once
    k_chunks, v_chunks = -(-head_dim // (4 * k_piece)), -(-head_dim // (8 * v_piece))
    v_loaded = v_piece // 4 if int8_pages else v_piece // 2  # words
    # of 16 keys, that a warp takes at once: 4 KB of K and of V, less where the scores of many rows need the registers
    tiles = max(1, (4 if strips <= 2 else 2) // k_chunks)
    ahead = k_chunks <= 4  # V and the next keys are fetched early; the registers don't hold both of longer heads
    step = WARPS * TILE * tiles
    k_pairs, v_products = k_piece // 2, v_piece // 2  # words of q a chunk of K, products a chunk of V
    padded = v_chunks * 8 * v_piece + 1  # an odd row of shared memory spreads the query rows over the banks
    q_words, k_words = strips * k_chunks * k_pairs, tiles * k_chunks * 8
    v_words = tiles * v_chunks * 4 * v_loaded
    sums, score_count, columns = strips * v_chunks * v_products * 4, tiles * strips * 4, strips * 2
    pair_words = 0 if int8_pages else 4  # words of pairs of elements in 16 bytes
    factor_count = 2 * tiles if int8_pages else 1
    stored = "int8" if int8_pages else dtype
    load_values = ptx.ld_global_stream_v4 if v_loaded == 4 else ptx.ld_global_stream_v2
    widen = pairs_from_int8x4(dtype) if int8_pages else None
    # a float16 does not hold a weight times a small scale well: the scale is taken relative to the largest one so far
    relative = int8_pages and str(dtype) == "float16"

    @cuda.jit(device=True, inline="always")
    def tile_at(at, page_stride, stride, key, last_key, my_page, page_shift):
        """(element where the 16 keys from ``key`` on begin in their page, the last of them that is there)."""
        key = min(key, int32(last_key & int32(-TILE)))
        page = ptx.shfl_idx_u32(my_page, uint32(uint32(key & int32(SPLIT - 1)) // uint32(TILE)))
        return at + int64(page) * page_stride + _row_in_page(key, page_shift) * stride, int32(last_key - key)

    @cuda.jit(device=True, inline="always")
    def load_k(words, k, at, page_stride, stride, key, last_key, my_page, page_shift, g, t):
        for i in range(tiles):
            if paged:
                tile, last_inside = tile_at(
                    at, page_stride, stride, int32(key + int32(TILE * i)), last_key, my_page, page_shift
                )
            for half in range(2):
                # a key past the end stands in for the last one, and is masked later: nothing past the length is read
                if paged:
                    row = tile + int64(min(int32(uint32(g + uint32(8 * half))), last_inside)) * stride
                else:
                    inside = int32(uint32(g + uint32(16 * i + 8 * half)))
                    row = at + int64(min(int32(key + inside), last_key)) * stride
                for c in range(k_chunks):
                    column = uint32(uint32(c * 4 * k_piece) + uint32(t * uint32(k_piece)))
                    loaded = ptx.ld_global_stream_v4(
                        ptx.address(k, row + int64(min(column, uint32(head_dim - k_piece))))
                    )
                    for w in range(4):
                        word = loaded[w]
                        if c * 4 * k_piece + 4 * k_piece > head_dim and column >= uint32(head_dim):
                            word = uint32(0)
                        words[((i * k_chunks + c) * 2 + half) * 4 + w] = word

    @cuda.jit(device=True, inline="always")
    def load_v(words, v, at, page_stride, stride, key, last_key, my_page, page_shift, g, t):
        for i in range(tiles):
            if paged:
                tile, last_inside = tile_at(
                    at, page_stride, stride, int32(key + int32(TILE * i)), last_key, my_page, page_shift
                )
            for n in range(4):
                if paged:
                    inside = int32(uint32(uint32(t * uint32(2)) + uint32(8 * (n // 2) + n % 2)))
                    row = tile + int64(min(inside, last_inside)) * stride
                else:
                    inside = int32(uint32(uint32(t * uint32(2)) + uint32(16 * i + 8 * (n // 2) + n % 2)))
                    row = at + int64(min(int32(key + inside), last_key)) * stride
                for c in range(v_chunks):
                    # columns past the head give sums that nobody reads
                    column = min(
                        uint32(uint32(c * 8 * v_piece) + uint32(g * uint32(v_piece))), uint32(head_dim - v_piece)
                    )
                    address = ptx.address(v, row + int64(column))
                    loaded = load_values(address)
                    for w in range(v_loaded):
                        words[((i * v_chunks + c) * 4 + n) * v_loaded + w] = loaded[w]

    @cuda.jit(device=True, inline="always")
    def load_factors(factors, scales, at, page_stride, stride, key, last_key, my_page, page_shift, g):
        """The scales of int8 keys or values g and g + 8 of each tile."""
        for i in range(tiles):
            tile, last_inside = tile_at(
                at, page_stride, stride, int32(key + int32(TILE * i)), last_key, my_page, page_shift
            )
            for half in range(2):
                inside = int64(min(int32(uint32(g + uint32(8 * half))), last_inside))
                factors[2 * i + half] = ptx.ld_global_nc_f32(ptx.address(scales, tile + inside * stride))

    # a few registers fewer than the assembler would take give it a third block a multiprocessor; elsewhere they would spill
    fits_three = int8_pages and strips == 1 and k_chunks <= 2 and not relative and not prefixed

    @kernel(launch_bounds=(THREADS, 3) if fits_three else THREADS)
    def tensor_decode(
        q: ptx.pointer(dtype),
        k: ptx.pointer(stored),
        v: ptx.pointer(stored),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        vectors: ptx.pointer("float32"),
        weights: ptx.pointer("float32"),
        q_len: int32,
        kv_len: int32,
        kv_heads: uint32,
        group: uint32,
        row_tiles: uint32,
        splits: uint32,
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
        sinks: ptx.pointer("float32") if has_sinks and single else None,
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
        first_split: uint32 if prefixed else None,
        all_splits: uint32 if prefixed else None,
    ):
        shared_max = cuda.shared.array((WARPS, rows), float32)
        shared_sum = cuda.shared.array((WARPS, rows), float32)
        shared_vector = cuda.shared.array((WARPS, rows, padded), float32)
        query = cuda.local.array(q_words, uint32)
        keys = cuda.local.array(k_words, uint32)
        values = cuda.local.array(v_words, uint32)
        scores = cuda.local.array(score_count, float32)
        vector = cuda.local.array(sums, float32)
        largest = cuda.local.array(columns, float32)
        total = cuda.local.array(columns, float32)
        first = cuda.local.array(columns, int32)  # keys first to last - 1 are seen by a row
        last = cuda.local.array(columns, int32)
        shrink = cuda.local.array(columns, float32)
        k_factors = cuda.local.array(factor_count, float32)  # the scales of int8 keys and values
        v_factors = cuda.local.array(factor_count, float32)

        my_page = uint32(0)  # of tile lane % 16 of the split; asked for first, since keys wait for it
        if paged:
            at_split = uint32(uint32(cuda.blockIdx.x) // row_tiles)
            my_split = uint32(at_split % splits)
            if prefixed:
                my_split = uint32(my_split + first_split)
            my_key = uint32(
                uint32(my_split * uint32(SPLIT)) + uint32(uint32(ptx.lane_id() % uint32(16)) * uint32(TILE))
            )
            my_key = min(my_key, uint32(kv_len - int32(1)))
            table_at = int64(uint32(at_split // splits) // kv_heads) * table_stride + int64(my_key >> page_shift)
            my_page = min(ptx.ld_global(ptx.address(block_table, table_at)), last_page)
        batch, kv_head, tile, split, count, begin, end = task(
            kv_lengths, q_len, kv_len, kv_heads, group, row_tiles, splits, window, first_split
        )
        if begin >= end and not single:
            return
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        lane = ptx.lane_id()
        g = uint32(lane >> uint32(2))
        t = uint32(lane & uint32(3))
        if paged:
            shift = page_shift
            begin = int32(begin & int32(-TILE))  # a tile of keys lies in one page
            k_at = kv_head * k_head
            v_at = kv_head * v_head
        else:
            shift = uint32(0)
            k_at = batch * k_batch + kv_head * k_head
            v_at = batch * v_batch + kv_head * v_head
        if int8_pages:
            k_scales_at = kv_head * k_scales_head
            v_scales_at = kv_head * v_scales_head
        last_key = int32(end - int32(1))
        start = int32(begin + int32(uint32(warp * uint32(16 * tiles))))
        if ahead and start < end:
            load_k(keys, k, k_at, k_batch, k_token, start, last_key, my_page, shift, g, t)
            if int8_pages:
                load_factors(
                    k_factors, k_scales, k_scales_at, k_scales_page, k_scales_token, start, last_key, my_page, shift, g
                )

        for s in range(strips):
            packed = uint32(uint32(tile * uint32(rows)) + uint32(uint32(s * STRIP) + g))
            token = int64(packed // group)
            head = kv_head * int64(group) + int64(packed % group)
            at = batch * q_batch + token * q_token + head * q_head
            for c in range(k_chunks):
                column = uint32(uint32(c * 4 * k_piece) + uint32(t * uint32(k_piece)))
                for w in range(k_pairs):
                    query[(s * k_chunks + c) * k_pairs + w] = uint32(0)
                if token < int64(q_len) and column < uint32(head_dim):
                    loaded = ptx.ld_global_v4(ptx.address(q, at + int64(column)))
                    for w in range(4):
                        query[(s * k_chunks + c) * k_pairs + w] = loaded[w]
                    if k_piece > width:
                        loaded = ptx.ld_global_v4(ptx.address(q, at + int64(column) + int64(width)))
                        for w in range(4):
                            query[(s * k_chunks + c) * k_pairs + 4 + w] = loaded[w]
        for n in range(columns):
            packed = uint32(uint32(tile * uint32(rows)) + uint32(n // 2 * STRIP + n % 2))
            token = int32(uint32(packed + uint32(t * uint32(2))) // group)
            first[n], last[n] = sight(token, q_len, count, window)
            largest[n] = NOTHING
            total[n] = float32(0.0)
        for i in range(sums):
            vector[i] = float32(0.0)
        unit = float32(LEAST_UNIT)  # ``relative``: what the scales of values, and so the vector, are in
        turn = float32(1.0)

        while start < end:
            if ahead:
                load_v(values, v, v_at, v_batch, v_token, start, last_key, my_page, shift, g, t)
            else:
                load_k(keys, k, k_at, k_batch, k_token, start, last_key, my_page, shift, g, t)
            if int8_pages:
                load_factors(
                    v_factors, v_scales, v_scales_at, v_scales_page, v_scales_token, start, last_key, my_page, shift, g
                )
                if not ahead:
                    load_factors(
                        k_factors,
                        k_scales,
                        k_scales_at,
                        k_scales_page,
                        k_scales_token,
                        start,
                        last_key,
                        my_page,
                        shift,
                        g,
                    )
            for i in range(tiles):
                for s in range(strips):
                    x = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
                    for c in range(k_chunks):
                        a = (i * k_chunks + c) * 8
                        b = (s * k_chunks + c) * k_pairs
                        if int8_pages:
                            for w in range(4):
                                upper = widen(keys[a + w])  # two pairs of elements of key g
                                lower = widen(keys[a + w + 4])  # of key g + 8
                                x = product(
                                    upper[0], lower[0], upper[1], lower[1],
                                    query[b + 2 * w], query[b + 2 * w + 1], x[0], x[1], x[2], x[3],
                                )  # fmt: skip
                        for w in range(0, pair_words, 2):
                            x = product(
                                keys[a + w], keys[a + w + 4], keys[a + w + 1], keys[a + w + 5],
                                query[b + w], query[b + w + 1], x[0], x[1], x[2], x[3],
                            )  # fmt: skip
                    for n in range(4):
                        key = int32(start + int32(uint32(g + uint32(16 * i + n // 2 * 8))))
                        score = x[n] * scale_log2
                        if int8_pages:
                            score *= k_factors[2 * i + n // 2]
                        if capped:
                            score = cap(score, cap_log2)
                        row = s * 2 + n % 2
                        if key >= end or key >= last[row] or key < first[row]:
                            score = float32(-np.inf)
                        scores[(i * strips + s) * 4 + n] = score
            if not ahead:
                load_v(values, v, v_at, v_batch, v_token, start, last_key, my_page, shift, g, t)
            elif int32(start + int32(step)) < end:
                following = int32(start + int32(step))
                load_k(keys, k, k_at, k_batch, k_token, following, last_key, my_page, shift, g, t)
                if int8_pages:
                    load_factors(
                        k_factors,
                        k_scales,
                        k_scales_at,
                        k_scales_page,
                        k_scales_token,
                        following,
                        last_key,
                        my_page,
                        shift,
                        g,
                    )

            for n in range(columns):
                new = largest[n]
                for i in range(tiles):
                    for half in range(2):
                        new = ptx.fmax_nan(new, scores[(i * strips + n // 2) * 4 + half * 2 + n % 2])
                for bit in range(2, 5):
                    new = ptx.fmax_nan(new, ptx.shfl_bfly(new, uint32(1 << bit)))
                shrink[n] = ptx.ex2(largest[n] - new)
                largest[n] = new
                added = float32(0.0)
                for i in range(tiles):
                    for half in range(2):
                        at_score = (i * strips + n // 2) * 4 + half * 2 + n % 2
                        scores[at_score] = ptx.ex2(scores[at_score] - new)
                        added += scores[at_score]
                total[n] = ptx.fma(total[n], shrink[n], added)
            if relative:
                new = unit
                for i in range(factor_count):
                    new = ptx.fmax(new, v_factors[i])
                for bit in range(2, 5):
                    new = ptx.fmax(new, ptx.shfl_bfly(new, uint32(1 << bit)))
                inverse = ptx.rcp(new)
                turn = unit * inverse
                unit = new
                for i in range(factor_count):
                    v_factors[i] *= inverse
                for n in range(columns):
                    shrink[n] *= turn
            for i in range(sums):
                vector[i] *= shrink[i // (v_chunks * v_products * 4) * 2 + i % 2]
            for i in range(tiles):
                for s in range(strips):
                    of = (i * strips + s) * 4
                    if int8_pages:
                        for n in range(4):
                            scores[of + n] *= v_factors[2 * i + n // 2]
                    b0 = ptx.movmatrix_trans(pack(scores[of], scores[of + 1]))
                    b1 = ptx.movmatrix_trans(pack(scores[of + 2], scores[of + 3]))
                    for c in range(v_chunks):
                        if int8_pages:
                            for j in range(v_products):
                                a = (i * v_chunks + c) * 4 * v_loaded + j // 2
                                o = ((s * v_chunks + c) * v_products + j) * 4
                                half = uint32(UPPER_BYTES if j % 2 else LOWER_BYTES)
                                first_keys = widen(ptx.prmt(values[a], values[a + v_loaded], half))
                                last_keys = widen(ptx.prmt(values[a + 2 * v_loaded], values[a + 3 * v_loaded], half))
                                x = product(
                                    first_keys[0], first_keys[1], last_keys[0], last_keys[1],
                                    b0, b1, vector[o], vector[o + 1], vector[o + 2], vector[o + 3],
                                )  # fmt: skip
                                for n in range(4):
                                    vector[o + n] = x[n]
                        for j in range(pair_words):
                            a = (i * v_chunks + c) * 16 + j
                            o = ((s * v_chunks + c) * 4 + j) * 4
                            x = product(
                                ptx.prmt(values[a], values[a + 4], uint32(LOWER_HALVES)),
                                ptx.prmt(values[a], values[a + 4], uint32(UPPER_HALVES)),
                                ptx.prmt(values[a + 8], values[a + 12], uint32(LOWER_HALVES)),
                                ptx.prmt(values[a + 8], values[a + 12], uint32(UPPER_HALVES)),
                                b0, b1, vector[o], vector[o + 1], vector[o + 2], vector[o + 3],
                            )  # fmt: skip
                            for n in range(4):
                                vector[o + n] = x[n]
            start = int32(start + int32(step))

        for n in range(columns):
            row = uint32(uint32(n // 2 * STRIP + n % 2) + uint32(t * uint32(2)))
            for bit in range(2, 5):
                total[n] += ptx.shfl_bfly(total[n], uint32(1 << bit))
            if g == uint32(0):
                shared_max[warp, row] = largest[n]
                shared_sum[warp, row] = total[n]
            for c in range(v_chunks):
                for j in range(v_products):
                    for odd in range(2):
                        column = uint32(uint32(c * 8 * v_piece + j * 2 + odd) + uint32(g * uint32(v_piece)))
                        at_sum = ((n // 2 * v_chunks + c) * v_products + j) * 4 + odd * 2 + n % 2
                        if relative:
                            vector[at_sum] *= unit
                        shared_vector[warp, row, column] = vector[at_sum]
        cuda.syncthreads()
        leave(
            shared_max, shared_sum, shared_vector, out, vectors, weights, sinks, batch, kv_head, tile, split,
            q_len, kv_heads, group, all_splits if prefixed else splits, out_batch, out_token, out_head,
        )  # fmt: skip

    return tensor_decode


def merge_kernel(dtype, head_dim, causal, windowed, has_lengths, has_sinks=False):
    """Combine the splits of a query row. grid: batch · q_len · heads; warp w takes every MERGE_WARPS-th split from the w-th on.

    Each lane has ``width`` elements of a head in each of ``chunks``; the warps' sums are added in the warps' order.
    """
    _, to_storage = conversions(dtype)
    sight = _sight(causal, windowed)
    width = 4 if head_dim % 4 == 0 else 1
    load, _ = access(np.dtype(np.float32), width)
    chunks = -(-head_dim // (width * ptx.WARP))
    elements, padded = chunks * width, chunks * width * ptx.WARP
    threads = MERGE_WARPS * ptx.WARP

    @kernel(launch_bounds=threads)
    def merge(
        vectors: ptx.pointer("float32"),
        weights: ptx.pointer("float32"),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        q_len: uint32,
        kv_len: int32,
        heads: uint32,
        splits: int64,
        window: int32,
        out_batch: int64,
        out_token: int64,
        out_head: int64,
        sinks: ptx.pointer("float32") if has_sinks else None,
    ):
        shared_total = cuda.shared.array(MERGE_WARPS, float32)
        shared_vector = cuda.shared.array((MERGE_WARPS, padded), float32)
        vector = cuda.local.array(elements, float32)
        row = uint32(cuda.blockIdx.x)
        head = int64(row % heads)
        token = uint32(uint32(row // heads) % q_len)
        batch = int64(uint32(row // heads) // q_len)
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        lane = ptx.lane_id()
        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        first, last = sight(int32(token), int32(q_len), count, window)
        # exactly the splits in which this row sees a key have been written
        begin = int32(first // int32(SPLIT))
        end = begin
        if last > first:
            end = int32((last + int32(SPLIT - 1)) // int32(SPLIT))
        slots = int64(row) * splits

        largest = NOTHING
        s = int32(begin + int32(lane))
        while s < end:
            largest = ptx.fmax(largest, weights[(slots + int64(s)) * int64(2)])
            s = int32(s + int32(ptx.WARP))
        largest = ptx.warp_max(largest)

        total = float32(0.0)
        for e in range(elements):
            vector[e] = float32(0.0)
        s = int32(begin + int32(warp))
        while s < end:
            for u in range(MERGE_UNROLL):
                # past the end the first of these stands in, with no weight: its loads go out together with the others'
                split = int32(s + int32(u * MERGE_WARPS))
                inside = split < end
                slot = slots + int64(split if inside else s)
                factor = ptx.ex2(weights[slot * int64(2)] - largest) if inside else float32(0.0)
                total = ptx.fma(weights[slot * int64(2) + int64(1)], factor, total)
                for c in range(chunks):
                    column = uint32((uint32(c * ptx.WARP) + lane) * uint32(width))
                    if column < uint32(head_dim):
                        values = load(vectors, slot * int64(head_dim) + int64(column))
                        for w in range(width):
                            vector[c * width + w] = ptx.fma(values[w], factor, vector[c * width + w])
            s = int32(s + int32(MERGE_UNROLL * MERGE_WARPS))

        if lane == uint32(0):
            shared_total[warp] = total
        for c in range(chunks):
            for w in range(width):
                column = uint32((uint32(c * ptx.WARP) + lane) * uint32(width) + uint32(w))
                shared_vector[warp, column] = vector[c * width + w]
        cuda.syncthreads()
        column = uint32(cuda.threadIdx.x)
        if column < uint32(head_dim):
            total = float32(0.0)
            x = float32(0.0)
            for w in range(MERGE_WARPS):
                total += shared_total[w]
                x += shared_vector[w, column]
            if has_sinks:
                factor, total = join_sink(largest, total, sinks[head])
                x *= factor
            # a row that sees nothing stays zero
            if total != float32(0.0):
                x = x / total
            out[batch * out_batch + int64(token) * out_token + head * out_head + int64(column)] = to_storage(x)

    return merge


def _walk(packed, head_dim, dtype, width, int8_pages, most_strips=MAX_STRIPS):
    """(factory, its first constants, query rows a block) for so many packed rows.

    Rows a block: as many as the packed rows fill, up to what the registers hold: STRIP · strips of tensor_decode, where strips
    is a power of two and strips · head_dim at most STRIP_ELEMENTS, or a power of two up to MAX_ROWS of decode.
    """
    if dtype.itemsize == 2 and width == (INT8_PIECE if int8_pages else vector_width(dtype)):
        strips = 1
        while 2 * strips * head_dim <= STRIP_ELEMENTS and strips * STRIP < packed and strips < most_strips:
            strips *= 2
        return tensor_decode_kernel, (dtype, head_dim, strips), strips * STRIP
    rows = 1
    while rows < min(packed, MAX_ROWS):
        rows *= 2
    return decode_kernel, (dtype, head_dim, width, rows), rows


@lru_cache(maxsize=4096)
def plan(
    batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, width, causal, windowed, has_lengths,
    capped=False, has_sinks=False, paged=False, int8_pages=False, prefix_splits=0,
):  # fmt: skip
    """(walk over the splits, merge or None, row tiles, splits). width: elements of a load, 1 where rows begin anywhere.

    int8 pages at 16-byte addresses count as INT8_PIECE. The walk begins behind the splits of a prefix, which another takes.
    """
    packed = heads // kv_heads * q_len
    splits = max(1, -(-kv_len // SPLIT))
    masks = (causal, windowed, has_lengths)
    factory, constants, rows = _walk(packed, head_dim, dtype, width, int8_pages)
    row_tiles = -(-packed // rows)
    blocks, query_rows = batch * kv_heads * row_tiles * (splits - prefix_splits), batch * q_len * heads
    if max(blocks, query_rows) > 2**31 - 1:
        raise ValueError(f"{batch} sequences of {kv_len} keys and {heads} heads need more than 2^31 - 1 blocks")
    options = (splits == 1, capped, has_sinks, paged, int8_pages, prefix_splits > 0)
    walk = Plan(factory, (*constants, *masks, *options), (blocks, 1, 1), (THREADS, 1, 1))
    if splits == 1:
        return walk, None, row_tiles, splits
    merge = Plan(merge_kernel, (dtype, head_dim, *masks, has_sinks), (query_rows, 1, 1), (MERGE_WARPS * ptx.WARP, 1, 1))
    return walk, merge, row_tiles, splits


@lru_cache(maxsize=4096)
def plan_prefix(batch, q_len, heads, kv_heads, head_dim, dtype, width, capped, int8_pages, prefix_splits):
    """(walk over a prefix's splits, row tiles): the query tokens of all sequences, which all see it, as those of one."""
    group = heads // kv_heads
    # as many keys at a time as in a sequence's own walk, which has fewer rows: the same bits
    _, _, rows = _walk(group * q_len, head_dim, dtype, width, int8_pages)
    most_strips = MAX_STRIPS if rows > 2 * STRIP else 2
    factory, constants, rows = _walk(group * q_len * batch, head_dim, dtype, width, int8_pages, most_strips)
    row_tiles = -(-group * q_len * batch // rows)
    blocks = kv_heads * row_tiles * prefix_splits
    if blocks > 2**31 - 1:
        raise ValueError(f"{batch} sequences and {heads} heads need more than 2^31 - 1 blocks")
    options = (False, False, False, False, capped, False, True, int8_pages, True)
    return Plan(factory, (*constants, *options), (blocks, 1, 1), (THREADS, 1, 1)), row_tiles


def cost(batch, q_len, kv_len, heads, kv_heads, head_dim, itemsize, kv_itemsize=None):
    """K and V are read once, q and out pass once. kv_itemsize: of K and V where it is another; int8 has a scale a key, head."""
    keys = 2 * batch * kv_len * kv_heads
    key_bytes = head_dim * itemsize if kv_itemsize in (None, itemsize) else head_dim * kv_itemsize + 4
    queries = 2 * batch * q_len * heads * head_dim
    return Cost(bytes=keys * key_bytes + queries * itemsize, flops=4 * batch * q_len * heads * kv_len * head_dim)


def _load_width(q, k, v):
    """Elements of a load that q's, K's and V's rows allow; of int8 pages INT8_PIECE where 16 bytes do."""
    head_dim, width = q.shape[3], vector_width(q.dtype)
    if head_dim % width or not aligned(q, width=width):
        return 1
    if k.dtype == q.dtype:
        return width if all(aligned(x, width=width) for x in (k, v)) else 1
    for wide in (INT8_PIECE, width) if q.dtype.itemsize == 2 else (width,):
        starts = (x.pointer % wide == 0 and all(s % wide == 0 for s in x.strides[:3]) for x in (k, v))
        if head_dim % wide == 0 and all(starts):
            return wide
    return 1


def run(q, k, v, causal, scale, window, soft_cap, sinks, kv_lengths, out, device, stream, pages=None):
    """See ``nbkernels.attention``; all arrays are DeviceArrays, kv_lengths and sinks may be None.

    pages: None, or (block_table, k_scales, v_scales, prefix) of ``nbkernels.paged_attention``, the pools as k and v.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    table, int8_pages, prefix_splits = (), k.dtype != q.dtype, 0
    if pages is not None:
        block_table, k_scales, v_scales, prefix = pages
        table = (block_table.pointer, block_table.strides[0], kv_len.bit_length() - 1, k.shape[0] - 1)
        if int8_pages:
            table += (k_scales.pointer, v_scales.pointer, *k_scales.strides, *v_scales.strides)
        kv_len *= block_table.shape[1]
        # the prefix's walk takes all tokens for one sequence's, so they lie at one stride; and a window cuts splits elsewhere
        if batch > 1 and window is None and (q_len == 1 or q.strides[0] == q_len * q.strides[1]):
            prefix_splits = min(prefix, kv_len - 1) // SPLIT
    width = _load_width(q, k, v)
    # a lone query stands at the end: no key is later
    causal = (causal and q_len > 1) or window is not None
    masks = (causal, window is not None, kv_lengths is not None)
    capped, has_sinks = soft_cap is not None, sinks is not None
    options = (capped, has_sinks, pages is not None, int8_pages, prefix_splits)
    walk, merge, row_tiles, splits = plan(
        batch, q_len, kv_len, heads, kv_heads, head_dim, q.dtype, width, *masks, *options
    )
    vectors = weights = None
    if merge is not None:
        partials = batch * q_len * heads * splits
        workspace = memory.empty((partials * (head_dim + 2),), np.dtype(np.float32), stream)
        vectors, weights = workspace[: partials * head_dim], workspace[partials * head_dim :]
    lengths = 0 if kv_lengths is None else kv_lengths.pointer
    # a window beyond every key hides nothing, and must not overflow
    window = 0 if window is None else min(window, kv_len + q_len)
    strides = [s for x in (q, k, v, out) for s in x.strides[:3]]
    pointers = (q.pointer, k.pointer, v.pointer, lengths, out.pointer)
    partial = (0, 0) if merge is None else (vectors.pointer, weights.pointer)
    group = heads // kv_heads
    factor, cap = score_factors(scale, soft_cap)
    sink = () if sinks is None else (sinks.pointer,)  # for the last of the kernels
    places = ()
    if prefix_splits:
        shared, shared_tiles = plan_prefix(
            batch, q_len, heads, kv_heads, head_dim, q.dtype, width, capped, int8_pages, prefix_splits
        )
        as_tokens = (0, q.strides[0] // q_len, *strides[2:])
        sizes = (batch * q_len, prefix_splits * SPLIT, kv_heads, group, shared_tiles, prefix_splits, 0, factor)
        launch(shared, (*pointers, *partial, *sizes, *as_tokens, *cap, *table, 0, splits), device, stream)
        places = (prefix_splits, splits)
    sizes = (q_len, kv_len, kv_heads, group, row_tiles, splits - prefix_splits, window, factor)
    last = () if merge else sink
    launch(walk, (*pointers, *partial, *sizes, *strides, *cap, *last, *table, *places), device, stream)
    if merge is not None:
        sizes = (q_len, kv_len, heads, splits, window)
        launch(merge, (*partial, lengths, out.pointer, *sizes, *out.strides[:3], *sink), device, stream)
