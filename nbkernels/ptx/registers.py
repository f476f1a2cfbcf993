"""Registers that the compiler must not compute across a point of the program: empty inline asm."""

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic


@cache
def hold(count, kind="f"):
    """hold(values, at): values [at, at + count) of a local array are computed before this point, and used after it.

    What was derived from them before is derived anew from here on. kind: "f" float32, "r" 32-bit integers.
    """
    value = {"f": ir.FloatType(), "r": ir.IntType(32)}[kind]
    constraints = ",".join([f"={kind}"] * count + [str(n) for n in range(count)] + ["~{memory}"])
    returned = ir.LiteralStructType([value] * count) if count > 1 else value

    @intrinsic
    def held(typingctx, values, at):
        def emit(context, builder, signature, arguments):
            targets = elements(context, builder, signature.args[0], arguments[0], arguments[1], count)
            asm = ir.InlineAsm(ir.FunctionType(returned, [value] * count), "", constraints, side_effect=True)
            new = builder.call(asm, [builder.load(t) for t in targets], attrs=("convergent", "nounwind"))
            put(builder, new, targets)
            return context.get_dummy_value()

        return types.void(values, types.int64), emit

    return held


def elements(context, builder, array_type, array, first, count):
    """For an intrinsic: the addresses of consecutive elements of a one-dimensional local array."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return [builder.gep(data, [builder.add(first, ir.IntType(64)(i))]) for i in range(count)]


def put(builder, values, targets):
    """For an intrinsic: store a value, or a struct of several, to addresses."""
    if len(targets) == 1:
        builder.store(values, targets[0])
        return
    for n, target in enumerate(targets):
        builder.store(builder.extract_value(values, n), target)
