"""Kernels taken apart without a GPU: PTX and SASS beside the Python line each instruction came from, and what each line did.

An operation's kernels are those that it launches for a small shape (or a given one) on an architecture; a function of the user's
own is compiled for the types of its arguments.
"""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nbkernels.emulator.numba_kernel import compiled
from nbkernels.launch import compile as compiling
from nbkernels.launch.device import EMULATED_SHARED_BYTES, EMULATED_SM_COUNT, Device, device, parse_arch, use
from nbkernels.launch.emulated import counted, planned
from nbkernels.profiling.disassembly import (
    access_width,
    instruction_class,
    line_of,
    name_of,
    ptx_instructions,
    ptx_with_source,
    sass_instructions,
)
from nbkernels.profiling.operations import DeviceMaker, checked_dtype, checked_shape, operation
from nbkernels.profiling.resources import LIMITS, RESERVED_SHARED


@dataclass(frozen=True)
class Kernel:
    """One kernel of an architecture. ptx: its text; assemble: a function that gives its cubin; report: of a run, or None."""

    name: str
    heading: str
    ptx: str
    assemble: object
    report: object = None

    @cached_property
    def ptx_instructions(self):
        """Its PTX as Instructions."""
        return ptx_instructions(self.ptx)

    @cached_property
    def sass_instructions(self):
        """Its SASS as Instructions, with live registers. Raises as ``disassembly.sass_instructions``."""
        return sass_instructions(self.assemble())


def launches(name, *, dtype="bfloat16", arch="sm_90a", shape=None):
    """Run an operation once on the emulator: [(Plan, Report of what each source line did)], one a launch.

    shape: default a small one. ValueError for an operation, shape, dtype or architecture that is not known; EmulatorError where a
    kernel does something wrong.
    """
    entry, shape, dtype = _checked(name, shape, dtype)
    with device("emulator", arch=arch), counted() as done:
        args, kwargs = entry.make(DeviceMaker(dtype), *shape)
        entry.call(*args, **kwargs)
    return done


def plans(name, *, dtype="bfloat16", arch="sm_90a", shape=None):
    """The Plans of an operation's launches, in their order, for any architecture; nothing runs. ValueError as ``launches``."""
    entry, shape, dtype = _checked(name, shape, dtype)
    capability = parse_arch(arch)[:2]
    if capability in LIMITS:
        shared_bytes = LIMITS[capability].shared_bytes - RESERVED_SHARED
    else:
        shared_bytes = EMULATED_SHARED_BYTES.get(capability, min(EMULATED_SHARED_BYTES.values()))
    stand_in = Device("emulator", f"plans for {arch}", arch, EMULATED_SM_COUNT, shared_bytes, 2**40)
    with use(stand_in), planned() as done:
        args, kwargs = entry.make(DeviceMaker(dtype), *shape)
        entry.call(*args, **kwargs)
    return [plan for plan, _ in done]


def ptx_of(name, *, dtype="bfloat16", arch="sm_90a", shape=None):
    """The PTX of every kernel that an operation launches, in the order of its launches, each once."""
    return [kernel.ptx for kernel in kernels(name, dtype=dtype, arch=arch, shape=shape)]


def kernels(name, *, dtype="bfloat16", arch="sm_90a", shape=None, run=False):
    """The Kernels that an operation launches, each once. run: count what each line did, where the emulator knows the arch."""
    reports = {}
    if run and parse_arch(arch)[:2] in EMULATED_SHARED_BYTES:
        for plan, report in launches(name, dtype=dtype, arch=arch, shape=shape):
            reports.setdefault((plan.factory, plan.constants), report)
    found = {}
    for plan in plans(name, dtype=dtype, arch=arch, shape=shape):
        key = plan.factory, plan.constants
        if key in found:
            continue
        text = compiling.ptx(*key, arch)
        found[key] = Kernel(
            compiling.entry_name(text),
            f"grid {plan.grid}, block {plan.block}, {plan.shared_bytes} bytes of dynamic shared memory",
            text,
            lambda key=key: compiling.cubin(*key, arch)[0],
            reports.get(key),
        )
    return list(found.values())


