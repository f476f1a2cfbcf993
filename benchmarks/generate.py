"""SmolLM2-135M from load to text: how long each part takes, and what int8 costs in quality.

Runs on the GPU where one answers, else on the CPU (30 tokens a second on two idle cores is the floor there).
"""

import time
from pathlib import Path

import nbkernels as nbk
from nbkernels.launch.device import current
from nbkernels.model import demo_model

PROMPT = "Once upon a time, there was a little robot who"
NEW_TOKENS = 256
TEXT = Path(__file__).parent.parent / "tests" / "data" / "perplexity.txt"  # the beginning of Pride and Prejudice
VARIANTS = {
    "cuda": ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantize": "int8"}),
    "cpu": ({"dtype": "float32"},),
}


def measure(options):
    """One row: seconds and figures of a model loaded with ``options``."""
    start = time.perf_counter()
    model = nbk.load(demo_model.path(), **options)
    loaded = time.perf_counter() - start
    for _ in range(2):  # the first one compiles kernels
        generation = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, stream=True)
        for _ in generation:
            pass
    statistics = generation.statistics
    return {
        "model": "SmolLM2-135M-Instruct",
        **options,
        "load_seconds": loaded,
        "first_token_seconds": statistics.first_token_seconds,
        "new_tokens": statistics.new_tokens,
        "tokens_per_second": statistics.tokens_per_second,
        "weight_bytes": model.transformer.nbytes,
        "memory_bytes": statistics.memory_bytes,
        "perplexity": model.perplexity(TEXT.read_text()),
    }


def run(report):
    """Measure every variant; ``report(rows)`` keeps them."""
    from rich.console import Console
    from rich.table import Table

    device = current()
    rows = [measure(options) for options in VARIANTS[device.kind]]
    table = Table(title=f"SmolLM2-135M-Instruct on {device.name}", title_justify="left")
    for column in ("weights", "load s", "first token ms", "tokens/s", "weights MB", "memory MiB", "perplexity"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.get("quantize", row["dtype"]),
            f"{row['load_seconds']:.2f}",
            f"{row['first_token_seconds'] * 1e3:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['weight_bytes'] / 1e6:.0f}",
            f"{row['memory_bytes'] / 2**20:.0f}",
            f"{row['perplexity']:.3f}",
        )
    Console(width=110).print(table)
    report(rows)
