"""Kernels that overlap (``launch.overlap``): the same bits, and what the emulator reports."""

import re

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight
from nbkernels.emulator.errors import RaceError
from nbkernels.emulator.run import run_ptx
from nbkernels.kernels import matmul, matmul_stream
from nbkernels.launch import compile as compiling
from nbkernels.launch import emulated
from nbkernels.launch.overlap import overlapping

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request, monkeypatch):
    """The emulator as sm_90a, or the GPU; weights of any size stream."""
    for threshold in ("LEAST_BYTES", "LEAST_DEPTH"):
        monkeypatch.setattr(matmul_stream, threshold, 0)
    matmul.plan.cache_clear()
    chosen = nbk.device("cuda") if request.param == "cuda" else nbk.device("emulator", arch=request.param)
    with chosen as found:
        yield found
    matmul.plan.cache_clear()


def chain(x, weights, turns):
    """Norms and products in a row, each of what the one before it wrote."""
    found = []
    for _ in range(turns):
        for weight in weights:
            normed = nbk.rms_norm(x, out=poisoned(x.shape, BF16))
            out = poisoned((x.shape[0], weight.shape[0]), BF16)
            product = nbk.int8_matmul if isinstance(weight, Int8Weight) else nbk.matmul
            x = product(normed, weight, residual=x, out=out)
            found.append(x)
    return [to_host(y) for y in found]


@pytest.mark.parametrize("rows", [1, 17])
def test_the_same_bits(on, rows):
    size = 400
    x = to_device(random((rows, size), BF16, 1))
    weights = [to_device(random((size, size), BF16, 2))]
    for group_size in (None, 32):
        given = reference.quantize_int8(random((size, size), np.float32, 3), group_size=group_size)
        weights.append(Int8Weight(to_device(given.values), to_device(given.scales), group_size))
    plain = chain(x, weights, 2)
    with emulated.observed() as plans, overlapping():
        early = chain(x, weights, 2)
    for a, b in zip(plain, early, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
    if on.kind == "emulator" and on.arch == "sm_90a":
        streams = [p for p in plans if p.factory is matmul_stream.matmul_stream_kernel]
        assert len(streams) == 6 and all(p.constants[-1] is True for p in streams)


@pytest.mark.parametrize(
    "rows, columns, depth, group_size",
    [
        pytest.param(1, 128, 64, "dense", id="one unit: less than the ring"),
        pytest.param(9, 700, 192, None, id="whole tiles and cut ones"),
        pytest.param(2, 100, 5008, 32, id="a ring that goes round"),
        pytest.param(64, 257, 592, 64, id="large rings"),
        pytest.param(9, 257, 1008, 32, id="boxes of scales"),
    ],
)
def test_products(on, rows, columns, depth, group_size):
    x, weight = random((rows, depth), BF16, 1), random((columns, depth), np.float32, 2)
    bias, residual = random((columns,), BF16, 3), random((rows, columns), BF16, 4)
    out = to_device(residual)
    options = {"bias": to_device(bias), "residual": out, "out": out}
    with overlapping():
        if group_size == "dense":
            weight = weight.astype(BF16)
            nbk.matmul(to_device(x), to_device(weight), **options)
        else:
            quantised = reference.quantize_int8(weight, group_size=group_size)
            on_device = Int8Weight(to_device(quantised.values), to_device(quantised.scales), group_size)
            nbk.int8_matmul(to_device(x), on_device, **options)
            weight = reference.dequantize_int8(quantised, np.float64)
    want = reference.matmul(
        *(a.astype(np.float64) for a in (x, weight)),
        bias=bias.astype(np.float64),
        residual=residual.astype(np.float64),
    )
    assert relative_error(out, want) < BOUND[BF16]


def test_a_weight_made_inside_is_reported(monkeypatch):
    for threshold in ("LEAST_BYTES", "LEAST_DEPTH"):
        monkeypatch.setattr(matmul_stream, threshold, 0)
    matmul.plan.cache_clear()
    with nbk.device("emulator", arch="sm_90a"):
        x = to_device(random((3, 256), BF16, 1))
        weight = to_device(random((128, 256), BF16, 2))
        with overlapping():
            made = nbk.rms_norm(weight)
            with pytest.raises(RaceError, match="what rms_norm writes, and has not waited"):
                nbk.matmul(x, made)
            nbk.int8_matmul(x, nbk.quantize_int8(weight))  # nothing overlaps with it
        nbk.matmul(x, made)
    matmul.plan.cache_clear()


def test_other_kernels_wait_first():
    with nbk.device("emulator", arch="sm_90a"), emulated.observed() as plans:
        nbk.rms_norm(to_device(random((3, 256), BF16, 1)))
    (plan,) = plans
    plain = compiling.ptx(plan.factory, plan.constants, "sm_90a")
    early = compiling.ptx(plan.factory, plan.constants, "sm_90a", True)
    assert not compiling.waits(plain) and compiling.waits(early)
    first = re.search(r"\.entry[^{]*\{\s*(\S+)\s+(\S+)", early)
    assert first.groups() == ("griddepcontrol.launch_dependents;", "griddepcontrol.wait;")


STORE_EARLY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry store(.param .u64 y)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [y];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    griddepcontrol.wait;
    ret;
}
"""


def test_a_store_before_the_wait_is_reported():
    y = np.zeros(1, np.uint32)
    with pytest.raises(RaceError, match="has not waited"):
        run_ptx(STORE_EARLY, None, 1, 1, [y])
    store = "st.global.u32 [%rd1], %r1;\n    griddepcontrol.wait;"
    run_ptx(STORE_EARLY.replace(store, "griddepcontrol.wait;\n    st.global.u32 [%rd1], %r1;"), None, 1, 1, [y])
    assert y[0] == 7


def test_nothing_changes_where_the_gpu_is_older():
    with nbk.device("emulator", arch="sm_80"), overlapping():
        x = random((3, 256), BF16, 1)
        assert relative_error(nbk.rms_norm(to_device(x)), reference.rms_norm(x.astype(np.float64))) < BOUND[BF16]
