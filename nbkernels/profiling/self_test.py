"""Every operation once on a small shape, held against its definition in NumPy in float64."""

import numpy as np

from nbkernels import reference
from nbkernels.arrays import DeviceArray, Int8Weight
from nbkernels.launch.device import cuda_device, device
from nbkernels.launch.memory import to_host
from nbkernels.profiling.operations import DTYPES, OPERATIONS, DeviceMaker, HostMaker, has_gpu

# ‖found - wanted‖ / ‖wanted‖: a result in bfloat16 is rounded once (2^-9), its inputs and weights between once more
DTYPE, BOUND = "bfloat16", 1e-2
EMULATED = "sm_90a"


def names():
    """The operations' names."""
    return tuple(OPERATIONS)


def where():
    """The device they are tested on, in words."""
    return cuda_device().name if has_gpu() else f"the emulator ({EMULATED})"


def run(name):
    """What is wrong with an operation on the device at hand, in words, or None."""
    entry = OPERATIONS[name]
    on = ("cuda", None) if has_gpu() else ("emulator", EMULATED)
    args, kwargs = entry.make(HostMaker(DTYPES[DTYPE]), *entry.small)
    if name != "quantize_int8":  # its scale is defined in float32, and its values by that
        args, kwargs = _wide(args), _wide(kwargs)
    wanted = list(_arrays((getattr(reference, entry.call.__name__)(*args, **kwargs), args)))
    with device(on[0], arch=on[1]):
        args, kwargs = entry.make(DeviceMaker(DTYPES[DTYPE]), *entry.small)
        found = [to_host(array) for array in _arrays((entry.call(*args, **kwargs), args))]
    return fault(found, wanted)


def fault(found, wanted):
    """In words, how lists of arrays differ: integers at all, floats beyond BOUND; None where they do not."""
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got.shape != want.shape:
            return f"result {number} has shape {got.shape}, wanted {want.shape}"
        if np.issubdtype(want.dtype, np.integer):
            if not np.array_equal(got, want):
                return f"{np.count_nonzero(got != want)} of {want.size} integers of result {number} are wrong"
            continue
        error = np.linalg.norm(got.astype(np.float64) - want) / max(np.linalg.norm(want), 1e-30)
        if not error <= BOUND:
            return f"result {number} is off by {error:.1e} of its norm, wanted at most {BOUND:.0e}"
    return None


def _wide(value):
    """Floats in float64, also where a dtype is named."""
    if isinstance(value, dict):
        return {key: _wide(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    if isinstance(value, np.ndarray):
        return value if np.issubdtype(value.dtype, np.integer) else value.astype(np.float64)
    return np.dtype(np.float64) if isinstance(value, np.dtype) else value


def _arrays(value):
    if isinstance(value, Int8Weight):
        yield from (value.values, value.scales)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, DeviceArray | np.ndarray):
        yield value
