"""``benchmarks counters``: what is read of ncu's tables, which bound the counters name, what is said where ncu reads none."""

import json
import subprocess
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

import nbkernels as nbk
from benchmarks import __main__ as benchmarks_main
from benchmarks import counters
from benchmarks.counters import DURATION, NcuError, by_operation, judged, known_metrics, parsed, refused, weighed
from nbkernels.profiling.operations import OPERATIONS
from nbkernels.profiling.profile import profile_operation
from nbkernels.profiling.timing import Timing

PEAK = ".avg.pct_of_peak_sustained_elapsed"
DRAM, TENSOR, ISSUED = f"dram__throughput{PEAK}", f"sm__pipe_tensor_cycles_active{PEAK}", f"sm__inst_issued{PEAK}"


# the form of ncu's raw page as CSV: lines of its own, the names, the units, a line a kernel
def line(*cells):
    return ",".join(f'"{cell}"' for cell in cells) + "\n"


_NAMES = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "CC",
)
_PROCESS = ("4711", "python3.12", "127.0.0.1")
TABLE = (
    "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n"
    '==PROF== Profiling "softmax": 0%....50%....100% - 6 passes\n'
    "==PROF== Disconnected from process 4711\n"
    + line(*_NAMES, DRAM, DURATION, counters.REGISTERS)
    + line(*[""] * len(_NAMES), "%", "ns", "register/thread")
    + line(0, *_PROCESS, "nothing", 1, 7, "(32, 1, 1)", "(1, 1, 1)", "9.0", "0.01", "1,504", "16")
    + line(1, *_PROCESS, "softmax", 1, 7, "(128, 1, 1)", "(16,384, 1, 1)", "9.0", "88.25", "68,512", "48")
    + line(2, *_PROCESS, "void fill<float>(float *, int)", 1, 7, "(32, 1, 1)", "(1, 1, 1)", "9.0", "n/a", "2,000", "12")
)


def test_a_table_is_read_with_its_separators():
    nothing, softmax, fill = parsed(TABLE)
    assert nothing["kernel"] == "nothing" and nothing[DURATION] == pytest.approx(1.504)
    assert softmax["kernel"] == "softmax" and softmax["launch__registers_per_thread"] == 48
    assert softmax[DRAM] == 88.25 and softmax[DURATION] == pytest.approx(68.512)
    assert fill["kernel"] == "fill<float>" and DRAM not in fill, "n/a is no number"


@pytest.mark.parametrize(
    "unit, microseconds",
    [("ns", 2.5), ("nsecond", 2.5), ("us", 2500), ("usecond", 2500), ("ms", 2.5e6), ("msecond", 2.5e6), ("s", 2.5e9)],
)
def test_durations_become_microseconds(unit, microseconds):
    (row,) = parsed(f'"ID","Kernel Name","{DURATION}"\n"","","{unit}"\n"0","k","2,500.0"\n')
    assert row[DURATION] == pytest.approx(microseconds)


def test_a_table_may_begin_anew_and_a_unit_must_be_a_time():
    again = f'"ID","Kernel Name","{DURATION}"\n"","","us"\n"3","gelu","40.5"\n"4","cut off'
    assert [row["kernel"] for row in parsed(TABLE + again)] == ["nothing", "softmax", "fill<float>", "gelu"]
    assert parsed(TABLE + again)[-1] == {"kernel": "gelu", "ID": 3, DURATION: 40.5}
    assert parsed("") == parsed("==PROF== nothing\n") == []
    with pytest.raises(NcuError, match="cycle"):
        parsed(f'"ID","Kernel Name","{DURATION}"\n"","","cycle"\n"0","k","2,500"\n')


def test_kernels_go_to_the_operations_that_launched_them():
    rows = [{"kernel": name, "n": n} for n, name in enumerate(["decode", "fill", "decode_merge", "softmax", "softmax"])]
    found = by_operation(
        rows, [("decode", ["decode", "decode_merge"]), ("one", ["softmax"]), ("none", []), ("two", ["softmax"])]
    )
    assert {name: [row["n"] for row in own] for name, own in found.items()} == {
        "decode": [0, 2], "one": [3], "none": [], "two": [4]
    }  # fmt: skip
    with pytest.raises(NcuError, match="no gelu of activation"):
        by_operation(rows, [("decode", ["decode"]), ("activation", ["gelu"])])


