"""What every lesson stands on: run a kernel with all checks, say what it did, draw it, and turn a lesson into a page.

A lesson is a Python file that is read from top to bottom. Comment blocks at the left margin are its prose (Markdown), what lies
between them is its code. ``python 01_threads_and_a_grid.py`` runs it block by block and prints what each ``step`` measured;
``--page FOLDER`` writes prose, code, measurements and pictures as Markdown. Nothing a lesson prints is typed in: counts come
from the emulator, registers from the assembler where there is one, times from the GPU where there is one.
"""

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

import nbkernels as nbk
from nbkernels.emulator import Emulator, EmulatorError
from nbkernels.emulator.counters import Counters, Counts, Report
from nbkernels.launch import compile as compiling
from nbkernels.launch.device import DeviceError, resolve
from nbkernels.profiling.resources import LIMITS, WARP, find_ptxas, occupancy, resources

FOLDER = Path(__file__).parent
ARCH = "sm_80"  # what a lesson is compiled for where no GPU answers and the step names no other
SEED = 0


# ---- lessons as files ---------------------------------------------------------------------------------------------------


def files():
    """number -> path of each lesson."""
    return {int(path.name[:2]): path for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}


def title(path):
    """The first heading of a lesson."""
    return re.search(r"^# # (.*)$", Path(path).read_text(), re.MULTILINE)[1]


def blocks(text):
    """[(first line, "prose" or "code", lines)] of a lesson's text: prose is comments that begin at the margin."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        kind = "prose" if line.startswith("#") else "code"
        if not line.strip() and found and found[-1][1] == "prose":
            kind = "code"
        if not found or found[-1][1] != kind:
            found.append((number, kind, []))
        found[-1][2].append(line)
    # a blank line between two comments parts paragraphs, and is no code
    return [(number, kind, lines) for number, kind, lines in found if any(line.strip() for line in lines)]


def module_of(path, name=None):
    """An empty module for a file, known by its name: the compiler keeps kernels by the text of the module they are in."""
    name = name or f"lesson_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return module


def definitions(which):
    """A lesson's functions and constants without running its steps. which: its number, or a path."""
    path = files()[which] if isinstance(which, int) else Path(which)
    name = f"lesson_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    module = module_of(path)
    text = path.read_text()
    tree = ast.parse(text)
    wanted = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    runs = re.compile(r"\bstep\(|\boperation\(|\.accesses\(|\bsteps\(|\.run\(|\.results|\.report_total")
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, wanted)
        or (isinstance(node, ast.Assign) and not runs.search(ast.get_source_segment(text, node.value)))
    ]
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


class Session:
    """One performance of a lesson: what its steps measured, in order, and where the page is written."""

    def __init__(self, page=None, gpu=True):
        self.page = page
        self.gpu = _gpu() if gpu else None
        self.steps = []
        self.pictures = []
        self.output = []  # Markdown of what the present block has shown

    def show(self, text):
        """Print a measurement, and keep it for the page."""
        print(text)
        self.output.append(f"```text\n{text}\n```")


_session = Session(gpu=False)


def perform(path, page=None, *, quiet=False, gpu=True):
    """Run a lesson block by block -> its Session. page: a folder that gets its Markdown and pictures."""
    global _session
    path = Path(path)
    before, _session = _session, Session(Path(page) if page else None, gpu)
    if page:
        Path(page).mkdir(parents=True, exist_ok=True)
    _session.stem = path.stem
    module = module_of(path)
    text = path.read_text()
    written = []
    try:
        for number, kind, lines in blocks(text):
            if kind == "prose":
                prose = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
                written.append(prose)
                for line in prose.splitlines():
                    if line.startswith("#") and not quiet:
                        print(
                            f"\n\033[1m{line.lstrip('# ')}\033[0m" if sys.stdout.isatty() else f"\n{line.lstrip('# ')}"
                        )
                continue
            code = compile("\n" * (number - 1) + "\n".join(lines), str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
                exec(code, module.__dict__)
            shown = "\n".join(lines).strip()
            written.append(f"```python\n{shown}\n```")
            written.extend(_session.output)
            _session.output.clear()
        if page:
            name = _session.page / f"{path.stem}.md"
            name.write_text("\n\n".join(written) + "\n")
            if not quiet:
                print(f"\nwrote {name}")
        return _session
    finally:
        _session = before


def main(name, path):
    """The first line of every lesson: run as a program, perform the file; imported, do nothing."""
    if name != "__main__":
        return
    parser = argparse.ArgumentParser(description=title(path))
    parser.add_argument("--page", metavar="FOLDER", help="where to write the lesson as Markdown with its pictures")
    parser.add_argument("--no-gpu", action="store_true", help="do not time on a GPU even where there is one")
    options = parser.parse_args()
    page = Path(options.page or compiling.cache_folder() / "lessons")
    try:
        page.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"{page} cannot be made ({error.strerror}): --page FOLDER writes the page elsewhere")
    perform(path, page, gpu=not options.no_gpu)
    sys.exit(0)


