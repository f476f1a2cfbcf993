"""How fast the emulator is: nanoseconds an instruction and lane, and milliseconds an operation, with its checks on and off.

    python -m benchmarks emulator

Runs on the CPU. The second launch of each kernel is timed: the first one parses the PTX and binds the machine.
"""

import statistics
import time

import numpy as np

import nbkernels as nbk
from nbkernels.launch import emulated
from nbkernels.launch.memory import to_device

REPEATS = 5


def _normal(*shape):
    return to_device(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def cases():
    """Name -> a call without arguments, on arrays that are there already."""
    x, row = _normal(16, 4096), _normal(1, 576)
    weight = nbk.quantize_int8(_normal(1536, 576), group_size=32)
    left, right = _normal(64, 256), _normal(64, 256)
    q, k = _normal(1, 64, 4, 64), _normal(1, 64, 2, 64)
    return {
        "softmax 16×4096": lambda: nbk.softmax(x),
        "int8_matmul 1×1536×576": lambda: nbk.int8_matmul(row, weight),
        "matmul 64×64×256": lambda: nbk.matmul(left, right),
        "attention 64 tokens": lambda: nbk.attention(q, k, k, causal=True),
    }


def milliseconds(call):
    """The fastest of several runs behind a first one: what disturbs a CPU only ever adds."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), statistics.median(times)


def run(report, _options=None):
    """Measure and print; ``report(rows)`` keeps the figures."""
    from rich.console import Console
    from rich.table import Table

    rows = []
    with nbk.device("emulator", arch="sm_80"):
        machine = emulated.emulator()
        for name, call in cases().items():
            row = {"case": name}
            for checks in (False, True):
                machine.checks = checks
                machine.machines.clear()  # a kept machine has its checks built in
                row["ms_checked" if checks else "ms"], row["median_ms_checked" if checks else "median_ms"] = (
                    milliseconds(call)
                )
            with emulated.counted() as done:
                call()
            row["lane_instructions"] = sum(entry.total.lane_instructions for _, entry in done)
            rows.append(row)
    table = Table(title="emulator, float32, sm_80", title_justify="left")
    for column in ("case", "ms", "ms, checked", "lane instructions", "ns each", "ns each, checked"):
        table.add_column(column, justify="right")
    for row in rows:
        each = 1e6 / row["lane_instructions"]
        table.add_row(
            row["case"],
            f"{row['ms']:.1f}",
            f"{row['ms_checked']:.1f}",
            f"{row['lane_instructions']}",
            f"{row['ms'] * each:.1f}",
            f"{row['ms_checked'] * each:.1f}",
        )
    Console(width=110).print(table)
    report(rows)
