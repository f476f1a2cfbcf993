"""Few rows times a dense or int8 weight by multiply-add: float32, and whatever fits no fragments of the tensor cores.

    y[m, n] = epilogue(sum_k x[m, k] · w[n, k])

A warp owns one or two columns of y and up to eight rows; its lanes lie along k, ``width`` elements each, and meet in a shuffle
reduction:

    weight row n    |l0 ....|l1 ....| ... |l31 ....|l0 ....|l1 ....| ...
    x rows          |l0 ....|l1 ....| ...               from L1: all warps of the block read the same

Each element of y is summed in the same order whatever the other rows are, and however many.
"""

from functools import cache, lru_cache

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import access
from nbkernels.kernels.epilogue import finish
from nbkernels.kernels.int8 import floats_from_int8x4
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan

WIDTH = 4  # elements a lane takes at once where alignment allows: 16 bytes of float32, 4 of int8
WARPS = 4
THREADS = WARPS * ptx.WARP
MOST_ROWS = 8
# Below this many columns a warp takes one, so that there are more warps.
MANY_COLUMNS = 4096


@cache
def weight_access(dtype, weight, group_size, width):
    """load(weight, index, scales, scale_index, column) -> ``width`` consecutive weights as float32.

    weight: "dense", "rows" or "groups"; in groups each is times its scale, scales[scale_index + column // group_size].
    """
    if weight == "dense":
        dense_load, _ = access(dtype, width)

        @cuda.jit(device=True, inline="always")
        def load(weight, index, scales, scale_index, column):
            return dense_load(weight, index)

        return load

    if width == 1:

        @cuda.jit(device=True, inline="always")
        def values(weight, index):
            return (float32(weight[index]),)

    else:

        @cuda.jit(device=True, inline="always")
        def values(weight, index):
            return floats_from_int8x4(ptx.ld_global_nc(ptx.address(weight, index)))

    if weight == "rows":

        @cuda.jit(device=True, inline="always")
        def load(weight, index, scales, scale_index, column):
            return values(weight, index)

    elif width == 1:

        @cuda.jit(device=True, inline="always")
        def load(weight, index, scales, scale_index, column):
            return (values(weight, index)[0] * scales[scale_index + int64(uint32(column // uint32(group_size)))],)

    else:

        @cuda.jit(device=True, inline="always")
        def load(weight, index, scales, scale_index, column):
            four = values(weight, index)
            scale = scales[scale_index + int64(uint32(column // uint32(group_size)))]
            return (four[0] * scale, four[1] * scale, four[2] * scale, four[3] * scale)

    return load


def matmul_lanes_kernel(dtype, weight, group_size, width, row_count, column_count, epilogue):
    """weight: "dense", "rows" (int8, a scale a row: the epilogue's) or "groups" (int8, a scale any group_size).

    width: WIDTH where dtype is float32, rows of x and the weight begin at addresses divisible by that many elements, and
    depth and group_size are multiples of it; else 1. column_count: even where the epilogue is gated.
    """
    load_x, _ = access(dtype, width, True)
    load_weight = weight_access(dtype, weight, group_size, width)
    weight_dtype = dtype if weight == "dense" else "int8"
    values = row_count * column_count
    step = ptx.WARP * width
    store = finish(dtype, epilogue)
    gated = epilogue.gated
    pairs = column_count // 2

    @kernel(launch_bounds=THREADS)
    def matmul_lanes(
        x: ptx.pointer(dtype),
        weight: ptx.pointer(weight_dtype),
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
        x_starts = cuda.local.array(row_count, int64)
        weight_starts = cuda.local.array(column_count, int64)
        scale_starts = cuda.local.array(column_count, int64)
        sums = cuda.local.array(values, float32)
        for i in range(values):
            sums[i] = float32(0.0)
        lane = ptx.lane_id()
        warp = int64(uint32(uint32(cuda.threadIdx.x) >> uint32(5)))
        # the blocks of rows are neighbours: they share the weight in L2
        row_blocks = (rows + int64(row_count - 1)) // int64(row_count)
        block = int64(cuda.blockIdx.x)
        first_row = block % row_blocks * int64(row_count)
        first_column = (block // row_blocks * int64(WARPS) + warp) * int64(column_count)

        # rows and columns beyond the last are read as the last: their sums go nowhere
        for m in range(row_count):
            x_starts[m] = min(first_row + int64(m), rows - int64(1)) * x_stride
        for n in range(column_count):
            column = min(first_column + int64(n), columns - int64(1))
            weight_starts[n] = column * weight_stride
            scale_starts[n] = column * scale_stride

        k = uint32(lane * uint32(width))
        while k < depth:
            for n in range(column_count):
                w = load_weight(weight, weight_starts[n] + int64(k), scales, scale_starts[n], k)
                for m in range(row_count):
                    values_x = load_x(x, x_starts[m] + int64(k))
                    for j in range(width):
                        sums[m * column_count + n] = ptx.fma(values_x[j], w[j], sums[m * column_count + n])
            k = uint32(k + uint32(step))

        for i in range(values):
            sums[i] = ptx.warp_sum(sums[i])
        if gated:
            for m in range(row_count):
                for n in range(pairs):
                    row, column = first_row + int64(m), first_column + int64(2 * n)
                    if lane == uint32(m * pairs + n) and row < rows and column < columns:
                        store(
                            (sums[m * column_count + 2 * n], sums[m * column_count + 2 * n + 1]),
                            column,
                            scales,
                            scale_stride,
                            bias,
                            residual,
                            int64(0),
                            out,
                            row * out_stride + (column >> int64(1)),
                        )
            return
        for m in range(row_count):
            for n in range(column_count):
                row, column = first_row + int64(m), first_column + int64(n)
                # a lane an element: the epilogue's reads and writes go out together
                if lane == uint32(m * column_count + n) and row < rows and column < columns:
                    store(
                        (sums[m * column_count + n],),
                        column,
                        scales,
                        scale_stride,
                        bias,
                        residual,
                        row * residual_stride + column,
                        out,
                        row * out_stride + column,
                    )

    return matmul_lanes


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, weight, group_size, wide, epilogue):
    """wide: whether ``width`` may be WIDTH (``matmul_lanes_kernel``)."""
    row_count = min(MOST_ROWS, 1 << (rows - 1).bit_length())
    column_count = 2 if columns >= MANY_COLUMNS or epilogue.gated else 1
    blocks = -(-rows // row_count) * -(-columns // (WARPS * column_count))
    constants = (dtype, weight, group_size, WIDTH if wide else 1, row_count, column_count, epilogue)
    return Plan(matmul_lanes_kernel, constants, (blocks, 1, 1), (THREADS, 1, 1))
