"""Repeated calls on torch tensors: alike in all but their addresses, they give what a first call gives."""

import threading

import numpy as np
import pytest
from compare import BOUND

torch = pytest.importorskip("torch")

import nbkernels as nbk  # noqa: E402
from nbkernels import ops  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh():
    for operation in (
        ops.softmax,
        ops.rms_norm,
        ops.layer_norm,
        ops.silu_mul,
        ops.matmul,
        ops.int8_matmul,
        ops.quantize_int8,
        ops.attention,
    ):
        operation.records.clear()


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def close(a, b):
    return torch.linalg.norm(a.double() - b.double()) <= BOUND[np.dtype(np.float32)] * torch.linalg.norm(b.double())


def test_a_repeated_call_reads_and_writes_its_own_arrays():
    kept = []
    for seed in range(5):
        x = normal(37, 1000, seed=seed)
        kept.append((x, nbk.softmax(x)))
        assert len(ops.softmax.records) == 1
    for x, y in kept:
        assert close(y, torch.softmax(x, -1))


def test_what_a_call_depends_on_makes_it_another_call():
    x = normal(8, 1024)
    calls = [
        (x, {}),
        (x, {"scale": 2.0}),
        (x[:, :512], {}),
        (x[:, 1:1001], {}),
        (x[:4], {}),
        (x.half(), {}),
        (x.view(2, 4, 1024), {}),
    ]
    for turn in range(3):
        for array, options in calls:
            y = nbk.softmax(array, **options)
            want = torch.softmax(array.double() * options.get("scale", 1.0), -1)
            assert y.shape == array.shape and y.dtype == array.dtype
            assert torch.linalg.norm(y.double() - want) < 2e-3 * torch.linalg.norm(want), (turn, options)
    assert len(ops.softmax.records) == len(calls)
    with pytest.raises(TypeError, match="scale"):
        nbk.softmax(x, scale=True)  # equal to 1.0, and wrong


def test_two_results_and_a_result_in_place():
    weight = normal(640, seed=9)
    for seed in range(3):
        x, residual = normal(5, 640, seed=seed), normal(5, 640, seed=seed + 50)
        summed = x + residual
        y, total = nbk.rms_norm(x, weight, residual=residual)
        want = summed / torch.sqrt(summed.square().mean(-1, keepdim=True) + 1e-6) * weight
        assert torch.equal(total, summed) and close(y, want)
        again = nbk.rms_norm(x, weight, residual=residual, out=x)
        assert again[0] is x and close(x, want)


def test_one_array_as_two_operands():
    for seed in range(2):
        a, b = normal(4, 96, seed=seed), normal(4, 96, seed=seed + 7)
        for gate, up in ((a, a), (a, b), (b, a), (b, b)):
            assert close(nbk.silu_mul(gate, up), torch.nn.functional.silu(gate) * up)


def test_a_weight_that_is_its_own_bias():
    for seed in range(3):
        x, a, b = normal(4, 640, seed=seed), normal(640, seed=seed + 10), normal(640, seed=seed + 20)
        for weight, bias in ((a, a), (a, b), (b, b)):
            want = torch.nn.functional.layer_norm(x.double(), (640,), weight.double(), bias.double())
            assert close(nbk.layer_norm(x, weight, bias), want)
    assert len(ops.layer_norm.records) == 2


def test_scratch_memory_is_each_call_s_own():
    kept = []
    for seed in range(4):
        q = normal(1, 1, 8, 64, dtype=torch.float16, seed=seed)
        k = normal(1, 3000, 2, 64, dtype=torch.float16, seed=seed + 10)
        kept.append((q, k, nbk.attention(q, k, k)))
    assert len(ops.attention.records) == 1
    for q, k, y in kept:
        k = k.double().transpose(1, 2).repeat_interleave(4, 1)
        want = torch.softmax(q.double().transpose(1, 2) @ k.transpose(2, 3) / 8, -1) @ k
        assert torch.linalg.norm(y.double() - want.transpose(1, 2)) < 2e-3 * torch.linalg.norm(want)


