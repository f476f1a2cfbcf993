"""matmul_wgmma (sm_90a): tile shapes, edges, consumers together and in turn, weights, every epilogue; and when it is chosen."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight
from nbkernels.kernels import matmul_wgmma
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.launch import emulated
from nbkernels.launch.device import DeviceError, cuda_device, current
from nbkernels.launch.launcher import launch

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request):
    if request.param == "cuda":
        try:
            found = cuda_device()
        except DeviceError as error:
            pytest.skip(str(error))
        if found.arch != "sm_90a":
            pytest.skip(f"wgmma is an instruction of sm_90a, this GPU is {found.arch}")
        with nbk.device("cuda"):
            yield
    else:
        with nbk.device("emulator", arch="sm_90a"):
            yield


def padded(array):
    """On the device, as part of an array whose rows are 16 bytes longer or more, full of NaN or 99."""
    row = -(-array.shape[1] * array.itemsize // 16) * 16 // array.itemsize + 16 // array.itemsize
    around = np.full((array.shape[0], row), 99 if array.dtype == np.int8 else np.nan, array.dtype)
    around[:, : array.shape[1]] = array
    whole = to_device(around)
    return whole, whole[:, : array.shape[1]]


def product(
    shape, dtype, weight, group_size, tile, stages, ping_pong, bias=False, activation=None, residual=False, blocks=2
):
    """The relative error of one launch with these constants; nothing is written beside the result."""
    rows, columns, depth = shape
    x, dense = random((rows, depth), dtype, 0), random((columns, depth), np.float32, 1).astype(dtype)
    scales, stored, exact = None, dense, np.asarray(dense, np.float64)
    if weight != "dense":
        quantised = reference.quantize_int8(np.asarray(dense, np.float32), group_size=group_size or None)
        stored, exact = quantised.values, reference.dequantize_int8(quantised, np.float64)
        scales = to_device(quantised.scales)
    added = random((columns,), dtype, 2) if bias else None
    before = random((rows, columns), dtype, 3) if residual else None
    kept = [padded(x), padded(stored), padded(before) if residual else (None, None), to_device(added)]
    out_columns = columns // 2 if activation == "silu_mul" else columns
    whole, out = padded(np.full((rows, out_columns), np.nan, dtype))
    epilogue = Epilogue(weight == "rows", bias, activation, residual)
    chosen = matmul_wgmma.plan_of(
        rows, columns, (dtype, weight, group_size, *tile, stages, ping_pong, epilogue), blocks
    )
    arguments = matmul_wgmma.arguments(
        chosen, kept[0][1], kept[1][1], scales, kept[3], kept[2][1], out, current(), band_rows=2 * tile[0]
    )
    launch(chosen, arguments, current())
    written = to_host(whole)
    assert np.isnan(written[:, out_columns:].astype(np.float32)).all()
    wide = [None if a is None else np.asarray(a, np.float64) for a in (x, added, before)]
    want = reference.matmul(wide[0], exact, bias=wide[1], residual=wide[2], activation=activation)
    return relative_error(np.ascontiguousarray(written[:, :out_columns]), want)


GATED = {"bias": True, "activation": "silu_mul"}
FULL = {"bias": True, "activation": "gelu", "residual": True}
DENSE = [
    pytest.param((130, 136, 200), (128, 64), 2, False, {}, id="two stages, a depth of four steps"),
    pytest.param((270, 136, 72), (128, 64), 3, False, FULL, id="several tiles a block, edges of all kinds"),
    pytest.param((130, 136, 8), (128, 128), 3, False, {"bias": True}, id="less than a step"),
    pytest.param((260, 72, 136), (256, 64), 3, False, {"residual": True}, id="two products of 64 rows a consumer"),
    pytest.param((70, 200, 136), (128, 192), 3, False, {"activation": "silu"}, id="an odd number of boxes"),
    pytest.param((330, 136, 200), (64, 64), 3, True, FULL, id="consumers in turn"),
    pytest.param((64, 64, 72), (64, 64), 2, True, {}, id="consumers in turn, but one tile"),
    pytest.param((270, 144, 72), (128, 64), 3, False, GATED, id="gated, several tiles a block, edges of all kinds"),
    pytest.param((70, 208, 136), (128, 192), 3, False, GATED, id="gated, an odd number of boxes"),
    pytest.param((330, 144, 72), (64, 64), 3, True, GATED, id="gated, consumers in turn"),
    pytest.param((330, 136, 200), (128, 64), 3, True, {}, id="consumers in turn, two products of 64 rows each"),
    pytest.param((4090, 4104, 1000), (128, 256), 4, False, FULL, id="large", marks=pytest.mark.gpu),
    pytest.param((4090, 4104, 1000), (128, 128), 5, True, FULL, id="large, in turn", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("shape, tile, stages, ping_pong, epilogue", DENSE)
def test_dense(hopper, shape, tile, stages, ping_pong, epilogue, dtype):
    large = shape[0] > 1000
    if not large and dtype == F16 and ping_pong:
        pytest.skip("float16 differs in one instruction")
    error = product(shape, dtype, "dense", 0, tile, stages, ping_pong, **epilogue, blocks=132 if large else 2)
    assert error < BOUND[dtype]


INT8 = [
    pytest.param((70, 264, 136), "rows", 0, (64, 128), 3, False, BF16, {}, id="a scale a row"),
    pytest.param((70, 136, 72), "rows", 0, (64, 128), 3, False, F16, FULL, id="a scale a row, edges of all kinds"),
    pytest.param((130, 136, 328), "groups", 32, (64, 128), 3, False, BF16, FULL, id="groups of half a step"),
    pytest.param((70, 136, 328), "groups", 96, (64, 128), 2, False, BF16, {}, id="groups of one step and a half"),
    pytest.param((70, 272, 72), "rows", 0, (64, 128), 3, False, F16, GATED, id="gated, a scale a row"),
    pytest.param((130, 144, 72), "groups", 32, (64, 128), 3, False, BF16, GATED, id="gated, groups"),
    pytest.param((130, 200, 328), "groups", 128, (64, 64), 3, True, BF16, {"bias": True}, id="consumers in turn"),
    pytest.param((200, 136, 72), "rows", 0, (192, 128), 3, False, BF16, {}, id="an odd number of boxes"),
    pytest.param((4090, 4104, 1000), "rows", 0, (256, 128), 4, False, F16, FULL, id="large", marks=pytest.mark.gpu),
    pytest.param((4090, 4104, 1000), "groups", 32, (256, 128), 4, False, BF16, FULL, id="large", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("shape, weight, group_size, tile, stages, ping_pong, dtype, epilogue", INT8)
def test_int8(hopper, shape, weight, group_size, tile, stages, ping_pong, dtype, epilogue):
    blocks = 132 if shape[0] > 1000 else 2
    error = product(shape, dtype, weight, group_size, tile, stages, ping_pong, **epilogue, blocks=blocks)
    assert error < BOUND[dtype]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_byte_is_exact(hopper, dtype):
    # a weight of single ones, times every int8 in turn: the result is that number
    weight = np.zeros((256, 64), np.int8)
    weight[:, 37] = np.arange(-128, 128)
    x = np.zeros((128, 64), dtype)
    x[:, 37] = 1
    out = poisoned((128, 256), dtype)
    nbk.int8_matmul(
        to_device(x), Int8Weight(to_device(weight), to_device(np.ones((256, 1), np.float32)), None), out=out
    )
    np.testing.assert_array_equal(to_host(out).astype(np.int32), np.broadcast_to(weight[:, 37], (128, 256)))


def test_nan_and_infinity_stay_in_their_row(hopper):
    # the last column lies beside the padding; what is beyond the edges of a tile is read as zeros
    x, weight = random((140, 72), BF16, 0), random((72, 72), BF16, 1)
    x[0, 71], x[1, 0], weight[2, 0] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        want = reference.matmul(np.asarray(x, np.float64), np.asarray(weight, np.float64))
    assert relative_error(nbk.matmul(to_device(x), to_device(weight)), want) < BOUND[BF16]


def test_the_residual_stream_in_place(hopper):
    x, weight, stream = random((260, 72), BF16, 0), random((200, 72), BF16, 1), random((260, 200), BF16, 2)
    out = to_device(stream)
    nbk.matmul(to_device(x), to_device(weight), residual=out, out=out)
    wide = [np.asarray(a, np.float64) for a in (x, weight, stream)]
    assert relative_error(out, reference.matmul(wide[0], wide[1], residual=wide[2])) < BOUND[BF16]


@pytest.mark.parametrize(
    "rows, columns, depth, dtype, served",
    [
        (128, 64, 8, BF16, True),
        (127, 64, 8, BF16, False),
        (128, 65, 8, BF16, False),  # pairs of columns
        (128, 62, 8, F16, False),  # rows of y of 124 bytes
        (128, 68, 8, F16, False),  # and of 136
        (128, 64, 9, F16, False),  # rows of x of 18 bytes
        (128, 64, 8, np.dtype(np.float32), False),
    ],
)
def test_which_calls_it_takes(rows, columns, depth, dtype, served):
    with nbk.device("emulator", arch="sm_90a"), emulated.observed() as plans:
        nbk.matmul(to_device(np.ones((rows, depth), dtype)), to_device(np.ones((columns, depth), dtype)))
    assert (plans[0].factory is matmul_wgmma.matmul_wgmma_kernel) == served


def test_groups_of_float16_stay_exact():
    # a weight times its scale may leave float16's range
    x, weight = np.ones((128, 64), F16), Int8Weight(np.ones((64, 64), np.int8), np.ones((64, 2), np.float32), 32)
    with nbk.device("emulator", arch="sm_90a"), emulated.observed() as plans:
        nbk.int8_matmul(to_device(x), Int8Weight(to_device(weight.values), to_device(weight.scales), 32))
    assert plans[0].factory is not matmul_wgmma.matmul_wgmma_kernel


def test_plans_fit():
    for rows in (128, 512, 4096, 70001):
        for columns in (64, 1024, 14336, 50256):
            for weight, group_size in (("dense", 0), ("rows", 0), ("groups", 32)):
                chosen = matmul_wgmma.plan(rows, columns, BF16, weight, group_size, Epilogue(weight == "rows"), 132)
                assert chosen.grid[0] <= 132 and chosen.shared_bytes <= 227 * 1024