# ---- running a kernel ---------------------------------------------------------------------------------------------------


def normal(*shape, dtype=np.float32, seed=SEED):
    """Normally distributed numbers, the same every time."""
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


@dataclass
class Launch:
    """One launch of a kernel.

    grid, block: blocks, and threads a block. arguments: parameter name -> array or number, in the kernel's order. want: name of
    an array the kernel writes -> what it should hold; such an array starts unwritten. bytes, flops: what the task itself needs
    to move and to compute. tolerance: error of ``want``, relative to its norm.
    """

    grid: object
    block: object
    arguments: dict
    want: dict
    bytes: int = 0
    flops: int = 0
    tolerance: float = 1e-6
    shared_bytes: int = 0
    keep: tuple = ()  # arrays of ``want`` that the kernel also reads: they start with what they hold
    maps: dict = field(default_factory=dict)  # name -> (box, swizzle bytes) of an array that is passed as a tensor map


@dataclass
class Access:
    """One memory instruction of some warps, in the order of execution: who touched what."""

    order: int
    line: int
    space: str  # "shared" or "global"
    array: str
    mode: str
    size: int  # bytes a lane
    blocks: np.ndarray
    threads: np.ndarray
    offsets: np.ndarray  # bytes from the array's start; in shared memory from the start of the block's
    passes: int = 0  # of shared memory, counted by the emulator

    @property
    def warps(self):
        """Of each lane: (block, warp) as one number."""
        return self.blocks * 64 + self.threads // WARP


class Recorder(Counters):
    """The emulator's counters, which also keep every access."""

    def __init__(self, machine):
        super().__init__(machine)
        self.accesses = []

    def watch(self, instruction, locate, size, mode):
        """As the plain counters', and keep who touched what."""
        m = self.machine
        counts = self.by_instruction[self.numbers[id(instruction)]]

        def recorded(group):
            before = counts.shared_passes
            parts = counted(group)
            for buffer, which, offsets in parts:
                if buffer is m.local:
                    continue
                lanes = group.lanes if which is None else group.lanes[which]
                shared = buffer is m.shared
                self.accesses.append(
                    Access(
                        len(self.accesses),
                        instruction.source[1] if instruction.source else 0,
                        "shared" if shared else "global",
                        "" if shared else buffer.name,
                        mode,
                        size,
                        m.block_order[m.lane_block[lanes]],
                        m.lane_thread[lanes].copy(),
                        np.array(offsets % m.shared_stride if shared else offsets),
                        counts.shared_passes - before,
                    )
                )
            return parts

        counted = super().watch(instruction, locate, size, mode)
        return recorded


class RecordingEmulator(Emulator):
    """An emulator whose counted launches keep their accesses, and where each shared array lies."""

    def _make_machine(self, module, function, block, total, shared_bytes, make_counters):
        machine = super()._make_machine(module, function, block, total, shared_bytes, make_counters and Recorder)
        self.recorder = machine.counters
        self.shared_variables = {name: at for name, (space, at) in machine.symbols.items() if space == "shared"}
        return machine


