"""Floating-point arithmetic rounded as the hardware rounds it, on NumPy arrays.

A sum that is computed in float64 and then rounded again to float32 can be off in the last place, when the first rounding
lands on a tie of the second. Rounding the first time to odd (an inexact result gets an odd last bit) makes the second right
(Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
"""

import numpy as np

F32, F64, U16, U32, U64 = np.float32, np.float64, np.uint16, np.uint32, np.uint64

_TIE_MASK = U64(0x1FFFFFFF)  # the bits of a float64 significand below those of a float32
_TIE = U64(0x10000000)
SMALLEST_NORMAL = F32(2.0**-126)


def flush(x):
    """Subnormal float32 become zeros of their sign (the .ftz forms)."""
    small = np.abs(x) < SMALLEST_NORMAL
    return np.where(small, np.copysign(F32(0), x), x) if small.any() else x


def two_sum(a, b):
    """(s, e) with s = fl(a + b) and s + e = a + b exactly."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def odd_sum(a, b):
    """a + b of float64, rounded to odd."""
    s, e = two_sum(a, b)
    return _make_odd(s, e)


def _make_odd(s, e):
    bits = s.view(np.int64)
    # an inexact sum with an even last bit moves one step towards the part that was lost
    adjust = (e != 0) & ((bits & 1) == 0) & np.isfinite(s) & np.isfinite(e)
    if not adjust.any():
        return s
    step = np.where((e > 0) == (s > 0), 1, -1)
    return np.where(adjust, bits + step, bits).view(F64)


def fma32(a, b, c):
    """a · b + c of float32, rounded once to nearest even."""
    product = np.multiply(a, b, dtype=F64)
    total = np.add(product, c, dtype=F64)
    result = total.astype(F32)
    doubtful = (total.view(U64) & _TIE_MASK) == _TIE
    magnitude = np.abs(result)
    if magnitude.size and np.minimum.reduce(magnitude) < SMALLEST_NORMAL:
        # a subnormal result has fewer bits, so its ties lie elsewhere
        doubtful |= (magnitude < SMALLEST_NORMAL) & (total != 0)
    if np.count_nonzero(doubtful):
        added = total - product
        lost = (product - (total - added)) + (c - added)
        doubtful &= lost != 0
        if np.count_nonzero(doubtful):
            result = np.where(doubtful, _make_odd(total, lost).astype(F32), result)
    return result


def fma32_exact(a, b, c):
    """a · b + c of float32 as a float64 rounded to odd: what any further rounding may start from."""
    return odd_sum(np.multiply(a, b, dtype=F64), np.asarray(c, F64))


def two_product(a, b):
    """(p, e) with p = fl(a · b) and p + e = a · b, of float64 (Veltkamp's splitting; no overflow near 2**996)."""
    p = a * b
    factor = 134217729.0  # 2**27 + 1
    x, y = a * factor, b * factor
    a_high, b_high = x - (x - a), y - (y - b)
    a_low, b_low = a - a_high, b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def fma_bf16(a, b, c):
    """a · b + c of float32 that hold bfloat16, as float32 that any rounding to bfloat16 rounds right."""
    product = np.multiply(a, b, dtype=F64)
    total = np.add(product, c, dtype=F64)
    single = total.astype(F32)
    doubtful = (single.view(U32) & U32(0xFFFF)) == U32(0x8000)
    if np.count_nonzero(doubtful):
        # the float32 lies on a tie of bfloat16: whether the sum does, or lies beside it, decides
        added = total - product
        lost = (product - (total - added)) + (c - added)
        single = np.where(doubtful, odd_f32(_make_odd(total, lost)), single)
    return single


def fma64(a, b, c):
    """a · b + c of float64, rounded once (Boldo and Melquiond's algorithm)."""
    high, low = two_product(a, b)
    t_high, t_low = two_sum(c, low)
    v_high, v_low = two_sum(high, t_high)
    result = v_high + odd_sum(t_low, v_low)
    plain = high + c
    return np.where(np.isfinite(result) & np.isfinite(low), result, plain)


def to_f32(x, mode="rn"):
    """float64 -> float32, rounded to nearest even (rn), to zero (rz), down (rm), up (rp) or away from zero on ties (rna)."""
    nearest = x.astype(F32)
    if mode == "rn":
        return nearest
    back = nearest.astype(F64)
    if mode == "rz":
        wrong = np.abs(back) > np.abs(x)
        toward = np.zeros_like(nearest)
    elif mode == "rm":
        wrong, toward = back > x, np.full_like(nearest, -np.inf)
    elif mode == "rp":
        wrong, toward = back < x, np.full_like(nearest, np.inf)
    else:
        raise KeyError(mode)
    return np.where(wrong, np.nextafter(nearest, toward), nearest)


def narrow_bits(x, kept, mode="rn"):
    """float32 -> its bits (uint32) with only the top ``kept`` bits left; the rest is rounded away. NaN becomes 0x7fffffff.

    mode: rn (ties to even), rna (ties away from zero) or rz.
    """
    bits = np.ascontiguousarray(x, F32).view(U32)
    drop = 32 - kept
    if mode == "rn":
        rounded = bits + (U32((1 << (drop - 1)) - 1) + ((bits >> U32(drop)) & U32(1)))
    elif mode == "rna":
        rounded = bits + U32(1 << (drop - 1))
    elif mode == "rz":
        rounded = bits
    else:
        raise KeyError(mode)
    rounded = rounded & U32(0xFFFFFFFF ^ ((1 << drop) - 1))
    nan = np.isnan(x)
    return np.where(nan, U32(0x7FFFFFFF), rounded) if nan.any() else rounded


def narrow_bits_of_nan(x, kept):
    """float32 -> its bits (uint32) with only the top ``kept`` bits left, cut off."""
    return np.ascontiguousarray(x, F32).view(U32) & U32(0xFFFFFFFF ^ ((1 << (32 - kept)) - 1))


def to_bf16(x, mode="rn"):
    """float32 -> the bits of a bfloat16 (uint16)."""
    return (narrow_bits(x, 16, mode) >> U32(16)).astype(U16)


def from_bf16(bits):
    """The bits of a bfloat16 (uint16) -> float32."""
    return (bits.astype(U32) << U32(16)).view(F32)


def odd_f32(x):
    """float64 -> float32 rounded to odd, so that a rounding to a 16-bit format after it is right."""
    nearest = x.astype(F32)
    back = nearest.astype(F64)
    bits = nearest.view(np.int32)
    adjust = (back != x) & ((bits & 1) == 0) & np.isfinite(x)
    if not adjust.any():
        return nearest
    step = np.where(np.abs(back) > np.abs(x), -1, 1)
    return np.where(adjust, bits + step, bits).astype(np.int32).view(F32)


def to_f16(x, mode="rn"):
    """float32 or float64 -> float16. A NaN becomes 0x7fff."""
    result = x.astype(np.float16)
    if mode == "rz":
        back = result.astype(x.dtype)
        result = np.where(np.abs(back) > np.abs(x), np.nextafter(result, np.float16(0)), result)
    elif mode != "rn":
        raise KeyError(mode)
    nan = np.isnan(result)
    return np.where(nan, U16(0x7FFF).view(np.float16), result) if nan.any() else result
