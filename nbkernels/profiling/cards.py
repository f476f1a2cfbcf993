"""What a card can do at most: published figures of a few, by which a kernel is judged where none is at hand.

``published("H200")`` is a Card for planning and for floors; ``timing.measured_card()`` is that of the GPU at hand.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from nbkernels.launch.device import EMULATED_SHARED_BYTES, Device, parse_arch

LEAST_SHARED_BYTES = 99 * 1024
SCHEDULERS = 4  # of a multiprocessor; each issues an instruction of a warp a cycle


@dataclass(frozen=True)
class Card:
    """A GPU's limits.

    memory_bytes_a_second: read and written together; operations_a_second: dtype -> products and sums of the tensor cores
    (float32: of the ordinary cores), int8's are integer; launch_microseconds: of an empty kernel among others in a graph;
    l2_bytes; clock_hz. measured: on the card itself, else published.
    """

    name: str
    arch: str
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    clock_hz: float
    memory_bytes_a_second: float
    operations_a_second: dict
    launch_microseconds: float
    measured: bool = False

    @property
    def issues_a_second(self):
        """Instructions of a warp that all schedulers issue at most."""
        return SCHEDULERS * self.sm_count * self.clock_hz

    def device(self):
        """A Device that plans as the card does, and runs on the emulator."""
        shared_bytes = EMULATED_SHARED_BYTES.get(parse_arch(self.arch)[:2], LEAST_SHARED_BYTES)
        return Device("emulator", self.name, self.arch, self.sm_count, shared_bytes, self.memory_bytes)


def _rates(float32, sixteen_bits, int8):
    return {
        "float32": float32 * 1e12,
        "float16": sixteen_bits * 1e12,
        "bfloat16": sixteen_bits * 1e12,
        "int8": int8 * 1e12,
    }


# NVIDIA's data sheets: dense rates with sums in float32 (int32 for int8), at the boost clock; the launch is what an H200 gave
PUBLISHED = {
    "A100": Card("A100 SXM 80 GB", "sm_80", 108, 80 * 10**9, 40 * 2**20, 1.41e9, 2.039e12, _rates(19.5, 312, 624), 1.0),
    "H100": Card("H100 SXM", "sm_90a", 132, 80 * 10**9, 50 * 2**20, 1.83e9, 3.35e12, _rates(66.9, 989, 1979), 1.0),
    "H200": Card("H200 SXM", "sm_90a", 132, 141 * 10**9, 50 * 2**20, 1.83e9, 4.8e12, _rates(66.9, 989, 1979), 1.0),
    "RTX 4090": Card("RTX 4090", "sm_89", 128, 24 * 10**9, 72 * 2**20, 2.52e9, 1.008e12, _rates(82.6, 165, 661), 1.0),
}


def published(name):
    """The Card of a name such as "H200" or "rtx4090". ValueError for one that is not in the table."""
    wanted = str(name).replace(" ", "").lower()
    names = {known.replace(" ", "").lower(): known for known in PUBLISHED}
    if wanted not in names:
        near = get_close_matches(wanted, names, n=1, cutoff=0.4)
        meant = f" (did you mean {names[near[0]]}?)" if near else ""
        raise ValueError(f"gpu: {name!r}, wanted one of {', '.join(PUBLISHED)}{meant}")
    return PUBLISHED[names[wanted]]
