"""Integer arithmetic, logic, shifts, comparisons, selections and moves."""

import numpy as np

from nbkernels.emulator import parser
from nbkernels.emulator.machine import DTYPES
from nbkernels.emulator.registry import instruction

U32, U64, S32, S64 = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(np.int32), np.dtype(np.int64)
BOOL = np.dtype(bool)


def emit(m, i, operation, kind, kinds=None, **how):
    """The step of a plain instruction: operands[0] of type ``kind`` = operation(the others, each of its type in ``kinds``)."""
    target = m.destination(i, i.operands[0], DTYPES[kind])
    operands = i.operands[1:]
    kinds = kinds or [kind] * len(operands)
    sources = [m.source(i, o, DTYPES[k]) for o, k in zip(operands, kinds, strict=True)]
    if target is not None and target.dtype != DTYPES[kind]:
        how["into"] = False
    return m.apply(operation, target, sources, **how)


def wide_type(kind):
    """u32 -> u64"""
    return f"{kind[0]}{2 * int(kind[1:])}"


# ---- sums and products ------------------------------------------------------------------------------------------------


def saturating(operation):
    """s32 with .sat: computed in 64 bits and clamped."""

    def clamped(a, b):
        total = operation(a.astype(np.int64), b.astype(np.int64))
        return np.clip(total, -(2**31), 2**31 - 1).astype(np.int32)

    return clamped


def bind_integer_sum(m, i):
    """add, sub of integers, with .sat and the carry forms."""
    name, kind = i.opcode[0], i.opcode[-1]
    operation = np.add if name.startswith("add") else np.subtract
    if "cc" in i.opcode or name in ("addc", "subc"):
        return _carry_sum(m, i, name, kind)
    if "sat" in i.opcode:
        return emit(m, i, saturating(operation), kind, into=False)
    return emit(m, i, operation, kind)


def carry_flag(m):
    """The carry of each lane's CC register, uint64 [lanes]."""
    if not hasattr(m, "carry"):
        m.carry = np.zeros(m.lanes, np.uint64)
    return m.carry


def _carry_sum(m, i, name, kind):
    dtype = DTYPES["u" + kind[1:]]
    bits = np.uint64(8 * dtype.itemsize)
    target = m.destination(i, i.operands[0], dtype)
    a, b = (m.source(i, o, dtype) for o in i.operands[1:])
    carry = carry_flag(m)
    takes, gives, subtracts = name in ("addc", "subc"), "cc" in i.opcode, name.startswith("sub")

    def step(group):
        sel = group.sel
        x, y = a[sel], b[sel]
        extra = carry[sel].astype(dtype) if takes else dtype.type(0)
        if subtracts:
            first = x - y
            total = first - extra
            out = (x < y) | (first < extra)
        else:
            first = x + y
            total = first + extra
            out = (first < x) | (total < first)
        if target is not None:
            target[sel] = total
        if gives:
            carry[sel] = out

    assert bits in (32, 64)
    return step


def multiply_high(a, b):
    """The upper half of the product of two arrays of 16-, 32- or 64-bit integers."""
    dtype = a.dtype
    bits = 8 * dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return (np.multiply(a, b, dtype=wide) >> wide.type(bits)).astype(dtype)
    x, y = a.view(np.uint64), b.view(np.uint64)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = x0 * y1 + (middle & mask)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(dtype)


def _contiguous(operation):
    """Views need arrays with their own storage, not broadcast literals."""
    return lambda *arrays: operation(*(np.ascontiguousarray(a) for a in arrays))


@instruction("mul24", "mad24")
def bind_mul24(m, i):
    kind = i.opcode[-1]

    def product(a, b, *c):
        low = (a << a.dtype.type(8)) >> a.dtype.type(8), (b << b.dtype.type(8)) >> b.dtype.type(8)
        full = np.multiply(*low, dtype=np.dtype(f"{a.dtype.kind}8"))
        full = full >> full.dtype.type(16) if "hi" in i.opcode else full
        result = full.astype(a.dtype)
        return result + c[0] if c else result

    return emit(m, i, product, kind, into=False)


