"""The emulator's sm_90a units: mbarriers, bulk and tensor bulk copies, wgmma with its descriptors and swizzles."""

import ml_dtypes
import numpy as np
import pytest

from nbkernels import emulator
from nbkernels.emulator import tensor_map

HEAD = ".version 8.5\n.target sm_90a\n.address_size 64\n"


def rng():
    return np.random.default_rng(3)


BULK = (
    HEAD
    + """
.extern .shared .align 128 .b8 dynamic[];
.shared .align 8 .b64 full;
.entry bulk(.param .u64 x, .param .u64 y, .param .u32 bytes)
{
    .reg .b64 %a<6>; .reg .b32 %r<8>; .reg .pred %p<3>;
    ld.param.u64 %a1, [x]; ld.param.u64 %a2, [y]; ld.param.u32 %r1, [bytes];
    mov.u32 %r2, full; mov.u32 %r3, dynamic; mov.u32 %r4, %tid.x; setp.eq.u32 %p1, %r4, 0;
    @%p1 mbarrier.init.shared.b64 [%r2], 1;
    bar.sync 0;
    @!%p1 bra wait;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], EXPECTED;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%a1], %r1, [%r2];
wait:
    { .reg .pred done;
    again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0;
    @!done bra again; }
    mad.lo.u32 %r5, %r4, 4, %r3; ld.shared.u32 %r6, [%r5]; add.u32 %r6, %r6, 1;
    bar.sync 0;
    st.shared.u32 [%r5], %r6;
    fence.proxy.async; bar.sync 0;
    @!%p1 bra done_all;
    cp.async.bulk.global.shared::cta.bulk_group [%a2], [%r3], %r1;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
done_all:
    ret;
}
"""
)


def test_a_bulk_copy_there_and_back():
    x = rng().integers(0, 2**32, 64, dtype=np.uint32)
    y = np.zeros(64, np.uint32)
    emulator.run_ptx(BULK.replace("EXPECTED", "256"), None, 1, 64, [x, y, 256], shared_bytes=256)
    np.testing.assert_array_equal(y, x + np.uint32(1))


def test_faults_of_bulk_copies():
    x, y = np.zeros(64, np.uint32), np.zeros(64, np.uint32)

    def run(text, expected, size):
        emulator.run_ptx(text.replace("EXPECTED", str(expected)), None, 1, 64, [x, y, size], shared_bytes=512)

    with pytest.raises(
        emulator.Deadlock, match=r"threads 0-63 wait for the mbarrier .* lacks 0 of 1 arrivals and 16 bytes"
    ):
        run(BULK, 272, 256)
    with pytest.raises(emulator.MemoryFault, match=r"bulk copy of 272 bytes at global address .* of argument 0"):
        run(BULK, 272, 272)
    with pytest.raises(emulator.MemoryFault, match=r"248 bytes, which is no multiple of 16"):
        run(BULK, 248, 248)
    with pytest.raises(emulator.MemoryFault, match="no mbarrier was initialised"):
        run(BULK.replace("@%p1 mbarrier.init.shared.b64 [%r2], 1;", ""), 256, 256)
    # nobody waits: the threads read what a copy may still be writing
    early = BULK.replace("@!done bra again;", "")
    early = early.replace("again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0;", "")
    with pytest.raises(emulator.RaceError, match=r"reads 4 bytes .* not been waited for"):
        run(early, 256, 256)


# ---- wgmma ------------------------------------------------------------------------------------------------------------


def product_kernel(columns, a_box_bytes, b_box_bytes, steps, kinds, result, tail):
    """One tile m64 × columns: two tensor copies, then the products of ``steps`` (descriptors of a and b), then registers out."""
    count = columns // 2
    registers = ", ".join(f"%d{n}" for n in range(count))
    issue = "\n".join(
        f"mov.b64 %a3, {a:#x}; add.u64 %a3, %a3, %a5; mov.b64 %a4, {b:#x}; add.u64 %a4, %a4, %a6;"
        f"wgmma.mma_async.sync.aligned.m64n{columns}{kinds} {{{registers}}}, %a3, %a4, %p2, 1, 1{tail};"
        "setp.eq.u32 %p2, 0, 0;"
        for a, b in steps
    )
    stores = "\n".join(f"st.global.b32 [%a7+{4 * (n * 128)}], %d{n};" for n in range(count))
    kind = "f32" if result == "f32" else "b32"
    clear = " ".join(f"mov.b32 %d{n}, 0;" for n in range(count))
    return (
        HEAD
        + f"""
.extern .shared .align 1024 .b8 dynamic[];
.shared .align 8 .b64 full;
.entry product(.param .u64 a_map, .param .u64 b_map, .param .u64 y)
{{
    .reg .b64 %a<9>; .reg .b32 %r<8>; .reg .pred %p<4>; .reg .{kind} %d<{count}>;
    ld.param.u64 %a1, [a_map]; ld.param.u64 %a2, [b_map]; ld.param.u64 %a7, [y];
    mov.u32 %r2, full; mov.u32 %r3, dynamic; add.u32 %r5, %r3, {-(-a_box_bytes // 1024) * 1024}; mov.u32 %r4, %tid.x;
    mad.wide.u32 %a7, %r4, 4, %a7;
    setp.eq.u32 %p1, %r4, 0; setp.ne.u32 %p2, 0, 0; mov.u32 %r6, 0;
    @%p1 mbarrier.init.shared.b64 [%r2], 1;
    bar.sync 0;
    @!%p1 bra wait;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {a_box_bytes + b_box_bytes};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%a1, {{%r6, %r6}}], [%r2];
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r5], [%a2, {{%r6, %r6}}], [%r2];
wait:
    {{ .reg .pred done;
    again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0;
    @!done bra again; }}
    shr.u32 %r6, %r3, 4; cvt.u64.u32 %a5, %r6; shr.u32 %r6, %r5, 4; cvt.u64.u32 %a6, %r6;
    {clear}
    wgmma.fence.sync.aligned;
    {issue}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores}
    ret;
}}
"""
    )


