"""What a checkpoint is, whether it runs, in how much memory, and what is missing: ``nbkernels doctor``."""

import math
from collections import Counter
from pathlib import Path

from nbkernels.model.checkpoint import shape_of
from nbkernels.model.config import CheckpointError
from nbkernels.model.families import FAMILIES, OF_MODEL
from nbkernels.model.gguf_reader import GGUFCheckpoint
from nbkernels.model.loading import open_checkpoint, read_tokenizer
from nbkernels.model.saved import SavedCheckpoint

MIB = 2**20
GROUP_BYTES = 1 + 4 / 32  # of an int8 weight with a float32 scale a group of 32


def parameters(config):
    """How many numbers the matrices of a model hold."""
    parts = FAMILIES[config.architecture].tensors
    total = 0
    for part in parts:
        if not (part == "head" and config.tied):
            total += math.prod(shape_of(config, part)) * (1 if part in OF_MODEL else config.layers)
    return total


def examine(path):
    """(facts, faults): pairs of strings, and what keeps the checkpoint from running. No tensor is read."""
    facts, faults = [], []
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return [("checkpoint", str(path))], [str(error)]
    config = checkpoint.config
    form = {GGUFCheckpoint: "GGUF file", SavedCheckpoint: "written by nbkernels convert"}
    facts.append(("checkpoint", f"{Path(path).name}: {form.get(type(checkpoint), 'Hugging Face folder')}"))
    windows = sum(window is not None for window in config.windows)
    kv = f"{config.heads} heads and {config.kv_heads} KV heads of {config.head_dim}"
    facts.append(("model", f"{config.architecture}, {config.layers} layers of width {config.hidden}, {kv}"))
    facts.append(
        ("vocabulary", f"{config.vocab} rows, head {'tied to the embedding' if config.tied else 'of its own'}")
    )
    seen = f", {windows} layers with a window of {max(w for w in config.windows if w)}" if windows else ""
    facts.append(("context", f"{config.context} tokens{seen}; rotary angles: {_rotaries(config)}"))
    kinds = Counter()
    for tensor in checkpoint.tensors.values():
        kinds[tensor.kind if isinstance(tensor.kind, str) else tensor.kind.name] += math.prod(tensor.shape)
    total = sum(kinds.values())
    facts.append(("stored as", ", ".join(f"{kind} {count / total:.0%}" for kind, count in kinds.most_common())))
    count = parameters(config)
    int8 = isinstance(checkpoint, SavedCheckpoint) and checkpoint.quantize
    sizes = {"int8": GROUP_BYTES} if int8 else {"float32": 4, "bfloat16": 2, "int8": GROUP_BYTES}
    memory = ", ".join(f"{count * size / MIB:.0f} MiB in {name}" for name, size in sizes.items())
    facts.append(("weights", f"{count / 1e6:.1f} million: {memory}"))
    token = 2 * config.layers * config.kv_width
    facts.append(
        (
            "KV cache",
            f"{2 * token} bytes a token in bfloat16: {2 * token * config.context / MIB:.0f} MiB a full context",
        )
    )
    try:
        checkpoint.check()
    except CheckpointError as error:
        faults.append(str(error))
    try:
        tokenizer = read_tokenizer(checkpoint)
        ends = " ".join(tokenizer.tokens[i] for i in sorted(tokenizer.end_ids) if i < len(tokenizer)) or "none"
        bos = (
            ""
            if tokenizer.bos is None
            else f", begin {tokenizer.tokens[tokenizer.bos]!r}{' always' * tokenizer.add_bos}"
        )
        facts.append(("tokenizer", f"{len(tokenizer)} tokens{bos}, end {ends}"))
        facts.append(("chat template", "there" if checkpoint.chat_template() else "none: prompts alone, no chat"))
    except CheckpointError as error:
        faults.append(str(error))
    except ModuleNotFoundError as error:
        faults.append(f"the package {error.name!r} is missing: pip install 'nbkernels[llm]'")
    return facts, faults


def _rotaries(config):
    if config.rope_dim == 0:
        return "none"
    kinds = [r.kind if r.kind == "default" else f"{r.kind} (factor {r.factor:g})" for r in config.rotaries]
    return f"base {', '.join(f'{r.base:g}' for r in config.rotaries)}, scaling {', '.join(kinds)}"
