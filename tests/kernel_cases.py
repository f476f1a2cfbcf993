"""A few small calls for every kernel in the package, each with what it should give: for tests that go over all kernels.

``CASES``: name -> Case. ``call()`` runs on the device in force and returns NumPy arrays; ``want()`` gives the same from the
reference in float64 (integers exactly). What is not written is NaN in the result, since outputs are poisoned.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from compare import BOUND, poisoned, random, relative_error, to_device, to_host
from decoder_model import EPS, Model

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight
from nbkernels.ops import decoder_layers

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
# float32 results of approximate functions, whose error is 2^-22 or so; a 16-bit result then seldom rounds the other way
APPROXIMATE = {F32: 1e-6, F16: 1e-4, BF16: 1e-3}


@dataclass(frozen=True)
class Case:
    """call() -> arrays; want() -> float64 or integer arrays; bound: of ‖call - want‖ / ‖want‖, 0 for equal.

    gpu_bound: the same between the emulator and the GPU.
    """

    call: object
    want: object
    bound: float
    gpu_bound: float

    def error(self, found):
        """The largest relative error of what ``call`` returned; 0 or inf where it must be equal."""
        errors = []
        for got, want in zip(found, self.want(), strict=True):
            if self.bound == 0 or np.issubdtype(got.dtype, np.integer):
                errors.append(0.0 if np.array_equal(got, want) else np.inf)
            else:
                errors.append(relative_error(got, want))
        return max(errors)


CASES = {}


def case(name, bound, gpu_bound, want):
    """Enter the decorated function as the call of a case."""

    def decorate(call):
        CASES[name] = Case(call, want, bound, gpu_bound)
        return call

    return decorate


def _decoder():
    """A layer whose products are as large as they must be, and a token behind a first split of keys."""
    model = Model(BF16, None, layers=1, heads=32, kv_heads=8, hidden=1024, feed_forward=2048)
    return model, *model.at(530)


# as many roundings to bfloat16 one behind the other as there are operations
@case("decoder_layers", 2 * BOUND[BF16], 1e-2, lambda: [_decoder()[0].exact(*_decoder()[1:])])
def a_token_through_a_layer():
    model, positions, lengths = _decoder()
    layers = decoder_layers(model.layers, dtype=BF16, eps=EPS, **model.sizes)
    if layers is None:  # not this architecture's
        return [model.one_by_one(positions, lengths)]
    return [to_host(layers(model.x, model.cos, model.sin, positions, lengths, model.block_table))]


def wide(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


# ---- rows ---------------------------------------------------------------------------------------------------------------


def rows(name, operation, dtype, shape, inputs=1, shift=0.0, **options):
    """An operation on ``inputs`` arrays [rows, columns] around ``shift``; weights and biases are options: their dtype."""

    def arrays():
        given = [(random(shape, F32, seed) + np.float32(shift)).astype(dtype) for seed in range(inputs)]
        vectors = {k: 1 + random((shape[1],), v, 9) for k, v in options.items() if isinstance(v, np.dtype)}
        if options.get("residual") is True:
            vectors["residual"] = random(shape, dtype, 8)
        rest = {k: v for k, v in options.items() if k not in vectors}
        return given, vectors, rest

    def call():
        given, vectors, rest = arrays()
        on_device = {k: to_device(v) for k, v in vectors.items()}
        out = poisoned(shape, dtype)
        result = getattr(nbk, operation)(*map(to_device, given), **on_device, **rest, out=out)
        return [to_host(r) for r in (result if isinstance(result, tuple) else (result,))]

    def want():
        given, vectors, rest = arrays()
        result = getattr(reference, operation)(*wide(*given), **{k: wide(v)[0] for k, v in vectors.items()}, **rest)
        return list(result) if isinstance(result, tuple) else [result]

    CASES[name] = Case(call, want, BOUND[dtype], APPROXIMATE[dtype])


rows("softmax float32", "softmax", F32, (5, 700))
# far below zero: what is taken from beyond a row's end shows
rows("softmax bfloat16, block", "softmax", BF16, (3, 5000), shift=-100.0, scale=3.0)
rows("softmax float16, short rows", "softmax", F16, (37, 7))
rows("softmax float32, tiled", "softmax", F32, (2, 16389), shift=-100.0)
# on sm_90a blocks share a row
rows("softmax float16, cluster", "softmax", F16, (2, 40000))
rows("layer_norm bfloat16, cluster, odd", "layer_norm", BF16, (2, 33001), weight=F32, bias=F32, residual=True)
rows("rms_norm float32, cluster", "rms_norm", F32, (1, 70000), weight=F32)
rows("softmax bfloat16, odd rows", "softmax", BF16, (3, 4097), shift=-100.0)
rows("layer_norm float32", "layer_norm", F32, (5, 700), weight=F32, bias=F32)
rows("layer_norm bfloat16, residual", "layer_norm", BF16, (3, 2056), weight=BF16, bias=BF16, residual=True)
rows("layer_norm float16, tiled", "layer_norm", F16, (2, 16389), weight=F16)
rows("rms_norm float16", "rms_norm", F16, (5, 700), weight=F16)
rows("rms_norm float32, residual", "rms_norm", F32, (3, 2052), weight=F32, residual=True)
rows("rms_norm bfloat16, tiled", "rms_norm", BF16, (2, 16389), residual=True)
# on sm_90a long rows are streamed, of norms those that begin anywhere: nine are more than the blocks, of which some take two
rows("softmax bfloat16, streamed", "softmax", BF16, (9, 16392), shift=-100.0)
rows("layer_norm float32, streamed", "layer_norm", F32, (9, 2049), weight=F32, bias=F32)
rows("rms_norm bfloat16, streamed, residual", "rms_norm", BF16, (9, 4097), weight=BF16, residual=True)
rows("gelu float32", "gelu", F32, (5, 701))
rows("silu_mul bfloat16", "silu_mul", BF16, (3, 96), inputs=2)
rows("gelu_mul float16", "gelu_mul", F16, (3, 71), inputs=2)
rows("soft_cap bfloat16", "soft_cap", BF16, (3, 96), shift=2.0, cap=3.0)


# ---- products -----------------------------------------------------------------------------------------------------------


def product(name, dtype, m, k, n, group_size="dense", gpu_bound=0.0, **epilogue):
    outs = n // 2 if epilogue.get("activation") == "silu_mul" else n

    def arrays():
        x, weight = random((m, k), dtype, 0), random((n, k), dtype if group_size == "dense" else F32, 1)
        rest = dict(epilogue)
        if rest.pop("bias", False):
            rest["bias"] = random((n,), dtype, 2)
        if rest.pop("residual", False):
            rest["residual"] = random((m, n), dtype, 3)
        if group_size != "dense":
            weight = reference.quantize_int8(weight, group_size=group_size)
        return x, weight, rest

    def call():
        x, weight, rest = arrays()
        rest = {key: to_device(v) if isinstance(v, np.ndarray) else v for key, v in rest.items()}
        if group_size == "dense":
            return [to_host(nbk.matmul(to_device(x), to_device(weight), out=poisoned((m, outs), dtype), **rest))]
        on_device = Int8Weight(to_device(weight.values), to_device(weight.scales), weight.group_size)
        return [to_host(nbk.int8_matmul(to_device(x), on_device, out=poisoned((m, outs), dtype), **rest))]

    def want():
        x, weight, rest = arrays()
        rest = {key: wide(v)[0] if isinstance(v, np.ndarray) else v for key, v in rest.items()}
        if group_size != "dense":
            weight = reference.dequantize_int8(weight, np.float64)
        return [reference.matmul(*wide(x, weight), **rest)]

    CASES[name] = Case(call, want, BOUND[dtype], gpu_bound)


product("matmul float32, few rows", F32, 3, 200, 50, bias=True)
product("matmul float32, many rows", F32, 40, 200, 70, residual=True)
product("matmul bfloat16, few rows", BF16, 3, 264, 72, residual=True, gpu_bound=APPROXIMATE[BF16])
product("matmul float16, many rows", F16, 70, 328, 80, bias=True, gpu_bound=APPROXIMATE[F16])
product("matmul bfloat16, odd", BF16, 70, 75, 33, gpu_bound=APPROXIMATE[BF16])
product("int8_matmul float32, few rows", F32, 3, 200, 50, 32, activation="silu", gpu_bound=APPROXIMATE[F32])
product("int8_matmul float32, many rows", F32, 40, 200, 70, None)
product("int8_matmul bfloat16, few rows", BF16, 2, 256, 80, 32, gpu_bound=APPROXIMATE[BF16])
product("int8_matmul bfloat16, few rows, a scale a row", BF16, 9, 256, 80, None, bias=True, gpu_bound=APPROXIMATE[BF16])
product("int8_matmul bfloat16, groups", BF16, 70, 256, 80, 32, residual=True, gpu_bound=APPROXIMATE[BF16])
# weights of 2 MB, from which sm_90a streams them: int8 ones that are deep, dense ones for more than 16 rows
product("matmul bfloat16, a large weight", BF16, 17, 512, 2048, residual=True, gpu_bound=APPROXIMATE[BF16])
product("int8_matmul bfloat16, a large weight", BF16, 2, 1024, 2052, 32, bias=True, gpu_bound=APPROXIMATE[BF16])
product("int8_matmul float16, a scale a row", F16, 70, 256, 80, None, bias=True, gpu_bound=APPROXIMATE[F16])
# on sm_90a these are matmul_wgmma's: two tiles a block, edges, a depth that is no multiple of a step
product("matmul bfloat16, a prompt", BF16, 130, 136, 264, bias=True, residual=True, gpu_bound=APPROXIMATE[BF16])
product("int8_matmul float16, a prompt, a scale a row", F16, 130, 144, 264, None, bias=True, gpu_bound=APPROXIMATE[F16])
# a GPU of many multiprocessors gives so few tiles to matmul_tiles, which does not round a weight times its scale: 2^-9 apart
product("int8_matmul bfloat16, a prompt, groups", BF16, 130, 160, 264, 32, residual=True, gpu_bound=4e-3)
# blocks share tiles: groups' scales by bulk copies; and a large weight times some rows
product("int8_matmul bfloat16, a deep prompt, groups", BF16, 130, 2016, 584, 32, bias=True, gpu_bound=4e-3)
product(
    "int8_matmul float16, some rows of a large weight", F16, 20, 4128, 584, None, bias=True, gpu_bound=APPROXIMATE[F16]
)
product("matmul float16, some rows of a large weight", F16, 20, 2064, 584, residual=True, gpu_bound=APPROXIMATE[F16])
# a gate and an up by turns, in every kernel
GATED = {"activation": "silu_mul", "bias": True}
product("matmul float32, gated, few rows", F32, 3, 200, 50, gpu_bound=APPROXIMATE[F32], **GATED)
product("matmul float32, gated, many rows", F32, 40, 200, 70, gpu_bound=APPROXIMATE[F32], **GATED)
product("matmul bfloat16, gated, few rows", BF16, 3, 264, 72, gpu_bound=APPROXIMATE[BF16], **GATED)
product("matmul bfloat16, gated, odd", BF16, 70, 75, 34, gpu_bound=APPROXIMATE[BF16], **GATED)
product("int8_matmul bfloat16, gated, a large weight", BF16, 2, 1024, 2052, 32, gpu_bound=APPROXIMATE[BF16], **GATED)
product("matmul bfloat16, gated, a prompt", BF16, 130, 136, 272, gpu_bound=APPROXIMATE[BF16], **GATED)
product("int8_matmul float16, gated, a prompt", F16, 130, 144, 272, None, gpu_bound=APPROXIMATE[F16], **GATED)


def int8_product(name, dtype, m, k, n, group_size, **epilogue):
    """int8_matmul of floats that are quantised on the way; the same quantised values are multiplied in float64."""

    def arrays():
        weight = reference.quantize_int8(random((n, k), F32, 1), group_size=group_size)
        rest = dict(epilogue)
        if rest.pop("bias", False):
            rest["bias"] = random((n,), dtype, 2)
        if rest.pop("residual", False):
            rest["residual"] = random((m, n), dtype, 3)
        return random((m, k), dtype, 0), weight, rest

    def call():
        x, weight, rest = arrays()
        rest = {key: to_device(v) if isinstance(v, np.ndarray) else v for key, v in rest.items()}
        on_device = Int8Weight(to_device(weight.values), to_device(weight.scales), weight.group_size)
        out = poisoned((m, n), dtype)
        return [to_host(nbk.int8_matmul(to_device(x), on_device, activations="int8", out=out, **rest))]

    def want():
        x, weight, rest = arrays()
        rest = {key: wide(v)[0] if isinstance(v, np.ndarray) else v for key, v in rest.items()}
        return [reference.int8_matmul(reference.quantize_int8(x), weight, dtype=np.float64, **rest)]

    CASES[name] = Case(call, want, BOUND[dtype], APPROXIMATE[dtype])


int8_product("int8_matmul float32, int8 activations, few rows, groups", F32, 3, 200, 50, 32, residual=True)
int8_product("int8_matmul bfloat16, int8 activations", BF16, 40, 144, 70, None, bias=True)
int8_product("int8_matmul bfloat16, int8 activations, a large weight", BF16, 2, 1024, 2052, None, bias=True)
# on sm_90a by wgmma: two tiles a block, edges, a depth that is no multiple of a step
int8_product("int8_matmul bfloat16, int8 activations, a prompt", BF16, 130, 144, 264, None, bias=True, residual=True)
int8_product("int8_matmul float32, int8 activations, a prompt", F32, 130, 144, 132, None, activation="silu")


def _quantised():
    return reference.quantize_int8(random((33, 200), F32, 1), group_size=32)


def _quantised_both_ways(quantize, place):
    both = [quantize(place(random((33, 200), F32, 1)), group_size=size) for size in (70, None)]
    return [to_host(part) for weight in both for part in (weight.values, weight.scales)]


@case("quantize_int8", 0, 0, lambda: _quantised_both_ways(reference.quantize_int8, lambda x: x))
def quantised():
    return _quantised_both_ways(nbk.quantize_int8, to_device)


def _quantised_rows(quantize, place):
    rows = [quantize(place(random((2, columns), dtype, 1))) for columns, dtype in ((16389, F32), (40000, BF16))]
    return [to_host(part) for weight in rows for part in (weight.values, weight.scales)]


@case("quantize_int8, long rows", 0, 0, lambda: _quantised_rows(reference.quantize_int8, lambda x: x))
def quantised_rows():
    return _quantised_rows(nbk.quantize_int8, to_device)


def normed_int8(name, operation, dtype, shape, gpu_bound=APPROXIMATE[BF16], **vectors):
    """A norm in int8, and its residual's sum: the norm is what the values stand for, half a step of the scale off."""

    def arrays():
        parameters = {k: 1 + random((shape[1],), v, 9) for k, v in vectors.items()}
        return {"x": random(shape, dtype, 0), "residual": random(shape, dtype, 8), **parameters}

    def call():
        out = Int8Weight(poisoned(shape, np.dtype(np.int8)), poisoned((shape[0], 1), F32))
        on_device = {k: to_device(v) for k, v in arrays().items()}
        normed, total = getattr(nbk, operation)(**on_device, quantize="int8", out=out)
        return [to_host(normed.scales) * to_host(normed.values), to_host(normed.scales), to_host(total)]

    def want():
        normed, total = getattr(reference, operation)(**{k: wide(v)[0] for k, v in arrays().items()})
        return [normed, np.abs(normed).max(-1, keepdims=True) / 127, total]

    # rounding to whole steps is off by step / sqrt(12) on average, where elements are sigma on average: largest / sigma /
    # (127 · sqrt(12)). Products of two normal numbers have largest values of up to nine sigma in such rows: 2.0%
    CASES[name] = Case(call, want, 2.5e-2, gpu_bound)


