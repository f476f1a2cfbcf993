# # wgmma and the bulk tensor copy
#
# From Hopper (sm_90) on, two things that a warp did instruction by instruction are done by units of their own. One
# thread asks for a whole tile, and a copy engine brings it. Four warps together (a *warpgroup*) start a product whose
# operands lie in shared memory, and it runs by itself. What remains for the program is to say what must be ready before
# what.
import lesson
import ml_dtypes
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, float32, int32, types, uint8, uint32, uint64

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.emulator import EmulatorError
from nbkernels.launch.compile import kernel
from nbkernels.ptx.bulk import bulk_load, tensor_load_2d, tensor_map, tensor_map_address
from nbkernels.ptx.mbarrier import fence_mbarrier_init, mbarrier_expect, mbarrier_init, mbarrier_wait
from nbkernels.ptx.wgmma import (
    descriptor_address,
    descriptor_bits,
    hold,
    wgmma_commit,
    wgmma_fence,
    wgmma_update,
    wgmma_wait,
)

lesson.main(__name__, __file__)

# ## A bulk copy and its barrier
#
# An *mbarrier* is eight bytes of shared memory that count. Here it is told: one arrival, and so many bytes to come. The
# copy engine reports each byte it has brought; when all have come the barrier's phase ends, and whoever waits for it
# goes on. Phases are told apart by their parity: 0 is the first.
floats, integers = ptx.pointer("float32"), types.CPointer(int32)
ARCH = "sm_90a"
PIECE = 256  # numbers a block copies


def bulk_kernel():
    @kernel(launch_bounds=128)
    def bulk(x: floats, y: floats):
        tile = cuda.shared.array(PIECE, float32, alignment=16)
        barrier = cuda.shared.array(1, uint64)
        at = ptx.shared_address(barrier)
        if cuda.threadIdx.x == 0:
            mbarrier_init(at, uint32(1))
            fence_mbarrier_init()
            mbarrier_expect(at, uint32(4 * PIECE))
            bulk_load(ptx.shared_address(tile), ptx.address(x, cuda.blockIdx.x * PIECE), uint32(4 * PIECE), at)
        cuda.syncthreads()  # the barrier exists now, for everybody
        mbarrier_wait(at, uint32(0))
        for i in range(cuda.threadIdx.x, PIECE, 128):
            y[cuda.blockIdx.x * PIECE + i] = 2 * tile[PIECE - 1 - i]

    return bulk


def bulk_launch(blocks):
    x = normal(blocks, PIECE)
    return Launch(blocks, 128, {"x": x, "y": x}, {"y": 2 * x[:, ::-1]}, bytes=2 * x.nbytes)


step("a bulk copy, each piece turned around", bulk_kernel, bulk_launch, small=(4,), large=(1 << 17,), arch=ARCH)

# The sectors counted are those of the stores alone: no warp asks for what the engine brings. Without the wait it is a
# race, with the copy engine on the other side:


def unwaited_kernel():
    @kernel(launch_bounds=128)
    def unwaited(x: floats, y: floats):
        tile = cuda.shared.array(PIECE, float32, alignment=16)
        barrier = cuda.shared.array(1, uint64)
        at = ptx.shared_address(barrier)
        if cuda.threadIdx.x == 0:
            mbarrier_init(at, uint32(1))
            fence_mbarrier_init()
            mbarrier_expect(at, uint32(4 * PIECE))
            bulk_load(ptx.shared_address(tile), ptx.address(x, cuda.blockIdx.x * PIECE), uint32(4 * PIECE), at)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, PIECE, 128):
            y[cuda.blockIdx.x * PIECE + i] = 2 * tile[PIECE - 1 - i]

    return unwaited


try:
    lesson.run(unwaited_kernel, (), bulk_launch(1), ARCH)
except EmulatorError as error:
    say(lesson.in_short(error))

# ## A tile of a matrix, swizzled
#
# A *tensor map* describes a matrix in memory: where it is, its rows and columns, the box to bring at a time. With it
# the engine can also swizzle: with rows of 128 bytes in shared memory, the eight 16-byte chunks of row `r` change
# places by `r % 8`, so that a column of chunks lies in different banks (lesson 3). To see it, copy a box of 8 rows
# whose numbers say in which chunk of its row they were, and write out shared memory as it lies.


