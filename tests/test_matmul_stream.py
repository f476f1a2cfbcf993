"""matmul_stream, few rows times a weight that streams through shared memory (sm_90a): shapes, cuts, bits, the choice of it."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight
from nbkernels.kernels import matmul, matmul_stream
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.launch import emulated, memory
from nbkernels.launch.device import DeviceError, cuda_device, current
from nbkernels.launch.tensor_map import describes

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request, monkeypatch):
    """The emulator as sm_90a, or a GPU that is one; the kernel is chosen for weights of any size."""
    for threshold in ("LEAST_BYTES", "LEAST_DEPTH"):
        monkeypatch.setattr(matmul_stream, threshold, 0)
    matmul.plan.cache_clear()
    if request.param == "cuda":
        try:
            found = cuda_device()
        except DeviceError as error:
            pytest.skip(str(error))
        if found.arch != "sm_90a":
            pytest.skip(f"bulk copies of this kind are sm_90a's, this GPU is {found.arch}")
    with nbk.device(request.param) if request.param == "cuda" else nbk.device("emulator", arch=request.param):
        yield request.param
    matmul.plan.cache_clear()


def operands(rows, columns, depth, dtype, group_size):
    """x, weight on the host; group_size: "dense", None for a scale a row, or columns a scale."""
    x = random((rows, depth), dtype, rows)
    if group_size == "dense":
        return x, random((columns, depth), dtype, columns)
    return x, reference.quantize_int8(random((columns, depth), np.float32, columns), group_size=group_size)


def exact(x, weight, **epilogue):
    if isinstance(weight, Int8Weight):
        weight = reference.dequantize_int8(weight, np.float64)
    epilogue = {k: v.astype(np.float64) if isinstance(v, np.ndarray) else v for k, v in epilogue.items()}
    with np.errstate(all="ignore"):
        return reference.matmul(x.astype(np.float64), weight.astype(np.float64), **epilogue)


def product(x, weight, **options):
    """On the device, by this kernel."""
    options = {k: to_device(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    with emulated.observed() as plans:
        if isinstance(weight, Int8Weight):
            if isinstance(weight.values, np.ndarray):
                weight = Int8Weight(to_device(weight.values), to_device(weight.scales), weight.group_size)
            out = nbk.int8_matmul(to_device(x), weight, **options)
        else:
            out = nbk.matmul(to_device(x), to_device(weight), **options)
    assert all(p.factory is matmul_stream.matmul_stream_kernel for p in plans)
    return out


@pytest.mark.parametrize(
    "rows, columns, depth, dtype, group_size",
    [
        pytest.param(1, 128, 64, BF16, "dense", id="one unit"),
        pytest.param(3, 129, 328, BF16, "dense", id="odd columns, part of a step, one block has the end of a tile and a tile"),
        pytest.param(5, 700, 192, F16, "dense", id="whole tiles and cut ones"),
        pytest.param(9, 512, 64, BF16, "dense", id="whole tiles only"),
        pytest.param(8, 131, 336, BF16, None, id="a scale a row"),
        pytest.param(17, 200, 16, F16, None, id="less than a box of x"),
        pytest.param(2, 100, 5008, BF16, 32, id="a ring that goes round, a column tile that is short"),
        pytest.param(64, 130, 400, BF16, 32, id="all rows there are"),
        pytest.param(3, 257, 592, F16, 64, id="groups of 64, the last one short"),
        pytest.param(1, 20, 400, BF16, 128, id="groups of a step"),
        pytest.param(5, 130, 496, BF16, 32, id="boxes of scales, four a step"),
        pytest.param(17, 257, 496, F16, 64, id="boxes of scales, two a step"),
        pytest.param(4, 140, 672, BF16, 96, id="groups of 96, no part of a step"),
        pytest.param(4, 140, 672, BF16, 256, id="groups of two steps"),
    ],
)  # fmt: skip
def test_shapes(hopper, rows, columns, depth, dtype, group_size):
    x, weight = operands(rows, columns, depth, dtype, group_size)
    out = product(x, weight, out=poisoned((rows, columns), dtype))
    assert relative_error(out, exact(x, weight)) < BOUND[dtype]


@pytest.mark.parametrize(
    "group_size, activation, bias, residual",
    [
        ("dense", "gelu", True, False),
        ("dense", None, False, True),
        (None, "silu", True, True),
        (32, "gelu", True, True),
    ],
)
def test_epilogue(hopper, group_size, activation, bias, residual):
    # tiles that one block has, and tiles that several share
    rows, columns, depth = 6, 700, 320
    x, weight = operands(rows, columns, depth, BF16, group_size)
    given = {"activation": activation}
    if bias:
        given["bias"] = random((columns,), BF16, 3)
    if residual:
        given["residual"] = random((rows, columns), BF16, 4)
    want = exact(x, weight, **given)
    out = to_device(given["residual"]) if residual else poisoned((rows, columns), BF16)
    if residual:
        given["residual"] = out  # the residual stream: read and written in place
    assert relative_error(product(x, weight, out=out, **given), want) < BOUND[BF16]


@pytest.mark.parametrize("rows", [pytest.param(6, id="few rows"), pytest.param(64, id="all rows there are")])
@pytest.mark.parametrize("group_size", ["dense", None, 32])
def test_gated(hopper, group_size, rows):
    # tiles that one block has, and tiles that several share; a tile that is short
    columns, depth = 700, 320
    x, weight = operands(rows, columns, depth, BF16, group_size)
    given = {"activation": "silu_mul", "bias": random((columns,), BF16, 3)}
    out = product(x, weight, out=poisoned((rows, columns // 2), BF16), **given)
    assert relative_error(out, exact(x, weight, **given)) < BOUND[BF16]
    alone = to_host(product(x[:3], weight, **given))
    np.testing.assert_array_equal(alone.view(np.uint8), to_host(out)[:3].view(np.uint8))


@pytest.mark.parametrize("group_size", ["dense", None, 32])
def test_rows_do_not_depend_on_the_batch(hopper, group_size):
    x, weight = operands(64, 300, 592, BF16, group_size)
    together = to_host(product(x, weight))
    for rows in (1, 9, 17):
        alone = to_host(product(x[:rows], weight))
        np.testing.assert_array_equal(alone.view(np.uint8), together[:rows].view(np.uint8))


@pytest.mark.parametrize(
    "rows, columns, depth, group_size, shape, on_one",
    [
        pytest.param(60, 700, 192, None, (2, 4, 1), 1, id="sums of whole tiles and cut ones through memory"),
        pytest.param(10, 300, 200, "dense", (2, 4, 1), 1, id="two fragments a warp, dense"),
        pytest.param(3, 300, 336, 64, (2, 8, 1), 1, id="two fragments a warp, groups"),
        pytest.param(3, 300, 336, None, (1, 4, 1), 2, id="two blocks a multiprocessor"),
        pytest.param(3, 300, 1040, None, (1, 2, 4), 1, id="four teams"),
        pytest.param(9, 300, 912, None, (1, 4, 2), 1, id="two teams, 16 rows"),
        pytest.param(3, 130, 496, 32, (1, 2, 3), 1, id="three teams, boxes of scales"),
        pytest.param(9, 300, 400, "dense", (1, 4, 2), 1, id="two teams, dense"),
        pytest.param(3, 300, 496, 32, (1, 3, 3), 1, id="three warps side by side, boxes of scales"),
        pytest.param(9, 1000, 400, None, (1, 7, 1), 1, id="seven warps"),
        pytest.param(16, 300, 336, None, (1, 5, 1), 1, id="five warps"),
        pytest.param(3, 300, 400, "dense", (1, 6, 1), 1, id="six warps, dense"),
    ],
)
def test_other_shapes_of_a_block(hopper, rows, columns, depth, group_size, shape, on_one):
    x, weight = operands(rows, columns, depth, BF16, group_size)
    kind = {"dense": "dense", None: "rows"}.get(group_size, "groups")
    size = group_size if kind == "groups" else 0
    epilogue = Epilogue(row_scale=kind == "rows")
    device = current()
    ring_bytes = matmul_stream.RING_BYTES // on_one
    values, scales = (weight, None) if kind == "dense" else (weight.values, to_device(weight.scales))
    scale_maps = kind == "groups" and describes(scales)
    chosen = matmul_stream.plan(
        rows,
        columns,
        depth,
        BF16,
        kind,
        size,
        epilogue,
        device.sm_count,
        shape,
        ring_bytes,
        on_one,
        scale_maps=scale_maps,
    )
    out = poisoned((rows, columns), BF16)
    matmul_stream.launch_plan(chosen, to_device(x), to_device(values), scales, None, None, out, device, 0)
    assert relative_error(out, exact(x, weight)) < BOUND[BF16]


def test_nan_and_infinity_stay_in_their_row(hopper):
    x, weight = operands(3, 150, 200, BF16, "dense")
    x[0, 199] = np.nan
    x[1, 0] = np.inf
    weight[2, 0] = -np.inf
    assert relative_error(product(x, weight), exact(x, weight)) < BOUND[BF16]


def test_views(hopper):
    # rows of larger arrays: what lies around them is NaN, and no zero of a weight
    x, weight = operands(5, 140, 336, BF16, 32)
    around = np.full((5, 336 + 24), np.nan, BF16)
    around[:, 8:344] = x
    values = np.full((140, 336 + 48), 99, np.int8)
    values[:, 16:352] = weight.values
    scales = np.full((140, weight.scales.shape[1] + 3), np.nan, np.float32)
    scales[:, 1:-2] = weight.scales
    view = Int8Weight(to_device(values)[:, 16:352], to_device(scales)[:, 1:-2], 32)
    whole = to_device(np.full((5, 150), np.nan, BF16))
    with emulated.observed() as plans:
        nbk.int8_matmul(to_device(around)[:, 8:344], view, out=whole[:, 3:143])
    assert all(p.factory is matmul_stream.matmul_stream_kernel for p in plans)
    written = to_host(whole)
    assert relative_error(written[:, 3:143], exact(x, weight)) < BOUND[BF16]
    assert np.isnan(written[:, :3].astype(np.float32)).all() and np.isnan(written[:, 143:].astype(np.float32)).all()


def test_counters_are_zero_again(hopper, monkeypatch):
    kept = memory.zeros((16,), np.uint32)
    monkeypatch.setattr(memory, "counters", lambda count, stream: kept)
    x, weight = operands(3, 300, 320, BF16, "dense")
    first = to_host(product(x, weight))
    assert not to_host(kept).any()
    np.testing.assert_array_equal(to_host(product(x, weight)).view(np.uint8), first.view(np.uint8))


def test_what_no_map_describes_goes_elsewhere(hopper):
    x, weight = operands(3, 70, 328, BF16, 32)  # rows of the weight at multiples of 8 bytes
    on_device = Int8Weight(to_device(weight.values), to_device(weight.scales), 32)
    with emulated.observed() as plans:
        out = nbk.int8_matmul(to_device(x), on_device)
    assert all(p.factory is not matmul_stream.matmul_stream_kernel for p in plans)
    assert relative_error(out, exact(x, weight)) < BOUND[BF16]


ALIGNED = matmul.Alignment(fragments=True, pieces=True, pairs=True, quads=True, maps=True)
OLDER = matmul.Alignment(fragments=True, pieces=True, pairs=True, quads=True, maps=False)


@pytest.mark.parametrize(
    "rows, columns, depth, dtype, weight, aligned, streams",
    [
        (1, 4096, 4096, BF16, "rows", ALIGNED, True),
        (1, 4096, 4096, BF16, "dense", ALIGNED, True),
        (1, 49152, 576, BF16, "dense", ALIGNED, False),
        (17, 4096, 4096, BF16, "dense", ALIGNED, True),
        (64, 4096, 4096, F16, "rows", ALIGNED, True),
        (65, 4096, 4096, BF16, "rows", ALIGNED, False),
        (1, 4096, 4096, BF16, "rows", OLDER, False),
        (1, 576, 576, BF16, "rows", ALIGNED, False),
        (1, 49152, 576, BF16, "rows", ALIGNED, False),
        (1, 4096, 4096, np.dtype(np.float32), "rows", ALIGNED, False),
    ],
)
def test_plan_picks_it(rows, columns, depth, dtype, weight, aligned, streams):
    chosen = matmul.plan(rows, columns, depth, dtype, weight, 0, aligned, Epilogue(), 132)
    assert (chosen.factory is matmul_stream.matmul_stream_kernel) is streams


@pytest.mark.parametrize("weight, group_size", [("dense", 0), ("rows", 0), ("groups", 32)])
def test_every_plan_fits(weight, group_size):
    for rows in (1, 8, 9, 32, 33, 64):
        chosen = matmul_stream.plan(rows, 6144, 4096, BF16, weight, group_size, Epilogue(), 132)
        stages = chosen.constants[6]
        assert stages >= 4 and chosen.shared_bytes <= 227 * 1024 and chosen.grid[0] in (128, 132)


@pytest.mark.parametrize(
    "columns, depth, shape, blocks",
    [
        (4096, 4096, (1, 2, 4), 128),
        (6144, 4096, (1, 3, 3), 128),
        (4096, 14336, (1, 2, 4), 128),
        (28672, 4096, (1, 7, 1), 128),  # two tiles a block
        (128256, 4096, (1, 8, 1), 132),  # parts of tiles: whole ones would leave a twentieth of the time unused
    ],
)
def test_whole_tiles_where_they_keep_multiprocessors_busy(columns, depth, shape, blocks):
    chosen = matmul_stream.plan(1, columns, depth, BF16, "rows", 0, Epilogue(), 132)
    _, _, _, _, column_tiles, consumers, _, teams, *_ = chosen.constants
    assert ((column_tiles, consumers, teams), chosen.grid[0]) == (shape, blocks)


def test_parts_of_one_tile_where_that_takes_no_longer():
    # 32 tiles of 32 steps: 8 steps a block, at most, either way
    chosen = matmul_stream.plan(1, 4096, 4096, BF16, "rows", 0, Epilogue(), 132, matmul_stream.SHAPE)
    assert chosen.grid == (128, 1, 1)
