"""Softmax on the kernels: every code path by its row lengths, the edges of the contract, and the plan."""

import itertools

import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.launch import memory

pytestmark = pytest.mark.emulate_one_in(2)

# (rows, columns), and what each is there for
SHAPES = [
    pytest.param(3, 1, id="one column: four threads a row"),
    pytest.param(33, 7, id="odd and short: 32 rows a block and one more"),
    pytest.param(3, 31, id="below a warp's lanes"),
    pytest.param(3, 32, id="a warp's lanes"),
    pytest.param(3, 33, id="above a warp's lanes"),
    pytest.param(5, 128, id="part of a warp or a warp a row"),
    pytest.param(6, 575, id="strided, a warp a row, two blocks"),
    pytest.param(6, 576, id="wide, a warp a row, two blocks"),
    pytest.param(1, 1024, id="the longest row of a warp"),
    pytest.param(2, 1032, id="the shortest row of a block, a tail of one chunk"),
    pytest.param(2, 4097, id="strided, a block a row"),
    pytest.param(1, 16384, id="the longest strided row in registers"),
    pytest.param(2, 16385, id="strided, tile by tile"),
    pytest.param(1, 32768, id="the longest wide row in registers"),
    pytest.param(2, 32776, id="wide, tile by tile, a short last tile"),
    pytest.param(2, 50257, id="a vocabulary"),
    pytest.param(3, 262144, id="sixteen tiles", marks=pytest.mark.gpu),
    pytest.param(70001, 5, id="more rows than a grid is high", marks=pytest.mark.gpu),
    pytest.param(66000, 1100, id="more blocks than a grid is high", marks=pytest.mark.gpu),
]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def exact(x, scale=1.0):
    with np.errstate(all="ignore"):
        return reference.softmax(np.asarray(x, np.float64), scale=scale)


@dtypes
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_shapes(device, rows, columns, dtype):
    x = random((rows, columns), dtype, seed=columns)
    out = poisoned(x.shape, dtype)
    assert nbk.softmax(to_device(x), out=out) is out
    want = exact(x)
    # weights of a long row are so small that float16 has few digits left for them: rounding the exact ones costs this much
    rounding = relative_error(want.astype(dtype), want)
    assert relative_error(out, want) < max(BOUND[dtype], 1.1 * rounding)


@dtypes
@pytest.mark.parametrize("scale", [0.125, 30.0, 1.0, 0.0, -2.5])
def test_scale(device, scale, dtype):
    x = random((3, 200), dtype, seed=1)
    assert relative_error(nbk.softmax(to_device(x), scale=scale), exact(x, scale)) < BOUND[dtype]


def special_rows(columns):
    """float32 rows that hold infinities, NaN or huge values; more than one thread's part of each."""
    x = random((9, columns), np.float32, seed=2)
    x[0] = -np.inf  # 0 / 0
    x[1, 3] = np.nan
    x[2, columns - 1] = np.inf
    x[3, :-1] = -np.inf  # only the last column weighs
    x[4, 1:] = -np.inf  # only the first
    x[5] = 1e30  # all alike: one over the length
    x[6] *= 1e4
    x[7, ::2] = -np.inf
    x[8] = np.where(x[8] > 0, 3e38, -3e38)
    return x


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0, -1.5])
@pytest.mark.parametrize("columns", [40, 43, 1100, 16385])
def test_infinities_and_nan(device, columns, scale):
    x = special_rows(columns)
    if scale == 0:
        x = x[:8]  # 0 · (3e38 + 3e38) is NaN in float32
    got = nbk.softmax(to_device(x), scale=scale)
    for row, want in zip(to_host(got), exact(x, scale), strict=True):
        assert relative_error(row, want) < BOUND[np.dtype(np.float32)]


def test_large_float16_scores(device):
    x = (60000 * np.sign(random((4, 896), np.float32, seed=3))).astype(np.float16)
    for scale in (1.0, -4.0):
        assert relative_error(nbk.softmax(to_device(x), scale=scale), exact(x, scale)) < BOUND[np.dtype(np.float16)]


@dtypes
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(slice(128, 256), id="aligned columns of wider rows"),
        pytest.param(slice(129, 257), id="shifted by one element"),
        pytest.param(slice(8, 15), id="seven columns"),
        pytest.param(slice(0, 384), id="whole rows"),
    ],
)
def test_strides(device, part, dtype):
    x = random((14, 384), dtype, seed=4)
    wide_out = poisoned((7, 500), dtype)
    out = wide_out[:, 100 : 100 + part.stop - part.start]
    nbk.softmax(to_device(x)[::2, part], out=out)
    assert relative_error(out, exact(x[::2, part])) < BOUND[dtype]
    beside = np.delete(np.asarray(to_host(wide_out), np.float32), np.s_[100 : 100 + part.stop - part.start], axis=1)
    assert np.isnan(beside).all()


@dtypes
@pytest.mark.parametrize("columns", [7, 576, 4097, 16385])
def test_in_place(device, columns, dtype):
    x = random((3, columns), dtype, seed=5)
    y = to_device(x)
    nbk.softmax(y, out=y)
    assert relative_error(y, exact(x)) < BOUND[dtype]


