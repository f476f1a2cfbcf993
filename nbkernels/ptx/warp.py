"""Exchange among the 32 lanes of a warp, and reductions of a warp and a block."""

import numpy as np
from numba import cuda, float32, types, uint32

from nbkernels.ptx.arithmetic import fmax
from nbkernels.ptx.asm import instruction

WARP = 32


@instruction(float32(float32, uint32), "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", effect="converges")
def shfl_bfly(x, lane_mask):
    """x of the lane whose number differs by the bits of lane_mask; all 32 lanes take part. Every architecture."""


@instruction(float32(float32, uint32), "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", effect="converges")
def shfl_idx(x, lane):
    """x of the lane with this number; all 32 lanes take part."""


@instruction(uint32(uint32, uint32), "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", effect="converges")
def shfl_bfly_u32(x, lane_mask):
    """As shfl_bfly, of a word."""


@instruction(uint32(uint32, uint32), "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", effect="converges")
def shfl_idx_u32(x, lane):
    """As shfl_idx, of a word."""


@instruction(uint32(), "mov.u32 $0, %laneid;")
def lane_id():
    """This thread's lane, 0 to 31."""


@instruction(
    uint32(uint32),
    "{ .reg .pred any, mine; setp.ne.u32 mine, $1, 0; vote.sync.any.pred any, mine, -1; selp.u32 $0, 1, 0, any; }",
    effect="converges",
)
def warp_any(condition):
    """1 where the condition is not 0 in some lane, else 0; all 32 lanes take part. Every architecture."""


@instruction(types.void(), "bar.warp.sync -1;", effect="converges")
def warp_sync():
    """Wait for all lanes of the warp; their writes to shared memory before it are seen by all after it."""


@cuda.jit(device=True, inline="always")
def warp_sum(x):
    """The sum of x over the warp, in every lane; always in the same order."""
    x += shfl_bfly(x, uint32(16))
    x += shfl_bfly(x, uint32(8))
    x += shfl_bfly(x, uint32(4))
    x += shfl_bfly(x, uint32(2))
    x += shfl_bfly(x, uint32(1))
    return x


@cuda.jit(device=True, inline="always")
def warp_max(x):
    """The largest x over the warp, in every lane; a NaN loses against a number."""
    x = fmax(x, shfl_bfly(x, uint32(16)))
    x = fmax(x, shfl_bfly(x, uint32(8)))
    x = fmax(x, shfl_bfly(x, uint32(4)))
    x = fmax(x, shfl_bfly(x, uint32(2)))
    x = fmax(x, shfl_bfly(x, uint32(1)))
    return x


def block_reductions(threads):
    """(block_sum, block_max) for blocks of ``threads`` (a multiple of 32): the result in every thread.

    One barrier when ``scratch`` has not been used since the last barrier: each warp reduces by shuffles and leaves one
    float32 in ``scratch`` (shared, threads / 32 words), and after the barrier every warp reduces those. Two reductions in
    a row need two scratch arrays, or a barrier in between.
    """
    warps = threads // WARP

    @cuda.jit(device=True, inline="always")
    def block_sum(x, scratch):
        x = warp_sum(x)
        if warps > 1:
            lane = lane_id()
            if lane == uint32(0):
                scratch[uint32(cuda.threadIdx.x) >> uint32(5)] = x
            cuda.syncthreads()
            x = float32(0.0)
            if lane < uint32(warps):
                x = scratch[lane]
            x = warp_sum(x)
        return x

    @cuda.jit(device=True, inline="always")
    def block_max(x, scratch):
        x = warp_max(x)
        if warps > 1:
            lane = lane_id()
            if lane == uint32(0):
                scratch[uint32(cuda.threadIdx.x) >> uint32(5)] = x
            cuda.syncthreads()
            x = float32(-np.inf)
            if lane < uint32(warps):
                x = scratch[lane]
            x = warp_max(x)
        return x

    return block_sum, block_max
