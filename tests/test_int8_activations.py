"""int8_matmul with int8 activations: exact integer sums on every code path, every epilogue, and the edges of the contract."""

import ml_dtypes
import numpy as np
import pytest
from compare import DTYPES, poisoned, random, relative_error, to_device, to_host
from test_matmul_wgmma import hopper, padded  # noqa: F401

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight
from nbkernels.kernels import int8_matmul, matmul_stream_int8, matmul_tiles_int8, matmul_wgmma_int8
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.launch import emulated
from nbkernels.launch.device import current
from nbkernels.launch.launcher import launch

pytestmark = pytest.mark.emulate_one_in(5)

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
# ‖y - y in float64‖ / ‖y in float64‖ from the same int8 values: the integer sums are exact, so that what is left is a handful of
# roundings of float32 (2^-24 each; an activation 2^-22) and one to y's dtype, of at most 2^-11 or 2^-8
ROUNDED = {F32: 1e-6, F16: 2.0**-11, BF16: 2.0**-8}
FULL = {"bias": True, "activation": "silu", "residual": True}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# (rows, columns, depth), each with the code path it is there for
SHAPES = [
    pytest.param(1, 1, 1, id="one of each"),
    pytest.param(1, 70, 200, id="a row"),
    pytest.param(16, 65, 33, id="sixteen rows, byte by byte"),
    pytest.param(17, 64, 1040, id="two tiles of rows in one, more steps than stages"),
    pytest.param(40, 130, 144, id="small tiles"),
    pytest.param(140, 129, 136, id="large tiles, odd columns"),
    pytest.param(130, 264, 400, id="a prompt: wgmma on sm_90a, large tiles before"),
    pytest.param(131, 136, 16, id="a prompt, less than a step"),
    pytest.param(5, 960, 576, id="SmolLM2 qkv", marks=pytest.mark.gpu),
    pytest.param(300, 576, 1536, id="SmolLM2 down, a prompt", marks=pytest.mark.gpu),
    pytest.param(16, 4096, 14336, id="Llama-8B down", marks=pytest.mark.gpu),
    pytest.param(700, 6144, 4096, id="Llama-8B qkv, a prompt", marks=pytest.mark.gpu),
    pytest.param(3, 50257, 1023, id="an odd vocabulary", marks=pytest.mark.gpu),
    pytest.param(70000, 65, 72, id="more rows than a grid is high", marks=pytest.mark.gpu),
    pytest.param(70000, 64, 80, id="more rows than a grid is high, a prompt", marks=pytest.mark.gpu),
]


def quantised(rows, depth, group_size=None, seed=1):
    """An Int8Weight on the host, its values over the whole range; scales of 1e-4 to 0.1, and of 0 in one row."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else -(-depth // group_size)
    values = rng.integers(-128, 128, (rows, depth)).astype(np.int8)
    scales = np.exp(rng.uniform(np.log(1e-4), np.log(0.1), (rows, groups))).astype(np.float32)
    if rows > 2:
        values[1], scales[1] = 0, 0
    return Int8Weight(values, scales, group_size)


def on_device(q):
    return Int8Weight(to_device(q.values), to_device(q.scales), q.group_size)


def extras(rows, columns, dtype, bias=False, activation=None, residual=False):
    """The epilogue's arguments, on the host."""
    given = {"activation": activation}
    if bias:
        given["bias"] = random((columns,), dtype, 3)
    if residual:
        given["residual"] = random((rows, columns), dtype, 4)
    return given


