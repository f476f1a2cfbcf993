"""mbarriers and bulk copies (sm_90): one thread asks, the copy engine brings, an mbarrier counts the bytes.

A copy's data land when somebody waits for them, and not before. Waiting lanes are parked until their mbarrier's phase ends.
"""

import numpy as np

from nbkernels.emulator import parser, tensor_map
from nbkernels.emulator.copies import CHUNK, BulkCopy, Move, land_all
from nbkernels.emulator.errors import LaunchError
from nbkernels.emulator.groups import group_of
from nbkernels.emulator.instructions_memory import address_source, locator, space_of
from nbkernels.emulator.machine import SHARED_START
from nbkernels.emulator.memory import SHARED_WINDOW
from nbkernels.emulator.registry import BATCH_ENDS, END_BINDERS, instruction

U32, U64, BOOL = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(bool)

# a lane whose test fails this often in a row waits as in try_wait, so that a loop around test_wait ends in a report
PATIENCE = 64


class MBarrier:
    """One mbarrier of a block. copies: those that will report to it, not yet landed; arrivals: cp.async arrivals to come."""

    __slots__ = ("arrivals", "clock", "copies", "done_clock", "expected", "pending", "phase", "tx")

    def __init__(self, expected):
        self.expected = self.pending = expected
        self.tx = 0
        self.phase = 0
        self.copies = []
        self.arrivals = []
        self.clock = self.done_clock = 0


