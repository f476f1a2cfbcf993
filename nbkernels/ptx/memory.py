"""Addresses, wide loads and stores with cache hints, and asynchronous copies into shared memory.

Global addresses are uint64 (``address``), shared ones uint32 (``shared_address``), both in bytes. A 16-byte access needs an
address divisible by 16.
"""

from llvmlite import ir
from numba import float32, types, uint16, uint32, uint64
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from nbkernels.ptx.asm import instruction

words2 = types.UniTuple(uint32, 2)
words4 = types.UniTuple(uint32, 4)
floats4 = types.UniTuple(float32, 4)
void = types.void


@intrinsic
def address(typingctx, base, index):
    """The byte address (uint64) of element ``index`` of a pointer parameter."""
    if not isinstance(base, types.CPointer) or not isinstance(index, types.Integer):
        return None

    def emit(context, builder, signature, arguments):
        element = builder.gep(arguments[0], [arguments[1]])
        return builder.ptrtoint(element, ir.IntType(64))

    # an unsigned 32-bit index must be widened without its sign, so the index is taken as 64 bits
    return uint64(base, uint64 if not index.signed else types.int64), emit


@intrinsic
def pointer_at(typingctx, like, byte_address):
    """A pointer of the type of ``like`` to a byte address (uint64)."""
    if not isinstance(like, types.CPointer) or byte_address != types.uint64:
        return None

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[1], context.get_value_type(like))

    return like(like, byte_address), emit


@intrinsic
def shared_address(typingctx, array):
    """The shared-space byte address (uint32) of the first element of a ``cuda.shared.array``."""
    if not isinstance(array, types.Array):
        return None

    def emit(context, builder, signature, arguments):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0]).data
        narrow = builder.addrspacecast(data, _shared(data.type))
        return builder.ptrtoint(narrow, ir.IntType(32))

    return uint32(array), emit


def _shared(pointer_type):
    return ir.PointerType(pointer_type.pointee, addrspace=3)


# ---- global loads and stores -------------------------------------------------------------------------------------------


@instruction(words4(uint64), "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", effect="reads")
def ld_global_v4(address):
    """Sixteen bytes as four words, through L1 and L2."""


@instruction(words4(uint64), "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];", effect="constant")
def ld_global_nc_v4(address):
    """Sixteen bytes of data that nobody writes during the kernel and that is read once: past L1, L2 told to fetch 128."""


@instruction(words4(uint64), "ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];", effect="reads")
def ld_global_stream_v4(address):
    """Sixteen bytes that are read once but may be overwritten later in the kernel: past L1."""


@instruction(words2(uint64), "ld.global.v2.b32 {$0, $1}, [$2];", effect="reads")
def ld_global_v2(address):
    """Eight bytes as two words."""


@instruction(words2(uint64), "ld.global.nc.L1::no_allocate.v2.b32 {$0, $1}, [$2];", effect="constant")
def ld_global_nc_v2(address):
    """Eight bytes of read-only data that is read once."""


@instruction(words2(uint64), "ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];", effect="reads")
def ld_global_stream_v2(address):
    """Eight bytes that are read once but may be overwritten later in the kernel: past L1."""


@instruction(uint32(uint64), "ld.global.b32 $0, [$1];", effect="reads")
def ld_global(address):
    """Four bytes as a word."""


@instruction(uint32(uint64), "ld.global.nc.b32 $0, [$1];", effect="constant")
def ld_global_nc(address):
    """Four bytes of data that nobody writes during the kernel."""


@instruction(float32(uint64), "ld.global.nc.f32 $0, [$1];", effect="constant")
def ld_global_nc_f32(address):
    """A float32 that nobody writes during the kernel."""


@instruction(floats4(uint64), "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", effect="reads")
def ld_global_v4_f32(address):
    """Four float32, through L1 and L2."""


@instruction(floats4(uint64), "ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {$0, $1, $2, $3}, [$4];", effect="constant")
def ld_global_nc_v4_f32(address):
    """Four float32 of read-only data that is read once."""


@instruction(void(uint64, uint32, uint32, uint32, uint32), "st.global.v4.b32 [$0], {$1, $2, $3, $4};", effect="writes")
def st_global_v4(address, a, b, c, d):
    """Sixteen bytes."""


@instruction(
    void(uint64, uint32, uint32, uint32, uint32),
    "st.global.L1::no_allocate.v4.b32 [$0], {$1, $2, $3, $4};",
    effect="writes",
)
def st_global_stream_v4(address, a, b, c, d):
    """Sixteen bytes that this kernel won't read again."""


@instruction(void(uint64, uint32, uint32), "st.global.v2.b32 [$0], {$1, $2};", effect="writes")
def st_global_v2(address, a, b):
    """Eight bytes."""


@instruction(void(uint64, uint32), "st.global.b32 [$0], $1;", effect="writes")
def st_global(address, a):
    """Four bytes."""


@instruction(
    void(uint64, float32, float32, float32, float32), "st.global.v4.f32 [$0], {$1, $2, $3, $4};", effect="writes"
)
def st_global_v4_f32(address, a, b, c, d):
    """Four float32."""


# ---- between blocks -----------------------------------------------------------------------------------------------------


@instruction(uint32(uint64, uint32), "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", effect="writes")
def atomic_add(address, a):
    """Add to a word of global memory -> what it held before.

    For the whole GPU it comes after what this thread, and those it has met at a barrier, wrote before, and before what it, and
    those it meets at the next barrier, read.
    """


@instruction(uint32(uint64, uint32), "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", effect="writes")
def atomic_add_relaxed(address, a):
    """As atomic_add, and orders nothing else: for a count that no data hangs on."""


