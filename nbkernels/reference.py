"""Every operation in NumPy: what each one means.

This is what the kernels are held against and what ``device="cpu"`` runs. The arithmetic is float32, or float64 where an
input is float64: the tests pass float64 copies of their inputs and get the value a kernel is compared with. The output has
the dtype of the (first) input. Shapes are checked by ``nbkernels.ops``, which is the public face of these functions.
"""

import math
from itertools import pairwise

import numpy as np

from nbkernels.arrays import Int8Weight


def _work(x):
    """x in the dtype the arithmetic runs in: float64 stays, all else becomes float32."""
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def softmax(x, *, scale=1.0):
    """exp(scale·x - max) / sum over the last axis. x [..., columns]. A row of -inf gives NaN, as does a NaN in the row."""
    scores = _work(x) * scale
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
        return (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype, copy=False)


def layer_norm(x, weight=None, bias=None, *, residual=None, eps=1e-5, quantize=None):
    """(x - mean) / sqrt(var + eps) · weight + bias over the last axis (Ba, Kiros, Hinton 2016).

    With residual the sum x + residual is normalised and returned as the second value, rounded to x's dtype; the statistics
    are those of the unrounded sum. quantize "int8": ``quantize_int8`` of the unrounded result, in place of that in x's dtype.
    """
    total = _work(x) if residual is None else _work(x) + _work(residual)
    centred = total - total.mean(axis=-1, keepdims=True)
    normalised = centred / np.sqrt(_mean_square(centred) + eps)
    return _affine(normalised, weight, bias, x, residual, total, quantize)


