"""The emulator as a device: its memory behind ``launch.memory``, and plans launched on it."""

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import prod

import numpy as np

from nbkernels.arrays import DeviceArray, contiguous_strides
from nbkernels.emulator import Emulator, EmulatorError
from nbkernels.launch import overlap
from nbkernels.launch.compile import ptx
from nbkernels.launch.tensor_map import TensorMap


@lru_cache(maxsize=1)
def emulator():
    """The one emulator of this process: all emulated arrays live in its memory."""
    return Emulator()


_planning = ContextVar("nbkernels_planning", default=None)


class _Planning:
    """Launches that are planned and not run, or whose first blocks alone are (``planned``)."""

    def __init__(self, blocks, instruction_limit):
        self.emulator = Emulator(checks=False, instruction_limit=instruction_limit)
        self.blocks = blocks
        self.done = []


@contextmanager
def planned(blocks=0, instruction_limit=None):
    """Plan the launches inside without running them: yields a list that fills with (Plan, Report or None) of each.

    blocks: run so many of a launch's blocks, the first ones, and report what they did; None where they would execute more
    instructions, summed over threads, than instruction_limit. Nothing is checked. Arrays made inside are zeros, or what the host
    copies there; they take no memory until they are touched, so that those of a large card have room. None, too, where those
    zeros lead a kernel astray.
    """
    token = _planning.set(_Planning(blocks, instruction_limit))
    try:
        yield _planning.get().done
    finally:
        _planning.reset(token)


def _memory():
    """The memory that arrays are made in."""
    planning = _planning.get()
    return (emulator() if planning is None else planning.emulator).memory


class _Block:
    """Owns a piece of the emulator's memory and gives it back when it is collected."""

    __slots__ = ("memory", "pointer")
    emulated = True  # an address of the emulator's own: on a GPU it would be anybody's

    def __init__(self, nbytes):
        self.memory = _memory()
        # tracked: a kernel that reads what nothing wrote is told
        self.pointer, _ = self.memory.allocate(nbytes, tracked=_planning.get() is None)

    def __del__(self):
        if not sys.is_finalizing():
            self.memory.unregister(self.pointer)


def allocate(shape, dtype):
    """A DeviceArray of unspecified content in the emulator's memory."""
    block = _Block(max(prod(shape) * dtype.itemsize, 16))
    return DeviceArray(block.pointer, shape, contiguous_strides(shape), dtype, block)


def host_view(array):
    """A NumPy view of an emulated array's memory. Who writes to it says so by ``mark_written``."""
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    buffer = _memory().find(array.pointer)
    strides = tuple(s * array.itemsize for s in array.strides)
    return np.ndarray(array.shape, array.dtype, buffer.data, array.pointer - buffer.base, strides)


def mark_written(array):
    """The host has written a contiguous array."""
    _memory().mark_written(array.pointer, array.nbytes)


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
    done, seen, planning = _counted.get(), _observed.get(), _planning.get()
    if seen is not None:
        seen.append(plan)
    arguments = [a.data if type(a) is TensorMap else a for a in arguments]
    if planning is not None:
        planning.done.append((plan, _first_blocks(planning, plan, arguments, device.arch)))
        return
    report = emulator().launch(
        ptx(plan.factory, plan.constants, device.arch, early),
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


def _first_blocks(planning, plan, arguments, arch):
    """The Report of a launch's first blocks, or None."""
    if not planning.blocks:
        return None
    text = ptx(plan.factory, plan.constants, arch)
    sizes = {"shared_bytes": plan.shared_bytes, "count": True, "most_blocks": planning.blocks}
    try:
        return planning.emulator.launch(text, None, plan.grid, plan.block, arguments, **sizes)
    except EmulatorError:
        return None
