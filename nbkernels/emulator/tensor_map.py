"""Tensor maps: what a bulk tensor copy knows of the array it copies from or to.

The driver's 128-byte encoding is not documented and needs a driver to make, so the emulator has one of its own; a kernel only
ever passes the address on. ``encode`` takes what ``cuTensorMapEncodeTiled`` takes.
"""

import struct
from dataclasses import dataclass

import numpy as np

BYTES = 128
_MAGIC = 0x6E626B54
_HEADER = struct.Struct("<IBBBBQ")
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of the pattern -> address bits it turns


@dataclass(frozen=True)
class TensorMap:
    """address of the first element; itemsize in bytes; extents and box in elements, innermost first; strides in bytes of all
    axes but the innermost; swizzle in bytes (0, 32, 64 or 128); fill_nan: what elements outside are read as.
    """

    address: int
    itemsize: int
    extents: tuple
    strides: tuple
    box: tuple
    swizzle: int = 0
    fill_nan: bool = False


def encode(tensor):
    """uint8 [128]. ValueError where the hardware would refuse the map."""
    rank = len(tensor.extents)
    if not 1 <= rank <= 5 or len(tensor.box) != rank or len(tensor.strides) != rank - 1:
        raise ValueError(f"extents {tensor.extents}, strides {tensor.strides} and box {tensor.box} do not fit together")
    if tensor.address % 16 or any(s % 16 or s <= 0 for s in tensor.strides):
        raise ValueError(f"address {tensor.address:#x} and strides {tensor.strides} must be multiples of 16 bytes")
    if any(not 1 <= b <= 256 for b in tensor.box):
        raise ValueError(f"box {tensor.box}: each extent must be 1 to 256")
    inner = tensor.box[0] * tensor.itemsize
    if inner % 16 or (tensor.swizzle and inner > tensor.swizzle):
        raise ValueError(f"box rows of {inner} bytes: wanted a multiple of 16, at most the swizzle's {tensor.swizzle}")
    packed = _HEADER.pack(_MAGIC, rank, tensor.itemsize, SWIZZLES[tensor.swizzle], tensor.fill_nan, tensor.address)
    numbers = [*tensor.extents, *tensor.strides, *tensor.box]
    packed += struct.pack(f"<{2 * rank - 1}Q{rank}H", *numbers)
    return np.frombuffer(packed.ljust(BYTES, b"\0"), np.uint8).copy()


def decode(data):
    """The TensorMap of 128 bytes. ValueError for bytes that ``encode`` did not make."""
    magic, rank, itemsize, swizzle, fill_nan, address = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no tensor map of the emulator: encode it with nbkernels.emulator.tensor_map.encode")
    numbers = struct.unpack_from(f"<{2 * rank - 1}Q{rank}H", data, _HEADER.size)
    strides = numbers[rank : 2 * rank - 1]
    return TensorMap(
        address,
        itemsize,
        numbers[:rank],
        strides,
        numbers[2 * rank - 1 :],
        next(k for k, v in SWIZZLES.items() if v == swizzle),
        bool(fill_nan),
    )


def swizzled(addresses, bits):
    """Shared addresses with the pattern of ``bits`` bits: address bits from 4 up are xor-ed with those from 7 up."""
    if bits == 0:
        return addresses
    return addresses ^ ((addresses >> 3) & (((1 << bits) - 1) << 4))
