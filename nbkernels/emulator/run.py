"""Launching: arguments are packed by the entry's parameter types, machines are kept and used again."""

import ctypes
import threading
from collections import OrderedDict
from functools import lru_cache

import numpy as np

from nbkernels.emulator import (  # noqa: F401  the instruction modules enter their binders when they are imported
    instructions_async,
    instructions_bulk,
    instructions_convert,
    instructions_float,
    instructions_integer,
    instructions_matrix,
    instructions_memory,
    instructions_warp,
    instructions_wgmma,
)
from nbkernels.emulator.calls import with_calls_inlined
from nbkernels.emulator.checks import Checks
from nbkernels.emulator.counters import Counters, Report
from nbkernels.emulator.errors import LaunchError, RaceError
from nbkernels.emulator.machine import BATCH_LANES, WARP, Machine, align, cluster_of
from nbkernels.emulator.memory import GlobalMemory
from nbkernels.emulator.parser import parse

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
# what a kernel may ask for without a driver attribute that allows 16
MAX_CLUSTER_BLOCKS = 8
KEPT_MACHINES = 64


class Emulator:
    """A memory and the machines bound to it. ``memory.register(array)`` gives addresses that kernels may use.

    instruction_limit: raise Endless when a launch executes more instructions, summed over threads. checks: report reads of
    memory that nothing wrote, and races (see ``checks``); bounds are always checked.
    """

    def __init__(self, *, checks=True, instruction_limit=None):
        self.checks = checks
        self.instruction_limit = instruction_limit
        self.lock = threading.Lock()
        self.memory = GlobalMemory()
        self.machines = OrderedDict()

    def launch(
        self, ptx_text, entry_name, grid, block, args, *, shared_bytes=0, count=False, chain=None, most_blocks=None
    ):
        """Run an entry of a PTX text over a grid of blocks; returns when it is done.

        entry_name: None where the text has one entry. grid, block: an int or up to three. args: for each parameter a NumPy
        array (its address is passed; it is written in place), or a Python, NumPy or ctypes number. count: return a Report
        of what was done, by source line. chain: of launches that may overlap, a dict that the calls share (at first empty): an
        array that a kernel reads before its ``griddepcontrol.wait`` must not be one that a launch of the chain has written.
        most_blocks: run so many blocks of the grid, the first ones (whole clusters), and leave the others out.
        Raises EmulatorError.
        """
        grid, block = three(grid, "grid"), three(block, "block")
        module = parse(ptx_text)
        function = _flat(ptx_text, module.entry(entry_name).name)
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= MAX_THREADS:
            raise LaunchError(f"{function.name}: block {block} has {threads} threads, wanted 1 to {MAX_THREADS}")
        bound = function.directives.get("maxntid")
        if bound and threads > int(np.prod(bound)):
            raise LaunchError(
                f"{function.name}: block {block} has {threads} threads, the kernel was compiled for {bound}"
            )
        total = grid[0] * grid[1] * grid[2]
        if total == 0:
            raise LaunchError(f"{function.name}: an empty grid {grid}")
        _check_cluster(function, grid)
        if most_blocks is not None:
            total = min(total, align(most_blocks, int(np.prod(cluster_of(function)))))
        registered = []
        try:
            packed = self._pack(function, args, registered)
            if count:
                machine = self._make_machine(module, function, block, total, shared_bytes, Counters)
            else:
                machine = self._machine(module, function, block, total, shared_bytes)
            machine.limit = machine.executed + (self.instruction_limit or float("inf"))
            with self.lock:
                machine.run(grid, packed, total)
                if chain is not None and machine.checks is not None:
                    _check_chain(machine, chain)
        finally:
            for address in registered:
                self.memory.unregister(address)
        if not count:
            return None
        return Report(machine.name, function.instructions, machine.counters.totals())

    def _make_machine(self, module, function, block, total, shared_bytes, make_counters):
        blocks = min(total, _most_blocks(function, block))
        checks = _make_checks if self.checks else None
        machine = Machine(module, function, self.memory, block, blocks, shared_bytes, checks, make_counters)
        if machine.shared_bytes > MAX_SHARED_BYTES:
            used = machine.shared_bytes
            raise LaunchError(f"{function.name}: {used} bytes of shared memory a block, at most {MAX_SHARED_BYTES}")
        return machine

    def _machine(self, module, function, block, total, shared_bytes):
        # as many blocks at once as the grid has, or as a batch holds: grids that differ beyond that share a machine
        key = (module.text, function.name, block, min(total, _most_blocks(function, block)), shared_bytes)
        machine = self.machines.get(key)
        if machine is None:
            machine = self.machines[key] = self._make_machine(module, function, block, total, shared_bytes, None)
            if len(self.machines) > KEPT_MACHINES:
                self.machines.popitem(last=False)
        self.machines.move_to_end(key)
        return machine

    def _pack(self, function, args, registered):
        if len(args) != len(function.parameters):
            raise LaunchError(f"{function.name} takes {len(function.parameters)} arguments, got {len(args)}")
        packed = bytearray()
        for number, (parameter, value) in enumerate(zip(function.parameters, args, strict=True)):
            packed += bytes(align(len(packed), parameter.alignment) - len(packed))
            packed += self._pack_one(function, number, parameter, value, registered)
        return bytes(packed)

    def _pack_one(self, function, number, parameter, value, registered):
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if isinstance(value, np.ndarray):
            if parameter.size != 8:
                raise LaunchError(
                    f"{function.name}, argument {number}: an array where {parameter.size} bytes are wanted"
                )
            count = len(self.memory.buffers)
            address = self.memory.register(value, f"argument {number} ({value.dtype} {list(value.shape)})")
            if len(self.memory.buffers) > count:
                registered.append(self.memory.buffers[-1].base)
            return int(address).to_bytes(8, "little")
        if isinstance(value, bytes | bytearray):
            if len(value) != parameter.size:
                raise LaunchError(f"{function.name}, argument {number}: {len(value)} bytes, wanted {parameter.size}")
            return bytes(value)
        if isinstance(value, ctypes._SimpleCData):
            data = bytes(value)
        elif isinstance(value, np.generic):
            data = value.tobytes()
        elif isinstance(value, float):
            if parameter.kind not in ("f32", "f64", "b32", "b64"):
                raise LaunchError(
                    f"{function.name}, argument {number}: a float for a parameter of type {parameter.kind}"
                )
            data = (np.float32 if parameter.size == 4 else np.float64)(value).tobytes()
        elif isinstance(value, int):
            if parameter.kind == "f32" or parameter.kind == "f64":
                data = (np.float32 if parameter.size == 4 else np.float64)(value).tobytes()
            else:
                data = (value % (1 << (8 * parameter.size))).to_bytes(parameter.size, "little")
        else:
            raise LaunchError(f"{function.name}, argument {number}: {type(value).__name__} is no array and no number")
        if len(data) != parameter.size:
            raise LaunchError(
                f"{function.name}, argument {number}: {type(value).__name__} has {len(data)} bytes, "
                f"wanted {parameter.size}"
            )
        return data


