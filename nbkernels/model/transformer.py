"""The forward pass of a decoder-only transformer of the llama family, written once against the operations.

A layer, with x the residual stream [batch, tokens, hidden]:

    q, k, v = rms_norm(x) · Wqkv                 one product; q, k, v are views of it
    q, cache = rotary(q), cache + (rotary(k), v)        into the cache's pages
    x = attention(q, cache) · Wo + x
    gated = silu(gate) · up                      one product, rms_norm(x) · Wgate_up, whose columns are gate's and up's by turns
    x = gated · Wdown + x
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from nbkernels.arrays import Int8Weight
from nbkernels.model import backend

# On the CPU a matrix with so many times more rows than columns is kept by columns: BLAS then multiplies a vector by it in three
# quarters of the time (2 cores, OpenBLAS, 3072×576: 20 against 27 GB/s); for squarer ones rows are faster.
TALL = 4
# ``quantize`` of ``load`` -> (columns a scale of the matrices, None being a whole row; activations of ``int8_matmul``). Groups of
# 32 are those of the GGUF block formats.
QUANTIZATIONS = {"int8": (32, None), "int8-rows": (None, None), "int8-activations": (None, "int8")}

_plan_rows = ContextVar("nbkernels_plan_rows", default=None)


@contextmanager
def planned_as(rows):
    """Choose the kernels of products as for so many rows, so that a row's bits don't depend on how many there are."""
    token = _plan_rows.set(rows)
    try:
        yield
    finally:
        _plan_rows.reset(token)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. qkv [(heads + 2·kv_heads)·head_dim, hidden]; gate_up [2·feed_forward, hidden].

    gate_up is what ``interleave_gate_up`` makes; for int8 activations the gate's rows stand above the up's instead.
    """

    attention_norm: object  # [hidden]
    qkv: object
    output: object  # [hidden, heads·head_dim]
    feed_forward_norm: object  # [hidden]
    gate_up: object
    down: object  # [hidden, feed_forward]


