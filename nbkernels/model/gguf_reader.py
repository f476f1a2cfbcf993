"""GGUF checkpoints: the header is read and checked here, the tensors are dequantised through the ``gguf`` package.

The package's own reader trusts every length that a file claims, and takes two seconds over a vocabulary; this one refuses
whatever does not fit into the file before it is used. The format is described in the ggml project's ``docs/gguf.md``.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nbkernels.model.config import CheckpointError, ModelConfig

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
# struct codes of the metadata values by type; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


class _Cursor:
    """A place in the file's bytes that refuses to leave them."""

    def __init__(self, data, path):
        self.data = data
        self.path = path
        self.at = 0

    def fail(self, why):
        raise CheckpointError(f"{why} (at byte {self.at} of {len(self.data)})")

    def take(self, count):
        """The position of the next ``count`` bytes, which are passed."""
        start = self.at
        if count > len(self.data) - start:
            self.fail(f"the header claims {count} more bytes than follow: the file is truncated or damaged")
        self.at = start + count
        return start

    def number(self, code):
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize(code)))[0]

    def string(self):
        start = self.take(self.number("Q"))
        return bytes(self.data[start : self.at]).decode(errors="replace")

    def value(self, kind):
        """One metadata value, in Python's own types."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self.fail(f"a metadata value of unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            code = _SCALARS[element]
            start = self.take(count * struct.calcsize(code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if element != _STRING:
            self.fail(f"an array of unsupported element type {element}")
        # a string takes at least the eight bytes of its length, so a false count ends here and not in a long loop
        if count * 8 > len(self.data) - self.at:
            self.fail(f"an array of {count} strings does not fit into the file")
        return [self.string() for _ in range(count)]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its type, shape (outermost first), first byte and number of bytes."""

    kind: object
    shape: tuple
    start: int
    nbytes: int


