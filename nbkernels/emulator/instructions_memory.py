"""Loads, stores, atomics, address conversions and fences.

An access first becomes parts: (buffer, which of the group's lanes or None for all, byte offsets int64). Global addresses
nearly always fall into one array, so that is tried first.
"""

import numpy as np

from nbkernels.emulator import parser
from nbkernels.emulator.machine import DTYPES, LOCAL_START, SHARED_START
from nbkernels.emulator.memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW, WINDOW_BYTES
from nbkernels.emulator.registry import instruction

U32, U64 = np.dtype(np.uint32), np.dtype(np.uint64)
# accesses that other threads may rely on without a barrier
STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")
SPACES = ("global", "shared", "local", "const", "param")


def space_of(i):
    """The state space an opcode names ("shared::cta" is "shared"), or "generic"."""
    for word in i.opcode[1:]:
        name = word.partition("::")[0]
        if name in SPACES:
            if word == "shared::cluster":
                return "shared"
            return name
    return "generic"


def shape_of(i):
    """(elements a lane, type word) of a load or store."""
    vector = next((int(w[1]) for w in i.opcode if w in ("v2", "v4", "v8")), 1)
    return vector, i.opcode[-1]


def data_type(m, i, kind):
    """The dtype in which a value of this type moves: its bits."""
    if kind == "b128":
        raise m.unknown(i, "128-bit registers")
    dtype = DTYPES[kind]
    return dtype if dtype.kind == "i" else np.dtype(f"uint{8 * dtype.itemsize}")


def address_source(m, i, address, space):
    """(registers [lanes] or None, constant offset) of an address operand in a space."""
    base = address.base
    if isinstance(base, parser.Register):
        dtype = U64 if DTYPES[base.type].itemsize == 8 else U32
        return m.source(i, base, dtype), address.offset
    if isinstance(base, parser.Immediate):
        return None, base.value + address.offset
    if base.name not in m.symbols:
        raise m.unknown(i, f"variable {base.name}")
    generic = space == "generic"
    return None, m.symbol_address(base.name, generic) + address.offset


def locator(m, i, address, space, size, mode, *, checked=True):
    """A function of a group that gives the parts of an access of ``size`` bytes a lane, checked for bounds and alignment.

    mode: "read", "write", "atomic", or "copy" for a write that an asynchronous copy begins. The checks know "strong read" and
    "strong write" besides: accesses that do not race with each other, nor with atomics.
    """
    locate = _plain_locator(m, i, address, space, size, mode != "read")
    if space == "const" or not checked:
        return locate
    if m.counters is not None:
        locate = m.counters.watch(i, locate, size, mode)
    if m.checks is None:
        return locate
    if any(w in i.opcode for w in STRONG) and mode in ("read", "write"):
        mode = "strong " + mode
    return m.checks.watch(i, locate, size, mode)


def _plain_locator(m, i, address, space, size, write):
    base, offset = address_source(m, i, address, space)
    if base is None:
        base, offset = m.constant(offset % (1 << 64), U64), 0
    if space == "shared" and "shared::cluster" in i.opcode and i.opcode[0] in ("ld", "st", "atom", "red", "mbarrier"):
        return _cluster_locator(m, i, base, offset, size, write)
    if space in ("shared", "local"):
        return _window_locator(m, i, base, offset, space, size, write)
    if space in ("global", "const"):
        return _global_locator(m, i, base, offset, size, write)
    return _generic_locator(m, i, base, offset, size, write)


