"""Launch a compiled kernel: a plan says which one and how wide, the arguments are packed into kept buffers.

A launch costs a few microseconds on the host: the argument buffers of a kernel are allocated once and written in place.
"""

import ctypes
import threading
from dataclasses import dataclass
from functools import cache, lru_cache

from nbkernels.launch import overlap
from nbkernels.launch.compile import cubin, ptx, waits
from nbkernels.launch.device import DeviceError
from nbkernels.launch.replay import launch_early, launch_together, note_launch
from nbkernels.launch.tensor_map import TensorMap


@dataclass(frozen=True)
class Plan:
    """One launch: a kernel factory and its constants, the grid and block in threads, dynamic shared memory in bytes.

    early: whether inside ``overlap.overlapping`` it may start before its predecessor has ended, and let its successor do so.
    together: all blocks run at once, and may wait for one another (a cooperative launch); then early is false.
    """

    factory: object
    constants: tuple
    grid: tuple
    block: tuple
    shared_bytes: int = 0
    early: bool = True
    together: bool = False


# the C type of a kernel parameter by its Numba type's name; pointers are all one
_C_TYPES = {
    "uint32": ctypes.c_uint32,
    "int32": ctypes.c_int32,
    "uint64": ctypes.c_uint64,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


class LoadedKernel:
    """A kernel on the device, with its argument buffers. early: it waits for its predecessor, and may start before that ends."""

    def __init__(self, factory, constants, arch, early):
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        code, name = cubin(factory, constants, arch, early)
        self.early = early and waits(ptx(factory, constants, arch, early))
        self.module = ObjectCode.from_cubin(code)
        self.kernel = self.module.get_kernel(name)
        self.handle = driver.CUfunction(int(self.kernel.handle))
        self.lock = threading.Lock()
        self.shared_limit = 48 * 1024
        # the parameter sizes are read off the kernel, so that a kept cubin needs no Numba
        sizes = [info.size for info in self.kernel.arguments_info]
        self.count = len(sizes)
        self.values = (ctypes.c_uint64 * max(self.count, 1))()
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * max(self.count, 1))(*(base + 8 * i for i in range(self.count)))
        self.address = ctypes.addressof(self.pointers)
        self.floats = (ctypes.c_float * (2 * max(self.count, 1))).from_buffer(self.values)

    def allow_shared(self, shared_bytes):
        """Let blocks of this kernel use that many bytes of dynamic shared memory (beyond 48 KB the driver must be asked)."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(int(self.kernel.handle))
        check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, driver.cuDeviceGet(0)[1]))
        self.shared_limit = shared_bytes


def check(result):
    """Raise DeviceError unless a driver call's status (first of its results) is success; return what follows it."""
    status = result[0]
    if int(status) != 0:
        from cuda.bindings import driver

        text = driver.cuGetErrorString(status)[1]
        raise DeviceError(f"CUDA: {status.name}: {text.decode() if text else ''}")
    return result[1:]


_loading = threading.Lock()


@cache
def _loaded(factory, constants, arch, early):
    return LoadedKernel(factory, constants, arch, early)


def load(factory, constants, arch, early=False):
    """The kernel of ``factory(*constants)`` on the device, compiled on first use; early as ``compile.ptx``."""
    with _loading:  # two threads that need one kernel must not both compile it
        return _loaded(factory, constants, arch, early)


def launch(plan, arguments, device, stream=0):
    """Launch ``plan`` on ``device`` on a stream handle, with arguments: addresses and integers as int, floats, TensorMaps.

    Returns at once. DeviceError where the driver refuses.
    """
    if device.kind == "emulator":
        from nbkernels.launch.emulated import launch_emulated

        launch_emulated(plan, arguments, device)
        return
    early = plan.early and overlap.wanted(device)
    kernel = _kernels.get((plan.factory, plan.constants, early))
    if kernel is None:
        kernel = load(plan.factory, plan.constants, device.arch, early)
        _kernels[(plan.factory, plan.constants, early)] = kernel
    if len(arguments) != kernel.count:
        raise TypeError(f"{plan.factory.__name__}: {len(arguments)} arguments for {kernel.count} parameters")
    with kernel.lock:
        if plan.shared_bytes > kernel.shared_limit:
            kernel.allow_shared(plan.shared_bytes)
        values, floats = kernel.values, kernel.floats
        for i, argument in enumerate(arguments):
            if type(argument) is float:
                floats[2 * i] = argument
            elif type(argument) is TensorMap:
                kernel.pointers[i] = argument.host_address
            else:
                # a negative int32 in two's complement has the right low half
                values[i] = argument & 0xFFFFFFFFFFFFFFFF
        if plan.together:
            status = launch_together(kernel, plan, stream)
        elif overlap.follows(stream) and kernel.early:
            status = launch_early(kernel, plan, stream)
        else:
            status = _launch_function()(
                kernel.handle, *plan.grid, *plan.block, plan.shared_bytes, stream, kernel.address, 0
            )
    if int(status[0]) != 0:
        check(status)
    note_launch(kernel, plan, arguments)


_kernels = {}


@lru_cache(maxsize=1)
def _launch_function():
    from cuda.bindings import driver

    return driver.cuLaunchKernel
