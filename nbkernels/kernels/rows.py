"""How a kernel walks rows: which thread holds which columns, in registers, and how the threads of a row reduce.

A row of ``columns`` elements belongs to a group of ``threads`` threads (a power of two): part of a warp, a warp, or a whole
block. Each thread holds ``chunks`` chunks of ``width`` elements (16 bytes' worth) as float32 registers. Two walks:

    wide      chunk c of thread t is columns (c·threads + t)·width and the width - 1 after it: one 16-byte access each

        row:  |t0 c0 ......|t1 c0 ......| ... |tN c0 ......|t0 c1 ......|t1 c1 ......| ...

    strided   register i of thread t is column i·threads + t: single elements, for rows that do not start at 16-byte
              addresses or whose length is no multiple of width; neighbouring threads still read neighbouring elements

        row:  |t0 r0|t1 r0| ... |tN r0|t0 r1|t1 r1| ... |tN r1| ...

The walk is chosen by the row's length and the alignment, never by the number of rows: a row gives the same bits in any batch.
``columns`` is an argument of the kernels; only the number of chunks is compiled in, so that few kernels serve all lengths.
"""

from functools import cache, lru_cache
from typing import NamedTuple

from numba import cuda, float32, int64, uint32

from nbkernels import ptx
from nbkernels.kernels.elements import access, conversions, vector_width
from nbkernels.launch.launcher import Plan

# float32 of shared memory for one reduction: a partial result a warp.
SCRATCH = 32
# Registers a thread may spend on its part of a row: with 1024 threads there are 64 in all.
HELD = 32
# A block's threads where a row takes a warp or less: small, so that many blocks share a multiprocessor and none waits long.
SHORT_BLOCK = 128
# The most threads a row gets. The strided walk has a condition for every register and needs more than the 64 that go with 1024.
LONGEST_WIDE = 1024
LONGEST_STRIDED = 512
# Registers a thread holds of a tile of a longer row: half of HELD leaves room for two blocks on a multiprocessor.
TILE_HELD = 16
# Below four threads a row there would be more rows in a warp than a memory transaction has use for.
FEWEST_THREADS = 4


def _power_of_two(n):
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _longest(wide):
    return LONGEST_WIDE if wide else LONGEST_STRIDED


