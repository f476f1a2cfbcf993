"""What is wrong with an installation, and the command that mends it: packages, driver, GPU, cache folder, and every operation.

Each check is a function that yields Findings; none needs a GPU, and none raises for what it finds.
"""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from nbkernels.launch.compile import CompilerMissing, cache_folder
from nbkernels.launch.device import KINDS, DeviceError, cuda_device, driver_version

PYTHON_PACKAGES = ("numpy", "numba", "numba-cuda", "llvmlite", "ml-dtypes", "rich")
CUDA_PACKAGES = ("cuda-core", "cuda-bindings")
# a wheel of each major version of CUDA has a name of its own, or its version says it
CUDA_WHEELS = ("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc")
TOOLS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")
LEAST_NUMPY, FIRST_NUMPY_TOO_NEW = (1, 26), (2, 5)
FIXED_NUMBA_CUDA = (0, 31)  # 0.30 uses np.row_stack, which NumPy 2.5 removed
ROOM = 200 << 20  # bytes that compiled kernels and the demo's model take
SELF_TEST_SECONDS = 20.0

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True)
class Finding:
    """status: OK, NOTE (works, but something is missing) or WRONG; mend: a command, or empty."""

    subject: str
    status: str
    said: str
    mend: str = ""


def installed(name):
    """A package's version as text, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version):
    """(major, minor) of a version's text."""
    parts = [*version.split("."), "0"][:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def check_packages(installed=installed):
    """The Python packages, and those that do not work together."""
    versions = {name: installed(name) for name in (*PYTHON_PACKAGES, *CUDA_PACKAGES)}
    for name, version in versions.items():
        if version is not None:
            yield Finding(name, OK, version)
        elif name in CUDA_PACKAGES:
            yield Finding(name, NOTE, "not installed: a GPU cannot be used", "pip install 'nbkernels[cu13]'")
        else:
            yield Finding(name, WRONG, "not installed", f"pip install {name}")
    numpy, numba_cuda = versions["numpy"], versions["numba-cuda"]
    if numpy and numbers(numpy) < LEAST_NUMPY:
        yield Finding("numpy", WRONG, f"{numpy} is older than 1.26", "pip install 'numpy>=1.26,<2.5'")
    if numpy and numba_cuda and numbers(numpy) >= FIRST_NUMPY_TOO_NEW and numbers(numba_cuda) < FIXED_NUMBA_CUDA:
        yield Finding(
            "numpy",
            WRONG,
            f"numba-cuda {numba_cuda} cannot be imported with NumPy {numpy}, which has no row_stack",
            "pip install 'numpy<2.5'",
        )


def check_wheels(installed=installed, driver_version=driver_version):
    """The wheels of the CUDA compiler: all there, and of one major version. Without a GPU one can do without any."""
    found = {}
    for name in CUDA_WHEELS:
        for package in (name, f"{name}-cu12"):
            if (version := installed(package)) is not None:
                found.setdefault(numbers(version)[0], []).append(f"{package} {version}")
    if not found:
        said = "none of its wheels is installed: no kernel compiles"
        try:
            driver_version()
        except DeviceError:
            yield Finding("CUDA compiler", NOTE, f"{said}, device='cpu' alone works", "pip install 'nbkernels[learn]'")
        else:
            yield Finding("CUDA compiler", WRONG, said, "pip install 'nbkernels[cu13]'")
        return
    said = ", ".join(text for texts in found.values() for text in texts)
    if len(found) > 1:
        yield Finding(
            "CUDA compiler",
            WRONG,
            f"wheels of CUDA {' and '.join(map(str, sorted(found)))} beside each other: {said}",
            "pip uninstall -y nvidia-nvjitlink-cu12 nvidia-cuda-nvrtc-cu12 nvidia-nvvm-cu12",
        )
        return
    yield Finding("CUDA compiler", OK, said)
    for name in TOOLS:
        version = installed(name)
        if version is None:
            yield Finding(name, NOTE, "not installed: nbkernels profile and inspect show less", f"pip install {name}")
        else:
            yield Finding(name, OK, version)


def check_environment(environment=os.environ):
    """Variables that change what the package does."""
    kind = environment.get("NBKERNELS_DEVICE")
    if kind and kind not in KINDS:
        yield Finding(
            "NBKERNELS_DEVICE", WRONG, f"{kind!r}, wanted one of {', '.join(KINDS)}", "unset NBKERNELS_DEVICE"
        )
    if environment.get("NUMBA_ENABLE_CUDASIM") == "1":
        yield Finding(
            "NUMBA_ENABLE_CUDASIM",
            WRONG,
            "Numba's simulator is on, which cannot run these kernels",
            "unset NUMBA_ENABLE_CUDASIM",
        )


def check_gpu(driver_version=driver_version, cuda_device=cuda_device):
    """The driver and the GPU. None at all is a note: the CPU and the emulator work without."""
    try:
        version = driver_version()
    except DeviceError as error:
        yield Finding("driver", NOTE, str(error))
        return
    yield Finding("driver", OK, f"of CUDA {version[0]}.{version[1]}")
    try:
        device = cuda_device()
    except DeviceError as error:
        mend = "pip install 'nbkernels[cu12]'" if "cu12" in str(error) else "nvidia-smi"
        yield Finding("GPU", WRONG, str(error), mend)
        return
    size = f"{device.sm_count} multiprocessors, {device.memory_bytes / 2**30:.0f} GiB"
    yield Finding("GPU", OK, f"{device.name} ({device.arch}), {size}")


def check_cache(folder=None):
    """The folder that compiled kernels are kept in."""
    folder = folder or cache_folder()
    mend = "export NBKERNELS_CACHE=/a/folder/that/can/be/written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        yield Finding(
            "cache folder", WRONG, f"{folder} cannot be written ({error.strerror}): every process compiles anew", mend
        )
        return
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        yield Finding("cache folder", NOTE, f"{folder} has room for {free / 2**20:.0f} MB more", mend)
        return
    yield Finding("cache folder", OK, f"{folder}, {free / 2**30:.0f} GiB free")


