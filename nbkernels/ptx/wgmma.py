"""Tensor-core products of a warpgroup, four warps, with operands in shared memory (wgmma, sm_90a).

The sums of m64nNk…, for thread t of the warpgroup, warp w = t / 32, lane l = t % 32: row = 16·w + l / 4, column = 2·(l % 4):

    sums[4·j], sums[4·j + 1]       (row, 8·j + column), (row, 8·j + column + 1)
    sums[4·j + 2], sums[4·j + 3]   (row + 8, the same)

An operand a from registers is four words a thread, the a of mma.m16n8k16 (k32 for bytes) of the thread's warp (``mma``).

A product runs on its own until it is waited for. The order around it:

    hold(sums, 0); wgmma_fence(); update(sums, 0, …) …; wgmma_commit(); …; wgmma_wait(0); hold(sums, 0)

``hold`` keeps the compiler from computing with the sums on the wrong side. Words of an operand a are read while the product runs,
which the assembler does not reckon with where this lasts into a loop's next turn: it gives their registers to other values.
``wgmma_words_until`` keeps them. A descriptor says where an operand lies, with offsets
in units of 16 bytes; PTX ISA, "Matrix descriptor":

    bits 0-13 address   16-29 leading offset   32-45 stride offset   62-63 swizzle: 1, 2, 3 for 128, 64, 32 bytes
"""

from functools import cache

from llvmlite import ir
from numba import cuda, types, uint32, uint64
from numba.cuda.extending import intrinsic

from nbkernels.ptx.asm import instruction
from nbkernels.ptx.registers import elements, hold, put

__all__ = [
    "descriptor_address",
    "descriptor_bits",
    "fewer_registers",
    "hold",
    "more_registers",
    "wgmma_commit",
    "wgmma_fence",
    "wgmma_update",
    "wgmma_wait",
    "wgmma_words_until",
]

void = types.void
_SHORT = {"bfloat16": "bf16", "float16": "f16", "int8": "s8"}
_SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}


@instruction(void(), "wgmma.fence.sync.aligned;", effect="converges")
def wgmma_fence():
    """Before the first product, and whenever other code has written its registers."""


@instruction(void(), "wgmma.commit_group.sync.aligned;", effect="converges")
def wgmma_commit():
    """Close the group of the warpgroup's products since the last commit."""


@intrinsic
def wgmma_wait(typingctx, pending):
    """Wait until all but the ``pending`` (a constant) newest groups of products are done."""
    return _constant_instruction(pending, "wgmma.wait_group.sync.aligned {};")


@intrinsic
def more_registers(typingctx, count):
    """setmaxnreg: from here each thread has ``count`` (a constant, a multiple of 8) registers; waits until they are free.

    The compiler must know how many a thread has at entry: ``launch_bounds=(threads, 1)``.
    """
    return _constant_instruction(count, "setmaxnreg.inc.sync.aligned.u32 {};")


@intrinsic
def fewer_registers(typingctx, count):
    """setmaxnreg: this warpgroup gives registers back, down to ``count`` (a constant, a multiple of 8) a thread."""
    return _constant_instruction(count, "setmaxnreg.dec.sync.aligned.u32 {};")


def _constant_instruction(constant, text):
    if not isinstance(constant, types.IntegerLiteral):
        return None

    def emit(context, builder, signature, arguments):
        filled = text.format(constant.literal_value)
        asm = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), filled, "~{memory}", side_effect=True)
        builder.call(asm, [], attrs=("convergent", "nounwind"))
        return context.get_dummy_value()

    return void(constant), emit


def descriptor_bits(leading_bytes, stride_bytes, swizzle_bytes):
    """The constant part of a descriptor, to be added to ``descriptor_address``."""
    return (leading_bytes >> 4) << 16 | (stride_bytes >> 4) << 32 | _SWIZZLE[swizzle_bytes] << 62


@cuda.jit(device=True, inline="always")
def descriptor_address(shared):
    """The varying part of a descriptor: the shared byte address (uint32) of the operand's first element."""
    return uint64((shared & uint32(0x3FFFF)) >> uint32(4))


