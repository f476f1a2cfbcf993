"""Attention for prompts against cuDNN and FlashAttention-2 (both through torch's SDPA), and for single tokens over a long cache.

FLOPs count the products that the mask leaves; a prompt case holds 16,384 tokens or one sequence. Bytes of a token case are those
of K and V.
"""

import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import nbkernels as nbk
from benchmarks.harness import Case

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def _bfloat16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _sdpa(backend, causal=False):
    def call(s):
        q, k, v = (x.transpose(1, 2) for x in s[:3])
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return call


def _tensor_core_tiles(s, causal):
    """The kernel for sm_80 (mma.sync), which a Hopper card has no use for."""
    from nbkernels.kernels import attention_wgmma

    serves, attention_wgmma.serves = attention_wgmma.serves, lambda *_: False
    try:
        with nbk.device("cuda"):
            return nbk.attention(*s, causal=causal)
    finally:
        attention_wgmma.serves = serves


def _prompt(batch, length, heads, kv_heads, head_dim, causal, calls=None):
    flops = 4 * batch * heads * length * length * head_dim
    return Case(
        "causal prompt" if causal else "prompt",
        f"{batch}×{length}×{heads}/{kv_heads}×{head_dim}",
        "bfloat16",
        4 * batch * length * head_dim * (heads + kv_heads),
        flops // 2 if causal else flops,
        lambda: (
            _bfloat16(batch, length, heads, head_dim),
            _bfloat16(batch, length, kv_heads, head_dim),
            _bfloat16(batch, length, kv_heads, head_dim),
        ),
        calls
        or {
            "nbkernels": lambda s: nbk.attention(*s, causal=causal),
            **{name: _sdpa(backend, causal) for name, backend in BACKENDS.items()},
        },
    )


def _prompts():
    for causal in (False, True):
        for heads, kv_heads, head_dim in ((32, 32, 128), (32, 8, 128), (32, 32, 64), (16, 16, 256)):
            for length in LENGTHS:
                yield _prompt(max(1, TOKENS // length), length, heads, kv_heads, head_dim, causal)
        yield _prompt(2, 8192, 32, 32, 128, causal, {"nbkernels": lambda s, c=causal: _tensor_core_tiles(s, c)})


def _tokens():
    for batch, length in ((1, 8192), (1, 131072), (16, 8192), (64, 4096)):
        yield Case(
            "token",
            f"{batch}×{length}×32/8×128",
            "bfloat16",
            2 * 2 * batch * length * 8 * 128,
            4 * batch * 32 * length * 128,
            lambda b=batch, n=length: (_bfloat16(b, 1, 32, 128), _bfloat16(b, n, 8, 128), _bfloat16(b, n, 8, 128)),
            {"nbkernels": lambda s: nbk.attention(*s), "cuDNN": _sdpa(BACKENDS["cuDNN"])},
            copied=True,
        )


def cases():
    """All of them."""
    yield from _prompts()
    yield from _tokens()


def summarise(results, copy_bytes_a_second):
    """Print the figures that the operation is held to."""
    for peer in BACKENDS:
        ratios = {
            f"{r.operation} {r.shape}": r.microseconds[peer] / r.microseconds["nbkernels"]
            for r in results
            if "prompt" in r.operation and peer in r.microseconds
        }
        if ratios:
            worst = min(ratios, key=ratios.get)
            mean = statistics.geometric_mean(ratios.values())
            print(f"prompts: {mean:.2f} times {peer} in the geometric mean, least {ratios[worst]:.2f} at {worst}")
