"""Measure an operation's candidates on the GPU at hand, and keep those that beat the heuristic (``launch.tuning``)."""

from dataclasses import dataclass
from statistics import geometric_mean

from nbkernels.launch import tuning
from nbkernels.launch.device import device
from nbkernels.profiling import timing
from nbkernels.profiling.operations import DeviceMaker, checked_dtype, checked_shape, operation

ROUNDS = 4
REPLAYS_A_ROUND = 5
# operation -> shapes that its tuned kernels serve; on sm_90 even numbers of columns go by wgmma, which has nothing to choose
_ODD = ((128, 4095, 4096), (512, 4095, 4096), (2048, 4095, 4096), (512, 50257, 1024))  # the last is GPT-2's vocabulary
SHAPES = {
    "matmul": ((128, 4096, 4096), (512, 4096, 4096), (2048, 4096, 4096), (4096, 14336, 4096), *_ODD),
    "int8_matmul": ((128, 4096, 4096), (512, 4096, 4096), (2048, 4096, 4096), *_ODD),
}


@dataclass(frozen=True)
class Choice:
    """What was found for one call: its heuristic's Plan and the best, with Timings; how many were tried and stopped early."""

    call: str
    heuristic: object
    heuristic_timing: object
    best: object
    best_timing: object
    tried: int
    stopped: int

    @property
    def gain(self):
        """How much faster than the heuristic, as a share of its time; 0 where that one is the fastest."""
        return 1 - self.best_timing.microseconds / self.heuristic_timing.microseconds

    @property
    def ratio(self):
        """The heuristic's time over the best's: 1 where the heuristic is the fastest."""
        return self.heuristic_timing.microseconds / self.best_timing.microseconds


def summary(choices):
    """What Choices come to in a line: how far the heuristic is from the tuned plans, in the geometric mean and at worst."""
    ratios = [choice.ratio for choice in choices]
    worst = max(choices, key=lambda choice: choice.ratio)
    return (
        f"the heuristic takes {geometric_mean(ratios):.3f} times as long as the tuned plans (geometric mean of {len(ratios)}); "
        f"at worst {worst.ratio:.3f} times, at {worst.call}"
    )


def race(candidates, time, *, rounds=ROUNDS):
    """(the fastest candidate, {candidate: Timing}, how many were stopped early).

    time(candidate): samples of microseconds, another few each time. After each round those leave whose quartile of fast samples
    is slower than the slow one of the fastest. The first candidate, the heuristic's, stays to the end; another one wins only if
    the quartiles of the two do not meet.
    """
    samples = {candidate: [] for candidate in candidates}
    running = list(candidates)
    for _ in range(rounds):
        for candidate in running:
            samples[candidate] += time(candidate)
        timings = {candidate: timing.Timing.of(samples[candidate]) for candidate in running}
        limit = min(timings.values(), key=lambda timed: timed.microseconds).high
        running = [c for c in running if timings[c].low <= limit or c is candidates[0]]
    timings = {candidate: timings[candidate] for candidate in running}
    fastest = min(running, key=lambda candidate: timings[candidate].microseconds)
    if timings[fastest].high >= timings[candidates[0]].low:
        fastest = candidates[0]
    return fastest, timings, len(candidates) - len(running)


def tune(name=None, *, shape=None, dtype="bfloat16", on=None, prepare=None):
    """Measure all choices that an operation's calls ask for, and keep the fastest: yields a Choice of each.

    name: default every operation of SHAPES. DeviceError without a GPU, ValueError for what is not known or has nothing to choose,
    OSError where the results cannot be kept. on, prepare: a Device and a function in place of the GPU and of
    ``timing.prepared``, for tests.
    """
    names = tuple(SHAPES) if name is None else (name,)
    entries = [operation(each) for each in names]
    dtype = checked_dtype(dtype)
    if shape is not None:
        for entry in entries:
            checked_shape(entry, shape)
    with device("cuda") if on is None else device(on.kind, arch=on.arch) as chosen:
        for entry in entries:
            shapes = SHAPES.get(entry.name, (entry.usual,)) if shape is None else (shape,)
            found = 0
            for each in shapes:
                for choice in _tune_call(entry, checked_shape(entry, each), dtype, prepare or timing.prepared):
                    figures = {
                        "microseconds": choice.best_timing.microseconds,
                        "quartiles": [choice.best_timing.low, choice.best_timing.high],
                        "heuristic_microseconds": choice.heuristic_timing.microseconds,
                    }
                    tuning.keep(chosen.name, choice.call, choice.heuristic, choice.best, figures)
                    found += 1
                    yield choice
            if not found and name is not None:
                raise ValueError(
                    f"operation: {entry.name} {'x'.join(map(str, shapes[-1]))} has nothing to choose on {chosen.name}; "
                    f"those that may are {', '.join(SHAPES)}"
                )


def _tune_call(entry, shape, dtype, prepare):
    args, kwargs = entry.make(DeviceMaker(dtype), *shape)
    with tuning.asked() as questions, tuning.forced({}):
        entry.call(*args, **kwargs)
    for question, candidates in questions.items():
        _, heuristic = question
        plans = [heuristic, *(plan for plan in candidates if plan != heuristic)]
        prepared = {}

        def time(plan, question=question, prepared=prepared):
            if plan not in prepared:
                with tuning.forced({question: plan}):
                    prepared[plan] = prepare(entry.call, args, kwargs)
            return [prepared[plan](1).microseconds for _ in range(REPLAYS_A_ROUND)]

        best, timings, stopped = race(plans, time)
        yield Choice(question[0], heuristic, timings[heuristic], best, timings[best], len(plans), stopped)
