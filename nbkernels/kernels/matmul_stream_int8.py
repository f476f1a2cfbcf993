"""Few int8 rows times an int8 weight at the speed of memory (sm_90), in exact int32 sums; a scale a row of each.

    y[m, n] = epilogue(float(sum_k x[m, k] · w[n, k]) · x_scales[m] · scales[n])

The walk is that of ``matmul_stream`` with a dense weight, a step being 128 bytes of a row, which are 128 columns here: one warp
of a block brings boxes of the weight and of x, the others multiply them by m16n8k32, 16 rows of the weight a warp. Blocks that
share a tile leave int32 sums in memory, whose sum does not depend on their order.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.epilogue import finish
from nbkernels.kernels.int8 import scale_of_row
from nbkernels.kernels.matmul_stream import (
    FRAGMENT_BYTES,
    FRAGMENT_COLUMNS,
    FRAGMENT_ROWS,
    MERGE_UNROLL,
    MOST_DIRECT,
    MOST_ROWS,
    RING_BYTES,
    ROW_BYTES,
    SWIZZLE_BYTES,
    block_of,
    blocks_for,
    first_unit_of,
    multiply_dense,
)
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.tensor_map import describes, tensor_map
from nbkernels.ptx.bulk import (
    EVICT_FIRST,
    prefetch_tensor_map,
    tensor_load_2d,
    tensor_load_2d_hint,
    tensor_map_address,
)
from nbkernels.ptx.bulk import tensor_map as tensor_map_type
from nbkernels.ptx.mbarrier import (
    barrier_sync,
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)

STEP = ROW_BYTES  # k a stage, and bytes of a row of it
# of a weight, from which on a ring of bulk copies pays
LEAST_BYTES = 2 * 2**20


def matmul_stream_int8_kernel(dtype, row_tiles, column_tiles, consumers, stages, epilogue):
    """dtype: of y, bias and residual. row_tiles: of 8 rows of x, all there are; column_tiles: fragments of 16 columns of y a
    warp, of ``consumers`` warps; together at most MOST_DIRECT sums a lane. One warp more brings everything in.
    """
    tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
    tile_bytes = tile_n * ROW_BYTES
    stage_bytes = tile_bytes + row_tiles * SWIZZLE_BYTES
    consumer_threads = consumers * ptx.WARP
    values = 4 * row_tiles * column_tiles
    assert values <= MOST_DIRECT
    multiply = multiply_dense("int8", row_tiles, column_tiles)
    store = finish(dtype, epilogue)
    full_at, free_at, flag_at = 0, 8 * stages, 16 * stages

    @kernel(launch_bounds=(consumer_threads + ptx.WARP, 1))
    def matmul_stream_int8(
        weight_map: tensor_map_type,
        x_map: tensor_map_type,
        x_scales: ptx.pointer("float32"),
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        out: ptx.pointer(dtype),
        partial: ptx.pointer("int32"),  # [2 · blocks, rows, tile_n]
        counters: ptx.pointer("uint32"),  # [tiles]
        rows: uint32,
        columns: uint32,
        steps: uint32,
        share: uint32,
        extra: uint32,
        x_scale_stride: int64,
        scale_stride: int64,
        residual_stride: int64,
        out_stride: int64,
    ):
        raw = ptx.shared_address(cuda.shared.array(0, uint8))
        base = uint32(uint32(raw + uint32(SWIZZLE_BYTES - 1)) & uint32(0xFFFFFFFF - SWIZZLE_BYTES + 1))
        ring = uint32(base + uint32(SWIZZLE_BYTES))
        thread = uint32(cuda.threadIdx.x)
        lane = ptx.lane_id()
        warp = ptx.shfl_idx_u32(uint32(thread >> uint32(5)), uint32(0))  # known to be the same in all lanes
        block = uint32(cuda.blockIdx.x)
        if thread == uint32(0):
            for s in range(stages):
                mbarrier_init(uint32(base + uint32(full_at + 8 * s)), uint32(1))
                mbarrier_init(uint32(base + uint32(free_at + 8 * s)), uint32(consumers))
            fence_mbarrier_init()
        cuda.syncthreads()

        unit = first_unit_of(block, share, extra)
        end = first_unit_of(uint32(block + uint32(1)), share, extra)
        tile = uint32(unit // steps)
        step = uint32(unit - uint32(tile * steps))
        stage = uint32(0)
        parity = uint32(0)
        if warp == uint32(consumers):
            if lane == uint32(0):
                weight_at, x_at = tensor_map_address(weight_map), tensor_map_address(x_map)
                prefetch_tensor_map(weight_at)
                prefetch_tensor_map(x_at)
                while unit < end:
                    full = uint32(base + uint32(stage << uint32(3)))
                    mbarrier_wait(uint32(full + uint32(free_at - full_at)), uint32(parity ^ uint32(1)))
                    k = uint32(step * uint32(STEP))
                    to = uint32(ring + uint32(stage * uint32(stage_bytes)))
                    mbarrier_expect(full, uint32(stage_bytes))
                    tensor_load_2d_hint(to, weight_at, k, uint32(tile * uint32(tile_n)), full, uint64(EVICT_FIRST))
                    tensor_load_2d(uint32(to + uint32(tile_bytes)), x_at, k, uint32(0), full)
                    unit = uint32(unit + uint32(1))
                    step = uint32(step + uint32(1))
                    if step == steps:
                        step = uint32(0)
                        tile = uint32(tile + uint32(1))
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))
            return

        sums = cuda.local.array(values, int32)
        quad = uint32(lane & uint32(3))
        # where a lane reads in its warp's rows and in x; pieces are exchanged by XOR with the row's last three bits
        w_row = uint32(lane & uint32(15))
        w_lane = uint32(
            uint32(w_row << uint32(7)) + uint32(uint32(uint32(lane >> uint32(4)) ^ (w_row & uint32(7))) << uint32(4))
        )
        x_row = uint32(lane & uint32(7))
        x_lane = uint32(uint32(x_row << uint32(7)) + uint32(uint32(uint32(lane >> uint32(3)) ^ x_row) << uint32(4)))
        warp_bytes = uint32(warp * uint32(column_tiles * FRAGMENT_BYTES))
        warp_column = uint32(uint32(warp * uint32(column_tiles * FRAGMENT_COLUMNS)) + uint32(lane >> uint32(2)))
        while unit < end:
            first_unit = uint32(unit - step)
            last = min(uint32(end - first_unit), steps)  # the step after this block's last one of the tile
            first_column = uint32(tile * uint32(tile_n))
            whole = step == uint32(0) and last == steps
            slot = uint32(uint32(block << uint32(1)) + (uint32(1) if step == uint32(0) else uint32(0)))
            for i in range(values):
                sums[i] = int32(0)
            unit = uint32(first_unit + last)
            while step < last:
                full = uint32(base + uint32(stage << uint32(3)))
                mbarrier_wait(full, parity)
                w = uint32(ring + uint32(stage * uint32(stage_bytes)))
                multiply(uint32(w + warp_bytes), uint32(w + uint32(tile_bytes)), w_lane, x_lane, 0, 0, sums)
                fence_proxy_async_shared()  # loads may be under way, which nothing else orders before the next copy
                ptx.warp_sync()
                if lane == uint32(0):
                    mbarrier_arrive(uint32(full + uint32(free_at - full_at)))
                step = uint32(step + uint32(1))
                stage = uint32(stage + uint32(1))
                if stage == uint32(stages):
                    stage = uint32(0)
                    parity = uint32(parity ^ uint32(1))

            step = uint32(0)
            for t in range(row_tiles):
                for h in range(2):
                    row = uint32(uint32(quad << uint32(1)) + uint32(8 * t + h))
                    x_scale = float32(0.0)
                    if whole and row < rows:
                        x_scale = scale_of_row(x_scales[int64(row) * x_scale_stride])
                    for c in range(2 * column_tiles):
                        column = uint32(warp_column + uint32(FRAGMENT_COLUMNS // 2 * c))
                        y_column = uint32(first_column + column)
                        if row < rows and y_column < columns:
                            total = sums[4 * (c // 2 * row_tiles + t) + 2 * (c % 2) + h]
                            if whole:
                                store(
                                    (float32(total) * x_scale,),
                                    int64(y_column),
                                    scales,
                                    scale_stride,
                                    bias,
                                    residual,
                                    int64(row) * residual_stride + int64(y_column),
                                    out,
                                    int64(row) * out_stride + int64(y_column),
                                )
                            else:
                                at = uint32(uint32(uint32(slot * rows) + row) * uint32(tile_n)) + column
                                partial[uint32(at)] = total
            if not whole:
                first_block = block_of(first_unit, share, extra)
                last_block = block_of(uint32(uint32(first_unit + steps) - uint32(1)), share, extra)
                flag = uint32(base + uint32(flag_at))
                barrier_sync(uint32(1), uint32(consumer_threads))
                if thread == uint32(0):
                    counter = ptx.address(counters, int64(tile))
                    # it orders what the block has written, and what it reads after the next barrier
                    came = uint32(ptx.atomic_add(counter, uint32(1)))
                    if came == uint32(last_block - first_block):
                        ptx.st_global(counter, uint32(0))  # for the next launch
                    ptx.st_shared(flag, came)
                barrier_sync(uint32(1), uint32(consumer_threads))
                if ptx.ld_shared(flag) == uint32(last_block - first_block):
                    number = thread
                    here = uint32(rows * uint32(tile_n))
                    while number < here:
                        row = uint32(number // uint32(tile_n))
                        y_column = uint32(first_column + uint32(number % uint32(tile_n)))
                        if y_column < columns:
                            merged = int32(0)
                            part = first_block
                            while part <= last_block:
                                found = cuda.local.array(MERGE_UNROLL, int32)
                                for i in range(MERGE_UNROLL):
                                    from_block = uint32(part + uint32(i))
                                    found[i] = int32(0)
                                    if from_block <= last_block:
                                        # the first block begins, or has begun before, the tile: its second slot
                                        from_slot = uint32(from_block << uint32(1))
                                        if from_block == first_block:
                                            from_slot = uint32(from_slot + uint32(1))
                                        at = uint32(uint32(from_slot * here) + number)
                                        bits = ptx.bits_from_float(ptx.ld_global_relaxed_f32(ptx.address(partial, at)))
                                        found[i] = int32(bits)
                                for i in range(MERGE_UNROLL):
                                    merged = int32(merged + found[i])
                                part = uint32(part + uint32(MERGE_UNROLL))
                            x_scale = scale_of_row(x_scales[int64(row) * x_scale_stride])
                            store(
                                (float32(merged) * x_scale,),
                                int64(y_column),
                                scales,
                                scale_stride,
                                bias,
                                residual,
                                int64(row) * residual_stride + int64(y_column),
                                out,
                                int64(row) * out_stride + int64(y_column),
                            )
                        number = uint32(number + uint32(consumer_threads))
            tile = uint32(tile + uint32(1))

    return matmul_stream_int8


def serves(x, weight, group_size, device, planned_rows):
    """Whether the kernel can take a call, and is the fastest: few rows and a large weight."""
    return (
        device.arch == "sm_90a"
        and group_size == 0
        and planned_rows <= MOST_ROWS
        and weight.size >= LEAST_BYTES
        and describes(x)
        and describes(weight)
    )


@lru_cache(maxsize=4096)
def plan(rows, columns, depth, dtype, epilogue, sm_count, shape=(1, 8), ring_bytes=RING_BYTES, on_one=1):
    """rows up to MOST_ROWS. shape: its column_tiles and consumers; on_one: blocks a multiprocessor, each with ring_bytes."""
    column_tiles, consumers = shape
    tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
    row_tiles = 1
    while FRAGMENT_ROWS * row_tiles < rows:
        row_tiles *= 2
    stage_bytes = tile_n * ROW_BYTES + row_tiles * SWIZZLE_BYTES
    stages = ring_bytes // stage_bytes
    blocks = blocks_for(*_cut(columns, depth, tile_n), sm_count * on_one)
    # in front of the ring its mbarriers, and what is lost to alignment
    shared_bytes = 2 * SWIZZLE_BYTES + stages * stage_bytes
    constants = (dtype, row_tiles, column_tiles, consumers, stages, epilogue)
    return Plan(matmul_stream_int8_kernel, constants, (blocks, 1, 1), ((consumers + 1) * ptx.WARP, 1, 1), shared_bytes)


def _cut(columns, depth, tile_n):
    """(tiles, steps) of a weight."""
    return -(-columns // tile_n), -(-depth // STEP)


def run(x, x_scales, weight, scales, bias, residual, epilogue, out, device, stream):
    """As ``int8_matmul.run_int8``, for calls that this kernel ``serves``; weight and scales apart."""
    chosen = plan(*out.shape, x.shape[1], out.dtype, epilogue, device.sm_count)
    launch_plan(chosen, x, x_scales, weight, scales, bias, residual, out, device, stream)


def launch_plan(chosen, x, x_scales, weight, scales, bias, residual, out, device, stream):
    """Launch what ``plan`` chose."""
    _, row_tiles, column_tiles, consumers, _, _ = chosen.constants
    tile_n = FRAGMENT_COLUMNS * column_tiles * consumers
    rows, depth = x.shape
    columns = weight.shape[0]
    tiles, steps = _cut(columns, depth, tile_n)
    blocks = chosen.grid[0]
    share, extra = divmod(tiles * steps, blocks)
    partial = counters = None
    if extra or share % steps:
        partial = memory.empty((2 * blocks * rows * tile_n,), np.dtype(np.int32), stream)
        counters = memory.counters(tiles, stream)
    launch(
        chosen,
        (
            tensor_map(weight, (tile_n, STEP), device=device),
            tensor_map(x, (FRAGMENT_ROWS * row_tiles, STEP), device=device),
            x_scales.pointer,
            scales.pointer,
            0 if bias is None else bias.pointer,
            0 if residual is None else residual.pointer,
            out.pointer,
            0 if partial is None else partial.pointer,
            0 if counters is None else counters.pointer,
            rows,
            columns,
            steps,
            share,
            extra,
            x_scales.strides[0],
            scales.strides[0],
            0 if residual is None else residual.strides[0],
            out.strides[0],
        ),
        device,
        stream,
    )
