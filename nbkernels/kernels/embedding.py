"""Embedding lookup: y[i] = table[ids[i]], from a dense table or one in int8.

    y[i, j] = table[ids[i], j]                                      dense: bits are copied
    y[i, j] = values[ids[i], j] · scales[ids[i], j // group_size]   int8

Either may be scaled, and a row of a second table added: with tokens ids a sequence, id i stands at
p = positions[i / tokens] + i mod tokens, and adds position_table[p]. Sums in float32, rounded once.

A block takes one stretch of one row, a thread one wide access of it. An id outside the vocabulary gives a row of zeros, a
position outside of its table adds nothing.
"""

from functools import cache, lru_cache

from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.arrays import Int8Weight
from nbkernels.kernels.elements import Cost, access, aligned, conversions, vector_width
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

THREADS = 128


@cache
def _multiply_add(width):
    """a · scale + b over tuples of ``width`` values."""

    @cuda.jit(device=True, inline="always")
    def one(a, scale, b):
        return (float32(a[0] * scale + b[0]),)

    @cuda.jit(device=True, inline="always")
    def four(a, scale, b):
        return (
            one(a[:1], scale, b[:1])
            + one(a[1:2], scale, b[1:2])
            + one(a[2:3], scale, b[2:3])
            + one(a[3:], scale, b[3:])
        )

    @cuda.jit(device=True, inline="always")
    def eight(a, scale, b):
        return four(a[:4], scale, b[:4]) + four(a[4:], scale, b[4:])

    return {1: one, 4: four, 8: eight}[width]


@cache
def _position_values(dtype, width):
    """(row, column, positions, table, stride, tokens, limit) -> ``width`` values of the second table, for a row at a column."""
    load, _ = access(dtype, width)
    zeros = (float32(0.0),) * width

    @cuda.jit(device=True, inline="always")
    def added(row, column, positions, position_table, position_stride, tokens, limit):
        position = int64(positions[row // int64(tokens)]) + row % int64(tokens)
        values = zeros
        if position >= int64(0) and position < int64(limit):
            values = load(position_table, position * position_stride + int64(column))
        return values

    return added


def embedding_kernel(dtype, width, scaled=False, positioned=False):
    """ids [count], table [vocab, hidden] -> y [count, hidden]; grid: stretches · count.

    scaled, positioned: whether there are a scale, and positions with their table.
    """
    load, store = access(dtype, width)
    zeros = (float32(0.0),) * width
    combine, added = _multiply_add(width), _position_values(dtype, width)
    changed = scaled or positioned

    @kernel(launch_bounds=THREADS)
    def embedding(
        ids: ptx.pointer("int32"),
        table: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        vocab: int32,
        hidden: uint32,
        stretches: uint32,
        table_stride: int64,
        scale: float32 if scaled else None,
        positions: ptx.pointer("int32") if positioned else None,
        position_table: ptx.pointer(dtype) if positioned else None,
        position_stride: int64 if positioned else None,
        tokens: uint32 if positioned else None,
        limit: int32 if positioned else None,
    ):
        block = uint32(cuda.blockIdx.x)
        row = int64(block // stretches)
        column = uint32(uint32(uint32(block % stretches) * uint32(THREADS) + uint32(cuda.threadIdx.x)) * uint32(width))
        if column < hidden:
            token = ids[row]
            values = zeros
            if token >= int32(0) and token < vocab:
                values = load(table, int64(token) * table_stride + int64(column))
            if changed:
                factor = float32(1.0)
                more = zeros
                if scaled:
                    factor = scale
                if positioned:
                    more = added(row, column, positions, position_table, position_stride, tokens, limit)
                values = combine(values, factor, more)
            store(y, row * int64(hidden) + int64(column), values)

    return embedding


def int8_embedding_kernel(dtype, scaled=False, positioned=False):
    """ids [count], values int8 [vocab, hidden], scales [vocab, groups] -> y [count, hidden]; a thread an element.

    scaled, positioned: as of ``embedding_kernel``.
    """
    _, to_storage = conversions(dtype)
    added = _position_values(dtype, 1)

    @kernel(launch_bounds=THREADS)
    def int8_embedding(
        ids: ptx.pointer("int32"),
        values: ptx.pointer("int8"),
        scales: ptx.pointer("float32"),
        y: ptx.pointer(dtype),
        vocab: int32,
        hidden: uint32,
        stretches: uint32,
        group_size: uint32,
        values_stride: int64,
        scales_stride: int64,
        factor: float32 if scaled else None,
        positions: ptx.pointer("int32") if positioned else None,
        position_table: ptx.pointer(dtype) if positioned else None,
        position_stride: int64 if positioned else None,
        tokens: uint32 if positioned else None,
        limit: int32 if positioned else None,
    ):
        block = uint32(cuda.blockIdx.x)
        row = int64(block // stretches)
        column = uint32(uint32(block % stretches) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if column < hidden:
            token = ids[row]
            value = float32(0.0)
            if token >= int32(0) and token < vocab:
                scale = scales[int64(token) * scales_stride + int64(column // group_size)]
                value = float32(values[int64(token) * values_stride + int64(column)]) * scale
            if scaled:
                value *= factor
            if positioned:
                value += added(row, column, positions, position_table, position_stride, tokens, limit)[0]
            y[row * int64(hidden) + int64(column)] = to_storage(value)

    return int8_embedding


@lru_cache(maxsize=4096)
def plan(factory, constants, count, hidden, width):
    """One block a stretch of THREADS accesses of a row, all in grid.x. ValueError beyond 2^31 - 1 blocks."""
    stretches = -(-hidden // (THREADS * width))
    if count * stretches > 2**31 - 1:
        raise ValueError(f"{count} ids of {hidden} columns need more than 2^31 - 1 blocks")
    return Plan(factory, constants, (count * stretches, 1, 1), (THREADS, 1, 1)), stretches


def cost(count, hidden, table_itemsize, itemsize):
    """Each row that is asked for is read, and the result written, once."""
    return Cost(bytes=count * (4 + hidden * (table_itemsize + itemsize)), flops=0)


def run(ids, table, out, device, stream, *, scale=1.0, positions=None, position_table=None, tokens=1):
    """ids int32 [count]; table DeviceArray [vocab, hidden] or Int8Weight of DeviceArrays; out [count, hidden] contiguous.

    positions int32 [count / tokens] and position_table [limit, hidden], or None.
    """
    options = (scale != 1, positions is not None)
    more = () if scale == 1 else (scale,)
    if positions is not None:
        more += (positions.pointer, position_table.pointer, position_table.strides[0], tokens, position_table.shape[0])
    count, hidden = out.shape
    vocab = table.shape[0]
    if isinstance(table, Int8Weight):
        chosen, stretches = plan(int8_embedding_kernel, (out.dtype, *options), count, hidden, 1)
        group_size = table.group_size or hidden
        strides = (table.values.strides[0], table.scales.strides[0])
        pointers = (ids.pointer, table.values.pointer, table.scales.pointer, out.pointer)
        launch(chosen, (*pointers, vocab, hidden, stretches, group_size, *strides, *more), device, stream)
        return
    width = vector_width(out.dtype)
    if hidden % width or not (aligned(table, width=width) and aligned(out, width=width)):
        width = 1
    if positions is not None and not aligned(position_table, width=width):
        width = 1
    chosen, stretches = plan(embedding_kernel, (out.dtype, width, *options), count, hidden, width)
    pointers = (ids.pointer, table.pointer, out.pointer)
    launch(chosen, (*pointers, vocab, hidden, stretches, table.strides[0], *more), device, stream)