def test_tensor_maps_follow_their_arrays():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tensor maps are of compute capability 9.0")
    for seed in range(3):
        x, w = normal(300, 512, dtype=torch.float16, seed=seed), normal(384, 512, dtype=torch.float16, seed=seed + 5)
        want = x.double() @ w.double().T
        assert torch.linalg.norm(nbk.matmul(x, w).double() - want) < 2e-3 * torch.linalg.norm(want)
        q, k = (normal(1, 300, 2, 64, dtype=torch.float16, seed=seed + s) for s in (20, 30))
        want = torch.softmax(
            q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) / 8, -1
        ) @ k.double().transpose(1, 2)
        got = nbk.attention(q, k, k).double().transpose(1, 2)
        assert torch.linalg.norm(got - want) < 2e-3 * torch.linalg.norm(want)


def test_an_out_that_overlaps_is_refused_every_time():
    memory = normal(4 * 1024 + 64)
    x = memory[: 4 * 1024].view(4, 1024)
    apart = torch.empty_like(x)
    shifted = memory[64:].view(4, 1024)
    for _ in range(3):
        assert nbk.softmax(x, out=apart) is apart
        with pytest.raises(ValueError, match="out"):
            nbk.softmax(x, out=shifted)
    before = x.clone()
    assert nbk.softmax(x, out=x) is x and close(x, torch.softmax(before, -1))
    before = x.clone()
    assert nbk.softmax(x, out=x) is x and close(x, torch.softmax(before, -1))


def test_int8_weights():
    weight = nbk.quantize_int8(normal(96, 256, seed=3), group_size=32)
    dense = weight.values.double() * weight.scales.double().repeat_interleave(32, 1)
    for seed in range(3):
        x = normal(3, 256, seed=seed)
        assert close(nbk.int8_matmul(x, weight), x.double() @ dense.T)


def test_int8_activations():
    weight = nbk.quantize_int8(normal(96, 256, seed=3))
    dense = weight.values.double() * weight.scales.double()
    for seed in range(3):
        x = normal(3, 256, seed=seed)
        rows = nbk.quantize_int8(x)
        want = (rows.values.double() * rows.scales.double()) @ dense.T
        assert close(nbk.int8_matmul(x, weight, activations="int8"), want)
        assert close(nbk.int8_matmul(rows, weight), want)
    assert len(ops.int8_matmul.records) == 2


def test_results_in_int8():
    weight = normal(640, seed=9)
    for seed in range(3):
        x, residual = normal(3, 5, 640, seed=seed), normal(3, 5, 640, seed=seed + 50)
        plain, total = nbk.rms_norm(x, weight, residual=residual)
        normed, again = nbk.rms_norm(x, weight, residual=residual, quantize="int8")
        want = nbk.quantize_int8(plain)
        assert torch.equal(normed.values, want.values) and torch.equal(normed.scales, want.scales)
        assert torch.equal(again, total)
        out = nbk.Int8Weight(torch.empty_like(want.values), torch.empty_like(want.scales))
        assert nbk.rms_norm(x, weight, residual=residual, quantize="int8", out=out)[0] is out
        assert torch.equal(out.values, want.values)
    assert len(ops.quantize_int8.records) == 1 and len(ops.rms_norm.records) == 2


def test_streams_and_captures():
    x = normal(64, 2048)
    nbk.softmax(x), nbk.softmax(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = nbk.softmax(x)
    stream.synchronize()
    assert close(y, torch.softmax(x, -1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nbk.softmax(x)
    x.copy_(normal(64, 2048, seed=5))
    graph.replay()
    assert close(y, torch.softmax(x, -1))


def test_threads():
    arrays = [normal(16, 4096, seed=s) for s in range(8)]
    wanted = [torch.softmax(x, -1) for x in arrays]
    failed = []

    def work(n):
        for _ in range(200):
            if not close(nbk.softmax(arrays[n]), wanted[n]):
                failed.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
