"""A checkpoint's tensors by what they are in the model, whatever the format of its file.

A reader says what it finds (names and shapes) and gives rows of a tensor; here fused tensors are taken apart, biases found, and
all of a file is held against what the family has: a tensor that is missing, misshapen or too many is named before any is read.
"""

import re

import numpy as np

from nbkernels.model.config import CheckpointError
from nbkernels.model.families import FAMILIES, OF_MODEL

FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
NORMS = (
    "norm",
    "attention_norm",
    "feed_forward_norm",
    "q_norm",
    "k_norm",
    "post_attention_norm",
    "post_feed_forward_norm",
)
# of other purposes: masks and angles that old files keep, and what is no part of a text model
IGNORED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias)"
    r"|rope_freqs\.weight|rope_factors_(long|short)\.weight|.*(vision_tower|multi_modal_projector)\..*"
)
CHECKED = 2**18  # elements that are looked at at once: they stay in the cache


def shape_of(config, part):
    """The shape of a part's weight, [out, in] or [columns]."""
    c = config
    return {
        "embedding": (c.vocab, c.hidden),
        "head": (c.vocab, c.hidden),
        "positions": (c.context, c.hidden),
        "q": (c.q_width, c.hidden),
        "k": (c.kv_width, c.hidden),
        "v": (c.kv_width, c.hidden),
        "qkv": (c.q_width + 2 * c.kv_width, c.hidden),
        "output": (c.hidden, c.q_width),
        "gate": (c.feed_forward, c.hidden),
        "up": (c.feed_forward, c.hidden),
        "gate_up": (2 * c.feed_forward, c.hidden),
        "down": (c.hidden, c.feed_forward),
        "q_norm": (c.q_width if c.qk_norm == "row" else c.head_dim,),
        "k_norm": (c.kv_width if c.qk_norm == "row" else c.head_dim,),
    }.get(part, (c.hidden,))


class Checkpoint:
    """What ``transformer.load_transformer`` reads. A format's reader gives

    path; config, a ModelConfig; shapes, a dict of tensor name -> shape as stored; names, part -> name with {} for the layer;
    ``read(name, rows)``: rows (a slice) of a tensor, as a NumPy array [rows, …] of float32, float16 or bfloat16;
    and how it stores them: transposed, qkv_by_heads, interleaved (rows of q and k for rotary pairs (0, 1), …), norm_offset.
    """

    transposed = False
    qkv_by_heads = False
    interleaved = False
    norm_offset = 0.0

    @property
    def family(self):
        """The Family of the architecture."""
        return FAMILIES[self.config.architecture]

    def name_of(self, part, layer=None, kind="weight"):
        """The name of a part's tensor in the file; kind: weight or bias."""
        return f"{self.names[part].format(layer)}.{kind}"

    def has_bias(self, part, layer=None):
        """Whether a part, fused or not, has a bias in the file."""
        stored = part if part in self.names else FUSED[part]
        return self.name_of(stored, layer, "bias") in self.shapes

    def check(self):
        """CheckpointError unless every tensor that the model is made of is there in its shape, and none that we don't know."""
        known = {self.name_of("head")} if self.config.tied else set()
        for part in self.names:
            if part == "head" and self.config.tied:
                continue
            for layer in (None,) if part in OF_MODEL else range(self.config.layers):
                name = self.name_of(part, layer)
                self._check_one(name, self._stored_shape(part))
                known.add(name)
                bias = self.name_of(part, layer, "bias")
                if bias in self.shapes or part in self.family.biases:
                    self._check_one(
                        bias,
                        self._stored_shape(part)[-1:]
                        if self._is_transposed(part)
                        else (shape_of(self.config, part)[0],),
                    )
                    known.add(bias)
        for name in self.shapes:
            if name not in known and not IGNORED.fullmatch(name):
                raise CheckpointError(
                    f"tensor {name!r} of shape {self.shapes[name]} is none that architecture {self.config.architecture!r} has"
                )

    def _check_one(self, name, wanted):
        if name not in self.shapes:
            raise CheckpointError(f"tensor {name!r} is missing")
        if tuple(self.shapes[name]) != wanted:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(self.shapes[name])}, wanted {wanted}")

    def _is_transposed(self, part):
        return self.transposed and part not in OF_MODEL and part not in NORMS

    def _stored_shape(self, part):
        shape = shape_of(self.config, part)
        return shape[::-1] if self._is_transposed(part) else shape

    def tensor(self, part, layer=None, kind="weight"):
        """A part's weight [out, in] or [columns], or its bias [out]; a view of the file where that is possible.

        CheckpointError where it holds a NaN or an infinity.
        """
        stored = part if part in self.names else FUSED[part]
        name = self.name_of(stored, layer, kind)
        if stored == part:
            values = self._read(name, stored, kind, slice(None))
        elif stored == "qkv" and self.qkv_by_heads:
            whole = self._read(name, stored, kind, slice(None))
            heads = whole.reshape(self.config.heads, 3, self.config.head_dim, *whole.shape[1:])
            values = heads[:, "qkv".index(part)].reshape(-1, *whole.shape[1:])
        else:
            widths = {"q": self.config.q_width, "k": self.config.kv_width, "v": self.config.kv_width}
            if stored == "gate_up":
                widths = dict.fromkeys(("gate", "up"), self.config.feed_forward)
            start = sum(list(widths.values())[: list(widths).index(part)])
            values = self._read(name, stored, kind, slice(start, start + widths[part]))
        check_finite(values, name)
        if self.interleaved and part in ("q", "k"):
            values = self._unpermuted(values)
        if part in NORMS and kind == "weight" and self.norm_offset:
            values = values.astype(np.float32) + np.float32(self.norm_offset)
        return values

    def _read(self, name, part, kind, rows):
        if not self._is_transposed(part) or kind == "bias":
            return self.read(name, rows)
        return self.read(name, slice(None)).T[rows]

    def _unpermuted(self, values):
        """q's or k's rows back in half-split order.

        The file holds the rows of each head interleaved, for rotary pairs (0, 1), (2, 3), …; the runtime pairs i with
        i + rope_dim / 2, so row 2i goes to i and row 2i + 1 to i + rope_dim / 2 of the rotated part.
        """
        rope, head_dim = self.config.rope_dim, self.config.head_dim
        heads = values.reshape(-1, head_dim, *values.shape[1:])
        order = np.concatenate((np.arange(0, rope, 2), np.arange(1, rope, 2), np.arange(rope, head_dim)))
        return heads[:, order].reshape(values.shape)


def check_finite(values, name):
    """CheckpointError where an element is NaN or infinite.

    Its exponent's bits are all set: as a signed integer it is the largest of the positive ones, as an unsigned one of all.
    """
    signed, unsigned = {2: (np.int16, np.uint16), 4: (np.int32, np.uint32)}[values.dtype.itemsize]
    infinity = int(np.array([np.inf], values.dtype).view(unsigned)[0])
    negative = infinity | (1 << 8 * values.dtype.itemsize - 1)
    words = values.view(unsigned)
    rows = max(1, CHECKED // max(1, int(np.prod(words.shape[1:]))))
    for start in range(0, words.shape[0], rows):
        part = words[start : start + rows]
        if part.size and (part.view(signed).max() >= infinity or part.max() >= negative):
            raise CheckpointError(
                f"tensor {name!r} holds NaN or infinite values: the file is damaged, or was trained to them"
            )
