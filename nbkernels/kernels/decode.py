"""Attention for few query tokens over a long KV cache: bound by reading K and V once.

    out[b, i, h] = sum_j softmax_j(scale · q[b, i, h] · k[b, j, h / group]) · v[b, j, h / group]

Split-KV decoding (Dao et al. 2023, "Flash-Decoding") with the online softmax of Milakov and Gimelshein (2018): the keys of a
sequence are cut into splits of a fixed length, a block takes one split of one KV head for up to ``rows`` query rows (the query
heads of the KV head's group, times the query tokens, packed so that K and V are read once for them), and a second kernel merges
the splits in their order. The length of a split depends on nothing but this file, so a sequence's bits do not depend on its batch
or on the cache's capacity.

    warp:   key 0: |lane 0 … lanes-1| key 1: |lane … | …      ``lanes`` lanes a key, each with 16 bytes of it
    steps:  ``unroll`` keys a lane group in flight, then the next ones; groups, warps and splits are merged by (max, sum, vector)

Keys beyond a sequence's length are never read, whatever stands there.
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, access, aligned, conversions, vector_width
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

SPLIT = 256  # keys a block: short enough that one sequence fills the card from a few thousand keys on
WARPS = 4
THREADS = WARPS * ptx.WARP
IN_FLIGHT = 16  # elements of K, then of V, that a lane holds at once: more, with MAX_ROWS rows of state, would spill
MAX_ROWS = 4  # query rows a block keeps in registers; the compiler leaves the arrays of 8 in memory
LOG2E = np.log2(np.e)
# where a row has seen nothing: finite, since the difference of two infinities is NaN
NOTHING = np.float32(-1e38)


@cache
def _layout(head_dim, width):
    """(lanes a key, chunks a lane): chunk c of lane l holds elements (c · lanes + l) · width and the following width - 1."""
    chunks = -(-head_dim // width)
    lanes = 1
    while lanes < min(chunks, ptx.WARP):
        lanes *= 2
    return lanes, -(-chunks // lanes)


def decode_kernel(dtype, head_dim, width, rows, causal, windowed, has_lengths, single):
    """A split of a KV head for ``rows`` packed query rows; writes out where ``single``, else (max, sum, vector) a row and split.

    grid: batch · kv_heads · row tiles · splits. Packed row r is query token r // group of query head r % group.
    """
    load, _ = access(dtype, width)
    _, to_storage = conversions(dtype)
    lanes, chunks = _layout(head_dim, width)
    elements = chunks * width  # a lane's share of a head
    groups = ptx.WARP // lanes  # keys a warp takes at once
    unroll = max(1, IN_FLIGHT // elements)  # keys a lane group in flight
    step = WARPS * groups * unroll
    partial = head_dim + 2  # float32 a row and split in the workspace: max, sum, vector
    padded = lanes * elements
    masked = head_dim != padded
    state, in_flight, score_count = rows * elements, unroll * elements, unroll * rows

    @kernel(launch_bounds=THREADS)
    def decode(
        q: ptx.pointer(dtype),
        k: ptx.pointer(dtype),
        v: ptx.pointer(dtype),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        workspace: ptx.pointer("float32"),
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

        block = uint32(cuda.blockIdx.x)
        split = uint32(block % splits)
        block = uint32(block // splits)
        tile = uint32(block % row_tiles)
        block = uint32(block // row_tiles)
        kv_head = int64(block % kv_heads)
        batch = int64(block // kv_heads)
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        lane = ptx.lane_id()
        sub = uint32(lane % uint32(lanes))
        slot = uint32(lane // uint32(lanes))

        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        begin = int32(split) * int32(SPLIT)
        end = min(begin + int32(SPLIT), count)

        seen_first = end
        seen_last = begin
        for r in range(rows):
            packed = int32(tile) * int32(rows) + int32(r)
            token = packed // int32(group)
            first[r] = int32(0)
            last[r] = int32(0)
            if token < q_len:
                position = count - q_len + token
                last[r] = count
                if causal:
                    last[r] = position + int32(1)
                if windowed:
                    first[r] = max(position - window + int32(1), int32(0))
                seen_first = min(seen_first, max(first[r], begin))
                seen_last = max(seen_last, min(last[r], end))
        if seen_first >= seen_last and not single:
            return
        begin = seen_first
        end = seen_last

        for r in range(rows):
            packed = int32(tile) * int32(rows) + int32(r)
            token = packed // int32(group)
            head = kv_head * int64(group) + int64(packed % int32(group))
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

        k_at = batch * k_batch + kv_head * k_head
        v_at = batch * v_batch + kv_head * v_head
        start = begin
        while start < end:
            for u in range(unroll):
                key = start + int32((uint32(u * WARPS) + warp) * uint32(groups) + slot)
                # a key past the end stands in for the last one, and is masked below: nothing past the length is read
                row = k_at + int64(min(key, end - int32(1))) * k_token
                for c in range(chunks):
                    column = uint32((uint32(c * lanes) + sub) * uint32(width))
                    if masked:
                        for w in range(width):
                            keys[u * elements + c * width + w] = float32(0.0)
                        if column < uint32(head_dim):
                            values = load(k, row + int64(column))
                            for w in range(width):
                                keys[u * elements + c * width + w] = values[w]
                    else:
                        values = load(k, row + int64(column))
                        for w in range(width):
                            keys[u * elements + c * width + w] = values[w]
            for u in range(unroll):
                key = start + int32((uint32(u * WARPS) + warp) * uint32(groups) + slot)
                for r in range(rows):
                    score = float32(0.0)
                    for e in range(elements):
                        score = ptx.fma(query[r * elements + e], keys[u * elements + e], score)
                    for i in range(5):
                        if (1 << i) < lanes:
                            score += ptx.shfl_bfly(score, uint32(1 << i))
                    if key < first[r] or key >= last[r] or key >= end:
                        score = float32(-np.inf)
                    scores[u * rows + r] = score
            # the registers of K are free: V takes them
            for u in range(unroll):
                key = start + int32((uint32(u * WARPS) + warp) * uint32(groups) + slot)
                row = v_at + int64(min(key, end - int32(1))) * v_token
                for c in range(chunks):
                    column = uint32((uint32(c * lanes) + sub) * uint32(width))
                    if masked:
                        for w in range(width):
                            keys[u * elements + c * width + w] = float32(0.0)
                        if column < uint32(head_dim):
                            values = load(v, row + int64(column))
                            for w in range(width):
                                keys[u * elements + c * width + w] = values[w]
                    else:
                        values = load(v, row + int64(column))
                        for w in range(width):
                            keys[u * elements + c * width + w] = values[w]
            for r in range(rows):
                new = largest[r]
                for u in range(unroll):
                    new = ptx.fmax_nan(new, scores[u * rows + r])
                shrink = ptx.ex2(largest[r] - new)
                largest[r] = new
                total[r] *= shrink
                for e in range(elements):
                    vector[r * elements + e] *= shrink
                for u in range(unroll):
                    weight = ptx.ex2(scores[u * rows + r] - new)
                    total[r] += weight
                    for e in range(elements):
                        vector[r * elements + e] = ptx.fma(weight, keys[u * elements + e], vector[r * elements + e])
            start += int32(step)

        # the lane groups of a warp, pair by pair
        for i in range(5):
            if (1 << i) >= lanes:
                for r in range(rows):
                    other = ptx.shfl_bfly(largest[r], uint32(1 << i))
                    new = ptx.fmax_nan(largest[r], other)
                    mine = ptx.ex2(largest[r] - new)
                    theirs = ptx.ex2(other - new)
                    total[r] = total[r] * mine + ptx.shfl_bfly(total[r], uint32(1 << i)) * theirs
                    for e in range(elements):
                        x = vector[r * elements + e]
                        vector[r * elements + e] = x * mine + ptx.shfl_bfly(x, uint32(1 << i)) * theirs
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

        # the warps in their order; a thread an element
        for r in range(rows):
            packed = int32(tile) * int32(rows) + int32(r)
            token = packed // int32(group)
            if token < q_len:
                head = kv_head * int64(group) + int64(packed % int32(group))
                new = NOTHING
                for w in range(WARPS):
                    new = ptx.fmax_nan(new, shared_max[w, r])
                whole = float32(0.0)
                for w in range(WARPS):
                    whole += shared_sum[w, r] * ptx.ex2(shared_max[w, r] - new)
                to = batch * out_batch + int64(token) * out_token + head * out_head
                query_row = (batch * int64(q_len) + int64(token)) * (int64(kv_heads) * int64(group)) + head
                slot_at = (query_row * int64(splits) + int64(split)) * int64(partial)
                column = uint32(cuda.threadIdx.x)
                while column < uint32(head_dim):
                    x = float32(0.0)
                    for w in range(WARPS):
                        x += shared_vector[w, r, column] * ptx.ex2(shared_max[w, r] - new)
                    if single:
                        if whole != float32(0.0):
                            x = x / whole
                        out[to + int64(column)] = to_storage(x)
                    else:
                        workspace[slot_at + int64(2) + int64(column)] = x
                    column = uint32(column + uint32(THREADS))
                if not single and cuda.threadIdx.x == 0:
                    workspace[slot_at] = new
                    workspace[slot_at + int64(1)] = whole

    return decode


def merge_kernel(dtype, head_dim, causal, windowed, has_lengths):
    """Combine the splits of each query row, in their order. grid: batch · q_len · heads; a thread an element."""
    _, to_storage = conversions(dtype)
    threads = min(128, -(-head_dim // 32) * 32)
    partial = head_dim + 2

    @kernel(launch_bounds=threads)
    def merge(
        workspace: ptx.pointer("float32"),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        q_len: int32,
        kv_len: int32,
        heads: uint32,
        splits: int64,
        window: int32,
        out_batch: int64,
        out_token: int64,
        out_head: int64,
    ):
        row = int64(cuda.blockIdx.x)
        head = row % int64(heads)
        token = (row // int64(heads)) % int64(q_len)
        batch = row // (int64(heads) * int64(q_len))
        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        position = count - q_len + int32(token)
        last = count
        if causal:
            last = position + int32(1)
        first = int32(0)
        if windowed:
            first = max(position - window + int32(1), int32(0))
        # exactly the splits in which this row sees a key have been written
        begin = int64(first // int32(SPLIT))
        end = int64(0)
        if last > first:
            end = int64((last + int32(SPLIT - 1)) // int32(SPLIT))
        base = row * splits * int64(partial)
        new = NOTHING
        s = begin
        while s < end:
            new = ptx.fmax_nan(new, workspace[base + s * int64(partial)])
            s += int64(1)
        column = int64(cuda.threadIdx.x)
        while column < int64(head_dim):
            x = float32(0.0)
            whole = float32(0.0)
            s = begin
            while s < end:
                at = base + s * int64(partial)
                weight = ptx.ex2(workspace[at] - new)
                whole += workspace[at + int64(1)] * weight
                x += workspace[at + int64(2) + column] * weight
                s += int64(1)
            if whole != float32(0.0):
                x = x / whole
            out[batch * out_batch + token * out_token + head * out_head + column] = to_storage(x)
            column += int64(threads)

    return merge


@lru_cache(maxsize=4096)
def plan(batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, width, causal, windowed, has_lengths):
    """(decode, merge or None, row tiles, splits). Rows a block: a power of two that holds the packed rows, up to MAX_ROWS."""
    packed = heads // kv_heads * q_len
    rows = 1
    while rows < min(packed, MAX_ROWS):
        rows *= 2
    row_tiles = -(-packed // rows)
    splits = max(1, -(-kv_len // SPLIT))
    blocks = batch * kv_heads * row_tiles * splits
    if blocks > 2**31 - 1:
        raise ValueError(f"{batch} sequences of {kv_len} keys and {heads} heads need more than 2^31 - 1 blocks")
    constants = (dtype, head_dim, width, rows, causal, windowed, has_lengths, splits == 1)
    first = Plan(decode_kernel, constants, (blocks, 1, 1), (THREADS, 1, 1))
    if splits == 1:
        return first, None, row_tiles, splits
    threads = min(128, -(-head_dim // 32) * 32)
    second = Plan(
        merge_kernel, (dtype, head_dim, causal, windowed, has_lengths), (batch * q_len * heads, 1, 1), (threads, 1, 1)
    )
    return first, second, row_tiles, splits


def cost(batch, q_len, kv_len, heads, kv_heads, head_dim, itemsize):
    """K and V are read once, q and out pass once."""
    elements = 2 * batch * kv_len * kv_heads * head_dim + 2 * batch * q_len * heads * head_dim
    return Cost(bytes=itemsize * elements, flops=4 * batch * q_len * heads * kv_len * head_dim)


def run(q, k, v, causal, scale, window, kv_lengths, out, device, stream):
    """See ``nbkernels.attention``; all arrays are DeviceArrays, kv_lengths may be None."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    width = vector_width(q.dtype)
    if head_dim % width or not all(aligned(x, width=width) for x in (q, k, v)):
        width = 1
    causal = causal or window is not None
    masks = (causal, window is not None, kv_lengths is not None)
    first, second, row_tiles, splits = plan(batch, q_len, kv_len, heads, kv_heads, head_dim, q.dtype, width, *masks)
    workspace = None
    if second is not None:
        workspace = memory.empty((batch * q_len * heads * splits * (head_dim + 2),), np.dtype(np.float32), stream)
    lengths = 0 if kv_lengths is None else kv_lengths.pointer
    # a window beyond every key hides nothing, and must not overflow
    window = 0 if window is None else min(window, kv_len + q_len)
    strides = (s for x in (q, k, v, out) for s in x.strides[:3])
    pointers = (q.pointer, k.pointer, v.pointer, lengths, out.pointer, workspace.pointer if workspace else 0)
    sizes = (q_len, kv_len, kv_heads, heads // kv_heads, row_tiles, splits, window, float(scale * LOG2E))
    launch(first, (*pointers, *sizes, *strides), device, stream)
    if second is not None:
        sizes = (q_len, kv_len, heads, splits, window)
        launch(second, (workspace.pointer, lengths, out.pointer, *sizes, *out.strides[:3]), device, stream)
