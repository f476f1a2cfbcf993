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
from llvmlite import ir
from numba import cuda, types, uint32
from numba.core import cgutils
from numba.cuda.extending import intrinsic

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


# ---- two fragments at once ----------------------------------------------------------------------------------------------

# Asm, its registers and then from two bytes of {word} to a word {to} of two 16-bit floats: the arithmetic above
_BFLOAT16 = (
    ".reg .b32 spread, magnitude, offset, one; mov.b32 one, 0x3f803f80; ",
    "prmt.b32 spread, {word}, {exponents}, {selector}; and.b32 magnitude, spread, 0xff7fff7f; "
    "lop3.b32 offset, spread, {signs}, 0xc300c300, 0xea; fma.rn.bf16x2 {to}, magnitude, one, offset; ",
)
_FLOAT16 = (
    ".reg .b32 biased, spread, taken; mov.b32 taken, 0x64806480; ",
    "xor.b32 biased, {word}, 0x80808080; prmt.b32 spread, biased, 0x64646464, {selector}; sub.f16x2 {to}, spread, taken; ",
)


@cuda.jit(device=True, inline="always")
def leave_widening_constants(shared):
    """Write the 8 bytes for ``widening_constants`` to a shared address; a barrier lies between."""
    ptx.st_shared(shared, uint32(0x43434343))
    ptx.st_shared(uint32(shared + uint32(4)), uint32(0x00800080))


@cuda.jit(device=True, inline="always")
def widening_constants(shared):
    """(exponents, signs) of ``fragments_from_int8``, from memory so that the assembler takes them for variables.

    An instruction holds one constant; where two are needed the assembler makes the second anew each time, which is a third of all
    instructions.
    """
    return ptx.ld_shared(shared), ptx.ld_shared(uint32(shared + uint32(4)))


@cache
def fragments_from_int8(dtype):
    """fragments(a, at, row_address, exponents, signs): 16 rows of 32 bytes in shared memory -> two fragments of m16n8k16.

    a[at : at + 4] and a[at + 4 : at + 8] (a local array) become the a of products with 16 k each, of which lane q of a quad has
    four consecutive ones, 4q to 4q + 3, in place of 2q, 2q + 1, 2q + 8, 2q + 9: b must have them so too. row_address as for
    ldmatrix_x4: matrices are rows 0 to 7 and 8 to 15 of the first 16 bytes, then of the others.
    """
    setup, widen = _BFLOAT16 if str(dtype) == "bfloat16" else _FLOAT16
    lines = ["{ .reg .b32 w0, w1, w2, w3; ", setup, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {w0, w1, w2, w3}, [$8]; "]
    for half in range(2):
        for word in range(4):  # a0 and a1 hold the first two k of both rows, a2 and a3 the others
            lines.append(
                widen.format(
                    word=f"w{2 * half + word % 2}",
                    selector=("0x4140", "0x4342")[word // 2],
                    to=f"${4 * half + word}",
                    exponents="$9",
                    signs="$10",
                )
            )
    text = "".join([*lines, "}"])
    word = ir.IntType(32)
    loaded = ir.FunctionType(ir.LiteralStructType([word] * 8), [word] * 3)

    @intrinsic
    def fragments(typingctx, a, at, row_address, exponents, signs):
        def emit(context, builder, signature, arguments):
            a, at, *inputs = arguments
            data = cgutils.create_struct_proxy(signature.args[0])(context, builder, a).data
            asm = ir.InlineAsm(loaded, text, ",".join(["=&r"] * 8 + ["r"] * 3 + ["~{memory}"]), side_effect=True)
            found = builder.call(asm, inputs, attrs=("convergent", "nounwind"))
            for i in range(8):
                builder.store(builder.extract_value(found, i), builder.gep(data, [builder.add(at, ir.IntType(64)(i))]))
            return context.get_dummy_value()

        return types.void(a, types.int64, uint32, uint32, uint32), emit

    return fragments
