"""How a benchmark is timed, printed and kept.

A case is a row: an operation on one shape, the bytes and FLOPs it must do, our call and the peers' calls. Each call is captured
into a CUDA graph that runs it once on every set of a ring of inputs that together exceed the L2 cache several times, so
that neither launch cost nor a warm cache is in the figure; the median replay is divided by the number of sets.
"""

import json
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata

from nbkernels.launch.device import current

try:
    import torch
except ImportError:  # on the CPU there is nothing that needs it
    torch = None

RING_BYTES = 512 * 2**20  # several times the 60 MB L2 of an H200
REPLAYS = 20


@dataclass
class Case:
    """One row. calls: name -> function of one input set; "nbkernels" is ours. make: a fresh input set."""

    operation: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    make: object
    calls: dict
    copied: bool = False  # time a copy of as many bytes as well


@dataclass
class Result:
    """The microseconds of one call by name, and what they mean."""

    operation: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    microseconds: dict = field(default_factory=dict)
    copy_microseconds: float | None = None

    @property
    def best_peer(self):
        """(name, microseconds) of the fastest call that is not ours, or None; a second way of ours is named "nbkernels, …"."""
        peers = {k: v for k, v in self.microseconds.items() if not k.startswith("nbkernels")}
        return min(peers.items(), key=lambda item: item[1]) if peers else None


def time_call(function, inputs):
    """Median microseconds of one call, over replays of a graph that calls it once an input set."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for one in inputs:
                function(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for one in inputs:
            function(one)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return statistics.median(times)


def time_copy(nbytes):
    """Median microseconds of a device-to-device copy that reads and writes ``nbytes`` together, from memory to memory."""
    size = max(16, nbytes // 2)
    sets = max(2, min(64, RING_BYTES // max(nbytes, 1)))
    pairs = [tuple(torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)) for _ in range(sets)]
    return time_copies(pairs, 5)


def time_copies(pairs, rounds):
    """Median microseconds of a copy, over rounds that copy every (source, target) once.

    By launches and not by a graph, whose copy nodes go through another engine and are slower.
    """
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the launches queue up behind it
        start.record()
        for source, target in pairs:
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(pairs))
    return statistics.median(times)


def run_case(case, without=()):
    """Time every call of a case but those of the peers named; a peer that fails is left out and said so."""
    sets = max(2, min(64, -(-RING_BYTES // max(case.bytes, 1))))
    inputs = [case.make() for _ in range(sets)]
    result = Result(case.operation, case.shape, case.dtype, case.bytes, case.flops)
    if case.copied:
        result.copy_microseconds = time_copy(case.bytes)
    for name, function in case.calls.items():
        if name in without:
            continue
        try:
            result.microseconds[name] = time_call(function, inputs)
        except Exception as error:
            if name == "nbkernels":
                raise
            print(f"{case.operation} {case.shape}: {name} failed: {error}", file=sys.stderr)
    return result


def in_short(result):
    """A line of a result, printed as soon as it is there."""
    ours, peer = result.microseconds["nbkernels"], result.best_peer
    parts = [f"{result.operation} {result.shape} {result.dtype}: {ours:.1f} µs"]
    if result.copy_microseconds:
        parts.append(f"{result.copy_microseconds / ours:.0%} of its own copy's speed")
    if peer:
        parts.append(f"{peer[1] / ours:.2f} times {peer[0]}")
    return ", ".join(parts)


def copy_speed():
    """Bytes a second, read and written, of a large device-to-device copy: the ceiling of the memory-bound operations."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_copies([(source, target)] * 5, 10) * 1e-6)


def environment(command):
    """What a figure was measured on."""
    versions = {}
    for name in ("nbkernels", "numba", "numba-cuda", "cuda-core", "llvmlite", "numpy", "torch", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "device": current().name,
        "driver": _driver_version(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
        "command": command,
    }


def _driver_version():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def report(results, copy_bytes_a_second, path, command):
    """Print the table and, where a path is given, write the JSON."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"copy: {copy_bytes_a_second / 1e12:.2f} TB/s", title_justify="left")
    for column in ("operation", "shape", "dtype"):
        table.add_column(column)
    for column in ("µs", "TB/s", "of copy", "of own copy", "TFLOP/s", "best peer", "peer µs", "speedup"):
        table.add_column(column, justify="right")
    for r in results:
        ours = r.microseconds["nbkernels"]
        speed = r.bytes / (ours * 1e-6)
        peer = r.best_peer
        table.add_row(
            r.operation,
            r.shape,
            r.dtype,
            f"{ours:.1f}",
            f"{speed / 1e12:.2f}",
            f"{speed / copy_bytes_a_second:.0%}",
            f"{r.copy_microseconds / ours:.0%}" if r.copy_microseconds else "",
            f"{r.flops / (ours * 1e-6) / 1e12:.1f}",
            peer[0] if peer else "",
            f"{peer[1]:.1f}" if peer else "",
            f"{peer[1] / ours:.2f}" if peer else "",
        )
    Console(width=140).print(table)
    keep(path, command, {"copy_bytes_a_second": copy_bytes_a_second, "results": [asdict(r) for r in results]})


def keep(path, command, figures):
    """Write figures as JSON, with what they were measured on; nothing where there is no path."""
    if path:
        with open(path, "w") as file:
            json.dump({**environment(command), **figures}, file, indent=1)
            file.write("\n")
