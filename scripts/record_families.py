"""Record what transformers computes for a tiny random model of each family: tests/data/families/NAME.npz.

    python scripts/record_families.py [NAME ...]        needs transformers and torch, on the CPU

A recording holds the model's config.json, the names and shapes of its tensors (their values come from tests/family_models.py),
a prompt, logits behind some of its tokens in float32, and the tokens that follow it greedily.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import family_models

POSITIONS = (0, 5, 12, 19)  # whose logits are kept


def build(name):
    """(model in float32 with the recipe's weights, config.json's text, names and shapes of the tensors in its file)."""
    kind, _ = family_models.CASES[name]
    config = getattr(transformers, f"{kind}Config")(**family_models.settings(name))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        text = (Path(folder) / "config.json").read_text()
        content = (Path(folder) / "model.safetensors").read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack_from("<Q", content)[0]])
        shapes = {key: entry["shape"] for key, entry in header.items() if key != "__metadata__"}
        arrays = family_models.weights({"config": text, "tensors": json.dumps(shapes)})
        save_file(arrays, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model, report = type(model).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval(), text, shapes


def greedy(model, prompt, count):
    """The likeliest next tokens, each from one pass over all the text."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def main():
    """Record the named cases, or all."""
    transformers.utils.logging.disable_progress_bar()
    family_models.FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or family_models.CASES:
        torch.manual_seed(0)
        model, text, shapes = build(name)
        prompt = np.random.default_rng(crc32(name.encode())).integers(
            0, family_models.VOCAB, family_models.PROMPT_TOKENS
        )
        with torch.no_grad():
            logits = model(torch.tensor(prompt[None])).logits[0].numpy()
        tokens = greedy(model, prompt.tolist(), family_models.NEW_TOKENS)
        np.savez_compressed(
            family_models.FOLDER / f"{name}.npz",
            config=text,
            tensors=json.dumps(shapes),
            prompt=prompt.astype(np.int32),
            positions=np.array(POSITIONS, np.int32),
            logits=logits[list(POSITIONS)],
            greedy=np.array(tokens, np.int32),
            versions=f"transformers {transformers.__version__}, torch {torch.__version__}",
        )
        print(f"{name}: {len(set(tokens))} different of {len(tokens)} tokens, logits {logits.std():.2f}", flush=True)


if __name__ == "__main__":
    main()
