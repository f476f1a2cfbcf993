"""GGUF checkpoints: the header is read and checked here, the tensors are dequantised through the ``gguf`` package.

The package's own reader trusts every length that a file claims, and takes two seconds over a vocabulary; this one refuses
whatever does not fit into the file before it is used. The format is described in the ggml project's ``docs/gguf.md``.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nbkernels.model.checkpoint import Checkpoint
from nbkernels.model.config import CheckpointError
from nbkernels.model.families import FAMILIES, GGUF_TENSORS, gguf_config

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
    located = {name: _locate(cursor, name, *entry, start, alignment) for name, entry in entries.items()}
    before, end = None, 0
    for name, tensor in sorted(located.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            cursor.fail(f"tensor {name!r} overlaps {before!r}: the file is damaged")
        before, end = name, tensor.start + tensor.nbytes
    return metadata, located


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


class GGUFCheckpoint(Checkpoint):
    """An open GGUF file: a Checkpoint, and ``metadata(key)``. CheckpointError for whatever is wrong with it."""

    def __init__(self, path):
        self.path = Path(path)
        self.data = np.memmap(self.path, np.uint8, mode="r")
        self._metadata, self.tensors = read_header(memoryview(self.data), self.path)
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        factors = next((n for n in ("rope_freqs.weight", "rope_factors_short.weight") if n in self.tensors), None)
        if factors is not None:
            factors = self.read(factors, slice(None))
        architecture, self.config = gguf_config(self.metadata, self.shapes, factors)
        family = FAMILIES[architecture]
        self.interleaved = family.gguf_interleaved
        self.names = {part: GGUF_TENSORS[part] for part in family.tensors}

    def metadata(self, key, default=None):
        """A metadata value in Python's own types, or the default where it is absent."""
        return self._metadata.get(key, default)

    def chat_template(self):
        """The file's template, or None."""
        template = self.metadata("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def read(self, name, rows):
        """Rows of a tensor as float32, dequantised."""
        from gguf import GGML_QUANT_SIZES, dequantize

        tensor = self.tensors[name]
        if tensor.kind.name not in TENSOR_TYPES:
            raise CheckpointError(
                f"tensor {name!r} has type {tensor.kind.name}, which is not supported; {', '.join(TENSOR_TYPES)} are"
            )
        start, stop, _ = rows.indices(tensor.shape[0])
        shape = (stop - start, *tensor.shape[1:])
        row_bytes = tensor.nbytes // tensor.shape[0]
        block = GGML_QUANT_SIZES[tensor.kind][0]
        if len(shape) == 1 and block > 1 and shape != tensor.shape:
            return self.read(name, slice(None))[rows]
        stored = np.asarray(self.data[tensor.start + start * row_bytes : tensor.start + stop * row_bytes])
        if tensor.kind.name in ("F32", "F16"):
            values = stored.view(np.float32 if tensor.kind.name == "F32" else np.float16)
        else:
            # blocks know nothing of rows, and the package takes 16 rows at a time: long ones are read ten times as fast
            values = stored.reshape(_long_rows(math.prod(shape) // block), -1)
        if values.dtype == np.float32:
            return values.reshape(shape)
        return np.ascontiguousarray(dequantize(values, tensor.kind), np.float32).reshape(shape)
