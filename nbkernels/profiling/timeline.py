"""Where the time of many launches goes: those of a decode step or a prefill, kernel by kernel and layer by layer.

The work is recorded twice as a CUDA graph. As it is, it gives the whole. With an event between every two launches it gives the
time from one launch's end to the next one's; of each, what an empty kernel takes there is taken off, which leaves the time that
the kernel was busy. What the whole has beyond the sum are gaps. Kernels that overlap (``launch.overlap``) do so in neither
recording; a third one, with the overlap, tells what that saves.
"""

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise

from nbkernels.launch import memory
from nbkernels.launch.graph import Graph
from nbkernels.launch.launcher import Plan, check, launch
from nbkernels.launch.replay import Note, noted
from nbkernels.profiling import timing

REPLAYS = 15
EMPTY_LAUNCHES = 50


@dataclass(frozen=True)
class Span:
    """One launch: kernel, layer (None outside of any), grid, block; start and busy in microseconds."""

    kernel: str
    layer: int | None
    grid: tuple
    block: tuple
    start: float
    busy: float


@dataclass(frozen=True)
class Timeline:
    """A piece of work. whole: microseconds of its graph; overlapped: the same where kernels start early, or None.

    gaps: microseconds of the whole in which no kernel was busy; the spans stand so far apart as all of them are the same.
    """

    name: str
    spans: tuple
    whole: float
    overlapped: float | None
    gaps: float

    def by_kernel(self):
        """[(kernel, launches, busy microseconds)], the longest first."""
        return _sums(self.spans, lambda span: span.kernel)

    def by_layer(self):
        """[(layer or None, launches, busy microseconds)], the longest first."""
        return _sums(self.spans, lambda span: span.layer)

    def print(self, console=None):
        """Print it as tables."""
        from rich.console import Console
        from rich.table import Table

        console = console or Console(highlight=False)
        overlap = "" if self.overlapped is None else f", {self.overlapped:.1f} µs where kernels start early"
        console.print(
            f"[bold]{self.name}[/bold]: {self.whole:.1f} µs{overlap}; {len(self.spans)} launches, gaps {self.gaps:.1f} µs "
            f"({self.gaps / self.whole:.0%})"
        )
        for heading, rows in (("kernel", self.by_kernel()), ("layer", self.by_layer())):
            table = Table()
            table.add_column(heading)
            for column in ("launches", "µs", "µs a launch", "share"):
                table.add_column(column, justify="right")
            for key, count, busy in rows:
                name = "outside" if key is None else str(key)
                table.add_row(name, f"{count}", f"{busy:.1f}", f"{busy / count:.2f}", f"{busy / self.whole:.0%}")
            console.print(table)

    def as_dict(self):
        """For JSON."""
        return asdict(self)


def _sums(spans, key):
    launches, busy = Counter(), Counter()
    for span in spans:
        launches[key(span)] += 1
        busy[key(span)] += span.busy
    return [(name, launches[name], total) for name, total in sorted(busy.items(), key=lambda item: -item[1])]


def assemble(name, launches, times, floor, whole, overlapped=None):
    """A Timeline of (Plan, layer) of each launch and the microseconds between the events around it.

    floor: microseconds between two events with an empty kernel between them.
    """
    busy = [max(0.0, time - floor) for time in times]
    gaps = max(0.0, whole - sum(busy))
    start, spans = 0.0, []
    for (plan, layer), microseconds in zip(launches, busy, strict=True):
        kernel = plan.factory.__name__.removesuffix("_kernel")
        spans.append(Span(kernel, layer, tuple(plan.grid), tuple(plan.block), start, microseconds))
        start += microseconds + gaps / len(launches)
    return Timeline(name, tuple(spans), whole, overlapped, gaps)


