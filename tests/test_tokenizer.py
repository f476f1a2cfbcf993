"""Text to ids and back: control tokens only where they are meant, no half characters, stop strings that span tokens."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_model
from tiny_model import BOS, END, START, TOKENS

from nbkernels.launch.compile import cache_folder
from nbkernels.model import chat
from nbkernels.model.chat import encode_chat
from nbkernels.model.config import CheckpointError
from nbkernels.model.gguf_reader import read_header
from nbkernels.model.tokenizer import (
    TextStream,
    Tokenizer,
    byte_level_backend,
    sentencepiece_backend,
    tokenizer_from_gguf,
)

pytest.importorskip("tokenizers")


def make(add_bos=False, pre="gpt-2"):
    types = [3 if t in tiny_model.CONTROL else 1 for t in TOKENS]
    backend = byte_level_backend(TOKENS, tiny_model.MERGES, types, pre)
    return Tokenizer(backend, bos=BOS, add_bos=add_bos, end_ids=[END])


def ids(*names):
    return [TOKENS.index(n) for n in names]


def test_merges_and_round_trip():
    tokenizer = make()
    assert tokenizer.encode("the a") == ids("the", "Ġa")
    for text in ("the quick\nfox, 42!", "é", "a é the", "<|im_end"):
        known = tokenizer.encode(text)
        assert tokenizer.decode(known) == text


def test_control_tokens_only_where_asked_for():
    tokenizer = make()
    assert tokenizer.encode("a<|im_end|>b", control=True) == [*ids("a"), END, *ids("b")]
    assert END not in tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "a<|im_end|>b"


def test_one_bos_and_no_second():
    tokenizer = make(add_bos=True)
    assert tokenizer.encode_prompt("the") == [BOS, *ids("the")]
    assert tokenizer.encode_prompt("<|bos|>the") == [BOS, *ids("the")]
    assert make().encode_prompt("the") == ids("the")


def test_chat_markers_in_content_stay_text():
    tokenizer = make()
    got = encode_chat(tokenizer, tiny_model.TEMPLATE, [{"role": "user", "content": "a <|im_end|> b<|im_start|>"}])
    assert got.count(END) == 1 and got.count(START) == 2, "those of the template, none of the user's"
    assert "a <|im_end|> b<|im_start|>" in tokenizer.decode(got)


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], ValueError),
        (["hello"], TypeError),
        ([{"role": "user"}], TypeError),
        ([{"role": "user", "content": 3}], TypeError),
        ([{"role": "pirate", "content": "arr"}], ValueError),
    ],
)
def test_messages_that_are_none(messages, error):
    with pytest.raises(error, match="messages"):
        encode_chat(make(), tiny_model.TEMPLATE, messages)


def test_templates_run_in_a_sandbox():
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="template"):
        encode_chat(make(), attack, [{"role": "user", "content": "a"}])
    for attack in (
        "{{ messages.__init__.__globals__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'a' * 2**40 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    ):
        with pytest.raises(ValueError, match="template"):
            encode_chat(make(), attack, [{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="no system"):
        encode_chat(make(), "{{ raise_exception('no system') }}", [{"role": "user", "content": "a"}])
    with pytest.raises(CheckpointError, match="template"):
        encode_chat(make(), None, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
    ids=["loops", "power"],
)
def test_endless_templates_are_stopped(monkeypatch, endless):
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 1.0)
    with pytest.raises(ValueError, match=r"template was stopped after 1\.0 seconds"):
        encode_chat(make(), endless, [{"role": "user", "content": "a"}])
    monkeypatch.undo()
    assert encode_chat(make(), tiny_model.TEMPLATE, [{"role": "user", "content": "a"}]), "the next one is rendered"


def test_special_tokens_stand_where_the_template_puts_them():
    """A tokenizer that starts texts with a BOS adds none to a chat, and none beside the template's own."""
    message = [{"role": "user", "content": "a"}]
    assert BOS not in encode_chat(make(add_bos=True), tiny_model.TEMPLATE, message)
    assert encode_chat(make(add_bos=True), "{{ bos_token }}" + tiny_model.TEMPLATE, message).count(BOS) == 1


def test_streaming_never_shows_half_a_character():
    tokenizer = make()
    stream = TextStream(tokenizer)
    first, second = ids("Ã", "©")
    assert stream.push(first) == ""
    assert stream.push(second) == "é"
    assert stream.push(first) == ""
    assert stream.finish() == "\ufffd", "a character that never ended is told, not lost"


def feed(text, stop):
    """Push a text letter by letter; returns (pieces, rest, stopped)."""
    tokenizer = make()
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return "".join(pieces), stream.finish(), stream.stopped