# ---- the rules -----------------------------------------------------------------------------------------------------------


def kernel(microseconds=50.0, name="kernel", **shares):
    """A row with the first counter of each share, in percent."""
    row = {"kernel": name, DURATION: microseconds}
    for share in counters.COUNTERS:
        row[counters.COUNTERS[share][0]] = shares.get(share.replace(" ", "_"), 5.0)
    return row


@pytest.mark.parametrize(
    "row, bound",
    [
        (kernel(memory=88.0, L2=70.0, L1=40.0), "memory"),
        (kernel(tensor=85.0, L1=70.0), "tensor"),
        (kernel(instruction_issue=75.0, memory=61.0), "instruction issue"),
        (kernel(memory=59.9, tensor=40.0), "latency"),
        (kernel(memory=60.0), "memory"),
        (kernel(L2=80.0, memory=65.0), "L2"),
        (kernel(L1=80.0, memory=65.0), "L1"),
        (kernel(2.0), "launch"),
        (kernel(3.0), "latency"),
        (kernel(2.0, memory=90.0), "memory"),
    ],
)
def test_the_largest_share_is_the_bound_from_60_percent_on(row, bound):
    assert judged([row], 1.5).bound == bound


def test_kernels_are_weighed_by_their_durations():
    rows = [kernel(30.0, "decode", memory=90.0), kernel(10.0, "decode_merge", memory=10.0)]
    seen = judged(rows, 1.0)
    assert seen.microseconds == 40 and seen.kernels == ("decode", "decode_merge")
    assert seen.shares["memory"] == pytest.approx((30 * 0.9 + 10 * 0.1) / 40) and seen.shares[
        "launch"
    ] == pytest.approx(2 / 40)
    assert seen.bound == "memory"
    del rows[1][DRAM]
    assert weighed(rows, DRAM) is None, "a counter that one of them lacks says nothing of both"


def test_a_share_is_the_largest_of_the_counters_that_are_known():
    row = kernel()
    row.pop(DRAM)
    row[f"gpu__dram_throughput{PEAK}"] = 77.0
    row[f"sm__inst_executed_pipe_alu{PEAK}"] = 71.0
    seen = judged([row], 1.0)
    assert seen.shares["memory"] == 0.77 and seen.deciding["memory"] == f"gpu__dram_throughput{PEAK}"
    assert seen.shares["instruction issue"] == 0.71 and seen.deciding["instruction issue"].startswith(
        "sm__inst_executed_pipe_alu"
    )
    row.pop(f"gpu__dram_throughput{PEAK}")
    assert "memory" not in judged([row], 1.0).shares


# ---- running ncu ---------------------------------------------------------------------------------------------------------

LISTED = """Device NVIDIA H200 (GH100)
--------------------------------- ----------- -------- -----------------------------
Metric Name                       Metric Type Metric Unit Metric Description
--------------------------------- ----------- -------- -----------------------------
dram__throughput                  Throughput  %        DRAM throughput
gpu__time_duration                Counter     ns       duration
sm__inst_issued                   Counter     inst     # of warp instructions issued
"""


def test_only_counters_that_ncu_lists_are_asked_for():
    for listed in (LISTED, LISTED.replace("dram__", '"dram__').replace("sm__inst", '"sm__inst')):
        asked = known_metrics(listed)
        assert {DRAM, ISSUED, DURATION, counters.REGISTERS, counters.WAVES} <= set(asked)
        assert f"gpu__dram_throughput{PEAK}" not in asked and f"smsp__issue_active{PEAK}" not in asked
        assert set(counters.COUNTERS["tensor"]) <= set(asked), "none of a share is listed: the list may be short"
    assert set(known_metrics("")) == set(counters.METRICS)
    assert len(counters.METRICS) == len(set(counters.METRICS))


