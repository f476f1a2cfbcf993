# # Tensor cores: mma.sync and the fragment layout
#
# A tensor core multiplies small matrices as one instruction of a warp: here a [16, 16] times b [16, 8] in bfloat16,
# summed in float32. That is 4096 multiplications and additions by 32 lanes at once. The one difficulty is that the
# matrices are *spread over the lanes' registers*, in a layout the hardware prescribes.
import lesson
import ml_dtypes
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, step
from numba import cuda, float32, types, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## One instruction
#
# Lane `l` holds, of a, rows `l / 4` and eight further, and of each two neighbouring columns in a word: four words. Of b
# it holds two words, of the result four numbers. Here every lane fetches its own part straight from memory. (bfloat16
# comes as words of two numbers: `a` has 8 words a row. b is given as its transpose, so that two neighbours along the
# sum lie in one word.)
words, floats = types.CPointer(uint32), ptx.pointer("float32")
bf16 = ml_dtypes.bfloat16


def one_mma_kernel():
    @kernel(launch_bounds=32)
    def one_mma(a: words, b: words, d: floats):
        lane = uint32(cuda.threadIdx.x)
        row, pair = lane // uint32(4), lane % uint32(4)
        a0 = a[row * 8 + pair]
        a1 = a[(row + 8) * 8 + pair]
        a2 = a[row * 8 + pair + 4]
        a3 = a[(row + 8) * 8 + pair + 4]
        b0 = b[row * 8 + pair]
        b1 = b[row * 8 + pair + 4]
        zero = float32(0)
        d0, d1, d2, d3 = ptx.mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
        d[row * 8 + 2 * pair] = d0
        d[row * 8 + 2 * pair + 1] = d1
        d[(row + 8) * 8 + 2 * pair] = d2
        d[(row + 8) * 8 + 2 * pair + 1] = d3

    return one_mma


def as_words(array):
    """bfloat16 [rows, 2·n] seen as words [rows, n]."""
    return np.ascontiguousarray(array).view(np.uint32)


def one_mma_launch():
    a, b = normal(16, 16, dtype=bf16), normal(8, 16, dtype=bf16, seed=1)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    return Launch(
        1, 32, {"a": as_words(a), "b": as_words(b), "d": np.zeros((16, 8), np.float32)}, {"d": want}, flops=4096
    )


single = step("one product of a warp", one_mma_kernel, one_mma_launch)

# Who holds what, drawn from the loads and stores of that run; a box is an element, the number its lane.
loads = [access for text in ("a0 = a[", "a1 = a[", "a2 = a[", "a3 = a[") for access in single.accesses(text)]
picture("a", pictures.owner_map(loads, (16, 16), 2, "a [16, 16]: which lane holds which element"), "The fragment of a.")
loads = [access for text in ("b0 = b[", "b1 = b[") for access in single.accesses(text)]
picture(
    "b", pictures.owner_map(loads, (8, 16), 2, "bᵀ [8, 16]"), "The fragment of b: two neighbours along the sum a word."
)
picture(
    "d",
    pictures.owner_map(single.accesses("d[", mode="write"), (16, 8), 4, "the result [16, 8]"),
    "The result's fragment.",
)

# ## A tile product
#
# A larger product is many of these. A warp takes 16 × 32 results: four fragments of b for one of a. The tiles come
# through shared memory, and `ldmatrix` reads them: one instruction hands each lane four words, exactly in the
# fragment's layout. Each lane gives the address of one row of 16 bytes. With rows of 64 bytes the rows that are read
# together share banks:
ROWS, COLUMNS, INNER = 16, 32, 32
WORDS_A_ROW = INNER // 2


