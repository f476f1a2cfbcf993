"""Tensor-core instructions of one warp: ldmatrix, stmatrix, movmatrix and mma.sync.

Fragments: with g = lane // 4 and t = lane % 4, a word of matrix a holds consecutive columns of row g (register r: row
g + 8·(r % 2), columns from t·e + 4·e·(r // 2), e elements a word); of matrix b consecutive rows of column g; c and d hold
columns 2·t and 2·t + 1 of rows g and g + 8.
"""

import numpy as np

from nbkernels.emulator import parser, rounding
from nbkernels.emulator.groups import group_of
from nbkernels.emulator.instructions_memory import locator, space_of
from nbkernels.emulator.machine import WARP
from nbkernels.emulator.registry import warp_instruction

U32 = np.dtype(np.uint32)


def _items(operand):
    return operand.items if isinstance(operand, parser.Vector) else (operand,)


def whole_warps(m, i, group):
    """LaunchError-free check that every warp of the group has all 32 lanes: tensor-core instructions need them."""
    if group.count % WARP or not group.mask.reshape(-1, WARP).all(axis=1).sum() * WARP == group.count:
        raise m.fault(i, m.first_lane(group), "a matrix instruction needs all 32 lanes of the warp")


@warp_instruction("ldmatrix")
def bind_load_matrix(m, i):
    words = i.opcode
    count = next(int(w[1]) for w in words if w in ("x1", "x2", "x4"))
    if "m8n8" not in words or words[-1] != "b16":
        raise m.unknown(i, "this shape of ldmatrix")
    transposed = "trans" in words
    places = [m.destination(i, t, U32) for t in _items(i.operands[0])]
    locate = locator(m, i, i.operands[1], "shared" if space_of(i) == "shared" else "generic", 16, "read")
    gives_address = np.arange(m.lanes) % WARP < 8 * count

    def step(group):
        whole_warps(m, i, group)
        rows = _matrix_rows(m, group, locate, gives_address, count)  # uint16 [warps, count, 8, 8]
        if transposed:
            rows = rows.swapaxes(2, 3)
        fragments = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, count, WARP)
        for number, place in enumerate(places):
            place[group.sel] = fragments[:, number].reshape(-1)

    return None, step


def _matrix_rows(m, group, locate, gives_address, count):
    asked = group if count == 4 else group_of(group.mask & gives_address)
    parts = locate(asked)
    if len(parts) == 1:
        buffer, _, offsets = parts[0]
        rows = buffer.view(np.uint16, 8).take(offsets >> 4, axis=0)
    else:
        rows = np.empty((asked.count, 8), np.uint16)
        for buffer, which, offsets in parts:
            rows[which] = buffer.view(np.uint16, 8)[offsets >> 4]
    return rows.reshape(-1, count, 8, 8)


@warp_instruction("stmatrix")
def bind_store_matrix(m, i):
    words = i.opcode
    count = next(int(w[1]) for w in words if w in ("x1", "x2", "x4"))
    if "m8n8" not in words or words[-1] != "b16":
        raise m.unknown(i, "this shape of stmatrix")
    transposed = "trans" in words
    sources = [m.source(i, s, U32) for s in _items(i.operands[1])]
    locate = locator(m, i, i.operands[0], "shared" if space_of(i) == "shared" else "generic", 16, "write")
    gives_address = np.arange(m.lanes) % WARP < 8 * count

    def step(group):
        whole_warps(m, i, group)
        fragments = np.stack([s[group.sel].reshape(-1, WARP) for s in sources], axis=1)  # [warps, count, 32]
        rows = np.ascontiguousarray(fragments).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        rows = np.ascontiguousarray(rows).reshape(-1, 8)
        asked = group if count == 4 else group_of(group.mask & gives_address)
        for buffer, which, offsets in locate(asked):
            buffer.view(np.uint16, 8)[offsets >> 4] = rows if which is None else rows[which]

    return None, step


@warp_instruction("movmatrix")
def bind_move_matrix(m, i):
    place = m.destination(i, i.operands[0], U32)
    source = m.source(i, i.operands[1], U32)

    def step(group):
        whole_warps(m, i, group)
        rows = np.ascontiguousarray(source[group.sel]).view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
        place[group.sel] = np.ascontiguousarray(rows).view(np.uint32).reshape(-1)

    return None, step


