"""What ``python -m benchmarks generate`` compares with: whole decode steps of transformers, with its static cache.

Batch 1 is the model's forward pass of a token under torch.compile, with neither a choice nor the host's part behind it; a full
batch is ``generate`` itself. Weights are random, of the same shapes as ours; int8 ones are dequantised inside the compiled
product, with a scale a row. torch.compile takes about a minute a model.
"""

import time
from importlib.util import find_spec

from benchmarks.harness import torch

COMPILE = {"fullgraph": True, "mode": "reduce-overhead"}  # as CUDA graphs


def available():
    """Whether there are torch, transformers and a GPU."""
    return torch is not None and torch.cuda.is_available() and find_spec("transformers") is not None


def random_llama(config, tied, quantize, device, dtype=None):
    """transformers' Llama of a ModelConfig's shapes with random weights; quantize: "int8", or None."""
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.feed_forward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotaries[0].base},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = torch.bfloat16 if dtype is None else dtype
    with torch.device(device):
        model = LlamaForCausalLM._from_config(described, dtype=dtype, attn_implementation="sdpa").eval()
    if quantize is not None:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, int8_linear(child))
    return model


def int8_linear(linear):
    """A Linear's module whose weight is int8 with a scale a row; the compiler puts the conversion inside the product."""

    class Int8Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            weight = linear.weight.detach()
            scales = weight.abs().amax(dim=1).clamp(min=1e-8) / 127
            self.register_buffer("values", (weight / scales[:, None]).round().to(torch.int8))
            self.register_buffer("scales", scales)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.values.to(x.dtype)) * self.scales

    return Int8Linear()


def step_seconds(model, rows, context, steps, compiled=True):
    """Mean seconds of a decode step of so many sequences behind so many tokens."""
    from transformers import StaticCache

    device = next(model.parameters()).device
    cache = StaticCache(config=model.config, max_cache_len=context + 2 * steps + 8)
    prompt = torch.randint(model.config.vocab_size, (rows, context), device=device)
    token = prompt[:, :1].clone()
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        forward = torch.compile(model.forward, **COMPILE) if compiled else model.forward

        def run(count):
            for _ in range(count):
                torch.compiler.cudagraph_mark_step_begin()
                forward(token, past_key_values=cache, use_cache=True)
            wait(device)

        run(5)  # compiles, records, replays
        began = time.perf_counter()
        run(steps)
    return (time.perf_counter() - began) / steps


def generate_seconds(model, rows, context, steps):
    """Mean seconds of a decode step of ``model.generate`` for so many prompts; the prompts' own time is taken off."""
    device = next(model.parameters()).device
    prompts = torch.randint(model.config.vocab_size, (rows, context), device=device)

    def run(tokens):
        began = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        wait(device)
        return time.perf_counter() - began

    with torch.no_grad():
        run(1 + steps)  # compiles
        run(1 + steps)
        return (run(1 + steps) - run(1)) / steps


def wait(device):
    """Until the device's work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
