"""How long a checkpoint takes from the page cache to the device: a Hugging Face folder as it is and quantised, and its int8 file.

On a GPU the shape is Llama-3-8B's (16 GB of bfloat16 and 9 GB of int8 in the temporary folder), else a small one's.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np

import nbkernels as nbk
from nbkernels.arrays import bfloat16
from nbkernels.launch.device import current
from nbkernels.model import saved
from nbkernels.model.checkpoint import NORMS, shape_of
from nbkernels.model.families import FAMILIES, OF_MODEL, huggingface_config

SHAPES = {
    "cuda": (
        "Llama-3-8B",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    ),
    "cpu": ("small", {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 32000}),
}
COMMON = {"model_type": "llama", "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def write_folder(folder, config):
    """A folder of random weights in bfloat16, of the shape that config says."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    _, model = huggingface_config(config)
    # one stretch of random numbers, over and over: drawing eight billion of them would take longer than all the rest
    stretch = (np.random.default_rng(0).standard_normal(2**22 + 1) * 0.02).astype(bfloat16)
    entries = []
    for part, name in FAMILIES["llama"].tensors.items():
        for layer in (None,) if part in OF_MODEL else range(model.layers):
            shape = shape_of(model, part)
            make = np.ones if part in NORMS else lambda shape, _: np.resize(stretch, shape)
            entries.append(
                (f"{name.format(layer)}.weight", shape, bfloat16, lambda make=make, s=shape: make(s, bfloat16))
            )
    saved.write_safetensors(folder / "model.safetensors", entries)


def timed(path, **options):
    """Seconds to load a model, the least of three, and the model."""
    best = float("inf")
    for _ in range(3):  # the first one compiles, and may read from the disk
        model = None
        start = time.perf_counter()
        model = nbk.load(path, progress=lambda share: None, **options)
        best = min(best, time.perf_counter() - start)
    return best, model


def run(report, _options=None):
    """Measure every way to load; ``report(rows)`` keeps the figures."""
    name, shape = SHAPES[current().kind]
    config = {**COMMON, **shape, "num_attention_heads": shape["hidden_size"] // 128}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        original, int8 = Path(folder) / "original", Path(folder) / "int8"
        write_folder(original, config)
        for label, path, options in (
            ("bfloat16", original, {"dtype": "bfloat16"}),
            ("bfloat16, quantised", original, {"dtype": "bfloat16", "quantize": "int8"}),
            ("int8 file", int8, {"dtype": "bfloat16"}),
        ):
            seconds, model = timed(path, **options)
            nbytes = model.transformer.nbytes
            if options.get("quantize"):
                saved.save(model, int8, quantize="int8")
            model = None
            rows.append({"model": name, "from": label, "seconds": seconds, "weight_bytes": nbytes})
            print(f"{name} from {label}: {seconds:.1f} s, {nbytes / 1e9:.2f} GB on {current().name}", flush=True)
    report(rows)
