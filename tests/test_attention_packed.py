"""Attention of packed sequences of unequal length, with soft caps and sinks, against the float64 reference."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference

pytestmark = pytest.mark.emulate_one_in(3)

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
SINKS = np.array([0.5, -2.0, 9.0, -np.inf, 1.0, 3.0, 0.0, -1.0], np.float32)


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def inputs(total_q, total_kv, heads, kv_heads, head_dim, dtype, seed=0):
    q = random((total_q, heads, head_dim), dtype, seed)
    return q, *(random((total_kv, kv_heads, head_dim), dtype, seed + i) for i in (1, 2))


def run(q, k, v, q_lengths, kv_lengths, **options):
    """The device's result, poisoned before; behind the last sequence it stays so."""
    given = {"query_offsets": offsets(q_lengths), "kv_offsets": offsets(kv_lengths), **options}
    out = poisoned(q.shape, q.dtype)
    placed = {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    nbk.attention(*map(to_device, (q, k, v)), out=out, **placed)
    return to_host(out)


def check(q, k, v, q_lengths, kv_lengths, **options):
    """Compare sequence by sequence, so that a short one counts as much as a long one, and return what came out."""
    got = run(q, k, v, q_lengths, kv_lengths, **options)
    q_at, kv_at = offsets(q_lengths), offsets(kv_lengths)
    for b in range(len(q_lengths)):
        rows, keys = slice(q_at[b], q_at[b + 1]), slice(kv_at[b], kv_at[b + 1])
        want = reference.attention(*(np.asarray(x, np.float64)[None] for x in (q[rows], k[keys], v[keys])), **options)
        assert relative_error(got[rows], want[0]) < BOUND[q.dtype], f"sequence {b}"
    assert (got[q_at[-1] :].view(np.uint8) == 0xFF).all(), "rows of no sequence are not written"
    return got


# one token, none on either side, both sides of the tiles of 16, 64 and 128 rows, fewer keys than queries
MIXED = ([1, 0, 5, 130, 64, 3, 128, 17], [7, 9, 0, 140, 64, 1, 300, 16])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 20}], ids=str)
def test_mixed_lengths(device, dtype, options):
    got = check(*inputs(sum(MIXED[0]) + 3, sum(MIXED[1]), 4, 2, 64, dtype), *MIXED, **options)
    assert not got[1:6].any(), "a sequence without keys gives zeros"


@pytest.mark.parametrize(
    "head_dim, dtype", [(13, F16), (80, BF16), (96, F16), (128, BF16), (192, F16), (256, BF16), (72, F32)]
)
def test_head_sizes(device, head_dim, dtype):
    check(*inputs(90, 170, 2, 1, head_dim, dtype), [70, 20], [100, 70], causal=True)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (8, 1)])
def test_grouped_heads(device, heads, kv_heads):
    check(*inputs(90, 90, heads, kv_heads, 64, F16), [20, 70], [70, 20])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_neighbours_are_never_seen(device, dtype):
    """NaN in the sequences beside one, and behind all."""
    q_lengths, kv_lengths = [70, 65, 9], [33, 90, 40]
    q, k, v = inputs(160, 200, 2, 1, 64, dtype)
    q[:70] = q[135:] = np.nan
    k[:33] = k[123:] = v[:33] = v[123:] = np.nan
    got = run(q, k, v, q_lengths, kv_lengths, causal=True)
    exact = [np.asarray(x, np.float64)[None] for x in (q[70:135], k[33:123], v[33:123])]
    assert relative_error(got[70:135], reference.attention(*exact, causal=True)[0]) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_sequence_does_not_depend_on_its_batch(device, dtype):
    q_lengths, kv_lengths = [1, 77, 0, 150, 6], [30, 77, 4, 280, 50]
    q, k, v = inputs(sum(q_lengths), sum(kv_lengths), 2, 1, 64, dtype)
    together = run(q, k, v, q_lengths, kv_lengths, causal=True)
    q_at, kv_at = offsets(q_lengths), offsets(kv_lengths)
    for b in (0, 1, 3, 4):
        rows, keys = slice(q_at[b], q_at[b + 1]), slice(kv_at[b], kv_at[b + 1])
        alone = run(q[rows], k[keys], v[keys], q_lengths[b : b + 1], kv_lengths[b : b + 1], causal=True)
        np.testing.assert_array_equal(alone, together[rows])
    # nor on whether it was packed: the same kernel takes a prompt of this length
    rows, keys = slice(q_at[3], q_at[4]), slice(kv_at[3], kv_at[4])
    plain = nbk.attention(*(to_device(np.ascontiguousarray(x[None])) for x in (q[rows], k[keys], v[keys])), causal=True)
    np.testing.assert_array_equal(to_host(plain)[0], together[rows])


def test_many_short_sequences(device):
    lengths = [1 + 37 * i % 19 for i in range(70)]
    check(*inputs(sum(lengths), sum(lengths), 2, 1, 64, BF16), lengths, lengths, causal=True)


