"""``python -m benchmarks check --trial N``: how good the check is, by slowdowns that are planted and by checks of nothing.

First the kept results are measured, unless --against names a file of them. Then N rounds: each measures all cases as one check
does, and in the same loop, behind its own case, a slowed copy of one case, another each round, every operation before the second
shape of any. A round is two checks against the kept results, a clean one of all samples, and a planted one in which the slowed
samples stand in for those of their case: so that 2 N checks cost little more than N. Caught is a slowdown whose own case the
planted check names; a false alarm is a clean check that names anything.

What is planted is work on the device, in the captured graph and on its stream: a kernel of one thread that waits a number of
clocks. A launch alone takes a microsecond, which is more than 5% of a short call, so that a graph of several calls has as many of
them as leave each LEAST_DELAY, spread over the calls. The clocks lie in device memory and are set until a replay takes 5% more
than one without; what was reached is measured again by the round itself, and printed.

Exit status 1 where less than 95% of the planted slowdowns were caught, or more than 5% of the clean checks raised an alarm.
"""

import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import cycle, islice

import numpy as np
from numba import int64

from benchmarks import check, harness
from nbkernels import ptx
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.device import cuda_device, device
from nbkernels.launch.launcher import Plan, launch
from nbkernels.profiling import timing

BY = 0.05
NEAR = 0.002  # of a share: a calibration that is as close is done
CALIBRATIONS = 6
LEAST_DELAY = 3.0  # microseconds: an empty kernel takes 1 to 1.5 of them
CAUGHT, ALARMS = 0.95, 0.05  # shares of the rounds, at least and at most
SLOWED = "slowed"  # the name of the slowed copy among the cases


@ptx.instruction(int64(), "mov.u64 $0, %clock64;", effect="writes")
def clock():
    """Clocks of this multiprocessor since some moment."""


def delay_kernel():
    """Wait for clocks[0] clocks."""

    @kernel(launch_bounds=32)
    def delay(clocks: ptx.pointer("int64")):
        start = clock()
        wanted = clocks[0]
        while clock() - start < wanted:
            pass

    return delay


DELAY = Plan(delay_kernel, (), (1, 1, 1), (1, 1, 1))


@dataclass(frozen=True)
class Round:
    """One round's outcome. slower: how much slower the planted case was, measured; alarms: what the clean check named."""

    case: str
    slower: float
    caught: bool
    alarms: tuple

    def __str__(self):
        alarms = f"FALSE ALARM: {'; '.join(self.alarms)}" if self.alarms else "no false alarm"
        return f"{self.case} by {self.slower:.1%}: {'caught' if self.caught else 'MISSED'}; {alarms}"


def judge(kept, case, clean, slowed):
    """The Round of samples. kept, clean: as ``check.measure`` gives them; slowed: {ratio: values} of a case's slowed copy."""
    named = {found.case for found in check.compare(kept, {**clean, case: slowed})}
    pairs = zip(clean[case]["the copy"], slowed["the copy"], strict=True)
    slower = statistics.median(before / after for before, after in pairs) - 1
    return Round(case, slower, case in named, tuple(str(found) for found in check.compare(kept, clean)))


def turns(named, rounds):
    """The names of the cases that are slowed, one a round; named: as ``check.all_shapes``."""
    seen = Counter()
    order = []
    for name, entry, _ in named:
        order.append((seen[entry.name], name))
        seen[entry.name] += 1
    return list(islice(cycle(name for _, name in sorted(order, key=lambda pair: pair[0])), rounds))


def delays_for(calls, microseconds):
    """How many delays a graph of so many calls gets, each call taking so long: at most one a call, at least one in all."""
    return max(1, min(calls, int(BY * calls * microseconds / LEAST_DELAY)))


def follows(index, calls, delays):
    """Whether a delay stands behind the call of this index: ``delays`` of ``calls`` are true, evenly spread."""
    return (index + 1) * delays // calls > index * delays // calls


def calibrate(clean, slowed, set_clocks, clocks_a_microsecond, calls_a_delay):
    """Set the clocks until ``slowed()`` takes 1 + BY times as long as ``clean()``, microseconds a call; the share last reached.

    A launch that takes more than that by itself leaves them at 0.
    """
    clocks = 0
    for _ in range(CALIBRATIONS):
        set_clocks(clocks)
        usual, now = (
            statistics.median(values) for values in zip(*((clean(), slowed()) for _ in range(3)), strict=True)
        )
        reached = now / usual - 1
        more = (BY - reached) * usual * calls_a_delay * clocks_a_microsecond
        if abs(reached - BY) <= NEAR or clocks + more < 0:
            break
        clocks += round(more)
    return reached


