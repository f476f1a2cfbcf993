"""int8 weights inside a kernel: four bytes of a word become float registers or pairs of 16-bit floats, exactly.

No instruction converts a byte cheaply, so the bits are put together (``prmt``) as numbers whose last place counts ones, and a
constant is taken off:

    float16     byte + 128  under 0x64:  1024 + 128 + q               - 1152
    bfloat16    has 7 bits behind the point, so the sign goes its own way:
                low 7 bits  under 0x43:  128 + (q mod 128)            - 128, or - 256 where q is negative
    float32     byte + 128  under 0x4b0000:  2^23 + 128 + q           - (2^23 + 128)
"""

from functools import cache

import numpy as np
from numba import cuda, float32, uint32

from nbkernels import ptx

FLOAT32_OFFSET = np.float32(2**23 + 128)
INFINITY, NAN_BITS = np.float32(np.inf), 0x7FFFFFFF


@cuda.jit(device=True, inline="always")
def floats_from_int8x4(word):
    """Four signed bytes of a word -> four float32."""
    biased = uint32(word ^ uint32(0x80808080))
    return (
        ptx.float_from_bits(ptx.prmt(biased, uint32(0x4B000000), uint32(0x7440))) - FLOAT32_OFFSET,
        ptx.float_from_bits(ptx.prmt(biased, uint32(0x4B000000), uint32(0x7441))) - FLOAT32_OFFSET,
        ptx.float_from_bits(ptx.prmt(biased, uint32(0x4B000000), uint32(0x7442))) - FLOAT32_OFFSET,
        ptx.float_from_bits(ptx.prmt(biased, uint32(0x4B000000), uint32(0x7443))) - FLOAT32_OFFSET,
    )


@cuda.jit(device=True, inline="always")
def _f16x2_pairs_from_int8x4(word):
    biased = uint32(word ^ uint32(0x80808080))
    return (
        ptx.sub_f16x2(ptx.prmt(biased, uint32(0x64646464), uint32(0x4140)), uint32(0x64806480)),
        ptx.sub_f16x2(ptx.prmt(biased, uint32(0x64646464), uint32(0x4342)), uint32(0x64806480)),
    )


@cuda.jit(device=True, inline="always")
def _bf16x2_from_spread(spread):
    """spread: two int8 in the lower bytes of the halves, 0x43 in the upper ones."""
    magnitude = uint32(spread & uint32(0xFF7FFF7F))
    # 0xc300 is -128; the sign bit of the byte is the last bit of the exponent, and makes it -256
    offset = uint32(uint32(spread & uint32(0x00800080)) | uint32(0xC300C300))
    return ptx.fma_bf16x2(magnitude, uint32(0x3F803F80), offset)


@cuda.jit(device=True, inline="always")
def _bf16x2_pairs_from_int8x4(word):
    return (
        _bf16x2_from_spread(ptx.prmt(word, uint32(0x43434343), uint32(0x4140))),
        _bf16x2_from_spread(ptx.prmt(word, uint32(0x43434343), uint32(0x4342))),
    )


@cache
def pairs_from_int8x4(dtype):
    """widen(word): four signed bytes -> two words of two float16 or bfloat16 each."""
    return _bf16x2_pairs_from_int8x4 if str(dtype) == "bfloat16" else _f16x2_pairs_from_int8x4


@cuda.jit(device=True, inline="always")
def _bf16x2_parts(word, exponents, signs):
    spread = ptx.prmt(word, exponents, uint32(0x4140))
    return uint32(spread & uint32(0xFF7FFF7F)), uint32(uint32(spread & signs) | uint32(0xC300C300))


@cuda.jit(device=True, inline="always")
def _bf16x2_of_parts(magnitude, offset):
    return ptx.fma_bf16x2(magnitude, uint32(0x3F803F80), offset)


@cuda.jit(device=True, inline="always")
def _f16x2_parts(word, exponents, signs):
    biased = uint32(word ^ uint32(0x8080))
    return ptx.prmt(biased, uint32(0x64646464), uint32(0x4140)), uint32(0x64806480)


@cache
def pair_from_int8x2(dtype):
    """(parts, together): the two lower signed bytes of a word -> a word of two float16 or bfloat16, in two steps.

    parts(word, exponents, signs) -> a, b, with ``ptx.widen.widening_constants``; together(a, b) is one instruction.
    """
    if str(dtype) == "bfloat16":
        return _bf16x2_parts, _bf16x2_of_parts
    return _f16x2_parts, ptx.sub_f16x2


@cuda.jit(device=True, inline="always")
def scale_of_row(scale):
    """The scale of quantised activations, NaN where it is infinite: a row that holds an infinity has no numbers."""
    return scale if abs(scale) < INFINITY else ptx.float_from_bits(uint32(NAN_BITS))


@cache
def load_int8(width):
    """load(pointer, index) -> ``width`` (1, 4 or 8) consecutive int8 as float32; the address is divisible by width."""
    if width == 1:

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            return (float32(pointer[index]),)

    elif width == 4:

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            return floats_from_int8x4(ptx.ld_global_nc(ptx.address(pointer, index)))

    else:

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            w = ptx.ld_global_stream_v2(ptx.address(pointer, index))
            return floats_from_int8x4(w[0]) + floats_from_int8x4(w[1])

    return load
