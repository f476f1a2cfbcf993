"""Calls on torch tensors that were seen before: no checks, no plan, one launch into kept argument buffers.

The first call with some shapes, strides, dtypes, alignments and options runs in full, and what it launches is noted. A later
call that is alike in all of these differs in addresses alone: they are written into the kept arguments, new results are
allocated, and the kernels are launched. What cannot be repeated so (memory of our own was taken, something was read back, an
argument depends on an address) always runs in full.
"""

import ctypes
import functools
import sys
import threading
from contextvars import ContextVar
from functools import lru_cache

from nbkernels.arrays import Int8Weight
from nbkernels.launch.device import chosen_device
from nbkernels.launch.tensor_map import TensorMap

MOST_KEPT = 4096
_ADDRESSES_FROM = 1 << 32  # smaller integers are sizes and strides

_noting = ContextVar("nbkernels_noting", default=None)


class Note:
    """What one call launches: (LoadedKernel, Plan, arguments) of each; ``repeatable`` until something forbids it."""

    def __init__(self):
        self.launches = []
        self.repeatable = True


def note_launch(kernel, plan, arguments):
    """A kernel was launched on the GPU."""
    note = _noting.get()
    if note is not None:
        note.launches.append((kernel, plan, arguments))


def forbid():
    """The call in progress does what cannot be repeated with other addresses."""
    note = _noting.get()
    if note is not None:
        note.repeatable = False


@lru_cache(maxsize=1)
def _driver_launch():
    """cuLaunchKernel, called without a conversion of arguments: they are kept as C values."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    return library.cuLaunchKernel


class _Launch:
    """One kernel launch with arguments of its own. slots: (place among the arguments, which operand's address it is)."""

    def __init__(self, kernel, plan, arguments, operands):
        self.slots = []
        self.kept = (kernel, arguments)  # tensor maps live as long as they are pointed to
        self.values = (ctypes.c_uint64 * max(len(arguments), 1))()
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * max(len(arguments), 1))(*(base + 8 * i for i in range(len(arguments))))
        floats = (ctypes.c_float * (2 * max(len(arguments), 1))).from_buffer(self.values)
        for i, argument in enumerate(arguments):
            if type(argument) is TensorMap:
                raise ValueError("a tensor map holds an address")
            if type(argument) is float:
                floats[2 * i] = argument
                continue
            self.values[i] = argument & 0xFFFFFFFFFFFFFFFF
            if argument >= _ADDRESSES_FROM:
                self.slots.append((i, operands.index(argument)))  # ValueError where it is no operand's address
        self.head = (
            ctypes.c_void_p(int(kernel.handle)),
            *map(ctypes.c_uint, (*plan.grid, *plan.block, plan.shared_bytes)),
        )
        self.tail = (self.pointers, None)