def ptx_of(factory, constants=(), arch=ARCH):
    """The PTX of a kernel of a lesson."""
    return compiling.ptx(factory, tuple(constants), arch)


@dataclass
class Run:
    """What a launch on the emulator left: results by name, the Report, every Access."""

    results: dict
    report: Report
    accesses: list


def parameters_of(source):
    """The names of a kernel's parameters."""
    return list(inspect.signature(source.function).parameters)


def run(factory, constants, launch, arch=ARCH, checks=True):
    """Run a Launch on the emulator with all checks -> Run. EmulatorError for what a GPU would let pass."""
    source = factory(*constants)
    names = parameters_of(source)
    if list(launch.arguments) != names:
        raise TypeError(f"{factory.__name__} takes {', '.join(names)}; the launch gives {', '.join(launch.arguments)}")
    emulator = RecordingEmulator(checks=checks)
    arguments, results = [], {}
    for name, value in launch.arguments.items():
        if not isinstance(value, np.ndarray):
            arguments.append(value)
            continue
        unwritten = name in launch.want and name not in launch.keep
        pointer, data = emulator.memory.allocate(max(value.nbytes, 16), name, tracked=unwritten)
        held = data[: value.nbytes].view(value.dtype).reshape(value.shape)
        if unwritten:
            data[:] = 0xFF  # NaN in every float format, -1 in integers
        else:
            held[...] = value
        if name in launch.want:
            results[name] = held
        if name in launch.maps:
            arguments.append(_emulated_map(pointer, value, *launch.maps[name]))
        else:
            arguments.append(int(pointer))
    text = ptx_of(factory, constants, arch)
    try:
        report = emulator.launch(
            text, None, launch.grid, launch.block, arguments, shared_bytes=launch.shared_bytes, count=True
        )
    except EmulatorError as error:
        error.shared_places = _shared_places(factory, emulator.shared_variables)
        raise
    accesses = emulator.recorder.accesses
    _name_shared(factory, emulator.shared_variables, accesses)
    return Run(results, report, accesses)


def _emulated_map(pointer, array, box, swizzle_bytes):
    from nbkernels.arrays import DeviceArray, contiguous_strides
    from nbkernels.launch.tensor_map import tensor_map

    described = DeviceArray(int(pointer), array.shape, contiguous_strides(array.shape), array.dtype, None)
    return tensor_map(described, box, swizzle_bytes, resolve("emulator", arch="sm_90a")).data


def shared_names(function_or_text):
    """The names that shared arrays have in a kernel's text, in the order they stand there."""
    text = function_or_text if isinstance(function_or_text, str) else inspect.getsource(function_or_text)
    return re.findall(r"(\w+) = cuda\.shared\.array\(", text)


def _shared_places(factory, variables):
    """address -> name of each shared array; they are numbered in the order they stand in the kernel's text."""
    names = shared_names(factory)
    places = sorted(variables.items(), key=lambda entry: int(re.search(r"(\d+)\D*$", "0" + entry[0])[1]))
    return {at: name for (_, at), name in zip(places, names, strict=False)}


def _name_shared(factory, variables, accesses):
    """Give accesses of shared memory the name of their array, and offsets from its start."""
    named = _shared_places(factory, variables)
    starts = np.array(sorted(named)) if named else np.array([0])
    for access in accesses:
        if access.space != "shared" or not access.offsets.size:
            continue
        start = int(starts[max(0, np.searchsorted(starts, access.offsets[0], side="right") - 1)])
        access.array = named.get(start, "shared memory")
        access.offsets = access.offsets - start


def rounding_of(additions):
    """Tolerance of float32 sums of so many numbers, added one after the other.

    Each addition is off by up to 2^-24 of the sum, at random, so that the root of their number counts (N. Higham, "Accuracy and
    Stability of Numerical Algorithms", 2002); and twice that, for products and powers are rounded too.
    """
    return 2**-23 * additions**0.5


