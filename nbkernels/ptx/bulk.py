"""Bulk copies between global and shared memory (sm_90): one thread asks, the copy engine brings, an mbarrier counts the bytes.

A tensor copy moves a box of an array that a tensor map describes (``launch.tensor_map``); coordinates are elements, innermost
axis first. What lies outside the array is read as zeros and not written. Shared addresses are multiples of 128 bytes, and of 8
times the swizzle's bytes where the map has one.
"""

from llvmlite import ir
from numba import types, uint32, uint64
from numba.core.datamodel import models
from numba.cuda.extending import intrinsic, register_model

from nbkernels.ptx.asm import instruction

void = types.void

# how long the second-level cache keeps what a copy brings: CUTLASS' encodings of the policies that createpolicy makes
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


class TensorMapType(types.Type):
    """A kernel parameter that holds a tensor map: 128 bytes by value; in the kernel, its address."""

    def __init__(self):
        super().__init__(name="tensor_map")


tensor_map = TensorMapType()


@register_model(TensorMapType)
class _TensorMapModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.IntType(64))


@intrinsic
def tensor_map_address(typingctx, described):
    """The address (uint64) of a tensor map parameter."""
    if not isinstance(described, TensorMapType):
        return None

    def emit(context, builder, signature, arguments):
        return arguments[0]

    return uint64(described), emit


@instruction(
    void(uint32, uint64, uint32, uint32),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    effect="writes",
)
def bulk_load(shared, source, copied_bytes, barrier):
    """Copy bytes (a multiple of 16, both addresses too) from global to shared memory; the mbarrier counts them."""


@instruction(
    void(uint32, uint64, uint32, uint32, uint64),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;",
    effect="writes",
)
def bulk_load_hint(shared, source, copied_bytes, barrier, policy):
    """As bulk_load, with an L2 policy."""


@instruction(
    void(uint64, uint32, uint32), "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", effect="writes"
)
def bulk_store(target, shared, copied_bytes):
    """Copy bytes (a multiple of 16, both addresses too) from shared to global memory.

    After ``fence_proxy_async`` by those who wrote them, and a barrier.
    """


_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def _load(axes):
    coordinates = ", ".join(f"${2 + n}" for n in range(axes))
    text = f"{_LOAD.format(axes)} [$0], [$1, {{{coordinates}}}], [${2 + axes}];"
    return instruction(void(uint32, uint64, *[uint32] * (axes + 1)), text, effect="writes")


def _load_hint(axes):
    coordinates = ", ".join(f"${2 + n}" for n in range(axes))
    text = f"{_LOAD.format(axes)}.L2::cache_hint [$0], [$1, {{{coordinates}}}], [${2 + axes}], ${3 + axes};"
    return instruction(void(uint32, uint64, *[uint32] * (axes + 1), uint64), text, effect="writes")


def _store(axes):
    coordinates = ", ".join(f"${1 + n}" for n in range(axes))
    text = f"cp.async.bulk.tensor.{axes}d.global.shared::cta.tile.bulk_group [$0, {{{coordinates}}}], [${1 + axes}];"
    return instruction(void(uint64, *[uint32] * (axes + 1)), text, effect="writes")


@_load(2)
def tensor_load_2d(shared, map_address, x, y, barrier):
    """Bring the box at (x, y) of an array of two axes; the mbarrier counts the whole box's bytes."""


@_load(3)
def tensor_load_3d(shared, map_address, x, y, z, barrier):
    """Bring the box at (x, y, z) of an array of three axes."""


@_load(4)
def tensor_load_4d(shared, map_address, x, y, z, w, barrier):
    """Bring the box at (x, y, z, w) of an array of four axes."""


@_load_hint(2)
def tensor_load_2d_hint(shared, map_address, x, y, barrier, policy):
    """As tensor_load_2d, with an L2 policy."""


@_load_hint(4)
def tensor_load_4d_hint(shared, map_address, x, y, z, w, barrier, policy):
    """As tensor_load_4d, with an L2 policy."""


@_store(2)
def tensor_store_2d(map_address, x, y, shared):
    """Write a box from shared memory to (x, y). After ``fence_proxy_async`` by those who filled it, and a barrier."""


@_store(3)
def tensor_store_3d(map_address, x, y, z, shared):
    """Write a box from shared memory to (x, y, z)."""


@_store(4)
def tensor_store_4d(map_address, x, y, z, w, shared):
    """Write a box from shared memory to (x, y, z, w)."""


@instruction(void(uint64), "prefetch.tensormap [$0];", effect="writes")
def prefetch_tensor_map(map_address):
    """Fetch a tensor map before the first copy needs it."""


@instruction(void(), "cp.async.bulk.commit_group;", effect="writes")
def bulk_commit():
    """Close the group of this thread's bulk stores since the last commit."""


@intrinsic
def bulk_wait_read(typingctx, pending):
    """Wait until all but the ``pending`` (a constant) newest groups of bulk stores have read their shared memory."""
    return _wait(pending, "cp.async.bulk.wait_group.read {};")


@intrinsic
def bulk_wait(typingctx, pending):
    """Wait until all but the ``pending`` (a constant) newest groups of bulk stores are written."""
    return _wait(pending, "cp.async.bulk.wait_group {};")


def _wait(pending, text):
    if not isinstance(pending, types.IntegerLiteral):
        return None

    def emit(context, builder, signature, arguments):
        filled = text.format(pending.literal_value)
        builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), filled, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return void(pending), emit
