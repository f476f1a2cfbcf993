"""Tensor maps: what a bulk tensor copy must know of an array (sm_90). A kernel takes one as a parameter by value.

The driver makes the 128 bytes (cuTensorMapEncodeTiled); the emulator has an encoding of its own.
"""

import ctypes
from functools import lru_cache

from nbkernels.launch.device import DeviceError, current

_BYTES, _ALIGNMENT = 128, 64
_MAX_BOX = 256


class TensorMap:
    """An encoded map. data: its 128 bytes; host_address: where they lie, for a launch on the GPU; address: the array's."""

    __slots__ = ("_buffer", "address", "data", "host_address")

    def __init__(self, data, address):
        self.data = data
        self.address = address
        self._buffer = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        self.host_address = -(-ctypes.addressof(self._buffer) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memmove(self.host_address, data, _BYTES)


def describes(array, swizzle_bytes=128):
    """Whether a tensor map can describe a DeviceArray: address, strides but the last, and last extent are multiples of 16 bytes.

    The driver takes another last extent, but tests of products that store such rows failed on an H200 while all others passed.
    """
    outer = array.strides[:-1]
    return (
        0 < len(array.shape) <= 5
        and array.size > 0
        and array.pointer % 16 == 0
        and array.strides[-1] == 1
        and array.shape[-1] * array.itemsize % 16 == 0
        and all(s * array.itemsize % 16 == 0 and 0 < s * array.itemsize < 1 << 40 for s in outer)
        and all(extent < 1 << 32 for extent in array.shape)
    )


def tensor_map(array, box, swizzle_bytes=128, device=None):
    """The TensorMap of a DeviceArray, made once for an address and layout.

    box: elements a copy brings along each axis, in the order of ``array.shape``, at most 256 each; the last axis' bytes are a
    multiple of 16, and at most the swizzle's (0, 32, 64 or 128). ValueError where ``describes`` is false.
    """
    device = device or current()
    make = _emulated if device.kind == "emulator" else _encoded
    return make(array.pointer, str(array.dtype), array.itemsize, array.shape, array.strides, tuple(box), swizzle_bytes)


@lru_cache(maxsize=4096)
def _emulated(pointer, dtype, itemsize, shape, strides, box, swizzle_bytes):
    from nbkernels.emulator.tensor_map import TensorMap as Description
    from nbkernels.emulator.tensor_map import encode

    outer = tuple(s * itemsize for s in reversed(strides[:-1]))
    described = Description(pointer, itemsize, tuple(reversed(shape)), outer, tuple(reversed(box)), swizzle_bytes)
    return TensorMap(encode(described).tobytes(), pointer)


@lru_cache(maxsize=4096)
def _encoded(pointer, dtype, itemsize, shape, strides, box, swizzle_bytes):
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    kinds = {
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "int8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "uint8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "int32": types.CU_TENSOR_MAP_DATA_TYPE_INT32,
    }
    swizzles = driver.CUtensorMapSwizzle
    swizzle = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[swizzle_bytes]
    if any(not 1 <= extent <= _MAX_BOX for extent in box):
        raise ValueError(f"box {box}: each extent must be 1 to {_MAX_BOX}")
    rank = len(shape)
    status, encoded = driver.cuTensorMapEncodeTiled(
        kinds[dtype],
        rank,
        pointer,
        [driver.cuuint64_t(extent) for extent in reversed(shape)],
        [driver.cuuint64_t(s * itemsize) for s in reversed(strides[:-1])],
        [driver.cuuint32_t(extent) for extent in reversed(box)],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise DeviceError(
            f"CUDA refuses a tensor map: shape {shape}, strides {strides} in elements of {itemsize} bytes, box {box}, "
            f"swizzle {swizzle_bytes}: {status.name}"
        )
    return TensorMap(ctypes.string_at(encoded.getPtr(), _BYTES), pointer)
