"""Attention for prompts on sm_90a: the products run on their own (wgmma) while the softmax of the tile before is computed.

    out[b, i, h] = sum_j softmax_j(scale · q[b, i, h] · k[b, j, h / group]) · v[b, j, h / group]

After FlashAttention-3 (Shah et al. 2024); the conditional rescaling is FlashAttention-4's. A block stays on its multiprocessor
and takes work items, each some query rows of one head; the first scores of the next item are computed while the results of this
one are written. Single threads of one warpgroup, the producer, ask for tiles by bulk
tensor copies and send results back. Each of the other warpgroups, the consumers, owns 64 query rows and walks the keys from the
last tile that they see to the first:

    producer     K5  Q  V5  K4  V4  K3  V3 …                        rings of a few tiles in shared memory
    tensor cores    │S5 = q·k5ᵀ│S4 = q·k4ᵀ│out += P5·v5│S3 = q·k3ᵀ│out += P4·v4│ …
    a consumer                 │P5 = softmax(S5)   │P4 = softmax(S4)       │P3 …      both products of a step are in flight

P stays in the registers that held S, rounded to 16 bits. The consumers go their own ways: one's softmax runs under the others'
products. Only tiles at the diagonal, the ends and a window's begin are masked.
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.elements import pair_conversions
from nbkernels.kernels.packed import queries_function, tile_count
from nbkernels.kernels.scores import join_sink, soft_cap_function
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.tensor_map import describes, tensor_map
from nbkernels.ptx.bulk import (
    bulk_commit,
    bulk_wait_read,
    prefetch_tensor_map,
    tensor_load_4d,
    tensor_map_address,
    tensor_store_4d,
)
from nbkernels.ptx.bulk import tensor_map as tensor_map_type
from nbkernels.ptx.mbarrier import (
    barrier_sync,
    fence_mbarrier_init,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbkernels.ptx.wgmma import (
    descriptor_address,
    descriptor_bits,
    fewer_registers,
    hold,
    more_registers,
    wgmma_commit,
    wgmma_fence,
    wgmma_update,
    wgmma_wait,
)

WARPGROUP = 128
ROWS = 64  # query rows of a consumer: of one product
BOX = 64  # columns of a box: 128 bytes, the swizzle's width
BOX_ROW = 128  # its bytes
BARRIER_BYTES = 1024  # in front of the tiles, which start at multiples of 1024 bytes
# registers a thread of the producer and of a consumer, by the number of consumers: 64 K in all
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160)}
PACKED_REGISTERS = {2: (40, 232)}  # the search for a packed sequence does not fit 24
# head_dim up to: from so many queries on, (tile_n, stages, consumers, q_stages); by the registers of scores, their rounded
# weights and sums, by what fits shared memory, and by what was fastest on an H200 (benchmarks/notes/attention.md)
TILES = {
    64: ((0, (128, 3, 2, 2)), (2048, (96, 4, 3, 2))),
    128: ((0, (128, 2, 2, 2)),),
    192: ((0, (96, 2, 2, 1)),),
    256: ((0, (64, 2, 2, 1)),),
}
SECTION_BYTES = 24 << 20  # of K and V, that query tiles pass together: half of the L2 cache
# where a row has seen nothing: finite, since the difference of two infinities is NaN
NOTHING = np.float32(-1e38)
# a maximum is kept until it is so far (in powers of two) behind: weights up to 2^8 fit every dtype, and sums are seldom scaled
SLACK = 8


def boxes(head_dim):
    """Boxes of 64 columns beside each other; zeros fill the last one."""
    return -(-head_dim // BOX)


def shared_bytes(head_dim, tile_n, stages, consumers, q_stages):
    """The rings of q, K and V, behind the barriers; they start at the first multiple of 1024."""
    rows = q_stages * consumers * ROWS + 2 * stages * tile_n
    return 1024 + BARRIER_BYTES + rows * boxes(head_dim) * BOX_ROW


@cache
def _walk(tile_m, tile_n, causal, windowed, has_lengths, packed):
    """item(number, …) -> (batch, head, first row, keys of the sequence, end of those seen, first tile, tiles, rows of the
    sequence, where its queries and its keys begin) of a work item.
    """
    queries = queries_function(tile_m)

    @cuda.jit(device=True, inline="always")
    def item(
        number, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window, query_offsets, kv_offsets, sequences
    ):
        q_at = int32(0)
        kv_at = int32(0)
        if packed:
            # the last tile of a sequence, its longest, first; the heads of a tile beside each other
            tile = uint32(number // heads)
            head = uint32(number - uint32(tile * heads))
            batch = uint32(0)
            tile = uint32(q_tiles - uint32(1) - tile)
            first_row, q_at, q_len, kv_at, count = queries(tile, query_offsets, kv_offsets, sequences, q_len, kv_len)
        else:
            # a section of (batch, head) pairs whose keys fit the L2 cache; in it the last query tiles, the longest, come first
            which = uint32(number // uint32(section * q_tiles))
            rest = uint32(number - uint32(which * uint32(section * q_tiles)))
            size = min(section, uint32(pairs - uint32(which * section)))
            back = uint32(rest // size)
            pair = uint32(uint32(which * section) + uint32(rest - uint32(back * size)))
            tile = uint32(q_tiles - uint32(1) - back)
            batch = uint32(pair // heads)
            head = uint32(pair - uint32(batch * heads))
            count = kv_len
            if has_lengths:
                count = min(max(kv_lengths[batch], int32(0)), kv_len)
            first_row = int32(tile * uint32(tile_m))
        end = count  # keys begin to end - 1 are seen by some row
        begin = int32(0)
        if causal:
            last_row = min(int32(first_row + int32(tile_m)), q_len)
            end = max(min(count, int32(count - q_len + last_row)), int32(0))
        if windowed:
            begin = max(int32(count - q_len + first_row - window + int32(1)), int32(0))
        first_tile = int32(uint32(begin) // uint32(tile_n))
        tiles = int32(int32(uint32(end + int32(tile_n - 1)) // uint32(tile_n)) - first_tile)
        if packed and first_row >= q_len:  # beyond the end of all sequences
            tiles = int32(0)
        return batch, head, first_row, count, end, first_tile, max(tiles, int32(0)), q_len, q_at, kv_at

    return item


def attention_wgmma_kernel(
    dtype, head_dim, tile_n, stages, consumers, q_stages, negative, causal, windowed, has_lengths,
    capped=False, has_sinks=False, packed=False,
):  # fmt: skip
    """16-bit attention by wgmma. grid: any number of blocks; each takes one work item after another, in the order of a counter
    or every gridDim.x-th.

    tile_n: keys a tile; stages: tiles of K, and of V, in shared memory; consumers: warpgroups of 64 query rows; q_stages: tiles
    of q in shared memory: with two, that of the next item comes while this one is computed. negative: the scale is below zero
    (the kernel gets its magnitude); a capped score has its sign.
    packed: sequences lie one after another (``kernels.packed``), and batch is 1.
    """
    depth = -(-head_dim // 16) * 16
    columns = boxes(head_dim)
    tile_m = consumers * ROWS
    q_box, kv_box = tile_m * BOX_ROW, tile_n * BOX_ROW
    q_bytes, kv_bytes = columns * q_box, columns * kv_box
    threads = (consumers + 1) * WARPGROUP
    few, many = (PACKED_REGISTERS if packed else REGISTERS)[consumers]
    score_count, sum_count, word_count = tile_n // 2, head_dim // 2, tile_n // 4
    n_blocks, d_blocks = tile_n // 8, head_dim // 8
    k_steps, v_steps = depth // 16, tile_n // 16
    ahead = q_stages > 1
    hidden_score = np.inf if negative else -np.inf  # signs change after the mask
    name = str(dtype)
    _, pack = pair_conversions(dtype)
    cap = soft_cap_function(exact=False)
    score_update = wgmma_update(name, tile_n)
    sum_update = wgmma_update(name, head_dim, a="registers", b_transposed=True)
    hold_scores, hold_sums, hold_words = hold(score_count), hold(sum_count), hold(word_count, "r")
    along_k = descriptor_bits(16, 8 * BOX_ROW, BOX_ROW)
    along_keys = descriptor_bits(kv_box, 8 * BOX_ROW, BOX_ROW)
    item = _walk(tile_m, tile_n, causal, windowed, has_lengths, packed)
    wipes_rows = has_lengths or packed  # what lies behind a sequence's last key may be anything
    pieces = head_dim // 8  # of 16 bytes in a row
    # mbarriers: K there, V there, K free, V free, q there, q free, rows of the result written (a ring of each), the rows behind a
    # length wiped
    k_full, v_full, k_free, v_free = (8 * stages * n for n in range(4))
    q_full, q_free, written = (8 * (4 * stages + n * q_stages) for n in range(3))
    wiped = written + 8 * q_stages * consumers
    next_items = wiped + 8 * stages  # a ring as long as q's: the number of the item after this one
    rows_barrier = 1  # the numbered barrier of the first consumer

    @cuda.jit(device=True, inline="always")
    def ring(base, kind, number):
        """The mbarrier of the ``number``-th tile of a kind."""
        return uint32(base + uint32(kind) + uint32(uint32(number % uint32(stages)) * uint32(8)))

    @cuda.jit(device=True, inline="always")
    def parity(number):
        return uint32(uint32(number // uint32(stages)) & uint32(1))

    @cuda.jit(device=True, inline="always")
    def tile_address(start, number):
        return uint32(start + uint32(uint32(number % uint32(stages)) * uint32(kv_bytes)))

    @cuda.jit(device=True, inline="always")
    def q_slot(turn):
        return uint32(turn % uint32(q_stages))

    @cuda.jit(device=True, inline="always")
    def q_barrier(base, kind, turn):
        return uint32(base + uint32(kind) + uint32(q_slot(turn) * uint32(8)))

    @cuda.jit(device=True, inline="always")
    def q_parity(turn):
        return uint32(uint32(turn // uint32(q_stages)) & uint32(1))

    @cuda.jit(device=True, inline="always")
    def rows_written(base, turn, group):
        which = uint32(uint32(q_slot(turn) * uint32(consumers)) + group)
        return uint32(base + uint32(written) + uint32(which * uint32(8)))

    @cuda.jit(device=True, inline="always")
    def bring(to, box_bytes, described, head, row, batch, barrier):
        """Ask for a tile: its boxes of 64 columns beside each other."""
        for c in range(columns):
            tensor_load_4d(uint32(to + uint32(c * box_bytes)), described, uint32(c * BOX), head, row, batch, barrier)

    @cuda.jit(device=True, inline="always")
    def low_word(address, bits):
        """The lower half of a tile's descriptor, in a form in which the compiler keeps it once a warp and adds to it there."""
        word = uint32(uint32(descriptor_address(address)) | uint32(bits & 0xFFFFFFFF))
        return ptx.shfl_idx_u32(word, uint32(0))

    @cuda.jit(device=True, inline="always")
    def operand(word, offset, bits):
        """The descriptor of what lies ``offset`` bytes into a tile; the address's field never carries into the next one."""
        return uint64(uint64(uint32(word + uint32(offset >> 4))) | uint64(bits >> 32 << 32))

    def make_part(first, end):
        @cuda.jit(device=True, inline="always")
        def part(scores, q_word, k_word):
            for i in range(end - first):
                s = first + i
                a = operand(q_word, s // 4 * q_box + s % 4 * 32, along_k)
                b = operand(k_word, s // 4 * kv_box + s % 4 * 32, along_k)
                score_update(scores, 0, a, b, uint32(1 if s else 0))

        return part

    # the compiler leaves a loop of more than eight products rolled
    multiply_first, multiply_rest = make_part(0, min(k_steps, 8)), make_part(min(k_steps, 8), k_steps)

    @cuda.jit(device=True, inline="always")
    def multiply_scores(scores, q_rows, k_tile):
        """scores = q · kᵀ, in flight."""
        q_word, k_word = low_word(q_rows, along_k), low_word(k_tile, along_k)
        multiply_first(scores, q_word, k_word)
        multiply_rest(scores, q_word, k_word)
        wgmma_commit()

    @cuda.jit(device=True, inline="always")
    def multiply_values(sums, words, v_tile):
        """sums += P · v, in flight."""
        v_word = low_word(v_tile, along_keys)
        for s in range(v_steps):
            sum_update(sums, 0, words, 4 * s, operand(v_word, 16 * BOX_ROW * s, along_keys), uint32(1))
        wgmma_commit()

    @cuda.jit(device=True, inline="always")
    def cap_scores(scores, scale_log2, cap_log2):
        if capped:
            for i in range(score_count):
                scores[i] = cap(scores[i] * scale_log2, cap_log2)

    @cuda.jit(device=True, inline="always")
    def mask(scores, position, first_key, end, window):
        """Hide scores. position: of the lane's first row among the keys; first_key: the lane's first one of the tile."""
        for h in range(2):
            here = int32(position + int32(8 * h))
            high = end  # keys from here on are hidden, and those up to ``low``: both are counted from first_key
            if causal:
                high = min(high, int32(here + int32(1)))
            high = int32(high - first_key)
            low = int32(here - window - first_key)
            for n in range(n_blocks):
                for i in range(2):
                    column = int32(8 * n + i)
                    hidden = column >= high
                    if windowed:
                        hidden = hidden or column <= low
                    if hidden:
                        scores[4 * n + 2 * h + i] = float32(hidden_score)

    @cuda.jit(device=True, inline="always")
    def softmax(scores, largest, total, shrink, scale_log2):
        """Scores become weights; shrink: by what the sums so far must be scaled."""
        if negative:
            for i in range(score_count):
                scores[i] = -scores[i]
        # four chains, two a row: a warp has the instruction pipe nearly to itself and would wait for each result
        chains = cuda.local.array(4, float32)
        origin = cuda.local.array(2, float32)
        for c in range(4):
            chains[c] = float32(-np.inf)
        for n in range(n_blocks):
            for c in range(4):
                chains[c] = ptx.fmax_nan(chains[c], scores[4 * n + c])
        for h in range(2):
            chains[h] = ptx.fmax_nan(chains[2 * h], chains[2 * h + 1])
        for h in range(2):
            chains[2 + h] = ptx.shfl_bfly(chains[h], uint32(1))
        for h in range(2):
            chains[h] = ptx.fmax_nan(chains[h], chains[2 + h])
        for h in range(2):
            chains[2 + h] = ptx.shfl_bfly(chains[h], uint32(2))
        for h in range(2):
            peak = ptx.fmax_nan(chains[h], chains[2 + h])
            if not capped:
                peak *= scale_log2
            old = largest[h]
            origin[h] = old
            if not peak <= old + float32(SLACK):  # a NaN goes through
                origin[h] = peak
            shrink[h] = ptx.ex2(old - origin[h])
            largest[h] = origin[h]
        for c in range(4):
            chains[c] = float32(0.0)
        for n in range(n_blocks):
            for c in range(4):
                exponent = scores[4 * n + c] - origin[c // 2]
                if not capped:
                    exponent = ptx.fma(scores[4 * n + c], scale_log2, -origin[c // 2])
                scores[4 * n + c] = ptx.ex2(exponent)
                chains[c] += scores[4 * n + c]
        for h in range(2):
            total[h] = ptx.fma(total[h], shrink[h], chains[2 * h] + chains[2 * h + 1])

    @cuda.jit(device=True, inline="always")
    def round_weights(scores, words):
        """The layout of a product's result is that of the next one's first factor."""
        for i in range(word_count):
            words[i] = pack(scores[2 * i], scores[2 * i + 1])

    @cuda.jit(device=True, inline="always")
    def scale_sums(sums, shrink):
        moved = uint32(1) if shrink[0] != float32(1.0) or shrink[1] != float32(1.0) else uint32(0)
        if ptx.warp_any(moved) != uint32(0):
            for n in range(d_blocks):
                for i in range(4):
                    sums[4 * n + i] *= shrink[i // 2]

    @cuda.jit(device=True, inline="always")
    def rows_of(q_ring, turn, group):
        """Where a warpgroup's rows of q are."""
        return uint32(q_ring + uint32(q_slot(turn) * uint32(q_bytes)) + uint32(group * uint32(ROWS * BOX_ROW)))

    @cuda.jit(device=True, inline="always")
    def take(counter, work, items):
        """The number of the item that a block takes after the one it has: asked for until it is none of ``items``."""
        ticket = ptx.address(counter, int64(0))
        if ticket == uint64(0):
            return uint32(work + uint32(cuda.gridDim.x))
        taken = uint32(ptx.atomic_add_relaxed(ticket, uint32(1)))
        if taken == uint32(items - uint32(1)):  # as many as there are items: this was the last time
            ptx.st_global(ticket, uint32(0))
        return uint32(uint32(cuda.gridDim.x) + taken)

    @cuda.jit(device=True, inline="always")
    def item_after(
        counter, work, items, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
        query_offsets, kv_offsets, sequences,
    ):  # fmt: skip
        """As ``take``, past the items that are beyond the end of packed sequences."""
        looking = True
        while looking:
            work = take(counter, work, items)
            looking = False
            if packed and work < items:
                _, _, first_row, _, _, _, _, rows, _, _ = item(
                    work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                    query_offsets, kv_offsets, sequences,
                )  # fmt: skip
                looking = first_row >= rows
        return work

    @cuda.jit(device=True, inline="always")
    def next_item(base, turn):
        """Where the number of the item after this one stands; it has come when this one's q has."""
        return uint32(base + uint32(next_items) + uint32(q_slot(turn) * uint32(4)))

    @cuda.jit(device=True, inline="always")
    def leave(base, q_rows, turn, group, sums, largest, total, sink, my_row, my_key):
        """The quotients take the place of the warpgroup's rows of q, in the same boxes, once all of its warps have used those."""
        barrier_sync(uint32(uint32(rows_barrier) + group), uint32(WARPGROUP))
        for h in range(2):
            whole = total[h]
            whole += ptx.shfl_bfly(whole, uint32(1))
            whole += ptx.shfl_bfly(whole, uint32(2))
            if has_sinks:
                factor, whole = join_sink(largest[h], whole, sink)
            inverse = float32(0.0)  # a row that saw nothing is zero
            if whole != float32(0.0):
                inverse = ptx.rcp(whole)
            if has_sinks:
                inverse *= factor
            inside = uint32(my_row + int32(8 * h))
            at = uint32(q_rows + uint32(inside * uint32(BOX_ROW)) + uint32(my_key * int32(2)))
            for n in range(d_blocks):
                chunk = uint32(uint32(uint32(n % 8) ^ uint32(inside & uint32(7))) * uint32(16))
                s = 4 * n + 2 * h
                ptx.st_shared(
                    uint32(at + uint32(n // 8 * q_box) + chunk), pack(sums[s] * inverse, sums[s + 1] * inverse)
                )
        fence_proxy_async()
        mbarrier_arrive(rows_written(base, turn, group))

    @kernel(launch_bounds=(threads, 1))  # setmaxnreg needs a known register count at entry
    def attention(
        q: tensor_map_type,
        k: tensor_map_type,
        v: tensor_map_type,
        out: tensor_map_type,
        kv_lengths: ptx.pointer("int32"),
        q_len: int32,
        kv_len: int32,
        heads: uint32,
        pairs: uint32,
        group_size: uint32,
        q_tiles: uint32,
        section: uint32,
        window: int32,
        scale_log2: float32,
        cap_log2: float32 if capped else None,
        sinks: ptx.pointer("float32") if has_sinks else None,
        query_offsets: ptx.pointer("int32") if packed else None,
        kv_offsets: ptx.pointer("int32") if packed else None,
        sequences: uint32 if packed else None,
        out_rows: ptx.pointer(dtype) if packed else None,
        out_token: int64 if packed else None,
        out_head: int64 if packed else None,
        counter: ptx.pointer("uint32"),  # of items taken, or null
    ):
        t = uint32(cuda.threadIdx.x)
        # the warpgroup's number, in a form in which the compiler sees that a warp shares it
        group = ptx.shfl_idx_u32(uint32(t // uint32(WARPGROUP)), uint32(0))
        base = uint32(uint32(ptx.shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00))
        q_ring = uint32(base + uint32(BARRIER_BYTES))
        k_ring = uint32(q_ring + uint32(q_stages * q_bytes))
        v_ring = uint32(k_ring + uint32(stages * kv_bytes))
        items = uint32(pairs * q_tiles)
        if t == uint32(0):
            for s in range(stages):
                for full in (k_full, v_full):
                    mbarrier_init(uint32(base + uint32(full + 8 * s)), uint32(1))
                mbarrier_init(uint32(base + uint32(wiped + 8 * s)), uint32(ptx.WARP))
                for free in (k_free, v_free):
                    mbarrier_init(uint32(base + uint32(free + 8 * s)), uint32(4 * consumers))
            for s in range(q_stages):
                mbarrier_init(uint32(base + uint32(q_full + 8 * s)), uint32(1))
                mbarrier_init(uint32(base + uint32(q_free + 8 * s)), uint32(2 if wipes_rows else 1))
                for g in range(consumers):
                    mbarrier_init(rows_written(base, uint32(s), uint32(g)), uint32(WARPGROUP))
            fence_mbarrier_init()
        cuda.syncthreads()

        number = uint32(0)  # of tiles before this item, by which the rings turn
        work = uint32(cuda.blockIdx.x)
        turn = uint32(0)  # items before this one, by which the ring of q turns
        wipes = uint32(0)  # parities of a ring of which not every round is used: a bit each
        if group == uint32(consumers):
            fewer_registers(few)
            warp = uint32(uint32(t // uint32(ptx.WARP)) & uint32(3))
            if t == uint32(consumers * WARPGROUP):
                q_map, k_map, v_map = tensor_map_address(q), tensor_map_address(k), tensor_map_address(v)
                prefetch_tensor_map(q_map)
                prefetch_tensor_map(k_map)
                prefetch_tensor_map(v_map)
                following = item_after(
                    counter, work, items, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                    query_offsets, kv_offsets, sequences,
                )  # fmt: skip
                while work < items:
                    batch, head, first_row, _, _, first_tile, tiles, rows, q_at, kv_at = item(
                        work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                        query_offsets, kv_offsets, sequences,
                    )  # fmt: skip
                    kv_head = uint32(head // group_size)
                    left = tiles
                    asked = False
                    while left > int32(0) or not asked:
                        key = uint32(int32(first_tile + left - int32(1)) * int32(tile_n))
                        if packed:
                            key = uint32(key + uint32(kv_at))
                        if left > int32(0):
                            barrier = ring(base, k_full, number)
                            mbarrier_wait(ring(base, k_free, number), uint32(parity(number) ^ uint32(1)))
                            mbarrier_expect(barrier, uint32(kv_bytes))
                            to = tile_address(k_ring, number)
                            bring(to, kv_box, k_map, kv_head, key, batch, barrier)
                        if not asked:  # behind the first K: that may come while the item before is still written
                            asked = True
                            barrier = q_barrier(base, q_full, turn)
                            mbarrier_wait(q_barrier(base, q_free, turn), uint32(q_parity(turn) ^ uint32(1)))
                            ptx.st_shared(next_item(base, turn), following)
                            to = uint32(q_ring + uint32(q_slot(turn) * uint32(q_bytes)))
                            mbarrier_expect(barrier, uint32(q_bytes))
                            q_row = uint32(first_row)
                            if packed:
                                q_row = uint32(q_row + uint32(q_at))
                            bring(to, q_box, q_map, head, q_row, batch, barrier)
                        if left > int32(0):
                            barrier = ring(base, v_full, number)
                            mbarrier_wait(ring(base, v_free, number), uint32(parity(number) ^ uint32(1)))
                            mbarrier_expect(barrier, uint32(kv_bytes))
                            to = tile_address(v_ring, number)
                            bring(to, kv_box, v_map, kv_head, key, batch, barrier)
                            number = uint32(number + uint32(1))
                        left = int32(left - int32(1))
                    turn = uint32(turn + uint32(1))
                    work = following
                    if work < items:
                        following = item_after(
                            counter, work, items, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                            query_offsets, kv_offsets, sequences,
                        )  # fmt: skip
            elif wipes_rows and warp == uint32(1):
                # What stands behind a sequence's length may be anything, and a weight of 0 times NaN would be NaN
                lane = ptx.lane_id()
                while work < items:
                    _, _, first_row, count, _, first_tile, tiles, rows, _, _ = item(
                        work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                        query_offsets, kv_offsets, sequences,
                    )  # fmt: skip
                    there = int32(count - int32(first_tile + tiles - int32(1)) * int32(tile_n))  # rows of the last tile
                    if tiles > int32(0) and there < int32(tile_n):
                        mbarrier_wait(ring(base, v_full, number), parity(number))
                        last = tile_address(v_ring, number)
                        for c in range(columns):
                            at = uint32(uint32(there * int32(BOX_ROW)) + uint32(lane * uint32(16)))
                            while at < uint32(kv_box):
                                zero = uint32(0)
                                ptx.st_shared_v4(uint32(last + uint32(c * kv_box) + at), zero, zero, zero, zero)
                                at = uint32(at + uint32(16 * ptx.WARP))
                        fence_proxy_async()
                        mbarrier_arrive(ring(base, wiped, number))
                    number = uint32(number + uint32(tiles))
                    mbarrier_wait(q_barrier(base, q_full, turn), q_parity(turn))
                    work = ptx.ld_shared(next_item(base, turn))
                    if lane == uint32(0):
                        mbarrier_arrive(q_barrier(base, q_free, turn))
                    turn = uint32(turn + uint32(1))
            elif packed and warp == uint32(2):
                # as below, but a sequence's last rows leave by plain stores: in their box stand rows of the next one as well
                out_map = tensor_map_address(out)
                lane = ptx.lane_id()
                while work < items:
                    batch, head, first_row, _, _, _, _, rows, q_at, _ = item(
                        work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                        query_offsets, kv_offsets, sequences,
                    )  # fmt: skip
                    rows_from = uint32(q_ring + uint32(q_slot(turn) * uint32(q_bytes)))
                    for g in range(consumers):
                        mbarrier_wait(rows_written(base, turn, uint32(g)), q_parity(turn))
                        out_row = int32(q_at + first_row + int32(ROWS * g))
                        left = int32(rows - first_row - int32(ROWS * g))
                        box = uint32(rows_from + uint32(g * ROWS * BOX_ROW))
                        if left >= int32(ROWS):
                            if lane == uint32(0):
                                for c in range(columns):
                                    part = uint32(box + uint32(c * q_box))
                                    tensor_store_4d(out_map, uint32(c * BOX), head, uint32(out_row), batch, part)
                                bulk_commit()
                        elif left > int32(0):
                            start = int64(out_row) * out_token + int64(head) * out_head
                            number = lane
                            while number < uint32(uint32(left) * uint32(pieces)):
                                inside = uint32(number // uint32(pieces))
                                piece = uint32(number - uint32(inside * uint32(pieces)))
                                chunk = uint32(uint32(piece & uint32(7)) ^ uint32(inside & uint32(7)))
                                at = uint32(box + uint32(uint32(piece >> uint32(3)) * uint32(q_box)))
                                at = uint32(at + uint32(inside * uint32(BOX_ROW)) + uint32(chunk * uint32(16)))
                                w = ptx.ld_shared_v4(at)
                                to = start + int64(inside) * out_token + int64(uint32(piece * uint32(8)))
                                ptx.st_global_v4(ptx.address(out_rows, to), w[0], w[1], w[2], w[3])
                                number = uint32(number + uint32(ptx.WARP))
                    ptx.warp_sync()
                    work = ptx.ld_shared(next_item(base, turn))
                    if lane == uint32(0):
                        bulk_wait_read(0)
                    ptx.warp_sync()
                    if lane == uint32(0):
                        mbarrier_arrive(q_barrier(base, q_free, turn))
                    turn = uint32(turn + uint32(1))
            elif not packed and t == uint32(consumers * WARPGROUP + 2 * ptx.WARP):
                # rows of the result leave while their warpgroup is at its next item
                out_map = tensor_map_address(out)
                while work < items:
                    batch, head, first_row, _, _, _, _, _, _, _ = item(
                        work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                        query_offsets, kv_offsets, sequences,
                    )  # fmt: skip
                    rows_from = uint32(q_ring + uint32(q_slot(turn) * uint32(q_bytes)))
                    for g in range(consumers):
                        mbarrier_wait(rows_written(base, turn, uint32(g)), q_parity(turn))
                        out_row = int32(first_row + int32(ROWS * g))
                        if out_row < q_len:
                            for c in range(columns):
                                box = uint32(rows_from + uint32(c * q_box + g * ROWS * BOX_ROW))
                                tensor_store_4d(out_map, uint32(c * BOX), head, uint32(out_row), batch, box)
                            bulk_commit()
                    bulk_wait_read(0)
                    work = ptx.ld_shared(next_item(base, turn))
                    mbarrier_arrive(q_barrier(base, q_free, turn))
                    turn = uint32(turn + uint32(1))
        else:
            more_registers(many)
            sums = cuda.local.array(sum_count, float32)
            scores = cuda.local.array(score_count, float32)
            words = cuda.local.array(word_count, uint32)
            # of the lane's two rows, lane / 4 and eight below
            largest = cuda.local.array(2, float32)
            total = cuda.local.array(2, float32)
            shrink = cuda.local.array(2, float32)
            lane = ptx.lane_id()
            warp = uint32(uint32(t // uint32(ptx.WARP)) & uint32(3))
            my_row = int32(uint32(warp * uint32(16)) + uint32(lane >> uint32(2)))
            my_key = int32(uint32(uint32(lane & uint32(3)) << uint32(1)))
            batch, head, first_row, count, end, first_tile, tiles, rows, _, _ = item(
                work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                query_offsets, kv_offsets, sequences,
            )  # fmt: skip
            asked = False  # whether the scores of this item's first tile are there
            while work < items:
                first_row = int32(first_row + int32(group * uint32(ROWS)))
                row = int32(count - rows + first_row)
                for i in range(sum_count):
                    sums[i] = float32(0.0)
                for h in range(2):
                    largest[h] = NOTHING
                    total[h] = float32(0.0)
                sink = float32(0.0)
                if has_sinks:
                    sink = sinks[head]
                q_rows = rows_of(q_ring, turn, group)
                last = uint32(0)  # the number of the tile whose weights wait for their product
                if not asked:
                    mbarrier_wait(q_barrier(base, q_full, turn), q_parity(turn))
                if tiles > int32(0):
                    tile = int32(first_tile + tiles - int32(1))
                    # tiles from plain_first to plain_end - 1 are seen whole by all of the warpgroup's rows
                    clear = end
                    if causal:
                        clear = max(min(end, int32(row + int32(1))), int32(0))
                    plain_end = int32(uint32(clear) // uint32(tile_n))
                    plain_first = first_tile
                    if windowed:
                        seen = max(int32(row + int32(ROWS) - window), int32(0))
                        plain_first = int32(uint32(seen + int32(tile_n - 1)) // uint32(tile_n))

                    first_key = int32(int32(tile * int32(tile_n)) + my_key)
                    if not asked:
                        mbarrier_wait(ring(base, k_full, number), parity(number))
                        hold_scores(scores, 0)
                        wgmma_fence()
                        multiply_scores(scores, q_rows, tile_address(k_ring, number))
                        wgmma_wait(0)
                        hold_scores(scores, 0)
                    if lane == uint32(0):
                        mbarrier_arrive(ring(base, k_free, number))
                    cap_scores(scores, scale_log2, cap_log2)
                    if tile >= plain_end or tile < plain_first:
                        mask(scores, int32(row + my_row), first_key, end, window)
                    softmax(scores, largest, total, shrink, scale_log2)
                    round_weights(scores, words)
                    mbarrier_wait(ring(base, v_full, number), parity(number))
                    if wipes_rows and int32(int32(tile + int32(1)) * int32(tile_n)) > count:
                        slot = uint32(number % uint32(stages))
                        mbarrier_wait(ring(base, wiped, number), uint32(uint32(wipes >> slot) & uint32(1)))
                        wipes = uint32(wipes ^ uint32(uint32(1) << slot))
                    last = number
                    number = uint32(number + uint32(1))
                    tile = int32(tile - int32(1))
                    while tile >= first_tile:
                        # the scores of this tile and the sums of the one before it, then the weights of this tile
                        first_key = int32(first_key - int32(tile_n))
                        mbarrier_wait(ring(base, k_full, number), parity(number))
                        hold_scores(scores, 0)
                        hold_sums(sums, 0)
                        hold_words(words, 0)
                        wgmma_fence()
                        multiply_scores(scores, q_rows, tile_address(k_ring, number))
                        multiply_values(sums, words, tile_address(v_ring, last))
                        wgmma_wait(1)
                        hold_scores(scores, 0)
                        if lane == uint32(0):
                            mbarrier_arrive(ring(base, k_free, number))
                        cap_scores(scores, scale_log2, cap_log2)
                        if tile >= plain_end or tile < plain_first:
                            mask(scores, int32(row + my_row), first_key, end, window)
                        softmax(scores, largest, total, shrink, scale_log2)
                        # V of the next product; and a branch, over which ptxas does not move the softmax behind the wait below
                        mbarrier_wait(ring(base, v_full, number), parity(number))
                        wgmma_wait(0)
                        hold_sums(sums, 0)
                        hold_words(words, 0)
                        if lane == uint32(0):
                            mbarrier_arrive(ring(base, v_free, last))
                        scale_sums(sums, shrink)
                        round_weights(scores, words)
                        last = number
                        number = uint32(number + uint32(1))
                        tile = int32(tile - int32(1))

                pending = tiles > int32(0)
                # in a form in which the compiler sees that a warp shares it
                work = ptx.shfl_idx_u32(ptx.ld_shared(next_item(base, turn)), uint32(0))
                more = work < items
                if more:
                    batch, head, first_row, count, end, first_tile, tiles, rows, _, _ = item(
                        work, kv_lengths, q_len, kv_len, heads, pairs, q_tiles, section, window,
                        query_offsets, kv_offsets, sequences,
                    )  # fmt: skip
                asked = False
                if ahead:
                    asked = pending and more and tiles > int32(0)
                if asked:
                    # the next item's first scores are computed while this item's sums are written
                    following = uint32(turn + uint32(1))
                    mbarrier_wait(q_barrier(base, q_full, following), q_parity(following))
                    mbarrier_wait(ring(base, k_full, number), parity(number))
                    hold_scores(scores, 0)
                    hold_sums(sums, 0)
                    hold_words(words, 0)
                    wgmma_fence()
                    multiply_values(sums, words, tile_address(v_ring, last))
                    multiply_scores(scores, rows_of(q_ring, following, group), tile_address(k_ring, number))
                    wgmma_wait(1)
                    hold_sums(sums, 0)
                    hold_words(words, 0)
                    if lane == uint32(0):
                        mbarrier_arrive(ring(base, v_free, last))
                    leave(base, q_rows, turn, group, sums, largest, total, sink, my_row, my_key)
                    wgmma_wait(0)
                    hold_scores(scores, 0)
                else:
                    if pending:
                        hold_sums(sums, 0)
                        hold_words(words, 0)
                        wgmma_fence()
                        multiply_values(sums, words, tile_address(v_ring, last))
                        wgmma_wait(0)
                        hold_sums(sums, 0)
                        hold_words(words, 0)
                        if lane == uint32(0):
                            mbarrier_arrive(ring(base, v_free, last))
                    leave(base, q_rows, turn, group, sums, largest, total, sink, my_row, my_key)
                turn = uint32(turn + uint32(1))

    return attention


def constants_for(dtype, head_dim, negative, masks, q_len=0):
    """The kernel's constants. masks: (causal, windowed, has_lengths[, capped, has_sinks[, packed]]).

    q_len: 0 where sequences are packed: a sequence's bits do not depend on the others.
    """
    choices = next(TILES[most] for most in TILES if head_dim <= most)
    tiles = next(tiles for least, tiles in reversed(choices) if q_len >= least)
    return (dtype, head_dim, *tiles, negative, *masks)


@lru_cache(maxsize=4096)
def plan(constants, batch, q_len, kv_len, heads, kv_heads, sm_count, sequences=0):
    """(Plan, query tiles, pairs of sequence and head whose keys and values pass together). sequences: how many are packed."""
    _, head_dim, tile_n, stages, consumers, q_stages = constants[:6]
    tile_m = consumers * ROWS
    q_tiles = tile_count(q_len, tile_m, sequences) if sequences else -(-q_len // tile_m)
    pairs = batch * heads
    group = heads // kv_heads
    pair_bytes = max(kv_len * boxes(head_dim) * BOX_ROW * 2 // group, 1)
    section = min(max(SECTION_BYTES // pair_bytes // group, 1) * group, pairs)
    grid = min(pairs * q_tiles, sm_count)
    threads = (consumers + 1) * WARPGROUP
    shared = shared_bytes(head_dim, tile_n, stages, consumers, q_stages)
    return Plan(attention_wgmma_kernel, constants, (grid, 1, 1), (threads, 1, 1), shared), q_tiles, section


def serves(q, k, v, out, sequences, device):
    """Whether this kernel computes the attention of these arrays. sequences: how many are packed."""
    return (
        device.arch == "sm_90a"
        and q.itemsize == 2
        and (q.shape[1] >= ROWS or sequences > 0)  # a packed sequence's bits must not depend on how many rows follow it
        and 32 <= q.shape[3] <= 256
        and q.shape[3] % 8 == 0
        and all(describes(x) for x in (q, k, v, out))
    )


def run(q, k, v, masks, scale_log2, negative, window, kv_lengths, out, extra, sequences, device, stream):
    """scale_log2: the scale's magnitude · log2(e); window: any number where masks say that there is none.

    extra: the arguments of a soft cap, of sinks and of packed sequences.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    masks = (*masks, sequences > 0)
    constants = constants_for(q.dtype, head_dim, negative, masks, 0 if sequences else q_len)
    tile_n, consumers = constants[2], constants[4]
    chosen, q_tiles, section = plan(constants, batch, q_len, kv_len, heads, kv_heads, device.sm_count, sequences)
    boxes_of = [(q, consumers * ROWS), (k, tile_n), (v, tile_n), (out, ROWS)]
    maps = [tensor_map(x, (1, rows, 1, BOX), device=device) for x, rows in boxes_of]
    lengths = 0 if kv_lengths is None else kv_lengths.pointer
    sizes = (q_len, kv_len, heads, batch * heads, heads // kv_heads, q_tiles, section, window, scale_log2)
    if sequences:
        extra += (out.pointer, *out.strides[1:3])
    # items of unequal length are taken by whichever block is free
    counter = None
    if (any(masks[:3]) or sequences) and batch * heads * q_tiles > chosen.grid[0]:
        counter = memory.counters(1, stream)
    launch(chosen, (*maps, lengths, *sizes, *extra, 0 if counter is None else counter.pointer), device, stream)
