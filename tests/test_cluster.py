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


# ---- single instructions ----------------------------------------------------------------------------------------------

REGISTERS = ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def run(body, grid=2, block=32, cluster="2, 1, 1", words=64, **options):
    """Run a body over clusters. %r0: the thread, %r1: the rank, %r2: the shared ``words``; returns y, or a report."""
    text = f"""
.version 8.5
.target sm_90a
.address_size 64
.entry program(.param .u64 y) .explicitcluster .reqnctapercluster {cluster}
{{
    .reg .b32 %r<20>; .reg .b64 %a<6>; .reg .pred %p<6>;
    .shared .align 16 .b8 words[256];
    ld.param.u64 %a0, [y]; mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, words;
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.u32 %r3, %r3, %r4, %r0; mad.wide.u32 %a1, %r3, 4, %a0;
    setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r0, 0; xor.b32 %r5, %r1, 1;
    {body}
    ret;
}}
"""
    y = np.zeros(words, np.uint32)
    report = emulator.run_ptx(text, None, grid, block, [y], **options)
    return y if report is None else report


def test_special_registers_of_clusters():
    names = ("%cluster_ctarank", "%cluster_nctarank", *(f"%{n}.{axis}" for n in REGISTERS for axis in "xyz"))
    stores = "\n".join(
        f"mov.u32 %r6, {name}; st.global.u32 [%a1+{4 * number}], %r6;" for number, name in enumerate(names)
    )
    linear = (
        "mov.u32 %r6, %ctaid.y; mad.lo.u32 %r6, %r6, 4, %ctaid.x; mad.lo.u32 %r6, %r6, 80, 0; cvt.u64.u32 %a1, %r6;"
    )
    y = run(f"{linear} add.u64 %a1, %a1, %a0; @!%p2 ret; {stores}", (4, 6), 32, "2, 3, 1", 4 * 6 * 20, checks=False)
    for block, found in enumerate(y.reshape(24, 20)):
        x, row = block % 4, block // 4
        position = [x % 2, row % 3, 0, 2, 3, 1, x // 2, row // 3, 0, 2, 2, 1]
        assert list(found[:14]) == [x % 2 + 2 * (row % 3), 6, *position]


CLEAR = "mov.u32 %r6, 0; @%p2 st.shared.u32 [%r2], %r6;"
NEIGHBOUR = "mapa.shared::cluster.u32 %r7, %r2, %r5;"


def test_atomics_and_generic_addresses_reach_other_blocks():
    y = run(
        f"""{CLEAR} {BARRIER} mapa.shared::cluster.u32 %r7, %r2, 0;
        atom.shared::cluster.add.u32 %r8, [%r7], 1; red.shared::cluster.add.u32 [%r7], 2;
        {BARRIER} ld.shared::cluster.u32 %r9, [%r7]; st.global.u32 [%a1], %r9; {BARRIER}"""
    )
    np.testing.assert_array_equal(y, 64 * 3)
    y = run(
        f"""{BARRIER} cvta.shared.u64 %a2, words; mapa.u64 %a2, %a2, %r5; mad.wide.u32 %a2, %r0, 4, %a2; st.u32 [%a2], %r3;
        getctarank.u64 %r8, %a2; {BARRIER} mad.lo.u32 %r2, %r0, 4, %r2; ld.shared::cluster.u32 %r9, [%r2];
        mad.lo.u32 %r9, %r8, 100, %r9; st.global.u32 [%a1], %r9;"""
    )
    np.testing.assert_array_equal(y, np.r_[100 + 32 + np.arange(32), np.arange(32)])


def test_rounds_with_arrivals_and_waits_apart():
    """A token goes back and forth; a block arrives, does something else, and waits."""
    step = f"""@%p2 st.shared::cluster.u32 [%r7], %r8; barrier.cluster.arrive.release; add.u32 %r10, %r10, 1;
    barrier.cluster.wait.acquire; ld.shared.u32 %r8, [%r2]; add.u32 %r8, %r8, 1; {BARRIER}"""
    y = run(f"mov.u32 %r10, 0; mov.u32 %r8, %r1; {NEIGHBOUR} {BARRIER} {step * 3} st.global.u32 [%a1], %r8;")
    np.testing.assert_array_equal(y, np.repeat([4, 3], 32))


def test_relaxed_arrivals_show_that_blocks_run_and_no_more():
    started = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    send = f"{NEIGHBOUR} @%p2 st.shared::cluster.u32 [%r7], %r3;"
    read = "ld.shared.u32 %r8, [%r2]; st.global.u32 [%a1], %r8;"
    np.testing.assert_array_equal(run(f"{started} {send} {BARRIER} {read}"), np.repeat([32, 0], 32))
    with pytest.raises(emulator.RaceError, match=r"reads 4 bytes at shared address 0x\w+ of block \(0, 0, 0\)"):
        run(f"{started} {send} {started} {read}")


WAITS = r"(?s)block \({}, 0, 0\): threads 0-31 wait at {}.*block \(1, 0, 0\): threads 0-31 {}"
NOBODY = WAITS.format(0, "the cluster barrier", "have not arrived")
NOBODY_AT_BARRIER = WAITS.format(0, "barrier 0 ", "wait at the cluster")


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("@%p1 barrier.cluster.arrive; barrier.cluster.wait;", emulator.Deadlock, NOBODY),
        ("@%p1 bar.sync 0, 64; " + BARRIER, emulator.Deadlock, NOBODY_AT_BARRIER),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", emulator.LaunchError, "a second time before it has waited"),
        ("mapa.shared::cluster.u32 %r7, %r2, 2;", emulator.MemoryFault, "rank 2 in a cluster of 2 blocks"),
        (
            f"{BARRIER} add.u32 %r7, %r2, 0x3000000; ld.shared::cluster.u32 %r8, [%r7];",
            emulator.MemoryFault,
            "rank 2 in a cluster of 2 blocks",
        ),
        (
            f"{BARRIER} {NEIGHBOUR} ld.shared::cluster.u32 %r8, [%r7+256];",
            emulator.MemoryFault,
            "0 bytes behind its end",
        ),
        (f"{BARRIER} {NEIGHBOUR} ld.shared::cluster.u32 %r8, [%r7+2];", emulator.MemoryFault, "misaligned"),
        (
            f"{BARRIER} {NEIGHBOUR} ld.shared.u32 %r8, [%r7];",
            emulator.MemoryFault,
            "only shared::cluster accesses take",
        ),
        (
            f"{BARRIER} {NEIGHBOUR} ld.shared::cluster.u32 %r8, [%r7]; {BARRIER}",
            emulator.UninitialisedRead,
            r"block \(0, 0, 0\), thread .* of block \(1, 0, 0\), which nothing has written",
        ),
        (
            f"{BARRIER} {NEIGHBOUR} @!%p1 ret; st.shared::cluster.u32 [%r7], %r1;",
            emulator.MemoryFault,
            r"block \(1, 0, 0\) of its cluster, which has exited",
        ),
        (
            f"{BARRIER} {NEIGHBOUR} @%p1 st.shared::cluster.u32 [%r7], %r1;",
            emulator.RaceError,
            "nothing orders this before that block's exit",
        ),
        # a remote read, and a write by the block whose memory it is
        (
            f"{CLEAR} {BARRIER} {NEIGHBOUR} @%p1 ld.shared::cluster.u32 %r8, [%r7]; @!%p1 st.shared.u32 [%r2], %r1;",
            emulator.RaceError,
            r"they were read by block \(0, 0, 0\)",
        ),
        # the barrier of a block orders its own threads only
        (
            f"{BARRIER} {NEIGHBOUR} @%p2 st.shared::cluster.u32 [%r7], %r1; bar.sync 0; ld.shared.u32 %r8, [%r2];",
            emulator.RaceError,
            "they were written by block",
        ),
    ],
)
def test_faults_of_clusters(body, error, message):
    with pytest.raises(error, match=message):
        run(body)


def test_a_grid_of_broken_clusters():
    with pytest.raises(emulator.LaunchError, match="no multiple of its clusters"):
        run(BARRIER, 3)
    with pytest.raises(emulator.LaunchError, match="wanted 1 to 8"):
        run(BARRIER, 16, cluster="16, 1, 1")


def test_counters_take_remote_accesses_for_shared_ones():
    report = run(
        f"{BARRIER} mad.lo.u32 %r2, %r0, 4, %r2; {NEIGHBOUR} st.shared::cluster.u32 [%r7], %r3; {BARRIER}", count=True
    )
    assert (report.total.shared_passes, report.total.shared_passes_needed) == (2, 2)
