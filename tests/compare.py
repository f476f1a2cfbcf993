"""How results are compared: one measure, one table of bounds, and arrays that show what was not written."""

import ml_dtypes
import numpy as np

from nbkernels.arrays import DeviceArray
from nbkernels.launch import memory

# ‖out - ref‖ / ‖ref‖ against float64. float32 sums of up to some 10^4 terms lose a few units of 6e-8 each; a 16-bit result is
# rounded once (2^-9 for bfloat16, 2^-12 for float16, each at most) and its inputs and intermediate weights once more
BOUND = {
    np.dtype(np.float32): 1e-5,
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 1e-2,
}
DTYPES = tuple(BOUND)


def relative_error(out, ref):
    """‖out - ref‖ / ‖ref‖ in float64; 0 where both are empty or zero, inf where NaN or infinities stand at other places."""
    out, ref = np.asarray(to_host(out), np.float64), np.asarray(ref, np.float64)
    assert out.shape == ref.shape, f"shape {out.shape}, wanted {ref.shape}"
    special = ~np.isfinite(ref)
    if not np.array_equal(out[special], ref[special], equal_nan=True) or not np.isfinite(out[~special]).all():
        return np.inf
    difference = np.linalg.norm(out[~special] - ref[~special])
    size = np.linalg.norm(ref[~special])
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else np.inf


def random(shape, dtype, seed):
    """Standard normal values of a dtype."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def poisoned(shape, dtype):
    """A device array of NaN (255 in every byte): what is not written shows."""
    array = memory.empty(shape, dtype)
    memory.fill_bytes(array, 255)
    return array


def to_device(array):
    """NumPy -> the current device; None stays None."""
    return None if array is None else memory.to_device(array)


def to_host(array):
    """A device array -> NumPy; a NumPy array stays."""
    return memory.to_host(array) if isinstance(array, DeviceArray) else array
