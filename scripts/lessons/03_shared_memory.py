# # Shared memory and its banks
#
# A transpose reads along rows and must write along columns, so that one of the two is uncoalesced however threads are
# placed. The way out is memory inside the multiprocessor that the threads of a block share: read a tile along its rows,
# put it there, and write it out along the other direction. Shared memory has a rule of its own, though: it is made of
# 32 *banks*.
import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, float32, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.emulator import EmulatorError
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## Straight through
#
# A block of 32 × 8 threads takes a tile of 32 × 32 numbers. `threadIdx.x` runs along a row of `x`, so that loads are
# coalesced; the stores then go down a column of `y`, and each lane of a warp touches a sector of its own.
floats = ptx.pointer("float32")
TILE, ROWS = 32, 8


def straight_kernel():
    @kernel(launch_bounds=TILE * ROWS)
    def straight(x: floats, y: floats, rows: uint32, columns: uint32):
        column = cuda.blockIdx.x * TILE + cuda.threadIdx.x
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            row = cuda.blockIdx.y * TILE + r
            y[column * rows + row] = x[row * columns + column]

    return straight


def transposing(rows, columns):
    x = normal(rows, columns)
    return Launch(
        (columns // TILE, rows // TILE),
        (TILE, ROWS),
        {"x": x, "y": x.T.copy(), "rows": rows, "columns": columns},
        want={"y": x.T},
        bytes=2 * x.nbytes,
    )


SMALL, LARGE = (64, 96), (8192, 8192)
straight = step("straight through", straight_kernel, transposing, small=SMALL, large=LARGE)
picture(
    "stores",
    pictures.sector_map(straight.accesses("y[column", mode="write", block=0, warp=0), "the store of one warp"),
    "Down a column of y: a sector for each lane.",
)

# ## Through shared memory
#
# `cuda.shared.array` is memory of the block: all its threads see it, and it is gone when the block ends. One thread
# writes what another reads, so that all must have written before any reads: `cuda.syncthreads()` waits for the whole
# block.


def tiled_kernel(width):
    @kernel(launch_bounds=TILE * ROWS)
    def tiled(x: floats, y: floats, rows: uint32, columns: uint32):
        tile = cuda.shared.array((TILE, width), float32)
        across, down = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            tile[r, cuda.threadIdx.x] = x[(down + r) * columns + across + cuda.threadIdx.x]
        cuda.syncthreads()
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            y[(across + r) * rows + down + cuda.threadIdx.x] = tile[cuda.threadIdx.x, r]

    return tiled


tiled = step("through shared memory", tiled_kernel, transposing, constants=(TILE,), small=SMALL, large=LARGE)

# Without the barrier it is a *race*: whether a thread finds the number depends on who comes first. On a GPU it might be
# right for years. The emulator knows the order that barriers make, and says which two threads have none.


def without_barrier_kernel():
    @kernel(launch_bounds=TILE * ROWS)
    def without_barrier(x: floats, y: floats, rows: uint32, columns: uint32):
        tile = cuda.shared.array((TILE, TILE), float32)
        across, down = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            tile[r, cuda.threadIdx.x] = x[(down + r) * columns + across + cuda.threadIdx.x]
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            y[(across + r) * rows + down + cuda.threadIdx.x] = tile[cuda.threadIdx.x, r]

    return without_barrier


try:
    lesson.run(without_barrier_kernel, (), transposing(*SMALL))
except EmulatorError as error:
    say(lesson.in_short(error))

# ## Banks
#
# All sectors are used now. But shared memory gives 32 words at once only if they lie in 32 different banks; word number
# `w` lies in bank `w % 32`. Two *different* words of one bank wait for each other. A column of a tile 32 words wide
# lies in one bank:
picture(
    "conflict",
    pictures.bank_map(
        tiled.accesses("= tile[", mode="read", block=0, warp=0), "tile[threadIdx.x, r], rows of 32 words"
    ),
    "Every lane wants another word of the same bank.",
)

# ## A column nobody uses
#
# One word more a row, and the rows' beginnings move on by a bank each. The word costs memory, and is never touched.
padded = step("rows of 33 words", tiled_kernel, transposing, constants=(TILE + 1,), small=SMALL, large=LARGE)
picture(
    "padded",
    pictures.bank_map(
        padded.accesses("= tile[", mode="read", block=0, warp=0), "tile[threadIdx.x, r], rows of 33 words"
    ),
    "The same column, one word a bank.",
)

# ## A swizzle
#
# Or nothing is added and the words of a row change places: word `c` of row `r` is kept at `c ^ r`. A row still fills
# all 32 banks, and so does a column. Tiles that are copied in chunks of 16 bytes, whose rows cannot be padded by one
# word, are laid out like this; the package's tiles are.


def swizzled_kernel():
    @kernel(launch_bounds=TILE * ROWS)
    def swizzled(x: floats, y: floats, rows: uint32, columns: uint32):
        tile = cuda.shared.array((TILE, TILE), float32)
        across, down = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            tile[r, cuda.threadIdx.x ^ r] = x[(down + r) * columns + across + cuda.threadIdx.x]
        cuda.syncthreads()
        for r in range(cuda.threadIdx.y, TILE, ROWS):
            y[(across + r) * rows + down + cuda.threadIdx.x] = tile[cuda.threadIdx.x, r ^ cuda.threadIdx.x]

    return swizzled


swizzled = step("swizzled", swizzled_kernel, transposing, small=SMALL, large=LARGE)
picture(
    "swizzled",
    pictures.bank_map(swizzled.accesses("= tile[", mode="read", block=0, warp=0), "tile[threadIdx.x, r ^ threadIdx.x]"),
    "No conflict, and no word wasted.",
)
picture(
    "passes",
    pictures.bars(
        [(s.title, s.report_total.shared_passes) for s in lesson.steps()], "passes of shared memory", "passes"
    ),
    "The same tile, counted.",
)

# ## The package's own
#
# Its matrix product keeps tiles of both operands in shared memory, swizzled, and reads them in two directions.


def product(to_device, rows, columns, inner):
    x, weight = (
        to_device(normal(rows, inner, dtype="bfloat16")),
        to_device(normal(columns, inner, dtype="bfloat16", seed=1)),
    )
    return (lambda: nbk.matmul(x, weight)), 2 * (rows * inner + columns * inner + rows * columns)


def right_product(rows, columns, inner):
    x, weight = normal(rows, inner, dtype="bfloat16"), normal(columns, inner, dtype="bfloat16", seed=1)
    return x.astype(np.float32) @ weight.astype(np.float32).T


# the result is rounded to bfloat16, which has 8 bits
lesson.operation("nbk.matmul", product, right_product, small=(64, 64, 128), large=(4096, 4096, 4096), tolerance=2**-8)
compare()

# ## What to take along
#
# - Shared memory lets the threads of a block hand numbers to one another; a barrier stands between writing and reading.
# - Lanes of a warp that touch different words of one bank wait. The same word for all is fine.
# - Padding or a swizzle takes conflicts away; which one depends on who else must read the tile.
#
# *Sources.* NVIDIA, CUDA C++ Programming Guide, "Shared Memory"; G. Ruetsch, P. Micikevicius, "Optimizing Matrix
# Transpose in CUDA" (NVIDIA, 2009); NVIDIA, CUTLASS documentation, on swizzled layouts.
