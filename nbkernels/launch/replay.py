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
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from nbkernels.arrays import Int8Weight
from nbkernels.launch import overlap
from nbkernels.launch.device import chosen_device
from nbkernels.launch.tensor_map import TensorMap

MOST_KEPT = 4096
_ADDRESSES_FROM = 1 << 32  # smaller integers are sizes and strides

_noting = ContextVar("nbkernels_noting", default=None)


class Note:
    """What one call does.

    launches: (LoadedKernel, Plan, arguments) of each. allocations: address -> bytes of scratch memory that it took. kept: address
    -> (array that stays, the handle of the stream it belongs to). repeatable: False once something forbade it.
    """

    def __init__(self):
        self.launches = []
        self.allocations = {}
        self.kept = {}
        self.repeatable = True

    def launched(self, kernel, plan, arguments):
        """A kernel was launched."""
        self.launches.append((kernel, plan, arguments))


@contextmanager
def noted(note):
    """Enter in a Note what is launched inside, on the GPU and by this thread; calls that were recorded run in full."""
    for records in _all_records:
        records.clear()
    token = _noting.set(note)
    try:
        yield note
    finally:
        _noting.reset(token)


def note_launch(kernel, plan, arguments):
    """A kernel was launched on the GPU."""
    note = _noting.get()
    if note is not None:
        note.launched(kernel, plan, arguments)


def note_allocation(address, nbytes):
    """The call in progress took memory of unspecified content, which lasts as long as the call."""
    note = _noting.get()
    if note is not None:
        note.allocations[address] = nbytes


def note_kept(array, stream):
    """The call in progress uses an array that outlives it, and belongs to a stream handle."""
    note = _noting.get()
    if note is not None:
        note.kept[array.pointer] = array, stream


