"""layer_norm and rms_norm on the kernels: every code path by its row lengths, all optional arrays, and ill-conditioned rows."""

from importlib import import_module

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import DeviceArray, Int8Weight
from nbkernels.launch import memory

pytestmark = pytest.mark.emulate_one_in(4)

FLOAT32, FLOAT16, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

# (rows, columns), and what each is there for
SHAPES = [
    pytest.param(33, 7, id="odd and short: 32 rows a block and one more"),
    pytest.param(3, 31, id="below a warp's lanes"),
    pytest.param(3, 32, id="a warp's lanes"),
    pytest.param(3, 33, id="above a warp's lanes"),
    pytest.param(6, 575, id="strided, a warp a row, two blocks"),
    pytest.param(6, 576, id="wide, a warp a row, two blocks"),
    pytest.param(1, 1024, id="the longest row of a warp"),
    pytest.param(2, 1032, id="the shortest row of a block, a tail of one chunk"),
    pytest.param(2, 4097, id="strided, a block a row"),
    pytest.param(1, 16384, id="the longest strided row in registers"),
    pytest.param(2, 16385, id="strided, tile by tile"),
    pytest.param(1, 28672, id="the longest float32 row that layer norm holds beside a residual", marks=pytest.mark.gpu),
    pytest.param(1, 32768, id="the longest wide row in registers"),
    pytest.param(2, 32776, id="wide, tile by tile, a short last tile"),
    pytest.param(2, 50257, id="a vocabulary", marks=pytest.mark.gpu),
    pytest.param(3, 262144, id="sixteen tiles", marks=pytest.mark.gpu),
    pytest.param(70001, 5, id="more rows than a grid is high", marks=pytest.mark.gpu),
    pytest.param(66000, 1100, id="more blocks than a grid is high", marks=pytest.mark.gpu),
]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
norms = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])


def float64(x):
    return None if x is None else np.asarray(x, np.float64)


def check(name, x, weight=None, bias=None, residual=None, **options):
    """Run an operation into a poisoned array and hold it, and the sum it returns, against float64."""
    parameters = (weight, bias) if name == "layer_norm" else (weight,)
    out = poisoned(x.shape, x.dtype)
    got = getattr(nbk, name)(
        to_device(x), *map(to_device, parameters), residual=to_device(residual), out=out, **options
    )
    with np.errstate(all="ignore"):
        want = getattr(reference, name)(float64(x), *map(float64, parameters), residual=float64(residual), **options)
    if residual is None:
        assert got is out
        assert relative_error(out, want) < BOUND[x.dtype]
    else:
        assert got[0] is out
        assert relative_error(out, want[0]) < BOUND[x.dtype]
        assert relative_error(got[1], want[1]) < BOUND[x.dtype]
    return to_host(out)


def operands(shape, dtype, parameter_dtype, has_weight, has_bias, has_residual):
    columns = shape[1:]
    return {
        "x": random(shape, dtype, seed=1),
        "weight": random(columns, parameter_dtype, seed=2) if has_weight else None,
        "bias": random(columns, parameter_dtype, seed=3) if has_bias else None,
        "residual": random(shape, dtype, seed=4) if has_residual else None,
    }


@norms
@dtypes
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_shapes(device, rows, columns, dtype, name):
    check(name, **operands((rows, columns), dtype, dtype, True, name == "layer_norm", True))


@norms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [33, 576, 16385])
@pytest.mark.parametrize("parameter_dtype", ["own", "float32"])
@pytest.mark.parametrize(
    "given",
    [
        pytest.param((False, False, False), id="alone"),
        pytest.param((True, False, False), id="weight"),
        pytest.param((False, True, False), id="bias"),
        pytest.param((True, True, False), id="weight-bias"),
        pytest.param((False, False, True), id="residual"),
        pytest.param((True, True, True), id="weight-bias-residual"),
    ],
)
def test_optional_arrays(device, given, parameter_dtype, columns, dtype, name):
    has_weight, has_bias, has_residual = given
    if name == "rms_norm" and has_bias:
        pytest.skip("rms_norm has no bias")
    parameter_dtype = dtype if parameter_dtype == "own" else FLOAT32
    check(name, **operands((3, columns), dtype, parameter_dtype, has_weight, has_bias, has_residual))


