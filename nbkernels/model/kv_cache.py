"""The KV cache: what attention remembers of each token, on device arrays, one sequence after another."""

import numpy as np

from nbkernels import ops
from nbkernels.model import backend


class KVCache:
    """Keys and values of a batch of sequences, and how long each one is.

    layers: pairs (k, v) of [batch, capacity, kv_heads, head_dim]. ``positions`` and ``lengths`` are int32 [batch] on the device,
    so that a step needs no host work: within a step, positions says where its first token goes and lengths how many tokens
    there are with it. ``used`` is the host's own count of the longest sequence.
    """

    def __init__(self, layers, batch, capacity, kv_heads, head_dim, dtype):
        if min(layers, batch, capacity, kv_heads, head_dim) < 1:
            shape = (layers, batch, capacity, kv_heads, head_dim)
            raise ValueError(f"layers, batch, capacity, kv_heads, head_dim: {shape}, wanted positive numbers")
        self.capacity = capacity
        self.used = 0
        shape = (batch, capacity, kv_heads, head_dim)
        self.layers = [(backend.zeros(shape, dtype), backend.zeros(shape, dtype)) for _ in range(layers)]
        self.positions = backend.zeros((batch,), np.dtype(np.int32))
        self.lengths = backend.zeros((batch,), np.dtype(np.int32))

    @property
    def nbytes(self):
        """Bytes of all keys and values."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    def require(self, tokens):
        """ValueError where ``tokens`` more tokens a sequence do not fit."""
        if self.used + tokens > self.capacity:
            raise ValueError(f"{self.used} + {tokens} tokens do not fit into a KV cache of {self.capacity}")

    def begin(self, tokens):
        """A step of ``tokens`` tokens a sequence begins. ValueError where they do not fit; nothing is changed then."""
        self.require(tokens)
        ops.advance(self.lengths, tokens)

    def end(self, tokens):
        """The tokens of a step have been written into every layer."""
        ops.advance(self.positions, tokens)
        self.used += tokens

    def reset(self):
        """Forget every token; the arrays are kept, and what they hold is never read again."""
        zero = np.zeros(self.positions.shape, np.int32)
        backend.overwrite(self.positions, zero)
        backend.overwrite(self.lengths, zero)
        self.used = 0
