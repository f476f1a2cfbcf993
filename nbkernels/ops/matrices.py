"""Products with dense and int8 weights, and the quantisation of weights."""

from math import prod

import numpy as np

from nbkernels import reference
from nbkernels.arrays import FLOATS, Int8Weight
from nbkernels.launch import memory
from nbkernels.launch.replay import replayed
from nbkernels.ops.call import (
    Call,
    Int8Result,
    as_rows,
    check_out,
    finish_host,
    finish_int8_host,
    kernel_module,
    merge_rows,
)
from nbkernels.ops.checks import (
    as_dtype,
    check_axes,
    check_choice,
    check_contiguous_last,
    check_dtype,
    check_float,
    check_integer,
    check_number,
    check_overlap,
    check_rows,
    check_shape,
)

ACTIVATIONS = (None, "silu", "gelu", "gelu_exact", "silu_mul")


INT8_DEPTH = 2**17  # from so many columns on 128 · 128 · columns may not fit into int32


@replayed
def matmul(x, weight, *, bias=None, residual=None, activation=None, plan_rows=None, out=None, stream=None):
    """activation(x @ weightᵀ + bias) + residual. x [..., in], weight [out, in], bias [out], residual [..., out].

    activation: None, "silu", "gelu" (tanh form) or "gelu_exact". out may be residual.

    activation="silu_mul" is the gated unit of SwiGLU: row 2i of weight [2·n, in] is a gate's row i, row 2i + 1 an up's, the bias
    likewise, and the result [..., n] is silu(gate) · up of the two products in float32, rounded once. There is no residual.

    plan_rows: the kernel is chosen as for so many rows where there are fewer; then a row's bits depend neither on how many
    there are nor on which it is. The CPU has no such choice.
    """
    call = Call(stream, ("bias", "residual", "out"), x=x, weight=weight, bias=bias, residual=residual, out=out)
    dtype = check_float(x=call.x, weight=call.weight, bias=call.bias, residual=call.residual)
    shape = _check_matmul(call, call.weight, activation, plan_rows)
    if call.on_host:
        check_out(call, shape, dtype)
        value = reference.matmul(call.x, call.weight, bias=call.bias, residual=call.residual, activation=activation)
        return finish_host(value, x, out)
    return _run_matmul("matmul", call, call.weight, shape, dtype, activation, out, plan_rows)


@replayed
def int8_matmul(
    x,
    weight,
    *,
    bias=None,
    residual=None,
    activation=None,
    activations=None,
    dtype=None,
    plan_rows=None,
    out=None,
    stream=None,
):
    """``matmul`` with an Int8Weight of [out, in], dequantised on the way: sums in float32, the result in x's dtype.

    activations="int8": x is quantised too, row by row (a scale a row, as ``quantize_int8`` does it), and products of int8 are
    summed in int32, exactly; the rest is float32. x may also come quantised: an Int8Weight with values [..., in] and scales
    [..., 1]. A row of x with a NaN or an infinity gives NaN. group_size of the weight must then be a multiple of 32, or
    at least ``in``; with one scale a row ``in`` is at most 131071, beyond which int32 could overflow.

    activation="silu_mul" as in ``matmul``; not with int8 activations.

    dtype: of the result, bias and residual with int8 activations; default x's, or of an x that comes quantised that of residual
    or bias, else float32.
    """
    if not isinstance(weight, Int8Weight):
        raise TypeError(f"weight: {type(weight).__name__}, wanted an Int8Weight (see quantize_int8)")
    check_choice("activations", activations, (None, "int8"))
    quantised = isinstance(x, Int8Weight)
    first, x_scales = (x.values, x.scales) if quantised else (x, None)
    parts = {"x_scales": x_scales, "values": weight.values, "scales": weight.scales}
    call = Call(
        stream, ("x_scales", "bias", "residual", "out"), x=first, **parts, bias=bias, residual=residual, out=out
    )
    if quantised:
        check_dtype(np.int8, **{"x.values": call.x})
        check_dtype(np.float32, **{"x.scales": call.x_scales})
        own = next((a.dtype for a in (call.residual, call.bias) if a is not None), np.dtype(np.float32))
    else:
        own = check_float(x=call.x)
    dtype = own if dtype is None else as_dtype(dtype)
    if dtype not in FLOATS:
        raise TypeError(f"dtype: {dtype}, wanted float32, float16 or bfloat16")
    if not quantised and activations is None and dtype != own:
        raise TypeError(f"dtype: {dtype}, wanted {own} as x")
    check_dtype(dtype, bias=call.bias, residual=call.residual)
    check_dtype(np.int8, **{"weight.values": call.values})
    check_dtype(np.float32, **{"weight.scales": call.scales})
    described = Int8Weight(call.values, call.scales, weight.group_size)
    if activation == "silu_mul" and (quantised or activations == "int8"):
        raise ValueError("activation: 'silu_mul', wanted None, 'silu', 'gelu' or 'gelu_exact' with int8 activations")
    shape = _check_matmul(call, described, activation, plan_rows)
    if quantised or activations == "int8":
        return _int8_by_int8(call, x, first, described, shape, dtype, activation, out, plan_rows)
    if call.on_host:
        check_out(call, shape, dtype)
        value = reference.int8_matmul(call.x, described, bias=call.bias, residual=call.residual, activation=activation)
        return finish_host(value, x, out)
    check_contiguous_last(**{"weight.scales": call.scales})
    return _run_matmul("int8_matmul", call, described, shape, dtype, activation, out, plan_rows)