@norms
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps(device, eps, name):
    check(name, random((3, 100), FLOAT32, seed=5), eps=eps)


# lengths of a warp's row, a block's, and a tiled one, by both walks
CONDITIONED = [1000, 1001, 4096, 16385, 33000]


def ill_conditioned(kind, columns):
    normal = random((2, columns), np.float64, seed=6)
    return {
        "2000 + N(0, 1)": 2000 + normal,
        "1e4 + i/1000": np.stack([1e4 + np.arange(columns) * 1e-3] * 2),
        "-1e5 + N(0, 10)": -1e5 + 10 * normal,
        "1e30 N(0, 1)": 1e30 * normal,
        "±3e38": 3e38 * np.sign(normal),
        "1e-4 N(0, 1)": 1e-4 * normal,
        "0 then 1000 + N(0, 1)": np.where(np.arange(columns) < columns // 2, 0, 1000 + normal),
    }[kind].astype(np.float32)


@norms
@pytest.mark.parametrize("columns", CONDITIONED)
@pytest.mark.parametrize(
    "kind",
    [
        "2000 + N(0, 1)",
        "1e4 + i/1000",
        "-1e5 + N(0, 10)",
        "1e30 N(0, 1)",
        "±3e38",
        "1e-4 N(0, 1)",
        "0 then 1000 + N(0, 1)",
    ],
)
def test_ill_conditioned_rows(device, kind, columns, name):
    check(name, ill_conditioned(kind, columns))


def test_float16_squares_do_not_overflow(device):
    x = (8000 * np.sign(random((4, 896), np.float32, seed=7))).astype(np.float16)
    check("rms_norm", x, weight=random((896,), FLOAT16, seed=8))
    check("layer_norm", x)


def test_bfloat16_squares_do_not_overflow(device):
    x = (1e30 * random((2, 896), np.float32, seed=9)).astype(ml_dtypes.bfloat16)
    check("rms_norm", x)
    check("layer_norm", x)


@norms
@pytest.mark.parametrize("columns", [40, 16385])
def test_infinities_and_nan(device, columns, name):
    x = random((5, columns), FLOAT32, seed=10)
    x[0, columns - 1] = np.nan  # the row is NaN
    x[1, 2] = np.inf  # layer norm: the row is NaN; rms norm: that element, the others 0
    x[2, columns - 1] = -np.inf
    x[3] = 0
    check(name, x)


@norms
def test_constant_rows(device, name):
    x = np.repeat(np.float32([[7.3], [-2500.1], [0.0]]), 4096, axis=1)
    if name == "rms_norm":
        check(name, x)
    else:  # nothing but rounding is left: far below sqrt(eps)
        out = to_host(nbk.layer_norm(to_device(x), to_device(np.full(4096, 3, np.float32))))
        assert np.abs(out).max() < 1e-3


@norms
@dtypes
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(slice(128, 256), id="aligned columns of wider rows"),
        pytest.param(slice(129, 257), id="shifted by one element"),
        pytest.param(slice(8, 15), id="seven columns"),
    ],
)
def test_strides(device, part, dtype, name):
    x, residual = random((14, 384), dtype, seed=11), random((7, 400), dtype, seed=12)
    columns = part.stop - part.start
    weight = random((columns,), dtype, seed=13)
    wide_out = poisoned((7, 504), dtype)
    out = wide_out[:, 104 : 104 + columns]
    operation, meaning = getattr(nbk, name), getattr(reference, name)
    _, total = operation(to_device(x)[::2, part], to_device(weight), residual=to_device(residual)[:, part], out=out)
    want = meaning(float64(x[::2, part]), float64(weight), residual=float64(residual[:, part]))
    assert relative_error(out, want[0]) < BOUND[dtype]
    assert relative_error(total, want[1]) < BOUND[dtype]
    beside = np.delete(np.asarray(to_host(wide_out), np.float32), np.s_[104 : 104 + columns], axis=1)
    assert np.isnan(beside).all()


