"""Attention over arrays and over pages, and what fills the pages."""

import numpy as np

from nbkernels import reference
from nbkernels.launch.replay import replayed
from nbkernels.ops.call import Call, check_out, finish_host, kernel_module
from nbkernels.ops.checks import (
    check_axes,
    check_contiguous_last,
    check_dtype,
    check_float,
    check_integer,
    check_no_jax,
    check_number,
    check_overlap,
    check_shape,
    check_writable,
)

PAGE_SIZES = (16, 32, 64, 128, 256)  # tokens: whole tiles of keys a page, whole pages a split


def _check_pages(call, k_name, v_name, dtype, batch, kv_heads, head_dim):
    """Caches or page pools, the table, and the scales of int8 ones, as ``call`` has them under these names.

    Returns how many tokens a sequence may have.
    """
    k, v, table = getattr(call, k_name), getattr(call, v_name), call.block_table
    axes = ("batch", "capacity") if table is None else ("pages", "page_size")
    check_axes(k_name, k, (*axes, "kv_heads", "head_dim"))
    check_shape(k_name, k, (batch if table is None else k.shape[0], k.shape[1], kv_heads, head_dim))
    check_shape(v_name, v, k.shape)
    capacity = k.shape[1]
    if table is not None:
        check_dtype(np.int32, block_table=table)
        check_axes("block_table", table, ("batch", "max_pages"))
        check_shape("block_table", table, (batch, table.shape[1]))
        if k.shape[1] not in PAGE_SIZES:
            raise ValueError(f"{k_name}: page_size {k.shape[1]}, wanted one of {', '.join(map(str, PAGE_SIZES))}")
        capacity *= table.shape[1]
        if capacity > 2**31 - 1:
            raise ValueError(
                f"block_table: {table.shape[1]} pages of {k.shape[1]} tokens, wanted at most 2^31 - 1 tokens"
            )
    for name, x in ((k_name, k), (v_name, v)):
        if x.dtype != dtype and x.dtype != np.int8:
            raise TypeError(f"{name}: {x.dtype}, wanted {dtype} as q, or int8")
    check_dtype(k.dtype, **{v_name: v})
    for name, scales in (("k_scales", call.k_scales), ("v_scales", call.v_scales)):
        if (scales is not None) != (k.dtype == np.int8):
            wanted = "an array beside int8 caches" if scales is None else f"None beside caches of {k.dtype}"
            raise TypeError(f"{name}: {'None' if scales is None else 'an array'}, wanted {wanted}")
        check_dtype(np.float32, **{name: scales})
        check_shape(name, scales, k.shape[:3])
    return capacity


