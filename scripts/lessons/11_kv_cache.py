# # The KV cache and one decode step
#
# A model writes one token after the other. Keys and values of the tokens before do not change, so they are kept: the
# *KV cache*. A step then has a single query, and reads the whole cache for it. That is all about memory again, and
# about having enough blocks.
import math

import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, float32, int32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel

lesson.main(__name__, __file__)

# ## What the cache saves
#
# Keys and values come from a product of the tokens with a weight. Without a cache each step makes it for all tokens so
# far, with one only for the new token.
floats, ints = ptx.pointer("float32"), ptx.pointer("int32")
LOG2E = math.log2(math.e)


def projection(to_device, tokens):
    x, weight = to_device(normal(tokens, 256)), to_device(normal(128, 256, seed=1))
    return (lambda: nbk.matmul(x, weight)), 4 * (tokens * 256 + 128 * 256 + tokens * 128)


def right_projection(tokens):
    return normal(tokens, 256).astype(np.float64) @ normal(128, 256, seed=1).T


whole = lesson.operation("nbk.matmul, 64 tokens", projection, right_projection, small=(64,))
single = lesson.operation("nbk.matmul, 1 token", projection, right_projection, small=(1,))
say(
    f"without a cache the 64th step computes {whole.report_total.flops / single.report_total.flops:.0f} times as much here"
)

# ## Append
#
# A step first writes its key and value behind those that are there. How many those are stands in the GPU's memory: the
# host need not know it, which lesson 13 makes use of.
DIM, GROUP = 64, 4  # numbers a head; query heads that share one head of keys and values


def append_kernel():
    @kernel(launch_bounds=DIM)
    def append(key: floats, value: floats, k_cache: floats, v_cache: floats, length: ints):
        head, d = cuda.blockIdx.x, cuda.threadIdx.x
        heads = cuda.gridDim.x
        k_cache[(length[0] * heads + head) * DIM + d] = key[head * DIM + d]
        v_cache[(length[0] * heads + head) * DIM + d] = value[head * DIM + d]

    return append


def append_launch(heads, length):
    key, value = normal(heads, DIM), normal(heads, DIM, seed=1)
    caches = {name: np.zeros((length + 1, heads, DIM), np.float32) for name in ("k_cache", "v_cache")}
    want = {"k_cache": caches["k_cache"].copy(), "v_cache": caches["v_cache"].copy()}
    want["k_cache"][length], want["v_cache"][length] = key, value
    arguments = {"key": key, "value": value, **caches, "length": np.array([length], np.int32)}
    return Launch(heads, DIM, arguments, want, bytes=2 * key.nbytes, keep=("k_cache", "v_cache"))


step("append", append_kernel, append_launch, small=(2, 9))

# ## A warp a head
#
# The query's head in registers, two numbers a lane; a key at a time: multiply, add up over the warp (five shuffles),
# and the online softmax of lesson 5. Each query head reads the keys and values for itself, though four of them share
# these.


def warp_a_head_kernel():
    @kernel(launch_bounds=32)
    def warp_a_head(q: floats, k: floats, v: floats, y: floats, length: int32):
        head, lane = cuda.blockIdx.x, cuda.threadIdx.x
        kv_heads, kv_head = cuda.gridDim.x // GROUP, head // GROUP
        scale = float32(LOG2E / math.sqrt(DIM))
        q0, q1 = q[head * DIM + lane] * scale, q[head * DIM + lane + 32] * scale
        top, total = float32(-1e30), float32(0)
        y0, y1 = float32(0), float32(0)
        for key in range(length):
            at = (key * kv_heads + kv_head) * DIM + lane
            score = ptx.warp_sum(q0 * k[at] + q1 * k[at + 32])
            higher = max(top, score)
            shrink, weight = ptx.ex2(top - higher), ptx.ex2(score - higher)
            total = total * shrink + weight
            y0 = y0 * shrink + weight * v[at]
            y1 = y1 * shrink + weight * v[at + 32]
            top = higher
        y[head * DIM + lane] = y0 / total
        y[head * DIM + lane + 32] = y1 / total

    return warp_a_head


