"""The device the operations run on: asked for once, here.

``device("cpu")`` is a context manager that sets it for the code inside; NBKERNELS_DEVICE sets the default; "auto" is "cuda"
where a GPU answers and "cpu" elsewhere.
"""

import os
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

KINDS = ("auto", "cuda", "emulator", "cpu")
OLDEST_ARCH = (8, 0)  # bf16 tensor cores and cp.async


class DeviceError(RuntimeError):
    """No usable device of the kind that was asked for; the message says why and what to do."""


@dataclass(frozen=True)
class Device:
    """What a launch needs to know of a device. memory_bytes and shared_bytes (the most a block may use) are bytes."""

    kind: str
    name: str
    arch: str | None = None
    sm_count: int = 0
    shared_bytes: int = 0
    memory_bytes: int = 0


CPU = Device("cpu", "CPU (NumPy)")

EMULATED_SM_COUNT = 4  # a few, so that a plan that fills the card stays small
# the most shared memory a block may use, by compute capability (CUDA's programming guide, table of technical specifications)
EMULATED_SHARED_BYTES = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
}

_chosen = ContextVar("nbkernels_device", default=None)
_thread = threading.local()


def parse_arch(arch):
    """ "sm_90a" -> (9, 0, "a"); ValueError for anything else than sm_80 and later."""
    text = str(arch).removeprefix("sm_")
    suffix = text[-1] if text[-1:] in ("a", "f") else ""
    digits = text.removesuffix(suffix) if suffix else text
    if not digits.isdigit() or len(digits) < 2:
        raise ValueError(f"arch: {arch!r}, wanted a name such as 'sm_80' or 'sm_90a'")
    capability = (int(digits[:-1]), int(digits[-1]))
    if capability < OLDEST_ARCH:
        raise ValueError(f"arch: {arch!r} is older than sm_80, the oldest architecture the kernels are written for")
    return (*capability, suffix) if suffix else capability


def driver_version():
    """The CUDA version the installed driver supports, as (major, minor). DeviceError where there is no driver."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"the CUDA bindings are not installed ({error}): pip install 'nbkernels[cu13]', or use device='cpu'"
        ) from error
    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError as error:  # the bindings raise this where libcuda.so cannot be loaded
        raise DeviceError(
            "no NVIDIA driver was found (libcuda is missing): install one, or use device='cpu'"
        ) from error
    if int(status) != 0 or version == 0:
        raise DeviceError(f"the NVIDIA driver does not answer ({status.name}): check nvidia-smi, or use device='cpu'")
    return version // 1000, version % 1000 // 10


def _toolkit_version():
    """The CUDA version of the installed compiler wheels, as (major, minor)."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"):
        try:
            major, minor = version(package).split(".")[:2]
            return int(major), int(minor)
        except PackageNotFoundError:
            continue
    raise DeviceError(
        "the CUDA compiler wheels are not installed: pip install 'nbkernels[cu13]' (driver 580 or newer) or "
        "'nbkernels[cu12]', or use device='cpu'"
    )


def cuda_device():
    """The first CUDA device, current in this thread. DeviceError where there is none that can run the kernels."""
    device = _find_cuda_device()
    if not getattr(_thread, "is_current", False):
        # a driver context is current in one thread; each new thread has to take it up
        from cuda.core import Device as CoreDevice

        CoreDevice(0).set_current()
        _thread.is_current = True
    return device


@cache
def _find_cuda_device():
    supported = driver_version()
    toolkit = _toolkit_version()
    if supported[0] < toolkit[0]:
        other = ", or pip install 'nbkernels[cu12]'" if supported[0] == 12 else ""
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {supported[0]}.{supported[1]}, but the installed wheels are for "
            f"CUDA {toolkit[0]}: update the driver{other}, or use device='cpu'"
        )
    from cuda.core import Device as CoreDevice

    try:
        device = CoreDevice(0)
        device.set_current()
    except Exception as error:
        raise DeviceError(f"no CUDA device answers ({error}): check nvidia-smi, or use device='cpu'") from error
    capability = tuple(device.compute_capability)
    if capability < OLDEST_ARCH:
        raise DeviceError(
            f"{device.name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (Ampere) or "
            "newer: use device='cpu'"
        )
    from cuda.bindings import driver

    suffix = "a" if capability >= (9, 0) else ""
    status, memory_bytes = driver.cuDeviceTotalMem(driver.cuDeviceGet(0)[1])
    return Device(
        "cuda",
        device.name,
        f"sm_{capability[0]}{capability[1]}{suffix}",
        device.properties.multiprocessor_count,
        device.properties.max_shared_memory_per_block_optin,
        int(memory_bytes) if int(status) == 0 else 0,
    )


@cache
def _has_cuda():
    try:
        _find_cuda_device()
    except DeviceError:
        return False
    return True


def _emulated_device(arch):
    """A Device that stands for an architecture such as "sm_80". ValueError for one the emulator does not know."""
    capability = parse_arch(arch)[:2]
    if capability not in EMULATED_SHARED_BYTES:
        known = ", ".join(f"sm_{major}{minor}" for major, minor in EMULATED_SHARED_BYTES)
        raise ValueError(f"arch: {arch!r}, the emulator knows {known} (and their variants such as sm_90a)")
    return Device("emulator", f"emulator ({arch})", arch, EMULATED_SM_COUNT, EMULATED_SHARED_BYTES[capability], 2**34)


def resolve(kind, *, arch=None):
    """A Device for "auto", "cuda", "emulator" or "cpu". ValueError for another name, DeviceError where it is not to be had."""
    if kind not in KINDS:
        raise ValueError(f"device: {kind!r}, wanted one of {', '.join(KINDS)}")
    if kind == "auto":
        kind = "cuda" if _has_cuda() else "cpu"
    if kind == "cuda":
        return cuda_device()
    if kind == "emulator":
        return _emulated_device(arch or "sm_80")
    return CPU


def chosen_device():
    """The Device of the innermost ``device(…)``, or None outside of any."""
    return _chosen.get()


def current():
    """The Device in force: that of the innermost ``device(…)``, else NBKERNELS_DEVICE, else "auto"."""
    chosen = _chosen.get()
    if chosen is None:
        return resolve(os.environ.get("NBKERNELS_DEVICE") or "auto")
    return cuda_device() if chosen.kind == "cuda" else chosen


@contextmanager
def device(kind, *, arch=None):
    """Run the operations inside on another device: ``with nbk.device("cpu"): …``. Yields the Device.

    arch names the architecture the emulator stands for. Raises as ``resolve``.
    """
    with use(resolve(kind, arch=arch)) as chosen:
        yield chosen


@contextmanager
def use(chosen):
    """Run the operations inside on a given Device, which may be one of the emulator's that stands for a certain card."""
    token = _chosen.set(chosen)
    try:
        yield _chosen.get()
    finally:
        _chosen.reset(token)
