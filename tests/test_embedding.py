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


TABLES = ["dense", 32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [7, 64])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("scale, positioned", [(7.25, False), (1.0, True), (0.5, True)])
def test_scale_and_positions(device, dtype, hidden, kind, scale, positioned):
    dense, count = random((10, hidden), dtype, 0), 6
    table, exact = to_device(dense), dense.astype(np.float64)
    if kind != "dense":
        quantised = reference.quantize_int8(dense, group_size=kind)
        table = Int8Weight(to_device(quantised.values), to_device(quantised.scales), kind)
        exact = reference.dequantize_int8(quantised, np.float64)
    want, options = exact[IDS] * scale, {}
    if positioned:
        positions, more = np.array([3, 0], np.int32), random((count, hidden), dtype, 1)
        options = {"positions": to_device(positions), "position_table": to_device(more)}
        want = want + more.astype(np.float64)[positions[:, None] + np.arange(3)]
    out = poisoned((2, 3, hidden), dtype)
    nbk.embedding(to_device(IDS), table, dtype=dtype, scale=scale, **options, out=out)
    assert relative_error(out, want) < BOUND[dtype]
    host = Int8Weight(quantised.values, quantised.scales, kind) if kind != "dense" else dense
    options = {"positions": positions, "position_table": more} if positioned else {}
    assert relative_error(reference.embedding(IDS, host, dtype=dtype, scale=scale, **options), want) < BOUND[dtype]


def test_positions_outside_of_their_table_add_nothing(device):
    table, more = random((10, 64), np.float32, 0), random((4, 64), np.float32, 1)
    options = {"positions": to_device(np.array([2, -1], np.int32)), "position_table": to_device(more)}
    got = to_host(nbk.embedding(to_device(IDS), to_device(table), **options))
    np.testing.assert_array_equal(got[0, 2], table[IDS[0, 2]])
    np.testing.assert_array_equal(got[1, 0], table[IDS[1, 0]])
    np.testing.assert_array_equal(got[1, 1], table[IDS[1, 1]] + more[0])


def test_ids_outside_of_the_vocabulary(device):
    table = random((10, 64), np.float32, 0)
    got = to_host(nbk.embedding(to_device(np.array([-1, 10, 2**31 - 1, 4], np.int32)), to_device(table)))
    assert not got[:3].any()
    np.testing.assert_array_equal(got[3], table[4])
