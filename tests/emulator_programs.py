"""Small PTX programs, a few instructions each, that hold the emulator against the hardware.

``python tests/emulator_programs.py run DATA.json`` executes them on a GPU (it needs nothing but Python and the driver) after
``python tests/emulator_programs.py prepare DATA.json`` has written texts and inputs there; the results are added to the file.
``python tests/emulator_programs.py keep DATA.json`` stores them as tests/data/emulator_hardware.npz, which
test_emulator_hardware.py compares with what the emulator computes.
"""

import base64
import ctypes
import json
import sys
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "emulator_hardware.npz"
LANES = 512
BYTES = {"u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8, "pred": 4}
REGISTER = {"u16": "b16", "u32": "b32", "u64": "b64", "f32": "f32", "f64": "f64", "pred": "pred"}


@dataclass(frozen=True)
class Program:
    """code names its results $0, $1, … and then its inputs. inputs: (type, how they are drawn). bound: the relative error
    allowed against the hardware, 0 for the same bits; floor: an absolute error below which nothing is compared.
    """

    name: str
    code: str
    inputs: tuple
    results: tuple
    bound: float = 0.0
    floor: float = 0.0


WORD, DOUBLE, ANY, NORMAL, TILE = (
    ("u32", "bits"),
    ("u64", "bits"),
    ("f32", "bits"),
    ("f32", "normal"),
    ("u32", "halves"),
)
POSITIVE, BYTES4, BF16, F16 = ("f32", "positive"), ("u32", "bits"), ("u32", "bf16 pair"), ("u32", "f16 pair")


def _simple(name, inputs, results, **options):
    """One instruction with plain operands."""
    operands = ", ".join(f"${n}" for n in range(len(results) + len(inputs)))
    return Program(name, f"{name} {operands};", inputs, results, **options)


def _mma(kind, a, b, result, c):
    """A tensor-core product of one warp with an accumulator."""
    shape, types = kind
    d, x, y, z = (
        "{" + ", ".join(f"${k}" for k in ks) + "}" for ks in (range(4), range(4, 8), range(8, 10), range(10, 14))
    )
    code = f"mma.sync.aligned.{shape}.row.col.{types} {d}, {x}, {y}, {z};"
    # the hardware cuts off the aligned products where the emulator rounds once; where they cancel, what is left of the largest
    bound, floor = (0.0, 0.0) if result[0] != "f" else (1e-6, 2e-4 if ".f16." in types else 0.02)
    inputs = (a,) * 4 + (b,) * 2 + (c,) * 4
    return Program(f"mma {shape} {types}", code, inputs, (result,) * 4, bound, floor)


PROGRAMS = (
    *(_simple(n, (WORD, WORD), ("u32",)) for n in (
        "add.u32", "mul.lo.s32", "mul.hi.u32", "mul.hi.s32", "div.u32", "div.s32", "rem.u32", "rem.s32", "min.s32",
        "shl.b32", "shr.u32", "shr.s32", "add.sat.s32", "bmsk.clamp.b32",
    )),
    *(_simple(n, (DOUBLE, DOUBLE), ("u64",)) for n in ("mul.hi.u64", "mul.hi.s64", "div.s64", "rem.u64")),
    *(_simple(n, (WORD,), ("u32",)) for n in (
        "popc.b32", "clz.b32", "brev.b32", "bfind.u32", "bfind.s32", "bfind.shiftamt.u32", "cnot.b32", "abs.s32",
    )),
    *(_simple(n, (WORD, WORD, WORD), ("u32",)) for n in (
        "mad.lo.s32", "mad.hi.u32", "prmt.b32", "prmt.b32.f4e", "prmt.b32.rc16", "dp4a.s32.s32", "dp4a.u32.s32",
        "dp2a.lo.s32.s32", "shf.l.wrap.b32", "shf.r.clamp.b32", "sad.s32",
    )),
    Program("bfe.u32", "{ .reg .b32 p, n; and.b32 p, $2, 63; and.b32 n, $3, 63; bfe.u32 $0, $1, p, n; }", (WORD,) * 3, ("u32",)),
    Program("bfe.s32", "{ .reg .b32 p, n; and.b32 p, $2, 63; and.b32 n, $3, 63; bfe.s32 $0, $1, p, n; }", (WORD,) * 3, ("u32",)),
    Program(
        "bfi.b32", "{ .reg .b32 p, n; and.b32 p, $3, 63; and.b32 n, $4, 63; bfi.b32 $0, $1, $2, p, n; }", (WORD,) * 4, ("u32",)
    ),
    Program("lop3.b32", "lop3.b32 $0, $1, $2, $3, 0x96;", (WORD,) * 3, ("u32",)),
    Program("mad.wide.s32", "mad.wide.s32 $0, $1, $2, $3;", (WORD, WORD, DOUBLE), ("u64",)),
    Program("add.cc", "add.cc.u32 $0, $2, $4; addc.u32 $1, $3, $5;", (WORD,) * 4, ("u32", "u32")),
    *(_simple(n, (ANY, ANY), ("f32",)) for n in (
        "add.f32", "sub.ftz.f32", "mul.f32", "mul.ftz.f32", "div.rn.f32", "min.f32", "max.f32", "max.NaN.f32",
        "add.rz.f32", "mul.rm.f32", "add.rp.f32", "copysign.f32",
    )),
    *(_simple(n, (NORMAL, NORMAL, NORMAL), ("f32",)) for n in ("fma.rn.f32", "fma.rn.ftz.f32", "fma.rz.f32")),
    Program("fma.rn.f32 of any bits", "fma.rn.f32 $0, $1, $2, $3;", (ANY,) * 3, ("f32",)),
    Program("sqrt.rn.f32", "sqrt.rn.f32 $0, $1;", (ANY,), ("f32",)),
    Program("rcp.rn.f32", "rcp.rn.f32 $0, $1;", (ANY,), ("f32",)),
    *(_simple(n, (POSITIVE,), ("f32",), bound=b, floor=f) for n, b, f in (
        ("ex2.approx.ftz.f32", 2.0**-22, 0.0), ("lg2.approx.ftz.f32", 2.0**-21, 2.0**-22),
        ("rcp.approx.ftz.f32", 2.0**-22.5, 0.0),
        ("rsqrt.approx.ftz.f32", 2.0**-22, 0.0), ("sqrt.approx.f32", 2.0**-21, 0.0), ("tanh.approx.f32", 2.0**-10, 2.0**-11),
    )),
    Program("div.full.f32", "div.full.f32 $0, $1, $2;", (POSITIVE, POSITIVE), ("f32",), bound=2.0**-21),
    Program("setp", "setp.ltu.f32 $0|$1, $2, $3;", (ANY, ANY), ("pred", "pred")),
    *(Program(n, f"{n} $0, $1;", (ANY,), ("u32",)) for n in (
        "cvt.rni.s32.f32", "cvt.rzi.u32.f32", "cvt.rmi.s32.f32", "cvt.rna.tf32.f32",
    )),
    Program("cvt.rzi.s64.f32", "cvt.rzi.s64.f32 $0, $1;", (ANY,), ("u64",)),
    Program("cvt.rni.sat.s8.f32", "{ .reg .b32 t; cvt.rni.sat.s8.f32 t, $1; mov.b32 $0, t; }", (NORMAL,), ("u32",)),
    Program("cvt.rn.f32.s32", "cvt.rn.f32.s32 $0, $1;", (WORD,), ("f32",)),
    Program("cvt.rz.f32.u64", "cvt.rz.f32.u64 $0, $1;", (DOUBLE,), ("f32",)),
    Program("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 $0, $1, $2;", (ANY, ANY), ("u32",)),
    Program("cvt.rn.f16x2.f32", "cvt.rn.f16x2.f32 $0, $1, $2;", (ANY, ANY), ("u32",)),
    Program("cvt.rn.relu.bf16x2.f32", "cvt.rn.relu.bf16x2.f32 $0, $1, $2;", (ANY, ANY), ("u32",)),
    Program("cvt.pack", "cvt.pack.sat.s8.s32.b32 $0, $1, $2, $3;", (WORD,) * 3, ("u32",)),
    *(Program(f"{n}.{k}", f"{n}.{k} $0, $1, $2{c};", (s,) * (2 + bool(c)), ("u32",))
      for k, s in (("f16x2", F16), ("bf16x2", BF16))
      for n, c in (("add.rn", ""), ("mul.rn", ""), ("fma.rn", ", $3"), ("max", ""), ("min.NaN", ""))),
    Program("shfl.sync", "shfl.sync.up.b32 $0|$1, $2, $3, 0x1800, -1;", (WORD, WORD), ("u32", "pred")),
    Program("match.any", "{ .reg .b32 t; and.b32 t, $1, 3; match.any.sync.b32 $0, t, -1; }", (WORD,), ("u32",)),
    Program("redux", "redux.sync.add.s32 $0, $2, -1; redux.sync.min.u32 $1, $2, -1;", (WORD,), ("u32", "u32")),
    _mma(("m16n8k32", "s32.s8.s8.s32"), BYTES4, BYTES4, "u32", WORD),
    _mma(("m16n8k16", "f32.bf16.bf16.f32"), BF16, BF16, "f32", NORMAL),
    _mma(("m16n8k16", "f32.f16.f16.f32"), F16, F16, "f32", NORMAL),
    _mma(("m16n8k8", "f32.tf32.tf32.f32"), ("u32", "f32 bits"), ("u32", "f32 bits"), "f32", NORMAL),
)  # fmt: skip


def text_of(program):
    """The PTX of a program: each lane loads its inputs, runs the code and stores its results."""
    kinds = [*program.results, *(kind for kind, _ in program.inputs)]
    outputs = len(program.results)
    lines = [".version 8.0", ".target sm_90a", ".address_size 64"]
    lines.append(f".visible .entry program({', '.join(f'.param .u64 p{n}' for n in range(len(kinds)))}) {{")
    lines.append(".reg .b64 %address<3>; .reg .b32 %thread, %n, %word;")
    lines += [f".reg .{REGISTER[kind]} %v{n};" for n, kind in enumerate(kinds)]
    lines.append("mov.u32 %thread, %ctaid.x; mov.u32 %n, %ntid.x; mul.lo.u32 %thread, %thread, %n;")
    lines.append("mov.u32 %n, %tid.x; add.u32 %thread, %thread, %n;")
    for n, kind in enumerate(kinds[outputs:], outputs):
        lines.append(f"ld.param.u64 %address1, [p{n}]; mad.wide.u32 %address2, %thread, {BYTES[kind]}, %address1;")
        lines.append(f"ld.global.b{8 * BYTES[kind]} %v{n}, [%address2];")
    code = program.code
    for n in reversed(range(len(kinds))):
        code = code.replace(f"${n}", f"%v{n}")
    lines.append(code)
    for n, kind in enumerate(program.results):
        lines.append(f"ld.param.u64 %address1, [p{n}]; mad.wide.u32 %address2, %thread, {BYTES[kind]}, %address1;")
        value = f"%v{n}"
        if kind == "pred":
            lines.append(f"selp.u32 %word, 1, 0, %v{n};")
            value = "%word"
        lines.append(f"st.global.b{8 * BYTES[kind]} [%address2], {value};")
    return "\n".join([*lines, "ret;", "}"])


def inputs_of(program):
    """The input arrays of a program, always the same: drawn as bits, so that no library's version matters."""
    import numpy as np

    arrays = []
    for number, (kind, how) in enumerate(program.inputs):
        seed = sum(program.name.encode()) * 31 + number
        rng = np.random.Generator(np.random.PCG64(seed))
        bits = rng.integers(0, 2 ** (8 * BYTES[kind]), LANES, dtype=f"u{BYTES[kind]}")
        if how == "bits":
            edges = [0, 1, 2 ** (8 * BYTES[kind]) - 1, 2 ** (8 * BYTES[kind] - 1)]
            if kind == "f32":
                edges += [0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000, 0x00800000, 0x007FFFFF]
            bits[rng.integers(0, LANES, len(edges))] = edges
        elif how in ("normal", "positive", "f32 bits"):
            # exponents around 1, so that sums and products cancel and round
            bits = bits & np.uint32(0x807FFFFF) | rng.integers(118, 136, LANES, dtype=np.uint32) << np.uint32(23)
            if how == "positive":
                bits &= np.uint32(0x7FFFFFFF)
        elif how == "bf16 pair":
            exponents = rng.integers(118, 136, (2, LANES), dtype=np.uint32)
            bits = bits & np.uint32(0x807F807F) | exponents[0] << np.uint32(7) | exponents[1] << np.uint32(23)
        elif how == "f16 pair":
            exponents = rng.integers(9, 20, (2, LANES), dtype=np.uint32)
            bits = bits & np.uint32(0x83FF83FF) | exponents[0] << np.uint32(10) | exponents[1] << np.uint32(26)
        arrays.append(bits)
    return arrays


def prepare(path):
    """Write texts and inputs."""
    entries = {}
    for program in PROGRAMS:
        data = [base64.b64encode(a.tobytes()).decode() for a in inputs_of(program)]
        entries[program.name] = {
            "text": text_of(program),
            "inputs": data,
            "results": [BYTES[k] for k in program.results],
        }
    Path(path).write_text(json.dumps(entries))


def run(path):
    """Execute every program on the first GPU, through the driver alone, and add the results to the file."""
    driver = ctypes.CDLL("libcuda.so.1")

    def check(status, what):
        if status:
            raise RuntimeError(f"{what}: CUDA error {status}")

    check(driver.cuInit(0), "cuInit")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    name = ctypes.create_string_buffer(100)
    driver.cuDeviceGetName(name, 100, device)
    entries = json.loads(Path(path).read_text())
    for key, entry in entries.items():
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        status = driver.cuModuleLoadData(ctypes.byref(module), entry["text"].encode() + b"\0")
        if status:
            print(f"{key}: the driver refuses the text ({status})")
            continue
        check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"program"), key)
        inputs = [base64.b64decode(data) for data in entry["inputs"]]
        sizes = [LANES * n for n in entry["results"]] + [len(data) for data in inputs]
        pointers = [ctypes.c_uint64() for _ in sizes]
        for pointer, size in zip(pointers, sizes, strict=True):
            check(driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)), key)
        for pointer, data in zip(pointers[len(entry["results"]) :], inputs, strict=True):
            check(driver.cuMemcpyHtoD_v2(pointer, data, ctypes.c_size_t(len(data))), key)
        arguments = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
        check(driver.cuLaunchKernel(function, LANES // 64, 1, 1, 64, 1, 1, 0, None, arguments, None), key)
        check(driver.cuCtxSynchronize(), key)
        entry["outputs"] = []
        for pointer, size in zip(pointers, sizes, strict=True):
            if len(entry["outputs"]) < len(entry["results"]):
                content = ctypes.create_string_buffer(size)
                check(driver.cuMemcpyDtoH_v2(content, pointer, ctypes.c_size_t(size)), key)
                entry["outputs"].append(base64.b64encode(content.raw).decode())
            driver.cuMemFree_v2(pointer)
    entries["device"] = name.value.decode()
    Path(path).write_text(json.dumps(entries))
    print(f"{sum('outputs' in e for e in entries.values() if isinstance(e, dict))} programs ran on {entries['device']}")


def keep(path):
    """Store the results where the tests look for them."""
    import numpy as np

    entries = json.loads(Path(path).read_text())
    arrays = {"device": np.array(entries.pop("device"))}
    for key, entry in entries.items():
        for number, data in enumerate(entry.get("outputs", ())):
            arrays[f"{key}/{number}"] = np.frombuffer(base64.b64decode(data), f"u{entry['results'][number]}")
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, **arrays)


if __name__ == "__main__":
    {"prepare": prepare, "run": run, "keep": keep}[sys.argv[1]](sys.argv[2])
