"""Operations on rows: softmax, norms, activations, and the lookup of rows in a table."""

import numpy as np

from nbkernels import reference
from nbkernels.arrays import FLOATS, Int8Weight
from nbkernels.launch.replay import replayed
from nbkernels.ops.call import (
    Call,
    Int8Result,
    check_out,
    finish_host,
    finish_int8_host,
    int8_out,
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
    check_number,
    check_overlap,
    check_rows,
    check_shape,
)


@replayed
def softmax(x, *, scale=1.0, out=None, stream=None):
    """exp(scale·x - max) / sum over the last axis. x [..., columns] float -> the same shape and dtype; out may be x.

    A row of -inf is NaN, and a NaN in a row makes it NaN.
    """
    call = Call(stream, ("out",), x=x, out=out)
    dtype = check_float(x=call.x)
    check_rows("x", call.x)
    check_number("scale", scale)
    if call.on_host:
        check_out(call, call.x.shape, dtype)
        return finish_host(reference.softmax(call.x, scale=scale), x, out)
    check_contiguous_last(x=call.x, out=call.out)
    y = call.result(call.x.shape, dtype, out)
    check_overlap(call.out, same=[("x", call.x)])
    if y.size:
        run = kernel_module("softmax").run
        for rows, result in merge_rows((call.x, y)):
            run(rows, result, float(scale), call.device, call.stream)
    return call.hand_out(y, call.returned)


@replayed
def layer_norm(x, weight=None, bias=None, *, residual=None, eps=1e-5, quantize=None, out=None, stream=None):
    """(x - mean) / sqrt(var + eps) · weight + bias over the last axis, var the mean square deviation.

    x [..., columns]; weight, bias [columns] of x's dtype or float32; residual of x's shape and dtype. With residual returns
    (norm(x + residual), x + residual) from one pass, the sum written into a new array. out may be x or residual.

    quantize="int8" gives the norm as an Int8Weight, values int8 of x's shape and scales float32 [..., 1]: what ``quantize_int8``
    makes of the norm in float32, before it is rounded to x's dtype. out is then such an Int8Weight to write into (its two
    arrays share memory with no input and not with each other).
    """
    return _norm("layer_norm", x, weight, bias, residual, eps, quantize, out, stream)


@replayed
def rms_norm(x, weight=None, *, residual=None, eps=1e-6, quantize=None, out=None, stream=None):
    """x / sqrt(mean(x²) + eps) · weight over the last axis; arguments and results as ``layer_norm``."""
    return _norm("rms_norm", x, weight, None, residual, eps, quantize, out, stream)


def _norm(name, x, weight, bias, residual, eps, quantize, out, stream):
    check_choice("quantize", quantize, (None, "int8"))
    quantized = quantize is not None
    outs = int8_out(out) if quantized else {"out": out}
    call = Call(stream, ("weight", "bias", "residual", *outs), x=x, weight=weight, bias=bias, residual=residual, **outs)
    dtype = check_float(x=call.x, residual=call.residual)
    check_rows("x", call.x)
    columns = call.x.shape[-1]
    for argument in ("weight", "bias"):
        array = getattr(call, argument)
        if array is not None:
            if array.dtype != dtype and array.dtype != np.float32:
                raise TypeError(f"{argument}: {array.dtype}, wanted {dtype} as x, or float32")
            check_shape(argument, array, (columns,))
    if call.weight is not None and call.bias is not None and call.weight.dtype != call.bias.dtype:
        raise TypeError(f"bias: {call.bias.dtype}, wanted {call.weight.dtype} as weight")
    check_shape("residual", call.residual, call.x.shape)
    check_number("eps", eps, least=0)
    affine = (call.weight,) if name == "rms_norm" else (call.weight, call.bias)
    if call.on_host:
        value = getattr(reference, name)(call.x, *affine, residual=call.residual, eps=eps, quantize=quantize)
        normed, total = (value, None) if residual is None else value
        if quantized:
            y = finish_int8_host(call, normed, x, out)
        else:
            check_out(call, call.x.shape, dtype)
            y = finish_host(normed, x, out)
        return y if residual is None else (y, finish_host(total, x, None))
    inputs = {"x": call.x, "residual": call.residual, "weight": call.weight, "bias": call.bias}
    check_contiguous_last(**inputs)
    total = total_returned = None
    if residual is not None:
        total = call.result(call.x.shape, dtype)
        total_returned = call.returned
    if quantized:
        result = Int8Result(call, call.x.shape, 1, None, out, inputs)
        y, scales = result.values, result.scales
    else:
        check_contiguous_last(out=call.out)
        y, scales = call.result(call.x.shape, dtype, out), None
        returned = call.returned
        check_overlap(
            call.out,
            same=[("x", call.x), ("residual", call.residual)],
            other=[("weight", call.weight), ("bias", call.bias)],
        )
    if y.size:
        run = kernel_module(name).run
        for rows, added, values, steps, summed in merge_rows((call.x, call.residual, y, scales, total)):
            run(rows, *affine, added, values, steps, summed, float(eps), call.device, call.stream)
    elif quantized:
        result.quantise(call.x, None)  # rows of no columns have scales, too
    y = result.hand_out() if quantized else call.hand_out(y, returned)
    return y if residual is None else (y, call.hand_out(total, total_returned))


