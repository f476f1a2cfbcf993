"""The emulator as a device: its memory behind ``launch.memory``, and plans launched on it."""

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import prod

import numpy as np

from nbkernels.arrays import DeviceArray, contiguous_strides
from nbkernels.emulator import Emulator
from nbkernels.launch import overlap
from nbkernels.launch.compile import ptx
from nbkernels.launch.tensor_map import TensorMap


@lru_cache(maxsize=1)
def emulator():
    """The one emulator of this process: all emulated arrays live in its memory."""
    return Emulator()


class _Block:
    """Owns a piece of the emulator's memory and gives it back when it is collected."""

    __slots__ = ("pointer",)
    emulated = True  # an address of the emulator's own: on a GPU it would be anybody's

    def __init__(self, nbytes):
        # tracked: a kernel that reads what nothing wrote is told
        self.pointer, _ = emulator().memory.allocate(nbytes, tracked=True)

    def __del__(self):
        if not sys.is_finalizing():
            emulator().memory.unregister(self.pointer)


def allocate(shape, dtype):
    """A DeviceArray of unspecified content in the emulator's memory."""
    block = _Block(max(prod(shape) * dtype.itemsize, 16))
    return DeviceArray(block.pointer, shape, contiguous_strides(shape), dtype, block)


def host_view(array):
    """A NumPy view of an emulated array's memory. Who writes to it says so by ``mark_written``."""
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    buffer = emulator().memory.find(array.pointer)
    strides = tuple(s * array.itemsize for s in array.strides)
    return np.ndarray(array.shape, array.dtype, buffer.data, array.pointer - buffer.base, strides)


def mark_written(array):
    """The host has written a contiguous array."""
    emulator().memory.mark_written(array.pointer, array.nbytes)


_counted = ContextVar("nbkernels_counted", default=None)
_observed = ContextVar("nbkernels_observed", default=None)


@contextmanager
def counted():
    """Count what the launches inside do: yields a list that fills with (Plan, Report) of each."""
    token = _counted.set([])
    try:
        yield _counted.get()
    finally:
        _counted.reset(token)


@contextmanager
def observed():
    """Yields a list that fills with the Plan of each launch inside."""
    token = _observed.set([])
    try:
        yield _observed.get()
    finally:
        _observed.reset(token)


def launch_emulated(plan, arguments, device):
    """Run a plan to its end; EmulatorError names what a kernel did wrong."""
    early = plan.early and overlap.wanted(device)
    text = ptx(plan.factory, plan.constants, device.arch, early)
    done, seen = _counted.get(), _observed.get()
    if seen is not None:
        seen.append(plan)
    arguments = [a.data if type(a) is TensorMap else a for a in arguments]
    report = emulator().launch(
        text,
        None,
        plan.grid,
        plan.block,
        arguments,
        shared_bytes=plan.shared_bytes,
        count=done is not None,
        chain=overlap.written() if early else None,
    )
    if done is not None:
        done.append((plan, report))
