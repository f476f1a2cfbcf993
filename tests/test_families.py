"""Every family computes what transformers does: as scripts/record_families.py recorded it, and live where it is there."""

import json

import family_models
import numpy as np
import pytest

import nbkernels as nbk
from nbkernels.model import backend
from nbkernels.model.checkpoint import NORMS
from nbkernels.model.families import FAMILIES, GGUF_TENSORS, OF_MODEL

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


def test_the_emulator_computes_the_same(tmp_path):
    """The family with the most of its own, as compiled PTX: windows, soft caps, norms of outputs, scaled embeddings."""
    name = "gemma2"
    recorded = family_models.load_recording(name)
    folder = family_models.write_folder(tmp_path / name, recorded)
    ids = recorded["prompt"].tolist()[:13]
    with nbk.device("emulator", arch="sm_90a"):
        model = nbk.load(folder, device="emulator", dtype="float32")
        found = model.logits(ids)
        assert relative_error(found[[0, 5, 12]], recorded["logits"][:3]) < BOUND
        assert relative_error(stepwise(model, ids[:3]), found[:3]) < BOUND


@pytest.mark.parametrize("quantize", ["int8", "int8-rows", "int8-activations"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "gpt_neox", "olmo2"])
def test_int8_logits_are_near_the_dense_ones(name, quantize, tmp_path):
    """Biases, positions and both kinds of gate beside int8 weights: some hundredths, for matrices this narrow."""
    recorded = family_models.load_recording(name)
    model = nbk.load(family_models.write_folder(tmp_path / name, recorded), device="cpu", quantize=quantize)
    found = model.logits(recorded["prompt"].tolist())[recorded["positions"]]
    assert 1e-4 < relative_error(found, recorded["logits"]) < 5e-2


@pytest.mark.parametrize("name", family_models.CASES)
def test_live_against_transformers(name, tmp_path):
    """Other prompts than the recorded ones, where transformers and torch are installed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = family_models.write_folder(tmp_path / name, family_models.load_recording(name))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    ours = nbk.load(folder, device="cpu")
    for seed, length in enumerate((1, 2, 9, 33, 90)):
        ids = np.random.default_rng(seed).integers(0, family_models.VOCAB, length).tolist()
        with torch.no_grad():
            want = theirs(torch.tensor([ids])).logits[0].numpy()
        assert relative_error(ours.logits(ids), want) < BOUND


# ---- GGUF ---------------------------------------------------------------------------------------------------------------


def interleaved(matrix, heads):
    """Rows of q or k as llama files hold them: those of rotary pair i of each head side by side."""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)


def write_gguf(path, name, kind="F32"):
    """A GGUF file of a recording, tensors renamed and laid out as llama.cpp's conversion does; kind: of its matrices."""
    import gguf

    recorded = family_models.load_recording(name)
    config = json.loads(str(recorded["config"]))
    family = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(path, family.gguf)
    get = lambda *keys: next(config[k] for k in keys if config.get(k) is not None)  # noqa: E731
    heads = get("num_attention_heads", "n_head")
    kv_heads = config.get("num_key_value_heads") if "num_key_value_heads" in config else heads
    if family.gguf in ("gpt2", "gptneox"):
        kv_heads = heads
    hidden = get("hidden_size", "n_embd")
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_context_length(get("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(hidden)
    writer.add_block_count(get("num_hidden_layers", "n_layer"))
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    if family.norm == "rms":
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(get("layer_norm_eps", "layer_norm_epsilon"))
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # Gemma 3: the other layers' base is known
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if family.windowed and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family.parallel_key:
        writer.add_parallel_residual(config[family.parallel_key])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["w", "0", "w0", *(f"t{i}" for i in range(3, family_models.VOCAB))])
    writer.add_token_merges(["w 0"])
    arrays = family_models.weights(recorded)
    for part, pattern in family.tensors.items():
        for layer in (None,) if part in OF_MODEL else range(get("num_hidden_layers", "n_layer")):
            for ending in ("weight", "bias"):
                stored = arrays.get(f"{pattern.format(layer)}.{ending}")
                if stored is None:
                    continue
                if part in ("q", "k") and family.gguf_interleaved:
                    stored = interleaved(stored, heads if part == "q" else kv_heads)
                if part in NORMS and ending == "weight":
                    stored = stored + np.float32(family.norm_offset)
                if family.transposed and stored.ndim == 2 and part not in OF_MODEL:
                    stored = np.ascontiguousarray(stored.T)
                if family.qkv_by_heads and part == "qkv":
                    by_heads = stored.reshape(heads, 3, -1, *stored.shape[1:])
                    stored = np.ascontiguousarray(by_heads.swapaxes(0, 1)).reshape(stored.shape)
                target = f"{GGUF_TENSORS[part].format(layer)}.{ending}"
                if kind == "F32" or stored.ndim == 1:
                    writer.add_tensor(target, stored)
                else:
                    quantization = gguf.GGMLQuantizationType[kind]
                    writer.add_tensor(target, gguf.quantize(stored, quantization), raw_dtype=quantization)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-biased", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2"],
)
def test_gguf_files_give_the_same_logits(name, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    if "gemma" in name:  # what GGUF files of Gemma do not say: scores are divided by the root of head_dim
        changed = dict(family_models.load_recording(name))
        raw = json.loads(str(changed["config"])) | {"query_pre_attn_scalar": 32}
        folder = family_models.write_folder(tmp_path / "hf", changed, config=raw)
    else:
        folder = family_models.write_folder(tmp_path / "hf", family_models.load_recording(name))
    if name == "smollm3":  # nor which layers of SmolLM3 rotate: three of four
        monkeypatch.setitem(FAMILIES["smollm3"].defaults, "no_rope_layer_interval", 2)
    ids = family_models.load_recording(name)["prompt"].tolist()
    want = nbk.load(folder, device="cpu").logits(ids)
    found = nbk.load(write_gguf(tmp_path / "m.gguf", name), device="cpu").logits(ids)
    assert relative_error(found, want) < 1e-6


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_quantised_gguf_files_give_the_logits_of_their_values(name, kind, tmp_path):
    """As a folder of the same values in float32; of phi3 fused tensors are read by rows."""
    gguf = pytest.importorskip("gguf")
    recorded = family_models.load_recording(name)
    quantization = gguf.GGMLQuantizationType[kind]
    arrays = family_models.weights(recorded)
    config = json.loads(str(recorded["config"]))
    for key, array in arrays.items():
        if array.ndim == 2:
            # the file holds q's and k's rows in another order, but blocks lie within a row
            arrays[key] = gguf.dequantize(gguf.quantize(array, quantization), quantization).reshape(array.shape)
    ids = recorded["prompt"].tolist()
    want = nbk.load(family_models.write_folder(tmp_path / "hf", recorded, arrays, config), device="cpu").logits(ids)
    found = nbk.load(write_gguf(tmp_path / "m.gguf", name, kind), device="cpu").logits(ids)
    assert relative_error(found, want) < 1e-6
