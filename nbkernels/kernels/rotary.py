"""Rotary position embedding of q and k, and the append of k and v to the KV cache, in one launch.

    out[.., i]        = x[.., i] · cos[p, i] - x[.., i + half] · sin[p, i]          for i < half = rotary_dim / 2
    out[.., i + half] = x[.., i + half] · cos[p, i] + x[.., i] · sin[p, i]
    out[.., j]        = x[.., j]                                                     for j >= rotary_dim

p = positions[b] + t. (Su et al. 2021, "RoFormer", with the halves paired as in GPT-NeoX.) A block is one token of one sequence;
its threads walk the pairs of all of the token's heads, q then k, and then the elements of v:

    token:  | q head 0 | q head 1 | … | k head 0 | … | v head 0 | …
             i ∘ i+half pairs, a thread a pair          copied

A position outside the cache or the table writes nothing to the cache, and its row of q is zero. A thread reads both elements of a
pair before it writes either, so out may be q.
"""

from functools import lru_cache

from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, conversions
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch


def rotary_append_kernel(dtype, head_dim, half, threads):
    """q, k, v, caches and out [batch, tokens or capacity, heads, head_dim] by strides; grid: batch · tokens."""
    from_storage, to_storage = conversions(dtype)
    rest = head_dim - 2 * half
    items = half + rest  # of a head: pairs, then elements that are copied

    @cuda.jit(device=True, inline="always")
    def rotate(source, at, target, to, cos, sin, angle, item):
        """One pair, or one element past the rotated part, of a head at ``at`` to the head at ``to``."""
        if item < uint32(half):
            first = from_storage(source[at + int64(item)])
            second = from_storage(source[at + int64(item) + int64(half)])
            c = cos[angle + int64(item)]
            s = sin[angle + int64(item)]
            target[to + int64(item)] = to_storage(first * c - second * s)
            target[to + int64(item) + int64(half)] = to_storage(second * c + first * s)
        else:
            target[to + int64(item) + int64(half)] = source[at + int64(item) + int64(half)]

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
        angle_stride: int64,
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
        angle = position * angle_stride
        q_row = batch * q_batch + token * q_token
        out_row = batch * out_batch + token * out_token

        index = uint32(cuda.threadIdx.x)
        while index < uint32(heads * uint32(items)):
            head = int64(index // uint32(items))
            item = uint32(index % uint32(items))
            to = out_row + head * out_head
            if inside:
                rotate(q, q_row + head * q_head, out, to, cos, sin, angle, item)
            else:
                if item < uint32(half):
                    out[to + int64(item)] = to_storage(float32(0.0))
                out[to + int64(item) + int64(half)] = to_storage(float32(0.0))
            index = uint32(index + uint32(threads))

        if inside:
            k_row = batch * k_batch + token * k_token
            k_to = batch * k_cache_batch + position * k_cache_token
            index = uint32(cuda.threadIdx.x)
            while index < uint32(kv_heads * uint32(items)):
                head = int64(index // uint32(items))
                item = uint32(index % uint32(items))
                rotate(k, k_row + head * k_head, k_cache, k_to + head * k_cache_head, cos, sin, angle, item)
                index = uint32(index + uint32(threads))
            v_row = batch * v_batch + token * v_token
            v_to = batch * v_cache_batch + position * v_cache_token
            index = uint32(cuda.threadIdx.x)
            while index < uint32(kv_heads * uint32(head_dim)):
                head = int64(index // uint32(head_dim))
                element = int64(index % uint32(head_dim))
                v_cache[v_to + head * v_cache_head + element] = v[v_row + head * v_head + element]
                index = uint32(index + uint32(threads))

    return rotary_append


@lru_cache(maxsize=4096)
def plan(batch, tokens, heads, head_dim, half, dtype):
    """A block a token; as many threads as the token has pairs of q, up to 256, since the work a thread is a few loads."""
    pairs = heads * max(head_dim - half, 1)
    threads = min(256, max(32, -(-pairs // 32) * 32))
    return Plan(rotary_append_kernel, (dtype, head_dim, half, threads), (batch * tokens, 1, 1), (threads, 1, 1))


def cost(batch, tokens, heads, kv_heads, head_dim, itemsize):
    """q, k and v are read and written once; the tables' rows are shared by a batch and stay in the cache."""
    elements = batch * tokens * (heads + 2 * kv_heads) * head_dim
    return Cost(bytes=2 * itemsize * elements, flops=3 * elements)


def run(q, k, v, cos, sin, positions, k_cache, v_cache, out, device, stream):
    """See ``nbkernels.rotary_append``; all arguments are DeviceArrays."""
    batch, tokens, heads, head_dim = q.shape
    limit = min(k_cache.shape[1], cos.shape[0])
    # a table of no columns has no strides to speak of
    if cos.strides[0] != sin.strides[0] and cos.shape[1]:
        raise ValueError(f"sin: row stride {sin.strides[0]}, wanted {cos.strides[0]} as cos")
    pointers = (x.pointer for x in (q, k, v, cos, sin, positions, k_cache, v_cache, out))
    strides = (s for x in (q, k, v, k_cache, v_cache, out) for s in x.strides[:3])
    sizes = (tokens, heads, k.shape[2], limit, cos.strides[0], positions.strides[0])
    chosen = plan(batch, tokens, heads, head_dim, cos.shape[1], q.dtype)
    launch(chosen, (*pointers, *sizes, *strides), device, stream)
