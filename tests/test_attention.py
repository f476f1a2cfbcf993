"""Attention against the float64 reference: prompts (``kernels/attention.py`` and, on sm_90a, ``kernels/attention_wgmma.py``)
and few tokens (``kernels/decode.py``)."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.kernels import attention, attention_wgmma, decode
from nbkernels.launch import emulated
from nbkernels.launch.device import Device, DeviceError, cuda_device

pytestmark = pytest.mark.emulate_one_in(2)

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def inputs(batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, seed=0):
    q = random((batch, q_len, heads, head_dim), dtype, seed)
    k, v = (random((batch, kv_len, kv_heads, head_dim), dtype, seed + i) for i in (1, 2))
    return q, k, v


def check(q, k, v, lengths=None, **options):
    """Run on the device into a poisoned output, compare, and return what came out."""
    out = poisoned(q.shape, q.dtype)
    nbk.attention(*map(to_device, (q, k, v)), kv_lengths=to_device(lengths), out=out, **options)
    got = to_host(out)
    if lengths is not None:  # the reference must not see what stands beyond a length either
        k, v = (np.where(np.arange(x.shape[1])[:, None, None] < lengths[:, None, None, None], x, 0) for x in (k, v))
    want = reference.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), kv_lengths=lengths, **options)
    assert relative_error(got, want) < BOUND[q.dtype]
    return got


# q_len, kv_len: both sides of FEW_TOKENS, of a tile of queries, of a tile of keys and of a split
FEW = [(1, 9), (2, 5), (5, 2), (1, decode.SPLIT), (3, decode.SPLIT + 1), (8, 2 * decode.SPLIT + 40)]
MANY = [(9, 9), (17, 17), (64, 64), (65, 130), (70, 33)]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("q_len, kv_len", FEW + MANY)
def test_lengths(device, dtype, q_len, kv_len):
    check(*inputs(2, q_len, kv_len, 6, 2, 64, dtype), causal=True)


@pytest.mark.parametrize("q_len, kv_len", [(1, 300), (20, 40)])
@pytest.mark.parametrize(
    "head_dim, dtype",
    [
        *((13, F16), (16, F16), (72, BF16), (80, BF16), (96, F16), (128, BF16), (192, F16), (256, BF16)),
        *((16, F32), (72, F32), (80, F32), (128, F32), (250, F32), (256, F32)),
    ],
)
def test_head_sizes(device, q_len, kv_len, head_dim, dtype):
    check(*inputs(1, q_len, kv_len, 2, 1, head_dim, dtype), causal=True)


@pytest.mark.parametrize("q_len", [2, 40])
@pytest.mark.parametrize("causal, window", [(False, None), (False, 3), (True, 30)])
def test_masks(device, q_len, causal, window):
    check(*inputs(2, q_len, 300, 2, 2, 64, BF16), causal=causal, window=window)


def test_a_window_counts_the_current_token(device):
    q, k, _ = inputs(1, 8, 8, 1, 1, 64, F32)
    v = np.zeros((1, 8, 1, 64), F32)
    v[0, np.arange(8), 0, np.arange(8)] = 1  # the output's columns are the weights
    got = check(q, k, v, window=3)
    for i in range(8):
        assert np.flatnonzero(got[0, i, 0]).tolist() == list(range(max(0, i - 2), i + 1))


@pytest.mark.parametrize("q_len", [1, 12])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (8, 2), (8, 1)])
def test_grouped_heads(device, q_len, heads, kv_heads):
    check(*inputs(2, q_len, 40, heads, kv_heads, 64, F16), causal=True)


@pytest.mark.parametrize("q_len", [1, 5, 12])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_keys_beyond_a_length_are_never_seen(device, q_len, dtype):
    lengths = np.array([0, 1, 33, 300], np.int32)
    q, k, v = inputs(4, q_len, 300, 2, 2, 64, dtype)
    for b, n in enumerate(lengths):
        k[b, n:] = np.nan
        v[b, n:] = np.nan
    got = check(q, k, v, lengths, causal=True)
    assert not got[0].any(), "a sequence without keys gives zeros"


@pytest.mark.parametrize("q_len", [1, 12])
def test_a_sequence_does_not_depend_on_its_batch_or_capacity(device, q_len):
    q, k, v = inputs(3, q_len, 600, 4, 2, 64, BF16)
    lengths = np.array([17, 300, 256], np.int32)
    together = check(q, k, v, lengths, causal=True)
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        alone = check(q[one], k[one, : n + 3], v[one, : n + 3], lengths[one], causal=True)
        np.testing.assert_array_equal(alone[0], together[b])


# blocks enough for more rows a thread where all sequences run together, too few alone
@pytest.mark.parametrize("dtype, batch, heads", [(F32, 3, 1), (BF16, 3, 2)])
def test_bits_do_not_depend_on_how_many_rows_a_thread_takes(device, dtype, batch, heads):
    alone, together = (prompt_plan(b, 130, heads, 64, dtype, device)[0].constants for b in (1, batch))
    while alone == together and batch < 4096:  # a large GPU takes more rows a thread only for a larger batch
        batch *= 2
        together = prompt_plan(batch, 130, heads, 64, dtype, device)[0].constants
    assert alone != together
    q, k, v = inputs(batch, 130, 200, heads, heads, 64, dtype)
    lengths = (150 + np.arange(batch) % 50).astype(np.int32)
    together = check(q, k, v, lengths, window=90)
    alone = check(q[1:2], k[1:2], v[1:2], lengths[1:2], window=90)
    np.testing.assert_array_equal(alone[0], together[1])


@pytest.mark.parametrize("head_dim, dtype", [(64, F16), (80, BF16), (128, BF16)])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_two_strips_a_warp(head_dim, dtype, options):
    with nbk.device("emulator", arch="sm_90") as device:  # without the a: no wgmma
        chosen, _ = prompt_plan(1, 130, 4, head_dim, dtype, device)
        assert chosen.constants[2] == 2
        check(*inputs(1, 130, 140, 4, 2, head_dim, dtype), **options)


# ---- wgmma --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request):
    """A device whose prompts wgmma takes; on the emulator the launches are looked at as well."""
    if request.param == "cuda":
        try:
            found = cuda_device()
        except DeviceError as error:
            pytest.skip(str(error))
        if found.arch != "sm_90a":
            pytest.skip(f"wgmma is an instruction of sm_90a, this GPU is {found.arch}")
        with nbk.device("cuda") as on:
            yield on
    else:
        with nbk.device("emulator", arch="sm_90a") as on, emulated.observed() as plans:
            yield on
        assert {plan.factory for plan in plans} == {attention_wgmma.attention_wgmma_kernel}


# one tile of queries, a part of one, more than one; keys that end within a tile, at its end, before the queries
@pytest.mark.parametrize(
    "q_len, kv_len, head_dim, dtype, options",
    [
        (140, 100, 64, BF16, {"causal": True}),
        (130, 300, 64, F16, {}),
        (200, 256, 128, BF16, {"causal": True}),
        (100, 200, 256, BF16, {"causal": True}),
        (70, 150, 80, F16, {}),
        (70, 150, 192, BF16, {"causal": True}),
        # a window that begins within a tile, is shorter than one, and hides all keys of some blocks' first tiles
        (140, 420, 64, BF16, {"window": 50}),
        (70, 90, 64, F16, {"causal": True, "scale": -0.3}),
        (70, 90, 64, F16, {"causal": True, "scale": 0.0}),
        # a scale of 2: sums must be scaled on the way
        (70, 400, 64, BF16, {"scale": 2.0}),
    ],
)
def test_wgmma(hopper, q_len, kv_len, head_dim, dtype, options):
    check(*inputs(1, q_len, kv_len, 2, 1, head_dim, dtype), **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_wgmma_with_the_tiles_of_long_prompts(hopper, head_dim):
    assert attention_wgmma.constants_for(BF16, 64, False, (), 2050) != attention_wgmma.constants_for(
        BF16, 64, False, ()
    )
    check(*inputs(1, 2050, 200, 1, 1, head_dim, BF16), causal=True)


def test_wgmma_never_sees_keys_beyond_a_length(hopper):
    """Among several work items a block, whose rings and turns go on; one sequence has no key."""
    lengths = np.array([0, 1, 130, 256, 299], np.int32)
    q, k, v = inputs(5, 70, 300, 2, 2, 64, BF16)
    for b, n in enumerate(lengths):
        k[b, n:] = np.nan
        v[b, n:] = np.nan
    together = check(q, k, v, lengths, causal=True)
    assert not together[0].any(), "a sequence without keys gives zeros"
    for b in (2, 4):
        one, n = slice(b, b + 1), lengths[b]
        alone = check(q[one], k[one, : n + 1], v[one, : n + 1], lengths[one], causal=True)
        np.testing.assert_array_equal(alone[0], together[b])


def test_wgmma_on_many_short_sequences(hopper):
    """Items of one tile: their copies, and the zeros behind their lengths, run ahead of the products."""
    lengths = np.array([90, 50, 128, 1, 70, 99, 3, 60], np.int32)
    check(*inputs(8, 64, 128, 2, 1, 64, BF16), lengths, causal=True)


def test_wgmma_keeps_a_nan_in_its_row(hopper):
    q, k, v = inputs(1, 70, 140, 1, 1, 64, BF16)
    q[0, 3, 0, 5] = np.nan
    assert np.isnan(check(q, k, v)[0, 3]).all()


def test_wgmma_writes_a_view_and_no_more(hopper):
    """q, k and v are parts of one array; behind the last row, and between the heads, nothing is written."""
    fused = to_device(random((2, 70, 5, 64), BF16, 3))
    whole = poisoned((2, 80, 4, 64), BF16)
    nbk.attention(fused[:, :, :3], fused[:, :, 3:4], fused[:, :, 4:], causal=True, out=whole[:, :70, :3])
    exact, got = to_host(fused).astype(np.float64), to_host(whole)
    want = reference.attention(exact[:, :, :3], exact[:, :, 3:4], exact[:, :, 4:], causal=True)
    assert relative_error(got[:, :70, :3], want) < BOUND[BF16]
    assert (got[:, 70:].view(np.uint16) == 0xFFFF).all() and (got[:, :, 3].view(np.uint16) == 0xFFFF).all()


def test_a_wgmma_plan_fits_the_device():
    for head_dim, q_len in itertools.product(range(32, 257, 8), (1000, 5000)):
        constants = attention_wgmma.constants_for(BF16, head_dim, False, (True, False, False), q_len)
        chosen, q_tiles, section = attention_wgmma.plan(constants, 8, q_len, 4000, 64, 8, 132)
        assert chosen.shared_bytes <= 227 * 1024
        assert chosen.grid[0] <= 132 and section % 8 == 0
        few, many = attention_wgmma.REGISTERS[constants[4]]
        assert 128 * (few + constants[4] * many) <= 64 * 1024
        assert q_tiles * constants[4] * attention_wgmma.ROWS >= q_len


@pytest.mark.parametrize("q_len", [2, 20])
def test_views_of_a_fused_qkv(device, q_len):
    fused = random((2, q_len, 5, 64), BF16, 3)
    out = poisoned((2, q_len, 3, 64), BF16)
    whole = to_device(fused)
    nbk.attention(whole[:, :, :3], whole[:, :, 3:4], whole[:, :, 4:], causal=True, out=out)
    exact = fused.astype(np.float64)
    want = reference.attention(exact[:, :, :3], exact[:, :, 3:4], exact[:, :, 4:], causal=True)
    assert relative_error(out, want) < BOUND[BF16]


@pytest.mark.parametrize("q_len", [2, 20])
def test_misaligned_views(device, q_len):
    wide = random((1, q_len, 1, 65), BF16, 3)
    out = poisoned((1, q_len, 1, 64), BF16)
    view = to_device(wide)[..., 1:]
    nbk.attention(view, view, view, out=out)
    exact = wide[..., 1:].astype(np.float64)
    assert relative_error(out, reference.attention(exact, exact, exact)) < BOUND[BF16]


@pytest.mark.parametrize("q_len", [1, 16])
def test_large_scores_in_float16(device, q_len):
    q, k, v = inputs(1, q_len, 20, 1, 1, 128, F16)
    q[...] = 60
    k[...] = 60  # scores of 460800 before the scale: beyond float16
    check(q, k, v)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("q_len", [1, 16])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(device, dtype, q_len, scale):
    check(*inputs(1, q_len, 20, 1, 1, 64, dtype), scale=scale, causal=True)


@pytest.mark.parametrize("growth", [0.05, 0.5, -0.5])
def test_scores_that_grow_or_fall_along_the_keys(device, growth):
    """By less than the slack of the kept maximum from tile to tile, by more, and with the first keys above all."""
    q, k, v = inputs(1, 16, 200, 1, 1, 64, F16)
    q[..., 0], k[..., 0] = 8, growth * np.arange(200)[:, None]  # adds growth a key to the scaled scores
    check(q, k, v)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_nan_stays_in_its_row(device, dtype):
    q, k, v = inputs(1, 20, 40, 1, 1, 64, dtype)
    q[0, 3, 0, 5] = np.nan
    got = check(q, k, v)
    assert np.isnan(got[0, 3]).all()


def test_nothing_to_do(device):
    q, k, v = inputs(2, 20, 40, 2, 2, 64, BF16)
    for part in (slice(0, 0), slice(None)):  # an empty grid must not spoil what follows
        assert nbk.attention(*(to_device(x[part]) for x in (q, k, v))).shape == q[part].shape
    assert not check(q, k[:, :0], v[:, :0]).any(), "no keys give zeros"


@pytest.mark.gpu
@pytest.mark.parametrize("batch, heads", [(65537, 1), (1, 65537)])
@pytest.mark.parametrize("q_len", [1, 9])
def test_more_blocks_than_a_grid_axis_holds(device, batch, heads, q_len):
    check(*inputs(batch, q_len, 9, heads, heads, 16, F16), causal=True)


def test_costs_count_what_must_move():
    assert decode.cost(1, 1, 1000, 8, 2, 64, 2).bytes == 2 * (2 * 1000 * 2 * 64 + 2 * 8 * 64)
    full = attention.cost(1, 128, 128, 8, 2, 64, 2, causal=False)
    assert full.flops == 4 * 8 * 128 * 128 * 64 == 2 * attention.cost(1, 128, 128, 8, 2, 64, 2, causal=True).flops


def prompt_plan(batch, q_len, heads, head_dim, dtype, device):
    options = {"wide": True, "negative": False, "masks": (True, False, False)}
    return attention.plan(
        batch, q_len, heads, head_dim, dtype, sm_count=device.sm_count, shared_limit=device.shared_bytes, **options
    )


def test_a_plan_fits_the_device_and_covers_the_rows():
    small, large = (Device("made up", "", "sm_80", 100, kib * 1024) for kib in (99, 227))
    for head_dim in range(1, 257):
        for dtype in (F32, BF16):
            for device in (small, large):
                chosen, q_tiles = prompt_plan(8, 1000, 64, head_dim, dtype, device)
                assert chosen.shared_bytes <= device.shared_bytes
                assert chosen.grid == (8 * 64 * q_tiles, 1, 1)
    # two strips a warp: only where two such blocks fit a multiprocessor, and there are two for each
    strips = [prompt_plan(1, 1000, heads, 128, BF16, d)[0].constants[2] for d in (small, large) for heads in (8, 64)]
    assert strips == [1, 1, 1, 2]
    with pytest.raises(ValueError, match="2\\^31"):
        prompt_plan(2**21, 2**17, 1, 64, BF16, large)
