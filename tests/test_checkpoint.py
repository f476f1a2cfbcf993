"""A checkpoint is data from a stranger: what is wrong with a file is said, named, and nothing of it is trusted before."""

import struct

import numpy as np
import pytest
import tiny_model

import nbkernels as nbk
from nbkernels.model.config import CheckpointError
from nbkernels.model.gguf_reader import GGUFCheckpoint, read_header

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("good") / "tiny.gguf").read_bytes()


def refused(path, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        nbk.load(path, device="cpu")
    assert str(path) in str(caught.value), "the message names the file"


@pytest.mark.parametrize(
    "content, match",
    [
        (b"", "empty file"),
        (b"hello", "not a GGUF file"),
        (b"PK\x03\x04 data.pkl", "pickle"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "do not fit"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60) + b"key" * 20, "truncated"),
    ],
    ids=["empty", "text", "zip", "pickle", "lfs", "magic", "version", "tensors", "keys", "string"],
)
def test_files_that_are_no_model(tmp_path, content, match):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    refused(path, match)


def test_no_file_and_a_folder(tmp_path):
    refused(tmp_path / "absent.gguf", "cannot be read")
    refused(tmp_path, "a folder without config.json")


def key(name, kind, payload):
    name = name.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + payload


def header(*, keys=(), tensors=()):
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return memoryview(content + bytes(4096))


