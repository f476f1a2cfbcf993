"""The doctor: each thing that can be wrong is found and told with what mends it, and a sound installation passes."""

import numpy as np
import pytest

from nbkernels.cli import main
from nbkernels.launch.compile import CompilerMissing
from nbkernels.launch.device import Device, DeviceError
from nbkernels.profiling import doctor, self_test
from nbkernels.profiling.doctor import NOTE, OK, WRONG, Finding

SOUND = {
    "numpy": "2.4.6", "numba": "0.68.1", "numba-cuda": "0.30.4", "llvmlite": "0.50.0", "ml-dtypes": "0.7.0",
    "rich": "15.0.0", "cuda-core": "1.2.2", "cuda-bindings": "13.5.0", "nvidia-nvvm": "13.5.37",
    "nvidia-nvjitlink": "13.5.37", "nvidia-cuda-nvrtc": "13.5.37", "nvidia-cuda-nvcc": "13.5.37",
    "nvidia-cuda-nvdisasm": "13.5.37",
}  # fmt: skip


def worst(findings):
    """{subject: (status, mend)} of what is not sound."""
    return {f.subject: (f.status, f.mend) for f in findings if f.status != OK}


@pytest.mark.parametrize(
    "changes, subject, status, mend",
    [
        ({}, None, None, None),
        ({"numpy": "2.5.0"}, "numpy", WRONG, "'numpy<2.5'"),
        ({"numpy": "1.25.2"}, "numpy", WRONG, "'numpy>=1.26,<2.5'"),
        ({"rich": None}, "rich", WRONG, "pip install rich"),
        ({"cuda-core": None}, "cuda-core", NOTE, "nbkernels[cu13]"),
        ({"numpy": "2.5.0rc1", "numba-cuda": "0.31.0"}, None, None, None),
    ],
)
def test_packages(changes, subject, status, mend):
    found = worst(doctor.check_packages((SOUND | changes).get))
    assert set(found) == ({subject} if subject else set())
    if subject:
        assert found[subject][0] == status and mend in found[subject][1]


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, {}),
        ({"nvidia-nvjitlink-cu12": "12.9.86"}, {"CUDA compiler": WRONG}),
        ({"nvidia-cuda-nvcc": None}, {"nvidia-cuda-nvcc": NOTE}),
    ],
)
def test_wheels(changes, found):
    worse = worst(doctor.check_wheels((SOUND | changes).get))
    assert {name: status for name, (status, _) in worse.items()} == found
    assert all(mend.startswith("pip ") for _, mend in worse.values())


def test_without_a_gpu_the_compiler_may_be_left_out():
    installed = (SOUND | dict.fromkeys(doctor.CUDA_WHEELS)).get
    ((status, mend),) = worst(doctor.check_wheels(installed, failing("no NVIDIA driver was found"))).values()
    assert status == NOTE and "nbkernels[learn]" in mend
    ((status, mend),) = worst(doctor.check_wheels(installed, lambda: (13, 0))).values()
    assert status == WRONG and "nbkernels[cu13]" in mend


def test_without_the_compiler_operations_are_not_called_wrong():
    def test(name):
        raise CompilerMissing("no")

    (found,) = doctor.check_operations(test=test)
    assert found.status == NOTE and "not tested" in found.said


def test_environment():
    assert not list(doctor.check_environment({"NBKERNELS_DEVICE": "emulator"}))
    found = worst(doctor.check_environment({"NBKERNELS_DEVICE": "gpu", "NUMBA_ENABLE_CUDASIM": "1"}))
    assert found == {name: (WRONG, f"unset {name}") for name in ("NBKERNELS_DEVICE", "NUMBA_ENABLE_CUDASIM")}


def failing(message):
    def fail():
        raise DeviceError(message)

    return fail


def test_gpu():
    here = Device("cuda", "NVIDIA H200", "sm_90a", 132, 0, 141 << 30)
    found = list(doctor.check_gpu(lambda: (13, 0), lambda: here))
    assert all(f.status == OK for f in found) and "NVIDIA H200 (sm_90a), 132" in found[1].said
    (none,) = doctor.check_gpu(failing("no NVIDIA driver was found"), None)
    assert none.status == NOTE
    old = list(doctor.check_gpu(lambda: (12, 4), failing("wheels are for CUDA 13: pip install 'nbkernels[cu12]'")))
    assert (old[1].status, old[1].mend) == (WRONG, "pip install 'nbkernels[cu12]'")


def test_cache_folder(tmp_path, monkeypatch):
    (sound,) = doctor.check_cache(tmp_path / "new")
    assert sound.status == OK
    (tmp_path / "file").write_text("")
    (found,) = doctor.check_cache(tmp_path / "file" / "folder")  # fails for root too
    assert found.status == WRONG and "NBKERNELS_CACHE" in found.mend
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1 << 20}))
    (full,) = doctor.check_cache(tmp_path)
    assert full.status == NOTE and "1 MB" in full.said


def test_language_models():
    (found,) = doctor.check_optional(lambda name: None if name == "gguf" else name)
    assert found.status == NOTE and "gguf not installed" in found.said


def test_operations_that_fail_are_named_and_the_others_still_tested():
    def test(name):
        if name == "gelu":
            return "result 0 is off by 1.0e+00 of its norm"
        if name == "matmul":
            raise RuntimeError("a message\nof two lines")
        return None

    found = list(doctor.check_operations(test=test))
    wrong = {f.subject: f.said for f in found if f.status == WRONG}
    assert wrong == {"gelu": "result 0 is off by 1.0e+00 of its norm", "matmul": "RuntimeError: a message"}
    assert found[-1].said.startswith(f"{len(self_test.names()) - 2} agree")


def test_time_runs_out():
    times = iter(range(0, 1000, 7))
    found = list(doctor.check_operations(20, lambda: next(times), lambda name: None))
    assert found[-1].status == NOTE and "softmax" not in found[-1].said and "advance" in found[-1].said


def test_what_counts_as_a_fault():
    floats, integers = np.linspace(1, 2, 100), np.arange(5)
    assert self_test.fault([floats, integers], [floats, integers]) is None
    assert "off by" in self_test.fault([floats * 1.02], [floats])
    assert "off by" in self_test.fault([np.full(100, np.nan)], [floats])
    assert "1 of 5 integers" in self_test.fault([np.array([0, 1, 2, 3, 5])], [integers])
    assert "shape" in self_test.fault([floats[:5]], [floats])


@pytest.mark.parametrize("name", self_test.names())
def test_every_operation_passes_its_self_test(name):
    assert self_test.run(name) is None


def test_an_operation_with_a_fault_fails(monkeypatch):
    monkeypatch.setattr("nbkernels.reference.softmax", lambda x: np.exp(x))
    assert "off by" in self_test.run("softmax")


@pytest.mark.parametrize("status, code", [(OK, 0), (NOTE, 0), (WRONG, 1)])
def test_exit_status(monkeypatch, capsys, status, code):
    monkeypatch.setattr(
        doctor, "examine", lambda: [Finding("thing", status, "said so", "mend it"), Finding("b", OK, "c")]
    )
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "thing: said so" in out and "mend it" in out


def test_here_all_but_the_operations(monkeypatch):
    monkeypatch.delenv("NBKERNELS_DEVICE", raising=False)
    found = list(doctor.examine([check for check in doctor.CHECKS if check is not doctor.check_operations]))
    assert not [f for f in found if f.status == WRONG and f.subject != "GPU"]
