"""Checks of arguments: each raises TypeError or ValueError that names the argument and says what was wanted."""

import sys

import numpy as np

from nbkernels.arrays import FLOATS, DeviceArray, library

MOST_FLOAT = sys.float_info.max


def check_float(**arrays):
    """All of one float dtype, which is returned."""
    dtype = None
    for name, x in arrays.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise TypeError(f"{name}: {x.dtype}, wanted float32, float16 or bfloat16")
        if dtype is None:
            dtype, first = x.dtype, name
        elif x.dtype != dtype:
            raise TypeError(f"{name}: {x.dtype}, wanted {dtype} as {first}")
    return dtype


def as_dtype(dtype):
    """Whatever names a dtype -> the dtype."""
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: {dtype!r}, wanted a NumPy dtype") from None


def check_dtype(dtype, **arrays):
    """All arrays that there are, of one dtype."""
    for name, x in arrays.items():
        if x is not None and x.dtype != dtype:
            raise TypeError(f"{name}: {x.dtype}, wanted {np.dtype(dtype)}")


def check_shape(name, x, shape):
    """An array, where there is one, of that shape."""
    if x is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, wanted {tuple(shape)}")


def check_axes(name, x, axes):
    """As many axes as there are names."""
    if len(x.shape) != len(axes):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, wanted [{', '.join(axes)}]")


def check_rows(name, x):
    """At least one axis."""
    if len(x.shape) == 0:
        raise ValueError(f"{name}: a scalar, wanted at least one axis")


def check_contiguous_last(**arrays):
    """Device arrays only: the kernels read along the last axis."""
    for name, x in arrays.items():
        if x is not None and len(x.shape) and x.shape[-1] > 1 and x.size and x.strides[-1] != 1:
            raise ValueError(
                f"{name}: strides {tuple(x.strides)} in elements; the last axis must be contiguous (make a contiguous copy first)"
            )


def _span(x):
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    return x.pointer, x.pointer + extent * x.itemsize


def check_overlap(out, *, same=(), other=()):
    """``out`` may be one of ``same`` element for element; sharing memory otherwise is refused. Pairs (name, array)."""
    if out is None or out.size == 0:
        return
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.strides, strict=True)):
        raise ValueError(f"out: strides {out.strides} in elements; several elements lie at one place")
    low, high = _span(out)
    for allowed, pairs in ((True, same), (False, other)):
        for name, x in pairs:
            if x is None or x.size == 0:
                continue
            start, end = _span(x)
            if start >= high or end <= low:
                continue
            if allowed and x.pointer == out.pointer and x.shape == out.shape and x.strides == out.strides:
                continue
            if not _share_an_element(out, x):  # views that interleave, as q and k of one fused array
                continue
            raise ValueError(f"out: shares memory with {name}, which is still read when out is written")


def _share_an_element(a, b):
    """Whether two views have a byte in common: NumPy's solver, on arrays at these addresses that nobody reads."""
    views = []
    for x in (a, b):
        described = {
            "version": 3,
            "typestr": f"|V{x.itemsize}",
            "shape": x.shape,
            "strides": tuple(s * x.itemsize for s in x.strides),
            "data": (x.pointer, True),
        }
        views.append(np.asarray(type("Described", (), {"__array_interface__": described})()))
    try:
        return np.shares_memory(*views, max_work=10**5)
    except np.exceptions.TooHardError:
        return True


def check_writable(**arrays):
    """Host arrays only: those that are written to. JAX's are views that may not be."""
    for name, x in arrays.items():
        if x is not None and not x.flags.writeable:
            raise ValueError(f"{name}: a read-only array, wanted one that may be written to")


def check_no_jax(**arrays):
    """Device arrays as the caller gave them: those that are written to."""
    for name, x in arrays.items():
        if type(x) is not DeviceArray and library(x) == "jax":
            raise TypeError(f"{name}: a JAX array, which must not be written to")


def check_integer(name, value):
    """An integer, and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: {type(value).__name__}, wanted an integer")


def check_number(name, value, *, positive=False, least=None):
    """A number that is not NaN, above zero where positive is set, and at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: {type(value).__name__}, wanted a number")
    if value != value:
        raise ValueError(f"{name}: NaN")
    if isinstance(value, int) and abs(value) > MOST_FLOAT:  # float() of it would overflow further on, without a name
        raise ValueError(f"{name}: an integer that no float holds")
    if positive and not value > 0:
        raise ValueError(f"{name}: {value}, wanted a number above 0")
    if least is not None and value < least:
        raise ValueError(f"{name}: {value}, wanted at least {least}")


def check_choice(name, value, choices):
    """One of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: {value!r}, wanted one of {', '.join(repr(c) for c in choices)}")