def tensor(name, shape, kind=0, offset=0):
    name = name.encode()
    return struct.pack(f"<Q{len(name)}sI{len(shape)}QIQ", len(name), name, len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    "content, match",
    [
        (header(keys=[key("a", 9, struct.pack("<IQ", 4, 2**40))]), "truncated"),
        (header(keys=[key("a", 9, struct.pack("<IQ", 8, 2**40))]), "do(es)? not fit"),
        (header(keys=[key("a", 9, struct.pack("<IQ", 9, 1))]), "unsupported element type 9"),
        (header(keys=[key("a", 77, b"")]), "unknown type 77"),
        (header(keys=[key("a", 4, bytes(4))] * 2), "stands there twice"),
        (header(keys=[key("general.alignment", 4, struct.pack("<I", 0))]), "alignment 0"),
        (header(keys=[key("general.alignment", 4, struct.pack("<I", 24))]), "alignment 24"),
        (header(tensors=[tensor("t", [1] * 9)]), "9 dimensions"),
        (header(tensors=[tensor("t", [])]), "0 dimensions"),
        (header(tensors=[tensor("t", [4]), tensor("t", [4])]), "stands there twice"),
        (header(tensors=[tensor("t", [4], kind=999)]), "unknown type 999"),
        (header(tensors=[tensor("t", [33], kind=8)]), "blocks of Q8_0"),
        (header(tensors=[tensor("t", [0])]), "shape"),
        (header(tensors=[tensor("t", [2**20])]), "outside of the file"),
        (header(tensors=[tensor("t", [2**32, 2**32])]), "outside of the file"),
        (header(tensors=[tensor("t", [4], offset=2**63)]), "outside of the file"),
        (header(tensors=[tensor("t", [4], offset=8)]), "outside of the file"),
        (header(tensors=[tensor("a", [4]), tensor("b", [4])]), "'b' overlaps 'a'"),
        (header(tensors=[tensor("a", [4], offset=32), tensor("b", [64])]), "'a' overlaps 'b'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_that_lie(content, match):
    with pytest.raises(CheckpointError, match=match):
        read_header(content, "file.gguf")


def test_every_truncation_is_refused(tmp_path, good):
    path = tmp_path / "cut.gguf"
    for length in [*range(4, 200, 7), *range(200, len(good), len(good) // 40), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            nbk.load(path, device="cpu")


def test_flipped_bytes_never_crash(tmp_path, good):
    path = tmp_path / "flipped.gguf"
    rng = np.random.default_rng(0)
    limit = good.index(b"tokenizer.ggml.tokens")
    for _ in range(150):
        content = bytearray(good)
        content[rng.integers(4, limit)] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            GGUFCheckpoint(path)
        except CheckpointError:
            continue


def test_unsupported_architecture_and_tokenizer_are_named(tmp_path):
    refused(tiny_model.write(tmp_path / "a.gguf", architecture="mamba"), "'mamba'")
    refused(tiny_model.write(tmp_path / "b.gguf", pre="deepseek-r1"), "'deepseek-r1'")


def test_unsupported_scaling_is_refused_and_not_dropped(tmp_path):
    path = tiny_model.write(
        tmp_path / "s.gguf",
        extra=lambda w: w.add_string("llama.rope.scaling.type", "spiral") or w.add_rope_scaling_factor(4.0),
    )
    refused(path, "scaling 'spiral'")


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    arrays = tiny_model.tensors()
    del arrays["blk.1.ffn_up.weight"]
    refused(tiny_model.write(tmp_path / "m.gguf", arrays=arrays), r"blk\.1\.ffn_up\.weight.*missing")
    arrays = tiny_model.tensors()
    arrays["blk.0.attn_k.weight"] = arrays["blk.0.attn_k.weight"][:-1]
    refused(tiny_model.write(tmp_path / "n.gguf", arrays=arrays), r"blk\.0\.attn_k\.weight.*shape")


def test_unsupported_tensor_type_is_named(tmp_path):
    arrays = tiny_model.tensors()
    arrays["blk.0.attn_k.weight"] = arrays["blk.0.attn_k.weight"].astype(np.float64)
    refused(tiny_model.write(tmp_path / "t.gguf", arrays=arrays), "F64")


def test_rows_of_q_come_back_in_half_split_order(tmp_path):
    arrays = tiny_model.tensors()
    checkpoint = GGUFCheckpoint(tiny_model.write(tmp_path / "q.gguf", arrays=arrays))
    stored = arrays["blk.0.attn_q.weight"].reshape(tiny_model.HEADS, tiny_model.HEAD_DIM, tiny_model.HIDDEN)
    got = checkpoint.tensor("q", 0).reshape(stored.shape)
    half = tiny_model.HEAD_DIM // 2
    for i in range(half):
        np.testing.assert_array_equal(got[:, i], stored[:, 2 * i])
        np.testing.assert_array_equal(got[:, i + half], stored[:, 2 * i + 1])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_rows_of_every_type(tmp_path, kind):
    import gguf

    quantization = gguf.GGMLQuantizationType[kind]
    _, row_bytes = gguf.quant_shape_to_byte_shape((7, 512), quantization)
    stored = np.random.default_rng(0).integers(0, 60, (7, row_bytes)).astype(np.uint8)  # bytes that make no NaN
    path = tiny_model.write(tmp_path / "k.gguf", extra=lambda w: w.add_tensor("more", stored, raw_dtype=quantization))
    want = gguf.dequantize(stored, quantization).reshape(7, 512)
    checkpoint = GGUFCheckpoint(path)
    for rows in (slice(None), slice(2, 3), slice(3, 7)):
        np.testing.assert_array_equal(checkpoint.read("more", rows), want[rows])


def test_tied_and_untied_heads(tmp_path):
    tied = nbk.load(tiny_model.write(tmp_path / "tied.gguf"), device="cpu")
    assert tied.transformer.head is tied.transformer.embedding
    arrays = tiny_model.tensors(tied=False)
    untied = nbk.load(tiny_model.write(tmp_path / "untied.gguf", arrays=arrays), device="cpu")
    np.testing.assert_array_equal(untied.transformer.head, arrays["output.weight"])


@pytest.mark.parametrize(
    "name, value, match", [("dtype", "int4", "dtype"), ("quantize", "fp8", "quantize"), ("device", "tpu", "device")]
)
def test_wrong_options_of_load(tmp_path, name, value, match):
    with pytest.raises(ValueError, match=match):
        nbk.load(tiny_model.write(tmp_path / "o.gguf"), **{"device": "cpu", name: value})
