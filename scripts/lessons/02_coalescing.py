# # Coalescing: neighbours read neighbours
#
# Memory is not read number by number. It comes in *sectors* of 32 bytes, and a warp's load asks for all sectors that
# any of its 32 lanes touches. Whether that is 4 sectors or 32 is up to you, and mostly decides how fast a kernel is.
import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, step
from numba import cuda, int32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## Each thread its own piece
#
# On a CPU one would hand each thread a piece of the array, so that threads stay out of each other's way. Here we double
# an array that way: thread `t` takes `PIECE` neighbouring numbers.
floats = ptx.pointer("float32")
PIECE = 16


def pieces_kernel():
    @kernel(launch_bounds=128)
    def pieces(x: floats, y: floats, n: int32):
        first = cuda.grid(1) * PIECE
        for i in range(first, min(first + PIECE, n)):
            y[i] = 2 * x[i]

    return pieces


def doubling(threads_for, block, n):
    x = normal(n)
    grid = -(-threads_for // block)
    return Launch(grid, block, {"x": x, "y": x, "n": n}, want={"y": 2 * x}, bytes=2 * x.nbytes, flops=n)


LARGE = 1 << 25
own_piece = step(
    "each thread its piece", pieces_kernel, lambda n: doubling(n // PIECE, 128, n), small=(4096,), large=(LARGE,)
)

# In one instruction the 32 lanes of a warp are `PIECE` numbers apart, so that each touches a sector of its own: 32
# sectors come, and of each one number is used. The next instruction wants the neighbours; with luck the sectors still
# lie in the cache.
picture(
    "pieces",
    pictures.sector_map(
        own_piece.accesses("x[i]", block=0, warp=0), "x[i] with a piece a thread: one load of one warp"
    ),
    "Every lane touches a sector of its own, and uses an eighth of it.",
)

# ## Neighbours read neighbours
#
# The threads of a warp should touch, *in the same instruction*, numbers that lie side by side. Each thread then walks
# over the array in steps as long as the whole grid.


def neighbours_kernel():
    @kernel(launch_bounds=128)
    def neighbours(x: floats, y: floats, n: int32):
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            y[i] = 2 * x[i]

    return neighbours


side_by_side = step(
    "neighbours read neighbours",
    neighbours_kernel,
    lambda n: doubling(n // PIECE, 128, n),
    small=(4096,),
    large=(LARGE,),
)
picture(
    "neighbours",
    pictures.sector_map(side_by_side.accesses("x[i]", block=0, warp=0), "x[i] with neighbours: one load of one warp"),
    "The same 32 numbers a load, in as few sectors as hold them.",
)

# ## Off by one
#
# What if the array begins one number later? The warp's 128 bytes then reach into one sector more.


def shifted_kernel():
    @kernel(launch_bounds=128)
    def shifted(x: floats, y: floats, n: int32):
        for i in range(cuda.grid(1), n - 1, cuda.gridsize(1)):
            y[i] = 2 * x[i + 1]

    return shifted


def doubling_shifted(threads_for, block, n):
    x = normal(n)
    return Launch(
        -(-threads_for // block),
        block,
        {"x": x, "y": x[1:], "n": n},
        want={"y": 2 * x[1:]},
        bytes=2 * x.nbytes,
        flops=n,
    )


off_by_one = step(
    "off by one", shifted_kernel, lambda n: doubling_shifted(n // PIECE, 128, n), small=(4097,), large=(LARGE + 1,)
)
picture(
    "off_by_one",
    pictures.sector_map(off_by_one.accesses("x[i + 1]", block=0, warp=0), "x[i + 1]: one load of one warp"),
    "One sector more, of which one number is used; the next warp asks for it again.",
)

# ## Sixteen bytes a lane
#
# A lane can load four numbers by one instruction if their address is a multiple of 16. The sectors are as many as
# before, the instructions a quarter. `ptx.ld_global_v4_f32` is that instruction; the package has such a function for
# each it uses.


def wide_kernel():
    @kernel(launch_bounds=128)
    def wide(x: floats, y: floats, n: int32):
        for i in range(4 * cuda.grid(1), n, 4 * cuda.gridsize(1)):
            a, b, c, d = ptx.ld_global_v4_f32(ptx.address(x, i))
            ptx.st_global_v4_f32(ptx.address(y, i), 2 * a, 2 * b, 2 * c, 2 * d)

    return wide


wide = step("16 bytes a lane", wide_kernel, lambda n: doubling(n // PIECE, 128, n), small=(4096,), large=(LARGE,))
picture(
    "wide",
    pictures.sector_map(wide.accesses("ld_global_v4_f32", block=0, warp=0), "16 bytes a lane: one load of one warp"),
    "Four numbers a lane: sixteen sectors, all of whose bytes are used.",
)
picture(
    "sectors",
    pictures.bars([(s.title, s.sectors) for s in lesson.steps()], "sectors of global memory", "sectors"),
    "The same task, counted.",
)

# ## The package's own
#
# Looking up rows of an embedding table is a gather: which row comes next nobody knows, and rows may lie anywhere. It is
# coalesced all the same, since *within* a row neighbours read neighbours.
TOKENS = [7, 3, 31, 3]


def lookup(to_device, columns, repeats):
    table = to_device(normal(32, columns))
    tokens = to_device(np.array(TOKENS * repeats, np.int32))
    return (lambda: nbk.embedding(tokens, table)), 2 * 4 * columns * len(TOKENS) * repeats


lesson.operation(
    "nbk.embedding",
    lookup,
    lambda columns, repeats: normal(32, columns)[TOKENS * repeats],
    small=(512, 1),
    large=(4096, 4096),
)
compare()

# ## What to take along
#
# - Count sectors: a warp's load of 32 numbers of 4 bytes needs 4. Everything above is memory speed thrown away.
# - The index of a load should be `something + threadIdx.x`: the lane's number with no factor before it.
# - Wide loads save instructions, not sectors; they need aligned addresses.
#
# *Sources.* NVIDIA, CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"; PTX ISA reference, "ld" and
# "st"; J. Luitjens, "CUDA Pro Tip: Increase Performance with Vectorized Memory Access" (2013).
