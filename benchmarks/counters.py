"""``python -m benchmarks counters``: does ``profile`` name the bound that the GPU's own counters name?

Every operation runs once under Nsight Compute (``ncu``), in one process for all, at its usual shape in bfloat16, after a call
that compiled it. The counters are read by replays of each kernel with empty caches: they stand beside ``profile``'s cold time.
Of an operation that launches several kernels a counter is the mean over them, weighed by their durations.

ncu's bound is the largest of these shares, each the largest of its counters that this ncu knows (``COUNTERS``):

    memory               what DRAM moves, of its peak
    tensor               clocks in which the tensor cores are at work
    instruction issue    clocks in which a scheduler issues, or in which a pipe of the ordinary cores is full
    L2, L1               what L2 moves, and L1 with shared memory; ``profile`` has no such limit, so it disagrees where one leads
    launch               the duration of an empty kernel, once a launch, over the operation's

and latency where the largest is below 60%: below that ``profile`` says so, and Nsight Compute's own advice as well. ``profile``
reads no counter; its shares are of times. After the table stands the speed of its copy beside that of torch's ``copy_``.
"""

import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import harness
from nbkernels.launch import memory
from nbkernels.launch.compile import cubin
from nbkernels.launch.device import DeviceError, cuda_device, device
from nbkernels.launch.launcher import Plan, check, launch
from nbkernels.launch.replay import Note, noted
from nbkernels.profiling import timing
from nbkernels.profiling.operations import DTYPES, OPERATIONS, DeviceMaker, operation
from nbkernels.profiling.profile import EXPLAINED, profile_operation

DTYPE = "bfloat16"
EMPTY = "nothing"  # what the child calls the empty kernel, by which launches are judged
WANTED = 10  # kernels whose bound is to be the same
TRIES = 8  # of ncu, each without the counters that the one before did not know
COPY_BYTES = (1 << 30, 2 << 30)
COPY_ROUNDS = 5

_OF_PEAK = ".avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"
REGISTERS, WARPS, WAVES = (
    "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__waves_per_multiprocessor",
)
# what a share is the largest of: names differ between architectures and versions of ncu
COUNTERS = {
    "memory": tuple(name + _OF_PEAK for name in ("dram__throughput", "gpu__dram_throughput")),
    "tensor": tuple(
        name + _OF_PEAK
        for name in (
            "sm__pipe_tensor_cycles_active",
            "sm__pipe_tensor_op_hmma_cycles_active",
            "sm__pipe_tensor_op_imma_cycles_active",
            "sm__inst_executed_pipe_tensor",
            "sm__inst_executed_pipe_tensor_op_gmma",
        )
    ),
    "instruction issue": tuple(
        name + _OF_PEAK
        for name in (
            "sm__inst_issued",
            "smsp__issue_active",
            "sm__inst_executed_pipe_alu",
            "sm__inst_executed_pipe_fma",
            "sm__inst_executed_pipe_xu",
            "sm__inst_executed_pipe_lsu",
        )
    ),
    "L2": ("lts__throughput" + _OF_PEAK,),
    "L1": ("l1tex__throughput" + _OF_PEAK,),
}
METRICS = (DURATION, REGISTERS, WARPS, WAVES, *(name for names in COUNTERS.values() for name in names))
_MICROSECONDS = {
    "n": 1e-3,
    "u": 1.0,
    "µ": 1.0,
    "m": 1e3,
    "s": 1e6,
}  # by the first letter: ns, nsecond, us, msecond, second


class NcuError(Exception):
    """ncu is not there, or does not read the counters; the text says what to do."""


@dataclass(frozen=True)
class Seen:
    """What ncu says of an operation. shares: as the module's text lists them; deciding: the counter behind each of them."""

    microseconds: float
    kernels: tuple
    shares: dict
    deciding: dict
    bound: str
    registers: float | None
    warps_active: float | None
    waves: float | None


# ---- what ncu writes -----------------------------------------------------------------------------------------------------


