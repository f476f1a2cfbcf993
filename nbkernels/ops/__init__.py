"""The public operations: check, choose a plan, allocate, launch.

Arrays of torch, CuPy, JAX, Numba or this package in device memory are taken without a copy, run on the GPU on their library's
current stream (or ``stream``), and the result comes back in the first array's kind. NumPy arrays (and host tensors) run on
the current device: on "cpu" through ``nbkernels.reference``, else they are copied to the device and the result back.
dtypes: float32, float16 and bfloat16, all float operands of a call of one dtype unless said otherwise; sums in float32. The
last axis of every device array must be contiguous; other axes may have any stride.

Every operation takes ``out`` (an array of the result's shape and dtype to write into; it may be an input only where that is
said) and ``stream`` (an integer handle or anything with __cuda_stream__), and raises TypeError or ValueError, naming the
argument, before anything is launched.
"""

from nbkernels.ops.attention import PAGE_SIZES, advance, attention, paged_attention, rotary_append
from nbkernels.ops.decoder_layers import DecoderLayer, DecoderLayers, decoder_layers
from nbkernels.ops.matrices import int8_matmul, matmul, quantize_int8
from nbkernels.ops.rows import embedding, gelu, gelu_mul, layer_norm, rms_norm, silu_mul, soft_cap, softmax
from nbkernels.ops.sampling import argmax, sample, sample_rows

__all__ = [
    "PAGE_SIZES",
    "DecoderLayer",
    "DecoderLayers",
    "advance",
    "argmax",
    "attention",
    "decoder_layers",
    "embedding",
    "gelu",
    "gelu_mul",
    "int8_matmul",
    "layer_norm",
    "matmul",
    "paged_attention",
    "quantize_int8",
    "rms_norm",
    "rotary_append",
    "sample",
    "sample_rows",
    "silu_mul",
    "soft_cap",
    "softmax",
]