def forbid():
    """The call in progress does what cannot be repeated with other addresses."""
    note = _noting.get()
    if note is not None:
        note.repeatable = False


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver's interface: an identifier, padding, and a value of 64 bytes."""

    _fields_ = (("identifier", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the one in front of it has ended
_EARLY = _Attribute(6, 0, (1,))
_EARLY_ADDRESS = ctypes.addressof(_EARLY)
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE: all blocks run at once, or the launch is refused
_TOGETHER = _Attribute(2, 0, (1,))
_TOGETHER_ADDRESS = ctypes.addressof(_TOGETHER)


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver's interface."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _driver():
    """(cuLaunchKernelEx, cuTensorMapReplaceAddress), called without a conversion of arguments: they are kept as C values."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    return library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress


def launch_early(kernel, plan, stream):
    """Launch a LoadedKernel, its arguments written, so that it may start before its predecessor has ended -> (CUresult,)."""
    return _launch_with(kernel, plan, stream, _EARLY_ADDRESS)


def launch_together(kernel, plan, stream):
    """Launch a LoadedKernel, its arguments written, all of whose blocks run at once -> (CUresult,). It is not replayed."""
    forbid()
    return _launch_with(kernel, plan, stream, _TOGETHER_ADDRESS)


def _launch_with(kernel, plan, stream, attribute):
    from cuda.bindings import driver

    config = _Config(*plan.grid, *plan.block, plan.shared_bytes, stream, attribute, 1)
    launch_kernel, _ = _driver()
    status = launch_kernel(ctypes.byref(config), ctypes.c_void_p(int(kernel.handle)), kernel.pointers, None)
    return (driver.CUresult(status),)


class _Launch:
    """One kernel launch with arguments of its own.

    slots: (place among the arguments, which operand's address it is, bytes behind it). maps: (a tensor map, where its bytes lie,
    which operand it describes).
    """

    def __init__(self, kernel, plan, arguments, operands, scratch, kept):
        self.made_of = kernel, plan, arguments, operands, scratch, kept
        count = max(len(arguments), 1)
        self.slots, self.maps = [], []
        self.kernel = kernel  # it stays loaded while it may be launched
        self.launch_kernel, self.replace_address = _driver()
        self.values = (ctypes.c_uint64 * count)()
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * count)(*(base + 8 * i for i in range(count)))
        floats = (ctypes.c_float * (2 * count)).from_buffer(self.values)
        for i, argument in enumerate(arguments):
            if type(argument) is TensorMap:
                own = TensorMap(argument.data, argument.address)
                self.pointers[i] = own.host_address
                self.maps.append((own, ctypes.c_void_p(own.host_address), operands.index(argument.address)))
                continue
            if type(argument) is float:
                floats[2 * i] = argument
                continue
            self.values[i] = argument & 0xFFFFFFFFFFFFFFFF
            if argument < _ADDRESSES_FROM or argument in kept:
                continue
            inside = next((a for a, nbytes in scratch.items() if a < argument < a + nbytes), argument)
            self.slots.append((i, operands.index(inside), argument - inside))  # ValueError where it is no operand's
        self.config = _Config(*plan.grid, *plan.block, plan.shared_bytes, None, _EARLY_ADDRESS, 0)
        self.call = (
            ctypes.c_void_p(ctypes.addressof(self.config)),
            ctypes.c_void_p(int(kernel.handle)),
            self.pointers,
            None,
        )

    def buffers(self):
        """(values, config, what ``launch_kernel`` takes) of the same launch, for one thread while it launches."""
        own = _Launch(*self.made_of)
        return own.values, own.config, own.call


class _Record:
    """How to repeat a call. Operands are its tensors, then what is made anew each time: results, then scratch memory.

    new: functions that make these. results: of each result the operand that it is, or of an Int8Weight (values' operand, scales'
    operand, group_size). again(tensors, pointers): the results, or NotImplemented where the call must run in full. once(pointer):
    the same of a call on one tensor with one new result, or None.
    """

    def __init__(self, note, tensors, out, returned):
        import torch

        if type(out) is Int8Weight:
            raise ValueError(
                "two arrays to write into, whose place among the operands is checked by the full call alone"
            )
        self.lock = threading.Lock()
        self.stream_of = torch._C._cuda_getCurrentRawStream
        self.device = tensors[0].get_device()
        self.single = not isinstance(returned, tuple)
        operands = [t.data_ptr() for t in tensors]
        empty = _empty(torch, tensors[0].device)
        self.new = []

        def number(result):
            """Which operand a result is; a new one where it is none yet."""
            if type(result) not in _tensor_types:
                raise ValueError("a result that is no tensor")
            at = next((i for i, t in enumerate(tensors) if t is result), None)
            if at is not None:
                return at
            operands.append(result.data_ptr())
            self.new.append(empty(tuple(result.shape), result.stride(), result.dtype))
            return len(operands) - 1

        self.results = [
            (number(r.values), number(r.scales), r.group_size) if type(r) is Int8Weight else number(r)
            for r in ((returned,) if self.single else returned)
        ]
        self.plain = all(type(at) is int for at in self.results)
        for address, nbytes in note.allocations.items():
            operands.append(address)
            self.new.append(empty((nbytes,), (1,), torch.uint8))
        self.launches = [_Launch(*launch, operands, note.allocations, note.kept) for launch in note.launches]
        self.kept = note.kept
        self.only_stream = next((stream for _, stream in note.kept.values()), None)
        self.out = next((i for i, t in enumerate(tensors) if t is out), None) if out is not None else None
        # ``out`` may lie where an operand lies, or apart from it, if it did so in the call that was checked
        self.beside, self.relations = [], []
        if self.out is not None:
            spans = [_span(t) for t in tensors]
            self.beside = [(i, spans[self.out], spans[i]) for i in range(len(tensors)) if i != self.out]
            self.relations = self._relations(operands)
        simple = len(self.launches) == 1 and self.plain and not (self.kept or overlap.entered())
        simple = simple and not self.launches[0].maps
        self.once = (
            self._once() if simple and len(tensors) == 1 and self.results == [1] and len(self.new) == 1 else None
        )
        self.again = self._again() if simple else self.repeat

    def _once(self):
        launch = self.launches[0]
        if sorted(slot[1:] for slot in launch.slots) != [(0, 0), (1, 0)]:
            return None
        slot_of_x, slot_of_y = (next(i for i, operand, _ in launch.slots if operand == n) for n in (0, 1))
        (make,), stream_of, device, spare = self.new, self.stream_of, self.device, [launch.buffers()]
        launch_kernel, take, give = launch.launch_kernel, spare.pop, spare.append

        def once(pointer):
            y = make()
            try:
                mine = take()
            except IndexError:  # other threads have all there are
                mine = launch.buffers()
            values, config, call = mine
            values[slot_of_x] = pointer
            values[slot_of_y] = y.data_ptr()
            config.stream = stream_of(device)
            status = launch_kernel(*call)
            give(mine)
            return NotImplemented if status else y  # the full call says what is wrong

        return once

    def _again(self):
        """``repeat`` of one launch where nothing is looked at but addresses: most calls."""
        launch, new, stream_of, device = self.launches[0], self.new, self.stream_of, self.device
        spare = [launch.buffers()]
        launch_kernel, take, give = launch.launch_kernel, spare.pop, spare.append
        slots, results = launch.slots, self.results
        result = results[0] if self.single else None
        relations, apart = self._relations if self.beside else None, self.relations

        def again(tensors, pointers):
            if relations is not None and relations(pointers) != apart:
                return NotImplemented
            for make in new:
                made = make()
                tensors.append(made)
                pointers.append(made.data_ptr())
            try:
                mine = take()
            except IndexError:  # other threads have all there are
                mine = launch.buffers()
            values, config, call = mine
            for slot, operand, behind in slots:
                values[slot] = pointers[operand] + behind
            config.stream = stream_of(device)
            status = launch_kernel(*call)
            give(mine)
            if status:
                return NotImplemented  # the full call says what is wrong
            return tuple([tensors[at] for at in results]) if result is None else tensors[result]

        return again

    def _relations(self, pointers):
        """Of ``out`` to every other operand: 0 the same address, 1 apart, 2 overlapping."""
        start = pointers[self.out]
        found = []
        for i, span, other in self.beside:
            distance = pointers[i] - start
            found.append(0 if distance == 0 else 1 if distance >= span or -distance >= other else 2)
        return found

    def repeat(self, tensors, pointers):
        """The results, or NotImplemented where the call must run in full."""
        if self.beside and self._relations(pointers) != self.relations:
            return NotImplemented
        stream = self.stream_of(self.device)
        if self.only_stream is not None and stream != self.only_stream:
            return NotImplemented
        for make in self.new:
            made = make()
            tensors.append(made)
            pointers.append(made.data_ptr())
        with self.lock:
            for launch in self.launches:
                values = launch.values
                for slot, operand, behind in launch.slots:
                    values[slot] = pointers[operand] + behind
                for _, described, operand in launch.maps:
                    launch.replace_address(described, ctypes.c_void_p(pointers[operand]))
                launch.config.stream = stream
                launch.config.attribute_count = 1 if overlap.follows(stream) and launch.kernel.early else 0
                if launch.launch_kernel(*launch.call):
                    return NotImplemented  # the full call says what is wrong
        if self.single and self.plain:
            return tensors[self.results[0]]
        results = tuple(
            tensors[at] if type(at) is int else Int8Weight(tensors[at[0]], tensors[at[1]], at[2]) for at in self.results
        )
        return results[0] if self.single else results


def _empty(torch, device):
    """make(shape, strides, dtype) -> a function of nothing that makes such a tensor on the device.

    Where torch knows of one GPU alone, by the function that its compiler's programs call: half the time of torch.empty.
    """
    short = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
    if short is not None and torch.cuda.device_count() == 1:
        return lambda shape, strides, dtype: functools.partial(short, shape, strides, dtype)
    return lambda shape, strides, dtype: functools.partial(
        torch.empty_strided, shape, strides, dtype=dtype, device=device
    )


def _span(tensor):
    """Bytes from the first element's address to behind the last one's."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_all_records = []  # of every operation

_tensor_types = set()  # torch.Tensor once one was seen: torch is never imported here for its own sake


def replayed(function):
    """Let an operation repeat calls on torch tensors. Its arrays are the tensors among its arguments; ``out`` may be one."""
    records = {}
    device_in_force, chain_in_force = chosen_device, overlap.chain  # found once: microseconds count
    tensor_types, record_of = _tensor_types, records.get

    @functools.wraps(function)
    def operation(*args, **kwargs):
        # all that a call may depend on, save the addresses themselves: what there is, then each value as ``_describe`` says it
        if len(args) == 1 and not kwargs and type(args[0]) in tensor_types:
            (x,) = args
            pointer = x.data_ptr()
            key = (
                device_in_force(),
                chain_in_force() is None,
                1,
                x.shape,
                x.stride(),
                x.dtype,
                x.get_device(),
                x.is_neg(),
                pointer & 15,
                0,
            )
            record = record_of(key)
            if record is not None and record.once is not None:
                result = record.once(pointer)
                return function(x) if result is NotImplemented else result
            tensors, pointers = [x], [pointer]
        else:
            first = args[0] if args else None
            if type(first) is Int8Weight:
                first = first.values
            if type(first) not in tensor_types:
                return operation(*args, **kwargs) if _is_torch_tensor(first) else function(*args, **kwargs)
            tensors, pointers, key = [], [], [device_in_force(), chain_in_force() is None, len(args), *kwargs]
            for value in (*args, *kwargs.values()) if kwargs else args:
                if type(value) in tensor_types:  # as ``_describe``, which is a call more
                    pointer = value.data_ptr()
                    tensors.append(value)
                    pointers.append(pointer)
                    key += (
                        value.shape,
                        value.stride(),
                        value.dtype,
                        value.get_device(),
                        value.is_neg(),
                        pointer & 15,
                        pointers.index(pointer),
                    )
                else:
                    _describe(value, tensors, pointers, key)
            key = tuple(key)
        try:
            record = record_of(key)
        except TypeError:  # an option without a hash is wrong, and the full call says so
            return function(*args, **kwargs)
        if record is not None:
            result = record.again(tensors, pointers)
            if result is not NotImplemented:
                return result
            return function(*args, **kwargs)
        if _noting.get() is not None:  # somebody notes already
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
    _all_records.append(records)
    return operation


def _describe(value, tensors, pointers, key):
    """Enter a value: a tensor by its layout and alignment, another by its type (1, 1.0 and True are equal) and itself."""
    kind = type(value)
    if kind in _tensor_types:
        pointer = value.data_ptr()
        tensors.append(value)
        pointers.append(pointer)
        # the first operand at this address: two that were one array must be one again
        same = pointers.index(pointer)
        key += (value.shape, value.stride(), value.dtype, value.get_device(), value.is_neg(), pointer & 15, same)
    elif kind is Int8Weight:
        _describe(value.values, tensors, pointers, key)
        _describe(value.scales, tensors, pointers, key)
        key.append(value.group_size)
    else:
        key += (kind, value)


def _is_torch_tensor(value):
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    _tensor_types.update((torch.Tensor, torch.nn.Parameter))
    return True
