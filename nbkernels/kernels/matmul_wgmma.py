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
from nbkernels.kernels.activation import silu
from nbkernels.kernels.elements import conversions, pair_conversions
from nbkernels.kernels.epilogue import activation_function
from nbkernels.kernels.int8 import floats_from_int8x2, pair_from_int8x2
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
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
GATED_ROW_BYTES = BOX  # of a box whose columns are halved, two sums an element
WARPGROUP = 128
CONSUMERS = 2
THREADS = (CONSUMERS + 1) * WARPGROUP
# registers a thread: 128 · 40 + 256 · 232 are 63 of the 64 K
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# rows of x whose tiles are taken side by side: with as many columns of w they fill the multiprocessors and share L2
BAND_ROWS = 2048
# rows of the second factor of wgmma in a tile: the more, the fewer bytes pass L2 and shared memory for a product
WIDTHS = (256, 192, 128, 64)
# what a tile costs beyond its products, in rows of the second factor
TILE_OVERHEAD = 24
# fewer rows, and fewer small tiles than a share of the multiprocessors, are better served by matmul's other kernels
LEAST_ROWS, LEAST_SHARE = 128, 4
SHARED_BYTES = 227 * 1024  # of a block, on sm_90


def stage_bytes(weight, tile_m, tile_n):
    """x's and w's tile of a stage."""
    return tile_m * X_ROW_BYTES + tile_n * STEP * (2 if weight == "dense" else 1)


def shared_bytes(weight, tile_m, tile_n, stages):
    """The ring, two boxes of y a consumer, two mbarriers a stage; up to 1023 bytes in front, since stages begin at multiples."""
    return 1024 + stages * stage_bytes(weight, tile_m, tile_n) + 2 * CONSUMERS * BOX_BYTES + 16 * stages


