# # Warp shuffles and the softmax reduction
#
# Softmax turns a row of scores into weights that sum to one: `exp(x - max) / sum(exp(x - max))`. The maximum is taken
# away so that `exp` cannot overflow; the result is the same. Each row needs two *reductions*, many numbers to one: a
# maximum and a sum. How threads work together on a reduction is this lesson.
import math

import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, step
from numba import cuda, float32, int32, types, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## A thread a row
#
# The loops of NumPy's definition, one row a thread. Nobody needs to work together; but the threads of a warp are in
# different rows, a whole row apart, and from lesson 2 we know what that costs.
floats = ptx.pointer("float32")
LOG2E = math.log2(math.e)  # exp(x) = 2^(x · log2 e), and 2^x is one instruction


def thread_a_row_kernel():
    @kernel(launch_bounds=32)
    def thread_a_row(x: floats, y: floats, rows: int32, columns: int32):
        row = cuda.grid(1)
        if row >= rows:
            return
        first = row * columns
        top = float32(-math.inf)
        for c in range(columns):
            top = max(top, x[first + c])
        total = float32(0)
        for c in range(columns):
            total += ptx.ex2((x[first + c] - top) * float32(LOG2E))
        for c in range(columns):
            y[first + c] = ptx.ex2((x[first + c] - top) * float32(LOG2E)) / total

    return thread_a_row


def softmax(x):
    """NumPy's, in float64."""
    power = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return power / power.sum(axis=-1, keepdims=True)


