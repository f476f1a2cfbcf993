"""Copies under way: those of cp.async, a few bytes a lane, and bulk copies, whose bytes move in arrays of 16-byte chunks."""

import numpy as np

# bytes a lane -> how they move
COPY_SHAPES = {4: (np.uint32, 1), 8: (np.uint64, 1), 16: (np.uint64, 2)}
CHUNK = 16


class Copy:
    """One cp.async of a group of lanes: where each lane's bytes go, where they come from, and its commit group."""

    __slots__ = ("instruction", "lanes", "number", "parts", "ragged", "size", "target")

    def __init__(self, instruction, lanes, target, size, parts, ragged, number):
        self.instruction = instruction
        self.lanes = lanes  # [n]
        self.target = target  # byte offset in the machine's shared memory [n]
        self.size = size
        self.parts = parts  # (buffer, positions in lanes, byte offsets) of lanes that copy all bytes
        self.ragged = ragged  # (position, bytes, buffer, byte offset) of lanes that copy only the first bytes
        self.number = number  # commit group [n]


def part_of(copy, held):
    """The copies of some of the lanes."""
    position = np.cumsum(held) - 1
    parts = []
    for buffer, which, offsets in copy.parts:
        chosen = held if which is None else held[which]
        places = np.flatnonzero(held) if which is None else which[chosen]
        if places.size:
            parts.append((buffer, position[places], offsets[chosen]))
    ragged = [(int(position[n]), count, buffer, offset) for n, count, buffer, offset in copy.ragged if held[n]]
    return Copy(copy.instruction, copy.lanes[held], copy.target[held], copy.size, parts, ragged, copy.number[held])


def land(m, copy):
    """Carry a copy out."""
    dtype, vector = COPY_SHAPES[copy.size]
    shift = copy.size.bit_length() - 1
    rows = np.zeros((copy.lanes.size, vector), dtype)
    for buffer, which, offsets in copy.parts:
        values = buffer.view(dtype, vector).take(offsets >> shift, axis=0).reshape(-1, vector)
        if which is None:
            rows[:] = values
        else:
            rows[which] = values
    if copy.ragged:
        as_bytes = rows.view(np.uint8).reshape(copy.lanes.size, copy.size)
        for place, count, buffer, offset in copy.ragged:
            as_bytes[place, :count] = buffer.data[offset : offset + count]
    view = m.shared.view(dtype, vector)
    view[copy.target >> shift] = rows if vector > 1 else rows[:, 0]
    if m.checks is not None:
        m.checks.settle(copy.instruction, copy.lanes, copy.target, copy.size)


def land_all(m, lanes):
    """Carry out all copies of these lanes."""
    mask = np.zeros(m.lanes, bool)
    mask[lanes] = True
    kept = []
    for copy in m.pending_copies:
        due = mask[copy.lanes]
        if due.any():
            land(m, copy if due.all() else part_of(copy, due))
        if not due.all():
            kept.append(part_of(copy, ~due) if due.any() else copy)
    m.pending_copies = kept


class Move:
    """Equal pieces of a bulk copy. source None: the bytes become ``fill``. Offsets are int64 [n] in bytes, size bytes each."""

    __slots__ = ("fill", "size", "source", "start", "target", "to")

    def __init__(self, source, start, target, to, size, fill=0):
        self.source, self.start = source, np.atleast_1d(np.asarray(start, np.int64))
        self.target, self.to = target, np.atleast_1d(np.asarray(to, np.int64))
        self.size, self.fill = size, fill

    def carry_out(self):
        """Move the bytes."""
        if self.source is None:
            span = np.arange(self.size)
            self.target.data[self.to[:, None] + span] = self.fill
        elif self.size == CHUNK and not ((self.start | self.to) & (CHUNK - 1)).any():
            chunks = self.source.view(np.uint64, 2).take(self.start >> 4, axis=0)
            self.target.view(np.uint64, 2)[self.to >> 4] = chunks
        else:
            span = np.arange(self.size)
            self.target.data[self.to[:, None] + span] = self.source.data[self.start[:, None] + span]


class BulkCopy:
    """One bulk copy of a lane: its moves, and how many bytes it reports to its mbarrier."""

    __slots__ = ("instruction", "lane", "moves", "size")

    def __init__(self, instruction, lane, moves, size):
        self.instruction = instruction
        self.lane = lane
        self.moves = moves
        self.size = size

    def carry_out(self, m):
        """Move the bytes, and let the checks know that they have come."""
        for move in self.moves:
            move.carry_out()
        if m.checks is not None:
            m.checks.settle_copy(self)