def rms_norm(x, weight=None, *, residual=None, eps=1e-6, quantize=None):
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang, Sennrich 2019); residual, quantize as in layer_norm."""
    total = _work(x) if residual is None else _work(x) + _work(residual)
    normalised = total / np.sqrt(_mean_square(total) + eps)
    return _affine(normalised, weight, None, x, residual, total, quantize)


def _mean_square(x):
    return np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1]


def _affine(normalised, weight, bias, x, residual, total, quantize):
    if weight is not None:
        normalised = normalised * _work(weight)
    if bias is not None:
        normalised = normalised + _work(bias)
    y = normalised.astype(x.dtype, copy=False) if quantize is None else quantize_int8(normalised)
    return y if residual is None else (y, total.astype(x.dtype, copy=False))


def _silu(x):
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is inf, and x / inf the right 0
        weights = np.exp(-x)
        weights += 1
        return np.divide(x, weights, out=weights)


def _gelu_tanh(x):
    # x·x·x and not x**3: NumPy's general power is some thirty times slower
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _gelu_erf(x):
    erf = np.frompyfunc(math.erf, 1, 1)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)).astype(x.dtype))


def gelu(x, *, approximate="tanh"):
    """x·Phi(x) with Phi the normal distribution function (Hendrycks, Gimpel 2016): exact ("none"), or by its tanh form."""
    return (_gelu_tanh if approximate == "tanh" else _gelu_erf)(_work(x)).astype(x.dtype, copy=False)


def silu_mul(gate, up):
    """gate / (1 + exp(-gate)) · up, element by element (the gated unit SwiGLU of Shazeer 2020)."""
    return (_silu(_work(gate)) * _work(up)).astype(gate.dtype, copy=False)


def gelu_mul(gate, up):
    """gelu(gate) · up, gelu in its tanh form, element by element (GeGLU of Shazeer 2020)."""
    return (_gelu_tanh(_work(gate)) * _work(up)).astype(gate.dtype, copy=False)


def soft_cap(x, cap):
    """cap · tanh(x / cap), element by element (the logits of Gemma 2)."""
    return (cap * np.tanh(_work(x) / cap)).astype(x.dtype, copy=False)


def _gated(x):
    """silu(columns 0, 2, …) · columns 1, 3, …"""
    return _silu(x[..., 0::2]) * x[..., 1::2]


_ACTIVATIONS = {None: lambda x: x, "silu": _silu, "gelu": _gelu_tanh, "gelu_exact": _gelu_erf, "silu_mul": _gated}


def matmul(x, weight, *, bias=None, residual=None, activation=None):
    """activation(x @ weightᵀ + bias) + residual. x [..., in], weight [out, in], bias [out], residual [..., out].

    "silu_mul": silu of columns 0, 2, … times columns 1, 3, …: [..., out / 2].
    """
    # one matrix product over all leading axes: a batch of small ones is far slower
    rows = _work(x).reshape(-1, x.shape[-1]) if x.size else np.zeros((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    product = (rows @ _work(weight).T).reshape(*x.shape[:-1], weight.shape[0])
    if bias is not None:
        product = product + _work(bias)
    product = _ACTIVATIONS[activation](product)
    if residual is not None:
        product = product + _work(residual)
    return product.astype(x.dtype, copy=False)


def quantize_int8(weight, *, group_size=None):
    """Symmetric int8: values = round(weight / scale), scale = max|weight| / 127 a row, or a group of group_size columns.

    weight [..., columns] -> Int8Weight. A group of zeros has scale 0 and values 0. A group with a NaN has scale NaN and values
    round(weight), one with infinities an infinite scale; what is then NaN or infinity / infinity has value 0.
    """
    dense = _work(weight)
    *leading, columns = dense.shape
    group = columns if group_size is None else group_size
    groups = max(1, -(-columns // max(group, 1)))
    padded = np.zeros((*leading, groups * group), dense.dtype)
    padded[..., :columns] = dense
    blocks = padded.reshape(*leading, groups, group)
    scales = np.abs(blocks).max(axis=-1, initial=0.0) / 127
    # divide by the scale, as the kernel does: a product with its reciprocal rounds some halves the other way
    safe = np.where(scales > 0, scales, 1)[..., None]
    with np.errstate(invalid="ignore"):  # infinity / infinity
        quotients = np.nan_to_num(np.rint(blocks / safe), nan=0.0, posinf=127, neginf=-127)
    values = np.clip(quotients, -127, 127).astype(np.int8).reshape(*leading, groups * group)
    return Int8Weight(np.ascontiguousarray(values[..., :columns]), scales.astype(np.float32), group_size)


def dequantize_int8(weight, dtype=np.float32):
    """values · scale of their group. Int8Weight -> [..., columns] in dtype."""
    columns = weight.values.shape[-1]
    scales = weight.scales
    if weight.group_size is not None:
        scales = np.repeat(scales, weight.group_size, axis=-1)[..., :columns]
    work = np.float64 if dtype == np.float64 else np.float32
    return (weight.values.astype(work) * scales).astype(dtype, copy=False)


def int8_matmul(x, weight, *, bias=None, residual=None, activation=None, activations=None, dtype=None):
    """activation(x @ dequantised(weight)ᵀ + bias) + residual. x [..., in], weight Int8Weight of [out, in].

    activations "int8", or x an Int8Weight of [..., in] with a scale a row: products of int8, summed exactly, and then

        activation(x_scale · Σ_span float(Σ_(k in span) x · values) · scale + bias) + residual

    in float32, or float64 where dtype, of the result, is that. A span is a row where it has one scale, else the greatest common
    divisor of group_size and 128; spans are added in their order. A row of x that holds NaN or an infinity is NaN.
    """
    if activations is None and not isinstance(x, Int8Weight):
        dense = dequantize_int8(weight, np.float64 if x.dtype == np.float64 else np.float32)
        return matmul(x, dense, bias=bias, residual=residual, activation=activation)
    if not isinstance(x, Int8Weight):
        dtype = dtype or x.dtype
        with np.errstate(invalid="ignore"):
            rows = quantize_int8(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        x = Int8Weight(rows.values.reshape(x.shape), rows.scales.reshape(*x.shape[:-1], 1))
    dtype = np.dtype(dtype or np.float32)
    work = np.float64 if dtype == np.float64 else np.float32
    columns, depth = weight.shape
    rows = math.prod(x.values.shape[:-1])
    values = x.values.reshape(rows, depth).astype(np.float64)  # whose sums are exact to 2^53
    one_scale = weight.group_size is None or weight.group_size >= depth
    span = max(depth, 1) if one_scale else math.gcd(weight.group_size, 128)
    product = np.zeros((rows, columns), work)
    for start in range(0, depth, span):
        here = slice(start, start + span)
        sums = values[:, here] @ weight.values[:, here].T.astype(np.float64)
        scale = weight.scales[:, 0 if one_scale else start // weight.group_size]
        # with groups a fused multiplication and addition
        product = (sums if one_scale else sums * scale + product).astype(work)
    scales = x.scales.reshape(-1, 1)
    with np.errstate(invalid="ignore"):
        product = product * np.where(np.isfinite(scales), scales, np.float32(np.nan)).astype(work)
        if one_scale:
            product = product * weight.scales[:, 0]
        product = product.reshape(*x.values.shape[:-1], columns)
        if bias is not None:
            product = product + _work(bias)
        product = _ACTIVATIONS[activation](product)
        if residual is not None:
            product = product + _work(residual)
    return product.astype(dtype, copy=False)


def embedding(ids, table, *, dtype=None, scale=1.0, positions=None, position_table=None):
    """table[ids] · scale + position_table[p]. ids int32 [...], table [vocab, hidden] or Int8Weight -> [..., hidden] in dtype.

    With position_table [count, hidden] ids are [batch, tokens], and token t of sequence b stands at p = positions[b] + t.
    """
    if isinstance(table, Int8Weight):
        rows = Int8Weight(table.values[ids.ravel()], table.scales[ids.ravel()], table.group_size)
        dtype = np.dtype(dtype or np.float32)
        plain = scale == 1 and position_table is None
        values = dequantize_int8(rows, dtype if plain else np.float64 if dtype == np.float64 else np.float32).reshape(
            *ids.shape, -1
        )
    else:
        values, dtype = table[ids], dtype or table.dtype
    if scale != 1:
        values = _work(values) * scale
    if position_table is not None:
        values = _work(values) + _work(position_table[positions[:, None] + np.arange(ids.shape[1])])
    return values.astype(dtype, copy=False)


def _rotate(x, cos, sin, out):
    """x [tokens, heads, head_dim] turned by cos, sin [tokens, 1, half] into out, pair by pair."""
    half = cos.shape[-1]
    work = _work(x)
    first, second = work[..., :half], work[..., half : 2 * half]
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]


def _pages(cache, table, start, stop):
    """(rows, index): rows[index] are the tokens start to stop - 1 of a sequence, [tokens, kv_heads, …].

    cache [pages, page_size, kv_heads, …]; table int32 [max_pages] of the sequence. Where its pages follow one another the index
    is a slice, so that what is read is a view.
    """
    page_size = cache.shape[1]
    first, end = start // page_size, -(-stop // page_size)
    pages = table[first:end].tolist()
    if pages and (min(pages) < 0 or max(pages) >= len(cache)):
        raise ValueError(f"block_table: pages {min(pages)} to {max(pages)} of a pool of {len(cache)}")
    if (
        pages
        and pages == list(range(pages[0], pages[0] + len(pages)))
        and cache.strides[0] == page_size * cache.strides[1]
    ):
        begin = (pages[0] - first) * page_size + start
        return cache.reshape(-1, *cache.shape[2:]), slice(begin, begin + stop - start)
    positions = np.arange(start, stop)
    return cache, (table[positions // page_size], positions % page_size)


def _store(rows, index, scales, scale_index, values):
    """values [tokens, kv_heads, head_dim] into rows[index]; int8 with a scale a token and head, of which scales are given."""
    if scales is None:
        rows[index] = values
        return
    work = _work(values)
    scale = np.abs(work).max(axis=-1, initial=0.0) / 127
    divided = work / np.where(scale > 0, scale, 1)[..., None]
    rows[index] = np.clip(np.rint(divided), -127, 127).astype(np.int8)
    scales[scale_index] = scale


def rotary_append(
    q, k, v, cos, sin, positions, k_cache, v_cache, *,
    block_table=None, k_scales=None, v_scales=None, q_norm=None, k_norm=None, eps=1e-6,
):  # fmt: skip
    """Rotary position embedding (Su et al. 2021) of q and k, and k, v written into the cache. Returns the rotated q.

    q [batch, tokens, heads, head_dim]; k, v [batch, tokens, kv_heads, head_dim]; cos, sin [max_position, rotary_dim / 2];
    positions int32 [batch], of each sequence's first token; caches [batch, capacity, kv_heads, head_dim], written in place.
    Element i is paired with i + rotary_dim / 2; what lies past rotary_dim is left as it is. block_table int32 [batch, max_pages]:
    caches are [pages, page_size, kv_heads, head_dim] (Kwon et al. 2023, PagedAttention). k_scales, v_scales [as the caches
    without head_dim]: int8 caches. q_norm, k_norm [head_dim]: RMSNorm of each head before the rotation.
    """
    tokens = q.shape[1]
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    limit = min(capacity, cos.shape[0])
    rotated = np.empty(q.shape, q.dtype)
    for b, start in enumerate(positions.tolist()):
        if tokens and not 0 <= start <= limit - tokens:
            raise ValueError(f"positions: {start} to {start + tokens - 1} do not fit into 0 to {limit - 1}")
        here = slice(start, start + tokens)
        turn = cos[here, None], sin[here, None]  # [tokens, 1, half]
        # normalised or quantised, what is between the steps is not rounded to the dtype
        exact = _work(k[b]).dtype if k_norm is not None or k_scales is not None else k.dtype
        query = q[b] if q_norm is None else rms_norm(_work(q[b]), q_norm, eps=eps)
        key = k[b] if k_norm is None else rms_norm(_work(k[b]), k_norm, eps=eps)
        turned = np.empty(key.shape, exact)
        _rotate(query, *turn, rotated[b])
        _rotate(key, *turn, turned)
        for values, cache, scales in ((turned, k_cache, k_scales), (v[b], v_cache, v_scales)):
            if block_table is None:
                _store(cache[b], here, None if scales is None else scales[b], here, values)
            elif tokens:
                of_scales = (None, None) if scales is None else _pages(scales, block_table[b], start, start + tokens)
                _store(*_pages(cache, block_table[b], start, start + tokens), *of_scales, values)
    return rotated


def _visible(q_len, n, causal, window):
    """Which of n keys each query sees, [q_len, n], or None where all see all."""
    if window is None and (not causal or q_len == 1):
        return None
    behind = (n - q_len + np.arange(q_len))[:, None] - np.arange(n)  # how far each key lies behind each query
    return (behind >= 0) & (behind < (n if window is None else window))


def _parts(name, offsets, total):
    """Offsets of packed sequences -> a slice of the rows for each; ValueError where they don't ascend from 0 to at most total."""
    given = offsets.tolist()
    if given[0] != 0 or given[-1] > total or any(a > b for a, b in pairwise(given)):
        raise ValueError(f"{name}: {given}, wanted numbers that ascend from 0 to at most {total}")
    return [slice(a, b) for a, b in pairwise(given)]


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
):
    """softmax(scale · q kᵀ, masked) v, head by head; query heads share KV heads in groups (GQA, Ainslie et al. 2023).

    q [batch, q_len, heads, head_dim]; k, v [batch, kv_len, kv_heads, head_dim]; kv_lengths int32 [batch] (default kv_len).
    With n keys, query i stands at position p = n - q_len + i: causal hides keys after p, window hides keys before
    p - window + 1 and, being counted backwards, keys after p. A row that sees nothing is zero. soft_cap: a score becomes
    soft_cap · tanh(score / soft_cap) (Gemma 2). sinks float32 [heads]: exp(sink) joins the sum of a row's weights (gpt-oss).
    Packed sequences: q, k, v without their first axis, sequence b being rows offsets[b] to offsets[b + 1] - 1 of each.
    """
    if query_offsets is not None:
        out = np.zeros(q.shape, q.dtype)
        queries, keys = _parts("query_offsets", query_offsets, len(q)), _parts("kv_offsets", kv_offsets, len(k))
        options = {"causal": causal, "scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        for rows, columns in zip(queries, keys, strict=True):
            out[rows] = attention(q[None, rows], k[None, columns], v[None, columns], **options)[0]
        return out
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = np.empty(q.shape, q.dtype)
    for b in range(batch):
        n = kv_len if kv_lengths is None else min(max(int(kv_lengths[b]), 0), kv_len)
        if n == 0 or q_len == 0:
            out[b] = 0
            continue
        query = (_work(q[b]) * scale).reshape(q_len, kv_heads, heads // kv_heads, head_dim)
        query = query.transpose(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)  # [kv_heads, group·q_len, head_dim]
        key = _work(k[b, :n]).transpose(1, 2, 0)  # [kv_heads, head_dim, n]
        value = _work(v[b, :n]).transpose(1, 0, 2)  # [kv_heads, n, head_dim]
        scores = (query @ key).reshape(kv_heads, -1, q_len, n)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        visible = _visible(q_len, n, causal, window)
        if visible is not None:
            scores = np.where(visible, scores, -np.inf)
        largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1)
            largest = np.maximum(largest, sink)
        largest = np.where(largest == -np.inf, 0, largest)  # a row that sees nothing
        weights = np.exp(scores - largest)
        total = np.add.reduce(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sink - largest)
        weights /= np.where(total == 0, 1, total)
        result = weights.reshape(kv_heads, -1, n) @ value  # [kv_heads, group·q_len, head_dim]
        result = result.reshape(kv_heads, -1, q_len, head_dim).transpose(2, 0, 1, 3)
        out[b] = result.reshape(q_len, heads, head_dim).astype(q.dtype, copy=False)
    return out


def paged_attention(
    q, k_pages, v_pages, block_table, kv_lengths, *,
    k_scales=None, v_scales=None, prefix=0, causal=True, scale=None, window=None,
    soft_cap=None, sinks=None,
):  # fmt: skip
    """``attention`` over the first kv_lengths[b] tokens in the pages that block_table [batch, max_pages] names.

    q [batch, q_len, heads, head_dim]; k_pages, v_pages [pages, page_size, kv_heads, head_dim], float or int8 times k_scales,
    v_scales [pages, page_size, kv_heads]. prefix, tokens in common pages, changes nothing here.
    """
    out = np.empty(q.shape, q.dtype)
    capacity = block_table.shape[1] * k_pages.shape[1]
    for b, (table, length) in enumerate(zip(block_table, kv_lengths.tolist(), strict=True)):
        kv = []
        for pages, scales in ((k_pages, k_scales), (v_pages, v_scales)):
            rows, index = _pages(pages, table, 0, min(max(length, 0), capacity))
            values = rows[index]
            if scales is not None:
                rows, index = _pages(scales, table, 0, len(values))
                values = values.astype(_work(q).dtype) * rows[index][..., None]
            kv.append(values[None])
        one = slice(b, b + 1)
        out[one] = attention(q[one], *kv, causal=causal, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return out


def advance(lengths, tokens):
    """lengths += tokens, in place. lengths int32 [batch]."""
    lengths += np.int32(tokens)


def argmax(x):
    """The first index of the largest element over the last axis; a NaN counts as largest. x [..., columns] -> int32 [...]."""
    return np.argmax(x, axis=-1).astype(np.int32)


def philox(counter, key):
    """Philox4x32-10, a counter-based random generator (Salmon et al. 2011): the first of the four words.

    counter: four uint32 arrays that broadcast; key: two Python integers below 2^32. Returns uint32.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter))
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> shift) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0.astype(np.uint32)


def _gumbel(rows, vocab, seed, step):
    """-log(-log(u)) for u uniform in (0, 1) on a grid of 2^-24 (so that no float32 rounds to 0 or 1). [rows, vocab]"""
    counter = (np.arange(vocab), np.full(1, step), np.arange(rows)[:, None], np.zeros(1))
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    uniform = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    return -np.log(-np.log(uniform))


def penalise(logits, penalty, seen):
    """Repetition penalty (Keskar et al. 2019): logits of seen tokens divided by it where positive, multiplied elsewhere."""
    if penalty == 1.0 or seen is None:
        return logits
    return np.where(seen != 0, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def sampling_filter(scores, *, top_k=None, top_p=None, min_p=None):
    """Which tokens may be drawn. scores [rows, vocab], already divided by the temperature -> bool [rows, vocab].

    top_k keeps the k largest (and their ties); top_p then keeps the smallest set of largest tokens whose share of what is
    left reaches p (and ties; Holtzman et al. 2020); min_p keeps those at least min_p as likely as the likeliest.
    """
    keep = np.ones(scores.shape, bool)
    vocab = scores.shape[-1]
    if top_k is not None and top_k < vocab:
        keep &= scores >= np.partition(scores, vocab - top_k, axis=-1)[:, vocab - top_k, None]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    if top_p is not None and top_p < 1:
        kept = np.where(keep, weights, 0)
        descending = -np.sort(-kept, axis=-1)
        before = np.cumsum(descending, axis=-1) - descending  # the share of those strictly in front
        enough = before < top_p * kept.sum(axis=-1, keepdims=True)
        last = np.count_nonzero(enough, axis=-1).clip(1)[:, None] - 1
        keep &= kept >= np.take_along_axis(descending, last, axis=-1)
    if min_p is not None:
        keep &= weights >= min_p
    return keep


def sample(
    logits,
    *,
    temperature,
    top_k=None,
    top_p=None,
    min_p=None,
    repetition_penalty=1.0,
    seen=None,
    seed=0,
    step=None,
):
    """One token a row. logits [rows, vocab] -> int32 [rows]; seen uint8 [rows, vocab] is read and the token marked in it.

    Penalty, temperature and filters, then the draw as the largest of score + Gumbel noise (Gumbel 1954), the noise from
    Philox at counter (token, step, row, 0): a seed gives the same tokens on every device. temperature 0 takes the largest.
    step int32 [1] (None: 0).
    """
    scores = penalise(_work(logits), repetition_penalty, seen)
    if temperature > 0:
        scores = scores / np.float32(temperature)
        keep = sampling_filter(scores, top_k=top_k, top_p=top_p, min_p=min_p)
        noise = _gumbel(*scores.shape, seed, 0 if step is None else int(step[0]))
        # the largest score is taken off first: at a tiny temperature scores are huge, and noise would vanish in them
        scores = np.where(keep, scores - scores.max(axis=-1, keepdims=True) + noise, -np.inf)
    chosen = argmax(scores)
    if seen is not None:
        seen[np.arange(len(chosen)), chosen] = 1
    return chosen


def sample_rows(logits, *, temperature, top_k, top_p, min_p, repetition_penalty, seed, step, seen=None, seen_row=None):
    """``sample`` of each row by itself, with numbers of its own: arrays [rows] of each, top_k 0 for all tokens.

    seen uint8 [masks, vocab]: row i's is seen[seen_row[i]], read and marked where its repetition_penalty is not 1.
    """
    chosen = np.empty(len(logits), np.int32)
    for i in range(len(logits)):
        penalised = seen is not None and repetition_penalty[i] != 1
        chosen[i] = sample(
            logits[i : i + 1],
            temperature=temperature[i],
            top_k=int(top_k[i]) or None,
            top_p=top_p[i],
            min_p=min_p[i],
            repetition_penalty=repetition_penalty[i] if penalised else 1.0,
            seen=seen[seen_row[i] : seen_row[i] + 1] if penalised else None,
            seed=int(seed[i]),
            step=step[i : i + 1],
        )[0]
    return chosen
