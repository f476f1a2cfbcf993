"""Rows in registers become int8 with one scale a row: how the norms may end, and what quantize_int8 does to whole rows.

    top      max |value| over the row; a NaN wins
    scale    top / 127, a true division
    q        value / scale, rounded to a float32 as a true division rounds it, then half to even

A row has one divisor d, so its reciprocal r is taken once, and a quotient is corrected twice by its own remainder:

    q = v·r        q += (v - q·d)·r        q += (v - q·d)·r

The first correction leaves less than a unit in the last place, whose remainder is exact, and the second then rounds as a true
division (Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor", theorem 3), as long as no
remainder that matters is a denormal: a row with such a scale, or with NaN or infinities, is ``careful`` and takes a longer way.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.elements import vector_width
from nbkernels.kernels.rows import word_columns

LARGEST = np.float32(127)
# A sum with 1.5 · 2^23 is rounded to an integer, half to even, that stands in its lowest bits in two's complement.
ROUNDER = np.float32(1.5 * 2**23)
# Scales whose quotients of 1/4 and more have remainders that are no denormals and quotients that are finite.
SMALLEST_SCALE, LARGEST_SCALE = np.float32(2.0**-80), np.float32(2.0**100)
SHRINK, GROW = np.float32(2.0**-100), np.float32(2.0**100)
INFINITE = np.float32(np.inf)
# Beyond what rounds to 127 or is cut off there, and far from overflow.
FAR = np.float32(2.0**100)


@cuda.jit(device=True, inline="always")
def divisor_of(scale):
    """(d, r, factor, careful) of a row's scale: v / scale = v·factor / d, and r = 1 / d; careful: 1 where rounding needs care.

    A scale of 0 (a row of zeros) or NaN divides by 1; an infinite one gives 0, and NaN for the infinities.
    """
    careful = uint32(1)
    if scale == float32(0.0) or (scale >= SMALLEST_SCALE and scale <= LARGEST_SCALE):
        careful = uint32(0)
    factor = float32(1.0)
    if scale < SMALLEST_SCALE and scale > float32(0.0):
        factor = GROW
    if scale > LARGEST_SCALE:
        factor = SHRINK
    d = float32(1.0)
    if scale > float32(0.0):
        d = scale * factor
    if scale == INFINITE:
        factor = float32(0.0)
        d = float32(1.0)
    return d, float32(1.0) / d, factor, careful


@cuda.jit(device=True, inline="always")
def _quotient(v, d, r):
    q = v * r
    q = ptx.fma(ptx.fma(-q, d, v), r, q)
    return ptx.fma(ptx.fma(-q, d, v), r, q)


@cuda.jit(device=True, inline="always")
def _rounded(v, d, r):
    # the scale is the largest value's: nothing rounds beyond 127
    return ptx.bits_from_float(_quotient(v, d, r) + ROUNDER)


@cuda.jit(device=True, inline="always")
def _rounded_with_care(v, d, r, factor):
    v = v * factor
    near = v
    if v > FAR:
        near = FAR
    if v < -FAR:
        near = -FAR
    q = _quotient(near, d, r)
    if q > LARGEST:
        q = LARGEST
    if q < -LARGEST:
        q = -LARGEST
    if v != v:
        q = float32(0.0)
    return ptx.bits_from_float(q + ROUNDER)


@cuda.jit(device=True, inline="always")
def _pack(bits, i):
    """The lowest bytes of four words from number i on, in one word."""
    low = ptx.prmt(bits[i], bits[i + 1], uint32(0x0040))
    high = ptx.prmt(bits[i + 2], bits[i + 3], uint32(0x0040))
    return ptx.prmt(low, high, uint32(0x5410))


@cache
def int8_put(dtype, walk, threads, inside):
    """put(pointer, start, thread, columns, c, values, divisor): chunk c of a row of int8 = values[:width] / scale, rounded.

    The columns are those of ``rows.row_access`` for dtype; inside: its. divisor: ``divisor_of``'s. The wide walk stores a chunk's
    bytes (a half or a quarter of 16) at once, so it wants rows that start at multiples of them.
    """
    width = vector_width(dtype)
    column = word_columns(width, threads)

    @cuda.jit(device=True, inline="always")
    def quantise(values, divisor, bits):
        if divisor[3] == uint32(0):
            for j in range(width):
                bits[j] = _rounded(values[j], divisor[0], divisor[1])
        else:
            for j in range(width):
                bits[j] = _rounded_with_care(values[j], divisor[0], divisor[1], divisor[2])

    if walk == "wide":

        @cuda.jit(device=True, inline="always")
        def put(pointer, start, thread, columns, c, values, divisor):
            bits = cuda.local.array(width, uint32)
            quantise(values, divisor, bits)
            if inside(c * width, thread, columns):
                at = ptx.address(pointer, start) + uint64(uint32(uint32(thread + uint32(c * threads)) * uint32(width)))
                if width == 8:
                    ptx.st_global_v2(at, _pack(bits, 0), _pack(bits, width - 4))
                else:
                    ptx.st_global(at, _pack(bits, 0))

        return put

    @cuda.jit(device=True, inline="always")
    def put_bytes(pointer, start, thread, columns, c, values, divisor):
        bits = cuda.local.array(width, uint32)
        quantise(values, divisor, bits)
        for j in range(width):
            i = c * width + j
            if inside(i, thread, columns):
                pointer[start + column(i, thread)] = int8(bits[j])

    return put_bytes
