"""Embedding lookup: y[i] = table[ids[i]], from a dense table or one in int8.

    y[i, j] = table[ids[i], j]                                      dense: bits are copied
    y[i, j] = values[ids[i], j] · scales[ids[i], j // group_size]   int8

A block takes one stretch of one row, a thread one wide access of it. An id outside the vocabulary gives a row of zeros.
"""

from functools import lru_cache

from numba import cuda, float32, int32, int64, uint32

from nbkernels import ptx
from nbkernels.arrays import Int8Weight
from nbkernels.kernels.elements import Cost, access, aligned, conversions, vector_width
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

THREADS = 128


def embedding_kernel(dtype, width):
    """ids [count], table [vocab, hidden] -> y [count, hidden]; grid: stretches · count."""
    load, store = access(dtype, width)
    zeros = (float32(0.0),) * width

    @kernel(launch_bounds=THREADS)
    def embedding(
        ids: ptx.pointer("int32"),
        table: ptx.pointer(dtype),
        y: ptx.pointer(dtype),
        vocab: int32,
        hidden: uint32,
        stretches: uint32,
        table_stride: int64,
    ):
        block = uint32(cuda.blockIdx.x)
        row = int64(block // stretches)
        column = uint32(uint32(uint32(block % stretches) * uint32(THREADS) + uint32(cuda.threadIdx.x)) * uint32(width))
        if column < hidden:
            token = ids[row]
            values = zeros
            if token >= int32(0) and token < vocab:
                values = load(table, int64(token) * table_stride + int64(column))
            store(y, row * int64(hidden) + int64(column), values)

    return embedding


def int8_embedding_kernel(dtype):
    """ids [count], values int8 [vocab, hidden], scales [vocab, groups] -> y [count, hidden]; a thread an element."""
    _, to_storage = conversions(dtype)

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


def run(ids, table, out, device, stream):
    """ids int32 [count]; table DeviceArray [vocab, hidden] or Int8Weight of DeviceArrays; out [count, hidden] contiguous."""
    count, hidden = out.shape
    vocab = table.shape[0]
    if isinstance(table, Int8Weight):
        chosen, stretches = plan(int8_embedding_kernel, (out.dtype,), count, hidden, 1)
        group_size = table.group_size or hidden
        strides = (table.values.strides[0], table.scales.strides[0])
        pointers = (ids.pointer, table.values.pointer, table.scales.pointer, out.pointer)
        launch(chosen, (*pointers, vocab, hidden, stretches, group_size, *strides), device, stream)
        return
    width = vector_width(out.dtype)
    if hidden % width or not (aligned(table, width=width) and aligned(out, width=width)):
        width = 1
    chosen, stretches = plan(embedding_kernel, (out.dtype, width), count, hidden, width)
    pointers = (ids.pointer, table.pointer, out.pointer)
    launch(chosen, (*pointers, vocab, hidden, stretches, table.strides[0]), device, stream)
