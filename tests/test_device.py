"""The device is asked for in one place, and what is missing is said with what to do about it."""

import pytest

import nbkernels as nbk
from nbkernels.launch import device as devices
from nbkernels.launch.device import DeviceError, current, parse_arch, resolve


@pytest.fixture(autouse=True)
def asked_again():
    """What was found before a test holds neither in it nor behind it."""
    devices._find_cuda_device.cache_clear()
    devices._has_cuda.cache_clear()
    yield
    devices._find_cuda_device.cache_clear()
    devices._has_cuda.cache_clear()


def test_names(monkeypatch):
    with pytest.raises(ValueError, match=r"'tpu'.*auto, cuda, emulator, cpu"):
        resolve("tpu")
    with nbk.device("cpu") as on:
        assert current() is on and on.kind == "cpu"
        with nbk.device("emulator", arch="sm_90a") as inner:
            assert current() is inner and inner.arch == "sm_90a"
        assert current() is on
    monkeypatch.setenv("NBKERNELS_DEVICE", "cpu")
    assert current().kind == "cpu"
    monkeypatch.setenv("NBKERNELS_DEVICE", "gpu")
    with pytest.raises(ValueError, match="'gpu'"):
        current()


def missing(message):
    def raises():
        raise DeviceError(message)

    return raises


def test_no_driver_falls_back_or_says_so(monkeypatch):
    monkeypatch.setattr(devices, "driver_version", missing("no NVIDIA driver was found"))
    monkeypatch.delenv("NBKERNELS_DEVICE", raising=False)
    assert resolve("auto").kind == "cpu"
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        resolve("cuda")


def test_a_driver_older_than_the_wheels(monkeypatch):
    monkeypatch.setattr(devices, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(devices, "_toolkit_version", lambda: (13, 0))
    with pytest.raises(DeviceError, match=r"supports CUDA 12\.4.*CUDA 13.*cu12"):
        resolve("cuda")


def test_no_compiler_wheels(monkeypatch):
    from importlib import metadata

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(devices, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(DeviceError, match=r"nbkernels\[cu13\]"):
        resolve("cuda")


@pytest.mark.parametrize(
    "text, want",
    [("sm_80", (8, 0)), ("sm_90a", (9, 0, "a")), ("sm_120", (12, 0)), ("sm_100f", (10, 0, "f")), ("90", (9, 0))],
)
def test_architectures(text, want):
    assert parse_arch(text) == want


@pytest.mark.parametrize("text", ["sm_75", "hopper", "sm_", "sm_9", ""])
def test_architectures_that_are_none(text):
    with pytest.raises(ValueError, match="arch"):
        parse_arch(text)


def test_the_emulator_names_what_it_knows():
    with pytest.raises(ValueError, match="sm_100"):
        resolve("emulator", arch="sm_100")