@cuda.jit(device=True, inline="always")
def tile_at(number, row_tiles, column_tiles, band):
    """(row tile, column tile): ``band`` row tiles walk the columns side by side, then the next."""
    which = uint32(number // uint32(column_tiles * band))
    first = uint32(which * band)
    height = min(uint32(row_tiles - first), band)
    inside = uint32(number - uint32(first * column_tiles))
    return uint32(first + uint32(inside % height)), uint32(inside // height)


@cache
def multiply_dense(dtype, blocks, b_rows):
    """multiply(a_tile, b_tile, sums, step, before, lane, words, scales): sums += a · bᵀ of a stage, in flight.

    The stage before is free then: its mbarrier, ``before``, is told. step 0: sums start from zero, and there is none before.
    """
    update = wgmma_update(str(dtype), b_rows)
    bits = descriptor_bits(16, 8 * X_ROW_BYTES, X_ROW_BYTES)
    count = b_rows // 2

    @cuda.jit(device=True, inline="always")
    def multiply(a_tile, b_tile, sums, step, before, warp, lane, words, scales):
        a_bits = uint64(descriptor_address(a_tile) + uint64(bits))
        b_bits = uint64(descriptor_address(b_tile) + uint64(bits))
        more = uint32(1) if step > uint32(0) else uint32(0)
        wgmma_fence()
        for k in range(K_STEPS):
            for block in range(blocks):
                update(
                    sums,
                    block * count,
                    uint64(a_bits + uint64(2 * k + block * 4 * X_ROW_BYTES)),
                    uint64(b_bits + uint64(2 * k)),
                    more if k == 0 else uint32(1),
                )
        wgmma_commit()
        wgmma_wait(1)
        if step > uint32(0) and lane == uint32(0):
            mbarrier_arrive(before)

    return multiply


@cache
def _multiply_int8(dtype, b_rows, groups):
    """As multiply_dense with a = 64 rows of int8, 64 bytes each under a swizzle of 64 bytes, and b from x.

    words: 8 registers for fragments of a, of the product in flight and of the next. scales: with ``groups`` those of the lane's
    two rows for both halves of the stage: (row g, g + 8 of k 0 to 31, then of k 32 to 63).
    """
    update = wgmma_update(str(dtype), b_rows, a="registers")
    bits = descriptor_bits(16, 8 * X_ROW_BYTES, X_ROW_BYTES)
    widen = pair_from_int8x2(dtype)
    pack = ptx.bf16x2_from_floats
    keep = ptx.hold(4, "r")
    loads = 4 * K_STEPS

    @cuda.jit(device=True, inline="always")
    def multiply(a_tile, b_tile, sums, step, before, warp, lane, words, scales):
        b_bits = uint64(descriptor_address(b_tile) + uint64(bits))
        more = uint32(1) if step > uint32(0) else uint32(0)
        # a fragment's lane has two neighbours in k, and the two that are 8 further, of rows g and g + 8
        g = uint32(lane >> uint32(2))
        row = uint32(uint32(warp << uint32(4)) + g)
        turned = uint32(uint32(uint32(g >> uint32(1)) & uint32(3)) << uint32(4))
        start = uint32(a_tile + uint32(row << uint32(6)) + uint32(uint32(lane & uint32(3)) << uint32(1)))
        raw = cuda.local.array(loads, uint32)
        for k in range(K_STEPS):
            for i in range(4):
                place = uint32(start + uint32(uint32(16 * k) ^ turned) + uint32(8 * (i // 2) + 8 * STEP * (i % 2)))
                raw[4 * k + i] = uint32(ptx.ld_shared_u16(place))
        for k in range(K_STEPS):
            own = 4 * (k % 2)
            for i in range(4):
                if groups:
                    first, second = floats_from_int8x2(raw[4 * k + i])
                    scale = scales[k // 2 * 2 + i % 2]
                    words[own + i] = pack(first * scale, second * scale)
                else:
                    words[own + i] = widen(raw[4 * k + i])
            keep(words, own)
            wgmma_fence()
            update(sums, 0, words, own, uint64(b_bits + uint64(2 * k)), more if k == 0 else uint32(1))
            wgmma_commit()
            wgmma_wait(1)
            keep(words, 4 - own)  # the product before has read them
            if k == 0 and step > uint32(0) and lane == uint32(0):
                mbarrier_arrive(before)

    return multiply


@cache
@cache
def _fill_dense(dtype, epilogue):
    """fill(box, sums, at, row, column, warp, lane, call): 64 × 64 sums of a warpgroup -> a box of y in shared memory.

    The box begins inside y. For what lies beyond y's edges, and is not written, the last bias and residual are read.
    """
    unpack, pack = pair_conversions(dtype)
    activate = activation_function(epilogue)
    has_bias, has_residual = epilogue.bias, epilogue.residual

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, rows, columns, _, _, bias, residual, stride = call
        quad = uint32(uint32(lane & uint32(3)) << uint32(1))
        inside = uint32(uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
        added = cuda.local.array(16, uint32)
        if has_residual:
            for j in range(8):
                for h in range(2):
                    m, n = uint32(row + inside + uint32(8 * h)), uint32(column + quad + uint32(8 * j))
                    at_most = int64(min(m, uint32(rows - uint32(1)))) * stride + int64(
                        min(n, uint32(columns - uint32(2)))
                    )
                    added[2 * j + h] = ptx.ld_global(ptx.address(residual, at_most))
        for j in range(8):
            biases = (float32(0.0), float32(0.0))
            if has_bias:
                n = min(uint32(column + quad + uint32(8 * j)), uint32(columns - uint32(2)))
                biases = unpack(ptx.ld_global_nc(ptx.address(bias, int64(n))))
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
                place = uint32(
                    box + uint32(uint32(inside + uint32(8 * h)) << uint32(7)) + chunk + uint32(quad << uint32(1))
                )
                ptx.st_shared(place, pack(first, second))

    return fill


@cache
def _fill_transposed(dtype, epilogue):
    """As _fill_dense where the sums' rows are y's columns. A lane's pair lies along y's columns after movmatrix."""
    unpack, pack = pair_conversions(dtype)
    from_storage, _ = conversions(dtype)
    activate = activation_function(epilogue)
    has_scale, has_bias, has_residual = epilogue.row_scale, epilogue.bias, epilogue.residual

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, rows, columns, scales, scale_stride, bias, residual, stride = call
        quad = uint32(uint32(lane & uint32(3)) << uint32(1))
        g = uint32(lane >> uint32(2))
        first_column = uint32(column + uint32(warp << uint32(4)))
        added = cuda.local.array(16, uint32)
        if has_residual:
            for j in range(8):
                for h in range(2):
                    m, n = uint32(row + g + uint32(8 * j)), uint32(first_column + quad + uint32(8 * h))
                    at_most = int64(min(m, uint32(rows - uint32(1)))) * stride + int64(
                        min(n, uint32(columns - uint32(2)))
                    )
                    added[2 * j + h] = ptx.ld_global(ptx.address(residual, at_most))
        for h in range(2):
            n = int64(min(uint32(first_column + g + uint32(8 * h)), uint32(columns - uint32(1))))
            scale = float32(1.0)
            added_bias = float32(0.0)
            if has_scale:
                scale = scales[n * scale_stride]
            if has_bias:
                added_bias = from_storage(bias[n])
            for j in range(8):
                first = sums[at + 4 * j + 2 * h]
                second = sums[at + 4 * j + 2 * h + 1]
                if has_scale:
                    first *= scale
                    second *= scale
                if has_bias:
                    first += added_bias
                    second += added_bias
                first = activate(first)
                second = activate(second)
                if has_residual:
                    pair = unpack(ptx.movmatrix_trans(added[2 * j + h]))
                    first += pair[0]
                    second += pair[1]
                chunk = uint32(uint32(uint32(uint32(warp << uint32(1)) + uint32(h)) ^ g) << uint32(4))
                place = uint32(box + uint32(uint32(g + uint32(8 * j)) << uint32(7)) + chunk + uint32(quad << uint32(1)))
                ptx.st_shared(place, ptx.movmatrix_trans(pack(first, second)))

    return fill


@cuda.jit(device=True, inline="always")
def gated_place(box, row, element):
    """Where an element of a gated box lies: rows of 64 bytes, their four pieces exchanged (the swizzle of 64 bytes)."""
    chunk = uint32(uint32(element >> uint32(3)) ^ uint32(uint32(row >> uint32(1)) & uint32(3)))
    inside = uint32(uint32(element & uint32(7)) << uint32(1))
    return uint32(box + uint32(row * uint32(GATED_ROW_BYTES)) + uint32(chunk << uint32(4)) + inside)


@cache
def _fill_dense_gated(dtype, epilogue):
    """As _fill_dense where two columns of sums, which a lane has, make one of y: a box of 64 × 32."""
    unpack, _ = pair_conversions(dtype)
    _, to_storage = conversions(dtype)
    has_bias = epilogue.bias

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, _, columns, _, _, bias, _, _ = call
        quad = uint32(lane & uint32(3))
        inside = uint32(uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
        for j in range(8):
            biases = (float32(0.0), float32(0.0))
            if has_bias:
                n = min(uint32(column + uint32(quad << uint32(1)) + uint32(8 * j)), uint32(columns - uint32(2)))
                biases = unpack(ptx.ld_global_nc(ptx.address(bias, int64(n))))
            for h in range(2):
                gate = sums[at + 4 * j + 2 * h]
                up = sums[at + 4 * j + 2 * h + 1]
                if has_bias:
                    gate += biases[0]
                    up += biases[1]
                place = gated_place(box, uint32(inside + uint32(8 * h)), uint32(quad + uint32(4 * j)))
                ptx.st_shared_u16(place, to_storage(float32(silu(gate) * up)))

    return fill


@cache
def _fill_transposed_gated(dtype, epilogue):
    """As _fill_transposed where two rows of sums, which neighbouring lanes have, make one column of y: a box of 64 × 32.

    The lane of the gate finishes the first of their two rows of y, that of the up the second; nothing is left to turn.
    """
    from_storage, to_storage = conversions(dtype)
    has_scale, has_bias = epilogue.row_scale, epilogue.bias

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, warp, lane, call):
        _, _, columns, scales, scale_stride, bias, _, _ = call
        g = uint32(lane >> uint32(2))
        which = uint32(g & uint32(1))
        is_up = which == uint32(1)
        first_column = uint32(column + uint32(warp << uint32(4)))
        own_row = uint32(uint32(uint32(lane & uint32(3)) << uint32(1)) + which)
        for h in range(2):
            n = int64(min(uint32(first_column + g + uint32(8 * h)), uint32(columns - uint32(1))))
            scale = float32(1.0)
            added_bias = float32(0.0)
            if has_scale:
                scale = scales[n * scale_stride]
            if has_bias:
                added_bias = from_storage(bias[n])
            element = uint32(uint32(warp << uint32(3)) + uint32(4 * h) + uint32(g >> uint32(1)))
            for j in range(8):
                first = sums[at + 4 * j + 2 * h]
                second = sums[at + 4 * j + 2 * h + 1]
                if has_scale:
                    first *= scale
                    second *= scale
                if has_bias:
                    first += added_bias
                    second += added_bias
                other = ptx.shfl_bfly(first if is_up else second, uint32(4))
                gate = other if is_up else first
                up = second if is_up else other
                place = gated_place(box, uint32(own_row + uint32(8 * j)), element)
                ptx.st_shared_u16(place, to_storage(float32(silu(gate) * up)))

    return fill


def matmul_wgmma_kernel(dtype, weight, group_size, tile_m, tile_n, stages, ping_pong, epilogue):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, a scale group_size, a multiple of 32).

    tile_m × tile_n: a tile of y, of a block; with ping_pong of a warpgroup: then one multiplies while the other stores. grid: any
    number of blocks. Columns are even in number, and pairs of them 4-byte aligned in bias and residual.
    """
    dense, groups = weight == "dense", weight == "groups"
    assert dense or str(dtype) == "bfloat16" or not groups
    # the two factors of wgmma: b is 16-bit x where the weight is turned into 16-bit floats in registers
    a_rows, b_rows = (tile_m, tile_n) if dense else (tile_n, tile_m)
    a_row_bytes = X_ROW_BYTES if dense else STEP
    a_bytes, b_bytes = a_rows * a_row_bytes, b_rows * X_ROW_BYTES
    both = a_bytes + b_bytes
    own_rows = a_rows if ping_pong else a_rows // CONSUMERS  # of a, a consumer's
    blocks = own_rows // 64
    count = b_rows // 2
    values = blocks * count
    parts = b_rows // BOX
    teams = 1 if ping_pong else CONSUMERS  # consumers of a stage
    assert blocks == 1 or dense
    multiply = multiply_dense(dtype, blocks, b_rows) if dense else _multiply_int8(dtype, b_rows, groups)
    gated = epilogue.gated
    if gated:
        fill = (_fill_dense_gated if dense else _fill_transposed_gated)(dtype, epilogue)
    else:
        fill = (_fill_dense if dense else _fill_transposed)(dtype, epilogue)
    keep = ptx.hold(values)
    free = 8 * stages
    store_barrier, turn_barrier = 1, 1 + CONSUMERS

    @cuda.jit(device=True, inline="always")
    def load_scales(scales, own, k, depth, into):
        """The scales of the lane's two rows, which begin at ``own``, for both halves of the stage at k."""
        for half in range(2):
            group = uint32(min(uint32(k + uint32(STEP // 2 * half)), uint32(depth - uint32(1))) // uint32(group_size))
            for h in range(2):
                into[2 * half + h] = scales[own[h] + int64(group)]

    def boxes_from(number):
        """Code that stores a consumer's boxes from ``number`` on. One function each: a loop as long as this is not unrolled."""
        if number == blocks * parts:

            @cuda.jit(device=True, inline="always")
            def store(sums, boxes, corner, team, call):
                pass

            return store
        part, block = number // blocks, number % blocks
        others = boxes_from(number + 1)

        @cuda.jit(device=True, inline="always")
        def store(sums, boxes, corner, team, call):
            """boxes: (the one to fill, the other's distance); corner: the warpgroup's first row and column in y."""
            box = uint32(boxes[0] + boxes[1]) if number % 2 else boxes[0]
            group, warp, lane, leader = team
            row = uint32(corner[0] + uint32(BOX * (block if dense else part)))
            column = uint32(corner[1] + uint32(BOX * (part if dense else block)))
            inside = (
                row < call[1] and column < call[2]
            )  # the others' residual is not read: it may be out, and being written
            if inside:
                fill(box, sums, block * count + 32 * part, row, column, warp, lane, call)
                fence_proxy_async()
            if leader:
                bulk_wait_read(0)  # the other box is free again, for those behind the barrier
            barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))
            if leader and inside:
                out_column = uint32(column >> uint32(1)) if gated else column
                tensor_store_2d(call[0], out_column, row, box)
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
                    row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, band)
                    row = uint32(row_tile * uint32(tile_m))
                    column = uint32(column_tile * uint32(tile_n))
                    k = uint32(0)
                    while k < depth:
                        barrier = uint32(full + uint32(stage << uint32(3)))
                        mbarrier_wait(uint32(barrier + uint32(free)), uint32(parity ^ uint32(1)))
                        mbarrier_expect(barrier, uint32(both))
                        to = uint32(ring + uint32(stage * uint32(both)))
                        x_to = to if dense else uint32(to + uint32(a_bytes))
                        weight_to = uint32(to + uint32(a_bytes)) if dense else to
                        tensor_load_2d(x_to, x_at, k, row, barrier)
                        tensor_load_2d(weight_to, weight_at, k, column, barrier)
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
            words = cuda.local.array(8, uint32)
            for i in range(8):
                words[i] = uint32(0)
            step_scales = cuda.local.array(4, float32)
            next_scales = cuda.local.array(4, float32)
            own_scales = cuda.local.array(2, int64)
            warp = uint32(uint32(thread >> uint32(5)) & uint32(3))
            lane = ptx.lane_id()
            leader = uint32(thread & uint32(WARPGROUP - 1)) == uint32(0)
            own_a = uint32(0)
            if not ping_pong:
                own_a = uint32(group * uint32(own_rows))
            box = uint32(boxes + uint32(group * uint32(2 * BOX_BYTES)))
            other_box = uint32(BOX_BYTES)
            call = (
                tensor_map_address(out_map),
                rows,
                columns,
                scales,
                scale_stride,
                bias,
                residual,
                residual_stride,
            )
            if ping_pong and group == uint32(1):
                # the first consumer's turn
                barrier_arrive(uint32(turn_barrier), uint32(CONSUMERS * WARPGROUP))
                tile = uint32(tile + stride)
                stage = uint32(steps % uint32(stages))
                parity = uint32(uint32(steps // uint32(stages)) & uint32(1))
            while tile < tiles:
                row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, band)
                row = uint32(row_tile * uint32(tile_m))
                column = uint32(column_tile * uint32(tile_n))
                if ping_pong:
                    barrier_sync(uint32(uint32(turn_barrier) + group), uint32(CONSUMERS * WARPGROUP))
                if groups:
                    n = uint32(column + own_a + uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
                    for h in range(2):
                        own_scales[h] = (
                            int64(min(uint32(n + uint32(8 * h)), uint32(columns - uint32(1)))) * scale_stride
                        )
                    load_scales(scales, own_scales, uint32(0), depth, next_scales)
                keep(sums, 0)
                step = uint32(0)
                before = uint32(0)
                while step < steps:
                    barrier = uint32(full + uint32(stage << uint32(3)))
                    mbarrier_wait(barrier, parity)
                    at = uint32(ring + uint32(stage * uint32(both)))
                    if groups:
                        for i in range(4):
                            step_scales[i] = next_scales[i]
                        following = uint32(uint32(step + uint32(1)) * uint32(STEP))
                        load_scales(scales, own_scales, following, depth, next_scales)
                    multiply(
                        uint32(at + uint32(own_a * uint32(a_row_bytes))),
                        uint32(at + uint32(a_bytes)),
                        sums,
                        step,
                        before,
                        warp,
                        lane,
                        words,
                        step_scales,
                    )
                    before = uint32(barrier + uint32(free))
                    step = uint32(step + uint32(1))
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))
                if ping_pong and uint32(tile + stride) < tiles:
                    other = uint32(uint32(turn_barrier) + uint32(group ^ uint32(1)))
                    barrier_arrive(other, uint32(CONSUMERS * WARPGROUP))
                wgmma_wait(0)
                keep(sums, 0)
                if lane == uint32(0):
                    mbarrier_arrive(before)

                corner = (uint32(row + own_a), column) if dense else (row, uint32(column + own_a))
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


def tiles(rows, columns, tile_m, tile_n):
    """Tiles of y."""
    return -(-rows // tile_m) * -(-columns // tile_n)


def serves(x, weight, kind, group_size, pairs, out, device, plan_rows=None):
    """Whether the kernel can take a call, and is the fastest: enough rows and tiles. pairs: of matmul's Alignment."""
    rows, columns = max(x.shape[0], plan_rows or 0), weight.shape[0]
    return (
        device.arch == "sm_90a"
        and pairs
        and rows >= LEAST_ROWS
        and x.itemsize == 2
        and (kind != "groups" or (str(x.dtype) == "bfloat16" and group_size % (STEP // 2) == 0))
        and LEAST_SHARE * tiles(rows, columns, *_tile_shape(kind, WIDTHS[-1])) >= device.sm_count
        and max(rows, columns, x.shape[1]) < 1 << 31
        and all(map(describes, (x, weight, out)))
    )


def _tile_shape(weight, width):
    """(tile_m, tile_n): 128 rows of the first factor, ``width`` of the second."""
    return (64 * CONSUMERS, width) if weight == "dense" else (width, 64 * CONSUMERS)


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, weight, group_size, epilogue, sm_count):
    """rows, columns > 0; weight and group_size as ``matmul_wgmma_kernel``."""

    def time(width):
        """Of all turns of a multiprocessor, in products; a tile costs its own and some more: it begins and it ends."""
        turns = -(-tiles(rows, columns, *_tile_shape(weight, width)) // sm_count)
        return turns * (width + TILE_OVERHEAD)

    width = min(WIDTHS, key=time)
    tile = _tile_shape(weight, width)
    stages = 8
    while shared_bytes(weight, *tile, stages) > SHARED_BYTES:
        stages -= 1
    return plan_of(rows, columns, (dtype, weight, group_size, *tile, stages, False, epilogue), sm_count)


def plan_of(rows, columns, constants, sm_count):
    """The Plan of given constants."""
    _, weight, _, tile_m, tile_n, stages, _, _ = constants
    grid = (min(tiles(rows, columns, tile_m, tile_n), sm_count), 1, 1)
    return Plan(matmul_wgmma_kernel, constants, grid, (THREADS, 1, 1), shared_bytes(weight, tile_m, tile_n, stages))


def run(x, weight, scales, kind, group_size, bias, residual, epilogue, out, device, stream, plan_rows=None):
    """As ``matmul.multiply``, for calls that this kernel ``serves``."""
    rows, columns = x.shape[0], weight.shape[0]
    chosen = plan(max(rows, plan_rows or 0), columns, x.dtype, kind, group_size, epilogue, device.sm_count)
    if plan_rows is not None:
        chosen = plan_of(rows, columns, chosen.constants, device.sm_count)
    launch(chosen, arguments(chosen, x, weight, scales, bias, residual, out, device), device, stream)


def arguments(chosen, x, weight, scales, bias, residual, out, device, band_rows=BAND_ROWS):
    """What the kernel of a Plan is launched with."""
    _, kind, _, tile_m, tile_n, _, _, epilogue = chosen.constants
    out_box = ((BOX, BOX // 2), GATED_ROW_BYTES) if epilogue.gated else ((BOX, BOX), 128)
    return (
        tensor_map(x, (tile_m, STEP), device=device),
        tensor_map(weight, (tile_n, STEP), 128 if kind == "dense" else 64, device=device),
        tensor_map(out, *out_box, device=device),
        0 if scales is None else scales.pointer,
        0 if bias is None else bias.pointer,
        0 if residual is None else residual.pointer,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        0 if scales is None else scales.strides[0],
        0 if residual is None else residual.strides[0],
        max(band_rows // tile_m, 1),
    )