def softmax_launch(rows_a_block, threads):
    def launch(rows, columns):
        x = normal(rows, columns)
        arguments = {"x": x, "y": x, "rows": rows, "columns": columns}
        grid = -(-rows // rows_a_block)
        return Launch(grid, threads, arguments, want={"y": softmax(x)}, bytes=2 * x.nbytes, flops=5 * x.size)

    return launch


SMALL, LARGE = (32, 256), (65536, 256)
step("a thread a row", thread_a_row_kernel, softmax_launch(32, 32), small=SMALL, large=LARGE)

# ## A block a row
#
# Now 128 threads share a row, and neighbours read neighbours. Each has a maximum of what it has seen; these are put
# into shared memory and halved, again and again, with a barrier each time: a *tree*.
THREADS = 128


def block_a_row_kernel():
    @kernel(launch_bounds=THREADS)
    def block_a_row(x: floats, y: floats, rows: int32, columns: int32):
        part = cuda.shared.array(THREADS, float32)
        thread = cuda.threadIdx.x
        first = cuda.blockIdx.x * columns
        top = float32(-math.inf)
        for c in range(thread, columns, THREADS):
            top = max(top, x[first + c])
        part[thread] = top
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()
            if thread < half:
                part[thread] = max(part[thread], part[thread + half])
            half //= 2
        cuda.syncthreads()
        top = part[0]
        cuda.syncthreads()
        total = float32(0)
        for c in range(thread, columns, THREADS):
            total += ptx.ex2((x[first + c] - top) * float32(LOG2E))
        part[thread] = total
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()
            if thread < half:
                part[thread] += part[thread + half]
            half //= 2
        cuda.syncthreads()
        total = part[0]
        for c in range(thread, columns, THREADS):
            y[first + c] = ptx.ex2((x[first + c] - top) * float32(LOG2E)) / total

    return block_a_row


step("a block a row, tree in shared memory", block_a_row_kernel, softmax_launch(1, THREADS), small=SMALL, large=LARGE)

# The sectors are as few as three walks over `x` allow. But look at the warp instructions and the divergent branches: in
# the last rounds of the tree most threads wait.
#
# ## Shuffles
#
# The lanes of a warp can read one another's registers, without memory and without a barrier: `shfl_bfly(v, m)` gives
# the `v` of the lane whose number differs in the bits of `m`. With m = 16, 8, 4, 2, 1 every lane ends up with the sum
# over all 32: a *butterfly*. To see it, give lane `l` a word with only bit `l` set, and combine by "or" instead of
# "plus":
words = types.CPointer(uint32)


def butterfly_kernel():
    @kernel(launch_bounds=32)
    def butterfly(seen: words):
        lane = cuda.threadIdx.x
        mine = uint32(1) << uint32(lane)
        seen[lane] = mine
        for stage in range(5):
            mine |= ptx.shfl_bfly_u32(mine, uint32(uint32(16) >> uint32(stage)))
            seen[32 * (stage + 1) + lane] = mine

    return butterfly


def all_bits():
    """What each lane should hold after each stage: bits of the lanes that agree with it in the low bits."""
    lanes = np.arange(32)
    held = [
        [sum(1 << int(o) for o in lanes if (o ^ lane) % (32 >> stage) == 0) for lane in lanes] for stage in range(6)
    ]
    return np.array(held, np.uint32)


seen = step(
    "a butterfly, watched",
    butterfly_kernel,
    lambda: Launch(1, 32, {"seen": np.zeros((6, 32), np.uint32)}, want={"seen": all_bits()}),
)
picture(
    "butterfly",
    pictures.bit_map(
        seen.run.results["seen"], "who is in whose sum", ["at first", *(f"after {16 >> s}" for s in range(5))]
    ),
    "After five shuffles every lane holds the sum of all 32.",
)

# ## A warp a row
#
# Four warps a block, each with a row of its own: no shared memory, no barrier. `ptx.warp_max` and `ptx.warp_sum` are
# the five shuffles.


def warp_a_row_kernel():
    @kernel(launch_bounds=THREADS)
    def warp_a_row(x: floats, y: floats, rows: int32, columns: int32):
        row = cuda.blockIdx.x * (THREADS // 32) + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        if row >= rows:
            return
        first = row * columns
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

    return warp_a_row


step("a warp a row, shuffles", warp_a_row_kernel, softmax_launch(THREADS // 32, THREADS), small=SMALL, large=LARGE)

# ## The row stays in registers
#
# `x` is still read three times. A warp's registers hold a row easily: with the number of columns known when the kernel
# is compiled, each lane keeps its numbers in a local array, and the loops are unrolled so that the array is registers
# and not memory. (`x` once read, `y` once written: that is as little as softmax can do.) Each power is computed once,
# too.


def registers_kernel(columns):
    held = columns // 32

    @kernel(launch_bounds=THREADS)
    def registers(x: floats, y: floats, rows: int32):
        row = cuda.blockIdx.x * (THREADS // 32) + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        if row >= rows:
            return
        first = row * columns + lane
        values = cuda.local.array(held, float32)
        top = float32(-math.inf)
        for i in range(held):
            values[i] = x[first + 32 * i]
            top = max(top, values[i])
        top = ptx.warp_max(top)
        total = float32(0)
        for i in range(held):
            values[i] = ptx.ex2((values[i] - top) * float32(LOG2E))
            total += values[i]
        inverse = ptx.rcp(ptx.warp_sum(total))
        for i in range(held):
            y[first + 32 * i] = values[i] * inverse

    return registers


def held_launch(rows, columns):
    launch = softmax_launch(THREADS // 32, THREADS)(rows, columns)
    del launch.arguments["columns"]
    return launch


held = step("the row in registers", registers_kernel, held_launch, constants=(SMALL[1],), small=SMALL, large=LARGE)

# ## The package's own
#
# The same idea for every row length and three dtypes: a few lanes, a warp, a block or several blocks to a row, by its
# length, and 16 bytes a load.


def package_softmax(to_device, rows, columns):
    x = to_device(normal(rows, columns))
    return (lambda: nbk.softmax(x)), 2 * 4 * rows * columns


lesson.operation(
    "nbk.softmax",
    package_softmax,
    lambda rows, columns: softmax(normal(rows, columns)),
    small=SMALL,
    large=LARGE,
    beside=held,
)
compare()
picture(
    "instructions",
    pictures.bars(
        [(s.title, s.report_total.warp_instructions) for s in lesson.steps() if s.title != seen.title],
        "warp instructions",
    ),
    "The same softmax, counted.",
)

# ## What to take along
#
# - A reduction among 32 lanes is five shuffles; among the warps of a block it needs shared memory and a barrier.
# - What is kept in registers is not read again; a local array is in registers only if every index is known to the
#   compiler.
# - Take the maximum away before the exponential, always.
#
# *Sources.* NVIDIA, CUDA C++ Programming Guide, "Warp Shuffle Functions"; M. Harris, "Optimizing Parallel Reduction in
# CUDA" (NVIDIA, 2007); J. Luitjens, "Faster Parallel Reductions on Kepler" (2014); PTX ISA reference, "shfl.sync" and
# "ex2".
