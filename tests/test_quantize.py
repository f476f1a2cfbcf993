"""int8 quantisation on the kernels: the same bits as the reference, for every dtype, shape and group size."""

import numpy as np
import pytest
from compare import DTYPES, random, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.kernels import quantize
from nbkernels.launch import memory

pytestmark = pytest.mark.emulate_one_in(2)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same(result, weight, group_size):
    want = reference.quantize_int8(weight, group_size=group_size)
    np.testing.assert_array_equal(to_host(result.values), want.values)
    np.testing.assert_array_equal(to_host(result.scales), want.scales)
    assert result.group_size == group_size


@dtypes
@pytest.mark.parametrize("group_size", [None, 1, 7, 32, 64, 128, 1000])
@pytest.mark.parametrize(
    "rows, columns",
    [
        pytest.param(1, 1, id="one element"),
        pytest.param(5, 33, id="a short last group"),
        pytest.param(3, 1023, id="odd"),
        pytest.param(4, 256, id="whole groups"),
        pytest.param(70001, 96, id="more warps than a grid is high", marks=pytest.mark.gpu),
    ],
)
def test_shapes(device, rows, columns, group_size, dtype):
    weight = random((rows, columns), dtype, columns)
    same(nbk.quantize_int8(to_device(weight), group_size=group_size), weight, group_size)


@dtypes
@pytest.mark.parametrize(
    "rows, columns",
    [
        pytest.param(33, 7, id="odd and short: 32 rows a block and one more"),
        pytest.param(6, 576, id="wide, a warp a row, two blocks"),
        pytest.param(3, 4096, id="wide, a block a row"),
        pytest.param(2, 4097, id="staged, a block a row"),
        pytest.param(2, 16389, id="staged, tile by tile or a cluster"),
        pytest.param(2, 40000, id="wide, tile by tile or a cluster"),
        pytest.param(2, 600008, id="tile by tile", marks=pytest.mark.gpu),
        pytest.param(66000, 1100, id="more blocks than a grid is high", marks=pytest.mark.gpu),
    ],
)
def test_rows(device, rows, columns, dtype):
    x = random((rows, columns), dtype, columns)
    x[-1] *= dtype.type(100)
    same(nbk.quantize_int8(to_device(x)), x, None)


@pytest.mark.parametrize("group_size", [None, 16])
def test_leading_axes(device, group_size):
    x = random((2, 3, 5, 40), np.float32, 1)
    same(nbk.quantize_int8(to_device(x), group_size=group_size), x, group_size)
    same(nbk.quantize_int8(to_device(x)[:, :, 0], group_size=group_size), x[:, :, 0], group_size)
    same(nbk.quantize_int8(to_device(x)[0, 0, 0], group_size=group_size), x[0, 0, 0], group_size)


@pytest.mark.parametrize("columns", [64, 4097])
@pytest.mark.parametrize("group_size", [None, 32])
def test_infinities_and_nan(device, group_size, columns):
    x = random((5, columns), np.float32, 2)
    x[0, 5] = np.nan
    x[1, 3], x[1, 40] = np.inf, -np.inf
    x[2, 7] = np.inf
    x[3, :4] = np.nan, np.inf, -np.inf, 1e38
    same(nbk.quantize_int8(to_device(x), group_size=group_size), x, group_size)


def test_quotients_beside_halves(device):
    """Values around (k + 1/2)·scale: a quotient one unit in the last place off would round to the other side."""
    rng = np.random.default_rng(4)
    top = np.exp2(rng.uniform(-20, 20, (512, 1))).astype(np.float32)
    halves = (rng.integers(-127, 127, (512, 256)) + 0.5) * (top / np.float32(127)).astype(np.float64)
    steps = rng.integers(-2, 3, halves.shape).astype(np.int32)
    x = (np.abs(halves).astype(np.float32).view(np.int32) + steps).view(np.float32) * np.sign(halves).astype(np.float32)
    x[:, :1] = top
    same(nbk.quantize_int8(to_device(x)), x, None)


@dtypes
def test_zero_groups_have_scale_zero(device, dtype):
    weight = random((4, 96), dtype, 1)
    weight[0] = 0
    weight[2, 32:64] = 0
    result = nbk.quantize_int8(to_device(weight), group_size=32)
    same(result, weight, 32)
    assert to_host(result.scales)[0].tolist() == [0, 0, 0]


def test_halves_round_to_even(device):
    # scale 1 and 2: quotients k + 0.5, exactly
    weight = np.zeros((2, 256), np.float32)
    weight[0, :254] = np.arange(254) - 126.5
    weight[0, 255] = 127
    weight[1, :127] = 2 * np.arange(127) - 127
    weight[1, 255] = -254
    result = nbk.quantize_int8(to_device(weight))
    same(result, weight, None)
    assert to_host(result.values)[0, 125:129].tolist() == [-2, 0, 0, 2]


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-36, 1e-30, 1e-24, 5e37])
def test_small_and_large_weights(device, size, group_size):
    # 1e-42 / 127 is a denormal of one digit, or zero
    weight = (random((3, 64), np.float32, 1) * np.float32(size)).astype(np.float32)
    same(nbk.quantize_int8(to_device(weight), group_size=group_size), weight, group_size)


@dtypes
@pytest.mark.parametrize("columns", [7, 576, 1032, 4097, 16389])
def test_same_bits_whatever_the_batch(device, columns, dtype):
    x = random((9, columns), dtype, 3)
    batch = nbk.quantize_int8(to_device(x))
    for row in (0, 4, 8):
        alone = nbk.quantize_int8(to_device(x[row : row + 1]))
        np.testing.assert_array_equal(to_host(alone.values)[0], to_host(batch.values)[row])
        np.testing.assert_array_equal(to_host(alone.scales)[0], to_host(batch.scales)[row])


@dtypes
def test_views(device, dtype):
    around = random((6, 101), dtype, 1)
    same(nbk.quantize_int8(to_device(around)[::2, 1:98]), np.ascontiguousarray(around[::2, 1:98]), None)
    same(nbk.quantize_int8(to_device(around)[::2, 1:98], group_size=32), np.ascontiguousarray(around[::2, 1:98]), 32)


def test_no_columns_and_no_rows(device):
    f32 = np.dtype(np.float32)
    result = nbk.quantize_int8(memory.empty((3, 0), f32))
    assert result.shape == (3, 0) and to_host(result.scales).tolist() == [[0], [0], [0]]
    assert nbk.quantize_int8(memory.empty((0, 8), f32), group_size=4).scales.shape == (0, 2)


def test_cost():
    assert quantize.cost(3, 64, 2, np.dtype(np.float32)).bytes == 3 * (64 * 5 + 8)
