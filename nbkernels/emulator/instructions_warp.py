"""Instructions that the lanes of a warp execute together: shuffles, votes, matches and reductions.

The machine has brought the member lanes together before a step here runs. Its group may hold lanes with different member
masks (two halves of a warp, each with its own), so every result is computed for each lane from its own mask.
"""

import numpy as np

from nbkernels.emulator import parser
from nbkernels.emulator.groups import FULL, RUN
from nbkernels.emulator.machine import DTYPES, WARP
from nbkernels.emulator.registry import warp_instruction

U32, BOOL = np.dtype(np.uint32), np.dtype(bool)


def warp_bits(mask):
    """bool [lanes] -> uint32 [warps]: bit l is lane l of the warp."""
    return np.packbits(mask.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32)[:, 0]


def shuffle_source(mode, lane, b, c):
    """(source lane, whether it is in range) of a shuffle; arrays or scalars of int64. The lane itself where out of range."""
    b, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    highest = (lane & segment) | (clamp & ~segment & 31)
    lowest = lane & segment
    if mode == "up":
        source = lane - b
        valid = source >= highest
    elif mode == "down":
        source = lane + b
        valid = source <= highest
    elif mode == "bfly":
        source = lane ^ b
        valid = source <= highest
    elif mode == "idx":
        source = lowest | (b & ~segment & 31)
        valid = source <= highest
    else:
        raise KeyError(mode)
    return np.where(valid, source, lane), valid


@warp_instruction("shfl")
def bind_shuffle(m, i):
    words = i.opcode
    if words[1] != "sync":
        raise m.unknown(i, "shfl without .sync")
    mode = words[2]
    target, predicate = i.operands[0], None
    if isinstance(target, parser.Pair):
        target, predicate = target.first, m.destination(i, target.second, BOOL)
    place = m.destination(i, target, U32)
    a, b, c = (m.source(i, o, U32) for o in i.operands[1:4])
    fixed = b.strides[0] == 0 and c.strides[0] == 0
    if fixed:
        order, valid = shuffle_source(mode, np.arange(WARP), int(b[0]), int(c[0]))
    shuffle_source(mode, 0, 0, 0)  # an unknown mode is found when the kernel is bound

    def step(group):
        sel = group.sel
        if fixed and group.kind in (FULL, RUN) and group.count % WARP == 0 and sel.start % WARP == 0:
            if place is not None:
                place[sel] = a[sel].reshape(-1, WARP).take(order, axis=1).reshape(-1)
            if predicate is not None:
                predicate[sel].reshape(-1, WARP)[:] = valid
            return
        lanes = group.lanes
        lane = lanes & 31
        source, inside = shuffle_source(mode, lane, b[lanes].astype(np.int64), c[lanes].astype(np.int64))
        values = a[lanes - lane + source]
        if place is not None:
            place[lanes] = values
        if predicate is not None:
            predicate[lanes] = inside

    return i.operands[4], step


@warp_instruction("vote")
def bind_vote(m, i):
    words = i.opcode
    if words[1] != "sync":
        raise m.unknown(i, "vote without .sync")
    mode = words[2]
    value = i.operands[1]
    negated = isinstance(value, parser.Not)
    predicate = m.source(i, value.register if negated else value, BOOL)
    members = m.source(i, i.operands[2], U32)
    place = m.destination(i, i.operands[0], U32 if mode == "ballot" else BOOL)
    if mode not in ("ballot", "any", "all", "uni"):
        raise m.unknown(i, f"vote.{mode}")

    def step(group):
        lanes = group.lanes
        held = np.zeros(m.lanes, bool)
        held[lanes] = predicate[lanes] ^ negated
        warps = lanes // WARP
        voters = warp_bits(group.mask)[warps] & members[lanes]
        votes = warp_bits(held)[warps] & voters
        if mode == "ballot":
            place[lanes] = votes
        elif mode == "any":
            place[lanes] = votes != 0
        elif mode == "all":
            place[lanes] = votes == voters
        else:
            place[lanes] = (votes == voters) | (votes == 0)

    return i.operands[2], step


@warp_instruction("match")
def bind_match(m, i):
    words = i.opcode
    dtype = DTYPES[words[-1]]
    target, predicate = i.operands[0], None
    if isinstance(target, parser.Pair):
        target, predicate = target.first, m.destination(i, target.second, BOOL)
    place = m.destination(i, target, U32)
    source = m.source(i, i.operands[1], dtype)
    members = m.source(i, i.operands[2], U32)
    everyone = "all" in words

    def step(group):
        values = np.ascontiguousarray(source).reshape(-1, WARP)
        equal = values[:, :, None] == values[:, None, :]
        bits = np.packbits(equal, axis=2, bitorder="little").view(np.uint32)[:, :, 0].reshape(-1)
        lanes = group.lanes
        voters = warp_bits(group.mask)[lanes // WARP] & members[lanes]
        same = bits[lanes] & voters
        if everyone:
            agree = same == voters
            if place is not None:
                place[lanes] = np.where(agree, voters, np.uint32(0))
            if predicate is not None:
                predicate[lanes] = agree
        else:
            place[lanes] = same

    return i.operands[2], step


_REDUCTIONS = {
    "add": (np.add, 0),
    "and": (np.bitwise_and, -1),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
}


@warp_instruction("redux")
def bind_reduce(m, i):
    words = i.opcode
    kind = words[-1]
    dtype = DTYPES[kind]
    if dtype.kind == "f":
        raise m.unknown(i, "redux of floats")
    name = words[2]
    if name in ("min", "max"):
        info = np.iinfo(dtype)
        operation, neutral = (np.minimum, info.max) if name == "min" else (np.maximum, info.min)
    else:
        operation, neutral = _REDUCTIONS[name]
    neutral = np.array(neutral).astype(dtype)
    place = m.destination(i, i.operands[0], dtype)
    source = m.source(i, i.operands[1], dtype)
    members = m.source(i, i.operands[2], U32)
    lane_bit = np.uint32(1) << np.arange(WARP, dtype=np.uint32)

    def step(group):
        values = np.where(group.mask, source, neutral).reshape(-1, WARP)
        masks = np.unique(members[group.sel])
        for mask in masks:
            inside = (mask & lane_bit) != 0
            totals = operation.reduce(np.where(inside, values, neutral), axis=1, dtype=dtype)
            lanes = group.lanes
            lanes = lanes[members[lanes] == mask]
            place[lanes] = totals[lanes // WARP]

    return i.operands[2], step


@warp_instruction("elect")
def bind_elect(m, i):
    """The lowest member lane is elected."""
    target = i.operands[0]
    place, predicate = m.destination(i, target.first, U32), m.destination(i, target.second, BOOL)
    members = m.source(i, i.operands[1], U32)

    def step(group):
        lanes = group.lanes
        voters = warp_bits(group.mask)[lanes // WARP] & members[lanes]
        lowest = np.log2((voters & (~voters + np.uint32(1))).astype(np.float64)).astype(np.uint32)
        if place is not None:
            place[lanes] = lowest
        if predicate is not None:
            predicate[lanes] = lowest == (lanes & 31)

    return i.operands[1], step
