"""One answer to exercise 3."""

from numba import cuda, float32, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")
TILE, WARPS = 32, 8
WIDTH = 33  # words a row of the tile


def transpose_kernel():
    @kernel(launch_bounds=WARPS * 32)
    def transpose(x: floats, y: floats, rows: int32, columns: int32):
        tile = cuda.shared.array((TILE, WIDTH), float32)
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        across, down = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        for r in range(warp, TILE, WARPS):
            tile[r, lane] = x[(down + r) * columns + across + lane]
        cuda.syncthreads()
        for r in range(warp, TILE, WARPS):
            y[(across + r) * rows + down + lane] = tile[lane, r]

    return transpose
