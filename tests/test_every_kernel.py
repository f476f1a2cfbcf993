"""Every kernel of the package runs on the emulator, as both architectures, with all checks on, and gives what it should.

Which kernels there are is read off the package, so that a new one without a case fails here.
"""

import importlib
import inspect
import pkgutil

import pytest
from kernel_cases import CASES

import nbkernels as nbk
from nbkernels import kernels
from nbkernels.launch import emulated

ARCHITECTURES = ["sm_80", "sm_90a"]


def factories():
    """Names of all functions in nbkernels.kernels that make a kernel."""
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        members = vars(importlib.import_module(f"nbkernels.kernels.{module.name}"))
        own = (
            m for m in members.values() if inspect.isfunction(m) and m.__module__ == f"nbkernels.kernels.{module.name}"
        )
        found |= {m.__name__ for m in own if m.__name__.endswith("_kernel") and not m.__name__.startswith("_")}
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel(arch):
    with nbk.device("emulator", arch=arch), emulated.observed() as plans:
        errors = {name: case.error(case.call()) for name, case in CASES.items()}
    wrong = {name: error for name, error in errors.items() if not error <= CASES[name].bound}
    assert not wrong
    missing = factories() - {plan.factory.__name__ for plan in plans}
    # kernels for newer machines cannot run as an older one
    newer = {
        name for name in missing if arch == "sm_80" and any(w in name for w in ("wgmma", "stream", "decoder_layers"))
    }
    # where blocks can share a row, rows are tiled from half a million columns on only
    older = {name for name in missing if arch == "sm_90a" and name.startswith("tiled_")}
    assert not missing - newer - older, "kernels without a case in tests/kernel_cases.py"
