"""The regression check, with made-up timers: what it catches, what it lets pass, and what it says of wrong files."""

import itertools
import json

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import check, harness

CASES = {f"case {n}": 1e6 * (n + 1) for n in range(30)}  # name -> bytes
SPEED = 4e12
NOISE = 0.01


def samples(seed, slower=None, by=0.05):
    """Measured by timers whose every figure, the copy's too, is off by 1% of normal noise."""
    random = np.random.default_rng(seed)

    def noisy(value):
        return value * (1 + NOISE * random.standard_normal())

    def timer(name, moved):
        ours = 1.2 * moved / SPEED * 1e6 * (1 + by if name == slower else 1)
        return lambda: {"nbkernels": noisy(ours), "torch": noisy(2 * moved / SPEED * 1e6)}

    cases = {name: (moved, timer(name, moved)) for name, moved in CASES.items()}
    return check.measure(cases, lambda: noisy(SPEED), check.RUNS)


KEPT = samples(10_000)


def test_a_slowdown_of_5_percent_is_caught_in_19_of_20():
    caught = 0
    for seed in range(20):
        slower = f"case {seed % len(CASES)}"
        found = check.compare(KEPT, samples(seed, slower))
        assert {f.case for f in found} <= {slower}, "no other case is accused"
        caught += bool(found)
    assert caught >= 19


def test_clean_runs_raise_at_most_one_false_alarm_of_20():
    assert sum(bool(check.compare(KEPT, samples(seed))) for seed in range(100, 120)) <= 1


def test_a_faster_case_is_no_alarm_and_a_small_drift_neither():
    assert not check.compare(KEPT, samples(1, "case 3", by=-0.3))
    assert not check.compare(KEPT, samples(2, "case 3", by=0.005))


def brute_force(lower, upper):
    """The same chance by going over all ways to pick."""
    values = [*lower, *upper]
    rank = {v: np.mean([i + 1 for i, w in enumerate(sorted(values)) if w == v]) for v in values}
    observed = sum(rank[v] for v in lower)
    sums = [sum(rank[v] for v in picked) for picked in itertools.combinations(values, len(lower))]
    return np.mean([s <= observed + 1e-9 for s in sums])


@pytest.mark.parametrize("seed", range(6))
def test_the_rank_test_against_all_ways_to_pick(seed):
    random = np.random.default_rng(seed)
    lower, upper = (random.integers(0, 6, n).tolist() for n in (4, 5))  # with ties
    assert check.rank_test(lower, upper) == pytest.approx(brute_force(lower, upper))


def test_the_rank_test_by_hand():
    assert check.rank_test([1, 2, 3], [4, 5, 6]) == pytest.approx(1 / 20)
    assert check.rank_test([4, 5, 6], [1, 2, 3]) == 1
    assert check.rank_test([1] * 4, [1] * 4) == 1


def test_ratios_are_of_one_run():
    speeds = iter([1e12, 2e12])
    found = check.measure({"a": (1e6, lambda: {"nbkernels": 2.0, "torch": 3.0})}, lambda: next(speeds), 2)
    assert found == {"a": {"the copy": [0.5, 0.25], "torch": [1.5, 1.5]}}


def test_exit_status_and_what_is_said(tmp_path, capsys):
    path = str(tmp_path / "kept.json")
    assert check.main(["--record", path], lambda options: ("card", KEPT)) == 0
    assert json.loads((tmp_path / "kept.json").read_text())["samples"] == KEPT
    content = json.loads((tmp_path / "kept.json").read_text()) | {"device": "card"}
    (tmp_path / "kept.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert check.main(["--against", path], lambda options: ("card", samples(3))) == 0
    assert "30 cases: 0 slower" in capsys.readouterr().out
    assert check.main(["--against", path], lambda options: ("card", samples(3, "case 7"))) == 1
    out = capsys.readouterr().out
    assert "case 7: " in out and "slower against the copy" in out and "30 cases: 1 slower" in out
    more = samples(3) | {"new": KEPT["case 1"]}
    assert check.main(["--against", path], lambda options: ("card", more)) == 0
    assert "nothing is kept of them: new" in capsys.readouterr().out


def test_wrong_files_are_told(tmp_path, capsys):
    def run(text, name="card"):
        path = tmp_path / "kept.json"
        path.write_text(text)
        assert check.main(["--against", str(path)], lambda options: (name, KEPT)) == 2
        return capsys.readouterr().err

    assert "cannot be read" in run("{")
    assert "cannot be read" in run("{}")
    assert "results of another, and this is card" in run(json.dumps({"samples": {}, "device": "another"}))
    assert check.main(["--against", str(tmp_path / "none")], lambda options: ("card", KEPT)) == 2
    assert "--record" in capsys.readouterr().err
    assert check.main(["--runs", "2"]) == 2
    assert "at least 5" in capsys.readouterr().err
    assert check.main(["--match", "nothing like it"]) == 2
    assert "no case holds" in capsys.readouterr().err


def test_groups_fit_into_memory():
    named = check.all_shapes("")
    assert len({name for name, _, _ in named}) == len(named) > 30
    parts = list(check.groups(named, 40 << 30))
    assert [case for part in parts for case in part] == named and len(parts) > 1
    assert list(check.groups(named, 1 << 60)) == [named]
    assert all(len(part) == 1 for part in check.groups(named, 1))
    assert check.results_path("NVIDIA H200").name == "h200_check.json"


def test_a_benchmark_without_the_demo_s_model_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NBKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["benchmarks", "quality"])
    with pytest.raises(SystemExit, match=r"fetch_model\.py"):
        benchmarks_main.main()


def test_a_benchmark_without_a_gpu_says_which_need_none(monkeypatch):
    monkeypatch.setattr(harness, "torch", None)
    monkeypatch.setattr("sys.argv", ["benchmarks", "attention"])
    with pytest.raises(SystemExit, match=r"attention needs torch \(pip install torch\).*quality"):
        benchmarks_main.main()
