"""One answer to exercise 8."""

from numba import cuda, float32, int32, uint32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")
TILE, BYTES = 256, 1024
RING = 2 * TILE


def turn_kernel():
    @kernel(launch_bounds=64)
    def turn(x: floats, y: floats, tiles: int32):
        ring = cuda.shared.array(RING, float32, alignment=16)
        thread = cuda.threadIdx.x
        target = uint32(ptx.shared_address(ring) + 16 * thread)
        source = ptx.address(x, 4 * thread)
        ptx.cp_async_16(target, source)
        ptx.cp_async_commit()
        for t in range(tiles):
            if t + 1 < tiles:
                ptx.cp_async_16(uint32(target + (t + 1) % 2 * BYTES), source + (t + 1) * BYTES)
            ptx.cp_async_commit()
            ptx.cp_async_wait(1)
            cuda.syncthreads()
            for i in range(thread, TILE, 64):
                y[t * TILE + i] = ring[t % 2 * TILE + TILE - 1 - i]
            cuda.syncthreads()

    return turn
