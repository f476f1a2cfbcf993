"""Executes one entry of a module over batches of blocks, an instruction at a time for all lanes that stand at it.

Binding turns each instruction into a closure over the register arrays once; running calls the closures. Lanes that part at a
branch wait at their basic block, and the block that comes first in the text runs first, so that lanes meet again at the
earliest join. Barriers and warp instructions park their lanes until all that are wanted have come.
"""

import re

import numpy as np

from nbkernels.emulator import parser
from nbkernels.emulator.errors import Deadlock, Endless, LaunchError, MemoryFault, PtxError, Trap
from nbkernels.emulator.groups import FULL, full_group, group_of
from nbkernels.emulator.memory import LOCAL_WINDOW, SHARED_WINDOW, Buffer
from nbkernels.emulator.registry import BATCH_ENDS, BINDERS, END_BINDERS, WARP_BINDERS, WARPGROUP_BINDERS, find
from nbkernels.emulator.reports import describe_deadlock
from nbkernels.emulator.special_registers import SHARED_START, WARP, make_special
from nbkernels.emulator.steps import step_of

# about this many lanes run at once: enough to hide NumPy's cost a call, few enough that registers stay in the cache
BATCH_LANES = 4096

LOCAL_START = 16

# one scheduling decision in this many goes to the lanes that have waited longest, so that a loop that waits for another
# thread's write does not keep that thread from running
FAIRNESS = 1024

