"""Attention for prompts: many query rows against many keys, without the matrix of scores ever leaving the chip.

    out[b, i, h] = sum_j softmax_j(scale · q[b, i, h] · k[b, j, h / group]) · v[b, j, h / group]

FlashAttention-2 (Dao 2023) with the online softmax of Milakov and Gimelshein (2018). A block owns some query rows of one head
and walks the keys in tiles; K of the next tile travels to shared memory while this one is multiplied:

            keys ->  tile 0 | tile 1 | … | tile t (the diagonal: masked) | later tiles are skipped
    rows    ┌──────┐
    of a    │ S    │  S = q · kᵀ in registers, running maximum and sum a row, P = exp2(scale · S - maximum)
    block   └──────┘  out += P · v, P straight from the registers that held S

Two kernels here: 16-bit inputs on the tensor cores (mma.sync m16n8k16, float32 sums; a warp owns one or two strips of 16 rows),
float32 by fused multiply-adds (the tensor cores' tf32 would lose half of the digits). Few query tokens are ``decode``'s,
16-bit prompts on sm_90a ``attention_wgmma``'s.
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels import attention_wgmma, decode
from nbkernels.kernels.attention_wgmma import NOTHING, SLACK
from nbkernels.kernels.elements import Cost, aligned, conversions, pair_conversions, vector_width
from nbkernels.kernels.packed import queries_function, tile_count
from nbkernels.kernels.scores import join_sink, score_factors, soft_cap_function
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

FEW_TOKENS = 8  # up to so many query tokens a sequence are decode's: its blocks split the keys, these split the queries
WARPS = 4
STRIP = 16  # query rows of a tensor-core product
THREADS = WARPS * ptx.WARP
PIECE = 8  # 16-bit elements in 16 bytes
PAD = PIECE  # elements behind each row in shared memory: an odd number of 16-byte pieces a row keeps ldmatrix off one bank
# stands for a scale of 0, times which a hidden score of -inf would be NaN
NO_SCALE = float(np.finfo(np.float32).tiny)

FLOAT_THREADS = 128
FLOAT_GROUPS = FLOAT_THREADS // 8  # of threads that share rows
FLOAT_TILE_N = 32  # keys a tile
FLOAT_PAD = 4  # elements behind each row: rows that are read together then start four banks apart


def _padded(head_dim):
    """head_dim up to the next multiple of 16, the depth of a tensor-core product; zeros fill the rest."""
    return -(-head_dim // 16) * 16


def tile_keys(head_dim):
    """Keys a tile: 64, or 32 where the sums of a wide head leave no registers for more."""
    return 64 if _padded(head_dim) <= 128 else 32


@cache
def _copy_tile(dtype, head_dim, tile_rows, wide):
    """copy(tile, pointer, start, stride, rows): that many rows into shared memory, zeros in those behind.

    start: the element where the first row begins; tile: byte address of [tile_rows, padded head_dim + PAD]. With ``wide`` the
    copy is asynchronous, 16 bytes at a time; else it reads element by element.
    """
    depth = _padded(head_dim)
    row_bytes = 2 * (depth + PAD)
    pieces = depth // PIECE
    lanes = 1  # threads a row: a power of two, so that a thread keeps its column and walks down the rows
    while lanes < pieces:
        lanes *= 2
    step = THREADS // lanes

    @cuda.jit(device=True, inline="always")
    def wide_copy(tile, pointer, start, stride, rows):
        column = uint32(uint32(uint32(cuda.threadIdx.x) % uint32(lanes)) * uint32(PIECE))
        if column < uint32(depth):
            inside = uint32(uint32(cuda.threadIdx.x) // uint32(lanes))
            to = uint32(tile + uint32(inside * uint32(row_bytes)) + uint32(column * uint32(2)))
            left = int32(rows - int32(inside))  # rows that are there, from the thread's first one on
            if depth != head_dim and column >= uint32(head_dim):
                left = int32(0)
            source = ptx.address(pointer, start + int64(inside) * stride + int64(column))
            source_step = uint64(stride * int64(2 * step))
            for i in range(tile_rows // step):
                # no byte of a row that is not there is read, so its address need not be valid
                count = uint32(16) if int32(i * step) < left else uint32(0)
                ptx.cp_async_16_zfill(uint32(to + uint32(i * step * row_bytes)), source, count)
                source += source_step

    @cuda.jit(device=True, inline="always")
    def element(pointer, at, column):
        return uint32(pointer[at + int64(column)]) if column < uint32(head_dim) else uint32(0)

    @cuda.jit(device=True, inline="always")
    def narrow_copy(tile, pointer, start, stride, rows):
        number = uint32(cuda.threadIdx.x)
        while number < uint32(tile_rows * depth // 2):
            inside = uint32(number // uint32(depth // 2))
            column = uint32(uint32(number % uint32(depth // 2)) * uint32(2))
            word = uint32(0)
            if int32(inside) < rows:
                at = start + int64(inside) * stride
                upper = element(pointer, at, uint32(column + uint32(1)))
                word = uint32(element(pointer, at, column) | uint32(upper << uint32(16)))
            ptx.st_shared(uint32(tile + uint32(inside * uint32(row_bytes)) + uint32(column * uint32(2))), word)
            number = uint32(number + uint32(THREADS))

    return wide_copy if wide else narrow_copy


def attention_kernel(
    dtype, head_dim, strips, wide, negative, causal, windowed, has_lengths, capped=False, has_sinks=False, packed=False
):
    """16-bit attention on the tensor cores. grid: batch · heads · query tiles, the last tile (the longest) first.

    packed: sequences lie one after another (``packed``), and batch is 1.

    strips: of 16 query rows a warp. negative: the scale is below zero (the kernel gets its magnitude); a capped score has its
    sign already.
    """
    tile_n = tile_keys(head_dim)
    depth = _padded(head_dim)
    row_bytes = 2 * (depth + PAD)
    warp_rows = STRIP * strips
    tile_m = WARPS * warp_rows
    q_bytes, kv_bytes = tile_m * row_bytes, tile_n * row_bytes
    k_steps, n_blocks, d_blocks = depth // 16, tile_n // 8, depth // 8
    strip_scores, strip_sums = 4 * n_blocks, 4 * d_blocks  # a lane's
    score_count, sum_count, row_count = strips * strip_scores, strips * strip_sums, 2 * strips
    keep_q = strips * depth <= 128  # else q's fragments are read again for each tile: the registers hold the sums
    q_words = 4 * strips * (k_steps if keep_q else 1)
    q_step = 4 * strips if keep_q else 0
    # the compiler leaves a loop of more products rolled, in which a step's fragments are not read ahead
    unrolled = k_steps if keep_q else max(d for d in range(1, 5) if k_steps % d == 0)
    a_words = 4 * strips
    out_pieces = head_dim // PIECE
    update = ptx.mma_update(str(dtype))
    _, pack = pair_conversions(dtype)
    _, to_storage = conversions(dtype)
    cap = soft_cap_function(exact=False)
    queries = queries_function(tile_m)
    copy_q = _copy_tile(dtype, head_dim, tile_m, wide)
    copy_kv = _copy_tile(dtype, head_dim, tile_n, wide)

    @cuda.jit(device=True, inline="always")
    def load_q(q_tile, q_fragments, step, lane, warp):
        """The first factor of one step of 16 columns: this warp's rows of q."""
        row = uint32(uint32(warp * uint32(warp_rows)) + uint32(lane & uint32(15)))
        at = uint32(q_tile + uint32(row * uint32(row_bytes)) + uint32(uint32(lane >> uint32(4)) * uint32(16)))
        for m in range(strips):
            words = ptx.ldmatrix_x4(uint32(at + uint32(STRIP * row_bytes * m + 32 * step)))
            for j in range(4):
                q_fragments[q_step * step + 4 * m + j] = words[j]

    @cuda.jit(device=True, inline="always")
    def multiply_scores(q_tile, k_tile, q_fragments, scores, lane, warp, s):
        """scores += q · kᵀ of this warp's rows, over 16 columns."""
        if not keep_q:
            load_q(q_tile, q_fragments, s, lane, warp)
        # two blocks of eight keys: matrices (keys 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
        row = uint32(uint32(uint32(lane >> uint32(4)) << uint32(3)) + uint32(lane & uint32(7)))
        half = uint32(uint32(lane >> uint32(3)) & uint32(1))
        at = uint32(k_tile + uint32(row * uint32(row_bytes)) + uint32(half << uint32(4)))
        for n in range(n_blocks // 2):
            b = ptx.ldmatrix_x4(uint32(at + uint32(16 * n * row_bytes + 32 * s)))
            for m in range(strips):
                a = q_step * s + 4 * m
                for j in range(2):
                    c = strip_scores * m + 4 * (2 * n + j)
                    update(scores, c, q_fragments, a, b[2 * j], b[2 * j + 1])

    @cuda.jit(device=True, inline="always")
    def multiply_values(weights, v_tile, sums, lane, a, s):
        """sums += P · v over 16 keys; the layout of a product's result (weights) is that of the next one's first factor."""
        # 16 keys by 16 columns, transposed on the way: (keys 0-7, columns 0-7), (8-15, 0-7), then columns 8-15
        row = uint32(lane & uint32(15))
        at = uint32(v_tile + uint32(row * uint32(row_bytes)) + uint32(uint32(lane >> uint32(4)) << uint32(4)))
        for m in range(strips):
            for j in range(4):
                c = strip_scores * m + 8 * s + 2 * j
                a[4 * m + j] = pack(weights[c], weights[c + 1])
        for n in range(d_blocks // 2):
            b = ptx.ldmatrix_x4_trans(uint32(at + uint32(16 * s * row_bytes + 32 * n)))
            for m in range(strips):
                for j in range(2):
                    c = strip_sums * m + 4 * (2 * n + j)
                    update(sums, c, a, 4 * m, b[2 * j], b[2 * j + 1])

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
        cap_log2: float32 if capped else None,
        sinks: ptx.pointer("float32") if has_sinks else None,
        query_offsets: ptx.pointer("int32") if packed else None,
        kv_offsets: ptx.pointer("int32") if packed else None,
        sequences: uint32 if packed else None,
    ):
        q_tile = ptx.shared_address(cuda.shared.array(0, uint16))
        k_ring = uint32(q_tile + uint32(q_bytes))  # two stages
        v_tile = uint32(k_ring + uint32(2 * kv_bytes))
        sums = cuda.local.array(sum_count, float32)
        scores = cuda.local.array(score_count, float32)
        q_fragments = cuda.local.array(q_words, uint32)
        weight_words = cuda.local.array(a_words, uint32)
        # of the lane's rows: lane / 4 and eight below in each strip
        largest = cuda.local.array(row_count, float32)
        total = cuda.local.array(row_count, float32)
        shrink = cuda.local.array(2, float32)

        block = uint32(cuda.blockIdx.x)
        tile = uint32(q_tiles - uint32(1) - uint32(block % q_tiles))
        block = uint32(block // q_tiles)
        head = uint32(block % heads)
        batch = uint32(block // heads)
        kv_head = uint32(head // group)
        lane = ptx.lane_id()
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))

        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        first_row = int32(tile * uint32(tile_m))
        if packed:
            first_row, q_at, q_len, kv_at, count = queries(tile, query_offsets, kv_offsets, sequences, q_len, kv_len)
            if first_row >= q_len:
                return
        last_row = min(int32(first_row + int32(tile_m)), q_len)
        end = count  # keys begin to end - 1 are seen by some row
        begin = int32(0)
        if causal:
            end = max(min(count, int32(count - q_len + last_row)), int32(0))
        if windowed:
            begin = max(int32(count - q_len + first_row - window + int32(1)), int32(0))
        key = int32(begin & int32(-tile_n))
        warp_row = int32(first_row + int32(warp * uint32(warp_rows)))
        top = int32(count - q_len + warp_row)  # the position of the warp's first row

        k_start = int64(batch) * k_batch + int64(kv_head) * k_head + int64(key) * k_token  # of the next tile
        v_start = int64(batch) * v_batch + int64(kv_head) * v_head + int64(key) * v_token
        q_start = int64(batch) * q_batch + int64(head) * q_head + int64(first_row) * q_token
        if packed:
            k_start += int64(kv_at) * k_token
            v_start += int64(kv_at) * v_token
            q_start += int64(q_at) * q_token
        copy_q(q_tile, q, q_start, q_token, int32(last_row - first_row))
        if key < end:
            copy_kv(k_ring, k, k_start, k_token, int32(end - key))
            k_start += int64(tile_n) * k_token
        ptx.cp_async_commit()

        for i in range(sum_count):
            sums[i] = float32(0.0)
        for h in range(row_count):
            largest[h] = NOTHING
            total[h] = float32(0.0)
        my_row = int32(uint32(lane >> uint32(2)))
        my_key = int32(uint32(uint32(lane & uint32(3)) << uint32(1)))
        if keep_q:
            ptx.cp_async_wait(0)
            cuda.syncthreads()
            for s in range(k_steps):
                load_q(q_tile, q_fragments, s, lane, warp)
        stage = uint32(0)
        while key < end:
            ptx.cp_async_wait(0)
            cuda.syncthreads()  # K of this tile (and q) is there, V of the one before has been used
            following = int32(key + int32(tile_n))
            copy_kv(v_tile, v, v_start, v_token, int32(end - key))
            v_start += int64(tile_n) * v_token
            ptx.cp_async_commit()
            other = uint32(stage ^ uint32(kv_bytes))
            if following < end:
                copy_kv(uint32(k_ring + other), k, k_start, k_token, int32(end - following))
                k_start += int64(tile_n) * k_token
            ptx.cp_async_commit()
            for i in range(score_count):
                scores[i] = float32(0.0)
            for i in range(k_steps // unrolled):
                for s in range(unrolled):
                    multiply_scores(q_tile, uint32(k_ring + stage), q_fragments, scores, lane, warp, i * unrolled + s)
            if negative:
                for i in range(score_count):
                    scores[i] = -scores[i]
            if capped:
                for i in range(score_count):
                    scores[i] = cap(scores[i] * scale_log2, cap_log2)

            partly = following > end
            if causal:
                partly = partly or int32(following - int32(1)) > top
            if windowed:
                partly = partly or key <= int32(top + int32(warp_rows - 1) - window)
            if partly:
                for r in range(row_count):
                    # of the row's keys, counted from the lane's first one: after ``low``, before ``high`` are seen
                    position = int32(top + int32(8 * r) + my_row)
                    high = end
                    if causal:
                        high = min(high, int32(position + int32(1)))
                    high = int32(high - key - my_key)
                    low = int32(-1)
                    if windowed:
                        low = int32(position - window - key - my_key)
                    for n in range(n_blocks):
                        for i in range(2):
                            column = int32(8 * n + i)
                            if column >= high or column <= low:
                                scores[strip_scores * (r >> 1) + 4 * n + 2 * (r & 1) + i] = float32(-np.inf)
            for m in range(strips):
                for h in range(2):
                    s = strip_scores * m + 2 * h
                    peak = float32(-np.inf)
                    for n in range(n_blocks):
                        peak = ptx.fmax_nan(peak, scores[s + 4 * n])
                        peak = ptx.fmax_nan(peak, scores[s + 4 * n + 1])
                    peak = ptx.fmax_nan(peak, ptx.shfl_bfly(peak, uint32(1)))
                    peak = ptx.fmax_nan(peak, ptx.shfl_bfly(peak, uint32(2)))
                    if not capped:
                        peak *= scale_log2
                    old = largest[2 * m + h]
                    new = old
                    if not peak <= old + float32(SLACK):  # a NaN goes through
                        new = peak
                    shrink[h] = ptx.ex2(old - new)
                    largest[2 * m + h] = new
                    part = float32(0.0)
                    for n in range(n_blocks):
                        for i in range(2):
                            if capped:
                                weight = ptx.ex2(scores[s + 4 * n + i] - new)
                            else:
                                weight = ptx.ex2(ptx.fma(scores[s + 4 * n + i], scale_log2, -new))
                            scores[s + 4 * n + i] = weight
                            part += weight
                    total[2 * m + h] = ptx.fma(total[2 * m + h], shrink[h], part)
                moved = uint32(1) if shrink[0] != float32(1.0) or shrink[1] != float32(1.0) else uint32(0)
                if ptx.warp_any(moved) != uint32(0):
                    for n in range(d_blocks):
                        for i in range(4):
                            sums[strip_sums * m + 4 * n + i] *= shrink[i // 2]

            ptx.cp_async_wait(1)  # V of this tile; K of the next may still fly
            cuda.syncthreads()
            for s in range(tile_n // 16):
                multiply_values(scores, v_tile, sums, lane, weight_words, s)
            stage = other
            key = following

        ptx.cp_async_wait(0)
        cuda.syncthreads()  # where there was no key, q may still fly to what is used below
        for m in range(strips):
            for h in range(2):
                whole = total[2 * m + h]
                whole += ptx.shfl_bfly(whole, uint32(1))
                whole += ptx.shfl_bfly(whole, uint32(2))
                if has_sinks:
                    factor, whole = join_sink(largest[2 * m + h], whole, sinks[head])
                inverse = float32(0.0)  # a row that saw nothing is zero
                if whole != float32(0.0):
                    inverse = ptx.rcp(whole)
                if has_sinks:
                    inverse *= factor
                inside = int32(my_row + int32(STRIP * m + 8 * h))
                row = int32(warp_row + inside)
                if wide:
                    # q's place in shared memory turns the lanes' pairs into whole rows: a warp meets its own rows only
                    at = uint32(q_tile + uint32(uint32(warp * uint32(warp_rows)) + uint32(inside)) * uint32(row_bytes))
                    at = uint32(at + uint32(my_key) * uint32(2))
                    for n in range(d_blocks):
                        s = strip_sums * m + 4 * n + 2 * h
                        ptx.st_shared(uint32(at + uint32(16 * n)), pack(sums[s] * inverse, sums[s + 1] * inverse))
                elif row < q_len:
                    to = int64(batch) * out_batch + int64(row) * out_token + int64(head) * out_head
                    if packed:
                        to += int64(q_at) * out_token
                    for n in range(d_blocks):
                        for i in range(2):
                            column = int32(int32(8 * n) + my_key + int32(i))
                            if column < int32(head_dim):
                                x = sums[strip_sums * m + 4 * n + 2 * h + i] * inverse
                                out[to + int64(column)] = to_storage(x)
        if wide:
            ptx.warp_sync()
            number = lane
            while number < uint32(warp_rows * out_pieces):
                inside = uint32(number // uint32(out_pieces))
                column = uint32(uint32(number % uint32(out_pieces)) * uint32(PIECE))
                row = int32(warp_row + int32(inside))
                if row < q_len:
                    at = uint32(q_tile + uint32(uint32(warp * uint32(warp_rows)) + inside) * uint32(row_bytes))
                    w = ptx.ld_shared_v4(uint32(at + uint32(column * uint32(2))))
                    to = int64(batch) * out_batch + int64(row) * out_token + int64(head) * out_head + int64(column)
                    if packed:
                        to += int64(q_at) * out_token
                    ptx.st_global_v4(ptx.address(out, to), w[0], w[1], w[2], w[3])
                number = uint32(number + uint32(ptx.WARP))

    return attention


def float_attention_kernel(
    head_dim, rows, wide, causal, windowed, has_lengths, capped=False, has_sinks=False, packed=False
):
    """float32 attention by fused multiply-adds. grid: batch · heads · query tiles, the last tile first; packed as above.

    Eight neighbouring threads share ``rows`` query rows, 16 apart, and combine by shuffles; thread i of them owns keys i, i + 8,
    … of the scores and columns 4 · i to 4 · i + 3 of every 32 of the sums.
    """
    tile_m, tile_n = FLOAT_GROUPS * rows, FLOAT_TILE_N
    columns = _float_columns(head_dim)
    stride = columns + FLOAT_PAD
    chunks, quads = columns // 32, columns // 4
    row_sums, keys = 4 * chunks, tile_n // 8
    sum_count, score_count = rows * row_sums, rows * keys
    cap = soft_cap_function(exact=True)
    queries = queries_function(tile_m)
    weight_stride = tile_n + FLOAT_PAD

    @cuda.jit(device=True, inline="always")
    def copy(tile, source, start, row_stride, count, tile_rows):
        """``count`` rows from element ``start`` into shared memory, zeros behind them and behind head_dim."""
        number = uint32(cuda.threadIdx.x)
        while number < uint32(tile_rows * quads):
            inside = uint32(number // uint32(quads))
            column = uint32(uint32(number % uint32(quads)) * uint32(4))
            to = uint32(tile + uint32(uint32(inside * uint32(stride)) + column) * uint32(4))
            at = start + int64(inside) * row_stride + int64(column)
            if wide:
                size = uint32(16) if int32(inside) < count and column < uint32(head_dim) else uint32(0)
                ptx.cp_async_16_zfill(to, ptx.address(source, at), size)
            else:
                for i in range(4):
                    x = float32(0.0)
                    if int32(inside) < count and uint32(column + uint32(i)) < uint32(head_dim):
                        x = source[at + int64(i)]
                    ptx.st_shared_f32(uint32(to + uint32(4 * i)), x)
            number = uint32(number + uint32(FLOAT_THREADS))
        if wide:
            ptx.cp_async_commit()
            ptx.cp_async_wait(0)

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
        cap_log2: float32 if capped else None,
        sinks: ptx.pointer("float32") if has_sinks else None,
        query_offsets: ptx.pointer("int32") if packed else None,
        kv_offsets: ptx.pointer("int32") if packed else None,
        sequences: uint32 if packed else None,
    ):
        q_tile = ptx.shared_address(cuda.shared.array(0, float32))
        kv_tile = uint32(q_tile + uint32(4 * tile_m * stride))
        weights = uint32(kv_tile + uint32(4 * tile_n * stride))
        sums = cuda.local.array(sum_count, float32)
        scores = cuda.local.array(score_count, float32)
        largest = cuda.local.array(rows, float32)
        total = cuda.local.array(rows, float32)

        block = uint32(cuda.blockIdx.x)
        query_tile = uint32(q_tiles - uint32(1) - uint32(block % q_tiles))
        block = uint32(block // q_tiles)
        head = uint32(block % heads)
        batch = uint32(block // heads)
        kv_head = uint32(head // group)
        count = kv_len
        if has_lengths:
            count = min(max(kv_lengths[batch], int32(0)), kv_len)
        first_row = int32(query_tile * uint32(tile_m))
        if packed:
            first_row, q_at, q_len, kv_at, count = queries(
                query_tile, query_offsets, kv_offsets, sequences, q_len, kv_len
            )
            if first_row >= q_len:
                return
        last_row = min(int32(first_row + int32(tile_m)), q_len)
        top = int32(count - q_len + first_row)
        end = count
        begin = int32(0)
        if causal:
            end = max(min(count, int32(count - q_len + last_row)), int32(0))
        if windowed:
            begin = max(int32(top - window + int32(1)), int32(0))
        key = int32(begin & int32(-tile_n))

        my_row = uint32(uint32(cuda.threadIdx.x) >> uint32(3))  # and 16, 32, … below
        part = uint32(uint32(cuda.threadIdx.x) & uint32(7))
        q_start = int64(batch) * q_batch + int64(head) * q_head + int64(first_row) * q_token
        k_start = int64(batch) * k_batch + int64(kv_head) * k_head + int64(key) * k_token
        v_start = int64(batch) * v_batch + int64(kv_head) * v_head + int64(key) * v_token
        if packed:
            k_start += int64(kv_at) * k_token
            v_start += int64(kv_at) * v_token
            q_start += int64(q_at) * q_token
        copy(q_tile, q, q_start, q_token, int32(last_row - first_row), tile_m)
        for i in range(sum_count):
            sums[i] = float32(0.0)
        for r in range(rows):
            largest[r] = NOTHING
            total[r] = float32(0.0)
        q_row = uint32(q_tile + uint32(my_row * uint32(4 * stride)))
        k_row = uint32(kv_tile + uint32(part * uint32(4 * stride)))
        weight_row = uint32(weights + uint32(my_row * uint32(4 * weight_stride)))

        while key < end:
            cuda.syncthreads()  # q is there, and V of the tile before has been used
            copy(kv_tile, k, k_start, k_token, int32(end - key), tile_n)
            cuda.syncthreads()
            for i in range(score_count):
                scores[i] = float32(0.0)
            d = uint32(0)
            while d < uint32(4 * columns):
                for r in range(rows):
                    x = ptx.ld_shared_v4_f32(uint32(q_row + d + uint32(4 * FLOAT_GROUPS * stride * r)))
                    for i in range(keys):
                        y = ptx.ld_shared_v4_f32(uint32(k_row + d + uint32(4 * 8 * stride * i)))
                        for e in range(4):
                            scores[keys * r + i] = ptx.fma(x[e], y[e], scores[keys * r + i])
                d = uint32(d + uint32(16))
            for r in range(rows):
                position = int32(top + int32(my_row) + int32(FLOAT_GROUPS * r))
                new = largest[r]
                for i in range(keys):
                    column = int32(key + int32(part) + int32(8 * i))
                    hidden = column >= end
                    if causal:
                        hidden = hidden or column > position
                    if windowed:
                        hidden = hidden or column <= int32(position - window)
                    scores[keys * r + i] *= scale_log2
                    if capped:
                        scores[keys * r + i] = cap(scores[keys * r + i], cap_log2)
                    if hidden:
                        scores[keys * r + i] = float32(-np.inf)
                    new = ptx.fmax_nan(new, scores[keys * r + i])
                for i in range(3):
                    new = ptx.fmax_nan(new, ptx.shfl_bfly(new, uint32(1 << i)))
                shrink = ptx.ex2(largest[r] - new)
                largest[r] = new
                total[r] *= shrink
                for c in range(row_sums):
                    sums[row_sums * r + c] *= shrink
                at = uint32(weight_row + uint32(4 * FLOAT_GROUPS * weight_stride * r) + uint32(part * uint32(4)))
                for i in range(keys):
                    weight = ptx.ex2(scores[keys * r + i] - new)
                    total[r] += weight
                    ptx.st_shared_f32(uint32(at + uint32(32 * i)), weight)
            cuda.syncthreads()  # the weights are there, and K has been used
            copy(kv_tile, v, v_start, v_token, int32(end - key), tile_n)
            cuda.syncthreads()
            j = uint32(0)
            while j < uint32(tile_n):
                for r in range(rows):
                    w = ptx.ld_shared_v4_f32(
                        uint32(weight_row + uint32(4 * FLOAT_GROUPS * weight_stride * r) + uint32(j * uint32(4)))
                    )
                    for e in range(4):
                        scores[4 * r + e] = w[e]
                v_row = uint32(kv_tile + uint32(j * uint32(4 * stride)) + uint32(part * uint32(16)))
                for e in range(4):
                    for c in range(chunks):
                        x = ptx.ld_shared_v4_f32(uint32(v_row + uint32(4 * stride * e + 128 * c)))
                        for r in range(rows):
                            for i in range(4):
                                at_sum = row_sums * r + 4 * c + i
                                sums[at_sum] = ptx.fma(scores[4 * r + e], x[i], sums[at_sum])
                j = uint32(j + uint32(4))
            key = int32(key + int32(tile_n))
            k_start += int64(tile_n) * k_token
            v_start += int64(tile_n) * v_token

        for r in range(rows):
            whole = total[r]
            for i in range(3):
                whole += ptx.shfl_bfly(whole, uint32(1 << i))
            row = int32(first_row + int32(my_row) + int32(FLOAT_GROUPS * r))
            if has_sinks:
                factor, whole = join_sink(largest[r], whole, sinks[head])
            inverse = float32(0.0)  # a row that saw nothing is zero
            if whole != float32(0.0):
                inverse = ptx.rcp(whole)
            if has_sinks:
                inverse *= factor
            if row < q_len:
                to = int64(batch) * out_batch + int64(row) * out_token + int64(head) * out_head
                if packed:
                    to += int64(q_at) * out_token
                for c in range(chunks):
                    for i in range(4):
                        column = uint32(uint32(32 * c + i) + uint32(part * uint32(4)))
                        if column < uint32(head_dim):
                            out[to + int64(column)] = sums[row_sums * r + 4 * c + i] * inverse

    return float_attention


def _float_columns(head_dim):
    """head_dim up to the next multiple of 32: four columns for each of the eight threads of a row."""
    return -(-head_dim // 32) * 32


@lru_cache(maxsize=4096)
def plan(batch, q_len, heads, head_dim, dtype, wide, negative, masks, sm_count, shared_limit, sequences=0):
    """(Plan, query tiles). masks: (causal, windowed, has_lengths[, capped, has_sinks]); shared_limit: bytes a block may use.

    sequences: how many lie packed in the q_len rows of a batch of one.

    Shared memory: q's tile, two tiles of K, one of V; in float32 one of q, one of K or V and the weights.
    """
    if dtype == np.float32:
        # four rows a thread halve what is read for a multiply-add; two where the compiler would not keep them in registers, or
        # blocks are few
        columns = _float_columns(head_dim)
        rows = 4 if columns <= 128 and batch * heads * -(-q_len // (4 * FLOAT_GROUPS)) >= sm_count else 2
        tile_rows, threads = FLOAT_GROUPS * rows, FLOAT_THREADS
        elements = (tile_rows + FLOAT_TILE_N) * (columns + FLOAT_PAD) + tile_rows * (FLOAT_TILE_N + FLOAT_PAD)
        shared_bytes = 4 * elements
        factory, constants = float_attention_kernel, (head_dim, rows, wide, *masks, sequences > 0)
    else:
        # Each K and V fragment read from shared memory feeds a product a strip: with one strip that traffic, a byte for 8
        # multiply-adds, is the limit; two take twice the registers and rows. They pay where two blocks fit a multiprocessor (it
        # holds a block's most and 1 KB), so that one's softmax runs under the other's products, and there are enough for all.
        strips = 1
        if wide and _padded(head_dim) <= 128:
            room = (shared_limit + 1024) // (_shared_bytes(head_dim, 2) + 1024)
            enough = batch * heads * -(-q_len // (2 * STRIP * WARPS)) >= 2 * sm_count
            strips = 2 if room >= 2 and enough else 1
        tile_rows, threads = STRIP * WARPS * strips, THREADS
        shared_bytes = _shared_bytes(head_dim, strips)
        factory, constants = attention_kernel, (dtype, head_dim, strips, wide, negative, *masks, sequences > 0)
    q_tiles = tile_count(q_len, tile_rows, sequences) if sequences else -(-q_len // tile_rows)
    blocks = batch * heads * q_tiles
    if blocks > 2**31 - 1:
        raise ValueError(f"{batch} sequences of {q_len} queries and {heads} heads need more than 2^31 - 1 blocks")
    return Plan(factory, constants, (blocks, 1, 1), (threads, 1, 1), shared_bytes), q_tiles


def _shared_bytes(head_dim, strips):
    return 2 * (_padded(head_dim) + PAD) * (STRIP * WARPS * strips + 3 * tile_keys(head_dim))


def cost(batch, q_len, kv_len, heads, kv_heads, head_dim, itemsize, causal):
    """q, k, v and out pass once; two products of 2 · q_len · kv_len · head_dim a head, half of it where causal."""
    elements = batch * head_dim * (2 * q_len * heads + 2 * kv_len * kv_heads)
    flops = 4 * batch * heads * q_len * kv_len * head_dim
    return Cost(bytes=itemsize * elements, flops=flops // 2 if causal else flops)


def run(q, k, v, causal, scale, window, soft_cap, sinks, kv_lengths, offsets, out, device, stream):
    """See ``nbkernels.attention``; all arrays are DeviceArrays, kv_lengths and sinks may be None.

    offsets: of queries and of keys, where sequences are packed, in a batch of one; else None.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    if q_len <= FEW_TOKENS and offsets is None:
        decode.run(q, k, v, causal, scale, window, soft_cap, sinks, kv_lengths, out, device, stream)
        return
    width = vector_width(q.dtype)
    wide = head_dim % width == 0 and all(aligned(x, width=width) for x in (q, k, v, out))
    masks = (causal or window is not None, window is not None, kv_lengths is not None)
    masks += (soft_cap is not None, sinks is not None)
    scale_log2, cap = score_factors(scale, soft_cap)
    extra = (*cap, *(() if sinks is None else (sinks.pointer,)))
    sequences = 0
    if offsets is not None:
        sequences = offsets[0].shape[0] - 1
        extra += (*(x.pointer for x in offsets), sequences)
    negative = False
    if q.dtype != np.float32 and soft_cap is None:
        negative, scale_log2 = scale_log2 < 0, max(abs(scale_log2), NO_SCALE)
    # a window beyond every key hides nothing, and must not overflow
    window = 0 if window is None else min(window, kv_len + q_len)
    if attention_wgmma.serves(q, k, v, out, sequences, device):
        attention_wgmma.run(
            q, k, v, masks, scale_log2, negative, window, kv_lengths, out, extra, sequences, device, stream
        )
        return
    limits = (device.sm_count, device.shared_bytes)
    chosen, q_tiles = plan(batch, q_len, heads, head_dim, q.dtype, wide, negative, masks, *limits, sequences)
    lengths = 0 if kv_lengths is None else kv_lengths.pointer
    pointers = (q.pointer, k.pointer, v.pointer, lengths, out.pointer)
    sizes = (q_len, kv_len, heads, heads // kv_heads, q_tiles, window, scale_log2)
    strides = (s for x in (q, k, v, out) for s in x.strides[:3])
    launch(chosen, (*pointers, *sizes, *strides, *extra), device, stream)
