"""Device memory of our own: allocation, copies, and the order of work on streams.

Arrays made here live on the legacy default stream unless ``use_stream`` says otherwise; memory is given back in stream order
when the last view of it is gone.
"""

import ctypes
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import prod

import numpy as np

from nbkernels.arrays import DeviceArray, contiguous_strides, library
from nbkernels.launch.device import DeviceError, current
from nbkernels.launch.launcher import check
from nbkernels.launch.replay import forbid, note_allocation, note_kept

_stream = ContextVar("nbkernels_stream", default=0)
SHARED_HANDLES = (2,)  # handles that mean another stream in each thread: CU_STREAM_PER_THREAD
LEAST_COUNTERS = 4096


def current_stream(x=None):
    """The handle of the stream on which work for array x belongs: its library's current stream, or ours."""
    kind = library(x)
    if kind == "torch" and x.is_cuda:
        import torch

        # the raw handle: building torch's Stream object costs more than the launch
        return torch._C._cuda_getCurrentRawStream(x.device.index)
    if kind == "cupy":
        import cupy

        return cupy.cuda.get_current_stream().ptr
    return _stream.get()


def stream_handle(stream):
    """An integer handle from an integer, or from anything with __cuda_stream__. TypeError for anything else."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        pair = stream.__cuda_stream__
        return int((pair() if callable(pair) else pair)[1])
    if hasattr(stream, "cuda_stream"):  # torch before it spoke the protocol
        return int(stream.cuda_stream)
    raise TypeError(f"stream: {type(stream).__name__}, wanted an integer handle or an object with __cuda_stream__")


@contextmanager
def use_stream(stream):
    """Put the operations inside, and the arrays they make, on another stream."""
    token = _stream.set(stream_handle(stream))
    try:
        yield
    finally:
        _stream.reset(token)


class Arena:
    """Device memory that is handed out again and again in the same order: what a captured graph works in.

    Inside ``use_arena`` allocations come from here and return here when their last view is gone. A sequence of operations that
    has run once finds every block it needs the second time, so that a capture allocates nothing, and a replay finds the same
    addresses. The work must be on one stream.
    """

    def __init__(self):
        self.idle = {}  # rounded bytes -> blocks
        self.counters = []

    def take(self, nbytes, stream):
        """An owner of at least nbytes."""
        size = 256 << max(0, (nbytes - 1).bit_length() - 8)
        blocks = self.idle.setdefault(size, [])
        return _Lent(blocks.pop() if blocks else _Block(size, stream), blocks)


class _Lent:
    """A block of an arena, which goes back when this is collected."""

    __slots__ = ("block", "home", "pointer")

    def __init__(self, block, home):
        self.block = block
        self.pointer = block.pointer
        self.home = home

    def __del__(self):
        self.home.append(self.block)


_arena = ContextVar("nbkernels_arena", default=None)


@contextmanager
def use_arena(arena):
    """Take the memory of the operations inside from an Arena."""
    token = _arena.set(arena)
    try:
        yield
    finally:
        _arena.reset(token)


class _Block:
    """Owns one allocation and frees it, in the order of its stream, when it is collected."""

    __slots__ = ("pointer", "stream")

    def __init__(self, nbytes, stream):
        from cuda.bindings import driver

        result = driver.cuMemAllocAsync(nbytes, stream)
        if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceError(f"out of device memory: {nbytes / 2**20:.0f} MiB could not be allocated")
        self.pointer = int(check(result)[0])
        self.stream = stream

    def __del__(self):
        # when the interpreter shuts down its modules may be gone already, and the memory goes with the process
        if not sys.is_finalizing():
            from cuda.bindings import driver

            driver.cuMemFreeAsync(self.pointer, self.stream)


@lru_cache(maxsize=1)
def _keep_pool():
    """Keep freed memory in the pool, in place of giving it back to the system at every synchronisation."""
    from cuda.bindings import driver

    pool = check(driver.cuDeviceGetDefaultMemPool(driver.cuDeviceGet(0)[1]))[0]
    attribute = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    check(driver.cuMemPoolSetAttribute(pool, attribute, driver.cuuint64_t(2**64 - 1)))


def empty(shape, dtype, stream=None):
    """A DeviceArray of unspecified content on the current device, allocated and later freed in the order of a stream handle.

    stream: that of the work that uses it; default the one in force (``use_stream``).
    """
    device = current()
    shape = tuple(int(n) for n in shape)
    dtype = np.dtype(dtype)
    if device.kind == "emulator":
        from nbkernels.launch.emulated import allocate

        return allocate(shape, dtype)
    _keep_pool()
    strides = contiguous_strides(shape)
    nbytes = dtype.itemsize * (shape[0] * strides[0] if shape else 1)
    nbytes = max(nbytes, 16)  # an allocation of nothing is refused by the driver
    stream = _stream.get() if stream is None else stream
    arena = _arena.get()
    block = _Block(nbytes, stream) if arena is None else arena.take(nbytes, stream)
    note_allocation(block.pointer, nbytes)
    return DeviceArray(block.pointer, shape, strides, dtype, block)


def zeros(shape, dtype):
    """A DeviceArray of zero bytes."""
    array = empty(shape, dtype)
    fill_bytes(array, 0)
    return array


_counters = {}  # stream handle -> arrays, the last the largest


def counters(count, stream):
    """At least ``count`` uint32 zeros for the blocks of a launch on a stream handle to meet by; the launch leaves zeros behind.

    All launches of a stream share them, since they come one after the other; so do those with one arena.
    """
    if current().kind == "emulator":  # a launch that ended in an error leaves anything behind
        return zeros((count,), np.uint32)
    arena = _arena.get()
    # a graph may be replayed beside the stream that it was captured on, and so has counters of its own
    kept = None
    if arena is not None:
        kept = arena.counters
    elif stream not in SHARED_HANDLES and not is_capturing(stream):
        kept = _counters.setdefault(stream, [])
    if kept and kept[-1].shape[0] >= count:
        note_kept(kept[-1], stream)
        return kept[-1]
    made = empty((max(count, LEAST_COUNTERS),), np.uint32, stream)
    with use_stream(stream):
        fill_bytes(made, 0)
    if kept is not None:
        kept.append(made)  # beside the smaller ones, which graphs may go on to use
    return made


def is_capturing(stream):
    """Whether what is asked of a stream handle becomes part of a graph; the legacy default stream's never does."""
    from cuda.bindings import driver

    return stream != 0 and int(check(driver.cuStreamIsCapturing(stream))[0]) != 0


