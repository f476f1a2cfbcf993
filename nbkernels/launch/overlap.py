"""Kernels that begin while the one before them on the stream still runs (sm_90, "programmatic dependent launch").

Between two kernels of a stream the GPU stands still for a few microseconds: the last blocks of one end, the first of the other
start, set themselves up, and ask memory for the first time. Inside ``overlapping`` the second kernel starts early and waits, by
an instruction of its own, for the first one's end; what nobody writes any more, a product's weight, it may read before that:

    A   start | wait | x · w ................ | end
    B             start | first part of w, wait | x · w ........... | end
    C                                          start | …

Every kernel that is launched so waits before it reads or writes anything but constants: those that read constants early contain
the wait, and to the others it is added as their first instruction (``compile.ptx``). All let their dependents start at once.

Why that is safe over more than two kernels: C starts when B's blocks have all started, maybe before A has ended. C's wait ends
with B, and B cannot have ended before its own wait, which ends with A. So behind its wait a kernel sees what every earlier one
wrote, and may overwrite what every earlier one read. In front of it C reads constants alone: they must have been written before
the first kernel of the chain started. That one is launched as any other, and so waits for all work before it; hence constants may
be written right before ``overlapping`` is entered, also by work that has not ended.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from nbkernels.launch.device import parse_arch

OLDEST_ARCH = (9, 0)

_chain = ContextVar("nbkernels_overlap", default=None)
# chain() -> the launches inside the innermost ``overlapping``, None outside of any: C's own function, which every call asks
chain = _chain.get


class _Chain:
    """The launches inside one ``overlapping``. streams: handles that have one; written: for the emulator's checks."""

    def __init__(self):
        self.streams = set()
        self.written = {}


@contextmanager
def overlapping():
    """Let the kernels launched inside, by this thread, start before those in front of them on their stream have ended.

    The caller promises: no weight (with its scales) that is passed to ``matmul`` or ``int8_matmul`` inside is the result of an
    operation of this package inside. ``quantize_int8`` is exempt: nothing overlaps with it. Results are the same, to the bit.
    Where the GPU is older than sm_90 this does nothing.
    """
    token = _chain.set(_Chain())
    try:
        yield
    finally:
        _chain.reset(token)


def entered():
    """Whether this thread is inside ``overlapping``."""
    return _chain.get() is not None


def wanted(device):
    """Whether kernels launched now on a Device may start early."""
    return entered() and _has_it(device.arch)


@lru_cache(maxsize=16)
def _has_it(arch):
    return parse_arch(arch)[:2] >= OLDEST_ARCH


def follows(stream):
    """Whether a launch on a stream handle has one before it in the chain in force; a launch that asks is in it from then on."""
    chain = _chain.get()
    if chain is None:
        return False
    if stream in chain.streams:
        return True
    chain.streams.add(stream)
    return False


def written():
    """What the emulator keeps of the launches of the chain in force (``Emulator.launch``)."""
    return _chain.get().written
