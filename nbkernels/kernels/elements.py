"""Elements of the three float dtypes in memory, as float32 in registers; what every kernel file shares.

``access(dtype, width)`` gives the loads and stores of ``width`` consecutive elements: 1, or the 16 bytes of one wide access.
"""

from dataclasses import dataclass
from functools import cache

from numba import cuda, float32

from nbkernels import ptx


@dataclass(frozen=True)
class Cost:
    """What an operation must do, whatever the kernel does: bytes to and from memory, floating-point operations."""

    bytes: int
    flops: int


def vector_width(dtype):
    """Elements in a 16-byte access."""
    return 16 // dtype.itemsize


def aligned(array, *axes_of_rows, width):
    """True where every row of an array may be read ``width`` elements at a time: 16-byte address and row strides.

    axes_of_rows: the axes whose strides separate rows (all but the last where none is named).
    """
    axes = axes_of_rows or range(len(array.shape) - 1)
    if width == 1:
        return True
    return array.pointer % 16 == 0 and all(array.strides[a] % width == 0 or array.shape[a] <= 1 for a in axes)


@cache
def conversions(dtype):
    """(float32 from an element's storage, an element's storage from float32) of a NumPy dtype."""
    name = str(dtype)
    if name == "bfloat16":
        return ptx.float_from_bf16, ptx.bf16_from_float
    if name == "float16":
        return ptx.float_from_f16, ptx.f16_from_float

    @cuda.jit(device=True, inline="always")
    def same(x):
        return float32(x)

    return same, same


def pair_conversions(dtype):
    """(two float32 from a word, a word from two float32) of a 16-bit NumPy dtype."""
    if str(dtype) == "bfloat16":
        return ptx.floats_from_bf16x2, ptx.bf16x2_from_floats
    return ptx.floats_from_f16x2, ptx.f16x2_from_floats


@cache
def access(dtype, width, cached=False):
    """(load, store): load(pointer, index) -> a tuple of ``width`` float32; store(pointer, index, that tuple).

    index counts elements. width is 1, or 16 bytes' worth with an address divisible by 16. cached keeps what is loaded in L1, for
    data that several warps of a block read; else loads go past it.
    """
    from_storage, to_storage = conversions(dtype)
    wide = ptx.ld_global_v4 if cached else ptx.ld_global_stream_v4
    name = str(dtype)

    if width == 1:

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            return (from_storage(pointer[index]),)

        @cuda.jit(device=True, inline="always")
        def store(pointer, index, values):
            pointer[index] = to_storage(values[0])

    elif name == "float32" and width == 4:

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            w = wide(ptx.address(pointer, index))
            return (
                ptx.float_from_bits(w[0]),
                ptx.float_from_bits(w[1]),
                ptx.float_from_bits(w[2]),
                ptx.float_from_bits(w[3]),
            )

        @cuda.jit(device=True, inline="always")
        def store(pointer, index, values):
            ptx.st_global_v4_f32(ptx.address(pointer, index), values[0], values[1], values[2], values[3])

    elif width == 8:
        unpack, pack = pair_conversions(dtype)

        @cuda.jit(device=True, inline="always")
        def load(pointer, index):
            w = wide(ptx.address(pointer, index))
            return unpack(w[0]) + unpack(w[1]) + unpack(w[2]) + unpack(w[3])

        @cuda.jit(device=True, inline="always")
        def store(pointer, index, values):
            ptx.st_global_v4(
                ptx.address(pointer, index),
                pack(values[0], values[1]),
                pack(values[2], values[3]),
                pack(values[4], values[5]),
                pack(values[6], values[7]),
            )

    else:
        raise ValueError(f"no {width}-element access of {dtype}")
    return load, store
