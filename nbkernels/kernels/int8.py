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
from numba import cuda, types, uint32

from nbkernels import ptx

FLOAT32_OFFSET = np.float32(2**23 + 128)


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
def leave_widening_constants(shared):
    """Write the 8 bytes for ``widening_constants`` to a shared address; a barrier lies between."""
    ptx.st_shared(shared, uint32(0x43434343))
    ptx.st_shared(uint32(shared + uint32(4)), uint32(0x00800080))


@cuda.jit(device=True, inline="always")
def widening_constants(shared):
    """(exponents, signs) of ``pairs_with``, from memory so that the assembler takes them for variables.

    An instruction holds one constant; where two are needed the assembler makes the second anew each time, which is a third of all
    instructions.
    """
    return ptx.ld_shared(shared), ptx.ld_shared(uint32(shared + uint32(4)))


def _halves(lines):
    """Asm of both halves of a word: {0} is 0 or 1, {1} the selector of its bytes under the exponents."""
    return "".join(lines.format(half, selector) for half, selector in enumerate(("0x4140", "0x4342")))


_PAIRS = types.UniTuple(uint32, 2)(uint32, uint32, uint32)


@ptx.instruction(
    _PAIRS,
    "{ .reg .b32 spread, low, offset, one; mov.b32 one, 0x3f803f80; "
    + _halves(
        "prmt.b32 spread, $2, $3, {1}; and.b32 low, spread, 0xff7fff7f; lop3.b32 offset, spread, $4, 0xc300c300, 0xea; "
        "fma.rn.bf16x2 ${0}, low, one, offset; "
    )
    + "}",
)
def _bf16x2_pairs_with(word, exponents, signs):
    """As _bf16x2_pairs_from_int8x4; one piece of text, so that loops around it are short for the compilers."""


@ptx.instruction(
    _PAIRS,
    "{ .reg .b32 biased, spread, taken; mov.b32 taken, 0x64806480; xor.b32 biased, $2, 0x80808080; "
    + _halves("prmt.b32 spread, biased, 0x64646464, {1}; sub.f16x2 ${0}, spread, taken; ")
    + "}",
)
def _f16x2_pairs_with(word, exponents, signs):
    """As _f16x2_pairs_from_int8x4."""


@cache
def pairs_with(dtype):
    """widen(word, exponents, signs): as ``pairs_from_int8x4``, with ``widening_constants``."""
    return _bf16x2_pairs_with if str(dtype) == "bfloat16" else _f16x2_pairs_with
