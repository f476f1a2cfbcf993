"""``python -m benchmarks check``: has any operation become slower than the kept results say, by more than its noise?

Every case is timed in several runs, one after another, so that a disturbance meets all cases alike. What is compared are ratios
of one run: the time of copying a case's bytes at the speed of that run's copy, and torch's time where it is installed, each over
ours. A ratio's new values are held against the kept ones by the rank test of Mann and Whitney, exact and one-sided; a case is
slower where chance would give such ranks less than once in a hundred checks of all cases, and its median fell by more than
LEAST_DROP and by more than the values of one side spread.

    python -m benchmarks check --record FILE      measure, and keep the results
    python -m benchmarks check                    compare with benchmarks/results/<GPU>_check.json; exit status 1 if slower
    python -m benchmarks check --trial 20         how many planted slowdowns are caught, and how many alarms are false (``trial``)
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from math import comb
from pathlib import Path

from benchmarks import harness
from nbkernels.launch.device import DeviceError, device
from nbkernels.profiling import timing
from nbkernels.profiling.operations import DTYPES, OPERATIONS, DeviceMaker, SizeMaker, cost_of

RUNS = 10
FALSE_ALARM = 1e-2  # of a check of all cases together
LEAST_DROP = 0.015  # of a ratio: less is nobody's concern, and a day's temperature gives as much
RESULTS = Path(__file__).parent / "results"
# shapes beside the usual ones: where another kernel or another plan takes over
MORE_SHAPES = {
    "softmax": ((64, 1024), (4096, 32768)),
    "layer_norm": ((4096, 32768),),
    "rms_norm": ((1, 4096), (4096, 32768)),
    "residual_rms_norm": ((64, 4096),),
    "matmul": ((1, 14336, 4096), (64, 14336, 4096), (512, 4096, 4096)),
    "int8_matmul": ((16, 14336, 4096), (512, 14336, 4096)),
    "int8_int8_matmul": ((64, 14336, 4096),),
    "attention": ((1, 512, 512, 32, 8, 128), (1, 2048, 2048, 9, 3, 64)),
    "decode": ((1, 8192, 32, 8, 128), (1, 512, 9, 3, 64)),
    "paged_decode": ((1, 8192, 32, 8, 128),),
}


@dataclass(frozen=True)
class Slower:
    """A ratio of a case that fell. kept, found: medians; chance: that ranks alone would show as much."""

    case: str
    ratio: str
    kept: float
    found: float
    chance: float

    def __str__(self):
        return (
            f"{self.case}: {1 - self.found / self.kept:.1%} slower against {self.ratio} "
            f"({self.kept:.3f} became {self.found:.3f}, p = {self.chance:.1e})"
        )


def rank_test(lower, upper):
    """The chance that values drawn alike rank as low as ``lower`` does against ``upper``, or lower: Mann and Whitney's, exact.

    Of all ways to pick len(lower) of the ranks, the share whose sum is at most that of ``lower``; ties share their mean rank.
    H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is stochastically larger than the other", 1947.
    """
    values = sorted((*lower, *upper))
    # twice the mean rank, which is an integer
    twice = {}
    for value in set(values):
        first = values.index(value)
        twice[value] = 2 * first + values.count(value) + 1
    observed = sum(twice[value] for value in lower)
    ways = [{} for _ in range(len(lower) + 1)]  # how many are picked -> sum of their ranks -> number of ways
    ways[0][0] = 1
    for value in values:
        rank = twice[value]
        for picked in range(len(lower), 0, -1):
            for total, number in ways[picked - 1].items():
                if total + rank <= observed:  # a sum never shrinks again
                    ways[picked][total + rank] = ways[picked].get(total + rank, 0) + number
    return sum(ways[-1].values()) / comb(len(values), len(lower))


def spread(values):
    """The distance of the quartiles over the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def compare(kept, found):
    """[Slower] of {case: {ratio: [value of each run]}}; cases and ratios that only one side has are left out."""
    pairs = [
        (case, ratio, kept[case][ratio], values)
        for case, ratios in found.items()
        for ratio, values in ratios.items()
        if ratio in kept.get(case, {})
    ]
    slower = []
    for case, ratio, before, now in pairs:
        medians = statistics.median(before), statistics.median(now)
        drop = 1 - medians[1] / medians[0]
        if drop <= max(LEAST_DROP, spread(before), spread(now)):
            continue
        chance = rank_test(now, before)
        if chance < FALSE_ALARM / len(pairs):
            slower.append(Slower(case, ratio, *medians, chance))
    return slower


def measure(cases, copy, runs):
    """{case: {"the copy": [ratio of each run], peer: …}}.

    cases: {name: (bytes, function -> {"nbkernels": microseconds, peer: …})}; copy: function -> bytes a second.
    """
    samples = {name: {} for name in cases}
    for _ in range(runs):
        speed = copy()
        for name, (moved, time) in cases.items():
            times = dict(time())
            ours = times.pop("nbkernels")
            ratios = {"the copy": moved / speed * 1e6, **times}
            for ratio, microseconds in ratios.items():
                samples[name].setdefault(ratio, []).append(microseconds / ours)
    return samples


def all_shapes(match):
    """[(name, Operation, shape)] of the cases whose name holds a text."""
    named = []
    for entry in OPERATIONS.values():
        for shape in (entry.usual, *MORE_SHAPES.get(entry.name, ())):
            name = f"{entry.name} {'×'.join(map(str, shape))} bfloat16"
            if match in name:
                named.append((name, entry, shape))
    return named