def _window_locator(m, i, base, offset, space, size, write):
    if space == "shared":
        buffer, lane_base, start, end = m.shared, m.lane_shared, SHARED_START, m.shared_end
    else:
        buffer, lane_base, start, end = m.local, m.lane_local, LOCAL_START, m.local_end
    limit, mask = end - size, size - 1
    # a 32-bit address wraps, a 64-bit one does not come near it
    narrow = base.dtype == U32

    def locate(group):
        sel = group.sel
        at = base[sel].astype(np.int64)
        if offset:
            at += offset
            if narrow:
                at &= 0xFFFFFFFF
        if at.min() < start or at.max() > limit:
            bad = int(np.argmax((at < start) | (at > limit)))
            _window_fault(m, i, group, bad, int(at[bad]), space, start, end, size, write)
        if mask and int(np.bitwise_or.reduce(at)) & mask:
            bad = int(np.argmax((at & mask) != 0))
            _misaligned(m, i, group, bad, int(at[bad]), size, f"{space} memory")
        at += lane_base[sel]
        return ((buffer, None, at),)

    return locate


def _cluster_locator(m, i, base, offset, size, write):
    """Addresses in shared::cluster: the block's own, or what ``mapa`` made of one for a block of its cluster."""
    scratch = np.zeros(m.lanes, U32)  # addresses in the memory of the blocks that the lanes at hand reach
    inside = _window_locator(m, i, scratch, 0, "shared", size, write)
    narrow = base.dtype == U32

    def locate(group):
        sel = group.sel
        at = base[sel].astype(U64) + np.uint64(offset % (1 << 64))
        if narrow:
            at &= np.uint64(0xFFFFFFFF)
        rank = (at >> np.uint64(RANK_SHIFT)).astype(np.int64) - 1
        scratch[sel] = at & np.uint64((1 << RANK_SHIFT) - 1)
        if int(rank.max()) < 0:
            return inside(group)
        if int(rank.max()) >= m.cluster_blocks:
            bad = int(np.argmax(rank))
            _rank_fault(m, i, group, bad, int(rank[bad]))
        ((buffer, _, offsets),) = inside(group)
        lanes = group.lanes
        distance = np.where(rank < 0, 0, rank - m.lane_rank[lanes])
        _reach(m, i, lanes, distance, write)
        return ((buffer, None, offsets + distance * m.shared_stride),)

    return locate


def _reach(m, i, lanes, distance, write):
    """Lanes reach into the shared memory of blocks that many further: those have to run."""
    blocks = m.lane_block[lanes] + distance
    gone = (m.live_count[blocks] == 0) & (distance != 0)
    if gone.any():
        bad = int(np.argmax(gone))
        verb = "writes to" if write else "reads"
        raise m.fault(
            i, lanes[bad], f"{verb} shared memory of block {m.block_name(blocks[bad])} of its cluster, which has exited"
        )
    if m.checks is not None:
        m.checks.reach(i, lanes, blocks)


def _rank_fault(m, i, group, bad, rank):
    raise m.fault(i, group.lanes[bad], f"rank {rank} in a cluster of {m.cluster_blocks} blocks")


def _window_fault(m, i, group, bad, address, space, start, end, size, write):
    lane = group.lanes[bad]
    verb = "writes" if write else "reads"
    where = "before it" if address < start else "across its end"
    if space == "shared" and m.cluster_blocks > 1 and address >> RANK_SHIFT:
        where = "an address of mapa, which only shared::cluster accesses take"
    elif address >= end:
        where = f"{address - end} bytes behind its end"
    raise m.fault(
        i,
        lane,
        f"{verb} {size} bytes at {space} address {address:#x}, {where}: the block's {space} memory is "
        f"{start:#x} to {end:#x} ({end - start} bytes)",
    )


def _misaligned(m, i, group, bad, address, size, where):
    raise m.fault(
        i, group.lanes[bad], f"misaligned access: address {address:#x} ({where}) is no multiple of {size} bytes"
    )


