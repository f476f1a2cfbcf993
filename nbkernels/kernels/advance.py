"""lengths += tokens, in place: how a decode step moves its positions without the host.

    lengths[i] = lengths[i] + tokens

One thread an element.
"""

from functools import lru_cache

from numba import cuda, int32, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import Cost
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

THREADS = 128  # batches are small: one block is the rule


def advance_kernel():
    """lengths [count] int32 += tokens."""

    @kernel(launch_bounds=THREADS)
    def advance(lengths: ptx.pointer("int32"), count: uint32, tokens: int32):
        i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i < count:
            lengths[i] = int32(lengths[i] + tokens)

    return advance


@lru_cache(maxsize=256)
def plan(count):
    """The launch for a batch of ``count``."""
    return Plan(advance_kernel, (), (-(-count // THREADS), 1, 1), (THREADS, 1, 1))


def cost(count):
    """Each length read and written once."""
    return Cost(bytes=8 * count, flops=0)


def run(lengths, tokens, device, stream):
    """lengths: int32 [batch] DeviceArray."""
    count = lengths.shape[0]
    launch(plan(count), (lengths.pointer, count, tokens), device, stream)
