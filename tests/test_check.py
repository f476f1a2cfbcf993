"""The regression check, with made-up timers: what it catches, what it lets pass, and what it says of wrong files."""

import itertools
import json

import numpy as np
import pytest
from compare import to_device

import nbkernels as nbk
from benchmarks import __main__ as benchmarks_main
from benchmarks import check, harness, trial
from nbkernels.launch import emulated
from nbkernels.launch.launcher import launch
from nbkernels.profiling import timing
from nbkernels.profiling.operations import DTYPES, OPERATIONS, DeviceMaker, operation
from nbkernels.profiling.timing import Timing

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


# ---- the trial: slowdowns that are planted -------------------------------------------------------------------------------


def simulated(seed, by):
    """({name: Prepared}, copy, slow) as the trial takes them, with timers of 1% noise; slow makes a case slower by a share."""
    random = np.random.default_rng(seed)

    def noisy(value):
        return value * (1 + NOISE * random.standard_normal())

    def timer(microseconds):
        return lambda: Timing.of([noisy(microseconds)])

    prepared = {}
    for name, moved in CASES.items():
        ideal = moved / SPEED * 1e6
        prepared[name] = check.Prepared(
            None, (), {}, moved, {"nbkernels": timer(1.2 * ideal), "torch": timer(2 * ideal)}
        )
    return prepared, lambda: noisy(SPEED), lambda one: timer(1.2 * one.bytes / SPEED * 1e6 * (1 + by))


def simulate(by=0.05, kept=KEPT, seed=0):
    """A measure for ``trial.main``."""

    def measure(options):
        prepared, copy, slow = simulated(seed, by)
        names = list(itertools.islice(itertools.cycle(CASES), options.trial))
        for found in trial.rounds_of(prepared, names, copy, options.runs, slow):
            yield kept, *found

    return measure


