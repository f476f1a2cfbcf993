"""The public operations: check, choose a plan, allocate, launch.

Arrays of torch, CuPy, JAX, Numba or this package in device memory are taken without a copy, run on the GPU on their library's
current stream (or ``stream``), and the result comes back in the first array's kind. NumPy arrays (and host tensors) run on
the current device: on "cpu" through ``nbkernels.reference``, else they are copied to the device and the result back.
dtypes: float32, float16 and bfloat16, all float operands of a call of one dtype unless said otherwise; sums in float32. The
last axis of every device array must be contiguous; other axes may have any stride.

Every operation takes ``out`` (an array of the result's shape and dtype to write into; it may be an input only where that is
said) and ``stream`` (an integer handle or anything with __cuda_stream__), and raises TypeError or ValueError, naming the
argument, before anything is launched.
"""

from importlib import import_module
from math import prod

import numpy as np

from nbkernels import reference
from nbkernels.arrays import FLOATS, DeviceArray, Int8Weight, as_device_array, as_host_array, is_host, library
from nbkernels.launch import memory
from nbkernels.launch.device import DeviceError, cuda_device, current
from nbkernels.launch.replay import replayed

ACTIVATIONS = (None, "silu", "gelu", "gelu_exact", "silu_mul")
INT8_DEPTH = 2**17  # from so many columns on 128 · 128 · columns may not fit into int32
INT8, FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


class _Call:
    """The arrays of one call, described alike: NumPy arrays for the reference, else DeviceArrays for the kernels.

    ``on_host`` says which. ``named`` arrays become attributes; those named in ``optional`` may be None, and stay None.
    """

    def __init__(self, stream, optional, **named):
        if type(next(iter(named.values()))) is np.ndarray and self._is_numpy_on_cpu(named, optional):
            self.on_host = True
            self.__dict__.update(named)
            return
        self.explicit_stream = stream is not None
        given = [(name, x) for name, x in named.items() if x is not None]
        if len(given) < len(named):
            for name, x in named.items():
                if x is None and name not in optional:
                    raise TypeError(f"{name}: None, wanted an array")
        self.first = given[0][1]
        self.copied = None
        self.device = current()
        if {type(x) for _, x in given} == {DeviceArray}:
            self.on_host = False
            if self.device.kind == "cpu":
                self.device = cuda_device()
            if getattr(self.first.owner, "emulated", False) != (self.device.kind == "emulator"):
                raise TypeError(f"{given[0][0]}: made on another device than {self.device.name}, which is in force")
            self.stream = self._handle(stream)
            self.__dict__.update(named)
        else:
            self._describe(stream, named, given)

    @staticmethod
    def _is_numpy_on_cpu(named, optional):
        """The reference's own case, told quickly: a small model on the CPU makes hundreds of calls a token."""
        for name, x in named.items():
            if type(x) is not np.ndarray and not (x is None and name in optional):
                return False
        return current().kind == "cpu"

    def _handle(self, stream):
        """The stream of this call: the caller's, else that of the first array's library."""
        return memory.current_stream(self.first) if stream is None else memory.stream_handle(stream)

    def _describe(self, stream, named, given):
        for name, x in given:
            if isinstance(x, (list, tuple, int, float)) or not hasattr(x, "shape"):
                raise TypeError(f"{name}: {type(x).__name__}, wanted an array")
            if library(x) == "other" and not hasattr(x, "__dlpack__") and not hasattr(x, "__cuda_array_interface__"):
                kind = f"{type(x).__module__}.{type(x).__name__}"
                raise TypeError(f"{name}: {kind}, which speaks neither DLPack nor __cuda_array_interface__")
        host = [is_host(x) for _, x in given]
        if any(host) and not all(host):
            names = ", ".join(f"{n} ({'host' if h else 'device'})" for (n, _), h in zip(given, host, strict=True))
            raise TypeError(f"arrays in host and in device memory in one call: {names}")
        self.on_host = all(host) and self.device.kind == "cpu"
        self.copied = all(host) and not self.on_host
        if not all(host):
            if self.device.kind == "emulator":
                raise TypeError(f"{given[0][0]}: in a GPU's memory, wanted arrays of the emulator, which is in force")
            if self.device.kind == "cpu":
                self.device = cuda_device()
        self.stream = None if self.on_host else self._handle(stream)
        self.__dict__.update(named)
        for name, x in given:
            try:
                setattr(self, name, self._describe_one(x))
            except DeviceError:
                raise
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            # what torch and DLPack raise for what they cannot give
            except (TypeError, BufferError, RuntimeError) as error:
                raise TypeError(f"{name}: {error}") from error

    def _describe_one(self, x):
        """A NumPy view of a host array, its copy on the device, or a DeviceArray whose producer is ordered before this call."""
        if self.on_host:
            return as_host_array(x)
        if self.copied:
            with memory.use_stream(self.stream):
                return memory.to_device(as_host_array(x))
        described = as_device_array(x, self.stream)
        if library(x) == "torch":
            memory.order(memory.current_stream(x), self.stream)
        return described

    def result(self, shape, dtype, out=None, name="out"):
        """A DeviceArray to write into: that of ``out`` (checked), or a new array of the first array's kind."""
        if out is not None:
            described = getattr(self, name)
            _check_shape(name, described, shape)
            if described.dtype != dtype:
                raise TypeError(f"{name}: {described.dtype}, wanted {dtype}")
            if library(out) == "jax" and not self.copied:
                raise TypeError(f"{name}: a JAX array, which must not be written to")
            self.returned = out
            return described
        kind = library(self.first)
        if kind == "torch" and not self.copied:
            import torch

            self.returned = torch.empty(shape, dtype=getattr(torch, str(dtype)), device=self.first.device)
            if self.explicit_stream:
                # torch must not give the memory to others while the caller's stream still works on it
                self.returned.record_stream(torch.cuda.ExternalStream(self.stream))
        elif kind == "cupy":
            import cupy

            self.returned = cupy.empty(shape, dtype)
        else:
            self.returned = memory.empty(shape, dtype, self.stream)
        return as_device_array(self.returned, self.stream)

    def hand_out(self, array, returned):
        """The result in the caller's kind. array: the DeviceArray written; returned: the object ``result`` made or took."""
        if self.copied:
            with memory.use_stream(self.stream):
                values = memory.to_host(array)
            return _to_host_kind(values, self.first, None if returned is array else returned)
        if returned is not array or library(self.first) == "nbkernels":
            return returned
        return _from_device_array(array, self.first, self.stream)


def _to_host_kind(values, first, out):
    """NumPy values -> the host kind of ``first``; written into ``out`` where one was given."""
    if out is not None:
        as_host_array(out)[...] = values
        return out
    if library(first) == "torch":
        import torch

        if str(values.dtype) == "bfloat16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)
    if library(first) == "jax":
        import jax.numpy

        return jax.numpy.asarray(values)
    return values


def _from_device_array(array, first, stream):
    """A DeviceArray of ours, written on a stream handle -> the kind of ``first``, sharing the memory."""
    kind = library(first)
    if kind not in ("jax", "numba"):
        return array
    # they read on streams of their own, and know nothing of ours
    memory.wait_for(stream)
    if kind == "jax":
        import jax.dlpack

        return jax.dlpack.from_dlpack(array)
    from numba import cuda

    return cuda.as_cuda_array(array)