def test_leading_axes(device):
    x = random((2, 3, 4, 24), np.float32, seed=6)
    assert relative_error(nbk.softmax(to_device(x)), exact(x)) < 1e-5
    assert relative_error(nbk.softmax(to_device(x)[:, ::2, 1:]), exact(x[:, ::2, 1:])) < 1e-5
    assert relative_error(nbk.softmax(to_device(x[0, 0, 0])), exact(x[0, 0, 0])) < 1e-5


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)])
def test_nothing_to_do(device, shape):
    assert nbk.softmax(to_device(np.empty(shape, np.float32))).shape == shape
    x = random((2, 8), np.float32, seed=7)  # and the device still works
    assert relative_error(nbk.softmax(to_device(x)), exact(x)) < 1e-5


@dtypes
@pytest.mark.parametrize("columns", [7, 33, 576, 1032, 4097, 16385])
def test_same_bits_whatever_the_batch(device, columns, dtype):
    x = random((11, columns), dtype, seed=8)
    batch = to_host(nbk.softmax(to_device(x)))
    np.testing.assert_array_equal(batch, to_host(nbk.softmax(to_device(x))))
    for row in (0, 5, 10):
        alone = to_host(nbk.softmax(to_device(x[row : row + 1])))
        np.testing.assert_array_equal(alone[0], batch[row])


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements():
    rows, columns, dtype = 2**21 + 8, 1024, np.dtype(np.float16)
    with nbk.device("cuda"):
        x = memory.zeros((rows, columns), dtype)
        last = random((8, columns), dtype, seed=9)
        memory.copy_from_host(x[-8:], last)
        out = poisoned(x.shape, dtype)
        nbk.softmax(x, out=out)
        assert relative_error(out[-8:], exact(last)) < BOUND[dtype]
        assert relative_error(out[2**20 : 2**20 + 8], np.full((8, columns), 1 / columns)) < BOUND[dtype]


# ---- the plan and the walk, without a device ---------------------------------------------------------------------------------

LENGTHS = (1, 7, 8, 31, 32, 33, 575, 576, 1024, 1025, 4096, 4097, 16384, 16385, 32768, 32769, 50257, 262144)


@dtypes
@pytest.mark.parametrize("walk", ["strided", "staged", "wide"])
def test_plan_covers_the_row(walk, dtype):
    from nbkernels.kernels import softmax

    for columns, rows, clusters in itertools.product(LENGTHS, (1, 5, 100), (False, True)):
        plan = softmax.plan(rows, columns, dtype, walk, clusters)
        _, _, threads, chunks, *rest = plan.constants
        rows_per_block, cluster = 1, 1
        if rest:
            rows_per_block, resident, cluster = rest
            assert resident * plan.block[0] <= 2048 and (cluster == 1 or clusters)
            assert threads * chunks * cluster * (16 // dtype.itemsize) >= columns
        blocks = plan.grid[0] // cluster
        assert plan.grid[0] % cluster == 0
        assert blocks * rows_per_block >= rows > (blocks - 1) * rows_per_block
        assert plan.block == (threads * rows_per_block, 1, 1)
        assert plan.block[0] % 32 == 0 and plan.block[0] <= 1024


@dtypes
def test_few_kernels_serve_all_lengths(dtype):
    from nbkernels.kernels import softmax

    for walk in ("strided", "staged", "wide"):
        kernels = {softmax.plan(1, columns, dtype, walk).constants for columns in range(1, 70000, 3)}
        assert len(kernels) <= 40


@dtypes
@pytest.mark.parametrize("walk", ["strided", "staged", "wide"])
def test_the_kernel_does_not_depend_on_the_number_of_rows(walk, dtype):
    from nbkernels.kernels import softmax

    for columns in LENGTHS:
        assert len({softmax.plan(rows, columns, dtype, walk).constants for rows in (1, 2, 1000, 10**6)}) == 1


def test_alignment_decides_the_walk():
    from nbkernels.arrays import DeviceArray
    from nbkernels.kernels.rows import choose_walk

    def view(pointer, stride, columns, dtype=np.float16):
        return DeviceArray(pointer, (4, columns), (stride, 1), np.dtype(dtype), None)

    half = np.dtype(np.float16)
    assert choose_walk(64, half, (view(256, 64, 64), None)) == "wide"
    assert choose_walk(63, half, (view(256, 64, 63),)) == "strided", "the length leaves a tail"
    assert choose_walk(64, half, (view(258, 64, 64),)) == "strided", "the address"
    assert choose_walk(64, half, (view(256, 65, 64),)) == "strided", "the row stride"
    assert choose_walk(64, half, (view(256, 64, 64), view(256, 68, 64))) == "strided", "any of the arrays"
    assert choose_walk(4, np.dtype(np.float32), (view(256, 4, 4, np.float32),)) == "wide"
    assert choose_walk(4097, half, (view(256, 4097, 4097),)) == "staged", "long enough for shared memory"