def dump_kernel():
    @kernel(launch_bounds=32)
    def dump(box: tensor_map, y: integers):
        # rows of the swizzle's pattern begin at multiples of 1024 bytes
        base = (ptx.shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00)
        barrier = uint32(base + uint32(1024))
        if cuda.threadIdx.x == 0:
            mbarrier_init(barrier, uint32(1))
            fence_mbarrier_init()
            mbarrier_expect(barrier, uint32(1024))
            tensor_load_2d(base, tensor_map_address(box), uint32(0), uint32(0), barrier)
        cuda.syncthreads()
        mbarrier_wait(barrier, uint32(0))
        for i in range(cuda.threadIdx.x, 256, 32):
            y[i] = int32(ptx.ld_shared(uint32(base + uint32(4 * i))))

    return dump


def dump_launch():
    chunk = np.tile(np.arange(32, dtype=np.int32) // 4, (8, 1))
    where = np.arange(8)[:, None] ^ np.arange(8)[None, :]  # what row r holds at chunk c
    want = np.repeat(where, 4, axis=1).astype(np.int32)
    arguments = {"box": chunk, "y": np.zeros((8, 32), np.int32)}
    return Launch(1, 32, arguments, {"y": want}, shared_bytes=3072, maps={"box": ((8, 32), 128)})


dumped = step("a swizzled box, as it lies", dump_kernel, dump_launch, arch=ARCH)
picture(
    "swizzle",
    pictures.grid_map(
        dumped.run.results["y"][:, ::4], "8 rows of 128 bytes in shared memory: which chunk of its row lies where"
    ),
    "In each column every chunk is another: eight rows at one place of the original lie in all banks.",
)

# ## A product of a warpgroup
#
# `wgmma` multiplies a tile of 64 rows, in shared memory as the engine leaves it, by up to 256 columns; sums stay in the
# registers of the four warps. A *descriptor* says where an operand lies and how it is swizzled. Around it stand `fence`
# (registers are ready), `commit` (that was one group) and `wait`.
#
# A tile is 64 numbers of bfloat16 deep, 128 bytes: four products of depth 16. With one stage, the next tile is asked
# for when this one has been used; with two, one is under way meanwhile.
ROWS, COLUMNS, DEPTH = 64, 64, 64
A_BYTES, B_BYTES = ROWS * DEPTH * 2, COLUMNS * DEPTH * 2
STAGE_BYTES = A_BYTES + B_BYTES
SUMS = COLUMNS // 2
bf16 = ml_dtypes.bfloat16


def product_kernel(stages):
    update = wgmma_update("bfloat16", COLUMNS)
    keep = hold(SUMS, "f")
    bits = descriptor_bits(16, 1024, 128)  # eight rows of 128 bytes are one pattern of the swizzle

    @kernel(launch_bounds=128)
    def product(x: tensor_map, weight: tensor_map, y: floats, columns: uint32, inner: uint32):
        thread = uint32(cuda.threadIdx.x)
        barriers = (ptx.shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00)
        tiles = uint32(barriers + uint32(1024))
        row, column = uint32(cuda.blockIdx.y * ROWS), uint32(cuda.blockIdx.x * COLUMNS)
        x_map, weight_map = tensor_map_address(x), tensor_map_address(weight)
        steps = inner // uint32(DEPTH)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(uint32(barriers + uint32(8 * s)), uint32(1))
            fence_mbarrier_init()
            for s in range(stages):
                full, to = uint32(barriers + uint32(8 * s)), uint32(tiles + uint32(s * STAGE_BYTES))
                if s < steps:
                    mbarrier_expect(full, uint32(STAGE_BYTES))
                    tensor_load_2d(to, x_map, uint32(s * DEPTH), row, full)
                    tensor_load_2d(uint32(to + uint32(A_BYTES)), weight_map, uint32(s * DEPTH), column, full)
        cuda.syncthreads()
        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        for s in range(steps):
            stage, turn = uint32(s % stages), uint32(s // stages % 2)
            full, a = uint32(barriers + uint32(8) * stage), uint32(tiles + stage * uint32(STAGE_BYTES))
            mbarrier_wait(full, turn)
            b = uint32(a + uint32(A_BYTES))
            keep(sums, 0)
            wgmma_fence()
            for k in range(DEPTH // 16):
                a_at = descriptor_address(uint32(a + uint32(32 * k))) + uint64(bits)
                b_at = descriptor_address(uint32(b + uint32(32 * k))) + uint64(bits)
                update(sums, 0, a_at, b_at, uint32(1))
            wgmma_commit()
            wgmma_wait(0)
            keep(sums, 0)
            cuda.syncthreads()  # all four warps are done with this stage
            if thread == 0 and s + stages < steps:
                mbarrier_expect(full, uint32(STAGE_BYTES))
                tensor_load_2d(a, x_map, uint32((s + stages) * DEPTH), row, full)
                tensor_load_2d(b, weight_map, uint32((s + stages) * DEPTH), column, full)
        warp, lane = thread // uint32(32), thread % uint32(32)
        mine = row + uint32(16) * warp + lane // uint32(4)
        for j in range(COLUMNS // 8):
            at = mine * columns + column + 8 * j + 2 * (lane % 4)
            y[at] = sums[4 * j]
            y[at + 1] = sums[4 * j + 1]
            y[at + 8 * columns] = sums[4 * j + 2]
            y[at + 8 * columns + 1] = sums[4 * j + 3]

    return product


def product_launch(stages):
    def launch(rows, columns, inner):
        x, weight = normal(rows, inner, dtype=bf16), normal(columns, inner, dtype=bf16, seed=1)
        y = np.zeros((rows, columns), np.float32)
        return Launch(
            (columns // COLUMNS, rows // ROWS),
            128,
            {"x": x, "weight": weight, "y": y, "columns": columns, "inner": inner},
            {"y": x.astype(np.float32) @ weight.astype(np.float32).T},
            bytes=x.nbytes + weight.nbytes + y.nbytes,
            flops=2 * rows * columns * inner,
            # tensor cores cut off what lies below a sum's last bit, once for each 16 products (M. Fasi et al., 2021)
            tolerance=inner / 16 * 2**-23,
            shared_bytes=2048 + stages * STAGE_BYTES,
            maps={"x": ((ROWS, DEPTH), 128), "weight": ((COLUMNS, DEPTH), 128)},
        )

    return launch


STORES = ("y[at] =", "y[at + 1]", "y[at + 8 * columns]", "y[at + 8 * columns + 1]")
SMALL, LARGE = (64, 128, 256), (4096, 4096, 4096)
for stages in (1, 2, 4):
    named = f"wgmma, {stages} stage{'s' if stages > 1 else ''}"
    last = step(named, product_kernel, product_launch(stages), constants=(stages,), small=SMALL, large=LARGE, arch=ARCH)
picture(
    "fragment",
    pictures.owner_map(
        [a for text in STORES for a in last.accesses(text, block=0)],
        (64, 128),
        4,
        "the result's first 16 columns: which thread of the warpgroup holds which number (first block)",
        cell=15,
        shown=16,
    ),
    "Each warp has 16 rows, laid out as mma.sync's result; every further 8 columns are held alike.",
)

# More stages take *more* instructions: which stage it is, and with it the descriptors, has to be worked out each time
# round. What they save is waiting, of which the emulator knows nothing; only a GPU can show it.

# ## The package's own
#
# A warp of its own that only asks for tiles, two warpgroups that multiply and take turns with the epilogue, results
# written by bulk copies: `nbk.matmul` on sm_90.


def package_product(to_device, rows, columns, inner):
    x, weight = to_device(normal(rows, inner, dtype=bf16)), to_device(normal(columns, inner, dtype=bf16, seed=1))
    return (lambda: nbk.matmul(x, weight)), 2 * (rows * inner + columns * inner + rows * columns)


def right_product(rows, columns, inner):
    return (
        normal(rows, inner, dtype=bf16).astype(np.float32)
        @ normal(columns, inner, dtype=bf16, seed=1).astype(np.float32).T
    )


# the result is rounded to bfloat16, which has 8 bits
lesson.operation(
    "nbk.matmul on sm_90a",
    package_product,
    right_product,
    small=(128, 128, 128),
    large=LARGE,
    tolerance=2**-8,
    arch=ARCH,
    beside=last,
)
compare(("FLOPs an instruction", lambda s: f"{s.report_total.flops / s.report_total.warp_instructions:.0f}"))

# ## What to take along
#
# - Ask early, wait late; say how many bytes are to come before you ask.
# - A stage may be filled again only when every warp that reads it is done.
# - Address arithmetic, which filled lesson 8's loop, is gone: the engine does it.
#
# *Sources.* NVIDIA, H100 Tensor Core GPU Architecture (2022); PTX ISA reference, "cp.async.bulk.tensor", "mbarrier",
# "wgmma.mma_async" and "Matrix Descriptor"; V. Thakkar et al., CUTLASS 3 (2023); M. Fasi, N. Higham, M. Mikaitis, S.
# Pranesh, "Numerical Behavior of NVIDIA Tensor Cores" (2021).