def bind_integer_product(m, i):
    """mul.lo, mul.hi, mul.wide of integers."""
    kind = i.opcode[-1]
    if "lo" in i.opcode:
        return emit(m, i, np.multiply, kind)
    if "hi" in i.opcode:
        return emit(m, i, _contiguous(multiply_high), kind, into=False)
    wide = DTYPES[wide_type(kind)]
    return emit(m, i, lambda a, b: np.multiply(a, b, dtype=wide), wide_type(kind), [kind, kind], into=False)


def bind_integer_mad(m, i):
    """mad.lo, mad.hi, mad.wide of integers, with the carry forms."""
    kind = i.opcode[-1]
    if "cc" in i.opcode or i.opcode[0] == "madc":
        return _carry_mad(m, i, kind)
    if "lo" in i.opcode:
        return emit(m, i, lambda a, b, c: a * b + c, kind)
    if "hi" in i.opcode:
        high = _contiguous(multiply_high)
        if "sat" in i.opcode:
            return emit(m, i, lambda a, b, c: saturating(np.add)(high(a, b), c), kind)
        return emit(m, i, lambda a, b, c: high(a, b) + c, kind)
    wide = DTYPES[wide_type(kind)]
    return emit(m, i, lambda a, b, c: np.multiply(a, b, dtype=wide) + c, wide_type(kind), [kind, kind, wide_type(kind)])


def _carry_mad(m, i, kind):
    dtype, unsigned = DTYPES[kind], DTYPES["u" + kind[1:]]
    target = m.destination(i, i.operands[0], unsigned)
    a, b, c = (m.source(i, o, dtype) for o in i.operands[1:])
    carry = carry_flag(m)
    takes, gives, high = i.opcode[0] == "madc", "cc" in i.opcode, "hi" in i.opcode

    def step(group):
        sel = group.sel
        x, y, z = (np.ascontiguousarray(v[sel]) for v in (a, b, c))
        product = (multiply_high(x, y) if high else x * y).view(unsigned)
        first = product + z.view(unsigned)
        extra = carry[sel].astype(unsigned) if takes else unsigned.type(0)
        total = first + extra
        if target is not None:
            target[sel] = total
        if gives:
            carry[sel] = (first < product) | (total < first)

    return step


@instruction("sad")
def bind_sad(m, i):
    return emit(m, i, lambda a, b, c: c + np.where(a > b, a - b, b - a), i.opcode[-1])


@instruction("dp4a", "dp2a")
def bind_dot(m, i):
    """Dot products of four bytes, or of two halves with two bytes, added to a 32-bit sum."""
    kinds = i.opcode[-2:]
    kind = "s32" if "s32" in kinds else "u32"
    bytes_of = [np.dtype(np.int8 if k == "s32" else np.uint8) for k in kinds]
    halves_of = np.dtype(np.int16 if kinds[0] == "s32" else np.uint16)

    def dot4(a, b, c):
        x = np.ascontiguousarray(a).view(bytes_of[0]).reshape(-1, 4).astype(np.int64)
        y = np.ascontiguousarray(b).view(bytes_of[1]).reshape(-1, 4).astype(np.int64)
        return ((x * y).sum(axis=1) + c).astype(DTYPES[kind])

    def dot2(a, b, c):
        x = np.ascontiguousarray(a).view(halves_of).reshape(-1, 2).astype(np.int64)
        y = np.ascontiguousarray(b).view(bytes_of[1]).reshape(-1, 4).astype(np.int64)
        y = y[:, 2:] if "hi" in i.opcode else y[:, :2]
        return ((x * y).sum(axis=1) + c).astype(DTYPES[kind])

    return emit(m, i, dot4 if i.opcode[0] == "dp4a" else dot2, kind, ["u32", "u32", kind])


def divide(a, b):
    """Integer division that truncates; a division by zero gives all ones, as the hardware's sequence does."""
    zero = b == 0
    # a less its remainder divides exactly, so that NumPy's rounding down does not matter
    exact = a - np.fmod(a, b) if a.dtype.kind == "i" else a
    quotient = exact // np.where(zero, 1, b).astype(a.dtype)
    return np.where(zero, np.array(-1).astype(a.dtype), quotient)


def remainder(a, b):
    """The remainder with the sign of a; of a division by zero it is all ones (as an H200 gives it)."""
    zero = b == 0
    ones = np.invert(np.zeros_like(a))
    return np.where(zero, ones, np.fmod(a, np.where(zero, 1, b).astype(a.dtype)))


