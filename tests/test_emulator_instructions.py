"""Instructions of the emulator one by one, against their definition in the PTX ISA reference, computed with Python's numbers."""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nbkernels import emulator

LETTER = {"u16": "h", "u32": "r", "u64": "l", "f32": "f", "f64": "d", "pred": "p"}
REGISTER = {"u16": "b16", "u32": "b32", "u64": "b64", "f32": "f32", "f64": "f64", "pred": "pred"}
DTYPE = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f32": np.float32, "f64": np.float64, "pred": np.uint32}


def execute(code, inputs, results, lanes=None):
    """Run PTX code over as many lanes as the inputs are long.

    code uses $0, $1, … for the results, then the inputs, as inline assembly does. inputs: arrays of the dtypes above.
    results: types ("u32", "f32", "pred", …). Returns a list of arrays.
    """
    lanes = len(inputs[0]) if inputs else lanes
    kinds = [*results, *(next(k for k, d in DTYPE.items() if d == x.dtype.type) for x in inputs)]
    lines = [".version 8.5", ".target sm_90a", ".address_size 64"]
    parameters = ", ".join(f".param .u64 p{n}" for n in range(len(kinds)))
    lines.append(f".visible .entry program({parameters}, .param .u32 count) {{")
    lines.append(".reg .b64 %address<3>; .reg .b32 %thread, %n, %word; .reg .pred %outside;")
    for n, kind in enumerate(kinds):
        lines.append(f".reg .{REGISTER[kind]} %v{n};")
    lines += [
        "mov.u32 %thread, %ctaid.x; mov.u32 %n, %ntid.x; mul.lo.u32 %thread, %thread, %n;",
        "mov.u32 %n, %tid.x; add.u32 %thread, %thread, %n;",
        "ld.param.u32 %n, [count]; setp.ge.u32 %outside, %thread, %n; @%outside bra $done;",
    ]
    for n, kind in enumerate(kinds[len(results) :], len(results)):
        size = np.dtype(DTYPE[kind]).itemsize
        lines += [
            f"ld.param.u64 %address1, [p{n}]; cvta.to.global.u64 %address1, %address1;",
            f"mad.wide.u32 %address2, %thread, {size}, %address1; ld.global.b{8 * size} %v{n}, [%address2];",
        ]
    for n in reversed(range(len(kinds))):
        code = code.replace(f"${n}", f"%v{n}")
    lines.append(code)
    for n, kind in enumerate(results):
        size = np.dtype(DTYPE[kind]).itemsize
        lines.append(f"ld.param.u64 %address1, [p{n}]; mad.wide.u32 %address2, %thread, {size}, %address1;")
        if kind == "pred":
            lines.append(f"selp.u32 %word, 1, 0, %v{n}; st.global.u32 [%address2], %word;")
        else:
            lines.append(f"st.global.b{8 * size} [%address2], %v{n};")
    lines += ["$done: ret;", "}"]
    outputs = [np.zeros(lanes, DTYPE[kind]) for kind in results]
    emulator.run_ptx("\n".join(lines), None, -(-lanes // 64), 64, [*outputs, *inputs, lanes])
    return outputs


def rng():
    return np.random.default_rng(11)


def words(count, kind="u32"):
    """Random integers with the ends of the range and small numbers among them."""
    dtype = DTYPE[kind]
    bits = 8 * np.dtype(dtype).itemsize
    special = [0, 1, 2, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 31, 32, 33]
    values = rng().integers(0, 2**bits, count, dtype=dtype)
    values[: len(special)] = special
    return rng().permutation(values)


def signed(value, bits=32):
    value = int(value)
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def truncated(a, b):
    """C's quotient."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


M32, M64 = 2**32 - 1, 2**64 - 1

BINARY = {
    "add.u32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "div.u32": lambda a, b: a // b if b else M32,
    "div.s32": lambda a, b: truncated(signed(a), signed(b)) if b else M32,
    "rem.u32": lambda a, b: a % b if b else 2**32 - 1,
    "rem.s32": lambda a, b: signed(a) - truncated(signed(a), signed(b)) * signed(b) if b else -1,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": lambda a, b: max(a, b),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "add.sat.s32": lambda a, b: min(max(signed(a) + signed(b), -(2**31)), 2**31 - 1),
    "bmsk.clamp.b32": lambda a, b: ((1 << min(b, 32)) - 1) << a if a < 32 else 0,
}


@pytest.mark.parametrize("name", BINARY)
def test_integer_instructions_of_two_words(name):
    a, b = words(300), rng().permutation(words(300))
    (got,) = execute(f"{name} $0, $1, $2;", [a, b], ["u32"])
    want = [BINARY[name](int(x), int(y)) & M32 for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


WIDE = {
    "add.u64": lambda a, b: a + b,
    "sub.u64": lambda a, b: a - b,
    "mul.lo.u64": lambda a, b: a * b,
    "mul.hi.u64": lambda a, b: a * b >> 64,
    "mul.hi.s64": lambda a, b: signed(a, 64) * signed(b, 64) >> 64,
    "div.s64": lambda a, b: truncated(signed(a, 64), signed(b, 64)) if b else M64,
    "rem.u64": lambda a, b: a % b if b else 2**64 - 1,
    "max.s64": lambda a, b: max(signed(a, 64), signed(b, 64)),
}


@pytest.mark.parametrize("name", WIDE)
def test_integer_instructions_of_two_double_words(name):
    a, b = words(300, "u64"), rng().permutation(words(300, "u64"))
    (got,) = execute(f"{name} $0, $1, $2;", [a, b], ["u64"])
    want = [WIDE[name](int(x), int(y)) & M64 for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got, np.array(want, np.uint64))


@pytest.mark.parametrize("name", ["shl.b64", "shr.u64", "shr.s64"])
def test_shifts_of_double_words(name):
    a, b = words(200, "u64"), rng().integers(0, 80, 200, dtype=np.uint32)
    (got,) = execute(f"{name} $0, $1, $2;", [a, b], ["u64"])

    def want(x, n):
        if name == "shl.b64":
            return x << n if n < 64 else 0
        return (signed(x, 64) >> min(n, 63)) if name == "shr.s64" else x >> n

    expected = [want(int(x), int(n)) & M64 for x, n in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected, np.uint64))


UNARY = {
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "not.b32": lambda a: ~a,
    "cnot.b32": lambda a: int(a == 0),
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(signed(a)),
    "bfind.u32": lambda a: a.bit_length() - 1,
    "bfind.s32": lambda a: (signed(a) if signed(a) >= 0 else ~signed(a)).bit_length() - 1,
}


@pytest.mark.parametrize("name", UNARY)
def test_integer_instructions_of_one_word(name):
    a = words(200)
    (got,) = execute(f"{name} $0, $1;", [a], ["u32"])
    np.testing.assert_array_equal(got, np.array([UNARY[name](int(x)) & M32 for x in a], np.uint32))


def test_products_with_a_wide_sum():
    a, b = words(200), rng().permutation(words(200))
    c = words(200, "u64")
    (wide,) = execute("mad.wide.u32 $0, $1, $2, $3;", [a, b, c], ["u64"])
    (narrow,) = execute("mad.lo.s32 $0, $1, $2, 77;", [a, b], ["u32"])
    (product,) = execute("mul.wide.s32 $0, $1, -3;", [a], ["u64"])
    each = list(zip(map(int, a), map(int, b), map(int, c), strict=True))
    np.testing.assert_array_equal(wide, np.array([(x * y + z) & M64 for x, y, z in each], np.uint64))
    np.testing.assert_array_equal(narrow, np.array([(x * y + 77) & M32 for x, y, _ in each], np.uint32))
    np.testing.assert_array_equal(product, np.array([signed(x) * -3 & M64 for x, _, _ in each], np.uint64))


def test_sums_with_carry():
    a, b, c, d = (rng().permutation(words(200)) for _ in range(4))
    low, high = execute("add.cc.u32 $0, $2, $4; addc.u32 $1, $3, $5;", [a, b, c, d], ["u32", "u32"])
    got = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    x, y = (p.astype(np.uint64) | q.astype(np.uint64) << np.uint64(32) for p, q in ((a, b), (c, d)))
    np.testing.assert_array_equal(got, x + y)
    low, high = execute("sub.cc.u32 $0, $2, $4; subc.u32 $1, $3, $5;", [a, b, c, d], ["u32", "u32"])
    np.testing.assert_array_equal(low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), x - y)


def test_bit_fields():
    a, b = words(300), rng().permutation(words(300))
    position, length = (rng().integers(0, 40, 300, dtype=np.uint32) for _ in range(2))
    (unsigned_field,) = execute("bfe.u32 $0, $1, $2, $3;", [a, position, length], ["u32"])
    (signed_field,) = execute("bfe.s32 $0, $1, $2, $3;", [a, position, length], ["u32"])
    (inserted,) = execute("bfi.b32 $0, $1, $2, $3, $4;", [a, b, position, length], ["u32"])

    def field(value, at, count, with_sign):
        # the definition in the ISA reference, bit by bit
        sign = 0
        if with_sign and count:
            sign = value >> min(at + count - 1, 31) & 1
        result = 0
        for bit in range(32):
            taken = value >> (at + bit) & 1 if bit < count and at + bit <= 31 else sign
            result |= taken << bit
        return result

    def insert(value, into, at, count):
        for bit in range(count):
            if at + bit <= 31:
                into = into & ~(1 << (at + bit)) | (value >> bit & 1) << (at + bit)
        return into

    each = list(zip(map(int, a), map(int, b), map(int, position), map(int, length), strict=True))
    np.testing.assert_array_equal(unsigned_field, np.array([field(x, p, n, False) for x, _, p, n in each], np.uint32))
    np.testing.assert_array_equal(signed_field, np.array([field(x, p, n, True) for x, _, p, n in each], np.uint32))
    np.testing.assert_array_equal(inserted, np.array([insert(x, y, p, n) for x, y, p, n in each], np.uint32))


def test_byte_permutation_and_logic_of_three():
    a, b, s = (rng().permutation(words(200)) for _ in range(3))
    (chosen,) = execute("prmt.b32 $0, $1, $2, $3;", [a, b, s], ["u32"])
    fixed = {}
    for selector in (0x7B1C, 0x3210, 0x5410, 0x4140, 0x0000, 0x9DA8):
        (fixed[selector],) = execute(f"prmt.b32 $0, $1, $2, {selector:#x};", [a, b], ["u32"])
    (table,) = execute("lop3.b32 $0, $1, $2, $3, 0xca;", [a, b, s], ["u32"])

    def permute(x, y, selector):
        octets = (x | y << 32).to_bytes(8, "little")
        result = 0
        for n in range(4):
            nibble = selector >> (4 * n) & 15
            octet = octets[nibble & 7]
            result |= ((octet >> 7) * 255 if nibble & 8 else octet) << (8 * n)
        return result

    each = list(zip(map(int, a), map(int, b), map(int, s), strict=True))
    np.testing.assert_array_equal(chosen, np.array([permute(*e) for e in each], np.uint32))
    for selector, got in fixed.items():
        np.testing.assert_array_equal(got, np.array([permute(x, y, selector) for x, y, _ in each], np.uint32))
    np.testing.assert_array_equal(table, (a & b) | (~a & s))


def test_funnel_shifts():
    a, b = words(200), rng().permutation(words(200))
    n = rng().integers(0, 70, 200, dtype=np.uint32)
    left, right = execute("shf.l.wrap.b32 $0, $2, $3, $4; shf.r.clamp.b32 $1, $2, $3, $4;", [a, b, n], ["u32"] * 2)
    each = list(zip(map(int, a), map(int, b), map(int, n), strict=True))
    np.testing.assert_array_equal(
        left, np.array([((y << 32 | x) << (k & 31)) >> 32 & M32 for x, y, k in each], np.uint32)
    )
    np.testing.assert_array_equal(right, np.array([(y << 32 | x) >> min(k, 32) & M32 for x, y, k in each], np.uint32))


def test_dot_products_of_bytes():
    a, b, c = (rng().permutation(words(200)) for _ in range(3))
    (both,) = execute("dp4a.s32.s32 $0, $1, $2, $3;", [a, b, c], ["u32"])
    (mixed,) = execute("dp4a.u32.s32 $0, $1, $2, $3;", [a, b, c], ["u32"])
    octets = [v.view(np.int8).reshape(-1, 4).astype(np.int64) for v in (a, b)]
    unsigned = a.view(np.uint8).reshape(-1, 4).astype(np.int64)
    start = c.view(np.int32).astype(np.int64)
    np.testing.assert_array_equal(both.view(np.int32), ((octets[0] * octets[1]).sum(1) + start).astype(np.int32))
    np.testing.assert_array_equal(mixed.view(np.int32), ((unsigned * octets[1]).sum(1) + start).astype(np.int32))


def test_packing_and_unpacking():
    a, b = words(100), rng().permutation(words(100))
    joined, low, high = execute(
        "mov.b64 $0, {$3, $4}; { .reg .b16 l, h; mov.b32 {l, h}, $3; mov.b32 $1, {h, l}; } mov.b64 {_, $2}, $0;",
        [a, b],
        ["u64", "u32", "u32"],
    )
    np.testing.assert_array_equal(joined, a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(low, a << np.uint32(16) | a >> np.uint32(16))
    np.testing.assert_array_equal(high, b)


def test_predicates_combine_and_guard():
    a, b = words(200), rng().permutation(words(200))
    first, second, guarded = execute(
        "setp.lt.u32 $0, $3, 1000000; setp.gt.and.s32 $0|$1, $3, $4, !$0; mov.u32 $2, 5; @!$0 add.u32 $2, $2, 6;",
        [a, b],
        ["pred", "pred", "u32"],
    )
    small = a < 1000000
    greater = a.view(np.int32) > b.view(np.int32)
    np.testing.assert_array_equal(first, greater & ~small)
    np.testing.assert_array_equal(second, ~greater & ~small)
    np.testing.assert_array_equal(guarded, np.where(greater & ~small, 5, 11))


# ---- floating point ---------------------------------------------------------------------------------------------------


def floats(count):
    """Random float32 bit patterns: all magnitudes, subnormals, zeros, infinities, NaN."""
    bits = rng().integers(0, 2**32, count, dtype=np.uint32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.5, 2.0**-149, 2.0**-126, 3.4028235e38]
    values = bits.view(np.float32).copy()
    values[: len(special)] = special
    return rng().permutation(values)


def rounded32(value):
    """A Fraction -> the nearest float32, ties to even, as a Python float."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)) if magnitude > 2**-1000 else -1000, -126)
    while Fraction(2) ** exponent > magnitude and exponent > -126:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    steps = magnitude / unit
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    result = float(whole * unit) if whole * unit < Fraction(2) ** 128 else math.inf
    return math.copysign(result, value)


def test_fused_multiply_add_is_rounded_once():
    a = rng().standard_normal(3000).astype(np.float32)
    b = rng().standard_normal(3000).astype(np.float32)
    # sums near a tie: c cancels most of the product, or is a tiny part of it
    c = (-(a * b) * (1 + 2.0 ** rng().integers(-30, 3, 3000))).astype(np.float32)
    c[:800] = (np.abs(a * b)[:800] * 2.0**24).astype(np.float32)
    a[800:1200] = np.ldexp(a[800:1200], rng().integers(-100, -60, 400))
    b[800:1200] = np.ldexp(b[800:1200], rng().integers(-60, -30, 400))
    c[800:1200] = np.ldexp(c[800:1200], -140)
    (got,) = execute("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], ["f32"])
    want = [
        rounded32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got.astype(np.float64), np.array(want))


def test_ties_that_two_roundings_get_wrong():
    # an odd product of 25 bits is a tie of float32; c, too small for float64 to hold beside it, decides
    a, b = (rng().integers(2**11, 2**12, (2, 4000)) * 2 + 1).astype(np.float32)
    product = a.astype(np.float64) * b
    tie = (product >= 2.0**24) & (product < 2.0**25)
    a, b = a[tie], b[tie]
    c = np.ldexp(rng().choice([-1.0, 0.0, 1.0], a.size), -60).astype(np.float32)
    (got,) = execute("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], ["f32"])
    want = [
        rounded32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got.astype(np.float64), np.array(want))


def test_double_fused_multiply_add():
    a, b = rng().standard_normal(500), rng().standard_normal(500)
    c = -(a * b) * (1 + 2.0 ** rng().integers(-52, 3, 500))
    (got,) = execute("fma.rn.f64 $0, $1, $2, $3;", [a, b, c], ["f64"])
    want = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, np.array(want))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_directed_rounding(name, mode):
    a, b = (rng().standard_normal(400).astype(np.float32) for _ in range(2))
    b = rng().permutation(b)
    (got,) = execute(f"{name}.{mode}.f32 $0, $1, $2;", [a, b], ["f32"])
    exact = {"add": lambda x, y: x + y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y}[name]
    for x, y, g in zip(a, b, got, strict=True):
        value = exact(Fraction(float(x)), Fraction(float(y)))
        g = Fraction(float(g))
        step = Fraction(float(np.spacing(np.float32(abs(float(g))))))
        assert abs(g - value) < step
        if mode == "rz":
            assert abs(g) <= abs(value)
        assert g <= value if mode == "rm" else g >= value if mode == "rp" else True


def test_flush_to_zero():
    a = floats(300)
    b = np.full(300, 1.0, np.float32)
    tiny = np.abs(a) < np.float32(2.0**-126)
    (got,) = execute("mul.ftz.f32 $0, $1, $2;", [a, b], ["f32"])
    np.testing.assert_array_equal(got, np.where(tiny, np.copysign(np.float32(0), a), a))
    (kept,) = execute("mul.f32 $0, $1, $2;", [a, b], ["f32"])
    np.testing.assert_array_equal(kept, a)
    (product,) = execute("mul.rn.ftz.f32 $0, $1, 0f20000000;", [np.full(1, 2.0**-100, np.float32)], ["f32"])
    assert product[0] == 0.0


def test_minimum_and_maximum_with_nan_and_zeros():
    a, b = floats(400), rng().permutation(floats(400))
    a[0], b[0], a[1], b[1] = 0.0, -0.0, -0.0, 0.0
    low, high, nan_high = execute(
        "min.f32 $0, $3, $4; max.f32 $1, $3, $4; max.NaN.f32 $2, $3, $4;", [a, b], ["f32"] * 3
    )
    np.testing.assert_array_equal(low, np.fmin(a, b))
    np.testing.assert_array_equal(high, np.fmax(a, b))
    np.testing.assert_array_equal(nan_high, np.maximum(a, b))
    assert np.signbit(low[:2]).all()
    assert not np.signbit(high[:2]).any()
    both = np.isnan(a) & np.isnan(b)
    assert (high.view(np.uint32)[both] == 0x7FFFFFFF).all()


@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_float_comparisons(name):
    a, b = floats(300), rng().permutation(floats(300))
    b[:100] = a[:100]
    (got,) = execute(f"setp.{name}.f32 $0, $1, $2;", [a, b], ["pred"])
    nan = np.isnan(a) | np.isnan(b)
    plain = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    if name in ("num", "nan"):
        want = nan if name == "nan" else ~nan
    else:
        want = plain[name[:2]] & ~nan if len(name) == 2 else plain[name[:2]] | nan
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "function", "bound"),
    [
        ("ex2.approx.ftz", lambda x: 2.0**x, 2.0**-22),
        ("rcp.approx.ftz", lambda x: 1 / x, 2.0**-23),
        ("rsqrt.approx.ftz", lambda x: 1 / math.sqrt(abs(x)), 2.0**-22.4),
        ("sqrt.rn", lambda x: math.sqrt(abs(x)), 2.0**-24),
        ("tanh.approx", math.tanh, 2.0**-11),
    ],
)
def test_functions_within_the_documented_error(name, function, bound):
    x = np.abs(rng().uniform(0.01, 20, 500)).astype(np.float32)
    (got,) = execute(f"{name}.f32 $0, $1;", [x], ["f32"])
    want = np.array([function(float(v)) for v in x])
    assert (np.abs(got - want) <= bound * np.abs(want)).all()


# ---- conversions ------------------------------------------------------------------------------------------------------


def test_floats_to_integers_round_clamp_and_turn_nan_to_zero():
    x = np.r_[floats(300), np.array([0.5, 1.5, 2.5, -0.5, -2.5, 3e9, -3e9, 2.0**31, 1e20], np.float32)]
    x = x.astype(np.float32)
    nearest, chopped, floor, unsigned, octet = execute(
        "cvt.rni.s32.f32 $0, $5; cvt.rzi.s32.f32 $1, $5; cvt.rmi.s32.f32 $2, $5; cvt.rzi.u32.f32 $3, $5;"
        "cvt.rni.sat.s8.f32 $4, $5;",
        [x],
        ["u32"] * 5,
    )

    def want(function, low, high):
        clean = [0.0 if math.isnan(v) else v for v in x.tolist()]
        whole = [v if math.isinf(v) else function(v) for v in clean]
        return np.array([int(min(max(v, low), high)) & M32 for v in whole], np.uint32)

    np.testing.assert_array_equal(nearest, want(round, -(2**31), 2**31 - 1))
    np.testing.assert_array_equal(chopped, want(math.trunc, -(2**31), 2**31 - 1))
    np.testing.assert_array_equal(floor, want(math.floor, -(2**31), 2**31 - 1))
    np.testing.assert_array_equal(unsigned, want(math.trunc, 0, 2**32 - 1))
    np.testing.assert_array_equal(octet, want(round, -128, 127))


def test_integers_between_widths():
    x = words(200)
    extended, zero, byte, clamped = execute(
        "cvt.s64.s32 $0, $4; cvt.u64.u32 $1, $4; cvt.s32.s8 $2, $4; cvt.sat.u8.s32 $3, $4;",
        [x],
        ["u64", "u64", "u32", "u32"],
    )
    np.testing.assert_array_equal(extended.view(np.int64), x.view(np.int32))
    np.testing.assert_array_equal(zero, x)
    np.testing.assert_array_equal(byte.view(np.int32), x.astype(np.uint8).view(np.int8))
    np.testing.assert_array_equal(clamped, np.clip(x.view(np.int32), 0, 255))


def test_integers_to_floats():
    x, y = words(200), words(200, "u64")
    (near,) = execute("cvt.rn.f32.s32 $0, $1;", [x], ["f32"])
    (down,) = execute("cvt.rz.f32.u32 $0, $1;", [x], ["f32"])
    (wide,) = execute("cvt.rn.f32.u64 $0, $1;", [y], ["f32"])
    np.testing.assert_array_equal(near, [rounded32(Fraction(signed(v))) for v in x])
    np.testing.assert_array_equal(wide, [rounded32(Fraction(int(v))) for v in y])
    assert all(float(g) <= int(v) < float(g) * (1 + 2**-22) + 1 for g, v in zip(down, x, strict=True))


def test_sixteen_bit_floats():
    x, y = floats(3000), rng().permutation(floats(3000))
    x[:1000] = (x[:1000].view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)  # ties
    pair, f16_pair = execute("cvt.rn.bf16x2.f32 $0, $2, $3; cvt.rn.f16x2.f32 $1, $2, $3;", [x, y], ["u32", "u32"])
    with np.errstate(all="ignore"):
        for word, dtype in ((pair, ml_dtypes.bfloat16), (f16_pair, np.float16)):
            for half, value in ((word >> np.uint32(16), x), (word & np.uint32(0xFFFF), y)):
                got = half.astype(np.uint16).view(dtype).astype(np.float32)
                np.testing.assert_array_equal(got, value.astype(dtype).astype(np.float32))
    halves = rng().permutation(np.arange(2**16, dtype=np.uint16))[:4000]
    (back,) = execute("cvt.f32.f16 $0, $1;", [halves], ["f32"])
    np.testing.assert_array_equal(back, halves.view(np.float16).astype(np.float32))
    (single,) = execute("cvt.rn.bf16.f32 $0, $1;", [x], ["u16"])
    np.testing.assert_array_equal(single, (pair >> np.uint32(16)).astype(np.uint16))


@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16)])
def test_packed_arithmetic_rounds_once(kind, dtype):
    a, b, c = (rng().standard_normal((500, 2)).astype(dtype) for _ in range(3))
    registers = [np.ascontiguousarray(v).view(np.uint32)[:, 0] for v in (a, b, c)]
    total, product, fused = execute(
        f"add.rn.{kind} $0, $3, $4; mul.rn.{kind} $1, $3, $4; fma.rn.{kind} $2, $3, $4, $5;", registers, ["u32"] * 3
    )
    wide = [v.astype(np.float64) for v in (a, b, c)]
    exact = {"add": wide[0] + wide[1], "mul": wide[0] * wide[1], "fma": wide[0] * wide[1] + wide[2]}
    for got, name in ((total, "add"), (product, "mul"), (fused, "fma")):
        values = got.view(dtype).reshape(-1, 2).astype(np.float64)
        # these sums are exact in float64, or so near that no tie is missed by two roundings of this data
        want = exact[name].astype(np.float32).astype(dtype) if dtype != np.float16 else exact[name].astype(dtype)
        np.testing.assert_array_equal(values, want.astype(np.float64))


