"""The forward pass of a decoder-only transformer, written once against the operations; ModelConfig says which one it is.

A layer of the llama family, with x the residual stream [batch, tokens, hidden]:

    q, k, v = rms_norm(x) · Wqkv                 one product; q, k, v are views of it
    q, cache = rotary(q), cache + (rotary(k), v)        into the cache's pages
    x = attention(q, cache) · Wo + x
    gated = silu(gate) · up                      one product, rms_norm(x) · Wgate_up, whose columns are gate's and up's by turns
    x = gated · Wdown + x

Where outputs are normalised too (Gemma 2 and 3, OLMo 2), the sum is taken by the norm that comes next, in its own pass:

    added = rms_norm(attention(q, cache) · Wo)
    normed, x = rms_norm(x + added), x + added
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbkernels import ops
from nbkernels.arrays import Int8Weight
from nbkernels.model import backend
from nbkernels.model.checkpoint import shape_of

# On the CPU a matrix with so many times more rows than columns is kept by columns: BLAS then multiplies a vector by it in three
# quarters of the time (2 cores, OpenBLAS, 3072×576: 20 against 27 GB/s); for squarer ones rows are faster.
TALL = 4
# ``quantize`` of ``load`` -> (columns a scale of the matrices, None being a whole row; activations of ``int8_matmul``). Groups of
# 32 are those of the GGUF block formats.
STRETCH = 2**24  # elements that are copied to a device at once
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


class Weights(NamedTuple):
    """A matrix [out, in], dense or int8, and its bias [out]; or a norm's weight and bias [columns]. A bias may be None."""

    weight: object
    bias: object = None

    @property
    def nbytes(self):
        """Bytes of both."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class Layer:
    """The Weights of one layer; norms that a family lacks are None. qkv [(heads + 2·kv_heads)·head_dim, hidden].

    gate_up [2·feed_forward, hidden] is what ``interleave_gate_up`` makes, or for other activations than SiLU, and for int8
    activations, the gate's rows above the up's. Where there is no gate it is the up alone.
    """

    attention_norm: object  # [hidden]
    qkv: object
    q_norm: object  # [head_dim], or [heads·head_dim]
    k_norm: object
    output: object  # [hidden, heads·head_dim]
    post_attention_norm: object  # [hidden]
    feed_forward_norm: object  # [hidden]
    gate_up: object
    down: object  # [hidden, feed_forward]
    post_feed_forward_norm: object  # [hidden]


def interleave_gate_up(gate, up):
    """Two matrices [n, depth] as one [2·n, depth] whose row 2i is the gate's row i and row 2i + 1 the up's; vectors likewise.

    It is the weight that activation="silu_mul" of ``matmul`` and ``int8_matmul`` wants.
    """
    return np.stack([gate, up], axis=1).reshape(2 * len(gate), *gate.shape[1:])


class Transformer:
    """Weights on a device, and the forward pass.

    dtype: of the activations. embedding [vocab, hidden] and head [vocab, hidden], dense or int8; they may be one object.
    norm: Weights [hidden]; positions [context, hidden] or None. int8_activations: the inputs of int8 matrices are quantised as
    well, a scale a token.
    """

    def __init__(self, config, dtype, embedding, layers, norm, head, *, positions=None, int8_activations=False):
        self.config = config
        self.dtype = dtype
        self.embedding = embedding
        self.positions = positions
        self.layers = layers
        self.norm = norm
        self.head = head
        self.int8_options = {"activations": "int8"} if int8_activations else {}
        self.ops = backend.operations()
        self.fused_gate = fused_gate(config, int8_activations)
        tables = [tuple(map(backend.place, r.tables(config.rope_dim, config.context))) for r in config.rotaries]
        if None in config.rotations:  # of no columns: nothing is rotated
            nothing = np.zeros((config.context, 0), np.float32)
            tables.append((backend.place(nothing), backend.place(nothing)))
        self.rotations = [tables[-1 if i is None else i] for i in config.rotations]
        given = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
        options = {name: value for name, value in given.items() if value is not None}
        self.attention_options = [options if w is None else {**options, "window": w} for w in config.windows]
        self.embedding_options = {}
        if config.embedding_scale != 1:
            self.embedding_options["scale"] = float(np.array(config.embedding_scale).astype(dtype))

    @property
    def nbytes(self):
        """Bytes of all weights, shared ones counted once."""
        arrays = [
            self.embedding,
            self.norm,
            self.positions,
            *(w for layer in self.layers for w in vars(layer).values()),
        ]
        if self.head is not self.embedding:
            arrays.append(self.head)
        return sum(a.nbytes for a in arrays if a is not None)

    def linear(self, x, weights, **options):
        """x · weightᵀ + bias for a dense or an int8 weight; options: those of ``matmul``."""
        weight, bias = weights
        if bias is not None:
            options["bias"] = bias
        if _plan_rows.get() is not None:
            options["plan_rows"] = _plan_rows.get()
        if isinstance(weight, Int8Weight):
            return self.ops.int8_matmul(x, weight, **self.int8_options, **options)
        return self.ops.matmul(x, weight, **options)

    def normalise(self, x, norm, **options):
        """The family's norm of x; options: those of ``rms_norm``."""
        if self.config.norm == "rms":
            return self.ops.rms_norm(x, norm.weight, eps=self.config.norm_eps, **options)
        return self.ops.layer_norm(x, norm.weight, norm.bias, eps=self.config.norm_eps, **options)

    def add_and_normalise(self, x, added, norm):
        """(norm of x + added, x + added); added may be None, and norm too: then the sum stands for it."""
        if added is not None:
            if norm is None:
                _, x = self.ops.rms_norm(added, residual=x)
                return x, x
            return self.normalise(added, norm, residual=x)
        return (x if norm is None else self.normalise(x, norm)), x

    def embed(self, ids, step):
        """The residual stream before the first layer, [batch, tokens, hidden]."""
        options = self.embedding_options
        if self.positions is not None:
            options = {**options, "positions": step.positions, "position_table": self.positions}
        return self.ops.embedding(ids, self.embedding, dtype=self.dtype, **options)

    def attend(self, normed, layer, index, pages, step):
        """What attention saw, before the output product: [batch, tokens, heads·head_dim]."""
        config, ops = self.config, self.ops
        batch, tokens, _ = normed.shape
        q_width, kv_width = config.q_width, config.kv_width
        k_pages, v_pages, k_scales, v_scales = pages
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        qkv = self.linear(normed, layer.qkv)  # [batch, tokens, (heads + 2·kv_heads)·head_dim]
        q, k = qkv[..., :q_width], qkv[..., q_width : q_width + kv_width]
        norms = {}
        if config.qk_norm == "row":
            q, k = self.normalise(q, layer.q_norm), self.normalise(k, layer.k_norm)
        elif config.qk_norm == "head":
            norms = {"q_norm": layer.q_norm.weight, "k_norm": layer.k_norm.weight, "eps": config.norm_eps}
        q = q.reshape(batch, tokens, config.heads, config.head_dim)
        k = k.reshape(batch, tokens, config.kv_heads, config.head_dim)
        v = qkv[..., q_width + kv_width :].reshape(batch, tokens, config.kv_heads, config.head_dim)
        q = ops.rotary_append(
            q, k, v, *self.rotations[index], step.positions, k_pages, v_pages,
            block_table=step.block_table, **scales, **norms,
        )  # fmt: skip
        seen = ops.paged_attention(
            q, k_pages, v_pages, step.block_table, step.lengths, prefix=step.prefix, **scales,
            **self.attention_options[index],
        )  # fmt: skip
        return seen.reshape(batch, tokens, q_width)

    def feed_forward(self, normed, layer, **options):
        """The feed-forward unit; options: those of its last product."""
        config = self.config
        if not config.gated:
            inner = self.linear(normed, layer.gate_up, activation=config.activation)  # [batch, tokens, feed_forward]
        elif self.fused_gate:
            inner = self.linear(normed, layer.gate_up, activation="silu_mul")  # [batch, tokens, feed_forward]
        else:
            gate_up = self.linear(normed, layer.gate_up)  # [batch, tokens, 2·feed_forward]
            gated = self.ops.silu_mul if config.activation == "silu" else self.ops.gelu_mul
            inner = gated(gate_up[..., : config.feed_forward], gate_up[..., config.feed_forward :])
        return self.linear(inner, layer.down, **options)

    def one_launch(self, pages, rows=1):
        """The layers over a cache's (``LayerPages`` each) as one launch for one token of one sequence: ``ops.DecoderLayers``, or
        None where the device or the family does not allow it. rows: of the largest batch whose bits a token is to have.
        """
        config = self.config
        plain = config.norm == "rms" and config.gated and self.fused_gate and config.qk_norm is None
        plain = plain and not (config.post_norm or config.parallel or self.int8_options or config.attention_soft_cap)
        alike = set(config.windows) == {None} and len(set(config.rotations)) == 1 and None not in config.rotations
        biased = any(w.bias is not None for layer in self.layers for w in (layer.output, layer.gate_up, layer.down))
        if backend.on_host() or not (plain and alike) or biased or pages[0].k_scales is not None:
            return None
        layers = [
            ops.DecoderLayer(
                layer.attention_norm.weight,
                *layer.qkv,
                layer.output.weight,
                layer.feed_forward_norm.weight,
                layer.gate_up.weight,
                layer.down.weight,
                *of_layer[:2],
            )
            for layer, of_layer in zip(self.layers, pages, strict=True)
        ]
        sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
        numbers = {"eps": config.norm_eps, "scale": config.attention_scale}
        return ops.decoder_layers(layers, rotary_dim=config.rope_dim, dtype=self.dtype, rows=rows, **sizes, **numbers)

    def hidden(self, ids, cache, sequences, together=None):
        """The residual stream behind the last layer. ids int32 [batch, tokens] -> [batch, tokens, hidden].

        Row b extends the cache's sequence sequences[b]. Raises as ``KVCache.reserve`` where the tokens do not fit. together: what
        ``one_launch`` gave for this cache, for one token of one sequence; the bits are the same without.
        """
        step = cache.begin(sequences, ids.shape[1])
        x = self.embed(ids, step)  # [batch, tokens, hidden]
        if together is not None:
            cos, sin = self.rotations[0]
            out = together(x.reshape(-1), cos, sin, step.positions, step.lengths, step.block_table)
            cache.end(step)
            return out.reshape(*x.shape)
        added = None  # what the next norm adds to x
        for index, (layer, pages) in enumerate(zip(self.layers, cache.layers, strict=True)):
            normed, x = self.add_and_normalise(x, added, layer.attention_norm)
            seen = self.attend(normed, layer, index, pages, step)
            if self.config.post_norm:
                added = self.normalise(self.linear(seen, layer.output), layer.post_attention_norm)
                normed, x = self.add_and_normalise(x, added, layer.feed_forward_norm)
                added = self.normalise(self.feed_forward(normed, layer), layer.post_feed_forward_norm)
                continue
            if self.config.parallel:
                normed = self.normalise(x, layer.feed_forward_norm)
                x = self.linear(seen, layer.output, residual=x)
            else:
                x = self.linear(seen, layer.output, residual=x)
                normed = self.normalise(x, layer.feed_forward_norm)
            x = self.feed_forward(normed, layer, residual=x)
        cache.end(step)
        return self.add_and_normalise(x, added, None)[1]

    def logits(self, hidden, out=None):
        """Scores of the next token. hidden [..., hidden] -> [..., vocab]; out: on a device, where to write them."""
        options = {} if out is None else {"out": out}
        scores = self.linear(self.normalise(hidden, self.norm), Weights(self.head), **options)
        if self.config.logit_soft_cap is not None:
            scores = self.ops.soft_cap(scores, self.config.logit_soft_cap, **options)
        return scores


