"""What a model is made of: the numbers a forward pass needs, read from a checkpoint and checked."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, what is wrong with it and what was wanted."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the llama family.

    hidden: width of the residual stream; feed_forward: width inside the gated unit; context: the most tokens it was trained
    for; rope_dim: how many leading elements of a head are rotated, in half-split pairs; rope_base: the base of their angles.
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
    rope_base: float
    norm_eps: float

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "feed_forward", "vocab", "context"):
            value = getattr(self, name)
            if not 1 <= value <= 2**31 - 1:
                raise CheckpointError(f"{name}: {value}, wanted a positive number")
        if self.heads % self.kv_heads:
            raise CheckpointError(f"heads: {self.heads}, wanted a multiple of the {self.kv_heads} KV heads")
        if self.head_dim > 256:
            raise CheckpointError(f"head_dim: {self.head_dim}, the attention kernels take up to 256")
        if not 0 <= self.rope_dim <= self.head_dim or self.rope_dim % 2:
            raise CheckpointError(f"rope_dim: {self.rope_dim}, wanted an even number up to head_dim {self.head_dim}")
        if not self.rope_base > 0 or not 0 <= self.norm_eps < 1:
            raise CheckpointError(f"rope_base {self.rope_base} or norm_eps {self.norm_eps} is out of range")
