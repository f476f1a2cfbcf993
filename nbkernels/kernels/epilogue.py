"""What follows a matrix product while its sums are still in registers.

    y = activation(sum · scale + bias) + residual        in float32, rounded once to y's dtype

scale is that of an int8 weight with one scale a row; the activations are those of ``activation``:
"gelu" is its tanh form, "gelu_exact" the other.

"silu_mul" is the gated unit of SwiGLU (Shazeer 2020): of two consecutive sums one element of y, which has half as many columns.

    sums         |gate 0|up 0|gate 1|up 1| …         gate and up: sum · scale + bias
    y            |silu(gate 0) · up 0|silu(gate 1) · up 1| …
"""

from dataclasses import dataclass
from functools import cache

from numba import cuda, float32, int64

from nbkernels import ptx
from nbkernels.kernels.activation import gelu_exact, gelu_tanh, silu
from nbkernels.kernels.elements import conversions, pair_conversions


@dataclass(frozen=True)
class Epilogue:
    """Compile-time choices of an epilogue: what there is of it."""

    row_scale: bool = False
    bias: bool = False
    activation: str | None = None
    residual: bool = False

    @property
    def gated(self):
        """Whether two consecutive sums make one element of y."""
        return self.activation == "silu_mul"


@cuda.jit(device=True, inline="always")
def _same(x):
    return x


_ACTIVATIONS = {None: _same, "silu": silu, "gelu": gelu_tanh, "gelu_exact": gelu_exact}


def activation_function(epilogue):
    """Its activation, float32 -> float32. Not for a gated epilogue."""
    return _ACTIVATIONS[epilogue.activation]


@cache
def combine(epilogue):
    """combine(sum, scale, bias, residual) -> an element of y in float32, of a plain epilogue; what it lacks is not read."""
    has_scale, has_bias, has_residual = epilogue.row_scale, epilogue.bias, epilogue.residual
    activate = activation_function(epilogue)

    @cuda.jit(device=True, inline="always")
    def combined(value, scale, bias, residual):
        if has_scale:
            value *= scale
        if has_bias:
            value += bias
        value = activate(value)
        if has_residual:
            value += residual
        return value

    return combined


@cache
def finish(dtype, epilogue, width=1):
    """store(sums, column, scales, scale_stride, bias, residual, residual_index, out, out_index): elements of a row of y.

    sums: a tuple of ``width``: 1, or 2 for consecutive columns of a 16-bit dtype, which are read and written as 4-byte words.
    Read where the epilogue has them: scales[column · scale_stride], bias[column], residual[residual_index]; indices int64.
    A gated epilogue takes pairs of any dtype, from an even column on, whatever ``width``: one element of y is written.
    """
    if epilogue.gated:
        return _finish_gated(dtype, epilogue)
    from_storage, to_storage = conversions(dtype)
    unpack, pack = pair_conversions(dtype)
    has_scale, has_bias, has_residual = epilogue.row_scale, epilogue.bias, epilogue.residual
    activate, combined = activation_function(epilogue), combine(epilogue)

    @cuda.jit(device=True, inline="always")
    def store_one(sums, column, scales, scale_stride, bias, residual, residual_index, out, out_index):
        scale, offset, added = float32(1.0), float32(0.0), float32(0.0)
        if has_scale:
            scale = scales[column * scale_stride]
        if has_bias:
            offset = from_storage(bias[column])
        if has_residual:
            added = from_storage(residual[residual_index])
        out[out_index] = to_storage(combined(sums[0], scale, offset, added))

    @cuda.jit(device=True, inline="always")
    def store_pair(sums, column, scales, scale_stride, bias, residual, residual_index, out, out_index):
        first, second = sums
        if has_scale:
            first *= scales[column * scale_stride]
            second *= scales[(column + int64(1)) * scale_stride]
        if has_bias:
            pair = unpack(ptx.ld_global_nc(ptx.address(bias, column)))
            first += pair[0]
            second += pair[1]
        first = activate(first)
        second = activate(second)
        if has_residual:
            pair = unpack(ptx.ld_global(ptx.address(residual, residual_index)))
            first += pair[0]
            second += pair[1]
        ptx.st_global(ptx.address(out, out_index), pack(first, second))

    return store_pair if width == 2 else store_one


@cache
def _finish_gated(dtype, epilogue):
    """``finish`` of a gated epilogue."""
    from_storage, to_storage = conversions(dtype)
    has_scale, has_bias = epilogue.row_scale, epilogue.bias

    @cuda.jit(device=True, inline="always")
    def store_gated(sums, column, scales, scale_stride, bias, residual, residual_index, out, out_index):
        gate, up = sums
        if has_scale:
            gate *= scales[column * scale_stride]
            up *= scales[(column + int64(1)) * scale_stride]
        if has_bias:
            gate += from_storage(bias[column])
            up += from_storage(bias[column + int64(1)])
        out[out_index] = to_storage(float32(silu(gate) * up))

    return store_gated