@replayed
def gelu(x, *, approximate="tanh", out=None, stream=None):
    """x·Phi(x), Phi the normal distribution function: by its tanh form, or exactly with approximate="none". out may be x."""
    call = Call(stream, ("out",), x=x, out=out)
    dtype = check_float(x=call.x)
    check_choice("approximate", approximate, ("tanh", "none"))
    if call.on_host:
        check_out(call, call.x.shape, dtype)
        return finish_host(reference.gelu(call.x, approximate=approximate), x, out)
    check_contiguous_last(x=call.x, out=call.out)
    y = call.result(call.x.shape, dtype, out)
    check_overlap(call.out, same=[("x", call.x)])
    if y.size:
        run = kernel_module("activation").run_gelu
        for rows, result in merge_rows((call.x, y)):
            run(rows, result, approximate, call.device, call.stream)
    return call.hand_out(y, call.returned)


@replayed
def silu_mul(gate, up, *, out=None, stream=None):
    """gate / (1 + exp(-gate)) · up. gate, up of one shape [..., columns] and dtype, views of one fused array allowed.

    out may be gate or up.
    """
    return _gated("silu", gate, up, out, stream)


@replayed
def gelu_mul(gate, up, *, out=None, stream=None):
    """gelu(gate) · up, gelu in its tanh form; arguments as ``silu_mul``."""
    return _gated("gelu", gate, up, out, stream)


def _gated(activation, gate, up, out, stream):
    call = Call(stream, ("out",), gate=gate, up=up, out=out)
    dtype = check_float(gate=call.gate, up=call.up)
    check_shape("up", call.up, call.gate.shape)
    if call.on_host:
        check_out(call, call.gate.shape, dtype)
        return finish_host(getattr(reference, f"{activation}_mul")(call.gate, call.up), gate, out)
    check_contiguous_last(gate=call.gate, up=call.up, out=call.out)
    y = call.result(call.gate.shape, dtype, out)
    check_overlap(call.out, same=[("gate", call.gate), ("up", call.up)])
    if y.size:
        run = kernel_module("activation").run_gated
        for rows, other, result in merge_rows((call.gate, call.up, y)):
            run(rows, other, activation, result, call.device, call.stream)
    return call.hand_out(y, call.returned)


@replayed
def soft_cap(x, cap, *, out=None, stream=None):
    """cap · tanh(x / cap): logits held within a positive number cap (Gemma 2). x [..., columns]; out may be x."""
    call = Call(stream, ("out",), x=x, out=out)
    dtype = check_float(x=call.x)
    check_number("cap", cap, positive=True)
    if call.on_host:
        check_out(call, call.x.shape, dtype)
        return finish_host(reference.soft_cap(call.x, cap), x, out)
    check_contiguous_last(x=call.x, out=call.out)
    y = call.result(call.x.shape, dtype, out)
    check_overlap(call.out, same=[("x", call.x)])
    if y.size:
        run = kernel_module("activation").run_soft_cap
        for rows, result in merge_rows((call.x, y)):
            run(rows, result, float(cap), call.device, call.stream)
    return call.hand_out(y, call.returned)


