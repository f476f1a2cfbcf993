"""Tuning: candidates have the same bits, losers are stopped, and what is kept on disk stands up to processes and damage."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from compare import random, to_device, to_host

import nbkernels as nbk
from nbkernels.cli import main
from nbkernels.kernels import matmul_tiles
from nbkernels.launch import emulated, tuning
from nbkernels.launch.device import Device, use
from nbkernels.launch.launcher import Plan
from nbkernels.profiling import tune as tuner
from nbkernels.profiling.cards import published
from nbkernels.profiling.operations import DTYPES, DeviceMaker, operation
from nbkernels.profiling.timing import Timing
from nbkernels.profiling.tune import Choice, race, summary, tune

GPU = Device("cuda", "NVIDIA Test 1", "sm_80", 4, 163 * 1024, 2**34)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Results of a driver of CUDA 13.0, in a folder of their own."""
    monkeypatch.setattr(tuning, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(tuning, "driver_version", lambda: (13, 0))
    tuning._kept.cache_clear()
    yield tmp_path
    tuning._kept.cache_clear()


def plan(number):
    return Plan(matmul_tiles.matmul_tiles_kernel, (number,), (1, 1, 1), (32, 1, 1))


# ---- the choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", ["dense", None, 32])
def test_all_candidates_give_the_same_bits(group_size):
    x = random((70, 96), np.float16, 0)
    with nbk.device("emulator", arch="sm_80"):
        weight = to_device(random((72, 96), np.float16, 1))
        operation = nbk.matmul
        if group_size != "dense":
            weight, operation = nbk.quantize_int8(weight, group_size=group_size), nbk.int8_matmul
        x = to_device(x)
        # 4 multiprocessors: few tiles, but not so few that matmul_narrow is taken
        with tuning.asked() as questions:
            want = to_host(operation(x, weight))
        ((question, candidates),) = questions.items()
        assert question[0] == "70x72x96" and question[1] in candidates
        assert len({c.constants for c in candidates}) == len(candidates) >= 8
        for candidate in candidates[-6::5]:  # another tile and other stages; a kernel takes seconds to compile
            with tuning.forced({question: candidate}), emulated.observed() as launched:
                got = to_host(operation(x, weight))
            assert launched == [candidate]
            np.testing.assert_array_equal(got, want)


def test_candidates_fit_into_shared_memory():
    options = 300, 300, np.dtype(np.float16), "dense", 0, True, True, None
    for limit in (99 * 1024, 163 * 1024):
        found = matmul_tiles.candidates(*options, limit)
        assert found and all(c.shared_bytes <= limit for c in found)
    assert len(matmul_tiles.candidates(*options, 99 * 1024)) > len(matmul_tiles.candidates(*options, 48 * 1024))


def test_what_was_kept_is_taken_on_that_gpu_alone():
    one, two = plan(1), plan(2)

    def chosen(call="call", heuristic=one, device=GPU, candidates=(one, two)):
        return tuning.choose(call, heuristic, lambda: candidates, device)

    assert chosen() == one
    tuning.keep(GPU.name, "call", one, two, {"microseconds": 3.0})
    assert chosen() == two
    assert chosen(call="another") == one
    assert chosen(heuristic=plan(3)) == plan(3)
    assert chosen(device=replace(GPU, name="NVIDIA Test 2")) == one
    assert chosen(device=replace(GPU, kind="emulator")) == one
    assert chosen(candidates=(one,)) == one, "a plan that is no candidate any more"


def test_an_edited_source_is_another_kernel(monkeypatch):
    one, two = plan(1), plan(2)
    tuning.keep(GPU.name, "call", one, two, {})
    monkeypatch.setattr(tuning, "source_digest", lambda module: "edited")
    assert tuning.choose("call", one, lambda: [one, two], GPU) == one


def test_another_driver_has_a_file_of_its_own(monkeypatch):
    before = tuning.results_path(GPU.name)
    monkeypatch.setattr(tuning, "driver_version", lambda: (13, 1))
    assert tuning.results_path(GPU.name) != before


# ---- the file ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "edited", "empty", "list", "gone"])
def test_a_damaged_file_counts_as_not_there(damage):
    one, two = plan(1), plan(2)
    tuning.keep(GPU.name, "call", one, two, {})
    path = tuning.results_path(GPU.name)
    text = path.read_text()
    if damage == "gone":
        path.unlink()
    else:
        path.write_text({"cut": text[:-20], "edited": text.replace("(2)", "(1)"), "empty": "", "list": "[1]"}[damage])
    tuning._kept.cache_clear()
    assert tuning.read(path) == {}
    assert tuning.choose("call", one, lambda: [one, two], GPU) == one
    tuning.keep(GPU.name, "call", one, two, {})  # and it is made anew
    assert tuning.choose("call", one, lambda: [one, two], GPU) == two


WRITER = """
import sys
from pathlib import Path
from nbkernels.launch import tuning
from nbkernels.launch.launcher import Plan
from nbkernels.kernels.matmul_tiles import matmul_tiles_kernel
tuning.cache_folder = lambda: Path(sys.argv[1])
tuning.driver_version = lambda: (13, 0)
tuning.source_digest = lambda module: "same"
plan = Plan(matmul_tiles_kernel, (1,), (1, 1, 1), (32, 1, 1))
for turn in range(20):
    tuning.keep("NVIDIA Test 1", f"{sys.argv[2]} {turn}", plan, plan, {})
"""


def test_processes_that_write_at_once_lose_nothing(folder):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(n)]) for n in range(3)]
    path = tuning.results_path(GPU.name)
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = json.loads(path.read_text())  # whole at every moment
            assert len(content["choices"]) >= seen
            seen = len(content["choices"])
    assert all(writer.returncode == 0 for writer in writers)
    assert len(tuning.read(path)) == 60
    assert {p.suffix for p in path.parent.iterdir()} == {".json", ".lock"}, "nothing is left behind"