# of queries (no two sequences with a row in common: what both write would depend on which is last) and of keys
BROKEN = [
    ([0, 60, 20, 20], [0, 90, 20, 60]),
    ([5, 20, 40, 60], [5, 20, 40, 60]),
    ([0, -7, 40, 1000], [60, 40, 20, 0]),
    ([60, 40, 20, 0], [0, -7, 40, 1000]),
]


@pytest.mark.parametrize("queries, keys", BROKEN)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_offsets_that_do_not_ascend_stay_inside_the_arrays(device, queries, keys, dtype):
    """The emulator refuses an access outside of an allocation; on the CPU they raise."""
    q, k, v = inputs(60, 60, 2, 1, 64, dtype)
    at = {"query_offsets": np.array(queries, np.int32), "kv_offsets": np.array(keys, np.int32)}
    nbk.attention(*map(to_device, (q, k, v)), causal=True, **{name: to_device(x) for name, x in at.items()})
    with pytest.raises(ValueError, match=r"_offsets: .* wanted numbers that ascend"):
        reference.attention(q, k, v, **at)


def test_nothing_to_do(device):
    q, k, v = (to_device(x) for x in inputs(5, 9, 2, 1, 64, BF16))
    none = to_device(np.zeros(1, np.int32))
    assert nbk.attention(q, k, v, query_offsets=none, kv_offsets=none).shape == (5, 2, 64)
    some = to_device(np.zeros(4, np.int32))
    assert nbk.attention(q[:0], k, v, query_offsets=some, kv_offsets=some).shape == (0, 2, 64)
    assert not check(*inputs(5, 0, 2, 1, 64, BF16), [2, 3], [0, 0]).any()


# ---- soft caps and sinks ------------------------------------------------------------------------------------------------


def padded(q_len, kv_len, dtype, heads=8, kv_heads=4, batch=2):
    q = random((batch, q_len, heads, 64), dtype, 0)
    return q, *(random((batch, kv_len, kv_heads, 64), dtype, seed) for seed in (1, 2))


def check_padded(q, k, v, **options):
    out = poisoned(q.shape, q.dtype)
    placed = {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    nbk.attention(*map(to_device, (q, k, v)), out=out, **placed)
    want = reference.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), **options)
    assert relative_error(out, want) < BOUND[q.dtype]
    return to_host(out)


# decode with one split and with several, and prompts
SIZES = [(2, 40), (1, 300), (70, 150)]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("q_len, kv_len", SIZES)
# logits of deviation 30, which the cap bends most; a cap above all logits, where tanh must be exact near 0; a negative scale
@pytest.mark.parametrize("soft_cap, scale", [(50.0, 30 / 8), (1000.0, 1 / 8), (20.0, -0.3), (30, 0.0)])
def test_soft_cap(device, dtype, q_len, kv_len, soft_cap, scale):
    check_padded(*padded(q_len, kv_len, dtype), soft_cap=soft_cap, scale=scale, causal=True)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("q_len, kv_len", SIZES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "soft_cap": 15.0}, {"window": 24}], ids=str)
def test_sinks(device, dtype, q_len, kv_len, options):
    check_padded(*padded(q_len, kv_len, dtype), sinks=SINKS, **options)


@pytest.mark.parametrize("sink", [-200.0, 60.0])
@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_a_sink_far_from_the_scores(device, q_len, kv_len, sink):
    """Above them all: weights are tiny, and rounded to 16 bits below their own maximum, not the sink's."""
    check_padded(*padded(q_len, kv_len, F16), sinks=np.full(8, sink / 8, np.float32))


@pytest.mark.parametrize("q_len", [3, 70])
def test_a_row_that_sees_only_the_sink_is_zero(device, q_len):
    lengths = np.array([0, 2], np.int32)
    got = check_padded(*padded(q_len, 40, BF16), sinks=SINKS, kv_lengths=lengths, causal=True)
    assert not got[0].any() and not got[1, : q_len - 2].any() and got[1, -1].any()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_large_logits(device, dtype, q_len, kv_len):
    check_padded(*padded(q_len, kv_len, dtype), scale=30 / 8, causal=True)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(1, 600), (70, 300)])
def test_first_tokens_dominate(device, dtype, q_len, kv_len):
    """Sums of all later keys are scaled away by the first ones', which come first or last as the kernel walks."""
    q, k, v = padded(q_len, kv_len, dtype)
    q[..., 0], k[..., 0] = 8, 0
    k[:, :4, :, 0] = 40
    check_padded(q, k, v, causal=True)


def test_packed_sequences_with_a_cap_and_sinks(device):
    check(*inputs(100, 170, 8, 4, 64, BF16), [70, 30], [100, 70], causal=True, soft_cap=20.0, sinks=SINKS, scale=1.0)
