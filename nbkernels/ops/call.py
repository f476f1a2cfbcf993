"""A call of an operation: where its arrays are, what it runs on, and what its result becomes."""

from importlib import import_module

import numpy as np

from nbkernels.arrays import DeviceArray, Int8Weight, as_device_array, as_host_array, is_host, library
from nbkernels.launch import memory
from nbkernels.launch.device import DeviceError, cuda_device, current
from nbkernels.ops.checks import check_contiguous_last, check_dtype, check_overlap, check_shape, check_writable

INT8, FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)


class Call:
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
            check_shape(name, described, shape)
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


def kernel_module(name):
    """A module of nbkernels.kernels, imported when its first launch is due: a CPU never imports Numba."""
    return import_module(f"nbkernels.kernels.{name}")


def merge_rows(arrays):
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
        merged = tuple(x if x is None else as_rows(x) for x in arrays)
    except ValueError:
        for i in range(shape[0]):
            yield from merge_rows(tuple(x if x is None else x[i] for x in arrays))
    else:
        yield merged


def as_rows(x):
    """An array [..., columns] as [rows, columns] without a copy; ValueError where its rows do not lie at one stride."""
    if x.is_contiguous:
        columns = x.shape[-1]
        return DeviceArray(x.pointer, (x.size // max(columns, 1), columns), (columns, 1), x.dtype, x.owner)
    rows = x[..., 0].reshape(-1)
    return DeviceArray(x.pointer, (rows.shape[0], x.shape[-1]), (rows.strides[0], 1), x.dtype, x.owner)


def check_out(call, shape, dtype):
    """Host results: ``out`` has the right shape and dtype and may be written."""
    check_shape("out", call.out, shape)
    if call.out is not None and call.out.dtype != dtype:
        raise TypeError(f"out: {call.out.dtype}, wanted {dtype}")
    check_writable(out=call.out)


def finish_host(values, first, out):
    """A result in NumPy -> ``out`` where one was given, else the host kind of the first argument."""
    if out is None and isinstance(first, np.ndarray):
        return values
    return _to_host_kind(values, first, out)


def int8_out(out):
    """The arrays of an ``out`` that is quantised, by the names that errors give them."""
    if out is None:
        return {"out.values": None, "out.scales": None}
    if not isinstance(out, Int8Weight):
        raise TypeError(f"out: {type(out).__name__}, wanted an Int8Weight, as the result is quantised")
    if out.group_size is not None:
        raise ValueError(f"out: group_size {out.group_size}, wanted None: one scale a row")
    return {"out.values": out.values, "out.scales": out.scales}


class Int8Result:
    """The Int8Weight that a call on a device makes: of values and scales to write into, ``out``'s (checked) or new ones."""

    def __init__(self, call, shape, groups, group_size, out, inputs):
        self.call, self.group_size, self.out = call, group_size, out
        parts = (None, None) if out is None else (out.values, out.scales)
        self.values = call.result(shape, INT8, parts[0], "out.values")
        self.values_returned = call.returned
        self.scales = call.result((*shape[:-1], groups), FLOAT32, parts[1], "out.scales")
        self.scales_returned = call.returned
        if out is not None:
            check_contiguous_last(**{"out.values": self.values})
            others = [*inputs.items(), ("out.scales", self.scales)]
            check_overlap(self.values, other=others)
            check_overlap(self.scales, other=others[:-1])

    def quantise(self, x, group_size):
        """values and scales of x, row by row."""
        if self.scales.size:
            run = kernel_module("quantize").run
            for rows, values, scales in merge_rows((x, self.values, self.scales)):
                run(rows, values, scales, group_size, self.call.device, self.call.stream)

    def hand_out(self):
        """In the caller's kind."""
        values = self.call.hand_out(self.values, self.values_returned)
        scales = self.call.hand_out(self.scales, self.scales_returned)
        return Int8Weight(values, scales, self.group_size) if self.out is None else self.out


def finish_int8_host(call, quantised, first, out):
    """An Int8Weight of the reference in the host kind of ``first``; written into ``out`` where one was given."""
    if out is None:
        parts = (finish_host(a, first, None) for a in (quantised.values, quantised.scales))
        return Int8Weight(*parts, quantised.group_size)
    for name, values, into in (
        ("out.values", quantised.values, out.values),
        ("out.scales", quantised.scales, out.scales),
    ):
        described = getattr(call, name)
        check_shape(name, described, values.shape)
        check_dtype(values.dtype, **{name: described})
        check_writable(**{name: described})
        _to_host_kind(values, first, into)
    return out
