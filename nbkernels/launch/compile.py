"""A kernel factory and its constants become LLVM IR, PTX, then a cubin; each is kept on disk.

A factory is a function of compile-time constants that returns a function decorated with ``kernel``. Nothing here needs a
GPU or a driver: ``ptx`` and ``cubin`` work for any named architecture.
"""

import ast
import gc
import hashlib
import inspect
import json
import os
import re
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from nbkernels.launch.device import OLDEST_ARCH, DeviceError, parse_arch


@dataclass(frozen=True)
class KernelSource:
    """A kernel before compilation: the function, its parameter types (from its annotations), block size and cluster."""

    function: object
    parameters: tuple
    launch_bounds: object
    fastmath: bool
    cluster: int


# every GPU with clusters has those of 8 blocks
MAX_CLUSTER = 8
OLDEST_CLUSTER_ARCH = (9, 0)

# Called with a factory's name before a kernel is compiled, which takes seconds: a program that talks to a person may show it.
announce = None

NO_COMPILER = (
    "the CUDA compiler's libraries are missing, without which no kernel compiles: pip install 'nbkernels[learn]', or "
    "'nbkernels[cu13]' where there is a GPU (device='cpu' works without)"
)


class CompilerMissing(DeviceError):
    """No kernel compiles: the libraries of the CUDA compiler are not installed."""


def kernel(*, launch_bounds, fastmath=False, cluster=1):
    """Mark a function as a kernel. Its annotations are its parameter types: ``def f(x: pointer(dtype), rows: uint32)``.

    One annotated None is absent from this variant of the kernel: the launch does not give it, and the code must not use it.
    launch_bounds: threads a block, or (threads, blocks a multiprocessor). fastmath: contract and approximate float32
    operations (division, square root); denormals become zero. cluster: how many blocks along x reach each other's shared memory
    (see ``ptx.cluster``); more than one only from sm_90 on, and the grid's x is a multiple of it.
    """
    if cluster not in range(1, MAX_CLUSTER + 1):
        raise ValueError(f"cluster: {cluster!r} blocks, wanted 1 to {MAX_CLUSTER}")

    def decorate(function):
        names = inspect.signature(function).parameters
        parameters = tuple(function.__annotations__[name] for name in names)
        return KernelSource(function, parameters, launch_bounds, fastmath, cluster)

    return decorate