normed_int8("rms_norm bfloat16, int8", "rms_norm", BF16, (5, 4096), weight=BF16)
normed_int8("layer_norm float32, int8", "layer_norm", F32, (3, 701), weight=F32, bias=F32)
normed_int8("layer_norm float16, int8, long rows", "layer_norm", F16, (2, 16389), weight=F16)
normed_int8("rms_norm float32, int8, long rows", "rms_norm", F32, (1, 40004), weight=F32)


# ---- attention ----------------------------------------------------------------------------------------------------------


def attended(
    name, dtype, q_len, kv_len, head_dim=64, heads=4, kv_heads=2, batch=1, lengths=None, sinks=None, **options
):
    def arrays():
        q = random((batch, q_len, heads, head_dim), dtype, 0)
        return q, *(random((batch, kv_len, kv_heads, head_dim), dtype, seed) for seed in (1, 2))

    def extra(place):
        arrays = {"kv_lengths": (lengths, np.int32), "sinks": (sinks, np.float32)}
        return options | {key: place(np.array(x, dtype)) for key, (x, dtype) in arrays.items() if x is not None}

    def call():
        out = poisoned((batch, q_len, heads, head_dim), dtype)
        return [to_host(nbk.attention(*map(to_device, arrays()), out=out, **extra(to_device)))]

    def want():
        return [reference.attention(*wide(*arrays()), **extra(lambda x: x))]

    CASES[name] = Case(call, want, BOUND[dtype], APPROXIMATE[dtype])


