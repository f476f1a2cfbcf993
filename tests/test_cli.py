"""The console command: errors are one line that says what to do, and it ends cleanly."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_model
from cuda.pathfinder import DynamicLibNotFoundError

from nbkernels.cli import main
from nbkernels.launch.device import DeviceError
from nbkernels.model.transformer import QUANTIZATIONS

pytest.importorskip("gguf")


@pytest.fixture
def model(tmp_path):
    return str(tiny_model.write(tmp_path / "tiny.gguf"))


def run(capsys, *arguments):
    status = main(["generate", "--device", "cpu", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_text_goes_out_and_the_summary_to_stderr(capsys, model):
    status, out, err = run(capsys, "--model", model, "--max-new-tokens", "5", "the")
    assert status == 0 and out.endswith("\n") and "tokens/s" in err
    assert run(capsys, "--model", model, "--max-new-tokens", "5", "--no-summary", "the") == (0, out, "")


def test_chat(capsys, model):
    assert run(capsys, "--model", model, "--chat", "--system", "a", "--max-new-tokens", "3", "hello")[0] == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "/nowhere/model.gguf", "the"], "/nowhere/model.gguf"),
        (["--model", "MODEL", ""], "empty"),
        (["--model", "MODEL", "a" * 100], "context"),
        (["--model", "MODEL", "--top-p", "0", "the"], "top_p"),
        (["--model", "MODEL", "--temperature", "-1", "the"], "temperature"),
    ],
)
def test_errors_are_one_line(capsys, model, arguments, said):
    status, out, err = run(capsys, *[model if a == "MODEL" else a for a in arguments])
    assert status == 2 and out == ""
    assert said in err and err.count("\n") == 1 and "Traceback" not in err


def test_the_ways_to_quantize_are_those_of_load(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "--help")
    said = capsys.readouterr().out
    assert f"--quantize {{{','.join(QUANTIZATIONS)}}}" in said


def test_no_demo_model_says_how_to_get_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NBKERNELS_CACHE", str(tmp_path))
    status, _, err = run(capsys, "the")
    assert status == 2 and "fetch_model.py" in err


def test_a_model_that_cannot_be_kept_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    script = Path(__file__).parent.parent / "scripts" / "fetch_model.py"
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "NBKERNELS_CACHE": str(tmp_path / "file" / "cache"),
            "PYTHONPATH": str(script.parent.parent),
        },
    )
    assert done.returncode == 1 and "export NBKERNELS_CACHE" in done.stderr and done.stderr.count("\n") == 1


def test_without_a_gpu_a_command_names_its_own_option(capsys, model, monkeypatch):
    def none():
        raise DeviceError("no NVIDIA driver was found: install one, or use device='cpu'")

    monkeypatch.setattr("nbkernels.launch.device.cuda_device", none)
    assert main(["generate", "--device", "cuda", "--model", model, "the"]) == 2
    assert "--device cpu" in capsys.readouterr().err
    for command in (["profile", "--model", model], ["tune", "matmul"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert "measures on a GPU" in err and "device='cpu'" not in err


def test_a_missing_compiler_is_told_with_what_installs_it(capsys, monkeypatch):
    def missing(*_, **__):
        raise DynamicLibNotFoundError('Failure finding "libnvJitLink.so.13": No such file')

    monkeypatch.setattr("nbkernels.profiling.inspect.own_kernel", missing)
    assert main(["inspect", "own.py:kernel", "--signature", "int32"]) == 2
    err = capsys.readouterr().err
    assert "nbkernels[learn]" in err and "libnvJitLink" in err and err.count("\n") == 1


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(capsys):
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "/nowhere", "--port", port]) == 2
    err = capsys.readouterr().err
    assert f"port {port}" in err and "--port" in err and err.count("\n") == 1
    assert main(["serve", "/nowhere", "--port", port]) == 2
    assert "/nowhere: cannot be read" in capsys.readouterr().err, "the port is free again"


@pytest.mark.parametrize("chat", [False, True])
def test_a_person_at_the_keyboard_is_told_what_ends_the_input(capsys, model, monkeypatch, chat):
    keyboard = io.StringIO("the\n")
    keyboard.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", keyboard)
    status, _, err = run(capsys, "--model", model, "--max-new-tokens", "2", *(["--chat"] if chat else []))
    assert status == 0 and "Ctrl-D" in err.splitlines()[0]


def test_a_plot_that_cannot_be_written_is_told_before_measuring(capsys, monkeypatch):
    monkeypatch.setattr("nbkernels.profiling.profile.profile_operation", None)
    assert main(["profile", "softmax", "--plot", "/nowhere/at/all.svg"]) == 2
    assert "/nowhere/at/all.svg" in capsys.readouterr().err


def test_serve_says_what_it_takes(capsys, tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert "/v1/chat/completions" in said and "nbkernels serve --port 8000" in said and "neither a password" in said
    with pytest.raises(SystemExit):
        main(["serve", "--port", "65536"])
    assert "--port: 65536, wanted 0 to 65535" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--port", "http"])
    assert "--port: http, wanted 0 to 65535" in capsys.readouterr().err
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("NBKERNELS_CACHE", str(tmp_path))
    assert main(["serve"]) == 2 and "fetch_model.py" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(capsys, model, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("nbkernels.model.generation.LanguageModel.generate", interrupted)
    status, _, err = run(capsys, "--model", model, "the")
    assert status == 130 and "Traceback" not in err