def rotary_tables(config, positions):
    """cos and sin float32 [positions, rope_dim / 2] of the angles position · base^(-2i / rope_dim), rounded from float64."""
    frequencies = config.rope_base ** (-np.arange(0, config.rope_dim, 2) / max(config.rope_dim, 1))
    angles = np.outer(np.arange(positions), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def interleave_gate_up(gate, up):
    """Two matrices [n, depth] as one [2·n, depth] whose row 2i is the gate's row i and row 2i + 1 the up's.

    It is the weight that activation="silu_mul" of ``matmul`` and ``int8_matmul`` wants.
    """
    return np.stack([gate, up], axis=1).reshape(2 * len(gate), -1)


class Transformer:
    """Weights on a device, and the forward pass.

    dtype: of the activations. embedding [vocab, hidden] and head [vocab, hidden], dense or int8; they may be one object.
    int8_activations: the inputs of int8 matrices are quantised as well, a scale a token.
    """

    def __init__(self, config, dtype, embedding, layers, norm, head, int8_activations=False):
        self.config = config
        self.dtype = dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.int8_options = {"activations": "int8"} if int8_activations else {}
        self.ops = backend.operations()
        self.cos, self.sin = map(backend.place, rotary_tables(config, config.context))

    @property
    def nbytes(self):
        """Bytes of all weights, shared ones counted once."""
        arrays = [self.embedding, self.norm, *(w for layer in self.layers for w in vars(layer).values())]
        if self.head is not self.embedding:
            arrays.append(self.head)
        return sum(a.nbytes for a in arrays)

    def linear(self, x, weight, **options):
        """x · weightᵀ for a dense or an int8 weight; options: those of ``matmul``."""
        if _plan_rows.get() is not None:
            options["plan_rows"] = _plan_rows.get()
        if isinstance(weight, Int8Weight):
            return self.ops.int8_matmul(x, weight, **self.int8_options, **options)
        return self.ops.matmul(x, weight, **options)

    def hidden(self, ids, cache, sequences):
        """The residual stream behind the last layer. ids int32 [batch, tokens] -> [batch, tokens, hidden].

        Row b extends the cache's sequence sequences[b]. Raises as ``KVCache.reserve`` where the tokens do not fit.
        """
        config, ops = self.config, self.ops
        batch, tokens = ids.shape
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        step = cache.begin(sequences, tokens)
        x = ops.embedding(ids, self.embedding, dtype=self.dtype)  # [batch, tokens, hidden]
        for layer, (k_pages, v_pages, k_scales, v_scales) in zip(self.layers, cache.layers, strict=True):
            scales = {"k_scales": k_scales, "v_scales": v_scales}
            normed = ops.rms_norm(x, layer.attention_norm, eps=config.norm_eps)
            qkv = self.linear(normed, layer.qkv)  # [batch, tokens, (heads + 2·kv_heads)·head_dim]
            q = qkv[..., :q_width].reshape(batch, tokens, config.heads, config.head_dim)
            k = qkv[..., q_width : q_width + kv_width].reshape(batch, tokens, config.kv_heads, config.head_dim)
            v = qkv[..., q_width + kv_width :].reshape(batch, tokens, config.kv_heads, config.head_dim)
            q = ops.rotary_append(
                q, k, v, self.cos, self.sin, step.positions, k_pages, v_pages, block_table=step.block_table, **scales
            )
            seen = ops.paged_attention(
                q, k_pages, v_pages, step.block_table, step.lengths, prefix=step.prefix, **scales
            )
            x = self.linear(seen.reshape(batch, tokens, q_width), layer.output, residual=x)
            normed = ops.rms_norm(x, layer.feed_forward_norm, eps=config.norm_eps)
            if self.int8_options:
                gate_up = self.linear(normed, layer.gate_up)  # [batch, tokens, 2·feed_forward]
                gated = ops.silu_mul(gate_up[..., : config.feed_forward], gate_up[..., config.feed_forward :])
            else:
                gated = self.linear(normed, layer.gate_up, activation="silu_mul")  # [batch, tokens, feed_forward]
            x = self.linear(gated, layer.down, residual=x)
        cache.end(step)
        return x

    def logits(self, hidden, out=None):
        """Scores of the next token. hidden [..., hidden] -> [..., vocab]; out: on a device, where to write them."""
        options = {} if out is None else {"out": out}
        return self.linear(self.ops.rms_norm(hidden, self.norm, eps=self.config.norm_eps), self.head, **options)


def load_transformer(checkpoint, *, dtype, quantize, progress):
    """Read a checkpoint's weights onto the current device, a matrix at a time.

    dtype: of the activations and dense weights; quantize: None or one of QUANTIZATIONS; the norms stay in dtype.
    progress: called after each matrix with the share done, 0 to 1.
    """
    config = checkpoint.config
    steps = 4 * config.layers + 1
    done = 0
    int8_activations = quantize is not None and QUANTIZATIONS[quantize][1] == "int8"

    def place_matrix(parts):
        nonlocal done
        placed = _place_weight(parts, dtype, quantize)
        done += 1
        progress(done / steps)
        return placed

    def norm(name):
        return backend.place(checkpoint.tensor(name, (config.hidden,)).astype(dtype, copy=False))

    def gate_up_parts(prefix):
        parts = [
            checkpoint.tensor(prefix + name, (feed_forward, hidden)) for name in ("ffn_gate.weight", "ffn_up.weight")
        ]
        return parts if int8_activations else [interleave_gate_up(*parts)]

    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, feed_forward = config.hidden, config.feed_forward
    embedding = place_matrix([checkpoint.tensor("token_embd.weight", (config.vocab, hidden))])
    layers = []
    for i in range(config.layers):
        prefix = f"blk.{i}."
        layers.append(
            Layer(
                attention_norm=norm(prefix + "attn_norm.weight"),
                qkv=place_matrix(
                    [
                        checkpoint.unpermuted(prefix + "attn_q.weight", config.heads, (q_width, hidden)),
                        checkpoint.unpermuted(prefix + "attn_k.weight", config.kv_heads, (kv_width, hidden)),
                        checkpoint.tensor(prefix + "attn_v.weight", (kv_width, hidden)),
                    ]
                ),
                output=place_matrix([checkpoint.tensor(prefix + "attn_output.weight", (hidden, q_width))]),
                feed_forward_norm=norm(prefix + "ffn_norm.weight"),
                gate_up=place_matrix(gate_up_parts(prefix)),
                down=place_matrix([checkpoint.tensor(prefix + "ffn_down.weight", (hidden, feed_forward))]),
            )
        )
    head = embedding
    if checkpoint.has("output.weight"):  # else the head is tied to the embedding
        head = _place_weight([checkpoint.tensor("output.weight", (config.vocab, hidden))], dtype, quantize)
    return Transformer(config, dtype, embedding, layers, norm("output_norm.weight"), head, int8_activations)


def _place_weight(parts, dtype, quantize):
    """Matrices of one width, one below the other, as one weight on the current device."""
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if backend.on_host() and quantize is None and rows >= TALL * columns:
        return _column_major(parts, rows, columns, dtype)
    matrix = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if quantize is not None:
        return backend.operations().quantize_int8(backend.place(matrix), group_size=QUANTIZATIONS[quantize][0])
    return backend.place(matrix.astype(dtype, copy=False))


def _column_major(parts, rows, columns, dtype):
    """The parts one below the other, stored column by column; copied in stretches of rows that stay in the cache."""
    stored = np.empty((columns, rows), dtype)
    at = 0
    for part in parts:
        for start in range(0, part.shape[0], 512):
            stretch = part[start : start + 512]
            stored[:, at : at + len(stretch)] = stretch.T
            at += len(stretch)
    return stored.T
