"""Shapes of matrix products (rows, columns, depth), each with the code path it is there for: for dense and int8 weights.

The emulated device has four multiprocessors, so that a handful of tiles fills it.
"""

import pytest

SHAPES = [
    pytest.param(1, 1, 1, id="one of each"),
    pytest.param(1, 33, 10, id="a row, depth below any vector"),
    pytest.param(3, 10, 33, id="few rows, odd depth"),
    pytest.param(2, 9, 1023, id="few rows, long odd depth"),
    pytest.param(1, 10, 4096, id="a row, all warps of a block take several turns"),
    pytest.param(2, 33, 8, id="a lane's width of depth"),
    pytest.param(8, 17, 72, id="a fragment of rows, two of columns, part of a turn"),
    pytest.param(9, 16, 136, id="two fragments of rows"),
    pytest.param(17, 33, 64, id="two blocks of rows"),
    pytest.param(2, 8201, 24, id="many columns: two fragments, or two columns a warp"),
    pytest.param(34, 65, 33, id="small tiles, element by element"),
    pytest.param(33, 129, 40, id="small tiles, odd columns, part of a step"),
    pytest.param(65, 70, 8, id="small tiles, less than a step"),
    pytest.param(129, 132, 168, id="large tiles, more steps than stages"),
    pytest.param(5, 960, 576, id="SmolLM2 qkv", marks=pytest.mark.gpu),
    pytest.param(300, 576, 1536, id="SmolLM2 down, a prompt", marks=pytest.mark.gpu),
    pytest.param(1, 49152, 576, id="SmolLM2 head", marks=pytest.mark.gpu),
    pytest.param(3, 50257, 1023, id="an odd vocabulary", marks=pytest.mark.gpu),
    pytest.param(16, 4096, 14336, id="Llama-8B down", marks=pytest.mark.gpu),
    pytest.param(700, 6144, 4096, id="Llama-8B qkv, a prompt", marks=pytest.mark.gpu),
    pytest.param(70001, 65, 72, id="more rows than a grid is high", marks=pytest.mark.gpu),
    pytest.param(2_200_003, 10, 33, id="more tiles than a grid is high", marks=pytest.mark.gpu),
]

# one shape for each kernel, 16-bit and float32 alike
KERNEL_SHAPES = [
    pytest.param(3, 20, 33, id="lanes"),
    pytest.param(9, 20, 40, id="narrow or lanes"),
    pytest.param(40, 130, 40, id="tiles or blocks"),
    pytest.param(40, 65, 33, id="tiles or blocks, element by element"),
]

# (rows, columns, depth) of gated products, whose columns are even: one for each kernel again, and on sm_90a for matmul_wgmma
GATED_SHAPES = [
    pytest.param(1, 66, 33, id="a row, odd depth: lanes"),
    pytest.param(5, 66, 40, id="narrow or lanes"),
    pytest.param(64, 130, 33, id="tiles or blocks, element by element"),
    pytest.param(64, 136, 72, id="tiles or blocks"),
    pytest.param(130, 272, 136, id="large tiles, or wgmma"),
    pytest.param(2, 8202, 24, id="many columns"),
    pytest.param(1, 3072, 576, id="SmolLM2", marks=pytest.mark.gpu),
    pytest.param(300, 3072, 576, id="SmolLM2, a prompt", marks=pytest.mark.gpu),
    pytest.param(5, 28672, 4096, id="Llama-8B", marks=pytest.mark.gpu),
    pytest.param(700, 28672, 4096, id="Llama-8B, a prompt", marks=pytest.mark.gpu),
]

# the kernels are the same for every architecture, so the emulator compiles them for one
one_architecture = pytest.mark.parametrize(
    "device", ["sm_80", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