def tile_mma_kernel(width):
    a_words, b_words = ROWS * width, COLUMNS * width

    @kernel(launch_bounds=32)
    def tile_mma(a: words, b: words, d: floats):
        a_tile = cuda.shared.array(a_words, uint32, alignment=16)
        b_tile = cuda.shared.array(b_words, uint32, alignment=16)
        lane = uint32(cuda.threadIdx.x)
        for chunk in range(lane, ROWS * WORDS_A_ROW // 4, 32):
            r, w = chunk // (WORDS_A_ROW // 4), chunk % (WORDS_A_ROW // 4) * 4
            x, y, z, u = ptx.ld_global_v4(ptx.address(a, 4 * chunk))
            ptx.st_shared_v4(uint32(ptx.shared_address(a_tile) + 4 * (r * width + w)), x, y, z, u)
        for chunk in range(lane, COLUMNS * WORDS_A_ROW // 4, 32):
            r, w = chunk // (WORDS_A_ROW // 4), chunk % (WORDS_A_ROW // 4) * 4
            x, y, z, u = ptx.ld_global_v4(ptx.address(b, 4 * chunk))
            ptx.st_shared_v4(uint32(ptx.shared_address(b_tile) + 4 * (r * width + w)), x, y, z, u)
        cuda.syncthreads()
        totals = cuda.local.array(16, float32)
        for i in range(16):
            totals[i] = float32(0)
        for k in range(INNER // 16):
            # matrices 0 to 3 of ldmatrix: rows 0-7 and 8-15, columns 0-7; the same, columns 8-15
            where = lane % 16 * width + lane // 16 * 4 + k * 8
            a0, a1, a2, a3 = ptx.ldmatrix_x4(uint32(ptx.shared_address(a_tile) + 4 * where))
            for n in range(2):
                where = (n * 16 + lane % 8 + lane // 16 * 8) * width + lane // 8 % 2 * 4 + k * 8
                b0, b1, b2, b3 = ptx.ldmatrix_x4(uint32(ptx.shared_address(b_tile) + 4 * where))
                i = 8 * n
                totals[i], totals[i + 1], totals[i + 2], totals[i + 3] = ptx.mma_m16n8k16_bf16(
                    a0, a1, a2, a3, b0, b1, totals[i], totals[i + 1], totals[i + 2], totals[i + 3]
                )
                i = 8 * n + 4
                totals[i], totals[i + 1], totals[i + 2], totals[i + 3] = ptx.mma_m16n8k16_bf16(
                    a0, a1, a2, a3, b2, b3, totals[i], totals[i + 1], totals[i + 2], totals[i + 3]
                )
        row, pair = lane // uint32(4), lane % uint32(4)
        for n in range(4):
            first = row * COLUMNS + 8 * n + 2 * pair
            d[first] = totals[4 * n]
            d[first + 1] = totals[4 * n + 1]
            d[first + 8 * COLUMNS] = totals[4 * n + 2]
            d[first + 8 * COLUMNS + 1] = totals[4 * n + 3]

    return tile_mma


def tile_launch():
    a, b = normal(ROWS, INNER, dtype=bf16), normal(COLUMNS, INNER, dtype=bf16, seed=1)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    arguments = {"a": as_words(a), "b": as_words(b), "d": np.zeros((ROWS, COLUMNS), np.float32)}
    return Launch(1, 32, arguments, {"d": want}, flops=2 * ROWS * COLUMNS * INNER)


dense = step("ldmatrix, rows of 64 bytes", tile_mma_kernel, tile_launch, constants=(WORDS_A_ROW,))

# Four words more a row, and eight rows of 16 bytes lie in 32 different banks. (The package's tiles are swizzled
# instead, see lesson 3.) The picture of one `ldmatrix`: each lane's 16 bytes are four words.
padded = step("ldmatrix, rows of 80 bytes", tile_mma_kernel, tile_launch, constants=(WORDS_A_ROW + 4,))
picture(
    "conflict",
    pictures.bank_map(dense.accesses("ptx.shared_address(a_tile) + 4 * where"), "ldmatrix, rows of 64 bytes"),
    "Rows that are read together lie in the same banks.",
)
picture(
    "padded",
    pictures.bank_map(padded.accesses("ptx.shared_address(a_tile) + 4 * where"), "ldmatrix, rows of 80 bytes"),
    "Each group of eight rows uses every bank once.",
)

# ## The package's own
#
# Tiles through asynchronous copies in a ring (lesson 8), fragments by ldmatrix, products by mma.sync: `nbk.matmul`.


def package_product(to_device, rows, columns, inner):
    x, weight = to_device(normal(rows, inner, dtype=bf16)), to_device(normal(columns, inner, dtype=bf16, seed=1))
    return (lambda: nbk.matmul(x, weight)), 2 * (rows * inner + columns * inner + rows * columns)


def right_product(rows, columns, inner):
    return (
        normal(rows, inner, dtype=bf16).astype(np.float64)
        @ normal(columns, inner, dtype=bf16, seed=1).astype(np.float64).T
    )


# the result is rounded to bfloat16, which has 8 bits
lesson.operation(
    "nbk.matmul", package_product, right_product, small=(128, 64, 256), large=(4096, 4096, 4096), tolerance=2**-8
)
compare(("FLOPs an instruction", lambda s: f"{s.report_total.flops / s.report_total.warp_instructions:.0f}"))

# ## What to take along
#
# - Draw the fragment before you write the kernel: who holds which element decides every index.
# - Operands in 16 bits, sums in 32.
# - ldmatrix wants rows of 16 bytes that lie in different banks, eight at a time.
#
# *Sources.* PTX ISA reference, "Matrix Fragments for mma.m16n8k16" and "ldmatrix"; S. Markidis et al., "NVIDIA Tensor
# Core Programmability, Performance & Precision" (2018).