def test_the_arguments_of_ncu_and_of_the_child():
    arguments = counters.command("ncu", (DURATION, DRAM), "log", "called", ["nothing", "softmax"])
    child = arguments.index("-m")
    own, program = arguments[: child - 1], arguments[child:]
    assert program == ["-m", "benchmarks.counters", "called", "nothing", "softmax"]
    assert own[0] == "ncu" and own[own.index("--metrics") + 1] == f"{DURATION},{DRAM}"
    for option, value in (
        ("--profile-from-start", "off"),
        ("--clock-control", "none"),
        ("--log-file", "log"),
        ("--page", "raw"),
    ):
        assert own[own.index(option) + 1] == value
    assert "--csv" in own and own[own.index("--print-units") + 1] == "base"


def test_metrics_that_an_error_names_are_dropped():
    text = f"==ERROR== Failed to find metric {DRAM}\n==PROF== {DURATION}\n==ERROR== unknown: sm__inst_issued."
    assert refused(text, (DURATION, DRAM, ISSUED)) == [DRAM, ISSUED]
    assert refused("==ERROR== Failed to profile", (DURATION, DRAM)) == []


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """An ncu on PATH; run(*answers) makes what stands in for subprocess.run: (what goes to the log, exit status) of each run."""
    path = tmp_path / "ncu"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = []

    def run(*answers, launched=(("nothing", ["nothing"]), ("softmax", ["softmax"])), listed=""):
        rest = iter(answers)

        def runs(arguments, **options):
            if "--query-metrics" in arguments:
                return SimpleNamespace(stdout=listed, stderr="", returncode=0)
            asked.append(arguments[arguments.index("--metrics") + 1].split(","))
            text, status = next(rest)
            with open(arguments[arguments.index("--log-file") + 1], "w") as file:
                file.write(text)
            with open(arguments[arguments.index("benchmarks.counters") + 1], "w") as file:
                json.dump(launched, file)
            return SimpleNamespace(stdout="", stderr="", returncode=status)

        return runs

    return SimpleNamespace(run=run, asked=asked)


def test_counters_are_read_again_without_those_that_ncu_does_not_know(ncu):
    error = f"==ERROR== Failed to find metric {TENSOR}\n"
    found, missing = counters.read_counters(["softmax"], ncu.run((error, 1), (TABLE, 0)))
    assert TENSOR in ncu.asked[0] and TENSOR not in ncu.asked[1] and len(ncu.asked[1]) == len(ncu.asked[0]) - 1
    assert set(found) == {"softmax"}
    seen = found["softmax"]
    assert seen.bound == "memory" and seen.shares["memory"] == 0.8825 and seen.registers == 48
    assert seen.shares["launch"] == pytest.approx(1.504 / 68.512)
    assert TENSOR in missing and DRAM not in missing and DURATION not in missing