def descriptor(leading, stride, swizzle, offset=0):
    """A matrix descriptor less its start address; offset in bytes of the start."""
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return (offset >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def from_registers(y, columns):
    """Registers [columns / 2, 128] -> the tile [64, columns], by the layout in the ISA reference."""
    tile = np.zeros((64, columns), y.dtype)
    thread = np.arange(128)
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    for n in range(columns // 2):
        row = 16 * warp + g + 8 * (n % 4 // 2)
        tile[row, 8 * (n // 4) + 2 * t + n % 2] = y[n]
    return tile


def multiply(a, b, columns, steps, kinds, result, swizzle, tail, dtype=np.float32):
    """Run a product kernel on a tensor map of each matrix, whose whole extent is one box."""
    e = emulator.Emulator()
    maps = []
    for matrix in (a, b):
        rows, width = matrix.shape
        address = e.memory.register(matrix)
        tensor = tensor_map.TensorMap(
            address, matrix.itemsize, (width, rows), (width * matrix.itemsize,), (width, rows), swizzle
        )
        maps.append(tensor_map.encode(tensor))
    y = np.zeros((columns // 2, 128), dtype)
    text = product_kernel(columns, a.nbytes, b.nbytes, steps, kinds, result, tail)
    e.launch(text, None, 1, 128, [*maps, y], shared_bytes=-(-a.nbytes // 1024) * 1024 + b.nbytes)
    return from_registers(y, columns)


@pytest.mark.parametrize("swizzle", [128, 64, 32])
@pytest.mark.parametrize("columns", [8, 96])
def test_products_of_matrices_stored_along_k(swizzle, columns):
    depth = swizzle // 2  # one swizzle row of bfloat16
    a = rng().standard_normal((64, depth)).astype(ml_dtypes.bfloat16)
    b = rng().standard_normal((columns, depth)).astype(ml_dtypes.bfloat16)
    steps = [(descriptor(16, 8 * swizzle, swizzle, 32 * n),) * 2 for n in range(depth // 16)]
    got = multiply(a, b, columns, steps, "k16.f32.bf16.bf16", "f32", swizzle, ", 0, 0")
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_products_of_b_stored_along_its_columns():
    a = rng().standard_normal((64, 64)).astype(np.float16)
    b = rng().standard_normal((64, 64)).astype(np.float16)  # [k, columns]
    # two atoms of 8 rows of k for each k16: 1024 bytes from one to the next
    steps = [(descriptor(16, 1024, 128, 32 * n), descriptor(8192, 1024, 128, 2048 * n)) for n in range(4)]
    got = multiply(a, b, 64, steps, "k16.f32.f16.f16", "f32", 128, ", 0, 1")
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_integer_products():
    a = rng().integers(-128, 128, (64, 128)).astype(np.int8)
    b = rng().integers(-128, 128, (16, 128)).astype(np.int8)
    steps = [(descriptor(16, 1024, 128, 32 * n),) * 2 for n in range(4)]
    got = multiply(a, b, 16, steps, "k32.s32.s8.s8", "s32", 128, "", dtype=np.int32)
    np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32).T)


def test_a_tensor_copy_fills_what_lies_outside_with_zeros():
    text = (
        HEAD
        + """
.extern .shared .align 1024 .b8 dynamic[];
.shared .align 8 .b64 full;
.entry box(.param .u64 map, .param .u64 y, .param .u32 column, .param .u32 row)
{
    .reg .b64 %a<6>; .reg .b32 %r<8>; .reg .pred %p<3>;
    ld.param.u64 %a1, [map]; ld.param.u64 %a2, [y]; ld.param.u32 %r1, [column]; ld.param.u32 %r6, [row];
    mov.u32 %r2, full; mov.u32 %r3, dynamic; mov.u32 %r4, %tid.x; setp.eq.u32 %p1, %r4, 0;
    @%p1 mbarrier.init.shared.b64 [%r2], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%a1, {%r1, %r6}], [%r2];
    { .reg .pred done;
    again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0;
    @!done bra again; }
    mad.lo.u32 %r5, %r4, 4, %r3; ld.shared.u32 %r5, [%r5]; mad.wide.u32 %a3, %r4, 4, %a2; st.global.u32 [%a3], %r5;
    ret;
}
"""
    )
    e = emulator.Emulator()
    x = rng().integers(1, 2**31, (5, 12), dtype=np.uint32)
    tensor = tensor_map.TensorMap(e.memory.register(x), 4, (12, 5), (48,), (16, 8))
    y = np.zeros((8, 16), np.uint32)
    padded = np.zeros((24, 48), np.uint32)
    padded[8:13, 16:28] = x
    for column, row in ((0, 0), (-4, -2), (4, 3), (16, 0), (0, 7)):
        e.launch(text, None, 1, 128, [tensor_map.encode(tensor), y, column, row], shared_bytes=512)
        np.testing.assert_array_equal(y, padded[8 + row : 16 + row, 16 + column : 32 + column])
    with pytest.raises(emulator.MemoryFault, match="from element 5"):
        e.launch(text, None, 1, 128, [tensor_map.encode(tensor), y, 5, 0], shared_bytes=512)


PIPELINE = (
    HEAD
    + """
.shared .align 16 .b8 tile[512];
.shared .align 8 .b64 full[2];
.shared .align 8 .b64 empty[2];
.entry pipeline(.param .u64 x, .param .u64 y, .param .u32 turns)
{
    .reg .b64 %a<6>; .reg .b32 %r<16>; .reg .pred %p<4>;
    ld.param.u64 %a1, [x]; ld.param.u64 %a2, [y]; ld.param.u32 %r1, [turns];
    mov.u32 %r2, full; mov.u32 %r3, empty; mov.u32 %r4, tile; mov.u32 %r5, %tid.x; setp.eq.u32 %p1, %r5, 0;
    @%p1 mbarrier.init.shared.b64 [%r2], 1;   @%p1 mbarrier.init.shared.b64 [%r2+8], 1;
    @%p1 mbarrier.init.shared.b64 [%r3], 64;  @%p1 mbarrier.init.shared.b64 [%r3+8], 64;
    bar.sync 0;
    mov.u32 %r6, 0;
    setp.ge.u32 %p2, %r5, 32;
    @%p2 bra consume;
    @!%p1 bra leave;
produce:
    and.b32 %r7, %r6, 1; shr.u32 %r8, %r6, 1; and.b32 %r8, %r8, 1; xor.b32 %r8, %r8, 1;
    mad.lo.u32 %r9, %r7, 8, %r3; mad.lo.u32 %r10, %r7, 8, %r2; mad.lo.u32 %r11, %r7, 256, %r4;
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r9], %r8; @!done bra again; }
    mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%a1], 256, [%r10];
    add.u64 %a1, %a1, 256; add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, %r1; @%p3 bra produce;
    bra leave;
consume:
    sub.u32 %r5, %r5, 32;
next:
    and.b32 %r7, %r6, 1; shr.u32 %r8, %r6, 1; and.b32 %r8, %r8, 1;
    mad.lo.u32 %r9, %r7, 8, %r3; mad.lo.u32 %r10, %r7, 8, %r2; mad.lo.u32 %r11, %r7, 256, %r4;
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r10], %r8; @!done bra again; }
    mad.lo.u32 %r11, %r5, 4, %r11; ld.shared.u32 %r12, [%r11];
    mbarrier.arrive.shared.b64 _, [%r9];
    mad.lo.u32 %r13, %r6, 64, %r5; mad.wide.u32 %a3, %r13, 4, %a2; st.global.u32 [%a3], %r12;
    add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, %r1; @%p3 bra next;
leave:
    ret;
}
"""
)


def test_a_pipeline_of_two_stages():
    x = rng().integers(0, 2**32, (9, 64), dtype=np.uint32)
    y = np.zeros_like(x)
    emulator.run_ptx(PIPELINE, None, 1, 96, [x, y, 9])
    np.testing.assert_array_equal(y, x)


def test_faults_of_a_pipeline():
    x, y = np.zeros((9, 64), np.uint32), np.zeros((9, 64), np.uint32)
    # the producer does not wait for the stage to be empty
    careless = PIPELINE.replace("mbarrier.try_wait.parity.shared::cta.b64 done, [%r9], %r8; @!done bra again;", "", 1)
    careless = careless.replace("{ .reg .pred done; again:  }", "")
    with pytest.raises(emulator.EmulatorError):
        emulator.run_ptx(careless, None, 1, 96, [x, y, 9])
    # one arrival too few: the producer waits for ever
    with pytest.raises(emulator.Deadlock, match="lacks 1 of 65 arrivals"):
        emulator.run_ptx(PIPELINE.replace("[%r3], 64", "[%r3], 65"), None, 1, 96, [x, y, 9])
    # the stage is given back before it has been read
    load = "mad.lo.u32 %r11, %r5, 4, %r11; ld.shared.u32 %r12, [%r11];"
    give = "mbarrier.arrive.shared.b64 _, [%r9];"
    swapped = PIPELINE.replace(load, "LOAD").replace(give, load).replace("LOAD", give)
    with pytest.raises(emulator.RaceError):
        emulator.run_ptx(swapped, None, 1, 96, [x, y, 9])