attended("attention float32", F32, 20, 90, causal=True)
attended("attention float32, every key", F32, 20, 90)
# a scale of 1: weights grow by more than 2^8 on the way, so that sums must be scaled
attended("attention bfloat16", BF16, 70, 300, causal=True, scale=1.0)
attended("attention float16, lengths and window", F16, 33, 150, batch=2, lengths=[150, 40], causal=True, window=24)
attended("attention bfloat16, head size 128", BF16, 130, 140, head_dim=128, heads=2, kv_heads=1)
# on sm_90a by wgmma, as are the prompts of 64 tokens and more above
attended("attention bfloat16, a part of two tiles", BF16, 150, 290, heads=2, kv_heads=1, causal=True)
attended("attention bfloat16, several items a block", BF16, 140, 420, batch=3, heads=2, kv_heads=1, causal=True)
attended("attention float16, lengths", F16, 70, 200, heads=2, batch=2, lengths=[40, 190], causal=True)
attended("attention bfloat16, head size 256, window", BF16, 90, 210, head_dim=256, heads=1, kv_heads=1, window=70)
attended("decode float32", F32, 2, 600, causal=True)
attended("decode bfloat16", BF16, 1, 600, causal=True)
# a window that begins within a tile of keys
attended("decode float16, window", F16, 1, 600, causal=True, window=277)
attended("decode float16, one split", F16, 3, 200, batch=2, lengths=[200, 5], causal=True)
attended("decode bfloat16, head size 128, lengths", BF16, 1, 700, head_dim=128, batch=2, lengths=[700, 260])
attended(
    "attention float32, soft cap and sinks", F32, 20, 90, causal=True, soft_cap=20.0, sinks=[1, -1, 3, 0], scale=1.0
)
attended(
    "attention bfloat16, soft cap and sinks", BF16, 70, 300, causal=True, soft_cap=20.0, sinks=[1, -1, 3, 0], scale=1.0
)
attended("decode bfloat16, soft cap and sinks", BF16, 1, 600, soft_cap=20.0, sinks=[1, -1, 3, 0], scale=1.0)
attended("decode float32, one split, soft cap and sinks", F32, 2, 90, soft_cap=20.0, sinks=[1, -1, 3, 0], scale=1.0)


