"""Checks of what a GPU lets pass: memory that nothing wrote, and threads that touch the same bytes without an order.

Order between the warps of a cluster (mostly one block) is kept as vector clocks (Lamport's happened-before):
``clock[cluster, w, v]`` is the last time of warp v that warp w has synchronised with. A barrier joins the clocks of those who
meet in it; ``bar.warp.sync`` orders the lanes of a warp among themselves; an mbarrier hands the clocks of those who arrive to
those who wait. Clusters are never ordered. Blocks of a cluster reach each other's shared memory only between two such orders:
a block must be known to have started, and must know of the access when it exits.

A kernel that has ``griddepcontrol.wait`` may start before those in front of it have ended. Until a thread has waited it may write
no global memory, and read only arrays that none of those writes: which it read is kept (``read_early``) for who knows them all.

Every granule of memory (as wide as the kernel's narrowest access) remembers its last writer, its last reader, and the last
reader of another warp than that one, each as a 64-bit stamp:

    bit 63 atomic | 62 copy under way | 61..34 thread of the grid, plus 32 | 33..20 instruction | 19..0 time of its warp
"""

import numpy as np

from nbkernels.emulator.errors import RaceError, UninitialisedRead

U64 = np.uint64
ATOMIC, PENDING = U64(1 << 63), U64(1 << 62)
FLAGS = ATOMIC | PENDING
THREAD, CODE = U64(34), U64(20)
THREAD_MASK, CODE_MASK, TIME_MASK = U64((1 << 28) - 1), U64((1 << 14) - 1), U64((1 << 20) - 1)
# stamps of two warps differ by at least this where they differ in the warp
WARP_STEP = U64(1 << 39)
LAST_TIME, MOST_THREADS, MOST_CODE = (1 << 20) - 2, (1 << 28) - 64, (1 << 14) - 1

# reads of an array are only listed until somebody writes to it; when the list holds more accesses than this it is dropped,
# and reads before the first write are not compared
LISTED_ACCESSES = 1 << 24
WARP = 32


