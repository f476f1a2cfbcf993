"""PTX and SASS as lists of instructions, each with the Python line it came from.

PTX says the line itself (``.loc``). SASS comes from the disassembler ``nvdisasm``, which reads a cubin's line table, and also
tells how many registers are live at each instruction. No GPU is needed for either.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nbkernels.emulator.counters import class_of
from nbkernels.profiling.resources import find_tool


@dataclass(frozen=True)
class Instruction:
    """text: as the listing has it; source: (file, line) or None; live: registers that are live there (SASS), or None."""

    text: str
    source: tuple | None
    live: int | None = None

    @property
    def opcode(self):
        """The words of its opcode, as ("ld", "global", "v4", "u32") or ("LDG", "E", "128")."""
        words = self.text.split()
        if words and words[0].startswith("@"):
            words = words[1:]
        return tuple(words[0].rstrip(";").split(".")) if words else ()


def ptx_instructions(text):
    """The Instructions of a PTX text, in order; labels and directives are left out."""
    files, source, found = {}, None, []
    inside = False
    for line in text.splitlines():
        line = line.strip()
        if match := re.match(r'\.file\s+(\d+)\s+"([^"]*)"', line):
            files[match[1]] = match[2]
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("{"):
            inside = True
            line = line[1:].strip()
        if match := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            source = (files[match[1]], int(match[2])) if match[1] in files and match[2] != "0" else None
        elif inside and re.match(r"@|[a-z]", line) and line.endswith(";"):
            found.append(Instruction(line.rstrip(";"), source))
    return found


def ptx_with_source(text):
    """The PTX with a comment in front of the first instruction of each Python line, as that line is."""
    files, last, out = {}, None, []
    for line in text.splitlines():
        if match := re.match(r'\s*\.file\s+(\d+)\s+"([^"]*)"', line):
            files[match[1]] = match[2]
    for line in text.splitlines():
        if (match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)) and match[1] in files:
            source = files[match[1]], int(match[2])
            if source != last:
                out.append(f"// {name_of(source)}  {line_of(source)}")
            last = source
        out.append(line)
    return "\n".join(out)


def sass_instructions(cubin):
    """The Instructions of a cubin (bytes) with one kernel.

    FileNotFoundError where there is no nvdisasm, ValueError where it refuses the cubin.
    """
    tool = find_tool("nvdisasm", "nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)

        def disassemble(*options):
            done = subprocess.run([tool, "-c", *options, str(path)], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"nvdisasm refuses the cubin: {done.stderr.strip()}")
            return done.stdout

        lines = disassemble("-g")
        try:
            live = live_registers(disassemble("-plr", "-lrm", "count"))
        except ValueError:  # its analysis does not cover every program
            live = {}
    return parse_sass(lines, live)


_SASS = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:\{\s*)?(.*?)\s*;")


def parse_sass(text, live):
    """What ``nvdisasm -c -g`` prints -> Instructions. live: offset -> registers."""
    source, found = None, []
    for line in text.splitlines():
        if match := re.match(r'\s*//## File "([^"]*)", line (\d+)', line):
            source = match[1], int(match[2])
        elif match := _SASS.match(line):
            found.append(Instruction(match[2], source, live.get(int(match[1], 16))))
    return found


def live_registers(text):
    """What ``nvdisasm -c -plr -lrm count`` prints -> {offset: live general registers}. The first column of numbers is theirs."""
    found = {}
    for line in text.splitlines():
        match = _SASS.match(line)
        columns = line.rpartition("// |")[2].split("|") if match else []
        if columns and columns[0].strip().isdigit():
            found[int(match[1], 16)] = int(columns[0])
    return found


# ---- what instructions are -----------------------------------------------------------------------------------------------

# first word of a SASS opcode -> class; U… is the uniform datapath's, what is not here is "integer"
_SASS_CLASSES = {
    "memory": "LD LDG LDS LDL LDC LDSM LDGSTS ST STG STS STL STSM ATOM ATOMG ATOMS RED REDG UBLKCP UTMALDG UTMASTG UTMAPF "
    "UTMACMDFLUSH LDGDEPBAR ULDC LDCU LDGMC CCTL CCTLL CCTLT UCCTL",
    "tensor core": "HMMA IMMA DMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA WARPGROUP",
    "warp": "SHFL VOTE VOTEU MATCH REDUX CREDUX ELECT MOVM",
    "barrier": "BAR B2R MEMBAR DEPBAR SYNCS FENCE ERRBAR WARPSYNC ENDCOLLECTIVE ARRIVES UCGABAR_ARV UCGABAR_WAIT NANOSLEEP "
    "ACQBULK CGAERRBAR WARPARRIVE WARPDEPBAR UTMACCTL USETMAXREG",
    "branch": "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK RPCMOV YIELD BMOV BRXU JMX KILL PREEXIT",
    "convert": "F2F F2FP F2I I2F I2FP F2IP I2IP FRND",
    "special function": "MUFU",
    "float": "FADD FMUL FFMA FMNMX FSEL FSETP FSET FCHK HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 HSET2 DADD DMUL DFMA DSETP FSWZADD "
    "FADD2 FMUL2 FFMA2 FMNMX3",
    "move": "MOV UMOV S2R S2UR CS2R R2UR P2R R2P P2UR NOP",
}
_SASS_CLASS_OF = {name: group for group, names in _SASS_CLASSES.items() for name in names.split()}


def instruction_class(instruction):
    """The class of a PTX or SASS instruction: "memory", "tensor core", "float", …"""
    words = instruction.opcode
    if words and words[0].isupper():
        return _SASS_CLASS_OF.get(words[0], "integer")
    return class_of(words)


def access_width(instruction):
    """(space, bytes a lane) of a load or store to global or shared memory that is one lane's own, else None."""
    words = instruction.opcode
    if not words:
        return None
    if words[0].isupper():
        space = {"LDG": "global", "STG": "global", "LDS": "shared", "STS": "shared", "LDGSTS": "global to shared"}.get(
            words[0]
        )
        if space is None:
            return None
        bits = next((int(w.lstrip("US")) for w in words[1:] if w.lstrip("US") in ("8", "16", "64", "128")), 32)
        return space, bits // 8
    if words[0] == "cp" and words[1:2] == ("async",) and "bulk" not in words and "shared" in "".join(words):
        size = re.search(r",\s*(\d+)", instruction.text.rpartition("]")[2])
        return ("global to shared", int(size[1])) if size else None
    space = next((w for w in words[1:] if w in ("global", "shared")), None)
    if words[0] not in ("ld", "st") or space is None:
        return None
    bits = re.fullmatch(r"[busf](\d+)|bf16", words[-1])
    count = next((int(w[1:]) for w in words if re.fullmatch(r"v[248]", w)), 1)
    return (space, count * (int(bits[1] or 16) if bits else 32) // 8)


def name_of(source):
    """A source line as "rows.py:178"."""
    return f"{Path(source[0]).name}:{source[1]}"


def line_of(source):
    """The text of a source line, empty where its file cannot be read."""
    import linecache

    return linecache.getline(*source).strip()