def cache_folder():
    """Where files are kept for this user: NBKERNELS_CACHE, else XDG_CACHE_HOME/nbkernels, else ~/.cache/nbkernels."""
    own = os.environ.get("NBKERNELS_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbkernels"


@lru_cache(maxsize=128)  # texts of up to a megabyte
def ptx(factory, constants, arch, early=False):
    """The PTX text of ``factory(*constants)`` for an architecture such as "sm_90a", from the disk where it is kept. No GPU.

    early: it may be launched before its predecessor has ended (``overlap``): one that does not itself wait for that does first.
    """
    text = _kept(factory, constants, arch, "ptx", lambda: _translate(factory, constants, arch).encode()).decode()
    return _with_wait(text) if early else text


def _translate(factory, constants, arch):
    """LLVM IR -> PTX, through NVVM."""
    from cuda.pathfinder import DynamicLibNotFoundError
    from numba.cuda.cudadrv import nvrtc

    lowered = _lowered(factory, constants)
    if lowered["cluster"] > 1 and parse_arch(arch)[:2] < OLDEST_CLUSTER_ARCH:
        raise ValueError(
            f"arch: {arch!r} has no clusters, which {lowered['name']} is made of; they exist from sm_90 on"
        )
    try:
        target = nvrtc.get_arch_option(*parse_arch(arch))
    except DynamicLibNotFoundError as error:
        raise CompilerMissing(NO_COMPILER) from error

    text = _through_nvvm(lowered, lowered["ir"], target).decode().strip("\0").strip()
    # the entry gets the function's own name, in place of a mangled one that holds its types
    name = lowered["name"]
    text = _with_maps_by_value(text.replace(entry_name(text), name), name, lowered["maps"])
    return _with_cluster(text, name, lowered["cluster"])


def _through_nvvm(lowered, modules, target, **options):
    """What NVVM makes of the modules of a ``_lowered`` kernel. An error has a note of what NVVM says against them."""
    from numba.cuda.cudadrv import nvvm

    try:
        return nvvm.compile_ir(modules, arch=target, opt=3, fastmath=lowered["fastmath"], **options)
    except Exception as error:
        error.add_note(f"{lowered['name']} for {target}: {_complaint(modules, target)}")
        raise


def _complaint(modules, target):
    """NVVM's words, which numba-cuda's error leaves out, with the line that they are about where there is one."""
    from numba.cuda.cudadrv import nvvm

    for text in map(nvvm.llvm_replace, modules):
        unit = nvvm.CompilationUnit({"arch": target})
        try:
            unit.add_module(text.encode())
            unit.verify()
            unit.compile()
        except Exception:
            said = unit.get_log().strip()
            place = re.search(r"\((\d+), \d+\)", said)
            return said + (f": {text.splitlines()[int(place[1]) - 1].strip()}" if place else "")
    return "NVVM takes each of its modules when it is asked again"


def _lowered(factory, constants):
    """The kernel in LLVM IR, which no architecture is named in: kept, since the way there takes 90% of a compilation."""
    kept = _kept(
        factory, constants, "any", "ll", lambda: zlib.compress(json.dumps(_lower(factory, constants)).encode(), 1)
    )
    return json.loads(zlib.decompress(kept))


def _lower(factory, constants):
    """Python -> LLVM IR, through Numba."""
    if announce is not None:
        announce(factory.__name__)
    from numba import types
    from numba.cuda import compiler
    from numba.cuda.core import ir_utils

    source = factory(*constants)
    # a million objects are made and few of them die: looking for circles among them takes a seventh of the time
    collecting = gc.isenabled()
    gc.disable()
    try:
        with compiler.global_compiler_lock, _lines_of_inlined_functions(), _no_copies_of_inlined_functions():
            # Numba counts its blocks' labels on from one kernel to the next, and doubles the count where inlined functions
            # inline others: some 500 kernels later a label has more digits than NVVM reads
            ir_utils._the_max_label._value = 0
            library, _ = compiler._compile_pyfunc_with_fixup(
                source.function,
                types.void(*(types.Omitted(None) if p is None else p for p in source.parameters)),
                device=False,
                abi="numba",
                fastmath=source.fastmath,
                lineinfo=True,
                cc=OLDEST_ARCH,
                launch_bounds=source.launch_bounds,
            )
            ir = [_without_variables(text) for text in library.llvm_strs]
    finally:
        if collecting:
            gc.enable()
    present = [parameter for parameter in source.parameters if parameter is not None]
    maps = [number for number, parameter in enumerate(present) if str(parameter) == "tensor_map"]
    return {
        "name": source.function.__name__,
        "fastmath": source.fastmath,
        "maps": maps,
        "cluster": source.cluster,
        "ir": ir,
    }


@contextmanager
def _lines_of_inlined_functions():
    """Let instructions of an inlined function name the file they are in. Numba writes its line, with the kernel's file.

    Numba marks where it is by a line (``mark_location``) and then tells whom it may concern the whole place (``notify_loc``).
    """
    from numba.cuda.debuginfo import CUDADIBuilder
    from numba.cuda.lowering import Lower

    plain_notify = Lower.notify_loc

    def notify(lower, loc):
        plain_notify(lower, loc)
        debug = lower.debuginfo
        path = os.path.abspath(loc.filename)
        if isinstance(debug, CUDADIBuilder) and path != debug.filepath and os.path.isfile(path):
            folder, name = os.path.split(path)
            file = debug.module.add_debug_info("DIFile", {"directory": folder, "filename": name})
            scope = {"scope": debug.subprograms[-1], "file": file, "discriminator": 0}
            block = debug.module.add_debug_info("DILexicalBlockFile", scope)
            place = {"line": loc.line, "column": 1, "scope": block}
            lower.builder.debug_metadata = debug.module.add_debug_info("DILocation", place)

    Lower.notify_loc = notify
    try:
        yield
    finally:
        Lower.notify_loc = plain_notify


@contextmanager
def _no_copies_of_inlined_functions():
    """Let Numba inline a function as it has just been translated for this one call, in place of one of two deep copies of it.

    The copies, each block with all variables of its function, take a third of a compilation; nobody reads the original again.
    """
    from numba.cuda.core import inline_closurecall

    plain = inline_closurecall.copy
    inline_closurecall.copy = SimpleNamespace(**{**vars(plain), "deepcopy": lambda block: block})
    try:
        yield
    finally:
        inline_closurecall.copy = plain


def _without_variables(text):
    """LLVM IR that says of no instruction which of Python's variables it sets; the lines that instructions come from stay.

    Nothing reads the variables, and NVVM 13 fails on some programs because of them ("symbol name with unsupported characters"),
    has dropped labels of programs that had them, and mostly writes more instructions where they are.
    """
    return re.sub(r"^.*@\"?llvm\.dbg\.(?:declare|value)\"?\(.*\n", "", text, flags=re.MULTILINE)


def _with_maps_by_value(text, kernel_name, maps):
    """Tensor map parameters (by number) become 128 bytes by value, and the kernel works with their address.

    NVVM knows them as 64-bit integers. Passed by value, a map needs no memory of its own, and a graph keeps a copy.
    """
    for number in maps:
        name = f"{kernel_name}_param_{number}"
        text = re.sub(rf"\.param\s+\.u64\s+{name}\b", f".param .align 64 .b8 {name}[128]", text)
        text = re.sub(
            rf"ld\.param\.[bu]64\s+(%\w+), \[{name}\];", rf"mov.b64 \1, {name};\n\tcvta.param.u64 \1, \1;", text
        )
    return text


def _link(factory, constants, arch):
    """Cubin bytes of a kernel that changes its register count (``setmaxnreg``), by way of link-time optimisation.

    nvJitLink assembles PTX as a part of a program, in which the assembler ignores setmaxnreg, as other parts might rely on the
    count; without the registers it then serialises wgmma. LLVM IR it compiles as a whole program.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba.cuda.cudadrv import nvrtc

    lowered = _lowered(factory, constants)
    if lowered["cluster"] > 1:
        raise NotImplementedError(f"{lowered['name']}: clusters are said in PTX, which this way does not meet")
    target = nvrtc.get_arch_option(*parse_arch(arch))
    ir = [_ir_with_maps_by_value(text, lowered["name"], lowered["maps"]) for text in lowered["ir"]]
    options = LinkerOptions(arch=arch, lineinfo=True, link_time_optimization=True)

    object_code = _through_nvvm(lowered, ir, target, **{"gen-lto": None})
    return Linker(ObjectCode.from_ltoir(object_code), options=options).link("cubin").code


def _ir_with_maps_by_value(text, kernel_name, maps):
    """The entry gets the function's own name, and tensor map parameters (by number) are 128 bytes, as in ``_with_maps_by_value``.

    A grid constant is read where the launch has put it, without a copy of each thread's own.
    """
    entry = re.search(r'^define void (@"?[\w.$]+"?)\((.*?)\)(.*)\n\{\n(.*:)\n', text, re.MULTILINE)
    if entry is None:
        return text
    name, parameters, rest, label = entry.groups()
    parameters = parameters.split(", ")
    before = ", ".join(p.rpartition(" ")[0] for p in parameters)
    casts = []
    for number in maps:
        argument = parameters[number].rpartition(" ")[2]
        described = argument.rstrip('"') + ('.map"' if argument.endswith('"') else ".map")
        parameters[number] = f"[128 x i8]* byval align 64 {described}"
        casts.append(f"  {argument} = ptrtoint [128 x i8]* {described} to i64\n")
    after = ", ".join("[128 x i8]*" if n in maps else p.rpartition(" ")[0] for n, p in enumerate(parameters))
    head = f"define void {name}({', '.join(parameters)}){rest}\n{{\n{label}\n{''.join(casts)}"
    text = text[: entry.start()] + head + text[entry.end() :]
    text = text.replace(f"void ({before})* {name}", f"void ({after})* {name}")
    if maps:
        numbers = ", ".join(f"i32 {n + 1}" for n in maps)
        constants = f'!{{ void ({after})* {name}, !"grid_constant", !{{ {numbers} }} }}'
        text = (
            text.replace("!nvvm.annotations = !{", "!nvvm.annotations = !{ !9999999,") + f"\n!9999999 = {constants}\n"
        )
    return text.replace(name, f'@"{kernel_name}"')


def _with_cluster(text, kernel_name, cluster):
    """The entry says how many blocks its clusters have, so that a launch need not."""
    if cluster == 1:
        return text
    directives = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1"
    return re.sub(rf"(\.entry\s+{kernel_name}\([^)]*\))", rf"\1\n{directives}", text, count=1)


def _with_wait(text):
    """The entry lets its dependents start, and waits for what it depends on, before anything else, unless it waits itself.

    Kernels that change their register count are left as they are: their way to a cubin is by LLVM IR (``_link``).
    """
    if waits(text) or "setmaxnreg" in text:
        return text
    instructions = "\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n"
    return re.sub(r"(\.entry\s+\w+\([^)]*\)[^{]*\{\n)", rf"\1{instructions}", text, count=1)


def waits(text):
    """Whether a kernel in PTX waits for the kernel before it, and so may start before that one has ended."""
    return "griddepcontrol.wait" in text


def entry_name(text):
    """The name of the kernel in a PTX text."""
    return re.search(r"\.entry\s+(\w+)\(", text).group(1)


def assemble(text, arch):
    """PTX text -> cubin bytes, through nvJitLink."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=arch, lineinfo=True)
    return Linker(ObjectCode.from_ptx(text.encode()), options=options).link("cubin").code


# what a kernel is made of; the rest of the package launches it, and may change without a new compilation
_KERNEL_SOURCES = ("nbkernels.kernels", "nbkernels.ptx", "nbkernels.launch.compile")


def _imported_modules(module_name):
    """Name -> file of a kernel's module and of the kernel sources it imports, directly or not."""
    modules, unread = {}, [module_name]
    while unread:
        name = unread.pop()
        if name in modules:
            continue
        modules[name] = find_spec(name).origin
        for node in ast.parse(Path(modules[name]).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                candidates = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                unread.extend(c for c in candidates if c.startswith(_KERNEL_SOURCES) and _is_module(c))
    return modules


def _is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module and no package
        return False


@cache
def source_digest(module_name):
    """sha256 of a kernel module's source and of the kernel sources it imports."""
    digest = hashlib.sha256()
    for name, path in sorted(_imported_modules(module_name).items()):
        digest.update(name.encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


@cache
def _versions():
    wanted = (
        *("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink"),
        *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
    )
    found = {}
    for name in wanted:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return repr(sorted(found.items()))


def _key(factory, constants, arch):
    text = "\n".join(
        (
            f"{factory.__module__}.{factory.__qualname__}",
            repr(tuple(str(c) for c in constants)),
            arch,
            source_digest(factory.__module__),
            _versions(),
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()


def cubin(factory, constants, arch, early=False):
    """(cubin bytes, entry name) of ``factory(*constants)``, from the disk where it has been compiled before; early as ``ptx``.

    The file is named by a digest of the kernel's source and that of every module it imports, the constants, the
    architecture and the compiler's versions. A file that was damaged is compiled again.
    """

    def make():
        text = ptx(factory, constants, arch, early)
        code = _link(factory, constants, arch) if "setmaxnreg" in text else assemble(text, arch)
        return entry_name(text).encode() + b"\0" + code

    name, _, code = _kept(factory, constants, arch, "early.cubin" if early else "cubin", make).partition(b"\0")
    return code, name.decode()


def _kept(factory, constants, arch, suffix, make):
    """The bytes that ``make`` gives, from the disk where they have been made before."""
    path = cache_folder() / "kernels" / f"{factory.__name__}-{_key(factory, constants, arch)[:32]}.{suffix}"
    body = _read_checked(path)
    if body is None:
        body = make()
        _write_checked(path, body)
    return body


def _read_checked(path):
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, body = content[:32], content[32:]
    return body if hashlib.sha256(body).digest() == digest else None


def _write_checked(path, body):
    """Write atomically, so that processes that compile the same kernel at once never see half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(file.name, path)
    except OSError:
        # a cache folder that cannot be written costs a compilation in the next process, no more
        return
