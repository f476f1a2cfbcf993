"""Attention over a paged KV cache: the few query tokens of a decode step, or prompts.

A sequence's keys lie in pages of page_size tokens, anywhere in a pool; row b of the block table names the pages of sequence b in
their order (Kwon et al. 2023, "PagedAttention"):

    block_table[b]:  | 5 | 2 | …      pool:  | page 0 | page 1 | page 2: tokens 16-31 | … | page 5: tokens 0-15 | …

Few query tokens are ``decode``'s, which looks the pages up as it walks. Prompts go through ``gather_pages``: K and V of the
tokens that there are are copied, int8 ones times their scales, into arrays that the kernels for prompts take. For q_len tokens a
key's copy is 4 · kv_heads · head_dim elements of traffic beside 4 · heads · q_len · head_dim operations: with 512 tokens, groups
of 4 heads and 16-bit elements a seventh of the products' time on an H200, and less for longer prompts. The kernels for prompts
copy boxes of a tensor map (sm_90a), which pages of fewer tokens than a tile of keys would cut up.

    grid: batch · tiles of TILE tokens, each within a page, · (K, V);  a thread copies 16 bytes, UNROLL of them in flight
"""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels import attention, decode
from nbkernels.kernels.elements import Cost, aligned, conversions, pair_conversions, vector_width
from nbkernels.kernels.int8 import load_int8
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

TILE = 16  # tokens a block: the smallest page
THREADS = 256
UNROLL = 4
SCRATCH_BYTES = 2**30  # of gathered K and V at once, or those of one sequence: a batch goes in parts


