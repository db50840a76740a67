"""`LORA_TOOL_KERNEL`, what is chosen, what refuses by name, and that whole merges have the same bytes at every level."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import build_kernel
from lora_tool import plan_merge, verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import ExecutionError, WrongValue
from lora_tool.execution import kernels, units
from lora_tool.execution.backends import native_backend, numpy_backend
from lora_tool.execution.backends.choosing import arithmetic_of, backend_for
from lora_tool.execution.backends.native_backend import NativeBackend
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.engine import execute
from lora_tool.execution.local_engine import LocalEngine
from lora_tool.native import library
from lora_tool.native.library import TYPES, VARIABLE, Kernel, KernelLevel, asked_for
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.ops import Precision, RowOp, row_ops
from lora_tool.plans.core.plan import Plan
from tests.cli.calling import Caller
from tests.property.test_operations import DRAWN, Drawn, cut_at, operations, planned

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_auto_and_require_take_the_fastest_and_off_none(compiled: Path, kernels: tuple[Kernel, ...]) -> None:
    assert asked_for("auto", compiled) == asked_for("require", compiled) == kernels[0]
    assert asked_for("off", compiled) is None
    assert [asked_for(str(one.level).upper(), compiled) for one in kernels] == list(kernels)


def test_a_level_that_the_processor_lacks_is_refused_by_name(compiled: Path, kernels: tuple[Kernel, ...]) -> None:
    (missing, *_) = set(KernelLevel) - {one.level for one in kernels}
    with pytest.raises(ExecutionError, match=f"{VARIABLE}={missing}: this processor supports {kernels[0].level}"):
        asked_for(missing, compiled)


def test_an_unknown_word_is_refused_with_the_closest(compiled: Path) -> None:
    with pytest.raises(WrongValue, match="expected one of auto, off, require, scalar") as refused:
        asked_for("requier", compiled)
    assert "require" in str(refused.value.hint)


def test_without_a_library_auto_is_numpy_and_require_says_why(tmp_path: Path) -> None:
    for name, why in (("none.so", "was not built"), ("text.so", "cannot be loaded")):
        (tmp_path / "text.so").write_text("no library")
        assert asked_for("auto", tmp_path / name) is None
        with pytest.raises(ExecutionError, match=why) as refused:
            asked_for("require", tmp_path / name)
        assert f"unset {VARIABLE}" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("file", "right", "wrong", "why"),
    [
        ("merge.c", "#define VERSION 1", "#define VERSION 99", "has version 99, but version 1 is needed"),
        ("scalar.h", "fmaf(x, y, z)", "((x) * (y) + (z))", "gives wrong results at scalar"),
    ],
    ids=["another version", "a rounding more"],
)
def test_a_library_that_is_not_what_it_should_be_is_not_used(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str, why: str
) -> None:
    assert compiler
    for source in build_kernel.NATIVE.glob("*.[ch]"):
        (tmp_path / source.name).write_text(source.read_text())
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(right, wrong))
    monkeypatch.setattr(build_kernel, "NATIVE", tmp_path)
    build_kernel.compile_kernel(tmp_path / "made.so", "-O0")
    assert asked_for("auto", tmp_path / "made.so") is None
    with pytest.raises(ExecutionError, match=why) as refused:
        asked_for("require", tmp_path / "made.so")
    assert "its compiler may be faulty" in str(refused.value) or file == "merge.c"


def test_a_library_of_older_sources_is_said_to_be_one(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler
    for source in build_kernel.NATIVE.glob("*.[ch]"):
        (tmp_path / source.name).write_text(source.read_text())
    monkeypatch.setattr(build_kernel, "NATIVE", tmp_path)
    build_kernel.compile_kernel(tmp_path / "made.so", "-O0")
    (tmp_path / "scalar.h").write_text((tmp_path / "scalar.h").read_text() + "// newer\n")
    with pytest.raises(ExecutionError, match=r"compiled from other sources .*: compile it again"):
        asked_for("require", tmp_path / "made.so")


def merge_plan() -> Plan:
    adapter = open_checkpoint(FIXTURES / "causal-llama" / "adapter")
    assert isinstance(adapter, AdapterDir)
    return plan_merge(open_model(FIXTURES / "causal-llama" / "base"), adapter)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture
def use(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what chooses a kernel for the rest of the test."""
    monkeypatch.setattr(library, "FILE", compiled)
    return lambda asked: monkeypatch.setenv(VARIABLE, asked)


