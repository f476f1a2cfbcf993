"""CUDA kernels for transformer inference and a small decoder-only runtime, in pure Python.

The names below are imported when first used, so that ``import nbkernels`` costs nothing and needs no GPU:

    softmax, layer_norm, rms_norm, gelu, silu_mul, gelu_mul, soft_cap, matmul, quantize_int8, int8_matmul, embedding,
    rotary_append, attention, paged_attention,
    argmax, sample, sample_rows                               the operations, see ``nbkernels.ops``
    Int8Weight, DeviceArray                       what they take, see ``nbkernels.arrays``
    device                                        the device the operations run on, see ``nbkernels.launch.device``
    overlapping                                   a context whose kernels start early, see ``nbkernels.launch.overlap``
    profile                                       why a call takes its time, see ``nbkernels.profiling.profile``
    load, LanguageModel, KVCache, OutOfPages      the runtime, see ``nbkernels.model``
    Engine, Request, QueueFull, Cancelled         requests that come and go, see ``nbkernels.model.engine``
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        (
            "softmax",
            "layer_norm",
            "rms_norm",
            "gelu",
            "silu_mul",
            "gelu_mul",
            "soft_cap",
            "matmul",
            "quantize_int8",
            "int8_matmul",
            "embedding",
            "rotary_append",
            "attention",
            "paged_attention",
            "advance",
            "argmax",
            "sample",
            "sample_rows",
        ),
        "nbkernels.ops",
    ),
    **dict.fromkeys(("Int8Weight", "DeviceArray"), "nbkernels.arrays"),
    "device": "nbkernels.launch.device",
    "load": "nbkernels.model.loading",
    "LanguageModel": "nbkernels.model.generation",
    **dict.fromkeys(("KVCache", "OutOfPages"), "nbkernels.model.kv_cache"),
    **dict.fromkeys(("Engine", "Request", "QueueFull", "Cancelled"), "nbkernels.model.engine"),
    "overlapping": "nbkernels.launch.overlap",
    "profile": "nbkernels.profiling.profile",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'nbkernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOME])
