"""Wrong arguments: every operation names the argument, what it was and what was wanted, before anything runs."""

import ml_dtypes
import numpy as np
import pytest

import nbkernels as nbk
from nbkernels.arrays import Int8Weight

X = np.ones((2, 8), np.float32)
HALF = X.astype(np.float16)
DOUBLE = X.astype(np.float64)
Q = np.ones((2, 3, 4, 8), np.float32)
K = np.ones((2, 5, 2, 8), np.float32)
CACHE = np.ones((2, 16, 2, 8), np.float32)
NEW = np.ones((2, 3, 2, 8), np.float32)
TABLE = np.ones((16, 4), np.float32)
AT = np.zeros(2, np.int32)
ROW_NUMBERS = {name: np.ones(2, np.float32) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
ROW_NUMBERS |= {"top_k": AT, "step": AT, "seed": np.zeros(2, np.uint64)}
WEIGHT = Int8Weight(np.ones((5, 8), np.int8), np.ones((5, 1), np.float32))
IDS = np.zeros((2,), np.int32)
OFFSETS = np.array([0, 2, 3], np.int32)


def sample_rows(**changed):
    return nbk.sample_rows(X, **{**ROW_NUMBERS, **changed})


def packed(**changed):
    """attention of two sequences, 3 queries and 5 keys in all."""
    return nbk.attention(
        **{"q": Q[0], "k": K[0], "v": K[0], "query_offsets": OFFSETS, "kv_offsets": OFFSETS, **changed}
    )


def rotary(**changed):
    arguments = {
        "q": Q,
        "k": NEW,
        "v": NEW,
        "cos": TABLE,
        "sin": TABLE,
        "positions": AT,
        "k_cache": CACHE,
        "v_cache": CACHE,
    }
    return lambda: nbk.rotary_append(**{**arguments, **changed})


PAGES = np.ones((6, 16, 2, 8), np.float32)
INT8_PAGES, PAGE_SCALES = PAGES.astype(np.int8), np.ones((6, 16, 2), np.float32)
PAGE_TABLE = np.zeros((2, 3), np.int32)


def paged(**changed):
    arguments = {"q": Q, "k_pages": PAGES, "v_pages": PAGES, "block_table": PAGE_TABLE, "kv_lengths": AT}
    return lambda: nbk.paged_attention(**{**arguments, **changed})


CASES = {
    "softmax list": (lambda: nbk.softmax([1.0]), TypeError, "x: list"),
    "softmax float64": (lambda: nbk.softmax(DOUBLE), TypeError, "x: float64.*float32, float16 or bfloat16"),
    "softmax int": (lambda: nbk.softmax(IDS), TypeError, "x: int32"),
    "softmax scalar": (lambda: nbk.softmax(np.float32(1)), ValueError, "x: a scalar"),
    "softmax scale": (lambda: nbk.softmax(X, scale="big"), TypeError, "scale: str"),
    "softmax scale nan": (lambda: nbk.softmax(X, scale=float("nan")), ValueError, "scale: NaN"),
    "softmax scale huge": (lambda: nbk.softmax(X, scale=10**400), ValueError, "scale: an integer that no float holds"),
    "softmax out shape": (
        lambda: nbk.softmax(X, out=np.ones((2, 7), np.float32)),
        ValueError,
        r"out: shape \(2, 7\).*\(2, 8\)",
    ),
    "softmax out dtype": (lambda: nbk.softmax(X, out=HALF.copy()), TypeError, "out: float16, wanted float32"),
    "layer_norm weight shape": (
        lambda: nbk.layer_norm(X, np.ones(7, np.float32)),
        ValueError,
        r"weight: shape \(7,\).*\(8,\)",
    ),
    "layer_norm bias dtype": (lambda: nbk.layer_norm(X, None, np.ones(8, np.float16)), TypeError, "bias: float16"),
    "layer_norm eps": (lambda: nbk.layer_norm(X, eps=-1), ValueError, "eps: -1"),
    "rms_norm residual shape": (lambda: nbk.rms_norm(X, residual=X[:1]), ValueError, "residual: shape"),
    "rms_norm residual dtype": (lambda: nbk.rms_norm(X, residual=HALF), TypeError, "residual: float16"),
    "gelu approximate": (lambda: nbk.gelu(X, approximate="fast"), ValueError, "approximate: 'fast'"),
    "silu_mul shapes": (lambda: nbk.silu_mul(X, X[:, :4]), ValueError, "up: shape"),
    "silu_mul dtypes": (lambda: nbk.silu_mul(X, HALF), TypeError, "up: float16, wanted float32 as gate"),
    "matmul inner": (
        lambda: nbk.matmul(X, np.ones((5, 7), np.float32)),
        ValueError,
        r"x: shape \(2, 8\), wanted 7 columns",
    ),
    "matmul axes": (
        lambda: nbk.matmul(X, np.ones(8, np.float32)),
        ValueError,
        r"weight: shape \(8,\), wanted \[out, in\]",
    ),
    "matmul bias": (lambda: nbk.matmul(X, X, bias=np.ones(3, np.float32)), ValueError, "bias: shape"),
    "matmul residual": (lambda: nbk.matmul(X, X, residual=X), ValueError, "residual: shape"),
    "matmul activation": (lambda: nbk.matmul(X, X, activation="relu"), ValueError, "activation: 'relu'"),
    "matmul gated, odd rows": (
        lambda: nbk.matmul(X, np.ones((5, 8), np.float32), activation="silu_mul"),
        ValueError,
        "weight: 5 rows, wanted an even number",
    ),
    "matmul gated, residual": (
        lambda: nbk.matmul(X, np.ones((4, 8), np.float32), residual=X[:, :2], activation="silu_mul"),
        ValueError,
        "residual: given, wanted None",
    ),
    "matmul gated, bias": (
        lambda: nbk.matmul(X, np.ones((4, 8), np.float32), bias=X[0, :2], activation="silu_mul"),
        ValueError,
        "bias: shape",
    ),
    "matmul gated, out": (
        lambda: nbk.matmul(X, np.ones((4, 8), np.float32), out=X[:, :4].copy(), activation="silu_mul"),
        ValueError,
        "out: shape",
    ),
    "int8_matmul gated, odd rows": (
        lambda: nbk.int8_matmul(X, WEIGHT, activation="silu_mul"),
        ValueError,
        "weight: 5 rows, wanted an even number",
    ),
    "int8_matmul gated, int8 activations": (
        lambda: nbk.int8_matmul(X, WEIGHT, activation="silu_mul", activations="int8"),
        ValueError,
        "activation: 'silu_mul'",
    ),
    "matmul dtypes": (lambda: nbk.matmul(X, HALF), TypeError, "weight: float16"),
    "int8_matmul dense": (lambda: nbk.int8_matmul(X, X), TypeError, "weight: ndarray, wanted an Int8Weight"),
    "int8_matmul inner": (lambda: nbk.int8_matmul(X[:, :7], WEIGHT), ValueError, "x: shape"),
    "int8_matmul dtype": (lambda: nbk.int8_matmul(X, WEIGHT, dtype=np.float16), TypeError, "dtype: float16, wanted"),
    "int8_matmul activations": (
        lambda: nbk.int8_matmul(X, WEIGHT, activations="int4"),
        ValueError,
        "activations: 'int4'",
    ),
    "int8 activations dtype": (
        lambda: nbk.int8_matmul(X, WEIGHT, activations="int8", dtype=np.float64),
        TypeError,
        "dtype: float64, wanted float32, float16 or bfloat16",
    ),
    "int8 activations bias": (
        lambda: nbk.int8_matmul(X, WEIGHT, activations="int8", bias=np.ones(5, np.float16)),
        TypeError,
        "bias: float16, wanted float32",
    ),
    "int8 activations of one array": (lambda: nbk.int8_matmul(IDS, WEIGHT, activations="int8"), TypeError, "x: int32"),
    "int8 activations in groups": (
        lambda: nbk.int8_matmul(Int8Weight(np.ones((2, 8), np.int8), np.ones((2, 2), np.float32), 4), WEIGHT),
        ValueError,
        "x: group_size 4, wanted one scale a row",
    ),
    "int8 activations, groups of the weight": (
        lambda: nbk.int8_matmul(
            X, Int8Weight(np.ones((5, 8), np.int8), np.ones((5, 2), np.float32), 4), activations="int8"
        ),
        ValueError,
        "weight: group_size 4, wanted a multiple of 32",
    ),
    "int8 activations, too deep": (
        lambda: nbk.int8_matmul(
            np.ones((1, 2**17), np.float32),
            Int8Weight(np.ones((1, 2**17), np.int8), np.ones((1, 1), np.float32)),
            activations="int8",
        ),
        ValueError,
        "x: 131072 columns, wanted less than 131072",
    ),
    "int8 scales": (
        lambda: Int8Weight(np.ones((5, 8), np.int8), np.ones((5, 2), np.float32)),
        ValueError,
        "scales: shape",
    ),
    "int8 values dtype": (
        lambda: nbk.int8_matmul(X, Int8Weight(np.ones((5, 8), np.uint8), WEIGHT.scales)),
        TypeError,
        "weight.values: uint8",
    ),
    "quantize group": (lambda: nbk.quantize_int8(X, group_size=0), ValueError, "group_size: 0"),
    "quantize group type": (lambda: nbk.quantize_int8(X, group_size=2.5), TypeError, "group_size: float"),
    "quantize axes": (lambda: nbk.quantize_int8(np.float32(1)), ValueError, "weight: a scalar"),
    "rms_norm quantize": (lambda: nbk.rms_norm(X, quantize="int4"), ValueError, "quantize: 'int4', wanted one of None"),
    "rms_norm int8 out": (
        lambda: nbk.rms_norm(X, quantize="int8", out=X.copy()),
        TypeError,
        "out: ndarray, wanted an Int8Weight",
    ),
    "rms_norm float out": (lambda: nbk.rms_norm(X, out=WEIGHT), TypeError, "out: .*Int8Weight"),
    "layer_norm int8 out groups": (
        lambda: nbk.layer_norm(
            X, quantize="int8", out=Int8Weight(np.ones((2, 8), np.int8), np.ones((2, 2), np.float32), 4)
        ),
        ValueError,
        "out: group_size 4",
    ),
    "layer_norm int8 out shape": (
        lambda: nbk.layer_norm(X, quantize="int8", out=WEIGHT),
        ValueError,
        r"out.values: shape \(5, 8\), wanted \(2, 8\)",
    ),
    "layer_norm int8 out dtype": (
        lambda: nbk.layer_norm(
            X, quantize="int8", out=Int8Weight(np.ones((2, 8), np.uint8), np.ones((2, 1), np.float32))
        ),
        TypeError,
        "out.values: uint8, wanted int8",
    ),
    "gelu_mul shapes": (lambda: nbk.gelu_mul(X, X[:, :4]), ValueError, "up: shape"),
    "soft_cap cap": (lambda: nbk.soft_cap(X, 0.0), ValueError, "cap: 0.0, wanted a number above 0"),
    "soft_cap dtype": (lambda: nbk.soft_cap(X.astype(np.int32), 1.0), TypeError, "x: int32"),
    "embedding scale": (lambda: nbk.embedding(IDS, X, scale="2"), TypeError, "scale: str, wanted a number"),
    "embedding positions alone": (
        lambda: nbk.embedding(IDS, X, positions=IDS),
        TypeError,
        "position_table: None, wanted an array beside positions",
    ),
    "embedding position_table dtype": (
        lambda: nbk.embedding(IDS[None], X, positions=IDS[:1], position_table=HALF),
        TypeError,
        "position_table: float16, wanted float32",
    ),
    "embedding positions shape": (
        lambda: nbk.embedding(IDS[None], X, positions=np.zeros(3, np.int32), position_table=X),
        ValueError,
        r"positions: shape \(3,\), wanted \(1,\)",
    ),
    "embedding positions range": (
        lambda: nbk.embedding(IDS[None], X, positions=np.full(1, 7, np.int32), position_table=X),
        ValueError,
        "positions: 7 to",
    ),
    "embedding ids dtype": (lambda: nbk.embedding(IDS.astype(np.int64), X), TypeError, "ids: int64, wanted int32"),
    "embedding ids range": (lambda: nbk.embedding(IDS + 2, X), ValueError, "ids: 2 to 2 for a vocabulary of 2"),
    "embedding dtype": (lambda: nbk.embedding(IDS, X, dtype=np.float16), TypeError, "dtype: float16"),
    "rotary heads": (rotary(k=NEW[:, :, :1]), ValueError, "v: shape|k_cache: shape"),
    "rotary table": (rotary(sin=TABLE[:3]), ValueError, "sin: shape"),
    "rotary wide table": (
        rotary(cos=np.ones((16, 5), np.float32), sin=np.ones((16, 5), np.float32)),
        ValueError,
        "cos: shape",
    ),
    "rotary positions": (rotary(positions=AT[:1]), ValueError, "positions: shape"),
    "rotary positions dtype": (rotary(positions=AT.astype(np.int64)), TypeError, "positions: int64"),
    "rotary page size": (
        rotary(k_cache=CACHE[:, :10], v_cache=CACHE[:, :10], block_table=PAGE_TABLE),
        ValueError,
        "k_cache: page_size 10, wanted one of 16, 32, 64, 128, 256",
    ),
    "rotary table dtype": (rotary(block_table=PAGE_TABLE.astype(np.int64)), TypeError, "block_table: int64"),
    "rotary table rows": (rotary(block_table=PAGE_TABLE[:1]), ValueError, "block_table: shape"),
    "rotary no scales": (
        rotary(k_cache=CACHE.astype(np.int8), v_cache=CACHE.astype(np.int8)),
        TypeError,
        "k_scales: None, wanted an array beside int8",
    ),
    "rotary scales of floats": (rotary(v_scales=PAGE_SCALES), TypeError, "v_scales: an array, wanted None beside"),
    "rotary scales shape": (
        rotary(
            k_cache=INT8_PAGES,
            v_cache=INT8_PAGES,
            block_table=PAGE_TABLE,
            k_scales=PAGE_SCALES,
            v_scales=PAGE_SCALES[:1],
        ),
        ValueError,
        "v_scales: shape",
    ),
    "rotary norm shape": (rotary(q_norm=X[0, :7]), ValueError, "q_norm: shape"),
    "rotary norm dtype": (rotary(k_norm=HALF[0]), TypeError, "k_norm: float16, wanted float32"),
    "rotary page": (
        rotary(k_cache=PAGES, v_cache=PAGES, block_table=PAGE_TABLE + 6),
        ValueError,
        "block_table: pages 6 to 6",
    ),
    "paged q": (paged(q=Q[0]), ValueError, r"q: shape \(3, 4, 8\), wanted \[batch"),
    "paged heads": (paged(q=Q[:, :, :3]), ValueError, "q: 3 heads, wanted a multiple of the 2 kv_heads of k_pages"),
    "paged dtypes": (paged(v_pages=INT8_PAGES), TypeError, "v_pages: int8, wanted float32"),
    "paged page dtype": (
        paged(k_pages=PAGES.astype(np.float16)),
        TypeError,
        "k_pages: float16, wanted float32 as q, or int8",
    ),
    "paged page size": (paged(k_pages=PAGES[:, :8], v_pages=PAGES[:, :8]), ValueError, "k_pages: page_size 8"),
    "paged head size": (paged(k_pages=PAGES[..., :4]), ValueError, "k_pages: shape"),
    "paged table": (paged(block_table=AT), ValueError, "block_table: shape"),
    "paged lengths": (paged(kv_lengths=AT[:1]), ValueError, "kv_lengths: shape"),
    "paged lengths dtype": (paged(kv_lengths=AT.astype(np.int64)), TypeError, "kv_lengths: int64"),
    "paged window": (paged(window=0), ValueError, "window: 0"),
    "paged prefix": (paged(prefix=49), ValueError, "prefix: 49, wanted 0 to the 48 tokens"),
    "paged prefix type": (paged(prefix=1.0), TypeError, "prefix: float"),
    "paged prefix apart": (
        paged(prefix=17, block_table=np.array([[0, 1, 2], [0, 2, 3]], np.int32)),
        ValueError,
        "prefix: 17 tokens, whose pages are not the same",
    ),
    "paged soft cap": (paged(soft_cap=0), ValueError, "soft_cap: 0"),
    "paged sinks": (paged(sinks=X[0, :3]), ValueError, "sinks: shape"),
    "paged scales": (paged(k_pages=INT8_PAGES, v_pages=INT8_PAGES), TypeError, "k_scales: None"),
    "paged page": (paged(block_table=PAGE_TABLE - 1, kv_lengths=AT + 1), ValueError, "block_table: pages -1 to -1"),
    "rotary past the end": (rotary(positions=AT + 15), ValueError, "positions: 15 to 17 do not fit"),
    "rotary cache dtype": (rotary(v_cache=CACHE.astype(np.float16)), TypeError, "v_cache: float16"),
    "attention axes": (lambda: nbk.attention(X, K, K), ValueError, "q: shape"),
    "attention head_dim": (lambda: nbk.attention(Q, K[..., :4], K[..., :4]), ValueError, "k: shape"),
    "attention heads": (lambda: nbk.attention(Q[:, :, :3], K, K), ValueError, "3 heads, wanted a multiple of the 2"),
    "attention v": (lambda: nbk.attention(Q, K, K[:, :4]), ValueError, "v: shape"),
    "attention window": (lambda: nbk.attention(Q, K, K, window=0), ValueError, "window: 0"),
    "attention window type": (lambda: nbk.attention(Q, K, K, window=1.5), TypeError, "window: float"),
    "attention lengths": (lambda: nbk.attention(Q, K, K, kv_lengths=AT[:1]), ValueError, "kv_lengths: shape"),
    "attention lengths dtype": (
        lambda: nbk.attention(Q, K, K, kv_lengths=AT.astype(np.int64)),
        TypeError,
        "kv_lengths: int64",
    ),
    "attention soft_cap": (lambda: nbk.attention(Q, K, K, soft_cap=0.0), ValueError, "soft_cap: 0.0"),
    "attention large soft_cap": (
        lambda: nbk.attention(Q, K, K, soft_cap=1001),
        ValueError,
        "soft_cap: 1001, wanted at most",
    ),
    "attention soft_cap type": (lambda: nbk.attention(Q, K, K, soft_cap=True), TypeError, "soft_cap: bool"),
    "attention sinks": (lambda: nbk.attention(Q, K, K, sinks=np.zeros(3, np.float32)), ValueError, "sinks: shape"),
    "attention sinks dtype": (lambda: nbk.attention(Q, K, K, sinks=np.zeros(4)), TypeError, "sinks: float64"),
    "attention one kind of offsets": (lambda: packed(kv_offsets=None), TypeError, "kv_offsets: None"),
    "attention offsets dtype": (lambda: packed(query_offsets=np.zeros(3)), TypeError, "query_offsets: float64"),
    "attention offsets axes": (lambda: packed(query_offsets=OFFSETS[None]), ValueError, "query_offsets: shape"),
    "attention no offset": (lambda: packed(query_offsets=OFFSETS[:0]), ValueError, "query_offsets: shape"),
    "attention offsets of two batches": (lambda: packed(kv_offsets=OFFSETS[:2]), ValueError, "kv_offsets: shape"),
    "attention packed q": (lambda: packed(q=Q), ValueError, "q: shape"),
    "attention packed lengths": (lambda: packed(kv_lengths=AT), TypeError, "kv_lengths: an array, wanted None"),
    "attention offsets that fall": (
        lambda: packed(query_offsets=OFFSETS[::-1].copy()),
        ValueError,
        r"query_offsets: \[3, 2, 0\]",
    ),
    "attention wide head": (
        lambda: nbk.attention(*[np.ones((1, 1, 1, 257), np.float32)] * 3),
        ValueError,
        "head_dim 257, wanted 1 to 256",
    ),
    "advance dtype": (lambda: nbk.advance(AT.astype(np.int64), 1), TypeError, "lengths: int64"),
    "argmax nothing": (lambda: nbk.argmax(X[:, :0]), ValueError, "x: shape"),
    "sample temperature": (lambda: nbk.sample(X, temperature=-1), ValueError, "temperature: -1"),
    "sample top_p": (lambda: nbk.sample(X, temperature=1, top_p=1.5), ValueError, r"top_p: 1.5, wanted \(0, 1\]"),
    "sample top_k": (lambda: nbk.sample(X, temperature=1, top_k=0), ValueError, "top_k: 0"),
    "sample seen": (lambda: nbk.sample(X, temperature=1, seen=np.ones((2, 7), np.uint8)), ValueError, "seen: shape"),
    "sample seed": (lambda: nbk.sample(X, temperature=1, seed=2**64), ValueError, "seed"),
    "sample step": (lambda: nbk.sample(X, temperature=1, step=AT), ValueError, "step: shape"),
    "sample_rows dtype": (lambda: sample_rows(top_p=AT), TypeError, "top_p: int32, wanted float32"),
    "sample_rows shape": (lambda: sample_rows(step=np.zeros(3, np.int32)), ValueError, "step: shape"),
    "sample_rows seen": (lambda: sample_rows(seen=np.zeros((4, 8), np.uint8)), TypeError, "seen, seen_row: one of"),
    "sample_rows seen shape": (
        lambda: sample_rows(seen=np.zeros((4, 7), np.uint8), seen_row=AT),
        ValueError,
        r"seen: shape \(4, 7\), wanted \(4, 8\)",
    ),
    "sample_rows host": (lambda: on_emulator(sample_rows), TypeError, "logits: a host array"),
    "matmul plan_rows": (lambda: nbk.matmul(X, X, plan_rows=0), ValueError, "plan_rows: 0, wanted at least 1"),
    "int8_matmul plan_rows": (
        lambda: nbk.int8_matmul(X, nbk.quantize_int8(X), plan_rows=1.5),
        TypeError,
        "plan_rows: float",
    ),
    "stream": (lambda: on_emulator(lambda: nbk.softmax(X, stream="fast")), TypeError, "stream: str"),
}


def on_emulator(call):
    with nbk.device("emulator"):
        return call()


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments(name):
    call, error, message = CASES[name]
    with nbk.device("emulator") if name == "stream" else nbk.device("cpu"), pytest.raises(error, match=message):
        call()


def test_views_whose_last_axis_is_strided_are_refused(device):
    from compare import to_device

    x = to_device(np.ones((6, 8), np.float32))
    for view in (x[:, ::2],):
        with pytest.raises(ValueError, match=r"x: strides.*last axis"):
            nbk.softmax(view)


def test_outputs_that_overlap_an_input_are_refused(device):
    from compare import to_device

    x = to_device(np.ones((6, 8), np.float32))
    with pytest.raises(ValueError, match="out: shares memory with x"):
        nbk.softmax(x[:4], out=x[1:5])
    with pytest.raises(ValueError, match="out: shares memory with x"):
        nbk.matmul(x, to_device(np.ones((8, 8), np.float32)), out=x)
    q = to_device(Q)
    with pytest.raises(ValueError, match="out: shares memory with q"):
        nbk.attention(q, to_device(K), to_device(K), out=q)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nothing_in_nothing_out(device, dtype):
    """Zero rows launch no empty grid, and what follows still works."""
    from compare import to_device, to_host

    empty = to_device(np.ones((0, 8), dtype))
    some = to_device(np.ones((2, 8), dtype))
    assert nbk.softmax(empty).shape == (0, 8)
    assert nbk.rms_norm(empty, residual=empty)[0].shape == (0, 8)
    assert nbk.matmul(empty, some).shape == (0, 2)
    assert nbk.argmax(empty).shape == (0,)
    assert nbk.silu_mul(empty, empty).shape == (0, 8)
    none = to_device(np.ones((2, 0, 2, 8), dtype))
    q = to_device(np.ones((2, 3, 2, 8), dtype))
    assert not to_host(nbk.attention(q, none, none)).astype(np.float32).any(), "no keys: zeros"
    assert nbk.attention(none, q, q).shape == (2, 0, 2, 8)
    np.testing.assert_allclose(to_host(nbk.softmax(some)).astype(np.float32), 0.125)
