"""Clusters (sm_90): blocks that run at the same time on neighbouring multiprocessors and reach each other's shared memory.

A kernel with ``kernel(launch_bounds=…, cluster=N)`` runs in clusters of N blocks along x. A thread maps the address of its own
block's variable to the same variable of another block, by that block's rank, and loads or stores there:

    block 0   |slot 0|slot 1|slot 2|slot 3|        slot r of every block is
                 ^      ^      ^      ^            what block r has sent to it
    rank         0      1      2      3

A block may be reached from when it has started until it exits, so a kernel arrives at the cluster's barrier at its entry and
waits before its first remote access, and meets the others once more behind the last one:

    cluster_arrive()                            # I run
    … what needs no other block …
    cluster_wait()                              # all run
    st_cluster_f32(map_shared(slot, rank), x)
    cluster_arrive()
    cluster_wait()                              # all have stored: read what came here
    … and if remote accesses follow the last wait: arrive and wait again before the end
"""

from numba import float32, uint32
from numba.core import types

from nbkernels.ptx.asm import instruction

void = types.void


@instruction(uint32(), "mov.u32 $0, %cluster_ctarank;")
def cluster_rank():
    """This block's number in its cluster: blockIdx.x modulo the cluster's size."""


@instruction(void(), "barrier.cluster.arrive.release.aligned;", effect="converges")
def cluster_arrive():
    """Arrive at the cluster's barrier. All threads of a warp together; ``cluster_wait`` follows before the next arrival."""


@instruction(void(), "barrier.cluster.wait.acquire.aligned;", effect="converges")
def cluster_wait():
    """Wait until all threads of the cluster have arrived; what they wrote before they arrived is seen after it."""


@instruction(uint32(uint32, uint32), "mapa.shared::cluster.u32 $0, $1, $2;")
def map_shared(address, rank):
    """The address, for the functions below, of what lies at a shared address in the block of this rank (also the own one)."""


@instruction(void(uint32, float32), "st.shared::cluster.f32 [$0], $1;", effect="writes")
def st_cluster_f32(address, value):
    """One float32 into the shared memory of a block of the cluster."""


@instruction(void(uint32, uint32), "st.shared::cluster.b32 [$0], $1;", effect="writes")
def st_cluster(address, word):
    """Four bytes into the shared memory of a block of the cluster."""


@instruction(float32(uint32), "ld.shared::cluster.f32 $0, [$1];", effect="reads")
def ld_cluster_f32(address):
    """One float32 of the shared memory of a block of the cluster."""
