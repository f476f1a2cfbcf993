"""What 16 bits and int8 cost in quality: perplexity of SmolLM2-135M, and how often its likeliest next token stays what it was.

The text is the beginning of Pride and Prejudice, read in windows of 512 tokens; the model it is compared with is the same one in
float32. Runs on the GPU where one answers, else on the CPU (minutes).
"""

from pathlib import Path

import numpy as np

import nbkernels as nbk
from nbkernels.launch.device import current
from nbkernels.model import demo_model

TEXT = Path(__file__).parent.parent / "tests" / "data" / "perplexity.txt"
WINDOW = 512
HALF = {"cuda": "bfloat16", "cpu": "float32"}  # the CPU multiplies 16-bit floats slowly


def variants(kind):
    """name -> options of ``load``; the first one is compared with."""
    rest = {"dtype": HALF[kind]}
    found = {"dense float32": {"dtype": "float32"}}
    if kind == "cuda":
        found["dense bfloat16"] = rest
    found["int8, a scale a row"] = {**rest, "quantize": "int8-rows"}
    found["int8, groups of 32"] = {**rest, "quantize": "int8"}
    found["int8 rows, int8 activations"] = {**rest, "quantize": "int8-activations"}
    return found


def read(model, ids):
    """(negative log-likelihood of each token behind the first of its window, likeliest token at each place)."""
    losses, choices = [], []
    for start in range(0, len(ids) - 1, WINDOW):
        part = ids[start : start + WINDOW]
        if len(part) < 2:
            break
        scores = model.logits(part)[:-1].astype(np.float64)
        largest = scores.max(axis=-1)
        normaliser = np.log(np.exp(scores - largest[:, None]).sum(axis=-1)) + largest
        losses.append(normaliser - scores[np.arange(len(part) - 1), part[1:]])
        choices.append(scores.argmax(axis=-1))
    return np.concatenate(losses), np.concatenate(choices)


def run(report, _options=None):
    """Measure every variant; ``report(rows)`` keeps them."""
    from rich.console import Console
    from rich.table import Table

    device = current()
    rows, dense = [], None
    for name, options in variants(device.kind).items():
        model = nbk.load(demo_model.path(), **options)
        losses, choices = read(model, model.encode(TEXT.read_text()))
        if dense is None:
            dense = losses, choices
        rows.append(
            {
                "model": "SmolLM2-135M-Instruct",
                "weights": name,
                "tokens": len(losses),
                "perplexity": float(np.exp(losses.mean())),
                "perplexity_ratio": float(np.exp(losses.mean() - dense[0].mean())),
                "same_first_choice": float((choices == dense[1]).mean()),
            }
        )
        print(f"{name}: {rows[-1]['perplexity']:.3f}", flush=True)
    title = f"SmolLM2-135M-Instruct on {device.name}, {len(dense[0])} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("weights", "perplexity", "to float32", "same first choice"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["weights"],
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_ratio'] - 1:+.2%}",
            f"{row['same_first_choice']:.1%}",
        )
    Console(width=110).print(table)
    report(rows)
