"""Exercise 12: a bulk copy and its barrier (sm_90).

Each block turns a piece of 256 numbers around: one thread asks the copy engine for the piece, all wait for it, all
read. The mbarrier must be told how many bytes are to come, and everybody must wait for its phase, whose parity is 0.
"""

from numba import cuda, float32, uint32, uint64

from nbkernels import ptx
from nbkernels.launch.compile import kernel
from nbkernels.ptx.bulk import bulk_load
from nbkernels.ptx.mbarrier import fence_mbarrier_init, mbarrier_expect, mbarrier_init

floats = ptx.pointer("float32")
PIECE = 256
THREADS = 128


def turn_kernel():
    @kernel(launch_bounds=THREADS)
    def turn(x: floats, y: floats):
        tile = cuda.shared.array(PIECE, float32, alignment=16)
        barrier = cuda.shared.array(1, uint64)
        at, to = ptx.shared_address(barrier), ptx.shared_address(tile)
        if cuda.threadIdx.x == 0:
            mbarrier_init(at, uint32(1))
            fence_mbarrier_init()
            mbarrier_expect(at, uint32(4 * PIECE))
            bulk_load(to, ptx.address(x, cuda.blockIdx.x * PIECE), uint32(4 * PIECE), at)
        cuda.syncthreads()
        # …
        for i in range(cuda.threadIdx.x, PIECE, THREADS):
            y[cuda.blockIdx.x * PIECE + i] = tile[PIECE - 1 - i]

    return turn