def attended_packed(name, dtype, q_lengths, kv_lengths, head_dim=64, heads=4, kv_heads=2, **options):
    def arrays():
        q = random((sum(q_lengths), heads, head_dim), dtype, 0)
        return q, *(random((sum(kv_lengths), kv_heads, head_dim), dtype, seed) for seed in (1, 2))

    def extra(place):
        given = {"query_offsets": q_lengths, "kv_offsets": kv_lengths}
        return options | {key: place(np.cumsum([0, *lengths], dtype=np.int32)) for key, lengths in given.items()}

    def call():
        out = poisoned((sum(q_lengths), heads, head_dim), dtype)
        return [to_host(nbk.attention(*map(to_device, arrays()), out=out, **extra(to_device)))]

    def want():
        return [reference.attention(*wide(*arrays()), **extra(lambda x: x))]

    CASES[name] = Case(call, want, BOUND[dtype], APPROXIMATE[dtype])


attended_packed("attention float32, packed", F32, [1, 40, 0, 33], [20, 40, 9, 70], causal=True)
attended_packed("attention bfloat16, packed", BF16, [1, 140, 0, 64, 7], [300, 140, 9, 130, 3], causal=True)


def paged(name, dtype, q_len, lengths, head_dim=64, heads=4, kv_heads=2, page_size=16, int8=False, **options):
    """Attention over pages in an order of their own; rows beyond the lengths are NaN, or -128 with a scale of NaN."""
    batch, max_pages = len(lengths), -(-max(lengths) // page_size)
    table = np.random.default_rng(0).permutation(batch * max_pages + 2)[: batch * max_pages]
    table = table.reshape(batch, max_pages).astype(np.int32)
    inside = np.arange(max_pages * page_size) < np.array(lengths)[:, None]  # [batch, capacity]

    def in_pages(rows):
        pages = np.zeros((table.size + 2, page_size, *rows.shape[2:]), rows.dtype)
        pages[table] = rows.reshape(*table.shape, page_size, *rows.shape[2:])
        return pages

    def arrays():
        q = random((batch, q_len, heads, head_dim), dtype, 0)
        exact, pools, scales = [], [], []
        for seed in (1, 2):
            rows = random((batch, max_pages * page_size, kv_heads, head_dim), dtype, seed)
            hidden = np.array(np.nan, dtype)
            if int8:
                scale = np.abs(rows.astype(np.float32)).max(axis=-1) / np.float32(127)
                rows, hidden = np.rint(rows.astype(np.float32) / scale[..., None]).astype(np.int8), np.int8(-128)
                scales.append(in_pages(np.where(inside[..., None], scale, np.float32(np.nan))))
            exact.append(rows.astype(np.float64) * (scale[..., None] if int8 else 1))
            pools.append(in_pages(np.where(inside[..., None, None], rows, hidden)))
        return q, exact, pools, dict(zip(("k_scales", "v_scales"), scales, strict=False))

    def call():
        q, _, pools, scales = arrays()
        placed = map(to_device, (q, *pools, table, np.array(lengths, np.int32)))
        scales = {key: to_device(x) for key, x in scales.items()}
        return [to_host(nbk.paged_attention(*placed, out=poisoned(q.shape, dtype), **scales, **options))]

    def want():
        q, exact, _, _ = arrays()
        lengths_of = np.array(lengths, np.int32)
        return [reference.attention(q.astype(np.float64), *exact, kv_lengths=lengths_of, causal=True, **options)]

    CASES[name] = Case(call, want, BOUND[dtype], APPROXIMATE[dtype])


paged("paged decode float32", F32, 2, [600, 33])
paged("paged decode float32, int8", F32, 1, [40, 540], int8=True)
paged("paged decode bfloat16, window", BF16, 1, [600, 33], window=277)
paged("paged decode float16, head size 128", F16, 3, [540, 5], head_dim=128, page_size=64)
paged("paged decode bfloat16, int8", BF16, 2, [600, 70], int8=True)
paged("paged decode float16, int8, head size 128", F16, 1, [540, 16], head_dim=128, page_size=32, int8=True, window=200)
paged("paged prompt bfloat16", BF16, 20, [150, 33])
paged("paged prompt float16, int8", F16, 20, [150, 33], int8=True)


_POSITIONS = 9


def _rotary_arrays(positions=_POSITIONS):
    """The second sequence's last token lies behind the tables and the caches."""
    fused = random((2, 3, 8, 64), F32, 5)
    angles = np.outer(np.arange(positions), np.linspace(1, 0.1, 32))
    caches = [random((2, 10, 2, 64), F32, seed)[:, :positions] for seed in (6, 7)]
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return (fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]), (*tables, np.array([0, 7], np.int32)), caches