DTYPES = {
    **{f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "tf32": np.dtype(np.uint32),
    "pred": np.dtype(bool),
}
_BLOCK_ENDS = ("bra", "brx", "ret", "exit", "bar", "barrier", "trap")


def plain_name(name):
    """The Python function's name out of Numba's mangled one; other names as they are."""
    if not name.startswith("_ZN"):
        return name
    rest, found = name[3:], name
    while match := re.match(r"(\d+)", rest):
        length = int(match.group(1))
        found = rest[match.end() : match.end() + length]
        rest = rest[match.end() + length :]
    return found


def align(value, alignment):
    """The next multiple."""
    return -(-value // alignment) * alignment


def place(start, alignment):
    """The next address that is aligned as asked and no better: what a program takes for granted beyond it shows."""
    return align(start - alignment, 2 * alignment) + alignment


def cluster_of(function):
    """(x, y, z) blocks of a cluster, by the entry's directive."""
    shape = tuple(function.directives.get("reqnctapercluster", ()))
    return shape + (1,) * (3 - len(shape))


class Machine:
    """One entry bound for a block shape: its registers, its memories for a batch of blocks, and the lanes' state.

    block: (x, y, z) threads; blocks: how many run at once; shared_bytes: dynamic shared memory a block; make_checks: a
    function of the machine that returns its Checks, or None to run without; make_counters: the same for its Counters.
    """

    def __init__(self, module, function, memory, block, blocks, shared_bytes, make_checks=None, make_counters=None):
        self.module = module
        self.function = function
        self.name = plain_name(function.name)
        self.memory = memory
        self.block = block
        self.threads = block[0] * block[1] * block[2]
        self.padded = align(self.threads, WARP)
        # blocks along each axis that share one cluster, and how many that are; blocks of a cluster stand beside each other
        self.cluster = cluster_of(function)
        self.cluster_blocks = int(np.prod(self.cluster))
        self.clusters = blocks // self.cluster_blocks
        self.blocks = blocks
        self.lanes = blocks * self.padded
        self.dynamic_shared = shared_bytes
        self.grid = (1, 1, 1)
        self.executed = 0  # instructions, summed over lanes
        self.limit = float("inf")
        self._registers = {}
        self._constants = {}
        self._specials = {}
        self.full = full_group(self.lanes)
        self.lane_block = np.repeat(np.arange(blocks), self.padded)
        self.lane_cluster = self.lane_block // self.cluster_blocks
        self.lane_rank = self.lane_block % self.cluster_blocks
        self.lane_thread = np.tile(np.arange(self.padded), blocks)
        # [blocks] of a batch: a block's number in the order x, y, z, and its number in the order of clusters
        self.block_linear = np.zeros(blocks, np.int64)
        self.block_order = np.zeros(blocks, np.int64)
        self._place_variables()
        self._find_constants()
        self.checks = make_checks(self) if make_checks else None
        self.counters = make_counters(self) if make_counters else None
        self._bind()

    # ---- where things lie -----------------------------------------------------------------------------------------------

    def _place_variables(self):
        """Give shared, local and module variables their addresses."""
        self.symbols = {}
        shared, local = SHARED_START, LOCAL_START
        used = 0  # without the bytes that spoil a better alignment
        dynamic = []
        dynamic_alignment = 16
        for variable in (*self.module.variables.values(), *self.function.variables.values()):
            if variable.space == "shared":
                if variable.size == 0:
                    dynamic.append(variable.name)
                    dynamic_alignment = max(dynamic_alignment, variable.alignment)
                else:
                    shared = place(shared, variable.alignment)
                    used = align(used, variable.alignment) + variable.size
                    self.symbols[variable.name] = ("shared", shared)
                    shared += variable.size
            elif variable.space in ("local", "param"):
                local = align(local, max(variable.alignment, 16))
                self.symbols[variable.name] = ("local", local)
                local += variable.size
            elif variable.space in ("global", "const"):
                self.symbols[variable.name] = (variable.space, self._module_variable(variable))
        shared = place(shared, dynamic_alignment) if dynamic else shared
        for name in dynamic:
            self.symbols[name] = ("shared", shared)
        self.shared_end = shared + self.dynamic_shared
        self.shared_bytes = (align(used, dynamic_alignment) if dynamic else used) + self.dynamic_shared
        self.shared_stride = align(self.shared_end, 1024)
        self.shared = Buffer(0, np.zeros(self.shared_stride * self.blocks, np.uint8), "shared memory")
        self.lane_shared = (self.lane_block * self.shared_stride).astype(np.int64)
        self.local_end = local
        self.local_stride = align(local, 16)
        has_local = local > LOCAL_START
        self.local = Buffer(0, np.zeros(self.local_stride * self.lanes if has_local else 0, np.uint8), "local memory")
        self.lane_local = np.arange(self.lanes, dtype=np.int64) * self.local_stride
        offset = 0
        for parameter in self.function.parameters:
            offset = align(offset, parameter.alignment)
            self.symbols[parameter.name] = ("kernel parameter", offset)
            offset += parameter.size
        self.parameters = np.zeros(max(offset, 8), np.uint8)
        self.parameter_address = None

    def _module_variable(self, variable):
        """The address of a .global or .const variable: one instance a module and memory, as on the device."""
        placed = self.memory.__dict__.setdefault("module_variables", {})
        key = (self.module.text, variable.name)
        if key not in placed:
            address, data = self.memory.allocate(max(variable.size, 1), variable.name)
            placed[key] = address
            if variable.data is not None:
                data[: variable.size] = np.frombuffer(variable.data, np.uint8)
            for at, name, addend in variable.addresses:
                target = self._module_variable(self.module.variables[name]) + addend
                data[at : at + 8] = np.frombuffer(int(target).to_bytes(8, "little"), np.uint8)
        return placed[key]

    def symbol_address(self, name, generic):
        """The address of a variable in its own space, or as a generic address."""
        space, address = self.symbols[name]
        if space == "kernel parameter":
            if self.parameter_address is None:
                self.parameter_address = self.memory.register(self.parameters, "kernel parameters")
            return self.parameter_address + address
        if generic and space == "shared":
            return SHARED_WINDOW + address
        if generic and space == "local":
            return LOCAL_WINDOW + address
        return address

    # ---- registers and operands -----------------------------------------------------------------------------------------

    def _find_constants(self):
        """Registers that one unguarded ``mov`` of a literal writes and nothing else: reading them is reading the literal.

        NVVM puts every operand of inline assembly into a register, so shuffles get their distances this way.
        """
        writes = {}
        for instruction in self.function.instructions:
            if not instruction.operands:
                continue
            written = instruction.operands[0]
            if isinstance(written, parser.Vector):
                written = written.items
            elif isinstance(written, parser.Pair):
                written = (written.first, written.second)
            elif isinstance(written, list):
                written = tuple(written)
            else:
                written = (written,)
            for register in written:
                if isinstance(register, parser.Register):
                    writes.setdefault(register.number, []).append(instruction)
        self.literals = {}
        for number, instructions in writes.items():
            first = instructions[0]
            if (
                len(instructions) == 1
                and first.opcode[0] == "mov"
                and first.guard is None
                and isinstance(first.operands[1], parser.Immediate)
            ):
                self.literals[number] = self.literal_bits(first.operands[1], DTYPES[first.opcode[-1]])

    def literal_bits(self, immediate, dtype):
        """The value of a literal as a NumPy scalar of dtype; integers wrap."""
        value = immediate.value
        if dtype.kind == "b":
            return np.bool_(value)
        if immediate.is_float:
            bits = getattr(value, "bits", None)
            if bits is not None:
                return np.array(bits, f"u{value.size}").view(f"f{value.size}").astype(dtype)[()]
            if dtype.kind != "f":
                # a float literal in a .b32 or .b64 place is its bits
                return np.array(value, f"f{dtype.itemsize}").view(dtype)[()]
            return dtype.type(value)
        if dtype.kind == "f":
            return np.array(value % (1 << (8 * dtype.itemsize)), f"u{dtype.itemsize}").view(dtype)[()]
        return np.array(value % (1 << (8 * dtype.itemsize)), f"u{dtype.itemsize}").view(dtype)[()]

    def register(self, register):
        """The storage of a register: unsigned (or bool) [lanes]."""
        found = self._registers.get(register.number)
        if found is None:
            dtype = DTYPES[register.type]
            if dtype.kind != "b":
                dtype = np.dtype(f"uint{8 * dtype.itemsize}")
            found = self._registers[register.number] = np.zeros(self.lanes, dtype)
        return found

    def constant(self, value, dtype):
        """[lanes] of one value, without storage for each lane."""
        return np.broadcast_to(np.array(value, dtype), (self.lanes,))

    def source(self, instruction, operand, dtype):
        """[lanes] of dtype to read an operand from. A register wider than dtype is read in its low bits."""
        if isinstance(operand, parser.Register):
            number = operand.number
            if number in self.literals:
                value = self.literals[number]
                if value.dtype != dtype:
                    value = np.array(value).reshape(1).view(f"u{value.itemsize}").astype(f"u{dtype.itemsize}")
                    value = value.view(dtype)[0]
                return self.constant(value, dtype)
            return self.view(instruction, operand, dtype)
        if isinstance(operand, parser.Immediate):
            return self.constant(self.literal_bits(operand, dtype), dtype)
        if isinstance(operand, parser.Symbol):
            if operand.name in self.symbols:
                address = self.symbol_address(operand.name, generic=False) + operand.offset
                return self.constant(np.array(address, np.uint64).astype(f"u{dtype.itemsize}").view(dtype), dtype)
            return self.special(instruction, operand.name).astype(dtype, copy=False)
        raise self.unknown(instruction, f"operand {operand}")

    def view(self, instruction, register, dtype):
        """A register's storage [lanes] as dtype, to read or to write."""
        row = self.register(register)
        if row.dtype == dtype:
            return row
        if (row.dtype.kind == "b") != (dtype.kind == "b") or row.itemsize < dtype.itemsize:
            raise self.unknown(instruction, f"{register.name} (.{register.type}) used as {dtype}")
        ratio = row.itemsize // dtype.itemsize
        typed = row.view(dtype)
        return typed[::ratio] if ratio > 1 else typed

    def destination(self, instruction, operand, dtype):
        """[lanes] to write results of dtype to, or None for ``_``. A wider register is written in full (values extended)."""
        if not isinstance(operand, parser.Register):
            if isinstance(operand, parser.Symbol) and operand.name == "_":
                return None
            raise self.unknown(instruction, f"result {operand}")
        row = self.register(operand)
        if row.itemsize > dtype.itemsize and dtype.kind in "iu":
            return row.view(f"{dtype.kind}{row.itemsize}")
        return self.view(instruction, operand, dtype)

    def special(self, instruction, name):
        """[lanes] of a special register; those that depend on the block are filled anew for each batch."""
        if name not in self._specials:
            self._specials[name] = make_special(self, instruction, name)
        return self._specials[name]

    def _fill_specials(self):
        """Set what depends on the blocks of this batch."""
        x, y, _ = self.grid
        linear = self.block_linear[self.lane_block]
        position = (linear % x, linear // x % y, linear // (x * y))
        for name, row in self._specials.items():
            base, _, axis = name.partition(".")
            axis = "xyz".index(axis) if axis else None
            if base == "%ctaid":
                row[:] = position[axis]
            elif base == "%nctaid":
                row[:] = self.grid[axis]
            elif base == "%clusterid":
                row[:] = position[axis] // self.cluster[axis]
            elif base == "%nclusterid":
                row[:] = self.grid[axis] // self.cluster[axis]

    # ---- steps ----------------------------------------------------------------------------------------------------------

    def apply(self, operation, target, sources, *, into=True):
        """A step: target = operation(*sources) for a group's lanes.

        into: the operation is a ufunc that takes ``out`` of target's dtype. Otherwise it returns a new array.
        """
        if target is None:
            return lambda group: None
        into = into and isinstance(operation, np.ufunc)
        return step_of(operation, target, sources, into)

    def narrow(self, group, predicate, negated):
        """The lanes of a group whose predicate holds: the group itself, a smaller one, or None."""
        held = predicate[group.sel]
        count = int(np.count_nonzero(held))
        if negated:
            count = group.count - count
        if count == group.count:
            return group
        if count == 0:
            return None
        if negated:
            held = ~held
        if group.kind == FULL:
            return group_of(held if negated else held.copy())
        mask = np.zeros(self.lanes, bool)
        mask[group.sel] = held
        return group_of(mask)

    # ---- binding --------------------------------------------------------------------------------------------------------

    def _bind(self):
        """Cut the instructions into basic blocks and bind each."""
        instructions = self.function.instructions
        starts = {0, len(instructions), *self.function.labels.values()}
        for index, instruction in enumerate(instructions):
            name = instruction.opcode[0]
            if _ends_block(instruction):
                starts.add(index + 1)
                if name not in ("bra", "brx", "ret", "exit", "trap"):
                    starts.add(index)
        starts = sorted(starts)
        self.block_of = {start: number for number, start in enumerate(starts)}
        self.label_block = {name: self.block_of[index] for name, index in self.function.labels.items()}
        self.code = []  # (steps, end or None) a basic block
        self.block_instruction = []
        for number, start in enumerate(starts[:-1]):
            stop = starts[number + 1]
            steps, end = [], None
            for instruction in instructions[start:stop]:
                name = instruction.opcode[0]
                if name in _BLOCK_ENDS:
                    end = self._bind_end(instruction, number)
                elif _ends_block(instruction):
                    end = self._bind_waiting(instruction, number)
                else:
                    step = self._bind_step(instruction)
                    if step is not None:
                        steps.append(step)
            self.code.append((tuple(steps), end, stop - start))
            self.block_instruction.append(instructions[stop - 1] if stop > start else None)
        # falling off the end is a return
        self.code.append(((), lambda group: self._exit(group), 0))
        self.block_instruction.append(None)

    def _bind_step(self, instruction):
        binder = find(BINDERS, instruction.opcode)
        if binder is None:
            raise self.unknown(instruction, f"instruction {instruction.opcode[0]}")
        if (
            instruction.opcode[0] == "mov"
            and isinstance(instruction.operands[0], parser.Register)
            and instruction.operands[0].number in self.literals
        ):
            return None
        step = self._call_binder(binder, instruction)
        if step is None or instruction.guard is None:
            return step
        return self._guarded(instruction, step)

    def _call_binder(self, binder, instruction):
        try:
            return binder(self, instruction)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            # a binder looks modifiers up in tables; what is not there is not known
            raise self.unknown(instruction, f"a form of {instruction.opcode[0]} ({error!r})") from error

    def _guarded(self, instruction, step):
        register, negated = instruction.guard
        predicate = self.source(instruction, register, np.dtype(bool))

        def guarded(group):
            part = self.narrow(group, predicate, negated)
            if part is not None:
                step(part)

        return guarded

    def _bind_end(self, instruction, number):
        """The end of a basic block: a function of the group that returns the next block for it, or -1 where it has none."""
        name = instruction.opcode[0]
        following = number + 1
        if name == "bra":
            target = self.label_block[instruction.operands[-1]]
            if instruction.guard is None:
                return lambda group: target
            return self._bind_branch(instruction, target, following)
        if name == "brx":
            return self._bind_indexed_branch(instruction)
        if name in ("ret", "exit"):
            end = self._exit
        elif name == "trap":
            end = self._bind_trap(instruction)
        elif instruction.opcode[1:2] == ["warp"]:
            end = self._warp_end(instruction, number, instruction.operands[0], self._after_warp_sync)
        elif instruction.opcode[1:2] == ["cluster"]:
            end = self._bind_cluster_barrier(instruction, number)
        else:
            end = self._bind_barrier(instruction, number)
        return self._guarded_end(instruction, end, following)

    def _guarded_end(self, instruction, end, following):
        if instruction.guard is None:
            return end
        register, negated = instruction.guard
        predicate = self.source(instruction, register, np.dtype(bool))

        def guarded(group):
            part = self.narrow(group, predicate, negated)
            if part is None:
                return following
            if part is not group:
                self.push(following, self.narrow(group, predicate, not negated))
            return end(part)

        return guarded

    def _bind_branch(self, instruction, target, following):
        register, negated = instruction.guard
        predicate = self.source(instruction, register, np.dtype(bool))
        narrow = self.narrow

        def branch(group):
            taken = narrow(group, predicate, negated)
            if taken is group:
                return target
            if taken is None:
                return following
            rest = narrow(group, predicate, not negated)
            if self.counters is not None:
                self.counters.count_divergence(instruction, taken, rest)
            self.push(target, taken)
            self.push(following, rest)
            return -1

        return branch

    def _bind_indexed_branch(self, instruction):
        index = self.source(instruction, instruction.operands[0], np.dtype(np.uint32))
        targets = [self.label_block[name] for name in instruction.operands[-1]]

        def branch(group):
            chosen = index[group.sel]
            for number, target in enumerate(targets):
                hits = chosen == number
                if hits.any():
                    mask = np.zeros(self.lanes, bool)
                    mask[group.sel] = hits
                    self.push(target, group_of(mask))
            return -1

        return branch

    def _bind_trap(self, instruction):
        def trap(group):
            raise Trap(f"{self.where(instruction, self.first_lane(group))}: the kernel executed trap")

        return trap

    def _after_warp_sync(self, group):
        if self.checks is not None:
            self.checks.warp_sync(group)

    # ---- warp instructions ----------------------------------------------------------------------------------------------

    def _bind_waiting(self, instruction, number):
        """The end of a block whose instruction lanes may have to wait at: for their warp, their warpgroup, or an mbarrier."""
        binder = find(END_BINDERS, instruction.opcode)
        if binder is not None:
            end = self._call_binder(lambda machine, i: binder(machine, i, number), instruction)
        elif find(WARPGROUP_BINDERS, instruction.opcode):
            step = self._call_binder(find(WARPGROUP_BINDERS, instruction.opcode), instruction)
            end = self._warpgroup_end(number, step)
        else:
            members, step = self._call_binder(find(WARP_BINDERS, instruction.opcode), instruction)
            end = self._warp_end(instruction, number, members, step)
        return self._guarded_end(instruction, end, number + 1)

    def _warp_end(self, instruction, number, members, step):
        """An end that brings the member lanes together, executes ``step`` for them and goes on behind it."""
        following = number + 1
        all_members = True
        masks = None
        if members is not None:
            masks = self.source(instruction, members, np.dtype(np.uint32))
            all_members = masks.strides[0] == 0 and int(masks[0]) == 0xFFFFFFFF

        def end(group):
            waiting = self.warp_waiting.get(number)
            if waiting is None and all_members and group.holds_whole_warps(self.live):
                step(group)
                return following
            waiting = group.mask if waiting is None else waiting | group.mask
            arrived = _warp_bits(waiting)
            live = _warp_bits(self.live)
            wanted = np.repeat(live, WARP)
            if masks is not None:
                wanted = wanted & masks
            here = np.repeat(arrived, WARP)
            complete = waiting & ((wanted & ~here) == 0)
            ready = group_of(complete)
            left = waiting & ~complete
            if left.any():
                self.warp_waiting[number] = left
            else:
                self.warp_waiting.pop(number, None)
            if ready is None:
                return -1
            step(ready)
            self.push(following, ready)
            return -1

        return end

    def _warpgroup_end(self, number, step):
        """As _warp_end, for all live lanes of four warps."""
        following = number + 1

        def end(group):
            waiting = self.warp_waiting.pop(number, None)
            waiting = group.mask if waiting is None else waiting | group.mask
            here, live = waiting.reshape(-1, 4 * WARP), self.live.reshape(-1, 4 * WARP)
            complete = (here & (here == live).all(axis=1, keepdims=True)).reshape(-1)
            left = waiting & ~complete
            if left.any():
                self.warp_waiting[number] = left
            ready = group_of(complete)
            if ready is None:
                return -1
            step(ready)
            self.push(following, ready)
            return -1

        return end

    # ---- barriers -------------------------------------------------------------------------------------------------------

    def _bind_barrier(self, instruction, number):
        """bar.sync, bar.arrive, bar.red and their barrier.cta spellings."""
        words = [w for w in instruction.opcode[1:] if w not in ("cta", "aligned")]
        action = words[0]
        operands = list(instruction.operands)
        following = number + 1
        target = reduce_predicate = operation = None
        if action == "red":
            operation = words[1]
            result, value = operands.pop(0), operands.pop()
            target = self.destination(instruction, result, np.dtype(np.uint32 if operation == "popc" else bool))
            negated = isinstance(value, parser.Not)
            value = self.source(instruction, value.register if negated else value, np.dtype(bool))
            reduce_predicate = (value, negated)
        elif action not in ("sync", "arrive"):
            raise self.unknown(instruction, f"barrier action {action}")
        u32 = np.dtype(np.uint32)
        barrier = self.source(instruction, operands[0], u32) if operands else self.constant(0, u32)
        count = self.source(instruction, operands[1], u32) if len(operands) > 1 else None

        def end(group):
            simple = action == "sync" and group.kind == FULL and barrier.strides[0] == 0 and count is None
            if simple and not self.arrived.any():
                if self.checks is not None:
                    self.checks.everyone_meets()
                return following
            lanes = group.lanes
            blocks, ids = self.lane_block[lanes], barrier[lanes]
            if ids.max() > 15:
                raise LaunchError(f"{self.where(instruction, int(lanes[0]))}: barrier {int(ids.max())}, wanted 0 to 15")
            np.add.at(self.arrived, (blocks, ids), 1)
            self.expected[blocks, ids] = self.live_count[blocks] if count is None else count[lanes]
            self.counts_all[blocks, ids] = count is None
            if self.checks is not None:
                self.checks.arrive(group, barrier)
            if action != "arrive":
                self.at_barrier[lanes] = ids
                parked = self.barrier_parked.get(number)
                self.barrier_parked[number] = group.mask.copy() if parked is None else parked | group.mask
                self.barrier_reduce[number] = (operation, target, reduce_predicate)
            self.release_barriers()
            return following if action == "arrive" else -1

        return end

    def release_barriers(self):
        """Let the lanes go on whose barrier has all the threads it waits for."""
        np.copyto(self.expected, self.live_count[:, None], where=self.counts_all)
        complete = (self.arrived >= self.expected) & (self.arrived > 0)
        if not complete.any():
            return
        excess = complete & (self.arrived > self.expected)
        for number, parked in list(self.barrier_parked.items()):
            lanes = np.flatnonzero(parked)
            free = complete[self.lane_block[lanes], self.at_barrier[lanes]]
            if not free.any():
                continue
            if excess.any():
                block, barrier = (int(v[0]) for v in np.nonzero(excess))
                raise LaunchError(
                    f"{self.where(self.block_instruction[number], int(lanes[0]))}: barrier {barrier} of block "
                    f"{self.block_name(block)} was reached by {int(self.arrived[block, barrier])} threads, "
                    f"but waits for {int(self.expected[block, barrier])}"
                )
            released = lanes[free]
            if self.checks is not None:
                self.checks.release(released, self.at_barrier[released])
            self._reduce_at_barrier(number, released)
            mask = np.zeros(self.lanes, bool)
            mask[released] = True
            left = parked & ~mask
            if left.any():
                self.barrier_parked[number] = left
            else:
                del self.barrier_parked[number]
            self.push(number + 1, group_of(mask))
        if self.checks is not None:
            self.checks.finish(complete)
        self.arrived[complete] = 0
        self.counts_all[complete] = False

    def _reduce_at_barrier(self, number, lanes):
        operation, target, predicate = self.barrier_reduce[number]
        if operation is None:
            return
        values = predicate[0][lanes] ^ predicate[1]
        keys = self.lane_block[lanes] * 16 + self.at_barrier[lanes]
        sums = np.bincount(keys, weights=values)[keys]
        totals = np.bincount(keys)[keys]
        target[lanes] = {"popc": sums, "or": sums > 0, "and": sums == totals}[operation]

    # ---- the barrier of a cluster ---------------------------------------------------------------------------------------

    def _bind_cluster_barrier(self, instruction, number):
        """barrier.cluster.arrive and barrier.cluster.wait: a phase ends when all live threads of the cluster have arrived."""
        words = instruction.opcode[2:]
        following = number + 1
        if words[0] not in ("arrive", "wait"):
            raise self.unknown(instruction, f"cluster barrier action {words[0]}")
        released = "relaxed" not in words

        def arrive(group):
            lanes = group.lanes
            again = self.cluster_phase_of[lanes] >= 0
            if again.any():
                raise LaunchError(
                    f"{self.where(instruction, int(lanes[np.argmax(again)]))}: arrives at the cluster barrier a second time "
                    "before it has waited"
                )
            self.cluster_phase_of[lanes] = self.cluster_phase[self.lane_cluster[lanes]]
            self.cluster_arrived[lanes] = True
            if self.checks is not None:
                self.checks.cluster_arrive(group, released)
            self.release_clusters()
            return following

        def wait(group):
            lanes = group.lanes
            phase = self.cluster_phase_of[lanes]
            done = (phase >= 0) & (phase < self.cluster_phase[self.lane_cluster[lanes]])
            if not done.all():
                held = np.zeros(self.lanes, bool)
                held[lanes[~done]] = True
                parked = self.cluster_parked.get(number)
                self.cluster_parked[number] = held if parked is None else parked | held
            self._leave_cluster_barrier(number, lanes[done])
            return -1

        return arrive if words[0] == "arrive" else wait

    def _leave_cluster_barrier(self, number, lanes):
        if lanes.size == 0:
            return
        self.cluster_phase_of[lanes] = -1
        if self.checks is not None:
            self.checks.cluster_release(lanes)
        mask = np.zeros(self.lanes, bool)
        mask[lanes] = True
        self.push(number + 1, group_of(mask))

    def release_clusters(self):
        """End the phase of clusters whose live threads have all arrived, and let those go on that wait for it."""
        arrived = self.cluster_arrived.reshape(self.clusters, -1)
        missing = self.live.reshape(self.clusters, -1) & ~arrived
        complete = arrived.any(axis=1) & ~missing.any(axis=1)
        if not complete.any():
            return
        self.cluster_phase[complete] += 1
        arrived[complete] = False
        if self.checks is not None:
            self.checks.finish_clusters(complete)
        for number, parked in list(self.cluster_parked.items()):
            free = parked & complete[self.lane_cluster] & (self.cluster_phase_of >= 0)
            left = parked & ~free
            if left.any():
                self.cluster_parked[number] = left
            else:
                del self.cluster_parked[number]
            self._leave_cluster_barrier(number, np.flatnonzero(free))

    # ---- running --------------------------------------------------------------------------------------------------------

    def push(self, block, group):
        """Let a group wait to run a basic block, together with those already there."""
        there = self.ready.get(block)
        if there is not None:
            group = group_of(there.mask | group.mask)
        self.ready[block] = group
        self.since[block] = self.decisions

    def _exit(self, group):
        if group.kind == FULL:
            self.live[:] = False
            self.live_count[:] = 0
        else:
            lanes = group.lanes
            self.live[lanes] = False
            self.live_count -= np.bincount(self.lane_block[lanes], minlength=self.blocks)
        if self.checks is not None and self.cluster_blocks > 1:
            self.checks.leave(group)
        if self.cluster_arrived.any():
            self.release_clusters()
        if self.barrier_parked:
            self.release_barriers()
        if self.warp_waiting:
            # lanes that left are no longer waited for: try again with those that wait
            for number, waiting in list(self.warp_waiting.items()):
                del self.warp_waiting[number]
                self.push(number, group_of(waiting))
        return -1

    def run(self, grid, parameters, total):
        """Execute the first ``total`` blocks of a grid (x, y, z). parameters: the packed bytes of the kernel's parameters."""
        self.grid = grid
        self.parameters[: len(parameters)] = np.frombuffer(parameters, np.uint8)
        if self.checks is not None:
            self.checks.start_launch()
        with np.errstate(all="ignore"):
            for first in range(0, total, self.blocks):
                self._run_batch(first, min(self.blocks, total - first))

    def _run_batch(self, first, count):
        self.first_block, self.batch_blocks = first, count
        self.block_order[:] = first + np.arange(self.blocks)
        self.block_linear[:] = self.linear_block(self.block_order)
        self._fill_specials()
        self.live = ((self.lane_thread < self.threads) & (self.lane_block < count)).copy()
        self.live_count = np.where(np.arange(self.blocks) < count, self.threads, 0)
        self.arrived = np.zeros((self.blocks, 16), np.int64)
        self.expected = np.zeros((self.blocks, 16), np.int64)
        self.counts_all = np.zeros((self.blocks, 16), bool)
        self.at_barrier = np.zeros(self.lanes, np.int64)
        self.barrier_parked, self.barrier_reduce, self.warp_waiting = {}, {}, {}
        self.parked = {}
        # phases of each cluster's barrier that have ended; the phase a lane arrived in and has not waited for, else -1
        self.cluster_phase = np.zeros(self.clusters, np.int64)
        self.cluster_phase_of = np.full(self.lanes, -1, np.int64)
        self.cluster_arrived = np.zeros(self.lanes, bool)
        self.cluster_parked = {}
        self.ready, self.since, self.decisions = {}, {}, 0
        self.pending_copies = []
        self.copy_group = np.zeros(self.lanes, np.int64)
        self.mbarriers, self.bulk_stores, self.pending_products = {}, [], []
        self.bulk_group = np.zeros(self.lanes, np.int64)
        self.product_group = np.zeros(self.lanes, np.int64)
        self.shared.data[:] = 0xA5  # what a block finds in shared memory is nothing to rely on
        if self.checks is not None:
            self.checks.start_batch()
        self.push(0, group_of(self.live.copy()))
        self._loop()
        if self.barrier_parked or self.warp_waiting or self.parked or self.cluster_parked:
            raise Deadlock(describe_deadlock(self))
        for finish in BATCH_ENDS:
            finish(self)

    def _loop(self):
        ready, code, counters = self.ready, self.code, self.counters
        while ready:
            self.decisions += 1
            block = min(ready) if self.decisions % FAIRNESS else min(ready, key=self.since.__getitem__)
            group = ready.pop(block)
            while True:
                steps, end, length = code[block]
                if counters is not None:
                    counters.count_block(block, group)
                for step in steps:
                    step(group)
                self.executed += length * group.count
                if self.executed > self.limit and self.block_instruction[block] is not None:
                    raise Endless(
                        f"{self.where(self.block_instruction[block], self.first_lane(group))}: the launch has executed more "
                        "instructions than the emulator's instruction_limit"
                    )
                block = block + 1 if end is None else end(group)
                if block < 0:
                    break
                if ready:
                    self.push(block, group)
                    break

    # ---- reports --------------------------------------------------------------------------------------------------------

    def unknown(self, instruction, what):
        """A PtxError that names the instruction."""
        source = ":".join(str(part) for part in instruction.source) if instruction.source else "no source line"
        return PtxError(
            f"{self.name}: the emulator does not know {what}, at PTX line {instruction.ptx_line} "
            f"({source}): {instruction.text}"
        )

    def first_lane(self, group):
        """The lowest lane of a group."""
        return int(group.sel.start if isinstance(group.sel, slice) else group.sel[0])

    def linear_block(self, order):
        """Numbers of blocks in the order x, y, z, from those in the order of clusters."""
        if self.cluster[1] == self.cluster[2] == 1:
            return order
        width, height, _ = self.cluster
        across, down = self.grid[0] // width, self.grid[1] // height
        cluster, rank = order // self.cluster_blocks, order % self.cluster_blocks
        x = cluster % across * width + rank % width
        y = cluster // across % down * height + rank // width % height
        z = cluster // (across * down) * self.cluster[2] + rank // (width * height)
        return x + self.grid[0] * (y + self.grid[1] * z)

    def block_name(self, block):
        """(x, y, z) of a block of this batch."""
        linear = int(self.block_linear[block])
        x, y, _ = self.grid
        return (linear % x, linear // x % y, linear // (x * y))

    def thread_name(self, lane):
        """(x, y, z) of a lane's thread in its block."""
        thread = int(self.lane_thread[lane])
        x, y, _ = self.block
        return (thread % x, thread // x % y, thread // (x * y))

    def where(self, instruction, lane):
        """Kernel, source line, PTX line, block and thread, in words."""
        source = f"{instruction.source[0]}:{instruction.source[1]}" if instruction.source else "no source line"
        return (
            f"{self.name}, {source}, PTX line {instruction.ptx_line} ({instruction.text}), "
            f"block {self.block_name(self.lane_block[lane])}, thread {self.thread_name(lane)}"
        )

    def fault(self, instruction, lane, what):
        """A MemoryFault that names everything."""
        return MemoryFault(f"{self.where(instruction, int(lane))}: {what}")


def _ends_block(instruction):
    """Whether lanes may part or wait at an instruction, so that a basic block ends behind it."""
    opcode = instruction.opcode
    return opcode[0] in _BLOCK_ENDS or any(
        find(table, opcode) for table in (WARP_BINDERS, WARPGROUP_BINDERS, END_BINDERS)
    )


def _warp_bits(mask):
    """bool [lanes] -> uint32 [warps]"""
    return np.packbits(mask.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32)[:, 0]
