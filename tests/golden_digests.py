"""The bits of every operation's results, for fixed inputs and architecture, on the emulator: digests that are kept in a file.

    python tests/golden_digests.py              names what differs from tests/data/digests.json; exit status 1 if something does
    python tests/golden_digests.py --record     writes that file anew, where other bits were meant

They tell a change of bits that no bound of a comparison sees: another order of sums, another rounding.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import nbkernels as nbk
from nbkernels.arrays import DeviceArray, Int8Weight
from nbkernels.launch.memory import to_host
from nbkernels.profiling.operations import DTYPES, OPERATIONS, DeviceMaker

FILE = Path(__file__).parent / "data" / "digests.json"
VARIANTS = (("bfloat16", "sm_80"), ("bfloat16", "sm_90a"), ("float32", "sm_80"))
# beside each operation's small shape: where another kernel takes over
MORE_SHAPES = {
    "softmax": ((3, 701),),
    "matmul": ((3, 72, 264), (130, 264, 136)),
    "int8_matmul": ((2, 80, 256),),
    "decode": ((2, 700, 4, 2, 128),),
}


def cases():
    """[(name, Operation, shape, dtype, arch)]"""
    return [
        (f"{entry.name} {'x'.join(map(str, shape))} {dtype} {arch}", entry, shape, dtype, arch)
        for entry in OPERATIONS.values()
        for shape in (entry.small, *MORE_SHAPES.get(entry.name, ()))
        for dtype, arch in VARIANTS
    ]


def digest(entry, shape, dtype, arch):
    """sha256 of what an operation returns and of all arrays it was given, which it may have written to."""
    with nbk.device("emulator", arch=arch):
        args, kwargs = entry.make(DeviceMaker(DTYPES[dtype]), *shape)
        returned = entry.call(*args, **kwargs)
        hashed = hashlib.sha256()
        for array in _arrays((returned, *args, *kwargs.values())):
            hashed.update(f"{array.dtype} {array.shape}".encode())
            hashed.update(to_host(array).tobytes())
    return hashed.hexdigest()


def _arrays(value):
    if isinstance(value, Int8Weight):
        yield from (value.values, value.scales)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, DeviceArray):
        yield value


def main():
    """Compare, or record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="keep the bits as they are now")
    options = parser.parse_args()
    found = {name: digest(*case) for name, *case in cases()}
    if options.record:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    kept = json.loads(FILE.read_text())
    changed = sorted(name for name in {**kept, **found} if kept.get(name) != found.get(name))
    for name in changed:
        print(name)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
