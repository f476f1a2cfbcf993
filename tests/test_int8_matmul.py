"""The product with an int8 weight: every code path by shape and group size, and the edges of the contract."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host
from matrix_shapes import GATED_SHAPES, KERNEL_SHAPES, SHAPES, one_architecture

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight
from nbkernels.kernels import int8_matmul

pytestmark = pytest.mark.emulate_one_in(3)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BF16 = np.dtype(ml_dtypes.bfloat16)


def exact(x, weight, *, bias=None, residual=None, activation=None):
    """The product in float64 with the weight that the int8 values stand for."""
    wide = [None if a is None else np.asarray(a, np.float64) for a in (x, bias, residual)]
    with np.errstate(all="ignore"):
        return reference.int8_matmul(wide[0], weight, bias=wide[1], residual=wide[2], activation=activation)


def quantised(columns, depth, group_size, seed=1):
    """An Int8Weight on the host, its values at both ends of the range; scales of 1e-3 to 1, and of 0 in one row."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else -(-depth // group_size)
    values = rng.integers(-127, 128, (columns, depth)).astype(np.int8)
    scales = np.exp(rng.uniform(np.log(1e-3), 0, (columns, groups))).astype(np.float32)
    if columns > 2:
        values[1], scales[1] = 0, 0
    return Int8Weight(values, scales, group_size)


def on_device(weight):
    return Int8Weight(to_device(weight.values), to_device(weight.scales), weight.group_size)


@one_architecture
@dtypes
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_shapes(device, rows, columns, depth, group_size, dtype):
    x, weight = random((rows, depth), dtype, rows), quantised(columns, depth, group_size)
    out = poisoned((rows, columns), dtype)
    assert nbk.int8_matmul(to_device(x), on_device(weight), out=out) is out
    assert relative_error(out, exact(x, weight)) < BOUND[dtype]


@one_architecture
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize(
    "group_size",
    [
        pytest.param(1, id="1"),
        pytest.param(10, id="10, no multiple of a vector"),
        pytest.param(64, id="64"),
        pytest.param(96, id="96, no power of two"),
        pytest.param(128, id="128"),
        pytest.param(256, id="256, longer than a turn"),
        pytest.param(1000, id="1000, longer than the depth"),
    ],
)
@pytest.mark.parametrize("rows", [pytest.param(3, id="few rows"), pytest.param(70, id="many rows")])
def test_group_sizes(device, rows, group_size, dtype):
    depth = 328  # a short last group of every size
    x, weight = random((rows, depth), dtype, rows), quantised(66, depth, group_size)
    out = poisoned((rows, 66), dtype)
    nbk.int8_matmul(to_device(x), on_device(weight), out=out)
    assert relative_error(out, exact(x, weight)) < BOUND[dtype]


