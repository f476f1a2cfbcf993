"""A kernel written for Numba runs as it is: compiled to PTX as for a GPU, and executed here.

All that the emulator knows of Numba is in this file.
"""

import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np

from nbkernels.emulator.run import Emulator


@contextmanager
def _device_of(capability):
    """While a kernel is compiled: where there is no driver, Numba takes the architecture of device functions from here.

    Numba 0.30 of CUDA asks for a GPU when a kernel calls a device function that is not inlined, even in ``compile_ptx``.
    """
    device = SimpleNamespace(compute_capability=capability)
    with mock.patch("numba.cuda.dispatcher.get_current_device", lambda: device):
        yield


def compiled(kernel, argument_types, arch):
    """The PTX of a ``@cuda.jit`` kernel (or a plain function that could be one) for Numba types of its arguments. No GPU.

    ValueError for an architecture that is no name of one; Numba's errors for what cannot be compiled.
    """
    from numba import cuda, types

    function = getattr(kernel, "py_func", kernel)
    options = getattr(kernel, "targetoptions", {})
    digits = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if digits is None:
        raise ValueError(f"arch: {arch!r}, wanted a name such as 'sm_80' or 'sm_90a'")
    capability = tuple(int(n) for n in digits.groups()[:2]) + ((digits.group(3),) if digits.group(3) else ())
    fastmath = bool(options.get("fastmath"))
    with _device_of(capability):
        text, _ = cuda.compile_ptx(
            function,
            types.void(*argument_types),
            cc=capability,
            fastmath=fastmath,
            lineinfo=True,
            launch_bounds=options.get("launch_bounds"),
        )
    return text


def run(kernel, grid, block, *args, shared_bytes=0, arch="sm_80", checks=True, report=False):
    """Run a ``@cuda.jit`` kernel (or a plain function that could be one) on the CPU, with NumPy arrays and numbers.

    The kernel is compiled for ``arch`` as Numba would compile it for a GPU, and its PTX executed; arrays are written in place.
    shared_bytes: dynamic shared memory. report: print what each source line did. Returns a Report. Raises EmulatorError,
    and Numba's errors for what cannot be compiled.
    """
    from numba import typeof

    text = compiled(kernel, [typeof(a) for a in args], arch)
    emulator = Emulator(checks=checks)
    fields = []
    for number, value in enumerate(args):
        if isinstance(value, np.ndarray) and value.ndim:
            # the parts of Numba's array structure: meminfo, parent, element count and size, data, shape, strides
            address = emulator.memory.register(value, f"argument {number} ({value.dtype} {list(value.shape)})")
            fields += [0, 0, value.size, value.itemsize, address, *value.shape, *value.strides]
        else:
            fields.append(value)
    done = emulator.launch(text, None, grid, block, fields, shared_bytes=shared_bytes, count=True)
    if report:
        done.print()
    return done
