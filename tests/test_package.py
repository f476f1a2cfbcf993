"""What a user meets first: an import that costs nothing, names that are there, layers that hold, files in their places."""

import ast
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nbkernels as nbk

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "nbkernels").rglob("*.py"))
FIXED = {"pyproject.toml", "nbkernels", "tests", "benchmarks", "scripts", "README.md", "LICENSE"}


def test_import_is_instant():
    def seconds():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import nbkernels"], check=True, cwd=ROOT)
        return time.perf_counter() - start

    def bare():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True, cwd=ROOT)
        return time.perf_counter() - start

    assert statistics.median(seconds() for _ in range(5)) - statistics.median(bare() for _ in range(5)) < 0.5


def test_import_loads_nothing_heavy():
    code = "import nbkernels, sys; assert not {'numba', 'cuda', 'numpy', 'rich', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_public_names():
    for name in nbk.__all__:
        assert getattr(nbk, name).__doc__, name
        assert name in nbk.__doc__ or name in dir(nbk)
    assert set(nbk.__all__) <= set(dir(nbk))
    with pytest.raises(AttributeError, match="softmaxx"):
        _ = nbk.softmaxx


def test_layers_hold():
    pytest.importorskip("importlinter")
    finished = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
    assert "kept" in finished.stdout


def test_top_level_is_fixed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == FIXED


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_everything_public_is_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module"
    if path.parent.name == "emulator" and path.name.startswith("instructions_"):
        return  # a function there is one PTX instruction, named by its decorator and described by PTX's reference
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
