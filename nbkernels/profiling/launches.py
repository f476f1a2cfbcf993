"""A launch judged before it runs: what its kernel takes of a multiprocessor, how many blocks fit, in how many waves they run.

The driver says registers and shared memory of a kernel that is loaded; without a GPU the assembler does (``resources``).
"""

from dataclasses import dataclass
from math import ceil, prod

from nbkernels.profiling.resources import LIMITS, WARP, Resources, occupancy, resources


@dataclass(frozen=True)
class LaunchProfile:
    """One launch. shared_bytes: static and dynamic, a block; spill_bytes: a thread (the stack, where the driver says it).

    blocks_a_multiprocessor: that fit at once, limited_by what; occupancy: their threads over those a multiprocessor holds.
    waves: the grid over all that fit at once; tail: the share of block places that stand empty in the last wave, over all
    waves. warp_instructions: of the whole grid, from its first blocks on the emulator. None: not known, and ``unknown`` says why.
    """

    kernel: str
    constants: tuple
    grid: tuple
    block: tuple
    shared_bytes: int
    registers: int | None = None
    spill_bytes: int | None = None
    blocks_a_multiprocessor: int | None = None
    occupancy: float | None = None
    limited_by: str | None = None
    waves: float | None = None
    tail: float | None = None
    warp_instructions: int | None = None
    counted_blocks: int = 0
    unknown: str = ""


def tail_of(waves):
    """The share of all block places, in whole waves, that stay empty."""
    return 1 - waves / ceil(waves) if waves else 0.0


def loaded_resources(kernel):
    """The Resources of a LoadedKernel, as the driver says them; its stack stands for what is spilled."""
    from cuda.bindings import driver

    from nbkernels.launch.launcher import check

    names = driver.CUfunction_attribute
    handle, device = driver.CUkernel(int(kernel.kernel.handle)), driver.cuDeviceGet(0)[1]

    def attribute(name):
        return int(check(driver.cuKernelGetAttribute(getattr(names, f"CU_FUNC_ATTRIBUTE_{name}"), handle, device))[0])

    stack = attribute("LOCAL_SIZE_BYTES")
    return Resources(attribute("NUM_REGS"), stack, stack, attribute("SHARED_SIZE_BYTES"), ())


def judge(plan, card, *, kernel=None, report=None, blocks=0):
    """The LaunchProfile of a Plan on a Card.

    kernel: the LoadedKernel, on a GPU. report: what the first ``blocks`` blocks did on the emulator, or None.
    """
    total = prod(plan.grid)
    sizes = {
        "kernel": plan.factory.__name__.removesuffix("_kernel"),
        "constants": tuple(str(c) for c in plan.constants),
        "grid": tuple(plan.grid),
        "block": tuple(plan.block),
    }
    counted = min(blocks, total) if report is not None else 0
    instructions = round(report.total.warp_instructions * total / counted) if counted else None
    try:
        used = loaded_resources(kernel) if kernel is not None else resources(plan.factory, plan.constants, card.arch)
    except FileNotFoundError as error:  # no assembler
        return LaunchProfile(
            **sizes,
            shared_bytes=plan.shared_bytes,
            warp_instructions=instructions,
            counted_blocks=counted,
            unknown=str(error),
        )
    threads = prod(plan.block)
    fit, limit = occupancy(used, threads, plan.shared_bytes, card.arch)
    waves = total / (fit * card.sm_count) if fit else None
    return LaunchProfile(
        **sizes,
        shared_bytes=used.shared_bytes + plan.shared_bytes,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        blocks_a_multiprocessor=fit,
        occupancy=fit * ceil(threads / WARP) * WARP / LIMITS[capability(card.arch)].threads,
        limited_by=limit,
        waves=waves,
        tail=tail_of(waves) if waves else None,
        warp_instructions=instructions,
        counted_blocks=counted,
    )


def capability(arch):
    """(major, minor) of an architecture's name."""
    from nbkernels.launch.device import parse_arch

    return parse_arch(arch)[:2]
