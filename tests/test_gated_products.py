"""``activation="silu_mul"`` of matmul and int8_matmul: silu(gate) · up over rows of the weight that take turns."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference

pytestmark = pytest.mark.emulate_one_in(3)

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def gated(x, weight, bias):
    """In float64, gate and up as two products of their own."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    gate, up = x @ weight[0::2].T, x @ weight[1::2].T
    if bias is not None:
        gate, up = gate + bias[0::2].astype(np.float64), up + bias[1::2].astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up


# one row and few, rows for tensor cores, a prompt; widths that the tiles of each kernel divide, and others
SHAPES = [
    (1, 96, 128),
    (5, 64, 96),
    (16, 130, 72),
    (64, 256, 128),
    (130, 64, 64),
    (140, 256, 192),
    (3, 34, 37),
    (2, 2, 1),
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_dense(device, rows, columns, depth, dtype, with_bias):
    x, weight = random((rows, depth), dtype, 1), random((columns, depth), dtype, 2)
    bias = random((columns,), dtype, 3) if with_bias else None
    out = poisoned((rows, columns // 2), dtype)
    nbk.matmul(to_device(x), to_device(weight), bias=to_device(bias), activation="silu_mul", out=out)
    assert relative_error(to_host(out), gated(x, weight, bias)) < BOUND[dtype]


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("rows, columns, depth", [*SHAPES, (2, 4096, 512)])
def test_int8(device, rows, columns, depth, dtype, group_size):
    x = random((rows, depth), dtype, 1)
    weight = reference.quantize_int8(random((columns, depth), F32, 2), group_size=group_size)
    dense = reference.dequantize_int8(weight)
    placed = nbk.Int8Weight(to_device(weight.values), to_device(weight.scales), group_size)
    out = poisoned((rows, columns // 2), dtype)
    nbk.int8_matmul(to_device(x), placed, activation="silu_mul", out=out)
    assert relative_error(to_host(out), gated(x, dense, None)) < BOUND[dtype]


def test_the_reference():
    x, weight, bias = random((7, 24), F32, 1), random((20, 24), F32, 2), random((20,), F32, 3)
    got = nbk.matmul(x, weight, bias=bias, activation="silu_mul")
    assert got.shape == (7, 10) and relative_error(got, gated(x, weight, bias)) < 1e-6


def test_errors():
    x, weight = np.ones((2, 8), np.float32), np.ones((6, 8), np.float32)
    with pytest.raises(ValueError, match="residual"):
        nbk.matmul(x, weight, residual=np.ones((2, 3), np.float32), activation="silu_mul")
    with pytest.raises(ValueError, match=r"weight: .*even"):
        nbk.matmul(x, weight[:5], activation="silu_mul")
    with pytest.raises(ValueError, match="activation"):
        nbk.int8_matmul(x, nbk.quantize_int8(weight), activation="silu_mul", activations="int8")