def _rotary_wanted():
    parts, tables, caches = _rotary_arrays(_POSITIONS + 1)
    caches = wide(*caches)
    q = reference.rotary_append(*wide(*parts), *tables, *caches)
    q[1, 2] = 0  # the reference refuses such a token: it has one position more here
    return [q, *(c[:, :_POSITIONS] for c in caches)]


@case("rotary_append", BOUND[F32], 0, _rotary_wanted)
def rotated():
    parts, tables, caches = _rotary_arrays()
    on_device = [to_device(np.ascontiguousarray(c)) for c in caches]
    out = poisoned((2, 3, 4, 64), F32)
    nbk.rotary_append(
        *(to_device(np.ascontiguousarray(p)) for p in parts), *map(to_device, tables), *on_device, out=out
    )
    return [to_host(out), *map(to_host, on_device)]


def _heads_arrays():
    """The second sequence's second page is none of the pool's."""
    fused = random((2, 3, 8, 64), BF16, 5)
    angles = np.outer(np.arange(32), np.linspace(1, 0.1, 32))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), np.array([14, 15], np.int32)
    norms = {"q_norm": 1 + random((64,), F32, 8), "k_norm": 1 + random((64,), F32, 9)}
    return (fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]), tables, norms


def _heads(place, operation, table, out=None, wider=lambda x: x):
    """q, and k and v as they are read: values times scales."""
    parts, tables, norms = _heads_arrays()
    caches = [place(np.zeros((4, 16, 2, 64), np.int8)) for _ in range(2)]
    scales = {name: place(np.zeros((4, 16, 2), np.float32)) for name in ("k_scales", "v_scales")}
    norms = {name: place(wider(x)) for name, x in norms.items()}
    parts = (place(np.ascontiguousarray(wider(x))) for x in parts)
    q = operation(*parts, *map(place, tables), *caches, block_table=place(table), **scales, **norms, **(out or {}))
    caches, scales = ([to_host(x).astype(np.float64) for x in found] for found in (caches, scales.values()))
    return [to_host(q), *(c * s[..., None] for c, s in zip(caches, scales, strict=True))]


