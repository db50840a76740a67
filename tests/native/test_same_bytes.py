"""The default merge has the same bytes whatever another library or the environment has set; and verifying knows them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import AdapterDir, ModelDir, open_model
from lora_tool.core.machine import ieee_arithmetic
from lora_tool.execution.engine import execute
from lora_tool.native import library
from lora_tool.native.library import VARIABLE
from lora_tool.verification.checking import check_written
from tests.property.interpret import load
from tests.tiny_plans import EMBED, HIDDEN, NORM, VOCABULARY, Array, Q, numbers, save_adapter, save_base

FIXTURE = Path(__file__).parents[2] / "fixtures" / "causal-llama"


@pytest.fixture(params=["require", "off"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require":
        monkeypatch.setattr(library, "FILE", request.getfixturevalue("compiled"))
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


@contextmanager
def flushing() -> Iterator[None]:
    """Take subnormal numbers for zero in this thread, as programs do that torch or a library has made faster."""
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormal numbers on this processor")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def small(folder: Path, dtype: type[np.generic], **adapter: object) -> tuple[ModelDir, AdapterDir]:
    """Return a model of subnormal weights, and an adapter whose delta is of their size."""
    with ieee_arithmetic():
        tiny = 2.0**-130
        weights: dict[str, Array] = {EMBED: numbers(VOCABULARY, HIDDEN), NORM: numbers(HIDDEN)}
        weights[f"{Q}.weight"] = (numbers(HIDDEN, HIDDEN).astype(np.float64) * tiny).astype(np.float32)
        base = save_base(folder / "base", {name: array.astype(dtype) for name, array in weights.items()})
        factors = {
            f"{Q}.lora_A.weight": (numbers(2, HIDDEN, seed=1) * 2.0**-66).astype(np.float32),
            f"{Q}.lora_B.weight": (numbers(HIDDEN, 2, seed=2) * 2.0**-66).astype(np.float32),
        }
        return base, save_adapter(folder / "adapter", factors, **adapter)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["F32", "BF16"])
def test_flushing_subnormal_numbers_changes_neither_merge_nor_verdict(
    tmp_path: Path, arithmetic: str, dtype: type[np.generic]
) -> None:
    assert arithmetic
    plan = plan_merge(*small(tmp_path, dtype))
    plain = execute(plan, tmp_path / "plain", jobs=1)
    merged = load(open_model(plain).tensors[f"{Q}.weight"])
    assert np.count_nonzero(merged) >= merged.size - 2
    assert np.abs(merged).max() < np.finfo(np.float32).tiny
    with flushing():
        for jobs in (1, 2):
            flushed = execute(
                plan, tmp_path / f"flushed {jobs}", jobs=jobs, check=lambda folder: read_back(plan, folder)
            )
            assert digest(flushed) == digest(plain)
        verify(flushed).raise_for_errors()


def read_back(plan: object, folder: Path) -> dict[str, object]:
    check_written(plan, folder).raise_for_errors()  # type: ignore[arg-type]
    return {}


@pytest.mark.parametrize(
    "settings",
    [
        {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_CORETYPE": "Sandybridge", "OPENBLAS_NUM_THREADS": "2"},
        {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3", VARIABLE: "scalar"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_no_setting_of_a_blas_or_of_numpy_changes_a_byte(
    tmp_path: Path, compiled: Path, settings: dict[str, str]
) -> None:
    if compiled != library.FILE:
        pytest.skip("the installed kernel is not of these sources: pip install -e . compiles it")
    asked = ["merge", str(FIXTURE / "adapter"), "--dtype", "float32", "-q", "-o"]
    seen = set()
    for name, environment in {"plain": {VARIABLE: "require"}, "set": {VARIABLE: "require", **settings}}.items():
        command = [sys.executable, "-m", "lora_tool", *asked, str(tmp_path / name)]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        seen.add(tuple(sorted(path.read_bytes() for path in (tmp_path / name).glob("*.safetensors"))))
    assert len(seen) == 1


def test_a_thread_gets_its_own_mode_back(arithmetic: str, kept: Callable[[], bool]) -> None:
    assert arithmetic
    with flushing():
        assert not kept()
        with ieee_arithmetic():
            assert kept()
        assert not kept()
    assert kept()


@pytest.fixture
def kept() -> Callable[[], bool]:
    """Return what tells whether this thread keeps subnormal numbers."""
    least = np.array([1], np.uint32).view(np.float32)
    return lambda: bool((least + least).view(np.uint32)[0] == 2)
