"""Attention for few query tokens over a long KV cache: bound by reading K and V once.

    out[b, i, h] = sum_j softmax_j(scale · q[b, i, h] · k[b, j, h / group]) · v[b, j, h / group]        (caps, sinks: ``scores``)

Split-KV decoding (Dao et al. 2023, "Flash-Decoding") with the online softmax of Milakov and Gimelshein (2018): the keys of a
sequence are cut into splits of SPLIT, a block takes one of one KV head for up to ``rows`` query rows (the
query heads of the KV head's group, times the query tokens, packed so that K and V are read once for them), and the last block to
end merges the splits in their order (``decode_merge``). The length of a split depends on nothing but this file, so a sequence's
bits do not depend on its batch or on the cache's capacity. For that, products are added by a named fma: the assembler may fuse a
bare product and sum in one variant of a kernel and not in another.

    keys:   |   split 0   |   split 1   | … |  the last split, short  |  beyond the length: never read

``decode_tensor`` (16-bit elements at 16-byte addresses) multiplies on the tensor cores; ``decode_lanes`` (float32, and rows that
begin anywhere) works in float32 on the lanes.

Both walk a paged cache too (see ``pages``): k and v are pools of pages then, a split is whole pages, and the 16 keys of a product
lie in one of them. int8 pages have a scale a token and head, which is a factor of the key's score, and of its weight where the
weight meets the value: the products take the plain integers.

Where all sequences share their first pages, the query rows of the whole batch are packed over the prefix's splits in a launch of
its own, and each sequence's walk begins behind them; the merge finds all splits in their places, so that the bits are the same:

    prefix:      |  split 0  |  split 1  |    rows of every sequence, as if they were tokens of one
    sequence b:                          |  split 2  | …
"""

from functools import lru_cache, partial

import numpy as np

from nbkernels import ptx
from nbkernels.kernels import decode_lanes, decode_tensor
from nbkernels.kernels.decode_merge import places
from nbkernels.kernels.elements import Cost, aligned, vector_width
from nbkernels.kernels.scores import score_factors
from nbkernels.launch import memory
from nbkernels.launch.launcher import Plan, launch

SPLIT = 512  # keys a block: short enough that one sequence fills the card from a few thousand keys on
WARPS, FEW_WARPS = 4, 2  # of decode_tensor; fewer where two steps of that many would not fit into LEAST_SHARED_BYTES
# steps that a warp has room for, where no multiprocessor has two blocks, and elsewhere: more were slower on an H200
LONE_STAGES, STAGES = 4, 2
LEAST_SHARED_BYTES = 99 * 1024  # of a block, on every architecture
INT8_PIECE = 16  # int8 elements in 16 bytes
MOST_BLOCKS = 65535  # of a grid's second and third axes


