"""PTX text to a Module: functions with flat lists of instructions, every name resolved.

Scopes (``{ … }`` blocks of inline assembly with their own registers and labels) are flattened: each register becomes one
``Register`` with a number of its own, each label an index into the instruction list. Source lines come from ``.file`` and
``.loc``. The grammar is that of NVIDIA's PTX ISA reference, chapters 4 and 5.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from nbkernels.emulator.errors import PtxError

# newest version of the language whose documents the instruction tables were written from
NEWEST_VERSION = (9, 9)


class Register(NamedTuple):
    """A virtual register: number is its slot in the function; type is its declared type without the dot."""

    name: str
    type: str
    number: int


class Immediate(NamedTuple):
    """A literal: an int, or for 0f/0d literals and decimal floats a Python float with the bits of its own width."""

    value: object
    is_float: bool


class Symbol(NamedTuple):
    """A variable, function or special register by name, plus a byte offset."""

    name: str
    offset: int


class Address(NamedTuple):
    """[base + offset]; base is a Register, Symbol or Immediate. coordinates: the second part of a tensor address, or None."""

    base: object
    offset: int
    coordinates: object


class Vector(NamedTuple):
    """{a, b, …}"""

    items: tuple


class Not(NamedTuple):
    """!p"""

    register: object


class Pair(NamedTuple):
    """p|q: two results of one instruction."""

    first: object
    second: object


@dataclass
class Instruction:
    """One instruction.

    opcode: ["ld", "global", "v4", "b32"]; guard: (register, negated) or None; source: (file, line) or None.
    """

    opcode: list
    operands: list
    guard: tuple | None
    ptx_line: int
    source: tuple | None
    text: str


@dataclass
class Variable:
    """A variable of the module or a function. size in bytes (0: extern, sized by the launch); data: initial bytes or None."""

    name: str
    space: str
    size: int
    alignment: int
    kind: str = "b8"
    data: bytes | None = None
    # (byte offset, symbol name, addend) of addresses in the initialiser
    addresses: list = field(default_factory=list)
    is_extern: bool = False


@dataclass
class Function:
    """An entry or device function, flat. labels: name -> index into instructions; branch_targets: name -> labels."""

    name: str
    is_entry: bool
    parameters: list
    results: list
    instructions: list = field(default_factory=list)
    registers: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)
    branch_targets: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)
    directives: dict = field(default_factory=dict)


@dataclass
class Module:
    """A parsed PTX text."""

    version: tuple
    target: str
    functions: dict
    variables: dict
    files: dict
    text: str

    def entry(self, name):
        """The entry with this name, or the only one where name is None."""
        entries = [f for f in self.functions.values() if f.is_entry]
        if name is None and len(entries) == 1:
            return entries[0]
        for function in entries:
            if function.name == name:
                return function
        raise PtxError(f"no entry {name!r}; the module has {', '.join(f.name for f in entries) or 'none'}")


TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 16,
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "f32": 4,
    "tf32": 4,
    "f64": 8,
    "pred": 1,
}

_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.S)
_SPACE = re.compile(r"\s*")
_NAME = r"[A-Za-z_$%][\w$]*"
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_STATEMENT = re.compile(r"[^;]*;")
_LINE = re.compile(r"[^\n]*")
_DIRECTIVE = re.compile(r"\.(\w+)")
_REGISTERS = re.compile(rf"({_NAME})(?:<(\d+)>)?")
_GUARD = re.compile(rf"@(!?)\s*({_NAME})\s+")
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"([+-]?)0([fF][0-9a-fA-F]{8}|[dD][0-9a-fA-F]{16})$")
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?$")
_NUMBERED = re.compile(r"(.*?)(\d+)$")
_LINE_DIRECTIVES = ("version", "target", "address_size", "file", "loc")
_LINKING = ("visible", "extern", "weak", "common")


def integer(text):
    """The value of an integer literal (decimal, 0x, 0b, octal with a leading 0; a U suffix is allowed)."""
    text = text.strip().rstrip("U")
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        return sign * int(digits, 8)
    return sign * int(digits, 0)


def literal(text):
    """An Immediate, or None where the text is no literal."""
    if _INTEGER.match(text):
        return Immediate(integer(text), False)
    match = _FLOAT_BITS.match(text)
    if match:
        import struct

        digits = match.group(2)
        code, size = (">f", 4) if digits[0] in "fF" else (">d", 8)
        value = struct.unpack(code, int(digits[1:], 16).to_bytes(size, "big"))[0]
        bits = int(digits[1:], 16)
        if value != value:  # a NaN keeps its payload only as bits
            return Immediate(_NanBits(bits, size), True)
        return Immediate(-value if match.group(1) == "-" else value, True)
    if _DECIMAL.match(text):
        return Immediate(float(text), True)
    return None


class _NanBits(float):
    """A NaN literal that remembers its bits."""

    def __new__(cls, bits, size):
        self = super().__new__(cls, "nan")
        self.bits = bits
        self.size = size
        return self


def split(text):
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    if last or parts:
        parts.append(last)
    return parts


def _blank(match):
    """Comments become spaces that keep the line count; strings stay."""
    text = match.group(0)
    return text if text[0] == '"' else re.sub(r"[^\n]", " ", text)


# a large kernel takes tens of megabytes; a model has some twenty
@lru_cache(maxsize=32)
def parse(text):
    """The Module of a PTX text. PtxError names the line that cannot be read."""
    return _Parser(text).module()


class _Scope:
    """The names of one ``{ … }``: registers by name and by numbered range, variables, labels."""

    def __init__(self, number):
        self.number = number
        self.names = {}
        self.ranges = {}
        self.variables = {}
        self.labels = {}


class _Parser:
    def __init__(self, text):
        self.original = text
        self.text = _COMMENT.sub(_blank, text)
        self.position = 0
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", self.text))]
        self.files = {}
        self.source = None
        self.operand_cache = {}

    # ---- reading --------------------------------------------------------------------------------------------------------

    def line(self, position=None):
        """The 1-based line of a position."""
        return bisect_right(self.line_starts, self.position if position is None else position)

    def fail(self, what, position=None):
        number = self.line(position)
        shown = self.original.splitlines()[number - 1].strip() if number <= len(self.line_starts) else ""
        raise PtxError(f"PTX line {number}: {what}: {shown}")

    def skip_space(self):
        self.position = _SPACE.match(self.text, self.position).end()
        return self.position < len(self.text)

    def take(self, pattern, what):
        match = pattern.match(self.text, self.position)
        if not match:
            self.fail(f"expected {what}")
        self.position = match.end()
        return match

    def take_until(self, letters):
        """The text up to the first of ``letters`` outside brackets of another kind; the letter is consumed."""
        depth, position = 0, self.position
        while position < len(self.text):
            letter = self.text[position]
            if letter in letters and depth == 0:
                content = self.text[self.position : position]
                self.position = position + 1
                return content, letter
            if letter in "([{":
                depth += 1
            elif letter in ")]}":
                depth -= 1
            position += 1
        self.fail(f"expected one of {letters!r} before the end")

    def take_braced(self):
        """The text inside a { … } that starts here."""
        assert self.text[self.position] == "{"
        self.position += 1
        content, _ = self.take_until("}")
        return content

    # ---- module ---------------------------------------------------------------------------------------------------------

    def module(self):
        module = Module((0, 0), "", {}, {}, self.files, self.original)
        prefixes = set()
        while self.skip_space():
            start = self.position
            if self.text[start] == ";":
                self.position += 1
                continue
            name = self.take(_DIRECTIVE, "a directive").group(1)
            if name in _LINKING:
                prefixes.add(name)
                continue
            if name in _LINE_DIRECTIVES:
                self.line_directive(name, module)
            elif name == "section":
                self.take(re.compile(r"[^{]*"), "a section")
                self.take_braced()
            elif name in ("entry", "func"):
                self.function(name, module)
            elif name in ("global", "const", "shared", "local"):
                content, _ = self.take_until(";")
                for variable in self.variables(name, content, start):
                    variable.is_extern = "extern" in prefixes
                    module.variables[variable.name] = variable
            elif name in ("pragma", "alias", "callprototype"):
                self.take_until(";")
            else:
                self.fail(f"unknown directive .{name}", start)
            prefixes = set()
        self.resolve_files(module)
        return module

    def line_directive(self, name, module):
        content = self.take(_LINE, "a line").group(0).strip()
        if name == "version":
            module.version = tuple(int(part) for part in content.split("."))
            if module.version > NEWEST_VERSION:
                self.fail(
                    f"PTX version {content} is newer than the emulator knows "
                    f"({NEWEST_VERSION[0]}.{NEWEST_VERSION[1]}); compile with an older toolkit, or update nbkernels",
                    self.position - 1,
                )
        elif name == "target":
            module.target = content.split(",")[0].strip()
        elif name == "address_size":
            if content != "64":
                self.fail("only 64-bit addresses are supported", self.position - 1)
        elif name == "file":
            number, path = content.split(None, 1)
            self.files[int(number)] = re.match(r'"([^"]*)"', path).group(1)
        elif name == "loc":
            # line 0 marks code that belongs to no line: it stays with the line before it
            file, number = content.split()[:2]
            if int(number):
                self.source = (int(file), int(number))

    def resolve_files(self, module):
        for function in module.functions.values():
            for instruction in function.instructions:
                if instruction.source:
                    number, line = instruction.source
                    instruction.source = (self.files.get(number, f"file {number}"), line)

    def variables(self, space, content, position):
        """The variables that ``.space content;`` declares."""
        declaration, _, initialiser = content.partition("=")
        alignment, kind, is_vector = 0, None, 1
        rest = declaration.strip()
        while rest.startswith("."):
            word = re.match(r"\.([\w:]+)\s*", rest)
            rest = rest[word.end() :]
            if word.group(1) == "align":
                number = re.match(r"(\d+)\s*", rest)
                alignment, rest = int(number.group(1)), rest[number.end() :]
            elif word.group(1) in ("v2", "v4"):
                is_vector = int(word.group(1)[1])
            elif word.group(1) == "attribute":
                rest = re.sub(r"^\([^)]*(\([^)]*\))?[^)]*\)\s*", "", rest)
            elif word.group(1) in TYPE_BYTES:
                kind = word.group(1)
            elif word.group(1) != "ptr":
                self.fail(f"unknown variable attribute .{word.group(1)}", position)
        if kind is None:
            self.fail("a variable without a type", position)
        width = TYPE_BYTES[kind] * is_vector
        found = []
        for declared in split(rest):
            match = re.match(rf"({_NAME})\s*((?:\[\s*\w*\s*\]\s*)*)$", declared)
            if not match:
                self.fail("a variable that cannot be read", position)
            size = width
            for extent in re.findall(r"\[\s*(\w*)\s*\]", match.group(2)):
                size *= integer(extent) if extent else 0
            variable = Variable(match.group(1), space, size, max(alignment, min(width, 16)), kind)
            if initialiser.strip():
                self.initialise(variable, kind, initialiser.strip())
            found.append(variable)
        return found

    def initialise(self, variable, kind, text):
        import struct

        width = TYPE_BYTES[kind]
        data = bytearray()
        for item in re.findall(r"[^{},\s][^{},]*", text):
            item = item.strip()
            value = literal(item)
            if value is None:
                match = re.match(rf"(?:generic\s*\(\s*)?({_NAME})\s*\)?\s*(?:\+\s*(\d+))?$", item)
                if not match:
                    self.fail(f"an initial value that cannot be read ({item})")
                variable.addresses.append((len(data), match.group(1), int(match.group(2) or 0)))
                data += bytes(8)
            elif kind in ("f32", "f64") and value.is_float:
                data += struct.pack("<f" if kind == "f32" else "<d", value.value)
            elif value.is_float:
                self.fail("a float where an integer is declared")
            else:
                data += (value.value % (1 << (8 * width))).to_bytes(width, "little")
        variable.size = max(variable.size, len(data))
        variable.data = bytes(data) + bytes(variable.size - len(data))

    # ---- functions ------------------------------------------------------------------------------------------------------

    def parameter_list(self):
        self.skip_space()
        if self.text[self.position] != "(":
            return []
        self.position += 1
        content, _ = self.take_until(")")
        found = []
        for item in split(content):
            match = re.match(r"\.(param|reg)\s+", item)
            if not match:
                self.fail("a parameter that cannot be read")
            # .ptr [.space] [.align N] describes what a pointer points to; it changes no size
            item = re.sub(r"\.ptr(\s+\.(global|shared|local|const))?(\s+\.align\s+\d+)?", "", item[match.end() :])
            found += self.variables("param", item, self.position)
        return found

    def function(self, kind, module):
        results = self.parameter_list() if kind == "func" else []
        self.skip_space()
        name = self.take(re.compile(_NAME), "a name").group(0)
        parameters = self.parameter_list()
        function = Function(name, kind == "entry", parameters, results)
        while self.skip_space():
            letter = self.text[self.position]
            if letter == ";":
                self.position += 1
                module.functions.setdefault(name, function)
                return
            if letter == "{":
                break
            directive = self.take(_DIRECTIVE, "a directive or a body").group(1)
            values = re.compile(r"[\d,\s]*").match(self.text, self.position)
            self.position = values.end()
            function.directives[directive] = [int(v) for v in re.findall(r"\d+", values.group(0))]
        self.position += 1
        module.functions[name] = function
        self.body(function)

    def body(self, function):
        self.source = None
        self.operand_cache = {}
        scopes = [_Scope(0)]
        scope_count = 1
        self.function_now, self.scopes = function, scopes
        pending = []  # instructions whose labels are resolved when their scope is known in full
        while True:
            if not self.skip_space():
                self.fail("the function does not end", len(self.text) - 1)
            start = self.position
            letter = self.text[start]
            if letter == "{":
                scopes.append(_Scope(scope_count))
                scope_count += 1
                self.operand_cache = {}
                self.position += 1
            elif letter == "}":
                scope = scopes.pop()
                self.operand_cache = {}
                self.position += 1
                for name, index in scope.labels.items():
                    function.labels[f"{name}@{scope.number}"] = index
                self.resolve_labels(pending, scope, function, last=not scopes)
                if not scopes:
                    return
            elif letter == ";":
                self.position += 1
            elif letter == ".":
                self.body_directive(function, start)
            else:
                label = _LABEL.match(self.text, start)
                if label:
                    self.position = label.end()
                    scopes[-1].labels[label.group(1)] = len(function.instructions)
                    self.skip_space()
                    targets = re.compile(r"\.branchtargets\s+([^;]*);").match(self.text, self.position)
                    if targets:
                        self.position = targets.end()
                        function.branch_targets[label.group(1)] = split(targets.group(1))
                    continue
                statement = self.take(_STATEMENT, "an instruction that ends in ;").group(0)[:-1]
                instruction = self.instruction(statement.strip(), start)
                function.instructions.append(instruction)
                if instruction.opcode[0] in ("bra", "brx"):
                    pending.append((instruction, len(scopes)))

    def resolve_labels(self, pending, scope, function, last):
        """Branches of this scope or inner ones whose label this scope holds get the label's unique name."""
        kept = []
        for instruction, depth in pending:
            names = [o for o in instruction.operands if isinstance(o, Symbol)]
            if instruction.opcode[0] == "brx":
                targets = function.branch_targets[names[-1].name]
                instruction.operands[-1] = [f"{t}@{scope.number}" for t in targets]
            elif names and names[-1].name in scope.labels:
                instruction.operands[-1] = f"{names[-1].name}@{scope.number}"
            elif last:
                raise PtxError(f"PTX line {instruction.ptx_line}: no label for: {instruction.text}")
            else:
                kept.append((instruction, depth))
        pending[:] = kept

    def body_directive(self, function, start):
        name = self.take(_DIRECTIVE, "a directive").group(1)
        if name in _LINE_DIRECTIVES:
            self.line_directive(name, None)
            return
        if name == "pragma":
            self.take_until(";")
            return
        content, _ = self.take_until(";")
        if name == "reg":
            match = re.match(r"\s*((?:\.v[24]\s+)?)\.(\w+)\s+", content)
            kind = match.group(2)
            if match.group(1) or kind not in TYPE_BYTES:
                self.fail(f"registers of type {match.group(0).strip()}", start)
            for item in split(content[match.end() :]):
                declared = _REGISTERS.match(item)
                if declared.group(2):
                    self.scopes[-1].ranges[declared.group(1)] = (kind, int(declared.group(2)))
                else:
                    self.declare(declared.group(1), kind)
            self.operand_cache = {}
        elif name in ("shared", "local", "param", "global", "const"):
            for variable in self.variables(name, content, start):
                unique = variable.name
                while unique in function.variables:
                    unique += "'"
                self.scopes[-1].variables[variable.name] = unique
                variable.name = unique
                function.variables[unique] = variable
            self.operand_cache = {}
        else:
            self.fail(f"unknown directive .{name}", start)

    def declare(self, name, kind):
        register = Register(name, kind, len(self.function_now.registers))
        self.function_now.registers.append(register)
        self.scopes[-1].names[name] = register
        return register

    # ---- instructions ---------------------------------------------------------------------------------------------------

    def instruction(self, text, start):
        guard, rest = None, text
        match = _GUARD.match(text)
        if match:
            register = self.lookup(match.group(2))
            if not isinstance(register, Register):
                self.fail(f"no predicate {match.group(2)}", start)
            guard = (register, match.group(1) == "!")
            rest = text[match.end() :]
        head = re.match(r"\S+", rest)
        opcode = head.group(0)
        # shared::cta and L2::128B are one word each, so only single dots separate
        words = opcode.split(".")
        operands = [self.operand(o, start) for o in split(rest[head.end() :])]
        return Instruction(words, operands, guard, self.line(start), self.source, text)

    def operand(self, text, start):
        found = self.operand_cache.get(text)
        if found is None:
            found = self.operand_cache[text] = self.read_operand(text, start)
        return found

    def read_operand(self, text, start):
        if not text:
            self.fail("an empty operand", start)
        first = text[0]
        if first == "[":
            return self.address(text[1:-1], start)
        if first == "{":
            return Vector(tuple(self.operand(item, start) for item in split(text[1:-1])))
        if first == "(":
            return [self.operand(item, start) for item in split(text[1:-1])]
        if first == "!":
            return Not(self.operand(text[1:].strip(), start))
        value = literal(text)
        if value is not None:
            return value
        if "|" in text:
            one, other = text.split("|")
            return Pair(self.operand(one.strip(), start), self.operand(other.strip(), start))
        match = re.match(rf"({_NAME}(?:\.\w+)*)\s*(?:\+\s*(-?\w+))?$", text)
        if not match:
            self.fail(f"an operand that cannot be read ({text})", start)
        found = self.lookup(match.group(1))
        if isinstance(found, Register):
            return found
        return Symbol(found, integer(match.group(2)) if match.group(2) else 0)

    def address(self, text, start):
        parts = split(text)
        coordinates = None
        if len(parts) > 1:
            coordinates = self.operand(parts[1], start)
        match = re.match(r"([\w$%.]+)\s*(?:([+-])\s*(-?\w+))?$", parts[0])
        if not match:
            self.fail(f"an address that cannot be read ({text})", start)
        base = self.operand(match.group(1), start)
        offset = integer(match.group(3)) if match.group(3) else 0
        if match.group(2) == "-":
            offset = -offset
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name, 0), offset + base.offset
        return Address(base, offset, coordinates)

    def lookup(self, name):
        """The Register of a name, or the unique name of a variable, or the name itself."""
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
            if name in scope.variables:
                return scope.variables[name]
            match = _NUMBERED.match(name)
            if match and match.group(1) in scope.ranges:
                kind, count = scope.ranges[match.group(1)]
                if int(match.group(2)) < count:
                    register = Register(name, kind, len(self.function_now.registers))
                    self.function_now.registers.append(register)
                    scope.names[name] = register
                    return register
        return name