def test_a_merge_has_the_same_bytes_at_every_level_however_it_is_cut(
    tmp_path: Path, use: Callable[[str], None], kernels: tuple[Kernel, ...]
) -> None:
    plan = merge_plan()
    seen = set()
    for number, (level, jobs, unit, block) in enumerate(
        [(one.level, 1 + at, 1 << 22, 1 << 19) for at, one in enumerate(kernels)] + [(kernels[0].level, 3, 40, 30)]
    ):
        use(level)
        assert arithmetic_of(plan) == f"kernel 1 ({level})"
        with (
            mock.patch.object(units, "UNIT_WEIGHTS", unit),
            mock.patch.multiple(numpy_backend, BLOCK_WEIGHTS=block, _LEAST_ROWS=1),
        ):
            out = execute(plan, tmp_path / str(number), jobs=jobs)
        seen.add(tuple(digests(out).items()))
        assert json.loads((out / "lora_tool.json").read_text())["arithmetic"] == f"kernel 1 ({level})"
    assert len(seen) == 1
    verify(out).raise_for_errors()


@settings(max_examples=12)
@given(DRAWN, st.integers(1, 60))
def test_every_operation_has_the_same_bytes_at_every_level_however_it_is_cut(
    kernels: tuple[Kernel, ...], drawn: Drawn, cut: int
) -> None:
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(drawn, operations(drawn, Path(folder)), Precision.FLOAT32)
        for at, kernel in enumerate((*kernels, kernels[0])):
            # the norms of columns are sums over blocks: those of one size have one order
            with (
                cut_at(cut if at == len(kernels) else 7, 12),
                mock.patch.object(native_backend, "kernel", return_value=kernel),
            ):
                out = execute(plan, Path(folder) / str(at), engine=LocalEngine(jobs=1 + at % 2, choose=native))
            seen.add((out / "model.safetensors").read_bytes())
    assert len(seen) == 1


def native(_precision: Precision, op: RowOp) -> type[NumpyBackend]:
    return NativeBackend if isinstance(op, FactorOp) or op.source.dtype in TYPES else NumpyBackend


def test_numpy_is_at_most_one_place_from_the_kernel(tmp_path: Path, use: Callable[[str], None]) -> None:
    plan = merge_plan()
    use("require")
    ours = open_model(execute(plan, tmp_path / "kernel"))
    use("off")
    assert arithmetic_of(plan) == "numpy"
    theirs = open_model(execute(plan, tmp_path / "numpy"))
    for name, tensor in ours.tensors.items():
        storage = kernels.STORAGE[tensor.dtype]
        bits = [
            np.fromfile(one.path, np.uint8, one.nbytes, offset=one.spans[0].offset)
            for one in (tensor, theirs.tensors[name])
        ]
        one, other = (each.view(storage).astype(np.float64) for each in bits)
        assert np.allclose(one, other, rtol=2.0**-7, atol=0), name


def test_float64_and_float64_tensors_stay_numpys(use: Callable[[str], None]) -> None:
    use("require")
    plan = merge_plan()
    changed = next(op for step in plan.steps for op in row_ops(step.op) if not op.is_copy)
    assert backend_for(plan.precision, changed) is NativeBackend
    assert backend_for(type(plan.precision).FLOAT64, changed) is NumpyBackend


def test_env_says_what_computes(call: Caller, use: Callable[[str], None], kernels: tuple[Kernel, ...]) -> None:
    use("auto")
    assert call("env", "--json").json["kernel"] == f"kernel 1 ({kernels[0].level})"
    use("off")
    assert call("env", "--json").json["kernel"] == f"none; numpy is used because {VARIABLE}=off"
    use("fast")
    assert "expected one of auto" in call("env", "--json").json["kernel"]


def test_what_is_required_and_not_there_ends_the_merge(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FILE", tmp_path / "kernel.so")
    monkeypatch.setenv(VARIABLE, "require")
    done = call("merge", FIXTURES / "causal-llama" / "adapter", "-o", tmp_path / "out")
    assert done.code == 3
    assert f"{VARIABLE}=require, but the compiled kernel cannot be used: it was not built" in done.err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, "fast")
    assert call("merge", FIXTURES / "causal-llama" / "adapter", "-o", tmp_path / "out").code == 2
