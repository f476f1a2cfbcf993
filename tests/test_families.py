"""Every family computes what transformers does: as scripts/record_families.py recorded it, and live where it is there."""

import family_models
import numpy as np
import pytest

import nbkernels as nbk

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
# float32 on both sides: sums of some hundred products in another order
BOUND = 1e-4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def relative_error(found, want):
    return np.linalg.norm(found - want) / np.linalg.norm(want)


@pytest.fixture(scope="module", params=family_models.CASES)
def case(request, tmp_path_factory):
    """(recording, folder) of a family."""
    recorded = family_models.load_recording(request.param)
    return recorded, family_models.write_folder(tmp_path_factory.mktemp("family") / request.param, recorded)


def stepwise(model, ids):
    """Logits behind each token, read one at a time into a KV cache."""
    config = model.config
    with model.on_device():
        cache = nbk.KVCache(
            config.layers, config.kv_heads, config.head_dim, model.transformer.dtype, pages=8, page_size=16
        )
        sequence = cache.add()
        from nbkernels.model import backend

        rows = []
        for token in ids:
            hidden = model.transformer.hidden(backend.place(np.array([[token]], np.int32)), cache, [sequence])
            rows.append(np.array(backend.fetch(model.transformer.logits(hidden[0])))[0])
    return np.stack(rows)


@pytest.mark.parametrize("on", DEVICES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, on):
    recorded, folder = case
    model = nbk.load(folder, device=on, dtype="float32")
    prompt = recorded["prompt"].tolist()
    at_once = model.logits(prompt)
    assert relative_error(at_once[recorded["positions"]], recorded["logits"]) < BOUND
    assert relative_error(stepwise(model, prompt), at_once) < BOUND
    generation = model.generate(prompt, max_new_tokens=len(recorded["greedy"]), stream=True)
    list(generation)
    assert generation.ids == recorded["greedy"].tolist()
