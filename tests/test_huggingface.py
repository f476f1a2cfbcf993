"""Hugging Face folders: what is wrong with one is said, named, and nothing of it is trusted before; what is right is read."""

import json
import os
import struct
from types import SimpleNamespace

import family_models
import numpy as np
import pytest

import nbkernels as nbk
from nbkernels.arrays import bfloat16
from nbkernels.cli import main
from nbkernels.model.checkpoint import Checkpoint, shape_of
from nbkernels.model.config import CheckpointError
from nbkernels.model.families import OF_MODEL, huggingface_config
from nbkernels.model.huggingface_reader import DTYPES, INDEX, WEIGHTS, parse_json, read_header
from nbkernels.model.saved import write_safetensors

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
RECORDED = family_models.load_recording("llama")
CONFIG = json.loads(str(RECORDED["config"]))
ARRAYS = family_models.weights(RECORDED)
IDS = RECORDED["prompt"].tolist()
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return family_models.write_folder(tmp_path / "model", RECORDED, ARRAYS)


def write(folder, arrays, name=WEIGHTS):
    write_safetensors(folder / name, [(k, v.shape, v.dtype, lambda v=v: v) for k, v in arrays.items()])


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        nbk.load(folder, device="cpu")
    assert str(folder) in str(caught.value), "the message names the folder"


def shards(folder, count=3):
    """The weights of a folder as shards behind an index; returns the index."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    placed = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = dict(list(ARRAYS.items())[i::count])
        write(folder, part, file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index))
    return index


# ---- what is right --------------------------------------------------------------------------------------------------------


def test_shards_give_what_one_file_does(folder):
    want = nbk.load(folder, device="cpu").logits(IDS)
    shards(folder)
    np.testing.assert_array_equal(nbk.load(folder, device="cpu").logits(IDS), want)


def test_shards_may_be_links_out_of_the_folder(folder, tmp_path):
    """As the hub's cache keeps them."""
    index = shards(folder)
    for file in set(index["weight_map"].values()):
        (folder / file).rename(tmp_path / f"blob-{file}")
        os.symlink(tmp_path / f"blob-{file}", folder / file)
    assert relative(nbk.load(folder, device="cpu").logits(IDS)) < 1e-4


def relative(found):
    found = found[RECORDED["positions"]]
    return np.linalg.norm(found - RECORDED["logits"]) / np.linalg.norm(RECORDED["logits"])


@pytest.mark.parametrize("dtype, bound", [(np.float16, 2e-3), (bfloat16, 2e-2)])
def test_sixteen_bits(folder, dtype, bound):
    write(folder, {k: v.astype(dtype) for k, v in ARRAYS.items()})
    assert 1e-5 < relative(nbk.load(folder, device="cpu").logits(IDS)) < bound


def test_tensors_are_views_of_the_file(folder):
    """On the CPU, in the dtype they have: no copy is made, save of those that are joined or transposed."""
    weight = nbk.load(folder, device="cpu").transformer.layers[0].output.weight
    assert not weight.flags.owndata and not weight.flags.writeable


def test_names_of_a_bare_model_and_of_a_part_of_one(folder):
    bare = {k.removeprefix("model."): v for k, v in ARRAYS.items()}
    write(folder, bare)
    assert relative(nbk.load(folder, device="cpu").logits(IDS)) < 1e-4
    part = {"language_model." + k: v for k, v in ARRAYS.items()}
    part["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    write(folder, part)
    assert relative(nbk.load(folder, device="cpu").logits(IDS)) < 1e-4


def test_a_tied_head_with_and_without_one_in_the_file(folder):
    tied = {**CONFIG, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tied))
    with_head = nbk.load(folder, device="cpu").logits(IDS)
    headless = {k: v for k, v in ARRAYS.items() if k != "lm_head.weight"}
    write(folder, headless)
    np.testing.assert_array_equal(nbk.load(folder, device="cpu").logits(IDS), with_head)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    refused(folder, r"'lm_head\.weight' is missing")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}))
    np.testing.assert_array_equal(nbk.load(folder, device="cpu").logits(IDS), with_head)


