"""All layers of a decoder for one token of one sequence, in one launch (sm_90): the weights never stop streaming.

    x = x + Wo · attention(rotary(Wqkv · norm(x)), cache)        and then        x = x + Wdown · (silu(gate) · up) of norm(x)

As many blocks as there are multiprocessors live for the whole step. In each a warp brings boxes of the weights, of all products
of all layers one after another, into a ring in shared memory as fast as it empties. The other warps multiply, and at the end of a
phase wait for those of all other blocks, since the next one needs the whole of what this one made; meanwhile the ring fills with
what comes next. So memory works on while the blocks meet, normalise, or attend to the cache:

    memory      |Wqkv of layer i .......|Wo ......|Wgate_up .....................|Wdown .........|Wqkv of layer i + 1 …
    a block     |norm|multiply .....|meet|rotary, attention|meet|multiply|meet|norm|multiply ............|meet|multiply …

The work of a phase is cut as the kernels do that are launched one by one (``rms_norm``, ``matmul_stream``, ``rotary``,
``decode_tensor``), whose functions these are, and whose bits the result has: a product is tiles of so many fragments of 16
columns of y, each over the whole of k, which ``teams`` of warps take by turns, step by step:

    a stage:    | step s of team 0: consumers · 16 weight rows x 128 bytes | step s + 1 of team 1 | … |

The one row of x lies in shared memory for a whole phase, 16-bit, with the words of each 32 bytes in the order in which int8
fragments want them (``fragments_from_int8``); the seven other rows of a fragment's narrow side are one row of zeros.

Blocks meet by counters in device memory, one a meeting, that go back to zero when the next meeting shows that all have left. All
blocks must run at once: the launch is a cooperative one.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels import decode, decode_tensor, matmul_stream, norm, rows
from nbkernels.kernels.activation import silu
from nbkernels.kernels.decode_merge import places
from nbkernels.kernels.elements import conversions, pair_conversions, vector_width
from nbkernels.kernels.epilogue import Epilogue, combine
from nbkernels.kernels.rotary import copy_function, rotation
from nbkernels.kernels.rows import SCRATCH
from nbkernels.kernels.scores import score_factors
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.tensor_map import tensor_map
from nbkernels.ptx.bulk import EVICT_FIRST, tensor_load_2d, tensor_load_2d_hint
from nbkernels.ptx.mbarrier import (
    barrier_sync,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbkernels.ptx.widen import fragments_from_words, leave_widening_constants, widening_constants

QKV, OUTPUT, GATE_UP, DOWN = range(4)
PHASES = 4  # that multiply
MEETINGS = 5  # a layer: one behind each of them, and behind attention
# int64 of what a phase of a layer reads: a tensor map of its weight, one of its scales, then addresses
RECORD = 40
MAP_WORDS = 16
NORM_AT, SCALES_AT, BIAS_AT, K_AT, V_AT = range(32, 37)
STEP_BYTES = matmul_stream.ROW_BYTES
FRAGMENT_BYTES = matmul_stream.FRAGMENT_BYTES
COLUMNS = matmul_stream.FRAGMENT_COLUMNS
BOX_SCALES = matmul_stream.SCALE_BYTES
LINE = 64  # 16-bit elements of a line of the caches
ALL, NORMING, ATTENDING = 1, 2, 3  # numbers of the block's barriers, by the warps that meet
HEAD_BYTES = 4096  # of shared memory, in front of the ring
MOST_STAGES, LEAST_STAGES = 32, 4
SHARED_BYTES = 227 * 1024  # of a block, at most
MOST_WARPS = 11  # that multiply: attention takes 168 registers a thread


class LayerArrays(NamedTuple):
    """A layer's arrays on the device. weights: (values, scales or None) of each phase; norms: before attention, before the gate.

    bias: of q, k and v, or None; k, v: the pages of the cache.
    """

    norms: tuple
    weights: tuple
    bias: object
    k: object
    v: object


@dataclass(frozen=True)
class Product:
    """How a phase's product is cut: tiles of ``consumers`` fragments over ``steps`` of k, ``turns`` of them a block."""

    columns: int
    depth: int
    consumers: int
    teams: int
    steps: int
    tiles: int
    turns: int


