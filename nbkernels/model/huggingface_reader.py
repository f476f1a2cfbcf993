"""Hugging Face folders: config.json, safetensors files (one, or shards behind an index), tokenizer.json.

A safetensors file is eight bytes of the header's length, a header in JSON that says of each tensor its dtype, shape and the
bytes it takes, and those bytes (https://github.com/huggingface/safetensors, "Format"). The header is checked here before
anything of it is used; the tensors are views of the mapped file.
"""

import json
import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from nbkernels.arrays import bfloat16
from nbkernels.model.checkpoint import Checkpoint
from nbkernels.model.config import CheckpointError
from nbkernels.model.families import FAMILIES, huggingface_config

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": bfloat16,
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
FLOATS = ("F32", "F16", "BF16")
MOST_HEADER = 100_000_000  # bytes, the format's own limit
MOST_JSON = 64 * 2**20  # bytes of the other JSON files
MOST_DIMENSIONS = 8
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CONVERT = "convert it to safetensors: model.save_pretrained(folder, safe_serialization=True) in transformers"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, dtype (a name of the format), shape and bytes [start, end) of the file."""

    file: Path
    kind: str
    shape: tuple
    start: int
    end: int


def parse_json(data, name):
    """JSON of a stranger: bytes -> value. CheckpointError where it is none, nested too deep, or names a key twice."""

    def unique(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            seen = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            raise CheckpointError(f"{name}: {twice!r} stands there twice")
        return result

    try:
        return json.loads(data, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{name}: JSON nested too deep") from error
    except ValueError as error:
        raise CheckpointError(f"{name}: no JSON ({error})") from error


def read_header(data, path):
    """The tensors of a safetensors file's bytes, name -> StoredTensor. CheckpointError where anything does not fit.

    data: the file's bytes, of which the header alone is read; path: for the entries.
    """
    size = len(data)
    if size < 8:
        raise CheckpointError(f"{path.name}: {size} bytes, too short for a safetensors file")
    length = struct.unpack_from("<Q", data)[0]
    if length > min(MOST_HEADER, size - 8):
        raise CheckpointError(
            f"{path.name}: a header of {length} bytes in a file of {size}: it is truncated, damaged or no safetensors file"
        )
    header = parse_json(bytes(data[8 : 8 + length]), path.name)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: the header is no object")
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor_entry(name, entry, path, 8 + length, size)
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            what = "overlaps another" if tensor.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path.name}: tensor {name!r} {what}: the file is damaged")
        end = tensor.end
    if end != size:
        raise CheckpointError(f"{path.name}: {size - end} bytes behind the last tensor: the file is damaged")
    return tensors


def _tensor_entry(name, entry, path, base, size):
    def fail(why):
        raise CheckpointError(f"{path.name}: tensor {name!r} {why}")

    def whole(value):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        fail("has no dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        fail(f"has dtype {kind!r}, which is not supported; {', '.join(FLOATS)} are")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(map(whole, shape)):
        fail(f"has shape {shape!r}, wanted up to {MOST_DIMENSIONS} numbers of at least 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(whole, offsets)):
        fail(f"has data_offsets {offsets!r}, wanted its first and last byte")
    start, end = offsets
    nbytes = math.prod(shape) * DTYPES[kind].itemsize
    if end - start != nbytes:
        fail(f"has {end - start} bytes, but shape {shape} of {kind} takes {nbytes}")
    if base + end > size:
        fail(f"ends at byte {base + end} of {size}: the file is truncated")
    return StoredTensor(path, kind, tuple(shape), base + start, base + end)


def map_file(path):
    """A file's bytes as a read-only NumPy array; CheckpointError where it cannot be read, or is no safetensors file."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path.name}: missing")
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path.name}: an empty file")
        data = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    start = bytes(data[:64])
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path.name}: a Git LFS pointer, not the file itself: fetch it with 'git lfs pull'")
    if start[:2] == b"PK" or (start[:1] == b"\x80" and b"\x00" not in start[1:8]):
        raise CheckpointError(f"{path.name}: a pickle, refused because loading one can run any code; {CONVERT}")
    return data


def read_json(folder, name):
    """A JSON file of a folder, an object; None where there is none."""
    path = folder / name
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MOST_JSON:
            raise CheckpointError(f"{name}: {path.stat().st_size} bytes, wanted at most {MOST_JSON}")
        value = parse_json(path.read_bytes(), name)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error.strerror})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: wanted an object")
    return value


