"""Results have the bits that they had: see golden_digests.py, which records them anew where a change of bits was meant."""

import json

import numpy as np
import pytest
from golden_digests import FILE, cases, digest

import nbkernels as nbk
from nbkernels.launch.memory import to_device, to_host
from nbkernels.profiling.operations import OPERATIONS

KEPT = json.loads(FILE.read_text())


def test_every_operation_is_kept():
    assert set(KEPT) == {name for name, *_ in cases()}
    assert {name.split()[0] for name in KEPT} == set(OPERATIONS)


@pytest.mark.parametrize("name, case", [(name, case) for name, *case in cases()], ids=[name for name, *_ in cases()])
def test_bits(name, case):
    assert digest(*case) == KEPT[name], "other bits: python tests/golden_digests.py --record if that was meant"


def test_a_bit_makes_another_digest(monkeypatch):
    entry = OPERATIONS["softmax"]
    args = entry.small, "float32", "sm_80"
    before = digest(entry, *args)
    assert digest(entry, *args) == before

    def one_bit_off(x):
        y = nbk.softmax(x)
        host = to_host(y)
        host.view(np.uint32)[3, 5] ^= 1
        return to_device(host)

    changed = type("Entry", (), {"make": staticmethod(entry.make), "call": staticmethod(one_bit_off)})
    assert digest(changed, *args) != before
