"""Exercise 3: a transpose through shared memory, without a race and without bank conflicts.

y[c, r] = x[r, c]; x [rows, columns] float32, both multiples of 32. A block of 256 threads takes a tile of 32 × 32: a
warp a row, four times. Two things are missing: what makes every thread's part of the tile be there before it is read,
and a shape of the tile whose columns lie in different banks.
"""

from numba import cuda, float32, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")
TILE, WARPS = 32, 8
WIDTH = 32  # words a row of the tile …


def transpose_kernel():
    @kernel(launch_bounds=WARPS * 32)
    def transpose(x: floats, y: floats, rows: int32, columns: int32):
        tile = cuda.shared.array((TILE, WIDTH), float32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        across, down = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        for r in range(warp, TILE, WARPS):
            tile[r, lane] = x[(down + r) * columns + across + lane]
        # …
        for r in range(warp, TILE, WARPS):
            y[(across + r) * rows + down + lane] = tile[lane, r]

    return transpose
