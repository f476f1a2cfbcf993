"""Registers, spills and occupancy of kernels, from the assembler: no GPU is needed."""

import ml_dtypes
import numpy as np
import pytest

from nbkernels.kernels import layer_norm, matmul_stream, matmul_wgmma, quantize, rms_norm, softmax
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.profiling.resources import Resources, find_ptxas, occupancy, resources

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
COLUMNS = (128, 576, 1000, 1024, 4096, 8191, 16384, 32768, 131072)
PLANS = {
    "softmax": lambda columns, dtype, walk, clusters: softmax.plan(4096, columns, dtype, walk, clusters),
    "rms_norm": lambda columns, dtype, walk, clusters: rms_norm.plan(
        4096, columns, dtype, walk, dtype, False, clusters
    ),
    "rms_norm, residual": lambda columns, dtype, walk, clusters: rms_norm.plan(
        4096, columns, dtype, walk, dtype, True, clusters
    ),
    "rms_norm, int8": lambda columns, dtype, walk, clusters: rms_norm.plan(
        4096, columns, dtype, walk, dtype, False, clusters, True
    ),
    "rms_norm, residual, int8": lambda columns, dtype, walk, clusters: rms_norm.plan(
        4096, columns, dtype, walk, dtype, True, clusters, True
    ),
    "layer_norm, residual, int8": lambda columns, dtype, walk, clusters: layer_norm.plan(
        4096, columns, dtype, walk, dtype, True, True, True, clusters, True
    ),
    "quantize_int8": lambda columns, dtype, walk, clusters: quantize.plan(4096, columns, 1, dtype, walk, clusters),
    "layer_norm": lambda columns, dtype, walk, clusters: layer_norm.plan(
        4096, columns, dtype, walk, dtype, True, True, False, clusters
    ),
    "layer_norm, residual": lambda columns, dtype, walk, clusters: layer_norm.plan(
        4096, columns, dtype, walk, dtype, True, True, True, clusters
    ),
}
# long rows as an H200's multiprocessors stream them
STREAMED = {
    "softmax": lambda columns, dtype, walk: softmax.plan(4096, columns, dtype, walk, True, 132),
    "rms_norm": lambda columns, dtype, walk: rms_norm.plan(4096, columns, dtype, walk, dtype, False, True, False, 132),
    "rms_norm, residual": lambda columns, dtype, walk: rms_norm.plan(
        4096, columns, dtype, walk, dtype, True, True, False, 132
    ),
    "layer_norm": lambda columns, dtype, walk: layer_norm.plan(
        4096, columns, dtype, walk, dtype, True, True, False, True, False, 132
    ),
    "layer_norm, residual": lambda columns, dtype, walk: layer_norm.plan(
        4096, columns, dtype, walk, dtype, True, True, True, True, False, 132
    ),
}
# bytes stored and loaded a thread: norms in int8 go over their registers once more, and a few words are put away in some of the
# instances that have no register to spare, two arrays' on sm_80 above all
SPILLED = {"rms_norm, int8": 16, "rms_norm, residual, int8": 48, "layer_norm, residual, int8": 136}
# of streamed rows that begin anywhere: kept vectors' registers before the loop, and a few words in it
SPILLED_ODD = {"layer_norm": 44, "layer_norm, residual": 88}


@pytest.fixture(scope="module", autouse=True)
def assembler():
    try:
        find_ptxas()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("operation", PLANS)
