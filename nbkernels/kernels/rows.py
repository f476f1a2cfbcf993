"""How a kernel walks rows: which thread holds which columns, in registers, and how the threads of a row reduce.

A row of ``columns`` elements belongs to a group of ``threads`` threads (a power of two): part of a warp, a warp, or a whole
block. Each thread holds ``chunks`` chunks of ``width`` elements (16 bytes' worth). Its walks:

    wide      chunk c of thread t is columns (c·threads + t)·width and the width - 1 after it: one 16-byte access each

        row:  |t0 c0 ......|t1 c0 ......| ... |tN c0 ......|t0 c1 ......|t1 c1 ......| ...

    strided   register i of thread t is a word's worth of columns from (i·threads + t)·(elements a word) on, read one by one,
              for rows that do not start at 16-byte addresses or whose length is no multiple of width

        row:  |t0 r0|t1 r0| ... |tN r0|t0 r1|t1 r1| ... |tN r1| ...

    staged    the same columns, by way of shared memory: what lies between 16-byte addresses travels in 16-byte pieces, the
              elements before and behind them alone

        memory:  |.. head|piece|piece| ... |piece|tail ..|  <->  shared memory at the same distance from such an address

    streamed  wide or staged (sm_90): blocks stay and take row after row, which bulk copies bring ahead into a ring of slots

        memory:  |row 0|row 1|row 2| ...  ->  |slot 0|slot 1|slot 2|  ->  registers  [->  the slot]  ->  memory

The walk is chosen by the row's length and the alignment, never by the number of rows; strided and staged sum alike, and so do
staged rows that are streamed or not: a row gives the same bits in any batch. 16-bit elements are held as they are in memory, two
to a register, and widened whenever they are used: widening is cheap, and registers are what bounds the bytes on their way.
``columns`` is an argument of the kernels; only the number of chunks is compiled in, so that few kernels serve all lengths.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.elements import conversions, pair_conversions, vector_width
from nbkernels.launch.device import parse_arch
from nbkernels.launch.launcher import Plan
from nbkernels.ptx.bulk import bulk_commit, bulk_load, bulk_store, bulk_wait_read
from nbkernels.ptx.cluster import cluster_arrive, cluster_rank, cluster_wait, map_shared, st_cluster_f32
from nbkernels.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)

# float32 of shared memory for one reduction: a partial result a warp.
SCRATCH = 32
# Chunks a thread holds of one array, and at most: with 1024 threads there are 64 registers.
CHUNKS = 4
MOST_CHUNKS = 8
# A block's threads where a row takes a warp or less: small, so that many blocks share a multiprocessor and none waits long.
SHORT_BLOCK = 128
# The most threads a row gets. Single elements have a condition each and need more than the 64 registers that go with 1024.
LONGEST_WIDE = 1024
LONGEST_STRIDED = 512
# 16-byte pieces that a block takes of a row that blocks share, and the most blocks that share one.
SHARED_PIECES = 2048
MOST_BLOCKS = 8
# Below four threads a row there would be more rows in a warp than a memory transaction has use for.
FEWEST_THREADS = 4
# From this many elements on a row that cannot be read wide is worth two barriers and the way through shared memory.
STAGED_COLUMNS = 256
# Streamed are rows from this many bytes on, by their walk, as measured (benchmarks/notes/rows.md): of the wide ones those of
# which a multiprocessor's registers hold no second.
STREAMED_BYTES = {"wide": 32769, "staged": 8192}
# Slots of a block: as much on its way as memory needs (some 64 KB a multiprocessor) while one row is worked on.
STREAMED_SLOTS = 4
# of a multiprocessor with compute capability 9.0, less what the system and the reductions take of it for each block
RING_BYTES = 228 * 1024
BLOCK_BYTES = 6 * 1024


def _power_of_two(n):
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=4096)
def split(columns, dtype, walk, arrays=1, clusters=False, few=2, spare=0):
    """(threads, chunks, blocks) that hold a row of each of ``arrays`` arrays in registers; None where it is too long for them.

    clusters: whether blocks can share a row; few: chunks a thread that suit short rows; spare: chunks' registers that the largest
    blocks need for other things.
    As measured on an H200 (benchmarks/notes/rows.md): short rows want few chunks a thread, so that many are on their way, long
    ones more, so that few threads reduce; what a row leaves unused of them counts most. A cluster takes a row that one block
    cannot hold, and then has two blocks a multiprocessor where they hold it.
    """
    pieces = -(-columns // vector_width(dtype))
    wide_elements = dtype.itemsize == 4
    # 1024 threads have 64 registers each, which widened elements need; two float32 arrays are held as their sum
    longest_chunks = (MOST_CHUNKS - spare) // arrays if wide_elements else CHUNKS - spare
    block_pieces = LONGEST_WIDE * longest_chunks
    cluster = 1
    if clusters and pieces > block_pieces:
        shared = block_pieces if block_pieces == LONGEST_WIDE * MOST_CHUNKS else SHARED_PIECES
        cluster = min(MOST_BLOCKS, _power_of_two(-(-pieces // shared)))
    pieces = -(-pieces // cluster)
    short, few, more = (128, few, 4) if arrays == 1 else (256, 1, 3)
    wanted = few if pieces <= short else more

    def loss(part):
        threads, chunks, _ = part
        unused = math.sqrt(threads * chunks / pieces)
        return unused * (1 + 0.02 * abs(math.log2(chunks / wanted)) + 0.1 * max(chunks - 4, 0)), threads

    threads = FEWEST_THREADS if walk != "staged" else 2 * FEWEST_THREADS
    parts = []
    while threads <= (LONGEST_WIDE if walk == "wide" else LONGEST_STRIDED):
        chunks = -(-pieces // threads)
        if chunks <= (longest_chunks if threads == LONGEST_WIDE else MOST_CHUNKS // arrays):
            parts.append((threads, chunks, cluster))
        threads *= 2
    return min(parts, key=loss) if parts else None


def resident(threads, words, walk):
    """Blocks of so many threads, of ``words`` registers that hold rows, that a multiprocessor holds at least."""
    kept = 512 if words > 16 else 1024 if walk == "wide" else 768  # threads; single elements have a condition each
    return max(1, kept // threads)


def plan_rows(
    held,
    tiled,
    rows,
    columns,
    dtype,
    walk,
    options=(),
    arrays=1,
    clusters=False,
    few=2,
    spare=0,
    streamed=None,
    sm_count=0,
    vectors=0,
    more=None,
):
    """The Plan of an operation over rows: factory ``held`` where a row of each array fits into registers, else ``tiled``.

    Where rows are long, and sm_count is ``streaming``'s and not 0: factory ``streamed``, with constants of ``plan_streamed``.
    held gets the constants (dtype, walk, threads, chunks, rows a block, resident blocks, blocks a row, *options), tiled (dtype,
    walk, threads, chunks, *options) with those of a tile; all launch with the same arguments. vectors: kept ones of a row's
    length. more(threads, chunks, blocks, streamed): constants behind the options of held and streamed, which do not change a
    bit, by the threads that share registers; where any is true, few blocks of held are there and have them to themselves.
    """
    more = more or (lambda threads, chunks, blocks, streamed: ())
    part = split(columns, dtype, walk, arrays, clusters, few, spare)
    long = columns * dtype.itemsize >= STREAMED_BYTES.get(walk, math.inf)
    # a row that is staged where it cannot be streamed has the same bits there
    if streamed and sm_count and long and part is not None and part[2] == 1:
        options = (*options, *more(2 * part[0], part[1], sm_count, True))
        return plan_streamed(streamed, rows, dtype, walk, part[:2], options, arrays, sm_count, vectors)
    if part is None:
        threads, chunks = LONGEST_STRIDED, CHUNKS // arrays
        shared = shared_bytes(dtype, walk, threads, chunks, 1, arrays)
        return Plan(tiled, (dtype, walk, threads, chunks, *options), (rows, 1, 1), (threads, 1, 1), shared)
    threads, chunks, cluster = part
    rows_per_block = max(1, SHORT_BLOCK // threads) if threads <= ptx.WARP else 1
    block = threads * rows_per_block
    grid = -(-rows // rows_per_block) * cluster
    behind = more(threads, chunks, grid, False)
    kept = 1 if any(behind) else resident(block, 4 * chunks * arrays, walk)
    constants = (dtype, walk, threads, chunks, rows_per_block, kept, cluster, *options, *behind)
    shared = shared_bytes(dtype, walk, threads, chunks, rows_per_block, arrays)
    return Plan(held, constants, (grid, 1, 1), (block, 1, 1), shared)


def plan_streamed(
    factory, rows, dtype, walk, part, options, arrays, sm_count, vectors=0, slots=STREAMED_SLOTS, kept=None
):
    """The Plan of a persistent grid: factory gets (dtype, walk, threads, chunks, resident blocks, slots, *options).

    part: (threads, chunks); slots: at most, of each block; kept: resident blocks, else those of ``resident``.
    """
    threads, chunks = part
    row_bytes = _array_bytes(walk, threads, chunks) * arrays
    if kept is None:
        kept = resident(threads, 4 * chunks * (arrays + vectors), walk)
        if walk != "wide" and 2 * (2 * row_bytes + BLOCK_BYTES) <= RING_BYTES:
            kept = max(kept, 2)  # one works while another meets
    slots = max(1, min(slots, (RING_BYTES // kept - BLOCK_BYTES) // row_bytes))
    constants = (dtype, walk, threads, chunks, kept, slots, *options)
    # slots begin at multiples of 128 bytes
    return Plan(factory, constants, (min(rows, sm_count * kept), 1, 1), (threads, 1, 1), slots * row_bytes + 128)


def streaming(device, walk, arrays):
    """The multiprocessors of a Device on which long rows of a call are streamed, for ``plan_rows``; 0 where they are not.

    arrays [rows, columns], read and written, may be None. In the staged walk the rows of one number must begin equally far from
    16-byte addresses in all of them, and what is read beside a row must not be written. Bulk copies exist from compute
    capability 9.0 on, but consumers' later GPUs have not the shared memory for long rows.
    """
    if walk != "wide" and not _alike(arrays):
        return 0
    return device.sm_count if parse_arch(device.arch)[:2] in ((9, 0), (10, 0)) else 0


def _alike(arrays):
    """Whether the rows of arrays that are not None begin at the same distance from 16-byte addresses, each after the last's end.

    False as well where two of the arrays are one.
    """
    given = [x for x in arrays if x is not None]
    first = given[0]
    width = vector_width(first.dtype)
    return len({x.pointer for x in given}) == len(given) and all(
        x.dtype == first.dtype
        and (x.pointer - first.pointer) % 16 == 0
        and (x.strides[0] - first.strides[0]) % width == 0
        and x.strides[0] >= x.shape[1]
        for x in given
    )


def has_clusters(device):
    """Whether the blocks of a Device can share a row: from compute capability 9.0 on."""
    return parse_arch(device.arch)[0] >= 9


def choose_walk(columns, dtype, arrays, vectors=(), int8=None):
    """The walk of a call: "wide" where arrays [rows, columns] and vectors [columns], either None, start at 16-byte addresses.

    int8: a result of bytes [rows, columns], whose rows then start at multiples of a chunk. A single row is held to its stride
    too, so that it is walked as it would be among others.
    """
    width = vector_width(dtype)
    fits = columns % width == 0 and all(
        x is None or (x.pointer % 16 == 0 and x.strides[0] % width == 0) for x in arrays
    )
    fits = fits and (int8 is None or (int8.pointer % width == 0 and int8.strides[0] % width == 0))
    if fits and all(v is None or v.pointer % 16 == 0 for v in vectors):
        return "wide"
    return "staged" if columns >= STAGED_COLUMNS else "strided"


@cache
def place(threads, rows_per_block, cluster, width):
    """locate(rows, columns) -> (row, thread of the row, first column, columns) of the thread's block.

    A cluster of blocks shares a row: each takes an equal part of it, in units of ``width`` columns. columns is 0 for the rows a
    last block has too many: such rows load and store nothing, but their threads take part in shuffles and barriers.
    """
    if cluster > 1:

        @cuda.jit(device=True, inline="always")
        def locate(rows, columns):
            share = uint32(
                uint32(uint32(columns + uint32(cluster * width - 1)) // uint32(cluster * width)) * uint32(width)
            )
            first = min(uint32(cluster_rank() * share), columns)
            here = min(uint32(columns - first), share)
            return int64(uint32(cuda.blockIdx.x) // uint32(cluster)), uint32(cuda.threadIdx.x), first, here

        return locate

    @cuda.jit(device=True, inline="always")
    def locate(rows, columns):
        index = uint32(cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x) * int64(rows_per_block) + int64(index // uint32(threads))
        here = columns
        if row >= rows:
            here = uint32(0)
        return row, uint32(index % uint32(threads)), uint32(0), here

    return locate


@cache
def entrance(cluster):
    """(enter, entered): ``enter()`` at a kernel's start, ``entered()`` before its first reduction.

    No block writes to another's shared memory before that one runs.
    """
    return (cluster_arrive, cluster_wait) if cluster > 1 else (nothing, nothing)


@cuda.jit(device=True, inline="always")
def nothing():
    """In place of a barrier or an end where there is none."""


class Access(NamedTuple):
    """Between a row in memory and a thread's registers; held is a local array of ``words`` uint32.

    Of a row that begins at element ``start`` (int64) and has ``columns`` (uint32):

    begin(pointer, start, thread, columns): send for the thread's part, where that can be done ahead
    load(pointer, start, thread, columns, held): held[:] = the thread's part; zeros past ``columns``. After ``begin``
    get(held, c, values): values[:width] = chunk c in float32
    anew(held): what ``get`` widened is forgotten, so that it takes no registers over a reduction
    whole(c, columns): whether chunk c of every thread is inside the row: true for all but the last, as a rule
    inside(i, thread, columns): whether element i of the thread's chunks · width is one of the row
    put(pointer, start, thread, columns, c, values): the row's chunk c = values[:width], rounded; nothing past ``columns``
    flush(pointer, start, thread, columns): after the last ``put`` of a row
    """

    words: int
    begin: object
    load: object
    get: object
    anew: object
    whole: object
    inside: object
    put: object
    flush: object


@cache
def row_access(dtype, width, walk, threads, chunks, *, rows_per_block=1, slot=0, cached=False):
    """The Access to rows of dtype by one of the walks.

    width: elements a chunk, those of a 16-byte access to the row; dtype may be a wider one (float32 weights of a 16-bit row).
    slot: staged rows of a kernel that are on their way at once have different ones. cached keeps what is loaded in L1.
    """
    if walk == "wide":
        return _wide(dtype, width, threads, chunks, cached)
    if walk == "staged":
        return _staged(dtype, width, threads, chunks, rows_per_block, slot)
    return _strided(dtype, width, threads, chunks)


@cache
def _whole(threads, width):
    @cuda.jit(device=True, inline="always")
    def whole(c, columns):
        return uint32(uint32(c + 1) * uint32(threads * width)) <= columns

    return whole


@cache
def anew_words(count):
    """anew(held) of so many registers of narrow elements."""
    held_again = ptx.hold(count, "r")

    @cuda.jit(device=True, inline="always")
    def anew(held):
        held_again(held, 0)

    return anew


@cuda.jit(device=True, inline="always")
def _as_they_are(held):
    pass


@cuda.jit(device=True, inline="always")
def _nothing(pointer, start, thread, columns):
    pass


def _wide(dtype, width, threads, chunks, cached):
    part = vector_width(dtype)
    parts = width // part
    words = 4 * parts  # a chunk's
    read = ptx.ld_global_v4 if cached else ptx.ld_global_stream_v4
    narrow = dtype.itemsize == 2
    unpack, pack = pair_conversions(dtype)

    @cuda.jit(device=True, inline="always")
    def inside(i, thread, columns):
        # the length is a multiple of width: a chunk is inside or outside as a whole
        return uint32((uint32(i // width) * uint32(threads) + thread) * uint32(width)) < columns

    @cuda.jit(device=True, inline="always")
    def load(pointer, start, thread, columns, held):
        own = start + int64(uint32(thread * uint32(width)))
        for c in range(chunks):
            if inside(c * width, thread, columns):
                for p in range(parts):
                    loaded = read(ptx.address(pointer, own + int64(c * threads * width + p * part)))
                    for j in range(4):
                        held[c * words + 4 * p + j] = loaded[j]
            else:
                for j in range(words):
                    held[c * words + j] = uint32(0)

    if narrow:

        @cuda.jit(device=True, inline="always")
        def get(held, c, values):
            for j in range(words):
                pair = unpack(held[c * words + j])
                values[2 * j] = pair[0]
                values[2 * j + 1] = pair[1]

        @cuda.jit(device=True, inline="always")
        def put(pointer, start, thread, columns, c, values):
            if inside(c * width, thread, columns):
                own = start + int64(uint32(thread * uint32(width))) + int64(c * threads * width)
                ptx.st_global_v4(
                    ptx.address(pointer, own),
                    pack(values[0], values[1]),
                    pack(values[2], values[3]),
                    pack(values[4], values[5]),
                    pack(values[6], values[7]),
                )

    else:

        @cuda.jit(device=True, inline="always")
        def get(held, c, values):
            for j in range(words):
                values[j] = ptx.float_from_bits(held[c * words + j])

        @cuda.jit(device=True, inline="always")
        def put(pointer, start, thread, columns, c, values):
            if inside(c * width, thread, columns):
                own = start + int64(uint32(thread * uint32(width))) + int64(c * threads * width)
                ptx.st_global_v4_f32(ptx.address(pointer, own), values[0], values[1], values[2], values[3])

    anew = anew_words(chunks * words) if narrow else _as_they_are
    return Access(chunks * words, _nothing, load, get, anew, _whole(threads, width), inside, put, _nothing)


def _words(dtype, width, threads, chunks):
    """(words a chunk, elements a word, get, anew, inside) of the walks that take a word's columns at a time.

    The columns are those of a row whose 16 bytes have ``width`` elements, also where dtype is a wider one.
    """
    elements = 2 if dtype.itemsize == 2 else 1
    words = width // elements
    row_elements = width // 4  # of a word of the row
    unpack, _ = pair_conversions(dtype)

    @cuda.jit(device=True, inline="always")
    def inside(i, thread, columns):
        word = uint32(uint32(i // row_elements) * uint32(threads) + thread)
        return uint32(uint32(word * uint32(row_elements)) + uint32(i % row_elements)) < columns

    if elements == 1:

        @cuda.jit(device=True, inline="always")
        def get(held, c, values):
            for j in range(width):
                values[j] = ptx.float_from_bits(held[c * width + j])

        return words, elements, get, _as_they_are, inside

    @cuda.jit(device=True, inline="always")
    def get(held, c, values):
        for j in range(words):
            pair = unpack(held[c * words + j])
            values[2 * j] = pair[0]
            values[2 * j + 1] = pair[1]

    return words, elements, get, anew_words(chunks * words), inside


@cache
def word_columns(width, threads):
    """column(i, thread) -> which column of the row is element i of a thread's chunks · width, in the walks by words."""
    row_elements = width // 4

    @cuda.jit(device=True, inline="always")
    def column(i, thread):
        word = uint32(uint32(i // row_elements) * uint32(threads) + thread)
        return int64(uint32(word * uint32(row_elements))) + int64(i % row_elements)

    return column


def _strided(dtype, width, threads, chunks):
    # single elements go through L1: neighbouring rows and registers share sectors
    _, to_storage = conversions(dtype)
    words, elements, get, anew, inside = _words(dtype, width, threads, chunks)
    column = word_columns(width, threads)

    if elements == 1:

        @cuda.jit(device=True, inline="always")
        def load(pointer, start, thread, columns, held):
            for i in range(chunks * words):
                held[i] = uint32(0)
                if inside(i, thread, columns):
                    held[i] = ptx.bits_from_float(pointer[start + column(i, thread)])

    else:

        @cuda.jit(device=True, inline="always")
        def load(pointer, start, thread, columns, held):
            for w in range(chunks * words):
                held[w] = uint32(0)
                for h in range(2):
                    i = 2 * w + h
                    if inside(i, thread, columns):
                        bits = uint32(pointer[start + column(i, thread)])
                        held[w] = uint32(held[w] | uint32(bits << uint32(16 * h)))

    @cuda.jit(device=True, inline="always")
    def put(pointer, start, thread, columns, c, values):
        for j in range(width):
            i = c * width + j
            if inside(i, thread, columns):
                pointer[start + column(i, thread)] = to_storage(values[j])

    return Access(chunks * words, _nothing, load, get, anew, _whole(threads, width), inside, put, _nothing)


def _slot_elements(dtype, threads, chunks):
    """Elements of shared memory for a row: a piece for the head before it, and one behind for the tail."""
    return (threads * chunks + 2) * vector_width(dtype)


def shared_bytes(dtype, walk, threads, chunks, rows_per_block, arrays):
    """Of the staged walk, for ``arrays`` slots."""
    return arrays * rows_per_block * _slot_elements(dtype, threads, chunks) * dtype.itemsize if walk == "staged" else 0


@cache
def _words_in_shared(dtype, width, threads, chunks):
    """(collect, spread, read, write) of a thread's words of a row in shared memory, whose first is at the address ``own``.

    collect(own, thread, columns, held), spread(own, thread, columns, c, values): as Access's load and put
    read(address), write(address, element): one element
    """
    itemsize = dtype.itemsize
    _, to_storage = conversions(dtype)
    words, elements, _, _, inside = _words(dtype, width, threads, chunks)
    read, write = (ptx.ld_shared_f32, ptx.st_shared_f32) if itemsize == 4 else (ptx.ld_shared_u16, ptx.st_shared_u16)
    _, pack = pair_conversions(dtype)
    whole = _whole(threads, width)

    @cuda.jit(device=True, inline="always")
    def take(at, odd):
        # a row may begin in the middle of a word of shared memory; all of its threads then read halves
        if elements == 2 and odd:
            upper = uint32(ptx.ld_shared_u16(uint32(at + uint32(2))))
            return uint32(uint32(ptx.ld_shared_u16(at)) | uint32(upper << uint32(16)))
        return ptx.ld_shared(at)

    if elements == 1:

        @cuda.jit(device=True, inline="always")
        def take_checked(at, odd, w, thread, columns):
            return ptx.ld_shared(at) if inside(w, thread, columns) else uint32(0)

        @cuda.jit(device=True, inline="always")
        def give(at, odd, values, j):
            write(at, values[j])

        @cuda.jit(device=True, inline="always")
        def give_checked(at, odd, w, thread, columns, values, j):
            if inside(w, thread, columns):
                write(at, values[j])

    else:

        @cuda.jit(device=True, inline="always")
        def take_checked(at, odd, w, thread, columns):
            word = uint32(0)
            if inside(2 * w + 1, thread, columns):
                word = take(at, True)
            elif inside(2 * w, thread, columns):
                word = uint32(ptx.ld_shared_u16(at))
            return word

        @cuda.jit(device=True, inline="always")
        def give(at, odd, values, j):
            if odd:
                write(at, to_storage(values[j]))
                write(uint32(at + uint32(2)), to_storage(values[j + 1]))
            else:
                ptx.st_shared(at, pack(values[j], values[j + 1]))

        @cuda.jit(device=True, inline="always")
        def give_checked(at, odd, w, thread, columns, values, j):
            if inside(2 * w, thread, columns):
                write(at, to_storage(values[j]))
            if inside(2 * w + 1, thread, columns):
                write(uint32(at + uint32(2)), to_storage(values[j + 1]))

    @cuda.jit(device=True, inline="always")
    def collect(own, thread, columns, held):
        odd = uint32(own & uint32(2)) != uint32(0)
        for c in range(chunks):
            if not whole(c, columns):
                for w in range(c * words, (c + 1) * words):
                    held[w] = take_checked(uint32(own + uint32(4 * w * threads)), odd, w, thread, columns)
            elif odd:
                for w in range(c * words, (c + 1) * words):
                    held[w] = take(uint32(own + uint32(4 * w * threads)), True)
            else:
                for w in range(c * words, (c + 1) * words):
                    held[w] = take(uint32(own + uint32(4 * w * threads)), False)

    @cuda.jit(device=True, inline="always")
    def spread(own, thread, columns, c, values):
        odd = uint32(own & uint32(2)) != uint32(0)
        if not whole(c, columns):
            for j in range(words):
                w = c * words + j
                give_checked(uint32(own + uint32(4 * w * threads)), odd, w, thread, columns, values, j * elements)
        elif odd:
            for j in range(words):
                give(uint32(own + uint32(4 * (c * words + j) * threads)), True, values, j * elements)
        else:
            for j in range(words):
                give(uint32(own + uint32(4 * (c * words + j) * threads)), False, values, j * elements)

    return collect, spread, read, write


def _staged(dtype, width, threads, chunks, rows_per_block, slot):
    itemsize = dtype.itemsize
    slot_bytes = _slot_elements(dtype, threads, chunks) * itemsize
    words, _, get, anew, inside = _words(dtype, width, threads, chunks)
    collect, spread, read, write = _words_in_shared(dtype, width, threads, chunks)

    @cuda.jit(device=True, inline="always")
    def pieces_at():
        # where the row's pieces lie in shared memory; its head lies before
        row = uint32(uint32(cuda.threadIdx.x) // uint32(threads)) + uint32(slot * rows_per_block)
        return uint32(
            ptx.shared_address(cuda.shared.array(0, uint32)) + uint32(uint32(row * uint32(slot_bytes)) + uint32(16))
        )

    @cuda.jit(device=True, inline="always")
    def head_of(address, columns):
        # elements before the first 16-byte address
        return min(uint32(uint32(uint32(0) - uint32(address)) & uint32(15)) // uint32(itemsize), columns)

    @cuda.jit(device=True, inline="always")
    def own_at(pointer, start, thread, columns):
        # where the thread's first word lies in shared memory
        head = uint32(head_of(ptx.address(pointer, start), columns))
        return uint32(pieces_at() + uint32(thread << uint32(2)) - uint32(head * uint32(itemsize)))

    @cuda.jit(device=True, inline="always")
    def begin(pointer, start, thread, columns):
        to = pieces_at()
        at = ptx.address(pointer, start)
        head_bytes = uint32(uint32(head_of(at, columns)) * uint32(itemsize))
        if uint32(thread * uint32(itemsize)) < head_bytes:
            write(uint32(to - head_bytes + uint32(thread * uint32(itemsize))), pointer[start + int64(thread)])
        behind = uint32(uint32(columns * uint32(itemsize)) - head_bytes)
        source = at + uint64(head_bytes)
        for c in range(chunks):
            done = uint32(uint32(uint32(c * threads) + thread) << uint32(4))
            if done < behind:
                count = min(uint32(behind - done), uint32(16))
                ptx.cp_async_16_zfill(uint32(to + done), source + uint64(done), count)
        ptx.cp_async_commit()

    @cuda.jit(device=True, inline="always")
    def load(pointer, start, thread, columns, held):
        ptx.cp_async_wait(0)
        cuda.syncthreads()
        collect(own_at(pointer, start, thread, columns), thread, columns, held)
        cuda.syncthreads()

    @cuda.jit(device=True, inline="always")
    def put(pointer, start, thread, columns, c, values):
        spread(own_at(pointer, start, thread, columns), thread, columns, c, values)

    @cuda.jit(device=True, inline="always")
    def flush(pointer, start, thread, columns):
        cuda.syncthreads()
        shared = pieces_at()
        at = ptx.address(pointer, start)
        head = uint32(head_of(at, columns))
        head_bytes = uint32(head * uint32(itemsize))
        if thread < head:
            pointer[start + int64(thread)] = read(uint32(shared - head_bytes + uint32(thread * uint32(itemsize))))
        full = uint32(uint32(columns - head) // uint32(width))
        target = at + uint64(head_bytes)
        for c in range(chunks):
            piece = uint32(uint32(c * threads) + thread)
            if piece < full:
                done = uint32(piece << uint32(4))
                w = ptx.ld_shared_v4(uint32(shared + done))
                ptx.st_global_v4(target + uint64(done), w[0], w[1], w[2], w[3])
        last = uint32(uint32(full * uint32(width)) + thread)
        if last < uint32(columns - head):
            pointer[start + int64(uint32(head + last))] = read(uint32(shared + uint32(last * uint32(itemsize))))
        cuda.syncthreads()

    return Access(chunks * words, begin, load, get, anew, _whole(threads, width), inside, put, flush)


class Stream(NamedTuple):
    """Rows on their way through a ring of slots in shared memory. Each block takes every step-th row.

    step(): rows between two of a block
    begin(rows_of, row, rows, columns): make the ring ready and send for the first rows, from ``row`` on -> ring
    take(rows_of, row, rows, columns, ring, turn, thread, held): held[:] = the thread's part of ``row``, the block's
        turn-th; zeros past ``columns``. A row after those on their way is sent for -> the row's slot
    target(pointer, start, slot, a): what ``access.put`` and ``flush`` take for the result in place of a pointer; a: the array
        of the slot, 0 or 1, in whose place it may stay
    end(): after the last row
    access: to the results

    rows_of: (x, x_stride, residual, residual_stride), in elements; ring: two addresses.
    held has the words of the walk: those of both arrays if their elements have 16 bits, else those of their sum.
    A block meets its own threads once in ``take``: shared memory of theirs that was read before it may be written after it.
    """

    step: object
    begin: object
    take: object
    target: object
    end: object
    access: object


def _array_bytes(walk, threads, chunks):
    """Of a slot, a row's part of one array: in a staged walk also a piece more, where the row begins inside of one."""
    return 16 * threads * chunks + (0 if walk == "wide" else 16)


@cache
def stream(dtype, walk, threads, chunks, slots, arrays):
    """The Stream of one or two arrays, for the wide or the staged walk, which needs two slots.

    A staged row comes with all of the 16-byte pieces that have some of it, but for those that reach out of the array; these
    are the first row's first and the last row's last, whose elements threads bring. The result goes back to the same place in the
    slot, from where a bulk copy takes the pieces that are the row's alone, and threads the elements before and behind them.
    """
    itemsize = dtype.itemsize
    width = vector_width(dtype)
    words = 4 * chunks
    staged = walk != "wide"
    array_bytes = _array_bytes(walk, threads, chunks)
    slot_bytes = arrays * array_bytes
    summed = itemsize == 4  # two float32 arrays are held as their sum
    wide = row_access(dtype, width, "wide", threads, chunks)
    collect, spread, read, write = _words_in_shared(dtype, width, threads, chunks)

    @cuda.jit(device=True, inline="always")
    def step():
        return int64(cuda.gridDim.x)

    @cuda.jit(device=True, inline="always")
    def span(at, row, rows, columns):
        # of a staged row, from the 16-byte address before it on: where it begins, ends, and what a copy may read
        shift = uint32(uint32(at) & uint32(15))
        behind = uint32(shift + uint32(columns * uint32(itemsize)))
        low = uint32(16) if row == int64(0) and shift != uint32(0) else uint32(0)
        high = uint32(behind if row == rows - int64(1) else uint32(behind + uint32(15))) & uint32(0xFFFFFFF0)
        return shift, behind, low, uint32(high)

    @cuda.jit(device=True, inline="always")
    def send(rows_of, row, rows, columns, ring, slot):
        x, x_stride, residual, residual_stride = rows_of
        to, barrier = uint32(ring[0] + uint32(slot * uint32(slot_bytes))), uint32(ring[1] + uint32(slot << uint32(3)))
        source = ptx.address(x, row * x_stride)
        low, copied = uint32(0), uint32(columns * uint32(itemsize))
        if staged:
            shift, _, low, high = span(source, row, rows, columns)
            low, copied = uint32(low - shift), uint32(high - low)
            to = uint32(to + uint32(low + shift))
            source = source + uint64(int64(int32(low)))
        mbarrier_expect(barrier, uint32(copied * uint32(arrays)))
        bulk_load(to, source, copied, barrier)
        if arrays == 2:
            source = ptx.address(residual, row * residual_stride)
            if staged:
                source = source + uint64(int64(int32(low)))
            bulk_load(uint32(to + uint32(array_bytes)), source, copied, barrier)

    @cuda.jit(device=True, inline="always")
    def begin(rows_of, row, rows, columns):
        base = ptx.shared_address(cuda.shared.array(0, uint8))
        barriers = ptx.shared_address(cuda.shared.array(slots, uint64))
        ring = (uint32(uint32(base + uint32(127)) & uint32(0xFFFFFF80)), barriers)
        if uint32(cuda.threadIdx.x) == uint32(0):
            for s in range(slots):
                mbarrier_init(uint32(barriers + uint32(8 * s)), uint32(1))
            fence_mbarrier_init()
            for s in range(slots):
                ahead = row + int64(s) * step()
                if ahead < rows:
                    send(rows_of, ahead, rows, columns, ring, uint32(s))
        cuda.syncthreads()
        return ring

    @cuda.jit(device=True, inline="always")
    def arrived(ring, turn):
        slot = uint32(turn % uint32(slots))
        mbarrier_wait(uint32(ring[1] + uint32(slot << uint32(3))), uint32(uint32(turn // uint32(slots)) & uint32(1)))
        return uint32(ring[0] + uint32(slot * uint32(slot_bytes)))

    @cuda.jit(device=True, inline="always")
    def add(held, other):
        # the second array's words to the first's
        for i in range(words):
            if summed:
                both = ptx.float_from_bits(held[i]) + ptx.float_from_bits(other[i])
                held[i] = ptx.bits_from_float(both)
            else:
                held[words + i] = other[i]

    if not staged:

        @cuda.jit(device=True, inline="always")
        def of_slot(own, thread, columns, held):
            for c in range(chunks):
                if uint32(uint32(uint32(c * threads) + thread) * uint32(width)) < columns:
                    loaded = ptx.ld_shared_v4(uint32(own + uint32(16 * c * threads)))
                    for j in range(4):
                        held[4 * c + j] = loaded[j]
                else:
                    for j in range(4):
                        held[4 * c + j] = uint32(0)

        @cuda.jit(device=True, inline="always")
        def take(rows_of, row, rows, columns, ring, turn, thread, held):
            at = arrived(ring, turn)
            own = uint32(at + uint32(thread << uint32(4)))
            of_slot(own, thread, columns, held)
            if arrays == 2:
                other = cuda.local.array(words, uint32)
                of_slot(uint32(own + uint32(array_bytes)), thread, columns, other)
                add(held, other)
            cuda.syncthreads()
            ahead = row + int64(slots) * step()
            if uint32(cuda.threadIdx.x) == uint32(0) and ahead < rows:
                send(rows_of, ahead, rows, columns, ring, uint32(turn % uint32(slots)))
            return at

        @cuda.jit(device=True, inline="always")
        def target(pointer, start, slot, a):
            return pointer

        return Stream(step, begin, take, target, nothing, wide)

    _, _, get, anew, inside = _words(dtype, width, threads, chunks)
    # a slot is filled again two rows after its own, when the copy of the result has long read it; of two slots, one row after
    lag = min(slots - 1, 2)
    pending = (lag - 1) * arrays  # copies of the rows since, one an array

    @cuda.jit(device=True, inline="always")
    def bring_edges(array, start, row, rows, thread, columns, to):
        at = ptx.address(array, start)
        shift, behind, low, high = span(at, row, rows, columns)
        own = uint32(to + uint32(thread * uint32(itemsize)))
        if uint32(shift + uint32(thread * uint32(itemsize))) < low:
            write(uint32(own + shift), array[start + int64(thread)])
        if uint32(high + uint32(thread * uint32(itemsize))) < behind:
            last = uint32(uint32(uint32(high - shift) // uint32(itemsize)) + thread)
            write(uint32(own + high), array[start + int64(last)])

    @cuda.jit(device=True, inline="always")
    def take(rows_of, row, rows, columns, ring, turn, thread, held):
        x, x_stride, residual, residual_stride = rows_of
        at = arrived(ring, turn)
        if row == int64(0) or row == rows - int64(1):
            bring_edges(x, row * x_stride, row, rows, thread, columns, at)
            if arrays == 2:
                other_at = uint32(at + uint32(array_bytes))
                bring_edges(residual, row * residual_stride, row, rows, thread, columns, other_at)
            cuda.syncthreads()
        shift = uint32(uint32(ptx.address(x, row * x_stride)) & uint32(15))
        own = uint32(uint32(at + shift) + uint32(thread << uint32(2)))
        collect(own, thread, columns, held)
        if arrays == 2:
            other = cuda.local.array(words, uint32)
            collect(uint32(own + uint32(array_bytes)), thread, columns, other)
            add(held, other)
        cuda.syncthreads()
        # the slot of a row before: all have brought its edges away, and the copies that leave it have read it, or soon will have
        ahead = row + int64(slots - lag) * step()
        if uint32(cuda.threadIdx.x) == uint32(0) and turn >= uint32(lag) and ahead < rows:
            bulk_wait_read(pending)
            send(rows_of, ahead, rows, columns, ring, uint32(uint32(turn - uint32(lag)) % uint32(slots)))
        return at

    @cuda.jit(device=True, inline="always")
    def target(pointer, start, slot, a):
        shift = uint32(uint32(ptx.address(pointer, start)) & uint32(15))
        return pointer, uint32(slot + uint32(shift + uint32(a * array_bytes)))

    @cuda.jit(device=True, inline="always")
    def put(pointer, start, thread, columns, c, values):
        _, at = pointer
        spread(uint32(at + uint32(thread << uint32(2))), thread, columns, c, values)

    @cuda.jit(device=True, inline="always")
    def flush(pointer, start, thread, columns):
        array, at = pointer
        fence_proxy_async_shared()
        cuda.syncthreads()
        to = ptx.address(array, start)
        head = min(uint32(uint32(uint32(0) - at) & uint32(15)) // uint32(itemsize), columns)
        head_bytes = uint32(head * uint32(itemsize))
        full = uint32(uint32(columns - head) // uint32(width))
        if thread == uint32(0):
            bulk_store(to + uint64(head_bytes), uint32(at + head_bytes), uint32(full << uint32(4)))
            bulk_commit()
        if thread < head:
            array[start + int64(thread)] = read(uint32(at + uint32(thread * uint32(itemsize))))
        last = uint32(uint32(head + uint32(full * uint32(width))) + thread)
        if last < columns:
            array[start + int64(last)] = read(uint32(at + uint32(last * uint32(itemsize))))

    @cuda.jit(device=True, inline="always")
    def end():
        # a block's shared memory is given to others when it ends
        if uint32(cuda.threadIdx.x) == uint32(0):
            bulk_wait_read(0)

    access = Access(words, _nothing, _nothing, get, anew, _whole(threads, width), inside, put, flush)
    return Stream(step, begin, take, target, end, access)


@cuda.jit(device=True, inline="always")
def _meet_all():
    cuda.syncthreads()


@cache
def reductions(threads, cluster=1, meet=_meet_all):
    """(row_sum, row_max): of one float32 a thread over the threads of a row, in each of them, in a fixed order.

    Each takes (x, scratch); scratch is shared memory of SCRATCH · cluster float32, used where a row has more than a warp, and
    then only once between two barriers: a kernel gives each of its reductions its own. One barrier a reduction: meet(), of those
    threads, where a block has others.
    """
    return _reduction(threads, cluster, _plus, meet), _reduction(threads, cluster, ptx.fmax, meet)


@cache
def row_max_nan(threads, cluster=1):
    """As ``reductions``'s row_max, but a NaN wins."""
    return _reduction(threads, cluster, ptx.fmax_nan)


def _reduction(threads, cluster, combine, meet=_meet_all):
    lanes = min(threads, ptx.WARP)
    parts = threads // lanes * cluster
    across_lanes = _butterfly(lanes, combine)
    exchange = _exchange(threads // lanes, cluster, 1, meet)
    fewer = min(parts, ptx.WARP)
    rounds = parts // fewer
    across_parts = _butterfly(fewer, combine)

    @cuda.jit(device=True, inline="always")
    def reduce(x, scratch):
        x = across_lanes(x)
        if parts > 1:
            whole = cuda.local.array(1, float32)
            whole[0] = x
            exchange(whole, scratch)
            # the parts lie in each warp as often as they fit, so that every lane ends with the whole
            lane = uint32(ptx.lane_id() % uint32(fewer))
            x = scratch[lane]
            for r in range(1, rounds):
                x = combine(x, scratch[lane + uint32(r * fewer)])
            x = across_parts(x)
        return x

    return reduce


@cache
def _exchange(warps, cluster, count, meet=_meet_all):
    """exchange(x, scratch): scratch[k · parts + part] = x[k] of every warp of the row; parts are warps, block after block."""
    parts = warps * cluster

    @cuda.jit(device=True, inline="always")
    def exchange(x, scratch):
        lane = ptx.lane_id()
        warp = uint32(uint32(cuda.threadIdx.x) // uint32(ptx.WARP))
        if cluster == 1:
            if lane == uint32(0):
                for k in range(count):
                    scratch[uint32(k * parts) + warp] = x[k]
            meet()
        else:
            # lane r of each warp tells block r
            if lane < uint32(cluster):
                part = uint32(uint32(cluster_rank() * uint32(warps)) + warp)
                to = map_shared(uint32(ptx.shared_address(scratch) + uint32(part << uint32(2))), lane)
                for k in range(count):
                    st_cluster_f32(uint32(to + uint32(4 * k * parts)), x[k])
            cluster_arrive()
            cluster_wait()

    return exchange


@cache
def several_sums(threads, count, cluster=1):
    """row_sums(x, scratch): x[k] = the sum of x[k] over the threads of a row, for ``count`` registers behind one barrier.

    scratch: count · SCRATCH · cluster float32 of shared memory, for this reduction alone.
    """
    lanes = min(threads, ptx.WARP)
    parts = threads // lanes * cluster
    across_lanes = _butterfly(lanes, _plus)
    exchange = _exchange(threads // lanes, cluster, count)
    fewer = min(parts, ptx.WARP)
    rounds = parts // fewer
    across_parts = _butterfly(fewer, _plus)

    @cuda.jit(device=True, inline="always")
    def row_sums(x, scratch):
        for k in range(count):
            x[k] = across_lanes(x[k])
        if parts > 1:
            exchange(x, scratch)
            lane = uint32(ptx.lane_id() % uint32(fewer))
            for k in range(count):
                x[k] = scratch[lane + uint32(k * parts)]
                for r in range(1, rounds):
                    x[k] += scratch[lane + uint32(k * parts + r * fewer)]
                x[k] = across_parts(x[k])

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
