# # Flash attention
#
# Attention gives each query a mixture of values: `softmax(q · kᵀ / sqrt(d)) · v`. The matrix of scores has a number for
# each pair of query and key; for long texts it is far larger than everything else, and nobody wants it. With the online
# softmax of lesson 5 it never has to exist.
import math

import lesson
import ml_dtypes
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, step
from numba import cuda, float32, int32, types, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## Three kernels
#
# One head, `DIM` numbers a query and key. Scores, softmax (the kernel of lesson 5), mixture, each a kernel of its own.
floats, words = ptx.pointer("float32"), types.CPointer(uint32)
DIM = 32
SCALE = 1 / math.sqrt(DIM)
LOG2E = math.log2(math.e)
bf16 = ml_dtypes.bfloat16
softmax_lesson = lesson.definitions(5)


def scores_kernel():
    @kernel(launch_bounds=128)
    def scores(q: floats, k: floats, s: floats, keys: int32):
        query = cuda.blockIdx.x
        for key in range(cuda.threadIdx.x, keys, 128):
            total = float32(0)
            for d in range(DIM):
                total += q[query * DIM + d] * k[key * DIM + d]
            s[query * keys + key] = total * float32(SCALE)

    return scores


def mixture_kernel():
    @kernel(launch_bounds=DIM)
    def mixture(weights: floats, v: floats, y: floats, keys: int32):
        query, d = cuda.blockIdx.x, cuda.threadIdx.x
        total = float32(0)
        for key in range(keys):
            total += weights[query * keys + key] * v[key * DIM + d]
        y[query * DIM + d] = total

    return mixture


def inputs(queries, keys, dtype=np.float32):
    return (normal(n, DIM, dtype=dtype, seed=seed) for seed, n in enumerate((queries, keys, keys)))


