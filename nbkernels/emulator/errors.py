"""What the emulator reports: each message names kernel, source line, PTX line, and block and thread where they are known."""


class EmulatorError(RuntimeError):
    """The base of all faults the emulator reports."""


class PtxError(EmulatorError):
    """PTX text that cannot be read, or an instruction the emulator does not know."""


class MemoryFault(EmulatorError):
    """An access outside every array, across an array's end, at a misaligned address, or a write to a read-only array."""


class UninitialisedRead(EmulatorError):
    """A read of memory that nothing wrote."""


class RaceError(EmulatorError):
    """Two threads touch the same bytes, at least one of them writing, and nothing orders the two."""


class Deadlock(EmulatorError):
    """No thread can go on: the message lists who waits for what."""


class Trap(EmulatorError):
    """The kernel executed ``trap``."""


class Endless(EmulatorError):
    """A launch executed more instructions than its Emulator allows."""


class LaunchError(EmulatorError):
    """Arguments, grid, block or shared memory that do not fit the kernel or the machine."""