def find_tensors(folder):
    """(tensors by name, mapped files by path) of a folder's safetensors. CheckpointError for what is missing or wrong."""
    index = read_json(folder, INDEX)
    if (folder / WEIGHTS).exists() or index is None:
        files = {WEIGHTS: None}
    else:
        placed = index.get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{INDEX}: 'weight_map', wanted the file of each tensor")
        files = {}
        for name, file in placed.items():
            # a name in the folder itself and nothing else; the file may be a link, as the hub's cache keeps them
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\\" in file:
                raise CheckpointError(f"{INDEX}: tensor {name!r} is in {file!r}, wanted a file of this folder")
            files.setdefault(file, []).append(name)
    if index is None and not (folder / WEIGHTS).exists():
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            raise CheckpointError(f"{pickles[0]}: a pickle, refused because loading one can run any code; {CONVERT}")
        raise CheckpointError(f"no {WEIGHTS} and no {INDEX} in this folder")
    tensors, mapped = {}, {}
    for file, wanted in files.items():
        path = folder / file
        mapped[path] = map_file(path)
        found = read_header(mapped[path], path)
        for name in sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{file}: tensor {name!r} stands in {tensors[name].file.name} as well")
        for name in wanted or ():
            if name not in found:
                raise CheckpointError(f"{file}: tensor {name!r} is missing, which {INDEX} says is here")
        tensors.update(found)
    return tensors, mapped


class TokenizerFiles:
    """The files beside tokenizer.json in a folder ``path``. CheckpointError where one is no JSON."""

    @cached_property
    def tokenizer_config(self):
        """tokenizer_config.json."""
        return read_json(self.path, "tokenizer_config.json") or {}

    @cached_property
    def special_tokens(self):
        """special_tokens_map.json."""
        return read_json(self.path, "special_tokens_map.json") or {}

    @cached_property
    def generation_configs(self):
        """Where the ids of special tokens stand; the first that says wins."""
        return [read_json(self.path, name) or {} for name in ("generation_config.json", "config.json")]

    def chat_template(self):
        """The folder's template, or None: a file of its own, the tokenizer configuration's only one or its default."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            if path.stat().st_size > MOST_JSON:
                raise CheckpointError(f"{path.name}: {path.stat().st_size} bytes, wanted at most {MOST_JSON}")
            return path.read_bytes().decode(errors="replace")
        given = self.tokenizer_config.get("chat_template")
        if isinstance(given, list):
            named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
            given = named.get("default")
        return given if isinstance(given, str) else None


class HuggingFaceCheckpoint(TokenizerFiles, Checkpoint):
    """A folder as ``save_pretrained`` writes it. CheckpointError for whatever is wrong with it."""

    def __init__(self, path):
        self.path = Path(path)
        self.raw_config = read_json(self.path, "config.json")
        if self.raw_config is None:
            raise CheckpointError("a folder without config.json; pass a GGUF file or a Hugging Face folder")
        _, self.config = huggingface_config(self.raw_config)
        family = FAMILIES[self.config.architecture]
        self.transposed, self.qkv_by_heads = family.transposed, family.qkv_by_heads
        self.norm_offset = family.norm_offset
        tensors, self._mapped = find_tensors(self.path)
        self.tensors = {_plain_name(name): tensor for name, tensor in tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.names = self._names(family.tensors)
        if "tie_word_embeddings" not in self.raw_config and self.name_of("head") not in self.shapes:
            self.config = replace(self.config, tied=True)

    def _names(self, names):
        """The family's names, without their prefix where the file was saved from the bare model."""
        embedding = names["embedding"] + ".weight"
        prefix = embedding[: embedding.index(".") + 1]
        if embedding in self.shapes or embedding.removeprefix(prefix) not in self.shapes:
            return names
        return {part: name.removeprefix(prefix) for part, name in names.items()}

    def read(self, name, rows):
        """Rows of a tensor, a view of the file."""
        tensor = self.tensors[name]
        if tensor.kind not in FLOATS:
            raise CheckpointError(f"tensor {name!r} has dtype {tensor.kind}, wanted one of {', '.join(FLOATS)}")
        data = self._mapped[tensor.file][tensor.start : tensor.end]
        dtype = DTYPES[tensor.kind]
        # a header's length need not be a multiple of an element's size
        values = data.view(dtype) if tensor.start % dtype.itemsize == 0 else np.frombuffer(data.tobytes(), dtype)
        return np.asarray(values).reshape(tensor.shape)[rows]


def _plain_name(name):
    """Names of a model that is part of a larger one, as if it stood alone."""
    for prefix in ("language_model.model.", "model.language_model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")
