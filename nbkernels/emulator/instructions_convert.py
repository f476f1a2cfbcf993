"""cvt: between integer and floating-point types, with rounding, saturation and flushing."""

import numpy as np

from nbkernels.emulator import rounding
from nbkernels.emulator.instructions_float import saturate
from nbkernels.emulator.machine import DTYPES
from nbkernels.emulator.registry import instruction

_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOATS = ("f16", "bf16", "f32", "f64")


def _open(kind, ftz):
    """Source values as an exact float32 or float64, or the integers themselves."""
    if kind == "bf16":
        return rounding.from_bf16
    if kind == "f16":
        return lambda x: x.astype(np.float32)
    if kind == "f32" and ftz:
        return rounding.flush
    return lambda x: x


def _to_integer(kind, mode):
    """float -> integer: rounded, clamped to the type, NaN to 0, or to 2^63 where the type has 64 bits."""
    dtype = DTYPES[kind]
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    function = _ROUND[mode]

    def convert(x):
        rounded = function(x.astype(np.float64))
        clean = np.where(np.isnan(rounded), 0.0, rounded)
        # the largest 64-bit integers are no float64: what reaches them is set aside before the conversion
        top, bottom = clean >= float(high), clean <= float(low)
        result = np.where(top | bottom, 0.0, clean).astype(dtype)
        result = np.where(top, dtype.type(high), result)
        result = np.where(bottom, dtype.type(low), result).astype(dtype)
        if dtype.itemsize == 8:
            result = np.where(np.isnan(rounded), np.uint64(1 << 63).astype(dtype), result)
        return result

    return convert


def _integer_to_integer(source, target, sat):
    into = DTYPES[target]
    if not sat:
        return lambda x: x.astype(into)
    low, high = np.iinfo(into).min, np.iinfo(into).max
    start, end = np.iinfo(DTYPES[source]).min, np.iinfo(DTYPES[source]).max
    return lambda x: np.clip(x, max(low, start), min(high, end)).astype(into)


def _integer_to_float(target, mode):
    if target == "f64":
        return lambda x: x.astype(np.float64)
    if target == "f32":
        if mode == "rn":
            return lambda x: x.astype(np.float32)
        return lambda x: rounding.to_f32(_exact_integer(x), mode)
    if target == "f16":
        return lambda x: rounding.to_f16(_exact_integer(x), mode)
    return lambda x: rounding.to_bf16(rounding.odd_f32(_exact_integer(x)), mode)


def _exact_integer(x):
    """Integers as float64 rounded to odd (64-bit ones need not fit)."""
    if x.itemsize < 8:
        return x.astype(np.float64)
    high = (x >> x.dtype.type(32)).astype(np.float64) * 4294967296.0
    low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return rounding.odd_sum(high, low)


def _float_to_float(source, target, words):
    mode = next((w for w in words if w in ("rn", "rz", "rm", "rp", "rna")), "rn")
    integral = next((w for w in words if w in _ROUND), None)
    ftz, sat, relu = "ftz" in words, "sat" in words, "relu" in words

    def convert(x):
        if integral:
            x = _ROUND[integral](x)
        if sat:
            x = saturate(x)
        if relu:
            x = np.where(np.isnan(x), x, np.maximum(x, 0)).astype(x.dtype)
        if target == "f64":
            return x.astype(np.float64)
        if target == "f32":
            if x.dtype == np.float64:
                x = rounding.to_f32(x, mode)
            return rounding.flush(x) if ftz else x
        if target == "f16":
            return rounding.to_f16(x, mode)
        if target == "tf32":
            bits = rounding.narrow_bits(x, 19, mode)
            # a NaN keeps what is left of it
            return np.where(np.isnan(x), rounding.narrow_bits_of_nan(x, 19), bits)
        if x.dtype == np.float64:
            x = rounding.odd_f32(x)
        return rounding.to_bf16(x, mode)

    return convert


@instruction("cvt")
def bind_convert(m, i):
    words = i.opcode
    if words[1] == "pack":
        return _bind_pack(m, i)
    target, source = words[-2:]
    if target.endswith("x2") and target in ("f16x2", "bf16x2"):
        return _bind_pair(m, i, target, source)
    integral_source, integral_target = source[0] in "us", target[0] in "us"
    ftz, sat = "ftz" in words, "sat" in words
    mode = next((w for w in words if w in ("rn", "rz", "rm", "rp")), "rn")
    opened = _open(source, ftz)
    if integral_source and integral_target:
        convert = _integer_to_integer(source, target, sat)
    elif integral_source:
        plain = _integer_to_float(target, mode)
        convert = (lambda x: saturate(plain(x))) if sat else plain
    elif integral_target:
        plain = _to_integer(target, next(w for w in words if w in _ROUND))
        convert = lambda x: plain(opened(x))  # noqa: E731
    else:
        if source not in _FLOATS or target not in (*_FLOATS, "tf32"):
            raise m.unknown(i, f"conversion from {source} to {target}")
        plain = _float_to_float(source, target, words)
        convert = lambda x: plain(opened(x))  # noqa: E731
    place = m.destination(i, i.operands[0], DTYPES[target])
    value = m.source(i, i.operands[1], DTYPES[source])
    if integral_source and integral_target and not sat:
        return _copy_integer(m, place, value, DTYPES[target])
    return m.apply(convert, place, [value], into=False)


def _copy_integer(m, place, value, dtype):
    """Integer to integer without a temporary where the result fills its register."""
    if value.itemsize > dtype.itemsize and value.dtype.kind != dtype.kind:
        return m.apply(lambda x: x.astype(dtype), place, [value], into=False)
    if place.dtype != dtype:
        return m.apply(lambda x: x.astype(dtype), place, [value], into=False)
    return m.apply(lambda x: x, place, [value.astype(dtype) if value.strides[0] == 0 else value], into=False)


def _bind_pair(m, i, target, source):
    """Two float32 into a word; the first source is the upper half."""
    if source != "f32":
        raise m.unknown(i, f"conversion from {source} to {target}")
    words = i.opcode
    single = _float_to_float("f32", target.removesuffix("x2"), words)
    f32 = DTYPES["f32"]
    upper, lower = (m.source(i, o, f32) for o in i.operands[1:3])

    def convert(high, low):
        high, low = (single(v).view(np.uint16).astype(np.uint32) for v in (high, low))
        return (high << np.uint32(16)) | low

    return m.apply(convert, m.destination(i, i.operands[0], DTYPES["b32"]), [upper, lower], into=False)


def _bind_pack(m, i):
    """cvt.pack.sat.u8.s32.b32 d, a, b, c: bytes (or halves) of a and b saturated, in front of the upper part of c."""
    words = i.opcode
    kind = words[3]
    dtype = DTYPES[kind]
    width = 8 * dtype.itemsize
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    s32, u32 = DTYPES["s32"], DTYPES["u32"]
    a, b = (m.source(i, o, s32) for o in i.operands[1:3])
    rest = [m.source(i, o, u32) for o in i.operands[3:4]]

    def pack(a, b, *c):
        parts = [np.clip(v, low, high).astype(np.int64).astype(np.uint64) & np.uint64((1 << width) - 1) for v in (a, b)]
        result = parts[1] | (parts[0] << np.uint64(width))
        if c:
            result |= c[0].astype(np.uint64) << np.uint64(2 * width)
        return (result & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return m.apply(pack, m.destination(i, i.operands[0], u32), [a, b, *rest], into=False)
