"""Fixtures: the devices a kernel test runs on, and the model that the golden tests read."""

import os

import pytest

import nbkernels as nbk
from nbkernels.launch.device import DeviceError, resolve


def _gpu_reason():
    try:
        resolve("cuda")
    except DeviceError as error:
        return str(error)
    return None


NO_GPU = _gpu_reason()


def pytest_collection_modifyitems(items):
    if NO_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {NO_GPU}"))


@pytest.fixture(params=["sm_80", "sm_90a", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device a kernel test runs on: the emulator as two architectures, or the GPU; tests marked gpu on the GPU alone."""
    if request.param == "cuda":
        chosen = nbk.device("cuda")
    elif request.node.get_closest_marker("gpu"):
        pytest.skip("a shape for the GPU, too large for the emulator")
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