@pytest.mark.parametrize(
    "answer, said",
    [
        (
            ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", 1),
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        (("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", 1), "LibraryNotLoaded"),
        (("==WARNING== No kernels were profiled.\n", 0), "No kernels were profiled"),
        (("", 1), "wrote nothing"),
        ((TABLE.replace("softmax", "gelu"), 0), "no softmax"),
        ((TABLE.replace(DURATION, "other"), 0), f"no {DURATION}"),
    ],
)
def test_an_ncu_that_does_not_read_is_told(ncu, answer, said):
    with pytest.raises(NcuError, match=said):
        counters.read_counters(["softmax"], ncu.run(answer))


def test_without_an_ncu(tmp_path, monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name, path=None: None)
    with pytest.raises(NcuError, match="install Nsight Compute"):
        counters.read_counters(["softmax"])


def test_the_child_calls_each_operation_once_with_the_profiler_on(tmp_path, monkeypatch):
    from cuda.bindings import driver

    done = []
    monkeypatch.setattr(driver, "cuProfilerStart", lambda: done.append("start") or (0,))
    monkeypatch.setattr(driver, "cuProfilerStop", lambda: done.append("stop") or (0,))
    monkeypatch.setattr(counters, "device", lambda kind: nbk.device("emulator"))
    monkeypatch.setattr(counters.memory, "wait_for", lambda stream: None)
    call = lambda *args, **kwargs: done.append(len(args))  # noqa: E731
    monkeypatch.setitem(OPERATIONS, "advance", replace(OPERATIONS["advance"], call=call))
    monkeypatch.setattr(counters, "launch", lambda plan, arguments, device: done.append(plan.factory.__name__))
    counters.under_ncu(tmp_path / "called", [counters.EMPTY, "advance"])
    assert done == ["nothing_kernel", "start", "nothing_kernel", "stop", 2, "start", 2, "stop"]
    assert json.loads((tmp_path / "called").read_text()) == [["nothing", []], ["advance", []]]


@pytest.mark.gpu
def test_the_child_tells_its_kernels(tmp_path):
    path = tmp_path / "called"
    arguments = counters.command("ncu", (), "log", path, [counters.EMPTY, "softmax", "decode"])
    child = arguments[arguments.index("-m") - 1 :]
    subprocess.run(child, check=True, cwd=counters.Path(counters.__file__).parents[1], env=counters._environment())
    told = dict(json.loads(path.read_text()))
    assert told["nothing"] == ["nothing"] and told["softmax"] == ["softmax"] and told["decode"]


# ---- the comparison ------------------------------------------------------------------------------------------------------


def fake_profile(name, microseconds, bound):
    """A Profile as on a GPU, of an operation that is planned for an H200."""
    planned = profile_operation(name, shape="x".join(map(str, OPERATIONS[name].small)), gpu="H200")
    return replace(planned, cold=Timing.of([microseconds]), bound=bound)


def test_the_outcome_is_counted_printed_and_kept(monkeypatch, capsys):
    seen = {"gelu": judged([kernel(memory=88.0)], 1.0), "advance": judged([kernel(2.0)], 1.5)}
    bounds = {"gelu": "memory", "advance": "latency"}
    monkeypatch.setattr(counters, "cuda_device", lambda: None)
    monkeypatch.setattr(counters, "OPERATIONS", dict.fromkeys(bounds))
    monkeypatch.setattr(
        counters, "read_counters", lambda names: ({name: seen[name] for name in names}, ["lost__counter"])
    )
    monkeypatch.setattr(counters, "profile_operation", lambda name, **options: fake_profile(name, 10.0, bounds[name]))
    copy = [{"bytes": 1 << 30, "ours": 4.2e12, "torch": 4.0e12, "ratio": 1.05}]
    monkeypatch.setattr(counters, "copies", lambda: copy)
    kept = []
    counters.run(kept.append, SimpleNamespace(match=""))
    out = capsys.readouterr().out
    assert "does not give: lost__counter" in out and "advance: profile latency, ncu launch" in out
    assert (
        "for 1 of 2 operations, of 1 different kernels" in out
        and "torch's copy_ of 1 GiB 4.000 TB/s: 1.050 times" in out
    )
    assert out.count("DIFFER") == 1 and "dram__throughput 88" in out
    ((outcome,),) = [kept]
    assert outcome["agree"] == 1 and outcome["copy"] == copy
    gelu, advance = json.loads(json.dumps(outcome["operations"]))
    assert gelu["agree"] and not advance["agree"] and gelu["profile"]["microseconds"] == 10
    assert gelu["ncu"] == json.loads(json.dumps(asdict(seen["gelu"])))
    assert gelu["profile"]["shares"]["memory"] > 0 and gelu["profile"]["launches"][0]["kernel"] == "gelu"


def test_errors_are_one_line_from_the_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", "counters", "--match", "nothing like it"])
    with pytest.raises(SystemExit, match="no operation holds"):
        benchmarks_main.main()

    def without(*_):
        raise NcuError("ncu is not on PATH")

    monkeypatch.setattr(counters, "cuda_device", lambda: None)
    monkeypatch.setattr(counters, "read_counters", without)
    monkeypatch.setattr("sys.argv", ["benchmarks", "counters"])
    with pytest.raises(SystemExit, match="benchmarks counters: ncu is not on PATH"):
        benchmarks_main.main()