def own_kernel(place, signature, *, arch="sm_90a"):
    """The Kernel of a function in a file: place "path.py:function", signature "float32[::1], int32" in Numba's words.

    The file is run, as an import would. ValueError where it, the function or the signature is not what was wanted, and for what
    Numba cannot compile.
    """
    from numba.core.errors import NumbaError

    path, _, name = place.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{place}: {path or place} is not a file, wanted path.py:function")
    if not signature:
        raise ValueError(f"{place}: its arguments' types are wanted, as --signature 'float32[::1], int32'")
    parse_arch(arch)
    try:
        module = _module(Path(path))
    except Exception as error:  # a stranger's file: anything can come of it
        raise ValueError(f"{place}: the file does not run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(getattr(function, "py_func", function)):
        raise ValueError(f"{place}: there is no function {name!r} in that file")
    types = _types(signature)
    try:
        text = compiled(function, types, arch)
    except (NumbaError, TypeError) as error:
        raise ValueError(f"{place}: it does not compile: {_in_short(error)}") from error
    return Kernel(name, f"{place} of {signature}", text, lambda: compiling.assemble(text, arch))


def _in_short(error):
    """The lines of an error of Numba's that say what and where, as one."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(("During:", "^")))[:600]


def _module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as where it is run as a program
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _types(signature):
    from numba.core import sigutils

    text = signature if "(" in signature.partition("[")[0] else f"void({signature})"
    try:
        arguments, _ = sigutils.normalize_signature(text)
    except Exception as error:  # it is evaluated, so anything can come of it
        raise ValueError(f"signature: {signature!r} is not in Numba's words ({error})") from error
    return arguments


def _checked(name, shape, dtype):
    entry = operation(name)
    return entry, checked_shape(entry, entry.small if shape is None else shape), checked_dtype(dtype)


# ---- as text -------------------------------------------------------------------------------------------------------------


def ptx_listing(kernel):
    """PTX with Python lines, the counts by class and the access widths as comments."""
    return f"{ptx_with_source(kernel.ptx)}\n{_summary(kernel.ptx_instructions)}"


def sass_listing(kernel):
    """SASS with Python lines, live registers in front of each instruction, and the counts at its end."""
    out, last = [f"// {kernel.name}: {kernel.heading}", "// live registers, instruction"], None
    for instruction in kernel.sass_instructions:
        if instruction.source != last and instruction.source is not None:
            out.append(f"// {name_of(instruction.source)}  {line_of(instruction.source)}")
        last = instruction.source
        live = "" if instruction.live is None else str(instruction.live)
        out.append(f"{live:>4}    {instruction.text}")
    pressed = max((i for i in kernel.sass_instructions if i.live), key=lambda i: i.live, default=None)
    if pressed is not None:
        where = f" at {name_of(pressed.source)}" if pressed.source else ""
        out.append(f"// most registers live: {pressed.live}{where}")
    return "\n".join([*out, _summary(kernel.sass_instructions)])


def _summary(instructions):
    classes = Counter(map(instruction_class, instructions))
    widths = Counter(filter(None, map(access_width, instructions)))
    lines = ["// instructions: " + ", ".join(f"{name} {count}" for name, count in classes.most_common())]
    if widths:
        accesses = (f"{count} of {size} bytes {space}" for (space, size), count in sorted(widths.items()))
        lines.append("// accesses of a lane: " + ", ".join(accesses))
    return "\n".join(lines)


@dataclass
class Line:
    """A Python line: instructions in PTX and SASS, the most registers live at one of the latter, widths of its accesses."""

    source: tuple
    ptx: int = 0
    sass: int = 0
    live: int = 0
    widths: tuple = ()


def by_line(kernel):
    """[Line] in the order of files and lines. Where there is no disassembler the SASS is left out."""
    lines = {}

    def line(instruction):
        return lines.setdefault(instruction.source or ("", 0), Line(instruction.source or ("", 0)))

    for instruction in kernel.ptx_instructions:
        line(instruction).ptx += 1
    try:
        sass = kernel.sass_instructions
    except FileNotFoundError:
        sass = []
    for instruction in sass:
        entry = line(instruction)
        entry.sass += 1
        entry.live = max(entry.live, instruction.live or 0)
        width = access_width(instruction)
        if width is not None and width not in entry.widths:
            entry.widths += (width,)
    return [lines[source] for source in sorted(lines)]


def source_table(kernel):
    """A rich table of ``by_line``, with what the run did where there was one."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{kernel.name}: {kernel.heading}"), title_justify="left")
    table.add_column("line", justify="right", no_wrap=True)
    table.add_column("source", overflow="ellipsis", no_wrap=True, max_width=48)
    headings = ["PTX", "SASS", "live", "bytes a lane"]
    if kernel.report is not None:
        headings += ["warp instr.", "sectors", "passes", "divergent"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for line in by_line(kernel):
        widths = ", ".join(f"{size} {space}" for space, size in line.widths)
        row = [
            name_of(line.source) if line.source[0] else "",
            Text(line_of(line.source) if line.source[0] else "(no line)"),  # no markup: brackets are indices
            f"{line.ptx or ''}",
            f"{line.sass or ''}",
            f"{line.live or ''}",
            widths,
        ]
        if kernel.report is not None:
            did = kernel.report.by_line.get(line.source)
            row += (
                ["", "", "", ""]
                if did is None
                else [
                    f"{did.warp_instructions or ''}",
                    f"{did.sectors}/{did.sectors_needed}" if did.sectors else "",
                    f"{did.shared_passes}/{did.shared_passes_needed}" if did.shared_passes else "",
                    f"{did.divergent_branches or ''}",
                ]
            )
        table.add_row(*row)
    return table
