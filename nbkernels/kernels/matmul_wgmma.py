"""Many rows times a dense or int8 weight by bulk tensor copies and wgmma (sm_90a), 16-bit x.

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

A block stays on its multiprocessor and takes one tile of y after another. A warpgroup of it, the producer, has the tiles of x
and w, STEP columns deep, brought into a ring of shared-memory stages, ahead of two warpgroups, the consumers, that multiply:

    producer    |load|load|load|load|  (waits for a free stage, runs ahead into the next tile of y)  |load|load|load| …
                  ↓    ↓    ↓    ↓                                                        ↑ free
    stages      [x, w][x, w][x, w][x, w]       full →      wgmma: sums += a · bᵀ,  one step always in flight
                                                             ↓ after depth / STEP steps
    consumers   sums, 16 bits  →  two boxes [64, 64] a warpgroup in shared memory  →  tensor copy to y, clipped at its edges

wgmma takes b, and a where it need not be changed, from shared memory. Both lie along k there, as in x and w.

    dense    a = 64 rows of x from shared memory, b = up to 256 rows of w
    int8     a = 64 rows of w in registers: bytes become 16-bit floats there, while the product before runs; b = rows of x.
             The sums are y's tile transposed, and turned back on the way out (movmatrix).

An int8 weight with a scale a row is exact until the epilogue, which multiplies the sums. With scales a group the weight is
multiplied by its scale in float32 and then rounded to bfloat16: at most 2^-9 of each weight, errors of either sign that average
out over a sum. float16, whose range such products may leave, has no kernel for groups here.

The scheme is CUTLASS' warp-specialised persistent one (Thakkar et al. 2023); turning int8 weights in registers into the first
factor is from its mixed-input product.
"""

from functools import cache, lru_cache