class _Record:
    """How to repeat a call. results: for each, the operand that is returned, or None and (shape, dtype) of a new tensor."""

    def __init__(self, note, tensors, out, returned):
        import torch

        self.lock = threading.Lock()
        self.torch = torch
        self.single = not isinstance(returned, tuple)
        results = (returned,) if self.single else returned
        operands = [t.data_ptr() for t in tensors]
        inputs = [p for p, t in zip(operands, tensors, strict=True) if t is not out]
        if len(set(inputs)) < len(inputs):
            raise ValueError("two operands at one address cannot be told apart")
        self.results = []
        for result in results:
            if type(result) not in _tensor_types:
                raise ValueError("a result that is no tensor")
            at = next((i for i, t in enumerate(tensors) if t is result), None)
            self.results.append((at, tuple(result.shape), result.dtype, result.device))
            if at is None:
                operands.append(result.data_ptr())
        # a new result like the first operand is allocated by a cheaper call
        first = tensors[0]
        self.like_first = [
            at is None and shape == tuple(first.shape) and dtype == first.dtype and first.is_contiguous()
            for at, shape, dtype, _ in self.results
        ]
        self.launches = [_Launch(*launch, operands) for launch in note.launches]
        self.out = next((i for i, t in enumerate(tensors) if t is out), None) if out is not None else None
        self.spans = [_span(t) for t in tensors]
        self.relations = self._relations(operands) if self.out is not None else None

    def _relations(self, pointers):
        """Of ``out`` to every operand: 0 the same address, 1 apart, 2 overlapping."""
        start, span = pointers[self.out], self.spans[self.out]
        found = []
        for pointer, other in zip(pointers, self.spans, strict=False):
            distance = pointer - start
            found.append(0 if distance == 0 else 1 if distance >= span or -distance >= other else 2)
        return found

    def repeat(self, tensors, pointers):
        """The results, or NotImplemented where the call must run in full."""
        if self.relations is not None and self._relations(pointers) != self.relations:
            return NotImplemented
        torch = self.torch
        results = []
        for (at, shape, dtype, device), like_first in zip(self.results, self.like_first, strict=True):
            if at is not None:
                results.append(tensors[at])
                continue
            new = torch.empty_like(tensors[0]) if like_first else torch.empty(shape, dtype=dtype, device=device)
            pointers.append(new.data_ptr())
            results.append(new)
        launch_kernel = _driver_launch()
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(tensors[0].get_device()))
        with self.lock:
            for launch in self.launches:
                values = launch.values
                for slot, operand in launch.slots:
                    values[slot] = pointers[operand]
                if launch_kernel(*launch.head, stream, *launch.tail):
                    return NotImplemented  # the full call says what is wrong
        return results[0] if self.single else tuple(results)


def _span(tensor):
    """Bytes from the first element's address to behind the last one's."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_tensor_types = set()  # torch.Tensor once one was seen: torch is never imported here for its own sake


def replayed(function):
    """Let an operation repeat calls on torch tensors. Its arrays are the tensors among its arguments; ``out`` may be one."""
    records = {}

    @functools.wraps(function)
    def operation(*args, **kwargs):
        if not args or type(args[0]) not in _tensor_types:
            if args and _is_torch_tensor(args[0]):
                return operation(*args, **kwargs)
            return function(*args, **kwargs)
        tensors, pointers, key = [], [], [chosen_device()]
        add = key.append
        for value in args:
            _describe(value, tensors, pointers, add)
        for name, value in kwargs.items():
            add(name)
            _describe(value, tensors, pointers, add)
        key = tuple(key)
        try:
            record = records.get(key)
        except TypeError:  # an option without a hash is wrong, and the full call says so
            return function(*args, **kwargs)
        if record is not None:
            result = record.repeat(tensors, pointers)
            if result is not NotImplemented:
                return result
            return function(*args, **kwargs)
        note = Note()
        token = _noting.set(note)
        try:
            returned = function(*args, **kwargs)
        finally:
            _noting.reset(token)
        if note.repeatable and note.launches and kwargs.get("stream") is None and all(t.is_cuda for t in tensors):
            try:
                record = _Record(note, tensors, kwargs.get("out"), returned)
            except ValueError:
                return returned  # and run in full the next time too
            if len(records) >= MOST_KEPT:
                records.clear()
            records[key] = record
        return returned

    operation.records = records
    return operation


def _describe(value, tensors, pointers, add):
    """Enter all that a call may depend on, save the address itself."""
    if type(value) is Int8Weight:
        _describe(value.values, tensors, pointers, add)
        _describe(value.scales, tensors, pointers, add)
        add(value.group_size)
    elif type(value) in _tensor_types:
        pointer = value.data_ptr()
        tensors.append(value)
        pointers.append(pointer)
        add(value.shape)
        add(value.stride())
        add(value.dtype)
        add(value.get_device())
        add(value.is_neg())
        add(pointer & 15)
    else:
        add(type(value))  # 1, 1.0 and True are equal, and not the same option
        add(value)


def _is_torch_tensor(value):
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    _tensor_types.update((torch.Tensor, torch.nn.Parameter))
    return True
