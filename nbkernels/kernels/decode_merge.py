"""What both walks over the splits of a KV cache share: which keys a block works on, and how partial results become one.

A partial result of a query row is a softmax over some of its keys, not yet divided: a reference near the largest score, the sum
of the weights below it, and the sum of the values times their weights. Any two become one:

    r = max(r1, r2)    sum = sum1 · 2^(r1 - r) + sum2 · 2^(r2 - r)    vector likewise

The warps of a block leave theirs in shared memory, and the block leaves one a query row and split in device memory. The last
block to do so among FAN neighbouring splits, by a counter, merges those in their order; the last one to do that among FAN
neighbouring groups merges these, and so on: a tree whose shape hangs on the splits' numbers alone.

    splits:    0 … 15 | 16 … 31 | … | 240 … 255 | 256 …
    level 1:     0         1      …      15         16
    level 2:              0                          1         the last one writes out
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import conversions
from nbkernels.kernels.scores import join_sink

FAN_BITS = 4
FAN = 1 << FAN_BITS  # partial results that are merged at once: so many 16-byte loads a lane has in flight
HALF_FAN = FAN // 2  # loops of more turns are not unrolled
# where a row has seen nothing: finite, since the difference of two infinities is NaN
NOTHING = np.float32(-1e38)


def places(splits):
    """Partial results of a query row: of its splits, and of the merged ones at all levels above."""
    count = splits
    while splits > 1:
        splits = -(-splits // FAN)
        count += splits
    return count


def row_floats(head_dim):
    """float32 of a row's vector in shared memory: rows shifted by 4 banks, so that four of them lie in different ones."""
    return -(-head_dim // 16) * 16 + 4


def vectors_at(rows):
    """float32 before the vectors in a warp's state: references and sums of the rows."""
    return max(2 * rows, 4)


def state_floats(rows, head_dim):
    """float32 that a warp leaves in shared memory: a reference, then a sum, then a vector for each row."""
    return vectors_at(rows) + rows * row_floats(head_dim)


@cuda.jit(device=True, inline="always")
def meet_all():
    """All threads of a block meet."""
    cuda.syncthreads()


@cache
def sight_function(causal, windowed):
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
def task_function(rows, causal, windowed, has_lengths):
    """task(…) -> (batch, kv_head, tile, split, count, first, last, first_of_all, last_of_all): a block's part.

    Some of its rows see keys first to last - 1, and all of them keys first_of_all to last_of_all - 1.
    grid: KV heads · row tiles in x, splits from first_split on in y, sequences in z. Neighbouring blocks read the same memory: a
    token's heads lie side by side, and the row tiles of a split read the same keys.
    """
    sight = sight_function(causal, windowed)

    @cuda.jit(device=True, inline="always")
    def task(head_tile, block_split, batch, kv_lengths, q_len, kv_len, group, row_tiles, window, first_split):
        kv_head, tile = head_tile, uint32(0)
        if row_tiles > uint32(1):
            kv_head, tile = uint32(head_tile // row_tiles), uint32(head_tile % row_tiles)
        split = uint32(first_split + block_split)
        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        # the first token of the tile sees the earliest key, the last one the latest
        first_token = int32(uint32(tile * uint32(rows)) // group)
        last_token = min(
            int32(uint32(uint32(tile * uint32(rows)) + uint32(rows - 1)) // group), int32(q_len - int32(1))
        )
        first, last_of_all = sight(first_token, q_len, count, window)
        first_of_all, last = sight(last_token, q_len, count, window)
        return batch, int64(kv_head), tile, split, count, first, max(last, first), first_of_all, last_of_all

    return task


@cache
def finish_function(dtype, head_dim, split_keys, rows, warps, warp_bytes, has_sinks, partial_only, meet=meet_all):
    """(span, leave, climb): see ``span``; leave(states, …) makes a partial result of a split, or the result where it is alone, of
    the warps' states; climb(flag, …) counts so many of them, and merges as the file's text says.

    states, flag: shared addresses of the first warp's state (``state_floats``, the next warp's warp_bytes further) and of a word.
    vectors [query rows, places, head_dim] and weights [query rows, places, 2] (reference, sum), the places of a row in the order
    of the levels; counters [batch, kv_heads, row tiles, places above the splits], zero before and after. partial_only: of a
    prefix, whose splits are merged as far as their groups are whole; what follows each sequence has in its own way. meet(): the
    barrier of the warps.
    """
    _, to_storage = conversions(dtype)
    width = 4 if head_dim % 4 == 0 else 1
    chunks = -(-head_dim // (width * ptx.WARP))
    elements, held = chunks * width, FAN * width
    first_vector, row_bytes = 4 * vectors_at(rows), 4 * row_floats(head_dim)

    @cuda.jit(device=True, inline="always")
    def write_out(x, largest, total, out, to, sinks, head):
        factor = float32(1.0)
        if has_sinks:
            factor, total = join_sink(largest, total, sinks[head])
        # a row that has seen nothing stays zero
        divisor = total if total != float32(0.0) else float32(1.0)
        for c in range(chunks):
            column = uint32(uint32(uint32(c * ptx.WARP) + ptx.lane_id()) * uint32(width))
            if column < uint32(head_dim):
                for w in range(width):
                    value = x[c * width + w]
                    if has_sinks:
                        value *= factor
                    value = value / divisor
                    out[to + int64(column) + int64(w)] = to_storage(value)

    @cuda.jit(device=True, inline="always")
    def write_partial(x, largest, total, vectors, weights, slot):
        for c in range(chunks):
            column = uint32(uint32(uint32(c * ptx.WARP) + ptx.lane_id()) * uint32(width))
            if column < uint32(head_dim):
                at = slot * int64(head_dim) + int64(column)
                if width == 4:
                    first = c * width
                    ptx.st_global_v4_f32(ptx.address(vectors, at), x[first], x[first + 1], x[first + 2], x[first + 3])
                else:
                    vectors[at] = x[c]
        if ptx.lane_id() == uint32(0):
            weights[slot * int64(2)] = largest
            weights[slot * int64(2) + int64(1)] = total

    @cuda.jit(device=True, inline="always")
    def place(row, tile, batch, kv_head, q_len, kv_heads, group):
        """(token, head, query row) of a row of the tile."""
        packed = uint32(uint32(tile * uint32(rows)) + row)
        token = int64(packed // group)
        head = kv_head * int64(group) + int64(packed % group)
        return token, head, (batch * int64(q_len) + token) * (int64(kv_heads) * int64(group)) + head

    @cuda.jit(device=True, inline="always")
    def load_child(values, child, number, vectors, slot, column):
        """Sixteen bytes of the vector of a partial result, or of the last one in place of one that isn't there."""
        at = (slot + int64(number)) * int64(head_dim) + int64(column)
        if width == 4:
            loaded = ptx.ld_global_v4_f32(ptx.address(vectors, at))
            for w in range(4):
                values[4 * child + w] = loaded[w]
        else:
            values[child] = ptx.ld_global_relaxed_f32(ptx.address(vectors, at))

    @cuda.jit(device=True, inline="always")
    def merge(x, values, vectors, weights, slot, count):
        """Partial results slot to slot + count - 1 -> (reference, sum), the vector in x; by one warp."""
        lane = ptx.lane_id()
        mine = slot + int64(min(lane, uint32(count - uint32(1))))
        words = ptx.ld_global_v2(ptx.address(weights, mine * int64(2)))
        there = lane < count
        reference = ptx.float_from_bits(words[0]) if there else float32(NOTHING)
        share = ptx.float_from_bits(words[1]) if there else float32(0.0)
        total = float32(0.0)
        largest = float32(NOTHING)
        for c in range(chunks):
            column = uint32(uint32(uint32(c * ptx.WARP) + lane) * uint32(width))
            column_read = min(column, uint32(head_dim - width))
            for child in range(HALF_FAN):
                load_child(values, child, min(uint32(child), uint32(count - uint32(1))), vectors, slot, column_read)
            for child in range(HALF_FAN):
                number = min(uint32(child + HALF_FAN), uint32(count - uint32(1)))
                load_child(values, child + HALF_FAN, number, vectors, slot, column_read)
            if c == 0:
                largest = ptx.warp_max(reference)
                factor = ptx.ex2(reference - largest)
            for w in range(width):
                x[c * width + w] = float32(0.0)
            for half in range(2):
                for child in range(HALF_FAN):
                    number = uint32(half * HALF_FAN + child)
                    of_child = ptx.shfl_idx(factor, number)
                    if c == 0:
                        total = ptx.fma(ptx.shfl_idx(share, number), of_child, total)
                    for w in range(width):
                        value = values[(half * HALF_FAN + child) * width + w] if number < count else float32(0.0)
                        x[c * width + w] = ptx.fma(value, of_child, x[c * width + w])
        return largest, total

    @cuda.jit(device=True, inline="always")
    def span(first, last, own_split):
        """(low, own_low, high, alone): splits low to high - 1 have partial results, those from own_low on of this launch."""
        low = uint32(uint32(first) // uint32(split_keys))
        high = uint32(uint32(last + int32(split_keys - 1)) // uint32(split_keys))
        return low, max(low, own_split), high, not partial_only and high <= uint32(low + uint32(1))

    @cuda.jit(device=True, inline="always")
    def leave(
        states, out, vectors, weights, sinks, batch, kv_head, tile, split, alone,
        q_len, kv_heads, group, all_places, out_batch, out_token, out_head,
    ):  # fmt: skip
        x = cuda.local.array(elements, float32)
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        lane = ptx.lane_id()
        meet()  # the warps' states are there
        row = warp
        while row < uint32(rows):
            token, head, query_row = place(row, tile, batch, kv_head, q_len, kv_heads, group)
            if token < int64(q_len):
                largest = float32(NOTHING)
                for w in range(warps):
                    largest = ptx.fmax_nan(
                        largest,
                        ptx.ld_shared_f32(uint32(states + uint32(w * warp_bytes) + uint32(row * uint32(4)))),
                    )
                total = float32(0.0)
                for e in range(elements):
                    x[e] = float32(0.0)
                for w in range(warps):
                    state = uint32(states + uint32(w * warp_bytes))
                    at = uint32(state + uint32(row * uint32(4)))
                    factor = ptx.ex2(ptx.ld_shared_f32(at) - largest)
                    total = ptx.fma(ptx.ld_shared_f32(uint32(at + uint32(4 * rows))), factor, total)
                    for c in range(chunks):
                        column = uint32(uint32(uint32(c * ptx.WARP) + lane) * uint32(width))
                        if column < uint32(head_dim):
                            at = uint32(state + uint32(first_vector) + uint32(row * uint32(row_bytes)))
                            at = uint32(at + uint32(column * uint32(4)))
                            if width == 4:
                                loaded = ptx.ld_shared_v4_f32(at)
                                for n in range(4):
                                    x[c * width + n] = ptx.fma(loaded[n], factor, x[c * width + n])
                            else:
                                x[c] = ptx.fma(ptx.ld_shared_f32(at), factor, x[c])
                if alone:
                    to = batch * out_batch + token * out_token + head * out_head
                    write_out(x, largest, total, out, to, sinks, head)
                else:
                    write_partial(x, largest, total, vectors, weights, query_row * int64(all_places) + int64(split))
            row = uint32(row + uint32(warps))

    @cuda.jit(device=True, inline="always")
    def climb(
        flag, out, vectors, weights, counters, sinks, batch, kv_head, tile, split, low, own_low, high,
        q_len, kv_heads, group, row_tiles, splits, all_places, out_batch, out_token, out_head,
    ):  # fmt: skip
        x = cuda.local.array(elements, float32)
        values = cuda.local.array(held, float32)
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        counter_at = (batch * int64(kv_heads) + kv_head) * int64(row_tiles) + int64(tile)
        counter_at *= int64(uint32(all_places - splits))
        index = split
        below = uint32(0)  # places of a row before those of this level
        at_level = splits  # places of this level
        while True:
            group_number = uint32(index >> uint32(FAN_BITS))
            child = uint32(group_number << uint32(FAN_BITS))
            if partial_only and uint32(child + uint32(FAN)) > high:
                return
            end = min(uint32(child + uint32(FAN)), high)
            awaited = uint32(end - max(child, own_low))
            child = max(child, low)
            above = uint32(below + at_level)
            meet()  # the partial results of all warps have been written
            if cuda.threadIdx.x == 0:
                counter = ptx.address(counters, counter_at + int64(uint32(uint32(above - splits) + group_number)))
                # it orders what the block has written, and what it reads after the next barrier
                came = uint32(uint32(ptx.atomic_add(counter, uint32(1))) + uint32(1))
                if came == awaited:
                    ptx.st_global(counter, uint32(0))  # for the next launch
                ptx.st_shared(flag, came)
            meet()
            if ptx.ld_shared(flag) != awaited:
                return
            low = uint32(low >> uint32(FAN_BITS))
            own_low = uint32(own_low >> uint32(FAN_BITS))
            if partial_only:
                high = uint32(high >> uint32(FAN_BITS))
                top = False
            else:
                high = uint32(uint32(high + uint32(FAN - 1)) >> uint32(FAN_BITS))
                top = high == uint32(low + uint32(1))
            row = warp
            while row < uint32(rows):
                token, head, query_row = place(row, tile, batch, kv_head, q_len, kv_heads, group)
                if token < int64(q_len):
                    slot = query_row * int64(all_places)
                    largest, total = merge(
                        x, values, vectors, weights, slot + int64(uint32(below + child)), uint32(end - child)
                    )
                    if top:
                        to = batch * out_batch + token * out_token + head * out_head
                        write_out(x, largest, total, out, to, sinks, head)
                    else:
                        write_partial(x, largest, total, vectors, weights, slot + int64(uint32(above + group_number)))
                row = uint32(row + uint32(warps))
            if top:
                return
            index = group_number
            below = above
            at_level = uint32(uint32(at_level + uint32(FAN - 1)) >> uint32(FAN_BITS))

    return span, leave, climb