def test_rows_spill_nothing(operation, dtype, capsys):
    """The instances that the benchmark's row lengths take, as both architectures; ``pytest -s`` shows the list.

    Nothing, or what ``SPILLED`` says.
    """
    spilling = []
    for columns in COLUMNS:
        walk = "staged" if columns % (16 // dtype.itemsize) else "wide"
        for arch in ("sm_80", "sm_90a"):
            plan = PLANS[operation](columns, dtype, walk, arch == "sm_90a")
            used = resources(plan.factory, plan.constants, arch)
            threads = plan.block[0]
            blocks, limit = occupancy(used, threads, plan.shared_bytes, arch)
            print(
                f"{operation} {dtype} {columns} {arch}: {used.registers} registers, {blocks} blocks of {threads} threads "
                f"({blocks * threads / 2048:.0%}, limited by {limit})"
            )
            assert blocks >= 1
            if used.spill_bytes > SPILLED.get(operation, 0) or (used.stack_bytes and operation not in SPILLED):
                spilling.append((columns, arch, used))
    assert not spilling


PRODUCTS = [
    # weight, group_size, tile_m, tile_n, weight_first, shared, scale_boxes
    ("rows", 0, 64, 128, True, True, False),
    ("rows", 0, 256, 128, True, False, False),
    ("groups", 32, 256, 128, True, True, True),
    ("groups", 32, 256, 128, True, True, False),
    ("dense", 0, 128, 256, False, True, False),
    ("dense", 0, 128, 128, True, True, False),
]


@pytest.mark.parametrize("weight, group_size, tile_m, tile_n, weight_first, shared, scale_boxes", PRODUCTS)
def test_wgmma_products_spill_nothing(weight, group_size, tile_m, tile_n, weight_first, shared, scale_boxes):
    stages = matmul_wgmma.most_stages(weight, tile_m, tile_n, scale_boxes)
    epilogue = Epilogue(weight == "rows", True, "gelu", True)
    constants = (BF16, weight, group_size, tile_m, tile_n, stages, False, weight_first, shared, scale_boxes, epilogue)
    used = resources(matmul_wgmma.matmul_wgmma_kernel, constants, "sm_90a")
    assert stages >= 3 and used.spill_bytes == 0 and used.stack_bytes == 0 and not used.warnings


@pytest.mark.parametrize("rows", [1, 16])
def test_streamed_products_of_groups_spill_nothing(rows):
    chosen = matmul_stream.plan(rows, 4096, 4096, BF16, "groups", 32, Epilogue(), 132, scale_maps=True)
    used = resources(chosen.factory, chosen.constants, "sm_90a")
    assert used.spill_bytes == 0 and used.stack_bytes == 0


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("operation", STREAMED)
@pytest.mark.parametrize("columns", [4097, 8191, 16383, 32768])
def test_streamed_rows_spill_nothing_and_are_all_resident(columns, operation, dtype):
    """A persistent grid's blocks are on the GPU at the same time, with their rings. Spills: what ``SPILLED_ODD`` says."""
    plan = STREAMED[operation](columns, dtype, "staged" if columns % 2 else "wide")
    if not plan.factory.__name__.startswith("streamed"):
        pytest.skip("held or tiled")
    used = resources(plan.factory, plan.constants, "sm_90a")
    kept = plan.constants[4]
    assert occupancy(used, plan.block[0], plan.shared_bytes, "sm_90a")[0] >= kept
    assert plan.grid[0] <= 132 * kept
    assert used.spill_bytes <= SPILLED_ODD.get(operation, 0), used
    assert not used.stack_bytes or operation in SPILLED_ODD


def test_occupancy_by_hand():
    def blocks(registers, threads, shared=0, arch="sm_90a"):
        return occupancy(Resources(registers, 0, 0, 0, ()), threads, shared, arch)

    assert blocks(32, 1024) == (2, "threads")
    assert blocks(33, 1024) == (1, "registers")  # 40 with the rounding to 256 a warp
    assert blocks(32, 32) == (32, "blocks")
    assert blocks(16, 128, 113 * 1024) == (2, "shared memory")
    assert blocks(16, 128, 113 * 1024, "sm_80") == (1, "shared memory")


def test_a_spill_is_seen():
    # 1024 threads have 64 registers each, and the row alone takes 64
    used = resources(softmax.softmax_kernel, (F32, "wide", 1024, 16, 1, 1, 1), "sm_80")
    assert used.spill_bytes > 0