def gather_pages_kernel(dtype, head_dim, width, int8_pages):
    """k, v [batch, kv_len, kv_heads, head_dim] (contiguous) out of their pages. Tokens behind a length are not written."""
    chunks = head_dim // width
    load = load_int8(width) if int8_pages else None
    _, to_storage = conversions(dtype)
    pack = pair_conversions(dtype)[1] if dtype.itemsize == 2 else None
    stored = "int8" if int8_pages else dtype
    unroll = UNROLL if width > 1 else 1
    words_count = 4 * UNROLL

    @cuda.jit(device=True, inline="always")
    def read(words, first, pages, at, scale):
        """16 bytes of the result from pages[at]."""
        if not int8_pages:
            loaded = ptx.ld_global_stream_v4(ptx.address(pages, at))
            for w in range(4):
                words[first + w] = loaded[w]
        else:
            values = load(pages, at)
            for w in range(4):
                if width == 8:
                    words[first + w] = pack(values[2 * w] * scale, values[2 * w + 1] * scale)
                else:
                    words[first + w] = ptx.bits_from_float(values[w] * scale)

    @kernel(launch_bounds=THREADS)
    def gather_pages(
        k_pages: ptx.pointer(stored),
        v_pages: ptx.pointer(stored),
        k_scales: ptx.pointer("float32"),
        v_scales: ptx.pointer("float32"),
        block_table: ptx.pointer("int32"),
        kv_lengths: ptx.pointer("int32"),
        k: ptx.pointer(dtype),
        v: ptx.pointer(dtype),
        kv_len: int32,
        kv_heads: uint32,
        tiles: uint32,
        page_shift: uint32,
        last_page: uint32,
        table_stride: int64,
        k_page: int64,
        k_token: int64,
        k_head: int64,
        v_page: int64,
        v_token: int64,
        v_head: int64,
        k_scales_page: int64,
        k_scales_token: int64,
        k_scales_head: int64,
        v_scales_page: int64,
        v_scales_token: int64,
        v_scales_head: int64,
    ):
        words = cuda.local.array(words_count, uint32)
        block = uint32(cuda.blockIdx.x)
        is_v = uint32(block & uint32(1)) != uint32(0)
        block = uint32(block >> uint32(1))
        start = int32(uint32(block % tiles) * uint32(TILE))
        batch = int64(block // tiles)
        count = int32(min(kv_lengths[batch], kv_len) - start)
        if count <= int32(0):
            return
        count = min(count, int32(TILE))
        page = int64(min(uint32(block_table[batch * table_stride + int64(start >> int32(page_shift))]), last_page))
        row = int64(start & int32((int32(1) << int32(page_shift)) - int32(1)))
        pages, scales, gathered = k_pages, k_scales, k
        at = page * k_page + row * k_token
        scale_at = page * k_scales_page + row * k_scales_token
        token_stride, head_stride, scale_token, scale_head = k_token, k_head, k_scales_token, k_scales_head
        if is_v:
            pages, scales, gathered = v_pages, v_scales, v
            at = page * v_page + row * v_token
            scale_at = page * v_scales_page + row * v_scales_token
            token_stride, head_stride, scale_token, scale_head = v_token, v_head, v_scales_token, v_scales_head
        # the tokens of a tile follow each other in the result
        to = (batch * int64(kv_len) + int64(start)) * int64(kv_heads) * int64(head_dim)

        items = uint32(uint32(count) * uint32(kv_heads * uint32(chunks)))
        number = uint32(cuda.threadIdx.x)
        while number < items:
            for u in range(unroll):
                item = uint32(number + uint32(u * THREADS))
                if item < items:
                    chunk = int64(uint32(uint32(item % uint32(chunks)) * uint32(width)))
                    head = int64(uint32(uint32(item // uint32(chunks)) % kv_heads))
                    token = int64(uint32(uint32(item // uint32(chunks)) // kv_heads))
                    source = at + token * token_stride + head * head_stride + chunk
                    if not int8_pages and width == 1:
                        gathered[to + int64(item)] = pages[source]
                    elif not int8_pages:
                        read(words, 4 * u, pages, source, np.float32(1.0))
                    else:
                        scale = scales[scale_at + token * scale_token + head * scale_head]
                        if width == 1:
                            gathered[to + int64(item)] = to_storage(load(pages, source)[0] * scale)
                        else:
                            read(words, 4 * u, pages, source, scale)
            if width > 1:
                for u in range(unroll):
                    item = uint32(number + uint32(u * THREADS))
                    if item < items:
                        ptx.st_global_v4(
                            ptx.address(gathered, to + int64(item) * int64(width)),
                            words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3],
                        )  # fmt: skip
            number = uint32(number + uint32(unroll * THREADS))

    return gather_pages


@lru_cache(maxsize=4096)
def plan(batch, kv_len, head_dim, dtype, width, int8_pages):
    """A block a tile of K or of V."""
    tiles = -(-kv_len // TILE)
    if 2 * batch * tiles > 2**31 - 1:
        raise ValueError(f"{batch} sequences of {kv_len} keys need more than 2^31 - 1 blocks")
    constants = (dtype, head_dim, width, int8_pages)
    return Plan(gather_pages_kernel, constants, (2 * batch * tiles, 1, 1), (THREADS, 1, 1)), tiles


def gather_cost(tokens, kv_heads, head_dim, itemsize, page_itemsize):
    """K and V of so many tokens in all are read and written once, int8 ones with a float32 scale a token and head."""
    elements = 2 * tokens * kv_heads
    scale_bytes = 4 if page_itemsize == 1 else 0
    return Cost(bytes=elements * (head_dim * (itemsize + page_itemsize) + scale_bytes), flops=elements * head_dim)


def _gather(k_pages, v_pages, k_scales, v_scales, block_table, kv_lengths, dtype, device, stream):
    """K and V [batch, kv_len, kv_heads, head_dim] of the sequences of a table, in scratch memory."""
    _, page_size, kv_heads, head_dim = k_pages.shape
    batch, max_pages = block_table.shape
    int8_pages = k_pages.dtype != dtype
    width = vector_width(dtype)
    pools = (k_pages, v_pages)
    wide = head_dim % width == 0
    if int8_pages:  # ``width`` elements are a load of as many bytes
        wide = wide and all(x.pointer % width == 0 and all(s % width == 0 for s in x.strides[:3]) for x in pools)
    else:
        wide = wide and all(aligned(x, width=width) for x in pools)
    kv_len = max_pages * page_size
    chosen, tiles = plan(batch, kv_len, head_dim, dtype, width if wide else 1, int8_pages)
    gathered = memory.empty((2, batch, kv_len, kv_heads, head_dim), dtype, stream)
    scale_pointers, scale_strides = (0, 0), (0,) * 6
    if int8_pages:
        scale_pointers = (k_scales.pointer, v_scales.pointer)
        scale_strides = (*k_scales.strides, *v_scales.strides)
    pointers = (k_pages.pointer, v_pages.pointer, *scale_pointers, block_table.pointer, kv_lengths.pointer)
    sizes = (kv_len, kv_heads, tiles, page_size.bit_length() - 1, k_pages.shape[0] - 1, block_table.strides[0])
    strides = (*k_pages.strides[:3], *v_pages.strides[:3], *scale_strides)
    k, v = gathered[0], gathered[1]
    launch(chosen, (*pointers, k.pointer, v.pointer, *sizes, *strides), device, stream)
    return k, v


def run(
    q, k_pages, v_pages, block_table, kv_lengths, k_scales, v_scales, prefix, causal, scale, window, soft_cap, sinks,
    out, device, stream,
):  # fmt: skip
    """See ``nbkernels.paged_attention``; all arrays are DeviceArrays, the scales and sinks may be None."""
    batch, q_len = q.shape[:2]
    if q_len <= attention.FEW_TOKENS:
        pages = (block_table, k_scales, v_scales, prefix)
        decode.run(q, k_pages, v_pages, causal, scale, window, soft_cap, sinks, kv_lengths, out, device, stream, pages)
        return
    _, page_size, kv_heads, head_dim = k_pages.shape
    sequence_bytes = 2 * block_table.shape[1] * page_size * kv_heads * head_dim * q.dtype.itemsize
    part = max(1, SCRATCH_BYTES // sequence_bytes)
    for first in range(0, batch, part):
        here = slice(first, first + part)
        lengths = kv_lengths[here]
        k, v = _gather(k_pages, v_pages, k_scales, v_scales, block_table[here], lengths, q.dtype, device, stream)
        attention.run(q[here], k, v, causal, scale, window, soft_cap, sinks, lengths, None, out[here], device, stream)
