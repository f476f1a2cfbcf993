"""All layers of a decoder for one token, in one launch: what the runtime uses for a lone sequence where the GPU allows it.

The operations that it stands for, layer after layer, are ``rms_norm``, a product, ``rotary_append``, ``paged_attention``, a
product with its residual, ``rms_norm``, a product with silu · up, and a product with its residual. The result has their bits.
"""

from typing import NamedTuple

import numpy as np

from nbkernels.arrays import Int8Weight
from nbkernels.launch import memory
from nbkernels.launch.device import current, parse_arch
from nbkernels.launch.tensor_map import describes
from nbkernels.ops.call import kernel_module

ARCH = (9, 0)
MOST_ROWS = 16  # of a batch: from 17 on matmul_wgmma multiplies, in an order of its own


class DecoderLayer(NamedTuple):
    """A layer's device arrays. Matrices [out, in], dense or Int8Weight, all of one kind; norms [hidden].

    qkv [(heads + 2·kv_heads)·head_dim, hidden] and its bias or None; output [hidden, heads·head_dim]; gate_up [2·feed_forward,
    hidden], whose rows are a gate's and an up's by turns; down [hidden, feed_forward]; k_pages, v_pages [pages, page_size,
    kv_heads, head_dim].
    """

    attention_norm: object
    qkv: object
    qkv_bias: object
    output: object
    feed_forward_norm: object
    gate_up: object
    down: object
    k_pages: object
    v_pages: object


class DecoderLayers:
    """Layers that one launch takes a token through. Made by ``decoder_layers``."""

    def __init__(self, prepared, eps, scale):
        self._prepared = prepared
        self._eps, self._scale = eps, scale

    def __call__(self, x, cos, sin, positions, lengths, block_table):
        """The residual stream behind the last layer. x [hidden] before the first; the cache gets the token's key and value.

        cos, sin float32 [positions, rotary_dim / 2]; positions, lengths int32 [1]: where the token stands, and how many there are
        with it; block_table int32 [1, pages]. All on the device; the result is a new array.
        """
        stream = memory.current_stream()
        out = memory.empty(x.shape, x.dtype, stream)
        run = self._prepared.run
        run(x, cos, sin, positions, lengths, block_table[0], self._eps, self._scale, out, current(), stream)
        return out


def decoder_layers(layers, *, heads, kv_heads, head_dim, rotary_dim, dtype, eps, scale=None, rows=1):
    """DecoderLayers of a list of ``DecoderLayer``, or None where the current device or their shapes do not allow it.

    It takes a GPU of compute capability 9.0 (or its emulator), float16 or bfloat16 of activations, norms and cache (norms may be
    float32), and products that whole tiles share out evenly among the multiprocessors. rows: of the largest batch whose
    operations one by one (``plan_rows`` of ``matmul``) the result is to have the bits of; beyond 16 other kernels multiply.
    """
    device = current()
    if device.kind == "cpu" or parse_arch(device.arch)[:2] != ARCH or not layers or rows > MOST_ROWS:
        return None
    dtype = np.dtype(dtype)
    first = layers[0]
    kind, group_size = _kind(first.qkv)
    matrices = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in layers]
    if any(_kind(m) != (kind, group_size) for of_layer in matrices for m in of_layer):
        return None
    parts = [[_parts(m) for m in of_layer] for of_layer in matrices]
    norms = [(layer.attention_norm, layer.feed_forward_norm) for layer in layers]
    norm_dtypes = {norm.dtype for of_layer in norms for norm in of_layer}
    pages = [pool for layer in layers for pool in (layer.k_pages, layer.v_pages)]
    biased = {layer.qkv_bias is not None for layer in layers}
    described = all(
        describes(values) and (kind != "groups" or describes(scales)) and (kind == "dense") == (values.dtype == dtype)
        for of_layer in parts
        for values, scales in of_layer
    )
    wide = all(p.pointer % 16 == 0 and all(s * p.itemsize % 16 == 0 for s in p.strides[:3]) for p in pages)
    alike = (
        len({(p.shape, p.strides, p.dtype) for p in pages[::2]})
        == len({(p.shape, p.strides) for p in pages[1::2]})
        == 1
    )
    if not (described and wide and alike and len(norm_dtypes) == len(biased) == 1 and pages[0].dtype == dtype):
        return None
    norm_dtype = norm_dtypes.pop()
    if norm_dtype not in (dtype, np.dtype(np.float32)) or any(n.pointer % 16 for of_layer in norms for n in of_layer):
        return None
    kernels = kernel_module("decoder_layers")
    hidden, feed_forward = first.down.shape
    shape = kernels.Shape(hidden, heads, kv_heads, head_dim, rotary_dim // 2, feed_forward, biased.pop())
    chosen = kernels.plan(shape, dtype, kind, group_size, norm_dtype, device.sm_count, device.shared_bytes)
    if chosen is None:
        return None
    arrays = [
        kernels.LayerArrays(norm, tuple(of_layer), layer.qkv_bias, layer.k_pages, layer.v_pages)
        for norm, of_layer, layer in zip(norms, parts, layers, strict=True)
    ]
    prepared = kernels.Layers(chosen, arrays, device)
    return DecoderLayers(prepared, eps, head_dim**-0.5 if scale is None else float(scale))


def _kind(matrix):
    """(kind, group size) of a weight, as the kernels of products have them."""
    if not isinstance(matrix, Int8Weight):
        return "dense", 0
    return ("rows", 0) if matrix.group_size is None else ("groups", matrix.group_size)


def _parts(matrix):
    """(values, scales or None)."""
    return (matrix.values, matrix.scales) if isinstance(matrix, Int8Weight) else (matrix, None)
