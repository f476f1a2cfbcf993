"""Many int8 rows times an int8 weight by bulk tensor copies and wgmma (sm_90a), in exact int32 sums.

    y[m, n] = epilogue(float(sum_k x[m, k] · w[n, k]) · x_scales[m] · scales[n])
    y[m, n] = epilogue(x_scales[m] · sum_s scales[n, s] · float(sum_(k in span s) x[m, k] · w[n, k]))      with scales a group

The walk is that of ``matmul_wgmma`` with a dense weight: a row of a stage is 128 bytes, which are 128 columns here. What differs
is what follows the products. A lane needs the scales of two columns in every eight of its tile, and so do the seven lanes with
the same place in their quad; each loads an eighth of them when the tile begins, long before they are needed, and gives them away
by a shuffle:

    lane (g, q)         holds     columns 8·g + 2·q, + 1  of every 64: scales, and bias
    sums[4·j], [4·j+1]  need      columns 8·j + 2·q, + 1:              from lane (j % 8, q)

A group of columns with a scale is a multiple of a stage, and a span, whose int32 sum is turned into a float, is a stage: its
products begin from zero, and one consumer adds what it has, times scales, to its float32 sums while the other multiplies.
"""

from functools import cache, lru_cache

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.elements import conversions, pair_conversions
from nbkernels.kernels.epilogue import activation_function
from nbkernels.kernels.int8 import scale_of_row
from nbkernels.kernels.matmul_wgmma import (
    BOX,
    BOX_BYTES,
    CONSUMER_REGISTERS,
    CONSUMERS,
    K_STEPS,
    LEAST_ROWS,
    LEAST_SHARE,
    PRODUCER_REGISTERS,
    SHARED_BYTES,
    THREADS,
    WARPGROUP,
    WIDTHS,
    multiply_dense,
    shared_bytes,
    tile_at,
    tiles,
)
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
    fence_proxy_async_shared,
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

STEP = 128  # k a stage, and bytes of a row of it
# what a tile costs beyond its products, in columns of y
TILE_OVERHEAD = 48
# With tiles enough for both consumers of a multiprocessor, each takes its own and writes it under the other's products: tile_m,
# tile_n, stages; from so many tiles a multiprocessor on. On an H200 1.56 P operations a second to 1.44 for one tile at a time.
IN_TURN = (128, 128, 6)
TILES_IN_TURN = 4
WIDEST_OF_GROUPS = 128  # columns of a tile that has float32 sums beside those in int32
BAND_ROWS = 1024  # of tiles that follow one another down the rows before they go on along the columns


@cache
def _multiply_span(tile_n):
    """multiply(x_tile, w_tile, exact): the products of a stage from zero, in flight; 64 rows of x."""
    update = wgmma_update("int8", tile_n)
    bits = descriptor_bits(16, 8 * STEP, STEP)

    @cuda.jit(device=True, inline="always")
    def multiply(x_tile, w_tile, exact):
        a_bits = uint64(descriptor_address(x_tile) + uint64(bits))
        b_bits = uint64(descriptor_address(w_tile) + uint64(bits))
        wgmma_fence()
        for k in range(K_STEPS):
            update(
                exact, 0, uint64(a_bits + uint64(2 * k)), uint64(b_bits + uint64(2 * k)), uint32(1) if k else uint32(0)
            )
        wgmma_commit()

    return multiply