def test_tf32_keeps_ten_bits():
    x = floats(500)
    (got,) = execute("cvt.rna.tf32.f32 $0, $1;", [x], ["u32"])
    finite = np.isfinite(x) & (np.abs(x) < 3.3e38)
    assert (got[finite] & np.uint32(0x1FFF) == 0).all()
    value = got[finite].view(np.float32).astype(np.float64)
    assert (np.abs(value - x[finite]) <= np.maximum(np.abs(x[finite].astype(np.float64)) * 2.0**-11, 2.0**-137)).all()


# ---- atomics and warps ------------------------------------------------------------------------------------------------


def test_atomics_act_one_after_the_other():
    where = rng().integers(0, 5, 700, dtype=np.uint32)
    value = rng().integers(0, 1000, 700, dtype=np.uint32)
    counts = np.zeros(5, np.uint32)
    text = """
.version 8.0
.target sm_80
.address_size 64
.entry atomics(.param .u64 where, .param .u64 value, .param .u64 counts, .param .u64 before)
{
    .reg .b64 %a<9>; .reg .b32 %r<9>; .reg .pred %p;
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r1, %r1, 100, %r2;
    ld.param.u64 %a1, [where]; mad.wide.u32 %a1, %r1, 4, %a1; ld.global.u32 %r3, [%a1];
    ld.param.u64 %a2, [value]; mad.wide.u32 %a2, %r1, 4, %a2; ld.global.u32 %r4, [%a2];
    ld.param.u64 %a3, [counts]; mad.wide.u32 %a3, %r3, 4, %a3;
    ld.param.u64 %a4, [before]; mad.wide.u32 %a4, %r1, 4, %a4;
    atom.global.add.u32 %r5, [%a3], %r4;
    st.global.u32 [%a4], %r5;
    ret;
}
"""
    before = np.zeros(700, np.uint32)
    emulator.run_ptx(text, "atomics", 7, 100, [where, value, counts, before])
    np.testing.assert_array_equal(counts, np.bincount(where, value, 5))
    for slot in range(5):
        mine = where == slot
        # the values seen before are the partial sums in some order
        order = np.argsort(before[mine], kind="stable")
        np.testing.assert_array_equal(before[mine][order], np.r_[0, np.cumsum(value[mine][order])[:-1]])
    biggest = np.zeros(5, np.uint32)
    emulator.run_ptx(text.replace(".add.", ".max."), "atomics", 7, 100, [where, value, biggest, before])
    np.testing.assert_array_equal(biggest, [value[where == s].max() for s in range(5)])


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(mode, width):
    a = np.arange(96, dtype=np.uint32) + 1000
    b = rng().integers(0, 40, 96, dtype=np.uint32)
    clamp = (0 if mode == "up" else 31) | (32 - width) << 8
    got, inside = execute(f"shfl.sync.{mode}.b32 $0|$1, $2, $3, {clamp}, -1;", [a, b], ["u32", "pred"])
    for lane in range(96):
        mine, distance, first = lane % 32, int(b[lane]) & 31, lane % 32 // width * width
        source = {
            "up": mine - distance,
            "down": mine + distance,
            "bfly": mine ^ distance,
            "idx": first + distance % width,
        }[mode]
        valid = source >= first if mode == "up" else source < first + width
        assert inside[lane] == valid
        assert got[lane] == a[lane // 32 * 32 + (source if valid else mine)]


def test_votes_matches_and_reductions():
    a = rng().integers(0, 6, 64, dtype=np.uint32)
    ballot, some, every, same, total, largest = execute(
        "{ .reg .pred p, q; setp.lt.u32 p, $6, 3; vote.sync.ballot.b32 $0, p, -1; vote.sync.any.pred q, p, -1;"
        "selp.u32 $1, 1, 0, q; vote.sync.all.pred q, !p, -1; selp.u32 $2, 1, 0, q; }"
        "match.any.sync.b32 $3, $6, -1; redux.sync.add.u32 $4, $6, -1; redux.sync.max.s32 $5, $6, -1;",
        [a],
        ["u32"] * 6,
    )
    for warp in range(2):
        mine = a[32 * warp : 32 * warp + 32]
        here = slice(32 * warp, 32 * warp + 32)
        assert (ballot[here] == sum(1 << n for n in range(32) if mine[n] < 3)).all()
        assert (some[here] == (mine < 3).any()).all()
        assert (every[here] == (mine >= 3).all()).all()
        assert (total[here] == mine.sum()).all()
        assert (largest[here] == mine.max()).all()
        np.testing.assert_array_equal(same[here], [sum(1 << n for n in range(32) if mine[n] == v) for v in mine])


def test_each_half_of_a_warp_may_work_on_its_own():
    a = rng().integers(0, 100, 32, dtype=np.uint32)
    (total,) = execute(
        "{ .reg .pred p; .reg .b32 t, m; mov.u32 t, %laneid; setp.lt.u32 p, t, 16; selp.b32 m, 0xffff, 0xffff0000, p;"
        "@p bra low; redux.sync.add.u32 $0, $1, m; bra join; low: redux.sync.add.u32 $0, $1, m; join: }",
        [a],
        ["u32"],
    )
    np.testing.assert_array_equal(total, np.repeat([a[:16].sum(), a[16:].sum()], 16))


def test_memory_of_all_widths():
    text = """
.version 8.0
.target sm_80
.address_size 64
.const .align 4 .b8 table[8] = {1, 2, 3, 4, 250, 251, 252, 253};
.global .align 8 .u64 where = table;
.entry widths(.param .u64 x, .param .u64 y)
{
    .local .align 16 .b8 frame[32];
    .reg .b64 %a<9>; .reg .b32 %r<9>; .reg .b16 %h<4>; .reg .f32 %f<4>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %a1, [x]; mad.wide.u32 %a1, %r1, 8, %a1;
    ld.param.u64 %a2, [y]; mad.wide.u32 %a2, %r1, 32, %a2;
    ld.global.s8 %r2, [%a1+1]; st.global.b32 [%a2], %r2;
    ld.global.u16 %h1, [%a1+2]; cvt.u32.u16 %r3, %h1; st.global.u32 [%a2+4], %r3;
    ld.global.v4.u16 {%h1, %h2, %h3, _}, [%a1]; mov.b32 %r4, {%h2, %h3}; st.global.u32 [%a2+8], %r4;
    mov.u64 %a3, frame; st.local.v2.b32 [%a3+8], {%r2, %r3};
    cvta.local.u64 %a4, %a3; ld.b64 %a5, [%a4+8]; st.global.u64 [%a2+16], %a5;
    ld.global.u64 %a6, [where]; add.u64 %a6, %a6, 4; ld.u8 %r5, [%a6]; st.global.b32 [%a2+12], %r5;
    and.b32 %r6, %r1, 7; cvt.u64.u32 %a7, %r6; mov.u64 %a8, table; add.s64 %a8, %a8, %a7;
    ld.const.u8 %r7, [%a8]; st.global.b32 [%a2+24], %r7; st.global.b32 [%a2+28], %r1;
    ret;
}
"""
    x = rng().integers(0, 2**64, 40, dtype=np.uint64)
    y = np.zeros((40, 8), np.uint32)
    emulator.run_ptx(text, None, 1, 40, [x, y])
    octets, halves = x.view(np.uint8).reshape(-1, 8), x.view(np.uint16).reshape(-1, 4)
    np.testing.assert_array_equal(y[:, 0].view(np.int32), octets[:, 1].view(np.int8))
    np.testing.assert_array_equal(y[:, 1], halves[:, 1])
    np.testing.assert_array_equal(y[:, 2], halves[:, 1] | halves[:, 2].astype(np.uint32) << 16)
    np.testing.assert_array_equal(y[:, 3], 250)
    np.testing.assert_array_equal(y[:, 4:6], y[:, :2])
    np.testing.assert_array_equal(y[:, 6], np.array([1, 2, 3, 4, 250, 251, 252, 253])[np.arange(40) % 8])
    np.testing.assert_array_equal(y[:, 7], np.arange(40))


def test_literals():
    bits, single, double, big = execute(
        "mov.b32 $0, 0f3FC00000; mov.f32 $1, 0f7FC12345; mov.f64 $2, 0dC000000000000000; mov.u64 $3, 0xFFFFFFFF00000001;",
        [],
        ["u32", "f32", "f64", "u64"],
        lanes=3,
    )
    assert (bits == 0x3FC00000).all()
    assert (single.view(np.uint32) == 0x7FC12345).all()
    assert (double == struct.unpack(">d", bytes.fromhex("c000000000000000"))[0]).all()
    assert (big == 0xFFFFFFFF00000001).all()