@pytest.mark.parametrize(
    "name, older",
    [
        ("llama-linear", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        (
            "llama-yarn",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
        (
            "gemma3",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "layer_types": None,
                "sliding_window_pattern": 2,
            },
        ),
        ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("gemma2", {"layer_types": None}),
        ("smollm3", {"no_rope_layers": None}),
    ],
)
def test_older_spellings_of_config_json(name, older, tmp_path):
    recorded = family_models.load_recording(name)
    config = json.loads(str(recorded["config"]))
    del config["rope_parameters"]
    config |= {"rope_theta": 2e6} if name == "smollm3" else {}
    config = {k: v for k, v in (config | older).items() if v is not None}
    model = nbk.load(family_models.write_folder(tmp_path / name, recorded, config=config), device="cpu")
    found = model.logits(recorded["prompt"].tolist())[recorded["positions"]]
    assert np.linalg.norm(found - recorded["logits"]) / np.linalg.norm(recorded["logits"]) < 1e-4


def test_every_end_id_of_the_generation_config(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 3}))
    assert nbk.load(folder, device="cpu").tokenizer.end_ids == {3}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    model = nbk.load(folder, device="cpu")
    assert model.tokenizer.end_ids == {5, 7}
    greedy = RECORDED["greedy"].tolist()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [159, greedy[3]]}))
    generation = nbk.load(folder, device="cpu").generate(IDS, max_new_tokens=20, stream=True)
    list(generation)
    assert generation.ids == greedy[: greedy.index(greedy[3]) + 1] and generation.finish_reason == "end"


# ---- what is wrong --------------------------------------------------------------------------------------------------------


def test_missing_misshapen_and_unknown_tensors_are_named(folder):
    write(folder, {k: v for k, v in ARRAYS.items() if k != Q})
    refused(folder, rf"'{Q}' is missing")
    write(folder, {**ARRAYS, Q: ARRAYS[Q][:-1]})
    refused(folder, rf"'{Q}' has shape \(63, 64\), wanted \(64, 64\)")
    bias = Q.replace("q_proj.weight", "o_proj.scale")
    write(folder, {**ARRAYS, bias: np.ones(64, np.float32)})
    refused(folder, rf"'{bias}' .* is none that architecture 'llama' has")


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_told(folder, value):
    for dtype in (np.float32, np.float16, bfloat16):
        spoilt = {k: v.astype(dtype) for k, v in ARRAYS.items()}
        spoilt[Q][3, 5] = value
        write(folder, spoilt)
        refused(folder, rf"'{Q}' holds NaN or infinite")


@pytest.mark.parametrize(
    "changed, match",
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported; .*gemma2.*llama.*qwen3"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' is '64', wanted a number"),
        ({"num_hidden_layers": 10**12}, "layers"),
        ({"num_hidden_layers": -2}, "layers: -2"),
        ({"num_attention_heads": 0}, "heads: 0"),
        ({"num_key_value_heads": 3}, "multiple of the 3 KV heads"),
        ({"head_dim": 300}, "take up to 256"),
        ({"max_position_embeddings": 2**40}, "context"),
        ({"vocab_size": 1.5}, "wanted an integer"),
        ({"rms_norm_eps": -1}, "norm_eps"),
        ({"hidden_act": "relu6"}, "activation 'relu6'"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "'spiral' is not supported; default, linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor: 0"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "base: -1"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "'layer_types', wanted 2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
    ],
)
def test_config_json_that_cannot_be_used(folder, changed, match):
    config = {k: v for k, v in {**CONFIG, **changed}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, match)


def test_files_that_are_none(folder):
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json: no JSON")
    (folder / "config.json").write_text("[" * 100_000)
    refused(folder, r"config\.json: JSON nested too deep")
    (folder / "config.json").write_text("[]")
    refused(folder, r"config\.json: wanted an object")
    (folder / "config.json").write_text('{"a": 1, "a": 2}')
    refused(folder, "'a' stands there twice")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, r"tokenizer\.json cannot be used")
    (folder / "tokenizer.json").unlink()
    refused(folder, r"tokenizer\.json is missing")
    (folder / "tokenizer.model").write_text("")
    refused(folder, r"tokenizer\.model is there")


