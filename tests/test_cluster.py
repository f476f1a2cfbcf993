"""Clusters: blocks that write to each other's shared memory (sm_90), as kernels use them and in the emulator."""

import numpy as np
import pytest
from numba import cuda, float32, uint32
from test_wgmma import hopper  # noqa: F401  a fixture

import nbkernels as nbk
from nbkernels import emulator
from nbkernels.launch import memory
from nbkernels.launch.compile import cubin, kernel, ptx
from nbkernels.launch.device import current
from nbkernels.launch.launcher import Plan, launch
from nbkernels.ptx import ld_shared_f32, pointer, shared_address
from nbkernels.ptx.cluster import (
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    ld_cluster_f32,
    map_shared,
    st_cluster,
    st_cluster_f32,
)

THREADS = 64


def cluster_sum(blocks, stores, first_barrier, last_barrier):
    """y[block, t] = sum of x[b, t] over the blocks b of its cluster: each block stores its row in all, or loads it from all."""

    @kernel(launch_bounds=THREADS, cluster=blocks)
    def total(x: pointer("float32"), y: pointer("float32")):
        t = uint32(cuda.threadIdx.x)
        i = uint32(cuda.blockIdx.x) * uint32(THREADS) + t
        rank = cluster_rank()
        slots = shared_address(cuda.shared.array((blocks, THREADS), float32))
        if first_barrier:
            cluster_arrive()
        value = x[i]
        if first_barrier:
            cluster_wait()
        own = slots + (rank * uint32(THREADS) + t) * uint32(4)
        if stores:
            for r in range(blocks):
                st_cluster_f32(map_shared(own, uint32(r)), value)
        else:
            st_cluster_f32(own, value)
        if last_barrier:
            cluster_arrive()
            cluster_wait()
        else:
            cuda.syncthreads()
        sum_ = float32(0)
        for r in range(blocks):
            slot = slots + (uint32(r * THREADS) + t) * uint32(4)
            sum_ += ld_shared_f32(slot) if stores else ld_cluster_f32(map_shared(slot, uint32(r)))
        y[i] = sum_
        if not stores:
            cluster_arrive()
            cluster_wait()

    return total


def run_sum(blocks=4, clusters=2, stores=True, first_barrier=True, last_barrier=True, grid=None):
    x = np.random.default_rng(5).standard_normal((blocks * clusters, THREADS)).astype(np.float32)
    source, y = memory.to_device(x), memory.to_device(np.zeros_like(x))
    grid = (grid or blocks * clusters, 1, 1)
    plan = Plan(cluster_sum, (blocks, stores, first_barrier, last_barrier), grid, (THREADS, 1, 1), 0)
    launch(plan, (source.pointer, y.pointer), current())
    sums = x.reshape(clusters, blocks, THREADS).astype(np.float64).sum(axis=1)
    expected = np.repeat(sums, blocks, axis=0)
    # four float32 are added in one order: at most three roundings of sums below 16
    np.testing.assert_allclose(memory.to_host(y), expected, atol=8 * blocks * 2**-24, rtol=0)


# 100 clusters are more than the emulator runs at once
@pytest.mark.parametrize(("blocks", "clusters"), [(4, 2), (2, 3), (8, 1), (3, 100)])
@pytest.mark.parametrize("stores", [True, False])
def test_a_sum_over_a_cluster(hopper, blocks, clusters, stores):  # noqa: F811
    run_sum(blocks, clusters, stores)


def test_planted_faults():
    with nbk.device("emulator", arch="sm_90a"):
        with pytest.raises(
            emulator.RaceError, match=r"reads 4 bytes at shared address .*written by block \(\d, 0, 0\)"
        ):
            run_sum(last_barrier=False)
        with pytest.raises(emulator.RaceError, match=r"nothing orders this behind that block's start"):
            run_sum(first_barrier=False)
        with pytest.raises(emulator.LaunchError, match=r"grid \(6, 1, 1\) is no multiple of its clusters"):
            run_sum(grid=6)


def test_a_cluster_is_named_in_the_ptx():
    constants = (4, True, True, True)
    assert ".reqnctapercluster 4, 1, 1" in ptx(cluster_sum, constants, "sm_90a")
    assert cubin(cluster_sum, constants, "sm_90a")[1] == "total"
    with pytest.raises(ValueError, match="from sm_90 on"):
        ptx(cluster_sum, constants, "sm_80")
    with pytest.raises(ValueError, match="wanted 1 to 8"):
        kernel(launch_bounds=32, cluster=9)