@norms
def test_shifted_weight(device, name):
    """A weight that does not start at a 16-byte address, of rows that do."""
    x, weight = random((3, 256), BFLOAT16, seed=14), random((257,), BFLOAT16, seed=15)
    got = getattr(nbk, name)(to_device(x), to_device(weight)[1:])
    assert relative_error(got, getattr(reference, name)(float64(x), float64(weight[1:]))) < BOUND[BFLOAT16]


@norms
@dtypes
@pytest.mark.parametrize("columns", [7, 576, 4097, 16385])
@pytest.mark.parametrize("into", ["x", "residual"])
def test_in_place(device, into, columns, dtype, name):
    x, residual = random((3, columns), dtype, seed=16), random((3, columns), dtype, seed=17)
    arrays = {"x": to_device(x), "residual": to_device(residual)}
    out, total = getattr(nbk, name)(arrays["x"], residual=arrays["residual"], out=arrays[into])
    want = getattr(reference, name)(float64(x), residual=float64(residual))
    assert out is arrays[into]
    assert relative_error(out, want[0]) < BOUND[dtype]
    assert relative_error(total, want[1]) < BOUND[dtype]
    other = "residual" if into == "x" else "x"
    np.testing.assert_array_equal(to_host(arrays[other]), residual if into == "x" else x)


def int8_poisoned(shape):
    """An Int8Weight to write into: all bytes 255, which no result has (-1 with a scale of NaN)."""
    return Int8Weight(poisoned(shape, np.dtype(np.int8)), poisoned((*shape[:-1], 1), FLOAT32))


def check_int8(name, x, weight=None, bias=None, residual=None, **options):
    """A norm quantised in its own launch: values within one step of those of the float64 norm, dequantised within half a step."""
    parameters = (weight, bias) if name == "layer_norm" else (weight,)
    out = int8_poisoned(x.shape)
    got = getattr(nbk, name)(
        to_device(x), *map(to_device, parameters), residual=to_device(residual), quantize="int8", out=out, **options
    )
    want = getattr(reference, name)(float64(x), *map(float64, parameters), residual=float64(residual), **options)
    if residual is not None:
        (got, total), (want, want_total) = got, want
        assert relative_error(total, want_total) < BOUND[x.dtype]
    assert got is out
    values, scales = to_host(out.values).astype(np.float64), to_host(out.scales)
    assert relative_error(scales, np.abs(want).max(-1, keepdims=True) / 127) < BOUND[FLOAT32]
    # half a step, and what the norm in float32 is off by
    step = scales + (scales == 0)
    assert np.abs(values - want / step).max() < 0.5 + 127 * BOUND[FLOAT32]


@norms
@dtypes
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_int8(device, rows, columns, dtype, name):
    check_int8(name, **operands((rows, columns), dtype, dtype, True, name == "layer_norm", True))


@norms
@dtypes
@pytest.mark.parametrize("columns", [33, 576, 16389])
def test_int8_alone(device, columns, dtype, name):
    check_int8(name, **operands((3, columns), dtype, None, False, False, False))


