"""Arrays in and out: what the operations see of an array of torch, CuPy, JAX, Numba or this package.

``as_device_array`` describes any of them as a ``DeviceArray`` without copying. Nothing here allocates or launches.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index as as_integer

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float16), bfloat16))


@lru_cache(maxsize=4096)
def contiguous_strides(shape):
    """Row-major strides in elements of a tuple ``shape``."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class DeviceArray:
    """A strided view of device memory; it keeps its owner alive and allocates nothing.

    pointer: byte address of the first element; shape; strides in elements; dtype: a NumPy dtype (bfloat16 from ml_dtypes);
    owner: whatever must live as long as the view.
    """

    __slots__ = ("dtype", "owner", "pointer", "shape", "strides")

    def __init__(self, pointer, shape, strides, dtype, owner):
        self.pointer = pointer
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.owner = owner

    @property
    def ndim(self):
        """How many axes."""
        return len(self.shape)

    @property
    def size(self):
        """How many elements."""
        return prod(self.shape)

    @property
    def itemsize(self):
        """Bytes an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self):
        """Bytes of the elements (not of the gaps between them)."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self):
        """Row-major without gaps."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return self.size == 0
            step *= extent
        return True

    def __len__(self):
        if not self.shape:
            raise TypeError("a device array without axes has no length")
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        # without this NumPy would take the array for a sequence and build one of objects, element by element
        raise TypeError("a device array is not in host memory; copy it with nbkernels.launch.memory.to_host")

    def __repr__(self):
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, strides={self.strides})"

    def __getitem__(self, index):
        """Basic indexing: integers, slices with a step of at least 1, one Ellipsis. Returns a view."""
        index = index if isinstance(index, tuple) else (index,)
        for at, item in enumerate(index):
            if item is Ellipsis:
                filler = (slice(None),) * (self.ndim - len(index) + 1)
                index = index[:at] + filler + index[at + 1 :]
                break
        if len(index) > self.ndim:
            raise IndexError(f"{len(index)} indices for an array of {self.ndim} axes")
        offset, shape, strides = 0, [], []
        for axis, (extent, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            item = index[axis] if axis < len(index) else slice(None)
            if isinstance(item, slice):
                start, stop, step = item.indices(extent)
                if step < 1:
                    raise IndexError(f"a slice of a device array needs a step of at least 1, not {step}")
                offset += start * stride
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
            else:
                if isinstance(item, bool) or not hasattr(item, "__index__"):
                    raise IndexError(f"{item!r}: a device array takes integers, slices and one Ellipsis as indices")
                position = as_integer(item)
                if not -extent <= position < extent:
                    raise IndexError(f"index {position} is out of bounds for an axis of {extent}")
                offset += (position % extent) * stride
        pointer = self.pointer + offset * self.dtype.itemsize
        return DeviceArray(pointer, tuple(shape), tuple(strides), self.dtype, self.owner)

    def reshape(self, *shape):
        """A view of the same elements in another shape; one extent may be -1. ValueError where that would need a copy."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        shape = wanted
        if -1 in wanted:
            known = prod(extent for extent in wanted if extent != -1)
            shape = tuple(self.size // max(known, 1) if extent == -1 else extent for extent in wanted)
        if prod(shape) != self.size or wanted.count(-1) > 1 or any(extent < 0 for extent in shape):
            raise ValueError(f"cannot reshape {self.shape} into {wanted}")
        if self.is_contiguous:
            return DeviceArray(self.pointer, shape, contiguous_strides(shape), self.dtype, self.owner)
        merged = _reshape_strides(self.shape, self.strides, shape)
        if merged is None:
            raise ValueError(f"an array of shape {self.shape} and strides {self.strides} has no view of shape {shape}")
        return DeviceArray(self.pointer, shape, merged, self.dtype, self.owner)

    def swapaxes(self, first, second):
        """A view with two axes exchanged."""
        axes = list(range(self.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        shape, strides = (tuple(x[axis] for axis in axes) for x in (self.shape, self.strides))
        return DeviceArray(self.pointer, shape, strides, self.dtype, self.owner)

    @property
    def __cuda_array_interface__(self):
        if self.dtype == bfloat16:
            raise AttributeError("bfloat16 has no code in __cuda_array_interface__; use DLPack")
        strides = None if self.is_contiguous else tuple(s * self.itemsize for s in self.strides)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "strides": strides,
            # 1 is the legacy default stream, on which this package's own arrays are ordered
            "stream": 1,
        }

    def _memory_view(self):
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) if self.size else 0
        buffer = Buffer.from_handle(self.pointer, extent * self.itemsize, owner=self)
        dtype = np.dtype(np.uint16) if self.dtype == bfloat16 else self.dtype
        return StridedMemoryView.from_buffer(buffer, self.shape, self.strides, dtype=dtype)

    def __dlpack__(self, **options):
        capsule = self._memory_view().__dlpack__(**options)
        if self.dtype == bfloat16:
            _mark_bfloat16(capsule)
        return capsule

    def __dlpack_device__(self):
        return self._memory_view().__dlpack_device__()


def _mark_bfloat16(capsule):
    """Name the elements of a DLPack capsule bfloat16: cuda.core exports no bfloat16, so they left it as uint16."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    name = api.PyCapsule_GetName(ctypes.py_object(capsule))
    tensor = api.PyCapsule_GetPointer(ctypes.py_object(capsule), ctypes.c_char_p(name))
    if name == b"dltensor_versioned":
        tensor += 32  # version, manager, deleter and flags stand before the tensor
    code = ctypes.c_uint8.from_address(tensor + 20)  # behind the data pointer, the device and the number of axes
    assert code.value == 1, "uint16 leaves as DLPack's unsigned integers"
    code.value = 4  # kDLBfloat


def _reshape_strides(shape, strides, new_shape):
    """The strides of a view of new_shape, or None where none exists: runs of axes that lie in one line merge and split."""
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    runs = []  # [extent, innermost stride]
    for extent, stride in axes:
        if runs and runs[-1][1] == extent * stride:
            runs[-1] = [runs[-1][0] * extent, stride]
        else:
            runs.append([extent, stride])
    result = []
    for extent in reversed(new_shape):
        if extent == 1:
            result.append(1)
            continue
        while runs and runs[-1][0] == 1:
            runs.pop()
        if not runs or runs[-1][0] % extent:
            return None
        result.append(runs[-1][1])
        runs[-1] = [runs[-1][0] // extent, runs[-1][1] * extent]
    return tuple(reversed(result))


@dataclass(frozen=True)
class Int8Weight:
    """Rows quantised to int8, of a weight [out, in] or of activations.

    x[..., i] = values[..., i] · scales[..., i // group_size]

    values int8 [..., columns]; scales float32 [..., groups]; group_size: columns a scale, or None for one scale a row (scales
    [..., 1]). The last group may be short. Both are arrays of one kind, host or device.
    """

    values: object
    scales: object
    group_size: int | None = None

    def __post_init__(self):
        if len(self.values.shape) == 0:
            raise ValueError("values: a scalar, wanted at least one axis")
        *leading, columns = self.values.shape
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size: {self.group_size}, wanted a positive number of columns or None")
        groups = 1 if self.group_size is None else max(1, -(-columns // self.group_size))
        wanted = (*leading, groups)
        if tuple(self.scales.shape) != wanted:
            raise ValueError(
                f"scales: shape {tuple(self.scales.shape)}, wanted {wanted} for {tuple(self.values.shape)}"
            )

    @property
    def shape(self):
        """(…, columns)"""
        return tuple(self.values.shape)

    @property
    def nbytes(self):
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


@lru_cache(maxsize=64)
def _torch_dtype(dtype):
    """torch's dtype -> NumPy's."""
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        return bfloat16
    try:
        return np.dtype(name)
    except TypeError:
        raise TypeError(f"{dtype}, which NumPy does not know") from None


_LIBRARIES = {"torch": "torch", "numpy": "numpy", "cupy": "cupy", "jax": "jax", "jaxlib": "jax", "numba": "numba"}


@lru_cache(maxsize=256)
def _library_of(kind):
    """By the modules of a type and those it derives from, so that a subclass of a tensor is a tensor."""
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_LIBRARIES[root] for root in roots if root in _LIBRARIES), "other")


def library(x):
    """Which library an array comes from: "nbkernels", "numpy", "torch", "cupy", "jax", "numba" or "other"."""
    if type(x) is DeviceArray:
        return "nbkernels"
    return "numpy" if type(x) is np.ndarray else _library_of(type(x))


def is_host(x):
    """True for an array in host memory: NumPy's, or torch's and JAX's on the CPU."""
    kind = library(x)
    if kind == "torch":
        return not x.is_cuda
    if kind == "jax":
        return all(device.platform == "cpu" for device in x.devices())
    return kind == "numpy"


def as_host_array(x):
    """A NumPy view of a host array (bfloat16 through ml_dtypes). TypeError where there is none, such as of a masked array."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("a masked array, wanted one without a mask (x.filled(…))")
    if library(x) == "torch":
        import torch

        x = x.detach()
        return x.view(torch.int16).numpy().view(bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    return np.asarray(x)


def as_device_array(x, stream=0):
    """Describe an array in device memory as a DeviceArray, without a copy; its producer's work is ordered before ``stream``.

    Takes torch tensors, CuPy, JAX and Numba arrays and whatever speaks DLPack or __cuda_array_interface__; only for torch
    tensors the order is left to the caller (``launch.memory.order``). TypeError for anything else, ValueError for an array
    that lies on another GPU or is read backwards.
    """
    kind = library(x)
    if kind == "nbkernels":
        return x
    if kind == "torch":
        if x.device.index:
            raise ValueError(f"a tensor on {x.device}; the first GPU (cuda:0) is the only one supported yet")
        if x.is_neg():
            raise ValueError("a tensor that torch negates lazily; pass x.resolve_neg()")
        return DeviceArray(x.data_ptr(), tuple(x.shape), x.stride(), _torch_dtype(x.dtype), x)
    if not hasattr(x, "__dlpack__") and not hasattr(x, "__cuda_array_interface__"):
        raise TypeError(f"{type(x).__module__}.{type(x).__name__} speaks neither DLPack nor __cuda_array_interface__")
    from cuda.core.utils import StridedMemoryView

    # DLPack names the legacy default stream 1, since 0 could mean "none"
    view = StridedMemoryView.from_any_interface(x, stream_ptr=stream or 1)
    if not view.is_device_accessible:
        raise TypeError(f"{type(x).__module__}.{type(x).__name__} is not in device memory")
    if view.device_id > 0:
        raise ValueError(f"an array on GPU {view.device_id}; the first GPU (0) is the only one supported yet")
    shape = tuple(view.shape)
    strides = contiguous_strides(shape) if view.strides is None else tuple(view.strides)
    if any(stride < 0 for stride in strides):
        raise ValueError(f"strides {strides} in elements, wanted none below 0 (make a contiguous copy first)")
    return DeviceArray(view.ptr, shape, strides, np.dtype(view.dtype), (x, view))
