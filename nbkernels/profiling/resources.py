"""What a kernel takes of a multiprocessor, without a GPU: registers, spilled bytes, shared memory, and the blocks that fit.

The assembler (``ptxas`` of the wheel nvidia-cuda-nvcc) says the first three; the limits of an architecture are those of the CUDA
C++ Programming Guide, "Technical specifications per compute capability".
"""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from nbkernels.launch.compile import ptx
from nbkernels.launch.device import parse_arch

WARP = 32
REGISTERS = 65536  # of a multiprocessor; handed out to warps in units of 256
REGISTER_UNIT = 256
RESERVED_SHARED = 1024  # of each block, by the system


@dataclass(frozen=True)
class Limits:
    """Of a multiprocessor: threads, blocks, bytes of shared memory."""

    threads: int
    blocks: int
    shared_bytes: int


LIMITS = {
    (8, 0): Limits(2048, 32, 164 * 1024),
    (8, 6): Limits(1536, 16, 100 * 1024),
    (8, 9): Limits(1536, 24, 100 * 1024),
    (9, 0): Limits(2048, 32, 228 * 1024),
    (10, 0): Limits(2048, 32, 228 * 1024),
    (12, 0): Limits(1536, 24, 100 * 1024),
}


@dataclass(frozen=True)
class Resources:
    """Of one kernel. registers: a thread's; spill_bytes: stored to and loaded from memory a thread; shared_bytes: static."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple


def find_ptxas():
    """The assembler: the installed wheel's, which is as new as NVVM, or one on PATH. FileNotFoundError where there is none."""
    return find_tool("ptxas", "nvidia-cuda-nvcc")


def find_tool(name, package):
    """A program of CUDA: that of the installed wheel, or one on PATH. FileNotFoundError names the wheel where there is none."""
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(folder).glob(f"**/bin/{name}*")):
            return str(path)
    found = shutil.which(name)
    if found:
        return found
    raise FileNotFoundError(f"{name} was not found: pip install {package}")


@lru_cache(maxsize=4096)
def resources(factory, constants, arch):
    """The Resources of ``factory(*constants)`` on an architecture such as "sm_90a"."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx(factory, constants, arch))
        command = [find_ptxas(), "-v", f"-arch={arch}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{factory.__name__}{constants}: the assembler refuses it: {done.stderr.strip()}")
    said = done.stderr

    def number(pattern):
        match = re.search(pattern, said)
        return int(match[1]) if match else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=number(r"(\d+) bytes smem"),
        warnings=tuple(line.strip() for line in said.splitlines() if "Performance Loss" in line),
    )


def occupancy(used, threads, dynamic_shared_bytes, arch):
    """(blocks a multiprocessor holds at once, what limits them) for Resources and a block of so many threads."""
    limits = LIMITS[parse_arch(arch)[:2]]
    warps = -(-threads // WARP)
    warp_registers = -(-used.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    shared = used.shared_bytes + dynamic_shared_bytes + RESERVED_SHARED
    fits = {
        "threads": limits.threads // (warps * WARP),
        "blocks": limits.blocks,
        "registers": REGISTERS // (warps * warp_registers) if used.registers else limits.blocks,
        "shared memory": limits.shared_bytes // shared,
    }
    limit = min(fits, key=fits.get)
    return fits[limit], limit