# ---- checks ------------------------------------------------------------------------------------------------------------------


def _check_float(**arrays):
    """All of one float dtype, which is returned."""
    dtype = None
    for name, x in arrays.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: {x.dtype}, wanted float32, float16 or bfloat16")
        if dtype is None:
            dtype, first = x.dtype, name
        elif x.dtype != dtype:
            raise TypeError(f"{name}: {x.dtype}, wanted {dtype} as {first}")
    return dtype


def _as_dtype(dtype):
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: {dtype!r}, wanted a NumPy dtype") from None


def _check_dtype(dtype, **arrays):
    for name, x in arrays.items():
        if x is not None and x.dtype != dtype:
            raise TypeError(f"{name}: {x.dtype}, wanted {np.dtype(dtype)}")


def _check_shape(name, x, shape):
    if x is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, wanted {tuple(shape)}")


def _check_axes(name, x, axes):
    if len(x.shape) != len(axes):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, wanted [{', '.join(axes)}]")


def _check_rows(name, x):
    if len(x.shape) == 0:
        raise ValueError(f"{name}: a scalar, wanted at least one axis")


def _check_contiguous_last(**arrays):
    """Device arrays only: the kernels read along the last axis."""
    for name, x in arrays.items():
        if x is not None and len(x.shape) and x.shape[-1] > 1 and x.size and x.strides[-1] != 1:
            raise ValueError(
                f"{name}: strides {tuple(x.strides)} in elements; the last axis must be contiguous (make a contiguous copy first)"
            )


def _span(x):
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    return x.pointer, x.pointer + extent * x.itemsize


def _check_overlap(out, *, same=(), other=()):
    """``out`` may be one of ``same`` element for element; sharing memory otherwise is refused. Pairs (name, array)."""
    if out is None or out.size == 0:
        return
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.strides, strict=True)):
        raise ValueError(f"out: strides {out.strides} in elements; several elements lie at one place")
    low, high = _span(out)
    for allowed, pairs in ((True, same), (False, other)):
        for name, x in pairs:
            if x is None or x.size == 0:
                continue
            start, end = _span(x)
            if start >= high or end <= low:
                continue
            if allowed and x.pointer == out.pointer and x.shape == out.shape and x.strides == out.strides:
                continue
            if not _share_an_element(out, x):  # views that interleave, as q and k of one fused array
                continue
            raise ValueError(f"out: shares memory with {name}, which is still read when out is written")


def _share_an_element(a, b):
    """Whether two views have a byte in common: NumPy's solver, on arrays at these addresses that nobody reads."""
    views = []
    for x in (a, b):
        described = {
            "version": 3,
            "typestr": f"|V{x.itemsize}",
            "shape": x.shape,
            "strides": tuple(s * x.itemsize for s in x.strides),
            "data": (x.pointer, True),
        }
        views.append(np.asarray(type("Described", (), {"__array_interface__": described})()))
    try:
        return np.shares_memory(*views, max_work=10**5)
    except np.exceptions.TooHardError:
        return True


def _check_writable(**arrays):
    """Host arrays only: those that are written to. JAX's are views that may not be."""
    for name, x in arrays.items():
        if x is not None and not x.flags.writeable:
            raise ValueError(f"{name}: a read-only array, wanted one that may be written to")


def _check_no_jax(**arrays):
    """Device arrays as the caller gave them: those that are written to."""
    for name, x in arrays.items():
        if type(x) is not DeviceArray and library(x) == "jax":
            raise TypeError(f"{name}: a JAX array, which must not be written to")


def _check_integer(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: {type(value).__name__}, wanted an integer")


def _check_number(name, value, *, positive=False, least=None):
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: {type(value).__name__}, wanted a number")
    if value != value:
        raise ValueError(f"{name}: NaN")
    if positive and not value > 0:
        raise ValueError(f"{name}: {value}, wanted a number above 0")
    if least is not None and value < least:
        raise ValueError(f"{name}: {value}, wanted at least {least}")


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}: {value!r}, wanted one of {', '.join(repr(c) for c in choices)}")


def _kernels(name):
    """A module of nbkernels.kernels, imported when its first launch is due: a CPU never imports Numba."""
    return import_module(f"nbkernels.kernels.{name}")


def _merge_rows(arrays):
    """Collapse the leading axes of arrays of one shape into as few as their strides allow: yields tuples of [rows, columns].

    None among the arrays stays None. Where the rows of some array do not lie at one stride, the outer axes are walked.
    """
    shape = next(x for x in arrays if x is not None).shape
    if len(shape) == 2:
        yield arrays
        return
    if len(shape) == 1:
        yield tuple(x if x is None else x.reshape(1, -1) for x in arrays)
        return
    try:
        merged = tuple(x if x is None else _as_rows(x) for x in arrays)
    except ValueError:
        for i in range(shape[0]):
            yield from _merge_rows(tuple(x if x is None else x[i] for x in arrays))
    else:
        yield merged