def chosen_shapes(match):
    """``all_shapes``, of which there must be some: ValueError."""
    named = all_shapes(match)
    if not named:
        raise ValueError(f"--match: no case holds {match!r}")
    return named


@dataclass(frozen=True)
class Prepared:
    """A case whose graphs are captured and wait. timers: "nbkernels" or a peer -> a function that replays and gives a Timing."""

    entry: object
    args: tuple
    kwargs: dict
    bytes: int
    timers: dict

    def case(self):
        """What ``measure`` takes of it."""
        return self.bytes, lambda: times(self.timers)


def times(timers):
    """{"nbkernels": microseconds, peer: …}, each timed now."""
    return {library: time().microseconds for library, time in timers.items()}


def prepared_on_gpu(named, peers):
    """{name: Prepared} of what ``all_shapes`` gives."""
    dtype = DTYPES["bfloat16"]
    cases = {}
    for name, entry, shape in named:
        args, kwargs = entry.make(DeviceMaker(dtype), *shape)
        timers = {"nbkernels": timing.prepared(entry.call, args, kwargs)}
        if peers and entry.peer is not None:
            timers.update(_peer(entry, args, kwargs))
        cases[name] = Prepared(entry, args, kwargs, cost_of(entry, args, kwargs).bytes, timers)
    return cases


def _peer(entry, args, kwargs):
    from nbkernels.profiling.profile import as_tensors

    try:
        own, options = as_tensors(args, kwargs)
        return {"torch": timing.prepared(lambda *a, **k: entry.peer(harness.torch, a, k)(), own, options)}
    except Exception as error:
        print(f"{entry.name}: torch's own is left out: {error}", file=sys.stderr)
        return {}


def groups(named, most_bytes):
    """Cases in runs of those whose arrays fit into so many bytes together; one that does not fit alone is alone."""
    group, total = [], 0
    for name, entry, shape in named:
        args, kwargs = entry.make(SizeMaker(DTYPES["bfloat16"]), *shape)
        # a ring of at least two, its results, and the same for torch
        needed = 6 * (timing.nbytes(args) + timing.nbytes(kwargs)) + timing.RING * 128 * 2**20
        if group and total + needed > most_bytes:
            yield group
            group, total = [], 0
        group.append((name, entry, shape))
        total += needed
    if group:
        yield group


def results_path(name):
    """Where a GPU's results are kept: "NVIDIA H200" -> h200_check.json."""
    return RESULTS / f"{name.removeprefix('NVIDIA ').replace(' ', '_').lower()}_check.json"


def load(path, name):
    """The kept samples of a GPU. ValueError where they are not there, not readable, or another GPU's."""
    try:
        kept = json.loads(Path(path).read_text())
        samples, on = kept["samples"], kept["device"]
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no results of {name} are kept; make them with python -m benchmarks check --record {path}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as results of this check ({error!r})") from error
    if on != name:
        raise ValueError(f"{path}: results of {on}, and this is {name}; ratios of two cards are not to be compared")
    return samples


def main(arguments, measured=None):
    """Run the check. Returns the exit status: 0, 1 where something is slower, 2 where it cannot be told.

    measured: a function of the options -> (name of the GPU, samples), or for --trial what ``trial.main`` takes, in place of
    measuring, for tests.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks check", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"how often each case is timed ({RUNS})")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose name holds it")
    parser.add_argument("--no-peers", action="store_true", help="compare with the copy alone")
    parser.add_argument("--against", metavar="FILE", help="other results than those kept for this GPU")
    parser.add_argument("--record", metavar="FILE", help="keep the results there, and compare with nothing")
    parser.add_argument(
        "--trial",
        type=int,
        metavar="N",
        help="plant N slowdowns of 5%% and make N clean checks: how many are told rightly?",
    )
    parser.add_argument("--json", metavar="FILE", help="keep the outcome of --trial there")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m benchmarks check", *arguments])
    try:
        if options.runs < 5:
            raise ValueError(f"--runs: {options.runs}, wanted at least 5: fewer ranks say nothing")
        if options.trial is not None:
            return _trial(options, command, measured)
        if options.json:
            raise ValueError("--json: it keeps what --trial finds; --record keeps the results of a check")
        name, samples = (measured or _measure)(options)
        if options.record:
            harness.keep(options.record, command, {"samples": samples})
            print(f"{len(samples)} cases, {options.runs} runs each: {options.record}")
            return 0
        kept = load(options.against or results_path(name), name)
    except (ValueError, OSError, DeviceError) as error:
        print(f"benchmarks check: {error}", file=sys.stderr)
        return 2
    slower = compare(kept, samples)
    missing = sorted(set(samples) - set(kept))
    if missing:
        print(f"not compared, since nothing is kept of them: {', '.join(missing)}")
    for found in slower:
        print(found)
    print(f"{len(samples) - len(missing)} cases: {len({found.case for found in slower})} slower")
    return 1 if slower else 0


def _trial(options, command, measure):
    from benchmarks import trial  # which imports this module

    if options.trial < 1 or options.record:
        raise ValueError("--trial: wanted at least 1 round, and --json in place of --record")
    return trial.main(options, command, measure)


def _measure(options):
    named = chosen_shapes(options.match)
    samples = {}
    with device("cuda") as on:
        peers = not options.no_peers and harness.torch is not None
        copy = timing.prepared_copy()
        for group in groups(named, on.memory_bytes // 3):
            cases = {case: one.case() for case, one in prepared_on_gpu(group, peers).items()}
            samples.update(measure(cases, copy, options.runs))
            del cases  # its arrays make room for the next group's
    return on.name, samples
