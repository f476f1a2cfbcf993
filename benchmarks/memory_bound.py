"""softmax, layer_norm, rms_norm and residual + rms_norm over rows × columns: bound by the memory alone, from 1 to 262,144 rows.

Beside the speed of a large copy, each row of the table has that of a copy of its own bytes: what a launch costs is in both.
"""

import statistics

import torch
import torch.nn.functional as F

import nbkernels as nbk
from benchmarks.harness import Case

ROWS = (1, 64, 1024, 16384, 262144)
COLUMNS = (128, 576, 1000, 1024, 4096, 8191, 16384, 32768, 131072)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST_BYTES = 4 << 30  # of one array

try:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
except ImportError:
    LigerSoftmaxFunction = None


def _softmax(x, weight):
    return torch.softmax(x[0], -1)


def _layer_norm(x, weight):
    return F.layer_norm(x[0], x[0].shape[-1:], weight, weight)


def _rms_norm(x, weight):
    return F.rms_norm(x[0], x[0].shape[-1:], weight, 1e-6)


def _residual_rms_norm(x, weight):
    total = x[0] + x[1]
    return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total


# name -> (arrays read, arrays moved, FLOPs an element, ours, torch's, Liger's)
OPERATIONS = {
    "softmax": (
        1,
        2,
        7,
        lambda x, weight: nbk.softmax(x[0]),
        _softmax,
        lambda x, weight: LigerSoftmaxFunction.apply(x[0]),
    ),
    "layer_norm": (
        1,
        2,
        8,
        lambda x, weight: nbk.layer_norm(x[0], weight, weight),
        _layer_norm,
        lambda x, weight: LigerLayerNormFunction.apply(x[0], weight, weight, 1e-5),
    ),
    "rms_norm": (
        1,
        2,
        4,
        lambda x, weight: nbk.rms_norm(x[0], weight),
        _rms_norm,
        lambda x, weight: LigerRMSNormFunction.apply(x[0], weight, 1e-6),
    ),
    "residual + rms_norm": (
        2,
        4,
        5,
        lambda x, weight: nbk.rms_norm(x[0], weight, residual=x[1]),
        _residual_rms_norm,
        None,
    ),
}


def cases(dtypes=tuple(DTYPES), columns=COLUMNS):
    """Every operation at every size of these dtypes and row lengths; a compiled peer serves all numbers of rows."""
    for name in dtypes:
        dtype = DTYPES[name]
        for width in columns:
            weight = torch.randn(width, device="cuda").to(dtype)
            for operation, (read, moved, flops, ours, theirs, liger) in OPERATIONS.items():
                torch._dynamo.reset()  # its cache is small, and this case's code is used for all rows
                peers = {"torch": theirs, "torch.compile": torch.compile(theirs, dynamic=True)}
                if LigerSoftmaxFunction is not None and liger is not None:
                    peers["liger"] = liger
                for rows in ROWS:
                    size = rows * width
                    if size * dtype.itemsize > MOST_BYTES:
                        continue
                    yield Case(
                        operation,
                        f"{rows}×{width}",
                        name,
                        bytes=moved * dtype.itemsize * size,
                        flops=flops * size,
                        make=lambda n=read, r=rows, c=width, d=dtype: [
                            torch.randn(r, c, device="cuda", dtype=d) for _ in range(n)
                        ],
                        calls={k: (lambda x, f=f, w=weight: f(x, w)) for k, f in {"nbkernels": ours, **peers}.items()},
                        copied=True,
                    )


def summarise(results, copy_bytes_a_second):
    """Print, for each operation, how near to the copies the large sizes are, and how far from the best peer all of them."""
    for operation in OPERATIONS:
        mine = [r for r in results if r.operation == operation]
        if not mine:
            continue
        large = [r for r in mine if r.bytes >= 64e6]
        print(f"{operation}: {len(mine)} sizes")
        if large:
            of_copy = sorted(r.bytes / (r.microseconds["nbkernels"] * 1e-6) / copy_bytes_a_second for r in large)
            of_own = sorted(r.copy_microseconds / r.microseconds["nbkernels"] for r in large)
            print(f"  {len(large)} from 64 MB on, share of the speed of")
            print(f"    a large copy: median {statistics.median(of_copy):.1%}, worst {of_copy[0]:.1%}")
            print(f"    a copy of their own bytes: median {statistics.median(of_own):.1%}, worst {of_own[0]:.1%}")
        ratios = {r.shape: r.best_peer[1] / r.microseconds["nbkernels"] for r in mine if r.best_peer}
        if ratios:
            worst = min(ratios, key=ratios.get)
            mean = statistics.geometric_mean(ratios.values())
            print(f"  {mean:.2f} times the best peer in the geometric mean, least {ratios[worst]:.2f} at {worst}")
        small = [r for r in mine if r.bytes < 1e6 and r.best_peer]
        if small:
            slower = [r.shape for r in small if r.microseconds["nbkernels"] > r.best_peer[1]]
            print(
                f"  below 1 MB: {len(small) - len(slower)} of {len(small)} no slower than the best peer; slower: {slower}"
            )
