"""Exercise 7: a row of int8 weights times a vector, four weights a word.

y[r] = scale[r] · sum over c of q[r, c] · x[c]; q is int8 [rows, columns], given as words of four [rows, columns / 4]:
byte 0, the lowest, is the first. Bytes have a sign. What is missing is how byte b of a word becomes a number.
"""

from numba import cuda, float32, int32, types, uint32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats, words = ptx.pointer("float32"), types.CPointer(uint32)
WARPS = 4


def int8_row_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def int8_row(x: floats, q: words, scale: floats, y: floats, columns: int32):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        total = float32(0)
        for c in range(lane, columns // 4, 32):
            word = q[row * (columns // 4) + c]
            for b in range(4):
                weight = word >> uint32(8 * b) & uint32(255)  # … the byte, but without its sign
                total += float32(weight) * x[4 * c + b]
        total = ptx.warp_sum(total)
        if lane == 0:
            y[row] = scale[row] * total

    return int8_row
