"""Arrays of torch, CuPy, JAX and Numba go in without a copy and come out as they came; their streams are followed."""

import ml_dtypes
import numpy as np
import pytest

import nbkernels as nbk
from nbkernels import reference
from nbkernels.arrays import DeviceArray, as_device_array

pytestmark = pytest.mark.gpu

SHAPE = (33, 200)


def values(seed=0):
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def expected(x):
    return reference.softmax(np.asarray(x, np.float64))


def close(result, x, bound=1e-5):
    want = expected(x)
    return np.linalg.norm(np.asarray(result, np.float64) - want) / np.linalg.norm(want) < bound


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values()).cuda()
    y = nbk.softmax(x)
    assert isinstance(y, torch.Tensor) and y.device == x.device and y.dtype == x.dtype
    assert close(y.cpu().numpy(), values())


@pytest.mark.parametrize("name, bound", [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_torch_16_bit(name, bound):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values()).cuda().to(getattr(torch, name))
    y = nbk.softmax(x)
    assert y.dtype == x.dtype
    assert close(y.float().cpu().numpy(), x.double().cpu().numpy(), bound)


def test_torch_views_and_out():
    torch = pytest.importorskip("torch")
    wide = torch.from_numpy(np.random.default_rng(1).standard_normal((8, 9, 384)).astype(np.float32)).cuda()
    for view in (wide[:, ::2, 128:256], wide[:, :, 1:12], wide.transpose(0, 1), wide[3], wide[2, 3]):
        assert close(nbk.softmax(view).cpu().numpy(), view.cpu().numpy())
    x = torch.from_numpy(values()).cuda()
    out = torch.full_like(x, float("nan"))
    assert nbk.softmax(x, out=out) is out
    assert close(out.cpu().numpy(), values())
    with pytest.raises(ValueError, match="last axis"):
        nbk.softmax(x.T)


def test_torch_stream_is_followed():
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    x = torch.zeros(SHAPE, device="cuda")
    fresh = torch.from_numpy(values()).cuda()
    torch.cuda.synchronize()
    for _ in range(20):
        x.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # a slow producer
            x.copy_(fresh)
            y = nbk.softmax(x)
        side.synchronize()
        assert close(y.cpu().numpy(), values())


def test_torch_graph_capture():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values(0)).cuda()
    out = torch.empty_like(x)
    nbk.softmax(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nbk.softmax(x, out=out)
    x.copy_(torch.from_numpy(values(1)))
    graph.replay()
    torch.cuda.synchronize()
    assert close(out.cpu().numpy(), values(1))


def test_cupy():
    cupy = pytest.importorskip("cupy")
    y = nbk.softmax(cupy.asarray(values()))
    assert isinstance(y, cupy.ndarray)
    assert close(cupy.asnumpy(y), values())


def test_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(values())
    if x.devices().pop().platform != "gpu":
        pytest.skip("JAX sees no GPU")
    y = nbk.softmax(x)
    assert isinstance(y, jax.Array)
    assert close(np.asarray(y), values())
    z = nbk.softmax(x.astype(jax.numpy.bfloat16))
    assert z.dtype == jax.numpy.bfloat16
    assert close(np.asarray(z), np.asarray(x.astype(jax.numpy.bfloat16)), 1e-2)


def test_numba():
    cuda = pytest.importorskip("numba.cuda")
    y = nbk.softmax(cuda.to_device(values()))
    assert type(y).__module__.startswith("numba")
    assert close(y.copy_to_host(), values())


def test_numpy_goes_there_and_back():
    with nbk.device("cuda"):
        y = nbk.softmax(values())
        z = nbk.softmax(values().astype(ml_dtypes.bfloat16))
    assert isinstance(y, np.ndarray) and close(y, values())
    assert z.dtype == ml_dtypes.bfloat16


def test_device_array_out_to_torch():
    torch = pytest.importorskip("torch")
    x = as_device_array(torch.from_numpy(values()).cuda())
    y = nbk.softmax(DeviceArray(x.pointer, x.shape, x.strides, x.dtype, x.owner))
    assert isinstance(y, DeviceArray)
    assert close(torch.from_dlpack(y).cpu().numpy(), values())


def test_host_and_device_in_one_call_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values()).cuda()
    with pytest.raises(TypeError, match="host"):
        nbk.softmax(x, out=np.empty(SHAPE, np.float32))


def test_rows_beyond_2_to_the_31_elements():
    torch = pytest.importorskip("torch")
    rows = 2**21 + 8
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.float16)
    y = torch.full_like(x, float("nan"))
    nbk.softmax(x, out=y)
    for part in (slice(0, 8), slice(-8, None)):
        assert close(y[part].float().cpu().numpy(), x[part].double().cpu().numpy(), 2e-3)