def shared_addresses(m, i, operand):
    """A function of a group: the shared address (int64) of each lane's 8-byte object, checked."""
    locate = locator(m, i, operand, "shared" if space_of(i) == "shared" else "generic", 8, "atomic", checked=False)

    def addresses(group):
        parts = locate(group)
        buffer, _, offsets = parts[0]
        if len(parts) > 1 or buffer is not m.shared:
            raise m.fault(i, m.first_lane(group), "an mbarrier outside shared memory")
        if (offsets // m.shared_stride != m.lane_block[group.sel]).any():
            raise m.unknown(i, "an mbarrier of another block of the cluster")
        return offsets % m.shared_stride

    return addresses


def barrier_at(m, i, lane, address):
    """The MBarrier at a shared address of the lane's block; a fault where none was initialised."""
    found = m.mbarriers.get((int(m.lane_block[lane]), int(address)))
    if found is None:
        raise m.fault(i, lane, f"no mbarrier was initialised at shared address {int(address):#x}")
    return found


def settle_phase(m, key, barrier):
    """End the phase if nothing is pending, and let those go on that wait for it."""
    if barrier.pending < 0:
        raise LaunchError(f"{m.name}: an mbarrier at shared address {key[1]:#x} got more arrivals than it waits for")
    if barrier.pending or barrier.tx:
        return
    barrier.phase += 1
    barrier.pending = barrier.expected
    if m.checks is not None:
        barrier.done_clock = np.maximum(barrier.done_clock, barrier.clock)
    for number, group in m.parked.pop(key, ()):
        m.push(number, group)


def arrive(m, i, lanes, addresses, counts, bytes_expected=None):
    """Lanes arrive at their mbarriers; returns the phase each saw."""
    phases = np.zeros(lanes.size, np.int64)
    blocks = m.lane_block[lanes]
    keys = blocks * (1 << 32) + addresses
    for key in np.unique(keys):
        mine = keys == key
        first = int(lanes[np.argmax(mine)])
        barrier = barrier_at(m, i, first, addresses[np.argmax(mine)])
        phases[mine] = barrier.phase
        if bytes_expected is not None:
            barrier.tx += int(bytes_expected[mine].sum())
        barrier.pending -= int(counts[mine].sum())
        if m.checks is not None:
            mask = np.zeros(m.lanes, bool)
            mask[lanes[mine]] = True
            barrier.clock = np.maximum(barrier.clock, m.checks.publish(group_of(mask))[1].max(axis=0))
        settle_phase(m, (int(blocks[np.argmax(mine)]), int(addresses[np.argmax(mine)])), barrier)
    return phases


@instruction("mbarrier")
def bind_mbarrier(m, i):
    words = i.opcode
    action = words[1]
    if action == "init":
        return _bind_init(m, i)
    if action == "inval":
        addresses = shared_addresses(m, i, i.operands[0])

        def invalidate(group):
            for lane, address in zip(group.lanes, addresses(group), strict=True):
                m.mbarriers.pop((int(m.lane_block[lane]), int(address)), None)

        return invalidate
    if action in ("arrive", "arrive_drop"):
        return _bind_arrive(m, i, action == "arrive_drop")
    if action in ("expect_tx", "complete_tx"):
        return _bind_expect(m, i, 1 if action == "expect_tx" else -1)
    if action == "pending_count":
        place, source = m.destination(i, i.operands[0], U32), m.source(i, i.operands[1], U64)
        return m.apply(lambda s: (s & np.uint64(0xFFFFF)).astype(np.uint32), place, [source], into=False)
    raise m.unknown(i, f"mbarrier.{action}")


def _bind_init(m, i):
    addresses = shared_addresses(m, i, i.operands[0])
    count = m.source(i, i.operands[1], U32)

    def init(group):
        for lane, address in zip(group.lanes, addresses(group), strict=True):
            key = (int(m.lane_block[lane]), int(address))
            m.mbarriers[key] = MBarrier(int(count[lane]))

    return init


def _bind_arrive(m, i, drops):
    expects = "expect_tx" in i.opcode
    operands = list(i.operands)
    place = None if isinstance(operands[0], parser.Address) else m.destination(i, operands.pop(0), U64)
    addresses = shared_addresses(m, i, operands.pop(0))
    amount = m.source(i, operands.pop(0), U32) if operands else None

    def step(group):
        lanes = group.lanes
        at = addresses(group)
        ones = np.ones(lanes.size, np.int64)
        counts = ones if amount is None or expects else amount[lanes].astype(np.int64)
        if drops:
            for lane, address in zip(lanes, at, strict=True):
                barrier_at(m, i, lane, address).expected -= 1
        phases = arrive(m, i, lanes, at, counts, amount[lanes].astype(np.int64) if expects else None)
        if place is not None:
            place[lanes] = phases.astype(np.uint64) << np.uint64(32)

    return step


def _bind_expect(m, i, sign):
    addresses = shared_addresses(m, i, i.operands[0])
    amount = m.source(i, i.operands[1], U32)

    def step(group):
        for lane, address in zip(group.lanes, addresses(group), strict=True):
            barrier = barrier_at(m, i, lane, address)
            barrier.tx += sign * int(amount[lane])
            if sign < 0:
                settle_phase(m, (int(m.lane_block[lane]), int(address)), barrier)

    return step


def _bind_wait(m, i, number):
    """mbarrier.test_wait and try_wait: a block's end, since lanes may have to be parked."""
    place = m.destination(i, i.operands[0], BOOL)
    addresses = shared_addresses(m, i, i.operands[1])
    by_parity = "parity" in i.opcode
    state = m.source(i, i.operands[2], U32 if by_parity else U64)
    patient = i.opcode[1] == "try_wait"
    following = number + 1
    misses = np.zeros(m.lanes, np.int64)

    def end(group):
        lanes = group.lanes
        at = addresses(group)
        blocks = m.lane_block[lanes]
        keys = blocks * (1 << 32) + at
        done = np.zeros(lanes.size, bool)
        for key in np.unique(keys):
            mine = keys == key
            first = int(np.argmax(mine))
            barrier = barrier_at(m, i, int(lanes[first]), at[first])
            land(m, (int(blocks[first]), int(at[first])), barrier)
            wanted = state[lanes[mine]]
            if by_parity:
                done[mine] = (barrier.phase & 1) != (wanted & 1)
            else:
                done[mine] = barrier.phase != (wanted >> np.uint64(32)).astype(np.int64)
            if m.checks is not None and done[mine].any():
                mask = np.zeros(m.lanes, bool)
                mask[lanes[mine & done]] = True
                m.checks.learn(group_of(mask), barrier.done_clock)
        misses[lanes] = np.where(done, 0, misses[lanes] + 1)
        answered = done if patient else done | (misses[lanes] < PATIENCE)
        if place is not None:
            place[lanes] = done
        if answered.all():
            return following
        for key in np.unique(keys[~answered]):
            mine = (keys == key) & ~answered
            mask = np.zeros(m.lanes, bool)
            mask[lanes[mine]] = True
            first = int(np.argmax(mine))
            m.parked.setdefault((int(blocks[first]), int(at[first])), []).append((number, group_of(mask)))
        if answered.any():
            mask = np.zeros(m.lanes, bool)
            mask[lanes[answered]] = True
            m.push(following, group_of(mask))
        return -1

    return end


END_BINDERS["mbarrier.try_wait"] = _bind_wait
END_BINDERS["mbarrier.test_wait"] = _bind_wait


# ---- bulk copies ------------------------------------------------------------------------------------------------------


def land(m, key, barrier):
    """Bring what an mbarrier still waits for."""
    if barrier.arrivals:
        arrivals, barrier.arrivals = barrier.arrivals, []
        for instruction, lanes, addresses, counts in arrivals:
            land_all(m, lanes)
            arrive(m, instruction, lanes, addresses, counts)
    if not barrier.copies:
        return
    copies, barrier.copies = barrier.copies, []
    for copy in copies:
        copy.carry_out(m)
        barrier.tx -= copy.size
        if m.checks is not None:
            mask = np.zeros(m.lanes, bool)
            mask[copy.lane] = True
            barrier.clock = np.maximum(barrier.clock, m.checks.publish(group_of(mask))[1].max(axis=0))
    settle_phase(m, key, barrier)


def bind_bulk(m, i):
    """cp.async.bulk and cp.async.bulk.tensor, their commit_group and wait_group."""
    words = i.opcode
    if "commit_group" in words:
        return _bind_bulk_commit(m)
    if "wait_group" in words:
        return _bind_bulk_wait(m, int(i.operands[0].value))
    if "prefetch" in words:
        return None
    if "multicast::cluster" in words or "im2col" in words:
        raise m.unknown(i, "this form of cp.async.bulk")
    tensor = "tensor" in words
    spaces = [w.partition("::")[0] for w in words if w.partition("::")[0] in ("shared", "global")]
    to_shared = spaces[0] == "shared"
    moves_of = (_tensor_moves if tensor else _plain_moves)(m, i, to_shared)
    if not to_shared:

        def store(group):
            for lane in group.lanes:
                moves, size = moves_of(int(lane))
                m.bulk_stores.append([BulkCopy(i, int(lane), moves, size), int(m.bulk_group[lane])])
                _check_moves(m, i, int(lane), moves, to_shared)

        return store
    barrier_operand = i.operands[2] if tensor else i.operands[3]
    barriers = shared_addresses(m, i, barrier_operand)

    def load(group):
        for lane, address in zip(group.lanes, barriers(group), strict=True):
            moves, size = moves_of(int(lane))
            _check_moves(m, i, int(lane), moves, to_shared)
            barrier_at(m, i, lane, address).copies.append(BulkCopy(i, int(lane), moves, size))
            # who waits already looks again, and lands the copy
            for number, waiting in m.parked.pop((int(m.lane_block[lane]), int(address)), ()):
                m.push(number, waiting)

    return load


def _check_moves(m, i, lane, moves, to_shared):
    if m.checks is None:
        return
    for move in moves:
        if move.source is not None:
            mode = "read" if to_shared else "pending read"
            m.checks.bulk_access(i, lane, move.source, move.start, move.size, mode)
        m.checks.bulk_access(i, lane, move.target, move.to, move.size, "copy" if to_shared else "write")


def _shared_place(m, i, lane, address, size):
    """The byte offset in the machine's shared memory, checked."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    if address < SHARED_START or address + size > m.shared_end:
        raise m.fault(
            i, lane, f"a bulk copy of {size} bytes at shared address {address:#x}, outside the block's shared memory"
        )
    if address % 16:
        raise m.fault(i, lane, f"a bulk copy at shared address {address:#x}, which is no multiple of 16")
    return int(m.lane_shared[lane]) + address


def _global_place(m, i, lane, address, size, write):
    buffer = m.memory.find(address)
    if buffer is None or address + size > buffer.end:
        raise m.fault(
            i, lane, f"a bulk copy of {size} bytes at global address {address:#x}: {m.memory.describe(address)}"
        )
    if address % 16:
        raise m.fault(i, lane, f"a bulk copy at global address {address:#x}, which is no multiple of 16")
    if write and buffer.readonly:
        raise m.fault(i, lane, f"a bulk copy to {buffer.name}, which is read-only")
    return buffer, address - buffer.base


def _scalar(m, i, operand, space):
    """A function of a lane: the address an operand gives it."""
    base, offset = address_source(m, i, operand, space)
    if base is None:
        return lambda lane: offset
    return lambda lane: int(base[lane]) + offset


def _plain_moves(m, i, to_shared):
    target = _scalar(m, i, i.operands[0], "shared" if to_shared else "global")
    source = _scalar(m, i, i.operands[1], "global" if to_shared else "shared")
    size_of = m.source(i, i.operands[2], U32)

    def moves(lane):
        size = int(size_of[lane])
        if size % CHUNK:
            raise m.fault(i, lane, f"a bulk copy of {size} bytes, which is no multiple of 16")
        steps = np.arange(0, size, CHUNK)
        here, there = (target, source) if to_shared else (source, target)
        buffer, offset = _global_place(m, i, lane, there(lane), size, not to_shared)
        shared = _shared_place(m, i, lane, here(lane), size)
        if to_shared:
            return [Move(buffer, offset + steps, m.shared, shared + steps, CHUNK)], size
        return [Move(m.shared, shared + steps, buffer, offset + steps, CHUNK)], size

    return moves


def _tensor_moves(m, i, to_shared):
    """16-byte chunks of the rows of a tensor map's box, where the swizzle puts them, cut at the array's edge."""
    described, shared = (i.operands[1], i.operands[0]) if to_shared else (i.operands[0], i.operands[1])
    map_at = _scalar(m, i, parser.Address(described.base, described.offset, None), "generic")
    shared_at = _scalar(m, i, shared, "shared")
    numbers = [m.source(i, c, np.dtype(np.int32)) for c in described.coordinates.items]

    def moves(lane):
        address = map_at(lane)
        buffer, start = _global_place(m, i, lane, address, tensor_map.BYTES, False)
        try:
            tensor = tensor_map.decode(buffer.data[start : start + tensor_map.BYTES].tobytes())
        except ValueError as error:
            raise m.fault(i, lane, str(error)) from error
        if len(tensor.box) != len(numbers):
            raise m.fault(i, lane, f"{len(numbers)} coordinates for a tensor map of {len(tensor.box)} axes")
        size = int(np.prod(tensor.box)) * tensor.itemsize
        base = shared_at(lane) % SHARED_WINDOW
        bits = tensor_map.SWIZZLES[tensor.swizzle]
        pattern = 128 << bits
        if base % pattern:
            raise m.fault(i, lane, f"a tensor copy at shared address {base:#x}, wanted a multiple of {pattern}")
        window = _shared_place(m, i, lane, base, size) - base
        places = window + tensor_map.swizzled(base + np.arange(0, size, CHUNK), bits)
        first = [int(n[lane]) for n in numbers]
        if first[0] * tensor.itemsize % CHUNK:
            # not written down anywhere; such a copy ended in an illegal instruction on an H200
            raise m.fault(
                i, lane, f"a tensor copy from element {first[0]} of a row on, wanted a multiple of {CHUNK} bytes"
            )
        return _box_moves(m, i, lane, tensor, first, places, to_shared), size

    return moves


def _box_moves(m, i, lane, tensor, first, places, to_shared):
    """The moves between the box at element ``first`` and the shared places of its chunks, row by row."""
    rows = np.indices(tensor.box[:0:-1]).reshape(len(tensor.box) - 1, -1)[::-1]  # [outer axes, rows], innermost first
    row_address = np.full(max(1, rows.shape[1]), tensor.address, np.int64)
    inside = np.ones(row_address.size, bool)
    for axis, steps in enumerate(rows):
        at = first[axis + 1] + steps
        inside &= (at >= 0) & (at < tensor.extents[axis + 1])
        row_address = row_address + at * tensor.strides[axis]
    low = first[0] * tensor.itemsize + np.arange(0, tensor.box[0] * tensor.itemsize, CHUNK)  # bytes within the row
    width = tensor.extents[0] * tensor.itemsize
    low, row_address = (v.reshape(-1) for v in np.broadcast_arrays(low, row_address[:, None]))
    inside = np.repeat(inside, low.size // inside.size)
    full = inside & (low >= 0) & (low + CHUNK <= width)
    empty = ~inside | (low + CHUNK <= 0) | (low >= width)
    fill = 0xFF if tensor.fill_nan else 0
    found = []
    if full.any():
        addresses = row_address[full] + low[full]
        buffer, offset = _array_of(m, i, lane, int(addresses.min()), int(addresses.max()) + CHUNK, not to_shared)
        offsets = addresses - int(addresses.min()) + offset
        found.append(
            Move(buffer, offsets, m.shared, places[full], CHUNK)
            if to_shared
            else Move(m.shared, places[full], buffer, offsets, CHUNK)
        )
    if to_shared and empty.any():
        found.append(Move(None, 0, m.shared, places[empty], CHUNK, fill))
    for n in np.flatnonzero(~full & ~empty):
        begin, end = max(int(low[n]), 0), min(int(low[n]) + CHUNK, width)
        address = int(row_address[n])
        buffer, offset = _array_of(m, i, lane, address + begin, address + end, not to_shared)
        place = int(places[n]) + begin - int(low[n])
        if not to_shared:
            found.append(Move(m.shared, place, buffer, offset, end - begin))
            continue
        found.append(Move(buffer, offset, m.shared, place, end - begin))
        for start, stop in ((int(places[n]), place), (place + end - begin, int(places[n]) + CHUNK)):
            if stop > start:
                found.append(Move(None, 0, m.shared, start, stop - start, fill))
    return found


def _array_of(m, i, lane, begin, end, write):
    """(buffer, byte offset) of global bytes that must lie in one array."""
    buffer = m.memory.find(begin)
    if buffer is None or end > buffer.end:
        raise m.fault(i, lane, f"a tensor copy at global address {begin:#x} to {end:#x}: {m.memory.describe(begin)}")
    if write and buffer.readonly:
        raise m.fault(i, lane, f"a tensor copy to {buffer.name}, which is read-only")
    return buffer, begin - buffer.base


def _bind_bulk_commit(m):
    def commit(group):
        m.bulk_group[group.sel] += 1

    return commit


def _bind_bulk_wait(m, pending):
    def wait(group):
        kept = []
        mask = group.mask
        for copy, number in m.bulk_stores:
            if mask[copy.lane] and number < m.bulk_group[copy.lane] - pending:
                copy.carry_out(m)
            else:
                kept.append([copy, number])
        m.bulk_stores = kept

    return wait


def finish_stores(m):
    """What was not waited for lands at the latest when the kernel ends."""
    for copy, _ in m.bulk_stores:
        copy.carry_out(m)
    m.bulk_stores = []


BATCH_ENDS.append(finish_stores)