@replayed
def rotary_append(
    q,
    k,
    v,
    cos,
    sin,
    positions,
    k_cache,
    v_cache,
    *,
    block_table=None,
    k_scales=None,
    v_scales=None,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
    out=None,
    stream=None,
):
    """Rotary embedding of q and k, and k and v written into the cache, in one pass. Returns the rotated q; out may be q.

    q [batch, tokens, heads, head_dim]; k, v [batch, tokens, kv_heads, head_dim] (all may be views of one fused array);
    cos, sin float32 [max_position, rotary_dim / 2], rotary_dim at most head_dim: element i is paired with
    i + rotary_dim / 2 and what lies past rotary_dim is left as it is; positions int32 [batch]: where each sequence's first
    token stands; k_cache, v_cache [batch, capacity, kv_heads, head_dim]: token t goes to positions[b] + t. A position outside
    of the cache or the table writes nothing on the device, and raises ValueError on the CPU.

    block_table int32 [batch, max_pages]: the caches are pools [pages, page_size, kv_heads, head_dim], page_size a power of two
    from 16 to 256, and position p of sequence b is row p mod page_size of page block_table[b, p / page_size]. A page outside of
    the pool is treated as such a position, save that q is rotated on the device. k_scales, v_scales float32 [batch, capacity,
    kv_heads] or [pages, page_size, kv_heads] (any strides): the caches are int8, of max |.| / 127 a token and head, rounded as
    ``quantize_int8`` does. q_norm, k_norm [head_dim] (q's dtype or float32): q and k are normalised head by head first,
    x / sqrt(mean(x²) + eps) · norm.
    """
    call = Call(
        stream, ("block_table", "k_scales", "v_scales", "q_norm", "k_norm", "out"),
        q=q, k=k, v=v, cos=cos, sin=sin, positions=positions, k_cache=k_cache, v_cache=v_cache,
        block_table=block_table, k_scales=k_scales, v_scales=v_scales, q_norm=q_norm, k_norm=k_norm, out=out,
    )  # fmt: skip
    dtype = check_float(q=call.q, k=call.k, v=call.v)
    check_dtype(np.float32, cos=call.cos, sin=call.sin)
    check_dtype(np.int32, positions=call.positions)
    check_axes("q", call.q, ("batch", "tokens", "heads", "head_dim"))
    check_axes("k", call.k, ("batch", "tokens", "kv_heads", "head_dim"))
    batch, tokens, _, head_dim = call.q.shape
    kv_heads = call.k.shape[2]
    check_shape("k", call.k, (batch, tokens, kv_heads, head_dim))
    check_shape("v", call.v, call.k.shape)
    check_axes("cos", call.cos, ("max_position", "rotary_dim / 2"))
    check_shape("sin", call.sin, call.cos.shape)
    if 2 * call.cos.shape[1] > head_dim:
        raise ValueError(f"cos: shape {tuple(call.cos.shape)}, wanted at most head_dim / 2 = {head_dim // 2} columns")
    check_shape("positions", call.positions, (batch,))
    _check_pages(call, "k_cache", "v_cache", dtype, batch, kv_heads, head_dim)
    for name in ("q_norm", "k_norm"):
        norm = getattr(call, name)
        if norm is not None and norm.dtype != dtype and norm.dtype != np.float32:
            raise TypeError(f"{name}: {norm.dtype}, wanted {dtype} as q, or float32")
        check_shape(name, norm, (head_dim,))
    if call.q_norm is not None and call.k_norm is not None:
        check_dtype(call.q_norm.dtype, k_norm=call.k_norm)
    check_number("eps", eps, least=0)
    if call.on_host:
        check_out(call, call.q.shape, dtype)
        check_writable(k_cache=call.k_cache, v_cache=call.v_cache, k_scales=call.k_scales, v_scales=call.v_scales)
        value = reference.rotary_append(
            call.q, call.k, call.v, call.cos, call.sin, call.positions, call.k_cache, call.v_cache,
            block_table=call.block_table, k_scales=call.k_scales, v_scales=call.v_scales,
            q_norm=call.q_norm, k_norm=call.k_norm, eps=eps,
        )  # fmt: skip
        return finish_host(value, q, out)
    check_contiguous_last(
        q=call.q, k=call.k, v=call.v, cos=call.cos, sin=call.sin, positions=call.positions,
        k_cache=call.k_cache, v_cache=call.v_cache, block_table=call.block_table,
        q_norm=call.q_norm, k_norm=call.k_norm, out=call.out,
    )  # fmt: skip
    if call.copied:
        raise TypeError("k_cache: host arrays are not written through a GPU; pass device arrays")
    check_no_jax(k_cache=k_cache, v_cache=v_cache, k_scales=k_scales, v_scales=v_scales)
    y = call.result(call.q.shape, dtype, out)
    others = ("k", "v", "k_cache", "v_cache", "k_scales", "v_scales")
    check_overlap(call.out, same=[("q", call.q)], other=[(name, getattr(call, name)) for name in others])
    if y.size or call.k.size:
        kernel_module("rotary").run(
            call.q, call.k, call.v, call.cos, call.sin, call.positions, call.k_cache, call.v_cache,
            call.block_table, call.k_scales, call.v_scales, call.q_norm, call.k_norm, eps, y, call.device, call.stream,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


def _check_attention(heads, kv_heads, head_dim, scale, window, soft_cap, sinks, k_name):
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: {heads} heads, wanted a multiple of the {kv_heads} kv_heads of {k_name}")
    if not 1 <= head_dim <= 256:
        raise ValueError(f"q: head_dim {head_dim}, wanted 1 to 256")
    if scale is not None:
        check_number("scale", scale)
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
            raise TypeError(f"window: {type(window).__name__}, wanted an integer or None")
        check_number("window", window, least=1)
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, positive=True)
        if soft_cap > 1000:  # the kernels' tanh is off by a part of the cap
            raise ValueError(f"soft_cap: {soft_cap}, wanted at most 1000")
    check_dtype(np.float32, sinks=sinks)
    check_shape("sinks", sinks, (heads,))


