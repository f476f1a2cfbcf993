"""argmax over the last axis: the first index of the largest element, a NaN counting as largest.

A float becomes an integer that orders as NumPy's argmax does (the usual trick of flipping negative floats' bits; NaN on top),
and above it in one 64-bit key the index, inverted so that the smaller one wins. The largest key over a row is the answer,
whatever the order it is found in:

    key = ordered(x) · 2^32 + (2^32 - 1 - index)

A block a row; each thread takes every THREADS-th access, then shuffles and shared memory combine the keys.
"""

from functools import lru_cache

from numba import cuda, int32, int64, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.elements import Cost, access, aligned, vector_width
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

NAN_KEY = 0xFFFFFFFF
LARGEST_INDEX = 0xFFFFFFFF
SIGN = 0x80000000


@cuda.jit(device=True, inline="always")
def ordered(x):
    """A uint32 that compares as the float32 does: -inf lowest, NaN highest, -0 just as +0."""
    x = x + ptx.float_from_bits(uint32(0))  # -0 + 0 is +0
    bits = ptx.bits_from_float(x)
    flipped = uint32(bits ^ uint32(SIGN))
    if bits >= uint32(SIGN):
        flipped = uint32(~bits)
    if x != x:
        flipped = uint32(NAN_KEY)
    return flipped


@cuda.jit(device=True, inline="always")
def key_of(x, index):
    """The 64-bit key of an element: see the module's formula."""
    return uint64((uint64(ordered(x)) << uint64(32)) | uint64(uint32(uint32(LARGEST_INDEX) - index)))


@cuda.jit(device=True, inline="always")
def warp_largest(key):
    """The largest 64-bit key over a warp, in every lane."""
    for step in (16, 8, 4, 2, 1):
        high = ptx.shfl_bfly_u32(uint32(key >> uint64(32)), uint32(step))
        low = ptx.shfl_bfly_u32(uint32(key & uint64(0xFFFFFFFF)), uint32(step))
        other = uint64((uint64(high) << uint64(32)) | uint64(low))
        key = max(key, other)
    return key


def block_largest(threads):
    """The largest key over a block of ``threads``, in every thread; scratch: shared uint64 [32]. One barrier."""
    warps = threads // ptx.WARP

    @cuda.jit(device=True, inline="always")
    def largest(key, scratch):
        key = warp_largest(key)
        lane = ptx.lane_id()
        if lane == uint32(0):
            scratch[uint32(cuda.threadIdx.x) >> uint32(5)] = key
        cuda.syncthreads()
        key = uint64(0)
        if lane < uint32(warps):
            key = scratch[lane]
        return warp_largest(key)

    return largest


def argmax_kernel(dtype, width, threads):
    """x [rows, columns] -> y int32 [rows]; a block a row."""
    load, _ = access(dtype, width)
    largest = block_largest(threads)

    @kernel(launch_bounds=threads)
    def argmax(x: ptx.pointer(dtype), y: ptx.pointer("int32"), columns: uint32, x_stride: int64, y_stride: int64):
        scratch = cuda.shared.array(32, uint64)
        row = int64(cuda.blockIdx.x)
        best = uint64(0)
        column = uint32(uint32(cuda.threadIdx.x) * uint32(width))
        while column < columns:
            values = load(x, row * x_stride + int64(column))
            for i in range(width):
                best = max(best, key_of(values[i], uint32(column + uint32(i))))
            column = uint32(column + uint32(threads * width))
        best = largest(best, scratch)
        if cuda.threadIdx.x == 0:
            y[row * y_stride] = int32(uint32(LARGEST_INDEX) - uint32(best & uint64(0xFFFFFFFF)))

    return argmax


@lru_cache(maxsize=4096)
def plan(rows, columns, dtype, width):
    """A block a row: a warp where the row is short, 1024 threads where few rows must be read by few blocks."""
    threads = 32 if columns <= 32 * width else 256 if columns <= 8192 else 1024
    return Plan(argmax_kernel, (dtype, width, threads), (rows, 1, 1), (threads, 1, 1))


def cost(rows, columns, itemsize):
    """Each element read once, one index a row written."""
    return Cost(bytes=rows * (columns * itemsize + 4), flops=0)


def run(x, out, device, stream):
    """x: DeviceArray [rows, columns]; out: int32 [rows]. ValueError for more than 2^31 - 1 columns."""
    rows, columns = x.shape
    if columns > 2**31 - 1:
        raise ValueError(f"x: {columns} columns, an int32 index reaches 2^31 - 1")
    width = vector_width(x.dtype)
    if columns % width or not aligned(x, width=width):
        width = 1
    arguments = (x.pointer, out.pointer, columns, x.strides[0], out.strides[0])
    launch(plan(rows, columns, x.dtype, width), arguments, device, stream)