@lru_cache(maxsize=4096)
def split(columns, dtype, wide):
    """(threads, chunks) that hold a row in registers, or None where it is too long for a block's registers.

    Rows of up to 1024 elements take a warp or a part of one, longer ones a block of the fewest threads.
    """
    width = vector_width(dtype)
    pieces = -(-columns // width)
    most_chunks = HELD // width
    threads = max(FEWEST_THREADS, min(_power_of_two(pieces), ptx.WARP), _power_of_two(-(-pieces // most_chunks)))
    if threads > _longest(wide):
        return None
    return threads, -(-pieces // threads)


def plan_rows(held, tiled, rows, columns, dtype, wide, options=(), most_held=None):
    """The Plan of an operation over rows: factory ``held`` where a row fits into registers, else ``tiled``.

    most_held: the most columns that are held, where that is fewer than ``split`` allows.

    held gets the constants (dtype, wide, threads, chunks, rows a block, *options), tiled (dtype, wide, threads, chunks, *options)
    with those of a tile; both launch with the same arguments.
    """
    part = split(columns, dtype, wide)
    if part is None or (most_held is not None and columns > most_held):
        threads, chunks = _longest(wide), TILE_HELD // vector_width(dtype)
        return Plan(tiled, (dtype, wide, threads, chunks, *options), (rows, 1, 1), (threads, 1, 1))
    threads, chunks = part
    rows_per_block = SHORT_BLOCK // threads if threads <= ptx.WARP else 1
    constants = (dtype, wide, threads, chunks, rows_per_block, *options)
    return Plan(held, constants, (-(-rows // rows_per_block), 1, 1), (threads * rows_per_block, 1, 1))


def is_wide(columns, dtype, arrays, vectors=()):
    """True where 16-byte accesses fit: arrays [rows, columns] and vectors [columns], either None, all start at such addresses.

    A single row is held to its stride too, so that it is walked as it would be among others.
    """
    width = vector_width(dtype)
    if columns % width:
        return False
    return all(x is None or (x.pointer % 16 == 0 and x.strides[0] % width == 0) for x in arrays) and all(
        v is None or v.pointer % 16 == 0 for v in vectors
    )


@cache
def place(threads, rows_per_block):
    """locate(rows, columns) -> (row, thread of the row, columns): columns is 0 for the rows a last block has too many.

    Such rows load and store nothing, but their threads take part in shuffles and barriers.
    """

    @cuda.jit(device=True, inline="always")
    def locate(rows, columns):
        index = uint32(cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x) * int64(rows_per_block) + int64(index // uint32(threads))
        here = columns
        if row >= rows:
            here = uint32(0)
        return row, uint32(index % uint32(threads)), here

    return locate


class Access(NamedTuple):
    """Between a row in memory and a thread's registers. held is a local array of chunks·width float32.

    load(pointer, start, thread, columns, held): held[:] = the thread's part of the row that begins at element ``start`` (int64);
        zeros past ``columns`` (uint32)
    store(pointer, start, thread, columns, held): the reverse, rounding; nothing past ``columns``
    load_chunk, store_chunk: the same with a last argument c, for the registers c·width to (c + 1)·width alone
    inside(i, thread, columns): whether register i is an element of the row
    """

    load: object
    store: object
    load_chunk: object
    store_chunk: object
    inside: object


@cache
def row_access(dtype, width, wide, threads, chunks, *, cached=False):
    """The Access to rows of dtype by one of the two walks.

    width: elements a chunk, those of a 16-byte access to the row; dtype may be a wider one (float32 weights of a 16-bit row).
    cached keeps what is loaded in L1.
    """
    load_chunk, store_chunk, inside = (_wide if wide else _strided)(dtype, width, threads, cached)

    @cuda.jit(device=True, inline="always")
    def load(pointer, start, thread, columns, held):
        for c in range(chunks):
            load_chunk(pointer, start, thread, columns, held, c)

    @cuda.jit(device=True, inline="always")
    def store(pointer, start, thread, columns, held):
        for c in range(chunks):
            store_chunk(pointer, start, thread, columns, held, c)

    return Access(load, store, load_chunk, store_chunk, inside)


def _wide(dtype, width, threads, cached):
    part = min(width, vector_width(dtype))
    parts = width // part
    read, write = access(dtype, part, cached)
    piece = _piece(part)

    @cuda.jit(device=True, inline="always")
    def inside(i, thread, columns):
        # the length is a multiple of width: a chunk is inside or outside as a whole
        return uint32((uint32(i // width) * uint32(threads) + thread) * uint32(width)) < columns

    @cuda.jit(device=True, inline="always")
    def load_chunk(pointer, start, thread, columns, held, c):
        own = start + int64(uint32(thread * uint32(width)))
        if inside(c * width, thread, columns):
            for p in range(parts):
                loaded = read(pointer, own + int64(c * threads * width + p * part))
                for j in range(part):
                    held[c * width + p * part + j] = loaded[j]
        else:
            for j in range(width):
                held[c * width + j] = float32(0.0)

    @cuda.jit(device=True, inline="always")
    def store_chunk(pointer, start, thread, columns, held, c):
        own = start + int64(uint32(thread * uint32(width)))
        if inside(c * width, thread, columns):
            for p in range(parts):
                write(pointer, own + int64(c * threads * width + p * part), piece(held, c * width + p * part))

    return load_chunk, store_chunk, inside


def _strided(dtype, width, threads, cached):
    # single elements go through L1 whether cached or not: neighbouring rows and registers share sectors
    from_storage, to_storage = conversions(dtype)

    @cuda.jit(device=True, inline="always")
    def inside(i, thread, columns):
        return uint32(uint32(i) * uint32(threads) + thread) < columns

    @cuda.jit(device=True, inline="always")
    def load_chunk(pointer, start, thread, columns, held, c):
        own = start + int64(thread)
        for j in range(width):
            i = c * width + j
            held[i] = float32(0.0)
            if inside(i, thread, columns):
                held[i] = from_storage(pointer[own + int64(i * threads)])

    @cuda.jit(device=True, inline="always")
    def store_chunk(pointer, start, thread, columns, held, c):
        own = start + int64(thread)
        for j in range(width):
            i = c * width + j
            if inside(i, thread, columns):
                pointer[own + int64(i * threads)] = to_storage(held[i])

    return load_chunk, store_chunk, inside


@cache
def _piece(part):
    """piece(held, first): the ``part`` (4 or 8) registers from ``first`` on, as the tuple a wide store takes."""
    if part == 4:

        @cuda.jit(device=True, inline="always")
        def piece(held, first):
            return (held[first], held[first + 1], held[first + 2], held[first + 3])

    else:

        @cuda.jit(device=True, inline="always")
        def piece(held, first):
            return (
                held[first],
                held[first + 1],
                held[first + 2],
                held[first + 3],
                held[first + 4],
                held[first + 5],
                held[first + 6],
                held[first + 7],
            )

    return piece


@cache
def reductions(threads):
    """(row_sum, row_max): of one float32 a thread over the threads of a row, in each of them, in a fixed order.

    Each takes (x, scratch); scratch is shared memory of SCRATCH float32, used where a row has more than a warp, and then
    only once between two barriers: a kernel gives each of its reductions its own. One barrier a reduction.
    """
    return _reduction(threads, _plus), _reduction(threads, ptx.fmax)


def _reduction(threads, combine):
    lanes = min(threads, ptx.WARP)
    warps = threads // lanes
    across_lanes = _butterfly(lanes, combine)
    if warps == 1:

        @cuda.jit(device=True, inline="always")
        def reduce(x, scratch):
            return across_lanes(x)

    else:
        across_warps = _butterfly(warps, combine)

        @cuda.jit(device=True, inline="always")
        def reduce(x, scratch):
            x = across_lanes(x)
            lane = ptx.lane_id()
            if lane == uint32(0):
                scratch[uint32(cuda.threadIdx.x) // uint32(ptx.WARP)] = x
            cuda.syncthreads()
            # the partial results lie in each warp as often as they fit, so that every lane ends with the whole
            return across_warps(scratch[lane % uint32(warps)])

    return reduce


@cache
def several_sums(threads, count):
    """row_sums(x, scratch): x[k] = the sum of x[k] over the threads of a row, for ``count`` registers behind one barrier.

    scratch: count·SCRATCH float32 of shared memory, for this reduction alone.
    """
    lanes = min(threads, ptx.WARP)
    warps = threads // lanes
    across_lanes = _butterfly(lanes, _plus)
    across_warps = _butterfly(warps, _plus)

    @cuda.jit(device=True, inline="always")
    def row_sums(x, scratch):
        for k in range(count):
            x[k] = across_lanes(x[k])
        if warps > 1:
            lane = ptx.lane_id()
            if lane == uint32(0):
                for k in range(count):
                    scratch[uint32(k * warps) + uint32(cuda.threadIdx.x) // uint32(ptx.WARP)] = x[k]
            cuda.syncthreads()
            for k in range(count):
                x[k] = across_warps(scratch[uint32(k * warps) + lane % uint32(warps)])

    return row_sums


@cuda.jit(device=True, inline="always")
def _plus(a, b):
    return a + b


def _butterfly(lanes, combine):
    """reduce(x) over aligned groups of ``lanes`` lanes (a power of two); every lane of a group gets the same bits."""
    steps = lanes.bit_length() - 1

    @cuda.jit(device=True, inline="always")
    def reduce(x):
        for step in range(steps):
            x = combine(x, ptx.shfl_bfly(x, uint32(lanes) >> uint32(step + 1)))
        return x

    return reduce
