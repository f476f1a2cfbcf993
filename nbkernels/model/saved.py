"""Checkpoints that this package writes: ``nbkernels convert``.

``save`` writes a model as it stands on a device, matrices joined and quantised as the forward pass wants them, so that it
loads by copying alone:

    config.json              {"model_type": "nbkernels", "version", "quantize", "config": ModelConfig's fields}
    model.safetensors        embedding, layers.0.qkv, …, each .weight or, of int8, .values and .scales; .bias
    tokenizer.json and the files beside it, as in any Hugging Face folder

``write_huggingface`` writes a plain Hugging Face folder, for the families whose tensors are stored one by one.
"""

import json
import math
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from nbkernels.arrays import Int8Weight
from nbkernels.model import backend
from nbkernels.model.checkpoint import check_finite
from nbkernels.model.config import CheckpointError, ModelConfig, Rotary
from nbkernels.model.families import FAMILIES, KEYS, OF_MODEL
from nbkernels.model.huggingface_reader import DTYPES, WEIGHTS, TokenizerFiles, find_tensors, read_json
from nbkernels.model.progress import progress_bar
from nbkernels.model.transformer import QUANTIZATIONS, Layer, Transformer, Weights

MODEL_TYPE, VERSION = "nbkernels", 1
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN = ("llama", "mistral", "qwen2", "qwen3")  # families that write_huggingface knows


def write_safetensors(path, entries, progress=lambda share: None):
    """Write a safetensors file, a tensor at a time. entries: (name, shape, dtype, function that gives the array)."""
    # wide elements first: each tensor then starts at a multiple of its element's size
    entries = sorted(entries, key=lambda entry: -entry[2].itemsize)
    header, at = {}, 0
    for name, shape, dtype, _ in entries:
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, _, dtype, array in entries:
            np.ascontiguousarray(array(), dtype).tofile(file)
            progress(header[name]["data_offsets"][1] / max(1, at))


def _write_tokenizer(folder, tokenizer, chat_template):
    """The files that ``tokenizer_from_huggingface`` reads."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"add_bos_token": tokenizer.add_bos, **tokenizer.names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    generation = {"bos_token_id": tokenizer.bos, "eos_token_id": sorted(tokenizer.end_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template)


def check_new_folder(path):
    """FileExistsError where a path is anything but a folder that is empty or not there yet."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: wanted a new or an empty folder")


def _empty_folder(path):
    check_new_folder(path)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _named(transformer):
    """(name, array, dense or int8) of all that a Transformer holds."""
    yield "embedding", transformer.embedding
    if transformer.head is not transformer.embedding:
        yield "head", transformer.head
    if transformer.positions is not None:
        yield "positions", transformer.positions
    pairs = [("norm", transformer.norm)]
    for i, layer in enumerate(transformer.layers):
        pairs += [(f"layers.{i}.{field.name}", getattr(layer, field.name)) for field in fields(Layer)]
    for name, weights in pairs:
        if weights is not None:
            yield name, weights.weight
            if weights.bias is not None:
                yield f"{name}.bias", weights.bias