@cache
def _add_span(tile_n):
    """add(exact, scales, lane, sums): sums += exact · scale of the column; scales: what the lane holds of the tile's columns."""
    eights = tile_n // 8

    @cuda.jit(device=True, inline="always")
    def add(exact, scales, lane, sums):
        for j in range(eights):
            source = uint32(uint32(4 * (j % 8)) | uint32(lane & uint32(3)))
            held = 2 * (j // 8)
            scale = ptx.shfl_idx(scales[held], source), ptx.shfl_idx(scales[held + 1], source)
            for i in range(4):
                sums[4 * j + i] = ptx.fma(float32(exact[4 * j + i]), scale[i % 2], sums[4 * j + i])

    return add


@cache
def _fill(dtype, epilogue):
    """fill(box, sums, at, row, column, first, warp, lane, row_scales, scales, biases, call): sums of a warpgroup -> a box of y.

    The box, 64 rows of 128 bytes, begins inside y at (row, column), and at column ``first`` of the tile, a constant. row_scales:
    of the lane's rows; scales, biases: what the lane holds of the tile's columns. Beyond y's edges, where nothing is written, the
    last residual is read.
    """
    narrow = dtype.itemsize == 2
    eights = 128 // dtype.itemsize // 8
    box_values = 4 * eights
    unpack, pack = pair_conversions(dtype)
    activate = activation_function(epilogue)
    has_scale, has_bias, has_residual = epilogue.row_scale, epilogue.bias, epilogue.residual

    @cuda.jit(device=True, inline="always")
    def residual_pair(residual, m, n, rows, columns, stride):
        # columns are even in number
        at = int64(min(m, uint32(rows - uint32(1)))) * stride + int64(min(n, uint32(columns - uint32(2))))
        if narrow:
            return unpack(ptx.ld_global(ptx.address(residual, at)))
        return float32(residual[at]), float32(residual[at + int64(1)])

    @cuda.jit(device=True, inline="always")
    def put(box, inside, j, quad, first, second):
        """Two columns, 8·j + quad of the box, of row ``inside``, under the swizzle."""
        if narrow:
            chunk = uint32(uint32(uint32(j) ^ uint32(inside & uint32(7))) << uint32(4))
            place = uint32(box + uint32(inside << uint32(7)) + chunk + uint32(quad << uint32(1)))
            ptx.st_shared(place, pack(first, second))
        else:
            number = uint32(uint32(2 * j) + uint32(quad >> uint32(2)))
            chunk = uint32(uint32(number ^ uint32(inside & uint32(7))) << uint32(4))
            place = uint32(box + uint32(inside << uint32(7)) + chunk + uint32(uint32(quad & uint32(2)) << uint32(2)))
            ptx.st_shared_f32(place, first)
            ptx.st_shared_f32(uint32(place + uint32(4)), second)

    @cuda.jit(device=True, inline="always")
    def fill(box, sums, at, row, column, first, warp, lane, row_scales, scales, biases, call):
        _, rows, columns, residual, stride = call
        quad = uint32(uint32(lane & uint32(3)) << uint32(1))
        inside = uint32(uint32(warp << uint32(4)) + uint32(lane >> uint32(2)))
        added = cuda.local.array(box_values, float32)
        if has_residual:
            for j in range(eights):
                for h in range(2):
                    m, n = uint32(row + inside + uint32(8 * h)), uint32(column + quad + uint32(8 * j))
                    pair = residual_pair(residual, m, n, rows, columns, stride)
                    added[4 * j + 2 * h] = pair[0]
                    added[4 * j + 2 * h + 1] = pair[1]
        for j in range(eights):
            number = first // 8 + j
            source = uint32(uint32(4 * (number % 8)) | uint32(lane & uint32(3)))
            held = 2 * (number // 8)
            scale = float32(1.0), float32(1.0)
            if has_scale:
                scale = ptx.shfl_idx(scales[held], source), ptx.shfl_idx(scales[held + 1], source)
            bias = float32(0.0), float32(0.0)
            if has_bias:
                bias = ptx.shfl_idx(biases[held], source), ptx.shfl_idx(biases[held + 1], source)
            for h in range(2):
                one = float32(sums[at + 4 * j + 2 * h]) * row_scales[h]
                other = float32(sums[at + 4 * j + 2 * h + 1]) * row_scales[h]
                if has_scale:
                    one *= scale[0]
                    other *= scale[1]
                if has_bias:
                    one += bias[0]
                    other += bias[1]
                one = activate(one)
                other = activate(other)
                if has_residual:
                    one += added[4 * j + 2 * h]
                    other += added[4 * j + 2 * h + 1]
                put(box, uint32(inside + uint32(8 * h)), j, quad, one, other)

    return fill


def matmul_wgmma_int8_kernel(dtype, group_size, tile_m, tile_n, stages, ping_pong, epilogue):
    """dtype: of y, bias and residual, whose columns are even in number; pairs of 16-bit ones lie at 4-byte addresses in residual.

    group_size: 0 (a scale a row: the epilogue's) or a multiple of STEP; then a consumer has 64 rows, and at most
    WIDEST_OF_GROUPS columns.

    tile_m × tile_n: a tile of y, of a block; with ping_pong of a warpgroup: then one multiplies while the other stores. grid: any
    number of blocks.
    """
    x_bytes, weight_bytes = tile_m * STEP, tile_n * STEP
    both = x_bytes + weight_bytes
    own_rows = tile_m if ping_pong else tile_m // CONSUMERS  # of a tile, a consumer's
    assert own_rows % BOX == 0
    blocks = own_rows // BOX
    halves = 2 * blocks  # a lane's rows, 8 apart in pairs
    count = tile_n // 2
    values = blocks * count
    box_columns = 128 // dtype.itemsize
    parts = tile_n // box_columns
    teams = 1 if ping_pong else CONSUMERS  # consumers of a stage
    held = tile_n // 32  # scales, and biases, a lane holds
    held_biases = held if epilogue.bias else 1
    from_storage, _ = conversions(dtype)
    has_bias = epilogue.bias
    groups = group_size > 0
    assert not groups or (group_size % STEP == 0 and blocks == 1 and tile_n <= WIDEST_OF_GROUPS)
    sum_values = values if groups else 1
    multiply = multiply_dense("int8", blocks, tile_n)
    multiply_span, add_span = _multiply_span(tile_n), _add_span(tile_n)
    fill = _fill(dtype, epilogue)
    keep = ptx.hold(values, "r")
    free = 8 * stages
    store_barrier, turn_barrier = 1, 1 + CONSUMERS

    def boxes_from(number):
        """Code that stores a consumer's boxes from ``number`` on. One function each: a loop as long as this is not unrolled."""
        if number == blocks * parts:

            @cuda.jit(device=True, inline="always")
            def store(sums, boxes, corner, team, row_scales, scales, biases, call):
                pass

            return store
        part, block = number // blocks, number % blocks
        others = boxes_from(number + 1)

        @cuda.jit(device=True, inline="always")
        def store(sums, boxes, corner, team, row_scales, scales, biases, call):
            """boxes: (the one to fill, the other's distance); corner: the warpgroup's first row and column in y."""
            box = uint32(boxes[0] + boxes[1]) if number % 2 else boxes[0]
            group, warp, lane, leader = team
            row = uint32(corner[0] + uint32(BOX * block))
            column = uint32(corner[1] + uint32(box_columns * part))
            # the others' residual is not read: it may be out, and being written
            inside = row < call[1] and column < call[2]
            if inside:
                own = row_scales[2 * block], row_scales[2 * block + 1]
                at = block * count + box_columns // 2 * part
                fill(box, sums, at, row, column, box_columns * part, warp, lane, own, scales, biases, call)
                fence_proxy_async_shared()
            if leader:
                bulk_wait_read(0)  # the other box is free again, for those behind the barrier
            barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))
            if leader and inside:
                tensor_store_2d(call[0], column, row, box)
                bulk_commit()
            others(sums, boxes, corner, team, row_scales, scales, biases, call)

        return store

    store_boxes = boxes_from(0)

    @cuda.jit(device=True, inline="always")
    def held_column(i, column, lane, columns):
        """The column of y whose scale and bias a lane holds as number i, in a tile from ``column`` on; inside y."""
        g, q = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        inside = uint32(uint32(64 * (i // 2) + i % 2) + uint32(uint32(g << uint32(3)) + uint32(q << uint32(1))))
        return int64(min(uint32(column + inside), uint32(columns - uint32(1))))

    @kernel(launch_bounds=(THREADS, 1))  # setmaxnreg needs a known register count at entry
    def matmul_wgmma_int8(
        x_map: tensor_map_type,
        weight_map: tensor_map_type,
        out_map: tensor_map_type,
        x_scales: ptx.pointer("float32"),
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        rows: uint32,
        columns: uint32,
        depth: uint32,
        x_scale_stride: int64,
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
        number_of_tiles = uint32(row_tiles * column_tiles)
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
                while tile < number_of_tiles:
                    row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, band)
                    row = uint32(row_tile * uint32(tile_m))
                    column = uint32(column_tile * uint32(tile_n))
                    k = uint32(0)
                    while k < depth:
                        barrier = uint32(full + uint32(stage << uint32(3)))
                        mbarrier_wait(uint32(barrier + uint32(free)), uint32(parity ^ uint32(1)))
                        mbarrier_expect(barrier, uint32(both))
                        to = uint32(ring + uint32(stage * uint32(both)))
                        tensor_load_2d(to, x_at, k, row, barrier)
                        tensor_load_2d(uint32(to + uint32(x_bytes)), weight_at, k, column, barrier)
                        k = uint32(k + uint32(STEP))
                        stage = uint32(stage + uint32(1))
                        if stage == uint32(stages):
                            stage = uint32(0)
                            parity = uint32(parity ^ uint32(1))
                    tile = uint32(tile + stride)
        else:
            more_registers(CONSUMER_REGISTERS)
            exact = cuda.local.array(values, int32)
            for i in range(values):
                exact[i] = int32(0)
            sums = cuda.local.array(sum_values, float32)
            next_scales = cuda.local.array(held, float32)
            row_scales = cuda.local.array(halves, float32)
            column_scales = cuda.local.array(held, float32)
            biases = cuda.local.array(held_biases, float32)
            warp = uint32(uint32(thread >> uint32(5)) & uint32(3))
            lane = ptx.lane_id()
            leader = uint32(thread & uint32(WARPGROUP - 1)) == uint32(0)
            own_row = uint32(0)
            if not ping_pong:
                own_row = uint32(group * uint32(own_rows))
            box = uint32(boxes + uint32(group * uint32(2 * BOX_BYTES)))
            other_box = uint32(BOX_BYTES)
            call = (tensor_map_address(out_map), rows, columns, residual, residual_stride)
            if ping_pong and group == uint32(1):
                # the first consumer's turn
                barrier_arrive(uint32(turn_barrier), uint32(CONSUMERS * WARPGROUP))
                tile = uint32(tile + stride)
                stage = uint32(steps % uint32(stages))
                parity = uint32(uint32(steps // uint32(stages)) & uint32(1))
            while tile < number_of_tiles:
                row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, band)
                row = uint32(uint32(row_tile * uint32(tile_m)) + own_row)
                column = uint32(column_tile * uint32(tile_n))
                for i in range(held):
                    n = held_column(i, column, lane, columns)
                    column_scales[i] = ptx.ld_global_nc_f32(ptx.address(scales, n * scale_stride))
                    if has_bias:
                        biases[i] = from_storage(bias[n])
                for i in range(halves):
                    m = uint32(row + uint32(warp << uint32(4)) + uint32(lane >> uint32(2)) + uint32(8 * i))
                    if i > 1:
                        m = uint32(m + uint32((BOX - 16) * (i // 2)))
                    m = min(m, uint32(rows - uint32(1)))
                    row_scales[i] = ptx.ld_global_nc_f32(ptx.address(x_scales, int64(m) * x_scale_stride))
                if ping_pong:
                    barrier_sync(uint32(uint32(turn_barrier) + group), uint32(CONSUMERS * WARPGROUP))
                for i in range(sum_values):
                    sums[i] = float32(0.0)
                keep(exact, 0)
                step = uint32(0)
                before = uint32(0)
                while step < steps:
                    barrier = uint32(full + uint32(stage << uint32(3)))
                    mbarrier_wait(barrier, parity)
                    at = uint32(ring + uint32(stage * uint32(both)))
                    own = uint32(at + uint32(own_row * uint32(STEP)))
                    weight_at = uint32(at + uint32(x_bytes))
                    if groups:
                        multiply_span(own, weight_at, exact)
                        following = min(uint32(step + uint32(1)), uint32(steps - uint32(1)))
                        group_of = uint32(uint32(following * uint32(STEP)) // uint32(group_size))
                        for i in range(held):
                            n = held_column(i, column, lane, columns)
                            at_scale = ptx.address(scales, n * scale_stride + int64(group_of))
                            next_scales[i] = ptx.ld_global_nc_f32(at_scale)
                        wgmma_wait(0)
                        keep(exact, 0)
                        if lane == uint32(0):
                            mbarrier_arrive(uint32(barrier + uint32(free)))
                        add_span(exact, column_scales, lane, sums)
                        for i in range(held):
                            column_scales[i] = next_scales[i]
                    else:
                        multiply(own, weight_at, exact, step, before, warp, lane, uint32(0), uint32(0))
                    before = uint32(barrier + uint32(free))
                    step = uint32(step + uint32(1))
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))
                if ping_pong and uint32(tile + stride) < number_of_tiles:
                    other = uint32(uint32(turn_barrier) + uint32(group ^ uint32(1)))
                    barrier_arrive(other, uint32(CONSUMERS * WARPGROUP))
                if not groups:
                    wgmma_wait(0)
                    keep(exact, 0)
                    if lane == uint32(0):
                        mbarrier_arrive(before)

                for i in range(halves):
                    row_scales[i] = scale_of_row(row_scales[i])
                team = (group, warp, lane, leader)
                done = sums if groups else exact
                store_boxes(done, (box, other_box), (row, column), team, row_scales, column_scales, biases, call)
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

    return matmul_wgmma_int8


def serves(x, weight, group_size, pairs, out, device, plan_rows=None):
    """Whether the kernel can take a call, and is the fastest: enough rows and tiles. pairs: of matmul's Alignment."""
    rows, columns = max(out.shape[0], plan_rows or 0), out.shape[1]
    return (
        device.arch == "sm_90a"
        and group_size % STEP == 0
        and (pairs or out.itemsize == 4)
        and rows >= LEAST_ROWS
        and LEAST_SHARE * tiles(rows, columns, BOX * CONSUMERS, WIDTHS[-1]) >= device.sm_count
        and max(rows, columns, x.shape[1]) < 1 << 31
        and all(map(describes, (x, weight, out)))
    )


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, group_size, epilogue, sm_count):
    """rows, columns > 0; group_size as ``matmul_wgmma_int8_kernel``."""
    tile_m = BOX * CONSUMERS
    if not group_size and tiles(rows, columns, *IN_TURN[:2]) >= TILES_IN_TURN * sm_count:
        return plan_of(rows, columns, (dtype, 0, *IN_TURN, True, epilogue), sm_count)

    def time(width):
        """Of all turns of a multiprocessor, in products; a tile costs its own and some more: it begins and it ends."""
        return -(-tiles(rows, columns, tile_m, width) // sm_count) * (width + TILE_OVERHEAD)

    tile_n = min((w for w in WIDTHS if not group_size or w <= WIDEST_OF_GROUPS), key=time)
    stages = 8
    while shared_bytes("dense", tile_m, tile_n, stages) > SHARED_BYTES:
        stages -= 1
    return plan_of(rows, columns, (dtype, group_size, tile_m, tile_n, stages, False, epilogue), sm_count)


def plan_of(rows, columns, constants, sm_count):
    """The Plan of given constants."""
    _, _, tile_m, tile_n, stages, _, _ = constants
    grid = (min(tiles(rows, columns, tile_m, tile_n), sm_count), 1, 1)
    return Plan(
        matmul_wgmma_int8_kernel, constants, grid, (THREADS, 1, 1), shared_bytes("dense", tile_m, tile_n, stages)
    )


def run(x, x_scales, weight, scales, group_size, bias, residual, epilogue, out, device, stream):
    """As ``int8_matmul.run_int8``, for calls that this kernel ``serves``; weight and scales apart."""
    rows, columns = out.shape
    chosen = plan(rows, columns, out.dtype, group_size, epilogue, device.sm_count)
    launch(chosen, arguments(chosen, x, x_scales, weight, scales, bias, residual, out, device), device, stream)


def arguments(chosen, x, x_scales, weight, scales, bias, residual, out, device, band_rows=BAND_ROWS):
    """What the kernel of a Plan is launched with."""
    _, _, tile_m, tile_n, _, _, _ = chosen.constants
    return (
        tensor_map(x, (tile_m, STEP), device=device),
        tensor_map(weight, (tile_n, STEP), device=device),
        tensor_map(out, (BOX, 128 // out.itemsize), device=device),
        x_scales.pointer,
        scales.pointer,
        0 if bias is None else bias.pointer,
        0 if residual is None else residual.pointer,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x_scales.strides[0],
        scales.strides[0],
        0 if residual is None else residual.strides[0],
        max(band_rows // tile_m, 1),
    )