def place(given):
    return {name: to_device(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}


def exact(x, weight, **given):
    """The product in float64 of what the int8 values and scales stand for."""
    given = {name: np.asarray(v, np.float64) if isinstance(v, np.ndarray) else v for name, v in given.items()}
    return reference.int8_matmul(x, weight, dtype=np.float64, **given)


# ---- the reference ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 32, 96, 500])
def test_reference(group_size):
    x, weight = random((4, 5, 200), F32, 0), quantised(30, 200, group_size)
    rows = reference.quantize_int8(x.reshape(20, 200))
    dense = reference.dequantize_int8(weight, np.float64)
    want = (reference.dequantize_int8(rows, np.float64) @ dense.T).reshape(4, 5, 30)
    given = {"bias": random((30,), F32, 1), "residual": random((4, 5, 30), F32, 2), "activation": "gelu"}
    found = reference.int8_matmul(x, weight, activations="int8", **given)
    assert found.dtype == F32
    want = reference._gelu_tanh(want + given["bias"]) + given["residual"]
    assert relative_error(found, want) < 1e-6
    as_given = Int8Weight(rows.values.reshape(x.shape), rows.scales.reshape(4, 5, 1))
    np.testing.assert_array_equal(reference.int8_matmul(as_given, weight, **given), found)


def test_sums_are_exact_beyond_what_float32_holds():
    # 100 000 products of 127 · 127 and a single 1: float32, whose numbers are 128 apart there, would lose it
    depth = 100_000
    x, weight = np.full((1, depth), 127, np.int8), np.full((1, depth), 127, np.int8)
    weight[0, 7] = 126
    one = np.ones((1, 1), np.float32)
    want = np.float32(127 * 127 * depth - 127)
    with nbk.device("cpu"):
        assert nbk.int8_matmul(Int8Weight(x, one), Int8Weight(weight, one))[0, 0] == want


# ---- every path ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_quantised_rows_to_the_last_bit(device, rows, columns, depth, group_size):
    # without bias and activation nothing can be contracted; of groups, the reference rounds a fused addition twice
    x, weight = quantised(rows, depth, seed=2), quantised(columns, depth, group_size)
    out = poisoned((rows, columns), F32)
    assert nbk.int8_matmul(on_device(x), on_device(weight), out=out) is out
    found, want = to_host(out), reference.int8_matmul(x, weight)
    if group_size is None:
        np.testing.assert_array_equal(found, want)
    else:
        assert relative_error(found, np.asarray(want, np.float64)) < 1e-7
    assert relative_error(found, exact(x, weight)) < ROUNDED[F32]


@dtypes
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_floats_are_quantised_row_by_row(device, rows, columns, depth, group_size, dtype):
    x, weight = random((rows, depth), dtype, 2), quantised(columns, depth, group_size)
    given = extras(rows, columns, dtype, **FULL)
    out = poisoned((rows, columns), dtype)
    nbk.int8_matmul(to_device(x), on_device(weight), activations="int8", out=out, **place(given))
    assert relative_error(out, exact(reference.quantize_int8(x), weight, **given)) < ROUNDED[dtype]


@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 160, 256, 1000])
@pytest.mark.parametrize("rows", [3, 40, 140])
def test_group_sizes(device, rows, group_size):
    depth = 464  # a short last group of every size
    x, weight = quantised(rows, depth, seed=2), quantised(66, depth, group_size)
    out = poisoned((rows, 66), F32)
    nbk.int8_matmul(on_device(x), on_device(weight), out=out)
    assert relative_error(out, exact(x, weight)) < ROUNDED[F32]


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows", [3, 40, 132])
def test_largest_sums(device, rows, group_size):
    # every product is 2^14, the largest there is, and no sum leaves its type
    depth = 512
    x, weight = np.full((rows, depth), -128, np.int8), np.full((72, depth), -128, np.int8)
    ones = np.ones((72, 1 if group_size is None else depth // group_size), np.float32)
    given = Int8Weight(to_device(x), to_device(np.ones((rows, 1), np.float32)))
    out = nbk.int8_matmul(given, on_device(Int8Weight(weight, ones, group_size)))
    np.testing.assert_array_equal(to_host(out), np.full((rows, 72), 2**14 * depth, np.float32))


@pytest.mark.parametrize("shift", [1, 4, 16])
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows", [3, 40, 132])
def test_views(device, rows, group_size, shift):
    depth, columns = 80, 72
    x, weight = quantised(rows, depth, seed=2), quantised(columns, depth, group_size)

    def inside(array, beside):
        # the rows of a wider array, at an offset
        around = np.full((array.shape[0], array.shape[1] + 2 * shift), beside, array.dtype)
        around[:, shift : shift + array.shape[1]] = array
        return to_device(around)[:, shift : shift + array.shape[1]]

    given = [Int8Weight(inside(q.values, 99), inside(q.scales, np.nan), q.group_size) for q in (x, weight)]
    residual = random((rows, columns), BF16, 3)
    out = nbk.int8_matmul(*given, residual=inside(residual, np.nan))
    assert out.dtype == BF16
    assert relative_error(out, exact(x, weight, residual=residual)) < ROUNDED[BF16]


@pytest.mark.parametrize("quantise", [False, True])
def test_axes_that_do_not_merge(device, quantise):
    # rows of a batch at a stride of their own: one product an item; the float x is quantised item by item into one place
    x, weight = random((3, 5, 48), F32, 0), quantised(40, 48)
    wide = np.full((3, 7, 48), np.nan, np.float32)
    wide[:, 1:6] = x
    rows = reference.quantize_int8(x.reshape(15, 48))
    out = to_device(np.full((3, 6, 40), np.nan, np.float32))
    given = to_device(wide)[:, 1:6]
    if not quantise:
        given = Int8Weight(to_device(rows.values.reshape(x.shape)), to_device(rows.scales.reshape(3, 5, 1)))
    nbk.int8_matmul(given, on_device(weight), activations="int8", out=out[:, :5])
    found = to_host(out)
    np.testing.assert_array_equal(found[:, :5].reshape(15, 40), reference.int8_matmul(rows, weight))
    assert np.isnan(found[:, 5]).all()


def test_the_residual_stream_in_place(device):
    x, weight = quantised(140, 64, seed=2), quantised(72, 64)
    stream = random((140, 72), BF16, 2)
    out = to_device(stream)
    nbk.int8_matmul(on_device(x), on_device(weight), residual=out, out=out)
    assert relative_error(out, exact(x, weight, residual=stream)) < ROUNDED[BF16]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows", [3, 40, 132])
def test_nan_and_infinity_make_their_row_nan(device, rows, group_size, activation):
    x, weight = random((rows, 80), F32, 1), quantised(72, 80, group_size)
    clean = x.copy()
    clean[:2] = 0
    x[0, 79], x[1, 3], x[2] = np.nan, -np.inf, 0
    clean[2] = 0
    found = to_host(nbk.int8_matmul(to_device(x), on_device(weight), activation=activation, activations="int8"))
    assert np.isnan(found[:2]).all() and not found[2].any()
    want = exact(reference.quantize_int8(clean), weight, activation=activation)
    assert relative_error(found[3:], want[3:]) < ROUNDED[F32] if rows > 3 else True
    np.testing.assert_array_equal(
        np.isnan(reference.int8_matmul(x, weight, activation=activation, activations="int8")), np.isnan(found)
    )


@dtypes
def test_no_rows_and_no_depth(device, dtype):
    weight = on_device(quantised(72, 48))
    assert nbk.int8_matmul(to_device(np.zeros((0, 48), dtype)), weight, activations="int8").shape == (0, 72)
    empty = Int8Weight(to_device(np.zeros((72, 0), np.int8)), to_device(np.ones((72, 1), np.float32)))
    bias = random((72,), dtype, 1)
    out = nbk.int8_matmul(to_device(np.zeros((5, 0), dtype)), empty, bias=to_device(bias), activations="int8")
    np.testing.assert_array_equal(to_host(out), np.broadcast_to(bias, (5, 72)))


@pytest.mark.parametrize("group_size", [None, 32])
def test_rows_do_not_depend_on_the_batch(device, group_size):
    x, weight = random((150, 528), BF16, 1), on_device(quantised(80, 528, group_size))
    together = to_host(nbk.int8_matmul(to_device(x), weight, activations="int8"))
    for rows in (1, 17, 40):
        alone = to_host(nbk.int8_matmul(to_device(x[:rows]), weight, activations="int8"))
        np.testing.assert_array_equal(alone.view(np.uint8), together[:rows].view(np.uint8))


def test_dtypes_of_the_result(device):
    x, weight = on_device(quantised(4, 48, seed=2)), on_device(quantised(16, 48))
    assert nbk.int8_matmul(x, weight).dtype == F32
    assert nbk.int8_matmul(x, weight, dtype=BF16).dtype == BF16
    assert nbk.int8_matmul(x, weight, bias=to_device(np.ones(16, np.float16))).dtype == F16
    floats = to_device(np.ones((4, 48), BF16))
    assert nbk.int8_matmul(floats, weight, activations="int8").dtype == BF16
    assert nbk.int8_matmul(floats, weight, activations="int8", dtype=np.float32).dtype == F32


def test_cpu_and_device_agree(device):
    x, weight = random((4, 5, 48), F32, 2), quantised(16, 48)
    with nbk.device("cpu"):
        want = nbk.int8_matmul(x, weight, activations="int8")
    np.testing.assert_array_equal(to_host(nbk.int8_matmul(to_device(x), on_device(weight), activations="int8")), want)


# ---- matmul_wgmma_int8 --------------------------------------------------------------------------------------------------------

WGMMA = [
    pytest.param((130, 136, 400), BF16, None, (128, 64), 2, False, {}, id="two stages, a depth of four steps"),
    pytest.param((270, 136, 144), F16, None, (128, 64), 3, False, FULL, id="several tiles a block, edges of all kinds"),
    pytest.param((130, 132, 144), F32, None, (128, 64), 3, False, FULL, id="float32: boxes of 32 columns"),
    pytest.param((130, 136, 16), BF16, None, (128, 128), 3, False, {"bias": True}, id="less than a step"),
    pytest.param((260, 72, 272), BF16, None, (256, 64), 3, False, {"residual": True}, id="two products a consumer"),
    pytest.param((70, 200, 272), F16, None, (128, 192), 3, False, {"activation": "gelu"}, id="an odd number of boxes"),
    pytest.param((130, 520, 144), BF16, None, (128, 256), 4, False, FULL, id="the widest tile"),
    pytest.param((330, 136, 400), BF16, None, (64, 64), 3, True, FULL, id="consumers in turn"),
    pytest.param((64, 64, 144), F32, None, (64, 64), 2, True, {}, id="consumers in turn, but one tile"),
    pytest.param((130, 136, 400), F32, 128, (128, 64), 2, False, {}, id="a group a stage"),
    pytest.param((270, 200, 528), BF16, 256, (128, 128), 3, False, FULL, id="groups of two stages, edges of all kinds"),
    pytest.param((130, 136, 272), F32, 128, (64, 64), 3, True, FULL, id="groups, consumers in turn"),
    pytest.param((4090, 4104, 2000), BF16, 128, (128, 128), 6, False, FULL, id="large, groups", marks=pytest.mark.gpu),
    pytest.param((4090, 4104, 2000), BF16, None, (128, 256), 4, False, FULL, id="large", marks=pytest.mark.gpu),
    pytest.param((4090, 4104, 2000), F32, None, (128, 256), 4, False, {}, id="large, float32", marks=pytest.mark.gpu),
    pytest.param((4090, 4104, 2000), BF16, None, (128, 128), 5, True, FULL, id="large, in turn", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("shape, dtype, group_size, tile, stages, ping_pong, epilogue", WGMMA)
def test_wgmma(hopper, shape, dtype, group_size, tile, stages, ping_pong, epilogue):  # noqa: F811
    rows, columns, depth = shape
    x, weight = quantised(rows, depth, seed=2), quantised(columns, depth, group_size)
    given = extras(rows, columns, dtype, **epilogue)
    kept = [(padded(q.values)[1], to_device(np.repeat(q.scales, 2, axis=0))[::2]) for q in (x, weight)]
    bias = to_device(given.get("bias"))
    residual = padded(given["residual"]) if "residual" in given else (None, None)
    whole, out = padded(np.full((rows, columns), np.nan, dtype))
    has = Epilogue(group_size is None, "bias" in given, given["activation"], "residual" in given)
    constants = (dtype, group_size or 0, *tile, stages, ping_pong, has)
    chosen = matmul_wgmma_int8.plan_of(rows, columns, constants, 132 if rows > 1000 else 2)
    arguments = matmul_wgmma_int8.arguments(
        chosen, *kept[0], *kept[1], bias, residual[1], out, current(), band_rows=2 * tile[0]
    )
    launch(chosen, arguments, current())
    written = to_host(whole)
    assert np.isnan(written[:, columns:].astype(np.float32)).all()
    assert relative_error(np.ascontiguousarray(written[:, :columns]), exact(x, weight, **given)) < ROUNDED[dtype]


@pytest.mark.parametrize(
    "rows, columns, depth, group_size, dtype, served",
    [
        (128, 64, 16, None, BF16, True),
        (128, 64, 16, None, F32, True),
        (127, 64, 16, None, BF16, False),
        (128, 65, 16, None, BF16, False),
        (128, 66, 16, None, F32, False),  # rows of y of 264 bytes
        (128, 68, 16, None, F32, True),
        (128, 64, 24, None, BF16, False),  # rows of x of 24 bytes
        (128, 64, 64, 32, BF16, False),
        (128, 64, 64, 64, BF16, True),  # one group is one scale
        (128, 64, 256, 128, BF16, True),
        (128, 64, 256, 64, BF16, False),
    ],
)
def test_which_calls_wgmma_takes(rows, columns, depth, group_size, dtype, served):
    with nbk.device("emulator", arch="sm_90a"), emulated.observed() as plans:
        nbk.int8_matmul(
            on_device(quantised(rows, depth)), on_device(quantised(columns, depth, group_size)), dtype=dtype
        )
    factory = matmul_wgmma_int8.matmul_wgmma_int8_kernel if served else matmul_tiles_int8.matmul_tiles_int8_kernel
    assert plans[0].factory is factory


# ---- matmul_stream_int8 -------------------------------------------------------------------------------------------------------

STREAM = [
    pytest.param((1, 300, 400), F32, (1, 8), 3, {}, id="tiles in parts, each of two blocks or three"),
    pytest.param((9, 130, 1040), BF16, (1, 4), 7, FULL, id="a tile in many parts, an odd column tile"),
    pytest.param((16, 256, 272), F16, (1, 8), 2, {"bias": True}, id="a tile a block"),
    pytest.param((33, 200, 144), F32, (1, 4), 3, FULL, id="64 rows, of which half"),
    pytest.param((64, 101, 16), BF16, (1, 8), 1, {"residual": True}, id="less than a step, odd columns"),
    pytest.param((8, 300, 400), BF16, (2, 4), 5, FULL, id="two fragments a warp"),
    pytest.param((16, 14336, 4096), BF16, (1, 8), 132, FULL, id="large", marks=pytest.mark.gpu),
    pytest.param((64, 4096, 14336), F32, (1, 8), 132, {}, id="large, deep", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("shape, dtype, warps, blocks, epilogue", STREAM)
def test_stream(hopper, shape, dtype, warps, blocks, epilogue):  # noqa: F811
    rows, columns, depth = shape
    x, weight = quantised(rows, depth, seed=2), quantised(columns, depth)
    given = extras(rows, columns, dtype, **epilogue)
    kept = [(padded(q.values)[1], to_device(np.repeat(q.scales, 2, axis=1))[:, :1]) for q in (x, weight)]
    bias, residual = to_device(given.get("bias")), to_device(given.get("residual"))
    has = Epilogue(True, "bias" in given, given["activation"], "residual" in given)
    chosen = matmul_stream_int8.plan(rows, columns, depth, dtype, has, blocks, shape=warps)
    for _ in range(2):  # the second launch finds the counters as the first has left them
        out = poisoned((rows, columns), dtype)
        matmul_stream_int8.launch_plan(chosen, *kept[0], *kept[1], bias, residual, out, current(), 0)
        assert relative_error(out, exact(x, weight, **given)) < ROUNDED[dtype]


@pytest.mark.parametrize(
    "rows, columns, depth, group_size, served",
    [
        (1, 2048, 1024, None, True),
        (64, 2048, 1024, None, True),
        (65, 2048, 1024, None, False),
        (1, 2047, 1024, None, False),  # less than 2 MB
        (1, 2064, 1017, None, False),  # rows of x of 1017 bytes
        (1, 2048, 1024, 32, False),
    ],
)
def test_which_calls_stream_takes(rows, columns, depth, group_size, served):
    x, weight = quantised(rows, depth), quantised(columns, depth, group_size)
    with nbk.device("emulator", arch="sm_90a"), emulated.observed() as plans:
        out = to_host(nbk.int8_matmul(on_device(x), on_device(weight)))
    assert (plans[0].factory is matmul_stream_int8.matmul_stream_int8_kernel) == served
    assert relative_error(out, exact(x, weight)) < ROUNDED[F32]


def test_plans_fit():
    for rows in (1, 16, 17, 64, 65, 512, 4096, 70001):
        for columns in (1, 64, 1024, 14336, 50256):
            for dtype in (BF16, F32):
                chosen = matmul_stream_int8.plan(min(rows, 64), columns, 4096, dtype, Epilogue(True), 132)
                assert chosen.grid[0] <= 132 and chosen.shared_bytes <= 227 * 1024
                chosen = matmul_wgmma_int8.plan(rows, columns, dtype, 0, Epilogue(True), 132)
                assert chosen.grid[0] <= 132 and chosen.shared_bytes <= 227 * 1024
                chosen = matmul_wgmma_int8.plan(rows, columns, dtype, 128, Epilogue(), 132)
                assert chosen.constants[3] <= 128 and chosen.shared_bytes <= 227 * 1024
                for group_size in (0, 32, 128):
                    chosen = matmul_tiles_int8.plan(
                        rows, columns, dtype, group_size, True, False, Epilogue(group_size == 0), 132
                    )
                    assert chosen.constants[8] >= 3 and chosen.shared_bytes <= 99 * 1024 and chosen.block[0] <= 256


def test_cost():
    cost = int8_matmul.cost_int8(2, 30, 70, 3, BF16, residual=True)
    assert cost.bytes == 2 * (70 + 4) + 30 * (70 + 12) + 2 * 2 * (2 * 30) and cost.flops == 2 * 2 * 30 * 70
