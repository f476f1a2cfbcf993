"""Attention for prompts against cuDNN and FlashAttention-2 (both through torch's SDPA), and for single tokens over a long cache.

Beside them: tokens over pages in bfloat16 and int8, and sequences of unequal length next to an even batch of as much work.

FLOPs count the products that the mask leaves; a prompt case holds 16,384 tokens or one sequence. Bytes of a token case are those
of K and V.
"""

import statistics

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import nbkernels as nbk
from benchmarks.harness import Case

TOKENS = 16384
PAGE_SIZE = 64
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


def _pages(batch, length, int8):
    """q, pages of K and V, their table and lengths, and the scales of int8 ones; a sequence's pages lie anywhere."""
    count = batch * length // PAGE_SIZE
    shape = (count, PAGE_SIZE, 8, 128)
    table = torch.randperm(count, device="cuda", dtype=torch.int32).reshape(batch, -1)
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    scales = {}
    if int8:
        k, v = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2))
        scales = {name: torch.rand(shape[:3], device="cuda") / 64 for name in ("k_scales", "v_scales")}
    else:
        k, v = _bfloat16(*shape), _bfloat16(*shape)
    return (_bfloat16(batch, 1, 32, 128), k, v, table, lengths), scales


def _paged_tokens():
    for batch, length in ((1, 8192), (16, 8192), (64, 4096)):
        for int8 in (False, True):
            yield Case(
                "token, int8 pages" if int8 else "token, pages",
                f"{batch}×{length}×32/8×128",
                "bfloat16",
                2 * batch * length * 8 * (128 + 4 if int8 else 2 * 128),
                4 * batch * 32 * length * 128,
                lambda b=batch, n=length, i=int8: _pages(b, n, i),
                {"nbkernels": lambda s: nbk.paged_attention(*s[0], **s[1])},
                copied=True,
            )


def _ragged():
    """Sequences of 17 to 16384 tokens, and as many keys in one even batch; prompts packed without padding."""
    lengths = np.random.default_rng(0).integers(17, 16385, 64).astype(np.int32)
    total = int(lengths.sum())
    even = total // 64
    for name, given in (("token, ragged", lengths), ("token, even", np.full(64, even, np.int32))):
        yield Case(
            name,
            f"64×{even} on average×32/8×128",
            "bfloat16",
            2 * 2 * int(given.sum()) * 8 * 128,
            4 * 32 * int(given.sum()) * 128,
            lambda n=given: (
                (_bfloat16(64, 1, 32, 128), *(_bfloat16(64, int(n.max()), 8, 128) for _ in range(2))),
                torch.from_numpy(n).cuda(),
            ),
            {"nbkernels": lambda s: nbk.attention(*s[0], kv_lengths=s[1])},
            copied=True,
        )
    flops = 2 * 32 * 128 * sum(int(n) ** 2 for n in lengths)
    same = int(np.sqrt(np.mean(lengths.astype(np.float64) ** 2)))  # the length of an even batch with these products
    yield _packed("causal prompts, packed", lengths, flops)
    yield _packed("causal prompts, packed even", np.full(64, same, np.int32), 2 * 32 * 128 * 64 * same**2)


def _packed(name, lengths, flops):
    total = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Case(
        name,
        f"{total} tokens of 64 sequences×32/8×128",
        "bfloat16",
        4 * total * 128 * (32 + 8),
        flops,
        lambda: (
            _bfloat16(total, 32, 128),
            _bfloat16(total, 8, 128),
            _bfloat16(total, 8, 128),
            torch.from_numpy(offsets).cuda(),
        ),
        {"nbkernels": lambda s: nbk.attention(*s[:3], causal=True, query_offsets=s[3], kv_offsets=s[3])},
    )


def cases():
    """All of them."""
    yield from _prompts()
    yield from _tokens()
    yield from _paged_tokens()
    yield from _ragged()


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