@instruction("rem")
def bind_rem(m, i):
    return emit(m, i, remainder, i.opcode[-1], into=False)


# ---- logic and shifts -------------------------------------------------------------------------------------------------


def _unsigned(kind):
    return kind if kind == "pred" else "b" + kind[1:]


def _negatable(m, i, operation, kind):
    """Logic on predicates may name a source as !p."""
    if not any(isinstance(o, parser.Not) for o in i.operands):
        return emit(m, i, operation, kind)
    target = m.destination(i, i.operands[0], BOOL)
    negated = [isinstance(o, parser.Not) for o in i.operands[1:]]
    sources = [m.source(i, o.register if isinstance(o, parser.Not) else o, BOOL) for o in i.operands[1:]]
    return m.apply(
        lambda *values: operation(*(v ^ n for v, n in zip(values, negated, strict=True))), target, sources, into=False
    )


@instruction("and")
def bind_and(m, i):
    return _negatable(m, i, np.bitwise_and, _unsigned(i.opcode[-1]))


@instruction("or")
def bind_or(m, i):
    return _negatable(m, i, np.bitwise_or, _unsigned(i.opcode[-1]))


@instruction("xor")
def bind_xor(m, i):
    return _negatable(m, i, np.bitwise_xor, _unsigned(i.opcode[-1]))


@instruction("not")
def bind_not(m, i):
    return _negatable(m, i, np.invert, _unsigned(i.opcode[-1]))


@instruction("cnot")
def bind_cnot(m, i):
    return emit(m, i, lambda a: (a == 0).astype(a.dtype), _unsigned(i.opcode[-1]), into=False)


@instruction("shl", "shr")
def bind_shift(m, i):
    """Shifts; an amount beyond the width shifts everything out."""
    kind = i.opcode[-1]
    dtype = DTYPES[kind]
    operation = np.left_shift if i.opcode[0] == "shl" else np.right_shift
    target = m.destination(i, i.operands[0], dtype)
    value = m.source(i, i.operands[1], dtype)
    amount = m.source(i, i.operands[2], U32)
    if amount.strides[0] == 0:
        amount = m.constant(min(int(amount[0]), 8 * dtype.itemsize), dtype)
        return m.apply(operation, target, [value, amount], into=target is not None and target.dtype == dtype)
    width = np.uint32(8 * dtype.itemsize)
    return m.apply(lambda a, b: operation(a, np.minimum(b, width).astype(dtype)), target, [value, amount], into=False)