def inputs(kv_heads, length):
    q = normal(kv_heads * GROUP, DIM)
    k, v = normal(length, kv_heads, DIM, seed=1), normal(length, kv_heads, DIM, seed=2)
    return q, k, v


def decode(q, k, v):
    """NumPy's: (result [heads, dim], scores [heads, length] in units of log 2)."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = np.repeat(k, GROUP, axis=1), np.repeat(v, GROUP, axis=1)
    scores = np.einsum("hd,nhd->hn", q, k) * LOG2E / math.sqrt(DIM)
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v), scores


def whole_launch(kv_heads, length):
    q, k, v = inputs(kv_heads, length)
    arguments = {"q": q, "k": k, "v": v, "y": q, "length": length}
    want, tolerance = {"y": decode(q, k, v)[0]}, lesson.rounding_of(length)
    return Launch(len(q), 32, arguments, want, bytes=k.nbytes + v.nbytes, tolerance=tolerance)


SMALL, LARGE = (2, 128), (8, 65536)
alone = step("a warp a head", warp_a_head_kernel, whole_launch, small=SMALL, large=LARGE)

# ## Heads that share keys read them once
#
# A block has a warp for each query head of a group. A tile of keys and values comes to shared memory once, and all four
# use it. (*Grouped-query attention*: models have fewer heads of keys and values than of queries just so that the cache
# is small.)
#
# ## Split the keys
#
# A GPU has more than a hundred multiprocessors, and there are as many blocks as heads of keys: most would stand idle.
# So several blocks share a head, each with a piece of the keys. Each leaves its maximum, its sum and its unfinished
# result; a second, small kernel merges them by the rule of lesson 5.
TILE = 16
TILE_WORDS = TILE * DIM


def split_kernel(splits):
    @kernel(launch_bounds=32 * GROUP)
    def split(q: floats, k: floats, v: floats, part: floats, tops: floats, totals: floats, length: int32):
        k_tile = cuda.shared.array(TILE_WORDS, float32)
        v_tile = cuda.shared.array(TILE_WORDS, float32)
        kv_head, piece = cuda.blockIdx.x, cuda.blockIdx.y
        kv_heads, lane = cuda.gridDim.x, cuda.threadIdx.x % 32
        head = kv_head * GROUP + cuda.threadIdx.x // 32
        scale = float32(LOG2E / math.sqrt(DIM))
        q0, q1 = q[head * DIM + lane] * scale, q[head * DIM + lane + 32] * scale
        top, total = float32(-1e30), float32(0)
        y0, y1 = float32(0), float32(0)
        keys = length // splits
        for first in range(piece * keys, (piece + 1) * keys, TILE):
            cuda.syncthreads()
            for i in range(cuda.threadIdx.x, TILE_WORDS, 32 * GROUP):
                at = ((first + i // DIM) * kv_heads + kv_head) * DIM + i % DIM
                k_tile[i] = k[at]
                v_tile[i] = v[at]
            cuda.syncthreads()
            for key in range(TILE):
                score = ptx.warp_sum(q0 * k_tile[key * DIM + lane] + q1 * k_tile[key * DIM + lane + 32])
                higher = max(top, score)
                shrink, weight = ptx.ex2(top - higher), ptx.ex2(score - higher)
                total = total * shrink + weight
                y0 = y0 * shrink + weight * v_tile[key * DIM + lane]
                y1 = y1 * shrink + weight * v_tile[key * DIM + lane + 32]
                top = higher
        part[(head * splits + piece) * DIM + lane] = y0
        part[(head * splits + piece) * DIM + lane + 32] = y1
        if lane == 0:
            tops[head * splits + piece] = top
            totals[head * splits + piece] = total

    return split


def merge_kernel(splits):
    @kernel(launch_bounds=DIM)
    def merge(part: floats, tops: floats, totals: floats, y: floats):
        head, d = cuda.blockIdx.x, cuda.threadIdx.x
        top = float32(-1e30)
        for piece in range(splits):
            top = max(top, tops[head * splits + piece])
        total, mixed = float32(0), float32(0)
        for piece in range(splits):
            shrink = ptx.ex2(tops[head * splits + piece] - top)
            total += totals[head * splits + piece] * shrink
            mixed += part[(head * splits + piece) * DIM + d] * shrink
        y[head * DIM + d] = mixed / total

    return merge


def pieces(q, k, v, splits):
    """NumPy's unfinished results: part, tops, totals."""
    heads, keys = len(q), len(k) // splits
    scores = decode(q, k, v)[1].reshape(heads, splits, keys)
    tops = scores.max(axis=2)
    weights = np.exp2(scores - tops[..., None])
    values = np.repeat(v, GROUP, axis=1).reshape(splits, keys, heads, DIM)
    return np.einsum("hsn,snhd->hsd", weights, values), tops, weights.sum(axis=2)