def error_of(got, want):
    """The largest of the errors of arrays, each relative to the norm of what it should be. NaN where a NaN is."""
    worst = 0.0
    for name, right in want.items():
        a, b = (np.asarray(v).astype(np.float64) for v in (got[name], right))
        norm = np.linalg.norm(b) or 1.0
        error = float(np.linalg.norm(a - b) / norm)
        if np.isnan(error):
            return error
        worst = max(worst, error)
    return worst


# ---- what a lesson calls ------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What was measured of one kernel."""

    title: str
    report_total: object
    launch: Launch
    factory: object = None
    run: Run = None
    registers: int | None = None
    occupancy: float | None = None
    microseconds: float | None = None
    share: float | None = None
    gpu_flops: int = 0
    gpu_bytes: int = 0

    @property
    def sectors(self):
        """32-byte sectors of global memory."""
        return self.report_total.sectors

    def lines(self, text):
        """The numbers of the kernel's source lines that hold a text."""
        source, first = inspect.getsourcelines(self.factory)
        return [first + number for number, line in enumerate(source) if text in line]

    def accesses(self, text, *, mode=None, block=None, warp=None):
        """Accesses made by source lines that hold a text, of one block or one warp of it."""
        lines = set(self.lines(text))
        found = []
        for access in self.run.accesses:
            if access.line not in lines or (mode and access.mode != mode):
                continue
            keep = np.ones(access.threads.size, bool)
            if block is not None:
                keep &= access.blocks == block
            if warp is not None:
                keep &= access.threads // WARP == warp
            if keep.any():
                found.append(
                    Access(
                        access.order,
                        access.line,
                        access.space,
                        access.array,
                        access.mode,
                        access.size,
                        access.blocks[keep],
                        access.threads[keep],
                        access.offsets[keep],
                        access.passes,
                    )
                )
        return found


def step(heading, factory, launch, *, constants=(), small=(), large=None, arch=ARCH):
    """Run a kernel and say what it did. launch: a function of ``small`` (for the emulator) or ``large`` (a GPU) -> Launch."""
    constants = tuple(constants)
    case = launch(*small)
    done = run(factory, constants, case, arch)
    error = error_of(done.results, case.want)
    if not error <= case.tolerance:
        raise AssertionError(f"{heading}: relative error {error:.2g}, at most {case.tolerance:.2g} is right")
    total = done.report.total
    step = Step(heading, total, case, factory, done, gpu_flops=case.flops, gpu_bytes=case.bytes)
    text = [heading, f"    right: relative error {error:.1g}", *_counts(total, case)]
    block = int(np.prod(case.block))
    used = _resources(factory, constants, arch)
    if used:
        step.registers = used.registers
        text.append(_occupancy_line(step, used, block, case.shared_bytes, arch))
    if large is not None and _runs_on_gpu(arch):
        at_scale = launch(*large)
        _time_kernel(step, factory, constants, at_scale)
        text.append(_time_line(step))
    _session.steps.append(step)
    _session.show("\n".join(text))
    return step


def operation(heading, call, want, *, small=(), large=None, tolerance=1e-5, arch=ARCH, beside=None):
    """Run an operation of the package and say what its kernels did.

    call: function of (device array function, *size) that gives a function without arguments and the bytes it must move: see the
    lessons. want: a function of the size -> the right result. beside: the lesson's own Step for the same task, of the same
    ``large``: on a GPU its time is told beside the package's.
    """
    from nbkernels.launch.emulated import counted
    from nbkernels.launch.memory import to_device, to_host

    with nbk.device("emulator", arch=arch), counted() as launches:
        again, moved = call(to_device, *small)
        launches.clear()  # what preparing it took
        got = to_host(again())
    right = want(*small)
    error = error_of({"": got}, {"": right})
    if not error <= tolerance:
        raise AssertionError(f"{heading}: relative error {error:.2g}, at most {tolerance:.2g} is right")
    total = _sum(launches)
    step = Step(heading, total, Launch(0, 0, {}, {}, bytes=moved), gpu_bytes=moved)
    text = [heading, f"    right: relative error {error:.1g}", *_counts(total, None)]
    for plan, _ in launches:
        used = _resources(plan.factory, plan.constants, arch)
        if used:
            step.registers = used.registers
            text.append(_occupancy_line(step, used, int(np.prod(plan.block)), plan.shared_bytes, arch))
    if large is not None and _runs_on_gpu(arch):
        with nbk.device("cuda"):
            again, moved = call(to_device, *large)
            step.gpu_bytes = moved
            step.microseconds = microseconds(again)
            step.share = moved / (step.microseconds * 1e-6) / _copy_speed()
        text.append(_time_line(step))
        if beside is not None and beside.microseconds is not None:
            text.append(
                f"    the lesson's own, {beside.title!r}: {beside.microseconds:.1f} µs, "
                f"{beside.microseconds / step.microseconds:.2f} times as long"
            )
    _session.steps.append(step)
    _session.show("\n".join(text))
    return step


