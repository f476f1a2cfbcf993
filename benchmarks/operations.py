"""Every operation once or twice at the shapes of SmolLM2-135M and Llama-3-8B: a first look at where each one stands."""

import torch
import torch.nn.functional as F

import nbkernels as nbk
from benchmarks.harness import Case
from nbkernels.arrays import Int8Weight


def _random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _rows(operation, ours, peer, rows, columns, tensors):
    count = rows * columns
    return Case(
        operation,
        f"{rows}×{columns}",
        "bfloat16",
        bytes=tensors * 2 * count,
        flops=5 * count,
        make=lambda: [_random(rows, columns) for _ in range(2)],
        calls={"nbkernels": ours, "torch": peer, "torch.compile": torch.compile(peer, dynamic=False)},
        copied=True,
    )


def _quantised_norm(x, residual, weight):
    """What ``rms_norm(…, quantize="int8")`` gives: values, a scale a row, and the sum."""
    total = x + residual
    normed = F.rms_norm(total, total.shape[-1:], weight, 1e-6).float()
    scale = normed.abs().amax(-1, keepdim=True) / 127
    return torch.round(normed / scale).to(torch.int8), scale, total


def _row_cases():
    for rows, columns in ((16384, 4096), (4096, 32768)):
        weight = _random(columns)
        yield _rows("softmax", lambda s: nbk.softmax(s[0]), lambda s: torch.softmax(s[0], -1), rows, columns, tensors=2)
        yield _rows(
            "layer_norm",
            lambda s, w=weight: nbk.layer_norm(s[0], w, w),
            lambda s, w=weight: F.layer_norm(s[0], s[0].shape[-1:], w, w),
            rows,
            columns,
            tensors=2,
        )
        yield _rows(
            "add + rms_norm",
            lambda s, w=weight: nbk.rms_norm(s[0], w, residual=s[1]),
            lambda s, w=weight: (F.rms_norm(s[0] + s[1], s[0].shape[-1:], w, 1e-6), s[0] + s[1]),
            rows,
            columns,
            tensors=4,
        )
        quantised = _rows(
            "add + rms_norm to int8",
            lambda s, w=weight: nbk.rms_norm(s[0], w, residual=s[1], quantize="int8"),
            lambda s, w=weight: _quantised_norm(s[0], s[1], w),
            rows,
            columns,
            tensors=3,
        )
        quantised.bytes += rows * (columns + 4)
        yield quantised
        yield _rows(
            "silu_mul",
            lambda s: nbk.silu_mul(s[0], s[1]),
            lambda s: F.silu(s[0]) * s[1],
            rows,
            columns,
            tensors=3,
        )


def _rotary_cases():
    """A prompt and a batch of tokens appended to a cache that has room for them, in bfloat16 and in int8."""
    heads, kv_heads, head_dim, most = 32, 8, 128, 4096
    angles = torch.outer(torch.arange(most, device="cuda"), 1e4 ** (-torch.arange(0, 64, device="cuda") / 64))
    cos, sin = angles.cos(), angles.sin()
    for batch, tokens in ((1, 4096), (64, 1)):
        for dtype in (torch.bfloat16, torch.int8):

            def make(b=batch, t=tokens, d=dtype):
                length = max(t, 512)  # of the caches
                fused = _random(b, t, heads + 2 * kv_heads, head_dim)
                caches = [torch.zeros(b, length, kv_heads, head_dim, device="cuda", dtype=d) for _ in range(2)]
                scales = [torch.zeros(b, length, kv_heads, device="cuda") for _ in range(2)]
                return fused, torch.zeros(b, device="cuda", dtype=torch.int32), caches, scales

            def ours(s, d=dtype):
                fused, positions, caches, scales = s
                q, k, v = fused.split([heads, kv_heads, kv_heads], dim=2)
                named = {"k_scales": scales[0], "v_scales": scales[1]} if d == torch.int8 else {}
                return nbk.rotary_append(q, k, v, cos, sin, positions, *caches, **named)

            written = 2 * kv_heads * (head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0))
            yield Case(
                "rotary_append" + (" to int8" if dtype == torch.int8 else ""),
                f"{batch}×{tokens}×{heads}/{kv_heads}×{head_dim}",
                "bfloat16",
                bytes=batch * tokens * (2 * head_dim * (2 * heads + 2 * kv_heads) + written),
                flops=3 * batch * tokens * head_dim * (heads + kv_heads),
                make=make,
                calls={"nbkernels": ours},
                copied=True,
            )


