"""The dense product on the kernels: every code path by its shape, the edges of the contract, and the plan."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host
from matrix_shapes import GATED_SHAPES, KERNEL_SHAPES, SHAPES, one_architecture

import nbkernels as nbk
from nbkernels import reference
from nbkernels.kernels import matmul
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.launch import memory

pytestmark = pytest.mark.emulate_one_in(2)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BF16 = np.dtype(ml_dtypes.bfloat16)


def exact(x, weight, *, bias=None, residual=None, activation=None):
    """The product in float64 of the values as they are."""
    wide = [None if a is None else np.asarray(a, np.float64) for a in (x, weight, bias, residual)]
    with np.errstate(all="ignore"):
        return reference.matmul(wide[0], wide[1], bias=wide[2], residual=wide[3], activation=activation)


def operands(rows, columns, depth, dtype):
    return random((rows, depth), dtype, rows), random((columns, depth), dtype, columns + 1)


@one_architecture
@dtypes
@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_shapes(device, rows, columns, depth, dtype):
    x, weight = operands(rows, columns, depth, dtype)
    out = poisoned((rows, columns), dtype)
    assert nbk.matmul(to_device(x), to_device(weight), out=out) is out
    assert relative_error(out, exact(x, weight)) < BOUND[dtype]


@one_architecture
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_exact"])
@pytest.mark.parametrize("rows, columns, depth", KERNEL_SHAPES)
def test_epilogue(device, rows, columns, depth, activation, dtype):
    x, weight = operands(rows, columns, depth, dtype)
    bias, residual = random((columns,), dtype, 3), random((rows, columns), dtype, 4)
    want = exact(x, weight, bias=bias, residual=residual, activation=activation)
    out = to_device(residual)  # the residual stream: read and written in place
    nbk.matmul(to_device(x), to_device(weight), bias=to_device(bias), residual=out, activation=activation, out=out)
    assert relative_error(out, want) < BOUND[dtype]


@pytest.mark.emulate_one_in(1)
@dtypes
@pytest.mark.parametrize("rows, columns, depth", GATED_SHAPES)
def test_gated(device, rows, columns, depth, dtype):
    x, weight = operands(rows, columns, depth, dtype)
    bias = random((columns,), dtype, 3)
    out = poisoned((rows, columns // 2), dtype)
    given = {"bias": to_device(bias), "activation": "silu_mul", "out": out}
    assert nbk.matmul(to_device(x), to_device(weight), **given) is out
    assert relative_error(out, exact(x, weight, bias=bias, activation="silu_mul")) < BOUND[dtype]


@pytest.mark.emulate_one_in(1)
@one_architecture
@pytest.mark.parametrize("rows, columns, depth", GATED_SHAPES[:6])
def test_gated_is_rounded_once(device, rows, columns, depth):
    x, weight = operands(rows, columns, depth, BF16)
    want = exact(x, weight, activation="silu_mul").astype(BF16)
    found = to_host(nbk.matmul(to_device(x), to_device(weight), activation="silu_mul"))
    # float32 sums round the other way for one element in a thousand; with gate and up in bfloat16 it would be every other
    assert np.mean(found == want) > 0.98


@one_architecture
@dtypes
@pytest.mark.parametrize("rows, columns, depth", GATED_SHAPES[:4])
def test_gated_views(device, rows, columns, depth, dtype):
    # y in rows of a larger array, shifted by an element; a bias at an odd address; leading axes
    x, weight = operands(rows, columns, depth, dtype)
    bias = random((columns + 1,), dtype, 3)
    whole = to_device(np.full((rows, columns), np.nan, dtype))
    out = whole[:, 1 : 1 + columns // 2].reshape(rows, 1, -1)
    x_batch = to_device(x).reshape(rows, 1, depth)
    nbk.matmul(x_batch, to_device(weight), bias=to_device(bias)[1:], activation="silu_mul", out=out)
    written = to_host(whole)
    want = exact(x, weight, bias=bias[1:], activation="silu_mul")
    assert relative_error(np.ascontiguousarray(written[:, 1 : 1 + columns // 2]), want) < BOUND[dtype]
    assert np.isnan(written[:, 0].astype(np.float32)).all()
    assert np.isnan(written[:, 1 + columns // 2 :].astype(np.float32)).all()


@one_architecture
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_activations_of_large_values(device, activation):
    # exp overflows on one side and vanishes on the other; the result is the value or 0
    x = np.array([[-1e30], [-200.0], [-20.0], [0.0], [20.0], [200.0], [1e30]], np.float32)
    out = nbk.matmul(to_device(x), to_device(np.ones((2, 1), np.float32)), activation=activation)
    want = exact(x, np.ones((2, 1)), activation=activation)
    np.testing.assert_allclose(to_host(out), want, rtol=1e-5, atol=1e-7)


@one_architecture
@dtypes
@pytest.mark.parametrize("rows, columns, depth", KERNEL_SHAPES)
@pytest.mark.parametrize("shift", [1, 8], ids=["shifted by one", "aligned, with gaps"])
def test_views(device, rows, columns, depth, shift, dtype):
    # rows of larger arrays: what lies around them is NaN, and stays as it is
    gap = 24
    x, weight = operands(rows, columns, depth, dtype)
    residual = random((rows, columns), dtype, 4)

    def view(values):
        around = np.full((values.shape[0], values.shape[1] + gap - values.shape[1] % 8), np.nan, values.dtype)
        around[:, shift : shift + values.shape[1]] = values
        whole = to_device(around)
        return whole, whole[:, shift : shift + values.shape[1]]

    (_, x_view), (_, weight_view), (_, residual_view) = view(x), view(weight), view(residual)
    whole, out = view(np.full((rows, columns), np.nan, dtype))
    nbk.matmul(x_view, weight_view, residual=residual_view, out=out)
    written = to_host(whole)
    want = exact(x, weight, residual=residual)
    assert relative_error(written[:, shift : shift + columns], want) < BOUND[dtype]
    assert np.isnan(written[:, :shift].astype(np.float32)).all()
    assert np.isnan(written[:, shift + columns :].astype(np.float32)).all()


@one_architecture
@dtypes
def test_rows_do_not_depend_on_the_batch(device, dtype):
    most = 16 if dtype.itemsize == 4 else 32
    x, weight = operands(most, 40, 200, dtype)
    weight = to_device(weight)
    together = to_host(nbk.matmul(to_device(x), weight))
    for rows in (1, 3, 9):
        alone = to_host(nbk.matmul(to_device(x[:rows]), weight))
        np.testing.assert_array_equal(alone.view(np.uint8), together[:rows].view(np.uint8))


@one_architecture
@dtypes
@pytest.mark.parametrize("rows, columns, depth", [(3, 20, 40), (40, 130, 40)])
def test_nan_and_infinity_stay_in_their_row(device, rows, columns, depth, dtype):
    # the last column lies beside the padding, the first stands in for what is past the end
    x, weight = operands(rows, columns, depth, dtype)
    x[0, depth - 1] = np.nan
    x[1, 0] = np.inf
    weight[2, 0] = -np.inf
    assert relative_error(nbk.matmul(to_device(x), to_device(weight)), exact(x, weight)) < BOUND[dtype]


@one_architecture
@dtypes
def test_no_columns_are_a_sum_of_nothing(device, dtype):
    bias = random((5,), dtype, 1)
    out = poisoned((3, 5), dtype)
    nbk.matmul(memory.empty((3, 0), dtype), memory.empty((5, 0), dtype), bias=to_device(bias), out=out)
    np.testing.assert_array_equal(to_host(out), np.broadcast_to(bias, (3, 5)))


@one_architecture
def test_no_rows(device):
    weight = to_device(random((5, 8), np.float32, 1))
    assert nbk.matmul(memory.empty((0, 8), np.dtype(np.float32)), weight).shape == (0, 5)
    # and the device is still usable
    x = random((1, 8), np.float32, 2)
    assert relative_error(nbk.matmul(to_device(x), weight), exact(x, to_host(weight))) < 1e-5


ALIGNED = matmul.Alignment(fragments=True, pieces=True, pairs=True, quads=True)
ODD = matmul.Alignment(fragments=False, pieces=False, pairs=False, quads=False)


@pytest.mark.parametrize(
    "rows, columns, depth, dtype, alignment, kernel",
    [
        (1, 960, 576, BF16, ALIGNED, "matmul_narrow_kernel"),
        (32, 49152, 576, BF16, ALIGNED, "matmul_narrow_kernel"),
        (
            64,
            576,
            576,
            BF16,
            ALIGNED,
            "matmul_narrow_kernel",
        ),  # nine small tiles: most of 132 multiprocessors would idle
        (33, 49152, 576, BF16, ALIGNED, "matmul_tiles_kernel"),
        (4096, 4096, 4096, BF16, ODD, "matmul_tiles_kernel"),
        (1, 960, 576, BF16, ODD, "matmul_lanes_kernel"),
        (16, 960, 576, np.dtype(np.float32), ALIGNED, "matmul_lanes_kernel"),
        (17, 960, 576, np.dtype(np.float32), ALIGNED, "matmul_blocks_kernel"),
        (4096, 960, 0, BF16, ALIGNED, "matmul_lanes_kernel"),
    ],
)
def test_plan_picks_the_kernel(rows, columns, depth, dtype, alignment, kernel):
    chosen = matmul.plan(rows, columns, depth, dtype, "dense", 0, alignment, Epilogue(), 132)
    assert chosen.factory.__name__ == kernel


def test_plan_grid_covers_the_product():
    for rows, columns in ((1, 1), (31, 17), (33, 8193), (129, 129), (70001, 50257)):
        for dtype in DTYPES:
            for alignment in (ALIGNED, ODD):
                chosen = matmul.plan(rows, columns, 64, dtype, "dense", 0, alignment, Epilogue(), 132)
                assert chosen.grid[1:] == (1, 1) and chosen.grid[0] < 2**31
                assert chosen.shared_bytes <= 99 * 1024  # the least any supported GPU gives a block


def test_cost():
    cost = matmul.cost(2, 30, 7, BF16, bias=True, residual=True)
    assert cost.bytes == 2 * (2 * 7 + 30 * 7 + 30 + 2 * 2 * 30) and cost.flops == 2 * 2 * 30 * 7
    gated = matmul.cost(2, 30, 7, BF16, bias=True, gated=True)
    assert gated.bytes == 2 * (2 * 7 + 30 * 7 + 30 + 2 * 15) and gated.flops == cost.flops
