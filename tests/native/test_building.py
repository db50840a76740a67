"""Wheels: with the kernel for every Python of a platform, without it where there is no compiler, refused where required."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import build_kernel
from build_kernel import CannotCompileError, compile_kernel
from lora_tool.native import library

ROOT = Path(__file__).parents[2]

needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return what a clean clone holds of what is built."""
    target = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "src", target / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def built(clone: Path, out: str = "wheel", **settings: str) -> subprocess.CompletedProcess[str]:
    code = f"import hatchling.build; print(hatchling.build.build_{out}({str(clone / 'dist')!r}))"
    (clone / "dist").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=clone,
        env={**os.environ, "LORA_TOOL_KERNEL": "auto", **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def held(clone: Path, done: subprocess.CompletedProcess[str]) -> tuple[str, list[str]]:
    """Return the wheel's name and its files."""
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[-1]
    return name, zipfile.ZipFile(clone / "dist" / name).namelist()


@needs_hatchling
def test_a_compiler_makes_one_wheel_for_every_python_of_the_platform(clone: Path, compiler: str) -> None:
    assert compiler
    name, files = held(clone, built(clone, LORA_TOOL_KERNEL="require"))
    assert name.endswith(f"-{build_kernel.wheel_tag()}.whl")
    assert name.split("-")[2:4] == ["py3", "none"]
    assert "lora_tool/native/kernel.so" in files
    # an editable installation finds it in the sources
    assert library.loaded(clone / "src" / "lora_tool" / "native" / "kernel.so")[0]


@needs_hatchling
@pytest.mark.parametrize(
    "settings", [{"CC": "false"}, {"CC": "no-such-compiler"}, {"LORA_TOOL_KERNEL": "off"}], ids=str
)
def test_without_a_compiler_the_wheel_computes_in_numpy_and_the_build_says_so(
    clone: Path, settings: dict[str, str]
) -> None:
    stale = clone / "src" / "lora_tool" / "native" / "kernel.so"
    stale.write_bytes(b"of an earlier build")
    done = built(clone, **settings)
    name, files = held(clone, done)
    assert name.endswith("-py3-none-any.whl")
    assert not [file for file in files if file.endswith(".so")]
    assert not stale.exists()
    assert "without its compiled kernel and will compute with numpy" in done.stdout + done.stderr


@needs_hatchling
def test_what_is_required_and_cannot_be_compiled_ends_the_build_by_name(clone: Path) -> None:
    done = built(clone, CC="false", LORA_TOOL_KERNEL="require")
    assert done.returncode != 0
    assert "LORA_TOOL_KERNEL=require, but the kernel cannot be compiled: false -std=c11" in done.stderr
    assert not list((clone / "dist").iterdir())


@needs_hatchling
def test_the_source_distribution_holds_what_the_kernel_is_compiled_from(clone: Path) -> None:
    done = built(clone, "sdist", CC="false", LORA_TOOL_KERNEL="require")
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        ["tar", "tf", str(clone / "dist" / done.stdout.split()[-1])], capture_output=True, text=True, check=True
    ).stdout
    for file in ("merge.c", "tile.h"):
        assert f"src/lora_tool/native/{file}" in listed
    assert "src/build_kernel.py" in listed


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
def test_fast_arithmetic_is_refused_by_name(tmp_path: Path, compiler: str, flag: str) -> None:
    assert compiler
    with pytest.raises(CannotCompileError, match="promises IEEE arithmetic"):
        compile_kernel(tmp_path / "made.so", flag)
    assert list(tmp_path.iterdir()) == []


def test_flags_of_the_environment_do_not_reach_the_compiler(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler
    monkeypatch.setenv("CFLAGS", "-ffast-math")
    compile_kernel(tmp_path / "kernel.so", "-O0")
    assert library.loaded(tmp_path / "kernel.so")[0]


def test_the_installed_kernel_is_of_these_sources() -> None:
    if not library.FILE.exists():
        pytest.skip("no kernel is installed: pip install -e . compiles it")
    told = library.sources_of(library.FILE)
    assert told == build_kernel.sources_digest(), "compile it again: python src/build_kernel.py"
