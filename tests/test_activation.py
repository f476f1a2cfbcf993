"""GELU, the gated units and the soft cap against the float64 reference."""

import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference

# one column; a row shorter than an access; the edges of an access; several stretches of a row
COLUMNS = (1, 7, 8, 9, 1032, 5000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_gated_halves(device, dtype, operation, columns):
    fused = random((5, 2 * columns), dtype, 0)
    whole = to_device(fused)
    out = poisoned((5, columns), dtype)
    getattr(nbk, operation)(whole[:, :columns], whole[:, columns:], out=out)
    exact = fused.astype(np.float64)
    assert relative_error(out, getattr(reference, operation)(exact[:, :columns], exact[:, columns:])) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_soft_cap(device, dtype, columns):
    x = (20 * random((3, columns), np.float32, 0)).astype(dtype)
    out = poisoned(x.shape, dtype)
    nbk.soft_cap(to_device(x), 15.0, out=out)
    assert relative_error(out, 15 * np.tanh(x.astype(np.float64) / 15)) < BOUND[dtype]
    assert np.abs(to_host(nbk.soft_cap(to_device(100 * x), 15.0)).astype(np.float32)).max() <= 15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_gelu(device, dtype, approximate, columns):
    x = 3 * random((5, columns), np.float32, 0)
    x = x.astype(dtype)
    out = poisoned(x.shape, dtype)
    nbk.gelu(to_device(x), approximate=approximate, out=out)
    assert relative_error(out, reference.gelu(x.astype(np.float64), approximate=approximate)) < BOUND[dtype]


def test_extremes(device):
    x = np.array([[0.0, -0.0, 1e30, -1e30, np.inf, 88.0, -88.0, -200.0]], np.float32)
    one = to_device(np.ones_like(x))
    silu = to_host(nbk.silu_mul(to_device(x), one))[0]
    assert silu[2] == np.float32(1e30) and silu[4] == np.inf and silu[5] == 88
    assert not silu[[0, 1, 3, 7]].any() and abs(silu[6]) < 1e-35
    for approximate in ("tanh", "none"):
        gelu = to_host(nbk.gelu(to_device(x[:, [0, 5, 6, 7]]), approximate=approximate))[0]
        np.testing.assert_array_equal(gelu, [0, 88, 0, 0])


def test_in_place_and_three_axes(device):
    x = random((2, 3, 40), np.float32, 0)
    whole = to_device(x)
    view = whole[:, 1:, :]  # its rows do not lie at one stride
    nbk.gelu(view, out=view)
    want = x.copy()
    want[:, 1:] = reference.gelu(x[:, 1:])
    assert relative_error(whole, want) < 1e-5
