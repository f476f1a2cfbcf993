"""Between float32 registers and the 16-bit formats, two at a time in a 32-bit word (the lower half is the first)."""

from numba import float32, types, uint16, uint32

from nbkernels.ptx.asm import instruction

pair = types.UniTuple(float32, 2)


@instruction(float32(uint32), "mov.b32 $0, $1;")
def float_from_bits(word):
    """The float32 with these 32 bits."""


@instruction(uint32(float32), "mov.b32 $0, $1;")
def bits_from_float(x):
    """The 32 bits of a float32."""


@instruction(float32(uint16), "{ .reg .b16 z; mov.b16 z, 0; mov.b32 $0, {z, $1}; }")
def float_from_bf16(bits):
    """bfloat16 -> float32: its bits are the upper half. Every architecture."""


@instruction(float32(uint16), "cvt.f32.f16 $0, $1;")
def float_from_f16(bits):
    """float16 -> float32, exact. Every architecture."""


@instruction(uint16(float32), "cvt.rn.bf16.f32 $0, $1;")
def bf16_from_float(x):
    """float32 -> bfloat16, rounded to the nearest even. sm_80 and later."""


@instruction(uint16(float32), "cvt.rn.f16.f32 $0, $1;")
def f16_from_float(x):
    """float32 -> float16, rounded to the nearest even; beyond 65504 infinite. Every architecture."""


@instruction(pair(uint32), "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")
def floats_from_bf16x2(word):
    """Two bfloat16 of a word -> (lower, upper) float32. Every architecture."""


@instruction(pair(uint32), "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }")
def floats_from_f16x2(word):
    """Two float16 of a word -> (lower, upper) float32. Every architecture."""


@instruction(uint32(float32, float32), "cvt.rn.bf16x2.f32 $0, $2, $1;")
def bf16x2_from_floats(lower, upper):
    """Two float32 -> a word of two bfloat16, rounded to the nearest even. sm_80 and later."""


@instruction(uint32(float32, float32), "cvt.rn.f16x2.f32 $0, $2, $1;")
def f16x2_from_floats(lower, upper):
    """Two float32 -> a word of two float16, rounded to the nearest even. sm_80 and later."""
