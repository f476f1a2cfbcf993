"""Random layers over a cache with some tokens in it, and what a token becomes in them by the operations one by one."""

import numpy as np
from compare import random, to_device, to_host

import nbkernels as nbk
from nbkernels import ops, reference
from nbkernels.arrays import Int8Weight
from nbkernels.ops import DecoderLayer

F32 = np.dtype(np.float32)
EPS = 1e-5


class Model:
    """Random layers and a cache with some tokens in it."""

    def __init__(self, dtype, group_size, *, layers=2, heads=4, kv_heads=2, head_dim=64, hidden=512, feed_forward=384, bias=False,
                 page_size=64, pages=9, norm_dtype=None):  # fmt: skip
        self.sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": head_dim}
        self.dtype = dtype
        seeds = iter(range(1, 1000))
        q_width, kv_width = heads * head_dim, kv_heads * head_dim

        def matrix(rows, columns):
            placed = to_device((random((rows, columns), F32, next(seeds)) / np.sqrt(columns)).astype(dtype))
            return placed if group_size == 0 else nbk.quantize_int8(placed, group_size=group_size)

        def vector(columns, dtype=dtype):
            return to_device((1 + random((columns,), F32, next(seeds)) / 8).astype(dtype))

        def pool():
            return to_device(random((pages, page_size, kv_heads, head_dim), F32, next(seeds)).astype(dtype))

        self.layers = [
            DecoderLayer(
                vector(hidden, norm_dtype or dtype), matrix(q_width + 2 * kv_width, hidden),
                vector(q_width + 2 * kv_width) if bias else None, matrix(hidden, q_width), vector(hidden, norm_dtype or dtype),
                matrix(2 * feed_forward, hidden), matrix(hidden, feed_forward), pool(), pool(),
            )
            for _ in range(layers)
        ]  # fmt: skip
        angles = np.arange(pages * page_size)[:, None] * 10000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))
        self.cos, self.sin = to_device(np.cos(angles).astype(F32)), to_device(np.sin(angles).astype(F32))
        self.x = to_device(random((hidden,), F32, 0).astype(dtype))
        self.block_table = to_device(np.random.default_rng(0).permutation(pages).astype(np.int32)[None])

    def at(self, position):
        """(positions, lengths) of a token."""
        return to_device(np.array([position], np.int32)), to_device(np.array([position + 1], np.int32))

    def one_by_one(self, positions, lengths):
        """What one launch is to give, by the operations one by one on the device."""
        return to_host(self._walk(ops, lambda array: array, positions, lengths)).reshape(-1)

    def exact(self, positions, lengths):
        """The same by the reference in float64, without a rounding between two operations."""
        return self._walk(reference, in_float64, positions, lengths).reshape(-1)

    def _walk(self, where, place, positions, lengths):
        heads, kv_heads, head_dim, _ = self.sizes.values()
        positions, lengths, table, cos, sin = map(place, (positions, lengths, self.block_table, self.cos, self.sin))
        x = place(self.x).reshape(1, 1, -1)

        def multiply(x, weight, **options):
            product = where.int8_matmul if type(weight) is Int8Weight else where.matmul
            return product(x, weight, **options)

        for arrays in self.layers:
            layer = DecoderLayer(*(None if array is None else place(array) for array in arrays))
            qkv = multiply(where.rms_norm(x, layer.attention_norm, eps=EPS), layer.qkv, bias=layer.qkv_bias)
            q = qkv[..., : heads * head_dim].reshape(1, 1, heads, head_dim)
            k = qkv[..., heads * head_dim : (heads + kv_heads) * head_dim].reshape(1, 1, kv_heads, head_dim)
            v = qkv[..., (heads + kv_heads) * head_dim :].reshape(1, 1, kv_heads, head_dim)
            pools = layer.k_pages, layer.v_pages
            q = where.rotary_append(q, k, v, cos, sin, positions, *pools, block_table=table)
            seen = where.paged_attention(q, *pools, table, lengths)
            x = multiply(seen.reshape(1, 1, heads * head_dim), layer.output, residual=x)
            normed = where.rms_norm(x, layer.feed_forward_norm, eps=EPS)
            x = multiply(multiply(normed, layer.gate_up, activation="silu_mul"), layer.down, residual=x)
        return x

    def pools(self):
        """What the cache holds, as bits."""
        return [to_host(p).view(np.uint16) for layer in self.layers for p in (layer.k_pages, layer.v_pages)]


def in_float64(array):
    """A device array, or a weight, on the host: floats in float64."""
    if type(array) is Int8Weight:
        weight = Int8Weight(to_host(array.values), to_host(array.scales), array.group_size)
        return reference.dequantize_int8(weight, np.float64)
    array = to_host(array)
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)