def _walk(packed, head_dim, dtype, width, int8_pages, device, sequences, splits):
    """(factory, its first constants, query rows a block, threads, shared bytes) for so many packed rows.

    Rows a block: as many as the packed rows fill, up to what the registers hold: STRIP · strips of decode_tensor, where strips
    is a power of two and strips · head_dim at most STRIP_ELEMENTS, or a power of two up to MAX_ROWS of decode_lanes.
    sequences: blocks for each row tile and split. device: (shared bytes of a block, multiprocessors).
    """
    if dtype.itemsize != 2 or width != (INT8_PIECE if int8_pages else vector_width(dtype)):
        rows = 1
        while rows < min(packed, decode_lanes.MAX_ROWS):
            rows *= 2
        constants = (dtype, head_dim, width, rows, SPLIT)
        return decode_lanes.decode_lanes_kernel, constants, rows, decode_lanes.THREADS, 0
    shared_bytes, multiprocessors = device
    strips, strip = 1, decode_tensor.STRIP
    while (
        2 * strips * head_dim <= decode_tensor.STRIP_ELEMENTS
        and strips * strip < packed
        and strips < decode_tensor.MAX_STRIPS
    ):
        strips *= 2
    itemsize = 1 if int8_pages else 2
    keys = decode_tensor.step_keys(head_dim, itemsize)
    of_block = partial(decode_tensor.block_bytes, head_dim, itemsize, strips, keys)
    # the warps by the shape alone, since the bits hang on them; stages change none
    warps = WARPS if of_block(WARPS, 2) <= LEAST_SHARED_BYTES else FEW_WARPS
    blocks = sequences * -(-packed // (strips * strip)) * splits
    stages = LONE_STAGES if blocks <= multiprocessors and of_block(warps, LONE_STAGES) <= shared_bytes else STAGES
    constants = (dtype, head_dim, strips, SPLIT, keys, warps, stages)
    kernel = decode_tensor.decode_tensor_kernel
    return kernel, constants, strips * strip, warps * ptx.WARP, of_block(warps, stages)


@lru_cache(maxsize=4096)
def plan(
    batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, width, device, causal, windowed, has_lengths,
    capped=False, has_sinks=False, paged=False, int8_pages=False, prefix_splits=0,
):  # fmt: skip
    """(walk over the splits, row tiles, splits). width: elements of a load, 1 where rows begin anywhere.

    int8 pages at 16-byte addresses count as INT8_PIECE. The walk begins behind the splits of a prefix, which another takes.
    device: (the most shared bytes that a block may have, multiprocessors).
    """
    packed = heads // kv_heads * q_len
    splits = max(1, -(-kv_len // SPLIT))
    shape = (packed, head_dim, dtype, width, int8_pages, device, batch * kv_heads)
    factory, constants, rows, threads, used = _walk(*shape, splits - prefix_splits)
    row_tiles = -(-packed // rows)
    if splits > MOST_BLOCKS:
        raise ValueError(f"{kv_len} keys are more than {MOST_BLOCKS} splits of {SPLIT}")
    grid = (kv_heads * row_tiles, splits - prefix_splits, batch)
    options = (causal, windowed, has_lengths, capped, has_sinks, paged, int8_pages, "behind" if prefix_splits else None)
    return Plan(factory, (*constants, *options), grid, (threads, 1, 1), used), row_tiles, splits


@lru_cache(maxsize=4096)
def plan_prefix(batch, q_len, heads, kv_heads, head_dim, dtype, width, device, capped, int8_pages, prefix_splits):
    """(walk over a prefix's splits, row tiles): the query tokens of all sequences, which all see it, as those of one."""
    packed = heads // kv_heads * q_len * batch
    shape = (packed, head_dim, dtype, width, int8_pages, device, kv_heads)
    factory, constants, rows, threads, used = _walk(*shape, prefix_splits)
    row_tiles = -(-packed // rows)
    options = (False, False, False, capped, False, True, int8_pages, "shared")
    grid = (kv_heads * row_tiles, prefix_splits, 1)
    return Plan(factory, (*constants, *options), grid, (threads, 1, 1), used), row_tiles


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
    if batch > MOST_BLOCKS:
        for first in range(0, batch, MOST_BLOCKS):
            part = slice(first, first + MOST_BLOCKS)
            k_part, v_part = (k[part], v[part]) if pages is None else (k, v)
            pages_part = None if pages is None else (pages[0][part], *pages[1:])
            lengths = None if kv_lengths is None else kv_lengths[part]
            options = (causal, scale, window, soft_cap, sinks, lengths, out[part], device, stream, pages_part)
            run(q[part], k_part, v_part, *options)
        return
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
    shape = (heads, kv_heads, head_dim, q.dtype, width, (device.shared_bytes, device.sm_count))
    options = (soft_cap is not None, sinks is not None, pages is not None, int8_pages, prefix_splits)
    walk, row_tiles, splits = plan(batch, q_len, kv_len, *shape, *masks, *options)
    if prefix_splits:
        shared, shared_tiles = plan_prefix(batch, q_len, *shape, soft_cap is not None, int8_pages, prefix_splits)
    partials, counters = (0, 0), None
    all_places = places(splits)
    if splits > 1:
        slots = batch * q_len * heads * all_places
        head_floats = -(-2 * slots // 4) * 4  # the vectors behind them begin at 16 bytes
        workspace = memory.empty((head_floats + slots * head_dim,), np.dtype(np.float32), stream)
        partials = (workspace[head_floats:].pointer, workspace.pointer)
        tiles = max(batch * row_tiles, shared_tiles if prefix_splits else 0)
        counters = memory.counters(kv_heads * tiles * (all_places - splits), stream)
    lengths = 0 if kv_lengths is None else kv_lengths.pointer
    # a window beyond every key hides nothing, and must not overflow
    window = 0 if window is None else min(window, kv_len + q_len)
    strides = [s for x in (q, k, v, out) for s in x.strides[:3]]
    pointers = (
        q.pointer,
        k.pointer,
        v.pointer,
        lengths,
        out.pointer,
        *partials,
        0 if counters is None else counters.pointer,
    )
    group = heads // kv_heads
    factor, cap = score_factors(scale, soft_cap)
    if prefix_splits:
        as_tokens = (0, q.strides[0] // q_len, *strides[2:])
        sizes = (batch * q_len, prefix_splits * SPLIT, kv_heads, group, shared_tiles, 0)
        launch(shared, (*pointers, *sizes, splits, all_places, 0, factor, *as_tokens, *cap, *table), device, stream)
    sizes = (q_len, kv_len, kv_heads, group, row_tiles, prefix_splits, splits, all_places)
    sink = () if sinks is None else (sinks.pointer,)
    launch(walk, (*pointers, *sizes, window, factor, *strides, *cap, *sink, *table), device, stream)