@dataclass(frozen=True)
class Shape:
    """Of a layer: sizes in elements. half: of the rotated part of a head; bias: whether the product of q, k, v has one."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    half: int
    feed_forward: int
    bias: bool


@cache
def _multiply(dtype, weight, group_size):
    """multiply(w, w_lane, x, x_step, constants, scale, sums): sums[0 : 4] += the products of a step, for one fragment.

    w: the shared address of its 16 rows, x, of this lane's row in ldmatrix's terms, x_step the step's place in the row. scale: of
    groups, that of a row's group r at ``rounds`` · (0: rows 0 to 7, 1: rows 8 to 15) + r. The order of sums is that of
    ``matmul_stream``.
    """
    update = ptx.mma_update(str(dtype))
    if weight == "dense":

        @cuda.jit(device=True, inline="always")
        def multiply_dense(w, w_lane, x, x_step, x_mask, constants, scale, sums):
            a = cuda.local.array(16, uint32)
            b = cuda.local.array(8, uint32)
            for pair in range(2):
                found = ptx.ldmatrix_x4(uint32(x + (uint32(x_step + uint32(64 * pair)) & x_mask)))
                for i in range(4):
                    b[4 * pair + i] = found[i]
            for n in range(4):
                found = ptx.ldmatrix_x4(uint32(w + (w_lane ^ uint32(32 * n))))
                for i in range(4):
                    a[4 * n + i] = found[i]
            for n in range(4):
                update(sums, 0, a, 4 * n, b[2 * n], b[2 * n + 1])

        return multiply_dense

    fragments = fragments_from_words(dtype)
    groups = weight == "groups"
    pieces = _pieces_a_scale(group_size) if groups else 1
    rounds = 4 // pieces

    @cuda.jit(device=True, inline="always")
    def multiply_int8(w, w_lane, x, x_step, x_mask, constants, scale, sums):
        # all of the step is on its way before the first product
        raw = cuda.local.array(16, uint32)
        b = cuda.local.array(16, uint32)
        a = cuda.local.array(8, uint32)
        part = cuda.local.array(4, float32)
        for n in range(4):
            found = ptx.ldmatrix_x4(uint32(w + (w_lane ^ uint32(32 * n))))
            for i in range(4):
                raw[4 * n + i] = found[i]
        for n in range(4):
            found = ptx.ldmatrix_x4(uint32(x + (uint32(x_step + uint32(64 * n)) & x_mask)))
            for i in range(4):
                b[4 * n + i] = found[i]
        for r in range(rounds):
            if groups:
                for i in range(4):
                    part[i] = float32(0.0)
            for p in range(pieces):
                n = r * pieces + p
                words = raw[4 * n], raw[4 * n + 1], raw[4 * n + 2], raw[4 * n + 3]
                fragments(a, 0, words[0], words[1], words[2], words[3], constants[0], constants[1])
                for s in range(2):
                    at = 4 * n + 2 * s
                    if groups:
                        update(part, 0, a, 4 * s, b[at], b[at + 1])
                    else:
                        update(sums, 0, a, 4 * s, b[at], b[at + 1])
            if groups:
                for i in range(4):
                    sums[i] = ptx.fma(part[i], scale[rounds * (i >> 1) + r], sums[i])

    return multiply_int8


def _pieces_a_scale(group_size):
    return 4 if group_size % 128 == 0 else 2 if group_size % 64 == 0 else 1


def _stage_bytes(products, weight):
    """From one stage to the next: of the product that takes most."""
    row = STEP_BYTES + (BOX_SCALES if weight == "groups" else 0)
    most = max(p.consumers * p.teams * COLUMNS * row for p in products)
    return -(-most // matmul_stream.SWIZZLE_BYTES) * matmul_stream.SWIZZLE_BYTES


def _attention_bytes(shape, dtype):
    keys = decode_tensor.step_keys(shape.head_dim, dtype.itemsize)
    return decode_tensor.block_bytes(shape.head_dim, dtype.itemsize, 1, keys, decode.WARPS, decode.STAGES)


def _row_bytes(products, step_k):
    """Of the longest x in shared memory."""
    return max(p.steps for p in products) * step_k * 2


@cuda.jit(device=True, inline="always")
def _meet_attending():
    barrier_sync(uint32(ATTENDING), uint32(decode.WARPS * ptx.WARP))


@cache
def _meet_norming(threads):
    @cuda.jit(device=True, inline="always")
    def meet():
        barrier_sync(uint32(NORMING), uint32(threads))

    return meet


@cache
def _of_phase(numbers):
    """pick(phase) -> the number of that phase, uint32."""
    first, second, third, fourth = numbers

    @cuda.jit(device=True, inline="always")
    def pick(phase):
        if phase == uint32(0):
            return uint32(first)
        if phase == uint32(1):
            return uint32(second)
        if phase == uint32(2):
            return uint32(third)
        return uint32(fourth)

    return pick


@cuda.jit(device=True, inline="always")
def _first(x, y):
    return x


@cuda.jit(device=True, inline="always")
def _second(x, y):
    return y


@cache
def _normalise(dtype, weight_dtype, columns, threads, chunks, put):
    """normalise(source, weight, inverse_columns, eps, scratch, again, to): ``rms_norm`` of a row, by so many threads.

    put(to, column, words): 8 elements to the row in shared memory.
    """
    width = vector_width(dtype)
    access = rows.row_access(dtype, width, "wide", threads, chunks)
    vector = rows.row_access(weight_dtype, width, "wide", threads, chunks, cached=True)
    load, get, inside = access.load, access.get, access.inside
    load_vector, get_vector = vector.load, vector.get
    words, vector_words = access.words, vector.words
    row_sum, _ = rows.reductions(threads, 1, _meet_norming(threads))
    root = norm.inverse_root(dtype, threads, chunks, 1, get, inside, row_sum)
    _, pack = pair_conversions(dtype)

    @cuda.jit(device=True, inline="always")
    def normalise(source, weight, inverse_columns, eps, scratch, again, to):
        held = cuda.local.array(words, uint32)
        vectors = cuda.local.array(vector_words, uint32)
        values = cuda.local.array(width, float32)
        operand = cuda.local.array(width, float32)
        thread = uint32(cuda.threadIdx.x)
        load_vector(weight, int64(0), thread, uint32(columns), vectors)
        load(source, int64(0), thread, uint32(columns), held)
        squares = float32(0.0)
        for c in range(chunks):
            get(held, c, values)
            for j in range(width):
                squares = ptx.fma(values[j], values[j], squares)
        squares = row_sum(squares, scratch)
        zero = float32(0.0)
        scale = root(held, zero, squares, zero, inverse_columns, eps, thread, uint32(columns), again)
        for c in range(chunks):
            get(held, c, values)
            get_vector(vectors, c, operand)
            for j in range(width):
                values[j] *= scale
            for j in range(width):
                values[j] *= operand[j]
            if inside(c * width, thread, uint32(columns)):
                column = uint32(uint32(uint32(c * threads) + thread) * uint32(width))
                put(
                    to,
                    column,
                    pack(values[0], values[1]),
                    pack(values[2], values[3]),
                    pack(values[4], values[5]),
                    pack(values[6], values[7]),
                )

    return normalise


@cache
def _put_words(weight):
    """put(to, column, w0, w1, w2, w3): elements column to column + 7 of x to shared memory, in the order of the products."""
    if weight == "dense":

        @cuda.jit(device=True, inline="always")
        def put_in_order(to, column, w0, w1, w2, w3):
            ptx.st_shared_v4(uint32(to + uint32(column << uint32(1))), w0, w1, w2, w3)

        return put_in_order

    @cuda.jit(device=True, inline="always")
    def put_by_turns(to, column, w0, w1, w2, w3):
        """Of 32 bytes the even words, then the odd ones."""
        at = uint32(to + uint32(uint32(column >> uint32(4)) << uint32(5)))
        at = uint32(at + uint32(column & uint32(8)))
        ptx.st_shared_v2(at, w0, w2)
        ptx.st_shared_v2(uint32(at + uint32(16)), w1, w3)

    return put_by_turns


def decoder_layers_kernel(dtype, weight, group_size, norm_dtype, shape, products, norm_part, warps, stages):
    """weight: "dense", "rows" or "groups" with its group_size (``matmul_stream``); products: a Product a phase.

    norm_part: threads and chunks of ``rms_norm``; warps: that multiply, one more brings the weights; stages: of the ring.
    """
    dense, groups = weight == "dense", weight == "groups"
    step_k = matmul_stream.step_columns(weight)
    step_row = 2 * step_k  # bytes of x a step
    row_scales = not dense and not groups
    heads, kv_heads, head_dim, half = shape.heads, shape.kv_heads, shape.head_dim, shape.half
    group = heads // kv_heads
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    width = vector_width(dtype)
    consumer_threads = warps * ptx.WARP
    stage_bytes = _stage_bytes(products, weight)
    row_in_ring = STEP_BYTES + (BOX_SCALES if groups else 0)  # of the weight, a step
    part_bytes = warps * COLUMNS * 4
    scale_groups = 4 // _pieces_a_scale(group_size) if groups else 1
    scale_count = 2 * scale_groups if groups else 1

    consumers_of = _of_phase(tuple(p.consumers for p in products))
    teams_of = _of_phase(tuple(p.teams for p in products))
    steps_of = _of_phase(tuple(p.steps for p in products))
    tiles_of = _of_phase(tuple(p.tiles for p in products))
    turns_of = _of_phase(tuple(p.turns for p in products))
    columns_of = _of_phase(tuple(p.columns for p in products))
    depth_of = _of_phase(tuple(p.depth for p in products))

    multiply = _multiply(dtype, weight, group_size)
    read_scales = matmul_stream.read_scales_function(scale_groups, 2) if groups else None
    put = _put_words(weight)
    normalise = _normalise(dtype, norm_dtype, shape.hidden, *norm_part, put)
    norm_threads = norm_part[0]
    of_norm = _second if norm_dtype == np.float32 else _first
    from_storage, to_storage = conversions(dtype)
    has_bias = shape.bias
    of_qkv = combine(Epilogue(row_scales, has_bias))
    of_added = combine(Epilogue(row_scales, residual=True))
    of_gate = combine(Epilogue(row_scales))

    rotate, clear = rotation(dtype, half, width)
    copy = copy_function(width)
    items = half // width + (head_dim - 2 * half) // width  # of a head's rotation
    head_chunks = head_dim // width
    group_items = group * items
    attention_threads = decode.WARPS * ptx.WARP
    attend = decode_tensor.walk_function(
        dtype, head_dim, 1, decode.SPLIT, decode_tensor.step_keys(head_dim, 2), decode.WARPS, decode.STAGES,
        False, False, True, False, False, True, False, None, _meet_attending,
    )  # fmt: skip

    full_at, free_at = 0, 8 * MOST_STAGES
    constants_at = 16 * MOST_STAGES
    zeros_at = constants_at + 16
    parts_at = zeros_at + 16
    assert parts_at + 2 * part_bytes <= HEAD_BYTES and stages <= MOST_STAGES
    ring_at = HEAD_BYTES
    row_at = ring_at + stages * stage_bytes  # of x, and of attention: they take turns

    @cuda.jit(device=True, inline="always")
    def bring(layers, table, base, block, lane):
        """Every box of every weight that the block multiplies with, in order."""
        stage, parity = uint32(0), uint32(0)
        number = uint32(0)
        while number < uint32(layers * uint32(PHASES)):
            phase = uint32(number & uint32(3))
            record = int64(number) * int64(RECORD)
            weight_map = ptx.address(table, record)
            scale_map = ptx.address(table, record + int64(MAP_WORDS))
            teams, steps = teams_of(phase), steps_of(phase)
            tile_n = uint32(consumers_of(phase) * uint32(COLUMNS))
            tile = uint32(block * turns_of(phase))
            end = min(uint32(tile + turns_of(phase)), tiles_of(phase))
            while tile < end:
                step = uint32(0)
                while step < steps:
                    full = uint32(base + uint32(stage << uint32(3)))
                    mbarrier_wait(uint32(full + uint32(free_at)), uint32(parity ^ uint32(1)))
                    here = min(teams, uint32(steps - step))
                    if lane == uint32(0):
                        to = uint32(base + uint32(ring_at) + uint32(stage * uint32(stage_bytes)))
                        mbarrier_expect(full, uint32(uint32(here * tile_n) * uint32(row_in_ring)))
                        first_row = uint32(tile * tile_n)
                        i = uint32(0)
                        while i < here:
                            of_step = uint32(step + i)
                            at = uint32(to + uint32(uint32(i * tile_n) * uint32(STEP_BYTES)))
                            k = uint32(of_step * uint32(step_k))
                            tensor_load_2d_hint(at, weight_map, k, first_row, full, uint64(EVICT_FIRST))
                            if groups:
                                # from a multiple of four groups on, as in matmul_stream
                                first = uint32(uint32(of_step * uint32(scale_groups)) & uint32(0xFFFFFFFC))
                                at = uint32(to + uint32(uint32(teams * tile_n) * uint32(STEP_BYTES)))
                                at = uint32(at + uint32(uint32(i * tile_n) * uint32(BOX_SCALES)))
                                tensor_load_2d(at, scale_map, first, first_row, full)
                            i = uint32(i + uint32(1))
                    ptx.warp_sync()
                    step = uint32(step + here)
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))
                tile = uint32(tile + uint32(1))
            number = uint32(number + uint32(1))

    @cuda.jit(device=True, inline="always")
    def arrive(meetings, number, thread, all_meetings):
        """This block has done its part before a meeting. The last one of the last meeting leaves all counters at zero."""
        barrier_sync(uint32(ALL), uint32(consumer_threads))
        if thread == uint32(0):
            came = ptx.atomic_add(ptx.address(meetings, int64(number)), uint32(1))
            last = uint32(all_meetings - uint32(1))
            if number == last and came == uint32(cuda.gridDim.x) - uint32(1):
                ptx.st_global(ptx.address(meetings, int64(last)), uint32(0))
                if last > uint32(0):
                    ptx.st_global(ptx.address(meetings, int64(uint32(last - uint32(1)))), uint32(0))

    @cuda.jit(device=True, inline="always")
    def await_all(meetings, number, thread, block):
        """All blocks have arrived at a meeting; then the one before is over for all of them, too."""
        if thread == uint32(0):
            counter = ptx.address(meetings, int64(number))
            while ptx.ld_global_acquire(counter) < uint32(cuda.gridDim.x):
                pass
            if block == uint32(0) and number > uint32(0):
                ptx.st_global(ptx.address(meetings, int64(uint32(number - uint32(1)))), uint32(0))
        barrier_sync(uint32(ALL), uint32(consumer_threads))

    @cuda.jit(device=True, inline="always")
    def place_row(source, depth, steps, to, thread):
        """x as it lies in memory, and behind it zeros to the end of the last step."""
        column = uint32(thread * uint32(width))
        while column < uint32(steps * uint32(step_k)):
            if column < depth:
                w = ptx.ld_global_stream_v4(ptx.address(source, int64(column)))
                put(to, column, w[0], w[1], w[2], w[3])
            else:
                put(to, column, uint32(0), uint32(0), uint32(0), uint32(0))
            column = uint32(column + uint32(consumer_threads * width))

    @cuda.jit(device=True, inline="always")
    def clear_behind(depth, steps, to, thread):
        """Zeros behind a row that is a norm's."""
        column = uint32(depth + uint32(thread * uint32(width)))
        while column < uint32(steps * uint32(step_k)):
            put(to, column, uint32(0), uint32(0), uint32(0), uint32(0))
            column = uint32(column + uint32(consumer_threads * width))

    @cuda.jit(device=True, inline="always")
    def call_cache(
        k_pages, v_pages, lengths, kv_len, block_table, page_shift, last_page, k_page, k_token, k_head, v_page, v_token, v_head,
        block, thread,
    ):  # fmt: skip
        """The keys and values of the block's task into L2: its warps would wait for each step of them."""
        kv_head, split = int64(block % uint32(kv_heads)), int32(block // uint32(kv_heads))
        key = int32(split * int32(decode.SPLIT) + int32(thread))
        end = min(min(lengths[0], kv_len), int32(split * int32(decode.SPLIT) + int32(decode.SPLIT)))
        while key < end:
            page = int64(min(uint32(block_table[int64(key >> int32(page_shift))]), last_page))
            row = int64(key & int32((int32(1) << int32(page_shift)) - int32(1)))
            k_at = page * k_page + row * k_token + kv_head * k_head
            v_at = page * v_page + row * v_token + kv_head * v_head
            for line in range(-(-head_dim // LINE)):
                ptx.prefetch_l2(ptx.address(k_pages, k_at + int64(line * LINE)))
                ptx.prefetch_l2(ptx.address(v_pages, v_at + int64(line * LINE)))
            key = int32(key + int32(consumer_threads))

    @cuda.jit(device=True, inline="always")
    def rotate_heads(
        qkv, rotated, k_pages, v_pages, cos, sin, cos_at, sin_at, thread, block, kv_head, appends, inside, k_to, v_to
    ):
        """The query heads of a KV head into the block's own place, and its key and value into the cache."""
        index = thread
        all_items = uint32(group_items + items + head_chunks) if appends else uint32(group_items)
        while index < all_items:
            if index < uint32(group_items):
                head = int64(index // uint32(items))
                item = uint32(index % uint32(items))
                source = (int64(kv_head) * int64(group) + head) * int64(head_dim)
                to = (int64(block) * int64(group) + head) * int64(head_dim)
                if inside:
                    rotate(qkv, source, rotated, to, cos, sin, cos_at, sin_at, item)
                else:
                    clear(rotated, to, item)
            elif index < uint32(group_items + items):
                source = int64(q_width) + int64(kv_head) * int64(head_dim)
                item = uint32(index - uint32(group_items))
                rotate(qkv, source, k_pages, k_to, cos, sin, cos_at, sin_at, item)
            else:
                i = int64(uint32(uint32(index - uint32(group_items + items)) * uint32(width)))
                source = int64(q_width + kv_width) + int64(kv_head) * int64(head_dim) + i
                copy(qkv, source, v_pages, v_to + i)
            index = uint32(index + uint32(attention_threads))

    @kernel(launch_bounds=(consumer_threads + ptx.WARP, 1))
    def decoder_layers(
        table: ptx.pointer("int64"),  # [layers, PHASES, RECORD]
        x: ptx.pointer(dtype),  # [hidden], the residual stream before the first layer
        out: ptx.pointer(dtype),  # [hidden], behind the last
        middle: ptx.pointer(dtype),  # [hidden], between attention and feed-forward
        qkv: ptx.pointer(dtype),  # [q_width + 2 · kv_width]
        rotated: ptx.pointer(dtype),  # [blocks, group, head_dim]
        seen: ptx.pointer(dtype),  # [q_width]
        gated: ptx.pointer(dtype),  # [feed_forward]
        vectors: ptx.pointer("float32"),
        weights: ptx.pointer("float32"),
        counters: ptx.pointer("uint32"),  # of merges
        meetings: ptx.pointer("uint32"),  # [layers · MEETINGS]
        cos: ptx.pointer("float32"),
        sin: ptx.pointer("float32"),
        positions: ptx.pointer("int32"),
        lengths: ptx.pointer("int32"),
        block_table: ptx.pointer("int32"),
        layers: uint32,
        limit: int32,
        kv_len: int32,
        all_splits: uint32,
        all_places: uint32,
        page_shift: uint32,
        last_page: uint32,
        inverse_columns: float32,
        eps: float32,
        scale_log2: float32,
        cos_stride: int64,
        sin_stride: int64,
        k_page: int64,
        k_token: int64,
        k_head: int64,
        v_page: int64,
        v_token: int64,
        v_head: int64,
    ):
        scratch = cuda.shared.array(SCRATCH, float32)
        again = cuda.shared.array(SCRATCH, float32)
        raw = ptx.shared_address(cuda.shared.array(0, uint8))
        base = uint32(uint32(raw + uint32(1023)) & uint32(0xFFFFFC00))
        thread = uint32(cuda.threadIdx.x)
        lane = ptx.lane_id()
        warp = ptx.shfl_idx_u32(uint32(thread >> uint32(5)), uint32(0))
        block = uint32(cuda.blockIdx.x)
        if thread == uint32(0):
            for s in range(stages):
                mbarrier_init(uint32(base + uint32(full_at + 8 * s)), uint32(1))
                mbarrier_init(uint32(base + uint32(free_at + 8 * s)), uint32(warps))
            fence_mbarrier_init()
            leave_widening_constants(uint32(base + uint32(constants_at)))
            ptx.st_shared_v4(uint32(base + uint32(zeros_at)), uint32(0), uint32(0), uint32(0), uint32(0))
        cuda.syncthreads()
        if warp == uint32(warps):
            bring(layers, table, base, block, lane)
            return

        sums = cuda.local.array(4, float32)
        row_scale = cuda.local.array(2, float32)
        residual = cuda.local.array(2, float32)
        for i in range(2):
            row_scale[i], residual[i] = float32(1.0), float32(0.0)
        scale = cuda.local.array(scale_count, float32)
        quad, quad_row = uint32(lane & uint32(3)), uint32(lane >> uint32(2))
        w_row = uint32(lane & uint32(15))
        w_lane = uint32(
            uint32(w_row << uint32(7)) + uint32(uint32(uint32(lane >> uint32(4)) ^ (w_row & uint32(7))) << uint32(4))
        )
        row_bytes_at = uint32(base + uint32(row_at))
        # the first row of each matrix of ldmatrix is x's, the others are zeros
        x_lane, x_mask = uint32(base + uint32(zeros_at)), uint32(0)
        if uint32(lane & uint32(7)) == uint32(0):
            x_lane = uint32(row_bytes_at + uint32(uint32(lane >> uint32(3)) << uint32(4)))
            x_mask = uint32(0xFFFFFFFF)
        constants = widening_constants(uint32(base + uint32(constants_at)))
        zero = ptx.ld_shared(uint32(base + uint32(zeros_at)))  # the compiler does not know
        stage, parity, side = uint32(0), uint32(0), uint32(0)
        meeting = uint32(0)
        all_meetings = uint32(layers * uint32(MEETINGS))

        number = uint32(0)
        while number < uint32(layers * uint32(PHASES)):
            phase = uint32(number & uint32(3))
            record = int64(number) * int64(RECORD)
            consumers, teams, steps = consumers_of(phase), teams_of(phase), steps_of(phase)
            depth = depth_of(phase)
            before = x if number < uint32(PHASES) else out
            if phase == uint32(QKV):
                k_pages = ptx.pointer_at(x, uint64(table[record + int64(K_AT)]))
                v_pages = ptx.pointer_at(x, uint64(table[record + int64(V_AT)]))
                call_cache(
                    k_pages, v_pages, lengths, kv_len, block_table, page_shift, last_page,
                    k_page, k_token, k_head, v_page, v_token, v_head, block, thread,
                )  # fmt: skip
            if meeting > uint32(0):
                await_all(meetings, uint32(meeting - uint32(1)), thread, block)
            if uint32(phase & uint32(1)) == uint32(0):
                if thread < uint32(norm_threads):
                    source = before if phase == uint32(QKV) else middle
                    norm_weight = ptx.pointer_at(of_norm(x, cos), uint64(table[record + int64(NORM_AT)]))
                    normalise(source, norm_weight, inverse_columns, eps, scratch, again, row_bytes_at)
                clear_behind(depth, steps, row_bytes_at, thread)
            else:
                source = seen if phase == uint32(OUTPUT) else gated
                place_row(source, depth, steps, row_bytes_at, thread)
            barrier_sync(uint32(ALL), uint32(consumer_threads))

            scales = ptx.pointer_at(cos, uint64(table[record + int64(SCALES_AT)]))
            bias = ptx.pointer_at(x, uint64(table[record + int64(BIAS_AT)]))
            team = uint32(warp // consumers)
            consumer = uint32(warp - uint32(team * consumers))
            tile_n = uint32(consumers * uint32(COLUMNS))
            of_scales = uint32(uint32(teams * tile_n) * uint32(STEP_BYTES))
            turn = uint32(0)  # of the team that has a tile's first step
            tile = uint32(block * turns_of(phase))
            end = min(uint32(tile + turns_of(phase)), tiles_of(phase))
            while tile < end:
                for i in range(4):
                    sums[i] = float32(0.0)
                # whose steps of a stage are this team's, and where its fragment lies
                place = uint32(uint32(uint32(team + teams) - turn) % teams)
                own_row = uint32(uint32(place * tile_n) + uint32(consumer << uint32(4)))
                own_rows = uint32(own_row * uint32(STEP_BYTES))
                own_scales = uint32(of_scales + uint32(uint32(own_row + quad_row) * uint32(BOX_SCALES)))
                turn = uint32(uint32(turn + steps) % teams)
                first_column = uint32(uint32(tile * tile_n) + uint32(uint32(consumer << uint32(4)) + quad_row))
                # what the sums will meet is asked for before they are made
                for part in range(2):
                    column = min(uint32(first_column + uint32(8 * part)), uint32(columns_of(phase) - uint32(1)))
                    if row_scales:
                        row_scale[part] = ptx.float_from_bits(ptx.ld_global(ptx.address(scales, int64(column))))
                    if uint32(phase & uint32(1)) == uint32(1):
                        added = before if phase == uint32(OUTPUT) else middle
                        residual[part] = from_storage(added[int64(column)])
                first = uint32(0)
                while first < steps:
                    full = uint32(base + uint32(stage << uint32(3)))
                    mbarrier_wait(full, parity)
                    step = uint32(first + place)
                    if team < teams and step < steps:
                        w = uint32(base + uint32(ring_at) + uint32(stage * uint32(stage_bytes)))
                        if groups:
                            at = uint32(w + own_scales)
                            if scale_groups < 4:
                                in_box = uint32(uint32(step * uint32(scale_groups)) & uint32(3))
                                at = uint32(at + uint32(in_box << uint32(2)))
                            read_scales(at, scale)
                        multiply(
                            uint32(w + own_rows),
                            w_lane,
                            x_lane,
                            uint32(step * uint32(step_row)),
                            x_mask,
                            constants,
                            scale,
                            sums,
                        )
                    ptx.warp_sync()
                    if lane == uint32(0):
                        # behind the products, which have read what the next copy overwrites: an address that hangs on them
                        mbarrier_arrive(uint32(uint32(full + uint32(free_at)) + (ptx.bits_from_float(sums[0]) & zero)))
                    first = uint32(first + teams)
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(stages):
                        stage = uint32(0)
                        parity = uint32(parity ^ uint32(1))

                if teams > uint32(1):
                    own = uint32(base + uint32(parts_at) + uint32(side * uint32(part_bytes)))
                    own = uint32(own + uint32(uint32(uint32(consumer << uint32(4)) + quad_row) << uint32(2)))
                    of_team = uint32(consumers << uint32(6))
                    if team > uint32(0) and team < teams and quad == uint32(0):
                        at = uint32(own + uint32(team * of_team))
                        ptx.st_shared_f32(at, sums[0])
                        ptx.st_shared_f32(uint32(at + uint32(32)), sums[2])
                    barrier_sync(uint32(ALL), uint32(consumer_threads))
                    if team == uint32(0):
                        other = uint32(1)
                        while other < teams:
                            at = uint32(own + uint32(other * of_team))
                            sums[0] += ptx.ld_shared_f32(at)
                            sums[2] += ptx.ld_shared_f32(uint32(at + uint32(32)))
                            other = uint32(other + uint32(1))
                    side = uint32(side ^ uint32(1))  # the next tile's sums do not meet these
                if team == uint32(0):
                    for part in range(2):
                        column = uint32(first_column + uint32(8 * part))
                        mine = sums[2 * part]
                        # where this is a gate's, its up's
                        up, up_scale = ptx.shfl_bfly(mine, uint32(4)), ptx.shfl_bfly(row_scale[part], uint32(4))
                        if quad == uint32(0) and column < columns_of(phase):
                            y = int64(column)
                            if phase == uint32(QKV):
                                offset = from_storage(bias[y]) if has_bias else float32(0.0)
                                qkv[y] = to_storage(of_qkv(mine, row_scale[part], offset, float32(0.0)))
                            elif phase == uint32(OUTPUT):
                                middle[y] = to_storage(of_added(mine, row_scale[part], float32(0.0), residual[part]))
                            elif phase == uint32(DOWN):
                                out[y] = to_storage(of_added(mine, row_scale[part], float32(0.0), residual[part]))
                            elif uint32(column & uint32(1)) == uint32(0):
                                gate = of_gate(mine, row_scale[part], float32(0.0), float32(0.0))
                                gated[y >> int64(1)] = to_storage(
                                    float32(silu(gate) * of_gate(up, up_scale, float32(0.0), float32(0.0)))
                                )
                tile = uint32(tile + uint32(1))
            arrive(meetings, meeting, thread, all_meetings)
            meeting = uint32(meeting + uint32(1))

            if phase == uint32(QKV):
                await_all(meetings, uint32(meeting - uint32(1)), thread, block)
                if thread < uint32(attention_threads):
                    count = min(max(lengths[0], int32(0)), kv_len)
                    position = positions[0]
                    inside = position >= int32(0) and position < limit
                    page, in_page = int64(-1), int64(0)
                    if inside:
                        page = int64(block_table[int64(position >> int32(page_shift))])
                        in_page = int64(position & int32((int32(1) << int32(page_shift)) - int32(1)))
                    written = page >= int64(0) and page <= int64(last_page)
                    cos_at, sin_at = int64(position) * cos_stride, int64(position) * sin_stride
                    splits = max(uint32(uint32(count + int32(decode.SPLIT - 1)) // uint32(decode.SPLIT)), uint32(1))
                    task = block
                    while task < uint32(splits * uint32(kv_heads)):
                        kv_head, split = uint32(task % uint32(kv_heads)), uint32(task // uint32(kv_heads))
                        appends = written and split == uint32(splits - uint32(1))
                        k_to = page * k_page + in_page * k_token + int64(kv_head) * k_head
                        v_to = page * v_page + in_page * v_token + int64(kv_head) * v_head
                        rotate_heads(
                            qkv, rotated, k_pages, v_pages, cos, sin, cos_at, sin_at, thread, block, kv_head, appends,
                            inside, k_to, v_to,
                        )  # fmt: skip
                        _meet_attending()
                        # the query heads of the KV head, as if those of all others stood around them
                        own = (int64(block) - int64(kv_head)) * int64(group * head_dim)
                        query = ptx.pointer_at(x, ptx.address(rotated, own))
                        attend(
                            row_bytes_at, kv_head, split, int64(0), query, k_pages, v_pages, lengths, seen, vectors, weights,
                            counters,
                            (
                                int32(1), kv_len, uint32(kv_heads), uint32(group), uint32(1), uint32(0), all_splits, all_places,
                                int32(0), scale_log2,
                            ),
                            (
                                int64(0), int64(0), int64(head_dim), k_page, k_token, k_head, v_page, v_token, v_head,
                                int64(0), int64(0), int64(head_dim),
                            ),
                            float32(0.0), cos, block_table, int64(0), page_shift, last_page,
                            cos, cos, int64(0), int64(0), int64(0), int64(0), int64(0), int64(0),
                        )  # fmt: skip
                        _meet_attending()
                        task = uint32(task + uint32(cuda.gridDim.x))
                arrive(meetings, meeting, thread, all_meetings)
                meeting = uint32(meeting + uint32(1))
            number = uint32(number + uint32(1))

    return decoder_layers


def _cut(columns, depth, weight, sm_count):
    """The Product as ``matmul_stream`` cuts it, or None where other kernels multiply or blocks share tiles."""
    shape = matmul_stream.shape_for(columns, depth, weight, sm_count, True)
    column_tiles, consumers, teams = shape
    tiles, steps = matmul_stream.cut(columns, depth, weight, COLUMNS * column_tiles * consumers)
    turns, left = divmod(tiles * steps, matmul_stream.blocks_for(tiles, steps, sm_count) * steps)
    if column_tiles > 1 or left:
        return None
    return Product(columns, depth, consumers, teams, steps, tiles, turns)


@lru_cache(maxsize=256)
def plan(shape, dtype, weight, group_size, norm_dtype, sm_count, shared_bytes):
    """The Plan for a Shape, or None where its layers are to be launched one by one.

    weight, group_size: as ``matmul_stream_kernel``; shared_bytes: the most that a block may have.
    """
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width = vector_width(dtype)
    sizes = (
        (q_width + 2 * kv_width, shape.hidden),
        (shape.hidden, q_width),
        (2 * shape.feed_forward, shape.hidden),
        (shape.hidden, shape.feed_forward),
    )
    # a step of int8 is 128 columns; a smaller product is another kernel's
    if dtype.itemsize != 2 or shape.head_dim % 16 or shape.half % width or any(depth % 16 for _, depth in sizes):
        return None
    if shape.heads // shape.kv_heads > decode_tensor.STRIP or (
        weight == "groups" and group_size not in matmul_stream.BOXED_GROUPS
    ):
        return None
    if not all(matmul_stream.serves(1, *size, weight) for size in sizes):
        return None
    products = tuple(_cut(*size, weight, sm_count) for size in sizes)
    norm_part = rows.split(shape.hidden, dtype, "wide")
    if None in products or norm_part is None or norm_part[0] < ptx.WARP or norm_part[2] > 1:
        return None
    warps = max(*(p.consumers * p.teams for p in products), norm_part[0] // ptx.WARP, decode.WARPS)
    attention_bytes = _attention_bytes(shape, dtype)
    if warps > MOST_WARPS or attention_bytes > decode.LEAST_SHARED_BYTES:
        return None
    behind = max(attention_bytes, _row_bytes(products, matmul_stream.step_columns(weight)))
    stage_bytes = _stage_bytes(products, weight)
    spare = min(shared_bytes, SHARED_BYTES) - 1024 - 8 * SCRATCH - HEAD_BYTES - behind
    stages = min(MOST_STAGES, spare // stage_bytes)
    if stages < LEAST_STAGES:
        return None
    constants = (dtype, weight, group_size, norm_dtype, shape, products, norm_part[:2], warps, stages)
    blocks = max(-(-p.tiles // p.turns) for p in products)
    used = 1024 + HEAD_BYTES + stages * stage_bytes + behind
    threads = (warps + 1) * ptx.WARP
    return Plan(decoder_layers_kernel, constants, (blocks, 1, 1), (threads, 1, 1), used, early=False, together=True)


class Layers:
    """Layers of one model over one cache, ready to be launched.

    chosen: ``plan``'s; layers: LayerArrays, which stay alive with this.
    """

    def __init__(self, chosen, layers, device):
        self.chosen = chosen
        self.layers = layers
        _, weight, _, _, self.shape, products, *_ = chosen.constants
        step_k = matmul_stream.step_columns(weight)
        table = np.zeros((len(layers), PHASES, RECORD), np.int64)
        for record, layer in zip(table, layers, strict=True):
            for phase, product in enumerate(products):
                values, scales = layer.weights[phase]
                tile_n = COLUMNS * product.consumers
                _put_map(record[phase], 0, tensor_map(values, (tile_n, step_k), device=device))
                if weight == "groups":
                    _put_map(record[phase], MAP_WORDS, tensor_map(scales, (tile_n, BOX_SCALES // 4), 0, device=device))
                record[phase, SCALES_AT] = 0 if scales is None else scales.pointer
            record[QKV, NORM_AT], record[GATE_UP, NORM_AT] = (n.pointer for n in layer.norms)
            record[QKV, BIAS_AT] = 0 if layer.bias is None else layer.bias.pointer
            record[QKV, K_AT], record[QKV, V_AT] = layer.k.pointer, layer.v.pointer
        self.table = memory.to_device(table.reshape(-1))

    def run(self, x, cos, sin, positions, lengths, block_table, eps, scale, out, device, stream):
        """x, out [hidden], not the same; cos, sin [positions, half]; positions, lengths int32 [1]; block_table int32 [pages]."""
        shape, blocks = self.shape, self.chosen.grid[0]
        dtype = x.dtype
        k, v = self.layers[0].k, self.layers[0].v
        page_size = k.shape[1]
        kv_len = block_table.shape[0] * page_size
        splits = -(-kv_len // decode.SPLIT)
        all_places = places(splits)
        q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = (
            shape.hidden,
            q_width + 2 * kv_width,
            blocks * (shape.heads // shape.kv_heads) * shape.head_dim,
            q_width,
            shape.feed_forward,
        )
        held = memory.empty((sum(_rounded(n) for n in sizes),), dtype, stream)
        starts = np.cumsum([0, *(_rounded(n) for n in sizes[:-1])])
        scratch = [held.pointer + int(start) * dtype.itemsize for start in starts]
        slots = shape.heads * all_places
        head_floats = _rounded(2 * slots)  # the vectors behind them begin at 16 bytes
        partial = memory.empty((head_floats + slots * shape.head_dim,), np.dtype(np.float32), stream)
        merges = shape.kv_heads * (all_places - splits)
        meetings = len(self.layers) * MEETINGS
        counters = memory.counters(merges + meetings, stream)
        factor, _ = score_factors(scale, None)
        launch(
            self.chosen,
            (
                self.table.pointer,
                x.pointer,
                out.pointer,
                *scratch,
                partial.pointer + 4 * head_floats,
                partial.pointer,
                counters.pointer + 4 * meetings,
                counters.pointer,
                cos.pointer,
                sin.pointer,
                positions.pointer,
                lengths.pointer,
                block_table.pointer,
                len(self.layers),
                min(kv_len, cos.shape[0]),
                kv_len,
                splits,
                all_places,
                page_size.bit_length() - 1,
                k.shape[0] - 1,
                1.0 / shape.hidden,
                float(eps),
                factor,
                cos.strides[0],
                sin.strides[0],
                *k.strides[:3],
                *v.strides[:3],
            ),
            device,
            stream,
        )


def _rounded(elements):
    """Elements after which the next array begins at 64 bytes or more."""
    return -(-elements // 32) * 32


def _put_map(record, at, described):
    record[at : at + MAP_WORDS] = np.frombuffer(described.data, np.int64)