@norms
@pytest.mark.parametrize("columns", [7, 576, 4096, 4097, 16389, 40000])
@pytest.mark.parametrize("leading", [(3,), (2, 1, 2)], ids=str)
def test_int8_is_the_float32_norm_quantised(device, leading, columns, name):
    """Bit for bit, in every walk: the values that are stored are those whose maximum gave the scale."""
    given = operands((*leading, columns), FLOAT32, FLOAT32, False, False, True)
    x, residual = given["x"], given["residual"]
    x[0] *= np.float32(1e-3)
    operation = getattr(nbk, name)
    arrays = to_device(x), to_device(random((columns,), FLOAT32, seed=2))
    plain, total = operation(*arrays, residual=to_device(residual))
    quantised, same_total = operation(*arrays, residual=to_device(residual), quantize="int8")
    want = reference.quantize_int8(to_host(plain))
    assert quantised.values.shape == x.shape and quantised.scales.shape == (*leading, 1)
    assert quantised.group_size is None
    np.testing.assert_array_equal(to_host(quantised.values), want.values)
    np.testing.assert_array_equal(to_host(quantised.scales), want.scales)
    np.testing.assert_array_equal(to_host(same_total), to_host(total))


@pytest.mark.parametrize("columns", [7, 576, 4097, 16389, 40000])
@pytest.mark.parametrize("has_weight", [True, False])
def test_int8_with_a_bias(device, has_weight, columns):
    """A product and the bias are one operation or two, as the compiler likes: the float32 norm may be a rounding apart."""
    x, bias = random((3, columns), FLOAT32, seed=1), to_device(random((columns,), FLOAT32, seed=3))
    weight = to_device(random((columns,), FLOAT32, seed=2)) if has_weight else None
    want = reference.quantize_int8(to_host(nbk.layer_norm(to_device(x), weight, bias)))
    got = nbk.layer_norm(to_device(x), weight, bias, quantize="int8")
    np.testing.assert_array_max_ulp(to_host(got.scales), want.scales, 2)
    apart = np.abs(to_host(got.values).astype(int) - want.values)
    assert apart.max() <= 1 and apart.sum() <= 1 + x.size // 1000


@norms
@pytest.mark.parametrize("columns", [40, 16389])
def test_int8_infinities_nan_and_zeros(device, columns, name):
    x = random((4, columns), FLOAT32, seed=10)
    x[0, columns - 1] = np.nan
    x[1, 2] = np.inf
    x[2] = 0
    got = getattr(nbk, name)(to_device(x), quantize="int8")
    with np.errstate(all="ignore"):
        want = getattr(reference, name)(x, quantize="int8")
    np.testing.assert_array_equal(np.isnan(to_host(got.scales)), np.isnan(want.scales))
    np.testing.assert_array_equal(to_host(got.values)[:3], want.values[:3])
    assert to_host(got.scales)[2] == 0


@norms
@dtypes
@pytest.mark.parametrize("columns", [7, 576, 4097, 16389])
def test_int8_same_bits_whatever_the_batch(device, columns, dtype, name):
    x, residual = random((9, columns), dtype, seed=20), random((9, columns), dtype, seed=21)
    operation = getattr(nbk, name)
    batch, _ = operation(to_device(x), residual=to_device(residual), quantize="int8")
    for row in (0, 4, 8):
        one = slice(row, row + 1)
        alone, _ = operation(to_device(x[one]), residual=to_device(residual[one]), quantize="int8")
        np.testing.assert_array_equal(to_host(alone.values)[0], to_host(batch.values)[row])
        np.testing.assert_array_equal(to_host(alone.scales)[0], to_host(batch.scales)[row])


@norms
@pytest.mark.parametrize("first", [0, 8, 3])
def test_int8_into_a_view(device, first, name):
    """Rows of bytes that begin at 8-byte addresses, and that do not; nothing beside them is written."""
    x = random((4, 256), BFLOAT16, seed=11)
    around, scales = poisoned((4, 280), np.dtype(np.int8)), poisoned((4, 3), FLOAT32)
    out = Int8Weight(around[:, first : first + 256], scales[:, 1:2])
    assert getattr(nbk, name)(to_device(x), quantize="int8", out=out) is out
    want = getattr(nbk, name)(to_device(x), quantize="int8")
    np.testing.assert_array_equal(to_host(scales)[:, 1:2], to_host(want.scales))
    np.testing.assert_array_equal(to_host(around)[:, first : first + 256], to_host(want.values))
    assert (np.delete(to_host(around), np.s_[first : first + 256], axis=1) == -1).all()
    assert np.isnan(to_host(scales)[:, [0, 2]]).all()