def test_weights_that_are_none(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, rf"no {WEIGHTS}")
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    refused(folder, r"pytorch_model\.bin: a pickle, refused .*convert it to safetensors")
    refused(folder / "pytorch_model.bin", r"pickle .*convert it to safetensors")
    (folder / WEIGHTS).write_bytes(b"")
    refused(folder, "an empty file")
    (folder / WEIGHTS).write_bytes(b"hello")
    refused(folder, "too short")
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(folder, "Git LFS pointer")
    (folder / WEIGHTS).write_bytes(b"PK\x03\x04" * 100)
    refused(folder, "a pickle, refused")


def test_an_index_that_lies(folder):
    index = shards(folder)
    first = next(iter(index["weight_map"]))

    def spoilt(file):
        (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], first: file}}))

    outside = folder.parent / "x.safetensors"
    outside.write_bytes((folder / index["weight_map"][first]).read_bytes())
    for file in ("../x.safetensors", str(outside), "..", "a/b", "..\\x.safetensors", 3, ""):
        spoilt(file)
        refused(folder, rf"'{first}' is in .*wanted a file of this folder")
    spoilt("absent.safetensors")
    refused(folder, r"absent\.safetensors: missing")
    spoilt(next(f for f in index["weight_map"].values() if f != index["weight_map"][first]))
    refused(folder, rf"'{first}' is missing, which")
    (folder / INDEX).write_text("{}")
    refused(folder, "weight_map")