def check_optional(find=find_spec):
    """Packages that parts of the package want."""
    missing = [name for name in ("tokenizers", "safetensors", "gguf", "jinja2") if find(name) is None]
    if missing:
        yield Finding(
            "language models",
            NOTE,
            f"{', '.join(missing)} not installed: none can be loaded",
            "pip install 'nbkernels[llm]'",
        )
    else:
        yield Finding("language models", OK, "tokenizers, safetensors, gguf and jinja2 are installed")


def check_operations(seconds=SELF_TEST_SECONDS, clock=time.perf_counter, test=None):
    """Every operation on a small shape against its definition in NumPy, on the GPU, or on the emulator where there is none.

    Those that the time does not reach, as kernels compile the first time, are named. test: in place of ``self_test``.
    """
    try:
        from nbkernels.profiling import self_test
    except Exception as error:  # whatever an unsound installation raises
        yield Finding("operations", WRONG, f"cannot be imported: {error!r}", "pip install --force-reinstall nbkernels")
        return
    test = test or self_test.run
    started, passed, left = clock(), [], []
    for number, name in enumerate(self_test.names(), 1):
        _on_terminal(f"testing {name} ({number} of {len(self_test.names())})")
        if clock() - started > seconds:
            left.append(name)
            continue
        try:
            fault = test(name)
        except CompilerMissing:
            _on_terminal("")
            # said by check_wheels, with what mends it; the others would fail alike
            yield Finding("operations", NOTE, "not tested: no kernel compiles")
            return
        except Exception as error:  # whatever it is, the others are tested too
            fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        _on_terminal("")
        if fault:
            yield Finding(name, WRONG, fault, f"rm -r {cache_folder() / 'kernels'}")
        else:
            passed.append(name)
    _on_terminal("")
    where = self_test.where()
    yield Finding("operations", OK, f"{len(passed)} agree with their definition, on {where}: {', '.join(passed)}")
    if left:
        yield Finding(
            "operations",
            NOTE,
            f"not reached in {seconds:.0f} s, since kernels were compiled (what was is kept; run it again for the rest): "
            f"{', '.join(left)}",
            "nbkernels doctor",
        )


def _on_terminal(text):
    """A line that the next one overwrites: half a minute of silence looks like an end."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}\r", end="", file=sys.stderr, flush=True)


CHECKS = (check_packages, check_wheels, check_environment, check_gpu, check_cache, check_optional, check_operations)


def examine(checks=CHECKS):
    """Yields the Findings of all checks, each as soon as it is there."""
    for check in checks:
        yield from check()


def report(findings):
    """Print Findings as they come. Returns the exit status: 1 where something is wrong."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    styles = {OK: "green", NOTE: "yellow", WRONG: "bold red"}
    status = 0
    for finding in findings:
        line = Text.assemble(
            (f"{finding.status:5} ", styles[finding.status]), (f"{finding.subject}: ", "bold"), finding.said
        )
        console.print(line, soft_wrap=True)
        if finding.mend:
            console.print(Text(f"      {finding.mend}"), soft_wrap=True)
        status = 1 if finding.status == WRONG else status
    return status
