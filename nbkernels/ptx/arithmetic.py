"""Approximate and fused arithmetic of the special-function and integer units."""

from numba import float32, int32, types, uint32

from nbkernels.ptx.asm import instruction

pair = types.UniTuple(float32, 2)


@instruction(float32(float32), "ex2.approx.ftz.f32 $0, $1;")
def ex2(x):
    """2**x; relative error at most 2**-22. Every architecture."""


@instruction(float32(float32), "lg2.approx.ftz.f32 $0, $1;")
def lg2(x):
    """log2(x); absolute error about 2**-22 where x is in (0.5, 2), relative elsewhere. Every architecture."""


@instruction(float32(float32), "rcp.approx.ftz.f32 $0, $1;")
def rcp(x):
    """1 / x; at most 1 unit in the last place off. Every architecture."""


@instruction(float32(float32), "rsqrt.approx.ftz.f32 $0, $1;")
def rsqrt(x):
    """1 / sqrt(x); relative error at most 2**-22.4. Every architecture."""


@instruction(float32(float32), "tanh.approx.f32 $0, $1;")
def tanh_approx(x):
    """tanh(x); relative error at most 2**-11: for 16-bit results only. sm_75 and later."""


@instruction(float32(float32, float32), "max.f32 $0, $1, $2;")
def fmax(a, b):
    """The larger of two; a NaN loses against a number. Every architecture."""


@instruction(float32(float32, float32), "max.NaN.f32 $0, $1, $2;")
def fmax_nan(a, b):
    """The larger of two; a NaN wins. sm_80 and later."""


@instruction(float32(float32, float32, float32), "fma.rn.f32 $0, $1, $2, $3;")
def fma(a, b, c):
    """a · b + c, rounded once. Every architecture."""


@instruction(int32(int32, int32, int32), "dp4a.s32.s32 $0, $1, $2, $3;")
def dp4a(a, b, c):
    """c + the dot product of four signed bytes of a with those of b. sm_61 and later."""


@instruction(uint32(uint32, uint32, uint32), "prmt.b32 $0, $1, $2, $3;")
def prmt(a, b, selector):
    """Four bytes picked out of the eight of (b, a): nibble i of selector names byte i of the result (8: its sign). All."""


@instruction(uint32(uint32, uint32), "mul.hi.u32 $0, $1, $2;")
def mulhi(a, b):
    """The upper 32 bits of the 64-bit product. Every architecture."""


@instruction(uint32(uint32, uint32), "sub.f16x2 $0, $1, $2;")
def sub_f16x2(a, b):
    """Two float16 of a word minus those of another. Every architecture."""


@instruction(uint32(uint32, uint32, uint32), "fma.rn.bf16x2 $0, $1, $2, $3;")
def fma_bf16x2(a, b, c):
    """a · b + c of the two bfloat16 of each word, rounded once. sm_80 and later."""