def _sum(launches):
    total = Counts()
    for _, report in launches:
        total.add(report.total)
    return total


def _counts(total, case):
    text = [
        f"    global memory: {total.sectors} sectors of 32 bytes, where {total.sectors_needed} would hold the bytes asked for"
    ]
    if total.shared_passes:
        conflicts = total.shared_passes - total.shared_passes_needed
        text.append(f"    shared memory: {total.shared_passes} passes, {conflicts} of them for bank conflicts")
    lanes = total.lane_instructions / max(total.warp_instructions, 1)
    text.append(
        f"    {total.warp_instructions} warp instructions, {lanes:.1f} of {WARP} lanes at work in the mean, "
        f"{total.divergent_branches} divergent branches"
    )
    return text


def _resources(factory, constants, arch):
    try:
        find_ptxas()
    except FileNotFoundError:
        return None
    return resources(factory, tuple(constants), arch)


def _occupancy_line(step, used, threads, shared_bytes, arch):
    blocks, limit = occupancy(used, threads, shared_bytes, arch)
    most = LIMITS[tuple(int(d) for d in re.findall(r"\d", arch)[:2])].threads
    step.occupancy = blocks * threads / most
    spilled = f", {used.spill_bytes} bytes spilled" if used.spill_bytes else ""
    return (
        f"    {used.registers} registers a thread{spilled}, {used.shared_bytes + shared_bytes} bytes of shared memory a block: "
        f"{blocks} blocks fit a multiprocessor ({limit}), occupancy {step.occupancy:.0%}"
    )


def compare(*columns):
    """A table of the lesson's steps side by side. columns: extra pairs (heading, function of a Step)."""
    heads = ["step", "sectors", "needed", "bank conflicts", "warp instructions", "registers", "occupancy"]
    rows = []
    for s in _session.steps:
        t = s.report_total
        rows.append(
            [
                s.title,
                t.sectors,
                t.sectors_needed,
                t.shared_passes - t.shared_passes_needed,
                t.warp_instructions,
                "-" if s.registers is None else s.registers,
                "-" if s.occupancy is None else f"{s.occupancy:.0%}",
            ]
        )
    for head, value in columns:
        heads.append(head)
        for row, s in zip(rows, _session.steps, strict=True):
            row.append(value(s))
    if _session.gpu is not None:
        heads += ["µs", "of a copy's speed"]
        for row, s in zip(rows, _session.steps, strict=True):
            row += [
                "-" if s.microseconds is None else f"{s.microseconds:.1f}",
                "-" if s.share is None else f"{s.share:.0%}",
            ]
    table(heads, rows)


def table(heads, rows):
    """Print rows under headings."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells):
        return "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )

    print("\n".join([line(heads), *(line(row) for row in rows)]))
    marks = ["---"] + ["---:"] * (len(heads) - 1)
    _session.output.append("\n".join("| " + " | ".join(cells) + " |" for cells in [heads, marks, *rows]))


def say(text):
    """Print a sentence with a measurement in it."""
    _session.show(str(text))


def steps():
    """The steps of the lesson up to here."""
    return list(_session.steps)


def picture(name, svg, caption):
    """Put a picture on the page, beside it as NAME.svg."""
    file = f"{_session.stem}_{name}.svg" if hasattr(_session, "stem") else f"{name}.svg"
    _session.pictures.append((file, svg))
    if _session.page:
        (_session.page / file).write_text(svg)
        print(f"    picture: {_session.page / file}")
    _session.output.append(f"![{caption}]({file})\n\n*{caption}*")


def in_short(error):
    """An emulator's error without the folder of the source and the PTX: kernel, line, block, thread, and what is wrong."""
    text = re.sub(r", PTX line \d+ \(.*?\)(?=, block)", "", str(error))
    text = re.sub(r", PTX line \d+: .*?(?=\), and nothing)", "", text)
    text = re.sub(r"(/[^\s:]*/)([^/\s:]+:\d+)", r"\2", text)
    return f"{type(error).__name__}: {text}"