def _global_locator(m, i, base, offset, size, write):
    memory, mask = m.memory, np.uint64(size - 1)
    state = [None, None, None]  # the buffer of the last access, base less the constant offset, the largest good offset

    def remember(buffer):
        state[0] = buffer
        state[1] = np.uint64((buffer.base - offset) % (1 << 64))
        state[2] = buffer.size - size

    def locate(group):
        at = base[group.sel]
        buffer = state[0]
        if buffer is not None and buffer.alive:
            offsets = at - state[1]
            if state[2] >= 0 and int(offsets.max()) <= state[2]:
                if mask and np.bitwise_or.reduce(offsets) & mask:
                    bad = int(np.argmax((offsets & mask) != 0))
                    _misaligned(m, i, group, bad, int(at[bad]) + offset, size, memory.describe(int(at[bad]) + offset))
                if write and buffer.readonly:
                    _readonly(m, i, group, 0, int(at[0]) + offset, buffer)
                return ((buffer, None, offsets.view(np.int64)),)
        return _search(group, at)

    def _search(group, at):
        addresses = at + np.uint64(offset % (1 << 64))
        parts = split_by_buffer(m, i, group, addresses, size, write)
        remember(parts[0][0])
        return parts

    return locate


def split_by_buffer(m, i, group, addresses, size, write):
    """Parts of addresses that may fall into several arrays; faults for those in none."""
    memory = m.memory
    bases = np.array(memory.bases, np.uint64)
    if not bases.size:
        raise m.fault(i, group.lanes[0], f"global address {int(addresses[0]):#x}: no array is registered")
    owner = np.searchsorted(bases, addresses, side="right").astype(np.int64) - 1
    parts = []
    numbers = np.unique(owner)
    for number in numbers:
        inside = owner == number
        buffer = memory.buffers[max(number, 0)]
        offsets = (addresses[inside] - np.uint64(buffer.base)).view(np.int64)
        wrong = (offsets < 0) | (offsets + size > buffer.size)
        if wrong.any():
            bad = int(np.flatnonzero(inside)[int(np.argmax(wrong))])
            address = int(addresses[bad])
            verb = "writes" if write else "reads"
            raise m.fault(
                i, group.lanes[bad], f"{verb} {size} bytes at global address {address:#x}: {memory.describe(address)}"
            )
        crooked = (offsets & (size - 1)) != 0
        if crooked.any():
            bad = int(np.flatnonzero(inside)[int(np.argmax(crooked))])
            _misaligned(m, i, group, bad, int(addresses[bad]), size, memory.describe(int(addresses[bad])))
        if write and buffer.readonly:
            bad = int(np.flatnonzero(inside)[0])
            _readonly(m, i, group, bad, int(addresses[bad]), buffer)
        parts.append((buffer, None if numbers.size == 1 else np.flatnonzero(inside), offsets))
    return tuple(parts)


def _readonly(m, i, group, bad, address, buffer):
    raise m.fault(i, group.lanes[bad], f"writes at address {address:#x} of {buffer.name}, which is read-only")


def _generic_locator(m, i, base, offset, size, write):
    """Generic addresses: the shared and the local window, and all else global."""
    from nbkernels.emulator.groups import group_of

    shared_base, local_base = np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW)
    reach = np.uint64(WINDOW_BYTES)
    window_offset = np.uint64(offset % (1 << 64))
    scratch = np.zeros(m.lanes, np.uint64)  # window addresses of the lanes at hand
    in_shared = _cluster_locator(m, i, scratch, 0, size, write)
    in_local = _window_locator(m, i, scratch, 0, "local", size, write)
    in_global = _global_locator(m, i, base, offset, size, write)

    def locate(group):
        at = base[group.sel] + window_offset
        if int(at.max()) < SHARED_WINDOW:
            return in_global(group)
        shared = (at - shared_base) < reach
        local = (at - local_base) < reach
        parts = []
        for inside, locator_of, start in (
            (shared, in_shared, shared_base),
            (local, in_local, local_base),
            (~(shared | local), in_global, None),
        ):
            if not inside.any():
                continue
            everyone = inside.all()
            if everyone:
                part = group
            else:
                mask = np.zeros(m.lanes, bool)
                mask[group.sel] = inside
                part = group_of(mask)
            if start is not None:
                scratch[part.sel] = (at if everyone else at[inside]) - start
            places = None if everyone else np.flatnonzero(inside)
            for buffer, which, offsets in locator_of(part):
                if places is not None:
                    which = places if which is None else places[which]
                parts.append((buffer, which, offsets))
        return tuple(parts)

    return locate


