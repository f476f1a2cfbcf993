"""Attention for few query tokens (``kernels/decode.py``) against float64: both walks of a split, and their merge."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.kernels import decode
from nbkernels.kernels.decode_merge import FAN
from nbkernels.launch import memory

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
SPLIT = decode.SPLIT
DEVICE = (99 * 1024, 4)  # shared bytes of a block, on the smallest of the architectures, and multiprocessors
pytestmark = pytest.mark.emulate_one_in(3)
# a sequence without keys, one key, the edges of a product's 16 keys, and both sides of a split's end
LENGTHS = np.array([0, 1, 33, SPLIT, SPLIT + 1, 15, 16, 17], np.int32)


def inputs(batch, q_len, capacity, heads, kv_heads, head_dim, dtype, seed=0):
    q = random((batch, q_len, heads, head_dim), dtype, seed)
    k, v = (random((batch, capacity, kv_heads, head_dim), dtype, seed + i) for i in (1, 2))
    return q, k, v


def spoiled(cache, lengths):
    """The cache with NaN in place of every key beyond its sequence's length."""
    beyond = np.arange(cache.shape[1]) >= lengths[:, None]
    return np.where(beyond[..., None, None], np.array(np.nan, cache.dtype), cache)


def exact(q, k, v, lengths, **options):
    """The float64 reference, which sees nothing beyond a length either."""
    inside = (np.arange(k.shape[1]) < lengths[:, None])[..., None, None]
    k, v = (np.where(inside, x, 0).astype(np.float64) for x in (k, v))
    return reference.attention(q.astype(np.float64), k, v, kv_lengths=lengths, **options)


def run(q, k, v, lengths, **options):
    """On the device, into a poisoned output, with NaN beyond the lengths."""
    out = poisoned(q.shape, q.dtype)
    arrays = map(to_device, (q, spoiled(k, lengths), spoiled(v, lengths)))
    nbk.attention(*arrays, kv_lengths=to_device(lengths), out=out, **options)
    return to_host(out)


def check(q, k, v, lengths, **options):
    got = run(q, k, v, lengths, **options)
    assert relative_error(got, exact(q, k, v, lengths, **options)) < BOUND[q.dtype]
    return got


# decode_tensor with whole products and a half one; decode_lanes by 16-byte loads (float32) and single elements
TENSOR = [(16, F16), (64, BF16), (72, BF16), (80, F16), (128, BF16), (256, BF16), (256, F16)]
MULTIPLY_ADD = [(16, F32), (64, F32), (80, F32), (128, F32), (256, F32), (72, F32), (13, F16), (1, BF16)]


@pytest.mark.parametrize("head_dim, dtype", TENSOR + MULTIPLY_ADD)
def test_head_sizes(device, head_dim, dtype):
    got = check(*inputs(8, 1, SPLIT + 40, 4, 2, head_dim, dtype), LENGTHS)
    assert not got[0].any(), "a sequence without keys gives zeros"