def fill_bytes(array, value):
    """Set every byte of a contiguous DeviceArray."""
    if not array.is_contiguous:
        raise ValueError(f"an array of strides {array.strides} is not contiguous")
    if array.nbytes == 0:
        return
    if current().kind == "emulator":
        from nbkernels.launch.emulated import host_view, mark_written

        host_view(array).view(np.uint8)[...] = value
        mark_written(array)
        return
    from cuda.bindings import driver

    forbid()
    check(driver.cuMemsetD8Async(array.pointer, value, array.nbytes, _stream.get()))


def to_device(array):
    """Copy a NumPy array to the current device."""
    array = np.ascontiguousarray(array)
    result = empty(array.shape, array.dtype)
    copy_from_host(result, array)
    return result


def copy_from_host(destination, array):
    """Copy a NumPy array into a contiguous DeviceArray of the same shape and dtype; returns when the source may change."""
    if destination.shape != array.shape or destination.dtype != array.dtype or not destination.is_contiguous:
        raise ValueError(f"cannot copy {array.shape} {array.dtype} into {destination!r}")
    if array.nbytes == 0:
        return
    if current().kind == "emulator":
        from nbkernels.launch.emulated import host_view, mark_written

        host_view(destination)[...] = array
        mark_written(destination)
        return
    from cuda.bindings import driver

    forbid()
    array = np.ascontiguousarray(array)
    stream = _stream.get()
    check(driver.cuMemcpyHtoDAsync(destination.pointer, array.ctypes.data, array.nbytes, stream))
    # pageable memory is staged before the call returns, pinned memory is not
    check(driver.cuStreamSynchronize(stream))


def copy_from_pageable(destination, array):
    """``copy_from_host`` of ordinary memory, which is staged before this returns: it does not wait for the work on the stream."""
    if current().kind == "emulator":
        copy_from_host(destination, array)
        return
    from cuda.bindings import driver

    forbid()
    check(driver.cuMemcpyHtoDAsync(destination.pointer, array.ctypes.data, array.nbytes, _stream.get()))