def parsed(text):
    """Rows of ``ncu --csv --page raw``: [{"kernel": name, counter: number}], durations in microseconds; "n/a" is left out.

    Lines of ncu's own around the table are passed over; a table may begin anew, with other columns.
    """
    rows, header, units = [], None, None
    for cells in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if cells[0] == "ID":
            header, units = cells, None
        elif header is None or len(cells) != len(header):
            continue
        elif units is None:
            units = dict(zip(header, cells, strict=True))
        else:
            row = {}
            for name, cell in zip(header, cells, strict=True):
                number = _number(cell)
                if name == "Kernel Name":
                    row["kernel"] = cell.partition("(")[0].split(" ")[-1]
                elif number is not None:
                    row[name] = number * _microseconds(units[name]) if name == DURATION else number
            rows.append(row)
    return rows


def _microseconds(unit):
    if unit[:1] not in _MICROSECONDS:
        raise NcuError(f"{DURATION} is in {unit!r}, wanted nanoseconds to seconds")
    return _MICROSECONDS[unit[:1]]


def _number(cell):
    try:
        return float(cell.replace(",", ""))  # 1,234.5
    except ValueError:
        return None


def by_operation(rows, called):
    """{operation: its rows}. called: [(operation, kernels that it launched)], in order.

    Kernels that are none of ours are passed over. NcuError where one of ours is missing.
    """
    rest, found = iter(rows), {}
    for name, kernels in called:
        found[name] = []
        for kernel in kernels:
            row = next((row for row in rest if row["kernel"] == kernel), None)
            if row is None:
                raise NcuError(f"ncu saw no {kernel} of {name}, which was launched")
            found[name].append(row)
    return found


def weighed(rows, counter):
    """A counter's mean over kernels by their durations; None where one of them lacks it."""
    if any(counter not in row for row in rows):
        return None
    return sum(row[counter] * row[DURATION] for row in rows) / sum(row[DURATION] for row in rows)


def judged(rows, empty_microseconds):
    """What ncu says of one operation's kernels, as Seen, by the rules above. empty_microseconds: of an empty kernel, by ncu."""
    microseconds = sum(row[DURATION] for row in rows)
    shares = {"launch": len(rows) * empty_microseconds / microseconds}
    deciding = {"launch": DURATION}
    for name, counters in COUNTERS.items():
        known = {counter: value for counter in counters if (value := weighed(rows, counter)) is not None}
        if known:
            deciding[name] = max(known, key=known.get)
            shares[name] = known[deciding[name]] / 100
    bound = max(shares, key=shares.get)
    longest = max(rows, key=lambda row: row[DURATION])
    return Seen(
        microseconds,
        tuple(row["kernel"] for row in rows),
        shares,
        deciding,
        bound if shares[bound] >= EXPLAINED else "latency",
        longest.get(REGISTERS),
        longest.get(WARPS),
        longest.get(WAVES),
    )


# ---- running ncu ---------------------------------------------------------------------------------------------------------


def ncu_path():
    """Where ncu is: on PATH or with the CUDA toolkit. NcuError."""
    found = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if found is None:
        raise NcuError(
            "ncu is not on PATH: install Nsight Compute (it comes with the CUDA toolkit), or add its folder to PATH"
        )
    return found


def known_metrics(listed):
    """The counters of METRICS that ``ncu --query-metrics`` lists, by their names without a suffix.

    Those that describe the launch are in no such list; of a share none of whose counters are listed all are asked for.
    """
    names = set(re.findall(r'^ *"?(\w+__\w+)', listed, re.MULTILINE))
    chosen = [DURATION, REGISTERS, WARPS, WAVES]
    for counters in COUNTERS.values():
        chosen += [counter for counter in counters if counter.partition(".")[0] in names] or counters
    return tuple(chosen)


def command(ncu, metrics, log, called, names):
    """The arguments that run the operations under ncu: log takes its CSV, called what the child launched."""
    return [
        ncu,
        *("--profile-from-start", "off"),  # the child says which calls
        *("--clock-control", "none"),  # at the clocks at which profile measures
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--log-file", str(log)),
        *("--metrics", ",".join(metrics)),
        *(sys.executable, "-m", "benchmarks.counters", str(called), *names),
    ]