@replayed
def attention(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    kv_lengths=None,
    query_offsets=None,
    kv_offsets=None,
    out=None,
    stream=None,
):
    """softmax(scale · q kᵀ, masked) v, head by head. Returns q's shape and dtype.

    q [batch, q_len, heads, head_dim]; k, v [batch, kv_len, kv_heads, head_dim], heads a multiple of kv_heads (GQA);
    head_dim up to 256. kv_lengths int32 [batch]: how many keys each sequence has (default kv_len). With n keys, query i
    stands at position n - q_len + i: causal hides later keys; window (at least 1) keeps the last ``window`` keys up to and
    with its own, and so is causal. A row that sees nothing is zero. scale: default 1 / sqrt(head_dim). soft_cap, above 0 and
    up to 1000: scores become soft_cap · tanh(score / soft_cap). sinks float32 [heads]: a score each that joins the softmax's
    sum, and has no value.

    Packed sequences of unequal length: q [total_q, heads, head_dim]; k, v [total_kv, kv_heads, head_dim]; query_offsets and
    kv_offsets int32 [batch + 1], ascending from 0: sequence b has queries query_offsets[b] to query_offsets[b + 1] - 1 and keys
    likewise, none of either is allowed, and its last query stands at its last key. Rows behind the last offset are not computed.
    Offsets that don't ascend raise ValueError on the CPU; on the device nothing outside of the arrays is touched, and the result
    is arbitrary.
    """
    call = Call(
        stream, ("sinks", "kv_lengths", "query_offsets", "kv_offsets", "out"),
        q=q, k=k, v=v, sinks=sinks, kv_lengths=kv_lengths, query_offsets=query_offsets, kv_offsets=kv_offsets, out=out,
    )  # fmt: skip
    dtype = check_float(q=call.q, k=call.k, v=call.v)
    packed = call.query_offsets is not None
    if packed != (call.kv_offsets is not None):
        missing, given = ("kv_offsets", "query_offsets") if packed else ("query_offsets", "kv_offsets")
        raise TypeError(f"{missing}: None, wanted an array as {given}")
    if packed:
        check_axes("q", call.q, ("total_q", "heads", "head_dim"))
        check_axes("k", call.k, ("total_kv", "kv_heads", "head_dim"))
        check_dtype(np.int32, query_offsets=call.query_offsets, kv_offsets=call.kv_offsets)
        check_axes("query_offsets", call.query_offsets, ("batch + 1",))
        if call.query_offsets.shape[0] == 0:
            raise ValueError("query_offsets: shape (0,), wanted at least one offset")
        check_shape("kv_offsets", call.kv_offsets, call.query_offsets.shape)
        if call.kv_lengths is not None:
            raise TypeError("kv_lengths: an array, wanted None: kv_offsets say how many keys a packed sequence has")
    else:
        check_axes("q", call.q, ("batch", "q_len", "heads", "head_dim"))
        check_axes("k", call.k, ("batch", "kv_len", "kv_heads", "head_dim"))
    heads, head_dim = call.q.shape[-2:]
    kv_heads = call.k.shape[-2]
    check_shape("k", call.k, (*(() if packed else call.q.shape[:1]), call.k.shape[-3], kv_heads, head_dim))
    check_shape("v", call.v, call.k.shape)
    _check_attention(heads, kv_heads, head_dim, scale, window, soft_cap, call.sinks, "k")
    check_dtype(np.int32, kv_lengths=call.kv_lengths)
    check_shape("kv_lengths", call.kv_lengths, call.q.shape[:1])
    if call.on_host:
        check_out(call, call.q.shape, dtype)
        value = reference.attention(
            call.q, call.k, call.v, causal=causal, scale=scale, window=window, soft_cap=soft_cap, sinks=call.sinks,
            kv_lengths=call.kv_lengths, query_offsets=call.query_offsets, kv_offsets=call.kv_offsets,
        )  # fmt: skip
        return finish_host(value, q, out)
    check_contiguous_last(
        q=call.q, k=call.k, v=call.v, sinks=call.sinks, kv_lengths=call.kv_lengths,
        query_offsets=call.query_offsets, kv_offsets=call.kv_offsets, out=call.out,
    )  # fmt: skip
    y = call.result(call.q.shape, dtype, out)
    check_overlap(call.out, other=[("q", call.q), ("k", call.k), ("v", call.v)])
    offsets = (call.query_offsets, call.kv_offsets) if packed else None
    if y.size and (not packed or offsets[0].size > 1):
        q4, k4, v4, y4 = (x.reshape(1, *x.shape) if packed else x for x in (call.q, call.k, call.v, y))
        kernel_module("attention").run(
            q4, k4, v4, bool(causal), head_dim**-0.5 if scale is None else float(scale),
            None if window is None else int(window), None if soft_cap is None else float(soft_cap), call.sinks,
            call.kv_lengths, offsets, y4, call.device, call.stream,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


@replayed
def paged_attention(
    q,
    k_pages,
    v_pages,
    block_table,
    kv_lengths,
    *,
    k_scales=None,
    v_scales=None,
    prefix=0,
    causal=True,
    scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    out=None,
    stream=None,
):
    """``attention`` over a paged KV cache. Returns q's shape and dtype.

    q [batch, q_len, heads, head_dim]; k_pages, v_pages [pages, page_size, kv_heads, head_dim], page_size a power of two from 16
    to 256; block_table int32 [batch, max_pages]; kv_lengths int32 [batch]: token p of sequence b is row p mod page_size of page
    block_table[b, p / page_size], for p below kv_lengths[b]. int8 pages have k_scales, v_scales float32 [pages, page_size,
    kv_heads] (any strides). The rest as ``attention``; causal is the default here.

    prefix: so many leading tokens lie in the same pages for all sequences, all of which are longer by q_len at least; a batch
    of few query tokens then reads them once (as far as they are whole splits of 512), with the same bits.

    Of pages outside of the pool the CPU raises ValueError, and the device reads others in their place. What a sequence gives
    depends neither on its batch, nor on which pages it has, nor on the pool.
    """
    call = Call(
        stream, ("k_scales", "v_scales", "sinks", "out"),
        q=q, k_pages=k_pages, v_pages=v_pages, block_table=block_table, kv_lengths=kv_lengths,
        k_scales=k_scales, v_scales=v_scales, sinks=sinks, out=out,
    )  # fmt: skip
    dtype = check_float(q=call.q)
    check_axes("q", call.q, ("batch", "q_len", "heads", "head_dim"))
    check_axes("k_pages", call.k_pages, ("pages", "page_size", "kv_heads", "head_dim"))
    batch, _, heads, head_dim = call.q.shape
    kv_heads = call.k_pages.shape[2]
    capacity = _check_pages(call, "k_pages", "v_pages", dtype, batch, kv_heads, head_dim)
    check_integer("prefix", prefix)
    if not 0 <= prefix <= capacity:
        raise ValueError(f"prefix: {prefix}, wanted 0 to the {capacity} tokens of a sequence")
    _check_attention(heads, kv_heads, head_dim, scale, window, soft_cap, call.sinks, "k_pages")
    check_dtype(np.int32, kv_lengths=call.kv_lengths)
    check_shape("kv_lengths", call.kv_lengths, (batch,))
    if call.on_host:
        check_out(call, call.q.shape, dtype)
        shared = call.block_table[:, : -(-prefix // call.k_pages.shape[1])]
        if (shared != shared[:1]).any():
            raise ValueError(f"prefix: {prefix} tokens, whose pages are not the same for all sequences")
        value = reference.paged_attention(
            call.q, call.k_pages, call.v_pages, call.block_table, call.kv_lengths,
            k_scales=call.k_scales, v_scales=call.v_scales, causal=causal, scale=scale, window=window,
            soft_cap=soft_cap, sinks=call.sinks,
        )  # fmt: skip
        return finish_host(value, q, out)
    check_contiguous_last(
        q=call.q, k_pages=call.k_pages, v_pages=call.v_pages, block_table=call.block_table, kv_lengths=call.kv_lengths,
        sinks=call.sinks, out=call.out,
    )  # fmt: skip
    y = call.result(call.q.shape, dtype, out)
    others = ("q", "k_pages", "v_pages", "k_scales", "v_scales", "sinks")
    check_overlap(call.out, other=[(name, getattr(call, name)) for name in others])
    if y.size and not (capacity and call.k_pages.shape[0]):
        raise ValueError(
            f"block_table: {capacity} tokens in a pool of {call.k_pages.shape[0]} pages, wanted one page at least"
        )
    if y.size:
        kernel_module("pages").run(
            call.q, call.k_pages, call.v_pages, call.block_table, call.kv_lengths, call.k_scales, call.v_scales,
            int(prefix), bool(causal), head_dim**-0.5 if scale is None else float(scale),
            None if window is None else int(window), None if soft_cap is None else float(soft_cap), call.sinks, y,
            call.device, call.stream,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


def advance(lengths, tokens, *, stream=None):
    """lengths += tokens, in place and without a host round trip. lengths int32 [batch]."""
    call = Call(stream, (), lengths=lengths)
    check_dtype(np.int32, lengths=call.lengths)
    check_axes("lengths", call.lengths, ("batch",))
    check_integer("tokens", tokens)
    if call.on_host:
        check_writable(lengths=call.lengths)
        reference.advance(call.lengths, tokens)
        return
    if call.copied:
        raise TypeError("lengths: a host array is not written through a GPU; pass a device array")
    check_no_jax(lengths=lengths)
    check_contiguous_last(lengths=call.lengths)
    if call.lengths.size:
        kernel_module("advance").run(call.lengths, int(tokens), call.device, call.stream)
