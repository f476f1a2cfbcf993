"""Exercise 4: divide each row by its length, a warp a row, with shuffles.

y[r, c] = x[r, c] / sqrt(sum over c of x[r, c]²); x, y [rows, columns] float32. A block has four warps. Each lane has
added up the squares it has read; what is missing is the sum over the lanes. Write it with ``ptx.shfl_bfly(value,
uint32(distance))``.
"""

import math

from numba import cuda, float32, int32, uint32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")
WARPS = 4


def normalise_kernel():
    @kernel(launch_bounds=WARPS * 32)
    def normalise(x: floats, y: floats, rows: int32, columns: int32):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        if row >= rows:
            return
        first = row * columns
        total = float32(0)
        for c in range(lane, columns, 32):
            total += x[first + c] * x[first + c]
        total += ptx.shfl_bfly(total, uint32(16))  # … the first of several
        inverse = float32(1) / math.sqrt(total)
        for c in range(lane, columns, 32):
            y[first + c] = x[first + c] * inverse

    return normalise
