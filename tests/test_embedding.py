"""Embedding lookup: bits for a dense table, values times scale for one in int8, zeros for ids that are none."""

import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import Int8Weight

IDS = np.array([[3, 0, 9], [9, 9, 1]], np.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 64, 1100])
def test_dense(device, dtype, hidden):
    table = random((10, hidden), dtype, 0)
    out = poisoned((2, 3, hidden), dtype)
    nbk.embedding(to_device(IDS), to_device(table), out=out)
    np.testing.assert_array_equal(to_host(out), table[IDS])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden, group_size", [(64, 32), (70, 32), (33, None)])
def test_int8(device, dtype, hidden, group_size):
    quantised = reference.quantize_int8(random((10, hidden), np.float32, 0), group_size=group_size)
    table = Int8Weight(to_device(quantised.values), to_device(quantised.scales), group_size)
    out = poisoned((2, 3, hidden), dtype)
    nbk.embedding(to_device(IDS), table, dtype=dtype, out=out)
    assert relative_error(out, reference.dequantize_int8(quantised, np.float64)[IDS]) < BOUND[dtype]


def test_ids_outside_of_the_vocabulary(device):
    table = random((10, 64), np.float32, 0)
    got = to_host(nbk.embedding(to_device(np.array([-1, 10, 2**31 - 1, 4], np.int32)), to_device(table)))
    assert not got[:3].any()
    np.testing.assert_array_equal(got[3], table[4])