@instruction(float32(uint64), "ld.relaxed.gpu.global.f32 $0, [$1];", effect="writes")
def ld_global_relaxed_f32(address):
    """A float32 that another block may have written: never from this multiprocessor's own cache."""


@instruction(uint32(uint64), "ld.acquire.gpu.global.u32 $0, [$1];", effect="writes")
def ld_global_acquire(address):
    """A word as other blocks leave it; what their threads wrote before they did (``atomic_add``) is seen after this. sm_70."""


@instruction(void(uint64), "prefetch.global.L2 [$0];", effect="writes")
def prefetch_l2(address):
    """Fetch the line of this address into L2, for a load to come."""


# ---- shared loads and stores -------------------------------------------------------------------------------------------


@instruction(words4(uint32), "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", effect="reads")
def ld_shared_v4(address):
    """Sixteen bytes of shared memory."""


@instruction(floats4(uint32), "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", effect="reads")
def ld_shared_v4_f32(address):
    """Four float32 of shared memory."""


@instruction(words2(uint32), "ld.shared.v2.b32 {$0, $1}, [$2];", effect="reads")
def ld_shared_v2(address):
    """Eight bytes of shared memory as two words."""


@instruction(uint32(uint32), "ld.shared.b32 $0, [$1];", effect="reads")
def ld_shared(address):
    """Four bytes of shared memory as a word."""


@instruction(float32(uint32), "ld.shared.f32 $0, [$1];", effect="reads")
def ld_shared_f32(address):
    """One float32 of shared memory."""


@instruction(void(uint32, uint32, uint32, uint32, uint32), "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", effect="writes")
def st_shared_v4(address, a, b, c, d):
    """Sixteen bytes into shared memory."""


@instruction(
    void(uint32, float32, float32, float32, float32), "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", effect="writes"
)
def st_shared_v4_f32(address, a, b, c, d):
    """Four float32 into shared memory."""


@instruction(void(uint32, uint32), "st.shared.b32 [$0], $1;", effect="writes")
def st_shared(address, a):
    """Four bytes into shared memory."""


@instruction(void(uint32, uint32, uint32), "st.shared.v2.b32 [$0], {$1, $2};", effect="writes")
def st_shared_v2(address, a, b):
    """Write 8 bytes of shared memory."""


@instruction(void(uint32, float32), "st.shared.f32 [$0], $1;", effect="writes")
def st_shared_f32(address, a):
    """One float32 into shared memory."""


@instruction(uint16(uint32), "ld.shared.b16 $0, [$1];", effect="reads")
def ld_shared_u16(address):
    """Two bytes of shared memory."""


@instruction(void(uint32, uint16), "st.shared.b16 [$0], $1;", effect="writes")
def st_shared_u16(address, a):
    """Two bytes into shared memory."""


# ---- asynchronous copies, global to shared (sm_80 and later) ------------------------------------------------------------


@instruction(void(uint32, uint64), "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", effect="writes")
def cp_async_16(shared, source):
    """Copy 16 bytes past L1; complete for this thread after cp_async_wait, for others after a barrier behind that."""


@instruction(void(uint32, uint64, uint32), "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", effect="writes")
def cp_async_16_zfill(shared, source, source_bytes):
    """Copy the first source_bytes (0 to 16) of 16 bytes and fill the rest with zeros; 0 bytes reads nothing."""


@instruction(void(uint32, uint64, uint32), "cp.async.ca.shared.global [$0], [$1], 4, $2;", effect="writes")
def cp_async_4_zfill(shared, source, source_bytes):
    """Copy source_bytes (0 to 4) of 4 bytes and fill the rest with zeros."""


@instruction(void(), "cp.async.commit_group;", effect="writes")
def cp_async_commit():
    """Close the group of this thread's copies since the last commit."""


@intrinsic
def cp_async_wait(typingctx, pending):
    """Wait until at most ``pending`` (a compile-time constant) of this thread's newest groups are unfinished."""
    if not isinstance(pending, types.IntegerLiteral):
        return None
    text = f"cp.async.wait_group {pending.literal_value};"

    def emit(context, builder, signature, arguments):
        asm = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", side_effect=True)
        builder.call(asm, [])
        return context.get_dummy_value()

    return void(pending), emit


# ---- matrix fragments ---------------------------------------------------------------------------------------------------


@instruction(words4(uint32), "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", effect="converges")
def ldmatrix_x4(row_address):
    """Four 8×8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes each).

    Word m of lane l holds elements 2·(l % 4) and the next of row l / 4 of matrix m. sm_75 and later.
    """


@instruction(
    words4(uint32), "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", effect="converges"
)
def ldmatrix_x4_trans(row_address):
    """As ldmatrix_x4, each matrix transposed: lane l holds rows 2·(l % 4) and the next of column l / 4. sm_75 and later."""


@instruction(words2(uint32), "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];", effect="converges")
def ldmatrix_x2(row_address):
    """Two 8×8 matrices; lanes 0 to 15 give the row addresses. sm_75 and later."""


@instruction(words2(uint32), "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0, $1}, [$2];", effect="converges")
def ldmatrix_x2_trans(row_address):
    """Two 8×8 matrices, each transposed; lanes 0 to 15 give the row addresses. sm_75 and later."""


@instruction(uint32(uint32), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", effect="converges")
def movmatrix_trans(word):
    """An 8×8 matrix of 16-bit elements, transposed in registers.

    Lane l gives elements 2·(l % 4) and the next of row l / 4, and gets rows 2·(l % 4) and the next of column l / 4.
    sm_75 and later.
    """
