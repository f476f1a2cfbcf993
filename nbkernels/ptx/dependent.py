"""Dependent launch (sm_90): a kernel that starts while the one before it on the stream still runs.

A launch may allow its kernel to start as soon as every block of the kernel before it has said ``launch_dependents`` or ended
(CUDA's programmatic dependent launch; ``launch.overlap`` decides which may). The kernel then runs up to a ``griddep_wait``,
behind which the other kernel has ended and all it wrote is seen:

    kernel A    launch_dependents ... works ...................... ends
    kernel B              starts, reads constants, griddep_wait   |  reads what A wrote

In a launch that does not allow it both do nothing.
"""

from numba.core import types

from nbkernels.ptx.asm import instruction

void = types.void


@instruction(void(), "griddepcontrol.launch_dependents;", effect="writes")
def launch_dependents():
    """Let the next kernel start, once all blocks have come here or ended. One thread of a block speaks for it. sm_90."""


@instruction(void(), "griddepcontrol.wait;", effect="writes")
def griddep_wait():
    """Wait until the kernels before this one have ended; what they wrote is seen after it. sm_90.

    Loads marked "constant" are not held back by it: the compiler may move them in front.
    """
