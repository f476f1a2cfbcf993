"""int8_matmul from one row to 4096, at the matrices of Llama-3-8B and SmolLM2-135M, and the dense product of the same pipeline.

Weights are rotated, so that they come from memory. Bytes: the weight with its scales, x and y, each once. Peers: cuBLAS on the
bfloat16 weight (``torch``), torch.compile's fusion of the dequantisation, and ``torch._int_mm`` (int8 rows only, no scales).
"""

import statistics

import torch
import torch.nn.functional as F

import nbkernels as nbk
from benchmarks.harness import Case

LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
SMOLLM = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
ODD = ((1001, 333), (577, 1003), (4099, 2053))  # rows and columns no multiples of 16
FEW, MANY = (1, 2, 4, 8, 16), (64, 512, 4096)
GROUP = 32


def _bfloat16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _fused(x, values, scales):
    """One scale a row: the product is what torch.compile may fuse the conversion into."""
    return F.linear(x, values.to(x.dtype)) * scales[:, 0]


def _fused_groups(x, values, scales):
    weight = values.to(x.dtype).reshape(values.shape[0], -1, GROUP) * scales.to(x.dtype)[:, :, None]
    return F.linear(x, weight.reshape(values.shape))


def _case(kind, rows, out, depth, calls, weight_bytes, make):
    moved = weight_bytes + 2 * rows * (depth + out)
    shape = f"{rows}×{out}×{depth}"
    return Case(kind, shape, "bfloat16", moved, 2 * rows * out * depth, make, calls, copied=rows in FEW)


def cases():
    """The products; a compiled peer serves one weight shape, and all numbers of rows from 2 on."""
    for out, depth in (*LLAMA, *SMOLLM, *ODD):
        torch._dynamo.reset()
        fused = {1: torch.compile(_fused, dynamic=False), 2: torch.compile(_fused, dynamic=True)}
        fused_groups = {1: torch.compile(_fused_groups, dynamic=False), 2: torch.compile(_fused_groups, dynamic=True)}
        for rows in (*FEW, *MANY):

            def make(group_size, r=rows, o=out, d=depth):
                dense = _bfloat16(o, d)
                return _bfloat16(r, d), nbk.quantize_int8(dense, group_size=group_size), dense

            compiled = fused[min(rows, 2)]
            peers = {
                "torch": lambda s: F.linear(s[0], s[2]),
                "torch.compile": lambda s, f=compiled: f(s[0], s[1].values, s[1].scales),
            }
            ours = {"nbkernels": lambda s: nbk.int8_matmul(s[0], s[1])}
            weight_bytes = out * depth + 4 * out
            yield _case("int8 rows", rows, out, depth, ours | peers, weight_bytes, lambda m=make: m(None))
            if depth % GROUP == 0:
                compiled = fused_groups[min(rows, 2)]
                peers["torch.compile"] = lambda s, f=compiled: f(s[0], s[1].values, s[1].scales)
            else:
                del peers["torch.compile"]
            weight_bytes = out * depth + 4 * out * -(-depth // GROUP)
            yield _case(
                f"int8 groups of {GROUP}", rows, out, depth, ours | peers, weight_bytes, lambda m=make: m(GROUP)
            )
            if rows in MANY:
                yield from _int8_activations(rows, out, depth)
            dense = {"nbkernels": lambda s: nbk.matmul(s[0], s[1]), "torch": lambda s: F.linear(s[0], s[1])}
            two = lambda r=rows, o=out, d=depth: (_bfloat16(r, d), _bfloat16(o, d))  # noqa: E731
            yield _case("dense", rows, out, depth, dense, 2 * out * depth, two)


def _int8_activations(rows, out, depth):
    """x quantised beforehand, as a norm hands it on, and in the call."""

    def make():
        x = _bfloat16(rows, depth)
        return x, nbk.quantize_int8(x), nbk.quantize_int8(_bfloat16(out, depth))

    kinds = {
        "int8 x int8": lambda s: nbk.int8_matmul(s[1], s[2], dtype="bfloat16"),
        "int8 activations": lambda s: nbk.int8_matmul(s[0], s[2], activations="int8"),
    }
    for kind, ours in kinds.items():
        calls = {"nbkernels": ours}
        if depth % 8 == 0 and out % 8 == 0:
            calls["torch._int_mm"] = lambda s: torch._int_mm(s[1].values, s[2].values.T)
        yield _case(kind, rows, out, depth, calls, out * depth + 4 * out, make)


def _ratios(results, kinds, rows, peer):
    return [
        r.microseconds[peer] / r.microseconds["nbkernels"]
        for r in results
        if r.operation in kinds and int(r.shape.split("×")[0]) in rows and peer in r.microseconds
    ]


def summarise(results, copy_bytes_a_second):
    """Print the figures that the operation is held to."""
    weights = ("int8 rows", f"int8 groups of {GROUP}")
    few = [r for r in results if r.operation in weights and int(r.shape.split("×")[0]) in FEW]
    large = [r for r in few if r.bytes >= 16e6]
    for note, of in (
        ("a large copy", [r.bytes / (r.microseconds["nbkernels"] * 1e-6) / copy_bytes_a_second for r in large]),
        ("a copy of their own bytes", [r.copy_microseconds / r.microseconds["nbkernels"] for r in large]),
    ):
        if of:
            print(f"up to 16 rows, from 16 MB on: {statistics.median(of):.0%} of {note} (median), worst {min(of):.0%}")
    lines = [
        ("int8 weights, up to 16 rows", weights, FEW, "torch"),
        *((f"int8 weights, {m} rows", weights, (m,), "torch") for m in MANY),
        ("int8 weights, all rows", weights, FEW + MANY, "torch.compile"),
        ("int8 x int8, 4096 rows", ("int8 x int8",), (4096,), "torch._int_mm"),
        ("int8 activations, quantised in the call, 4096 rows", ("int8 activations",), (4096,), "torch._int_mm"),
        ("dense, 4096 rows", ("dense",), (4096,), "torch"),
        ("dense, up to 16 rows", ("dense",), FEW, "torch"),
    ]
    for note, kinds, rows, peer in lines:
        found = _ratios(results, kinds, rows, peer)
        if found:
            print(
                f"{note}: {statistics.geometric_mean(found):.2f} times {peer} (geometric mean), least {min(found):.2f}"
            )
