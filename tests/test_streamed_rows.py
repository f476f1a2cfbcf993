"""Long rows that blocks stream through shared memory (sm_90): the bits of the walk that they stand for, and the plan."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import DeviceArray
from nbkernels.kernels import layer_norm, norm, rms_norm, softmax
from nbkernels.kernels.rows import plan_streamed, shared_bytes, streaming
from nbkernels.launch.device import Device
from nbkernels.launch.launcher import Plan, launch

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
THREADS, CHUNKS = 64, 2


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request):
    chosen = nbk.device("cuda") if request.param == "cuda" else nbk.device("emulator", arch="sm_90a")
    with chosen as on:
        if on.arch != "sm_90a":
            pytest.skip("bulk copies need sm_90")
        yield on


def held_and_streamed(held, streamed, rows, dtype, options, arrays, blocks, slots, walk="wide", kept=True):
    """The Plans of the same part of a row a thread, one with a block a row and one with ``blocks`` that stay."""
    of_held = options if streamed is softmax.streamed_softmax_kernel else (*options, False)
    constants = (dtype, walk, THREADS, CHUNKS, 1, 1, 1, *of_held)
    part = (THREADS, CHUNKS)
    plan = plan_streamed(streamed, rows, dtype, walk, part, (*options, kept), arrays, blocks, 0, slots, 1)
    assert plan.constants[5] == slots and plan.grid[0] == min(rows, blocks)
    shared = shared_bytes(dtype, walk, THREADS, CHUNKS, 1, arrays)
    return Plan(held, constants, (rows, 1, 1), (THREADS, 1, 1), shared), plan


def columns_of(dtype):
    """A length that leaves part of the last chunk empty."""
    return (THREADS * CHUNKS - 19) * (16 // dtype.itemsize)


def view(array, dtype):
    """The array on the device as columns of wider rows, a multiple of 16 bytes apart."""
    rows, columns = array.shape
    wider = np.full((rows, columns + 32), np.nan, np.float32).astype(dtype)
    wider[:, 16 : 16 + columns] = array
    return to_device(wider)[:, 16 : 16 + columns]


def bits(array):
    found = np.ascontiguousarray(to_host(array))
    return found.view(np.uint8)


# rows, blocks, slots: 11 rows turn a ring of three, two and one slots more than once
RINGS = [
    pytest.param(11, 2, 3, id="the ring turns"),
    pytest.param(11, 3, 2, id="two slots, blocks of unequal numbers of rows"),
    pytest.param(5, 2, 1, id="one slot"),
    pytest.param(1, 4, 3, id="one row"),
    pytest.param(2, 4, 3, id="fewer rows than blocks"),
]
rings = pytest.mark.parametrize(("rows", "blocks", "slots"), RINGS)
dtypes = pytest.mark.parametrize("dtype", [BF16, F32], ids=str)


@dtypes
@rings
def test_softmax_has_the_same_bits(hopper, rows, blocks, slots, dtype):
    columns = columns_of(dtype)
    x = random((rows, columns), F32, seed=1)
    x[0, :40] = -np.inf
    x[-1, 7] = np.nan if rows > 1 else 3
    x = view(x.astype(dtype), dtype)
    plans = held_and_streamed(
        softmax.softmax_kernel, softmax.streamed_softmax_kernel, rows, dtype, (), 1, blocks, slots
    )
    results = []
    for plan in plans:
        y = poisoned((rows, columns), dtype)
        launch(plan, (x.pointer, y.pointer, rows, columns, x.strides[0], y.strides[0], 0.7), hopper)
        results.append(bits(y))
    np.testing.assert_array_equal(*results)


def norm_bits(hopper, plans, rows, columns, dtype, residual, vectors, quantised=False):
    """The bits of all results by each plan. A row of huge values is summed again, and one of NaN gives NaN."""
    x = random((rows, columns), F32, seed=2)
    if rows > 2:
        x[1] *= 1e25
        x[2, 5] = np.nan
    x = view(x.astype(dtype), dtype)
    other = view(random((rows, columns), dtype, seed=3), dtype) if residual else None
    parameters = [to_device(1 + random((columns,), dtype, seed=4 + n)) for n in range(vectors)]
    results = []
    for plan in plans:
        total = poisoned((rows, columns), dtype) if residual else None
        scales = to_device(np.full((rows, 1), np.nan, np.float32)) if quantised else None
        y = to_device(np.full((rows, columns), 99, np.int8)) if quantised else poisoned((rows, columns), dtype)
        launch(plan, norm.arguments(x, parameters, other, y, scales, total, 1e-5), hopper)
        results.append([bits(r) for r in (y, total, scales) if r is not None])
    return results


@dtypes
@rings
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm_has_the_same_bits(hopper, rows, blocks, slots, residual, dtype):
    columns = columns_of(dtype)
    kernels = rms_norm.rms_norm_kernel, rms_norm.streamed_rms_norm_kernel
    plans = held_and_streamed(*kernels, rows, dtype, (dtype, residual, False), 1 + residual, blocks, slots)
    for held, streamed in zip(*norm_bits(hopper, plans, rows, columns, dtype, residual, 1), strict=True):
        np.testing.assert_array_equal(held, streamed)


@dtypes
@rings
@pytest.mark.parametrize("residual", [False, True])
def test_layer_norm_has_the_same_bits(hopper, rows, blocks, slots, residual, dtype):
    columns = columns_of(dtype)
    kernels = layer_norm.layer_norm_kernel, layer_norm.streamed_layer_norm_kernel
    options = (dtype, True, True, residual, False)
    plans = held_and_streamed(*kernels, rows, dtype, options, 1 + residual, blocks, slots)
    for held, streamed in zip(*norm_bits(hopper, plans, rows, columns, dtype, residual, 2), strict=True):
        np.testing.assert_array_equal(held, streamed)


def test_int8_has_the_same_bits(hopper):
    columns = columns_of(BF16)
    kernels = rms_norm.rms_norm_kernel, rms_norm.streamed_rms_norm_kernel
    plans = held_and_streamed(*kernels, 7, BF16, (BF16, True, True), 2, 2, 2)
    for held, streamed in zip(*norm_bits(hopper, plans, 7, columns, BF16, True, 1, True), strict=True):
        np.testing.assert_array_equal(held, streamed)


# ---- rows that begin anywhere -------------------------------------------------------------------------------------------

ODD_RINGS = [RINGS[n] for n in (0, 1, 3, 4)]
odd_rings = pytest.mark.parametrize(("rows", "blocks", "slots"), ODD_RINGS)


def odd_columns(dtype):
    """A length that no piece's elements nor two divide: each row begins elsewhere, and the second chunk is partial."""
    return THREADS * CHUNKS * (16 // dtype.itemsize) - 13


def shifted(array, dtype, gap):
    """(the array on the device, ``gap`` NaN before each of its rows, all of this in one row)."""
    rows, columns = array.shape
    wider = np.full((rows, gap + columns), np.nan, np.float32).astype(dtype)
    wider[:, gap:] = array
    whole = to_device(wider.reshape(-1))
    pointer = whole.pointer + gap * dtype.itemsize
    return DeviceArray(pointer, (rows, columns), (gap + columns, 1), dtype, whole.owner), whole


@dtypes
@odd_rings
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("operation", ["softmax", "rms_norm", "rms_norm, residual", "layer_norm"])
def test_odd_rows_have_the_same_bits(hopper, rows, blocks, slots, gap, operation, dtype):
    columns = odd_columns(dtype)
    x = random((rows, columns), F32, seed=1)
    x[0, :40] = -np.inf if operation == "softmax" else 0
    x, _ = shifted(x.astype(dtype), dtype, gap)
    name, _, residual = operation.partition(", ")
    kernels = {"softmax": softmax, "rms_norm": rms_norm, "layer_norm": layer_norm}[name]
    options = {"softmax": (), "rms_norm": (dtype, bool(residual), False)}.get(name, (dtype, True, True, False, False))
    factories = getattr(kernels, f"{name}_kernel"), getattr(kernels, f"streamed_{name}_kernel")
    arrays = 2 if residual else 1
    plans = held_and_streamed(*factories, rows, dtype, options, arrays, blocks, max(slots, 2), "staged", kept=gap == 0)
    other = shifted(random((rows, columns), dtype, seed=3), dtype, gap)[0] if residual else None
    parameters = [to_device(1 + random((columns,), dtype, seed=4 + n)) for n in range(2)]
    results = []
    for plan in plans:
        nothing = np.full((rows, columns), np.nan, np.float32).astype(dtype)
        (y, around), (total, around_total) = shifted(nothing, dtype, gap), shifted(nothing, dtype, gap)
        if name == "softmax":
            arguments = x.pointer, y.pointer, rows, columns, x.strides[0], y.strides[0], 0.7
        else:
            given = parameters[: 2 if name == "layer_norm" else 1]
            arguments = norm.arguments(x, given, other, y, None, total if residual else None, 1e-5)
        launch(plan, arguments, hopper)
        results.append([bits(y), bits(total)])
        for written in (around, around_total) if residual else (around,):
            written = to_host(written).astype(np.float32).reshape(rows, -1)
            assert np.isfinite(written[:, gap:]).all() and np.isnan(written[:, :gap]).all()
    for held, streamed in zip(*results, strict=True):
        np.testing.assert_array_equal(held, streamed)


# ---- the operations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 16392), pytest.param((700, 32768), marks=pytest.mark.gpu)])
def test_in_place_and_whatever_the_batch(hopper, shape):
    x = random(shape, BF16, seed=6)
    y = to_device(x)
    nbk.softmax(y, out=y)
    assert relative_error(y[:9], reference.softmax(x[:9].astype(np.float64))) < BOUND[BF16]
    last = to_device(x[-1:])
    nbk.softmax(last, out=last)
    np.testing.assert_array_equal(bits(last), bits(y[-1:]))


# ---- the plan, without a device ------------------------------------------------------------------------------------------


PLANS = {
    "softmax": lambda rows, columns, dtype, walk, sms: softmax.plan(rows, columns, dtype, walk, True, sms),
    "rms_norm": lambda rows, columns, dtype, walk, sms: rms_norm.plan(
        rows, columns, dtype, walk, dtype, False, True, False, sms
    ),
    "rms_norm, residual": lambda rows, columns, dtype, walk, sms: rms_norm.plan(
        rows, columns, dtype, walk, dtype, True, True, False, sms
    ),
    "layer_norm": lambda rows, columns, dtype, walk, sms: layer_norm.plan(
        rows, columns, dtype, walk, dtype, True, True, False, True, False, sms
    ),
}
operations = pytest.mark.parametrize("operation", PLANS)


def is_streamed(plan):
    return plan.factory.__name__.startswith("streamed_")


@operations
def test_long_rows_alone_are_streamed(operation):
    def streamed(rows, columns, dtype=BF16, walk="staged", sms=132):
        return is_streamed(PLANS[operation](rows, columns, dtype, walk, sms))

    assert streamed(1000, 8191) and streamed(1, 4097) and streamed(1000, 2049, F32)
    assert not streamed(1000, 1001), "too short"
    assert not streamed(1000, 8191, sms=0), "a GPU without bulk copies"
    assert not streamed(1000, 131071), "longer than a block's registers"
    assert not streamed(1000, 8191, walk="strided")
    wide = operation == "softmax"
    assert streamed(1000, 32768, walk="wide") == wide and not streamed(1000, 16384, walk="wide")


@dtypes
@operations
@pytest.mark.parametrize("columns", [4097, 8191, 16383, 20000, 32768, 65536])
def test_the_grid_fits_on_the_gpu_and_the_kernel_is_the_same_for_all_batches(operation, columns, dtype):
    walk = "staged" if columns % 2 else "wide"
    plans = [PLANS[operation](rows, columns, dtype, walk, 132) for rows in (1, 7, 132, 100000)]
    plans = [p for p in plans if is_streamed(p)]
    assert len({p.constants for p in plans}) <= 1
    for p in plans:
        _, of, threads, chunks, kept, slots = p.constants[:6]
        assert of == walk and slots >= (2 if walk == "staged" else 1)
        assert threads * chunks * (16 // dtype.itemsize) >= columns
        assert p.grid[0] <= kept * 132
        assert p.shared_bytes >= slots * threads * chunks * 16 * (2 if "residual" in operation else 1)
        assert kept * (p.shared_bytes + 1024) <= 228 * 1024 and p.shared_bytes <= 227 * 1024


@operations
@pytest.mark.parametrize("columns", [4097, 8191, 16383])
def test_odd_rows_are_held_as_they_are_streamed(operation, columns):
    """Another alignment of the results than of the rows, and the row is not streamed: with the same threads and chunks."""
    on_its_way, apart = (PLANS[operation](100, columns, BF16, "staged", n).constants for n in (132, 0))
    assert on_its_way[1:4] == apart[1:4]


def test_what_may_be_streamed():
    def view(pointer, columns, stride, dtype=BF16):
        return DeviceArray(pointer, (8, columns), (stride, 1), dtype, None)

    hopper, ada = (Device("cuda", "a GPU", arch, sm_count=132) for arch in ("sm_90a", "sm_89"))
    x, y = view(1024, 8191, 8191), view(1 << 20, 8191, 8191)
    assert streaming(hopper, "staged", (x, None, y)) == 132 and streaming(ada, "staged", (x, None, y)) == 0
    assert streaming(hopper, "wide", (x, x)) == 132, "in place"
    assert streaming(hopper, "staged", (x, view(1 << 20, 8191, 8199))) == 132, "a stride that shifts rows alike"
    assert streaming(hopper, "staged", (x, x)) == 0, "in place: a row's pieces are written while its neighbour is read"
    assert streaming(hopper, "staged", (x, view((1 << 20) + 2, 8191, 8191))) == 0, "the address"
    assert streaming(hopper, "staged", (x, view(1 << 20, 8191, 8192))) == 0, "the stride"
    assert streaming(hopper, "staged", (view(1024, 8191, 0), view(1 << 20, 8191, 8192))) == 0, "rows within each other"
