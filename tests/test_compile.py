"""Kernels compile without a GPU for any architecture, and what was compiled is kept, checked, and made again when it must be."""

import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from cuda.pathfinder import DynamicLibNotFoundError
from numba.cuda.core import ir_utils
from numba.cuda.cudadrv import nvrtc

from nbkernels.kernels import advance, attention_wgmma, embedding, rotary
from nbkernels.launch import compile as compiling

FACTORY, CONSTANTS = advance.advance_kernel, ()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NBKERNELS_CACHE", str(tmp_path))
    compiling.ptx.cache_clear()
    yield tmp_path / "kernels"
    compiling.ptx.cache_clear()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_ptx_for_any_architecture(folder, arch):
    text = compiling.ptx(FACTORY, CONSTANTS, arch)
    assert f".target {arch}" in text
    assert ".visible .entry advance(" in text
    assert ".loc" in text, "the line of the source stands beside each instruction"


def test_cubin_is_kept(folder, monkeypatch):
    code, name = compiling.cubin(FACTORY, CONSTANTS, "sm_80")
    assert code.startswith(b"\x7fELF") and name == "advance"

    def never(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_translate", never)
    monkeypatch.setattr(compiling, "assemble", never)
    assert compiling.cubin(FACTORY, CONSTANTS, "sm_80") == (code, name)


def test_a_damaged_file_is_made_again(folder):
    first = compiling.cubin(FACTORY, CONSTANTS, "sm_80")
    for path in folder.glob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    assert compiling.cubin(FACTORY, CONSTANTS, "sm_80") == first
    for path in folder.glob("*.cubin"):
        path.write_bytes(b"")
    assert compiling.cubin(FACTORY, CONSTANTS, "sm_80") == first


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("NBKERNELS_CACHE", str(blocker))
    compiling.ptx.cache_clear()
    assert compiling.cubin(FACTORY, CONSTANTS, "sm_80")[1] == "advance"


def test_keys_differ_by_constants_architecture_and_source(monkeypatch):
    f32, f16 = np.dtype(np.float32), np.dtype(np.float16)
    keys = {
        compiling._key(embedding.embedding_kernel, (f32, 1), "sm_80"),
        compiling._key(embedding.embedding_kernel, (f16, 1), "sm_80"),
        compiling._key(embedding.embedding_kernel, (f32, 4), "sm_80"),
        compiling._key(embedding.embedding_kernel, (f32, 1), "sm_90a"),
    }
    monkeypatch.setattr(compiling, "source_digest", lambda module: "edited")
    keys.add(compiling._key(embedding.embedding_kernel, (f32, 1), "sm_80"))
    assert len(keys) == 5


def test_what_a_kernel_is_made_of():
    modules = compiling._imported_modules("nbkernels.kernels.sampling")
    assert {"nbkernels.kernels.sampling", "nbkernels.kernels.argmax", "nbkernels.ptx.warp"} <= modules.keys()
    assert not any(name.startswith(("nbkernels.emulator", "nbkernels.ops")) for name in modules)


def _compile_in(folder):
    code = (
        f"import os; os.environ['NBKERNELS_CACHE'] = {str(folder)!r}\n"
        "from nbkernels.kernels import advance; from nbkernels.launch import compile as c\n"
        "import hashlib; print(hashlib.sha256(c.cubin(advance.advance_kernel, (), 'sm_80')[0]).hexdigest())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_two_processes_at_once(tmp_path):
    with ProcessPoolExecutor(2) as pool:
        first, second = pool.map(_compile_in, [tmp_path] * 2)
    assert first == second != ""
    assert not list((tmp_path / "kernels").glob("tmp*")), "nothing half-written is left"


def test_python_is_lowered_once_for_all_architectures(folder, monkeypatch):
    first = compiling.ptx(FACTORY, CONSTANTS, "sm_80")

    def never(*_):
        raise AssertionError("lowered again")

    monkeypatch.setattr(compiling, "_lower", never)
    second = compiling.ptx(FACTORY, CONSTANTS, "sm_90a")
    assert first.replace("sm_80", "sm_90a") == second


def test_instructions_name_their_lines_and_no_variables(folder):
    kernel = rotary.rotary_append_kernel
    constants = (np.dtype(np.float16), 64, 32, 8, 64, False)
    assert not any(re.search("llvm.dbg.(value|declare)", text) for text in compiling._lowered(kernel, constants)["ir"])
    text = compiling.ptx(kernel, constants, "sm_90a")
    files = dict(re.findall(r'\.file\s+(\d+) "([^"]+)"', text))
    lines = {(files[file], int(line)) for file, line in re.findall(r"\.loc\s+(\d+) (\d+)", text)}
    assert len(lines) > 20
    assert any(path.endswith("kernels/rotary.py") for path, _ in lines)


def test_a_refused_program_is_told_with_the_compiler_s_words(folder, monkeypatch):
    plain = compiling._lower

    def damaged(*arguments):
        lowered = plain(*arguments)
        return lowered | {"ir": [text.replace("ret void", "ret nothing") for text in lowered["ir"]]}

    monkeypatch.setattr(compiling, "_lower", damaged)
    with pytest.raises(Exception, match="INVALID_IR") as caught:
        compiling.ptx(FACTORY, CONSTANTS, "sm_80")
    (note,) = caught.value.__notes__
    assert "advance for compute_80" in note and "ret nothing" in note


def test_setmaxnreg_counts(folder):
    """As a part of a program nvJitLink would ignore it; then this kernel's wgmma would lack registers and be serialised."""
    kernel = attention_wgmma.attention_wgmma_kernel
    constants = attention_wgmma.constants_for(np.dtype(np.float16), 128, False, (False, False, False))
    code, name = compiling.cubin(kernel, constants, "sm_90a")
    assert name == "attention"
    (folder / "code").write_bytes(code)
    disassembler = next(Path(find_spec("nvidia").submodule_search_locations[0]).glob("*/bin/nvdisasm"))
    listing = subprocess.run([disassembler, "-c", folder / "code"], capture_output=True, text=True, check=True).stdout
    assert "USETMAXREG.DEALLOC" in listing and "USETMAXREG.TRY_ALLOC" in listing
    assert "STL" not in listing, "a register spills"
    # one wait behind the first product, two a step, two where the next item's first product follows the last, else one
    assert listing.count("WARPGROUP.DEPBAR") == 6
    assert listing.count("UTMALDG.4D") >= 3


def test_without_the_compiler_s_libraries_it_says_what_to_install(folder, monkeypatch):
    def missing(*_):
        raise DynamicLibNotFoundError("libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "get_arch_option", missing)
    with pytest.raises(compiling.CompilerMissing, match=r"nbkernels\[learn\]"):
        compiling.ptx(FACTORY, CONSTANTS, "sm_86")


def test_labels_stay_short_however_many_kernels_were_compiled(folder):
    """Numba's count of labels goes on from kernel to kernel; NVVM cuts a name of thousands of digits and then misses it."""
    kernel, constants = rotary.rotary_append_kernel, (np.dtype(np.float16), 64, 32, 8, 64, False)
    ir_utils._the_max_label.update(10**4000)
    (text, *_) = compiling._lower(kernel, constants)["ir"]
    labels = re.findall(r"^B(\d+)", text, re.MULTILINE)
    assert len(labels) > 20 and max(map(len, labels)) < 12