@instruction("shf")
def bind_funnel_shift(m, i):
    """shf.l/.r with .wrap or .clamp: shift the 64 bits (high, low) and take one word."""
    left, wrap = i.opcode[1] == "l", i.opcode[2] == "wrap"

    def shift(low, high, amount):
        amount = (amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        if left:
            return ((both << amount) >> np.uint64(32)).astype(np.uint32)
        return (both >> amount).astype(np.uint32)

    return emit(m, i, shift, "b32")


@instruction("bfe")
def bind_bit_field_extract(m, i):
    kind = i.opcode[-1]
    bits = int(kind[1:])

    def extract(a, position, length):
        position = np.minimum(position & np.uint32(255), np.uint32(bits)).astype(np.int64)
        length = (length & np.uint32(255)).astype(np.int64)
        kept = np.minimum(length, bits - position)
        # bring the field to the top, then down again with its sign or with zeros
        up = np.minimum(bits - kept - position, bits)
        shifted = np.left_shift(a, up.astype(a.dtype))
        field = np.right_shift(shifted, np.minimum(bits - kept, bits).astype(a.dtype))
        if kind[0] == "s":
            # a field that reaches beyond the top is filled with the sign bit of a
            outside = (position >= bits) | ((kept <= 0) & (length > 0))
            return np.where(length == 0, 0, np.where(outside, np.where(a < 0, -1, 0), field)).astype(a.dtype)
        return np.where(kept <= 0, 0, field).astype(a.dtype)

    return emit(m, i, extract, kind, [kind, "u32", "u32"])


@instruction("bfi")
def bind_bit_field_insert(m, i):
    kind = i.opcode[-1]
    bits = int(kind[1:])

    def insert(a, b, position, length):
        position = np.minimum(position & np.uint32(255), np.uint32(bits)).astype(np.uint64)
        length = np.minimum(length & np.uint32(255), np.uint32(bits)).astype(np.uint64)
        ones = np.uint64(0xFFFFFFFFFFFFFFFF)
        mask = np.where(length >= 64, ones, (np.uint64(1) << length) - np.uint64(1)) << position
        wide = ((a.astype(np.uint64) << position) & mask) | (b.astype(np.uint64) & ~mask)
        return wide.astype(b.dtype)

    return emit(m, i, insert, kind, [kind, kind, "u32", "u32"])


@instruction("bfind")
def bind_find_bit(m, i):
    """The place of the highest bit that differs from the sign; 0xffffffff where there is none."""
    kind = i.opcode[-1]

    def find(a):
        value = np.where(a < 0, ~a, a) if kind[0] == "s" else a
        zeros = count_leading_zeros(value.astype(f"u{a.itemsize}"))
        found = np.uint32(8 * a.itemsize - 1) - zeros
        if "shiftamt" in i.opcode:
            found = np.where(zeros == 8 * a.itemsize, np.uint32(0xFFFFFFFF), zeros - np.uint32(kind[0] == "s"))
        return found

    return emit(m, i, find, "u32", [kind], into=False)


def count_leading_zeros(a):
    """uint32 of the zeros above the highest set bit."""
    bits = 8 * a.itemsize
    count = np.zeros(a.shape, np.uint32)
    value = a.copy()
    step = bits // 2
    while step:
        small = value < (1 << (bits - step))
        count += np.where(small, np.uint32(step), np.uint32(0))
        value = np.where(small, value << value.dtype.type(step), value)
        step //= 2
    return count + (value == 0).astype(np.uint32)


def count_bits(a):
    """uint32 of the set bits."""
    words = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
    return np.unpackbits(words, axis=1).sum(axis=1, dtype=np.uint32)


def reverse_bits(a):
    """The bits of each element in the opposite order."""
    width = a.itemsize
    octets = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), width), axis=1, bitorder="little")
    return np.packbits(octets[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]


@instruction("popc", "clz")
def bind_count(m, i):
    operation = count_bits if i.opcode[0] == "popc" else count_leading_zeros
    return emit(m, i, operation, "u32", [_unsigned(i.opcode[-1])], into=False)


@instruction("brev")
def bind_reverse(m, i):
    return emit(m, i, reverse_bits, i.opcode[-1], into=False)


@instruction("bmsk")
def bind_bit_mask(m, i):
    wrap = "wrap" in i.opcode

    def mask(position, length):
        if wrap:
            position, length = position & np.uint32(31), length & np.uint32(31)
        length = np.minimum(length, np.uint32(32)).astype(np.uint64)
        ones = (np.uint64(1) << length) - np.uint64(1)
        return np.where(position >= 32, 0, ones << np.minimum(position, 32).astype(np.uint64)).astype(np.uint32)

    return emit(m, i, mask, "b32", into=False)


@instruction("lop3")
def bind_lop3(m, i):
    """Any function of three bits: bit (4a + 2b + c) of the table is the result."""
    words = i.opcode
    if "and" in words[1:] or "or" in words[1:]:
        raise m.unknown(i, "lop3 with a predicate")
    table = i.operands[4].value
    target = m.destination(i, i.operands[0], U32)
    sources = [m.source(i, o, U32) for o in i.operands[1:4]]

    def combine(a, b, c):
        result = np.zeros(a.shape, np.uint32)
        for row in range(8):
            if table >> row & 1:
                term = (a if row & 4 else ~a) & (b if row & 2 else ~b)
                result |= term & (c if row & 1 else ~c)
        return result

    return m.apply(combine, target, sources)


def _fixed_permutation(selector):
    """The function of two words that a prmt with this selector is: bytes that move equally far move together."""
    moves, signs = {}, []  # (source word, places up) -> mask of the source; (source word, byte, place)
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        word, byte = nibble >> 2 & 1, nibble & 3
        if nibble & 8:
            signs.append((word, np.uint32(8 * byte + 7), np.uint32(8 * place)))
        else:
            key = (word, place - byte)
            moves[key] = moves.get(key, 0) | 0xFF << (8 * byte)

    def permute(*words):
        result = np.uint32(0)
        for (word, places), mask in moves.items():
            part = words[word] & np.uint32(mask)
            if places:
                part = part << np.uint32(8 * places) if places > 0 else part >> np.uint32(-8 * places)
            result = part | result if len(moves) > 1 or signs else part
        for word, sign, place in signs:
            result = result | ((words[word] >> sign) & np.uint32(1)) * np.uint32(0xFF) << place
        return result

    return permute


@instruction("prmt")
def bind_permute(m, i):
    """Bytes of (b, a) by the nibbles of a selector; only the default mode has a sign bit."""
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = next((w for w in i.opcode if w in modes), None)
    target = m.destination(i, i.operands[0], U32)
    a, b, selector = (m.source(i, o, U32) for o in i.operands[1:])

    def byte(both, place):
        return (both >> (place.astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)

    def default(a, b, selector):
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(a.shape, np.uint32)
        for position in range(4):
            nibble = (selector >> np.uint32(4 * position)) & np.uint32(15)
            value = byte(both, nibble & np.uint32(7))
            sign = (value >> np.uint64(7)) * np.uint64(0xFF)
            value = np.where(nibble & np.uint32(8), sign, value).astype(np.uint32)
            result |= value << np.uint32(8 * position)
        return result

    def special(a, b, selector):
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        s = (selector & np.uint32(3)).astype(np.int64)
        rows = {
            "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
            "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
            "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
            "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
            "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
            "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
        }
        places = np.array(rows[mode])[s]
        result = np.zeros(a.shape, np.uint32)
        for position in range(4):
            result |= byte(both, places[:, position]).astype(np.uint32) << np.uint32(8 * position)
        return result

    if mode is None and selector.strides[0] == 0:
        return m.apply(_fixed_permutation(int(selector[0])), target, [a, b], into=False)
    return m.apply(default if mode is None else special, target, [a, b, selector])


# ---- comparison and selection -----------------------------------------------------------------------------------------


def _unordered(operation):
    return lambda a, b: operation(a, b) | np.isnan(a) | np.isnan(b)


def _ordered_different(a, b):
    return (a != b) & ~(np.isnan(a) | np.isnan(b))


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "equ": _unordered(np.equal),
    "neu": np.not_equal,  # NumPy's != holds for a NaN
    "ltu": _unordered(np.less),
    "leu": _unordered(np.less_equal),
    "gtu": _unordered(np.greater),
    "geu": _unordered(np.greater_equal),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(i):
    """(function of two arrays, whether the type is a float's) of a setp or set."""
    from nbkernels.emulator.instructions_float import reader

    kind = i.opcode[-1]
    name = i.opcode[1]
    operation = COMPARISONS[name]
    if kind[0] == "f" or kind[0:2] == "bf":
        if name == "ne":
            operation = _ordered_different
        read = reader(kind, "ftz" in i.opcode)
        if read is not None:
            plain = operation
            operation = lambda a, b: plain(read(a), read(b))  # noqa: E731
    return operation


def _optional_predicate(m, i, operand):
    negated = isinstance(operand, parser.Not)
    return m.source(i, operand.register if negated else operand, BOOL), negated


@instruction("setp")
def bind_set_predicate(m, i):
    kind = i.opcode[-1]
    operation = comparison(i)
    combine = next((COMBINATIONS[w] for w in i.opcode[2:-1] if w in COMBINATIONS), None)
    if kind in ("f16x2", "bf16x2"):
        raise m.unknown(i, "setp of packed halves")
    a, b = (m.source(i, o, DTYPES[kind]) for o in i.operands[1:3])
    results = i.operands[0]
    if isinstance(results, parser.Pair):
        first, second = (m.destination(i, r, BOOL) for r in (results.first, results.second))
    else:
        first, second = m.destination(i, results, BOOL), None
    if combine is None and second is None:
        return m.apply(operation, first, [a, b])
    third, negated = _optional_predicate(m, i, i.operands[3]) if combine else (None, False)

    def step(group):
        sel = group.sel
        held = operation(a[sel], b[sel])
        other = ~held
        if combine is not None:
            c = third[sel]
            c = ~c if negated else c
            held, other = combine(held, c), combine(other, c)
        if first is not None:
            first[sel] = held
        if second is not None:
            second[sel] = other

    return step


@instruction("set")
def bind_set(m, i):
    """As setp into a register: all ones (or 1.0) where it holds."""
    result, kind = i.opcode[-2:]
    operation = comparison(i)
    combine = next((COMBINATIONS[w] for w in i.opcode[2:-2] if w in COMBINATIONS), None)
    dtype = DTYPES[result]
    a, b = (m.source(i, o, DTYPES[kind]) for o in i.operands[1:3])
    target = m.destination(i, i.operands[0], dtype)
    third, negated = _optional_predicate(m, i, i.operands[3]) if combine else (None, False)
    one = np.array(1.0, np.float32) if result == "f32" else np.array(-1).astype(dtype)

    def step(group):
        sel = group.sel
        held = operation(a[sel], b[sel])
        if combine is not None:
            held = combine(held, third[sel] ^ negated)
        target[sel] = np.where(held, one, dtype.type(0))

    return step


@instruction("selp")
def bind_select(m, i):
    kind = "b" + i.opcode[-1].lstrip("busf")
    dtype = DTYPES[kind]
    target = m.destination(i, i.operands[0], dtype)
    a, b = (m.source(i, o, dtype) for o in i.operands[1:3])
    predicate, negated = _optional_predicate(m, i, i.operands[3])
    if negated:
        a, b = b, a
    return m.apply(np.where, target, [predicate, a, b])


@instruction("slct")
def bind_select_sign(m, i):
    result, kind = i.opcode[-2:]
    width = "b" + result.lstrip("busf")
    return emit(m, i, lambda a, b, c: np.where(c >= 0, a, b), width, [width, width, kind])


# ---- moves ------------------------------------------------------------------------------------------------------------


@instruction("mov")
def bind_move(m, i):
    """Registers, literals, special registers, addresses of variables; packing and unpacking of {…}."""
    kind = i.opcode[-1]
    target, value = i.operands
    if isinstance(value, parser.Vector):
        return _pack(m, i, kind, target, value.items)
    if isinstance(target, parser.Vector):
        return _unpack(m, i, kind, target.items, value)
    if isinstance(value, parser.Symbol) and value.name in ("%clock", "%clock64", "%clock_hi", "%globaltimer"):
        return _read_clock(m, i, target, value.name)
    dtype = DTYPES["pred"] if kind == "pred" else DTYPES["b" + kind.lstrip("busf")]
    if isinstance(value, parser.Immediate) and kind[0] == "f":
        source = m.source(i, value, DTYPES[kind])
        return m.apply(np.positive, m.destination(i, target, DTYPES[kind]), [source], into=False)
    source = m.source(i, value, dtype)
    place = m.destination(i, target, dtype)
    return m.apply(np.copy if kind == "pred" else np.positive, place, [source], into=kind != "pred")


def _read_clock(m, i, target, name):
    dtype = U32 if name in ("%clock", "%clock_hi") else U64
    place = m.destination(i, target, dtype)

    def step(group):
        ticks = m.executed >> 32 if name == "%clock_hi" else m.executed
        place[group.sel] = np.array(ticks).astype(dtype)

    return step


def _part_type(m, i, kind, count):
    return DTYPES[f"b{int(kind[1:]) // count}"]


def _pack(m, i, kind, target, items):
    whole = DTYPES[kind]
    part = _part_type(m, i, kind, len(items))
    sources = [m.source(i, item, part) for item in items]
    shifts = [whole.type(8 * part.itemsize * n) for n in range(len(items))]

    def join(*parts):
        result = parts[0].astype(whole)
        for value, shift in zip(parts[1:], shifts[1:], strict=True):
            result |= value.astype(whole) << shift
        return result

    return m.apply(join, m.destination(i, target, whole), sources, into=False)


def _unpack(m, i, kind, targets, value):
    whole = DTYPES[kind]
    part = _part_type(m, i, kind, len(targets))
    source = m.source(i, value, whole)
    places = [m.destination(i, target, part) for target in targets]
    shifts = [whole.type(8 * part.itemsize * n) for n in range(len(targets))]

    def step(group):
        sel = group.sel
        word = source[sel].copy()
        for place, shift in zip(places, shifts, strict=True):
            if place is not None:
                place[sel] = (word >> shift).astype(part)

    return step
