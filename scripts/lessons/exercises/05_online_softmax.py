"""Exercise 5: the logarithm of a sum of powers, in one walk.

y[r] = log2(sum over c of 2^x[r, c]); x [rows, columns] float32, y [rows]. A warp a row. Numbers may be large (2^300
is no float32) or very small, so that a maximum is kept, and the sum is kept relative to it: total = sum of 2^(x -
top). What is missing is the correction of the sum when the maximum grows, here and where the lanes' sums are put
together. Read x once.
"""

from numba import cuda, float32, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")


def log_sum_kernel():
    @kernel(launch_bounds=32)
    def log_sum(x: floats, y: floats, columns: int32):
        row, lane = cuda.blockIdx.x, cuda.threadIdx.x
        top, total = float32(-1e30), float32(0)
        for c in range(lane, columns, 32):
            value = x[row * columns + c]
            higher = max(top, value)
            total = total + ptx.ex2(value - higher)  # …
            top = higher
        row_top = ptx.warp_max(top)
        total = ptx.warp_sum(total)  # …
        if lane == 0:
            y[row] = row_top + ptx.lg2(total)

    return log_sum
