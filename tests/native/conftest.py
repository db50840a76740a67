"""The kernel under test: compiled from these sources, whatever is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import build_kernel
from lora_tool.native import library
from lora_tool.native.library import Kernel
from tests.cli.calling import REPOSITORY, Caller


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Return what calls the command line in the repository's root."""
    monkeypatch.chdir(REPOSITORY)
    return Caller(capsys)


@pytest.fixture(scope="session")
def compiler() -> str:
    """Return the C compiler's name, or skip."""
    name = os.environ.get("CC") or "cc"
    if shutil.which(name.split()[0]) is None:
        pytest.skip(f"no C compiler: {name}")
    return name


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Path:
    """Return the library made of these sources: the installed one, if it is."""
    assert compiler
    if library.FILE.exists() and library.sources_of(library.FILE) == build_kernel.sources_digest():
        return library.FILE
    made = tmp_path_factory.mktemp("kernel") / library.FILE.name
    build_kernel.compile_kernel(made)
    return made


@pytest.fixture(scope="session")
def kernels(compiled: Path) -> tuple[Kernel, ...]:
    """Return the kernel at every level of this processor."""
    found, why_not = library.loaded(compiled)
    assert why_not is None
    return found
