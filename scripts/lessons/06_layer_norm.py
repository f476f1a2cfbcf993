# # Layer norm, fused with the residual
#
# A transformer's layer adds its result to what came in (the *residual*), and the next layer begins by normalising that
# sum. As two kernels the sum is written and read again; as one it is still in registers when the norm needs it.

import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, step
from numba import cuda, float32, int32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## Two kernels
#
# `added = x + residual`, then `(added - mean) / sqrt(variance + eps) · weight + bias` of each row, a warp a row.
floats = ptx.pointer("float32")
WARPS, EPS = 4, 1e-5


def add_kernel():
    @kernel(launch_bounds=256)
    def add(x: floats, residual: floats, added: floats, n: int32):
        i = cuda.grid(1)
        if i < n:
            added[i] = x[i] + residual[i]

    return add


def norm_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def norm(added: floats, weight: floats, bias: floats, y: floats, columns: int32):
        first = (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32) * columns
        lane = cuda.threadIdx.x % 32
        total = float32(0)
        for c in range(lane, columns, 32):
            total += added[first + c]
        mean = ptx.warp_sum(total) / float32(columns)
        total = float32(0)
        for c in range(lane, columns, 32):
            total += (added[first + c] - mean) * (added[first + c] - mean)
        inverse = ptx.rsqrt(ptx.warp_sum(total) / float32(columns) + float32(EPS))
        for c in range(lane, columns, 32):
            y[first + c] = (added[first + c] - mean) * inverse * weight[c] + bias[c]

    return norm


def layer_norm(added, weight, bias):
    """NumPy's, in float64."""
    added = added.astype(np.float64)
    mean = added.mean(axis=-1, keepdims=True)
    variance = ((added - mean) ** 2).mean(axis=-1, keepdims=True)
    return (added - mean) / np.sqrt(variance + EPS) * weight + bias


def inputs(rows, columns):
    x, residual = normal(rows, columns), normal(rows, columns, seed=1)
    return x, residual, normal(columns, seed=2), normal(columns, seed=3)


