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
"""

from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, access, aligned, vector_width
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch


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
def _copy(width):
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


def rotary_append_kernel(dtype, head_dim, half, width, threads):
    """q, k, v, caches and out [batch, tokens or capacity, heads, head_dim] by strides; grid: batch · tokens."""
    load, store = access(dtype, width)
    load_table, copy = _table_access(width), _copy(width)
    pairs = half // width  # chunks of a head's first half
    singles = (head_dim - 2 * half) // width
    items = pairs + singles
    chunks = head_dim // width

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
        k_to = batch * k_cache_batch + position * k_cache_token
        v_row = batch * v_batch + token * v_token
        v_to = batch * v_cache_batch + position * v_cache_token

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
            elif inside and index < k_end:
                head = int64(uint32(index - q_end) // uint32(items))
                item = uint32(uint32(index - q_end) % uint32(items))
                to = k_to + head * k_cache_head
                rotate(k, k_row + head * k_head, k_cache, to, cos, sin, cos_at, sin_at, item)
            elif inside:
                head = int64(uint32(index - k_end) // uint32(chunks))
                i = int64(uint32(uint32(uint32(index - k_end) % uint32(chunks)) * uint32(width)))
                copy(v, v_row + head * v_head + i, v_cache, v_to + head * v_cache_head + i)
            index = uint32(index + uint32(threads))

    return rotary_append


@lru_cache(maxsize=4096)
def plan(batch, tokens, heads, kv_heads, head_dim, half, dtype, width):
    """A block a token; a thread a chunk of it, up to 256 threads, since the work a thread is a few loads."""
    chunks = (heads + kv_heads) * (head_dim - half) // width + kv_heads * head_dim // width
    threads = min(256, -(-chunks // ptx.WARP) * ptx.WARP)
    return Plan(rotary_append_kernel, (dtype, head_dim, half, width, threads), (batch * tokens, 1, 1), (threads, 1, 1))


def cost(batch, tokens, heads, kv_heads, head_dim, itemsize):
    """q, k and v are read and written once; the tables' rows are shared by a batch and stay in the cache."""
    elements = batch * tokens * (heads + 2 * kv_heads) * head_dim
    return Cost(bytes=2 * itemsize * elements, flops=3 * elements)


def run(q, k, v, cos, sin, positions, k_cache, v_cache, out, device, stream):
    """See ``nbkernels.rotary_append``; all arguments are DeviceArrays."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads, half = k.shape[2], cos.shape[1]
    limit = min(k_cache.shape[1], cos.shape[0])
    width = vector_width(q.dtype)
    # a chunk may not cross the middle or the end of what is rotated; tables are read 4 elements at a time
    fits = head_dim % width == 0 and half % width == 0
    arrays, tables = (q, k, v, k_cache, v_cache, out), (cos, sin) if half else ()
    if not (fits and all(aligned(x, width=width) for x in arrays) and all(aligned(x, width=4) for x in tables)):
        width = 1
    pointers = (x.pointer for x in (q, k, v, cos, sin, positions, k_cache, v_cache, out))
    strides = (s for x in arrays for s in x.strides[:3])
    sizes = (tokens, heads, kv_heads, limit, cos.strides[0], sin.strides[0], positions.strides[0])
    chosen = plan(batch, tokens, heads, kv_heads, head_dim, half, q.dtype, width)
    launch(chosen, (*pointers, *sizes, *strides), device, stream)