def read_header(data, path):
    """(metadata, tensors) of a GGUF file's bytes: dicts by name. CheckpointError where anything does not fit."""
    cursor = _Cursor(data, path)
    cursor.take(len(MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        cursor.fail(f"GGUF version {version}, wanted one of {VERSIONS} (little endian)")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    # the smallest entries take 24 and 13 bytes
    if tensors * 24 + keys * 13 > len(data):
        cursor.fail(f"{tensors} tensors and {keys} metadata entries do not fit into the file")
    metadata = {}
    for _ in range(keys):
        name = cursor.string()
        if name in metadata:
            cursor.fail(f"metadata {name!r} stands there twice")
        metadata[name] = cursor.value(cursor.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment {alignment!r}, wanted a power of two")
    entries = {}
    for _ in range(tensors):
        name = cursor.string()
        if name in entries:
            cursor.fail(f"tensor {name!r} stands there twice")
        dimensions = cursor.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"tensor {name!r} has {dimensions} dimensions, wanted 1 to {MAX_DIMENSIONS}")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        entries[name] = (shape, cursor.number("I"), cursor.number("Q"))
    start = -(-cursor.at // alignment) * alignment
    return metadata, {name: _locate(cursor, name, *entry, start, alignment) for name, entry in entries.items()}


def _long_rows(blocks):
    """Into how many rows to cut so many blocks: each a power of two of blocks, up to 2048, that divides them."""
    length = 1
    while length < 2048 and blocks % (2 * length) == 0:
        length *= 2
    return blocks // length


def _locate(cursor, name, shape, code, offset, start, alignment):
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        cursor.fail(f"tensor {name!r} has unknown type {code}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if elements == 0 or shape[-1] % block:
        cursor.fail(f"tensor {name!r} of shape {shape} does not divide into the {block}-element blocks of {kind.name}")
    nbytes = elements // block * block_bytes
    if offset % alignment or start + offset + nbytes > len(cursor.data):
        cursor.fail(f"tensor {name!r} lies outside of the file: the file is truncated or damaged")
    return StoredTensor(kind, shape, start + offset, nbytes)


class GGUFCheckpoint:
    """An open GGUF file: ``config``, ``metadata(key)``, ``tensor(name)``. CheckpointError for whatever is wrong with it."""

    def __init__(self, path):
        self.path = Path(path)
        self.data = np.memmap(self.path, np.uint8, mode="r")
        self._metadata, self.tensors = read_header(memoryview(self.data), self.path)
        self.config = self._config()

    def metadata(self, key, default=None):
        """A metadata value in Python's own types, or the default where it is absent."""
        return self._metadata.get(key, default)

    def _required(self, key):
        value = self.metadata(key)
        if value is None:
            raise CheckpointError(f"metadata {key!r} is missing")
        return value

    def _number(self, key, default=None):
        value = self._required(key) if default is None else self.metadata(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"metadata {key!r} is {value!r}, wanted a number")
        return value

    def _config(self):
        architecture = self._required("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"architecture {architecture!r} is not supported; 'llama' is")
        name = architecture
        if self.metadata(f"{name}.rope.scaling.type") not in (None, "none"):
            kind = self.metadata(f"{name}.rope.scaling.type")
            raise CheckpointError(f"rotary scaling {kind!r} is not supported yet")
        if "rope_freqs.weight" in self.tensors:
            raise CheckpointError("rotary frequency factors (Llama 3.1 scaling) are not supported yet")
        if self.metadata(f"{name}.expert_count", 0):
            raise CheckpointError("mixtures of experts are not supported")
        hidden = self._number(f"{name}.embedding_length")
        heads = self._number(f"{name}.attention.head_count")
        head_dim = self._number(f"{name}.attention.key_length", hidden // max(heads, 1))
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError("tensor 'token_embd.weight' is missing")
        return ModelConfig(
            architecture=architecture,
            layers=self._number(f"{name}.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._number(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            feed_forward=self._number(f"{name}.feed_forward_length"),
            vocab=embedding.shape[0],
            context=self._number(f"{name}.context_length"),
            rope_dim=self._number(f"{name}.rope.dimension_count", head_dim),
            rope_base=float(self._number(f"{name}.rope.freq_base", 10000.0)),
            norm_eps=float(self._number(f"{name}.attention.layer_norm_rms_epsilon")),
        )

    def has(self, name):
        """Whether a tensor is in the file."""
        return name in self.tensors

    def tensor(self, name, shape):
        """A tensor as float32 of the wanted shape, dequantised. CheckpointError where it is missing or of another kind."""
        from gguf import GGML_QUANT_SIZES, dequantize

        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name!r} is missing")
        if tensor.kind.name not in TENSOR_TYPES:
            raise CheckpointError(
                f"tensor {name!r} has type {tensor.kind.name}, which is not supported; {', '.join(TENSOR_TYPES)} are"
            )
        if tensor.shape != tuple(shape):
            raise CheckpointError(f"tensor {name!r} has shape {tensor.shape}, wanted {tuple(shape)}")
        stored = np.asarray(self.data[tensor.start : tensor.start + tensor.nbytes])
        if tensor.kind.name in ("F32", "F16"):
            rows = stored.view(np.float32 if tensor.kind.name == "F32" else np.float16)
        else:
            # blocks know nothing of rows, and the package takes 16 rows at a time: long ones are read ten times as fast
            block = GGML_QUANT_SIZES[tensor.kind][0]
            rows = stored.reshape(_long_rows(math.prod(shape) // block), -1)
        return np.ascontiguousarray(dequantize(rows, tensor.kind), np.float32).reshape(shape)

    def unpermuted(self, name, heads, shape):
        """The matrix of q or k with its rows back in half-split order.

        llama files hold the rows of each head interleaved, for rotary pairs (0, 1), (2, 3), …; the runtime pairs i with
        i + rope_dim / 2, so row 2i goes to i and row 2i + 1 to i + rope_dim / 2 of the rotated part.
        """
        rope, head_dim = self.config.rope_dim, self.config.head_dim
        matrix = self.tensor(name, shape).reshape(heads, head_dim, shape[1])
        order = np.concatenate((np.arange(0, rope, 2), np.arange(1, rope, 2), np.arange(rope, head_dim)))
        return matrix[:, order].reshape(shape)