from numba import cuda, float32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.epilogue import activation_function
from nbkernels.kernels.int8 import pair_from_int8x2
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan
from nbkernels.launch.tensor_map import describes, tensor_map
from nbkernels.ptx.bulk import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    prefetch_tensor_map,
    tensor_load_2d,
    tensor_map_address,
    tensor_store_2d,
)
from nbkernels.ptx.bulk import tensor_map as tensor_map_type
from nbkernels.ptx.mbarrier import (
    barrier_arrive,
    barrier_sync,
    fence_mbarrier_init,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbkernels.ptx.wgmma import (
    descriptor_address,
    descriptor_bits,
    fewer_registers,
    more_registers,
    wgmma_commit,
    wgmma_fence,
    wgmma_update,
    wgmma_wait,
)

# k a stage: a row of 16-bit elements is as wide as the swizzle, 128 bytes
STEP = 64
X_ROW_BYTES = 2 * STEP
K_STEPS = STEP // 16  # products a stage
BOX = 64  # rows and columns of a box of y
BOX_BYTES = BOX * BOX * 2
WARPGROUP = 128
CONSUMERS = 2
THREADS = (CONSUMERS + 1) * WARPGROUP
# registers a thread: 128 · 40 + 256 · 232 are 63 of the 64 K
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# rows of x whose tiles are taken side by side: with as many columns of w they fill the multiprocessors and share L2
BAND_ROWS = 2048


def stage_bytes(weight, tile_m, tile_n):
    """x's and w's tile of a stage."""
    return tile_m * X_ROW_BYTES + tile_n * STEP * (2 if weight == "dense" else 1)


def shared_bytes(weight, tile_m, tile_n, stages):
    """The ring, two boxes of y a consumer, two mbarriers a stage; up to 1023 bytes in front, since stages begin at multiples."""
    return 1024 + stages * stage_bytes(weight, tile_m, tile_n) + 2 * CONSUMERS * BOX_BYTES + 16 * stages


@cuda.jit(device=True, inline="always")
def _tile(number, row_tiles, column_tiles, band):
    """(row tile, column tile): ``band`` row tiles walk the columns side by side, then the next."""
    which = uint32(number // uint32(column_tiles * band))
    first = uint32(which * band)
    height = min(uint32(row_tiles - first), band)
    inside = uint32(number - uint32(first * column_tiles))
    return uint32(first + uint32(inside % height)), uint32(inside // height)


@cache
def _multiply_dense(dtype, blocks, b_rows):
    """multiply(a_tile, b_tile, sums, first): sums += a · bᵀ of a stage, in flight; first: they start from zero."""
    update = wgmma_update(str(dtype), b_rows)
    bits = descriptor_bits(16, 8 * X_ROW_BYTES, X_ROW_BYTES)
    count = b_rows // 2

    @cuda.jit(device=True, inline="always")
    def multiply(a_tile, b_tile, sums, first):
        a_bits = uint64(descriptor_address(a_tile) + uint64(bits))
        b_bits = uint64(descriptor_address(b_tile) + uint64(bits))
        wgmma_fence()
        for k in range(K_STEPS):
            for block in range(blocks):
                update(
                    sums,
                    block * count,
                    uint64(a_bits + uint64(2 * k + block * 4 * X_ROW_BYTES)),
                    uint64(b_bits + uint64(2 * k)),
                    first if k == 0 else uint32(1),
                )
        wgmma_commit()

    return multiply


@cache
def _store_dense(dtype, epilogue):
    """fill(box, sums, at, row, column, warp, lane, call): 64 × 64 sums of a warpgroup -> a box of y in shared memory."""
    unpack = ptx.floats_from_bf16x2 if str(dtype) == "bfloat16" else ptx.floats_from_f16x2
    pack = ptx.bf16x2_from_floats if str(dtype) == "bfloat16" else ptx.f16x2_from_floats
    activate = activation_function(epilogue)
    has_bias, has_residual = epilogue.bias, epilogue.residual

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, rows, columns, bias, residual, stride = call
        quad = uint32(uint32(lane & uint32(3)) << uint32(1))
        inside = uint32(uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
        added = cuda.local.array(16, uint32)
        if has_residual:
            for j in range(8):
                for h in range(2):
                    m = uint32(row + inside + uint32(8 * h))
                    n = uint32(column + quad + uint32(8 * j))
                    added[2 * j + h] = uint32(0)
                    if m < rows and n < columns:
                        added[2 * j + h] = ptx.ld_global(ptx.address(residual, int64(m) * stride + int64(n)))
        for j in range(8):
            biases = (float32(0.0), float32(0.0))
            if has_bias:
                n = uint32(column + quad + uint32(8 * j))
                word = uint32(0)
                if n < columns:
                    word = ptx.ld_global_nc(ptx.address(bias, int64(n)))
                biases = unpack(word)
            for h in range(2):
                first = sums[at + 4 * j + 2 * h]
                second = sums[at + 4 * j + 2 * h + 1]
                if has_bias:
                    first += biases[0]
                    second += biases[1]
                first = activate(first)
                second = activate(second)
                if has_residual:
                    pair = unpack(added[2 * j + h])
                    first += pair[0]
                    second += pair[1]
                chunk = uint32(uint32(uint32(j) ^ uint32(inside & uint32(7))) << uint32(4))
                place = uint32(box + uint32(uint32(inside + uint32(8 * h)) << uint32(7)) + chunk + uint32(quad << 1))
                ptx.st_shared(place, pack(first, second))

    return fill


def matmul_wgmma_kernel(dtype, weight, group_size, tile_m, tile_n, stages, ping_pong, epilogue):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, a scale group_size, a multiple of 32).

    tile_m × tile_n: a tile of y, of a block; with ping_pong of a warpgroup: then one multiplies while the other stores. grid: any
    number of blocks. Columns are even in number, and pairs of them 4-byte aligned in bias and residual.
    """
    assert weight == "dense"
    a_rows, b_rows = tile_m, tile_n
    a_bytes = a_rows * X_ROW_BYTES
    b_bytes = b_rows * X_ROW_BYTES
    a_row_bytes = X_ROW_BYTES
    both = a_bytes + b_bytes
    own_rows = a_rows if ping_pong else a_rows // CONSUMERS  # of a, a consumer's
    blocks = own_rows // 64
    count = b_rows // 2
    values = blocks * count
    parts = b_rows // BOX
    teams = 1 if ping_pong else CONSUMERS  # consumers of a stage
    multiply = _multiply_dense(dtype, blocks, b_rows)
    fill = _store_dense(dtype, epilogue)
    keep = ptx.hold(values)
    free = 8 * stages
    store_barrier, turn_barrier = 1, 1 + CONSUMERS

    def boxes_from(number):
        """Code that stores a consumer's boxes from ``number`` on. One function each: a loop as long as this is not unrolled."""
        if number == blocks * parts:

            @cuda.jit(device=True, inline="always")
            def store(sums, boxes, corner, team, call):
                pass

            return store
        block, part = number // parts, number % parts
        others = boxes_from(number + 1)

        @cuda.jit(device=True, inline="always")
        def store(sums, boxes, corner, team, call):
            """boxes: (the one to fill, the other's distance); corner: the warpgroup's first row and column in y."""
            box = uint32(boxes[0] + boxes[1]) if number % 2 else boxes[0]
            group, warp, lane, leader = team
            row = uint32(corner[0] + uint32(64 * block))
            column = uint32(corner[1] + uint32(BOX * part))
            fill(box, sums, block * count + 32 * part, row, column, warp, lane, call)
            fence_proxy_async()
            if leader:
                bulk_wait_read(0)  # the other box is free again, for those behind the barrier
            barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))
            if leader:
                tensor_store_2d(call[0], column, row, box)
                bulk_commit()
            others(sums, boxes, corner, team, call)

        return store

    store_boxes = boxes_from(0)

    @kernel(launch_bounds=(THREADS, 1))  # setmaxnreg needs a known register count at entry
    def matmul_wgmma(
        x_map: tensor_map_type,
        weight_map: tensor_map_type,
        out_map: tensor_map_type,
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        rows: uint32,
        columns: uint32,
        depth: uint32,
        scale_stride: int64,
        residual_stride: int64,
        band: uint32,
    ):
        thread = uint32(cuda.threadIdx.x)
        # the warpgroup's number, in a form in which the compiler sees that a warp shares it
        group = ptx.shfl_idx_u32(uint32(thread // uint32(WARPGROUP)), uint32(0))
        ring = uint32(uint32(ptx.shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00))
        boxes = uint32(ring + uint32(stages * both))
        full = uint32(boxes + uint32(2 * CONSUMERS * BOX_BYTES))
        if thread == uint32(0):
            for s in range(stages):
                mbarrier_init(uint32(full + uint32(8 * s)), uint32(1))
                mbarrier_init(uint32(full + uint32(free + 8 * s)), uint32(4 * teams))
            fence_mbarrier_init()
        cuda.syncthreads()
        steps = uint32(uint32(depth + uint32(STEP - 1)) // uint32(STEP))
        row_tiles = uint32(uint32(rows + uint32(tile_m - 1)) // uint32(tile_m))
        column_tiles = uint32(uint32(columns + uint32(tile_n - 1)) // uint32(tile_n))
        tiles = uint32(row_tiles * column_tiles)
        stride = uint32(cuda.gridDim.x)
        tile = uint32(cuda.blockIdx.x)
        stage = uint32(0)
        parity = uint32(0)

        if group == uint32(CONSUMERS):
            fewer_registers(PRODUCER_REGISTERS)
            if thread == uint32(CONSUMERS * WARPGROUP):
                x_at, weight_at = tensor_map_address(x_map), tensor_map_address(weight_map)
                prefetch_tensor_map(x_at)
                prefetch_tensor_map(weight_at)
                prefetch_tensor_map(tensor_map_address(out_map))
                while tile < tiles:
                    row_tile, column_tile = _tile(tile, row_tiles, column_tiles, band)
                    row = uint32(row_tile * uint32(tile_m))
                    column = uint32(column_tile * uint32(tile_n))
                    k = uint32(0)
                    while k < depth:
                        barrier = uint32(full + uint32(stage << uint32(3)))
                        mbarrier_wait(uint32(barrier + uint32(free)), uint32(parity ^ uint32(1)))
                        mbarrier_expect(barrier, uint32(both))
                        to = uint32(ring + uint32(stage * uint32(both)))
                        tensor_load_2d(to, x_at, k, row, barrier)
                        tensor_load_2d(uint32(to + uint32(a_bytes)), weight_at, k, column, barrier)
                        k = uint32(k + uint32(STEP))
                        stage = uint32(stage + uint32(1))
                        if stage == uint32(stages):
                            stage = uint32(0)
                            parity = uint32(parity ^ uint32(1))
                    tile = uint32(tile + stride)
        else:
            more_registers(CONSUMER_REGISTERS)
            sums = cuda.local.array(values, float32)
            for i in range(values):
                sums[i] = float32(0.0)
            warp = uint32(uint32(thread >> uint32(5)) & uint32(3))
            lane = ptx.lane_id()
            leader = uint32(thread & uint32(WARPGROUP - 1)) == uint32(0)
            own_a = uint32(0)
            if not ping_pong:
                own_a = uint32(group * uint32(own_rows))
            box = uint32(boxes + uint32(group * uint32(2 * BOX_BYTES)))
            other_box = uint32(BOX_BYTES)
            call = (tensor_map_address(out_map), rows, columns, bias, residual, residual_stride)
            if ping_pong:
                if group == uint32(1):
                    # the first consumer's turn
                    barrier_arrive(uint32(turn_barrier), uint32(CONSUMERS * WARPGROUP))
                    tile = uint32(tile + stride)
                    stage = uint32(steps % uint32(stages))
                    parity = uint32(uint32(steps // uint32(stages)) & uint32(1))
            while tile < tiles:
                row_tile, column_tile = _tile(tile, row_tiles, column_tiles, band)
                row = uint32(row_tile * uint32(tile_m))
                column = uint32(column_tile * uint32(tile_n))
                if ping_pong:
                    barrier_sync(uint32(uint32(turn_barrier) + group), uint32(CONSUMERS * WARPGROUP))
                keep(sums, 0)
                step = uint32(0)
                before = uint32(0)
                while step < steps:
                    barrier = uint32(full + uint32(stage << uint32(3)))
                    mbarrier_wait(barrier, parity)
                    at = uint32(ring + uint32(stage * uint32(both)))
                    multiply(
                        uint32(at + uint32(own_a * uint32(a_row_bytes))),
                        uint32(at + uint32(a_bytes)),
                        sums,
                        uint32(1) if step > uint32(0) else uint32(0),
                    )
                    wgmma_wait(1)
                    if step > uint32(0) and lane == uint32(0):
                        mbarrier_arrive(before)
                    before = uint32(barrier + uint32(free))
                    step = uint32(step + uint32(1))
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))
                if ping_pong:
                    if uint32(tile + stride) < tiles:  # the other one's turn
                        barrier_arrive(
                            uint32(uint32(turn_barrier) + uint32(group ^ uint32(1))), uint32(CONSUMERS * WARPGROUP)
                        )
                wgmma_wait(0)
                keep(sums, 0)
                if lane == uint32(0):
                    mbarrier_arrive(before)

                corner = (uint32(row + own_a), column)
                store_boxes(sums, (box, other_box), corner, (group, warp, lane, leader), call)
                if blocks * parts % 2:
                    box = uint32(box + other_box)
                    other_box = uint32(uint32(0) - other_box)
                tile = uint32(tile + stride)
                if ping_pong:
                    tile = uint32(tile + stride)
                    passed = uint32(stage + steps)
                    stage = uint32(passed % uint32(stages))
                    parity = uint32(parity ^ uint32(uint32(passed // uint32(stages)) & uint32(1)))
            if leader:
                bulk_wait(0)

    return matmul_wgmma


def fits(x, weight, bias, residual, out, kind, pairs):
    """Whether tensor maps describe a call's arrays, which matmul's Alignment says to hold ``pairs``."""
    return (
        pairs
        and kind == "dense"
        and x.itemsize == 2
        and all(map(describes, (x, weight, out)))
        and max(x.shape[0], weight.shape[0], x.shape[1]) < 1 << 31
    )


def tiles(rows, columns, tile_m, tile_n):
    """Tiles of y."""
    return -(-rows // tile_m) * -(-columns // tile_n)


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, weight, group_size, epilogue, sm_count):
    """rows, columns > 0; weight and group_size as ``matmul_wgmma_kernel``."""
    return plan_of(rows, columns, (dtype, weight, group_size, 128, 256, 4, False, epilogue), sm_count)


def plan_of(rows, columns, constants, sm_count):
    """The Plan of given constants."""
    _, weight, _, tile_m, tile_n, stages, _, _ = constants
    grid = (min(tiles(rows, columns, tile_m, tile_n), sm_count), 1, 1)
    return Plan(
        matmul_wgmma_kernel, constants, grid, (THREADS, 1, 1), shared_bytes(weight, tile_m, tile_n, stages)
    )


def arguments(chosen, x, weight, scales, bias, residual, out, device):
    """What the kernel of a Plan is launched with."""
    _, kind, _, tile_m, tile_n, _, _, _ = chosen.constants
    return (
        tensor_map(x, (tile_m, STEP), device=device),
        tensor_map(weight, (tile_n, STEP), 128 if kind == "dense" else 64, device=device),
        tensor_map(out, (BOX, BOX), device=device),
        0 if scales is None else scales.pointer,
        0 if bias is None else bias.pointer,
        0 if residual is None else residual.pointer,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        0 if scales is None else scales.strides[0],
        0 if residual is None else residual.strides[0],
        max(BAND_ROWS // tile_m, 1),
    )
