"""Floating-point arithmetic: float32, float64, and the 16-bit formats one or two a register.

16-bit operations are computed in float32, which holds their exact sums and products closely enough that rounding the result
again is right (24 bits are at least 2·11 + 2); fused ones go through a float64 rounded to odd.
"""

import numpy as np

from nbkernels.emulator import rounding
from nbkernels.emulator.instructions_integer import (
    bind_integer_mad,
    bind_integer_product,
    bind_integer_sum,
    divide,
    emit,
)
from nbkernels.emulator.machine import DTYPES
from nbkernels.emulator.registry import instruction

HALVES = ("f16", "f16x2", "bf16", "bf16x2")
DIRECTED = ("rz", "rm", "rp")


def is_float(kind):
    """Whether an opcode's type word is a floating-point type."""
    return kind in ("f32", "f64", *HALVES)


def reader(kind, ftz=False):
    """register values -> what to compare or compute with, or None where they are that already."""
    if kind == "bf16":
        return rounding.from_bf16
    if kind == "f32" and ftz:
        return rounding.flush
    return None


def open_halves(kind, words):
    """Registers of a 16-bit type, one or two elements each -> float32 [lanes] or [lanes, 2]."""
    packed = kind.endswith("x2")
    halves = np.ascontiguousarray(words)
    if packed:
        halves = halves.view(np.uint16).reshape(-1, 2)
    if kind.startswith("bf"):
        return rounding.from_bf16(halves)
    return halves.view(np.float16).astype(np.float32)


def close_halves(kind, values):
    """float32 or float64 (rounded to odd) -> registers of a 16-bit type."""
    if kind.startswith("bf"):
        if values.dtype == np.float64:
            values = rounding.odd_f32(values)
        halves = rounding.to_bf16(values)
    else:
        halves = rounding.to_f16(values)
    if kind.endswith("x2"):
        return np.ascontiguousarray(halves).view(np.uint32)[:, 0]
    return halves


def saturate(values):
    """Clamp to [0, 1]; NaN becomes 0."""
    return np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)


def _half_step(m, i, kind, operation):
    """A step whose operation works on float32 (or returns float64 rounded to odd) of a 16-bit type."""
    words = i.opcode

    def compute(*sources):
        result = operation(*(open_halves(kind, s) for s in sources))
        if "sat" in words:
            result = saturate(result)
        if "relu" in words:
            result = np.where(np.isnan(result), result, np.maximum(result, 0))
        return close_halves(kind, result)

    dtype = DTYPES[kind]
    target = m.destination(i, i.operands[0], dtype)
    sources = [m.source(i, o, dtype) for o in i.operands[1:]]
    return m.apply(compute, target, sources, into=False)


def _f32_step(m, i, operation, exact):
    """A float32 step: operation is the correctly rounded one; exact gives float64 rounded to odd, for directed rounding."""
    words = i.opcode
    mode = next((w for w in words if w in DIRECTED), None)
    ftz, sat = "ftz" in words, "sat" in words
    if mode is None and not ftz and not sat:
        return emit(m, i, operation, "f32")

    def compute(*sources):
        if ftz:
            sources = [rounding.flush(s) for s in sources]
        wide = [s.astype(np.float64) for s in sources] if mode else None
        result = rounding.to_f32(exact(*wide), mode) if mode else operation(*sources)
        if ftz:
            result = rounding.flush(result)
        return saturate(result) if sat else result

    return emit(m, i, compute, "f32", into=False)


def _float_step(m, i, operation, exact, *, fused=None):
    kind = i.opcode[-1]
    if kind == "f32":
        return _f32_step(m, i, operation, exact)
    if any(w in DIRECTED for w in i.opcode):
        raise m.unknown(i, f"directed rounding of {kind}")
    if kind == "f64":
        return emit(m, i, fused or operation, "f64")
    if fused:
        return _half_step(m, i, kind, rounding.fma_bf16 if kind.startswith("bf") else exact)
    return _half_step(m, i, kind, operation)


@instruction("add", "addc")
def bind_add(m, i):
    if is_float(i.opcode[-1]):
        return _float_step(m, i, np.add, rounding.odd_sum)
    return bind_integer_sum(m, i)


@instruction("sub", "subc")
def bind_sub(m, i):
    if is_float(i.opcode[-1]):
        return _float_step(m, i, np.subtract, lambda a, b: rounding.odd_sum(a, -b))
    return bind_integer_sum(m, i)


@instruction("mul")
def bind_mul(m, i):
    if is_float(i.opcode[-1]):
        # a product of two float32 is exact in float64
        return _float_step(m, i, np.multiply, np.multiply)
    return bind_integer_product(m, i)


@instruction("fma")
def bind_fma(m, i):
    return _float_step(m, i, rounding.fma32, rounding.fma32_exact, fused=rounding.fma64)


@instruction("mad", "madc")
def bind_mad(m, i):
    if is_float(i.opcode[-1]):
        return bind_fma(m, i)
    return bind_integer_mad(m, i)


@instruction("div")
def bind_div(m, i):
    kind = i.opcode[-1]
    if kind == "f32":
        # .full and .approx allow 2 units in the last place; the right result is within that
        return _f32_step(m, i, np.divide, _exact_quotient)
    if kind == "f64":
        return emit(m, i, np.divide, "f64")
    return emit(m, i, divide, kind, into=False)


