"""Tiny random models of every family: what scripts/record_families.py records with transformers, and the tests make again.

A case is a name, the class of its configuration in transformers, and the configuration. The weights are no file: each tensor is
made from its name and shape alone, by the same recipe here and there.
"""

import json
from pathlib import Path
from zlib import crc32

import numpy as np

FOLDER = Path(__file__).parent / "data" / "families"
PROMPT_TOKENS, NEW_TOKENS = 20, 64
VOCAB, CONTEXT = 160, 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
LONG = {"original_max_position_embeddings": 32, "factor": 4.0}
# windows are short, soft caps low and original contexts small, so that 84 tokens go beyond them
CASES = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": (
        "Llama",
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}},
    ),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", **LONG}}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3-longrope": (
        "Phi3",
        {
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 384,
            "original_max_position_embeddings": 96,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [4.0] * 6,
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 0.5,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": VOCAB}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "olmo2": ("Olmo2", {}),
}


def settings(name):
    """Keyword arguments of a case's configuration class."""
    kind, own = CASES[name]
    # 16 and 19 alone would end a generation early
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {**ends, **own} if kind == "GPT2" else {**SIZES, **ends, **own}


def weight(name, shape, centre, embedding):
    """A tensor float32 from its name: uniform numbers from raw bits of a counter-based generator, which no version changes.

    centre: of a norm's weights; a matrix has variance 1 / columns, an embedding that times embedding².
    """
    raw = np.random.Philox(key=crc32(name.encode())).random_raw(int(np.prod(shape)))
    uniform = ((raw >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)).reshape(shape)
    if len(shape) == 1:
        return uniform * np.float32(0.4) + np.float32(0 if name.endswith("bias") else centre)
    depth = shape[0] if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else shape[1]
    scale = np.sqrt(12 / depth) * (embedding if "embed_tokens" in name or "wte" in name else 1)
    return uniform * np.float32(scale)


def weights(recorded):
    """Name -> array of a recording's model."""
    centre = 0.0 if "gemma" in json.loads(str(recorded["config"]))["model_type"] else 1.0
    shapes = json.loads(str(recorded["tensors"]))
    # where the head is the embedding, a large one makes every token repeat itself
    embedding = 1.0 if {"lm_head.weight", "embed_out.weight"} & shapes.keys() else 0.25
    return {name: weight(name, shape, centre, embedding) for name, shape in shapes.items()}


def write_tokenizer(folder, vocab=VOCAB):
    """A tokenizer.json of so many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_folder(folder, recorded, arrays=None, config=None):
    """A Hugging Face folder of a recording; returns its path."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(recorded["config"]) if config is None else json.dumps(config))
    save_file(weights(recorded) if arrays is None else arrays, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def load_recording(name):
    """The recording of a case."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        return dict(stored)
