"""Exercise 1: y = a·x + y, an element a thread.

x, y [n] float32, a a number, n any length. The launch gives enough blocks of 256 threads; y is changed in place. Fill
in what the dots stand for: which element is this thread's, and when must it do nothing?

Check it with ``nbkernels learn check 1``; ``--hint`` gives a hint.
"""

from numba import cuda, float32, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")


def axpy_kernel():
    @kernel(launch_bounds=256)
    def axpy(a: float32, x: floats, y: floats, n: int32):
        i = cuda.threadIdx.x  # … this is right for the first block alone
        y[i] = a * x[i] + y[i]

    return axpy
