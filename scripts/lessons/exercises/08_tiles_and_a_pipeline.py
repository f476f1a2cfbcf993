"""Exercise 8: tiles through a ring of two, by asynchronous copies.

x [tiles · TILE] float32; y holds each tile of 256 numbers turned around. One block of 64 threads; each thread copies
16 bytes of a tile, and reads numbers that others copied. While a tile is used the next is on its way. What is
missing: waiting for the copy of this tile (the newest group may stay under way), and the block's barriers.
"""

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
            # … wait for tile t
            for i in range(thread, TILE, 64):
                y[t * TILE + i] = ring[t % 2 * TILE + TILE - 1 - i]
            # … and before the next copy overwrites it?

    return turn
