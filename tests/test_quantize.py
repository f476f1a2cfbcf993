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


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e38])
def test_small_and_large_weights(device, size):
    # 1e-42 / 127 is a denormal of one digit, or zero
    weight = (random((3, 64), np.float32, 1) * np.float32(size)).astype(np.float32)
    same(nbk.quantize_int8(to_device(weight), group_size=32), weight, 32)


@dtypes
def test_views(device, dtype):
    around = random((6, 101), dtype, 1)
    same(nbk.quantize_int8(to_device(around)[::2, 1:98], group_size=32), np.ascontiguousarray(around[::2, 1:98]), 32)


def test_no_columns_and_no_rows(device):
    f32 = np.dtype(np.float32)
    result = nbk.quantize_int8(memory.empty((3, 0), f32))
    assert result.shape == (3, 0) and to_host(result.scales).tolist() == [[0], [0], [0]]
    assert nbk.quantize_int8(memory.empty((0, 8), f32), group_size=4).scales.shape == (0, 2)


def test_cost():
    assert quantize.cost(3, 64, 2, np.dtype(np.float32)).bytes == 3 * (64 * 5 + 8)