# ---- loads and stores -------------------------------------------------------------------------------------------------


def access_of(i):
    """(space, bytes) of an instruction's access to shared, global or generic memory, or None."""
    name = i.opcode[0]
    if name in ("ld", "ldu", "st"):
        vector, kind = shape_of(i)
        return space_of(i), vector * parser.TYPE_BYTES[kind]
    if name in ("atom", "red"):
        return space_of(i), parser.TYPE_BYTES.get(i.opcode[-1], 4)
    if name == "cp" and i.opcode[2:3] in (["ca"], ["cg"]):
        return "generic", i.operands[2].value
    return None


def granules(function):
    """The narrowest access of a function to "shared" and to "global" memory, in bytes, at most 16."""
    found = {"shared": 16, "global": 16}
    for i in function.instructions:
        access = access_of(i)
        if access is not None:
            for space in found:
                if access[0] in (space, "generic"):
                    found[space] = min(found[space], access[1])
    return found


def passes_between_blocks(function):
    """Whether a function has global atomics or strong accesses, by which blocks may order what they do."""
    return any(
        i.opcode[0] in ("atom", "red", "ld", "st")
        and space_of(i) in ("global", "generic")
        and (i.opcode[0] in ("atom", "red") or any(w in STRONG for w in i.opcode))
        for i in function.instructions
    )


@instruction("ld", "ldu")
def bind_load(m, i):
    vector, kind = shape_of(i)
    space = space_of(i)
    dtype = data_type(m, i, kind)
    targets = i.operands[0].items if isinstance(i.operands[0], parser.Vector) else (i.operands[0],)
    places = [m.destination(i, t, dtype) for t in targets]
    address = i.operands[1]
    if space == "param" and isinstance(address.base, parser.Symbol):
        where, start = m.symbols[address.base.name]
        if where == "kernel parameter":
            return _load_parameter(m, i, places, dtype, start + address.offset)
        space = "local"
    elif space == "param":
        space = "generic"
    size = dtype.itemsize * vector
    locate = locator(m, i, address, space, size, "read")
    shift = size.bit_length() - 1
    only = places[0] if vector == 1 else None

    def load_one(group):
        for buffer, which, offsets in locate(group):
            values = buffer.view(dtype).take(offsets >> shift if shift else offsets)
            if which is None:
                only[group.sel] = values
            else:
                only[group.lanes[which]] = values

    def load_vector(group):
        for buffer, which, offsets in locate(group):
            values = buffer.view(dtype, vector).take(offsets >> shift, axis=0)
            sel = group.sel if which is None else group.lanes[which]
            for number, place in enumerate(places):
                if place is not None:
                    place[sel] = values[:, number]

    return load_one if vector == 1 else load_vector


def _load_parameter(m, i, places, dtype, start):
    views = [m.parameters[start + n * dtype.itemsize :][: dtype.itemsize].view(dtype) for n in range(len(places))]

    def step(group):
        sel = group.sel
        for place, value in zip(places, views, strict=True):
            place[sel] = value[0]

    return step