def element_reader(kind):
    """(elements a 32-bit word, function that turns uint32 words into their elements as float64) of a type."""
    if kind == "bf16":
        return 2, lambda w: rounding.from_bf16(w.view(np.uint16)).astype(np.float64)
    if kind == "f16":
        return 2, lambda w: w.view(np.float16).astype(np.float64)
    if kind == "tf32":
        # the tensor core reads the upper 19 bits
        return 1, lambda w: (w & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind == "f64":
        return None, None
    octet = {"s8": np.int8, "u8": np.uint8}[kind]
    return 4, lambda w: w.view(octet).astype(np.float64)


def fragment_matrix(words, elements, read, row_halves):
    """Registers, each uint32 [warps, 32] -> float64 [warps, 8 · row_halves, columns] in the layout of a (of b transposed)."""
    warps, halves = words[0].shape[0], len(words) // row_halves
    parts = np.stack(words, axis=1).view(f"u{4 // elements}")  # [warps, registers, 32 · elements]
    # register, row of 8, column within the half -> row, column
    parts = parts.reshape(warps, halves, row_halves, 8, 4 * elements).transpose(0, 2, 3, 1, 4)
    whole = np.ascontiguousarray(parts).reshape(warps, 8 * row_halves, 4 * elements * halves)
    return read(whole.view(np.uint32))


@warp_instruction("mma")
def bind_matrix_product(m, i):
    """mma.sync.aligned.mMnNkK.row.col: d = a · b + c.

    Floating-point sums are made in float64 and rounded once to the type of d; integer sums are exact and wrap, or clamp
    with .satfinite.
    """
    words = i.opcode
    shape = next(w for w in words if w[0] == "m" and w[1:2].isdigit())
    if "sp" in words or "row" not in words or "col" not in words:
        raise m.unknown(i, "this form of mma")
    result, kind_a, kind_b = words[-4:-1]
    elements, read_a = element_reader(kind_a)
    if elements is None or element_reader(kind_b)[0] != elements:
        raise m.unknown(i, "mma of these types")
    read_b = element_reader(kind_b)[1]
    rows, columns, depth = (int(n) for n in shape[1:].replace("n", " ").replace("k", " ").split())
    row_halves = rows // 8
    a, b = ([m.source(i, r, U32) for r in _items(o)] for o in i.operands[1:3])
    if columns != 8 or len(a) * 4 * elements != depth * row_halves or len(b) * 4 * elements != depth:
        raise m.unknown(i, f"shape {shape} of mma with these types")
    integral = result == "s32"
    if result not in ("f32", "f16", "s32"):
        raise m.unknown(i, f"mma with results of {result}")
    places = [m.destination(i, r, U32) for r in _items(i.operands[0])]
    c = [m.source(i, r, U32) for r in _items(i.operands[3])]
    clamps = "satfinite" in words

    def step(group):
        whole_warps(m, i, group)
        sel = group.sel
        left = fragment_matrix([w[sel].reshape(-1, WARP) for w in a], elements, read_a, row_halves)
        right = fragment_matrix([w[sel].reshape(-1, WARP) for w in b], elements, read_b, 1)
        total = np.matmul(left, right.swapaxes(1, 2))  # [warps, rows, 8]
        # [row half, element, warps, lane], as the registers hold it
        total = total.reshape(-1, row_halves, WARP, 2).transpose(1, 3, 0, 2)
        start = np.stack([w[sel] for w in c])
        if result == "f16":
            pairs = np.stack([total[:, 0].reshape(row_halves, -1), total[:, 1].reshape(row_halves, -1)], axis=2)
            summed = rounding.to_f16(pairs + start.view(np.float16).reshape(row_halves, -1, 2)).view(np.uint32)[:, :, 0]
        else:
            total = total.reshape(2 * row_halves, -1)
            if integral:
                exact = total.astype(np.int64) + start.view(np.int32)
                summed = (np.clip(exact, -(2**31), 2**31 - 1) if clamps else exact).astype(np.uint32)
            else:
                summed = (total + start.view(np.float32)).astype(np.float32).view(np.uint32)
        for place, words_of in zip(places, summed, strict=True):
            place[sel] = words_of

    return None, step
