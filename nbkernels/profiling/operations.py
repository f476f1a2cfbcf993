"""The operations as data: of each its shape's axes, how to make arguments of a shape, what it must do, and its peer in torch.

The profile, the inspection, the doctor and the golden digests all read this table.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

import ml_dtypes
import numpy as np

from nbkernels import ops
from nbkernels.arrays import Int8Weight, as_device_array, is_host, library
from nbkernels.kernels import (
    activation,
    advance,
    argmax,
    attention,
    decode,
    embedding,
    int8_matmul,
    layer_norm,
    matmul,
    quantize,
    rms_norm,
    rotary,
    sampling,
    softmax,
)
from nbkernels.launch.device import DeviceError, cuda_device, current
from nbkernels.launch.memory import copy, empty, to_device

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
INT8, INT32, FLOAT32 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.float32)
PAGE_SIZE = 256
GROUP = 32
_TILE = 1 << 20  # elements of random values that are repeated in a larger array


@dataclass(frozen=True)
class Operation:
    """An entry. axes: names of a shape's extents; small: a shape for the emulator, usual: one for a GPU.

    call: the public function; make(maker, *shape) -> (args, kwargs); cost(args, kwargs) -> Cost, of arrays with shape and dtype;
    products: whether its FLOPs are products of matrices, by the tensor cores; peer(torch, args, kwargs) -> a function without
    arguments, of the same arguments as tensors (an Int8Weight as a dense one), or None.
    """

    name: str
    axes: tuple
    small: tuple
    usual: tuple
    call: object
    make: object
    cost: object
    products: bool = False
    peer: object = None


class HostMaker:
    """Makes arrays of normal values in NumPy, the same for the same seed of this object."""

    def __init__(self, dtype, seed=0):
        self.dtype = dtype
        self.random = np.random.default_rng(seed)

    def normal(self, *shape, dtype=None):
        """Standard normal values, of the operation's dtype unless said otherwise."""
        values = self.random.standard_normal(min(prod(shape), _TILE), np.float32).astype(dtype or self.dtype)
        return self.place(np.resize(values, shape))

    def place(self, array):
        """A NumPy array where the arguments are to be."""
        return array

    def zeros(self, *shape, dtype=None):
        """What is written to."""
        return self.place(np.zeros(shape, dtype or self.dtype))

    def int8(self, rows, columns, group_size):
        """An Int8Weight of normal values."""
        groups = 1 if group_size is None else -(-columns // group_size)
        values = self.random.integers(-127, 128, min(rows * columns, _TILE), dtype=np.int8)
        scales = np.full((rows, groups), 2.0**-7, np.float32)
        return Int8Weight(self.place(np.resize(values, (rows, columns))), self.place(scales), group_size)


class DeviceMaker(HostMaker):
    """The same on the current device. Large arrays are random in their first part, which is repeated."""

    def place(self, array):
        return to_device(array)

    def normal(self, *shape, dtype=None):
        dtype = np.dtype(dtype or self.dtype)
        count = prod(shape)
        if count <= _TILE:
            return super().normal(*shape, dtype=dtype)
        result = empty(shape, dtype)
        if current().kind == "emulator":
            return result  # zeros, which take no memory: only plans and the first blocks are looked at
        flat = result.reshape(-1)
        flat_source = to_device(self.random.standard_normal(_TILE, np.float32).astype(dtype))
        for start in range(0, count, _TILE):
            stop = min(count, start + _TILE)
            copy(flat[start:stop], flat_source[: stop - start])
        return result

    def int8(self, rows, columns, group_size):
        if rows * columns <= _TILE or current().kind != "emulator":
            return super().int8(rows, columns, group_size)
        groups = 1 if group_size is None else -(-columns // group_size)
        return Int8Weight(empty((rows, columns), INT8), empty((rows, groups), FLOAT32), group_size)


class SizeMaker(HostMaker):
    """Arrays of a shape and no memory, in NumPy: for what depends on sizes alone."""

    def normal(self, *shape, dtype=None):
        return np.broadcast_to(np.zeros((), dtype or self.dtype), shape)

    def zeros(self, *shape, dtype=None):
        return self.normal(*shape, dtype=dtype)

    def int8(self, rows, columns, group_size):
        groups = 1 if group_size is None else -(-columns // group_size)
        values, scales = self.normal(rows, columns, dtype=INT8), self.normal(rows, groups, dtype=FLOAT32)
        return Int8Weight(values, scales, group_size)


def described(value):
    """An array as something with shape and a NumPy dtype: NumPy's and ours as they are; what is no array stays."""
    if isinstance(value, Int8Weight) or not hasattr(value, "shape") or library(value) in ("numpy", "nbkernels"):
        return value
    if is_host(value):
        return np.asarray(value)
    return as_device_array(value)


def _rows(x):
    return prod(x.shape[:-1]), x.shape[-1]


def _parameter_bytes(*arrays):
    return sum(x.shape[0] * x.dtype.itemsize for x in arrays if x is not None)


# ---- costs, of a public function's arguments -----------------------------------------------------------------------------


def _softmax_cost(x, **_):
    return softmax.cost(*_rows(x), x.dtype)


def _norm_cost(module):
    def cost(x, weight=None, bias=None, residual=None, quantize=None, **_):
        return module.cost(
            *_rows(x),
            x.dtype,
            residual=residual is not None,
            parameter_bytes=_parameter_bytes(weight, bias),
            quantised=quantize is not None,
        )

    return cost


def _activation_cost(*arrays, **_):
    return activation.cost(len(arrays) + 1, *_rows(arrays[0]), arrays[0].dtype.itemsize)


def _matmul_cost(x, weight, bias=None, residual=None, activation=None, **_):
    rows, depth = _rows(x)
    options = {"bias": bias is not None, "residual": residual is not None, "gated": activation == "silu_mul"}
    return matmul.cost(rows, weight.shape[0], depth, x.dtype, **options)


def _int8_matmul_cost(x, weight, bias=None, residual=None, activation=None, dtype=None, activations=None, **_):
    rows, depth = _rows(x)
    sizes = rows, weight.shape[0], depth, weight.scales.shape[-1]
    options = {"bias": bias is not None, "residual": residual is not None}
    if isinstance(x, Int8Weight):
        own = next((a.dtype for a in (residual, bias) if a is not None), FLOAT32)
        return int8_matmul.cost_int8(*sizes, own if dtype is None else np.dtype(dtype), **options)
    return int8_matmul.cost(*sizes, x.dtype, **options, gated=activation == "silu_mul")


def _quantize_cost(weight, group_size=None, **_):
    rows, columns = _rows(weight)
    groups = 1 if group_size is None else -(-columns // group_size)
    return quantize.cost(rows, columns, groups, weight.dtype)


def _embedding_cost(ids, table, dtype=None, **_):
    quantised = isinstance(table, Int8Weight)
    own = FLOAT32 if quantised else table.dtype
    itemsize = (own if dtype is None else np.dtype(dtype)).itemsize
    return embedding.cost(prod(ids.shape), table.shape[1], 1 if quantised else itemsize, itemsize)


def _rotary_cost(q, k, v, cos, sin, positions, k_cache, v_cache, **_):
    batch, tokens, heads, head_dim = q.shape
    return rotary.cost(batch, tokens, heads, k.shape[2], head_dim, q.dtype.itemsize, k_cache.dtype.itemsize)


def _attention_cost(q, k, v, causal=False, query_offsets=None, **_):
    if query_offsets is not None:
        raise ValueError(
            "query_offsets: the cost of packed sequences depends on their lengths, which lie on the device"
        )
    batch, q_len, heads, head_dim = q.shape
    sizes = batch, q_len, k.shape[1], heads, k.shape[2], head_dim, q.dtype.itemsize
    if q_len <= attention.FEW_TOKENS:
        return decode.cost(*sizes)
    return attention.cost(*sizes, causal)


def _paged_cost(q, k_pages, v_pages, block_table, kv_lengths, **_):
    batch, q_len, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    kv_len = block_table.shape[1] * page_size  # as if every page were full
    return decode.cost(batch, q_len, kv_len, heads, kv_heads, head_dim, q.dtype.itemsize, k_pages.dtype.itemsize)


def _argmax_cost(x, **_):
    return argmax.cost(*_rows(x), x.dtype.itemsize)


def _sample_cost(logits, **_):
    return sampling.cost(*logits.shape, logits.dtype.itemsize)


def _advance_cost(lengths, tokens, **_):
    return advance.cost(lengths.shape[0])


# ---- arguments of a shape ------------------------------------------------------------------------------------------------


def _one(m, *shape):
    return (m.normal(*shape),), {}


def _make_rotary(m, batch, tokens, heads, kv_heads, head_dim):
    q = m.normal(batch, tokens, heads, head_dim)
    k, v = (m.normal(batch, tokens, kv_heads, head_dim) for _ in range(2))
    angles = np.outer(np.arange(tokens), 10000.0 ** -(np.arange(head_dim // 2) * 2 / head_dim))
    tables = [m.place(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    positions = m.place(np.zeros(batch, np.int32))
    return (q, k, v, *tables, positions, *(m.zeros(batch, tokens, kv_heads, head_dim) for _ in range(2))), {}


def _make_attention(m, batch, q_len, kv_len, heads, kv_heads, head_dim):
    q = m.normal(batch, q_len, heads, head_dim)
    return (q, *(m.normal(batch, kv_len, kv_heads, head_dim) for _ in range(2))), {"causal": True}


def _make_decode(m, batch, kv_len, heads, kv_heads, head_dim):
    args, _ = _make_attention(m, batch, 1, kv_len, heads, kv_heads, head_dim)
    return args, {}


def _make_paged(m, batch, kv_len, heads, kv_heads, head_dim):
    pages = -(-kv_len // PAGE_SIZE)
    q = m.normal(batch, 1, heads, head_dim)
    pools = [m.normal(batch * pages, PAGE_SIZE, kv_heads, head_dim) for _ in range(2)]
    table = m.place(np.arange(batch * pages, dtype=np.int32).reshape(batch, pages))
    return (q, *pools, table, m.place(np.full(batch, kv_len, np.int32))), {}


def _make_embedding(m, tokens, vocab, hidden):
    ids = m.place((np.arange(tokens, dtype=np.int64) * 7919 % vocab).astype(np.int32))
    return (ids, m.normal(vocab, hidden)), {}


_SAMPLE = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1}

# ---- peers ---------------------------------------------------------------------------------------------------------------


def _sdpa(torch, args, kwargs):
    q, k, v = (x.transpose(1, 2) for x in args)
    options = {"is_causal": kwargs.get("causal", False) and q.shape[2] > 1, "enable_gqa": q.shape[1] != k.shape[1]}
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def _rms_norm_peer(torch, args, kwargs):
    x, weight = args
    norm = torch.nn.functional.rms_norm
    if "residual" in kwargs:
        return lambda: (norm(x + kwargs["residual"], x.shape[-1:], weight, 1e-6), x + kwargs["residual"])
    return lambda: norm(x, x.shape[-1:], weight, 1e-6)


def _linear_peer(torch, args, kwargs):
    return lambda: torch.nn.functional.linear(*args)


_ROWS = ("rows", "columns")
_ATTENTION = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
_DECODE = ("batch", "kv_len", "heads", "kv_heads", "head_dim")

OPERATIONS = {
    entry.name: entry
    for entry in (
        Operation(
            "softmax", _ROWS, (16, 1024), (16384, 4096), ops.softmax, _one, _softmax_cost,
            peer=lambda torch, args, _: lambda: torch.softmax(args[0], -1),
        ),
        Operation(
            "layer_norm", _ROWS, (16, 1024), (16384, 4096), ops.layer_norm,
            lambda m, rows, columns: ((m.normal(rows, columns), m.normal(columns), m.normal(columns)), {}),
            _norm_cost(layer_norm),
            peer=lambda torch, args, _: lambda: torch.nn.functional.layer_norm(args[0], args[0].shape[-1:], *args[1:]),
        ),
        Operation(
            "rms_norm", _ROWS, (16, 1024), (16384, 4096), ops.rms_norm,
            lambda m, rows, columns: ((m.normal(rows, columns), m.normal(columns)), {}),
            _norm_cost(rms_norm), peer=_rms_norm_peer,
        ),
        Operation(
            "residual_rms_norm", _ROWS, (16, 1024), (16384, 4096), ops.rms_norm,
            lambda m, rows, columns: (
                (m.normal(rows, columns), m.normal(columns)), {"residual": m.normal(rows, columns)}
            ),
            _norm_cost(rms_norm), peer=_rms_norm_peer,
        ),
        Operation(
            "gelu", _ROWS, (16, 1024), (16384, 4096), ops.gelu, _one, _activation_cost,
            peer=lambda torch, args, _: lambda: torch.nn.functional.gelu(args[0], approximate="tanh"),
        ),
        Operation(
            "silu_mul", _ROWS, (16, 1024), (16384, 4096), ops.silu_mul,
            lambda m, rows, columns: ((m.normal(rows, columns), m.normal(rows, columns)), {}), _activation_cost,
            peer=lambda torch, args, _: lambda: torch.nn.functional.silu(args[0]) * args[1],
        ),
        Operation(
            "gelu_mul", _ROWS, (16, 1024), (16384, 4096), ops.gelu_mul,
            lambda m, rows, columns: ((m.normal(rows, columns), m.normal(rows, columns)), {}), _activation_cost,
            peer=lambda torch, args, _: lambda: torch.nn.functional.gelu(args[0], approximate="tanh") * args[1],
        ),
        Operation(
            "matmul", ("rows", "out", "in"), (64, 128, 256), (4096, 14336, 4096), ops.matmul,
            lambda m, rows, out, depth: ((m.normal(rows, depth), m.normal(out, depth)), {}),
            _matmul_cost, products=True, peer=_linear_peer,
        ),
        Operation(
            "int8_matmul", ("rows", "out", "in"), (64, 128, 256), (1, 14336, 4096), ops.int8_matmul,
            lambda m, rows, out, depth: ((m.normal(rows, depth), m.int8(out, depth, GROUP)), {}),
            _int8_matmul_cost, products=True, peer=_linear_peer,
        ),
        Operation(
            "int8_int8_matmul", ("rows", "out", "in"), (64, 128, 256), (4096, 14336, 4096), ops.int8_matmul,
            lambda m, rows, out, depth: ((m.int8(rows, depth, None), m.int8(out, depth, None)), {"dtype": m.dtype}),
            _int8_matmul_cost, products=True,
        ),
        Operation(
            "quantize_int8", _ROWS, (64, 256), (14336, 4096), ops.quantize_int8,
            lambda m, rows, columns: ((m.normal(rows, columns),), {"group_size": GROUP}), _quantize_cost,
        ),
        Operation(
            "embedding", ("tokens", "vocab", "hidden"), (8, 8, 512), (4096, 128256, 4096), ops.embedding,
            _make_embedding, _embedding_cost,
            peer=lambda torch, args, _: lambda: torch.nn.functional.embedding(*args),
        ),
        Operation(
            "rotary_append", ("batch", "tokens", "heads", "kv_heads", "head_dim"), (1, 8, 4, 2, 64),
            (1, 4096, 32, 8, 128), ops.rotary_append, _make_rotary, _rotary_cost,
        ),
        Operation(
            "attention", _ATTENTION, (1, 64, 128, 4, 2, 64), (2, 4096, 4096, 32, 32, 128), ops.attention,
            _make_attention, _attention_cost, products=True, peer=_sdpa,
        ),
        Operation(
            "decode", _DECODE, (1, 512, 4, 2, 64), (16, 8192, 32, 8, 128), ops.attention, _make_decode,
            _attention_cost, products=True, peer=_sdpa,
        ),
        Operation(
            "paged_decode", _DECODE, (1, 512, 4, 2, 64), (16, 8192, 32, 8, 128), ops.paged_attention, _make_paged,
            _paged_cost, products=True,
        ),
        Operation(
            "argmax", _ROWS, (4, 4096), (64, 128256), ops.argmax, _one, _argmax_cost,
            peer=lambda torch, args, _: lambda: torch.argmax(args[0], -1),
        ),
        Operation(
            "sample", ("rows", "vocab"), (2, 2048), (64, 128256), ops.sample,
            lambda m, rows, vocab: ((m.normal(rows, vocab),), _SAMPLE), _sample_cost,
        ),
        Operation(
            "advance", ("batch",), (64,), (64,), ops.advance,
            lambda m, batch: ((m.place(np.zeros(batch, np.int32)), 1), {}), _advance_cost,
        ),
    )
}  # fmt: skip


def operation(name):
    """The Operation of a name. ValueError with near names for one that is not known."""
    if name in OPERATIONS:
        return OPERATIONS[name]
    near = get_close_matches(str(name), OPERATIONS, n=3, cutoff=0.5)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ValueError(f"operation: {name!r}, wanted one of {', '.join(OPERATIONS)}{meant}")


def operation_of(function):
    """The first Operation whose public function this is, or None: costs are the same for all of a function's."""
    return next((entry for entry in OPERATIONS.values() if entry.call is function), None)


def has_gpu():
    """Whether a GPU answers that can run the kernels."""
    try:
        cuda_device()
    except DeviceError:
        return False
    return True


def checked_shape(entry, shape):
    """A tuple of extents from a tuple or a text such as "16384x4096"; ValueError names the axes."""
    if isinstance(shape, str):
        parts = shape.replace("×", "x").replace(",", "x").split("x")
        if not all(part.strip().isdigit() for part in parts):
            raise ValueError(f"shape: {shape!r}, wanted {'x'.join(entry.axes)} in numbers")
        shape = tuple(map(int, parts))
    if len(shape) != len(entry.axes) or any(n < 1 for n in shape):
        raise ValueError(
            f"shape: {'x'.join(map(str, shape))}, wanted {'x'.join(entry.axes)}, as {'x'.join(map(str, entry.usual))}"
        )
    return tuple(shape)


def checked_dtype(name):
    """A NumPy dtype of a name. ValueError for one that the operations do not take."""
    if name not in DTYPES:
        raise ValueError(f"dtype: {name!r}, wanted one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cost_of(entry, args, kwargs):
    """The Cost of a call of an Operation on arrays of any kind."""
    return entry.cost(*map(described, args), **{key: described(x) for key, x in kwargs.items()})
