"""Tensor maps by value, bulk tensor copies, mbarriers and wgmma, as kernels use them: one tile of a product (sm_90a)."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32, uint64

import nbkernels as nbk
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.device import DeviceError, cuda_device, current
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.tensor_map import describes, tensor_map
from nbkernels.ptx import ld_shared, pointer, shared_address
from nbkernels.ptx.bulk import (
    bulk_commit,
    bulk_wait,
    prefetch_tensor_map,
    tensor_load_2d,
    tensor_map_address,
    tensor_store_2d,
)
from nbkernels.ptx.bulk import tensor_map as tensor_map_type
from nbkernels.ptx.mbarrier import (
    barrier_arrive,
    barrier_sync,
    fence_mbarrier_init,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbkernels.ptx.wgmma import (
    descriptor_address,
    descriptor_bits,
    fewer_registers,
    hold,
    more_registers,
    wgmma_commit,
    wgmma_fence,
    wgmma_update,
    wgmma_wait,
)

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
ROW = 128  # bytes of a row of a tile, the swizzle's width


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request):
    if request.param == "cuda":
        try:
            found = cuda_device()
        except DeviceError as error:
            pytest.skip(str(error))
        if not found.arch.startswith("sm_90"):
            pytest.skip(f"wgmma is an instruction of sm_90a, this GPU is {found.arch}")
        with nbk.device("cuda"):
            yield
    else:
        with nbk.device("emulator", arch="sm_90a"):
            yield


def product(name, columns, steps, a_place, b_transposed):
    """y [128 threads, columns / 2] = sums of a [64, steps · 128 bytes] · bᵀ; a ring of two stages filled by warp 4."""
    integers = name == "int8"
    count = columns // 2
    kind, letter = (int32, "r") if integers else (float32, "f")
    a_shared = a_place == "shared"
    update = wgmma_update(name, columns, a=a_place, b_transposed=b_transposed)
    keep = hold(count, letter)
    a_bits = descriptor_bits(16, 1024, 128)
    # along k: 8 rows of 128 bytes apart; transposed, k has the rows, and 64 columns lie beside each other
    b_bits = descriptor_bits(64 * ROW, 1024, 128) if b_transposed else a_bits
    b_step = 16 * ROW if b_transposed else 32
    a_bytes, b_bytes = 64 * ROW, columns * ROW
    stage_bytes = a_bytes + b_bytes
    groups = columns // 64 if b_transposed else 1

    @kernel(launch_bounds=(256, 1))  # setmaxnreg needs a known register count at entry
    def tile(a_map: tensor_map_type, b_map: tensor_map_type, y: pointer("int32" if integers else "float32")):
        t = uint32(cuda.threadIdx.x)
        base = (shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00)
        stages = base + uint32(1024)
        if t == uint32(0):
            for s in range(2):
                mbarrier_init(base + uint32(8 * s), uint32(1))
                mbarrier_init(base + uint32(16 + 8 * s), uint32(128))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t >= uint32(128):
            fewer_registers(40)
            if t == uint32(128):
                a_at, b_at = tensor_map_address(a_map), tensor_map_address(b_map)
                prefetch_tensor_map(a_at)
                for s in range(steps):
                    stage = uint32(s % 2)
                    full, free = base + stage * uint32(8), base + uint32(16) + stage * uint32(8)
                    mbarrier_wait(free, uint32((s // 2 + 1) % 2))
                    mbarrier_expect(full, uint32(stage_bytes))
                    to = stages + stage * uint32(stage_bytes)
                    tensor_load_2d(to, a_at, uint32(s * (128 if integers else 64)), uint32(0), full)
                    for g in range(groups):
                        if b_transposed:
                            tensor_load_2d(
                                to + uint32(a_bytes + g * 64 * ROW), b_at, uint32(g * 64), uint32(s * 64), full
                            )
                        else:
                            tensor_load_2d(
                                to + uint32(a_bytes), b_at, uint32(s * (128 if integers else 64)), uint32(0), full
                            )
        else:
            more_registers(232)
            sums = cuda.local.array(count, kind)
            words = cuda.local.array(4, uint32)
            row = (t >> uint32(5)) * uint32(16) + ((t & uint32(31)) >> uint32(2))
            for s in range(steps):
                stage = uint32(s % 2)
                mbarrier_wait(base + stage * uint32(8), uint32(s // 2 % 2))
                a = stages + stage * uint32(stage_bytes)
                b = a + uint32(a_bytes)
                for k in range(4):
                    b_at = descriptor_address(b + uint32(k * b_step)) + uint64(b_bits)
                    more = uint32(1 if s + k else 0)
                    if not a_shared:
                        for w in range(4):
                            r = row + uint32(8 * (w % 2))
                            place = a + r * uint32(ROW) + uint32(32 * k + 16 * (w // 2)) + (t & uint32(3)) * uint32(4)
                            words[w] = ld_shared(place ^ ((r & uint32(7)) << uint32(4)))
                    keep(sums, 0)
                    wgmma_fence()
                    if a_shared:
                        update(sums, 0, descriptor_address(a + uint32(32 * k)) + uint64(a_bits), b_at, more)
                    else:
                        update(sums, 0, words, 0, b_at, more)
                    wgmma_commit()
                    wgmma_wait(0)
                    keep(sums, 0)
                mbarrier_arrive(base + uint32(16) + stage * uint32(8))
            for j in range(count):
                y[t * uint32(count) + uint32(j)] = sums[j]

    return tile


def arranged(fragments, columns):
    """The registers of 128 threads [128, columns / 2] -> the tile [64, columns]."""
    t, j = np.meshgrid(np.arange(128), np.arange(columns // 2), indexing="ij")
    rows = t // 32 * 16 + t % 32 // 4 + j % 4 // 2 * 8
    tile = np.empty((64, columns), fragments.dtype)
    tile[rows, j // 4 * 8 + t % 4 * 2 + j % 2] = fragments
    return tile


CASES = [
    ("bfloat16", 8, "shared", False),
    ("bfloat16", 128, "shared", True),
    ("float16", 64, "registers", False),
    ("bfloat16", 256, "registers", True),
    ("int8", 128, "shared", False),
    ("int8", 32, "registers", False),
]


@pytest.mark.parametrize(("name", "columns", "a_place", "b_transposed"), CASES)
def test_a_tile(hopper, name, columns, a_place, b_transposed):
    rng = np.random.default_rng(7)
    steps, width = 3, ROW // (1 if name == "int8" else 2)
    if name == "int8":
        a, b = (rng.integers(-128, 128, (rows, steps * width), np.int8) for rows in (64, columns))
    else:
        a, b = (rng.standard_normal((rows, steps * width)).astype(DTYPES[name]) for rows in (64, columns))
    stored = np.ascontiguousarray(b.T) if b_transposed else b
    on_device = [memory.to_device(v) for v in (a, stored)]
    y = memory.empty((128, columns // 2), np.dtype(np.int32 if name == "int8" else np.float32))
    maps = (
        tensor_map(on_device[0], (64, width)),
        tensor_map(on_device[1], (64, 64) if b_transposed else (columns, width)),
    )
    shared = 2048 + 2 * (64 + columns) * ROW
    plan = Plan(product, (name, columns, steps, a_place, b_transposed), (1, 1, 1), (256, 1, 1), shared)
    launch(plan, (*maps, y.pointer), current())
    found = arranged(memory.to_host(y), columns)
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    if name == "int8":
        np.testing.assert_array_equal(found, wanted)
    else:
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


def moved(dtype, across, down):
    """y = x box by box through shared memory; two named barriers between the threads that load and the one that stores."""

    @kernel(launch_bounds=64)
    def move(x: tensor_map_type, y: tensor_map_type):
        t = uint32(cuda.threadIdx.x)
        base = (shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00)
        box = base + uint32(1024)
        at_x, at_y = uint32(cuda.blockIdx.x) * uint32(across), uint32(cuda.blockIdx.y) * uint32(down)
        if t == uint32(0):
            mbarrier_init(base, uint32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t < uint32(32):
            if t == uint32(0):
                mbarrier_expect(base, uint32(across * down * 4))
                tensor_load_2d(box, tensor_map_address(x), at_x, at_y, base)
            mbarrier_wait(base, uint32(0))
            fence_proxy_async()
            barrier_arrive(uint32(1), uint32(64))
        else:
            barrier_sync(uint32(1), uint32(64))
            if t == uint32(32):
                tensor_store_2d(tensor_map_address(y), at_x, at_y, box)
                bulk_commit()
                bulk_wait(0)

    return move


def test_boxes_there_and_back(hopper):
    x = np.random.default_rng(1).standard_normal((70, 100)).astype(np.float32)
    y = np.full((72, 112), 7, np.float32)
    source, target = memory.to_device(x), memory.to_device(y)
    plan = Plan(moved, ("float32", 32, 16), (4, 5, 1), (64, 1, 1), 2048 + 32 * 16 * 4)
    launch(plan, (tensor_map(source, (16, 32)), tensor_map(target[:70, :104], (16, 32))), current())
    expected = y.copy()
    expected[:70, :104] = 0
    expected[:70, :100] = x
    np.testing.assert_array_equal(memory.to_host(target), expected)


def late(dtype):
    """y = x through shared memory; the copy is asked for after its waiter has come."""

    @kernel(launch_bounds=64)
    def bring(x: tensor_map_type, y: pointer(dtype)):
        t = uint32(cuda.threadIdx.x)
        base = (shared_address(cuda.shared.array(0, uint8)) + uint32(1023)) & uint32(0xFFFFFC00)
        box, full, go = base + uint32(1024), base, base + uint32(8)
        if t == uint32(0):
            mbarrier_init(full, uint32(1))
            mbarrier_init(go, uint32(32))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t < uint32(32):
            mbarrier_arrive(go)
            mbarrier_wait(full, uint32(0))
            y[t] = ld_shared(box + t * uint32(4))
        elif t == uint32(32):
            mbarrier_wait(go, uint32(0))
            mbarrier_expect(full, uint32(128))
            tensor_load_2d(box, tensor_map_address(x), uint32(0), uint32(0), full)

    return bring


def test_a_copy_that_is_waited_for_before_it_is_asked_for(hopper):
    x = np.arange(32, dtype=np.int32)[None]
    source, y = memory.to_device(x), memory.empty((32,), np.dtype(np.int32))
    plan = Plan(late, ("int32",), (1, 1, 1), (64, 1, 1), 2048 + 128)
    launch(plan, (tensor_map(source, (1, 32)), y.pointer), current())
    np.testing.assert_array_equal(memory.to_host(y), x[0])


def test_what_no_map_describes(hopper):
    x = memory.to_device(np.zeros((8, 100), np.float16))
    assert not describes(x)  # rows of 200 bytes
    assert not describes(memory.to_device(np.zeros((8, 64), np.float32))[:, 1:])
    assert describes(memory.to_device(np.zeros((8, 64), np.float32)))
    assert not describes(memory.to_device(np.zeros((8, 64), np.float32))[:, :62])
    with pytest.raises((ValueError, DeviceError)):
        tensor_map(x, (8, 64))
    with pytest.raises(ValueError, match="1 to 256"):
        tensor_map(memory.to_device(np.zeros((300, 64), np.float16)), (257, 64))
