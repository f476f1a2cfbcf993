"""All layers in one launch: the bits of the operations that it stands for."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from compare import to_host
from decoder_model import EPS, Model

import nbkernels as nbk
from benchmarks.generate import NoTokenizer, random_transformer
from nbkernels.kernels import decoder_layers as kernels
from nbkernels.kernels import matmul, matmul_stream
from nbkernels.launch.device import current
from nbkernels.model.config import ModelConfig
from nbkernels.model.generation import LanguageModel
from nbkernels.model.sampling import SamplingOptions
from nbkernels.model.transformer import Transformer
from nbkernels.ops import decoder_layers

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request, monkeypatch):
    """A device with the kernel, on which small weights count as large."""
    for threshold in ("LEAST_BYTES", "LEAST_DEPTH"):
        monkeypatch.setattr(matmul_stream, threshold, 0)
    for cached in (matmul.plan, kernels.plan):
        cached.cache_clear()
    chosen = nbk.device("cuda") if request.param == "cuda" else nbk.device("emulator", arch="sm_90a")
    with chosen as found:
        yield found
    for cached in (matmul.plan, kernels.plan):
        cached.cache_clear()


CASES = {
    "rows": (BF16, None, {}),
    "groups": (BF16, 32, {"layers": 1}),
    "groups of 64, bias, float32 norms": (F16, 64, {"layers": 1, "feed_forward": 512, "bias": True, "norm_dtype": F32}),
    "dense": (BF16, 0, {"layers": 1}),
    "rows that end within a step": (BF16, None, {"layers": 1, "hidden": 560, "feed_forward": 208, "head_dim": 48}),
}
# a GPU's many blocks share the tiles of such small products; of these each has tiles of its own
ON_A_GPU = {"heads": 32, "kv_heads": 16, "head_dim": 64, "hidden": 4096, "feed_forward": 2048}
ON_A_GPU_BY_CASE = {"rows that end within a step": {"hidden": 4112, "feed_forward": 2064}}
# the first token, the last of a page, and one behind the first split of keys
POSITIONS = [("rows", 0), ("rows", 63), *((name, 530) for name in CASES)]


@pytest.mark.parametrize("name, position", POSITIONS)
def test_bits_of_the_operations_one_by_one(hopper, name, position):
    dtype, group_size, options = CASES[name]
    if hopper.kind == "cuda":
        options = options | ON_A_GPU | ON_A_GPU_BY_CASE.get(name, {})
    model, twin = Model(dtype, group_size, **options), Model(dtype, group_size, **options)
    layers = decoder_layers(model.layers, dtype=dtype, eps=EPS, **model.sizes)
    assert layers is not None
    positions, lengths = model.at(position)
    found = to_host(layers(model.x, model.cos, model.sin, positions, lengths, model.block_table))
    expected = twin.one_by_one(positions, lengths)
    assert np.isfinite(expected.astype(F32)).all()
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
    for mine, others in zip(model.pools(), twin.pools(), strict=True):
        np.testing.assert_array_equal(mine, others)


CONFIG = ModelConfig(
    architecture="llama", layers=2, hidden=512, heads=4, kv_heads=2, head_dim=64, feed_forward=384, vocab=160, context=512,
    rope_dim=64, norm_eps=EPS,
)  # fmt: skip


def test_a_model_writes_the_same_in_either_way(hopper, monkeypatch):
    tokens, config = 3, CONFIG
    if hopper.kind == "cuda":
        tokens, config = 40, replace(CONFIG, **ON_A_GPU)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]
    transformer = random_transformer(config, True, "int8-rows", elements=2**17)
    made = []
    plain = Transformer.one_launch

    def noted(*arguments):
        made.append(plain(*arguments))
        return made[-1]

    def texts():
        model = LanguageModel(transformer, NoTokenizer(config.vocab), None, current())
        with model.on_device():
            alone = [list(model.tokens(p, tokens, SamplingOptions(seed=0))) for p in prompts]
        return alone, model.generate(prompts[:1], max_new_tokens=tokens)

    monkeypatch.setattr(Transformer, "one_launch", noted)
    found = texts()
    assert len(made) == 2 and None not in made, "the sessions' and the Engine's"
    monkeypatch.setattr(Transformer, "one_launch", lambda *_: None)
    assert texts() == found


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_has_a_plan_for_its_cases(monkeypatch, name):
    for threshold in ("LEAST_BYTES", "LEAST_DEPTH"):
        monkeypatch.setattr(matmul_stream, threshold, 0)
    dtype, group_size, options = CASES[name]
    sizes = ON_A_GPU | ON_A_GPU_BY_CASE.get(name, {})
    weight = "dense" if group_size == 0 else "groups" if group_size else "rows"
    widths = sizes["hidden"], sizes["heads"], sizes["kv_heads"], sizes["head_dim"], 32, sizes["feed_forward"]
    shape = kernels.Shape(*widths, "bias" in options)
    assert (
        kernels.plan(shape, dtype, weight, group_size or 0, options.get("norm_dtype", dtype), 132, 232448) is not None
    )
    kernels.plan.cache_clear()


@pytest.mark.parametrize("weight, group_size, least", [("rows", 0, 8), ("groups", 32, 7), ("dense", 0, 8)])
def test_llama_3_8b_has_a_deep_ring_on_an_h200(weight, group_size, least):
    kernels.plan.cache_clear()
    chosen = kernels.plan(
        kernels.Shape(4096, 32, 8, 128, 64, 14336, False), BF16, weight, group_size, BF16, 132, 232448
    )
    assert chosen.grid == (128, 1, 1) and chosen.together and not chosen.early
    assert chosen.constants[-1] >= least and chosen.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    "spoil",
    [
        {"dtype": F32},
        {"rows": 17},
        {"kv_heads": 4, "heads": 64},  # more query heads a KV head than a product has rows
    ],
)
def test_what_is_launched_one_by_one(spoil):
    with nbk.device("emulator", arch="sm_90a"):
        model = Model(BF16, None, layers=1)
        assert decoder_layers(model.layers, **{"dtype": BF16, "eps": EPS, **model.sizes, **spoil}) is None
    with nbk.device("emulator", arch="sm_80"):
        assert decoder_layers(model.layers, dtype=BF16, eps=EPS, **model.sizes) is None
