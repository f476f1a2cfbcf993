# # Online softmax: the maximum while you go
#
# Lesson 4 kept a row in registers. A long row does not fit, and then softmax as it is written walks over it three
# times: for the maximum, for the sum, for the result. The first two can be one walk. That trick is also what makes
# flash attention possible.
import math

import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, float32, int32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## Three walks
#
# A warp a row, lanes side by side, as in lesson 4.
floats = ptx.pointer("float32")
WARPS = 4
LOG2E = math.log2(math.e)


def three_walks_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def three_walks(x: floats, y: floats, columns: int32):
        first = (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32) * columns
        lane = cuda.threadIdx.x % 32
        top = float32(-math.inf)
        for c in range(lane, columns, 32):
            top = max(top, x[first + c])
        top = ptx.warp_max(top)
        total = float32(0)
        for c in range(lane, columns, 32):
            total += ptx.ex2((x[first + c] - top) * float32(LOG2E))
        total = ptx.warp_sum(total)
        for c in range(lane, columns, 32):
            y[first + c] = ptx.ex2((x[first + c] - top) * float32(LOG2E)) / total

    return three_walks


def softmax(x):
    """NumPy's, in float64."""
    power = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return power / power.sum(axis=-1, keepdims=True)


def row_launch(rows, columns):
    x = normal(rows, columns)
    arguments = {"x": x, "y": x, "columns": columns}
    return Launch(rows // WARPS, 32 * WARPS, arguments, want={"y": softmax(x)}, bytes=2 * x.nbytes, flops=5 * x.size)


SMALL, LARGE = (8, 1024), (8192, 16384)
step("three walks", three_walks_kernel, row_launch, small=SMALL, large=LARGE)

# ## Correct the sum when the maximum grows
#
# Suppose the sum so far was taken with the maximum so far, `top`. A larger number comes, the new maximum is `higher`.
# Every power in the sum is too large by the same factor, `exp(higher - top)`; so multiply the sum by `exp(top -
# higher)`, and go on:
#
# higher = max(top, x);   total = total · exp(top - higher) + exp(x - higher);   top = higher
#
# At the end each lane has a maximum and a sum of its own. Two such pairs are merged by the same rule: both sums are
# brought to the larger maximum and added.


def two_walks_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def two_walks(x: floats, y: floats, columns: int32):
        first = (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32) * columns
        lane = cuda.threadIdx.x % 32
        top = x[first + lane]
        total = float32(1)
        for c in range(lane + 32, columns, 32):
            value = x[first + c]
            higher = max(top, value)
            total = total * ptx.ex2((top - higher) * float32(LOG2E)) + ptx.ex2((value - higher) * float32(LOG2E))
            top = higher
        row_top = ptx.warp_max(top)
        total = ptx.warp_sum(total * ptx.ex2((top - row_top) * float32(LOG2E)))
        for c in range(lane, columns, 32):
            y[first + c] = ptx.ex2((x[first + c] - row_top) * float32(LOG2E)) / total

    return two_walks


online = step("two walks, online", two_walks_kernel, row_launch, small=SMALL, large=LARGE)
picture(
    "walk",
    pictures.timeline(
        [
            (
                "row 0, warp 0",
                [
                    *((a.order, a.order, "first walk") for a in online.accesses("value = x[", block=0, warp=0)),
                    *(
                        (a.order, a.order, "second walk")
                        for a in online.accesses("y[first + c]", mode="read", block=0, warp=0)
                    ),
                ],
            )
        ],
        "the two walks over x: first maximum and sum, then the result",
    ),
    "x is read twice, where three walks read it three times.",
)

# How often does the maximum grow? With random numbers rarely, and ever more rarely; here is one lane's, counted in
# NumPy.
running = np.maximum.accumulate(normal(*SMALL)[0, ::32])
say(f"lane 0 sees {running.size} numbers; its maximum grows {int((np.diff(running) > 0).sum())} times after the first")

# ## One walk, if the weights are not wanted
#
# Attention does not want the weights themselves but `sum(weight · v)`. Then the same correction applies to that sum,
# and the third walk goes as well: one walk for maximum, sum and weighted sum. Divide at the end.


def weighted_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def weighted(x: floats, v: floats, y: floats, columns: int32):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        top = float32(-1e30)
        total = float32(0)
        mixed = float32(0)
        for c in range(lane, columns, 32):
            value = x[row * columns + c]
            higher = max(top, value)
            shrink = ptx.ex2((top - higher) * float32(LOG2E))
            weight = ptx.ex2((value - higher) * float32(LOG2E))
            total = total * shrink + weight
            mixed = mixed * shrink + weight * v[c]
            top = higher
        row_top = ptx.warp_max(top)
        shrink = ptx.ex2((top - row_top) * float32(LOG2E))
        total = ptx.warp_sum(total * shrink)
        mixed = ptx.warp_sum(mixed * shrink)
        if lane == 0:
            y[row] = mixed / total

    return weighted


def weighted_launch(rows, columns):
    x, v = normal(rows, columns), normal(columns, seed=1)
    arguments = {"x": x, "v": v, "y": np.zeros(rows, np.float32), "columns": columns}
    return Launch(rows // WARPS, 32 * WARPS, arguments, want={"y": softmax(x) @ v}, bytes=x.nbytes, tolerance=1e-5)


step("one walk, weighted sum", weighted_kernel, weighted_launch, small=SMALL, large=LARGE)

# ## The package's own
#
# `nbk.softmax` keeps a row in the registers of a block, or of several blocks, as long as it fits, and walks twice where
# it does not.


def package_softmax(to_device, rows, columns):
    x = to_device(normal(rows, columns))
    return (lambda: nbk.softmax(x)), 2 * 4 * rows * columns


def right_softmax(rows, columns):
    return softmax(normal(rows, columns))


lesson.operation("nbk.softmax", package_softmax, right_softmax, small=SMALL, large=LARGE, beside=online)
lesson.operation("nbk.softmax, a long row", package_softmax, right_softmax, small=(1, 40000), large=(512, 262144))
compare()

# ## What to take along
#
# - A maximum and a sum relative to it can be kept together, corrected as the maximum grows, and merged in any order.
# - The correction costs one exponential; a walk over memory costs far more.
#
# *Sources.* M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax" (2018); M. Rabe, C. Staats,
# "Self-attention Does Not Need O(n²) Memory" (2021).
