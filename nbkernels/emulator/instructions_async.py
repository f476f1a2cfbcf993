"""cp.async: copies whose data arrive when they are waited for, and not before.

A copy is checked when it is issued and carried out at the wait that covers it, so that a kernel which reads too early, or
overwrites the source too early, gets the wrong data here as it might on a GPU.
"""

import numpy as np

from nbkernels.emulator import parser
from nbkernels.emulator.copies import COPY_SHAPES, Copy, land, part_of
from nbkernels.emulator.groups import group_of
from nbkernels.emulator.instructions_bulk import barrier_at, bind_bulk, shared_addresses
from nbkernels.emulator.instructions_memory import locator
from nbkernels.emulator.machine import DTYPES
from nbkernels.emulator.registry import instruction

U32 = np.dtype(np.uint32)


@instruction("cp")
def bind_copy(m, i):
    words = i.opcode
    if words[1] != "async":
        raise m.unknown(i, "cp without .async")
    if words[2] == "commit_group":
        return _bind_commit(m)
    if words[2] in ("wait_group", "wait_all"):
        return _bind_wait(m, None if words[2] == "wait_all" else int(i.operands[0].value))
    if words[2] == "bulk":
        return bind_bulk(m, i)
    if words[2] == "mbarrier":
        return _bind_mbarrier_arrive(m, i)
    if words[2] not in ("ca", "cg"):
        raise m.unknown(i, f"cp.async.{words[2]}")
    return _bind_issue(m, i)


def _bind_issue(m, i):
    size = int(i.operands[2].value)
    if size not in COPY_SHAPES:
        raise m.unknown(i, f"cp.async of {size} bytes")
    to_shared = locator(m, i, i.operands[0], "shared", size, "copy")
    whole = locator(m, i, i.operands[1], "global", size, "read")
    byte = locator(m, i, i.operands[1], "global", 1, "read")
    amount = None
    ignore = None
    if len(i.operands) > 3:
        operand = i.operands[3]
        if isinstance(operand, parser.Register) and DTYPES[operand.type] == np.dtype(bool):
            ignore = m.source(i, operand, np.dtype(bool))
        elif not (isinstance(operand, parser.Register) and operand.type == "b64"):
            amount = m.source(i, operand, U32)

    def subset(group, held):
        if held.all():
            return group
        mask = np.zeros(m.lanes, bool)
        mask[group.sel] = held
        return group_of(mask)

    def issue(group):
        ((_, _, target),) = to_shared(group)
        parts, ragged = [], []
        if amount is None and ignore is None:
            parts = list(whole(group))
        else:
            count = amount[group.sel] if amount is not None else np.where(ignore[group.sel], 0, size)
            if int(count.max()) > size:
                bad = int(np.argmax(count))
                raise m.fault(i, group.lanes[bad], f"cp.async source size {int(count[bad])} is more than {size} bytes")
            full = count == size
            some = (count > 0) & ~full
            if full.any():
                places = np.flatnonzero(full)
                for buffer, which, offsets in whole(subset(group, full)):
                    parts.append((buffer, places if which is None else places[which], offsets))
            if some.any():
                places = np.flatnonzero(some)
                for buffer, which, offsets in byte(subset(group, some)):
                    for n, offset in zip(places if which is None else places[which], offsets, strict=True):
                        if offset % size:
                            raise m.fault(
                                i, group.lanes[n], f"cp.async source {int(offset):#x} is no multiple of {size}"
                            )
                        if offset + int(count[n]) > buffer.size:
                            raise m.fault(
                                i,
                                group.lanes[n],
                                f"cp.async reads {int(count[n])} bytes at byte {int(offset)} of {buffer.name}, which "
                                f"ends at {buffer.size}",
                            )
                        ragged.append((int(n), int(count[n]), buffer, int(offset)))
        lanes = group.lanes
        m.pending_copies.append(Copy(i, lanes, target, size, parts, ragged, m.copy_group[lanes].copy()))

    return issue


def _bind_commit(m):
    def commit(group):
        m.copy_group[group.sel] += 1

    return commit


def _bind_wait(m, pending):
    def wait(group):
        if not m.pending_copies:
            return
        kept = []
        mask = group.mask
        for copy in m.pending_copies:
            due = mask[copy.lanes]
            if pending is not None:
                due = due & (copy.number < m.copy_group[copy.lanes] - pending)
            if due.all():
                land(m, copy)
            elif due.any():
                land(m, part_of(copy, due))
                kept.append(part_of(copy, ~due))
            else:
                kept.append(copy)
        m.pending_copies = kept

    return wait


def _bind_mbarrier_arrive(m, i):
    """cp.async.mbarrier.arrive: the arrival comes when the lane's copies have landed, which is when somebody waits."""
    addresses = shared_addresses(m, i, i.operands[0])
    counted = "noinc" in i.opcode

    def step(group):
        at = addresses(group)
        lanes = group.lanes
        keys = m.lane_block[lanes] * (1 << 32) + at
        for key in np.unique(keys):
            mine = keys == key
            barrier = barrier_at(m, i, int(lanes[np.argmax(mine)]), at[np.argmax(mine)])
            count = int(np.count_nonzero(mine))
            if not counted:
                barrier.pending += count
            barrier.arrivals.append((i, lanes[mine], at[mine], np.ones(count, np.int64)))

    return step
