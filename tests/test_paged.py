"""Attention over paged KV caches against float64: few query tokens and prompts, float and int8 pages, in any order of pages."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.kernels import decode, pages

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
SPLIT = decode.SPLIT
pytestmark = pytest.mark.emulate_one_in(8)
# a sequence without keys, one key, the edges of a tile of 16 keys and of pages, both sides of a split's end
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 33]


class Paged:
    """The keys and values of a batch in pages that nobody else has, in no order, with NaN in all that is not a token's.

    exact: k, v float64 [batch, capacity, kv_heads, head_dim] as they are read, zeros behind the lengths. int8: quantised a token
    and head.
    """

    def __init__(self, lengths, kv_heads, head_dim, dtype, page_size=16, int8=False, order=0, spare=3, max_pages=None):
        self.lengths = np.array(lengths, np.int32)
        batch = len(lengths)
        self.max_pages = max_pages or -(-max([*lengths, 1]) // page_size)
        capacity = self.max_pages * page_size
        pool = batch * self.max_pages + spare
        pages = np.random.default_rng(order).permutation(pool)[: batch * self.max_pages]
        self.table = pages.reshape(batch, self.max_pages).astype(np.int32)
        inside = np.arange(capacity) < self.lengths[:, None]  # [batch, capacity]
        self.scales = None
        self.pools, self.exact, scales = [], [], []
        for seed in (1, 2):
            # sequence by sequence, so that one is the same in any batch
            rows = np.stack(
                [random((4096, kv_heads, head_dim), F32, 10 * seed + int(n) % 7)[:capacity] for n in lengths]
            )
            rows = rows.astype(dtype)
            if int8:
                scale = np.abs(rows.astype(np.float32)).max(axis=-1) / np.float32(127)
                rows = np.rint(rows.astype(np.float32) / scale[..., None]).astype(np.int8)
                exact = rows.astype(np.float64) * scale[..., None]
                scales.append(
                    self._paged(np.where(inside[..., None], scale, np.float32(np.nan)), pool, page_size, np.nan)
                )
            else:
                exact = rows.astype(np.float64)
                rows = np.where(inside[..., None, None], rows, np.array(np.nan, dtype))
            self.exact.append(np.where(inside[..., None, None], exact, 0))
            self.pools.append(self._paged(rows, pool, page_size, 77 if int8 else np.nan))
        if int8:
            self.scales = scales

    def _paged(self, rows, pool, page_size, filler):
        """rows [batch, capacity, …] -> [pool, page_size, …] by the table."""
        pages = np.full((pool, page_size, *rows.shape[2:]), filler, rows.dtype)
        pages[self.table] = rows.reshape(*self.table.shape, page_size, *rows.shape[2:])
        return pages

    def run(self, q, **options):
        """On the device, into a poisoned output."""
        if self.scales is not None:
            options |= dict(zip(("k_scales", "v_scales"), map(to_device, self.scales), strict=True))
        out = poisoned(q.shape, q.dtype)
        arrays = map(to_device, (q, *self.pools, self.table, self.lengths))
        nbk.paged_attention(*arrays, out=out, **options)
        return to_host(out)

    def check(self, q, bound=None, **options):
        got = self.run(q, **options)
        want = reference.attention(
            q.astype(np.float64), *self.exact, kv_lengths=self.lengths, **{"causal": True, **options}
        )
        assert relative_error(got, want) < (bound or BOUND[q.dtype])
        return got


def queries(batch, q_len, heads, head_dim, dtype):
    return random((batch, q_len, heads, head_dim), dtype, 0)


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("q_len", [1, 4, 20, 70])
@pytest.mark.parametrize(
    "dtype, int8", [(BF16, False), (F16, False), (F32, False), (BF16, True), (F16, True), (F32, True)]
)
def test_lengths(device, dtype, int8, q_len, page_size):
    paged = Paged(LENGTHS, 2, 64, dtype, page_size, int8)
    got = paged.check(queries(len(LENGTHS), q_len, 4, 64, dtype))
    for b, n in enumerate(LENGTHS):
        assert not got[b, : max(0, q_len - n)].any(), "a query that sees no key gives zeros"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 12])
@pytest.mark.parametrize(
    "dtype, head_dim",
    [
        (BF16, 16),
        (BF16, 128),
        (F16, 72),
        (BF16, 80),
        (F16, 256),
        (F32, 16),
        (F32, 128),
        (BF16, 13),
        (F32, 7),
        (BF16, 96),
    ],
)
def test_head_sizes(device, dtype, head_dim, q_len, int8):
    """By 16 bytes, by 8 where only those fit, and by single elements."""
    Paged([40, SPLIT + 20], 2, head_dim, dtype, 32, int8).check(queries(2, q_len, 4, head_dim, dtype))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (32, 8), (8, 1), (17, 1)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_grouped_heads(device, heads, kv_heads, dtype, int8):
    Paged([33, SPLIT + 7], kv_heads, 64, dtype, 16, int8).check(queries(2, 1, heads, 64, dtype))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 3, 30])
@pytest.mark.parametrize("window", [1, 3, 18, SPLIT, SPLIT + 1, 2**31 + 5])
def test_windows(device, window, q_len, int8):
    """Windows that begin inside a tile of keys, leave whole pages and splits unseen, and hide nothing."""
    paged = Paged([2, 33, 2 * SPLIT + 50], 1, 64, BF16, 16, int8)
    paged.check(queries(3, q_len, 2, 64, BF16), window=window)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 20])
def test_not_causal_and_a_scale(device, q_len, int8):
    Paged([40, SPLIT + 9], 2, 64, F16, 64, int8).check(queries(2, q_len, 4, 64, F16), causal=False, scale=0.5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 5, 20])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_same_bits_alone_and_on_any_pages(device, dtype, q_len, int8):
    """In another order of the pages, a longer table, a larger pool, pages of another size, and alone."""
    lengths = [17, SPLIT + 44, SPLIT, 3]
    q = queries(4, q_len, 4, 64, dtype)
    together = Paged(lengths, 2, 64, dtype, 16, int8).run(q)
    others = ({"order": 7}, {"max_pages": 40}, {"spare": 50}, {"page_size": 64})
    for other in others:
        np.testing.assert_array_equal(
            Paged(lengths, 2, 64, dtype, **{"page_size": 16, "int8": int8, **other}).run(q), together
        )
    for b, n in enumerate(lengths):
        alone = Paged([n], 2, 64, dtype, 16, int8, order=b).run(q[b : b + 1])
        np.testing.assert_array_equal(alone[0], together[b])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("lengths", [[0, 1, 100], [5, SPLIT + 30, 17]])  # one split, and several that are merged
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_soft_cap_and_sinks(device, dtype, lengths, q_len, int8):
    paged = Paged(lengths, 2, 64, dtype, 16, int8)
    q = queries(3, q_len, 4, 64, dtype)
    sinks = np.array([-1.0, 0.5, 3.0, 0.0], np.float32)
    for options in ({"soft_cap": 5.0}, {"sinks": sinks}, {"soft_cap": 2.0, "sinks": sinks, "scale": 0.5}):
        want = reference.attention(q.astype(np.float64), *paged.exact, kv_lengths=paged.lengths, causal=True, **options)
        placed = {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        assert relative_error(paged.run(q, **placed), want) < BOUND[dtype]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_small_and_large_values_in_int8(device, dtype, scale):
    """A scale times a weight is nothing that float16 could hold well."""
    paged = Paged([SPLIT + 20, 50], 2, 64, F32, 16, int8=True)
    paged.scales[1] *= np.float32(scale)
    paged.exact[1] *= scale
    got = paged.run(queries(2, 1, 4, 64, dtype))
    want = reference.attention(queries(2, 1, 4, 64, dtype).astype(np.float64), *paged.exact, kv_lengths=paged.lengths)
    # what float16 itself makes of results about 1e-4 is off by half of its last place, 3e-8
    assert np.abs(got.astype(np.float64) - want).max() < BOUND[dtype] * np.abs(want).max() + (
        3.1e-8 if dtype == F16 else 0
    )


@pytest.mark.parametrize("q_len", [1, 20])
def test_lengths_out_of_range_are_cut(device, q_len):
    paged = Paged([32, 32, 32], 2, 64, BF16, 16)
    q = queries(3, q_len, 2, 64, BF16)
    want = paged.run(q)
    paged.lengths = np.array([-7, 33, 2**31 - 1], np.int32)
    got = paged.run(q)
    assert not got[0].any()
    np.testing.assert_array_equal(got[1:], want[1:])


@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("int8", [False, True])
def test_slices_of_larger_pools(device, q_len, int8):
    """Every axis but the last cut out of a larger array; scales with the tokens innermost."""
    paged = Paged([40, SPLIT + 9], 2, 64, BF16, 16, int8)
    q = queries(2, q_len, 4, 64, BF16)
    want = paged.run(q)
    placed = []
    for pool in paged.pools:
        large = np.full((pool.shape[0] + 1, 20, 4, 80), 3, pool.dtype)
        large[1:, 2:18, 1:3, 16:] = pool
        placed.append(to_device(large)[1:, 2:18, 1:3, 16:])
    options = {}
    if int8:
        for name, scales in zip(("k_scales", "v_scales"), paged.scales, strict=True):
            turned = to_device(np.ascontiguousarray(scales.transpose(0, 2, 1)))
            strides = (turned.strides[0], turned.strides[2], turned.strides[1])
            options[name] = type(turned)(turned.pointer, scales.shape, strides, turned.dtype, turned.owner)
    table = to_device(np.pad(paged.table, ((0, 0), (0, 5)), constant_values=-1))[:, : paged.max_pages]
    out = poisoned(q.shape, BF16)
    nbk.paged_attention(to_device(q), *placed, table, to_device(paged.lengths), out=out, **options)
    np.testing.assert_array_equal(to_host(out), want)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("int8", [False, True])
def test_the_reference_reads_pages(dtype, int8):
    """On the CPU: pages in order are read in place, others gathered."""
    lengths = [0, 5, 33, 48]
    q = queries(4, 3, 4, 8, dtype)
    results = []
    for order in range(2):
        paged = Paged(lengths, 2, 8, dtype, 16, int8, order=order)
        if order:
            pools = [pool[paged.table].reshape(-1, *pool.shape[1:]) for pool in paged.pools]
            scales = [s[paged.table].reshape(-1, *s.shape[1:]) for s in paged.scales or ()]
            table = np.arange(paged.table.size, dtype=np.int32).reshape(paged.table.shape)
        else:
            pools, scales, table = paged.pools, paged.scales or (), paged.table
        with nbk.device("cpu"):
            results.append(
                nbk.paged_attention(
                    q, *pools, table, paged.lengths, **dict(zip(("k_scales", "v_scales"), scales, strict=False))
                )
            )
        want = reference.attention(q.astype(np.float64), *paged.exact, kv_lengths=paged.lengths, causal=True)
        assert relative_error(results[-1], want) < BOUND[dtype]
    np.testing.assert_array_equal(*results)


def test_a_page_outside_of_the_pool(device):
    """Nothing outside is read (the emulator would stop), and the other sequence is as it was."""
    paged = Paged([40, 40], 2, 64, BF16, 16)
    for q_len in (1, 20):
        q = queries(2, q_len, 4, 64, BF16)
        want = paged.run(q)
        for wrong in (-1, 2**31 - 1, len(paged.pools[0])):
            table = paged.table.copy()
            table[0, 1] = wrong
            arrays = map(to_device, (q, *paged.pools, table, paged.lengths))
            got = to_host(nbk.paged_attention(*arrays))
            np.testing.assert_array_equal(got[1], want[1])
        with nbk.device("cpu"), pytest.raises(ValueError, match="block_table: pages"):
            nbk.paged_attention(q, *paged.pools, table, paged.lengths)


def test_a_batch_is_gathered_in_parts(device, monkeypatch):
    paged = Paged([20, 40, 33], 1, 16, F32, 16)
    q = queries(3, 12, 1, 16, F32)
    want = paged.run(q)
    monkeypatch.setattr(pages, "SCRATCH_BYTES", 2 * 2 * 48 * 16 * 4)  # two sequences
    np.testing.assert_array_equal(paged.run(q), want)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("dtype, heads, head_dim", [(BF16, 8, 128), (F16, 16, 64), (F32, 4, 32)])
def test_a_shared_prefix(device, dtype, heads, head_dim, q_len, int8):
    """Two whole splits and some of a third are read once, with the same bits; what is packed fills several row tiles."""
    page_size = 64
    lengths = [2 * SPLIT + 40 + q_len, 3 * SPLIT + 5, 2 * SPLIT + 70, 2 * SPLIT + 41 + q_len, 4 * SPLIT]
    prefix = 2 * SPLIT + 40
    paged = Paged(lengths, 2, head_dim, dtype, page_size, int8)
    common = prefix // page_size  # whole pages
    paged.table[:, :common] = paged.table[:1, :common]
    for exact in paged.exact:
        exact[:, : common * page_size] = exact[:1, : common * page_size]
    q = queries(len(lengths), q_len, heads, head_dim, dtype)
    got = paged.check(q)
    with_prefix = paged.run(q, prefix=common * page_size)
    np.testing.assert_array_equal(with_prefix, got)
    # query tokens that do not lie at one stride are each sequence's own
    wide = to_device(np.concatenate([q, q], axis=1))[:, :q_len]
    options = dict(zip(("k_scales", "v_scales"), map(to_device, paged.scales), strict=True)) if int8 else {}
    arrays = map(to_device, (*paged.pools, paged.table, paged.lengths))
    np.testing.assert_array_equal(
        to_host(nbk.paged_attention(wide, *arrays, prefix=common * page_size, **options)), got
    )


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 128 keys, a step of a block, so that a few thousand keys are several groups of splits."""
    monkeypatch.setattr(decode, "SPLIT", 128)
    plans = decode.plan, decode.plan_prefix
    for kept in plans:
        kept.cache_clear()
    yield 128
    for kept in plans:
        kept.cache_clear()


