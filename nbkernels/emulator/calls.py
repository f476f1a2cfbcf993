"""Calls: device functions are laid into their callers before anything is bound, and ``vprintf`` prints.

Each call gets a copy of the function's registers, variables and labels; parameters and results become the caller's own
variables, so that what ``st.param`` wrote before the call is what ``ld.param`` reads in the function. PTX of Numba has no
recursion; it is refused.
"""

import re
from dataclasses import replace

import numpy as np

from nbkernels.emulator import parser
from nbkernels.emulator.errors import PtxError
from nbkernels.emulator.memory import LOCAL_WINDOW, SHARED_WINDOW
from nbkernels.emulator.registry import instruction

_FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(hh|h|ll|l|z|j)?([diouxXfFeEgGcsp%])")
BUILT_IN = ("vprintf",)


def with_calls_inlined(module, function, within=()):
    """The Function with every call of a device function replaced by a copy of it; the function itself where it calls none."""
    if not any(i.opcode[0] == "call" and _callee(i) not in BUILT_IN for i in function.instructions):
        return function
    result = replace(
        function, instructions=[], registers=list(function.registers), labels={}, variables=dict(function.variables)
    )
    place = []  # index in the caller -> index in the result
    for number, i in enumerate(function.instructions):
        place.append(len(result.instructions))
        name = _callee(i) if i.opcode[0] == "call" else None
        if name is None or name in BUILT_IN:
            result.instructions.append(i)
            continue
        callee = module.functions.get(name)
        if callee is None or not callee.instructions:
            raise PtxError(f"PTX line {i.ptx_line}: no function {name!r} to call: {i.text}")
        if name in (*within, function.name):
            raise PtxError(f"PTX line {i.ptx_line}: {name} calls itself, which the emulator does not do: {i.text}")
        _insert(result, i, with_calls_inlined(module, callee, (*within, function.name)), f"call {number} of {name}: ")
    place.append(len(result.instructions))
    result.labels.update({label: place[index] for label, index in function.labels.items()})
    return result


def _callee(i):
    name = next((o.name for o in i.operands if isinstance(o, parser.Symbol)), None)
    if name is None:
        raise PtxError(f"PTX line {i.ptx_line}: a call through a register: {i.text}")
    return name


def _lists(i):
    """(results, parameters) of a call, as variable names."""
    position = next(n for n, o in enumerate(i.operands) if isinstance(o, parser.Symbol))
    before = [o for o in i.operands[:position] if isinstance(o, list)]
    after = [o for o in i.operands[position + 1 :] if isinstance(o, list)]
    names = [[o.name for o in found[0]] if found else [] for found in (before, after)]
    return names[0], names[1]


def _insert(result, call, callee, prefix):
    """Append a copy of callee to result."""
    results, parameters = _lists(call)
    names = dict(zip([v.name for v in callee.results], results, strict=True))
    names.update(zip([v.name for v in callee.parameters], parameters, strict=True))
    for variable in callee.variables.values():
        names[variable.name] = prefix + variable.name
        result.variables[prefix + variable.name] = replace(variable, name=prefix + variable.name)
    first = len(result.registers)
    result.registers += [parser.Register(prefix + r.name, r.type, r.number + first) for r in callee.registers]

    def renamed(operand):
        if isinstance(operand, parser.Register):
            return result.registers[operand.number + first]
        if isinstance(operand, parser.Symbol):
            return parser.Symbol(names.get(operand.name, operand.name), operand.offset)
        if isinstance(operand, parser.Address):
            coordinates = operand.coordinates and renamed(operand.coordinates)
            return parser.Address(renamed(operand.base), operand.offset, coordinates)
        if isinstance(operand, parser.Vector):
            return parser.Vector(tuple(renamed(o) for o in operand.items))
        if isinstance(operand, parser.Not):
            return parser.Not(renamed(operand.register))
        if isinstance(operand, parser.Pair):
            return parser.Pair(renamed(operand.first), renamed(operand.second))
        if isinstance(operand, list):
            return [renamed(o) for o in operand]
        # a label
        return prefix + operand if isinstance(operand, str) else operand

    end = prefix + "end"
    if call.guard is not None:
        skip = (call.guard[0], not call.guard[1])
        result.instructions.append(replace(call, opcode=["bra"], operands=[end], guard=skip))
    start = len(result.instructions)
    for i in callee.instructions:
        guard = i.guard and (renamed(i.guard[0]), i.guard[1])
        if i.opcode[0] == "ret":
            copy = replace(i, opcode=["bra"], operands=[end], guard=guard)
        else:
            copy = replace(i, operands=[renamed(o) for o in i.operands], guard=guard)
        result.instructions.append(copy)
    result.labels.update({prefix + label: start + index for label, index in callee.labels.items()})
    result.labels[end] = len(result.instructions)


# ---- vprintf ----------------------------------------------------------------------------------------------------------


def _read(m, i, lane, address, size):
    """Bytes at a generic address as a lane sees it."""
    if address >= LOCAL_WINDOW:
        buffer, start = m.local, address - LOCAL_WINDOW + int(m.lane_local[lane])
    elif address >= SHARED_WINDOW:
        buffer, start = m.shared, address - SHARED_WINDOW + int(m.lane_shared[lane])
    else:
        buffer = m.memory.find(address)
        if buffer is None:
            raise m.fault(i, lane, f"vprintf reads address {address:#x}: {m.memory.describe(address)}")
        start = address - buffer.base
    return buffer.data[start : start + size].tobytes()


def _string(m, i, lane, address):
    """The text up to the zero byte."""
    return _read(m, i, lane, address, 4096).partition(b"\0")[0].decode(errors="replace")


def formatted(text, take, string_at):
    """C's printf of a format text; take(size) gives the next argument's bytes, string_at(address) a text."""

    def convert(match):
        length, kind = match.groups()
        if kind == "%":
            return "%"
        spec = match.group(0).replace(length, "", 1) if length else match.group(0)
        if kind in "fFeEgG":
            return spec % np.frombuffer(take(8), np.float64)[0]
        if kind in "sp":
            address = int.from_bytes(take(8), "little")
            return spec % string_at(address) if kind == "s" else f"{address:#x}"
        size = 8 if length in ("l", "ll", "z", "j") else 4
        return spec.replace("u", "d") % int.from_bytes(take(size), "little", signed=kind in "di")

    return _FORMAT.sub(convert, text)


@instruction("call")
def bind_call(m, i):
    """vprintf(format, arguments): prints for each lane, in the order of the lanes."""
    results, parameters = _lists(i)
    text_at, arguments_at = (m.symbols[name][1] for name in parameters)
    result_at = m.symbols[results[0]][1] if results else None

    def step(group):
        for lane in group.lanes:
            own = LOCAL_WINDOW
            text = int.from_bytes(_read(m, i, lane, own + text_at, 8), "little")
            position = [int.from_bytes(_read(m, i, lane, own + arguments_at, 8), "little")]

            def take(size, lane=lane, position=position):
                start = -(-position[0] // size) * size
                position[0] = start + size
                return _read(m, i, lane, start, size)

            print(formatted(_string(m, i, lane, text), take, lambda a, lane=lane: _string(m, i, lane, a)), end="")
            if result_at is not None:
                at = int(m.lane_local[lane]) + result_at
                m.local.data[at : at + 4] = 0
                if m.checks is not None:
                    m.checks.local_written[at : at + 4] = 0xFF

    return step