# ---- on a GPU -----------------------------------------------------------------------------------------------------------


def _gpu():
    try:
        return resolve("cuda")
    except DeviceError:
        return None


def _runs_on_gpu(arch):
    """Whether there is a GPU that has the instructions of an architecture that a step names."""
    return _session.gpu is not None and (arch == ARCH or arch == _session.gpu.arch)


def on_gpu():
    """The Device of the GPU that the lesson may time on, or None."""
    return _session.gpu


def _time_line(step):
    return (
        f"    {_session.gpu.name}: {step.microseconds:.1f} µs, {step.gpu_bytes / step.microseconds / 1e6:.2f} TB/s of what must "
        f"be moved, {step.share:.0%} of the speed of a copy"
    )


def _time_kernel(step, factory, constants, case):
    """Time a Launch on the GPU and check what it wrote."""
    from nbkernels.launch.launcher import Plan, launch
    from nbkernels.launch.memory import current_stream, empty, to_device, to_host
    from nbkernels.launch.tensor_map import tensor_map

    with nbk.device("cuda") as gpu:
        arguments, results = [], {}
        for name, value in case.arguments.items():
            if not isinstance(value, np.ndarray):
                arguments.append(float(value) if isinstance(value, float | np.floating) else int(value))
                continue
            fresh = name in case.want and name not in case.keep
            held = empty(value.shape, value.dtype) if fresh else to_device(value)
            results[name] = held
            arguments.append(tensor_map(held, *case.maps[name]) if name in case.maps else held.pointer)
        plan = Plan(factory, constants, _three(case.grid), _three(case.block), case.shared_bytes, early=False)
        launch(plan, arguments, gpu)
        error = error_of({name: to_host(results[name]) for name in case.want}, case.want)
        if not error <= case.tolerance:
            raise AssertionError(f"{step.title}, on the GPU: relative error {error:.2g}")
        step.microseconds = microseconds(lambda: launch(plan, arguments, gpu, current_stream()))
        step.gpu_bytes, step.gpu_flops = case.bytes, case.flops
        step.share = case.bytes / (step.microseconds * 1e-6) / _copy_speed()


def _three(value):
    value = (value,) if isinstance(value, int) else tuple(value)
    return value + (1,) * (3 - len(value))


def microseconds(call, calls=4):
    """Median microseconds of a call on the GPU, of some in a CUDA graph: what a launch costs the host is in no figure."""
    from nbkernels.launch.graph import Stream
    from nbkernels.profiling.timing import EventClock, captured, time_replays

    stream = Stream()
    return time_replays(captured([call] * calls, stream), calls, EventClock(stream.handle)).microseconds


def _copy_speed():
    """Bytes a second, read and written, of a large copy on this GPU; measured once."""
    from nbkernels.profiling.timing import copy_speed

    return copy_speed()


def peaks():
    """(float32 operations a second, bytes a second) of the GPU: its clocks and units as the driver gives them, and a measured
    copy. None where there is no GPU."""
    if _session.gpu is None:
        return None
    from cuda.bindings import driver

    from nbkernels.launch.launcher import check

    kinds = driver.CUdevice_attribute
    clock = check(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 0))[0] * 1e3
    lanes = 64 if _session.gpu.arch.startswith("sm_80") else 128  # float32 units of a multiprocessor, programming guide
    return 2 * clock * lanes * _session.gpu.sm_count, _copy_speed()