@pytest.mark.parametrize("dtype, int8", [(BF16, False), (F16, True), (F32, False)])
@pytest.mark.parametrize("splits", [16, 17, 33])
def test_a_prefix_of_several_groups_of_splits(device, short_splits, dtype, int8, splits):
    """Whole groups are merged by the prefix's own walk, the splits of the last one by each sequence."""
    prefix = short_splits * splits
    paged = Paged([prefix + 1, prefix + 40, prefix + 700], 1, 16, dtype, 16, int8)
    paged.table[:, : prefix // 16] = paged.table[:1, : prefix // 16]
    for exact in paged.exact:
        exact[:, :prefix] = exact[:1, :prefix]
    q = queries(3, 1, 2, 16, dtype)
    np.testing.assert_array_equal(paged.run(q, prefix=prefix), paged.check(q))


@pytest.mark.parametrize("dtype, int8", [(BF16, False), (F16, True), (BF16, True)])
@pytest.mark.parametrize("window", [None, 900])
def test_many_splits_behind_a_prefix(device, monkeypatch, dtype, int8, window):
    """Groups of splits that a prefix fills in part, and a window that begins within a split."""
    monkeypatch.setattr(decode, "SPLIT", 128)
    for kept in (decode.plan, decode.plan_prefix):
        kept.cache_clear()
    prefix = 5 * 128
    paged = Paged([prefix + 1, prefix + 40, prefix + 1500], 1, 64, dtype, 16, int8)
    paged.table[:, : prefix // 16] = paged.table[:1, : prefix // 16]
    for exact in paged.exact:
        exact[:, :prefix] = exact[:1, :prefix]
    q = queries(3, 1, 2, 64, dtype)
    np.testing.assert_array_equal(paged.run(q, window=window, prefix=prefix), paged.check(q, window=window))
    for kept in (decode.plan, decode.plan_prefix):
        kept.cache_clear()


def test_a_prefix_is_read_once():
    """By the plan: the walks behind it have fewer splits, and that of the prefix as many rows a block as there are."""
    masks = {"causal": False, "windowed": False, "has_lengths": True}
    splits = 8192 // SPLIT
    walk, _, all_splits = decode.plan(
        16, 1, 8192, 32, 8, 128, BF16, 8, (2**17, 999), **masks, paged=True, prefix_splits=5
    )
    assert (walk.grid, all_splits) == ((8, splits - 5, 16), splits)
    shared, tiles = decode.plan_prefix(
        16, 1, 32, 8, 128, BF16, 8, (2**17, 999), capped=False, int8_pages=False, prefix_splits=5
    )
    assert tiles == 16 * 4 // 16 and shared.grid == (8 * tiles, 5, 1)
