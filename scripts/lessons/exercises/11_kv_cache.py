"""Exercise 11: put together what the pieces of a decode step have left.

For each head and piece of the keys: part [heads, pieces, 64] (the unfinished mixture), tops and totals [heads,
pieces] (the largest score in units of log2, and the sum of 2^(score - top)). y [heads, 64] is the whole mixture. A
block a head, a thread a number. Each piece is relative to its own top; bring all to the largest.
"""

from numba import cuda, float32, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")
DIM = 64


def merge_kernel():
    @kernel(launch_bounds=DIM)
    def merge(part: floats, tops: floats, totals: floats, y: floats, pieces: int32):
        head, d = cuda.blockIdx.x, cuda.threadIdx.x
        top = float32(-1e30)
        for piece in range(pieces):
            top = max(top, tops[head * pieces + piece])
        total, mixed = float32(0), float32(0)
        for piece in range(pieces):
            at = head * pieces + piece
            shrink = float32(1)  # …
            total += totals[at] * shrink
            mixed += part[at * DIM + d] * shrink
        y[head * DIM + d] = mixed / total

    return merge
