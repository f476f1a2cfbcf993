"""Tensor-core products of one warp (mma.sync, sm_80 and later).

The fragments of m16n8k16, for lane l with row = l / 4 and column = 2·(l % 4); each word holds two 16-bit elements:

    a [16, 16]  a0 (row, column)  a1 (row + 8, column)  a2 (row, column + 8)  a3 (row + 8, column + 8)
    b [16, 8]   b0 (k = column, n = row)  b1 (k = column + 8, n = row)         two consecutive k a word
    c [16, 8]   c0, c1 (row, column and column + 1)  c2, c3 (row + 8, the same)
"""

from functools import cache

from llvmlite import ir
from numba import float32, int32, types, uint32
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from nbkernels.ptx.asm import instruction

floats4 = types.UniTuple(float32, 4)
ints4 = types.UniTuple(int32, 4)
_F16 = floats4(*[uint32] * 6, *[float32] * 4)
_SHAPES = {
    "bfloat16": "k16.row.col.f32.bf16.bf16.f32",
    "float16": "k16.row.col.f32.f16.f16.f32",
    "int8": "k32.row.col.s32.s8.s8.s32",
}
_TEXT = "mma.sync.aligned.{} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"


@instruction(_F16, _TEXT.format("m16n8k16.row.col.f32.bf16.bf16.f32"), effect="converges")
def mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """a [16, 16] · b [16, 8] + c of bfloat16 with float32 sums -> four float32 in the layout of c."""


@instruction(_F16, _TEXT.format("m16n8k16.row.col.f32.f16.f16.f32"), effect="converges")
def mma_m16n8k16_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """a [16, 16] · b [16, 8] + c of float16 with float32 sums -> four float32 in the layout of c."""


@instruction(ints4(*[uint32] * 6, *[int32] * 4), _TEXT.format("m16n8k32.row.col.s32.s8.s8.s32"), effect="converges")
def mma_m16n8k32_s8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """a [16, 32] · b [32, 8] + c of int8 with int32 sums; as m16n8k16 with four elements a word in place of two."""


@cache
def mma_update(name):
    """update(sums, at, a, a_at, b0, b1): m16n8k16 of "bfloat16" or "float16" into four elements of a local array, in place.

    sums[at : at + 4] (float32, the layout of c) += a · b, with the words a[a_at : a_at + 4] of a local array. "int8": m16n8k32
    with int32 sums. sm_80 and later.
    One call where the plain product takes a dozen reads and writes of elements: loops over many products stay short enough
    for the compiler to unroll.
    """
    text = _TEXT.format(f"m16n8{_SHAPES[name]}")
    word = ir.IntType(32)
    value, letter = (word, "r") if name == "int8" else (ir.FloatType(), "f")
    products = ir.FunctionType(ir.LiteralStructType([value] * 4), [word] * 6 + [value] * 4)
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4)

    @intrinsic
    def update(typingctx, sums, at, a, a_at, b0, b1):
        def emit(context, builder, signature, arguments):
            sums, at, a, a_at, b0, b1 = arguments
            targets = _elements(context, builder, signature.args[0], sums, at)
            words = [builder.load(p) for p in _elements(context, builder, signature.args[2], a, a_at)]
            asm = ir.InlineAsm(products, text, constraints, side_effect=False)
            old = [builder.load(p) for p in targets]
            new = builder.call(asm, [*words, b0, b1, *old], attrs=("convergent", "readnone", "nounwind"))
            for i, target in enumerate(targets):
                builder.store(builder.extract_value(new, i), target)
            return context.get_dummy_value()

        return types.void(sums, types.int64, a, types.int64, uint32, uint32), emit

    return update


def _elements(context, builder, array_type, array, first):
    """The addresses of four consecutive elements of a one-dimensional array."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return [builder.gep(data, [builder.add(first, ir.IntType(64)(i))]) for i in range(4)]
