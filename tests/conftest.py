"""Fixtures: the devices a kernel test runs on, and the model that the golden tests read."""

import os
from zlib import crc32

import pytest

import nbkernels as nbk
from nbkernels.launch.device import DeviceError, resolve


def _gpu_reason():
    try:
        resolve("cuda")
    except DeviceError as error:
        return str(error)
    return None


# of a file's cases one in so many: all kernels run as sm_90a in test_every_kernel, and most compile to the same instructions
SM_90A_SHARE = 4
NO_GPU = _gpu_reason()


def pytest_collection_modifyitems(items):
    if NO_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {NO_GPU}"))


def _emulate_one_in(request):
    """One case in how many runs on the emulator: a file's mark says it, and for sm_90a, from the same factories, it is fewer."""
    mark = request.node.get_closest_marker("emulate_one_in")
    share = mark.args[0] if mark else 1
    return share * SM_90A_SHARE if request.param == "sm_90a" else share


@pytest.fixture(params=["sm_80", "sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device a kernel test runs on: the emulator as two architectures, or the GPU; tests marked gpu on the GPU alone."""
    if request.param == "cuda":
        chosen = nbk.device("cuda")
    elif request.node.get_closest_marker("gpu"):
        pytest.skip("a shape for the GPU, too large for the emulator")
    elif crc32(request.node.nodeid.encode()) % _emulate_one_in(request):
        pytest.skip("a sample of the cases runs on the emulator: compiling all of them takes too long")
    else:
        chosen = nbk.device("emulator", arch=request.param)
    with chosen as on:
        yield on


@pytest.fixture(scope="session")
def model_path():
    """The SmolLM2-135M file: NBKERNELS_TEST_MODEL, or the demo's file in the user's cache; skipped where it is absent."""
    from nbkernels.model import demo_model

    path = os.environ.get("NBKERNELS_TEST_MODEL") or demo_model.path()
    if not os.path.isfile(path):
        pytest.skip(f"no model at {path}: python scripts/fetch_model.py")
    return str(path)
