"""The values of special registers: %tid, %laneid, %nctaid and so on."""

import numpy as np

WARP = 32
# shared addresses below this are never handed out (the hardware keeps 1 KB a block for itself), so that 0 is a fault
SHARED_START = 1024


def make_special(m, instruction, name):
    """[lanes] of a special register; zeros for those that depend on the block, which ``Machine`` fills for each batch."""
    base, _, axis = name.partition(".")
    axis = "xyz".index(axis) if axis in ("x", "y", "z") else None
    thread = m.lane_thread
    if axis is not None:
        x, y, _ = m.block
        if base == "%tid":
            return np.array((thread % x, thread // x % y, thread // (x * y))[axis], np.uint32)
        if base == "%ntid":
            return m.constant(m.block[axis], np.uint32)
        if base == "%ctaid":
            return np.zeros(m.lanes, np.uint32)
        if base in ("%nctaid", "%nclusterid", "%clusterid"):
            return np.zeros(m.lanes, np.uint32)
        if base == "%cluster_ctaid":
            width, height, _ = m.cluster
            rank = m.lane_rank
            return np.array((rank % width, rank // width % height, rank // (width * height))[axis], np.uint32)
        if base == "%cluster_nctaid":
            return m.constant(m.cluster[axis], np.uint32)
    lane = thread % WARP
    one = np.uint64(1)
    eq = (one << lane.astype(np.uint64)).astype(np.uint64)
    values = {
        "%laneid": lane,
        "%warpid": thread // WARP,
        "%nwarpid": np.full(m.lanes, m.padded // WARP),
        "WARP_SZ": np.full(m.lanes, WARP),
        "%smid": m.lane_block,
        "%nsmid": np.full(m.lanes, 132),
        "%gridid": np.zeros(m.lanes),
        "%lanemask_eq": eq,
        "%lanemask_lt": eq - one,
        "%lanemask_le": eq + (eq - one),
        "%lanemask_gt": np.uint64(0xFFFFFFFF) & ~(eq + (eq - one)),
        "%lanemask_ge": np.uint64(0xFFFFFFFF) & ~(eq - one),
        "%cluster_ctarank": m.lane_rank,
        "%cluster_nctarank": np.full(m.lanes, m.cluster_blocks),
        "%is_explicit_cluster": np.full(m.lanes, "reqnctapercluster" in m.function.directives),
        "%dynamic_smem_size": np.full(m.lanes, m.dynamic_shared),
        "%total_smem_size": np.full(m.lanes, m.shared_end - SHARED_START),
        "%clock": np.zeros(m.lanes),
        "%clock_hi": np.zeros(m.lanes),
        "%clock64": np.zeros(m.lanes),
        "%globaltimer": np.zeros(m.lanes),
    }
    if name not in values:
        raise m.unknown(instruction, f"special register or name {name}")
    wide = name in ("%clock64", "%globaltimer", "%gridid")
    dtype = bool if name == "%is_explicit_cluster" else np.uint64 if wide else np.uint32
    return np.array(values[name]).astype(dtype)
