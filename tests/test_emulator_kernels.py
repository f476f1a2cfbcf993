"""Our own kernels on the emulator and on the GPU: the same compiled code, the same inputs, the same bits.

Kernels that use the approximate functions (ex2, rcp, …) or the tensor cores' floating-point sums may differ in the last digits:
the hardware's tables, and the order in which a tensor core adds, are not published. Their bounds stand at the case.
"""

import ml_dtypes
import numpy as np
import pytest
from compare import random, relative_error, to_device, to_host

import nbkernels as nbk

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
# float32 results of approximate functions, whose error is 2^-22 or so; a 16-bit result then seldom rounds the other way
APPROXIMATE = {F32: 1e-6, F16: 1e-4, BF16: 1e-3}


def rows(function, dtype, columns=700):
    return lambda: function(to_device(random((5, columns), dtype, 0)))


def product(dtype, m, k, n):
    return lambda: nbk.matmul(to_device(random((m, k), dtype, 0)), to_device(random((n, k), dtype, 1)))


def int8_product(dtype, m, k, n, group_size):
    def call():
        weight = nbk.quantize_int8(to_device(random((n, k), np.float32, 1)), group_size=group_size)
        return nbk.int8_matmul(to_device(random((m, k), dtype, 0)), weight)

    return call


def quantised():
    weight = nbk.quantize_int8(to_device(random((33, 200), np.float32, 1)), group_size=32)
    return np.concatenate((to_host(weight.values).ravel().astype(np.float32), to_host(weight.scales).ravel()))


def rotated():
    q, k = (to_device(random((2, 3, heads, 64), F32, heads)) for heads in (4, 2))
    angles = np.outer(np.arange(9), np.ones(32))
    tables = [to_device(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    cache = to_device(np.zeros((2, 9, 2, 64), np.float32))
    nbk.rotary_append(
        q, k, k, *tables, to_device(np.array([0, 5], np.int32)), cache, to_device(np.zeros((2, 9, 2, 64), F32))
    )
    return cache


def attended(dtype, q_len):
    def call():
        q = to_device(random((1, q_len, 4, 64), dtype, 0))
        k, v = (to_device(random((1, 300, 2, 64), dtype, seed)) for seed in (1, 2))
        return nbk.attention(q, k, v, causal=True)

    return call


def drawn():
    return nbk.sample(to_device(random((4, 900), F32, 0)), temperature=0.9, top_k=50, top_p=0.9, seed=3)


# name -> (call, bound; 0 for the same bits)
CASES = {
    "embedding": (lambda: nbk.embedding(to_device(np.array([3, 1], np.int32)), to_device(random((5, 70), BF16, 0))), 0),
    "argmax": (rows(nbk.argmax, BF16), 0),
    "quantize_int8": (quantised, 0),
    "rotary_append": (rotated, 0),
    "matmul float32, few rows": (product(F32, 3, 200, 50), 0),
    "matmul float32, many rows": (product(F32, 40, 200, 70), 0),
    "int8_matmul float32": (int8_product(F32, 3, 200, 50, 32), 0),
    "sample": (drawn, 0),
    "matmul bfloat16, few rows": (product(BF16, 3, 256, 64), APPROXIMATE[BF16]),
    "matmul float16, many rows": (product(F16, 70, 256, 80), APPROXIMATE[F16]),
    "int8_matmul bfloat16, groups": (int8_product(BF16, 70, 256, 80, 32), APPROXIMATE[BF16]),
    "int8_matmul bfloat16, few rows": (int8_product(BF16, 2, 256, 80, 32), APPROXIMATE[BF16]),
    "softmax float32": (rows(nbk.softmax, F32), APPROXIMATE[F32]),
    "softmax bfloat16": (rows(nbk.softmax, BF16, 5000), APPROXIMATE[BF16]),
    "layer_norm": (rows(nbk.layer_norm, F32), APPROXIMATE[F32]),
    "rms_norm": (rows(nbk.rms_norm, F16), APPROXIMATE[F16]),
    "gelu": (rows(nbk.gelu, F32), APPROXIMATE[F32]),
    "silu_mul": (lambda: nbk.silu_mul(*(to_device(random((3, 90), F32, s)) for s in (0, 1))), APPROXIMATE[F32]),
    "attention float32": (attended(F32, 20), APPROXIMATE[F32]),
    "attention bfloat16": (attended(BF16, 70), APPROXIMATE[BF16]),
    "decode float32": (attended(F32, 2), APPROXIMATE[F32]),
    "decode bfloat16": (attended(BF16, 1), APPROXIMATE[BF16]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_emulator_gives_what_the_gpu_gives(name):
    call, bound = CASES[name]
    with nbk.device("cuda") as gpu:
        want = to_host(call())
    with nbk.device("emulator", arch=gpu.arch):
        got = to_host(call())
    if bound == 0:
        np.testing.assert_array_equal(got, want)
    else:
        assert relative_error(got, want.astype(np.float64)) < bound