class Shadow:
    """What is remembered of a buffer. granule: bytes an entry."""

    def __init__(self, size, granule):
        entries = -(-size // 256) * 256 // granule
        self.granule = granule
        self.writer = np.zeros(entries, U64)
        self.reader = np.zeros(entries, U64)
        self.other_reader = np.zeros(entries, U64)

    def clear(self):
        """Forget all accesses."""
        for stamps in (self.writer, self.reader, self.other_reader):
            stamps[:] = 0


def _note_read(shadow, width, rows, stamps):
    """Leave stamps [n, 1] of readers on rows of a shadow: the last reader, and the last one of another warp."""
    reader = shadow.reader.reshape(-1, width)
    other = shadow.other_reader.reshape(-1, width)
    last = reader[rows]
    elsewhere = ((last ^ stamps) & ~FLAGS) >= WARP_STEP
    elsewhere &= last != 0
    if elsewhere.any():
        other[rows] = np.where(elsewhere, last, other[rows])
    reader[rows] = stamps
    # several lanes may have read one granule in this very instruction
    lost = ((reader[rows] ^ stamps) & ~FLAGS) >= WARP_STEP
    if lost.any():
        other[rows] = np.where(lost, stamps, other[rows])


class Checks:
    """The state of a machine's checks. granules: space -> bytes (see ``granule``)."""

    def __init__(self, machine, granules, crosses_blocks):
        m = self.machine = machine
        self.granules = granules
        self.block_warps = m.padded // WARP
        self.warps = self.block_warps * m.cluster_blocks
        self.shared_written = np.zeros(m.shared.size, np.uint8)
        self.local_written = np.zeros(m.local.size, np.uint8)
        self.shared_shadow = Shadow(m.shared.size, granules["shared"])
        self.instructions = m.function.instructions
        self.numbers = {id(i): min(n, MOST_CODE) for n, i in enumerate(self.instructions)}
        # a kernel that passes data between blocks by atomics and fences orders them in a way that is not followed here
        self.crosses_blocks = crosses_blocks
        self.lane_warp = np.arange(m.lanes) // WARP % self.warps
        self.starts_early = any(tuple(i.opcode[:2]) == ("griddepcontrol", "wait") for i in self.instructions)
        self.waited = np.zeros(m.lanes, bool)

    # ---- the course of a launch -----------------------------------------------------------------------------------------

    def start_launch(self):
        """A launch comes after everything before it."""
        self.global_shadows = {}
        self.listed = {}  # base of an array nobody has written -> accesses listed, or None where they were too many
        self.listed_accesses = 0
        self.disabled = False
        self.written_arrays = set()  # the bases of arrays in global memory that the launch writes
        self.read_early = {}  # base of an array that is read by threads that have not waited -> where

    def start_batch(self):
        """New blocks: nothing written, nobody ordered."""
        m = self.machine
        self.shared_written[:] = 0
        self.local_written[:] = 0
        self.waited[:] = False
        self.shared_shadow.clear()
        columns = self.warps
        self.clock = np.zeros((m.clusters, self.warps, columns), np.int64)
        # time 0 is before a warp's start, 1 its start
        self.time = np.full((m.clusters, self.warps), 2, np.int64)
        self.barrier_clock = np.zeros((m.blocks, 16, columns), np.int64)
        every = np.arange(self.warps)
        self.clock[:, every, every] = 1
        self.cluster_clock = np.zeros((m.clusters, columns), np.int64)
        self.cluster_done = np.zeros((m.clusters, columns), np.int64)
        # [blocks, warps of the cluster]: when a warp last reached into a block's shared memory; by which instruction
        self.reached = np.zeros((m.blocks, columns), np.int64)
        self.reached_by = {}
        thread = m.block_order[m.lane_block] * m.padded + m.lane_thread
        if int(thread.max()) > MOST_THREADS:
            self.disabled = True
        self.thread_stamp = (thread + WARP).astype(U64) << THREAD
        self._restamp()

    def _restamp(self):
        if int(self.time.max()) > LAST_TIME:
            self.disabled = True
        self.lane_stamp = self.thread_stamp | np.repeat(self.time.reshape(-1), WARP).astype(U64)
        # what happened in a block at this time or before is ordered before everything its warps do now
        self.settled = U64(self.clock.min())

    # ---- order ----------------------------------------------------------------------------------------------------------

    def _own(self, clusters, warps):
        """Close the present time of these warps: what they did up to now can be ordered before what follows."""
        self.clock[clusters, warps, warps] = self.time[clusters, warps]
        self.time[clusters, warps] += 1

    def _warps_of(self, group):
        warps = np.flatnonzero(group.mask.reshape(-1, WARP).any(axis=1))
        return warps // self.warps, warps % self.warps

    def everyone_meets(self):
        """All threads of all blocks passed a barrier of their block together."""
        every = np.arange(self.warps)
        self.clock[:, every, every] = self.time
        of_blocks = self.clock.reshape(self.machine.blocks, self.block_warps, self.warps)
        of_blocks[:] = of_blocks.max(axis=1, keepdims=True)
        self.time += 1
        self._restamp()

    def arrive(self, group, barrier):
        """Lanes come to barriers (ids [lanes]) of their blocks."""
        clusters, warps = self._warps_of(group)
        numbers = clusters * self.warps + warps
        ids = barrier.reshape(-1, WARP).max(axis=1)[numbers]
        self._own(clusters, warps)
        np.maximum.at(self.barrier_clock, (numbers // self.block_warps, ids), self.clock[clusters, warps])
        self._restamp()

    def release(self, lanes, ids):
        """Lanes go on behind barriers (ids of these lanes)."""
        m = self.machine
        clusters, warps = m.lane_cluster[lanes], self.lane_warp[lanes]
        learnt = self.barrier_clock[m.lane_block[lanes], ids]
        self.clock[clusters, warps] = np.maximum(self.clock[clusters, warps], learnt)

    def finish(self, complete):
        """These barriers [blocks, 16] begin anew."""
        self.barrier_clock[complete] = 0

    def warp_sync(self, group):
        """Lanes of each warp met in bar.warp.sync."""
        self._own(*self._warps_of(group))
        self._restamp()

    def publish(self, group):
        """The clocks of the group's warps, for a release at an mbarrier: (clusters, clocks)."""
        clusters, warps = self._warps_of(group)
        self._own(clusters, warps)
        self._restamp()
        return clusters, self.clock[clusters, warps]

    def learn(self, group, clocks):
        """Warps of the group acquire what clocks [warps of the group, columns] hold."""
        clusters, warps = self._warps_of(group)
        self.clock[clusters, warps] = np.maximum(self.clock[clusters, warps], clocks)

    # ---- kernels that overlap -------------------------------------------------------------------------------------------

    def wait_for_kernels(self, group):
        """Lanes have waited for the kernels in front of this one."""
        self.waited[group.lanes] = True

    def _note_array(self, instruction, lanes, buffer, writes):
        """Lanes [n] touch an array in global memory."""
        if writes:
            self.written_arrays.add(buffer.base)
        if not self.starts_early:
            return
        early = ~self.waited[lanes]
        if early.any():
            where = self.machine.where(instruction, int(lanes[np.argmax(early)]))
            if writes:
                raise RaceError(f"{where}: writes, and has not waited for the kernels in front of this one")
            self.read_early.setdefault(buffer.base, where)

    # ---- clusters -------------------------------------------------------------------------------------------------------

    def cluster_arrive(self, group, released):
        """Lanes arrive at the barrier of their cluster. Not released (.relaxed): others learn only that they have started."""
        clusters, warps = self._warps_of(group)
        if released:
            self._own(clusters, warps)
            np.maximum.at(self.cluster_clock, clusters, self.clock[clusters, warps])
        else:
            self.cluster_clock[clusters, warps] = np.maximum(self.cluster_clock[clusters, warps], 1)
        self._restamp()

    def cluster_release(self, lanes):
        """Lanes go on behind the barrier of their cluster."""
        clusters, warps = self.machine.lane_cluster[lanes], self.lane_warp[lanes]
        self.clock[clusters, warps] = np.maximum(self.clock[clusters, warps], self.cluster_done[clusters])
        self._restamp()

    def finish_clusters(self, complete):
        """The barriers of these clusters [clusters] begin anew."""
        self.cluster_done[complete] = self.cluster_clock[complete]
        self.cluster_clock[complete] = 0

    def reach(self, instruction, lanes, blocks):
        """Lanes reach into the shared memory of blocks [lanes], which they must know to have started."""
        m = self.machine
        other = blocks != m.lane_block[lanes]
        if not other.any():
            return
        lanes, blocks = lanes[other], blocks[other]
        clusters, warps = m.lane_cluster[lanes], self.lane_warp[lanes]
        known = self.clock[clusters, warps].reshape(lanes.size, m.cluster_blocks, self.block_warps).max(axis=2)
        unknown = known[np.arange(lanes.size), blocks % m.cluster_blocks] == 0
        if unknown.any():
            bad = int(np.argmax(unknown))
            raise RaceError(
                f"{m.where(instruction, int(lanes[bad]))}: reaches into the shared memory of block "
                f"{m.block_name(blocks[bad])}, and nothing orders this behind that block's start"
            )
        self.reached[blocks, warps] = self.time[clusters, warps]
        for pair in np.unique(blocks * self.warps + warps):
            self.reached_by[int(pair)] = instruction

    def leave(self, group):
        """Lanes exit. A block that none is left of must know of all that reached into its shared memory."""
        m = self.machine
        for block in np.unique(m.lane_block[group.lanes]):
            if m.live_count[block]:
                continue
            cluster, rank = divmod(int(block), m.cluster_blocks)
            known = self.clock[cluster, rank * self.block_warps : (rank + 1) * self.block_warps].max(axis=0)
            late = self.reached[block] > known
            if late.any():
                warp = int(np.argmax(late))
                instruction = self.reached_by[int(block) * self.warps + warp]
                lane = (cluster * self.warps + warp) * WARP
                raise RaceError(
                    f"{m.where(instruction, lane)}: reaches into the shared memory of block {m.block_name(block)}, "
                    "and nothing orders this before that block's exit"
                )

    # ---- accesses -------------------------------------------------------------------------------------------------------

    def watch(self, instruction, locate, size, mode):
        """A locate function that also checks.

        mode: "read", "write", "atomic", "strong read", "strong write" or "copy" (a write under way).
        """
        code = U64(self.numbers.get(id(instruction), 0)) << CODE

        def watched(group):
            parts = locate(group)
            for buffer, which, offsets in parts:
                self.access(instruction, group, buffer, which, offsets, size, mode, code)
            return parts

        return watched

    def _shadow_of(self, buffer, writes):
        m = self.machine
        if buffer is m.shared:
            return self.shared_shadow
        if buffer is m.local:
            return None
        found = self.global_shadows.get(buffer.base)
        if found is None and writes:
            found = self.global_shadows[buffer.base] = Shadow(buffer.size, self.granules["global"])
            for offsets, size, stamps in self.listed.pop(buffer.base, None) or ():
                width = max(1, size // found.granule)
                rows = offsets // max(size, found.granule)
                _note_read(found, width, rows, stamps)
        return found

    def _list_read(self, buffer, offsets, size, stamps):
        """Keep a read of an array that nobody has written yet in this launch."""
        kept = self.listed.setdefault(buffer.base, [])
        if kept is None:
            return
        self.listed_accesses += offsets.size
        if self.listed_accesses > LISTED_ACCESSES:
            self.listed = dict.fromkeys(self.listed)
            return
        kept.append((offsets, size, stamps))

    def _is_global(self, buffer):
        return buffer is not self.machine.shared and buffer is not self.machine.local

    def _written_of(self, buffer):
        m = self.machine
        if buffer is m.shared:
            return self.shared_written
        return self.local_written if buffer is m.local else buffer.written

    def access(self, instruction, group, buffer, which, offsets, size, mode, code):
        """Check an access of ``size`` bytes a lane at byte offsets of a buffer, and remember it."""
        strong = mode in ("atomic", "strong read", "strong write")
        mode = mode.removeprefix("strong ")
        reads = mode in ("read", "atomic")
        if self._is_global(buffer):
            lanes = group.lanes if which is None else group.lanes[which]
            self._note_array(instruction, lanes, buffer, mode != "read")
        written = self._written_of(buffer)
        if written is not None:
            unit = min(size, 8)
            view = written[: written.size // size * size].view(f"u{unit}").reshape(-1, size // unit)
            rows = offsets // size
            if reads:
                whole = view[rows] == np.array(0xFFFFFFFFFFFFFFFF, U64).astype(view.dtype)
                if not whole.all():
                    self._report_unwritten(instruction, group, buffer, which, offsets, size, whole.all(axis=1))
            if mode != "read":
                view[rows] = np.array(0xFFFFFFFFFFFFFFFF, U64).astype(view.dtype)
        if self.disabled:
            return
        shadow = self._shadow_of(buffer, mode != "read")
        lanes = group.lanes if which is None else group.lanes[which]
        if shadow is None:
            if buffer is not self.machine.local:
                stamps = (self.lane_stamp[lanes] | code)[:, None]
                self._list_read(buffer, offsets, size, stamps | ATOMIC if strong else stamps)
            return
        self._remember(instruction, shadow, buffer, lanes, offsets, size, mode, code, strong)

    def _remember(self, instruction, shadow, buffer, lanes, offsets, size, mode, code, strong):
        """Compare an access with the stamps of what it touches, and leave its own."""
        width = max(1, size // shadow.granule)
        rows = offsets // max(size, shadow.granule)
        mine = (self.lane_stamp[lanes] | code)[:, None]
        if strong:
            mine = mine | ATOMIC
        elif mode in ("copy", "pending read"):
            mine = mine | PENDING
        writer = shadow.writer.reshape(-1, width)
        before = writer[rows]
        bad = self._unordered(before, mine, lanes, buffer)
        if bad is not None:
            self._report(instruction, lanes, offsets, size, buffer, mode, before, bad, True)
        if mode in ("read", "pending read"):
            _note_read(shadow, width, rows, mine)
            return
        reader = shadow.reader.reshape(-1, width)
        other = shadow.other_reader.reshape(-1, width)
        for seen in (reader[rows], other[rows]):
            bad = self._unordered(seen, mine, lanes, buffer)
            if bad is not None:
                self._report(instruction, lanes, offsets, size, buffer, mode, seen, bad, False)
        writer[rows] = mine

    def _unordered(self, before, mine, lanes, buffer):
        """Which stamps [n, width] are of other threads' accesses that nothing orders before this one; None where none is."""
        if buffer is self.machine.shared and int((before & (TIME_MASK | PENDING)).max()) <= int(self.settled):
            return None
        suspect = (before != 0) & ((((before ^ mine) & ~FLAGS) >> THREAD != 0) | (before & PENDING != 0))
        if not suspect.any():
            return None
        m = self.machine
        thread = ((before >> THREAD) & THREAD_MASK).astype(np.int64) - WARP
        slot = m.lane_block[lanes][:, None]
        together = m.padded * m.cluster_blocks
        same_cluster = thread // together == m.block_order[slot] // m.cluster_blocks
        warp = np.where(same_cluster & suspect, thread % together // WARP, 0)
        known = self.clock[m.lane_cluster[lanes][:, None], self.lane_warp[lanes][:, None], warp]
        ordered = same_cluster & (known >= (before & TIME_MASK).astype(np.int64)) & (before & PENDING == 0)
        both_atomic = (before & mine & ATOMIC) != 0
        bad = suspect & ~ordered & ~both_atomic
        if self.crosses_blocks and buffer is not m.shared:
            bad &= thread // m.padded == m.block_order[slot]
        return bad if bad.any() else None

    def last_writer_wins(self, instruction, group, buffer, which, offsets, kept):
        """A store whose lanes wrote different values to one place: kept says whose value is there."""
        if self.disabled or kept.all():
            return
        bad = int(np.argmin(kept))
        lanes = group.lanes if which is None else group.lanes[which]
        same = np.flatnonzero(offsets == offsets[bad])
        m = self.machine
        raise RaceError(
            f"{m.where(instruction, int(lanes[bad]))}: writes at {self._place(buffer, int(offsets[bad]))}, where thread "
            f"{m.thread_name(int(lanes[same[-1]]))} of block {m.block_name(m.lane_block[lanes[same[-1]]])} writes another "
            "value in the same instruction"
        )

    def settle(self, instruction, lanes, offsets, size):
        """Bytes of shared memory that copies of these lanes have brought: from now on writes of those lanes."""
        shadow = self.shared_shadow
        width = max(1, size // shadow.granule)
        rows = offsets // max(size, shadow.granule)
        code = U64(self.numbers.get(id(instruction), 0)) << CODE
        shadow.writer.reshape(-1, width)[rows] = (self.lane_stamp[lanes] | code)[:, None]

    def pending_read(self, instruction, lane, offsets):
        """A matrix product of a lane's warpgroup begins to read 16-byte chunks of shared memory; returns the stamp it leaves."""
        code = U64(self.numbers.get(id(instruction), 0)) << CODE
        view = self.shared_written.view(U64).reshape(-1, 2)
        whole = (view[offsets // 16] == U64(0xFFFFFFFFFFFFFFFF)).all(axis=1)
        lanes = np.full(offsets.size, lane)
        if not whole.all():
            bad = int(np.argmin(whole))
            raise UninitialisedRead(
                f"{self.machine.where(instruction, lane)}: reads 16 bytes at "
                f"{self._place(self.machine.shared, int(offsets[bad]))}, which nothing has written"
            )
        if not self.disabled:
            self._remember(
                instruction, self.shared_shadow, self.machine.shared, lanes, offsets, 16, "pending read", code, False
            )
        return self.lane_stamp[lane] | code | PENDING

    def settle_reads(self, instruction, offsets, stamp, lane):
        """A product has been waited for: its reads happened by now."""
        code = U64(self.numbers.get(id(instruction), 0)) << CODE
        shadow = self.shared_shadow
        rows = offsets // max(16, shadow.granule)
        for stamps in (shadow.reader, shadow.other_reader):
            view = stamps.reshape(-1, max(1, 16 // shadow.granule))
            seen = view[rows]
            view[rows] = np.where(seen == stamp, self.lane_stamp[lane] | code, seen)

    def bulk_access(self, instruction, lane, buffer, offsets, size, mode):
        """Pieces of a bulk copy of a lane touch bytes of a buffer: ``size`` bytes at each of offsets [n]."""
        reads = "read" in mode
        if self._is_global(buffer):
            self._note_array(instruction, np.array([lane]), buffer, not reads)
        written = self._written_of(buffer)
        if written is not None:
            span = offsets[:, None] + np.arange(size)
            if reads and not (written[span] == 0xFF).all():
                raise UninitialisedRead(
                    f"{self.machine.where(instruction, lane)}: copies from {self._place(buffer, int(offsets[0]))} what "
                    "nothing has written, at least in part"
                )
            if not reads:
                written[span] = 0xFF
        shadow = None if self.disabled else self._shadow_of(buffer, not reads)
        if shadow is None:
            return
        code = U64(self.numbers.get(id(instruction), 0)) << CODE
        if size < shadow.granule or size & (size - 1) or (offsets % size).any():
            # odd pieces at an array's edge: granule by granule
            offsets = np.unique(offsets[:, None] + np.arange(size)) // shadow.granule * shadow.granule
            offsets, size = np.unique(offsets), shadow.granule
        lanes = np.full(offsets.size, lane)
        self._remember(instruction, shadow, buffer, lanes, offsets, size, mode, code, False)

    def settle_copy(self, copy):
        """A bulk copy has been carried out."""
        if self.disabled:
            return
        code = U64(self.numbers.get(id(copy.instruction), 0)) << CODE
        stamp = self.lane_stamp[copy.lane] | code
        for move in copy.moves:
            for buffer, offsets, reads in ((move.source, move.start, True), (move.target, move.to, False)):
                shadow = None if buffer is None else self._shadow_of(buffer, True)
                if shadow is None:
                    continue
                steps = np.arange(0, max(move.size, 1), shadow.granule)
                rows = (offsets[:, None] + steps) // shadow.granule
                for stamps in (shadow.reader, shadow.other_reader) if reads else (shadow.writer,):
                    seen = stamps[rows]
                    stamps[rows] = np.where(seen & PENDING != 0, stamp, seen)

    # ---- reports --------------------------------------------------------------------------------------------------------

    def _place(self, buffer, offset):
        m = self.machine
        if buffer is m.shared:
            of_block = "" if m.cluster_blocks == 1 else f" of block {m.block_name(offset // m.shared_stride)}"
            return f"shared address {offset % m.shared_stride:#x}{of_block}"
        if buffer is m.local:
            return f"local address {offset % m.local_stride:#x}"
        return f"global address {buffer.base + offset:#x} (byte {offset} of {buffer.name})"

    def _report_unwritten(self, instruction, group, buffer, which, offsets, size, whole):
        bad = int(np.argmin(whole))
        lane = int((group.lanes if which is None else group.lanes[which])[bad])
        raise UninitialisedRead(
            f"{self.machine.where(instruction, lane)}: reads {size} bytes at {self._place(buffer, int(offsets[bad]))}, "
            "which nothing has written"
        )

    def _report(self, instruction, lanes, offsets, size, buffer, mode, stamps, bad, wrote):
        m = self.machine
        row, column = (int(v[0]) for v in np.nonzero(bad))
        stamp = int(stamps[row, column])
        thread = (stamp >> 34 & (1 << 28) - 1) - WARP
        other = self.instructions[stamp >> 20 & MOST_CODE]
        lane = int(lanes[row])
        block, number = divmod(thread, m.padded)
        x, y, _ = m.block
        gx, gy, _ = m.grid
        block = m.linear_block(block)
        where_block = (block % gx, block // gx % gy, block // (gx * gy))
        where_thread = (number % x, number // x % y, number // (x * y))
        verb = {"read": "reads", "write": "writes", "atomic": "updates", "copy": "copies asynchronously to"}.get(
            mode, "reads"
        )
        what = "they were " + ("written" if wrote else "read")
        if stamp & int(PENDING):
            what = "they belong to a copy or matrix product that has not been waited for, issued"
        source = f"{other.source[0]}:{other.source[1]}, " if other.source else ""
        raise RaceError(
            f"{m.where(instruction, lane)}: {verb} {size} bytes at {self._place(buffer, int(offsets[row]))}; "
            f"{what} by block {where_block}, thread {where_thread} "
            f"({source}PTX line {other.ptx_line}: {other.text}), and nothing orders the two"
        )