@pytest.mark.emulate_one_in(1)
@dtypes
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows, columns, depth", GATED_SHAPES)
def test_gated(device, rows, columns, depth, group_size, dtype):
    x, weight = random((rows, depth), dtype, rows), quantised(columns, depth, group_size)
    weight.scales[:] *= np.float32(2**-6)  # the product of two sums is to fit into float16
    bias = random((columns,), dtype, 3)
    out = poisoned((rows, columns // 2), dtype)
    given = {"bias": to_device(bias), "activation": "silu_mul", "out": out}
    assert nbk.int8_matmul(to_device(x), on_device(weight), **given) is out
    assert relative_error(out, exact(x, weight, bias=bias, activation="silu_mul")) < BOUND[dtype]


@one_architecture
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows, columns, depth", KERNEL_SHAPES)
def test_epilogue(device, rows, columns, depth, group_size, dtype):
    x, weight = random((rows, depth), dtype, 1), quantised(columns, depth, group_size)
    bias, residual = random((columns,), dtype, 3), random((rows, columns), dtype, 4)
    want = exact(x, weight, bias=bias, residual=residual, activation="silu")
    out = to_device(residual)
    nbk.int8_matmul(to_device(x), on_device(weight), bias=to_device(bias), residual=out, activation="silu", out=out)
    assert relative_error(out, want) < BOUND[dtype]


@one_architecture
@dtypes
@pytest.mark.parametrize("shift", [1, 4, 8, 16])
@pytest.mark.parametrize("rows", [3, 70])
def test_views(device, rows, shift, dtype):
    # the weight's rows at every alignment that a kernel tells apart: 1, 4, 8 and 16 bytes
    depth, columns = 72, 66
    x, weight = random((rows, depth), dtype, 1), quantised(columns, depth, 32)
    around = np.full((columns, depth + 24 + (shift % 8 == 1)), 99, np.int8)
    around[:, shift : shift + depth] = weight.values
    values = to_device(around)[:, shift : shift + depth]
    scales = to_device(np.pad(weight.scales, ((0, 0), (1, 1)), constant_values=np.nan))[:, 1:-1]
    out = nbk.int8_matmul(to_device(x), Int8Weight(values, scales, 32))
    assert relative_error(out, exact(x, weight)) < BOUND[dtype]


@one_architecture
@dtypes
@pytest.mark.parametrize("rows", [1, 40])
def test_every_byte_is_exact(device, rows, dtype):
    # a weight of single ones, times every int8 in turn: the result is that number, in any dtype
    depth = 256
    weight = np.zeros((66, depth), np.int8)
    x = np.zeros((rows, depth), dtype)
    x[:, 37] = 1
    for start in range(-127, 128, 66):
        weight[:, 37] = np.minimum(np.arange(start, start + 66), 127)
        out = nbk.int8_matmul(to_device(x), on_device(Int8Weight(weight, np.ones((66, 8), np.float32), 32)))
        np.testing.assert_array_equal(to_host(out).astype(np.int32), np.broadcast_to(weight[:, 37], (rows, 66)))


@one_architecture
@dtypes
@pytest.mark.parametrize("group_size", [None, 32])
def test_rows_do_not_depend_on_the_batch(device, group_size, dtype):
    most = 16 if dtype.itemsize == 4 else 32
    x, weight = random((most, 520), dtype, 1), on_device(quantised(40, 520, group_size))
    together = to_host(nbk.int8_matmul(to_device(x), weight))
    for rows in (1, 3, 9):
        alone = to_host(nbk.int8_matmul(to_device(x[:rows]), weight))
        np.testing.assert_array_equal(alone.view(np.uint8), together[:rows].view(np.uint8))


@one_architecture
@dtypes
@pytest.mark.parametrize("rows", [3, 40])
def test_nan_and_infinity_stay_in_their_row(device, rows, dtype):
    x, weight = random((rows, 72), dtype, 1), quantised(66, 72, 32)
    weight.values[weight.values == 0] = 1  # 0 · infinity is NaN on both sides; what is meant here is the rest
    x[0, 71] = np.nan
    x[1, 0] = np.inf
    assert relative_error(nbk.int8_matmul(to_device(x), on_device(weight)), exact(x, weight)) < BOUND[dtype]


@one_architecture
def test_float16_sums_of_small_scales(device):
    # weights of 1e-7 lie below float16's normal range: the scale must not be rounded into them
    x = (random((20, 96), np.float16, 1) * 100).astype(np.float16)
    weight = quantised(34, 96, 32)
    weight = Int8Weight(weight.values, weight.scales * np.float32(1e-5), 32)
    residual = np.zeros((20, 34), np.float16)
    want = exact(x, weight)
    out = nbk.int8_matmul(to_device(x), on_device(weight), residual=to_device(residual))
    assert relative_error(out, want) < BOUND[np.dtype(np.float16)]


def test_cost():
    cost = int8_matmul.cost(2, 30, 70, 3, BF16)
    assert cost.bytes == 2 * (2 * 70 + 2 * 30) + 30 * (70 + 12) and cost.flops == 2 * 2 * 30 * 70
