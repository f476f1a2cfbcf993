"""The runtime from prompt to text, on a tiny model and, where it is at hand, on a real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_model

import nbkernels as nbk
from nbkernels.launch import emulated
from nbkernels.launch.device import current
from nbkernels.model import session
from nbkernels.model.transformer import QUANTIZATIONS, interleave_gate_up

pytest.importorskip("gguf")
GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_135m_q4_1.json").read_text())["cases"]
SMALLEST_GAP = 0.15  # where the two likeliest tokens lie closer, rounding may choose the other


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return nbk.load(tiny_model.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), device="cpu")


def plain_logits(ids):
    """The tiny model's logits by a second implementation: no cache, no fusion, interleaved rotary pairs as the file has them."""
    weights = {name: w.astype(np.float64) for name, w in tiny_model.tensors().items()}
    head_dim, heads, kv_heads = tiny_model.HEAD_DIM, tiny_model.HEADS, tiny_model.KV_HEADS
    angle = np.outer(np.arange(len(ids)), 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim))
    turn = np.exp(1j * angle)[:, None]  # rotation of a pair as a product of complex numbers

    def norm(x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def rotate(x):
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack((pairs.real, pairs.imag), axis=-1).reshape(x.shape)

    x = weights["token_embd.weight"][ids]
    for i in range(tiny_model.LAYERS):
        w = {name: weights[f"blk.{i}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        h = norm(x)
        q = rotate((h @ w["attn_q"].T).reshape(-1, heads, head_dim))
        k = rotate((h @ w["attn_k"].T).reshape(-1, kv_heads, head_dim))
        v = (h @ w["attn_v"].T).reshape(-1, kv_heads, head_dim)
        seen = np.zeros_like(q)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            for t in range(len(ids)):
                score = k[: t + 1, shared] @ q[t, head] / np.sqrt(head_dim)
                weight = np.exp(score - score.max())
                seen[t, head] = weight @ v[: t + 1, shared] / weight.sum()
        x = x + seen.reshape(len(ids), -1) @ w["attn_output"].T
        h = norm(x)
        gate = h @ weights[f"blk.{i}.ffn_gate.weight"].T
        up = h @ weights[f"blk.{i}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"blk.{i}.ffn_down.weight"].T
    return norm(x) @ weights["token_embd.weight"].T


def test_logits_equal_a_second_implementation(tiny):
    ids = tiny.encode("the quick fox.")
    want = plain_logits(ids)
    assert np.linalg.norm(tiny.logits(ids) - want) / np.linalg.norm(want) < 1e-5


def test_cached_steps_equal_one_pass(tiny):
    generation = tiny.generate("the a", max_new_tokens=20, stream=True)
    list(generation)
    everything = tiny.encode("the a") + generation.ids
    want = np.argmax(plain_logits(everything[:-1])[len(tiny.encode("the a")) - 1 :], axis=-1)
    assert generation.ids == want.tolist()


def test_a_gate_and_an_up_by_turns():
    gate, up = np.arange(6, dtype=np.float32).reshape(3, 2), -np.arange(6, dtype=np.float32).reshape(3, 2)
    weight = interleave_gate_up(gate, up)
    np.testing.assert_array_equal(weight, [[0, 1], [0, -1], [2, 3], [-2, -3], [4, 5], [-4, -5]])
    x = np.array([[0.5, -0.25]], np.float32)
    with nbk.device("cpu"):
        y = nbk.matmul(x, weight, activation="silu_mul")
        want = nbk.silu_mul(x @ gate.T, x @ up.T)
    np.testing.assert_allclose(y, want, rtol=1e-6)


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_int8_logits_are_near_the_dense_ones(tmp_path, tiny, quantize):
    """Eight bits of a weight are off by some thousandths; so are eight bits of an activation, and not by chance the same."""
    int8 = nbk.load(tiny_model.write(tmp_path / "t.gguf"), device="cpu", quantize=quantize)
    ids = tiny.encode("the quick fox.")
    want = tiny.logits(ids)
    error = np.linalg.norm(int8.logits(ids) - want) / np.linalg.norm(want)
    assert 1e-4 < error < 5e-2


@pytest.mark.parametrize(
    "cache_dtype, bound", [(np.float32, 1e-5), (np.int8, 2e-2)]
)  # int8: a part in 127 of each head
def test_forks_in_a_batch_equal_texts_of_their_own(tiny, cache_dtype, bound):
    ids = tiny.encode("the quick brown fox")
    config = tiny.config
    with tiny.on_device():
        cache = nbk.KVCache(
            config.layers, config.kv_heads, config.head_dim, cache_dtype, pages=6, page_size=16, max_sequences=3
        )
        first = cache.add()
        tiny.transformer.hidden(np.array([ids], np.int32), cache, [first])
        second, third = cache.fork(first), cache.fork(first)
        assert cache.pages_in_use == -(-len(ids) // 16)
        for batch, tokens in (([first, second], [[5], [6]]), ([third, first], [[7], [8]])):
            hidden = tiny.transformer.hidden(np.array(tokens, np.int32), cache, batch)
            scores = tiny.transformer.logits(hidden[:, -1])
    for found, text in zip(scores, ([*ids, 7], [*ids, 5, 8]), strict=True):
        want = tiny.logits(text)[-1]
        assert np.linalg.norm(found - want) / np.linalg.norm(want) < bound


def test_the_emulator_continues_as_the_cpu(model_path):
    """The real model, int8 weights, every kernel of it as compiled PTX; its checks are those of other tests, off here."""
    prompt = "The capital of France is"
    wanted = nbk.load(model_path, device="cpu", quantize="int8").generate(prompt, max_new_tokens=4, stream=True)
    list(wanted)
    machine = emulated.emulator()
    with nbk.device("emulator", arch="sm_90a"):
        found = nbk.load(model_path, device="emulator", quantize="int8").generate(prompt, max_new_tokens=4, stream=True)
        machine.checks = False
        machine.machines.clear()
        try:
            list(found)
        finally:
            machine.checks = True
            machine.machines.clear()
    assert len(found.ids) == 4 and found.ids == wanted.ids


def test_a_generation_does_not_see_an_earlier_one(tiny):
    fresh = tiny.generate("fox", max_new_tokens=12)
    tiny.generate("the quick brown fox jumps over the lazy dog", max_new_tokens=20)
    assert tiny.generate("fox", max_new_tokens=12) == fresh


def test_stream_gives_the_same_text_in_pieces(tiny):
    generation = tiny.generate("the", max_new_tokens=20, stream=True)
    assert "".join(generation) == tiny.generate("the", max_new_tokens=20) == generation.text
    assert generation.finish_reason in ("length", "end")


def test_prompts_beyond_any_queue(tiny):
    """The Engine that was made for few of them takes as many as there are."""
    few, many = ["the"] * 65, ["the", "a"] * 600
    want = {prompt: tiny.generate(prompt, max_new_tokens=1) for prompt in many}
    assert tiny.generate(few, max_new_tokens=1) == [want[prompt] for prompt in few]
    assert tiny.generate(many, max_new_tokens=1) == [want[prompt] for prompt in many]


def test_several_prompts_have_the_texts_of_each(tiny):
    prompts = ["the", "a" * 40, "the quick brown fox.", *(f"fox {i}" for i in range(20))]
    options = {"max_new_tokens": 12, "temperature": 0.7, "seed": 3, "stop": "9"}
    assert tiny.generate(prompts, **options) == [tiny.generate(p, **options) for p in prompts]
    assert tiny.generate([[1, 2], [3]], max_new_tokens=3) == [tiny.generate(p, max_new_tokens=3) for p in ([1, 2], [3])]
    chats = [[{"role": "user", "content": text}] for text in ("the", "fox")]
    streams = tiny.generate(chats, max_new_tokens=5, stream=True)
    assert ["".join(s) for s in streams] == [tiny.generate(chat, max_new_tokens=5) for chat in chats]
    with pytest.raises(ValueError, match=f"context of {tiny_model.CONTEXT}"):
        tiny.generate(["the", "a" * tiny_model.CONTEXT])


def test_speculation_says_the_same(tiny):
    for prompt in ("a" * 30, "the quick brown fox", "zz zz zz"):
        assert tiny.generate(prompt, max_new_tokens=30, speculate=7) == tiny.generate(prompt, max_new_tokens=30)
    with pytest.raises(ValueError, match="speculate: 8"):
        tiny.generate("the", speculate=8)


def test_steps_that_run_ahead_say_the_same(tiny, monkeypatch):
    """As on a GPU: a step is launched before the token in front of it is taken, and one may be too many."""
    want = [tiny.generate(p, max_new_tokens=20, temperature=1.0, seed=3) for p in ("the", "fox")]
    monkeypatch.setattr(session.Session, "ahead", property(lambda _: 1, lambda *_: None), raising=False)
    tiny._idle_session = None
    for prompt, text in zip(("the", "fox"), want, strict=True):
        assert tiny.generate(prompt, max_new_tokens=20, temperature=1.0, seed=3) == text
        assert (
            tiny.generate(prompt, max_new_tokens=20, temperature=1.0, seed=3, stop=text[3:5])
            == text.split(text[3:5])[0]
        )
    tiny._idle_session = None


def test_generation_ends_at_the_context(tiny):
    generation = tiny.generate("a" * (tiny_model.CONTEXT - 3), max_new_tokens=50, stream=True)
    list(generation)
    assert len(generation.ids) <= 3


def test_prompts_that_do_not_fit(tiny):
    with pytest.raises(ValueError, match=f"context of {tiny_model.CONTEXT}"):
        tiny.generate("a" * tiny_model.CONTEXT)
    with pytest.raises(ValueError, match="empty"):
        tiny.generate("")
    with pytest.raises(ValueError, match="no tokens"):
        tiny.generate([])
    with pytest.raises(ValueError, match="no tokens"):
        tiny.generate("\0")  # a byte that the vocabulary does not have
    with pytest.raises(ValueError, match="vocabulary"):
        tiny.generate([10**6])
    with pytest.raises(TypeError, match="prompt"):
        tiny.generate(None)
    for ids in ([1.7], [True], [None], [3, "4"], np.array([1.0]), np.array([[1]])):
        with pytest.raises(TypeError, match=r"prompt\[\d\]: .* wanted a token id"):
            tiny.encode(ids)
    assert tiny.encode(np.array([1, 2], np.uint8)) == tiny.encode((1, np.int64(2))) == [1, 2]


@pytest.mark.parametrize(
    "option, value, error",
    [
        ("temperature", -0.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "hot", TypeError),
        ("temperature", 1e-21, ValueError),
        ("temperature", 10**400, ValueError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.5, ValueError),
        ("top_k", 0, ValueError),
        ("top_k", 1.5, TypeError),
        ("min_p", -0.1, ValueError),
        ("repetition_penalty", 0, ValueError),
        ("repetition_penalty", 10**400, ValueError),
        ("seed", -1, ValueError),
        ("max_new_tokens", 0, ValueError),
        ("max_new_tokens", 1.5, TypeError),
        ("stop", [""], ValueError),
        ("stop", [3], TypeError),
        ("stop", 3, TypeError),
        ("stop", None, TypeError),
    ],
)
def test_wrong_options_name_themselves(tiny, option, value, error):
    with pytest.raises(error, match=option):
        tiny.generate("the", **{option: value})


def test_seeds_repeat_and_differ(tiny):
    options = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "max_new_tokens": 20}
    first = tiny.generate("the", seed=1, **options)
    assert first == tiny.generate("the", seed=1, **options)
    assert any(first != tiny.generate("the", seed=s, **options) for s in range(2, 6))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-20},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 1},
    ],
)
def test_extreme_options_are_greedy(tiny, options):
    assert tiny.generate("the", max_new_tokens=12, seed=3, **options) == tiny.generate("the", max_new_tokens=12)