def _matmul_cases():
    for rows, out, columns in ((1, 14336, 4096), (8, 14336, 4096), (64, 14336, 4096), (4096, 14336, 4096)):
        moved = 2 * (rows * columns + rows * out)
        flops = 2 * rows * out * columns
        yield Case(
            "matmul",
            f"{rows}×{out}×{columns}",
            "bfloat16",
            moved + 2 * out * columns,
            flops,
            lambda r=rows, o=out, c=columns: (_random(r, c), _random(o, c)),
            {"nbkernels": lambda s: nbk.matmul(*s), "torch": lambda s: F.linear(*s)},
        )
        yield Case(
            "int8_matmul",
            f"{rows}×{out}×{columns}",
            "bfloat16",
            moved + out * columns + 4 * out * columns // 32,
            flops,
            lambda r=rows, o=out, c=columns: (
                _random(r, c),
                nbk.quantize_int8(_random(o, c), group_size=32),
                _random(o, c),
            ),
            {
                "nbkernels": lambda s: nbk.int8_matmul(s[0], Int8Weight(s[1].values, s[1].scales, 32)),
                "torch bf16": lambda s: F.linear(s[0], s[2]),
            },
        )


def _attention_cases():
    for batch, length, heads, kv_heads, head_dim in ((2, 4096, 32, 32, 128), (1, 2048, 9, 3, 64)):
        for causal in (False, True):
            yield Case(
                "attention" + (" causal" if causal else ""),
                f"{batch}×{length}×{heads}/{kv_heads}×{head_dim}",
                "bfloat16",
                2 * batch * length * head_dim * 2 * (heads + kv_heads),
                4 * batch * heads * length * length * head_dim // (2 if causal else 1),
                lambda b=batch, n=length, h=heads, g=kv_heads, d=head_dim: (
                    _random(b, n, h, d),
                    _random(b, n, g, d),
                    _random(b, n, g, d),
                ),
                {
                    "nbkernels": lambda s, c=causal: nbk.attention(*s, causal=c),
                    "torch": lambda s, c=causal: _sdpa(*s, c),
                },
            )
    for batch, length in ((1, 8192), (16, 8192), (64, 4096)):
        yield Case(
            "attention, one token",
            f"{batch}×{length}×32/8×128",
            "bfloat16",
            2 * 2 * batch * length * 8 * 128,
            4 * batch * 32 * length * 128,
            lambda b=batch, n=length: (_random(b, 1, 32, 128), _random(b, n, 8, 128), _random(b, n, 8, 128)),
            {"nbkernels": lambda s: nbk.attention(*s), "torch": lambda s: _sdpa(*s, False)},
        )


def _sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _token_cases():
    for rows, vocab in ((1, 49152), (64, 128256)):
        options = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
        yield Case(
            "argmax",
            f"{rows}×{vocab}",
            "bfloat16",
            2 * rows * vocab,
            rows * vocab,
            lambda r=rows, v=vocab: _random(r, v),
            {"nbkernels": nbk.argmax, "torch": lambda x: x.argmax(-1)},
        )
        yield Case(
            "sample top-k top-p",
            f"{rows}×{vocab}",
            "bfloat16",
            2 * rows * vocab,
            rows * vocab,
            lambda r=rows, v=vocab: _random(r, v),
            {"nbkernels": lambda x, o=options: nbk.sample(x, **o)},
        )


def cases():
    """All of them."""
    yield from _row_cases()
    yield from _rotary_cases()
    yield from _matmul_cases()
    yield from _attention_cases()
    yield from _token_cases()
