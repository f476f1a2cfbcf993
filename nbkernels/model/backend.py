"""Where a model's arrays live: NumPy on the CPU, device arrays elsewhere. The one place where the runtime asks."""

from contextlib import contextmanager

import numpy as np

from nbkernels import ops, reference
from nbkernels.launch.device import current


def on_host():
    """Whether the current device computes on NumPy arrays."""
    return current().kind == "cpu"


def operations():
    """The module whose functions compute on the current device: ``ops``, or on the CPU the reference that it would call.

    What ops checks of each argument has been checked here once for all, by the shapes of the weights, and a token on the CPU is
    hundreds of calls.
    """
    return reference if on_host() else ops


def place(array):
    """A NumPy array on the current device."""
    if on_host():
        return array
    from nbkernels.launch.memory import to_device

    return to_device(array)


def zeros(shape, dtype):
    """An array of zeros on the current device."""
    if on_host():
        return np.zeros(shape, dtype)
    from nbkernels.launch.memory import zeros as device_zeros

    return device_zeros(shape, dtype)


def view_bytes(array, dtype, shape):
    """A contiguous uint8 array [bytes] on the current device, seen as another dtype and shape of as many bytes."""
    if isinstance(array, np.ndarray):
        return array.view(dtype).reshape(shape)
    from nbkernels.arrays import DeviceArray, contiguous_strides

    return DeviceArray(array.pointer, shape, contiguous_strides(shape), np.dtype(dtype), array.owner)


def overwrite(array, values):
    """Copy NumPy values into an array of the same shape and dtype."""
    if isinstance(array, np.ndarray):
        array[...] = values
        return
    from nbkernels.launch.memory import copy_from_host

    copy_from_host(array, values)


def overwrite_at_once(array, values):
    """``overwrite`` of a device array, without waiting for the work before it."""
    from nbkernels.launch.memory import copy_from_pageable

    copy_from_pageable(array, values)


def copy(destination, source):
    """Copy a contiguous array into another of the same shape and dtype, both on the current device."""
    if isinstance(destination, np.ndarray):
        destination[...] = source
        return
    from nbkernels.launch.memory import copy as copy_on_device

    copy_on_device(destination, source)


def fetch(array):
    """An array as NumPy; from a device this waits for the work that makes it."""
    if isinstance(array, np.ndarray):
        return array
    from nbkernels.launch.memory import to_host

    return to_host(array)


def new_stream():
    """A stream of the GPU for one model's work."""
    from nbkernels.launch.graph import Stream

    return Stream()


@contextmanager
def use_stream(chosen):
    """Put the work inside on a stream that ``new_stream`` made; None leaves it where it is."""
    if chosen is None:
        yield
        return
    from nbkernels.launch.memory import use_stream as use

    with use(chosen.handle):
        yield


def stream():
    """The handle of the stream in force on the GPU."""
    from nbkernels.launch.memory import current_stream

    return current_stream()


def free_bytes():
    """Bytes of memory that are free on the GPU; of other devices' host memory none are promised: 0."""
    if current().kind != "cuda":
        return 0
    from nbkernels.launch.memory import free_bytes as of_device

    return of_device()


def memory_bytes():
    """Peak bytes this process has held on the CPU, or the bytes in use on the GPU."""
    device = current()
    if device.kind == "cuda":
        from nbkernels.launch.memory import used_bytes

        return used_bytes()
    try:
        import resource
    except ImportError:  # not a Unix system
        return 0
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
