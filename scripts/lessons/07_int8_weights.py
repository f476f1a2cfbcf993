# # int8 weights, dequantised in registers
#
# When a model writes one token, each weight is read once and used once: a matrix times *one* row. Nothing but the speed
# of memory counts, and a weight in one byte is read four times as fast as one in four. The bytes become numbers again
# in registers, on the way to the multiplication.
import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, float32, int8, int32, types, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## What is quantised
#
# Each row of the weight has a scale: `weight[r, c] ≈ scale[r] · q[r, c]`, `q` from -127 to 127. What that costs in
# exactness:
floats, bytes8, words = ptx.pointer("float32"), types.CPointer(int8), types.CPointer(uint32)
WARPS = 4


def quantise(weight):
    """(q int8, scale float32) of each row."""
    scale = np.abs(weight).max(axis=1) / 127
    return np.round(weight / scale[:, None]).astype(np.int8), scale.astype(np.float32)


def inputs(rows, columns):
    """x [columns], q [rows, columns], scale [rows], and the right y [rows]."""
    x = normal(columns)
    q, scale = quantise(normal(rows, columns, seed=1))
    return x, q, scale, scale * (q.astype(np.float64) @ x)


weight = normal(64, 256, seed=1)
q, scale = quantise(weight)
say(f"relative error of the weights in int8: {lesson.error_of({'w': q * scale[:, None]}, {'w': weight}):.2g}")

# ## First all the weights, then the product
#
# The obvious way makes the float matrix again and multiplies with that: the bytes saved are spent twice over.


def dequantise_kernel():
    @kernel(launch_bounds=256)
    def dequantise(q: bytes8, scale: floats, weight: floats, columns: int32):
        for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            weight[cuda.blockIdx.x * columns + c] = scale[cuda.blockIdx.x] * float32(q[cuda.blockIdx.x * columns + c])

    return dequantise


def product_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def product(x: floats, weight: floats, y: floats, columns: int32):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        total = float32(0)
        for c in range(lane, columns, 32):
            total += x[c] * weight[row * columns + c]
        total = ptx.warp_sum(total)
        if lane == 0:
            y[row] = total

    return product


def dequantise_launch(rows, columns):
    _, q, scale, _ = inputs(rows, columns)
    weight = (q * scale[:, None]).astype(np.float32)
    arguments = {"q": q, "scale": scale, "weight": weight, "columns": columns}
    return Launch(rows, 256, arguments, want={"weight": weight}, bytes=5 * q.size)


def product_launch(rows, columns):
    x, q, scale, want = inputs(rows, columns)
    weight = (q * scale[:, None]).astype(np.float32)
    arguments = {"x": x, "weight": weight, "y": scale, "columns": columns}
    return Launch(rows // WARPS, 32 * WARPS, arguments, {"y": want}, bytes=weight.nbytes, flops=2 * q.size)


SMALL, LARGE = (32, 1024), (16384, 8192)
apart = step("dequantise", dequantise_kernel, dequantise_launch, small=SMALL, large=LARGE)
multiply = step("… and multiply", product_kernel, product_launch, small=SMALL, large=LARGE)

# ## In registers, a byte at a time
#
# Convert where the number is used. The scale can wait for the end of the row: one multiplication instead of one a
# weight.


def byte_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def byte(x: floats, q: bytes8, scale: floats, y: floats, columns: int32):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        total = float32(0)
        for c in range(lane, columns, 32):
            total += x[c] * float32(q[row * columns + c])
        total = ptx.warp_sum(total)
        if lane == 0:
            y[row] = scale[row] * total

    return byte


def int8_launch(rows, columns):
    x, q, scale, want = inputs(rows, columns)
    arguments = {"x": x, "q": q, "scale": scale, "y": scale, "columns": columns}
    return Launch(rows // WARPS, 32 * WARPS, arguments, {"y": want}, bytes=q.nbytes, flops=2 * q.size)


byte = step("a byte at a time", byte_kernel, int8_launch, small=SMALL, large=LARGE)
picture(
    "byte",
    pictures.sector_map(byte.accesses("float32(q[", block=0, warp=0), "a byte a lane: one load of one warp"),
    "A warp's load asks for one sector: memory would give many more at once.",
)

# ## Sixteen bytes at a time
#
# A lane loads 16 weights by one instruction. They come as four words of four bytes; a shift up and an arithmetic shift
# down by 24 bits leave one byte with its sign. (`byte_of` is a device function: part of a kernel, inlined.)


@cuda.jit(device=True, inline="always")
def byte_of(word, place):
    """Byte 0 to 3 of a word, as a float32 with its sign."""
    return float32(int32(word << uint32(24 - 8 * place)) >> int32(24))


def wide_kernel():
    @kernel(launch_bounds=32 * WARPS)
    def wide(x: floats, q: bytes8, scale: floats, y: floats, columns: int32):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        total = float32(0)
        for c in range(16 * lane, columns, 16 * 32):
            four = ptx.ld_global_nc_v4(ptx.address(q, row * columns + c))
            for w in range(4):
                a, b, d, e = ptx.ld_global_v4_f32(ptx.address(x, c + 4 * w))
                total += a * byte_of(four[w], 0) + b * byte_of(four[w], 1)
                total += d * byte_of(four[w], 2) + e * byte_of(four[w], 3)
        total = ptx.warp_sum(total)
        if lane == 0:
            y[row] = scale[row] * total

    return wide


wide = step("16 bytes at a time", wide_kernel, int8_launch, small=SMALL, large=LARGE)
picture(
    "wide",
    pictures.sector_map(wide.accesses("ld_global_nc_v4", block=0, warp=0), "16 weights a lane: one load of one warp"),
    "Sixteen sectors a load, a quarter of the memory traffic of float weights. Each box is four weights.",
)
# `x`, though, is read with gaps now: a lane's 16 numbers lie in two sectors, which its four loads ask for one after the
# other. It is small, and comes from a cache; what counts is the weights, of which each is read once.
picture(
    "sectors",
    pictures.bars(
        [
            ("dequantise, then multiply", apart.sectors + multiply.sectors),
            ("float32 weights alone", multiply.sectors),
            ("int8, a byte at a time", byte.sectors),
            ("int8, 16 bytes at a time", wide.sectors),
        ],
        "sectors of global memory",
    ),
    "x is counted too: every warp reads it, though mostly from a cache.",
)

# ## The package's own
#
# `nbk.int8_matmul` takes any number of rows of x, and scales a row or a group of 32 weights.


def package_product(to_device, rows, columns):
    x, q, scale, _ = inputs(rows, columns)
    x = to_device(x[None])
    weight = nbk.Int8Weight(to_device(q), to_device(scale[:, None]), columns)
    return (lambda: nbk.int8_matmul(x, weight)), rows * columns


def right_product(rows, columns):
    return inputs(rows, columns)[3][None]


lesson.operation("nbk.int8_matmul", package_product, right_product, small=SMALL, large=LARGE, beside=wide)
compare()

# ## What to take along
#
# - Where memory is what limits, fewer bytes are faster, even if it takes instructions to unpack them.
# - Unpack in registers, and take out of the loop what is the same for a whole row.
#
# *Sources.* T. Dettmers, M. Lewis, Y. Belkada, L. Zettlemoyer, "LLM.int8()" (2022); PTX ISA reference, "shl", "shr",
# "cvt".
