"""Products planned as for so many rows: a row's bits depend neither on how many rows there are nor on which it is."""

import ml_dtypes
import numpy as np
import pytest
from compare import poisoned, random, to_device, to_host

import nbkernels as nbk
from nbkernels.kernels import (
    matmul,
    matmul_blocks,
    matmul_lanes,
    matmul_narrow,
    matmul_stream,
    matmul_stream_int8,
    matmul_tiles,
    matmul_tiles_int8,
    matmul_wgmma,
    matmul_wgmma_int8,
)
from nbkernels.launch import emulated

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


@pytest.fixture
def streamed(monkeypatch):
    """Small weights count as large."""
    for name in ("LEAST_BYTES", "LEAST_DEPTH"):
        monkeypatch.setattr(matmul_stream, name, 1)
    monkeypatch.setattr(matmul_stream_int8, "LEAST_BYTES", 1)
    matmul.plan.cache_clear()
    yield
    matmul.plan.cache_clear()


# (arch, dtype, group size: 0 for dense, None for a scale a row; activations; rows planned for, rows that there are, the kernel)
CASES = [
    ("sm_80", F32, 0, None, 16, (1, 3, 16), matmul_lanes.matmul_lanes_kernel),
    ("sm_80", F32, 0, None, 64, (1, 5, 64), matmul_blocks.matmul_blocks_kernel),
    ("sm_80", BF16, 0, None, 32, (1, 8, 20), matmul_narrow.matmul_narrow_kernel),
    ("sm_80", BF16, 32, None, 16, (1, 9), matmul_narrow.matmul_narrow_kernel),
    ("sm_80", BF16, 0, None, 64, (1, 8, 64), matmul_tiles.matmul_tiles_kernel),
    ("sm_80", BF16, 32, None, 64, (1, 64), matmul_tiles.matmul_tiles_kernel),
    ("sm_90a", BF16, 0, None, 64, (1, 9, 64), matmul_stream.matmul_stream_kernel),
    ("sm_90a", BF16, 32, None, 64, (1, 9, 64), matmul_stream.matmul_stream_kernel),
    ("sm_90a", BF16, 0, None, 128, (1, 70), matmul_wgmma.matmul_wgmma_kernel),
    ("sm_90a", BF16, 32, None, 128, (1, 70), matmul_wgmma.matmul_wgmma_kernel),
    ("sm_80", BF16, None, "int8", 64, (1, 17, 64), matmul_tiles_int8.matmul_tiles_int8_kernel),
    ("sm_80", BF16, 32, "int8", 64, (1, 17), matmul_tiles_int8.matmul_tiles_int8_kernel),
    ("sm_90a", BF16, None, "int8", 64, (1, 64), matmul_stream_int8.matmul_stream_int8_kernel),
    ("sm_90a", BF16, None, "int8", 128, (1, 70), matmul_wgmma_int8.matmul_wgmma_int8_kernel),
]


@pytest.mark.parametrize("arch, dtype, group, activations, planned, counts, kernel", CASES)
def test_a_row_is_the_same_among_any(streamed, arch, dtype, group, activations, planned, counts, kernel):
    columns, depth = 160, 224
    x = random((planned, depth), F32, 0).astype(dtype)
    weight = random((columns, depth), F32, 1).astype(dtype)
    residual = random((planned, columns), F32, 2).astype(dtype)
    with nbk.device("emulator", arch=arch), emulated.observed() as launches:
        placed = to_device(weight)
        if group != 0:
            placed = nbk.quantize_int8(placed, group_size=group)

        def multiply(rows):
            out = poisoned((len(rows), columns), dtype)
            options = {"residual": to_device(residual[rows]), "out": out, "plan_rows": planned}
            if group == 0:
                nbk.matmul(to_device(x[rows]), placed, **options)
            else:
                nbk.int8_matmul(to_device(x[rows]), placed, activations=activations, **options)
            return to_host(out)

        whole = multiply(np.arange(planned))
        for count in counts:
            rows = np.random.default_rng(count).permutation(planned)[:count]
            np.testing.assert_array_equal(multiply(rows), whole[rows])
        factories = {plan.factory for plan in launches} & {case[-1] for case in CASES}
    assert factories == {kernel}


@pytest.mark.gpu
@pytest.mark.parametrize("columns, depth", [(6144, 4096), (28672, 4096), (4096, 14336), (960, 576), (49152, 576)])
@pytest.mark.parametrize("kind", ["dense", "int8", "int8-rows", "int8-activations"])
@pytest.mark.parametrize("planned", [16, 64, 128, 256])
def test_a_row_is_the_same_among_any_on_a_gpu(columns, depth, kind, planned):
    with nbk.device("cuda"):
        x = to_device(random((planned, depth), F32, 0).astype(BF16))
        weight = to_device((random((columns, depth), F32, 1) / np.sqrt(depth)).astype(BF16))
        if kind != "dense":
            weight = nbk.quantize_int8(weight, group_size=32 if kind == "int8" else None)

        def multiply(rows):
            if kind == "dense":
                return to_host(nbk.matmul(rows, weight, plan_rows=planned))
            activations = "int8" if kind == "int8-activations" else None
            return to_host(nbk.int8_matmul(rows, weight, activations=activations, plan_rows=planned))

        whole = multiply(x)
        for first, count in ((0, 1), (3, 1), (planned - 1, 1), (1, 2), (5, 8), (2, 13), (planned // 2, planned // 2)):
            np.testing.assert_array_equal(multiply(x[first : first + count]), whole[first : first + count])
