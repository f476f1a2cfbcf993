"""Rotary embedding with the append to the KV cache, and the counter that moves positions, against the reference."""

import ml_dtypes
import numpy as np
import pytest
from compare import BOUND, DTYPES, poisoned, random, relative_error, to_device, to_host

import nbkernels as nbk
from nbkernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)


def tables(positions, half):
    angles = np.outer(np.arange(positions), 100.0 ** -(np.arange(half) / max(half, 1)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def run(dtype, batch, tokens, heads, kv_heads, head_dim, half, capacity, positions, table_length=None, in_place=False):
    """On the device and by the reference: ((q, k_cache, v_cache), the same in float64)."""
    fused = random((batch, tokens, heads + 2 * kv_heads, head_dim), dtype, 1)
    caches = [random((batch, capacity, kv_heads, head_dim), dtype, seed) for seed in (2, 3)]
    cos, sin = tables(table_length or capacity, half)
    whole = to_device(fused)
    parts = [whole[:, :, :heads], whole[:, :, heads : heads + kv_heads], whole[:, :, heads + kv_heads :]]
    on_device = [to_device(c) for c in caches]
    out = parts[0] if in_place else poisoned((batch, tokens, heads, head_dim), dtype)
    nbk.rotary_append(*parts, *map(to_device, (cos, sin, positions)), *on_device, out=out)
    exact = fused.astype(np.float64)
    want = [c.astype(np.float64) for c in caches]
    q = reference.rotary_append(
        exact[:, :, :heads],
        exact[:, :, heads : heads + kv_heads],
        exact[:, :, heads + kv_heads :],
        cos,
        sin,
        positions,
        *want,
    )
    return (to_host(out), *map(to_host, on_device)), (q, *want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, half", [(64, 32), (80, 40), (80, 16), (7, 2), (16, 0)])
@pytest.mark.parametrize("in_place", [False, True])
def test_against_the_reference(device, dtype, head_dim, half, in_place):
    positions = np.array([0, 11, 5], np.int32)
    got, want = run(dtype, 3, 4, 6, 2, head_dim, half, 20, positions, in_place=in_place)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < BOUND[dtype]
    np.testing.assert_array_equal(
        got[2], want[2].astype(dtype), "v is copied bit for bit, and the rest of the cache left alone"
    )


def test_positions_outside_write_nothing(device):
    fused = random((3, 2, 3, 8), BF16, 1)
    cache = random((3, 4, 1, 8), BF16, 2)
    cos, sin = tables(4, 4)
    k_cache, v_cache = to_device(cache), to_device(cache)
    whole = to_device(fused)
    out = poisoned((3, 2, 1, 8), BF16)
    positions = np.array([-1, 3, 2**31 - 1], np.int32)  # token 1 of the first and token 0 of the second are inside
    nbk.rotary_append(
        whole[:, :, :1],
        whole[:, :, 1:2],
        whole[:, :, 2:],
        *map(to_device, (cos, sin, positions)),
        k_cache,
        v_cache,
        out=out,
    )
    got, written = to_host(out).astype(np.float32), to_host(v_cache)
    assert not got[0, 0].any() and not got[1, 1].any() and not got[2].any()
    assert got[0, 1].any() and got[1, 0].any()
    np.testing.assert_array_equal(written[0, 0], fused[0, 1, 2:])
    np.testing.assert_array_equal(written[1, 3], fused[1, 0, 2:])
    np.testing.assert_array_equal(written[0, 1:], cache[0, 1:])
    np.testing.assert_array_equal(written[2], cache[2])


def test_advance(device):
    lengths = to_device(np.arange(300, dtype=np.int32))
    nbk.advance(lengths, 7)
    nbk.advance(lengths, -2)
    np.testing.assert_array_equal(to_host(lengths), np.arange(300) + 5)
