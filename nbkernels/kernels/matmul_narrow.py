"""Few rows times a dense or int8 weight: the memory's work, 16-bit x on the tensor cores (mma.sync, sm_80 and later).

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

The weight is the product's left side, 16 of its rows (y's columns) a fragment; eight rows of x are its narrow right side. A warp
streams its rows of the weight straight from memory into fragments, without shared memory, since the product does not
care in which order k is summed: lane q of a quad takes eight consecutive k of each CHUNK of 32, of the weight and of x alike,
and calls them columns 2q, 2q + 1, 2q + 8, 2q + 9 of two fragments.

    weight row   |q0 q0 q0 q0 q0 q0 q0 q0|q1 ...............|q2 ...............|q3 ...............|  one CHUNK
    fragments    |a0 a0 a2 a2|a0 a0 a2 a2|                     first product | second product

The warps of a block share its columns and take turns along k, each with several CHUNKs on their way at once; their sums meet in
shared memory and are added in the order of the warps. int8 weights become 16-bit floats in registers, exactly; with a scale a
group of columns the group's products are summed from zero and then added times the scale, in float32.

How k is cut depends on the weight alone: a row of y has the same bits whatever stands in the other rows, and however many.
"""

from functools import lru_cache

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.epilogue import finish
from nbkernels.kernels.int8 import pairs_from_int8x4
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan

# k a quad takes at once: two m16n8k16 products
CHUNK = 32
LANE_WIDTH = 8
FRAGMENT_COLUMNS = 16
FRAGMENT_ROWS = 8
# CHUNKs a warp loads before it multiplies the first: 64 bytes a lane in flight for 16 columns
DENSE_CHUNKS = 2
INT8_CHUNKS = 4
# float32 between the rows of partial sums in shared memory, beyond the columns: with it a quad's writes meet no bank twice
PAD = 4
# More warps a block would leave some multiprocessors with one block of two.
MOST_WARPS = 12
# From this many columns on the blocks fill any GPU, and fewer warps with more to do each are better.
MANY_COLUMNS = 8192
MOST_WARPS_OF_MANY_COLUMNS = 8


def unit(weight):
    """k a warp takes at a turn: "dense", "rows" or "groups" (``matmul_narrow_kernel``) -> columns."""
    return CHUNK * (DENSE_CHUNKS if weight == "dense" else INT8_CHUNKS)