@cache
def wgmma_update(name, columns, *, a="shared", a_transposed=False, b_transposed=False):
    """A product m64 × ``columns`` (a multiple of 8 up to 256) × 32 bytes of k, added to a local array in place.

    name: "bfloat16", "float16" (float32 sums) or "int8" (int32 sums). a="shared":

        update(sums, at, a_descriptor, b_descriptor, accumulate)

    with sums[at : at + columns / 2] = a · b + (accumulate ? sums : 0); descriptors uint64, accumulate uint32. a="registers":

        update(sums, at, words, words_at, b_descriptor, accumulate)

    with a in words[words_at : words_at + 4] (uint32, a local array). a_transposed, b_transposed: the operand lies along its
    rows (columns of b) in shared memory in place of k; 16-bit types only.
    """
    short = _SHORT[name]
    integers = name == "int8"
    depth = 32 if integers else 16
    count = columns // 2
    value, letter = (ir.IntType(32), "r") if integers else (ir.FloatType(), "f")
    from_registers = a == "registers"
    first = 2 * count  # the operands before are the sums, out and in
    inputs = 4 if from_registers else 1
    a_text = "{" + ", ".join(f"${first + n}" for n in range(4)) + "}" if from_registers else f"${first}"
    tail = (
        "p" if integers else "p, 1, 1" + ("" if from_registers else f", {int(a_transposed)}") + f", {int(b_transposed)}"
    )
    result = "s32" if integers else "f32"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${first + inputs + 1}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{result}.{short}.{short} "
        f"{{{', '.join(f'${n}' for n in range(count))}}}, {a_text}, ${first + inputs}, {tail}; }}"
    )
    a_letters = ["r"] * 4 if from_registers else ["l"]
    letters = [f"={letter}"] * count + [str(n) for n in range(count)] + a_letters + ["l", "r", "~{memory}"]
    a_types = [ir.IntType(32)] * 4 if from_registers else [ir.IntType(64)]
    operands = [value] * count + a_types + [ir.IntType(64), ir.IntType(32)]
    asm_type = ir.FunctionType(ir.LiteralStructType([value] * count), operands)

    def multiply(context, builder, array_type, sums, at, a_values, b, accumulate):
        targets = elements(context, builder, array_type, sums, at, count)
        asm = ir.InlineAsm(asm_type, text, ",".join(letters), side_effect=True)
        old = [builder.load(t) for t in targets]
        new = builder.call(asm, [*old, *a_values, b, accumulate], attrs=("convergent", "nounwind"))
        put(builder, new, targets)
        return context.get_dummy_value()

    if from_registers:

        @intrinsic
        def update(typingctx, sums, at, words, words_at, b_descriptor, accumulate):
            def emit(context, builder, signature, arguments):
                sums, at, words, words_at, b, accumulate = arguments
                places = elements(context, builder, signature.args[2], words, words_at, 4)
                values = [builder.load(p) for p in places]
                return multiply(context, builder, signature.args[0], sums, at, values, b, accumulate)

            return void(sums, types.int64, words, types.int64, uint64, uint32), emit

        return update

    @intrinsic
    def update(typingctx, sums, at, a_descriptor, b_descriptor, accumulate):
        def emit(context, builder, signature, arguments):
            sums, at, a_descriptor, b, accumulate = arguments
            return multiply(context, builder, signature.args[0], sums, at, [a_descriptor], b, accumulate)

        return void(sums, types.int64, uint64, uint64, uint32), emit

    return update


@intrinsic
def wgmma_words_until(typingctx, words, at, never):
    """Words [at, at + 4) of a local array keep their registers up to here; behind the wait for the products that read them.

    never: a uint32 that is 0, which the assembler must not know.
    """
    text = "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.shared.v4.b32 [$4], {$0, $1, $2, $3}; }"
    asm_type = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * 5)

    def emit(context, builder, signature, arguments):
        words, at, never = arguments
        places = elements(context, builder, signature.args[0], words, at, 4)
        asm = ir.InlineAsm(asm_type, text, "r,r,r,r,r,~{memory}", side_effect=True)
        builder.call(asm, [*(builder.load(p) for p in places), never], attrs=("nounwind",))
        return context.get_dummy_value()

    return void(words, types.int64, uint32), emit