def _heads_wanted():
    found = _heads(
        lambda x: x, reference.rotary_append, np.array([[2, 0], [1, 3]], np.int32), wider=lambda x: wide(x)[0]
    )
    for cached in found[1:]:
        cached[3] = 0  # the page that the kernel is not given
    return found


# a quotient near a half may round the other way: one of 127 steps
@case("rotary_append, int8 pages and norms", BOUND[BF16], APPROXIMATE[BF16], _heads_wanted)
def rotated_heads():
    out = {"out": poisoned((2, 3, 4, 64), BF16)}
    return _heads(to_device, nbk.rotary_append, np.array([[2, 0], [1, -1]], np.int32), out)


# ---- tokens -------------------------------------------------------------------------------------------------------------

_IDS = np.array([3, 1, 4, 0], np.int32)


@case("embedding", 0, 0, lambda: [random((5, 70), BF16, 0)[_IDS]])
def embedded():
    table = to_device(random((5, 70), BF16, 0))
    return [to_host(nbk.embedding(to_device(_IDS), table, out=poisoned((4, 70), BF16)))]


def _positions():
    return np.array([1], np.int32), random((5, 72), F16, 1)


@case(
    "embedding, scaled, with positions",
    BOUND[F16],
    0,
    lambda: [random((5, 72), F16, 0).astype(np.float64)[_IDS] * 3 + _positions()[1].astype(np.float64)[1:]],
)
def _embedding_positions():
    positions, more = map(to_device, _positions())
    table, ids = to_device(random((5, 72), F16, 0)), to_device(_IDS[None])
    options = {"positions": positions, "position_table": more, "scale": 3.0}
    return [to_host(nbk.embedding(ids, table, **options, out=poisoned((1, 4, 72), F16)))[0]]