def fused_gate(config, int8_activations):
    """Whether gate and up are one product with its activation; else the activation is an operation of its own."""
    return config.gated and config.activation == "silu" and not int8_activations


def load_transformer(checkpoint, *, dtype, quantize, progress):
    """Read a checkpoint's weights onto the current device, a matrix at a time.

    dtype: of the activations and dense weights; quantize: None or one of QUANTIZATIONS; norms and biases stay in dtype, norms
    that are stored less some offset in float32. progress: called after each matrix with the share done, 0 to 1.
    """
    config = checkpoint.config
    checkpoint.check()
    steps = 4 * config.layers + 1
    done = 0
    int8_activations = quantize is not None and QUANTIZATIONS[quantize][1] == "int8"

    def matrix(parts, layer):
        nonlocal done
        placed = _place_weight([checkpoint.tensor(part, layer) for part in parts], dtype, quantize)
        done += 1
        progress(min(1.0, done / steps))
        return placed

    def linear(parts, layer):
        return Weights(matrix(parts, layer), biases(parts, layer))

    def biases(parts, layer):
        if not any(checkpoint.has_bias(part, layer) for part in parts):
            return None
        given = [
            checkpoint.tensor(part, layer, "bias")
            if checkpoint.has_bias(part, layer)
            else np.zeros(shape_of(config, part)[0], np.float32)
            for part in parts
        ]
        return backend.place(np.concatenate(given).astype(dtype, copy=False))

    def norm(part, layer=None):
        if part not in checkpoint.names:
            return None
        weight = checkpoint.tensor(part, layer)
        if part == "norm" and config.logit_scale != 1:
            weight = weight * np.float32(config.logit_scale)
        exact = np.dtype(np.float32) if checkpoint.norm_offset else dtype
        bias = None
        if checkpoint.has_bias(part, layer):
            bias = backend.place(checkpoint.tensor(part, layer, "bias").astype(exact))
        return Weights(backend.place(np.ascontiguousarray(weight.astype(exact, copy=False))), bias)

    def gate_up(layer):
        if not fused_gate(config, int8_activations):
            return linear(("gate", "up") if config.gated else ("up",), layer)
        nonlocal done
        placed = _place_weight(
            [checkpoint.tensor(part, layer) for part in ("gate", "up")], dtype, quantize, interleave=True
        )
        done += 1
        progress(min(1.0, done / steps))
        bias = None
        if any(checkpoint.has_bias(part, layer) for part in ("gate", "up")):
            given = [checkpoint.tensor(part, layer, "bias") for part in ("gate", "up")]
            bias = backend.place(interleave_gate_up(*given).astype(dtype, copy=False))
        return Weights(placed, bias)

    embedding = matrix(("embedding",), None)
    layers = [
        Layer(
            attention_norm=norm("attention_norm", i),
            qkv=linear(("q", "k", "v"), i),
            q_norm=norm("q_norm", i),
            k_norm=norm("k_norm", i),
            output=linear(("output",), i),
            post_attention_norm=norm("post_attention_norm", i),
            feed_forward_norm=norm("feed_forward_norm", i),
            gate_up=gate_up(i),
            down=linear(("down",), i),
            post_feed_forward_norm=norm("post_feed_forward_norm", i),
        )
        for i in range(config.layers)
    ]
    head = embedding if config.tied else matrix(("head",), None)
    positions = None
    if config.positions:
        positions = backend.place(np.ascontiguousarray(checkpoint.tensor("positions").astype(dtype, copy=False)))
    return Transformer(
        config, dtype, embedding, layers, norm("norm"), head, positions=positions, int8_activations=int8_activations
    )