@replayed
def embedding(ids, table, *, dtype=None, scale=1.0, positions=None, position_table=None, out=None, stream=None):
    """table[ids] · scale + position_table[p]. ids int32 [...]; table [vocab, hidden] float, or an Int8Weight -> [..., hidden].

    position_table [count, hidden] of the result's dtype, with positions int32 [batch]: ids are [batch, tokens], and token t of
    sequence b stands at p = positions[b] + t. A position outside of the table adds nothing on the device, ValueError on the CPU.

    dtype: of the result of an Int8Weight (default float32); a dense table gives its own. An id outside the vocabulary reads
    nothing and gives a row of zeros on the device, ValueError on the CPU.
    """
    quantised = isinstance(table, Int8Weight)
    parts = {"values": table.values, "scales": table.scales} if quantised else {"table": table}
    call = Call(
        stream, ("positions", "position_table", "out"),
        ids=ids, **parts, positions=positions, position_table=position_table, out=out,
    )  # fmt: skip
    check_dtype(np.int32, ids=call.ids, positions=call.positions)
    check_number("scale", scale)
    if (call.positions is None) != (call.position_table is None):
        missing, given = ("positions", "position_table")[:: 1 if call.positions is None else -1]
        raise TypeError(f"{missing}: None, wanted an array beside {given}")
    if quantised:
        check_dtype(np.int8, **{"table.values": call.values})
        check_dtype(np.float32, **{"table.scales": call.scales})
        described = Int8Weight(call.values, call.scales, table.group_size)
        dtype = as_dtype(np.float32 if dtype is None else dtype)
    else:
        described = call.table
        own = check_float(table=described)
        dtype = own if dtype is None else as_dtype(dtype)
        if dtype != own:
            raise TypeError(f"dtype: {dtype}, wanted {own} as table")
    if dtype not in FLOATS:
        raise TypeError(f"dtype: {dtype}, wanted float32, float16 or bfloat16")
    check_axes("table", described, ("vocab", "hidden"))
    shape = (*call.ids.shape, described.shape[1])
    if call.positions is not None:
        check_axes("ids", call.ids, ("batch", "tokens"))
        check_shape("positions", call.positions, call.ids.shape[:1])
        check_axes("position_table", call.position_table, ("count", "hidden"))
        check_shape("position_table", call.position_table, (call.position_table.shape[0], shape[-1]))
        check_dtype(dtype, position_table=call.position_table)
    if call.on_host:
        check_out(call, shape, dtype)
        if call.ids.size and (call.ids.min() < 0 or call.ids.max() >= described.shape[0]):
            raise ValueError(f"ids: {call.ids.min()} to {call.ids.max()} for a vocabulary of {described.shape[0]}")
        if call.positions is not None and call.ids.size:
            first, last = int(call.positions.min()), int(call.positions.max()) + call.ids.shape[1] - 1
            if first < 0 or last >= call.position_table.shape[0]:
                raise ValueError(f"positions: {first} to {last} for a table of {call.position_table.shape[0]}")
        value = reference.embedding(
            call.ids, described, dtype=dtype, scale=scale,
            positions=call.positions, position_table=call.position_table,
        )  # fmt: skip
        return finish_host(value, ids, out)
    dense = described.values if quantised else described
    check_contiguous_last(table=dense, positions=call.positions, position_table=call.position_table, out=call.out)
    if not call.ids.is_contiguous:
        raise ValueError(f"ids: strides {call.ids.strides}, wanted a contiguous array")
    if call.out is not None and not call.out.is_contiguous:
        raise ValueError(f"out: strides {call.out.strides}, wanted a contiguous array")
    y = call.result(shape, dtype, out)
    check_overlap(call.out, other=[("table", dense), ("position_table", call.position_table)])
    if y.size:
        flat = y.reshape(-1, shape[-1])
        kernel_module("embedding").run(
            call.ids.reshape(-1), described, flat, call.device, call.stream, scale=float(scale),
            positions=call.positions, position_table=call.position_table, tokens=shape[-2] if call.ids.ndim == 2 else 1,
        )  # fmt: skip
    return call.hand_out(y, call.returned)
