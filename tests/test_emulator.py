"""The emulator on small kernels: control flow, warp and block cooperation, memory and its faults."""

import math

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, types, uint32

from nbkernels import emulator, ptx

pointer = types.CPointer


def compiled(function, *parameters, arch=(9, 0, "a")):
    """The PTX of a kernel for these parameter types."""
    text, _ = cuda.compile_ptx(function, types.void(*parameters), cc=arch, lineinfo=True)
    return text


def run(function, parameters, grid, block, args, **options):
    """Compile and run; the arrays among the arguments are written in place."""
    emulator.run_ptx(compiled(function, *parameters), None, grid, block, args, **options)


def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 5000, 20001])
def test_vector_add_of_any_length(count):
    def add(x, y, z, n):
        i = cuda.grid(1)
        if i < n:
            z[i] = x[i] + y[i]

    x, y = (rng().standard_normal(count).astype(np.float32) for _ in range(2))
    z = np.full(count, np.nan, np.float32)
    run(add, [pointer(float32)] * 3 + [int32], -(-count // 96), 96, [x, y, z, count])
    np.testing.assert_array_equal(z, x + y)


def test_divergent_loops_meet_again():
    def collatz(x, steps):
        i = cuda.grid(1)
        value, count = uint32(x[i]), uint32(0)
        while value != uint32(1):
            if value & uint32(1):
                value = uint32(uint32(3) * value + uint32(1))
            else:
                value >>= uint32(1)
            count = uint32(count + uint32(1))
        # every lane must take part here, although their loops ended at different times
        steps[i] = ptx.shfl_bfly_u32(count, uint32(1))

    x = np.arange(1, 257, dtype=np.uint32)
    steps = np.zeros(256, np.uint32)
    run(collatz, [pointer(uint32)] * 2, 2, 128, [x, steps])

    def length(v):
        n = 0
        while v != 1:
            v, n = (3 * v + 1 if v & 1 else v // 2), n + 1
        return n

    np.testing.assert_array_equal(steps.reshape(-1, 2)[:, ::-1].reshape(-1), [length(int(v)) for v in x])


def test_block_reduction_with_shuffles_shared_memory_and_barrier():
    block_sum, _ = ptx.block_reductions(128)

    def total(x, y):
        scratch = cuda.shared.array(4, float32)
        value = block_sum(x[cuda.grid(1)], scratch)
        if cuda.threadIdx.x == 0:
            y[cuda.blockIdx.x] = value

    x = rng().standard_normal((70, 128)).astype(np.float32)
    y = np.full(70, np.nan, np.float32)
    run(total, [pointer(float32)] * 2, 70, 128, [x, y])
    np.testing.assert_allclose(y, x.sum(axis=1, dtype=np.float64), rtol=1e-5, atol=1e-5)


def test_dynamic_shared_memory_and_three_dimensions():
    def transpose(x, y):
        tile = cuda.shared.array(0, float32)
        r, c = cuda.threadIdx.y, cuda.threadIdx.x
        z = cuda.blockIdx.z * 2 + cuda.blockIdx.y
        tile[c * 9 + r] = x[z * 64 + r * 8 + c]
        cuda.syncthreads()
        y[z * 64 + r * 8 + c] = tile[r * 9 + c]

    x = rng().standard_normal((6, 8, 8)).astype(np.float32)
    y = np.zeros_like(x)
    run(transpose, [pointer(float32)] * 2, (1, 2, 3), (8, 8), [x, y], shared_bytes=4 * 72)
    np.testing.assert_array_equal(y, x.swapaxes(1, 2))


def test_array_arguments_of_numba_are_passed_field_by_field():
    def scale(x, y):
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            y[i, j] = 2 * x[i, j]

    x = rng().standard_normal((13, 21)).astype(np.float32)
    y = np.zeros_like(x)
    memory = emulator.Emulator()
    fields = []
    for array in (x, y):
        address = memory.memory.register(array)
        fields += [0, 0, array.size, array.itemsize, address, *array.shape, *array.strides]
    memory.launch(compiled(scale, float32[:, ::1], float32[:, ::1]), None, (1, 2), (16, 16), fields)
    np.testing.assert_array_equal(y, 2 * x)


def test_a_view_inside_a_registered_array_has_an_address_inside_it():
    memory = emulator.Emulator().memory
    whole = np.zeros((4, 8), np.float32)
    base = memory.register(whole)
    assert memory.register(whole[1:, 3:]) == base + 4 * (8 + 3)
    assert memory.register(np.zeros(4)) >= base + whole.nbytes


@pytest.mark.parametrize("half", [np.float16, "bfloat16"])
def test_matrix_product_of_one_warp(half):
    dtype = np.dtype(half) if half != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    mma = ptx.mma_m16n8k16_f16 if half != "bfloat16" else ptx.mma_m16n8k16_bf16

    def product(a, b, d):
        lane = uint32(cuda.threadIdx.x)
        row, pair = lane >> uint32(2), lane & uint32(3)
        a0, a1 = a[row * uint32(8) + pair], a[(row + uint32(8)) * uint32(8) + pair]
        a2, a3 = a[row * uint32(8) + pair + uint32(4)], a[(row + uint32(8)) * uint32(8) + pair + uint32(4)]
        b0, b1 = b[row * uint32(8) + pair], b[row * uint32(8) + pair + uint32(4)]
        zero = float32(0.0)
        c = mma(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
        d[row * uint32(8) + uint32(2) * pair] = c[0]
        d[row * uint32(8) + uint32(2) * pair + uint32(1)] = c[1]
        d[(row + uint32(8)) * uint32(8) + uint32(2) * pair] = c[2]
        d[(row + uint32(8)) * uint32(8) + uint32(2) * pair + uint32(1)] = c[3]

    a, b = rng().standard_normal((16, 16)).astype(dtype), rng().standard_normal((8, 16)).astype(dtype)
    d = np.zeros((16, 8), np.float32)
    run(product, [pointer(uint32), pointer(uint32), pointer(float32)], 1, 32, [a, b, d])
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-6, atol=1e-6)


def test_asynchronous_copies_arrive_at_the_wait():
    def copy(x, y, early):
        tile = cuda.shared.array(512, float32, alignment=16)
        thread = uint32(cuda.threadIdx.x)
        here = uint32(ptx.shared_address(tile) + thread * uint32(16))
        tile[thread * uint32(4)] = float32(-1.0)
        ptx.cp_async_16(here, ptx.address(x, thread * uint32(4)))
        ptx.cp_async_commit()
        early[thread] = ptx.ld_shared_f32(here)
        ptx.cp_async_wait(0)
        cuda.syncthreads()
        other = (thread + uint32(1)) % uint32(128)
        for j in range(4):
            y[thread * uint32(4) + uint32(j)] = tile[other * uint32(4) + uint32(j)]

    x = rng().standard_normal((128, 4)).astype(np.float32)
    y, early = np.zeros_like(x), np.zeros(128, np.float32)
    with pytest.raises(emulator.RaceError, match=r"test_emulator.py.*ld.shared.f32.*not been waited for.*cp.async"):
        run(copy, [pointer(float32)] * 3, 1, 128, [x, y, early])
    run(copy, [pointer(float32)] * 3, 1, 128, [x, y, early], checks=False)
    np.testing.assert_array_equal(y, np.roll(x, -1, axis=0))
    np.testing.assert_array_equal(early, -1.0)


def test_partial_asynchronous_copies_fill_with_zeros_and_read_no_further():
    def copy(x, y, count):
        tile = cuda.shared.array(128, uint32, alignment=16)
        thread = uint32(cuda.threadIdx.x)
        here = uint32(ptx.shared_address(tile) + thread * uint32(16))
        first = thread * uint32(4)
        left = uint32(0)
        if first < count:
            left = min(uint32(count - first), uint32(4))
        ptx.cp_async_16_zfill(here, ptx.address(x, min(first, count)), uint32(left * uint32(4)))
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
        for j in range(4):
            y[first + uint32(j)] = tile[first + uint32(j)]

    x = rng().integers(1, 2**32, 41, dtype=np.uint32)
    y = np.full(128, 7, np.uint32)
    run(copy, [pointer(uint32)] * 2 + [uint32], 1, 32, [x, y, 41])
    np.testing.assert_array_equal(y, np.r_[x, np.zeros(87, np.uint32)])


# ---- faults -----------------------------------------------------------------------------------------------------------


def test_out_of_bounds_names_kernel_line_block_thread_address_and_array():
    def beyond(x, y):
        y[cuda.grid(1)] = x[cuda.grid(1)]

    x, y = np.zeros(100, np.float32), np.zeros(128, np.float32)
    with pytest.raises(emulator.MemoryFault) as caught:
        run(beyond, [pointer(float32)] * 2, 2, 64, [x, y])
    message = str(caught.value)
    line = beyond.__code__.co_firstlineno + 1
    for part in ("beyond", f"test_emulator.py:{line}", "block (1, 0, 0)", "thread (36, 0, 0)", "reads 4 bytes"):
        assert part in message
    assert "0 bytes behind the end of argument 0 (float32 [100]) (400 bytes)" in message


def test_misaligned_access_is_a_fault():
    def crooked(x, y):
        w = ptx.ld_global_v4(ptx.address(x, uint32(cuda.threadIdx.x)))
        y[cuda.threadIdx.x] = w[0]

    with pytest.raises(emulator.MemoryFault, match=r"thread \(1, 0, 0\).*misaligned.*no multiple of 16"):
        run(crooked, [pointer(uint32)] * 2, 1, 8, [np.zeros(64, np.uint32), np.zeros(8, np.uint32)])


@pytest.mark.parametrize("alignment", [None, 16])
def test_shared_arrays_are_aligned_as_asked_and_no_better(alignment):
    def in_pieces(x):
        flag = cuda.shared.array(1, float32)
        tile = cuda.shared.array(32, float32, alignment=alignment)
        tile[cuda.threadIdx.x] = x[cuda.threadIdx.x]
        flag[0] = x[0]
        cuda.syncthreads()
        if cuda.threadIdx.x < 8:
            w = ptx.ld_shared_v4_f32(ptx.shared_address(tile) + uint32(cuda.threadIdx.x) * uint32(16))
            x[cuda.threadIdx.x] = w[0] + flag[0]

    x = np.arange(32, dtype=np.float32)
    if alignment == 16:
        run(in_pieces, [pointer(float32)], 1, 32, [x])
        np.testing.assert_array_equal(x[:8], np.arange(0, 32, 4))
    else:
        with pytest.raises(emulator.MemoryFault, match=r"misaligned.*shared.*no multiple of 16"):
            run(in_pieces, [pointer(float32)], 1, 32, [x])


def test_shared_memory_is_bounded_for_each_block():
    def beyond(y):
        tile = cuda.shared.array(32, float32)
        tile[cuda.threadIdx.x + cuda.blockIdx.x] = 1.0
        cuda.syncthreads()
        y[cuda.threadIdx.x] = tile[31 - cuda.threadIdx.x]

    with pytest.raises(emulator.MemoryFault, match=r"block \(1, 0, 0\), thread \(31, 0, 0\).*behind its end"):
        run(beyond, [pointer(float32)], 2, 32, [np.zeros(32, np.float32)])


def test_a_write_to_a_read_only_array_is_a_fault():
    def write(x):
        x[cuda.threadIdx.x] = 1.0

    x = np.zeros(32, np.float32)
    x.flags.writeable = False
    with pytest.raises(emulator.MemoryFault, match="read-only"):
        run(write, [pointer(float32)], 1, 32, [x])


def test_a_barrier_that_not_all_threads_reach_is_reported():
    def half(x):
        if cuda.threadIdx.x < 64:
            cuda.syncthreads()
        else:
            ptx.shfl_bfly(x[0], uint32(1))
            if cuda.threadIdx.x % 2 == 0:
                x[0] = ptx.shfl_bfly(x[1], uint32(1))
            else:
                cuda.syncthreads()

    with pytest.raises(emulator.Deadlock) as caught:
        run(half, [pointer(float32)], 1, 128, [np.zeros(32, np.float32)])
    assert "block (0, 0, 0): threads 0-63 wait at barrier 0" in str(caught.value)
    assert "96 of 128 threads have come" in str(caught.value)
    assert "wait for other lanes of their warp" in str(caught.value)


def test_an_unknown_instruction_names_its_line():
    text = """
.version 8.0
.target sm_80
.address_size 64
.entry odd()
{
    .reg .b32 %r<2>;
    frobnicate.b32 %r1, 3;
    ret;
}
"""
    with pytest.raises(emulator.PtxError, match=r"instruction frobnicate, at PTX line 8 .*frobnicate.b32 %r1, 3"):
        emulator.run_ptx(text, "odd", 1, 32, [])
    with pytest.raises(emulator.PtxError, match=r"PTX version 99.0 is newer"):
        emulator.run_ptx(text.replace("8.0", "99.0"), "odd", 1, 32, [])
    with pytest.raises(emulator.LaunchError, match="takes 0 arguments, got 1"):
        emulator.run_ptx(text.replace("frobnicate", "mov"), "odd", 1, 32, [1])


# ---- races and unwritten memory -----------------------------------------------------------------------------------------


def exchange(first_barrier, second_barrier):
    """A kernel in which threads read what others wrote to shared memory, twice, with or without the barriers it needs."""

    def swap(x, y):
        tile = cuda.shared.array(64, float32)
        thread = uint32(cuda.threadIdx.x)
        for turn in range(2):
            tile[thread] = x[uint32(turn) * uint32(64) + thread]
            if first_barrier:
                cuda.syncthreads()
            y[uint32(turn) * uint32(64) + thread] = tile[uint32(63) - thread]
            if second_barrier:
                cuda.syncthreads()

    return swap


@pytest.mark.parametrize("barriers", [(True, True), (False, True), (True, False)])
def test_a_missing_barrier_is_a_race(barriers):
    x = rng().standard_normal(128).astype(np.float32)
    y = np.zeros(128, np.float32)
    arguments = [pointer(float32)] * 2, 1, 64, [x, y]
    if all(barriers):
        run(exchange(*barriers), *arguments)
        np.testing.assert_array_equal(y.reshape(2, 64), x.reshape(2, 64)[:, ::-1])
        return
    # without the first barrier a read follows a write, without the second a write follows a read
    words = "reads 4 bytes.*were written by" if not barriers[0] else "writes 4 bytes.*were read by"
    with pytest.raises(
        emulator.RaceError, match=words + r" block \(0, 0, 0\), thread .*test_emulator.py.*nothing orders"
    ):
        run(exchange(*barriers), *arguments)


@pytest.mark.parametrize("synchronised", [True, False])
def test_lanes_of_a_warp_need_an_order_too(synchronised):
    def neighbours(x, y):
        tile = cuda.shared.array(64, float32)
        thread = uint32(cuda.threadIdx.x)
        tile[thread] = x[thread]
        if synchronised:
            ptx.warp_sync()
        y[thread] = tile[thread ^ uint32(1)]

    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    if synchronised:
        run(neighbours, [pointer(float32)] * 2, 1, 64, [x, y])
        np.testing.assert_array_equal(y.reshape(-1, 2), x.reshape(-1, 2)[:, ::-1])
    else:
        with pytest.raises(emulator.RaceError):
            run(neighbours, [pointer(float32)] * 2, 1, 64, [x, y])


PIPELINE = """
.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 tile[256];
.entry pipeline(.param .u64 y)
{
    // warps 0 and 1 write for warps 2 and 3: barrier 1 says that the tile is full
    .reg .b64 %a<3>; .reg .b32 %r<6>; .reg .pred %p;
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 63; shl.b32 %r3, %r2, 2; mov.u32 %r4, tile; add.u32 %r3, %r3, %r4;
    setp.lt.u32 %p, %r1, 64; @!%p bra consumer;
    st.shared.u32 [%r3], %r1;
    bar.arrive 1, 128;
    bra done;
consumer:
    bar.sync 1, 128;
    xor.b32 %r3, %r3, 4; ld.shared.u32 %r5, [%r3];
    ld.param.u64 %a1, [y]; mad.wide.u32 %a1, %r2, 4, %a1; st.global.u32 [%a1], %r5;
done:
    ret;
}
"""


def test_a_named_barrier_orders_producers_and_consumers():
    y = np.zeros(64, np.uint32)
    emulator.run_ptx(PIPELINE, None, 1, 128, [y])
    np.testing.assert_array_equal(y, np.arange(64) ^ 1)
    with pytest.raises(emulator.RaceError, match="reads 4 bytes at shared address"):
        emulator.run_ptx(PIPELINE.replace("bar.sync 1, 128", "bar.sync 2, 64"), None, 1, 128, [y])
    with pytest.raises(emulator.Deadlock, match=r"threads 64-127 wait at barrier 1 .* 64 of 128 threads have come"):
        emulator.run_ptx(PIPELINE.replace("bar.arrive 1", "bar.arrive 2"), None, 1, 128, [y])


def test_two_blocks_that_write_one_word_race_and_atomics_do_not():
    def collide(y):
        if cuda.threadIdx.x == 0:
            y[0] = uint32(cuda.blockIdx.x)

    def count(y):
        cuda.atomic.add(y, 0, uint32(1))

    y = np.zeros(1, np.uint32)
    with pytest.raises(emulator.RaceError, match="argument 0"):
        run(collide, [pointer(uint32)], 200, 32, [y])
    y[:] = 0
    e = emulator.Emulator()
    address = e.memory.register(y)
    e.launch(compiled(count, uint32[::1]), None, 200, 32, [0, 0, 1, 4, address, 1, 4])
    assert y[0] == 6400


@pytest.mark.parametrize("filled", [64, 63])
def test_reading_shared_memory_that_nothing_wrote(filled):
    def read(y):
        tile = cuda.shared.array(64, float32)
        if cuda.threadIdx.x < filled:
            tile[cuda.threadIdx.x] = 1.0
        cuda.syncthreads()
        y[cuda.threadIdx.x] = tile[63 - cuda.threadIdx.x]

    y = np.zeros(64, np.float32)
    if filled == 64:
        run(read, [pointer(float32)], 3, 64, [y], checks=False)
        run(read, [pointer(float32)], 1, 64, [y])
        return
    with pytest.raises(emulator.UninitialisedRead, match=r"thread \(0, 0, 0\): reads 4 bytes at shared address"):
        run(read, [pointer(float32)], 1, 64, [y])


def test_reading_an_allocation_that_nothing_wrote():
    def double(x, y):
        y[cuda.threadIdx.x] = x[cuda.threadIdx.x] * float32(2.0)

    e = emulator.Emulator()
    (x, data), (y, _) = e.memory.allocate(128, "x", tracked=True), e.memory.allocate(128, tracked=True)
    text = compiled(double, pointer(float32), pointer(float32))
    with pytest.raises(emulator.UninitialisedRead, match="byte 124 of x"):
        e.memory.mark_written(x, 124)
        e.launch(text, None, 1, 32, [x, y])
    data.view(np.float32)[:] = 3.0
    e.memory.mark_written(x, 128)
    e.launch(text, None, 1, 32, [x, y])
    e.launch(text, None, 1, 32, [y, x])
    assert (data.view(np.float32) == 12.0).all()


# ---- counters and a user's own kernel -----------------------------------------------------------------------------------


@cuda.jit
def strided(x, y, step):
    """Reads x with a stride, and copies it through shared memory with another."""
    tile = cuda.shared.array(1024, float32)
    i = cuda.threadIdx.x
    tile[i * step] = x[i * step]
    cuda.syncthreads()
    if i % 2 == 0:
        y[i] = tile[i * step]
    else:
        y[i] = tile[i * step] + float32(1.0)


@pytest.mark.parametrize(("step", "sectors", "passes"), [(1, 4, 1), (2, 8, 2), (8, 32, 8), (32, 32, 32)])
def test_a_kernel_of_the_user_with_a_report(step, sectors, passes, capsys):
    x, y = np.arange(1024, dtype=np.float32), np.zeros(32, np.float32)
    report = emulator.run(strided, 1, 32, x, y, step, report=True)
    np.testing.assert_array_equal(y, x[::step][:32] + np.arange(32) % 2)
    line = strided.py_func.__code__.co_firstlineno + 5
    counts = report.by_line[__file__, line]
    assert (counts.sectors, counts.sectors_needed) == (sectors, 4)
    assert (counts.shared_passes, counts.shared_passes_needed) == (passes, 1)
    assert counts.global_read_bytes == 128
    assert report.total.global_written_bytes == 128
    assert report.by_class["memory"] > 0
    assert "what each line did" in capsys.readouterr().out


def test_divergent_branches_are_counted_a_warp():
    text = """
.version 8.0
.target sm_80
.address_size 64
.entry loops(.param .u64 x)
{
    .reg .b64 %a<3>; .reg .b32 %r<5>; .reg .pred %p;
    ld.param.u64 %a1, [x]; mov.u32 %r1, %tid.x; mad.wide.u32 %a1, %r1, 4, %a1;
    ld.global.u32 %r2, [%a1]; mov.u32 %r3, 0;
again:
    add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, %r2; @%p bra again;
    st.global.u32 [%a1], %r3;
    ret;
}
"""
    x = np.full(128, 3, np.uint32)
    x[70] = 9
    report = emulator.run_ptx(text, None, 1, 128, [x], count=True)
    assert (x == np.where(np.arange(128) == 70, 9, 3)).all()
    # warp 2 parts once, when all but one of its lanes leave the loop
    assert report.total.divergent_branches == 1
    # four warps go round three times, one of them six times more
    assert report.total.warp_instructions == 4 * (5 + 3 * 3 + 2) + 6 * 3
    assert report.total.lane_instructions == 128 * (5 + 3 * 3 + 2) + 6 * 3


def test_flops_and_vector_accesses():
    def axpy(x, y):
        thread = uint32(cuda.threadIdx.x)
        a = ptx.ld_global_v4_f32(ptx.address(x, uint32(thread * uint32(4))))
        b = ptx.ld_global_v4_f32(ptx.address(y, uint32(thread * uint32(4))))
        ptx.st_global_v4_f32(
            ptx.address(y, uint32(thread * uint32(4))),
            ptx.fma(a[0], float32(2.0), b[0]),
            ptx.fma(a[1], float32(2.0), b[1]),
            ptx.fma(a[2], float32(2.0), b[2]),
            ptx.fma(a[3], float32(2.0), b[3]),
        )

    x, y = np.ones(256, np.float32), np.ones(256, np.float32)
    report = emulator.run_ptx(compiled(axpy, *[pointer(float32)] * 2), None, 1, 64, [x, y], count=True)
    assert (y == 3).all()
    assert report.total.flops == 2 * 256
    assert report.total.sectors == report.total.sectors_needed == 3 * 256 * 4 // 32


# ---- device functions and printing ------------------------------------------------------------------------------------


def test_device_functions_are_called_and_print_prints(capsys):
    def waves(x):
        i = cuda.grid(1)
        # in float64 these need functions that the compiler does not inline
        x[i] = math.sin(x[i]) + math.pow(abs(x[i]), 1.5)
        if i == 37:
            print("thread", i, "of", cuda.blockDim.x)

    x = rng().standard_normal(100) * 1e6
    want = np.sin(x) + np.abs(x) ** 1.5
    run(waves, [pointer(float64)], 2, 50, [x])
    np.testing.assert_allclose(x, want, rtol=1e-14)
    assert capsys.readouterr().out == "thread 37 of 50\n"


def test_functions_call_functions_and_may_be_guarded():
    text = """
.version 8.0
.target sm_80
.address_size 64
.func (.param .b32 out) twice(.param .b32 in)
{
    .reg .b32 %r<3>;
    ld.param.u32 %r1, [in]; add.u32 %r1, %r1, %r1; st.param.b32 [out], %r1; ret;
}
.func (.param .b32 out) odd_even(.param .b32 in)
{
    .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u32 %r1, [in]; and.b32 %r2, %r1, 1; setp.eq.u32 %p, %r2, 0; @%p bra even;
    st.param.b32 [out], %r1; ret;
even:
    { .param .b32 a; st.param.b32 [a], %r1; .param .b32 b; call.uni (b), twice, (a); ld.param.b32 %r3, [b]; }
    st.param.b32 [out], %r3; ret;
}
.entry main(.param .u64 x)
{
    .reg .b64 %a<3>; .reg .b32 %r<5>; .reg .pred %p;
    ld.param.u64 %a1, [x]; mov.u32 %r1, %tid.x; mad.wide.u32 %a1, %r1, 4, %a1; setp.lt.u32 %p, %r1, 20; mov.u32 %r2, 7;
    { .param .b32 a; st.param.b32 [a], %r1; .param .b32 b; st.param.b32 [b], %r2;
      @%p call (b), odd_even, (a); ld.param.b32 %r2, [b]; }
    st.global.u32 [%a1], %r2; ret;
}
"""
    x = np.zeros(32, np.uint32)
    emulator.run_ptx(text, None, 1, 32, [x])
    n = np.arange(32)
    np.testing.assert_array_equal(x, np.where(n < 20, np.where(n % 2, n, 2 * n), 7))
    with pytest.raises(emulator.PtxError, match="calls itself"):
        emulator.run_ptx(text.replace("(b), twice", "(b), odd_even"), None, 1, 32, [x])
    with pytest.raises(emulator.PtxError, match="no function 'thrice'"):
        emulator.run_ptx(text.replace("(b), twice", "(b), thrice"), None, 1, 32, [x])


@cuda.jit(device=True)
def multiply_and_add(a, b):
    """Not inlined: Numba compiles it by itself."""
    return a * b + a


@cuda.jit
def uses_a_device_function(x, factor):
    """x[i] = x[i] * factor + x[i]"""
    i = cuda.grid(1)
    if i < x.size:
        x[i] = multiply_and_add(x[i], factor)


def test_a_kernel_of_the_user_that_calls_a_device_function():
    x = rng().standard_normal((5, 13)).astype(np.float32)
    flat, want = x.reshape(-1), x.reshape(-1) * np.float32(2.5) + x.reshape(-1)
    emulator.run(uses_a_device_function, 3, 32, flat, np.float32(2.5), arch="sm_90a")
    np.testing.assert_allclose(flat, want, rtol=1e-6)
    with pytest.raises(ValueError, match="arch: 'volta'"):
        emulator.run(uses_a_device_function, 3, 32, flat, np.float32(2.5), arch="volta")


# ---- waiting for other threads, indexed branches, traps -------------------------------------------------------------------

FLAG = """
.version 8.0
.target sm_80
.address_size 64
.entry flag(.param .u64 x)
{
    .reg .b64 %a<3>; .reg .b32 %r<5>; .reg .pred %p<3>;
    ld.param.u64 %a1, [x]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 bra set;
wait:
    ld.acquire.gpu.global.u32 %r2, [%a1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra wait;
    ld.global.u32 %r3, [%a1+4]; add.u32 %r3, %r3, 1; st.global.u32 [%a1+8], %r3;
    ret;
set:
    st.global.u32 [%a1+4], 41; st.release.gpu.global.u32 [%a1], 1;
    ret;
}
"""


def test_a_thread_may_wait_for_another_blocks_write():
    x = np.zeros(3, np.uint32)
    emulator.run_ptx(FLAG, None, 2, 1, [x])
    np.testing.assert_array_equal(x, [1, 41, 42])
    x[:] = 0
    e = emulator.Emulator(instruction_limit=10_000)
    with pytest.raises(emulator.Endless, match=r"flag, .*bra wait.*block \(0, 0, 0\)"):
        e.launch(FLAG, None, 1, 1, [x])


def test_an_indexed_branch_and_a_trap():
    text = """
.version 8.0
.target sm_80
.address_size 64
.entry choose(.param .u64 x)
{
    .reg .b64 %a<3>; .reg .b32 %r<5>; .reg .pred %p;
    ld.param.u64 %a1, [x]; mov.u32 %r1, %tid.x; mad.wide.u32 %a1, %r1, 4, %a1; rem.u32 %r2, %r1, 3;
    targets: .branchtargets first, second, third;
    brx.idx %r2, targets;
first: mov.u32 %r3, 10; bra join;
second: mov.u32 %r3, 20; bra join;
third: mov.u32 %r3, 30;
join:
    st.global.u32 [%a1], %r3; setp.gt.u32 %p, %r1, 40; @%p trap;
    ret;
}
"""
    x = np.zeros(64, np.uint32)
    emulator.run_ptx(text, None, 1, 40, [x])
    np.testing.assert_array_equal(x[:40], np.array([10, 20, 30])[np.arange(40) % 3])
    with pytest.raises(emulator.Trap, match=r"choose.*thread \(41, 0, 0\)"):
        emulator.run_ptx(text, None, 1, 64, [x])
