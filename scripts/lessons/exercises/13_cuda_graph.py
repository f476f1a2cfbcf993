"""Exercise 13: a step that can be replayed.

The launch is replayed three times with the same arguments. Each time it writes value [64] to row position[0] of
history [rows, 64], and moves position[0] on by one. One block of 64 threads. As it stands every thread moves it on,
while others have yet to read it.
"""

from numba import cuda, int32, types

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats, integers = ptx.pointer("float32"), types.CPointer(int32)
WIDTH = 64


def remember_kernel():
    @kernel(launch_bounds=WIDTH)
    def remember(value: floats, history: floats, position: integers):
        thread = cuda.threadIdx.x
        history[position[0] * WIDTH + thread] = value[thread]
        position[0] += 1  # …

    return remember