def _place_weight(parts, dtype, quantize, interleave=False):
    """Matrices of one width as one weight on the current device: one below the other, or two row by row by turns.

    On a device they are copied part by part, so that the host never holds more than a stretch of one.
    """
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if backend.on_host():
        if interleave:
            parts = [interleave_gate_up(*parts)]
        if quantize is None and rows >= TALL * columns:
            return _column_major(parts, rows, columns, dtype)
        matrix = parts[0] if len(parts) == 1 else np.concatenate(parts)
        placed = matrix.astype(dtype if quantize is None else matrix.dtype, copy=False)
    else:
        placed = backend.zeros((rows, columns), dtype if quantize is None else parts[0].dtype)
        at = 0
        for stretch in _stretches(parts, interleave):
            values = stretch.astype(placed.dtype, copy=False)
            backend.overwrite(placed[at : at + len(values)], values)
            at += len(values)
    if quantize is not None:
        return backend.operations().quantize_int8(placed, group_size=QUANTIZATIONS[quantize][0])
    return placed


def _stretches(parts, interleave):
    """The rows of a weight that is made of parts, some at a time."""
    step = max(1, STRETCH // max(1, parts[0].shape[1]))
    if interleave:
        gate, up = parts
        for start in range(0, len(gate), step):
            yield interleave_gate_up(gate[start : start + step], up[start : start + step])
        return
    for part in parts:
        for start in range(0, len(part), step):
            yield part[start : start + step]


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
