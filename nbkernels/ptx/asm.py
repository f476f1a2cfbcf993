"""Machine instructions as Python functions: inline PTX through llvmlite.

``instruction`` turns a signature and an asm text into a function that a ``numba.cuda`` kernel can call. The decorated
function has a docstring and no body: it never runs as Python.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

__all__ = ["absent", "instruction", "pointer", "storage"]

# the letter by which inline asm names a register of this type
_REGISTER = {
    types.float32: "f",
    types.float64: "d",
    types.int32: "r",
    types.uint32: "r",
    types.int64: "l",
    types.uint64: "l",
    types.uint16: "h",
    types.int16: "h",
}

# what an instruction does beside computing its result; it decides what the compiler may move it across
_EFFECTS = ("none", "constant", "reads", "writes", "converges")


def instruction(signature, text, *, effect="none", tied=()):
    """Make the decorated function emit the asm ``text`` at its call site.

    signature: ``result(arguments…)`` in Numba types; a result UniTuple(T, n) is n output registers, ``types.void`` is none.
    text: PTX with $0, $1, … for the results, then the arguments.
    effect: "none" (a pure function of its registers), "constant" (reads memory that nobody writes during the kernel), "reads"
    memory (kept in order with all that follows: NVVM takes a load that is only marked as reading out of a loop, over the
    barriers and stores in it), "writes" or orders memory, "converges" (the lanes of a warp, or threads of a block, act
    together: never moved into or out of a branch).
    tied: indices of arguments that share the register of the result with the same rank in ``tied`` (accumulators).
    """
    assert effect in _EFFECTS
    result = signature.return_type
    if result == types.void:
        results = ()
    elif isinstance(result, types.BaseTuple):
        results = tuple(result)
    else:
        results = (result,)
    inputs = [_REGISTER[a] for a in signature.args]
    for output, argument in enumerate(tied):
        inputs[argument] = str(output)
    constraints = ["=" + _REGISTER[r] for r in results] + inputs
    if effect in ("writes", "converges"):
        constraints.append("~{memory}")
    constraints = ",".join(constraints)

    def emit(context, builder, _, arguments):
        outputs = [context.get_value_type(r) for r in results]
        if not outputs:
            returned = ir.VoidType()
        elif len(outputs) == 1:
            returned = outputs[0]
        else:
            returned = ir.LiteralStructType(outputs)
        operands = [context.get_value_type(a) for a in signature.args]
        asm = ir.InlineAsm(
            ir.FunctionType(returned, operands), text, constraints, side_effect=effect not in ("none", "constant")
        )
        attributes = {
            "none": ("readnone", "nounwind"),
            "constant": ("readonly", "nounwind"),
            "reads": ("nounwind",),
            "writes": ("nounwind",),
            "converges": ("convergent", "nounwind"),
        }[effect]
        value = builder.call(asm, arguments, attrs=attributes)
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1 and not isinstance(result, types.BaseTuple):
            return value
        if len(outputs) == 1:
            return cgutils.pack_array(builder, [value])
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(len(outputs))])

    def decorate(function):
        # Numba reads the argument count off the typing function, so it gets the decorated function's own parameters
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        assert len(names) == len(signature.args), function.__name__
        scope = {"signature": signature, "emit": emit}
        exec(
            f"def {function.__name__}(typingctx{''.join(', ' + n for n in names)}):\n    return signature, emit\n",
            scope,
        )
        typing = scope[function.__name__]
        typing.__doc__ = function.__doc__
        typing.__module__ = function.__module__
        return intrinsic(typing)

    return decorate


def storage(dtype):
    """The Numba type in which a kernel holds an element of this NumPy dtype in memory: 16-bit floats are their bits."""
    name = str(dtype)
    if name in ("float16", "bfloat16"):
        return types.uint16
    return {
        "float32": types.float32,
        "float64": types.float64,
        "int8": types.int8,
        "uint8": types.uint8,
        "int32": types.int32,
        "uint32": types.uint32,
        "int64": types.int64,
    }[name]


# The type of a last parameter that a variant of a kernel does not have: inside it is the constant 0.
absent = types.Omitted(0)


def pointer(dtype):
    """A kernel parameter that is the address of elements of this NumPy dtype: ``p[i]`` reads or writes element i."""
    return types.CPointer(storage(dtype))
