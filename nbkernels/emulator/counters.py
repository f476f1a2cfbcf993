"""What a launch did, counted by instruction and summed by source line.

A warp's access to global memory is served in 32-byte sectors: those it touches, against those that its bytes would fill if
they lay side by side. A warp's access to shared memory takes a pass for every word that one of the 32 banks must give beyond
the first; accesses of 8 and 16 bytes a lane go in halves and quarters of a warp.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, fields

import numpy as np

WARP, SECTOR, BANKS, WORD = 32, 32, 32, 4

# first word of an opcode -> class; what is not here is "other"
_CLASSES = {
    "memory": ("ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix"),
    "tensor core": ("mma", "wgmma"),
    "warp": ("shfl", "vote", "match", "redux", "elect", "movmatrix", "activemask"),
    "barrier": ("bar", "barrier", "mbarrier", "fence", "membar"),
    "branch": ("bra", "brx", "ret", "exit", "call"),
    "convert": ("cvt", "cvta"),
    "special function": ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt", "div"),
}
_CLASS_OF = {name: group for group, names in _CLASSES.items() for name in names}
_FLOAT_TYPES = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_FLOPS = {"add": 1, "sub": 1, "mul": 1, "fma": 2, "mad": 2, "div": 1}


@dataclass
class Counts:
    """Sums over a launch. Lane counts are threads, warp counts are instructions as the hardware issues them."""

    lane_instructions: int = 0
    warp_instructions: int = 0
    divergent_branches: int = 0
    global_read_bytes: int = 0
    global_written_bytes: int = 0
    sectors: int = 0
    sectors_needed: int = 0
    shared_passes: int = 0
    shared_passes_needed: int = 0
    flops: int = 0

    def add(self, other):
        """Add another's sums."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))


def instruction_class(instruction):
    """The class an instruction is counted in: "memory", "integer", "float", …"""
    return class_of(instruction.opcode)


def class_of(opcode):
    """The class of the words of a PTX opcode."""
    if opcode[0] in _CLASS_OF:
        return _CLASS_OF[opcode[0]]
    return "float" if any(word in _FLOAT_TYPES for word in opcode[1:]) else "integer"


def flops_a_lane(instruction):
    """Floating-point (or tensor-core integer) operations of one lane's execution; a fused multiply-add is two."""
    words = instruction.opcode
    shape = next((w for w in words if w[0] == "m" and "n" in w and "k" in w and w[1:2].isdigit()), None)
    if words[0] in ("mma", "wgmma") and shape:
        m, n, k = (int(v) for v in shape[1:].replace("n", " ").replace("k", " ").split())
        return 2 * m * n * k // (WARP if words[0] == "mma" else 4 * WARP)
    if words[-1] in _FLOAT_TYPES:
        return _FLOPS.get(words[0], 0) * (2 if words[-1].endswith("x2") else 1)
    return 0


