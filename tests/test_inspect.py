"""Kernels taken apart without a GPU: counts by source line, PTX and SASS beside the lines they came from."""

import io
import re
from collections import Counter
from functools import partial

import pytest
import rich.console

from nbkernels.cli import main
from nbkernels.profiling import inspect
from nbkernels.profiling.disassembly import (
    Instruction,
    access_width,
    instruction_class,
    live_registers,
    parse_sass,
    ptx_instructions,
    ptx_with_source,
)
from nbkernels.profiling.resources import find_tool


@pytest.fixture
def disassembler():
    try:
        find_tool("nvdisasm", "nvidia-cuda-nvdisasm")
    except FileNotFoundError as error:
        pytest.skip(str(error))


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


@pytest.mark.parametrize("view", [[], ["--source"]])
def test_a_pipe_of_80_columns_gets_every_figure(view, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["inspect", "softmax", *view]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "if row >= rows:" in line]
    name, _, *figures = (cell.strip() for cell in row.strip("│").split("│"))
    assert re.fullmatch(r"rows\.py:\d+", name), "which file the line is of"
    assert "96" in figures, "16 blocks of 2 warps, by 3 instructions"


def test_a_narrow_terminal_shortens_the_source_alone(monkeypatch):
    ((_, report),) = inspect.launches("softmax", dtype="float32", arch="sm_80")
    screen = io.StringIO()
    monkeypatch.setattr(
        rich.console, "Console", partial(rich.console.Console, file=screen, force_terminal=True, width=120)
    )
    report.print()
    rows = [line for line in screen.getvalue().splitlines() if line.startswith("│")]
    assert len({len(row) for row in rows}) == 1 and len(rows[0]) == 120
    assert f" {report.total.warp_instructions} " in rows[-1]