def _int8_by_int8(call, x, first, weight, shape, dtype, activation, out, plan_rows):
    """int8_matmul with int8 activations: x as it was given, quantised or not; first: its array."""
    depth = weight.shape[1]
    quantised = isinstance(x, Int8Weight)
    if quantised and x.group_size is not None and x.group_size < depth:
        raise ValueError(f"x: group_size {x.group_size}, wanted one scale a row")
    if weight.group_size is None or weight.group_size >= depth:
        if depth >= INT8_DEPTH:
            raise ValueError(f"x: {depth} columns, wanted less than {INT8_DEPTH} for sums in int32, or a scale a group")
    elif weight.group_size % 32:
        raise ValueError(f"weight: group_size {weight.group_size}, wanted a multiple of 32 with int8 activations")
    if call.on_host:
        check_out(call, shape, dtype)
        given = Int8Weight(call.x, call.x_scales) if quantised else call.x
        value = reference.int8_matmul(
            given,
            weight,
            bias=call.bias,
            residual=call.residual,
            activation=activation,
            activations="int8",
            dtype=dtype,
        )
        return finish_host(value, first, out)
    check_contiguous_last(
        **{"x": call.x, "weight": weight.values, "weight.scales": weight.scales},
        bias=call.bias,
        residual=call.residual,
        out=call.out,
    )
    y = call.result(shape, dtype, out)
    check_overlap(
        call.out,
        same=[("residual", call.residual)],
        other=[("x", call.x), ("x.scales", call.x_scales), ("weight", weight.values), ("bias", call.bias)],
    )
    if y.size:
        values, scales = call.x, call.x_scales
        if not quantised:
            values, scales = _quantised_rows(call)
        run = kernel_module("int8_matmul").run_int8
        for rows, row_scales, added, result in _merge_rows_apart((values, scales, call.residual, y)):
            run(rows, row_scales, weight, call.bias, added, activation, result, call.device, call.stream, plan_rows)
    return call.hand_out(y, call.returned)


def _quantised_rows(call):
    """x of a call in int8, in memory of our own that lasts as long as the work on it: values [rows, in], scales [rows, 1]."""
    *outer, depth = call.x.shape
    rows = prod(outer)
    values = memory.empty((rows, depth), np.int8, call.stream)
    scales = memory.empty((rows, 1), np.float32, call.stream)
    start = 0
    for (some,) in merge_rows((call.x,)):
        end = start + some.shape[0]
        kernel_module("quantize").run(some, values[start:end], scales[start:end], None, call.device, call.stream)
        start = end
    return values.reshape(*outer, depth), scales.reshape(*outer, 1)


def _check_matmul(call, weight, activation, plan_rows):
    if plan_rows is not None:
        check_integer("plan_rows", plan_rows)
        check_number("plan_rows", plan_rows, least=1)
    check_rows("x", call.x)
    check_axes("weight", weight, ("out", "in"))
    if call.x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: shape {tuple(call.x.shape)}, wanted {weight.shape[1]} columns as weight {tuple(weight.shape)}"
        )
    check_choice("activation", activation, ACTIVATIONS)
    columns = weight.shape[0]
    check_shape("bias", call.bias, (columns,))
    if activation == "silu_mul":
        if columns % 2:
            raise ValueError(
                f"weight: {columns} rows, wanted an even number for a gate and an up by turns ('silu_mul')"
            )
        if call.residual is not None:
            raise ValueError("residual: given, wanted None with activation 'silu_mul'")
        columns //= 2
    shape = (*call.x.shape[:-1], columns)
    check_shape("residual", call.residual, shape)
    return shape


def _run_matmul(name, call, weight, shape, dtype, activation, out, plan_rows):
    values = weight.values if isinstance(weight, Int8Weight) else weight
    check_contiguous_last(x=call.x, weight=values, bias=call.bias, residual=call.residual, out=call.out)
    y = call.result(shape, dtype, out)
    check_overlap(
        call.out, same=[("residual", call.residual)], other=[("x", call.x), ("weight", values), ("bias", call.bias)]
    )
    if y.size:
        run = kernel_module(name).run
        for rows, added, result in _merge_rows_apart((call.x, call.residual, y)):
            run(rows, weight, call.bias, added, activation, result, call.device, call.stream, plan_rows)
    return call.hand_out(y, call.returned)


def _merge_rows_apart(arrays):
    """As merge_rows for arrays whose last axes differ."""
    first = arrays[0]
    if first.ndim == 2:
        yield arrays
        return
    if first.ndim == 1:
        yield tuple(x if x is None else x.reshape(1, -1) for x in arrays)
        return
    try:
        merged = tuple(x if x is None else as_rows(x) for x in arrays)
    except ValueError:
        for i in range(first.shape[0]):
            yield from _merge_rows_apart(tuple(x if x is None else x[i] for x in arrays))
    else:
        yield merged


@replayed
def quantize_int8(weight, *, group_size=None, stream=None):
    """Symmetric int8 quantisation: values = round(weight / scale), scale = max|weight| / 127 of a row or group.

    weight [..., columns] float, a weight [out, in] or activations; group_size: columns a scale (the last group may be short),
    None for one scale a row -> Int8Weight with values int8 of that shape and scales float32 [..., groups], of the weight's kind.
    """
    call = Call(stream, (), weight=weight)
    check_float(weight=call.weight)
    check_rows("weight", call.weight)
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer))):
        raise TypeError(f"group_size: {type(group_size).__name__}, wanted an integer or None")
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size: {group_size}, wanted a positive number of columns or None")
    group_size = None if group_size is None else int(group_size)
    if call.on_host:
        return finish_int8_host(call, reference.quantize_int8(call.weight, group_size=group_size), weight, None)
    check_contiguous_last(weight=call.weight)
    groups = 1 if group_size is None else max(1, -(-call.weight.shape[-1] // group_size))
    result = Int8Result(call, call.weight.shape, groups, group_size, None, {})
    result.quantise(call.weight, group_size)
    return result.hand_out()