def _check_chain(machine, chain):
    """chain: base of an array -> the kernel that wrote it last, of those that may still run when this one starts."""
    for base, where in machine.checks.read_early.items():
        if base in chain:
            raise RaceError(
                f"{where}: reads what {chain[base]} writes, and has not waited for the kernels in front of this one"
            )
    chain.update(dict.fromkeys(machine.checks.written_arrays, machine.name))


def _check_cluster(function, grid):
    cluster = cluster_of(function)
    if not 0 < int(np.prod(cluster)) <= MAX_CLUSTER_BLOCKS:
        raise LaunchError(f"{function.name}: a cluster of {cluster} blocks, wanted 1 to {MAX_CLUSTER_BLOCKS}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchError(f"{function.name}: grid {grid} is no multiple of its clusters of {cluster} blocks")


def _most_blocks(function, block):
    """How many blocks a batch holds at most: whole clusters."""
    together = int(np.prod(cluster_of(function)))
    return max(1, BATCH_LANES // align(block[0] * block[1] * block[2], WARP) // together) * together


def _make_checks(machine):
    function = machine.function
    return Checks(machine, instructions_memory.granules(function), instructions_memory.passes_between_blocks(function))


@lru_cache(maxsize=32)  # as many as ``parse`` keeps
def _flat(text, name):
    """An entry of a text with its calls inlined."""
    module = parse(text)
    return with_calls_inlined(module, module.entry(name))


def three(value, name):
    """An int or a tuple of up to three -> (x, y, z)."""
    value = (value,) if isinstance(value, int | np.integer) else tuple(value)
    if not 1 <= len(value) <= 3 or any(v < 0 for v in value):
        raise LaunchError(f"{name}: {value}, wanted one to three numbers that are not negative")
    return tuple(int(v) for v in value) + (1,) * (3 - len(value))


def run_ptx(ptx_text, entry_name, grid, block, args, *, shared_bytes=0, emulator=None, checks=True, count=False):
    """Run an entry of a PTX text on the CPU, in a memory of its own or that of a given Emulator. See ``Emulator.launch``."""
    emulator = emulator or Emulator(checks=checks)
    return emulator.launch(ptx_text, entry_name, grid, block, args, shared_bytes=shared_bytes, count=count)
