"""From a path to a LanguageModel: ``load``."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nbkernels.arrays import FLOATS, bfloat16
from nbkernels.launch.device import current
from nbkernels.model.config import CheckpointError
from nbkernels.model.generation import LanguageModel
from nbkernels.model.gguf_reader import MAGIC, GGUFCheckpoint
from nbkernels.model.huggingface_reader import CONVERT, HuggingFaceCheckpoint, read_json
from nbkernels.model.progress import progress_bar
from nbkernels.model.saved import MODEL_TYPE, SavedCheckpoint, load_saved
from nbkernels.model.tokenizer import tokenizer_from_gguf, tokenizer_from_huggingface
from nbkernels.model.transformer import QUANTIZATIONS, load_transformer

_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": bfloat16}


def load(path, *, device="auto", dtype=None, quantize=None, progress=None):
    """Load a checkpoint: a Hugging Face folder with safetensors, a GGUF file, or what ``nbkernels convert`` wrote.

    Of which families is said by ``families.FAMILIES``.

    device: "auto" (a GPU where one answers, else the CPU), "cuda", "emulator" or "cpu". dtype: "float32", "float16" or
    "bfloat16" (default bfloat16 on a GPU, float32 on the CPU). quantize: "int8" keeps the matrices in int8 with a scale
    a group of 32, "int8-rows" with a scale a row, and "int8-activations" multiplies those by activations in int8.
    progress: a function of the share done, 0 to 1; by default a bar is shown on a terminal where loading takes a while.
    CheckpointError (a ValueError) where the file cannot be used, DeviceError where the device is not to be had.
    """
    from nbkernels.launch.device import device as use_device

    with use_device(device) as on:
        if quantize is not None and quantize not in QUANTIZATIONS:
            raise ValueError(f"quantize: {quantize!r}, wanted None or one of {', '.join(map(repr, QUANTIZATIONS))}")
        activations = _activation_dtype(dtype, on)
        with naming(path):
            checkpoint = open_checkpoint(path)
            if isinstance(checkpoint, SavedCheckpoint) and quantize not in (None, checkpoint.quantize):
                raise CheckpointError(f"quantize: {quantize!r} for weights that are kept as {checkpoint.quantize!r}")
            tokenizer = read_tokenizer(checkpoint)
        with naming(path), progress_bar(f"loading {checkpoint.path.name}", progress) as report:
            if isinstance(checkpoint, SavedCheckpoint):
                transformer = load_saved(checkpoint, dtype=activations, progress=report)
            else:
                transformer = load_transformer(checkpoint, dtype=activations, quantize=quantize, progress=report)
        return LanguageModel(transformer, tokenizer, checkpoint.chat_template(), current())


@contextmanager
def naming(path):
    """Whatever is wrong with a checkpoint is told with its path in front."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _activation_dtype(dtype, on):
    if dtype is None:
        return _DTYPES["bfloat16" if on.kind == "cuda" else "float32"]
    name = str(np.dtype(dtype)) if not isinstance(dtype, str) else dtype
    if name not in _DTYPES or _DTYPES[name] not in FLOATS:
        raise ValueError(f"dtype: {dtype!r}, wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def open_checkpoint(path):
    """A Checkpoint whose header and configuration were read, or a CheckpointError that says what the path is instead."""
    file = Path(path)
    if file.is_dir():
        described = read_json(file, "config.json")
        saved = described is not None and described.get("model_type") == MODEL_TYPE
        return SavedCheckpoint(file) if saved else HuggingFaceCheckpoint(file)
    try:
        with open(file, "rb") as opened:
            start = opened.read(64)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    if not start:
        raise CheckpointError("an empty file")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError("a Git LFS pointer, not the file itself: fetch it with 'git lfs pull'")
    if start[:2] == b"PK" or start[:1] == b"\x80":
        raise CheckpointError(f"a pickle checkpoint, refused because loading one can run any code; {CONVERT}")
    if not start.startswith(MAGIC):
        what = "; pass the folder it is in" if file.suffix == ".safetensors" else ""
        raise CheckpointError(f"not a GGUF file (it starts with {start[:4]!r}){what}")
    return GGUFCheckpoint(file)


def read_tokenizer(checkpoint):
    """The checkpoint's Tokenizer; CheckpointError where it does not fit its embedding."""
    read = tokenizer_from_gguf if isinstance(checkpoint, GGUFCheckpoint) else tokenizer_from_huggingface
    tokenizer = read(checkpoint)
    if len(tokenizer) > checkpoint.config.vocab:
        raise CheckpointError(
            f"a vocabulary of {len(tokenizer)} tokens for an embedding of {checkpoint.config.vocab} rows"
        )
    return tokenizer
