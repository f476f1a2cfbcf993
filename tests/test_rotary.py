"""Rotary embedding with the append to the KV cache, and the counter that moves positions, against the reference."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.kernels import rotary

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
pytestmark = pytest.mark.emulate_one_in(2)


def tables(positions, half):
    angles = np.outer(np.arange(positions), 100.0 ** -(np.arange(half) / max(half, 1)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def run(dtype, batch, tokens, heads, kv_heads, head_dim, half, capacity, positions, table_length=None, in_place=False):
    """On the device and by the reference: ((q, k_cache, v_cache), the same in float64)."""
    fused = random((batch, tokens, heads + 2 * kv_heads, head_dim), dtype, 1)
    caches = [random((batch, capacity, kv_heads, head_dim), dtype, seed) for seed in (2, 3)]
    cos, sin = tables(table_length or capacity, half)
    whole = to_device(fused)
    parts = [whole[:, :, :heads], whole[:, :, heads : heads + kv_heads], whole[:, :, heads + kv_heads :]]
    on_device = [to_device(c) for c in caches]
    out = parts[0] if in_place else poisoned((batch, tokens, heads, head_dim), dtype)
    nbk.rotary_append(*parts, *map(to_device, (cos, sin, positions)), *on_device, out=out)
    exact = fused.astype(np.float64)
    want = [c.astype(np.float64) for c in caches]
    q = reference.rotary_append(
        exact[:, :, :heads],
        exact[:, :, heads : heads + kv_heads],
        exact[:, :, heads + kv_heads :],
        cos,
        sin,
        positions,
        *want,
    )
    return (to_host(out), *map(to_host, on_device)), (q, *want)


# by 16 bytes; by single elements where a chunk would cross the middle (72, 36), the end of the rotation (80, 20) or the head (7)
HEADS = [(64, 32), (80, 40), (80, 16), (7, 2), (16, 0), (72, 36), (80, 20)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, half", HEADS)
@pytest.mark.parametrize("in_place", [False, True])
def test_against_the_reference(device, dtype, head_dim, half, in_place):
    positions = np.array([0, 11, 5], np.int32)
    got, want = run(dtype, 3, 4, 6, 2, head_dim, half, 20, positions, in_place=in_place)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < BOUND[dtype]
    np.testing.assert_array_equal(
        got[2], want[2].astype(dtype), "v is copied bit for bit, and the rest of the cache left alone"
    )


def test_positions_outside_write_nothing(device):
    fused = random((3, 2, 3, 8), BF16, 1)
    cache = random((3, 4, 1, 8), BF16, 2)
    cos, sin = tables(4, 4)
    k_cache, v_cache = to_device(cache), to_device(cache)
    whole = to_device(fused)
    out = poisoned((3, 2, 1, 8), BF16)
    positions = np.array([-1, 3, 2**31 - 1], np.int32)  # token 1 of the first and token 0 of the second are inside
    nbk.rotary_append(
        whole[:, :, :1],
        whole[:, :, 1:2],
        whole[:, :, 2:],
        *map(to_device, (cos, sin, positions)),
        k_cache,
        v_cache,
        out=out,
    )
    got, written = to_host(out).astype(np.float32), to_host(v_cache)
    assert not got[0, 0].any() and not got[1, 1].any() and not got[2].any()
    assert got[0, 1].any() and got[1, 0].any()
    np.testing.assert_array_equal(written[0, 0], fused[0, 1, 2:])
    np.testing.assert_array_equal(written[1, 3], fused[1, 0, 2:])
    np.testing.assert_array_equal(written[0, 1:], cache[0, 1:])
    np.testing.assert_array_equal(written[2], cache[2])


@pytest.mark.parametrize("dtype, shift", [(BF16, 0), (BF16, 1), (F16, 4), (F32, 1)])
def test_slices_of_larger_arrays(device, dtype, shift):
    """Caches, tables and out cut out of larger arrays; shifted, no row begins at a 16-byte address."""
    batch, tokens, heads, kv_heads, head_dim, half = 2, 3, 4, 2, 32, 16
    part = slice(shift, shift + head_dim)
    fused = random((batch, tokens + 1, heads + 2 * kv_heads, head_dim + 8), dtype, 1)
    caches = [random((batch + 1, 9, kv_heads + 2, head_dim + 8), dtype, seed) for seed in (2, 3)]
    cut = (slice(1, None), slice(2, None), slice(1, -1), part)
    cos, sin = tables(7, half)
    wide_sin = np.full((7, half + 4), np.nan, np.float32)
    wide_sin[:, :half] = sin
    positions = np.array([4, 0], np.int32)
    whole, on_device, written = to_device(fused), [to_device(c) for c in caches], poisoned(fused.shape, dtype)
    q, k, v = slice(heads), slice(heads, heads + kv_heads), slice(heads + kv_heads, None)
    nbk.rotary_append(
        *(whole[:, 1:, part_of, part] for part_of in (q, k, v)),
        to_device(cos),
        to_device(wide_sin)[:, :half],
        to_device(positions),
        *(c[cut] for c in on_device),
        out=written[:, 1:, q, part],
    )
    exact, want = fused.astype(np.float64)[:, 1:, :, part], [c.astype(np.float64) for c in caches]
    rotated = reference.rotary_append(
        *(exact[:, :, part_of] for part_of in (q, k, v)), cos, sin, positions, *(w[cut] for w in want)
    )
    written = to_host(written).astype(np.float64)
    assert relative_error(written[:, 1:, q, part], rotated) < BOUND[dtype]
    assert np.isnan(written).sum() == written.size - rotated.size, "only out is written"
    for got, w, before in zip(on_device, want, caches, strict=True):
        assert relative_error(got, w) < BOUND[dtype]
        same = w == before.astype(np.float64)
        np.testing.assert_array_equal(to_host(got)[same], before[same])


@pytest.mark.parametrize("dtype, bits", [(BF16, 0xFF81), (F16, 0xFC01), (F32, 0xFF800001)], ids=str)
def test_what_is_copied_keeps_its_bits(device, dtype, bits):
    """Even those of a signalling NaN, in v and past the rotated part."""
    words = np.dtype(f"u{dtype.itemsize}")
    x = np.full((1, 1, 3, 32), bits, words).view(dtype)
    caches = [to_device(np.zeros((1, 2, 1, 32), dtype)) for _ in range(2)]
    whole = to_device(x)
    cos, sin = tables(2, 8)
    positions = np.array([1], np.int32)
    out = nbk.rotary_append(
        whole[:, :, :1], whole[:, :, 1:2], whole[:, :, 2:], *map(to_device, (cos, sin, positions)), *caches
    )
    k_cache, v_cache = (to_host(c).view(words) for c in caches)
    assert (v_cache[0, 1] == bits).all() and (k_cache[0, 1, :, 16:] == bits).all()
    assert (to_host(out).view(words)[..., 16:] == bits).all()
    assert not v_cache[0, 0].any() and not k_cache[0, 0].any()


def scattered(batch, max_pages, pages, seed=0):
    """A block table of pages in no order, each used once."""
    return (
        np.random.default_rng(seed).permutation(pages)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    )


def norms(kind, head_dim, dtype):
    """(q_norm, k_norm) of a kind: none, both, or one of them."""
    q_norm, k_norm = (1 + 0.3 * random((head_dim,), dtype, seed) for seed in (7, 8))
    return (q_norm.astype(dtype) if "q" in kind else None, k_norm.astype(dtype) if "k" in kind else None)


def append(parts, turns, positions, caches, place, operation, **options):
    """One call of an operation or of its reference on copies; -> q, caches, scales as NumPy arrays."""
    options = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    placed = [place(c) for c in caches]
    if operation is nbk.rotary_append:
        options["out"] = poisoned(parts[0].shape, parts[0].dtype)
    q = operation(*map(place, parts), *map(place, turns), place(positions), *placed, **options)
    scales = [options[name] for name in ("k_scales", "v_scales") if options.get(name) is not None]
    return [to_host(x) for x in (q, *placed, *scales)]


@pytest.mark.parametrize("dtype, head_dim, half", [(BF16, 64, 32), (F16, 80, 16), (F32, 128, 64), (BF16, 7, 2)])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kind", ["", "qk", "int8", "k int8"])
def test_pages_norms_and_int8(device, dtype, head_dim, half, page_size, kind):
    """Tokens across the edges of pages; by 16 bytes and by single elements; heads that leave lanes idle."""
    int8_cache = "int8" in kind
    heads, kv_heads, pages, batch, tokens = 5, 2, 9, 3, 5
    fused = random((batch, tokens, heads + 2 * kv_heads, head_dim), dtype, 1)
    parts = [np.ascontiguousarray(x) for x in np.split(fused, [heads, heads + kv_heads], axis=2)]
    table = scattered(batch, 2, pages)
    turns = tables(2 * page_size, half)
    positions = np.array([0, page_size - 2, 2 * page_size - tokens], np.int32)
    shape = (pages, page_size, kv_heads, head_dim)
    if int8_cache:
        caches = [np.full(shape, seed, np.int8) for seed in (2, 3)]
        options = {name: np.full(shape[:3], 9, np.float32) for name in ("k_scales", "v_scales")}
    else:
        caches, options = [random(shape, dtype, seed) for seed in (2, 3)], {}
    q_norm, k_norm = norms(kind.split()[0] if kind and kind != "int8" else "", head_dim, dtype)
    options |= {"block_table": table, "q_norm": q_norm, "k_norm": k_norm, "eps": 1e-5}
    got = append(parts, turns, positions, caches, to_device, nbk.rotary_append, **options)
    exact = [x.astype(np.float64) for x in parts]
    copies = [c.copy() if int8_cache else c.astype(np.float64) for c in caches]
    wanted_options = {name: x.copy() if name.endswith("scales") else x for name, x in options.items()}
    want = append(exact, turns, positions, copies, lambda x: x, reference.rotary_append, **wanted_options)
    assert relative_error(got[0], want[0]) < BOUND[dtype]
    if not int8_cache:
        for g, w in zip(got[1:], want[1:], strict=True):
            assert relative_error(g, w) < BOUND[dtype]
        np.testing.assert_array_equal(
            got[2], want[2].astype(dtype), "v is copied, and the rest of the pages left alone"
        )
        return
    # float32 against float64: a quotient within 2^-20 of a half may round the other way
    for g, w in zip(got[1:3], want[1:3], strict=True):
        difference = np.abs(g.astype(int) - w)
        assert difference.max() <= 1 and difference.mean() < 1e-3
    for g, w in zip(got[3:], want[3:], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5)
    whole = np.abs(got[1].astype(int)).max(axis=-1)[got[3] != 9]
    assert (whole == 127).all() and (got[3] != 9).sum() == batch * tokens * kv_heads


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_int8_without_pages_and_a_head_of_zeros(device, dtype):
    parts = [random((2, 3, heads, 32), dtype, heads) for heads in (4, 2, 2)]
    parts[1][0, 1, 0] = 0
    caches = [np.full((2, 9, 2, 32), 5, np.int8) for _ in range(2)]
    options = {name: np.full((2, 9, 2), 9, np.float32) for name in ("k_scales", "v_scales")}
    positions = np.array([6, 0], np.int32)
    got = append(parts, tables(9, 16), positions, caches, to_device, nbk.rotary_append, **options)
    # v is quantised as it is: the same bits as those of the reference in float32
    want = [c.copy() for c in caches]
    wanted_options = {name: x.copy() for name, x in options.items()}
    reference.rotary_append(*parts, *tables(9, 16), positions, *want, **wanted_options)
    np.testing.assert_array_equal(got[2], want[1])
    np.testing.assert_array_equal(got[4], wanted_options["v_scales"])
    assert not got[1][0, 7, 0].any() and got[3][0, 7, 0] == 0


def test_pages_outside_of_the_pool_write_nothing(device):
    parts = [random((3, 2, heads, 32), BF16, heads) for heads in (2, 1, 1)]
    cache = random((2, 16, 1, 32), BF16, 5)
    table = np.array([[1, -1], [2, 0], [2**31 - 1, 0]], np.int32)
    positions = np.array([15, 15, 0], np.int32)  # of each the first token, or the second, or none has a page
    caches = [cache, cache.copy()]
    q, _, v_cache = append(parts, tables(32, 16), positions, caches, to_device, nbk.rotary_append, block_table=table)
    want = cache.copy()
    want[1, 15] = parts[2][0, 0]
    want[0, 0] = parts[2][1, 1]
    np.testing.assert_array_equal(v_cache, want)
    assert np.abs(q.astype(np.float32)).max(axis=-1).all(), "q is turned all the same"
    with pytest.raises(ValueError, match="block_table: pages -1 to 1 of a pool of 2"):
        reference.rotary_append(*parts, *tables(32, 16), positions, *caches, block_table=table)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, tokens, heads", [(65537, 1, 1), (1, 65537, 1), (1, 2, 65537)])
def test_more_than_a_grid_axis_holds(device, batch, tokens, heads):
    positions = np.zeros(batch, np.int32)
    got, want = run(BF16, batch, tokens, heads, 1, 16, 8, tokens, positions)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < BOUND[BF16]


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, half, width, threads",
    [
        (9, 3, 64, 32, 8, 96),  # 12 · 4 pairs of chunks and 3 · 8 chunks of v
        (32, 8, 128, 64, 8, 256),
        (1, 1, 7, 2, 1, 32),
        (1, 0, 8, 4, 1, 32),
    ],
)
def test_the_plan_gives_a_thread_a_chunk(heads, kv_heads, head_dim, half, width, threads):
    chosen = rotary.plan(3, 5, heads, kv_heads, head_dim, half, BF16, width)
    assert chosen.grid == (15, 1, 1)
    assert chosen.block == (threads, 1, 1)


def test_advance(device):
    lengths = to_device(np.arange(300, dtype=np.int32))
    nbk.advance(lengths, 7)
    nbk.advance(lengths, -2)
    np.testing.assert_array_equal(to_host(lengths), np.arange(300) + 5)


def test_advance_of_one_wraps_as_int32(device):
    lengths = to_device(np.array([2**31 - 1], np.int32))
    nbk.advance(lengths, 1)
    assert to_host(lengths).tolist() == [-(2**31)]