def save(model, path, *, quantize, progress=None):
    """Write a LanguageModel into a new folder; quantize: as it was loaded; progress: as of ``load``.

    FileExistsError where the folder is not empty.
    """
    folder = _empty_folder(path)
    entries = []
    for name, array in _named(model.transformer):
        parts = {".values": array.values, ".scales": array.scales} if isinstance(array, Int8Weight) else {"": array}
        for suffix, part in parts.items():
            entries.append(
                (name + suffix, tuple(part.shape), np.dtype(part.dtype), lambda part=part: backend.fetch(part))
            )
    with model.on_device(), progress_bar(f"writing {folder.name}", progress) as report:
        write_safetensors(folder / WEIGHTS, entries, report)
    described = {"model_type": MODEL_TYPE, "version": VERSION, "quantize": quantize, "config": asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    _write_tokenizer(folder, model.tokenizer, model.chat_template)


class SavedCheckpoint(TokenizerFiles):
    """A folder that ``save`` wrote. CheckpointError for whatever is wrong with it."""

    def __init__(self, path):
        self.path = Path(path)
        raw = read_json(self.path, "config.json")
        if raw.get("version") != VERSION:
            raise CheckpointError(
                f"config.json: version {raw.get('version')!r}, wanted {VERSION}: convert the model again"
            )
        self.quantize = raw.get("quantize")
        if self.quantize is not None and self.quantize not in QUANTIZATIONS:
            raise CheckpointError(
                f"config.json: 'quantize' is {self.quantize!r}, wanted one of {', '.join(QUANTIZATIONS)}"
            )
        self.config = _read_config(raw.get("config"))
        self.tensors, self._mapped = find_tensors(self.path)

    def wanted(self):
        """Name -> (shape, dtypes it may have) of every tensor that the model has; biases, which it may have, are left out."""
        c, floats = self.config, ("F32", "F16", "BF16")
        matrices = {"embedding": (c.vocab, c.hidden)} | ({} if c.tied else {"head": (c.vocab, c.hidden)})
        found = {"norm": ((c.hidden,), floats)}
        if c.positions:
            found["positions"] = ((c.context, c.hidden), floats)
        for i in range(c.layers):
            matrices |= {f"layers.{i}.{name}": shape for name, shape in _matrices(c).items()}
            found |= {f"layers.{i}.{name}": ((columns,), floats) for name, columns in _norms(c).items()}
        for name, shape in matrices.items():
            if self.quantize is None:
                found[name] = (shape, floats)
                continue
            group = QUANTIZATIONS[self.quantize][0]
            found[f"{name}.values"] = (shape, ("I8",))
            found[f"{name}.scales"] = ((shape[0], 1 if group is None else -(-shape[1] // group)), ("F32",))
        return found

    def check(self):
        """CheckpointError unless every tensor is there in its shape and dtype, and none that the model has not."""
        wanted = self.wanted()
        rows = {
            f"layers.{i}.{name}": shape[0]
            for i in range(self.config.layers)
            for name, shape in _matrices(self.config).items()
        }
        norms = {name: shape[0] for name, (shape, _) in wanted.items() if len(shape) == 1}
        for name, columns in {**rows, **norms}.items():
            if f"{name}.bias" in self.tensors:
                wanted[f"{name}.bias"] = ((columns,), ("F32", "F16", "BF16"))
        for name, (shape, kinds) in wanted.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                raise CheckpointError(f"tensor {name!r} is missing")
            if tensor.shape != shape or tensor.kind not in kinds:
                found = f"is {tensor.kind} {tensor.shape}"
                raise CheckpointError(f"tensor {name!r} {found}, wanted {' or '.join(kinds)} {shape}")
        for name in self.tensors.keys() - wanted.keys():
            raise CheckpointError(f"tensor {name!r} is none that this model has")

    def array(self, name):
        """A tensor, a view of the file. CheckpointError where it holds a NaN or an infinity."""
        tensor = self.tensors[name]
        data = self._mapped[tensor.file][tensor.start : tensor.end]
        values = np.asarray(data.view(DTYPES[tensor.kind])).reshape(tensor.shape)
        if tensor.kind != "I8":
            check_finite(values, name)
        return values


def _read_config(given):
    """A ModelConfig from what ``asdict`` made of one."""
    names = {field.name for field in fields(ModelConfig)}
    if not isinstance(given, dict) or given.keys() != names or not isinstance(given["rotaries"], list):
        raise CheckpointError("config.json: 'config' is none of a model that this version writes")
    try:
        rotaries = tuple(Rotary(**{**r, "factors": tuple(r["factors"])}) for r in given["rotaries"])
        tuples = {name: tuple(given[name]) for name in ("rotations", "windows")}
        return ModelConfig(**{**given, **tuples, "rotaries": rotaries})
    except CheckpointError:
        raise
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"config.json: 'config' cannot be read ({error})") from error


def _norms(config):
    """Field of Layer -> columns of each norm that a layer of the model has."""
    c = config
    found = {"attention_norm": c.hidden, "feed_forward_norm": c.hidden} if c.pre_norm else {}
    if c.post_norm:
        found |= {"post_attention_norm": c.hidden, "post_feed_forward_norm": c.hidden}
    if c.qk_norm is not None:
        rows = c.qk_norm == "row"
        found |= {"q_norm": c.q_width if rows else c.head_dim, "k_norm": c.kv_width if rows else c.head_dim}
    return found


def _matrices(config):
    """Field of Layer -> shape of each matrix."""
    c = config
    return {
        "qkv": (c.q_width + 2 * c.kv_width, c.hidden),
        "output": (c.hidden, c.q_width),
        "gate_up": ((2 if c.gated else 1) * c.feed_forward, c.hidden),
        "down": (c.hidden, c.feed_forward),
    }


def load_saved(checkpoint, *, dtype, progress):
    """The Transformer of a SavedCheckpoint, its arrays copied to the current device; on the CPU they are views of the file."""
    config, quantize = checkpoint.config, checkpoint.quantize
    checkpoint.check()
    family = FAMILIES.get(config.architecture)
    exact_norms = family is not None and family.norm_offset != 0  # kept in float32 beside activations of 16 bits
    done, steps = 0, len(checkpoint.tensors)

    def array(name, kept=False):
        nonlocal done
        values = checkpoint.array(name)
        done += 1
        progress(done / steps)
        return backend.place(values if kept else values.astype(dtype, copy=False))

    def matrix(name):
        if quantize is None:
            return array(name)
        return Int8Weight(array(f"{name}.values", True), array(f"{name}.scales", True), QUANTIZATIONS[quantize][0])

    def bias(name):
        return array(f"{name}.bias") if f"{name}.bias" in checkpoint.tensors else None

    def norm(name):
        return Weights(array(name, exact_norms), bias(name))

    embedding = matrix("embedding")
    layers = []
    for i in range(config.layers):
        parts = dict.fromkeys(field.name for field in fields(Layer))
        for name in _norms(config):
            parts[name] = norm(f"layers.{i}.{name}")
        for name in _matrices(config):
            parts[name] = Weights(matrix(f"layers.{i}.{name}"), bias(f"layers.{i}.{name}"))
        layers.append(Layer(**parts))
    return Transformer(
        config,
        dtype,
        embedding,
        layers,
        norm("norm"),
        embedding if config.tied else matrix("head"),
        positions=array("positions") if config.positions else None,
        int8_activations=quantize is not None and QUANTIZATIONS[quantize][1] == "int8",
    )


# ---- Hugging Face folders ------------------------------------------------------------------------------------------------


def write_huggingface(checkpoint, tokenizer, path, *, dtype, progress=None):
    """Write a Checkpoint as a Hugging Face folder with tensors of a dtype; of the PLAIN families without rotary scaling.

    progress: as of ``load``. CheckpointError for others, FileExistsError where the folder is not empty.
    """
    if isinstance(checkpoint, SavedCheckpoint):
        raise CheckpointError("written by nbkernels convert already, its matrices joined: convert the original")
    config, family = checkpoint.config, checkpoint.family
    if config.architecture not in PLAIN or config.rotaries[0].kind != "default":
        raise CheckpointError(
            f"architecture {config.architecture!r}{'' if config.architecture not in PLAIN else ' with rotary scaling'} "
            f"cannot be written as a Hugging Face folder, only with --quantize; {', '.join(PLAIN)} can"
        )
    checkpoint.check()
    folder = _empty_folder(path)
    entries = []
    for part, name in family.tensors.items():
        if part == "head" and config.tied:
            continue
        for layer in (None,) if part in OF_MODEL else range(config.layers):
            for kind in ("weight", "bias"):
                if kind == "bias" and not checkpoint.has_bias(part, layer):
                    continue
                shape = checkpoint.shapes[checkpoint.name_of(part, layer, kind)]
                read = lambda part=part, layer=layer, kind=kind: checkpoint.tensor(part, layer, kind)  # noqa: E731
                entries.append((f"{name.format(layer)}.{kind}", tuple(shape), dtype, read))
    with progress_bar(f"writing {folder.name}", progress) as report:
        write_safetensors(folder / WEIGHTS, entries, report)
    described = {family.keys.get(name, key): getattr(config, name) for name, key in KEYS.items()}
    described |= {
        "model_type": config.architecture,
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture]
            + "ForCausalLM"
        ],
        "rope_theta": config.rotaries[0].base,
        "tie_word_embeddings": config.tied,
        "torch_dtype": str(dtype),
        "eos_token_id": sorted(tokenizer.end_ids),
        "bos_token_id": tokenizer.bos,
        "attention_bias": checkpoint.has_bias("q", 0),
        "mlp_bias": checkpoint.has_bias("up", 0),
    }
    windows = {w for w in config.windows if w is not None}
    if windows:
        described["sliding_window"] = max(windows)
        described["use_sliding_window"] = True
        described["max_window_layers"] = config.windows.index(max(windows))
    elif config.architecture == "mistral":
        described["sliding_window"] = None
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    _write_tokenizer(folder, tokenizer, checkpoint.chat_template())