def test_stop_strings_span_tokens():
    assert feed("abcxyzdef", ["xyz"]) == ("abc", "", True)
    assert feed("abcxy", ["xyz"]) == ("abc", "xy", False), "held text is given out at the end"
    assert feed("aab", ["ab"]) == ("a", "", True)
    assert feed("abababc", ["ababc"]) == ("ab", "", True)
    assert feed("one.two!", ["!", ".t"]) == ("one", "", True)


def test_smollm_digits_are_cut_one_by_one():
    types = [1] * 13
    tokens = [*"0123456789", "12", "Ġ", "123"]
    cut, whole = (Tokenizer(byte_level_backend(tokens, ["1 2", "12 3"], types, pre)) for pre in ("smollm", "gpt-2"))
    assert cut.encode("123") == [1, 2, 3]
    assert whole.encode("123") == [12]


def test_unknown_pre_tokenizer():
    with pytest.raises(CheckpointError, match="'qwen9'"):
        make(pre="qwen9")


# ---- SentencePiece --------------------------------------------------------------------------------------------------------

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "▁a",
    "▁ab",
    "bc",
    "[INST]",
]
SCORES = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -3.0, -2.0, -4.0, -1.0, 0.0]
KINDS = [2, 3, 3, *[6] * 256, *[1] * 8, 3]


def sentencepiece(prefix=True):
    return Tokenizer(sentencepiece_backend(PIECES, SCORES, KINDS, prefix), bos=1, add_bos=True, end_ids=[2])


def pieces(*names):
    return [PIECES.index(n) for n in names]


def test_the_best_scored_pair_merges_first():
    tokenizer = sentencepiece()
    assert tokenizer.encode("abc") == pieces("▁a", "bc"), "bc (-1) before ▁a (-2) before ab (-3)"
    assert tokenizer.encode("ab a") == pieces("▁ab", "▁a")
    assert sentencepiece(prefix=False).encode("ab") == pieces("ab")
    for text in ("abc", "ab  a", "a é", "é", " a", "b<s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_prompt("<s>a") == tokenizer.encode_prompt("a") == [1, *pieces("▁a")]


def test_byte_pieces_stream_whole_characters():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("a€")
    assert ids == pieces("▁a", "<0xE2>", "<0x82>", "<0xAC>")
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in ids] == [" a", "", "", "€"]
    assert stream.push(ids[1]) == "" and stream.finish() == "\ufffd"


def test_markers_in_content_stay_text_in_a_tokenizer_json(tmp_path):
    """Of a tokenizer.json that marks the first word of a text: what follows a control token is no first word."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    backend = Backend.from_str(sentencepiece(prefix=False).backend.to_str())
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = Tokenizer(backend, bos=1)
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[INST]"
    plain = encode_chat(tokenizer, template, [{"role": "user", "content": "ab"}])
    assert plain == [1, *pieces("[INST]", "ab", "[INST]")] == backend.encode("<s>[INST]ab[INST]").ids
    marked = encode_chat(tokenizer, template, [{"role": "user", "content": "ab[INST]"}])
    assert marked[:3] == plain[:3] and marked.count(PIECES.index("[INST]")) == 2
    assert tokenizer.decode(marked[2:-1]) == "ab[INST]"


@pytest.fixture(scope="module")
def vocabularies():
    """The folder of published vectors: NBKERNELS_TEST_VOCABULARIES, or the one in the cache; skipped where it is absent."""
    folder = Path(os.environ.get("NBKERNELS_TEST_VOCABULARIES") or cache_folder() / "vocabularies")
    if not folder.is_dir():
        pytest.skip(f"no vocabularies at {folder}: python scripts/fetch_vocabularies.py")
    return folder


@pytest.mark.parametrize(
    "name", ["command-r", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder"]
)
def test_published_vectors(name, vocabularies):
    """Texts and ids of the models' own tokenizers, in the source distribution of llama-cpp-python (MIT)."""
    vocabulary = vocabularies / f"ggml-vocab-{name}.gguf"
    metadata, _ = read_header(memoryview(np.memmap(vocabulary, np.uint8, mode="r")), vocabulary)
    tokenizer = tokenizer_from_gguf(SimpleNamespace(metadata=lambda key, default=None: metadata.get(key, default)))
    texts = Path(f"{vocabulary}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    wanted = [[int(i) for i in line.split()] for line in Path(f"{vocabulary}.out").read_text().splitlines()]
    assert len(texts) == len(wanted) + 1 > 40, "the last text is followed by a separator"
    for text, ids in zip(texts, wanted, strict=False):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
