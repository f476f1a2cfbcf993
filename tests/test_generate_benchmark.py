"""The parts of ``python -m benchmarks generate`` on a tiny model on the CPU: figures that add up, and counts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_model

import nbkernels as nbk
from benchmarks import generate
from nbkernels.launch.device import current
from nbkernels.model.generation import LanguageModel

TINY = replace(
    generate.SMOLLM2,
    layers=2,
    windows=(),
    rotations=(),
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_dim=8,
    feed_forward=64,
    vocab=96,
    context=128,
)
SPEEDS = {"copy_bytes_a_second": 1e9, "matmul_flops_a_second": 1e9}


@pytest.fixture(params=[None, "int8"])
def model(request):
    with nbk.device("cpu"):
        made = generate.random_transformer(TINY, False, request.param, np.dtype(np.float32), elements=1000)
        return LanguageModel(made, generate.NoTokenizer(TINY.vocab), None, current())


def test_decode(model):
    for row in (generate.batch_1(model, SPEEDS, 16, 4), generate.batch_64(model, SPEEDS, 16, 4, rows=3, chunk=64)):
        assert row["context"] == 16 and row["tokens_per_second"] > 0
        rows = row["tokens_per_second"] * row["step_ms"] / 1e3
        np.testing.assert_allclose(row["of_copy"], row["step_bytes"] / (row["step_ms"] * 1e-3) / 1e9)
        assert "replay_ms" not in row and round(rows) in (1, 3)


def test_prompts(model):
    row = generate.long_prompt(model, SPEEDS, 32, (16, 32))
    rates = [row[f"flops_a_second, chunks of {chunk}"] for chunk in (16, 32)]
    np.testing.assert_allclose(row["of_matmul"], max(rates) / 1e9)


def test_the_start(tmp_path):
    pytest.importorskip("gguf")
    row = generate.start(tiny_model.write(tmp_path / "tiny.gguf"), "cpu")
    assert list(row) == ["first_token_seconds, empty cache", "first_token_seconds, kernels kept"]
    assert all(0.05 < seconds < 60 for seconds in row.values())
    with pytest.raises(RuntimeError, match="ended with 2"):
        generate.start(tmp_path / "missing.gguf", "cpu")


def test_bytes_and_operations():
    """Llama-3-8B: 8.03e9 parameters, of which a step reads all but the embedding, a byte and a 32nd of a float32 each."""
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert weights + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert generate.prompt_flops(generate.LLAMA, 1) == 2 * weights + 32 * 4 * 4096
    with nbk.device("cpu"):
        made = generate.random_transformer(TINY, False, None, np.dtype(np.float32), elements=1000)
    parameters = 2 * 32 * (2 * 32 + 2 * 16 + 3 * 64) + 96 * 32 + (2 * 2 + 1) * 32
    assert generate.step_bytes(made, 3, 10) == 4 * (parameters + 3 * 10 * 2 * 2 * 2 * 8)


def test_random_matrices_differ():
    with nbk.device("cpu"):
        matrix = generate.RandomMatrices(np.dtype(np.float32), None, elements=1000)
        first, second, large = matrix(10, 20), matrix(10, 20), matrix(50, 64)
    assert not np.array_equal(first, second) and not np.array_equal(first[0], first[1])
    assert abs(large.std() / generate.DEVIATION - 1) < 0.1


def test_what_is_chosen():
    names = [name for found, _ in generate.jobs("cuda", "Llama-3-8B int8, batch 64") for name in found]
    assert "Llama-3-8B int8, batch 64" in names and not any("SmolLM2" in name for name in names)


def test_peers_are_chosen_and_left_out(monkeypatch):
    monkeypatch.setattr(generate.generate_peers, "available", lambda: True)
    peers = [
        [name for found, _ in generate.jobs("cuda", "", without) for name in found]
        for without in ((), ("torch.compile",))
    ]
    assert set(peers[0]) - set(peers[1]) == {f"{label}, torch.compile, batch 1" for label in generate.PEERS}
    assert len(peers[1]) >= 12 and "Llama-3-8B int8, transformers, batch 64" in peers[1]


def test_ratios():
    speeds = {
        "Llama-3-8B int8, batch 1": 500.0,
        "Llama-3-8B int8-rows, batch 1": 600.0,
        "Llama-3-8B int8, torch.compile, batch 1": 200.0,
        "Llama-3-8B int8, batch 64": 9.0,
    }
    rows = [{"model": name, "tokens_per_second": speed} for name, speed in speeds.items()]
    want = [
        {"model": "Llama-3-8B int8, batch 1, of torch.compile, batch 1", "times": 2.5},
        {"model": "Llama-3-8B int8-rows, batch 1, of torch.compile, batch 1", "times": 3.0},
    ]
    assert generate.ratios([*rows, {"model": "Llama-3-8B int8, transformers, batch 64", "failed": "x"}]) == want


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_peer(quantize, monkeypatch):
    """The weights' parts that a step reads are those of ours, and steps follow one another."""
    peers, torch = generate.generate_peers, pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = peers.random_llama(TINY, True, quantize, torch.device("cpu"), torch.float32)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == (0 if quantize else 7 * TINY.layers + 1)
    assert peers.step_seconds(model, 1, 16, 4, compiled=False) > 0
    monkeypatch.setattr(peers.time, "perf_counter", iter([0, 9, 0, 7, 0, 5, 0, 1]).__next__)
    assert peers.generate_seconds(model, 3, 16, 4) == 1


def test_a_peer_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(generate.harness, "torch", SimpleNamespace(device=lambda name: name))
    monkeypatch.setattr(generate.generate_peers, "random_llama", lambda *_: 1 / 0)
    ((name, row),) = generate.measure_peers("SmolLM2-135M bf16", ["SmolLM2-135M bf16, torch.compile, batch 1"])
    assert name == "SmolLM2-135M bf16, torch.compile, batch 1" and row == {
        "failed": "ZeroDivisionError: division by zero"
    }


def test_a_run_keeps_what_it_measured(monkeypatch):
    monkeypatch.setattr(generate, "jobs", lambda *_: [(["a", "b"], lambda speeds: [("a", {"tokens_per_second": 2.0})])])
    kept = []
    with nbk.device("cpu"):
        generate.run(kept.append, SimpleNamespace(match="", without=[]))
    assert [row["model"] for row in kept[0]] == ["a", "b"] and "left_out" in kept[0][1]
