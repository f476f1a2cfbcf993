"""int8 matrices in shared memory become fragments of 16-bit floats: a load and its conversion as one piece of asm.

In one piece the assembler keeps the conversion's constants in registers and the loaded words apart from other values.
"""

from functools import cache

from llvmlite import ir
from numba import cuda, types, uint32
from numba.cuda.extending import intrinsic

from nbkernels.ptx.memory import ld_shared, st_shared
from nbkernels.ptx.registers import elements, put

# Asm: registers; then two bytes of {word} become a word {to} of two 16-bit floats. Their bits are put under those of a power of
# two whose last place counts ones, and that power is taken off (see kernels/int8.py for the numbers).
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
    st_shared(shared, uint32(0x43434343))
    st_shared(uint32(shared + uint32(4)), uint32(0x00800080))


@cuda.jit(device=True, inline="always")
def widening_constants(shared):
    """(exponents, signs) of ``fragments_from_int8``, from memory so that the assembler takes them for variables.

    An instruction holds one constant; where two are needed the assembler makes the second anew each time, which is a third of all
    instructions.
    """
    return ld_shared(shared), ld_shared(uint32(shared + uint32(4)))


def _widened(dtype, exponents, signs):
    """Asm: words w0 to w3 that ldmatrix has brought become results 0 to 7."""
    setup, widen = _BFLOAT16 if str(dtype) == "bfloat16" else _FLOAT16
    lines = [setup]
    for half in range(2):
        for word in range(4):  # a0 and a1 hold the first two k of both rows, a2 and a3 the others
            names = {"word": f"w{2 * half + word % 2}", "selector": ("0x4140", "0x4342")[word // 2]}
            lines.append(widen.format(**names, to=f"${4 * half + word}", exponents=exponents, signs=signs))
    return "".join(lines)


@cache
def fragments_from_words(dtype):
    """fragments(a, at, w0, w1, w2, w3, exponents, signs): as ``fragments_from_int8`` of what ldmatrix_x4 has brought.

    For one who asks for several matrices before the first is widened.
    """
    names = "".join(f"mov.b32 w{n}, ${8 + n}; " for n in range(4))
    text = "{ .reg .b32 w0, w1, w2, w3; " + names + _widened(dtype, "$12", "$13") + "}"
    word = ir.IntType(32)
    widened = ir.FunctionType(ir.LiteralStructType([word] * 8), [word] * 6)

    @intrinsic
    def fragments(typingctx, a, at, w0, w1, w2, w3, exponents, signs):
        def emit(context, builder, signature, arguments):
            a, at, *inputs = arguments
            asm = ir.InlineAsm(widened, text, ",".join(["=&r"] * 8 + ["r"] * 6), side_effect=False)
            found = builder.call(asm, inputs, attrs=("readnone", "nounwind"))
            put(builder, found, elements(context, builder, signature.args[0], a, at, 8))
            return context.get_dummy_value()

        return types.void(a, types.int64, *[uint32] * 6), emit

    return fragments


@cache
def fragments_from_int8(dtype):
    """fragments(a, at, row_address, exponents, signs): 16 rows of 32 bytes in shared memory -> two fragments of m16n8k16.

    a[at : at + 4] and a[at + 4 : at + 8] (a local array) become the a of products with 16 k each, of which lane q of a quad has
    four consecutive ones, 4q to 4q + 3, in place of 2q, 2q + 1, 2q + 8, 2q + 9: b must have them so too. row_address as for
    ldmatrix_x4: matrices are rows 0 to 7 and 8 to 15 of the first 16 bytes, then of the others.
    """
    loads = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {w0, w1, w2, w3}, [$8]; "
    text = "{ .reg .b32 w0, w1, w2, w3; " + loads + _widened(dtype, "$9", "$10") + "}"
    word = ir.IntType(32)
    loaded = ir.FunctionType(ir.LiteralStructType([word] * 8), [word] * 3)

    @intrinsic
    def fragments(typingctx, a, at, row_address, exponents, signs):
        def emit(context, builder, signature, arguments):
            a, at, *inputs = arguments
            asm = ir.InlineAsm(loaded, text, ",".join(["=&r"] * 8 + ["r"] * 3 + ["~{memory}"]), side_effect=True)
            found = builder.call(asm, inputs, attrs=("convergent", "nounwind"))
            put(builder, found, elements(context, builder, signature.args[0], a, at, 8))
            return context.get_dummy_value()

        return types.void(a, types.int64, uint32, uint32, uint32), emit

    return fragments