class Counters:
    """Counts of one machine; ``watch`` counts an access, ``count_block`` the instructions of a basic block."""

    def __init__(self, machine):
        self.machine = machine
        self.by_instruction = defaultdict(Counts)  # index of the instruction -> Counts
        self.numbers = {id(i): n for n, i in enumerate(machine.function.instructions)}
        self.blocks = defaultdict(lambda: [0, 0])  # basic block -> [lanes, warps]

    def count_block(self, block, group):
        """A group executes a basic block."""
        entry = self.blocks[block]
        entry[0] += group.count
        if isinstance(group.sel, slice):
            entry[1] += -(-group.sel.stop // WARP) - group.sel.start // WARP
        else:
            entry[1] += np.unique(group.sel // WARP).size

    def count_divergence(self, instruction, taken, rest):
        """A branch parted a group: the warps that went both ways are counted."""
        both = taken.mask.reshape(-1, WARP).any(axis=1) & rest.mask.reshape(-1, WARP).any(axis=1)
        self.by_instruction[self.numbers[id(instruction)]].divergent_branches += int(np.count_nonzero(both))

    def watch(self, instruction, locate, size, mode):
        """A locate function that also counts the access."""
        counts = self.by_instruction[self.numbers[id(instruction)]]
        m = self.machine

        def watched(group):
            parts = locate(group)
            for buffer, which, offsets in parts:
                if buffer is m.local:
                    continue
                lanes = group.lanes if which is None else group.lanes[which]
                if buffer is m.shared:
                    self._count_shared(counts, lanes, offsets, size)
                else:
                    self._count_global(counts, lanes, offsets, size, mode)
            return parts

        return watched

    @staticmethod
    def _count_global(counts, lanes, offsets, size, mode):
        warps = (lanes // WARP).astype(np.int64) << 40
        if mode != "read":
            counts.global_written_bytes += size * lanes.size
        if mode in ("read", "atomic", "strong read"):
            counts.global_read_bytes += size * lanes.size
        steps = np.arange(0, max(size, 1), SECTOR)
        counts.sectors += np.unique((warps | (offsets // SECTOR))[:, None] + steps // SECTOR).size
        pieces = np.unique(warps | (offsets // size))
        bytes_of = np.bincount(np.unique(pieces >> 40, return_inverse=True)[1]) * size
        counts.sectors_needed += int((-(-bytes_of // SECTOR)).sum())

    @staticmethod
    def _count_shared(counts, lanes, offsets, size):
        # how many lanes one pass serves at most, by the width of their accesses
        together = WARP * WORD // max(size, WORD)
        step = np.int64(1) << 34
        phase = (lanes // WARP).astype(np.int64) * WARP + lanes % WARP // together
        words = np.arange(0, max(size, WORD), WORD)
        touched = np.unique((phase * step)[:, None] + (offsets[:, None] + words) // WORD)
        bank = touched // step * BANKS + touched % step % BANKS
        places, demand = np.unique(bank, return_counts=True)
        owner, first = np.unique(places // BANKS, return_index=True)
        counts.shared_passes += int(np.maximum.reduceat(demand, first).sum())
        counts.shared_passes_needed += owner.size

    def totals(self):
        """index of the instruction -> Counts, with the instruction counts filled in."""
        m = self.machine
        starts = sorted(m.block_of)
        for block, (lanes, warps) in self.blocks.items():
            if block >= len(starts) - 1:
                continue
            for number in range(starts[block], starts[block + 1]):
                counts = self.by_instruction[number]
                counts.lane_instructions += lanes
                counts.warp_instructions += warps
                counts.flops += lanes * flops_a_lane(m.function.instructions[number])
        self.blocks.clear()
        return self.by_instruction


class Report:
    """The counts of a launch: ``total``, ``by_line`` ((file, line) -> Counts) and ``by_class`` (warp instructions)."""

    def __init__(self, name, instructions, by_instruction):
        self.name = name
        self.total = Counts()
        self.by_line = defaultdict(Counts)
        self.by_class = defaultdict(int)
        for number, counts in by_instruction.items():
            instruction = instructions[number]
            self.total.add(counts)
            self.by_line[instruction.source or ("", 0)].add(counts)
            self.by_class[instruction_class(instruction)] += counts.warp_instructions

    def table(self):
        """A rich table: one row a source line, with its text where the file can be read."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.name}: what each line did", title_justify="left")
        table.add_column("line", justify="right", no_wrap=True)
        table.add_column("source", overflow="ellipsis", no_wrap=True, max_width=60)
        for heading in (
            "warp\ninstr.",
            "divergent",
            "global\nKB",
            "sectors\n/ needed",
            "shared passes\n/ needed",
            "MFLOP",
        ):
            table.add_column(heading, justify="right")
        for (file, line), counts in [*sorted(self.by_line.items()), (("", "total"), self.total)]:
            table.add_row(
                f"{os.path.basename(file)}:{line}" if file else str(line),
                Text(_source_line(file, line)),  # no markup: brackets are indices
                f"{counts.warp_instructions}",
                f"{counts.divergent_branches or ''}",
                f"{(counts.global_read_bytes + counts.global_written_bytes) / 1024:.1f}",
                f"{counts.sectors} / {counts.sectors_needed}" if counts.sectors else "",
                f"{counts.shared_passes} / {counts.shared_passes_needed}" if counts.shared_passes else "",
                f"{counts.flops / 1e6:.3f}" if counts.flops else "",
            )
        return table

    def print(self):
        """Print the table, and the instructions by class."""
        print_table(self.table())
        classes = sorted(self.by_class.items(), key=lambda entry: -entry[1])
        print("warp instructions: " + ", ".join(f"{name} {count}" for name, count in classes))


LEAST_SOURCE = 24  # characters of a source line that are worth reading


def print_table(table):
    """Print a rich table whose column "source" gives way on a narrow terminal; figures never do.

    Where it goes to a file or a pipe each row is one whole line.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)

    def natural():
        return Measurement.get(console, console.options.update(width=10_000), table).maximum

    (source,) = (column for column in table.columns if column.header == "source")
    if console.is_terminal and natural() > console.width:
        source.max_width = max(LEAST_SOURCE, source.max_width - (natural() - console.width))
    console.width = max(console.width, natural())
    console.print(table)


def _source_line(file, line):
    import linecache

    return linecache.getline(file, line).strip() if file else ""