def _as_rows(x):
    if x.is_contiguous:
        columns = x.shape[-1]
        return DeviceArray(x.pointer, (x.size // max(columns, 1), columns), (columns, 1), x.dtype, x.owner)
    rows = x[..., 0].reshape(-1)
    return DeviceArray(x.pointer, (rows.shape[0], x.shape[-1]), (rows.strides[0], 1), x.dtype, x.owner)


# ---- rows --------------------------------------------------------------------------------------------------------------------


@replayed
def softmax(x, *, scale=1.0, out=None, stream=None):
    """exp(scale·x - max) / sum over the last axis. x [..., columns] float -> the same shape and dtype; out may be x.

    A row of -inf is NaN, and a NaN in a row makes it NaN.
    """
    call = _Call(stream, ("out",), x=x, out=out)
    dtype = _check_float(x=call.x)
    _check_rows("x", call.x)
    _check_number("scale", scale)
    if call.on_host:
        _check_out(call, call.x.shape, dtype)
        return _finish_host(reference.softmax(call.x, scale=scale), x, out)
    _check_contiguous_last(x=call.x, out=call.out)
    y = call.result(call.x.shape, dtype, out)
    _check_overlap(call.out, same=[("x", call.x)])
    if y.size:
        run = _kernels("softmax").run
        for rows, result in _merge_rows((call.x, y)):
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
    _check_choice("quantize", quantize, (None, "int8"))
    quantized = quantize is not None
    outs = _int8_out(out) if quantized else {"out": out}
    call = _Call(
        stream, ("weight", "bias", "residual", *outs), x=x, weight=weight, bias=bias, residual=residual, **outs
    )
    dtype = _check_float(x=call.x, residual=call.residual)
    _check_rows("x", call.x)
    columns = call.x.shape[-1]
    for argument in ("weight", "bias"):
        array = getattr(call, argument)
        if array is not None:
            if array.dtype != dtype and array.dtype != np.float32:
                raise TypeError(f"{argument}: {array.dtype}, wanted {dtype} as x, or float32")
            _check_shape(argument, array, (columns,))
    if call.weight is not None and call.bias is not None and call.weight.dtype != call.bias.dtype:
        raise TypeError(f"bias: {call.bias.dtype}, wanted {call.weight.dtype} as weight")
    _check_shape("residual", call.residual, call.x.shape)
    _check_number("eps", eps, least=0)
    affine = (call.weight,) if name == "rms_norm" else (call.weight, call.bias)
    if call.on_host:
        value = getattr(reference, name)(call.x, *affine, residual=call.residual, eps=eps, quantize=quantize)
        normed, total = (value, None) if residual is None else value
        if quantized:
            y = _finish_int8_host(call, normed, x, out)
        else:
            _check_out(call, call.x.shape, dtype)
            y = _finish_host(normed, x, out)
        return y if residual is None else (y, _finish_host(total, x, None))
    inputs = {"x": call.x, "residual": call.residual, "weight": call.weight, "bias": call.bias}
    _check_contiguous_last(**inputs)
    total = total_returned = None
    if residual is not None:
        total = call.result(call.x.shape, dtype)
        total_returned = call.returned
    if quantized:
        result = _Int8Result(call, call.x.shape, 1, None, out, inputs)
        y, scales = result.values, result.scales
    else:
        _check_contiguous_last(out=call.out)
        y, scales = call.result(call.x.shape, dtype, out), None
        returned = call.returned
        _check_overlap(
            call.out,
            same=[("x", call.x), ("residual", call.residual)],
            other=[("weight", call.weight), ("bias", call.bias)],
        )
    if y.size:
        run = _kernels(name).run
        for rows, added, values, steps, summed in _merge_rows((call.x, call.residual, y, scales, total)):
            run(rows, *affine, added, values, steps, summed, float(eps), call.device, call.stream)
    elif quantized:
        result.quantise(call.x, None)  # rows of no columns have scales, too
    y = result.hand_out() if quantized else call.hand_out(y, returned)
    return y if residual is None else (y, call.hand_out(total, total_returned))


@replayed
def gelu(x, *, approximate="tanh", out=None, stream=None):
    """x·Phi(x), Phi the normal distribution function: by its tanh form, or exactly with approximate="none". out may be x."""
    call = _Call(stream, ("out",), x=x, out=out)
    dtype = _check_float(x=call.x)
    _check_choice("approximate", approximate, ("tanh", "none"))
    if call.on_host:
        _check_out(call, call.x.shape, dtype)
        return _finish_host(reference.gelu(call.x, approximate=approximate), x, out)
    _check_contiguous_last(x=call.x, out=call.out)
    y = call.result(call.x.shape, dtype, out)
    _check_overlap(call.out, same=[("x", call.x)])
    if y.size:
        run = _kernels("activation").run_gelu
        for rows, result in _merge_rows((call.x, y)):
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
    call = _Call(stream, ("out",), gate=gate, up=up, out=out)
    dtype = _check_float(gate=call.gate, up=call.up)
    _check_shape("up", call.up, call.gate.shape)
    if call.on_host:
        _check_out(call, call.gate.shape, dtype)
        return _finish_host(getattr(reference, f"{activation}_mul")(call.gate, call.up), gate, out)
    _check_contiguous_last(gate=call.gate, up=call.up, out=call.out)
    y = call.result(call.gate.shape, dtype, out)
    _check_overlap(call.out, same=[("gate", call.gate), ("up", call.up)])
    if y.size:
        run = _kernels("activation").run_gated
        for rows, other, result in _merge_rows((call.gate, call.up, y)):
            run(rows, other, activation, result, call.device, call.stream)
    return call.hand_out(y, call.returned)


@replayed
def soft_cap(x, cap, *, out=None, stream=None):
    """cap · tanh(x / cap): logits held within a positive number cap (Gemma 2). x [..., columns]; out may be x."""
    call = _Call(stream, ("out",), x=x, out=out)
    dtype = _check_float(x=call.x)
    _check_number("cap", cap, positive=True)
    if call.on_host:
        _check_out(call, call.x.shape, dtype)
        return _finish_host(reference.soft_cap(call.x, cap), x, out)
    _check_contiguous_last(x=call.x, out=call.out)
    y = call.result(call.x.shape, dtype, out)
    _check_overlap(call.out, same=[("x", call.x)])
    if y.size:
        run = _kernels("activation").run_soft_cap
        for rows, result in _merge_rows((call.x, y)):
            run(rows, result, float(cap), call.device, call.stream)
    return call.hand_out(y, call.returned)


def _check_out(call, shape, dtype):
    """Host results: ``out`` has the right shape and dtype and may be written."""
    _check_shape("out", call.out, shape)
    if call.out is not None and call.out.dtype != dtype:
        raise TypeError(f"out: {call.out.dtype}, wanted {dtype}")
    _check_writable(out=call.out)


def _finish_host(values, first, out):
    if out is None and isinstance(first, np.ndarray):
        return values
    return _to_host_kind(values, first, out)


# ---- matrices ----------------------------------------------------------------------------------------------------------------


@replayed
def matmul(x, weight, *, bias=None, residual=None, activation=None, plan_rows=None, out=None, stream=None):
    """activation(x @ weightᵀ + bias) + residual. x [..., in], weight [out, in], bias [out], residual [..., out].

    activation: None, "silu", "gelu" (tanh form) or "gelu_exact". out may be residual.

    activation="silu_mul" is the gated unit of SwiGLU: row 2i of weight [2·n, in] is a gate's row i, row 2i + 1 an up's, the bias
    likewise, and the result [..., n] is silu(gate) · up of the two products in float32, rounded once. There is no residual.

    plan_rows: the kernel is chosen as for so many rows where there are fewer; then a row's bits depend neither on how many
    there are nor on which it is. The CPU has no such choice.
    """
    call = _Call(stream, ("bias", "residual", "out"), x=x, weight=weight, bias=bias, residual=residual, out=out)
    dtype = _check_float(x=call.x, weight=call.weight, bias=call.bias, residual=call.residual)
    shape = _check_matmul(call, call.weight, activation, plan_rows)
    if call.on_host:
        _check_out(call, shape, dtype)
        value = reference.matmul(call.x, call.weight, bias=call.bias, residual=call.residual, activation=activation)
        return _finish_host(value, x, out)
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
    _check_choice("activations", activations, (None, "int8"))
    quantised = isinstance(x, Int8Weight)
    first, x_scales = (x.values, x.scales) if quantised else (x, None)
    parts = {"x_scales": x_scales, "values": weight.values, "scales": weight.scales}
    call = _Call(
        stream, ("x_scales", "bias", "residual", "out"), x=first, **parts, bias=bias, residual=residual, out=out
    )
    if quantised:
        _check_dtype(np.int8, **{"x.values": call.x})
        _check_dtype(np.float32, **{"x.scales": call.x_scales})
        own = next((a.dtype for a in (call.residual, call.bias) if a is not None), np.dtype(np.float32))
    else:
        own = _check_float(x=call.x)
    dtype = own if dtype is None else _as_dtype(dtype)
    if dtype not in FLOATS:
        raise TypeError(f"dtype: {dtype}, wanted float32, float16 or bfloat16")
    if not quantised and activations is None and dtype != own:
        raise TypeError(f"dtype: {dtype}, wanted {own} as x")
    _check_dtype(dtype, bias=call.bias, residual=call.residual)
    _check_dtype(np.int8, **{"weight.values": call.values})
    _check_dtype(np.float32, **{"weight.scales": call.scales})
    described = Int8Weight(call.values, call.scales, weight.group_size)
    if activation == "silu_mul" and (quantised or activations == "int8"):
        raise ValueError("activation: 'silu_mul', wanted None, 'silu', 'gelu' or 'gelu_exact' with int8 activations")
    shape = _check_matmul(call, described, activation, plan_rows)
    if quantised or activations == "int8":
        return _int8_by_int8(call, x, first, described, shape, dtype, activation, out, plan_rows)
    if call.on_host:
        _check_out(call, shape, dtype)
        value = reference.int8_matmul(call.x, described, bias=call.bias, residual=call.residual, activation=activation)
        return _finish_host(value, x, out)
    _check_contiguous_last(**{"weight.scales": call.scales})
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
        _check_out(call, shape, dtype)
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
        return _finish_host(value, first, out)
    _check_contiguous_last(
        **{"x": call.x, "weight": weight.values, "weight.scales": weight.scales},
        bias=call.bias,
        residual=call.residual,
        out=call.out,
    )
    y = call.result(shape, dtype, out)
    _check_overlap(
        call.out,
        same=[("residual", call.residual)],
        other=[("x", call.x), ("x.scales", call.x_scales), ("weight", weight.values), ("bias", call.bias)],
    )
    if y.size:
        values, scales = call.x, call.x_scales
        if not quantised:
            values, scales = _quantised_rows(call)
        run = _kernels("int8_matmul").run_int8
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
    for (some,) in _merge_rows((call.x,)):
        end = start + some.shape[0]
        _kernels("quantize").run(some, values[start:end], scales[start:end], None, call.device, call.stream)
        start = end
    return values.reshape(*outer, depth), scales.reshape(*outer, 1)


def _check_matmul(call, weight, activation, plan_rows):
    if plan_rows is not None:
        _check_integer("plan_rows", plan_rows)
        _check_number("plan_rows", plan_rows, least=1)
    _check_rows("x", call.x)
    _check_axes("weight", weight, ("out", "in"))
    if call.x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: shape {tuple(call.x.shape)}, wanted {weight.shape[1]} columns as weight {tuple(weight.shape)}"
        )
    _check_choice("activation", activation, ACTIVATIONS)
    columns = weight.shape[0]
    _check_shape("bias", call.bias, (columns,))
    if activation == "silu_mul":
        if columns % 2:
            raise ValueError(
                f"weight: {columns} rows, wanted an even number for a gate and an up by turns ('silu_mul')"
            )
        if call.residual is not None:
            raise ValueError("residual: given, wanted None with activation 'silu_mul'")
        columns //= 2
    shape = (*call.x.shape[:-1], columns)
    _check_shape("residual", call.residual, shape)
    return shape


def _run_matmul(name, call, weight, shape, dtype, activation, out, plan_rows):
    values = weight.values if isinstance(weight, Int8Weight) else weight
    _check_contiguous_last(x=call.x, weight=values, bias=call.bias, residual=call.residual, out=call.out)
    y = call.result(shape, dtype, out)
    _check_overlap(
        call.out, same=[("residual", call.residual)], other=[("x", call.x), ("weight", values), ("bias", call.bias)]
    )
    if y.size:
        run = _kernels(name).run
        for rows, added, result in _merge_rows_apart((call.x, call.residual, y)):
            run(rows, weight, call.bias, added, activation, result, call.device, call.stream, plan_rows)
    return call.hand_out(y, call.returned)


def _merge_rows_apart(arrays):
    """As _merge_rows for arrays whose last axes differ."""
    first = arrays[0]
    if first.ndim == 2:
        yield arrays
        return
    if first.ndim == 1:
        yield tuple(x if x is None else x.reshape(1, -1) for x in arrays)
        return
    try:
        merged = tuple(x if x is None else _as_rows(x) for x in arrays)
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
    call = _Call(stream, (), weight=weight)
    _check_float(weight=call.weight)
    _check_rows("weight", call.weight)
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer))):
        raise TypeError(f"group_size: {type(group_size).__name__}, wanted an integer or None")
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size: {group_size}, wanted a positive number of columns or None")
    group_size = None if group_size is None else int(group_size)
    if call.on_host:
        return _finish_int8_host(call, reference.quantize_int8(call.weight, group_size=group_size), weight, None)
    _check_contiguous_last(weight=call.weight)
    groups = 1 if group_size is None else max(1, -(-call.weight.shape[-1] // group_size))
    result = _Int8Result(call, call.weight.shape, groups, group_size, None, {})
    result.quantise(call.weight, group_size)
    return result.hand_out()


def _int8_out(out):
    """The arrays of an ``out`` that is quantised, by the names that errors give them."""
    if out is None:
        return {"out.values": None, "out.scales": None}
    if not isinstance(out, Int8Weight):
        raise TypeError(f"out: {type(out).__name__}, wanted an Int8Weight, as the result is quantised")
    if out.group_size is not None:
        raise ValueError(f"out: group_size {out.group_size}, wanted None: one scale a row")
    return {"out.values": out.values, "out.scales": out.scales}


class _Int8Result:
    """The Int8Weight that a call on a device makes: of values and scales to write into, ``out``'s (checked) or new ones."""

    def __init__(self, call, shape, groups, group_size, out, inputs):
        self.call, self.group_size, self.out = call, group_size, out
        parts = (None, None) if out is None else (out.values, out.scales)
        self.values = call.result(shape, INT8, parts[0], "out.values")
        self.values_returned = call.returned
        self.scales = call.result((*shape[:-1], groups), FLOAT32, parts[1], "out.scales")
        self.scales_returned = call.returned
        if out is not None:
            _check_contiguous_last(**{"out.values": self.values})
            others = [*inputs.items(), ("out.scales", self.scales)]
            _check_overlap(self.values, other=others)
            _check_overlap(self.scales, other=others[:-1])

    def quantise(self, x, group_size):
        """values and scales of x, row by row."""
        if self.scales.size:
            run = _kernels("quantize").run
            for rows, values, scales in _merge_rows((x, self.values, self.scales)):
                run(rows, values, scales, group_size, self.call.device, self.call.stream)

    def hand_out(self):
        """In the caller's kind."""
        values = self.call.hand_out(self.values, self.values_returned)
        scales = self.call.hand_out(self.scales, self.scales_returned)
        return Int8Weight(values, scales, self.group_size) if self.out is None else self.out


def _finish_int8_host(call, quantised, first, out):
    """An Int8Weight of the reference in the host kind of ``first``; written into ``out`` where one was given."""
    if out is None:
        parts = (_finish_host(a, first, None) for a in (quantised.values, quantised.scales))
        return Int8Weight(*parts, quantised.group_size)
    for name, values, into in (
        ("out.values", quantised.values, out.values),
        ("out.scales", quantised.scales, out.scales),
    ):
        described = getattr(call, name)
        _check_shape(name, described, values.shape)
        _check_dtype(values.dtype, **{name: described})
        _check_writable(**{name: described})
        _to_host_kind(values, first, into)
    return out


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
    call = _Call(
        stream, ("positions", "position_table", "out"),
        ids=ids, **parts, positions=positions, position_table=position_table, out=out,
    )  # fmt: skip
    _check_dtype(np.int32, ids=call.ids, positions=call.positions)
    _check_number("scale", scale)
    if (call.positions is None) != (call.position_table is None):
        missing, given = ("positions", "position_table")[:: 1 if call.positions is None else -1]
        raise TypeError(f"{missing}: None, wanted an array beside {given}")
    if quantised:
        _check_dtype(np.int8, **{"table.values": call.values})
        _check_dtype(np.float32, **{"table.scales": call.scales})
        described = Int8Weight(call.values, call.scales, table.group_size)
        dtype = _as_dtype(np.float32 if dtype is None else dtype)
    else:
        described = call.table
        own = _check_float(table=described)
        dtype = own if dtype is None else _as_dtype(dtype)
        if dtype != own:
            raise TypeError(f"dtype: {dtype}, wanted {own} as table")
    if dtype not in FLOATS:
        raise TypeError(f"dtype: {dtype}, wanted float32, float16 or bfloat16")
    _check_axes("table", described, ("vocab", "hidden"))
    shape = (*call.ids.shape, described.shape[1])
    if call.positions is not None:
        _check_axes("ids", call.ids, ("batch", "tokens"))
        _check_shape("positions", call.positions, call.ids.shape[:1])
        _check_axes("position_table", call.position_table, ("count", "hidden"))
        _check_shape("position_table", call.position_table, (call.position_table.shape[0], shape[-1]))
        _check_dtype(dtype, position_table=call.position_table)
    if call.on_host:
        _check_out(call, shape, dtype)
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
        return _finish_host(value, ids, out)
    dense = described.values if quantised else described
    _check_contiguous_last(table=dense, positions=call.positions, position_table=call.position_table, out=call.out)
    if not call.ids.is_contiguous:
        raise ValueError(f"ids: strides {call.ids.strides}, wanted a contiguous array")
    if call.out is not None and not call.out.is_contiguous:
        raise ValueError(f"out: strides {call.out.strides}, wanted a contiguous array")
    y = call.result(shape, dtype, out)
    _check_overlap(call.out, other=[("table", dense), ("position_table", call.position_table)])
    if y.size:
        flat = y.reshape(-1, shape[-1])
        _kernels("embedding").run(
            call.ids.reshape(-1), described, flat, call.device, call.stream, scale=float(scale),
            positions=call.positions, position_table=call.position_table, tokens=shape[-2] if call.ids.ndim == 2 else 1,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


# ---- attention ---------------------------------------------------------------------------------------------------------------


PAGE_SIZES = (16, 32, 64, 128, 256)  # tokens: whole tiles of keys a page, whole pages a split


def _check_pages(call, k_name, v_name, dtype, batch, kv_heads, head_dim):
    """Caches or page pools, the table, and the scales of int8 ones, as ``call`` has them under these names.

    Returns how many tokens a sequence may have.
    """
    k, v, table = getattr(call, k_name), getattr(call, v_name), call.block_table
    axes = ("batch", "capacity") if table is None else ("pages", "page_size")
    _check_axes(k_name, k, (*axes, "kv_heads", "head_dim"))
    _check_shape(k_name, k, (batch if table is None else k.shape[0], k.shape[1], kv_heads, head_dim))
    _check_shape(v_name, v, k.shape)
    capacity = k.shape[1]
    if table is not None:
        _check_dtype(np.int32, block_table=table)
        _check_axes("block_table", table, ("batch", "max_pages"))
        _check_shape("block_table", table, (batch, table.shape[1]))
        if k.shape[1] not in PAGE_SIZES:
            raise ValueError(f"{k_name}: page_size {k.shape[1]}, wanted one of {', '.join(map(str, PAGE_SIZES))}")
        capacity *= table.shape[1]
        if capacity > 2**31 - 1:
            raise ValueError(
                f"block_table: {table.shape[1]} pages of {k.shape[1]} tokens, wanted at most 2^31 - 1 tokens"
            )
    for name, x in ((k_name, k), (v_name, v)):
        if x.dtype != dtype and x.dtype != np.int8:
            raise TypeError(f"{name}: {x.dtype}, wanted {dtype} as q, or int8")
    _check_dtype(k.dtype, **{v_name: v})
    for name, scales in (("k_scales", call.k_scales), ("v_scales", call.v_scales)):
        if (scales is not None) != (k.dtype == np.int8):
            wanted = "an array beside int8 caches" if scales is None else f"None beside caches of {k.dtype}"
            raise TypeError(f"{name}: {'None' if scales is None else 'an array'}, wanted {wanted}")
        _check_dtype(np.float32, **{name: scales})
        _check_shape(name, scales, k.shape[:3])
    return capacity


@replayed
def rotary_append(
    q,
    k,
    v,
    cos,
    sin,
    positions,
    k_cache,
    v_cache,
    *,
    block_table=None,
    k_scales=None,
    v_scales=None,
    q_norm=None,
    k_norm=None,
    eps=1e-6,
    out=None,
    stream=None,
):
    """Rotary embedding of q and k, and k and v written into the cache, in one pass. Returns the rotated q; out may be q.

    q [batch, tokens, heads, head_dim]; k, v [batch, tokens, kv_heads, head_dim] (all may be views of one fused array);
    cos, sin float32 [max_position, rotary_dim / 2], rotary_dim at most head_dim: element i is paired with
    i + rotary_dim / 2 and what lies past rotary_dim is left as it is; positions int32 [batch]: where each sequence's first
    token stands; k_cache, v_cache [batch, capacity, kv_heads, head_dim]: token t goes to positions[b] + t. A position outside
    of the cache or the table writes nothing on the device, and raises ValueError on the CPU.

    block_table int32 [batch, max_pages]: the caches are pools [pages, page_size, kv_heads, head_dim], page_size a power of two
    from 16 to 256, and position p of sequence b is row p mod page_size of page block_table[b, p / page_size]. A page outside of
    the pool is treated as such a position, save that q is rotated on the device. k_scales, v_scales float32 [batch, capacity,
    kv_heads] or [pages, page_size, kv_heads] (any strides): the caches are int8, of max |.| / 127 a token and head, rounded as
    ``quantize_int8`` does. q_norm, k_norm [head_dim] (q's dtype or float32): q and k are normalised head by head first,
    x / sqrt(mean(x²) + eps) · norm.
    """
    call = _Call(
        stream, ("block_table", "k_scales", "v_scales", "q_norm", "k_norm", "out"),
        q=q, k=k, v=v, cos=cos, sin=sin, positions=positions, k_cache=k_cache, v_cache=v_cache,
        block_table=block_table, k_scales=k_scales, v_scales=v_scales, q_norm=q_norm, k_norm=k_norm, out=out,
    )  # fmt: skip
    dtype = _check_float(q=call.q, k=call.k, v=call.v)
    _check_dtype(np.float32, cos=call.cos, sin=call.sin)
    _check_dtype(np.int32, positions=call.positions)
    _check_axes("q", call.q, ("batch", "tokens", "heads", "head_dim"))
    _check_axes("k", call.k, ("batch", "tokens", "kv_heads", "head_dim"))
    batch, tokens, _, head_dim = call.q.shape
    kv_heads = call.k.shape[2]
    _check_shape("k", call.k, (batch, tokens, kv_heads, head_dim))
    _check_shape("v", call.v, call.k.shape)
    _check_axes("cos", call.cos, ("max_position", "rotary_dim / 2"))
    _check_shape("sin", call.sin, call.cos.shape)
    if 2 * call.cos.shape[1] > head_dim:
        raise ValueError(f"cos: shape {tuple(call.cos.shape)}, wanted at most head_dim / 2 = {head_dim // 2} columns")
    _check_shape("positions", call.positions, (batch,))
    _check_pages(call, "k_cache", "v_cache", dtype, batch, kv_heads, head_dim)
    for name in ("q_norm", "k_norm"):
        norm = getattr(call, name)
        if norm is not None and norm.dtype != dtype and norm.dtype != np.float32:
            raise TypeError(f"{name}: {norm.dtype}, wanted {dtype} as q, or float32")
        _check_shape(name, norm, (head_dim,))
    if call.q_norm is not None and call.k_norm is not None:
        _check_dtype(call.q_norm.dtype, k_norm=call.k_norm)
    _check_number("eps", eps, least=0)
    if call.on_host:
        _check_out(call, call.q.shape, dtype)
        _check_writable(k_cache=call.k_cache, v_cache=call.v_cache, k_scales=call.k_scales, v_scales=call.v_scales)
        value = reference.rotary_append(
            call.q, call.k, call.v, call.cos, call.sin, call.positions, call.k_cache, call.v_cache,
            block_table=call.block_table, k_scales=call.k_scales, v_scales=call.v_scales,
            q_norm=call.q_norm, k_norm=call.k_norm, eps=eps,
        )  # fmt: skip
        return _finish_host(value, q, out)
    _check_contiguous_last(
        q=call.q, k=call.k, v=call.v, cos=call.cos, sin=call.sin, positions=call.positions,
        k_cache=call.k_cache, v_cache=call.v_cache, block_table=call.block_table,
        q_norm=call.q_norm, k_norm=call.k_norm, out=call.out,
    )  # fmt: skip
    if call.copied:
        raise TypeError("k_cache: host arrays are not written through a GPU; pass device arrays")
    _check_no_jax(k_cache=k_cache, v_cache=v_cache, k_scales=k_scales, v_scales=v_scales)
    y = call.result(call.q.shape, dtype, out)
    others = ("k", "v", "k_cache", "v_cache", "k_scales", "v_scales")
    _check_overlap(call.out, same=[("q", call.q)], other=[(name, getattr(call, name)) for name in others])
    if y.size or call.k.size:
        _kernels("rotary").run(
            call.q, call.k, call.v, call.cos, call.sin, call.positions, call.k_cache, call.v_cache,
            call.block_table, call.k_scales, call.v_scales, call.q_norm, call.k_norm, eps, y, call.device, call.stream,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


def _check_attention(heads, kv_heads, head_dim, scale, window, soft_cap, sinks, k_name):
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: {heads} heads, wanted a multiple of the {kv_heads} kv_heads of {k_name}")
    if not 1 <= head_dim <= 256:
        raise ValueError(f"q: head_dim {head_dim}, wanted 1 to 256")
    if scale is not None:
        _check_number("scale", scale)
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
            raise TypeError(f"window: {type(window).__name__}, wanted an integer or None")
        _check_number("window", window, least=1)
    if soft_cap is not None:
        _check_number("soft_cap", soft_cap, positive=True)
        if soft_cap > 1000:  # the kernels' tanh is off by a part of the cap
            raise ValueError(f"soft_cap: {soft_cap}, wanted at most 1000")
    _check_dtype(np.float32, sinks=sinks)
    _check_shape("sinks", sinks, (heads,))


@replayed
def attention(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    kv_lengths=None,
    query_offsets=None,
    kv_offsets=None,
    out=None,
    stream=None,
):
    """softmax(scale · q kᵀ, masked) v, head by head. Returns q's shape and dtype.

    q [batch, q_len, heads, head_dim]; k, v [batch, kv_len, kv_heads, head_dim], heads a multiple of kv_heads (GQA);
    head_dim up to 256. kv_lengths int32 [batch]: how many keys each sequence has (default kv_len). With n keys, query i
    stands at position n - q_len + i: causal hides later keys; window (at least 1) keeps the last ``window`` keys up to and
    with its own, and so is causal. A row that sees nothing is zero. scale: default 1 / sqrt(head_dim). soft_cap, above 0 and
    up to 1000: scores become soft_cap · tanh(score / soft_cap). sinks float32 [heads]: a score each that joins the softmax's
    sum, and has no value.

    Packed sequences of unequal length: q [total_q, heads, head_dim]; k, v [total_kv, kv_heads, head_dim]; query_offsets and
    kv_offsets int32 [batch + 1], ascending from 0: sequence b has queries query_offsets[b] to query_offsets[b + 1] - 1 and keys
    likewise, none of either is allowed, and its last query stands at its last key. Rows behind the last offset are not computed.
    Offsets that don't ascend raise ValueError on the CPU; on the device nothing outside of the arrays is touched, and the result
    is arbitrary.
    """
    call = _Call(
        stream, ("sinks", "kv_lengths", "query_offsets", "kv_offsets", "out"),
        q=q, k=k, v=v, sinks=sinks, kv_lengths=kv_lengths, query_offsets=query_offsets, kv_offsets=kv_offsets, out=out,
    )  # fmt: skip
    dtype = _check_float(q=call.q, k=call.k, v=call.v)
    packed = call.query_offsets is not None
    if packed != (call.kv_offsets is not None):
        missing, given = ("kv_offsets", "query_offsets") if packed else ("query_offsets", "kv_offsets")
        raise TypeError(f"{missing}: None, wanted an array as {given}")
    if packed:
        _check_axes("q", call.q, ("total_q", "heads", "head_dim"))
        _check_axes("k", call.k, ("total_kv", "kv_heads", "head_dim"))
        _check_dtype(np.int32, query_offsets=call.query_offsets, kv_offsets=call.kv_offsets)
        _check_axes("query_offsets", call.query_offsets, ("batch + 1",))
        if call.query_offsets.shape[0] == 0:
            raise ValueError("query_offsets: shape (0,), wanted at least one offset")
        _check_shape("kv_offsets", call.kv_offsets, call.query_offsets.shape)
        if call.kv_lengths is not None:
            raise TypeError("kv_lengths: an array, wanted None: kv_offsets say how many keys a packed sequence has")
    else:
        _check_axes("q", call.q, ("batch", "q_len", "heads", "head_dim"))
        _check_axes("k", call.k, ("batch", "kv_len", "kv_heads", "head_dim"))
    heads, head_dim = call.q.shape[-2:]
    kv_heads = call.k.shape[-2]
    _check_shape("k", call.k, (*(() if packed else call.q.shape[:1]), call.k.shape[-3], kv_heads, head_dim))
    _check_shape("v", call.v, call.k.shape)
    _check_attention(heads, kv_heads, head_dim, scale, window, soft_cap, call.sinks, "k")
    _check_dtype(np.int32, kv_lengths=call.kv_lengths)
    _check_shape("kv_lengths", call.kv_lengths, call.q.shape[:1])
    if call.on_host:
        _check_out(call, call.q.shape, dtype)
        value = reference.attention(
            call.q, call.k, call.v, causal=causal, scale=scale, window=window, soft_cap=soft_cap, sinks=call.sinks,
            kv_lengths=call.kv_lengths, query_offsets=call.query_offsets, kv_offsets=call.kv_offsets,
        )  # fmt: skip
        return _finish_host(value, q, out)
    _check_contiguous_last(
        q=call.q, k=call.k, v=call.v, sinks=call.sinks, kv_lengths=call.kv_lengths,
        query_offsets=call.query_offsets, kv_offsets=call.kv_offsets, out=call.out,
    )  # fmt: skip
    y = call.result(call.q.shape, dtype, out)
    _check_overlap(call.out, other=[("q", call.q), ("k", call.k), ("v", call.v)])
    offsets = (call.query_offsets, call.kv_offsets) if packed else None
    if y.size and (not packed or offsets[0].size > 1):
        q4, k4, v4, y4 = (x.reshape(1, *x.shape) if packed else x for x in (call.q, call.k, call.v, y))
        _kernels("attention").run(
            q4, k4, v4, bool(causal), head_dim**-0.5 if scale is None else float(scale),
            None if window is None else int(window), None if soft_cap is None else float(soft_cap), call.sinks,
            call.kv_lengths, offsets, y4, call.device, call.stream,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


@replayed
def paged_attention(
    q,
    k_pages,
    v_pages,
    block_table,
    kv_lengths,
    *,
    k_scales=None,
    v_scales=None,
    prefix=0,
    causal=True,
    scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    out=None,
    stream=None,
):
    """``attention`` over a paged KV cache. Returns q's shape and dtype.

    q [batch, q_len, heads, head_dim]; k_pages, v_pages [pages, page_size, kv_heads, head_dim], page_size a power of two from 16
    to 256; block_table int32 [batch, max_pages]; kv_lengths int32 [batch]: token p of sequence b is row p mod page_size of page
    block_table[b, p / page_size], for p below kv_lengths[b]. int8 pages have k_scales, v_scales float32 [pages, page_size,
    kv_heads] (any strides). The rest as ``attention``; causal is the default here.

    prefix: so many leading tokens lie in the same pages for all sequences, all of which are longer by q_len at least; a batch
    of few query tokens then reads them once (as far as they are whole splits of 512), with the same bits.

    Of pages outside of the pool the CPU raises ValueError, and the device reads others in their place. What a sequence gives
    depends neither on its batch, nor on which pages it has, nor on the pool.
    """
    call = _Call(
        stream, ("k_scales", "v_scales", "sinks", "out"),
        q=q, k_pages=k_pages, v_pages=v_pages, block_table=block_table, kv_lengths=kv_lengths,
        k_scales=k_scales, v_scales=v_scales, sinks=sinks, out=out,
    )  # fmt: skip
    dtype = _check_float(q=call.q)
    _check_axes("q", call.q, ("batch", "q_len", "heads", "head_dim"))
    _check_axes("k_pages", call.k_pages, ("pages", "page_size", "kv_heads", "head_dim"))
    batch, _, heads, head_dim = call.q.shape
    kv_heads = call.k_pages.shape[2]
    capacity = _check_pages(call, "k_pages", "v_pages", dtype, batch, kv_heads, head_dim)
    _check_integer("prefix", prefix)
    if not 0 <= prefix <= capacity:
        raise ValueError(f"prefix: {prefix}, wanted 0 to the {capacity} tokens of a sequence")
    _check_attention(heads, kv_heads, head_dim, scale, window, soft_cap, call.sinks, "k_pages")
    _check_dtype(np.int32, kv_lengths=call.kv_lengths)
    _check_shape("kv_lengths", call.kv_lengths, (batch,))
    if call.on_host:
        _check_out(call, call.q.shape, dtype)
        shared = call.block_table[:, : -(-prefix // call.k_pages.shape[1])]
        if (shared != shared[:1]).any():
            raise ValueError(f"prefix: {prefix} tokens, whose pages are not the same for all sequences")
        value = reference.paged_attention(
            call.q, call.k_pages, call.v_pages, call.block_table, call.kv_lengths,
            k_scales=call.k_scales, v_scales=call.v_scales, causal=causal, scale=scale, window=window,
            soft_cap=soft_cap, sinks=call.sinks,
        )  # fmt: skip
        return _finish_host(value, q, out)
    _check_contiguous_last(
        q=call.q, k_pages=call.k_pages, v_pages=call.v_pages, block_table=call.block_table, kv_lengths=call.kv_lengths,
        sinks=call.sinks, out=call.out,
    )  # fmt: skip
    y = call.result(call.q.shape, dtype, out)
    others = ("q", "k_pages", "v_pages", "k_scales", "v_scales", "sinks")
    _check_overlap(call.out, other=[(name, getattr(call, name)) for name in others])
    if y.size and not (capacity and call.k_pages.shape[0]):
        raise ValueError(
            f"block_table: {capacity} tokens in a pool of {call.k_pages.shape[0]} pages, wanted one page at least"
        )
    if y.size:
        _kernels("pages").run(
            call.q, call.k_pages, call.v_pages, call.block_table, call.kv_lengths, call.k_scales, call.v_scales,
            int(prefix), bool(causal), head_dim**-0.5 if scale is None else float(scale),
            None if window is None else int(window), None if soft_cap is None else float(soft_cap), call.sinks, y,
            call.device, call.stream,
        )  # fmt: skip
    return call.hand_out(y, call.returned)


def advance(lengths, tokens, *, stream=None):
    """lengths += tokens, in place and without a host round trip. lengths int32 [batch]."""
    call = _Call(stream, (), lengths=lengths)
    _check_dtype(np.int32, lengths=call.lengths)
    _check_axes("lengths", call.lengths, ("batch",))
    _check_integer("tokens", tokens)
    if call.on_host:
        _check_writable(lengths=call.lengths)
        reference.advance(call.lengths, tokens)
        return
    if call.copied:
        raise TypeError("lengths: a host array is not written through a GPU; pass a device array")
    _check_no_jax(lengths=lengths)
    _check_contiguous_last(lengths=call.lengths)
    if call.lengths.size:
        _kernels("advance").run(call.lengths, int(tokens), call.device, call.stream)


# ---- choosing a token --------------------------------------------------------------------------------------------------------


@replayed
def argmax(x, *, out=None, stream=None):
    """The first index of the largest element over the last axis, a NaN counting as largest. x [..., columns] -> int32 [...]."""
    call = _Call(stream, ("out",), x=x, out=out)
    _check_float(x=call.x)
    _check_rows("x", call.x)
    shape = call.x.shape[:-1]
    if call.x.shape[-1] == 0:
        raise ValueError(f"x: shape {tuple(call.x.shape)}, wanted at least one column")
    dtype = np.dtype(np.int32)
    if call.on_host:
        _check_out(call, shape, dtype)
        return _finish_host(reference.argmax(call.x), x, out)
    _check_contiguous_last(x=call.x)
    if call.out is not None and not call.out.is_contiguous:
        raise ValueError(f"out: strides {call.out.strides}, wanted a contiguous array")
    y = call.result(shape, dtype, out)
    if y.size:
        # one launch a run of rows at one stride; the results follow one another
        flat, start = y.reshape(-1), 0
        for (rows,) in _merge_rows((call.x,)):
            _kernels("argmax").run(rows, flat[start : start + rows.shape[0]], call.device, call.stream)
            start += rows.shape[0]
    return call.hand_out(y, call.returned)


@replayed
def sample(
    logits,
    *,
    temperature,
    top_k=None,
    top_p=None,
    min_p=None,
    repetition_penalty=1.0,
    seen=None,
    seed=0,
    step=None,
    out=None,
    stream=None,
):
    """Draw one token a row: repetition penalty, temperature, top-k, top-p, min-p, then the draw. -> int32 [rows]

    logits [rows, vocab] float. seen uint8 [rows, vocab]: a token with a mark is penalised, and the chosen one gets a mark.
    temperature 0 takes the largest. top_k: the k largest; top_p in (0, 1]: the smallest set of largest tokens that has this
    share of the probability; min_p in [0, 1]: those at least min_p as likely as the likeliest. The draw depends on seed
    (0 to 2^64 - 1), step (int32 [1]; default 0), row and token alone: the same on every device.
    """
    call = _Call(stream, ("seen", "step", "out"), logits=logits, seen=seen, step=step, out=out)
    _check_float(logits=call.logits)
    _check_axes("logits", call.logits, ("rows", "vocab"))
    rows, vocab = call.logits.shape
    if vocab == 0:
        raise ValueError(f"logits: shape {tuple(call.logits.shape)}, wanted at least one column")
    _check_number("temperature", temperature, least=0)
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)):
            raise TypeError(f"top_k: {type(top_k).__name__}, wanted an integer or None")
        _check_number("top_k", top_k, least=1)
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None:
            _check_number(name, value)
            if not (0 < value <= 1 if name == "top_p" else 0 <= value <= 1):
                raise ValueError(f"{name}: {value}, wanted {'(0, 1]' if name == 'top_p' else '[0, 1]'}")
    _check_number("repetition_penalty", repetition_penalty, positive=True)
    _check_integer("seed", seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}, wanted 0 to 2^64 - 1")
    _check_dtype(np.uint8, seen=call.seen)
    _check_shape("seen", call.seen, (rows, vocab))
    _check_dtype(np.int32, step=call.step)
    _check_shape("step", call.step, (1,))
    options = {
        "temperature": float(temperature),
        "top_k": None if top_k is None else int(top_k),
        "top_p": None if top_p is None else float(top_p),
        "min_p": None if min_p is None else float(min_p),
        "repetition_penalty": float(repetition_penalty),
        "seed": int(seed),
    }
    dtype = np.dtype(np.int32)
    if call.on_host:
        _check_out(call, (rows,), dtype)
        _check_writable(seen=call.seen)
        return _finish_host(reference.sample(call.logits, seen=call.seen, step=call.step, **options), logits, out)
    _check_contiguous_last(logits=call.logits, seen=call.seen, out=call.out)
    if call.copied:
        _check_writable(seen=None if seen is None else as_host_array(seen))
    else:
        _check_no_jax(seen=seen)
    y = call.result((rows,), dtype, out)
    if rows:
        _kernels("sampling").run(call.logits, call.seen, call.step, y, options, call.device, call.stream)
    if call.copied and seen is not None:
        with memory.use_stream(call.stream):
            as_host_array(seen)[...] = memory.to_host(call.seen)
    return call.hand_out(y, call.returned)


_ROW_NUMBERS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "seed": np.uint64,
    "step": np.int32,
}


@replayed
def sample_rows(
    logits,
    *,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition_penalty,
    seed,
    step,
    seen=None,
    seen_row=None,
    out=None,
    stream=None,
):
    """``sample`` with numbers of its own for each row, drawn as that row would be alone. -> int32 [rows]

    logits [rows, vocab] float, up to 2^19 columns. Contiguous arrays [rows]: temperature, top_p, min_p and repetition_penalty
    float32, top_k (0: all) and step int32, seed uint64; top_p 1, min_p 0 and repetition_penalty 1 change nothing. seen uint8
    [masks, vocab], seen_row int32 [rows]: row i's mask is seen[seen_row[i]], read and marked where its penalty is not 1.
    The numbers themselves are not checked: they may lie on the device, and be another's at the next replay of a graph.
    """
    numbers = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "step": step,
    }
    call = _Call(stream, ("seen", "seen_row", "out"), logits=logits, **numbers, seen=seen, seen_row=seen_row, out=out)
    _check_float(logits=call.logits)
    _check_axes("logits", call.logits, ("rows", "vocab"))
    rows, vocab = call.logits.shape
    if vocab == 0:
        raise ValueError(f"logits: shape {tuple(call.logits.shape)}, wanted at least one column")
    for name, dtype in _ROW_NUMBERS.items():
        _check_dtype(dtype, **{name: getattr(call, name)})
        _check_shape(name, getattr(call, name), (rows,))
    if (seen is None) != (seen_row is None):
        raise TypeError("seen, seen_row: one of the two is None, wanted both or neither")
    _check_dtype(np.uint8, seen=call.seen)
    _check_dtype(np.int32, seen_row=call.seen_row)
    if seen is not None:
        _check_axes("seen", call.seen, ("masks", "vocab"))
        _check_shape("seen", call.seen, (call.seen.shape[0], vocab))
        _check_shape("seen_row", call.seen_row, (rows,))
    described = {name: getattr(call, name) for name in (*_ROW_NUMBERS, "seen_row")}
    dtype = np.dtype(np.int32)
    if call.on_host:
        _check_out(call, (rows,), dtype)
        _check_writable(seen=call.seen)
        return _finish_host(reference.sample_rows(call.logits, seen=call.seen, **described), logits, out)
    if call.copied:
        raise TypeError("logits: a host array on a GPU; pass device arrays, or use sample")
    _check_no_jax(seen=seen)
    _check_contiguous_last(logits=call.logits, seen=call.seen, out=call.out)
    for name, array in described.items():
        if array is not None and not array.is_contiguous:
            raise ValueError(f"{name}: strides {array.strides}, wanted a contiguous array")
    described["seen_row"] = described["seen_row"] if seen is not None else described["top_k"]  # which nobody reads
    y = call.result((rows,), dtype, out)
    if rows:
        _kernels("sampling").run_rows(call.logits, described, call.seen, y, call.device, call.stream)
    return call.hand_out(y, call.returned)