@instruction("st")
def bind_store(m, i):
    vector, kind = shape_of(i)
    space = space_of(i)
    dtype = data_type(m, i, kind)
    values = i.operands[1].items if isinstance(i.operands[1], parser.Vector) else (i.operands[1],)
    sources = [m.source(i, v, dtype) for v in values]
    size = dtype.itemsize * vector
    locate = locator(m, i, i.operands[0], "local" if space == "param" else space, size, "write")
    shift = size.bit_length() - 1

    def store_one(group):
        values = sources[0][group.sel]
        for buffer, which, offsets in locate(group):
            places = offsets >> shift if shift else offsets
            mine = values if which is None else values[which]
            buffer.view(dtype)[places] = mine
            if m.checks is not None:
                m.checks.last_writer_wins(i, group, buffer, which, offsets, buffer.view(dtype)[places] == mine)

    def store_vector(group):
        sel = group.sel
        for buffer, which, offsets in locate(group):
            view = buffer.view(dtype, vector)
            rows = np.empty((offsets.size, vector), dtype)
            for number, source in enumerate(sources):
                rows[:, number] = source[sel] if which is None else source[sel][which]
            view[offsets >> shift] = rows
            if m.checks is not None:
                kept = (view[offsets >> shift] == rows).all(axis=1)
                m.checks.last_writer_wins(i, group, buffer, which, offsets, kept)

    return store_one if vector == 1 else store_vector


# ---- atomics ----------------------------------------------------------------------------------------------------------


def _wrapped_increment(old, bound):
    return np.where(old >= bound, 0, old + old.dtype.type(1)).astype(old.dtype)


def _wrapped_decrement(old, bound):
    return np.where((old == 0) | (old > bound), bound, old - old.dtype.type(1)).astype(old.dtype)


def _atomic_operation(m, i, name, kind):
    """new = f(old, operand) of arrays of the type."""
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        from nbkernels.emulator.instructions_float import close_halves, open_halves

        base = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]
        return lambda old, b: close_halves(kind, base(open_halves(kind, old), open_halves(kind, b)))
    return {
        "add": np.add,
        "min": np.fmin if kind[0] == "f" else np.minimum,
        "max": np.fmax if kind[0] == "f" else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, b: b,
        "inc": _wrapped_increment,
        "dec": _wrapped_decrement,
    }[name]


@instruction("atom", "red")
def bind_atomic(m, i):
    """Lanes that meet at one address act one after the other, in the order of their numbers."""
    words = i.opcode
    kind = words[-1]
    name = next(w for w in words[1:] if w in ("add", "min", "max", "inc", "dec", "cas", "exch", "and", "or", "xor"))
    if any(w in ("v2", "v4", "v8") for w in words):
        raise m.unknown(i, "vector atomics")
    dtype = DTYPES[kind]
    operands = list(i.operands)
    place = m.destination(i, operands.pop(0), dtype) if words[0] == "atom" else None
    address = operands.pop(0)
    locate = locator(m, i, address, space_of(i), dtype.itemsize, "atomic")
    sources = [m.source(i, o, dtype) for o in operands[: 2 if name == "cas" else 1]]
    operation = None if name == "cas" else _atomic_operation(m, i, name, kind)
    shift = dtype.itemsize.bit_length() - 1

    def step(group):
        sel = group.sel
        values = [s[sel] for s in sources]
        for buffer, which, offsets in locate(group):
            mine = values if which is None else [v[which] for v in values]
            index = offsets >> shift
            view = buffer.view(dtype)
            old = np.empty(index.size, dtype)
            for turn in _turns(index):
                at = index[turn]
                before = view[at]
                old[turn] = before
                if operation is None:
                    view[at] = np.where(before == mine[0][turn], mine[1][turn], before)
                else:
                    view[at] = operation(before, mine[0][turn])
            if place is not None:
                lanes = group.sel if which is None else group.lanes[which]
                place[lanes] = old

    return step


def _turns(index):
    """Sets of positions with different indices each; a position stands behind the earlier ones with its index."""
    if index.size == 1:
        return (slice(None),)
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    if first.all():
        return (slice(None),)
    starts = np.flatnonzero(first)
    rank = np.arange(index.size) - np.repeat(starts, np.diff(np.r_[starts, index.size]))
    by_rank = np.argsort(rank, kind="stable")
    return np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1])


# ---- addresses, fences and what only hints ------------------------------------------------------------------------------


