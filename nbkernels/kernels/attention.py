"""Attention for prompts: many query rows against many keys, without the matrix of scores ever leaving the chip.

    out[b, i, h] = sum_j softmax_j(scale · q[b, i, h] · k[b, j, h / group]) · v[b, j, h / group]

FlashAttention-2 (Dao 2023) with the online softmax of Milakov and Gimelshein (2018). A block owns TILE_M query rows of one
head and walks the keys in tiles; K and V of the next tile travel to shared memory while this one is multiplied:

            keys ->  tile 0 | tile 1 | … | tile t (the diagonal: masked) | later tiles are skipped
    rows    ┌──────┐
    TILE_M  │ S    │  S = q · kᵀ in registers, running maximum and sum a row, P = exp2(S - maximum)
            └──────┘  out += P · v, P straight from the registers that held S

Two kernels: 16-bit inputs on the tensor cores (mma.sync m16n8k16, float32 sums; a warp owns 16 rows), float32 by fused
multiply-adds (the tensor cores' tf32 would lose half of the digits; a thread owns 4 rows by 4 columns). Few query tokens are
``decode``'s.
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from nbkernels import ptx
from nbkernels.kernels import decode
from nbkernels.kernels.elements import Cost, aligned, conversions, vector_width
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

FEW_TOKENS = 8  # up to so many query tokens a sequence are decode's: its blocks split the keys, these split the queries
TILE_M = 64
WARPS = TILE_M // 16
THREADS = WARPS * ptx.WARP
PIECE = 8  # 16-bit elements in 16 bytes
PAD = PIECE  # elements behind each row in shared memory: an odd number of 16-byte pieces a row keeps ldmatrix off one bank
LOG2E = np.log2(np.e)
# where a row has seen nothing: finite, since the difference of two infinities is NaN
NOTHING = np.float32(-1e38)

FLOAT_TILE = 32  # query rows and keys a tile of the float32 kernel
FLOAT_THREADS = 128


def _padded(head_dim):
    """head_dim up to the next multiple of 16, the depth of a tensor-core product; zeros fill the rest."""
    return -(-head_dim // 16) * 16


def tile_keys(head_dim):
    """Keys a tile: 64, or 32 where the sums of a wide head leave no registers for more."""
    return 64 if _padded(head_dim) <= 128 else 32


@cache
def _copy_tile(dtype, head_dim, tile_rows, wide):
    """copy(tile, pointer, start, stride, first, last): rows first, first + 1, … below last into shared memory, zeros elsewhere.

    start: the element where row 0 begins; tile: byte address of [tile_rows, padded head_dim + PAD]. With ``wide`` the copy is
    asynchronous, 16 bytes at a time; else element by element.
    """
    depth = _padded(head_dim)
    row_bytes = 2 * (depth + PAD)
    pieces = depth // PIECE
    rounds = -(-tile_rows * pieces // THREADS)

    @cuda.jit(device=True, inline="always")
    def element(pointer, at, column):
        return uint32(pointer[at + int64(column)]) if column < uint32(head_dim) else uint32(0)

    @cuda.jit(device=True, inline="always")
    def pair(pointer, at, column):
        low = element(pointer, at, column)
        return uint32(low | uint32(element(pointer, at, uint32(column + uint32(1))) << uint32(16)))

    @cuda.jit(device=True, inline="always")
    def copy(tile, pointer, start, stride, first, last):
        for i in range(rounds):
            number = uint32(uint32(cuda.threadIdx.x) + uint32(i * THREADS))
            if number < uint32(tile_rows * pieces):
                inside = uint32(number // uint32(pieces))
                column = uint32(uint32(number % uint32(pieces)) * uint32(PIECE))
                to = uint32(tile + uint32(inside * uint32(row_bytes)) + uint32(column * uint32(2)))
                row = first + int32(inside)
                there = row < last
                if wide:
                    count = uint32(16) if there and column < uint32(head_dim) else uint32(0)
                    at = start + int64(row) * stride + int64(column) if count != uint32(0) else start
                    ptx.cp_async_16_zfill(to, ptx.address(pointer, at), count)
                elif there:
                    at = start + int64(row) * stride
                    ptx.st_shared_v4(
                        to,
                        pair(pointer, at, column),
                        pair(pointer, at, uint32(column + uint32(2))),
                        pair(pointer, at, uint32(column + uint32(4))),
                        pair(pointer, at, uint32(column + uint32(6))),
                    )
                else:
                    ptx.st_shared_v4(to, uint32(0), uint32(0), uint32(0), uint32(0))

    return copy


def attention_kernel(dtype, head_dim, wide, causal, windowed, has_lengths):
    """16-bit attention on the tensor cores. grid: batch · heads · query tiles, the last tile (the longest) first."""
    tile_n = tile_keys(head_dim)
    depth = _padded(head_dim)
    row_bytes = 2 * (depth + PAD)
    q_bytes, kv_bytes = TILE_M * row_bytes, tile_n * row_bytes
    k_steps, n_blocks, d_blocks = depth // 16, tile_n // 8, depth // 8
    score_count, sum_count = 4 * n_blocks, 4 * d_blocks
    keep_q = depth <= 128  # else q's fragments are read again for each tile: the registers hold the sums
    q_words = 4 * k_steps if keep_q else 4
    q_step = 4 if keep_q else 0
    is_bf16 = str(dtype) == "bfloat16"
    mma = ptx.mma_m16n8k16_bf16 if is_bf16 else ptx.mma_m16n8k16_f16
    pack = ptx.bf16x2_from_floats if is_bf16 else ptx.f16x2_from_floats
    _, to_storage = conversions(dtype)
    copy_q = _copy_tile(dtype, head_dim, TILE_M, wide)
    copy_kv = _copy_tile(dtype, head_dim, tile_n, wide)

    @cuda.jit(device=True, inline="always")
    def multiply_scores(q_tile, k_tile, q_fragments, scores, lane, warp):
        """scores = q · kᵀ of this warp's 16 rows."""
        for i in range(score_count):
            scores[i] = float32(0.0)
        for s in range(k_steps):
            if not keep_q:
                row = uint32(uint32(warp * uint32(16)) + uint32(lane & uint32(15)))
                at = uint32(q_tile + uint32(row * uint32(row_bytes)) + uint32(uint32(lane >> uint32(4)) * uint32(16)))
                words = ptx.ldmatrix_x4(uint32(at + uint32(32 * s)))
                for j in range(4):
                    q_fragments[q_step * s + j] = words[j]
            for n in range(n_blocks // 2):
                # two blocks of eight keys: matrices (keys 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
                row = uint32(uint32(16 * n) + uint32(uint32(lane >> uint32(4)) << uint32(3)) + uint32(lane & uint32(7)))
                half = uint32(uint32(lane >> uint32(3)) & uint32(1))
                b = ptx.ldmatrix_x4(
                    uint32(k_tile + uint32(row * uint32(row_bytes)) + uint32(32 * s) + uint32(half << uint32(4)))
                )
                for j in range(2):
                    c = 4 * (2 * n + j)
                    d = mma(
                        q_fragments[q_step * s],
                        q_fragments[q_step * s + 1],
                        q_fragments[q_step * s + 2],
                        q_fragments[q_step * s + 3],
                        b[2 * j],
                        b[2 * j + 1],
                        scores[c],
                        scores[c + 1],
                        scores[c + 2],
                        scores[c + 3],
                    )
                    for i in range(4):
                        scores[c + i] = d[i]

    @cuda.jit(device=True, inline="always")
    def multiply_values(scores, v_tile, sums, lane):
        """sums += P · v, P packed from scores: the layout of a product's result is that of the next one's first factor."""
        for s in range(tile_n // 16):
            a0 = pack(scores[8 * s], scores[8 * s + 1])
            a1 = pack(scores[8 * s + 2], scores[8 * s + 3])
            a2 = pack(scores[8 * s + 4], scores[8 * s + 5])
            a3 = pack(scores[8 * s + 6], scores[8 * s + 7])
            for n in range(d_blocks // 2):
                # 16 keys by 16 columns, transposed on the way: (keys 0-7, columns 0-7), (8-15, 0-7), then columns 8-15
                row = uint32(uint32(16 * s) + uint32(lane & uint32(15)))
                column = uint32(uint32(16 * n) + uint32(uint32(lane >> uint32(4)) << uint32(3)))
                b = ptx.ldmatrix_x4_trans(
                    uint32(v_tile + uint32(row * uint32(row_bytes)) + uint32(column << uint32(1)))
                )
                for j in range(2):
                    c = 4 * (2 * n + j)
                    d = mma(a0, a1, a2, a3, b[2 * j], b[2 * j + 1], sums[c], sums[c + 1], sums[c + 2], sums[c + 3])
                    for i in range(4):
                        sums[c + i] = d[i]

    @kernel(launch_bounds=THREADS)
    def attention(
        q: ptx.pointer(dtype),
        k: ptx.pointer(dtype),
        v: ptx.pointer(dtype),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer(dtype),
        q_len: int32,
        kv_len: int32,
        heads: uint32,
        group: uint32,
        q_tiles: uint32,
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
        q_tile = ptx.shared_address(cuda.shared.array(0, uint16))
        k_ring = uint32(q_tile + uint32(q_bytes))
        v_ring = uint32(k_ring + uint32(2 * kv_bytes))
        sums = cuda.local.array(sum_count, float32)
        scores = cuda.local.array(score_count, float32)
        q_fragments = cuda.local.array(q_words, uint32)
        largest = cuda.local.array(2, float32)  # of the lane's two rows: lane / 4, and eight below
        total = cuda.local.array(2, float32)

        block = uint32(cuda.blockIdx.x)
        tile = uint32(q_tiles - uint32(1) - uint32(block % q_tiles))
        block = uint32(block // q_tiles)
        head = int64(block % heads)
        batch = int64(block // heads)
        kv_head = int64(uint32(block % heads) // group)
        lane = ptx.lane_id()
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))

        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        first_row = int32(tile) * int32(TILE_M)
        last_row = min(first_row + int32(TILE_M), q_len)
        top = count - q_len + first_row  # the position of the block's first row
        end = count  # keys begin to end - 1 are seen by some row
        begin = int32(0)
        if causal:
            end = max(min(count, count - q_len + last_row), int32(0))
        if windowed:
            begin = max(top - window + int32(1), int32(0))
        key = (begin // int32(tile_n)) * int32(tile_n)

        k_start = batch * k_batch + kv_head * k_head
        v_start = batch * v_batch + kv_head * v_head
        copy_q(q_tile, q, batch * q_batch + head * q_head, q_token, first_row, last_row)
        if key < end:
            copy_kv(k_ring, k, k_start, k_token, key, end)
        ptx.cp_async_commit()
        if key < end:
            copy_kv(v_ring, v, v_start, v_token, key, end)
        ptx.cp_async_commit()

        for i in range(sum_count):
            sums[i] = float32(0.0)
        for h in range(2):
            largest[h] = NOTHING
            total[h] = float32(0.0)
        my_row = int32(uint32(warp * uint32(16)) + uint32(lane >> uint32(2)))
        my_key = int32(uint32(uint32(lane & uint32(3)) << uint32(1)))
        fresh = True
        stage = uint32(0)
        while key < end:
            ptx.cp_async_wait(1)  # K of this tile (and q) is there; V may still fly
            cuda.syncthreads()
            if keep_q and fresh:
                row = uint32(uint32(warp * uint32(16)) + uint32(lane & uint32(15)))
                at = uint32(q_tile + uint32(row * uint32(row_bytes)) + uint32(uint32(lane >> uint32(4)) * uint32(16)))
                for s in range(k_steps):
                    words = ptx.ldmatrix_x4(uint32(at + uint32(32 * s)))
                    for j in range(4):
                        q_fragments[q_step * s + j] = words[j]
                fresh = False
            following = key + int32(tile_n)
            other = uint32(stage ^ uint32(1))
            if following < end:
                copy_kv(uint32(k_ring + uint32(other * uint32(kv_bytes))), k, k_start, k_token, following, end)
            ptx.cp_async_commit()
            multiply_scores(q_tile, uint32(k_ring + uint32(stage * uint32(kv_bytes))), q_fragments, scores, lane, warp)

            for i in range(score_count):
                scores[i] *= scale_log2
            partly = following > end
            if causal:
                partly = partly or following - int32(1) > top
            if windowed:
                partly = partly or key <= top + int32(TILE_M - 1) - window
            if partly:
                for n in range(n_blocks):
                    for i in range(4):
                        column = key + int32(8 * n) + my_key + int32(i & 1)
                        position = top + my_row + int32(8 * (i >> 1))
                        hidden = column >= end
                        if causal:
                            hidden = hidden or column > position
                        if windowed:
                            hidden = hidden or column <= position - window
                        if hidden:
                            scores[4 * n + i] = float32(-np.inf)
            for h in range(2):
                new = largest[h]
                for n in range(n_blocks):
                    new = ptx.fmax_nan(new, scores[4 * n + 2 * h])
                    new = ptx.fmax_nan(new, scores[4 * n + 2 * h + 1])
                new = ptx.fmax_nan(new, ptx.shfl_bfly(new, uint32(1)))
                new = ptx.fmax_nan(new, ptx.shfl_bfly(new, uint32(2)))
                shrink = ptx.ex2(largest[h] - new)
                largest[h] = new
                part = float32(0.0)
                for n in range(n_blocks):
                    for i in range(2):
                        weight = ptx.ex2(scores[4 * n + 2 * h + i] - new)
                        scores[4 * n + 2 * h + i] = weight
                        part += weight
                total[h] = total[h] * shrink + part
                for n in range(d_blocks):
                    sums[4 * n + 2 * h] *= shrink
                    sums[4 * n + 2 * h + 1] *= shrink

            ptx.cp_async_wait(1)  # V of this tile is there; K of the next may still fly
            cuda.syncthreads()
            if following < end:
                copy_kv(uint32(v_ring + uint32(other * uint32(kv_bytes))), v, v_start, v_token, following, end)
            ptx.cp_async_commit()
            multiply_values(scores, uint32(v_ring + uint32(stage * uint32(kv_bytes))), sums, lane)
            stage = other
            key = following

        for h in range(2):
            whole = total[h]
            whole += ptx.shfl_bfly(whole, uint32(1))
            whole += ptx.shfl_bfly(whole, uint32(2))
            inverse = float32(0.0)  # a row that saw nothing is zero
            if whole != float32(0.0):
                inverse = float32(1.0) / whole
            row = first_row + my_row + int32(8 * h)
            if row < q_len:
                to = batch * out_batch + int64(row) * out_token + head * out_head
                for n in range(d_blocks):
                    for i in range(2):
                        column = int32(8 * n) + my_key + int32(i)
                        if column < int32(head_dim):
                            out[to + int64(column)] = to_storage(sums[4 * n + 2 * h + i] * inverse)

    return attention


def float_attention_kernel(head_dim, causal, windowed, has_lengths):
    """float32 attention by fused multiply-adds. grid: batch · heads · query tiles of FLOAT_TILE rows, the last tile first.

    A thread owns 2 rows by 4 keys of the scores, and 2 rows by every 8th column of the sums; the 8 threads of a row pair are
    neighbours in a warp and combine by shuffles.
    """
    columns = -(-head_dim // 8)  # of the sums a thread owns in each of its rows
    stride = 8 * columns + 1  # an odd row length keeps neighbouring rows on different banks
    sum_count = 2 * columns
    tile = FLOAT_TILE
    tile_size = tile * stride
    score_size = tile * (tile + 1)

    @cuda.jit(device=True, inline="always")
    def copy(target, source, start, row_stride, first, last):
        number = uint32(cuda.threadIdx.x)
        while number < uint32(tile * 8 * columns):
            inside = uint32(number // uint32(8 * columns))
            column = uint32(number % uint32(8 * columns))
            row = first + int32(inside)
            value = float32(0.0)
            if row < last and column < uint32(head_dim):
                value = source[start + int64(row) * row_stride + int64(column)]
            target[uint32(inside * uint32(stride) + column)] = value
            number = uint32(number + uint32(FLOAT_THREADS))

    @kernel(launch_bounds=FLOAT_THREADS)
    def float_attention(
        q: ptx.pointer("float32"),
        k: ptx.pointer("float32"),
        v: ptx.pointer("float32"),
        kv_lengths: ptx.pointer("int32"),
        out: ptx.pointer("float32"),
        q_len: int32,
        kv_len: int32,
        heads: uint32,
        group: uint32,
        q_tiles: uint32,
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
        shared = cuda.shared.array(0, float32)
        q_tile = shared[0:tile_size]
        kv_tile = shared[tile_size : 2 * tile_size]
        weights = shared[2 * tile_size : 2 * tile_size + score_size]
        sums = cuda.local.array(sum_count, float32)
        scores = cuda.local.array(8, float32)
        largest = cuda.local.array(2, float32)
        total = cuda.local.array(2, float32)

        block = uint32(cuda.blockIdx.x)
        query_tile = uint32(q_tiles - uint32(1) - uint32(block % q_tiles))
        block = uint32(block // q_tiles)
        head = int64(block % heads)
        batch = int64(block // heads)
        kv_head = int64(uint32(block % heads) // group)
        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        first_row = int32(query_tile) * int32(tile)
        last_row = min(first_row + int32(tile), q_len)
        top = count - q_len + first_row
        end = count
        begin = int32(0)
        if causal:
            end = max(min(count, count - q_len + last_row), int32(0))
        if windowed:
            begin = max(top - window + int32(1), int32(0))
        key = (begin // int32(tile)) * int32(tile)

        pair = uint32(uint32(cuda.threadIdx.x) >> uint32(3))  # the thread's rows: 2 · pair and the next
        part = uint32(uint32(cuda.threadIdx.x) & uint32(7))  # and keys part, part + 8, …; columns likewise
        k_start = batch * k_batch + kv_head * k_head
        v_start = batch * v_batch + kv_head * v_head
        copy(q_tile, q, batch * q_batch + head * q_head, q_token, first_row, last_row)
        for i in range(sum_count):
            sums[i] = float32(0.0)
        for h in range(2):
            largest[h] = NOTHING
            total[h] = float32(0.0)
        q_at = uint32(uint32(pair * uint32(2)) * uint32(stride))

        while key < end:
            cuda.syncthreads()  # q is there, and V of the tile before has been used
            copy(kv_tile, k, k_start, k_token, key, end)
            cuda.syncthreads()
            for i in range(8):
                scores[i] = float32(0.0)
            d = uint32(0)
            while d < uint32(head_dim):
                upper = q_tile[uint32(q_at + d)]
                lower = q_tile[uint32(q_at + uint32(stride) + d)]
                for i in range(4):
                    x = kv_tile[uint32(uint32(part + uint32(8 * i)) * uint32(stride) + d)]
                    scores[i] = ptx.fma(upper, x, scores[i])
                    scores[4 + i] = ptx.fma(lower, x, scores[4 + i])
                d = uint32(d + uint32(1))
            for h in range(2):
                position = top + int32(2) * int32(pair) + int32(h)
                new = largest[h]
                for i in range(4):
                    column = key + int32(part) + int32(8 * i)
                    hidden = column >= end
                    if causal:
                        hidden = hidden or column > position
                    if windowed:
                        hidden = hidden or column <= position - window
                    scores[4 * h + i] *= scale_log2
                    if hidden:
                        scores[4 * h + i] = float32(-np.inf)
                    new = ptx.fmax_nan(new, scores[4 * h + i])
                for i in range(3):
                    new = ptx.fmax_nan(new, ptx.shfl_bfly(new, uint32(1 << i)))
                shrink = ptx.ex2(largest[h] - new)
                largest[h] = new
                total[h] *= shrink
                for c in range(columns):
                    sums[h * columns + c] *= shrink
                row = uint32(uint32(uint32(pair * uint32(2)) + uint32(h)) * uint32(tile + 1))
                for i in range(4):
                    weight = ptx.ex2(scores[4 * h + i] - new)
                    total[h] += weight
                    weights[uint32(row + part + uint32(8 * i))] = weight
            cuda.syncthreads()  # the weights are there, and K has been used
            copy(kv_tile, v, v_start, v_token, key, end)
            cuda.syncthreads()
            row = uint32(uint32(pair * uint32(2)) * uint32(tile + 1))
            j = uint32(0)
            while j < uint32(tile):
                upper = weights[uint32(row + j)]
                lower = weights[uint32(row + uint32(tile + 1) + j)]
                for c in range(columns):
                    x = kv_tile[uint32(uint32(j * uint32(stride)) + part + uint32(8 * c))]
                    sums[c] = ptx.fma(upper, x, sums[c])
                    sums[columns + c] = ptx.fma(lower, x, sums[columns + c])
                j = uint32(j + uint32(1))
            key += int32(tile)

        for h in range(2):
            whole = total[h]
            for i in range(3):
                whole += ptx.shfl_bfly(whole, uint32(1 << i))
            row = first_row + int32(2) * int32(pair) + int32(h)
            if row < q_len:
                to = batch * out_batch + int64(row) * out_token + head * out_head
                for c in range(columns):
                    column = uint32(part + uint32(8 * c))
                    if column < uint32(head_dim):
                        x = float32(0.0)
                        if whole != float32(0.0):
                            x = sums[h * columns + c] / whole
                        out[to + int64(column)] = x

    return float_attention


@lru_cache(maxsize=4096)
def plan(batch, q_len, heads, head_dim, dtype, wide, causal, windowed, has_lengths):
    """(Plan, query tiles). Shared memory: q's tile and two tiles each of K and V; in float32 one of K or V and the weights."""
    if dtype == np.float32:
        tile_rows, threads = FLOAT_TILE, FLOAT_THREADS
        row = 8 * -(-head_dim // 8) + 1
        shared_bytes = 4 * (2 * FLOAT_TILE * row + FLOAT_TILE * (FLOAT_TILE + 1))
        factory, constants = float_attention_kernel, (head_dim, causal, windowed, has_lengths)
    else:
        tile_rows, threads = TILE_M, THREADS
        shared_bytes = 2 * (_padded(head_dim) + PAD) * (TILE_M + 4 * tile_keys(head_dim))
        factory, constants = attention_kernel, (dtype, head_dim, wide, causal, windowed, has_lengths)
    q_tiles = -(-q_len // tile_rows)
    blocks = batch * heads * q_tiles
    if blocks > 2**31 - 1:
        raise ValueError(f"{batch} sequences of {q_len} queries and {heads} heads need more than 2^31 - 1 blocks")
    return Plan(factory, constants, (blocks, 1, 1), (threads, 1, 1), shared_bytes), q_tiles


def cost(batch, q_len, kv_len, heads, kv_heads, head_dim, itemsize, causal):
    """q, k, v and out pass once; two products of 2 · q_len · kv_len · head_dim a head, half of it where causal."""
    elements = batch * head_dim * (2 * q_len * heads + 2 * kv_len * kv_heads)
    flops = 4 * batch * heads * q_len * kv_len * head_dim
    return Cost(bytes=itemsize * elements, flops=flops // 2 if causal else flops)


def run(q, k, v, causal, scale, window, kv_lengths, out, device, stream):
    """See ``nbkernels.attention``; all arrays are DeviceArrays, kv_lengths may be None."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    if q_len <= FEW_TOKENS:
        decode.run(q, k, v, causal, scale, window, kv_lengths, out, device, stream)
        return
    wide = head_dim % vector_width(q.dtype) == 0 and all(aligned(x, width=vector_width(x.dtype)) for x in (q, k, v))
    causal = causal or window is not None
    masks = (causal, window is not None, kv_lengths is not None)
    chosen, q_tiles = plan(batch, q_len, heads, head_dim, q.dtype, wide, *masks)
    # a window beyond every key hides nothing, and must not overflow
    window = 0 if window is None else min(window, kv_len + q_len)
    lengths = 0 if kv_lengths is None else kv_lengths.pointer
    pointers = (q.pointer, k.pointer, v.pointer, lengths, out.pointer)
    sizes = (q_len, kv_len, heads, heads // kv_heads, q_tiles, window, float(scale * LOG2E))
    strides = (s for x in (q, k, v, out) for s in x.strides[:3])
    launch(chosen, (*pointers, *sizes, *strides), device, stream)
