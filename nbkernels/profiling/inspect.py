"""An operation taken apart without a GPU: its kernels' PTX, or what each source line did when it ran on the emulator."""

import ml_dtypes
import numpy as np

from nbkernels import ops
from nbkernels.arrays import Int8Weight
from nbkernels.launch import compile as compiling
from nbkernels.launch.device import device
from nbkernels.launch.memory import to_device

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def _normal(*shape, dtype):
    return to_device(np.random.default_rng(0).standard_normal(shape).astype(dtype))


def _int8_matmul(dtype):
    weight = ops.quantize_int8(_normal(128, 256, dtype=np.float32), group_size=32)
    ops.int8_matmul(_normal(64, 256, dtype=dtype), Int8Weight(weight.values, weight.scales, 32))


def _attention(q_len, kv_len):
    def call(dtype):
        q = _normal(1, q_len, 4, 64, dtype=dtype)
        k, v = (_normal(1, kv_len, 2, 64, dtype=dtype) for _ in range(2))
        ops.attention(q, k, v, causal=True)

    return call


def _rotary_append(dtype):
    fused = _normal(1, 8, 8, 64, dtype=dtype)
    cache = _normal(1, 8, 2, 64, dtype=dtype)
    table = _normal(8, 32, dtype=np.float32)
    positions = to_device(np.zeros(1, np.int32))
    ops.rotary_append(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:], table, table, positions, cache, cache[:, :])


# operation -> a function of a dtype that runs it once, on a shape that the emulator does in a second or so
CASES = {
    "softmax": lambda dtype: ops.softmax(_normal(16, 1024, dtype=dtype)),
    "layer_norm": lambda dtype: ops.layer_norm(_normal(16, 1024, dtype=dtype)),
    "rms_norm": lambda dtype: ops.rms_norm(_normal(16, 1024, dtype=dtype), residual=_normal(16, 1024, dtype=dtype)),
    "gelu": lambda dtype: ops.gelu(_normal(16, 1024, dtype=dtype)),
    "silu_mul": lambda dtype: ops.silu_mul(_normal(16, 1024, dtype=dtype), _normal(16, 1024, dtype=dtype)),
    "gelu_mul": lambda dtype: ops.gelu_mul(_normal(16, 1024, dtype=dtype), _normal(16, 1024, dtype=dtype)),
    "soft_cap": lambda dtype: ops.soft_cap(_normal(16, 1024, dtype=dtype), 30.0),
    "matmul": lambda dtype: ops.matmul(_normal(64, 256, dtype=dtype), _normal(128, 256, dtype=dtype)),
    "quantize_int8": lambda dtype: ops.quantize_int8(_normal(64, 256, dtype=dtype), group_size=32),
    "int8_matmul": _int8_matmul,
    "embedding": lambda dtype: ops.embedding(to_device(np.arange(8, dtype=np.int32)), _normal(8, 512, dtype=dtype)),
    "rotary_append": _rotary_append,
    "attention": _attention(64, 128),
    "decode": _attention(1, 512),
    "argmax": lambda dtype: ops.argmax(_normal(4, 4096, dtype=dtype)),
    "sample": lambda dtype: ops.sample(_normal(2, 2048, dtype=dtype), temperature=0.8, top_k=40, top_p=0.9),
}


def launches(operation, *, dtype="bfloat16", arch="sm_90a"):
    """Run an operation once on the emulator: [(Plan, Report of what each source line did)], one a launch.

    ValueError for an operation, dtype or architecture that is not known; EmulatorError where a kernel does something wrong.
    """
    from nbkernels.launch.emulated import counted

    if operation not in CASES:
        raise ValueError(f"operation: {operation!r}, wanted one of {', '.join(CASES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r}, wanted one of {', '.join(DTYPES)}")
    with device("emulator", arch=arch), counted() as done:
        CASES[operation](DTYPES[dtype])
    return done


def ptx_of(operation, *, dtype="bfloat16", arch="sm_90a"):
    """The PTX of every kernel that an operation launches, in the order of its launches, each once."""
    plans = dict.fromkeys((plan.factory, plan.constants) for plan, _ in launches(operation, dtype=dtype, arch=arch))
    return [compiling.ptx(factory, constants, arch) for factory, constants in plans]
