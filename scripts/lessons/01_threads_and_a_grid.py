# # Threads and a grid
#
# A GPU runs one function many thousand times at once. Each run is a *thread*, and the only thing that tells threads
# apart is a number they can ask for. This lesson adds two arrays, first with one thread, then with one thread an
# element.
import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, int32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.emulator import EmulatorError
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## A kernel
#
# A *kernel* is the function that threads run. This package declares one like this: `pointer("float32")` is the address
# of numbers in the GPU's memory (`x[i]` reads number `i`), and `launch_bounds` is the most threads a block may have; we
# come to blocks in a moment. The function around it, whose name ends in `_kernel`, makes the kernel; later lessons give
# it constants.
#
# The slow obvious way is the loop you would write in Python, in one thread.
floats = ptx.pointer("float32")


def one_thread_kernel():
    @kernel(launch_bounds=1)
    def one_thread(x: floats, y: floats, z: floats, n: int32):
        for i in range(n):
            z[i] = x[i] + y[i]

    return one_thread


# To run it we say how many threads, which arrays, and what should come out. `step` compiles the kernel to the machine's
# assembly language (PTX), runs that on an emulator of the GPU that checks every access, and says what it did. Where
# there is a GPU it also runs there, on a larger array.
def adding(grid, block, n):
    x, y = normal(n), normal(n, seed=1)
    return Launch(grid, block, {"x": x, "y": y, "z": x, "n": n}, want={"z": x + y}, bytes=3 * x.nbytes, flops=n)


serial = step("one thread", one_thread_kernel, lambda n: adding(1, 1, n), small=(1000,), large=(1 << 16,))

# Threads come in *warps* of 32 that execute the same instruction together. One thread is a warp with one lane at work:
# see the "lanes at work" above. The other 31 do nothing, and every other part of the GPU does nothing as well.
#
# ## One thread an element
#
# A *grid* is made of *blocks*, a block of threads. A thread asks for its place: `cuda.blockIdx.x` is its block,
# `cuda.blockDim.x` how many threads a block has, `cuda.threadIdx.x` its place in the block. From these follows the one
# element it is to add.


def add_kernel():
    @kernel(launch_bounds=256)
    def add(x: floats, y: floats, z: floats, n: int32):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < n:
            z[i] = x[i] + y[i]

    return add


def blocks_for(n, threads):
    return -(-n // threads)


parallel = step(
    "one thread an element",
    add_kernel,
    lambda n: adding(blocks_for(n, 256), 256, n),
    small=(1000,),
    large=(1 << 25,),
)

# The array's length is no multiple of the block's, so that the last block has threads without an element. `if i < n`
# sends them home; where a warp goes both ways the emulator counts a *divergent branch*. What happens without the `if`?


def add_too_far_kernel():
    @kernel(launch_bounds=256)
    def add_too_far(x: floats, y: floats, z: floats, n: int32):
        i = cuda.grid(1)  # the same number, by a shorter name
        z[i] = x[i] + y[i]

    return add_too_far


try:
    lesson.run(add_too_far_kernel, (), adding(blocks_for(1000, 256), 256, 1000))
except EmulatorError as error:
    say(lesson.in_short(error))

# On a GPU that would have read what lies behind the array, and mostly nothing would have told you. Here it is an error
# with the line, the block and the thread.
#
# ## Which thread touches what
#
# The picture is drawn from what the emulator recorded. Each row of eight boxes is a *sector*, 32 bytes of memory; a box
# is one number, and holds the lane that read it.
picture(
    "first_warp",
    pictures.sector_map(parallel.accesses("x[i]", block=0, warp=0), "x[i], read by the first warp"),
    "The first warp reads 32 neighbouring numbers: four sectors, all of whose bytes are used.",
)

# ## A grid-stride loop
#
# A grid need not have a thread for each element. Here a fixed number of threads walks over an array of any length: each
# takes an element, then the one a whole grid further on. Fewer threads start and end, and neighbours still read
# neighbours.


def add_strided_kernel():
    @kernel(launch_bounds=256)
    def add_strided(x: floats, y: floats, z: floats, n: int32):
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            z[i] = x[i] + y[i]

    return add_strided


strided = step(
    "grid-stride loop",
    add_strided_kernel,
    lambda blocks, n: adding(blocks, 256, n),
    small=(2, 1000),
    large=(132 * 8, 1 << 25),
)
picture(
    "walk",
    pictures.walk_map(strided.accesses("x[i]"), (8, 128), 4, "x[i], 128 numbers a row: pale is read first"),
    "A warp's numbers are read together; the second half of the array comes when the threads go round again.",
)


# ## The package's own
#
# An element-wise operation of the package goes the same way, and adds one idea: a thread takes 16 bytes at a time, so
# that a warp's instruction moves 512 bytes. Here is its GELU, an activation that reads one array and writes one.
def package_gelu(to_device, rows, columns):
    x = to_device(normal(rows, columns))
    return (lambda: nbk.gelu(x)), 2 * 4 * rows * columns


def gelu(rows, columns):
    x = normal(rows, columns).astype(np.float64)
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


lesson.operation("nbk.gelu", package_gelu, gelu, small=(4, 256), large=(8192, 4096))
compare()

# ## What to take along
#
# - A kernel is run by threads; a thread knows its block and its place in it, and nothing else of the others.
# - 32 threads are a warp, and execute together: work should come in multiples of 32.
# - A thread beyond the end must do nothing, and only you can see to that.
#
# Exercise 1 is `exercises/01_threads_and_a_grid.py`. Try it, then `nbkernels learn check 1`.
#
# *Sources.* NVIDIA, CUDA C++ Programming Guide, "Programming Model" and "SIMT Architecture"; PTX ISA reference,
# "Special Registers"; M. Harris, "CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops" (2013); D. Hendrycks, K.
# Gimpel, "Gaussian Error Linear Units" (2016).
