"""The report of a deadlock."""

import numpy as np


def describe_deadlock(m):
    """Who waits for what, a line a block and place."""
    lines = [f"{m.name}: deadlock, no thread can go on"]
    for number, parked in m.barrier_parked.items():
        instruction = m.block_instruction[number]
        lanes = np.flatnonzero(parked)
        for block in np.unique(m.lane_block[lanes])[:4]:
            mine = lanes[m.lane_block[lanes] == block]
            barrier = int(m.at_barrier[mine[0]])
            lines.append(
                f"  block {m.block_name(block)}: {_ranges(m.lane_thread[mine])} wait at barrier {barrier} "
                f"({_place(instruction)}), {int(m.arrived[block, barrier])} of "
                f"{int(m.expected[block, barrier])} threads have come"
            )
    for number, waiting in m.warp_waiting.items():
        instruction = m.block_instruction[number]
        lanes = np.flatnonzero(waiting)
        for block in np.unique(m.lane_block[lanes])[:4]:
            mine = lanes[m.lane_block[lanes] == block]
            lines.append(
                f"  block {m.block_name(block)}: {_ranges(m.lane_thread[mine])} wait for other lanes of their "
                f"warp ({_place(instruction)})"
            )
    for number, parked in m.cluster_parked.items():
        lanes = np.flatnonzero(parked)
        for cluster in np.unique(m.lane_cluster[lanes])[:4]:
            for block in np.unique(m.lane_block[lanes[m.lane_cluster[lanes] == cluster]])[:4]:
                mine = lanes[m.lane_block[lanes] == block]
                lines.append(
                    f"  block {m.block_name(block)}: {_ranges(m.lane_thread[mine])} wait at the cluster barrier "
                    f"({_place(m.block_instruction[number])})"
                )
            missing = np.flatnonzero(m.live & ~m.cluster_arrived & (m.lane_cluster == cluster))
            for block in np.unique(m.lane_block[missing]):
                mine = missing[m.lane_block[missing] == block]
                lines.append(
                    f"  block {m.block_name(block)}: {_ranges(m.lane_thread[mine])} have not arrived at the cluster barrier"
                )
    for (block, address), waiting in m.parked.items():
        barrier = m.mbarriers[block, address]
        for number, group in waiting:
            lines.append(
                f"  block {m.block_name(block)}: {_ranges(m.lane_thread[group.lanes])} wait for the mbarrier at "
                f"shared address {address:#x} ({_place(m.block_instruction[number])}): its phase {barrier.phase} "
                f"lacks {barrier.pending} of {barrier.expected} arrivals and {barrier.tx} bytes"
            )
    return "\n".join(lines)


def _place(instruction):
    source = f"{instruction.source[0]}:{instruction.source[1]}, " if instruction.source else ""
    return f"{source}PTX line {instruction.ptx_line}: {instruction.text}"


def _ranges(threads):
    """Thread numbers as text, runs shortened: "threads 0-31, 64"."""
    threads = sorted(int(t) for t in threads)
    runs = []
    for thread in threads:
        if runs and thread == runs[-1][1] + 1:
            runs[-1][1] = thread
        else:
            runs.append([thread, thread])
    shown = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs[:6])
    more = f" and {len(runs) - 6} more runs" if len(runs) > 6 else ""
    return f"threads {shown}{more}"
