# # Tiles, asynchronous copies and a pipeline
#
# A matrix product uses each number of its operands many times, and nobody can afford to fetch it from memory each time.
# Tiles in shared memory and in registers make it few times; asynchronous copies fetch the next tile while this one is
# used.
import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, step
from numba import cuda, float32, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## A thread a result
#
# `y = x @ weightᵀ`: x [rows, inner], weight [columns, inner], both float32. Each thread of a block of 16 × 16 computes
# one number.
floats = ptx.pointer("float32")
BLOCK = 16


def thread_a_result_kernel():
    @kernel(launch_bounds=BLOCK * BLOCK)
    def thread_a_result(x: floats, weight: floats, y: floats, columns: uint32, inner: uint32):
        row = cuda.blockIdx.y * BLOCK + cuda.threadIdx.y
        column = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
        total = float32(0)
        for k in range(inner):
            total += x[row * inner + k] * weight[column * inner + k]
        y[row * columns + column] = total

    return thread_a_result


def product_launch(tile, threads, shared_bytes=0):
    def launch(rows, columns, inner):
        x, weight = normal(rows, inner), normal(columns, inner, seed=1)
        arguments = {
            "x": x,
            "weight": weight,
            "y": np.zeros((rows, columns), np.float32),
            "columns": columns,
            "inner": inner,
        }
        return Launch(
            (columns // tile, rows // tile),
            threads,
            arguments,
            want={"y": x.astype(np.float64) @ weight.astype(np.float64).T},
            bytes=4 * (x.size + weight.size + rows * columns),
            flops=2 * rows * columns * inner,
            shared_bytes=shared_bytes,
            tolerance=lesson.rounding_of(inner),
        )

    return launch


SMALL, LARGE = (64, 64, 128), (2048, 2048, 2048)
plain = step(
    "a thread a result", thread_a_result_kernel, product_launch(BLOCK, (BLOCK, BLOCK)), small=SMALL, large=LARGE
)

# ## A tile in shared memory
#
# A block's 256 results need 16 rows of x and 16 of weight, each of them by 16 threads. So the block fetches a tile of
# 16 × 16 of both, each thread one number of each, and all use them 16 times; then the next tile along `inner`. Two
# barriers a tile: one before the tile is read, one before it is overwritten.


PADDED = BLOCK + 1


def shared_tile_kernel():
    @kernel(launch_bounds=BLOCK * BLOCK)
    def shared_tile(x: floats, weight: floats, y: floats, columns: uint32, inner: uint32):
        a = cuda.shared.array((BLOCK, PADDED), float32)
        b = cuda.shared.array((BLOCK, PADDED), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * BLOCK, cuda.blockIdx.x * BLOCK
        total = float32(0)
        for k in range(0, inner, BLOCK):
            a[ty, tx] = x[(row + ty) * inner + k + tx]
            b[ty, tx] = weight[(column + ty) * inner + k + tx]
            cuda.syncthreads()
            for i in range(BLOCK):
                total += a[ty, i] * b[tx, i]
            cuda.syncthreads()
        y[(row + ty) * columns + column + tx] = total

    return shared_tile


tiled = step(
    "a tile in shared memory", shared_tile_kernel, product_launch(BLOCK, (BLOCK, BLOCK)), small=SMALL, large=LARGE
)
picture(
    "walk",
    pictures.walk_map(
        tiled.accesses("= x[", block=0), (64, 128), 4, "x [64, 128], read by block 0: pale first, grey never"
    ),
    "The tile walk: 16 rows, 16 columns at a time.",
)

# ## A tile in registers
#
# Now shared memory is what is read most: two numbers for each multiplication. Let a thread compute 4 × 4 results: it
# reads 4 + 4 numbers and makes 16 multiplications of them. It reads them 16 bytes at a time, four steps along `inner`.
# The block's tile grows to 64 × 64.
#
# ## Asynchronous copies
#
# And let the copies run ahead. `cp.async` moves 16 bytes from global to shared memory while the thread goes on;
# `commit` closes a group of copies, `wait(n)` waits until at most the `n` newest groups are on their way. With a ring
# of `STAGES` tiles, the tile for two steps ahead is on its way while this one is multiplied. A thread that has waited
# knows of *its own* copies; the barrier behind it makes that everybody's. (Accesses of 16 bytes want addresses that are
# multiples of 16. An array of float32 promises a multiple of 4 alone, so these ask for more: `alignment=16`.)
TILE, DEPTH, STAGES = 64, 16, 3
WIDTH = DEPTH + 4  # words a row: rows of 16 bytes stay aligned, and rows lie in different banks
A_WORDS = TILE * WIDTH
ROW_BYTES, STAGE_BYTES = 4 * WIDTH, 4 * A_WORDS


def pipeline_kernel(stages):
    ahead, ring = stages - 1, stages * A_WORDS
    under_way, last = ahead - 1, ahead * STAGE_BYTES

    @kernel(launch_bounds=256)
    def pipeline(x: floats, weight: floats, y: floats, columns: uint32, inner: uint32):
        a = cuda.shared.array(ring, float32, alignment=16)
        b = cuda.shared.array(ring, float32, alignment=16)
        thread = uint32(cuda.threadIdx.x)
        tx, ty = thread % uint32(16), thread // uint32(16)
        row, column = uint32(cuda.blockIdx.y * TILE), uint32(cuda.blockIdx.x * TILE)
        # each thread copies 16 bytes of each tile: 64 rows of four chunks
        copy_row, chunk = thread // uint32(4), uint32(4) * (thread % uint32(4))
        a_target = ptx.shared_address(a) + uint32(4) * (copy_row * uint32(WIDTH) + chunk)
        b_target = ptx.shared_address(b) + uint32(4) * (copy_row * uint32(WIDTH) + chunk)
        a_read = ptx.shared_address(a) + uint32(4) * (ty * uint32(WIDTH))
        b_read = ptx.shared_address(b) + uint32(4) * (tx * uint32(WIDTH))
        totals = cuda.local.array(16, float32)
        for i in range(16):
            totals[i] = float32(0)
        tiles = inner // uint32(DEPTH)
        x_source = ptx.address(x, (row + copy_row) * inner + chunk)
        weight_source = ptx.address(weight, (column + copy_row) * inner + chunk)
        for t in range(ahead):
            if t < tiles:
                ptx.cp_async_16(uint32(a_target + t * STAGE_BYTES), x_source + 4 * DEPTH * t)
                ptx.cp_async_16(uint32(b_target + t * STAGE_BYTES), weight_source + 4 * DEPTH * t)
            ptx.cp_async_commit()
        stage, filled = uint32(0), uint32(ahead * STAGE_BYTES)  # where in the ring, in bytes, is read and is written
        for t in range(tiles):
            ptx.cp_async_wait(under_way)  # tile t is here, as far as this thread copied it
            cuda.syncthreads()  # … and as far as the others did; and all are done with tile t - 1
            if t + ahead < tiles:
                ptx.cp_async_16(uint32(a_target + filled), x_source + 4 * DEPTH * (t + ahead))
                ptx.cp_async_16(uint32(b_target + filled), weight_source + 4 * DEPTH * (t + ahead))
            ptx.cp_async_commit()
            for k in range(DEPTH // 4):
                at = uint32(stage + uint32(16 * k))
                b0 = ptx.ld_shared_v4_f32(uint32(b_read + at))
                b1 = ptx.ld_shared_v4_f32(uint32(b_read + at + 16 * ROW_BYTES))
                b2 = ptx.ld_shared_v4_f32(uint32(b_read + at + 32 * ROW_BYTES))
                b3 = ptx.ld_shared_v4_f32(uint32(b_read + at + 48 * ROW_BYTES))
                for i in range(4):
                    left = ptx.ld_shared_v4_f32(uint32(a_read + at + i * 16 * ROW_BYTES))
                    for n in range(4):
                        totals[4 * i] += left[n] * b0[n]
                        totals[4 * i + 1] += left[n] * b1[n]
                        totals[4 * i + 2] += left[n] * b2[n]
                        totals[4 * i + 3] += left[n] * b3[n]
            stage = uint32(stage + uint32(STAGE_BYTES)) if stage < uint32(last) else uint32(0)
            filled = uint32(filled + uint32(STAGE_BYTES)) if filled < uint32(last) else uint32(0)
        for i in range(4):
            for j in range(4):
                y[(row + ty + 16 * i) * columns + column + tx + 16 * j] = totals[4 * i + j]

    return pipeline


one_stage_ahead = step(
    "4 × 4 results, 2 stages",
    pipeline_kernel,
    product_launch(TILE, 256),
    constants=(2,),
    small=SMALL,
    large=LARGE,
)
pipeline = step(
    "4 × 4 results, 3 stages",
    pipeline_kernel,
    product_launch(TILE, 256),
    constants=(STAGES,),
    small=SMALL,
    large=LARGE,
)


# The picture shows one warp of that run, in the order in which its instructions were executed: when the copy of each
# tile was issued, and when the tile was used. A copy has from its issue to the first use to arrive.
def tile_rows(done):
    copies = done.accesses("cp_async_16(uint32(a_target + ", mode="copy", block=0, warp=0)
    uses = done.accesses("left = ptx.ld_shared", mode="read", block=0, warp=0)
    tiles = len(copies)
    each = len(uses) // tiles
    rows = []
    for t in range(tiles):
        mine = [a.order for a in uses[t * each : (t + 1) * each]]
        rows.append((f"tile {t}", [(copies[t].order, min(mine) - 1, "copy"), (min(mine), max(mine), "use")]))
    return rows


picture(
    "two_stages",
    pictures.timeline(tile_rows(one_stage_ahead), "2 stages: one tile is under way"),
    "Two stages.",
)
picture("three_stages", pictures.timeline(tile_rows(pipeline), "3 stages: two tiles are under way"), "Three stages.")

# ## On the roofline
#
# How fast a kernel *can* be depends on how many multiplications it makes for each byte it moves. To the left of the
# ridge memory sets the pace, to the right the arithmetic. The steps of this lesson moved to the right (by the sectors
# the emulator counted):
points = [
    (
        s.title,
        s.report_total.flops / (32 * s.sectors),
        s.gpu_flops / (s.microseconds * 1e-6) if s.microseconds else None,
    )
    for s in lesson.steps()
]
picture("roofline", pictures.roofline(points, "FLOPs a byte moved", lesson.peaks()), "The steps on the roofline.")

# ## The package's own
#
# In float32 it goes the same way; in 16 bits tensor cores multiply, which is the next lesson.


def package_product(to_device, rows, columns, inner):
    x, weight = to_device(normal(rows, inner)), to_device(normal(columns, inner, seed=1))
    return (lambda: nbk.matmul(x, weight)), 4 * (rows * inner + columns * inner + rows * columns)


def right_product(rows, columns, inner):
    return normal(rows, inner).astype(np.float64) @ normal(columns, inner, seed=1).astype(np.float64).T


lesson.operation("nbk.matmul, float32", package_product, right_product, small=SMALL, large=LARGE, beside=pipeline)
compare()

# ## What to take along
#
# - Each level of memory wants its own tile: shared memory saves sectors, registers save passes of shared memory.
# - A copy that is not waited for is a race; so is a stage that is overwritten while somebody still reads it.
# - The pipeline's depth is paid in shared memory, which other blocks then lack: see the occupancy.
#
# *Sources.* S. Williams, A. Waterman, D. Patterson, "Roofline" (2009); V. Volkov, J. Demmel, "Benchmarking GPUs to Tune
# Dense Linear Algebra" (2008); NVIDIA, CUDA C++ Programming Guide, "Asynchronous Data Copies"; PTX ISA reference,
# "cp.async".
