"""``python -m benchmarks loading`` on a tiny shape on the CPU: each way to load is timed, and the figures are kept."""

import json
import sys

import pytest

import nbkernels as nbk
from benchmarks import __main__ as benchmarks
from benchmarks import loading

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
TINY = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 200}


def test_every_way_is_timed_and_kept(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(loading.SHAPES, "cpu", ("tiny", TINY))
    monkeypatch.setitem(loading.COMMON, "num_key_value_heads", 2)  # as many as heads of 128 elements
    monkeypatch.setattr(sys, "argv", ["benchmarks", "loading", "--json", str(tmp_path / "kept.json")])
    with nbk.device("cpu"):
        benchmarks.main()
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["command"].startswith("python -m benchmarks loading") and kept["versions"] and kept["commit"]
    rows = kept["results"]
    assert [row["from"] for row in rows] == ["bfloat16", "bfloat16, quantised", "int8 file"]
    said = capsys.readouterr().out
    assert all(f"tiny from {row['from']}: {row['seconds']:.1f} s" in said for row in rows)
    dense, quantised, int8 = (row["weight_bytes"] for row in rows)
    assert quantised == int8 < 0.7 * dense