def _exact_quotient(a, b):
    """a / b of float32 values in float64, rounded to odd: the remainder tells which side the quotient is off."""
    quotient = a / b
    product, error = rounding.two_product(quotient, b)
    remainder = (a - product) - error
    return rounding._make_odd(quotient, np.where(np.isfinite(quotient), remainder * np.sign(b), 0.0))


@instruction("neg")
def bind_neg(m, i):
    kind = i.opcode[-1]
    if kind in HALVES:
        return emit(m, i, lambda a: a ^ _signs(kind, a.dtype), "b32" if kind.endswith("x2") else "b16")
    if kind == "f32" and "ftz" in i.opcode:
        return emit(m, i, lambda a: -rounding.flush(a), kind, into=False)
    return emit(m, i, np.negative, kind)


@instruction("abs")
def bind_abs(m, i):
    kind = i.opcode[-1]
    if kind in HALVES:
        return emit(m, i, lambda a: a & ~_signs(kind, a.dtype), "b32" if kind.endswith("x2") else "b16")
    if kind == "f32" and "ftz" in i.opcode:
        return emit(m, i, lambda a: np.abs(rounding.flush(a)), kind, into=False)
    return emit(m, i, np.absolute, kind)


def _signs(kind, dtype):
    return dtype.type(0x80008000 if kind.endswith("x2") else 0x8000)


def _extreme(i, smaller):
    """min or max of floats: of ±0 the negative one is smaller, a NaN loses, or wins with .NaN."""
    plain = np.fmin if smaller else np.fmax
    spread = np.minimum if smaller else np.maximum
    keeps_nan = "NaN" in i.opcode
    xor_sign = "xorsign" in i.opcode

    def pick(*values):
        signs = np.signbit(values[0])
        if xor_sign:
            for value in values[1:]:
                signs = signs ^ np.signbit(value)
            values = [np.abs(v) for v in values]
        result = values[0]
        for value in values[1:]:
            zeros = (result == 0) & (value == 0)
            chosen = (spread if keeps_nan else plain)(result, value)
            if zeros.any():
                negative = np.signbit(result) | np.signbit(value) if smaller else np.signbit(result) & np.signbit(value)
                chosen = np.where(zeros, np.where(negative, -0.0, 0.0).astype(chosen.dtype), chosen)
            result = chosen
        nan = np.isnan(result)
        if nan.any():
            # the hardware's NaN is 0x7fffffff
            canonical = np.uint32(0x7FFFFFFF).view(np.float32) if result.dtype == np.float32 else np.nan
            result = np.where(nan, canonical, result)
        if xor_sign:
            result = np.where(signs, -np.abs(result), np.abs(result))
        return result.astype(values[0].dtype, copy=False)

    return pick


def _bind_extreme(m, i, smaller):
    kind = i.opcode[-1]
    if is_float(kind):
        pick = _extreme(i, smaller)
        if kind in HALVES:
            return _half_step(m, i, kind, pick)
        if kind == "f32":
            return _f32_step(m, i, pick, None)
        return emit(m, i, pick, kind)
    operation = np.minimum if smaller else np.maximum
    if kind in ("s16x2", "u16x2"):
        half = np.dtype(np.int16 if kind[0] == "s" else np.uint16)

        def packed(a, b):
            a, b = (np.ascontiguousarray(v).view(half) for v in (a, b))
            return operation(a, b).view(np.uint32)

        return emit(m, i, packed, "b32", into=False)
    if "relu" in i.opcode:
        return emit(m, i, lambda a, b: np.maximum(operation(a, b), 0), kind, into=False)
    if len(i.operands) == 4:
        return emit(m, i, lambda a, b, c: operation(operation(a, b), c), kind)
    return emit(m, i, operation, kind)


@instruction("min")
def bind_min(m, i):
    return _bind_extreme(m, i, True)


@instruction("max")
def bind_max(m, i):
    return _bind_extreme(m, i, False)


@instruction("copysign")
def bind_copysign(m, i):
    # the first source gives the sign, the second the magnitude
    return emit(m, i, lambda a, b: np.copysign(b, a), i.opcode[-1], into=False)


_TESTS = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).smallest_normal),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal),
}


@instruction("testp")
def bind_testp(m, i):
    return emit(m, i, _TESTS[i.opcode[1]], "pred", [i.opcode[-1]], into=False)


# ---- functions of the special-function unit ---------------------------------------------------------------------------


def _through_f64(function):
    """Computed in float64 and rounded: within half a unit, so within every bound the hardware's approximation documents."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


_FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
}


@instruction("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt")
def bind_function(m, i):
    name, kind = i.opcode[0], i.opcode[-1]
    function = _FUNCTIONS[name]
    if kind in HALVES:
        return _half_step(m, i, kind, _through_f64(function))
    if kind == "f64":
        return emit(m, i, function, "f64")
    if name == "sqrt":
        return _f32_step(m, i, np.sqrt, _exact_root)
    if name == "rcp":
        return _f32_step(m, i, _through_f64(function), lambda x: _exact_quotient(np.ones_like(x), x))
    operation = _through_f64(function)
    if "ftz" in i.opcode:
        plain = operation
        operation = lambda x: rounding.flush(plain(rounding.flush(x)))  # noqa: E731
    return emit(m, i, operation, "f32", into=False)


def _exact_root(x):
    root = np.sqrt(x)
    product, error = rounding.two_product(root, root)
    remainder = (x - product) - error
    return rounding._make_odd(root, np.where(np.isfinite(root), remainder, 0.0))
