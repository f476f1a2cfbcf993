"""What a model is made of: the numbers and choices a forward pass needs, read from a checkpoint and checked."""

import math
from dataclasses import dataclass, field

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, what is wrong with it and what was wanted."""


MOST_LAYERS = 2**12
MOST_CONTEXT = 2**22  # tokens: the rotary tables of more do not fit into memory
ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True)
class Rotary:
    """The angles of rotary position embedding: position · frequency i, frequency i = base^(-2i / rope_dim), scaled.

    kind: how the frequencies are scaled for a longer context than the original one.
        default   not at all
        linear    all divided by factor (Chen et al. 2023)
        llama3    those with less than low_frequency turns in original_context divided by factor, those with more than
                  high_frequency kept, and between them a mixture (Llama 3.1)
        yarn      likewise by beta_slow and beta_fast turns, linear in the index (Peng et al. 2023); truncate: whole indices
        factors   frequency i divided by factors[i] (longrope; GGUF's rope_freqs)
    magnitude: what cosines and sines are multiplied by.
    """

    base: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_context: int = 0
    factors: tuple = ()
    magnitude: float = 1.0

    def __post_init__(self):
        numbers = {name: getattr(self, name) for name in ("base", "factor", "magnitude", "beta_fast", "beta_slow")}
        for name, value in numbers.items():
            if not 0 < value < math.inf:
                raise CheckpointError(f"rotary {name}: {value}, wanted a number above 0")
        if self.kind not in ROTARY_KINDS:
            raise CheckpointError(f"rotary scaling {self.kind!r} is not supported; {', '.join(ROTARY_KINDS)} are")
        if self.kind == "llama3" and not 0 < self.low_frequency < self.high_frequency:
            raise CheckpointError(f"rotary low_frequency {self.low_frequency}, wanted less than {self.high_frequency}")
        if self.kind in ("llama3", "yarn") and not self.original_context > 0:
            raise CheckpointError(f"rotary scaling {self.kind!r} without the original context")
        if self.kind == "yarn" and self.base == 1:
            raise CheckpointError("rotary base: 1, wanted more with scaling 'yarn'")
        if not all(0 < f < math.inf for f in self.factors):
            raise CheckpointError("rotary factors: wanted numbers above 0")

    def frequencies(self, dim):
        """float64 [dim / 2], radians a token."""
        plain = self.base ** (-np.arange(0, dim, 2) / max(dim, 1))
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "factors":
            return plain / np.array(self.factors, np.float64)
        if self.kind == "llama3":
            turns = self.original_context * plain / (2 * math.pi)
            kept = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        elif self.kind == "yarn":
            low, high = self._yarn_index(self.beta_fast, dim), self._yarn_index(self.beta_slow, dim)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            kept = 1 - (np.arange(dim // 2) - low) / (high - low or 0.001)
        else:
            return plain
        kept = np.clip(kept, 0, 1)
        return plain / self.factor * (1 - kept) + plain * kept

    def _yarn_index(self, turns, dim):
        """The index whose frequency makes so many turns in the original context."""
        return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def tables(self, dim, positions):
        """cos and sin float32 [positions, dim / 2], computed in float64."""
        angles = np.outer(np.arange(positions), self.frequencies(dim))
        return (self.magnitude * np.cos(angles)).astype(np.float32), (self.magnitude * np.sin(angles)).astype(
            np.float32
        )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: ``transformer`` is written against this alone, whatever the family and the file format.

    hidden: width of the residual stream; feed_forward: width inside the feed-forward unit; context: the most tokens it was
    trained for; rope_dim: how many leading elements of a head are rotated, in half-split pairs.
    Of tuples with an entry a layer: windows (the keys a query sees, None for all) and rotations (index into ``rotaries``, or
    None for a layer that rotates nothing).
    norm: "rms" or "layer"; qk_norm: None, "head" (each head of q and k alone) or "row" (all heads of a token at once).
    pre_norm: the inputs of attention and feed-forward are normalised; post_norm: their outputs are.
    activation: "silu", "gelu" (tanh form) or "gelu_exact"; gated: activation(gate) · up, else activation(up).
    parallel: attention and feed-forward both read the layer's input. positions: embeddings of positions are added.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    context: int
    rope_dim: int
    norm_eps: float
    rotaries: tuple = field(default=(Rotary(),))
    rotations: tuple = ()
    windows: tuple = ()
    norm: str = "rms"
    qk_norm: str | None = None
    pre_norm: bool = True
    post_norm: bool = False
    activation: str = "silu"
    gated: bool = True
    parallel: bool = False
    positions: bool = False
    tied: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "feed_forward", "vocab", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31 - 1:
                raise CheckpointError(f"{name}: {value!r}, wanted a positive integer")
        if self.layers > MOST_LAYERS or self.context > MOST_CONTEXT:
            raise CheckpointError(
                f"{self.layers} layers and a context of {self.context}, wanted at most {MOST_LAYERS} and {MOST_CONTEXT}"
            )
        if self.heads % self.kv_heads:
            raise CheckpointError(f"heads: {self.heads}, wanted a multiple of the {self.kv_heads} KV heads")
        if self.head_dim > 256:
            raise CheckpointError(f"head_dim: {self.head_dim}, the attention kernels take up to 256")
        if not isinstance(self.rope_dim, int) or not 0 <= self.rope_dim <= self.head_dim or self.rope_dim % 2:
            raise CheckpointError(f"rope_dim: {self.rope_dim}, wanted an even number up to head_dim {self.head_dim}")
        for rotary in self.rotaries:
            if rotary.kind == "factors" and len(rotary.factors) != self.rope_dim // 2:
                raise CheckpointError(f"{len(rotary.factors)} rotary factors, wanted {self.rope_dim // 2}")
        if not 0 <= self.norm_eps < 1:
            raise CheckpointError(f"norm_eps: {self.norm_eps}, wanted a number from 0 to 1")
        for name, default in (("windows", None), ("rotations", 0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * self.layers)
            if len(getattr(self, name)) != self.layers:
                raise CheckpointError(f"{name}: {len(getattr(self, name))} entries for {self.layers} layers")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise CheckpointError(f"window: {window!r}, wanted a positive number of tokens or none")
        for rotation in self.rotations:
            if rotation is not None and not 0 <= rotation < len(self.rotaries):
                raise CheckpointError(f"rotations: {rotation}, wanted None or 0 to {len(self.rotaries) - 1}")
        choices = {
            "norm": ("rms", "layer"),
            "qk_norm": (None, "head", "row"),
            "activation": ("silu", "gelu", "gelu_exact"),
        }
        for name, wanted in choices.items():
            if getattr(self, name) not in wanted:
                raise CheckpointError(
                    f"{name} {getattr(self, name)!r} is not supported; {', '.join(map(str, wanted))} are"
                )
        if self.gated and self.activation == "gelu_exact":
            raise CheckpointError("activation 'gelu_exact' of a gated unit is not supported; 'silu' and 'gelu' are")
        for name in ("embedding_scale", "logit_scale", "attention_scale", "attention_soft_cap", "logit_soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CheckpointError(f"{name}: {value}, wanted a number above 0")
        if self.attention_soft_cap is not None and self.attention_soft_cap > 1000:
            raise CheckpointError(f"attention_soft_cap: {self.attention_soft_cap}, the kernels take up to 1000")

    @property
    def q_width(self):
        """Columns of q: all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self):
        """Columns of k, and of v: all KV heads."""
        return self.kv_heads * self.head_dim
