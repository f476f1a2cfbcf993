"""Real headers, mutated: whatever a damaged or malicious file says, CheckpointError alone comes out, and memory stays low."""

import json
import subprocess
import sys

import family_models
import numpy as np
import pytest
import tiny_model

from nbkernels.model.config import CheckpointError
from nbkernels.model.families import huggingface_config
from nbkernels.model.gguf_reader import GGUFCheckpoint
from nbkernels.model.huggingface_reader import parse_json, read_header
from nbkernels.model.tokenizer import tokenizer_from_gguf

pytest.importorskip("gguf")
pytest.importorskip("safetensors")
MUTATIONS = 20_000  # in all, of three kinds of header
# what numbers are made of them: lengths, offsets and counts at the edges of their types
NUMBERS = [
    b"-1",
    b"0",
    b"1e308",
    b"1e999",
    b"2.5",
    b"9" * 19,
    b"9" * 400,
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"NaN",
    b"[" * 2000,
]
WORDS = [bytes([b]) * n for b in (0x00, 0x7F, 0x80, 0xFF) for n in (1, 2, 4, 8)]


def mutated_text(rng, text):
    """JSON with a stretch removed, doubled, or replaced: by a value, by other text of it, or by noise."""
    start = int(rng.integers(len(text)))
    end = min(len(text), start + int(rng.integers(1, 24)))
    kind = rng.integers(6)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:]
    if kind == 2:
        other = int(rng.integers(len(text)))
        return text[:start] + text[other : other + end - start] + text[end:]
    if kind == 3:
        return text[:start] + rng.bytes(end - start) + text[end:]
    digits = [i for i in range(start, min(len(text), start + 400)) if chr(text[i]).isdigit()]
    if not digits:
        return text[:start]
    first = last = digits[0]
    while last + 1 < len(text) and chr(text[last + 1]).isdigit():
        last += 1
    return text[:first] + NUMBERS[rng.integers(len(NUMBERS))] + text[last + 1 :]


def mutated_bytes(rng, data, limit):
    """Bytes with some changed below ``limit``: a bit, a word of extremes, a stretch removed or noise."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(limit)), rng.integers(4)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            word = WORDS[rng.integers(len(WORDS))]
            data[at : at + len(word)] = word
        elif kind == 2:
            del data[at : at + int(rng.integers(1, 16))]
        else:
            data[at : at + 8] = rng.bytes(8)
    return bytes(data)


def counted(read, inputs):
    """How many inputs were refused; anything but CheckpointError is an error of the test."""
    refused = 0
    for value in inputs:
        try:
            read(value)
        except CheckpointError:
            refused += 1
    return refused


def test_safetensors_headers(tmp_path):
    folder = family_models.write_folder(tmp_path / "m", family_models.load_recording("llama"))
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    text, size = content[8 : 8 + length], len(content) - 8 - length
    rng = np.random.default_rng(1)

    def inputs():
        for i in range(MUTATIONS * 2 // 5):
            changed = mutated_text(rng, text)
            claimed = len(changed) if i % 8 else int.from_bytes(rng.bytes(8), "little") >> int(rng.integers(64))
            yield memoryview(claimed.to_bytes(8, "little") + changed + bytes(size))

    refused = counted(lambda data: read_header(data, folder / "f"), inputs())
    # what stays is a change of a name, or of blanks
    assert refused > MUTATIONS * 2 // 5 * 0.5


def test_gguf_headers(tmp_path, monkeypatch):
    path = tiny_model.write(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    limit = content.index(b"tokenizer.chat_template") + 2000
    rng = np.random.default_rng(2)
    monkeypatch.setattr(np, "memmap", lambda data, *_, **__: np.frombuffer(data, np.uint8))
    monkeypatch.setattr("nbkernels.model.gguf_reader.Path", lambda data: data)

    def read(data):
        checkpoint = GGUFCheckpoint(data)
        checkpoint.check()
        tokenizer_from_gguf(checkpoint)

    inputs = (mutated_bytes(rng, content, limit) for _ in range(MUTATIONS * 2 // 5))
    assert counted(read, inputs) > MUTATIONS * 2 // 5 * 0.5


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**70,
    1.5,
    -2.5,
    1e308,
    "",
    "x",
    [],
    [[]],
    {},
    [1, "a", None],
    {"a": []},
    "llama",
]


def with_another_value(rng, text):
    """JSON of which some value, perhaps within a value, is another or missing."""
    value = json.loads(text)
    place = value
    key = list(place)[rng.integers(len(place))]
    while isinstance(place[key], dict | list) and place[key] and rng.integers(2):
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else int(rng.integers(len(place)))
    if isinstance(place, dict) and rng.integers(5) == 0:
        del place[key]
    else:
        place[key] = VALUES[rng.integers(len(VALUES))]
    return json.dumps(value).encode()


def test_config_json():
    texts = [str(family_models.load_recording(name)["config"]).encode() for name in family_models.CASES]
    rng = np.random.default_rng(3)

    def read(text):
        raw = parse_json(text, "config.json")
        if isinstance(raw, dict):
            huggingface_config(raw)

    mutations = (mutated_text, with_another_value)
    inputs = (mutations[i % 2](rng, texts[i % len(texts)]) for i in range(MUTATIONS // 5))
    assert counted(read, inputs) > MUTATIONS // 5 * 0.3


def test_memory_stays_below_a_gigabyte():
    """The tests above in a process of their own, which may not have more.

    VmHWM is of this program's memory alone; ru_maxrss of a process just started also counts its parent's,
    a test worker with everything that it has compiled.
    """
    code = (
        "import pathlib, re, sys, pytest\n"
        f"status = pytest.main(['-q', '-x', '-p', 'no:cacheprovider', {__file__!r}, '-k', 'headers or config'])\n"
        "peak = int(re.search(r'VmHWM:\\s+(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1])\n"
        "print('peak', peak, 'kB')\n"
        "sys.exit(status or peak > 2**20)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-2000:]
