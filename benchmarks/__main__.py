"""``python -m benchmarks NAME [--json FILE]``: names are the modules of this folder that have a ``cases`` function."""

import argparse
import importlib
import sys
from pathlib import Path


def names():
    """The benchmarks there are."""
    folder = Path(__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if "def cases(" in p.read_text() and p.stem != "__main__")


def main():
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time the operations on the GPU at hand.")
    parser.add_argument("name", choices=names())
    parser.add_argument("--json", metavar="FILE", help="write the figures with GPU, versions and commit")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("benchmarks: torch is needed, both as the clock and as a peer: pip install torch")
    if not torch.cuda.is_available():
        sys.exit("benchmarks: no CUDA device answers; these figures need one")
    from benchmarks import harness

    module = importlib.import_module(f"benchmarks.{options.name}")
    results = [harness.run_case(case) for case in module.cases()]
    harness.report(results, harness.copy_speed(), options.json, " ".join(["python -m benchmarks", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