def trouble(log, output):
    """What is to be done about a run of ncu that failed, by what it wrote."""
    text = f"{log}\n{output}"
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver's module with "
            "NVreg_RestrictProfilingToAdminUsers=0; in a container, it needs the capability SYS_ADMIN"
        )
    lines = [line for line in text.splitlines() if "==ERROR==" in line] or text.strip().splitlines()
    return f"ncu failed: {' / '.join(lines[-3:]) or 'it wrote nothing'}"


def refused(text, metrics):
    """Those of the metrics that an error of ncu names, in what it wrote."""
    errors = " ".join(line for line in text.splitlines() if "error" in line.lower())
    named = {name.rstrip(".") for name in re.findall(r"\w+__[\w.]+", errors)}
    return [metric for metric in metrics if named & {metric, metric.partition(".")[0]}]


def read_counters(names, run=subprocess.run):
    """({operation: Seen}, metrics that this ncu does not know) of operations by name.

    run: in place of ``subprocess.run``, for tests. NcuError.
    """
    ncu = ncu_path()
    metrics = known_metrics(run([ncu, "--query-metrics"], capture_output=True, text=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        log, called = Path(folder) / "log.csv", Path(folder) / "called.json"
        for _ in range(TRIES):
            log.write_text("")
            arguments = command(ncu, metrics, log, called, [EMPTY, *names])
            done = run(arguments, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=_environment())
            text, output = log.read_text(), f"{done.stdout}\n{done.stderr}"
            rows = parsed(text)
            unknown = refused(f"{text}\n{output}", metrics)
            if (rows and not done.returncode) or not unknown:
                break
            metrics = tuple(metric for metric in metrics if metric not in unknown)
        if done.returncode or not rows or not called.exists():
            raise NcuError(trouble(text, output))
        found = by_operation(rows, json.loads(called.read_text()))
    if any(DURATION not in row for own in found.values() for row in own):
        raise NcuError(f"ncu gave no {DURATION}, by which all others are weighed")
    (empty,) = found.pop(EMPTY)
    missing = [metric for metric in METRICS if not any(metric in row for row in rows)]
    return {name: judged(own, empty[DURATION]) for name, own in found.items()}, missing


def _environment():
    """This process's, with this checkout in front."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def under_ncu(called, names):
    """The child: call each operation once with the profiler on, and write to a file which kernels it launched."""
    from cuda.bindings import driver

    done = []
    with device("cuda") as on:
        for name in names:
            if name == EMPTY:
                plan = Plan(timing.nothing_kernel, (), (1, 1, 1), (32, 1, 1))
                call, args, kwargs = (lambda: launch(plan, (), on)), (), {}  # noqa: B023 (called in this turn)
            else:
                entry = operation(name)
                call, (args, kwargs) = entry.call, entry.make(DeviceMaker(DTYPES[DTYPE]), *entry.usual)
            call(*args, **kwargs)  # compiles
            memory.wait_for(0)
            check(driver.cuProfilerStart())
            with noted(Note()) as note:
                call(*args, **kwargs)
            memory.wait_for(0)
            check(driver.cuProfilerStop())
            launched = [
                cubin(plan.factory, plan.constants, on.arch, kernel.early)[1] for kernel, plan, _ in note.launches
            ]
            done.append((name, launched))
    Path(called).write_text(json.dumps(done))


# ---- the copy ------------------------------------------------------------------------------------------------------------


def copies():
    """[{"bytes", "torch", "ratio"}]: torch's speed of copying so many bytes, and that which profile measures over it.

    Both in bytes a second, read and written; measured in turns. None without torch.
    """
    torch = harness.torch
    if torch is None or not torch.cuda.is_available():
        return None
    samples, speeds = [], {size: [] for size in COPY_BYTES}
    with device("cuda"):
        ours = timing.prepared_copy()
        for _ in range(COPY_ROUNDS):
            samples.append(ours())
            for size in COPY_BYTES:
                source = torch.ones(size, dtype=torch.uint8, device="cuda")
                target = torch.empty_like(source)
                speeds[size].append(2 * size / (harness.time_copies([(source, target)] * 5, 10) * 1e-6))
    own = statistics.median(samples)
    return [
        {"bytes": size, "ours": own, "torch": statistics.median(values), "ratio": own / statistics.median(values)}
        for size, values in speeds.items()
    ]


# ---- the comparison ------------------------------------------------------------------------------------------------------


def compared(profile, seen):
    """A row of the outcome, of a Profile and what ncu saw."""
    launches = [asdict(launch) for launch in profile.launches]
    kept = ("kernel", "grid", "block", "registers", "occupancy", "limited_by", "waves", "warp_instructions")
    return {
        "operation": profile.name,
        "arguments": profile.arguments,
        "profile": {
            "bound": profile.bound,
            "microseconds": profile.cold.microseconds,
            "shares": {name: profile.share(name) for name in profile.limits},
            "launches": [{key: launch[key] for key in kept} for launch in launches],
        },
        "ncu": asdict(seen),
        "agree": profile.bound == seen.bound,
    }


def printed(rows, console=None):
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    names = ("memory", "tensor", "instruction issue", "L2", "L1", "launch")
    table = Table(caption="two figures a cell: profile's / ncu's; shares and occupancy in %", caption_justify="left")
    for column in ("operation", "kernels", "bound by profile", "by ncu", "", "ncu's largest counter"):
        table.add_column(column)
    for column in ("µs", "registers", "occupancy", *names):
        table.add_column(column, justify="right")
    for row in rows:
        own, seen = row["profile"], row["ncu"]
        first = own["launches"][0] if len(own["launches"]) == 1 else {}  # of several they would be another's
        largest = max(seen["shares"], key=seen["shares"].get)
        table.add_row(
            row["operation"],
            ", ".join(seen["kernels"]),
            own["bound"],
            seen["bound"],
            "agree" if row["agree"] else "DIFFER",
            f"{seen['deciding'][largest].partition('.')[0]} {_percent(seen['shares'][largest])}",
            f"{own['microseconds']:.1f} / {seen['microseconds']:.1f}",
            f"{_figure(first.get('registers'))} / {_figure(seen['registers'])}",
            f"{_percent(first.get('occupancy'))} / {_figure(seen['warps_active'])}",
            *(f"{_percent(own['shares'].get(name))} / {_percent(seen['shares'].get(name))}" for name in names),
        )
    (console or Console(width=240, highlight=False)).print(table)


def _percent(share):
    return "-" if share is None else f"{100 * share:.0f}"


def _figure(number):
    return "-" if number is None else f"{number:.0f}"


def run(keep, options):
    """Compare and print; keep takes the outcome. Exits with a line where there is no GPU or ncu does not read."""
    names = [name for name in OPERATIONS if options.match in name]
    try:
        if not names:
            raise ValueError(f"--match: no operation holds {options.match!r}")
        cuda_device()
        seen, missing = read_counters(names)
    except (ValueError, DeviceError, NcuError) as error:
        sys.exit(f"benchmarks counters: {error}")
    if missing:
        print(f"counters that this ncu does not give: {', '.join(missing)}")
    rows = []
    for name in names:
        rows.append(compared(profile_operation(name, dtype=DTYPE, peers=False), seen[name]))
        own = rows[-1]
        print(f"{name}: profile {own['profile']['bound']}, ncu {own['ncu']['bound']}", flush=True)
    printed(rows)
    agree = sum(row["agree"] for row in rows)
    kernels = {row["ncu"]["kernels"] for row in rows if row["agree"]}
    print(
        f"profile names the bound that ncu's counters name for {agree} of {len(rows)} operations, "
        f"of {len(kernels)} different kernels (wanted: {WANTED})"
    )
    speeds = copies()
    for one in speeds or ():
        print(
            f"copy: profile's {one['ours'] / 1e12:.3f} TB/s, torch's copy_ of {one['bytes'] >> 30} GiB "
            f"{one['torch'] / 1e12:.3f} TB/s: {one['ratio']:.3f} times"
        )
    if speeds is None:
        print("torch is not installed, or has no CUDA: its copy was not timed")
    keep(
        {
            "agree": agree,
            "agreeing_kernels": len(kernels),
            "missing_counters": missing,
            "operations": rows,
            "copy": speeds,
        }
    )


if __name__ == "__main__":
    under_ncu(sys.argv[1], sys.argv[2:])