def add_launch(rows, columns):
    x, residual, _, _ = inputs(rows, columns)
    arguments = {"x": x, "residual": residual, "added": x, "n": x.size}
    return Launch(-(-x.size // 256), 256, arguments, want={"added": x + residual}, bytes=3 * x.nbytes, flops=x.size)


def norm_launch(rows, columns):
    x, residual, weight, bias = inputs(rows, columns)
    added = x + residual
    arguments = {"added": added, "weight": weight, "bias": bias, "y": x, "columns": columns}
    want = {"y": layer_norm(added, weight, bias)}
    return Launch(rows // WARPS, 32 * WARPS, arguments, want, bytes=2 * x.nbytes, flops=7 * x.size)


SMALL, LARGE = (16, 512), (32768, 512)
adding = step("first kernel: add", add_kernel, add_launch, small=SMALL, large=LARGE)
norming = step("second kernel: norm", norm_kernel, norm_launch, small=SMALL, large=LARGE)

# ## One kernel, the row in registers
#
# Read `x` and `residual` once, write the sum (the next layer's residual) and the normalised row once. Four arrays cross
# the memory in place of seven or so.


def fused_kernel(columns):
    held = columns // 32

    @kernel(launch_bounds=32 * WARPS)
    def fused(x: floats, residual: floats, weight: floats, bias: floats, added: floats, y: floats):
        lane = cuda.threadIdx.x % 32
        first = (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32) * columns + lane
        values = cuda.local.array(held, float32)
        total = float32(0)
        for i in range(held):
            values[i] = x[first + 32 * i] + residual[first + 32 * i]
            added[first + 32 * i] = values[i]
            total += values[i]
        mean = ptx.warp_sum(total) * float32(1 / columns)
        total = float32(0)
        for i in range(held):
            values[i] -= mean
            total += values[i] * values[i]
        inverse = ptx.rsqrt(ptx.warp_sum(total) * float32(1 / columns) + float32(EPS))
        for i in range(held):
            y[first + 32 * i] = values[i] * inverse * weight[lane + 32 * i] + bias[lane + 32 * i]

    return fused


def fused_launch(rows, columns, shift=0.0, tolerance=1e-6):
    x, residual, weight, bias = inputs(rows, columns)
    x = x + np.float32(shift)
    added = x + residual
    arguments = {"x": x, "residual": residual, "weight": weight, "bias": bias, "added": x, "y": x}
    want = {"added": added, "y": layer_norm(added, weight, bias)}
    return Launch(rows // WARPS, 32 * WARPS, arguments, want, bytes=4 * x.nbytes, flops=8 * x.size, tolerance=tolerance)


fused = step("one kernel", fused_kernel, fused_launch, constants=(SMALL[1],), small=SMALL, large=LARGE)
picture(
    "sectors",
    pictures.bars(
        [("two kernels", adding.sectors + norming.sectors), ("one kernel", fused.sectors)], "sectors of global memory"
    ),
    "What the two ways move.",
)

# ## Why not mean(x²) - mean²?
#
# It needs one pass over the row in place of two, and it is tempting. But two large numbers are subtracted that are
# nearly alike: their digits cancel. Here is what becomes of it when a row's mean is far from zero, measured:


def one_pass_kernel(columns):
    held = columns // 32

    @kernel(launch_bounds=32 * WARPS)
    def one_pass(x: floats, residual: floats, weight: floats, bias: floats, added: floats, y: floats):
        lane = cuda.threadIdx.x % 32
        first = (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32) * columns + lane
        values = cuda.local.array(held, float32)
        total, squares = float32(0), float32(0)
        for i in range(held):
            values[i] = x[first + 32 * i] + residual[first + 32 * i]
            added[first + 32 * i] = values[i]
            total += values[i]
            squares += values[i] * values[i]
        mean = ptx.warp_sum(total) * float32(1 / columns)
        variance = ptx.warp_sum(squares) * float32(1 / columns) - mean * mean
        inverse = ptx.rsqrt(variance + float32(EPS))
        for i in range(held):
            y[first + 32 * i] = (values[i] - mean) * inverse * weight[lane + 32 * i] + bias[lane + 32 * i]

    return one_pass


errors = []
for shift in (0.0, 100.0, 1000.0):
    launch = fused_launch(4, 512, shift)
    row = [f"{shift:g}"]
    for factory in (fused_kernel, one_pass_kernel):
        got = lesson.run(factory, (512,), launch).results["y"]
        row.append(f"{lesson.error_of({'y': got}, {'y': launch.want['y']}):.1g}")
    errors.append(row)
lesson.table(["mean of a row", "error of (x - mean)²", "error of x² less mean²"], errors)

# ## The package's own
#
# `nbk.layer_norm(x, weight, bias, residual=…)` gives both results, and can give the normalised row in int8 for a
# product after it.


def package_norm(to_device, rows, columns):
    x, residual, weight, bias = (to_device(a) for a in inputs(rows, columns))
    return (lambda: nbk.layer_norm(x, weight, bias, residual=residual)[0]), 4 * 4 * rows * columns


def right_norm(rows, columns):
    x, residual, weight, bias = inputs(rows, columns)
    return layer_norm(x + residual, weight, bias)


lesson.operation("nbk.layer_norm", package_norm, right_norm, small=SMALL, large=LARGE, beside=fused)
compare()

# ## What to take along
#
# - A kernel that only moves numbers should be part of the one before or after it.
# - Subtract the mean before you square. With the row in registers the second pass costs next to nothing.
#
# *Sources.* J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization" (2016); B. P. Welford, "Note on a Method for
# Calculating Corrected Sums of Squares and Products" (1962); T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for
# Computing the Sample Variance" (1983).
