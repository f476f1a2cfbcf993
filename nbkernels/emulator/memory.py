"""The memories a kernel sees: one flat 64-bit space of registered arrays, and windows for shared and local memory.

Addresses are made up: every registered array begins at a multiple of 512 bytes, as the driver's allocations do, with an
unmapped gap behind it, so that an index beyond an array's end never falls into the next one.
"""

import ctypes
from bisect import bisect_right

import numpy as np

from nbkernels.emulator.errors import MemoryFault

FIRST_ADDRESS = 0x10_0000_0000
ALIGNMENT = 512
GAP = 1 << 20

# where the shared and the local window stand among generic addresses
SHARED_WINDOW = 0x0100_0000_0000_0000
LOCAL_WINDOW = 0x0200_0000_0000_0000
WINDOW_BYTES = 1 << 32
# a shared::cluster address: bits 24 and up are 0 for the block's own memory, else 1 + the block's rank in its cluster
RANK_SHIFT = 24


class Buffer:
    """Bytes with typed views. base: the address of the first byte; name: what reports call it."""

    def __init__(self, base, data, name, readonly=False, keep=None):
        self.base = base
        self.data = data  # uint8 [size]
        self.size = data.size
        self.end = base + data.size
        self.name = name
        self.readonly = readonly
        self.keep = keep
        self.alive = True
        self.written = None  # uint8, 0xff for each byte that has been written; None: all have
        self.host = None  # where the bytes lie in the process, for arrays that were registered
        self.views = {}

    def view(self, dtype, vector=1):
        """The bytes as elements [size // itemsize], or [size // (itemsize · vector), vector] where vector > 1."""
        key = (dtype, vector)
        found = self.views.get(key)
        if found is None:
            step = np.dtype(dtype).itemsize * vector
            found = self.data[: self.size // step * step].view(dtype)
            if vector > 1:
                found = found.reshape(-1, vector)
            self.views[key] = found
        return found


def _bytes_of(array):
    """(first byte's address in the process, uint8 view of all bytes from the first to the last, read-only?)"""
    interface = array.__array_interface__
    address = interface["data"][0]
    low = high = 0
    if array.size:
        for extent, stride in zip(array.shape, array.strides, strict=True):
            reach = (extent - 1) * stride
            low, high = (low + reach, high) if reach < 0 else (low, high + reach)
        high += array.itemsize
    if high - low == 0:
        return address, np.zeros(0, np.uint8), not array.flags.writeable
    raw = (ctypes.c_uint8 * (high - low)).from_address(address + low)
    return address + low, np.frombuffer(raw, np.uint8), not array.flags.writeable


class GlobalMemory:
    """The registered arrays, found by address."""

    def __init__(self):
        self.buffers = []
        self.bases = []
        self.next_base = FIRST_ADDRESS
        self.by_host = {}  # host address of the first byte -> Buffer

    def register(self, array, name=None):
        """The address of the array's first element. The array is used in place and kept alive until ``unregister``.

        An array whose bytes lie inside a registered one gets an address inside it.
        """
        host, data, readonly = _bytes_of(array)
        first_element = array.__array_interface__["data"][0] - host
        for known, buffer in self.by_host.items():
            if known <= host and host + data.size <= known + buffer.size and data.size:
                return buffer.base + (host - known) + first_element
        buffer = self._add(data, name or f"array {len(self.buffers)}", readonly, array)
        if data.size:
            self.by_host[host] = buffer
            buffer.host = host
        return buffer.base + first_element

    def allocate(self, size, name=None, *, tracked=False):
        """(address, uint8 array [size]) of new zeroed bytes.

        tracked: count them as unwritten until a kernel or ``mark_written`` has written them (for the checks).
        """
        data = np.zeros(size, np.uint8)
        buffer = self._add(data, name or f"allocation of {size} bytes", False, None)
        if tracked:
            buffer.written = np.zeros(-(-size // 64) * 64, np.uint8)
        return buffer.base, data

    def mark_written(self, address, size):
        """The host has written these bytes."""
        buffer = self.find(address)
        if buffer is not None and buffer.written is not None:
            buffer.written[address - buffer.base : address - buffer.base + size] = 0xFF

    def _add(self, data, name, readonly, keep):
        base = self.next_base
        self.next_base = -(-(base + data.size + GAP) // ALIGNMENT) * ALIGNMENT
        buffer = Buffer(base, data, name, readonly, keep)
        self.buffers.append(buffer)
        self.bases.append(base)
        return buffer

    def unregister(self, address):
        """Forget the array at this address; what it holds stays. MemoryFault where there is none."""
        buffer = self.find(address)
        if buffer is None:
            raise MemoryFault(f"no array at address {address:#x}")
        buffer.alive = False
        position = bisect_right(self.bases, buffer.base) - 1
        del self.buffers[position], self.bases[position]
        if buffer.host is not None:
            del self.by_host[buffer.host]

    def find(self, address):
        """The Buffer that holds an address (or begins there, where it is empty), or None."""
        position = bisect_right(self.bases, address) - 1
        if position < 0:
            return None
        buffer = self.buffers[position]
        return buffer if address < buffer.end or address == buffer.base else None

    def describe(self, address):
        """Where an address stands against the nearest array, in words."""
        if not self.buffers:
            return "no array is registered"
        position = max(0, bisect_right(self.bases, address) - 1)
        nearest = self.buffers[position]
        offset = address - nearest.base
        if 0 <= offset < nearest.size:
            return f"byte {offset} of {nearest.name} ({nearest.size} bytes)"
        if offset >= nearest.size:
            distance = offset - nearest.size
            if distance < GAP:
                return f"{distance} bytes behind the end of {nearest.name} ({nearest.size} bytes)"
        elif -offset < GAP:
            return f"{-offset} bytes before {nearest.name} ({nearest.size} bytes)"
        following = self.buffers[position + 1] if position + 1 < len(self.buffers) else None
        if following is not None and following.base - address < GAP:
            return f"{following.base - address} bytes before {following.name} ({following.size} bytes)"
        return "in no array"