def test_padded_vocabulary_is_never_drawn(tmp_path):
    arrays = tiny_model.tensors(vocab=len(tiny_model.TOKENS) + 9)
    arrays["token_embd.weight"][len(tiny_model.TOKENS) :] = 100 * np.abs(arrays["token_embd.weight"]).max()
    model = nbk.load(tiny_model.write(tmp_path / "padded.gguf", arrays=arrays), device="cpu")
    generation = model.generate("the", max_new_tokens=20, stream=True)
    list(generation)
    assert max(generation.ids) < len(tiny_model.TOKENS)


def test_abandoned_stream_leaves_the_device_alone(tiny):
    before = current()
    stream = tiny.generate("the", max_new_tokens=20, stream=True)
    next(stream, None)
    stream.close()
    assert current() == before


def test_the_cpu_needs_no_numba(tmp_path):
    path = tiny_model.write(tmp_path / "t.gguf")
    code = (
        "import sys, nbkernels as nbk\n"
        f"nbk.load({str(path)!r}, device='cpu').generate('the', max_new_tokens=3, temperature=1.0, seed=1)\n"
        "assert not {'numba', 'cuda', 'llvmlite'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, *QUANTIZATIONS])
def test_devices_agree(tmp_path, quantize):
    path = tiny_model.write(tmp_path / "t.gguf")
    cpu = nbk.load(path, device="cpu", quantize=quantize)
    gpu = nbk.load(path, device="cuda", dtype="float32", quantize=quantize)
    ids = cpu.encode("the quick fox.")
    want = cpu.logits(ids)
    assert np.linalg.norm(gpu.logits(ids) - want) / np.linalg.norm(want) < 1e-5
    options = {
        "max_new_tokens": 20,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "seed": 5,
    }
    assert gpu.generate("the", **options) == cpu.generate("the", **options)


@pytest.mark.gpu
def test_memory_does_not_grow(tmp_path):
    from nbkernels.launch.memory import used_bytes

    model = nbk.load(tiny_model.write(tmp_path / "t.gguf"), device="cuda")

    def generate(count):
        for i in range(count):
            model.generate("a" * (1 + i % 30), max_new_tokens=1 + i % 20, temperature=float(i % 2), seed=i)

    generate(30)
    with model.on_device():
        before = used_bytes()
    generate(170)
    with model.on_device():
        assert used_bytes() <= before


# ---- the real model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DEVICES)
def smollm(request, model_path):
    return nbk.load(model_path, device=request.param, dtype="float32")


@pytest.mark.parametrize("case", GOLDEN, ids=[c["prompt"][:20] for c in GOLDEN])
def test_golden_ids(smollm, case):
    assert smollm.encode(case["prompt"]) == case["prompt_ids"]
    logits = smollm.logits(case["prompt_ids"])[-1]
    for token, value in case["top5_logits"]:
        assert abs(logits[token] - value) < 2e-3
    generation = smollm.generate(case["prompt"], max_new_tokens=len(case["greedy_ids"]), stream=True)
    list(generation)
    certain = next((i for i, gap in enumerate(case["top_two_gaps"]) if gap < SMALLEST_GAP), len(case["greedy_ids"]))
    assert generation.ids[:certain] == case["greedy_ids"][:certain]


TEXT = Path(__file__).parent / "data" / "perplexity.txt"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_keeps_the_first_token_and_the_perplexity(model_path, dtype):
    dense = nbk.load(model_path, device="cuda", dtype="float32")
    int8 = nbk.load(model_path, device="cuda", dtype=dtype, quantize="int8")
    assert int8.generate("The capital of France is", max_new_tokens=1) == " Paris"
    want = dense.perplexity(TEXT.read_text())
    assert abs(int8.perplexity(TEXT.read_text()) / want - 1) < 0.01


def test_console_command(model_path):
    command = [sys.executable, "-m", "nbkernels.cli", "generate", "--model", model_path, "--device", "cpu"]
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    finished = subprocess.run(
        [*command, "--max-new-tokens", "4", "The capital of France is"], capture_output=True, text=True, env=environment
    )
    assert finished.returncode == 0
    assert finished.stdout.startswith(" Paris.")
    assert "tokens/s" in finished.stderr and "MiB" in finished.stderr