@case("embedding, int8", BOUND[F32], 0, lambda: [reference.dequantize_int8(_quantised(), np.float64)[_IDS]])
def embedded_int8():
    weight = _quantised()
    table = Int8Weight(to_device(weight.values), to_device(weight.scales), weight.group_size)
    return [to_host(nbk.embedding(to_device(_IDS), table, out=poisoned((4, 200), F32)))]


@case("argmax", 0, 0, lambda: [np.argmax(random((5, 4000), BF16, 0).astype(np.float32), axis=-1)])
def largest():
    return [to_host(nbk.argmax(to_device(random((5, 4000), BF16, 0)), out=poisoned((5,), np.int32)))]


@case("advance", 0, 0, lambda: [np.array([5, 9, 2], np.int32)])
def advanced():
    lengths = to_device(np.array([3, 7, 0], np.int32))
    nbk.advance(lengths, 2)
    return [to_host(lengths)]


def sampled(name, **options):
    def draw(place, choose):
        logits, step = 3 * random((12, 900), F32, 0), np.array([7], np.int32)
        seen = (random((12, 900), F32, 1) > 1).astype(np.uint8) if "repetition_penalty" in options else None
        marked = place(seen) if seen is not None else None
        chosen = choose(place(logits), step=place(step), **({"seen": marked} if seen is not None else {}), **options)
        return [to_host(chosen)] if seen is None else [to_host(chosen), to_host(marked)]

    CASES[name] = Case(lambda: draw(to_device, nbk.sample), lambda: draw(lambda x: x, reference.sample), 0, 0)


