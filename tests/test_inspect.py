"""Operations taken apart without a GPU: counts by source line, and PTX."""

import pytest

from nbkernels.cli import main
from nbkernels.profiling import inspect


@pytest.mark.parametrize("operation", ["softmax", "rms_norm", "decode", "argmax"])
def test_counts_by_line(operation):
    done = inspect.launches(operation, dtype="float32", arch="sm_80")
    assert done
    for _, report in done:
        assert report.total.warp_instructions > 0
        assert any(file.endswith(".py") for file, _ in report.by_line), "lines of our own sources"


def test_softmax_reads_and_writes_once():
    ((_, report),) = inspect.launches("softmax", dtype="float32", arch="sm_80")
    assert report.total.global_read_bytes == report.total.global_written_bytes == 16 * 1024 * 4
    assert report.total.sectors == report.total.sectors_needed, "every access is coalesced"


def test_console_command(capsys):
    assert main(["inspect", "silu_mul", "--arch", "sm_80"]) == 0
    assert "silu_mul: what each line did" in capsys.readouterr().out
    assert main(["inspect", "silu_mul", "--arch", "sm_80", "--ptx"]) == 0
    assert ".visible .entry silu_mul(" in capsys.readouterr().out
    assert main(["inspect", "conv2d"]) == 2
    assert "wanted one of softmax" in capsys.readouterr().err