@norms
def test_int8_out_shares_memory_with_nothing(device, name):
    memory_of_x = to_device(random((4, 64), FLOAT32, seed=1))
    as_bytes = DeviceArray(memory_of_x.pointer, (4, 64), (64, 1), np.dtype(np.int8), memory_of_x.owner)
    out = Int8Weight(as_bytes, poisoned((4, 1), FLOAT32))
    with pytest.raises(ValueError, match="out: shares memory with x"):
        getattr(nbk, name)(memory_of_x, quantize="int8", out=out)


@norms
@pytest.mark.parametrize("shape", [(0, 128), (3, 0)])
def test_int8_of_nothing(device, shape, name):
    y, total = getattr(nbk, name)(
        to_device(np.empty(shape, np.float32)), residual=to_device(np.empty(shape, np.float32)), quantize="int8"
    )
    assert y.values.shape == total.shape == shape
    assert to_host(y.scales).tolist() == [[0]] * shape[0]


@norms
def test_int8_cost(name):
    module = import_module(f"nbkernels.kernels.{name}")
    plain, quantised = (
        module.cost(3, 64, FLOAT16, residual=True, parameter_bytes=128, quantised=q) for q in (False, True)
    )
    assert plain.bytes == 3 * 64 * 2 * 4 + 128
    assert quantised.bytes == 3 * 64 * (2 * 3 + 1) + 3 * 4 + 128
    assert quantised.flops - plain.flops == 3 * 64 * 4


def test_statistics_are_those_of_the_unrounded_sum(device):
    """256 + N(0, 1) in bfloat16 is a multiple of 2: of the rounded sum, the norm would be off by about a half."""
    x = np.full((2, 512), 256, np.float32).astype(ml_dtypes.bfloat16)
    check("layer_norm", x, residual=random((2, 512), BFLOAT16, seed=18))


@norms
@pytest.mark.parametrize("shape", [(0, 128), (3, 0)])
def test_nothing_to_do(device, shape, name):
    x = to_device(np.empty(shape, np.float32))
    assert getattr(nbk, name)(x).shape == shape
    y, total = getattr(nbk, name)(x, residual=to_device(np.empty(shape, np.float32)))
    assert y.shape == total.shape == shape
    check(name, random((2, 8), FLOAT32, seed=19))  # and the device still works


@norms
@dtypes
@pytest.mark.parametrize("columns", [7, 576, 1032, 4097, 16385])
def test_same_bits_whatever_the_batch(device, columns, dtype, name):
    x, residual = random((11, columns), dtype, seed=20), random((11, columns), dtype, seed=21)
    operation = getattr(nbk, name)
    batch, totals = map(to_host, operation(to_device(x), residual=to_device(residual)))
    np.testing.assert_array_equal(batch, to_host(operation(to_device(x), residual=to_device(residual))[0]))
    for row in (0, 5, 10):
        one = slice(row, row + 1)
        alone, total = map(to_host, operation(to_device(x[one]), residual=to_device(residual[one])))
        np.testing.assert_array_equal(alone[0], batch[row])
        np.testing.assert_array_equal(total[0], totals[row])


@pytest.mark.gpu
@norms
def test_beyond_2_to_the_31_elements(name):
    rows, columns = 2**21 + 8, 1024
    with nbk.device("cuda"):
        x = memory.zeros((rows, columns), FLOAT16)
        last = random((8, columns), FLOAT16, seed=22)
        memory.copy_from_host(x[-8:], last)
        out = poisoned(x.shape, FLOAT16)
        getattr(nbk, name)(x, out=out)
        assert relative_error(out[-8:], getattr(reference, name)(float64(last))) < BOUND[FLOAT16]
        assert not to_host(out[2**20 : 2**20 + 8]).any()