def test_a_trial_counts_what_was_caught(tmp_path, capsys):
    path = tmp_path / "trial.json"
    assert check.main(["--trial", "20", "--json", str(path)], simulate()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21 and lines[0].startswith("1/20 case 0 by ") and "caught; no false alarm" in lines[0]
    kept = json.loads(path.read_text())
    assert kept["command"] == f"python -m benchmarks check --trial 20 --json {path}"
    assert kept["caught"] >= 19 and kept["false_alarms"] <= 1 and kept["cases"] == len(CASES) and kept["runs"] == 10
    assert lines[-1].startswith(
        f"{kept['caught']} of 20 planted slowdowns of 5% were caught; {kept['false_alarms']} of 20"
    )
    rounds = kept["rounds"]
    assert [one["case"] for one in rounds] == list(CASES)[:20]
    assert sum(one["caught"] for one in rounds) == kept["caught"]
    assert np.mean([one["slower"] for one in rounds]) == pytest.approx(0.05, abs=0.005)


def test_a_trial_of_nothing_catches_nothing(capsys):
    assert check.main(["--trial", "6"], simulate(by=0.0)) == 1
    out = capsys.readouterr().out
    assert out.count("MISSED") == 6 and "0 of 6 planted slowdowns of 5% were caught; 0 of 6 clean checks" in out


def test_a_trial_counts_false_alarms_by_check_and_not_by_case(capsys):
    faster = {case: {ratio: [1.06 * v for v in values] for ratio, values in of.items()} for case, of in KEPT.items()}
    assert (
        check.main(
            ["--trial", "3"], simulate(by=0.0, kept=KEPT | {"case 9": faster["case 9"], "case 8": faster["case 8"]})
        )
        == 1
    )
    out = capsys.readouterr().out
    assert out.count("FALSE ALARM: case 8: ") == 3 and out.count("; case 9: ") >= 3
    assert "0 of 3 planted" in out and "3 of 3 clean checks raised a false alarm" in out


def test_a_planted_case_counts_as_caught_by_its_own_name_alone():
    clean = samples(5)
    slowed = samples(6, "case 4")["case 4"]
    assert trial.judge(KEPT, "case 4", clean, slowed).caught
    others = KEPT | {"case 9": {ratio: [1.1 * v for v in values] for ratio, values in KEPT["case 9"].items()}}
    outcome = trial.judge(others, "case 4", clean, clean["case 4"])
    assert not outcome.caught and outcome.slower == 0 and len(outcome.alarms) >= 1


def test_the_slowed_copy_stands_behind_its_case_in_each_run():
    seen = []
    prepared = {
        name: check.Prepared(None, (), {}, 1e6, {"nbkernels": lambda name=name: seen.append(name) or Timing.of([2.0])})
        for name in "abc"
    }
    slow = lambda one: lambda: seen.append("slowed") or Timing.of([4.0])  # noqa: E731
    ((case, clean, slowed),) = trial.rounds_of(prepared, ["b"], lambda: 1e12, 2, slow)
    assert seen == ["a", "b", "slowed", "c"] * 2
    assert case == "b" and set(clean) == {"a", "b", "c"}
    assert clean["b"] == {"the copy": [0.5, 0.5]} and slowed == {"the copy": [0.25, 0.25]}


def test_every_operation_has_its_turn_before_the_second_shape_of_any():
    named = check.all_shapes("")
    names = trial.turns(named, 20)
    assert len(set(names)) == 20 and {name.split()[0] for name in names} == set(OPERATIONS)
    many = trial.turns(named, 2 * len(named))
    assert sorted(many) == sorted(2 * [name for name, _, _ in named])


@pytest.mark.parametrize("calls, microseconds", [(2, 65.0), (2, 700.0), (64, 1.5), (13, 12.0), (4, 5.0)])
def test_delays_are_spread_over_the_calls(calls, microseconds):
    delays = trial.delays_for(calls, microseconds)
    assert sum(trial.follows(index, calls, delays) for index in range(calls)) == delays
    room = 0.05 * calls * microseconds / delays
    assert delays == 1 or room >= trial.LEAST_DELAY
    assert delays == calls or room < 2 * trial.LEAST_DELAY


@pytest.mark.parametrize("usual, launch, want", [(65.0, 1.3, 0.05), (1.6, 0.03, 0.05), (12.0, 1.2, 0.1)])
def test_clocks_are_set_until_a_call_takes_5_percent_more(usual, launch, want):
    at = {}
    reached = trial.calibrate(
        lambda: usual,
        # a clock of 1.4 GHz where the device says 2
        lambda: usual + launch + at["clocks"] / 1400 / 4,
        lambda clocks: at.update(clocks=clocks),
        2000,
        4,
    )
    assert reached == pytest.approx(want, abs=0.002)
    assert (at["clocks"] == 0) == (want > 0.05), "a launch that takes more than 5% by itself is not made longer"


@pytest.mark.parametrize("clocks", [0, 500])
def test_the_delay_waits_for_its_clocks(clocks):
    with nbk.device("emulator", arch="sm_80") as on, emulated.planned(1, 10**6) as done:
        wanted = to_device(np.array([clocks], np.int64))
        launch(trial.DELAY, (wanted.pointer,), on, 0)
    ((_, report),) = done
    # the emulator's clock counts instructions; a turn of the loop is a few of them
    assert clocks <= report.total.warp_instructions <= clocks + 60


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "advance"])
def test_a_planted_slowdown_takes_its_time(name):
    entry = operation(name)
    with nbk.device("cuda"):
        args, kwargs = entry.make(DeviceMaker(DTYPES["bfloat16"]), *entry.usual)
        clean = timing.prepared(entry.call, args, kwargs)
        slowed = trial.slowed_timer(entry, args, kwargs, clean)
        ratios = [slowed().microseconds / clean().microseconds for _ in range(9)]
    assert np.median(ratios) == pytest.approx(1.05, abs=0.015)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--trial", "0"], "at least 1 round"),
        (["--trial", "2", "--record", "x.json"], "--json in place"),
        (["--json", "x.json"], "--trial"),
        (["--trial", "2", "--match", "nothing like it"], "no case holds"),
    ],
)
def test_a_trial_s_errors_are_one_line(arguments, said, capsys):
    assert check.main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