def chrome_trace(timelines):
    """JSON text that chrome://tracing and ui.perfetto.dev read: a process a timeline, a row of layers and one of kernels."""
    events = []
    for process, timeline in enumerate(timelines):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": timeline.name}})
        for row, title in enumerate(("layers", "kernels")):
            events.append({"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": title}})
        first = last = None
        for span in (*timeline.spans, None):
            if first is not None and (span is None or span.layer != first.layer):
                title = "outside" if first.layer is None else f"layer {first.layer}"
                events.append(_event(process, 0, title, first.start, last.start + last.busy - first.start))
                first = None
            if span is not None:
                first, last = first or span, span
                extents = {"grid": list(span.grid), "block": list(span.block)}
                events.append(_event(process, 1, span.kernel, span.start, span.busy, extents))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, indent=0)


def _event(process, row, name, start, duration, arguments=None):
    described = {"ph": "X", "pid": process, "tid": row, "name": name, "ts": start, "dur": duration}
    return {**described, "args": arguments} if arguments else described


# ---- measuring, on a GPU -------------------------------------------------------------------------------------------------


class Mark:
    """Which layer the launches to come belong to; whoever does the work sets ``layer``."""

    layer = None


class _Watch(Note):
    """Notes launches with their layer, and where it is given a function calls that after each."""

    def __init__(self, mark, after=None):
        super().__init__()
        self.mark = mark
        self.after = after
        self.seen = []

    def launched(self, kernel, plan, arguments):
        self.seen.append((plan, self.mark.layer))
        if self.after is not None:
            self.after()


def measure(name, work, *, mark, overlapped_work=None, before=None):
    """The Timeline of ``work()`` on the GPU, on the stream in force.

    work() must do the same each time and nothing that a graph cannot record (waiting, copies from and to the host); it sets
    mark.layer. overlapped_work: the same with kernels that start early. before(): puts things back, ahead of each.
    """
    floor = statistics.median(_times_between(_empty_launches, Mark())[1])
    launches, times = _times_between(work, mark, before)
    whole = _whole(work, before)
    overlapped = None if overlapped_work is None else _whole(overlapped_work, before)
    return assemble(name, launches, times, floor, whole, overlapped)


def _empty_launches():
    from nbkernels.launch.device import cuda_device

    for _ in range(EMPTY_LAUNCHES):
        launch(Plan(timing.nothing_kernel, (), (1, 1, 1), (32, 1, 1)), (), cuda_device(), memory.current_stream())


def _recorded(work, before, note):
    """(Graph, Arena) of work, which has run once."""
    stream, arena, graph = memory.current_stream(), memory.Arena(), Graph()
    with memory.use_arena(arena):
        if before is not None:
            before()
        work()
        memory.wait_for(stream)
        if before is not None:
            before()
        with noted(note), graph.capture(stream):
            work()
    return graph, arena


def _whole(work, before):
    """Microseconds of a graph of work."""
    stream = memory.current_stream()
    graph, _arena = _recorded(work, before, Note())
    clock = timing.EventClock(stream)
    return timing.time_replays(lambda: graph.replay(stream), 1, clock, before=before, replays=REPLAYS).microseconds


def _times_between(work, mark, before=None):
    """([(Plan, layer)], microseconds of each): medians over replays of a graph with an event behind each launch."""
    from cuda.bindings import driver

    stream = memory.current_stream()
    external = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL  # read outside of the graph
    events = []

    def record():
        events.append(check(driver.cuEventCreate(0))[0])
        check(driver.cuEventRecordWithFlags(events[-1], stream, external))

    def recorded_work():
        if memory.is_capturing(stream):
            record()
        work()

    watch = _Watch(mark, record)
    graph, _arena = _recorded(recorded_work, before, watch)
    samples = []
    for _ in range(REPLAYS):
        if before is not None:
            before()
        graph.replay(stream)
        memory.wait_for(stream)
        elapsed = (check(driver.cuEventElapsedTime(start, end))[0] for start, end in pairwise(events))
        samples.append([float(milliseconds) * 1e3 for milliseconds in elapsed])
    for event in events:
        driver.cuEventDestroy(event)
    return watch.seen, [statistics.median(column) for column in zip(*samples, strict=True)]