def attention(q, k, v):
    """NumPy's, in float64: (scores, weights, result)."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    scores = q @ k.T * SCALE
    weights = softmax_lesson.softmax(scores)
    return scores, weights, weights @ v


def scores_launch(queries, keys):
    q, k, v = inputs(queries, keys)
    s = attention(q, k, v)[0].astype(np.float32)
    return Launch(queries, 128, {"q": q, "k": k, "s": s, "keys": keys}, {"s": s}, bytes=q.nbytes + k.nbytes + s.nbytes)


def softmax_launch(queries, keys):
    s, weights, _ = (a.astype(np.float32) for a in attention(*inputs(queries, keys)))
    return Launch(queries // 4, 128, {"x": s, "y": s, "columns": keys}, {"y": weights}, bytes=2 * s.nbytes)


def mixture_launch(queries, keys):
    q, k, v = inputs(queries, keys)
    _, weights, y = (a.astype(np.float32) for a in attention(q, k, v))
    arguments = {"weights": weights, "v": v, "y": y, "keys": keys}
    moved = weights.nbytes + v.nbytes + y.nbytes
    return Launch(queries, DIM, arguments, {"y": y}, bytes=moved, tolerance=lesson.rounding_of(keys))


SMALL, LARGE = (64, 128), (4096, 4096)
apart = [
    step("scores", scores_kernel, scores_launch, small=SMALL, large=LARGE),
    step("softmax", softmax_lesson.two_walks_kernel, softmax_launch, small=SMALL, large=LARGE),
    step("mixture", mixture_kernel, mixture_launch, small=SMALL, large=LARGE),
]

# ## One kernel
#
# A thread a query. It keeps its query, its result so far, and maximum and sum so far in registers, and walks over the
# keys. A block's threads need the same keys, so that these come in tiles through shared memory. When the maximum grows,
# sum *and result* are brought to the new one; at the end the result is divided by the sum.
TILE = 32
TILE_WORDS = TILE * DIM


def flash_kernel():
    @kernel(launch_bounds=64)
    def flash(q: floats, k: floats, v: floats, y: floats, keys: int32):
        k_tile = cuda.shared.array(TILE_WORDS, float32)
        v_tile = cuda.shared.array(TILE_WORDS, float32)
        query = cuda.grid(1)
        mine = cuda.local.array(DIM, float32)
        result = cuda.local.array(DIM, float32)
        for d in range(DIM):
            mine[d] = q[query * DIM + d] * float32(SCALE * LOG2E)
            result[d] = float32(0)
        top, total = float32(-1e30), float32(0)
        for first in range(0, keys, TILE):
            cuda.syncthreads()
            for i in range(cuda.threadIdx.x, TILE_WORDS, 64):
                k_tile[i] = k[first * DIM + i]
                v_tile[i] = v[first * DIM + i]
            cuda.syncthreads()
            for key in range(TILE):
                score = float32(0)
                for d in range(DIM):
                    score += mine[d] * k_tile[key * DIM + d]
                higher = max(top, score)
                shrink, weight = ptx.ex2(top - higher), ptx.ex2(score - higher)
                total = total * shrink + weight
                for d in range(DIM):
                    result[d] = result[d] * shrink + weight * v_tile[key * DIM + d]
                top = higher
        for d in range(DIM):
            y[query * DIM + d] = result[d] / total

    return flash


def flash_launch(queries, keys):
    q, k, v = inputs(queries, keys)
    y = attention(q, k, v)[2].astype(np.float32)
    moved = q.nbytes + k.nbytes + v.nbytes + y.nbytes
    arguments = {"q": q, "k": k, "v": v, "y": y, "keys": keys}
    flops, tolerance = 4 * queries * keys * DIM, lesson.rounding_of(keys)
    return Launch(queries // 64, 64, arguments, {"y": y}, bytes=moved, flops=flops, tolerance=tolerance)


flash = step("one kernel, a thread a query", flash_kernel, flash_launch, small=SMALL, large=LARGE)
picture(
    "sectors",
    pictures.bars(
        [
            *((s.title, s.sectors) for s in apart),
            ("three kernels", sum(s.sectors for s in apart)),
            ("one kernel", flash.sectors),
        ],
        "sectors of global memory",
    ),
    "The scores are written and read by three kernels, and by one not at all.",
)
picture(
    "walk",
    pictures.walk_map(
        flash.accesses("v_tile[i] = v[", mode="read", block=0),
        (SMALL[1], DIM),
        4,
        "v [keys, dim], one block",
    ),
    "The walk over the values, tile by tile; the keys go alike.",
)

# ## On tensor cores
#
# Sixteen queries a warp, sixteen keys at a time, both products by mma.sync (lesson 9). The result of the first, the
# scores, lies in the lanes as the *result's* fragment: each lane has numbers of two queries, which it shares with three
# others, so that a row's maximum takes two shuffles. And rounded to bfloat16 in pairs it is just what the second
# product wants as its fragment of a: the weights never leave the registers.
PAIRS = DIM // 2
V_WIDTH = PAIRS + 4  # words a row: see lesson 9
V_WORDS = 16 * V_WIDTH


def tensor_kernel():
    @kernel(launch_bounds=32)
    def tensor(q: words, k: words, v: words, y: floats, keys: int32):
        v_tile = cuda.shared.array(V_WORDS, uint32, alignment=16)
        lane = uint32(cuda.threadIdx.x)
        row, pair = lane // uint32(4), lane % uint32(4)
        first = cuda.blockIdx.x * 16
        a = cuda.local.array(8, uint32)
        for d in range(2):
            a[4 * d] = q[(first + row) * PAIRS + 8 * d + pair]
            a[4 * d + 1] = q[(first + row + 8) * PAIRS + 8 * d + pair]
            a[4 * d + 2] = q[(first + row) * PAIRS + 8 * d + pair + 4]
            a[4 * d + 3] = q[(first + row + 8) * PAIRS + 8 * d + pair + 4]
        result = cuda.local.array(16, float32)
        for i in range(16):
            result[i] = float32(0)
        top0, top1 = float32(-1e30), float32(-1e30)
        total0, total1 = float32(0), float32(0)
        for start in range(0, keys, 16):
            # the values' tile: 16 rows of 64 bytes, two chunks of 16 bytes a lane
            cuda.syncthreads()
            for chunk in range(lane, 64, 32):
                w0, w1, w2, w3 = ptx.ld_global_v4(ptx.address(v, start * PAIRS + 4 * chunk))
                place = chunk // 4 * V_WIDTH + chunk % 4 * 4
                ptx.st_shared_v4(uint32(ptx.shared_address(v_tile) + 4 * place), w0, w1, w2, w3)
            cuda.syncthreads()
            s = cuda.local.array(8, float32)
            for n in range(2):
                c0, c1, c2, c3 = float32(0), float32(0), float32(0), float32(0)
                for d in range(2):
                    at = (start + 8 * n + row) * PAIRS + 8 * d + pair
                    c0, c1, c2, c3 = ptx.mma_m16n8k16_bf16(
                        a[4 * d], a[4 * d + 1], a[4 * d + 2], a[4 * d + 3], k[at], k[at + 4], c0, c1, c2, c3
                    )
                s[4 * n] = c0 * float32(SCALE * LOG2E)
                s[4 * n + 1] = c1 * float32(SCALE * LOG2E)
                s[4 * n + 2] = c2 * float32(SCALE * LOG2E)
                s[4 * n + 3] = c3 * float32(SCALE * LOG2E)
            # queries ``row`` (s 0, 1, 4, 5) and ``row + 8`` (s 2, 3, 6, 7)
            high0 = max(max(s[0], s[1]), max(s[4], s[5]))
            high1 = max(max(s[2], s[3]), max(s[6], s[7]))
            high0 = max(high0, ptx.shfl_bfly(high0, uint32(1)))
            high1 = max(high1, ptx.shfl_bfly(high1, uint32(1)))
            high0 = max(top0, max(high0, ptx.shfl_bfly(high0, uint32(2))))
            high1 = max(top1, max(high1, ptx.shfl_bfly(high1, uint32(2))))
            shrink0, shrink1 = ptx.ex2(top0 - high0), ptx.ex2(top1 - high1)
            top0, top1 = high0, high1
            for n in range(2):
                s[4 * n] = ptx.ex2(s[4 * n] - top0)
                s[4 * n + 1] = ptx.ex2(s[4 * n + 1] - top0)
                s[4 * n + 2] = ptx.ex2(s[4 * n + 2] - top1)
                s[4 * n + 3] = ptx.ex2(s[4 * n + 3] - top1)
            total0 = total0 * shrink0 + s[0] + s[1] + s[4] + s[5]
            total1 = total1 * shrink1 + s[2] + s[3] + s[6] + s[7]
            p0, p1 = ptx.bf16x2_from_floats(s[0], s[1]), ptx.bf16x2_from_floats(s[2], s[3])
            p2, p3 = ptx.bf16x2_from_floats(s[4], s[5]), ptx.bf16x2_from_floats(s[6], s[7])
            for n in range(4):
                place = lane % 16 * V_WIDTH + 4 * n
                b0, b1 = ptx.ldmatrix_x2_trans(uint32(ptx.shared_address(v_tile) + 4 * place))
                result[4 * n], result[4 * n + 1], result[4 * n + 2], result[4 * n + 3] = ptx.mma_m16n8k16_bf16(
                    *(p0, p1, p2, p3, b0, b1),
                    *(result[4 * n] * shrink0, result[4 * n + 1] * shrink0),
                    *(result[4 * n + 2] * shrink1, result[4 * n + 3] * shrink1),
                )
        total0 += ptx.shfl_bfly(total0, uint32(1))
        total1 += ptx.shfl_bfly(total1, uint32(1))
        inverse0 = float32(1) / (total0 + ptx.shfl_bfly(total0, uint32(2)))
        inverse1 = float32(1) / (total1 + ptx.shfl_bfly(total1, uint32(2)))
        for n in range(4):
            at = (first + row) * DIM + 8 * n + 2 * pair
            y[at] = result[4 * n] * inverse0
            y[at + 1] = result[4 * n + 1] * inverse0
            y[at + 8 * DIM] = result[4 * n + 2] * inverse1
            y[at + 8 * DIM + 1] = result[4 * n + 3] * inverse1

    return tensor


def tensor_launch(queries, keys):
    q, k, v = inputs(queries, keys, bf16)
    y = attention(q, k, v)[2].astype(np.float32)
    held = {name: a.view(np.uint32) for name, a in (("q", q), ("k", k), ("v", v))}
    moved = q.nbytes + k.nbytes + v.nbytes + y.nbytes
    # the weights are rounded to bfloat16, which has 8 bits
    return Launch(
        queries // 16, 32, {**held, "y": y, "keys": keys}, {"y": y}, moved, 4 * queries * keys * DIM, tolerance=2**-8
    )


tensor = step("tensor cores, a warp 16 queries", tensor_kernel, tensor_launch, small=SMALL, large=LARGE)

# ## The package's own
#
# More warps a block, keys and values through a ring of asynchronous copies, several heads, masks: `nbk.attention`.


def package_attention(to_device, queries, keys):
    q, k, v = (to_device(a[None, :, None]) for a in inputs(queries, keys, bf16))
    return (lambda: nbk.attention(q, k, v)), 2 * DIM * (2 * queries + 2 * keys)


def right_attention(queries, keys):
    return attention(*inputs(queries, keys, bf16))[2][None, :, None]


lesson.operation(
    "nbk.attention",
    package_attention,
    right_attention,
    small=SMALL,
    large=LARGE,
    tolerance=2**-8,
    beside=tensor,
)
compare(("FLOPs", lambda s: s.report_total.flops))

# ## What to take along
#
# - The online softmax turns three kernels into one walk over the keys; the scores live in registers only.
# - What matters is what the queries of a block share: each key that is fetched serves all of them.
# - The result's fragment of one product is the operand's fragment of the next.
#
# *Sources.* T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention" (2022); T. Dao, "FlashAttention-2" (2023); A.
# Vaswani et al., "Attention Is All You Need" (2017).