sampled("sample", temperature=3.0, top_k=3, top_p=0.9, seed=3)
sampled("sample, min_p and a penalty", temperature=1.3, min_p=0.02, repetition_penalty=1.7, seed=4)
sampled("sample, greedy with a penalty", temperature=0.0, repetition_penalty=3.0)


def row_numbers(rows):
    """Numbers for ``sample_rows``, of all kinds by turns."""
    turn = np.arange(rows)
    return {
        "temperature": np.array([0.0, 1.3, 0.7, 3.0], F32)[turn % 4],
        "top_k": np.array([0, 5, 10**6], np.int32)[turn % 3],
        "top_p": np.array([1.0, 0.8, 1.0, 0.6, 0.9], F32)[turn % 5],
        "min_p": np.array([0.0, 0.05], F32)[turn // 2 % 2],
        "repetition_penalty": np.array([1.0, 1.0, 1.7], F32)[turn // 3 % 3],
        "seed": np.uint64(2**40 + 7) * turn.astype(np.uint64),
        "step": (turn * 3).astype(np.int32),
        "seen_row": ((turn + 2) % rows).astype(np.int32),
    }


def sampled_rows(place, choose):
    logits, numbers = 3 * random((20, 900), F32, 0), row_numbers(20)
    marked = place((random((20, 900), F32, 1) > 1).astype(np.uint8))
    chosen = choose(place(logits), seen=marked, **{name: place(x) for name, x in numbers.items()})
    return [to_host(chosen), to_host(marked)]


CASES["sample_rows"] = Case(
    lambda: sampled_rows(to_device, nbk.sample_rows), lambda: sampled_rows(lambda x: x, reference.sample_rows), 0, 0
)