class Mailbox:
    """Copies of small arrays to the host, each taken once it is there, while later work is already on the stream.

    At most ``slots`` are under way. nbytes: of the largest array.
    """

    def __init__(self, nbytes, slots=2):
        from cuda.bindings import driver

        self.nbytes = nbytes
        # page-locked: only then does a copy leave the host free
        self.pointers = [int(check(driver.cuMemAllocHost(nbytes))[0]) for _ in range(slots)]
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.events = [check(driver.cuEventCreate(flags))[0] for _ in range(slots)]
        self.posted = []  # (slot, shape, dtype), oldest first
        self.next = 0

    def post(self, array):
        """Begin to copy a contiguous DeviceArray, behind the work that is on the stream in force."""
        from cuda.bindings import driver

        if len(self.posted) == len(self.pointers) or array.nbytes > self.nbytes:
            raise ValueError(f"{array!r} for a mailbox of {len(self.pointers)} times {self.nbytes} bytes")
        forbid()
        slot, stream = self.next, _stream.get()
        self.next = (slot + 1) % len(self.pointers)
        check(driver.cuMemcpyDtoHAsync(self.pointers[slot], array.pointer, array.nbytes, stream))
        check(driver.cuEventRecord(self.events[slot], stream))
        self.posted.append((slot, array.shape, array.dtype))

    def take(self):
        """The array that was posted first, as NumPy; waits for it."""
        from cuda.bindings import driver

        slot, shape, dtype = self.posted.pop(0)
        check(driver.cuEventSynchronize(self.events[slot]))
        count = prod(shape)
        held = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.pointers[slot])
        return np.frombuffer(held, dtype, count).reshape(shape).copy()

    def clear(self):
        """Take no more of what was posted."""
        self.posted.clear()

    def __del__(self):
        if sys.is_finalizing():
            return
        from cuda.bindings import driver

        for event in getattr(self, "events", ()):
            driver.cuEventDestroy(event)
        for pointer in getattr(self, "pointers", ()):
            driver.cuMemFreeHost(pointer)


def copy(destination, source):
    """Copy a contiguous DeviceArray into another of the same shape and dtype, in the order of the stream in force."""
    alike = destination.shape == source.shape and destination.dtype == source.dtype
    if not (alike and destination.is_contiguous and source.is_contiguous):
        raise ValueError(f"cannot copy {source!r} into {destination!r}")
    if source.nbytes == 0:
        return
    if current().kind == "emulator":
        from nbkernels.launch.emulated import host_view, mark_written

        host_view(destination)[...] = host_view(source)
        mark_written(destination)
        return
    from cuda.bindings import driver

    forbid()
    check(driver.cuMemcpyDtoDAsync(destination.pointer, source.pointer, source.nbytes, _stream.get()))


def to_host(array):
    """Copy a DeviceArray to a NumPy array; waits for the work on the stream. A strided view is copied through its whole span."""
    if current().kind == "emulator":
        from nbkernels.launch.emulated import host_view

        return host_view(array).copy()
    if array.nbytes == 0:
        return np.empty(array.shape, array.dtype)
    from cuda.bindings import driver

    forbid()
    stream = _stream.get()
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.empty(span, array.dtype)
    check(driver.cuMemcpyDtoHAsync(flat.ctypes.data, array.pointer, flat.nbytes, stream))
    check(driver.cuStreamSynchronize(stream))
    if array.is_contiguous:
        return flat.reshape(array.shape)
    strides = tuple(s * array.itemsize for s in array.strides)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, array.shape, strides))


def order(before, after):
    """Let work to come on one stream handle wait for what is on another now; the host does not wait."""
    if before == after:
        return
    forbid()
    from cuda.bindings import driver

    event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))[0]
    try:
        check(driver.cuEventRecord(event, before))
        check(driver.cuStreamWaitEvent(after, event, 0))
    finally:
        # the driver keeps what it still needs of it
        driver.cuEventDestroy(event)


def wait_for(stream):
    """Wait on the host for all work on a stream handle of the GPU."""
    from cuda.bindings import driver

    forbid()
    check(driver.cuStreamSynchronize(stream))


def free_bytes():
    """Bytes of device memory that can be had on the current device: what is free, and what our pool keeps and nobody uses."""
    from cuda.bindings import driver

    pool = check(driver.cuDeviceGetDefaultMemPool(driver.cuDeviceGet(0)[1]))[0]
    names = driver.CUmemPool_attribute
    reserved, used = (
        int(check(driver.cuMemPoolGetAttribute(pool, name))[0])
        for name in (names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    )
    return int(check(driver.cuMemGetInfo())[0]) + reserved - used


def used_bytes():
    """Bytes of device memory in use on the current device, by this process and others."""
    from cuda.bindings import driver

    free, total = check(driver.cuMemGetInfo())
    return int(total) - int(free)
