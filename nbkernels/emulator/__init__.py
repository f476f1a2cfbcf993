"""Executes compiled PTX on the CPU: kernels with shuffles, inline assembly and tensor cores run without a GPU."""

from nbkernels.emulator.errors import (
    Deadlock,
    EmulatorError,
    Endless,
    LaunchError,
    MemoryFault,
    PtxError,
    RaceError,
    Trap,
    UninitialisedRead,
)
from nbkernels.emulator.numba_kernel import run
from nbkernels.emulator.run import Emulator, run_ptx

__all__ = [
    "Deadlock",
    "Emulator",
    "EmulatorError",
    "Endless",
    "LaunchError",
    "MemoryFault",
    "PtxError",
    "RaceError",
    "Trap",
    "UninitialisedRead",
    "run",
    "run_ptx",
]