def matmul_narrow_kernel(dtype, weight, group_size, row_tiles, column_tiles, warps, epilogue):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, scale a group_size, a multiple of CHUNK).

    row_tiles, column_tiles: fragments of 8 rows of x and 16 columns of y a block. Rows of x and the weight begin at addresses
    divisible by 16 (int8: 8), and depth is a multiple of 8.
    """
    dense, groups = weight == "dense", weight == "groups"
    mma = ptx.mma_m16n8k16_bf16 if str(dtype) == "bfloat16" else ptx.mma_m16n8k16_f16
    widen = pairs_from_int8x4(dtype)
    load_weight = ptx.ld_global_stream_v4 if dense else ptx.ld_global_stream_v2
    chunks = DENSE_CHUNKS if dense else INT8_CHUNKS
    columns_a_turn = unit(weight)
    # consecutive CHUNKs of a turn that are sure to have one scale
    chunks_a_scale = 4 if not groups else (4 if group_size % 128 == 0 else 2 if group_size % 64 == 0 else 1)
    weight_rows = 2 * column_tiles  # a lane's, of each fragment row l / 4 and that + 8
    raw_words = 4 if dense else 2
    weight_words = chunks * weight_rows * raw_words
    x_words = chunks * row_tiles * 4
    scale_count = (chunks // chunks_a_scale if groups else 1) * weight_rows
    values = 4 * row_tiles * column_tiles
    block_rows, block_columns = FRAGMENT_ROWS * row_tiles, FRAGMENT_COLUMNS * column_tiles
    pitch = block_columns + PAD
    threads = warps * ptx.WARP
    store = finish(dtype, epilogue)
    gated = epilogue.gated
    element_columns = 2 if gated else 1  # of an element of y
    out_columns = block_columns // element_columns
    outputs = block_rows * out_columns

    @cuda.jit(device=True, inline="always")
    def turn(x, x_starts, weight, weight_starts, scales, scale_starts, k, depth, lane_k, sums):
        """sums += the products of columns k to k + columns_a_turn."""
        w = cuda.local.array(weight_words, uint32)
        b = cuda.local.array(x_words, uint32)
        scale = cuda.local.array(scale_count, float32)
        for chunk in range(chunks):
            start = uint32(k + uint32(chunk * CHUNK))
            # columns that are there in place of those that are not, and zeros made of them later: no branch between the loads
            at = uint32(start + lane_k)
            at = at if at < depth else uint32(0)
            for i in range(weight_rows):
                words = load_weight(ptx.address(weight, weight_starts[i] + int64(at)))
                for j in range(raw_words):
                    w[(chunk * weight_rows + i) * raw_words + j] = words[j]
            for i in range(row_tiles):
                words = ptx.ld_global_v4(ptx.address(x, x_starts[i] + int64(at)))
                for j in range(4):
                    b[(chunk * row_tiles + i) * 4 + j] = words[j]
            if groups and chunk % chunks_a_scale == 0:
                # the same for all lanes of a row, also for one whose own columns end sooner
                group = int64(uint32((start if start < depth else uint32(0)) // uint32(group_size)))
                for i in range(weight_rows):
                    scale[chunk // chunks_a_scale * weight_rows + i] = scales[scale_starts[i] + group]
        # a barrier of the warp, for the assembler: it would move loads behind products to save registers
        ptx.warp_sync()
        for chunk in range(chunks):
            inside = uint32(k + uint32(chunk * CHUNK) + lane_k) < depth
            for i in range(row_tiles * 4):
                b[chunk * row_tiles * 4 + i] = b[chunk * row_tiles * 4 + i] if inside else uint32(0)
            if dense:  # infinity times zero is NaN; int8 knows no infinity
                for i in range(weight_rows * raw_words):
                    at_word = chunk * weight_rows * raw_words + i
                    w[at_word] = w[at_word] if inside else uint32(0)

        for c in range(column_tiles):
            for t in range(row_tiles):
                v = 4 * (c * row_tiles + t)
                part = (sums[v], sums[v + 1], sums[v + 2], sums[v + 3])
                if groups:
                    part = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
                for chunk in range(chunks):
                    upper = (chunk * weight_rows + 2 * c) * raw_words
                    lower = upper + raw_words
                    right = (chunk * row_tiles + t) * 4
                    for half in range(2):
                        if dense:
                            first = (w[upper + 2 * half], w[upper + 2 * half + 1])
                            second = (w[lower + 2 * half], w[lower + 2 * half + 1])
                        else:
                            first = widen(w[upper + half])
                            second = widen(w[lower + half])
                        part = mma(
                            first[0],
                            second[0],
                            first[1],
                            second[1],
                            b[right + 2 * half],
                            b[right + 2 * half + 1],
                            part[0],
                            part[1],
                            part[2],
                            part[3],
                        )
                    if groups and chunk % chunks_a_scale == chunks_a_scale - 1:
                        s = chunk // chunks_a_scale * weight_rows + 2 * c
                        sums[v] = ptx.fma(part[0], scale[s], sums[v])
                        sums[v + 1] = ptx.fma(part[1], scale[s], sums[v + 1])
                        sums[v + 2] = ptx.fma(part[2], scale[s + 1], sums[v + 2])
                        sums[v + 3] = ptx.fma(part[3], scale[s + 1], sums[v + 3])
                        part = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
                if not groups:
                    for j in range(4):
                        sums[v + j] = part[j]

    @kernel(launch_bounds=(threads, 1))
    def matmul_narrow(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(dtype if dense else "int8"),
        scales: ptx.pointer("float32"),
        bias: ptx.pointer(dtype),
        residual: ptx.pointer(dtype),
        out: ptx.pointer(dtype),
        rows: int64,
        columns: int64,
        depth: uint32,
        x_stride: int64,
        weight_stride: int64,
        scale_stride: int64,
        residual_stride: int64,
        out_stride: int64,
    ):
        partial = cuda.shared.array(0, float32)  # [warps, block_rows, pitch]
        x_starts = cuda.local.array(row_tiles, int64)
        weight_starts = cuda.local.array(weight_rows, int64)
        scale_starts = cuda.local.array(weight_rows, int64)
        sums = cuda.local.array(values, float32)
        for i in range(values):
            sums[i] = float32(0.0)
        thread = uint32(cuda.threadIdx.x)
        lane = ptx.lane_id()
        warp = uint32(thread >> uint32(5))
        lane_row = int64(uint32(lane >> uint32(2)))
        lane_k = uint32(uint32(lane & uint32(3)) * uint32(LANE_WIDTH))
        # the row tiles of a column block are neighbours: they share the weight in L2
        row_blocks = (rows + int64(block_rows - 1)) // int64(block_rows)
        block = int64(cuda.blockIdx.x)
        first_row = block % row_blocks * int64(block_rows)
        first_column = block // row_blocks * int64(block_columns)

        # rows beyond the last are read as the last: their products go nowhere
        for i in range(row_tiles):
            row = min(first_row + int64(FRAGMENT_ROWS * i) + lane_row, rows - int64(1))
            x_starts[i] = row * x_stride
        for i in range(weight_rows):
            column = min(first_column + int64(8 * i) + lane_row, columns - int64(1))
            weight_starts[i] = column * weight_stride
            scale_starts[i] = column * scale_stride

        k = uint32(warp * uint32(columns_a_turn))
        while k < depth:
            turn(x, x_starts, weight, weight_starts, scales, scale_starts, k, depth, lane_k, sums)
            k = uint32(k + uint32(warps * columns_a_turn))

        for c in range(column_tiles):
            for t in range(row_tiles):
                for j in range(4):
                    row = uint32(uint32(8 * t + j % 2) + uint32(uint32(lane & uint32(3)) << uint32(1)))
                    column = uint32(uint32(16 * c + 8 * (j // 2)) + uint32(lane >> uint32(2)))
                    at = uint32(uint32(uint32(warp * uint32(block_rows)) + row) * uint32(pitch) + column)
                    partial[at] = sums[4 * (c * row_tiles + t) + j]
        cuda.syncthreads()

        number = thread
        while number < uint32(outputs):
            row = uint32(number // uint32(out_columns))
            column = uint32(number % uint32(out_columns))
            if gated:
                column = uint32(column << uint32(1))
            y_row = first_row + int64(row)
            y_column = first_column + int64(column)
            if gated and y_row < rows and y_column < columns:
                gate = float32(0.0)
                up = float32(0.0)
                for i in range(warps):
                    at = uint32(uint32(uint32(i * block_rows) + row) * uint32(pitch) + column)
                    gate += partial[at]
                    up += partial[uint32(at + uint32(1))]
                store(
                    (gate, up),
                    y_column,
                    scales,
                    scale_stride,
                    bias,
                    residual,
                    int64(0),
                    out,
                    y_row * out_stride + (y_column >> int64(1)),
                )
            if not gated and y_row < rows and y_column < columns:
                total = float32(0.0)
                for i in range(warps):
                    total += partial[uint32(uint32(uint32(i * block_rows) + row) * uint32(pitch) + column)]
                store(
                    (total,),
                    y_column,
                    scales,
                    scale_stride,
                    bias,
                    residual,
                    y_row * residual_stride + y_column,
                    out,
                    y_row * out_stride + y_column,
                )
            number = uint32(number + uint32(threads))

    return matmul_narrow


def _warps(columns, depth, weight):
    """Warps that share a block's columns along k."""
    turns = -(-depth // unit(weight))
    if columns >= MANY_COLUMNS:
        return max(1, min(MOST_WARPS_OF_MANY_COLUMNS, turns // 4))
    # as many turns each: the last round has no idle warps
    return -(-turns // -(-turns // MOST_WARPS))


@lru_cache(maxsize=4096)
def plan(rows, columns, depth, dtype, weight, group_size, epilogue):
    """rows, columns, depth > 0; weight and group_size (0 where there is none) as ``matmul_narrow_kernel``."""
    row_tiles = 1 if rows <= FRAGMENT_ROWS else 2
    # two fragments of columns read x half as often; one gives more blocks
    column_tiles = 2 if columns >= MANY_COLUMNS else 1
    warps = _warps(columns, depth, weight)
    blocks = -(-rows // (FRAGMENT_ROWS * row_tiles)) * -(-columns // (FRAGMENT_COLUMNS * column_tiles))
    shared_bytes = 4 * warps * FRAGMENT_ROWS * row_tiles * (FRAGMENT_COLUMNS * column_tiles + PAD)
    constants = (dtype, weight, group_size, row_tiles, column_tiles, warps, epilogue)
    return Plan(matmul_narrow_kernel, constants, (blocks, 1, 1), (warps * ptx.WARP, 1, 1), shared_bytes)