def slowed_timer(entry, args, kwargs, clean):
    """A timer as ``timing.prepared`` gives, of the same call made slower by BY; clean: the call's own."""
    clocks = memory.to_device(np.zeros(1, np.int64))
    on, usual, calls = cuda_device(), clean().microseconds, 1

    def delayed(index, count):
        nonlocal calls
        calls = count
        if follows(index, count, delays_for(count, usual)):
            launch(DELAY, (clocks.pointer,), on, memory.current_stream())

    def set_clocks(number):
        memory.copy(clocks, memory.to_device(np.array([number], np.int64)))
        memory.wait_for(0)

    timer = timing.prepared(entry.call, args, kwargs, after=delayed)
    calibrate(
        lambda: clean().microseconds,
        lambda: timer().microseconds,
        set_clocks,
        timing.clock_hz() / 1e6,
        calls / delays_for(calls, usual),
    )
    return timer


def with_slowed(cases, case, slowed):
    """The cases of ``check.measure`` with the slowed copy behind its own: slowed is a function of microseconds by library."""
    ordered = {}
    for name, one in cases.items():
        ordered[name] = one
        if name == case:
            ordered[SLOWED] = (one[0], slowed)
    return ordered


def rounds_of(prepared, names, copy, runs, slow):
    """Yields (case, clean samples, slowed samples) of each name. prepared: {name: Prepared}; slow: Prepared -> slowed timer."""
    cases = {name: one.case() for name, one in prepared.items()}
    for name in names:
        one = prepared[name]
        timers = {**one.timers, "nbkernels": slow(one)}
        found = check.measure(with_slowed(cases, name, lambda t=timers: check.times(t)), copy, runs)
        slowed = found.pop(SLOWED)
        yield name, found, slowed


def verdict(outcomes):
    """(caught, false alarms) of Rounds."""
    return sum(one.caught for one in outcomes), sum(bool(one.alarms) for one in outcomes)


def main(options, command, measure=None):
    """Run the trial. Returns the exit status.

    measure: a function of the options that yields (kept, case, clean, slowed) of each round, in place of the GPU, for tests.
    """
    outcomes, began = [], time.monotonic()
    for number, (kept, case, clean, slowed) in enumerate((measure or _measure)(options), 1):
        outcomes.append(judge(kept, case, clean, slowed))
        print(f"{number}/{options.trial} {outcomes[-1]} [{time.monotonic() - began:.0f} s]", flush=True)
        caught, alarms = verdict(outcomes)
        figures = {"by": BY, "runs": options.runs, "against": options.against, "caught": caught, "false_alarms": alarms}
        figures |= {"cases": len(clean), "rounds": [asdict(one) for one in outcomes]}
        harness.keep(options.json, command, figures)  # after each round: a trial that is cut short has its rounds
    print(
        f"{caught} of {len(outcomes)} planted slowdowns of {BY:.0%} were caught; "
        f"{alarms} of {len(outcomes)} clean checks raised a false alarm"
    )
    return 0 if caught >= CAUGHT * len(outcomes) and alarms <= ALARMS * len(outcomes) else 1


def _measure(options):
    named = check.chosen_shapes(options.match)
    began = time.monotonic()

    def tell(text):
        print(f"{text} [{time.monotonic() - began:.0f} s]", file=sys.stderr, flush=True)

    with device("cuda") as on:
        kept = check.load(options.against, on.name) if options.against else None
        if len(list(check.groups(named, on.memory_bytes // 2))) > 1:
            raise ValueError(
                f"--trial: the arrays of {len(named)} cases do not fit into half of this GPU; --match picks some"
            )
        copy = timing.prepared_copy()
        prepared = check.prepared_on_gpu(named, not options.no_peers and harness.torch is not None)
        tell(f"{len(prepared)} cases are compiled and captured")
        if kept is None:
            kept = check.measure({name: one.case() for name, one in prepared.items()}, copy, options.runs)
            tell(f"the kept results are measured: a check takes about that long, and there follow {options.trial}")
        slow = lambda one: slowed_timer(one.entry, one.args, one.kwargs, one.timers["nbkernels"])  # noqa: E731
        for found in rounds_of(prepared, turns(named, options.trial), copy, options.runs, slow):
            yield kept, *found