def test_console_command(capsys):
    assert main(["inspect", "silu_mul", "--arch", "sm_80"]) == 0
    assert "silu_mul: what each line did" in capsys.readouterr().out
    assert main(["inspect", "silu_mul", "--arch", "sm_80", "--ptx"]) == 0
    out = capsys.readouterr().out
    assert ".visible .entry silu_mul(" in out
    assert re.search(r"^// activation\.py:\d+  \S", out, re.MULTILINE), "the Python line in front of its PTX"
    # two chunks a thread of each of three arrays
    assert "// accesses of a lane: 6 of 16 bytes global" in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["conv2d"], "wanted one of softmax"),
        (["atention"], "did you mean attention"),
        (["gelu", "--dtype", "int4"], "dtype"),
        (["gelu", "--shape", "3"], "wanted rowsxcolumns"),
        (["gelu", "--arch", "sm_70", "--ptx"], "older than sm_80"),
        (["gelu", "--arch", "sm_100a"], "the emulator knows"),
        (["gelu", "--signature", "int32"], "path.py:function"),
        (["nowhere.py:kernel", "--signature", "int32"], "nowhere.py is not a file"),
    ],
)
def test_errors_are_one_line(arguments, said, capsys):
    assert main(["inspect", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


# ---- listings ------------------------------------------------------------------------------------------------------------

PTX = """
.visible .entry f(
	.param .u64 f_param_0
)
{
	.reg .b32 	%r<3>;
	.loc	1 7 0
	ld.global.v4.u32 	{%r1, %r2, %r3, %r4}, [%rd1];
	.loc	2 9 1
	@%p1 bra 	$L__BB0_2;
$L__BB0_2:
	st.shared.b16 	[%r1], %rs1;
	ret;
}
	.file	1 "/a/one.py"
	.file	2 "/a/two.py"
"""


def test_ptx_by_hand():
    found = ptx_instructions(PTX)
    one, two = ("/a/one.py", 7), ("/a/two.py", 9)
    assert [i.source for i in found] == [one, two, two, two]
    assert [i.opcode[0] for i in found] == ["ld", "bra", "st", "ret"]
    assert [access_width(i) for i in found] == [("global", 16), None, ("shared", 2), None]
    assert [instruction_class(i) for i in found] == ["memory", "branch", "memory", "branch"]
    text = ptx_with_source(PTX)
    assert text.index("// one.py:7") < text.index("ld.global") < text.index("// two.py:9") < text.index("bra")


SASS = """
	//## File "/a/one.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
	//## File "/a/two.py", line 9
        /*0020*/                   STS.U16 [R4], R5 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""
LIVE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;           // |   9   |        |        |
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ; // |  12   |   1    |   2    |
        /*0030*/                   EXIT ;                           // |       |        |        |
"""


def test_sass_by_hand():
    found = parse_sass(SASS, live_registers(LIVE))
    assert [i.source and i.source[1] for i in found] == [7, 7, 9, 9]
    assert [i.live for i in found] == [9, 12, None, None]
    assert [access_width(i) for i in found] == [None, ("global", 16), ("shared", 2), None]
    assert [instruction_class(i) for i in found] == ["memory", "memory", "memory", "tensor core"]


@pytest.mark.parametrize(
    "text, width",
    [
        ("LDGSTS.E.BYPASS.128 [R1], [R2.64]", ("global to shared", 16)),
        ("LDS.64 R2, [R4]", ("shared", 8)),
        ("STG.E.U8 [R2], R3", ("global", 1)),
        ("LDG.E R2, [R4]", ("global", 4)),
        ("cp.async.cg.shared.global [%r1], [%rd2], 16, %r3", ("global to shared", 16)),
        ("ld.global.nc.v2.f64 {%fd1, %fd2}, [%rd1]", ("global", 16)),
        ("ld.param.u64 %rd1, [f_param_0]", None),
    ],
)
def test_widths(text, width):
    assert access_width(Instruction(text, None)) == width


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("operation", ["softmax", "matmul"])
def test_sass_of_every_architecture(operation, arch, disassembler):
    kernels = inspect.kernels(operation, arch=arch)
    for kernel in kernels:
        sass = kernel.sass_instructions
        ours = [i for i in sass if i.source and "nbkernels" in i.source[0]]
        assert len(ours) > 0.7 * len(sass), "most instructions have a line"
        assert 16 < max(i.live or 0 for i in sass) <= 255
        classes = Counter(map(instruction_class, sass))
        assert classes["memory"] and classes["branch"] and (operation != "matmul" or classes["tensor core"])
        assert sum(line.sass for line in inspect.by_line(kernel)) == len(sass)
        assert sum(line.ptx for line in inspect.by_line(kernel)) == len(kernel.ptx_instructions)
        listing = inspect.sass_listing(kernel)
        assert "// most registers live: " in listing and "// accesses of a lane: " in listing


def test_a_line_s_row_has_what_the_emulator_counted(disassembler, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", "softmax", "--source", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    loading = next(line for line in out.splitlines() if "read(ptx.address(pointer" in line)
    assert "16 global" in loading and "2048/2048" in loading  # 64 KB in sectors of 32 bytes, all of them needed
    assert "values[" in out, "brackets are text"


def test_without_a_disassembler_the_ptx_remains(monkeypatch, capsys):
    def missing(*_):
        raise FileNotFoundError("nvdisasm was not found: pip install nvidia-cuda-nvdisasm")

    monkeypatch.setattr("nbkernels.profiling.disassembly.find_tool", missing)
    (kernel,) = inspect.kernels("gelu")
    lines = inspect.by_line(kernel)
    assert sum(line.ptx for line in lines) > 0 and not any(line.sass for line in lines)
    assert main(["inspect", "gelu", "--sass"]) == 2
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().err


OWN = """
from numba import cuda

@cuda.jit(device=True)
def twice(x):
    return x + x

@cuda.jit
def scale(y, x):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = twice(x[i])

def answers(x):
    return x

constant = 3
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_a_kernel_of_one_s_own(arch, tmp_path, capsys, disassembler):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    place = f"{path}:scale"
    arguments = ["inspect", place, "--signature", "float32[::1], float32[::1]", "--arch", arch]
    for view in ("--ptx", "--sass", "--source"):
        assert main([*arguments, view]) == 0
        assert "y[i] = twice(x[i])" in capsys.readouterr().out
    assert main(arguments) == 0
    kernel = inspect.own_kernel(place, "float32[::1], float32[::1]", arch=arch)
    assert [access_width(i) for i in kernel.sass_instructions if access_width(i)] == [("global", 4)] * 2


@pytest.mark.parametrize(
    "name, signature, said",
    [
        ("scale", None, "--signature"),
        ("scale", "float33", "not in Numba's words"),
        ("scale", "float32", "3 arguments|2 arguments"),
        ("none", "float32", "no function 'none'"),
        ("constant", "float32", "no function 'constant'"),
        ("answers", "float32", "own.py:answers: it does not compile: .*return"),
    ],
)
def test_wrong_words_for_a_kernel_of_one_s_own(name, signature, said, tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    given = [] if signature is None else ["--signature", signature]
    assert main(["inspect", f"{path}:{name}", *given]) == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, said",
    [("def (", "SyntaxError: .*line 1"), ("import nowhere_at_all", "ModuleNotFoundError: .*nowhere_at_all")],
)
def test_a_file_that_does_not_run_is_told_in_one_line(text, said, tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text(text)
    assert main(["inspect", f"{path}:scale", "--signature", "float32"]) == 2
    err = capsys.readouterr().err
    assert re.search(f"own.py:scale: the file does not run: {said}", err) and err.count("\n") == 1