@instruction("cvta")
def bind_convert_address(m, i):
    """cvta.space: to a generic address; cvta.to.space: from it."""
    words = i.opcode
    into = words[1] == "to"
    space = words[2 if into else 1].partition("::")[0]
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    dtype = DTYPES[words[-1]]
    place = m.destination(i, i.operands[0], dtype)
    value = i.operands[1]
    if isinstance(value, parser.Symbol) and value.name in m.symbols:
        address = m.symbol_address(value.name, generic=not into) + value.offset
        return m.apply(np.positive, place, [m.constant(address, dtype)])
    source = m.source(i, value, dtype)
    distance = m.constant(window, dtype)
    return m.apply(np.subtract if into else np.add, place, [source, distance])


@instruction("isspacep")
def bind_is_space(m, i):
    space = i.opcode[1].partition("::")[0]
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space)
    own = space == "shared" and i.opcode[1] != "shared::cluster"
    reach = np.uint64(1 << RANK_SHIFT if own else WINDOW_BYTES)
    place = m.destination(i, i.operands[0], np.dtype(bool))
    source = m.source(i, i.operands[1], U64)
    if window is None:
        if space != "global":
            raise m.unknown(i, f"isspacep.{space}")
        return m.apply(lambda x: x < np.uint64(SHARED_WINDOW), place, [source], into=False)
    return m.apply(lambda x: (x - np.uint64(window)) < reach, place, [source], into=False)


@instruction("mapa")
def bind_map_shared(m, i):
    """The address of the same shared variable in another block of the cluster."""
    dtype = DTYPES[i.opcode[-1]]
    place = m.destination(i, i.operands[0], dtype)
    operand = i.operands[1]
    if isinstance(operand, parser.Symbol) and operand.name in m.symbols:
        generic = space_of(i) == "generic"
        source = m.constant(m.symbol_address(operand.name, generic) + operand.offset, dtype)
    else:
        source = m.source(i, operand, dtype)
    ranks = m.source(i, i.operands[2], U32)
    own = dtype.type((1 << 8 * dtype.itemsize) - 1 - ((0xFF) << RANK_SHIFT))

    def step(group):
        sel = group.sel
        rank = ranks[sel]
        if int(rank.max()) >= m.cluster_blocks:
            bad = int(np.argmax(rank))
            _rank_fault(m, i, group, bad, int(rank[bad]))
        place[sel] = (source[sel] & own) | ((rank.astype(dtype) + dtype.type(1)) << dtype.type(RANK_SHIFT))

    return step


@instruction("getctarank")
def bind_rank_of_address(m, i):
    """The rank of the block whose shared memory an address is in."""
    dtype = DTYPES[i.opcode[-1]] if space_of(i) == "shared" else U64
    place, source = m.destination(i, i.operands[0], U32), m.source(i, i.operands[1], dtype)

    def rank_of(address, own):
        named = (address >> dtype.type(RANK_SHIFT) & dtype.type(0xFF)).astype(U32)
        return np.where(named == 0, own, named - np.uint32(1))

    return m.apply(rank_of, place, [source, m.lane_rank.astype(U32)], into=False)


@instruction(
    "membar", "fence", "prefetch", "prefetchu", "applypriority", "discard", "nanosleep", "pmevent", "setmaxnreg",
    "griddepcontrol.launch_dependents",
)  # fmt: skip
def bind_nothing(m, i):
    """Orders, hints and sleeps: memory here is in order and has no caches."""
    return None


@instruction("griddepcontrol.wait")
def bind_wait_for_kernels(m, i):
    """Launches follow one another here; the checks know what a thread may not touch before it has waited."""
    return None if m.checks is None else m.checks.wait_for_kernels


@instruction("createpolicy")
def bind_create_policy(m, i):
    return m.apply(np.positive, m.destination(i, i.operands[0], U64), [m.constant(0, U64)])


@instruction("activemask")
def bind_active_mask(m, i):
    place = m.destination(i, i.operands[0], U32)

    def step(group):
        bits = np.packbits(group.mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]
        place[group.sel] = np.repeat(bits, 32)[group.sel]

    return step
