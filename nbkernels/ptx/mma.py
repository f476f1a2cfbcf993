"""Tensor-core products of one warp (mma.sync, sm_80 and later).

The fragments of m16n8k16, for lane l with row = l / 4 and column = 2·(l % 4); each word holds two 16-bit elements:

    a [16, 16]  a0 (row, column)  a1 (row + 8, column)  a2 (row, column + 8)  a3 (row + 8, column + 8)
    b [16, 8]   b0 (k = column, n = row)  b1 (k = column + 8, n = row)         two consecutive k a word
    c [16, 8]   c0, c1 (row, column and column + 1)  c2, c3 (row + 8, the same)
"""

from numba import float32, int32, types, uint32

from nbkernels.ptx.asm import instruction

floats4 = types.UniTuple(float32, 4)
ints4 = types.UniTuple(int32, 4)
_F16 = floats4(*[uint32] * 6, *[float32] * 4)
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