def test_truncated_shards_and_duplicates(folder):
    index = shards(folder)
    file = folder / index["weight_map"][Q]
    content = file.read_bytes()
    for length in (7, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        refused(folder, rf"{file.name}.*(truncated|short)")
    file.write_bytes(content + b"x")
    refused(folder, "1 bytes behind the last tensor")
    file.write_bytes(content)
    write(folder, {Q: ARRAYS[Q]}, "more.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "x": "more.safetensors"}}))
    refused(folder, "stands in .* as well|'x' is missing")


def header(entries, size=64, length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)


def entry(shape=(4, 4), offsets=(0, 64), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content, match",
    [
        (header({}, length=2**64 - 1), "a header of 18446744073709551615 bytes"),
        (header({"a": entry()}, length=10**6), "a header of 1000000 bytes"),
        (header(b'{"a": {}, "a": {}}'), "'a' stands there twice"),
        (header(b"[" * 20000), "nested too deep"),
        (header(b"[]"), "no object"),
        (header({"a": 3}), "no dtype, shape"),
        (header({"a": entry(dtype="F99")}), "dtype 'F99'"),
        (header({"a": entry(dtype=["F32"])}), "dtype"),
        (header({"a": entry((-4, -4))}), "shape"),
        (header({"a": entry((2**63, 2**63))}), "takes"),
        (header({"a": entry((4.0, 4))}), "shape"),
        (header({"a": entry((True, 16))}), "shape"),
        (header({"a": entry([1] * 9)}), "shape"),
        (header({"a": entry(offsets=(-64, 0))}), "data_offsets"),
        (header({"a": entry(offsets=(64, 128))}), "ends at byte .*truncated"),
        (header({"a": entry(offsets=(2**70, 2**70 + 64))}), "truncated"),
        (header({"a": entry(offsets=(0, 60))}), "60 bytes, but shape"),
        (header({"a": entry(), "b": entry()}), "overlaps"),
        (header({"a": entry(offsets=(16, 80))}, 80), "leaves a gap"),
        (header({"a": entry()}, 80), "16 bytes behind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_that_lie(content, match, tmp_path):
    with pytest.raises(CheckpointError, match=match):
        read_header(memoryview(content), tmp_path / "file.safetensors")


def test_json_of_a_stranger():
    assert parse_json(b'{"a": [1, {"b": "]"}]}', "x") == {"a": [1, {"b": "]"}]}
    for data in (b"", b"{", b"\xff", b"[1" + b"0" * 5000 + b"]"):
        with pytest.raises(CheckpointError, match="x: "):
            parse_json(data, "x")


# ---- memory, convert, doctor ----------------------------------------------------------------------------------------------


def test_peak_memory_is_below_twice_the_largest_tensor(tmp_path):
    """A file of bfloat16 through the reader: what is allocated besides the mapped file while each tensor is taken."""
    import tracemalloc

    from nbkernels.model.huggingface_reader import HuggingFaceCheckpoint

    arrays = {k: v.astype(bfloat16) for k, v in ARRAYS.items()}
    arrays |= {k: np.zeros((4096, 64), bfloat16) for k in ("model.embed_tokens.weight", "lm_head.weight")}
    folder = family_models.write_folder(tmp_path / "m", RECORDED, {}, {**CONFIG, "vocab_size": 4096})
    write(folder, arrays)
    checkpoint = HuggingFaceCheckpoint(folder)
    checkpoint.check()
    tracemalloc.start()
    for name in ("embedding", "head"):
        checkpoint.tensor(name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 4096 * 64 * 2


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "gpt2", "gpt_neox"])
def test_loading_holds_less_than_twice_the_largest_tensor(name, quantize, tmp_path, monkeypatch):
    """The whole way to a device: read, taken apart or turned, checked, copied; quantised there.

    The device's arrays are mapped files, of which tracemalloc knows nothing. A stretch is as small beside the matrices
    here as it is beside those of a model of some billion weights.
    """
    import tracemalloc

    from nbkernels.model import backend, transformer
    from nbkernels.model.loading import open_checkpoint

    config = json.loads(str(family_models.load_recording(name)["config"]))
    sizes = {"n_embd": 256, "n_head": 8} if name == "gpt2" else {"hidden_size": 256, "intermediate_size": 1024}
    config = {**config, **sizes, "vocab_size": 6144, "head_dim": 32, "num_attention_heads": 8}
    monkeypatch.setattr(transformer, "STRETCH", 2**14)
    described = Checkpoint()  # of the tensors that a file of this family holds
    _, described.config = huggingface_config(config)
    family, wanted = described.family, {}
    described.transposed, described.names = family.transposed, family.tensors
    for part in family.tensors:
        if part == "head" and described.config.tied:
            continue
        for layer in (None,) if part in OF_MODEL else range(described.config.layers):
            wanted[described.name_of(part, layer)] = described._stored_shape(part)
            if part in family.biases:
                wanted[described.name_of(part, layer, "bias")] = shape_of(described.config, part)[:1]
    arrays = {key: np.ones(shape, bfloat16) for key, shape in wanted.items()}
    folder = family_models.write_folder(tmp_path / "m", RECORDED, {}, config)
    write(folder, arrays)
    largest = max(int(np.prod(shape)) for shape in wanted.values()) * 2

    def mapped(shape, dtype):
        kept.append(np.memmap(tmp_path / f"device{len(kept)}", dtype, "w+", shape=shape))
        return kept[-1]

    kept = []
    monkeypatch.setattr(backend, "on_host", lambda: False)
    monkeypatch.setattr(backend, "zeros", mapped)
    monkeypatch.setattr(backend, "place", lambda array: mapped(array.shape, array.dtype))
    monkeypatch.setattr(backend, "operations", lambda: SimpleNamespace(quantize_int8=lambda matrix, **_: matrix))
    checkpoint = open_checkpoint(folder)
    monkeypatch.setattr(transformer, "Transformer", lambda *_, **__: None)
    tracemalloc.start()
    transformer.load_transformer(checkpoint, dtype=bfloat16, quantize=quantize, progress=lambda share: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept and peak < 2 * largest, f"{peak / largest:.2f} times the largest tensor"


@pytest.mark.parametrize("quantize", ["int8", "int8-rows", "int8-activations"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_convert_keeps_every_bit(tmp_path, name, quantize):
    folder = family_models.write_folder(tmp_path / "m", family_models.load_recording(name))
    out = tmp_path / "out"
    assert main(["convert", str(folder), str(out), "--quantize", quantize, "--device", "cpu"]) == 0
    want = nbk.load(folder, device="cpu", quantize=quantize).logits(IDS)
    np.testing.assert_array_equal(nbk.load(out, device="cpu").logits(IDS), want)
    with pytest.raises(CheckpointError, match="quantize"):
        nbk.load(out, device="cpu", quantize="int8" if quantize != "int8" else "int8-rows")
    assert main(["convert", str(folder), str(out), "--quantize", quantize, "--device", "cpu"]) == 2, (
        "never over another"
    )


def test_writing_tells_how_far_it_is(tmp_path):
    from nbkernels.model import saved

    model = nbk.load(family_models.write_folder(tmp_path / "m", family_models.load_recording("llama")), device="cpu")
    shares = []
    saved.save(model, tmp_path / "out", quantize=None, progress=shares.append)
    assert len(shares) > 10 and shares == sorted(shares) and shares[0] > 0 and shares[-1] == 1


def test_a_damaged_int8_file_is_told(tmp_path, capsys):
    folder, out = family_models.write_folder(tmp_path / "m", family_models.load_recording("gpt2")), tmp_path / "out"
    assert main(["convert", str(folder), str(out), "--quantize", "int8", "--device", "cpu"]) == 0
    with open(out / WEIGHTS, "rb") as file:
        content = file.read()
    tensors = read_header(memoryview(content), out / WEIGHTS)
    kept = {
        name: np.frombuffer(content[t.start : t.end], DTYPES[t.kind]).reshape(t.shape) for name, t in tensors.items()
    }
    one = "layers.1.down.scales"
    for spoilt, match in (
        ({k: v for k, v in kept.items() if k != one}, f"'{one}' is missing"),
        ({**kept, one: kept[one][:-1]}, f"'{one}' is F32"),
        ({**kept, "layers.1.qkv.bias": np.ones(3, np.float32)}, r"'layers\.1\.qkv\.bias' is F32"),
        ({**kept, "more": np.ones(3, np.float32)}, "'more' is none that"),
    ):
        write(out, spoilt)
        refused(out, match)
        assert main(["doctor", str(out)]) == 1
        capsys.readouterr()
    config = json.loads((out / "config.json").read_text())
    for changed in (
        {"version": 99},
        {"quantize": "int2"},
        {"config": {}},
        {"config": {**config["config"], "heads": "4"}},
    ):
        (out / "config.json").write_text(json.dumps({**config, **changed}))
        refused(out, "config.json|heads")


def test_convert_refuses_what_it_cannot_write(tmp_path, capsys):
    folder = family_models.write_folder(tmp_path / "m", family_models.load_recording("gpt2"))
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert "'gpt2' cannot be written as a Hugging Face folder" in capsys.readouterr().err
    kept = str(tmp_path / "kept")
    assert main(["convert", str(folder), kept, "--quantize", "int8", "--device", "cpu"]) == 0
    assert main(["convert", kept, str(tmp_path / "out")]) == 2
    assert "convert the original" in capsys.readouterr().err
    # a folder that is taken is told before anything is read
    assert main(["convert", "/nowhere", kept, "--quantize", "int8", "--device", "cpu"]) == 2
    assert "wanted a new or an empty folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["convert", str(folder), str(tmp_path / "file")]) == 2
    assert "wanted a new or an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama-biased", "mistral", "qwen2", "qwen2-window", "qwen3"])
def test_a_folder_written_again_is_the_same(tmp_path, name):
    recorded = family_models.load_recording(name)
    folder = family_models.write_folder(tmp_path / "m", recorded)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0
    ids = recorded["prompt"].tolist()
    again = nbk.load(tmp_path / "out", device="cpu")
    np.testing.assert_array_equal(again.logits(ids), nbk.load(folder, device="cpu").logits(ids))


def test_doctor(folder, capsys):
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "llama, 2 layers of width 64" in said and "in bfloat16" in said and "runs" in said
    write(folder, {k: v for k, v in ARRAYS.items() if k != Q})
    (folder / "tokenizer.json").unlink()
    assert main(["doctor", str(folder)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"tensor '{Q}' is missing" in said and "tokenizer.json is missing" in said
    assert main(["doctor", str(folder / "absent")]) == 1


def test_the_real_model_as_a_folder_and_in_int8(model_path, tmp_path):
    """The same ids from the GGUF file, from a Hugging Face folder of it, and from its int8 file."""
    golden = json.loads((family_models.FOLDER.parent / "smollm2_135m_q4_1.json").read_text())["cases"][0]
    for out, options in (("folder", []), ("int8", ["--quantize", "int8"])):
        assert main(["convert", model_path, str(tmp_path / out), "--device", "cpu", *options]) == 0
        model = nbk.load(tmp_path / out, device="cpu")
        assert model.encode(golden["prompt"]) == golden["prompt_ids"]
        count = 1 if options else 24
        generation = model.generate(golden["prompt"], max_new_tokens=count, stream=True)
        list(generation)
        assert generation.ids == golden["greedy_ids"][:count]
    messages = [{"role": "user", "content": "Hi"}]
    assert model.encode(messages) == nbk.load(model_path, device="cpu").encode(messages)
