"""``python -m benchmarks NAME [--json FILE]``: a name is a module of this folder.

``generate``, ``loading`` and ``quality`` measure a whole model and ``emulator`` the emulator, on any machine; ``counters`` holds
``profile`` against Nsight Compute on a GPU; the others give rows for the harness, which needs torch and a GPU. ``check`` compares
with kept results: see ``python -m benchmarks check --help``.
"""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import harness
from nbkernels.model import demo_model

ANY_DEVICE = (
    "emulator",
    "generate",
    "loading",
    "quality",
)  # these measure by themselves; the others need a GPU

BY_THEMSELVES = (*ANY_DEVICE, "counters")  # the others give rows for the harness, and need torch

OF_THE_DEMO = ("generate", "quality")  # these read the demo's model

OTHERS = ("check", "generate_peers", "harness", "plot", "trial")  # modules that are no benchmarks


def names():
    """The benchmarks there are."""
    folder = Path(__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_") and p.stem not in OTHERS)


def main():
    """Run one benchmark."""
    if sys.argv[1:2] == ["check"]:
        from benchmarks import check

        sys.exit(check.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Time the operations on the GPU at hand. {', '.join(ANY_DEVICE)} need none.",
        epilog="python -m benchmarks check compares the operations with kept results: see python -m benchmarks check --help",
    )
    parser.add_argument("name", choices=names())
    parser.add_argument("--json", metavar="FILE", help="write the figures with GPU, versions and commit")
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="only cases whose operation, shape or dtype holds it"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="PEER", help="leave a peer out, torch.compile say"
    )
    options = parser.parse_args()
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    if options.name in OF_THE_DEMO and not demo_model.path().exists():
        said = f"benchmarks: the demo's model is not at {demo_model.path()}: run python scripts/fetch_model.py"
        if options.name == "quality":
            sys.exit(said)
        print(f"{said}; without it only models of random weights are measured, on a GPU", file=sys.stderr)
    module = importlib.import_module(f"benchmarks.{options.name}") if options.name in BY_THEMSELVES else None
    if module is not None:
        module.run(lambda rows: harness.keep(options.json, command, {"results": rows}), options)
        return
    if harness.torch is None or not harness.torch.cuda.is_available():
        sys.exit(
            f"benchmarks: {options.name} needs torch (pip install torch) and an NVIDIA GPU, as the clock and as a peer; "
            f"without a GPU there are {', '.join(ANY_DEVICE)}"
        )
    module = importlib.import_module(f"benchmarks.{options.name}")
    chosen = (case for case in module.cases() if options.match in f"{case.operation} {case.shape} {case.dtype}")
    results = []
    for case in chosen:
        results.append(harness.run_case(case, options.without))
        print(harness.in_short(results[-1]), flush=True)  # a run takes minutes
    copy_bytes_a_second = harness.copy_speed()
    harness.report(results, copy_bytes_a_second, options.json, command)
    if hasattr(module, "summarise"):
        module.summarise(results, copy_bytes_a_second)


if __name__ == "__main__":
    main()