def split_launch(splits):
    def launch(kv_heads, length):
        q, k, v = inputs(kv_heads, length)
        want = dict(
            zip(("part", "tops", "totals"), (a.astype(np.float32) for a in pieces(q, k, v, splits)), strict=True)
        )
        arguments = {"q": q, "k": k, "v": v, **want, "length": length}
        tolerance = lesson.rounding_of(length // splits)
        return Launch((kv_heads, splits), 32 * GROUP, arguments, want, bytes=k.nbytes + v.nbytes, tolerance=tolerance)

    return launch


def merge_launch(splits):
    def launch(kv_heads, length):
        q, k, v = inputs(kv_heads, length)
        given = dict(
            zip(("part", "tops", "totals"), (a.astype(np.float32) for a in pieces(q, k, v, splits)), strict=True)
        )
        return Launch(
            len(q), DIM, {**given, "y": q}, {"y": decode(q, k, v)[0]}, bytes=given["part"].nbytes, tolerance=1e-5
        )

    return launch


SPLITS, MANY = 4, 64
sharing = step("shared keys, not split", split_kernel, split_launch(1), constants=(1,), small=SMALL, large=LARGE)
splitting = step(
    "shared keys, split in 4", split_kernel, split_launch(SPLITS), constants=(SPLITS,), small=SMALL, large=None
)
step("merge", merge_kernel, merge_launch(SPLITS), constants=(SPLITS,), small=SMALL)
split = step(
    "shared keys, split in 64", split_kernel, split_launch(MANY), constants=(MANY,), small=(1, MANY * TILE), large=LARGE
)
picture(
    "walk",
    pictures.owner_map(
        [
            lesson.Access(0, 0, "global", "k", "read", 4, a.blocks, a.blocks // SMALL[0], a.offsets)
            for a in splitting.accesses("k_tile[i] = k[", mode="read")
        ],
        (SMALL[1] // 4, 2 * DIM // 4),
        64,
        "k in boxes of 16 numbers, two heads a row: which piece reads it",
        cell=14,
    ),
    "Each block of a head has a stretch of the keys (the number is the piece).",
)
picture(
    "sectors",
    pictures.bars([(s.title, s.sectors) for s in (alone, sharing, splitting)], "sectors of global memory"),
    "Sharing keys among a group's heads is what saves memory traffic; splitting costs little of it.",
)

# ## The package's own
#
# `nbk.attention` with one query: groups, splits chosen by the size of the GPU, the merge in the same launch.


def package_decode(to_device, kv_heads, length):
    q, k, v = inputs(kv_heads, length)
    q, k, v = to_device(q[None, None]), to_device(k[None]), to_device(v[None])
    return (lambda: nbk.attention(q, k, v)), 2 * 4 * kv_heads * length * DIM


def right_decode(kv_heads, length):
    return decode(*inputs(kv_heads, length))[0][None, None]


lesson.operation("nbk.attention, one query", package_decode, right_decode, small=SMALL, large=LARGE, beside=split)
compare()

# ## What to take along
#
# - One decode step reads all weights and the whole cache once: count bytes.
# - A kernel with few blocks leaves most of the GPU idle; split the work, and merge what the pieces leave.
#
# *Sources.* N. Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need" (2019); J. Ainslie et al., "GQA"
# (2023); T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference" (2023).