@pytest.mark.parametrize("q_len", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_query_tokens(device, q_len, dtype):
    """Lengths below q_len too: the first queries of those see nothing."""
    lengths = np.array([0, 1, 3, 33, SPLIT + 3], np.int32)
    got = check(*inputs(5, q_len, 2 * SPLIT, 4, 2, 64, dtype), lengths, causal=True)
    for b, n in enumerate(lengths):
        assert not got[b, : max(0, q_len - n)].any()


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (32, 8), (8, 1), (17, 1)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_grouped_heads(device, heads, kv_heads, dtype):
    """Packed rows that fill a strip or a row tile, leave some of it, or need several."""
    check(*inputs(2, 1, SPLIT + 8, heads, kv_heads, 64, dtype), np.array([33, SPLIT + 7], np.int32))


@pytest.mark.parametrize("head_dim, group, q_len", [(64, 4, 8), (128, 4, 8), (256, 2, 8), (16, 4, 8), (64, 3, 5)])
def test_row_tiles(device, head_dim, group, q_len):
    """decode_tensor with 4, 2 and 1 strips a block, several row tiles, and tiles whose last rows are no query."""
    check(*inputs(1, q_len, SPLIT + 20, 2 * group, 2, head_dim, F16), np.array([SPLIT + 9], np.int32), causal=True)


@pytest.mark.parametrize("window", [1, 3, SPLIT, SPLIT + 1, 2**31 + 5])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_windows(device, window, dtype):
    """Windows that begin inside a split, leave whole splits unseen, and hide nothing."""
    lengths = np.array([2, 33, 2 * SPLIT + 50], np.int32)
    check(*inputs(3, 3, 2 * SPLIT + 60, 2, 1, 64, dtype), lengths, window=window)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_short_sequence_in_a_long_cache(device, dtype):
    """Seven of eight splits see nothing: they write nothing, and the merge reads nothing of theirs."""
    check(*inputs(2, 1, 8 * SPLIT, 2, 1, 64, dtype), np.array([5, 1], np.int32))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_lengths_out_of_range_are_cut(device, dtype):
    q, k, v = inputs(3, 1, 40, 2, 1, 64, dtype)
    out = poisoned(q.shape, dtype)
    nbk.attention(*map(to_device, (q, k, v)), kv_lengths=to_device(np.array([-7, 41, 2**31 - 1], np.int32)), out=out)
    assert relative_error(out, exact(q, k, v, np.array([0, 40, 40], np.int32))) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("q_len", [1, 5])
def test_a_sequence_has_the_same_bits_alone_and_in_any_cache(device, dtype, q_len):
    lengths = np.array([17, SPLIT + 44, SPLIT, 3 * SPLIT - 1], np.int32)
    q, k, v = inputs(4, q_len, 3 * SPLIT, 4, 2, 64, dtype)
    together = run(q, k, v, lengths, causal=True)
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        for capacity in {int(n), 3 * SPLIT}:  # the first of them fits into one split, and is written without a merge
            alone = run(q[one], k[one, :capacity], v[one, :capacity], lengths[one], causal=True)
            np.testing.assert_array_equal(alone[0], together[b])


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 128 keys, a step of a block, so that a few thousand keys make a merge of two and three levels."""
    monkeypatch.setattr(decode, "SPLIT", 128)
    decode.plan.cache_clear()
    yield 128
    decode.plan.cache_clear()


@pytest.mark.parametrize("dtype, head_dim", [(BF16, 16), (F32, 16), (F16, 13)])
@pytest.mark.parametrize("q_len, window", [(1, None), (3, None), (1, 2066), (2, 100)])
def test_levels_of_the_merge(device, short_splits, dtype, head_dim, q_len, window):
    """Sixteen splits are one group, seventeen are two; windows begin within a group and leave whole ones unseen."""
    group = FAN * short_splits
    lengths = np.array([group, group + 1, 0, 31, 2 * group + 70], np.int32)
    q, k, v = inputs(5, q_len, 2 * group + 75, 2, 1, head_dim, dtype)
    options = {"causal": True, "window": window}
    together = check(q, k, v, lengths, **options)
    for b in (0, 1):  # in caches of one level and of two
        one, n = slice(b, b + 1), int(lengths[b])
        np.testing.assert_array_equal(run(q[one], k[one, :n], v[one, :n], lengths[one], **options)[0], together[b])


@pytest.mark.parametrize("dtype, q_len, window", [(BF16, 1, None), (F16, 3, 333)])
def test_stages_of_a_ring(device, monkeypatch, dtype, q_len, window):
    """Rings of any length leave the same bits, and some of them go round."""
    lengths = np.array([128, 700, SPLIT + 1, 0, 5], np.int32)
    q, k, v = inputs(len(lengths), q_len, SPLIT + 300, 2, 1, 64, dtype)
    results = []
    for stages in (2, 3, 6):
        monkeypatch.setattr(decode, "STAGES", stages)
        monkeypatch.setattr(decode, "LONE_STAGES", stages)
        decode.plan.cache_clear()
        results.append(check(q, k, v, lengths, causal=True, window=window))
    decode.plan.cache_clear()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_a_merge_of_three_levels(device, short_splits):
    n = FAN * FAN * short_splits + 5
    check(*inputs(1, 1, n, 1, 1, 16, BF16), np.array([n], np.int32))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_slices_of_a_larger_cache(device, dtype, shift):
    """Every axis but the last cut out of a larger array; shifted by an element no row begins at a 16-byte address."""
    batch, q_len, heads, kv_heads, head_dim = 2, 2, 4, 2, 64
    lengths = np.array([7, SPLIT + 20], np.int32)
    large = [random((batch + 1, SPLIT + 40, kv_heads + 2, head_dim + 8), dtype, i) for i in (1, 2)]
    fused = random((batch, q_len + 1, heads + 1, head_dim + 8), dtype, 3)
    written = poisoned(fused.shape, dtype)
    parts = (slice(1, None), slice(3, -4), slice(1, -1), slice(shift, shift + head_dim))
    of_q = (slice(None), slice(1, None), slice(1, None), slice(shift, shift + head_dim))
    out = written[of_q]
    k, v = (x[parts] for x in large)
    q = fused[of_q]
    on_device = [to_device(x)[parts] for x in large]
    nbk.attention(to_device(fused)[of_q], *on_device, kv_lengths=to_device(lengths), causal=True, out=out)
    assert relative_error(out, exact(q, k, v, lengths, causal=True)) < BOUND[dtype]
    around = np.ones(fused.shape, bool)
    around[of_q] = False
    assert np.isnan(to_host(written)[around].astype(np.float32)).all(), "only out is written"


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("scale", [30.0, -1.0])
def test_large_scores(device, dtype, scale):
    """The first key takes nearly all of the weight, or the maximum rises late: sums so far shrink to nothing."""
    q, k, v = inputs(2, 1, SPLIT + 30, 2, 1, 64, dtype)
    k[0, 0] *= 8
    k[1, SPLIT + 20] *= 8
    check(q, k, v, np.array([SPLIT + 30, SPLIT + 25], np.int32), scale=scale)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_nan_stays_with_the_queries_that_see_it(device, dtype):
    """Sequence 0 has one in a key, sequence 1 in a value of the second KV head, sequence 2 none."""
    q, k, v = inputs(3, 1, 40, 4, 2, 64, dtype)
    k[0, 3, 0, 5] = np.nan
    v[1, 4, 1, 7] = np.nan
    got = run(q, k, v, np.array([20, 20, 20], np.int32)).astype(np.float32)
    wrong = np.isnan(got)
    assert wrong[0, 0, :2].all() and not wrong[0, 0, 2:].any()
    assert wrong[1, 0, 2:, 7].all() and wrong[1].sum() == 2
    assert not wrong[2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 16, 64])
def test_batches_of_unequal_lengths(device, dtype, batch):
    lengths = np.random.default_rng(batch).integers(0, 3000, batch).astype(np.int32)
    q, k, v = inputs(batch, 1, 3000, 8, 2, 128, dtype)
    got = check(q, k, v, lengths)
    for _ in range(5):
        np.testing.assert_array_equal(run(q, k, v, lengths), got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_offsets_beyond_32_bits(device, dtype):
    """A cache of more than 2^31 elements: keys of zero with values of zero, then one strong key at the end of the last head."""
    keys, kv_heads, head_dim = 2**31 // (8 * 128) + 300, 8, 128
    k, v = (memory.empty((1, keys, kv_heads, head_dim), dtype) for _ in range(2))
    for cache in (k, v):
        memory.fill_bytes(cache, 0)
    row = np.ones((1, 1, 1, head_dim), dtype)
    for cache in (k, v):
        memory.copy_from_host(cache[:, -1:, -1:], row)
    q = to_device(np.ones((1, 1, kv_heads, head_dim), dtype))
    score = 20.0
    got = to_host(nbk.attention(q, k, v, scale=score / head_dim)).astype(np.float64)
    assert not got[0, 0, :-1].any()
    weight = np.exp(score) / (np.exp(score) + keys - 1)
    assert relative_error(got[0, 0, -1], np.full(head_dim, weight)) < BOUND[dtype]


def test_the_plan_counts_splits_by_the_capacity_alone():
    def splits(batch, kv_len, heads=8, q_len=1):
        return decode.plan(batch, q_len, kv_len, heads, 2, 64, BF16, 8, DEVICE, False, False, True)[2]

    assert [splits(1, n) for n in (0, 1, SPLIT, SPLIT + 1, 10 * SPLIT)] == [1, 1, 1, 2, 10]
    assert splits(1, 5000) == splits(64, 5000) == splits(1, 5000, heads=64, q_len=8)


@pytest.mark.parametrize(
    "packed, head_dim, dtype, width, rows",
    [
        (1, 128, BF16, 8, 8),  # a strip, however few rows it has
        (9, 128, BF16, 8, 16),
        (64, 128, BF16, 8, 16),  # two strips of 128 elements
        (64, 64, BF16, 8, 32),
        (64, 16, BF16, 8, 32),
        (64, 256, BF16, 8, 8),
        (1, 128, F32, 4, 1),
        (3, 128, F32, 4, 4),
        (64, 128, F32, 4, 4),
        (5, 13, BF16, 1, 4),
    ],
)
def test_the_plan_packs_rows(packed, head_dim, dtype, width, rows):
    walk, row_tiles, _ = decode.plan(2, 1, 100, packed, 1, head_dim, dtype, width, DEVICE, False, False, True)
    assert row_tiles == -(-packed // rows)
    assert walk.grid == (row_tiles, 1, 2)
    assert walk.shared_bytes <= DEVICE[0]


def test_more_splits_than_a_grid_holds_are_refused():
    with pytest.raises(ValueError, match="more than 65535 splits"):
        decode.plan(1, 1, 2**26, 8, 8, 64, BF16, 8, DEVICE, False, False, True)


@pytest.mark.parametrize("paged", [False, True])
def test_a_batch_beyond_a_grid_goes_in_parts(device, monkeypatch, paged):
    monkeypatch.setattr(decode, "MOST_BLOCKS", 2)
    lengths = np.array([5, 33, 20], np.int32)
    q, k, v = inputs(3, 1, 48, 2, 1, 64, BF16)
    if not paged:
        check(q, k, v, lengths)
        return
    pools = (to_device(x.reshape(9, 16, 1, 64)) for x in (k, v))
    table = np.arange(9, dtype=np.int32).reshape(3, 3)
    got = nbk.paged_attention(to_device(q), *pools, to_device(table), to_device(lengths))
    assert relative_error(got, exact(q, k, v, lengths)) < BOUND[BF16]