def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setattr(tuning, "cache_folder", lambda: folder / "file")
    with pytest.raises(OSError):
        tuning.keep(GPU.name, "call", plan(1), plan(2), {})
    assert tuning.choose("call", plan(1), lambda: [plan(2)], GPU) == plan(1)


# ---- measuring -----------------------------------------------------------------------------------------------------------


def clock(seed, times, noise=0.01):
    """time(candidate): five samples around its time; counts how often each was asked."""
    generator, asked = np.random.default_rng(seed), {}

    def time(candidate):
        asked[candidate] = asked.get(candidate, 0) + 1
        return (times[candidate] * (1 + noise * generator.standard_normal(5))).tolist()

    return time, asked


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_wins_and_losers_are_stopped(seed):
    time, asked = clock(seed, {"heuristic": 10.0, "slow": 20.0, "fast": 8.0, "close": 8.1})
    best, timings, stopped = race(["heuristic", "slow", "fast", "close"], time)
    assert best in ("fast", "close") and asked["slow"] == 1 and asked["heuristic"] == asked[best] == 4
    assert stopped >= 1 and "slow" not in timings and timings["heuristic"].microseconds == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_within_the_noise_does_not_replace_the_heuristic(seed):
    time, _ = clock(seed, {"heuristic": 10.0, "same": 9.99})
    assert race(["heuristic", "same"], time)[0] == "heuristic"


def test_a_choice_is_measured_and_kept():
    def prepare(call, args, kwargs):
        with emulated.planned() as planned:
            call(*args, **kwargs)
        stages = planned[0][0].constants[-2]
        return lambda replays: Timing.of([5.0 if stages == 5 else 10.0] * replays)

    on = Device("emulator", "emulator", "sm_80")
    (choice,) = tune("matmul", shape=(70, 72, 96), dtype="float16", on=on, prepare=prepare)
    assert choice.best.constants[-2] == 5 and choice.gain == 0.5 and choice.stopped >= 3
    (entry,) = tuning.read(tuning.results_path("emulator (sm_80)")).values()
    assert entry["plan"] == tuning.described(choice.best) and entry["heuristic_microseconds"] == 10.0
    with pytest.raises(ValueError, match="nothing to choose"):
        list(tune("softmax", shape=(4, 64), on=on, prepare=prepare))


def measured(call, heuristic, best):
    """A Choice whose plans took so many microseconds."""
    return Choice(call, plan(1), Timing.of([heuristic]), plan(2), Timing.of([best]), 12, 3)


def test_the_command_ends_with_the_heuristic_s_distance(monkeypatch, capsys):
    choices = [measured("near", 10.0, 10.0), measured("far", 11.0, 8.8), measured("half", 9.68, 8.8)]
    assert [choice.ratio for choice in choices] == pytest.approx([1, 1.25, 1.1])
    monkeypatch.setattr(tuner, "tune", lambda *names, **options: iter(choices))
    assert main(["tune"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "far: 8.80 µs" in lines[1] and "took 1.250 times as long" in lines[1]
    # (1 · 1.25 · 1.1)^(1/3)
    assert lines[-1] == summary(choices) and "1.112 times as long" in lines[-1] and "geometric mean of 3" in lines[-1]
    assert lines[-1].endswith("at worst 1.250 times, at far")


def test_an_h200_has_something_to_choose_among_the_usual_shapes():
    with use(published("H200").device()), emulated.planned(0, 0):
        for name, shapes in tuner.SHAPES.items():
            found = 0
            for shape in shapes:
                args, kwargs = operation(name).make(DeviceMaker(DTYPES["bfloat16"]), *shape)
                with tuning.asked() as questions:
                    operation(name).call(*args, **kwargs)
                found += len(questions)
            assert found >= 4, name


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["matmull"], "did you mean matmul"),
        (["--shape", "3x4x5"], "one operation"),
        (["matmul", "--dtype", "int2"], "dtype"),
        (["matmul", "--shape", "3"], "shape: 3, wanted"),
    ],
)
def test_errors_are_one_line(arguments, said, capsys):
    assert main(["tune", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
