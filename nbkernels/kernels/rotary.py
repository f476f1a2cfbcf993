"""Rotary position embedding of q and k, and the append of k and v to the KV cache, in one launch.

    out[.., i]        = x[.., i] · cos[p, i] - x[.., i + half] · sin[p, i]          for i < half = rotary_dim / 2
    out[.., i + half] = x[.., i + half] · cos[p, i] + x[.., i] · sin[p, i]
    out[.., j]        = x[.., j]                                                     for j >= rotary_dim

p = positions[b] + t. (Su et al. 2021, "RoFormer", with the halves paired as in GPT-NeoX.) A block is one token of one sequence;
its threads walk chunks of ``width`` elements through all of the token's heads, those of q, then k, then v, so that a short
token is one load and one store a thread:

    token:  | q head 0 | q head 1 | … | k head 0 | … | v head 0 | …
             i ∘ i+half chunk pairs, then single chunks  copied

A position outside the cache or the table writes nothing to the cache, and its row of q is zero. A thread reads both halves of its
pairs before it writes either, so out may be q.

In a paged cache, position p of a sequence is row p mod page_size of page block_table[b, p / page_size]. Where heads are
normalised first (RMSNorm of each head of q and k, as in Qwen3) or the cache is int8 (a scale a token and head, max |.| / 127), a
head's sum of squares and maximum are needed, so ``rotary_heads`` gives a head to a group of lanes that keep it in registers:

    token:  | q head 0 | q head 1 | … | k head 0 | … | v head 0 | …
             lanes 0-7   8-15       …                                    (head_dim 128, 16 bytes a chunk)
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int8, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, access, aligned, vector_width
from nbkernels.kernels.quantize import LARGEST, ROUNDER
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

MAX_THREADS = 256


@cache
def _table_access(width):
    """load(pointer, index) -> ``width`` (1, 4 or 8) consecutive float32 of cos or sin."""
    if width == 8:

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            return ptx.ld_global_v4_f32(ptx.address(pointer, index)) + ptx.ld_global_v4_f32(
                ptx.address(pointer, index + int64(4))
            )

        return load
    return access(np.dtype(np.float32), width, cached=True)[0]


@cache
def copy_function(width):
    """copy(source, at, target, to): the bits of a chunk, whatever they mean."""
    if width == 1:

        @cuda.jit(device=True, inline="always")
        def copy(source, at, target, to):
            target[to] = source[at]

    else:

        @cuda.jit(device=True, inline="always")
        def copy(source, at, target, to):
            w = ptx.ld_global_stream_v4(ptx.address(source, at))
            ptx.st_global_v4(ptx.address(target, to), w[0], w[1], w[2], w[3])

    return copy


@cache
def _place(paged):
    """place(batch, position, inside, …) -> (whether it is written, batch or page, row in it): where a token lies in the cache."""

    @cuda.jit(device=True, inline="always")
    def place(batch, position, inside, block_table, table_stride, page_shift, pages):
        if not paged:
            return inside, batch, position
        page = int64(-1)
        if inside:
            page = int64(block_table[batch * table_stride + (position >> int64(page_shift))])
        row = position & ((int64(1) << int64(page_shift)) - int64(1))
        return page >= int64(0) and page < pages, page, row

    return place


@cache
def rotation(dtype, half, width):
    """(rotate, clear): an item of a head, a pair of chunks at i and i + half, or past the rotated part a single one behind it."""
    load, store = access(dtype, width)
    load_table, copy = _table_access(width), copy_function(width)
    pairs = half // width  # chunks of a head's first half

    @cuda.jit(device=True, inline="always")
    def rotate(source, at, target, to, cos, sin, cos_at, sin_at, item):
        """A pair of chunks, or a chunk past the rotated part, of a head at ``at`` to the head at ``to``."""
        i = int64(uint32(item * uint32(width)))
        if item < uint32(pairs):
            first = load(source, at + i)
            second = load(source, at + i + int64(half))
            c = load_table(cos, cos_at + i)
            s = load_table(sin, sin_at + i)
            first_out = cuda.local.array(width, float32)
            second_out = cuda.local.array(width, float32)
            for n in range(width):
                # fused by name: the assembler may fuse a bare product and sum or not, with other bits
                first_out[n] = ptx.fma(first[n], c[n], float32(-(second[n] * s[n])))
                second_out[n] = ptx.fma(second[n], c[n], float32(first[n] * s[n]))
            store(target, to + i, first_out)
            store(target, to + i + int64(half), second_out)
        else:
            copy(source, at + i + int64(half), target, to + i + int64(half))

    @cuda.jit(device=True, inline="always")
    def clear(target, to, item):
        """Zeros in place of what ``rotate`` writes."""
        i = int64(uint32(item * uint32(width)))
        zeros = cuda.local.array(width, float32)
        for n in range(width):
            zeros[n] = float32(0.0)
        if item < uint32(pairs):
            store(target, to + i, zeros)
        store(target, to + i + int64(half), zeros)

    return rotate, clear


def rotary_append_kernel(dtype, head_dim, half, width, threads, paged):
    """q, k, v, caches and out [batch, tokens or capacity, heads, head_dim] by strides; grid: batch · tokens.

    With ``paged`` the caches are [pages, page_size, kv_heads, head_dim], their first strides those of a page.
    """
    copy, place = copy_function(width), _place(paged)
    pairs = half // width  # chunks of a head's first half
    singles = (head_dim - 2 * half) // width
    items = pairs + singles
    chunks = head_dim // width
    rotate, clear = rotation(dtype, half, width)

    @kernel(launch_bounds=threads)
    def rotary_append(
        q: ptx.pointer(dtype),
        k: ptx.pointer(dtype),
        v: ptx.pointer(dtype),
        cos: ptx.pointer("float32"),
        sin: ptx.pointer("float32"),
        positions: ptx.pointer("int32"),
        k_cache: ptx.pointer(dtype),
        v_cache: ptx.pointer(dtype),
        out: ptx.pointer(dtype),
        tokens: uint32,
        heads: uint32,
        kv_heads: uint32,
        limit: int32,
        cos_stride: int64,
        sin_stride: int64,
        positions_stride: int64,
        q_batch: int64,
        q_token: int64,
        q_head: int64,
        k_batch: int64,
        k_token: int64,
        k_head: int64,
        v_batch: int64,
        v_token: int64,
        v_head: int64,
        k_cache_batch: int64,
        k_cache_token: int64,
        k_cache_head: int64,
        v_cache_batch: int64,
        v_cache_token: int64,
        v_cache_head: int64,
        out_batch: int64,
        out_token: int64,
        out_head: int64,
        block_table: ptx.pointer("int32"),
        table_stride: int64,
        page_shift: uint32,
        pages: int64,
    ):
        block = uint32(cuda.blockIdx.x)
        batch = int64(block // tokens)
        token = int64(block % tokens)
        position = int64(positions[batch * positions_stride]) + token
        inside = position >= int64(0) and position < int64(limit)
        cos_at = position * cos_stride
        sin_at = position * sin_stride
        q_row = batch * q_batch + token * q_token
        out_row = batch * out_batch + token * out_token
        k_row = batch * k_batch + token * k_token
        v_row = batch * v_batch + token * v_token
        written, outer, position = place(batch, position, inside, block_table, table_stride, page_shift, pages)
        k_to = outer * k_cache_batch + position * k_cache_token
        v_to = outer * v_cache_batch + position * v_cache_token

        q_end = uint32(heads * uint32(items))
        k_end = uint32(q_end + uint32(kv_heads * uint32(items)))
        v_end = uint32(k_end + uint32(kv_heads * uint32(chunks)))
        index = uint32(cuda.threadIdx.x)
        while index < v_end:
            if index < q_end:
                head = int64(index // uint32(items))
                item = uint32(index % uint32(items))
                to = out_row + head * out_head
                if inside:
                    rotate(q, q_row + head * q_head, out, to, cos, sin, cos_at, sin_at, item)
                else:
                    clear(out, to, item)
            elif written and index < k_end:
                head = int64(uint32(index - q_end) // uint32(items))
                item = uint32(uint32(index - q_end) % uint32(items))
                to = k_to + head * k_cache_head
                rotate(k, k_row + head * k_head, k_cache, to, cos, sin, cos_at, sin_at, item)
            elif written:
                head = int64(uint32(index - k_end) // uint32(chunks))
                i = int64(uint32(uint32(uint32(index - k_end) % uint32(chunks)) * uint32(width)))
                copy(v, v_row + head * v_head + i, v_cache, v_to + head * v_cache_head + i)
            index = uint32(index + uint32(threads))

    return rotary_append


@cache
def _store_int8(width):
    """store(pointer, index, x, divisor): ``width`` float32 of x / divisor, rounded half to even, as int8. width 1, 4 or 8."""

    @cuda.jit(device=True, inline="always")
    def rounded(x, divisor):
        """The integer in the lowest byte of a word."""
        return ptx.bits_from_float(max(min(x / divisor, LARGEST), -LARGEST) + ROUNDER)

    @cuda.jit(device=True, inline="always")
    def word(x, at, divisor):
        lower = ptx.prmt(rounded(x[at], divisor), rounded(x[at + 1], divisor), uint32(0x0040))
        upper = ptx.prmt(rounded(x[at + 2], divisor), rounded(x[at + 3], divisor), uint32(0x0040))
        return ptx.prmt(lower, upper, uint32(0x5410))

    if width == 1:

        @cuda.jit(device=True, inline="always")
        def store(pointer, index, x, divisor):
            pointer[index] = int8(rounded(x[0], divisor))

    elif width == 4:

        @cuda.jit(device=True, inline="always")
        def store(pointer, index, x, divisor):
            ptx.st_global(ptx.address(pointer, index), word(x, 0, divisor))

    else:

        @cuda.jit(device=True, inline="always")
        def store(pointer, index, x, divisor):
            ptx.st_global_v2(ptx.address(pointer, index), word(x, 0, divisor), word(x, 4, divisor))

    return store


def rotary_heads_kernel(dtype, head_dim, half, width, threads, paged, int8_cache, q_normed, k_normed, norm_dtype):
    """As ``rotary_append``, a group of lanes a head, which is normalised before the rotation and quantised behind it.

    A lane's item is a pair of chunks, at i and i + half, or past the rotated part a single chunk in the second one's place.
    """
    load, store = access(dtype, width)
    load_table, copy, place, store_int8 = _table_access(width), copy_function(width), _place(paged), _store_int8(width)
    load_norm = _table_access(width) if norm_dtype == np.float32 else access(norm_dtype, width, cached=True)[0]
    pairs = half // width
    items = pairs + (head_dim - 2 * half) // width
    lanes = _lanes(items)
    steps = -(-items // lanes)  # items a lane
    group_count = threads // lanes
    elements = steps * 2 * width

    @kernel(launch_bounds=threads)
    def rotary_heads(
        q: ptx.pointer(dtype),
        k: ptx.pointer(dtype),
        v: ptx.pointer(dtype),
        cos: ptx.pointer("float32"),
        sin: ptx.pointer("float32"),
        positions: ptx.pointer("int32"),
        k_cache: ptx.pointer("int8" if int8_cache else dtype),
        v_cache: ptx.pointer("int8" if int8_cache else dtype),
        out: ptx.pointer(dtype),
        tokens: uint32,
        heads: uint32,
        kv_heads: uint32,
        limit: int32,
        cos_stride: int64,
        sin_stride: int64,
        positions_stride: int64,
        q_batch: int64,
        q_token: int64,
        q_head: int64,
        k_batch: int64,
        k_token: int64,
        k_head: int64,
        v_batch: int64,
        v_token: int64,
        v_head: int64,
        k_cache_batch: int64,
        k_cache_token: int64,
        k_cache_head: int64,
        v_cache_batch: int64,
        v_cache_token: int64,
        v_cache_head: int64,
        out_batch: int64,
        out_token: int64,
        out_head: int64,
        block_table: ptx.pointer("int32"),
        table_stride: int64,
        page_shift: uint32,
        pages: int64,
        k_scales: ptx.pointer("float32"),
        v_scales: ptx.pointer("float32"),
        k_scales_batch: int64,
        k_scales_token: int64,
        k_scales_head: int64,
        v_scales_batch: int64,
        v_scales_token: int64,
        v_scales_head: int64,
        q_norm: ptx.pointer(norm_dtype),
        k_norm: ptx.pointer(norm_dtype),
        eps: float32,
    ):
        x = cuda.local.array(elements, float32)
        chunk = cuda.local.array(width, float32)
        block = uint32(cuda.blockIdx.x)
        batch = int64(block // tokens)
        token = int64(block % tokens)
        position = int64(positions[batch * positions_stride]) + token
        inside = position >= int64(0) and position < int64(limit)
        cos_at = position * cos_stride
        sin_at = position * sin_stride
        written, outer, row = place(batch, position, inside, block_table, table_stride, page_shift, pages)
        sub = uint32(uint32(cuda.threadIdx.x) % uint32(lanes))
        group = uint32(uint32(cuda.threadIdx.x) // uint32(lanes))
        all_heads = uint32(heads + uint32(kv_heads * uint32(2)))
        first = uint32(0)  # every lane of a warp takes every step: they shuffle
        while first < all_heads:
            number = uint32(first + group)
            is_q = number < heads
            is_k = not is_q and number < uint32(heads + kv_heads)
            is_v = not is_q and not is_k and number < all_heads
            here = (is_q and inside) or ((is_k or is_v) and written)
            head = int64(number)
            source = q
            at = batch * q_batch + token * q_token + head * q_head
            to = batch * out_batch + token * out_token + head * out_head
            if is_k:
                head = int64(uint32(number - heads))
                source = k
                at = batch * k_batch + token * k_token + head * k_head
                to = outer * k_cache_batch + row * k_cache_token + head * k_cache_head
            elif is_v:
                head = int64(uint32(uint32(number - heads) - kv_heads))
                source = v
                at = batch * v_batch + token * v_token + head * v_head
                to = outer * v_cache_batch + row * v_cache_token + head * v_cache_head

            for e in range(elements):
                x[e] = float32(0.0)
            if here and (int8_cache or not is_v):
                for n in range(steps):
                    item = uint32(sub + uint32(n * lanes))
                    i = int64(uint32(item * uint32(width)))
                    if item < uint32(pairs):
                        values = load(source, at + i)
                        for w in range(width):
                            x[2 * n * width + w] = values[w]
                    if item < uint32(items):
                        values = load(source, at + i + int64(half))
                        for w in range(width):
                            x[(2 * n + 1) * width + w] = values[w]

            if q_normed or k_normed:
                total = float32(0.0)
                for e in range(elements):
                    total = ptx.fma(x[e], x[e], total)
                for bit in range(5):
                    if (1 << bit) < lanes:
                        total += ptx.shfl_bfly(total, uint32(1 << bit))
                factor = ptx.rsqrt(ptx.fma(total, float32(1.0 / head_dim), eps))
                normed = here and ((q_normed and is_q) or (k_normed and is_k))
                weight = k_norm if is_k else q_norm
                if normed:
                    for n in range(steps):
                        item = uint32(sub + uint32(n * lanes))
                        i = int64(uint32(item * uint32(width)))
                        if item < uint32(pairs):
                            values = load_norm(weight, i)
                            for w in range(width):
                                x[2 * n * width + w] = x[2 * n * width + w] * factor * values[w]
                        if item < uint32(items):
                            values = load_norm(weight, i + int64(half))
                            for w in range(width):
                                x[(2 * n + 1) * width + w] = x[(2 * n + 1) * width + w] * factor * values[w]

            if here and not is_v:
                for n in range(steps):
                    item = uint32(sub + uint32(n * lanes))
                    i = int64(uint32(item * uint32(width)))
                    if item < uint32(pairs):
                        c = load_table(cos, cos_at + i)
                        s = load_table(sin, sin_at + i)
                        for w in range(width):
                            a = x[2 * n * width + w]
                            b = x[(2 * n + 1) * width + w]
                            # fused by name, as in rotary_append
                            x[2 * n * width + w] = ptx.fma(a, c[w], float32(-(b * s[w])))
                            x[(2 * n + 1) * width + w] = ptx.fma(b, c[w], float32(a * s[w]))

            divisor = float32(1.0)
            if int8_cache:
                top = float32(0.0)
                for e in range(elements):
                    top = ptx.fmax_nan(top, abs(x[e]))
                for bit in range(5):
                    if (1 << bit) < lanes:
                        top = ptx.fmax_nan(top, ptx.shfl_bfly(top, uint32(1 << bit)))
                scale = top / LARGEST
                if scale > float32(0.0):
                    divisor = scale
                if here and sub == uint32(0):
                    if is_k:
                        k_scales[outer * k_scales_batch + row * k_scales_token + head * k_scales_head] = scale
                    elif is_v:
                        v_scales[outer * v_scales_batch + row * v_scales_token + head * v_scales_head] = scale

            for n in range(steps):
                item = uint32(sub + uint32(n * lanes))
                i = int64(uint32(item * uint32(width)))
                for part in range(2):
                    offset = to + i + int64(part * half)
                    if item < uint32(pairs) or (part == 1 and item < uint32(items)):
                        for w in range(width):
                            chunk[w] = x[(2 * n + part) * width + w]
                        if is_q:  # zeros where its position is outside
                            store(out, offset, chunk)
                        elif here:
                            cached = v_cache if is_v else k_cache
                            if int8_cache:
                                store_int8(cached, offset, chunk, divisor)
                            elif is_v:
                                copy(v, at + i + int64(part * half), v_cache, offset)
                            else:
                                store(cached, offset, chunk)
            first = uint32(first + uint32(group_count))

    return rotary_heads


def _lanes(items):
    """Lanes that share a head of so many items: a power of two, so that they reduce by shuffles."""
    lanes = 1
    while lanes < min(items, ptx.WARP):
        lanes *= 2
    return lanes


@lru_cache(maxsize=4096)
def plan(batch, tokens, heads, kv_heads, head_dim, half, dtype, width, paged=False, heads_options=None):
    """A block a token; a thread a chunk of it, up to MAX_THREADS, since the work a thread is a few loads.

    heads_options: None, or (int8_cache, q_normed, k_normed, norm dtype) of ``rotary_heads``.
    """
    if heads_options is None:
        chunks = (heads + kv_heads) * (head_dim - half) // width + kv_heads * head_dim // width
        factory, options = rotary_append_kernel, ()
    else:
        chunks = (heads + 2 * kv_heads) * _lanes((head_dim - half) // width)
        factory, options = rotary_heads_kernel, heads_options
    threads = min(MAX_THREADS, -(-chunks // ptx.WARP) * ptx.WARP)
    constants = (dtype, head_dim, half, width, threads, paged, *options)
    return Plan(factory, constants, (batch * tokens, 1, 1), (threads, 1, 1))


def cost(batch, tokens, heads, kv_heads, head_dim, itemsize, cache_itemsize=None):
    """q, k and v are read and written once; the tables' rows are shared by a batch and stay in the cache.

    cache_itemsize: of k and v as they are written, where it is another; int8 takes a float32 scale a token and head besides.
    """
    elements = batch * tokens * (heads + 2 * kv_heads) * head_dim
    written = batch * tokens * 2 * kv_heads
    saved = 0
    if cache_itemsize not in (None, itemsize):
        saved = written * (head_dim * (itemsize - cache_itemsize) - 4)
    return Cost(bytes=2 * itemsize * elements - saved, flops=3 * elements)


def run(
    q, k, v, cos, sin, positions, k_cache, v_cache, block_table, k_scales, v_scales, q_norm, k_norm, eps, out, device, stream
):  # fmt: skip
    """See ``nbkernels.rotary_append``; all arrays are DeviceArrays, those that it may leave out None."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads, half = k.shape[2], cos.shape[1]
    paged = block_table is not None
    capacity = block_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1]
    limit = min(capacity, cos.shape[0])
    int8_cache = k_cache.dtype != q.dtype
    width = vector_width(q.dtype)
    # a chunk may not cross the middle or the end of what is rotated; tables are read 4 elements at a time
    fits = head_dim % width == 0 and half % width == 0
    arrays, tables = (q, k, v, k_cache, v_cache, out), (cos, sin) if half else ()
    floats = (q, k, v, out) if int8_cache else arrays
    norms = [x for x in (q_norm, k_norm) if x is not None]
    wide = fits and all(aligned(x, width=width) for x in floats) and all(aligned(x, width=4) for x in tables)
    wide = wide and all(x.pointer % 16 == 0 for x in norms)
    if int8_cache:  # ``width`` elements are a store of as many bytes
        wide = wide and all(x.pointer % width == 0 for x in (k_cache, v_cache))
        wide = wide and all(s % width == 0 for x in (k_cache, v_cache) for s in x.strides[:3])
    if not wide:
        width = 1
    heads_options = None
    if int8_cache or norms:
        norm_dtype = norms[0].dtype if norms else q.dtype
        heads_options = int8_cache, q_norm is not None, k_norm is not None, norm_dtype
    pointers = (x.pointer for x in (q, k, v, cos, sin, positions, k_cache, v_cache, out))
    strides = (s for x in arrays for s in x.strides[:3])
    sizes = (tokens, heads, kv_heads, limit, cos.strides[0], sin.strides[0], positions.strides[0])
    table = (0, 0, 0, 0)
    if paged:
        table = (block_table.pointer, block_table.strides[0], k_cache.shape[1].bit_length() - 1, k_cache.shape[0])
    chosen = plan(batch, tokens, heads, kv_heads, head_dim, half, q.dtype, width, paged, heads_options)
    arguments = (*pointers, *sizes, *strides, *table)
    if heads_options is not None:
        scales = (0,) * 8
        if int8_cache:
            scales = (k_scales.pointer, v_scales.pointer, *k_scales.strides, *v_scales.strides)
        norm_pointers = (0 if x is None else x.pointer for x in (q_norm, k_norm))
        arguments = (*arguments, *scales, *norm_pointers, float(eps))
    launch(chosen, arguments, device, stream)
