"""Barriers: mbarriers in shared memory, on which asynchronous copies report (sm_90), and the block's numbered barriers.

An mbarrier is 8 bytes at a shared address divisible by 8. Its phase ends when as many arrivals as it was initialised with and
all expected bytes have come; phases are told apart by their parity, 0 for the first. A ring of stages waits for a stage to be
filled with the parity of its round, and for it to be free with the opposite one: an mbarrier that nobody has arrived at yet
counts as having ended a phase of parity 1.
"""

from numba import uint32
from numba.core import types

from nbkernels.ptx.asm import instruction

void = types.void


@instruction(void(uint32, uint32), "mbarrier.init.shared.b64 [$0], $1;", effect="writes")
def mbarrier_init(barrier, arrivals):
    """Make an mbarrier that ``arrivals`` arrivals end a phase of. One thread does; then ``fence_mbarrier_init`` and a barrier."""


@instruction(void(), "fence.mbarrier_init.release.cluster;", effect="writes")
def fence_mbarrier_init():
    """Show initialised mbarriers to the copy engine and the rest of the cluster. sm_90."""


@instruction(void(uint32, uint32), "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", effect="writes")
def mbarrier_expect(barrier, copied_bytes):
    """Arrive, and let the phase end only after that many more bytes have been copied. sm_90."""


@instruction(void(uint32), "mbarrier.arrive.shared.b64 _, [$0];", effect="writes")
def mbarrier_arrive(barrier):
    """Arrive once. What this thread did before is seen by who waits for the phase. sm_80."""


@instruction(
    void(uint32, uint32),
    "{ .reg .pred done; waiting: mbarrier.try_wait.parity.shared.b64 done, [$0], $1; @!done bra waiting; }",
    effect="writes",
)
def mbarrier_wait(barrier, parity):
    """Wait until the phase of this parity has ended. sm_90."""


@instruction(void(), "fence.proxy.async;", effect="writes")
def fence_proxy_async():
    """Order what this thread wrote or read before bulk copies and wgmma that touch the same bytes after. sm_90."""


@instruction(void(), "fence.proxy.async.shared::cta;", effect="writes")
def fence_proxy_async_shared():
    """As ``fence_proxy_async``, of the block's shared memory alone: it does not wait for what goes to global memory. sm_90."""


@instruction(void(uint32, uint32), "bar.sync $0, $1;", effect="converges")
def barrier_sync(number, threads):
    """Arrive at barrier 0 to 15 of the block and wait until ``threads`` (a multiple of 32) have."""


@instruction(void(uint32, uint32), "bar.arrive $0, $1;", effect="converges")
def barrier_arrive(number, threads):
    """Arrive at barrier 0 to 15 of the block without waiting; ``threads`` counts those who wait as well."""
