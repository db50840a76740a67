"""The compiled scan of weights: what it sees is what numpy sees, it can begin before it is asked, and a broken one is not used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import build_kernel
from lora_tool.checkpoint import open_adapter
from lora_tool.errors import SourceChanged
from lora_tool.rules.engine import scan as scanning
from lora_tool.rules.engine import scan_compiled
from lora_tool.rules.engine.native import library
from lora_tool.rules.engine.native.library import CompiledScan
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.engine.scan import Scans, read_ahead
from lora_tool.rules.engine.scan_compiled import CompiledScanning
from lora_tool.rules.engine.scan_model import WeightScan
from lora_tool.rules.judging import Judge
from lora_tool.tensors import DType
from tests.native.conftest import Wrong
from tests.unit.test_weights_scan import BYTES, KINDS, SPECIAL, expected, expected_of_bytes, stored

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> CompiledScan:
    """Return the scan, compiled from these sources."""
    assert compiler
    made = tmp_path_factory.mktemp("scan") / "scan.so"
    build_kernel.compile_scan(made)
    found = library.loaded(made)
    assert found is not None
    return found


@pytest.fixture
def used(compiled: CompiledScan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything scanned by it, in small pieces."""
    monkeypatch.setattr(library, "compiled_scan", lambda: compiled)
    for name in ("_LITTLE", "_AHEAD"):
        monkeypatch.setattr(scanning, name, 0)
    monkeypatch.setattr(scan_compiled, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(scan_compiled, "_CALL_BYTES", 192)


@pytest.mark.parametrize("dtype", [*KINDS, DType.I8])
@given(data=st.data())
def test_it_sees_what_numpy_sees(
    compiled: CompiledScan, dtype: DType, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    numbers = data.draw(st.lists(st.sampled_from(SPECIAL) | st.floats(-1, 1, width=32), max_size=40))
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.array(numbers, np.float64).astype(KINDS.get(dtype, np.int8))
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3))))
    tensor = stored(tmp_path_factory.getbasetemp() / f"compiled-{dtype}", values, dtype, cuts=cuts)
    found = CompiledScanning(compiled, {"x": tensor}, threads=0).results()["x"]
    wanted = expected(values) if dtype in KINDS else WeightScan(all_zero=values.size > 0 and not values.any())
    assert found == (None if wanted.nonfinite else wanted)


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("dtype", BYTES)
def test_it_sees_the_nan_of_eight_bits(compiled: CompiledScan, dtype: DType, tmp_path: Path) -> None:
    every = np.arange(256, dtype=np.uint8)
    below = [every[:0x7C], every[1:0x7C], np.zeros(100, np.uint8)]
    for values in (*below, every, every[::-1].copy(), np.full(100, 0x80, np.uint8)):
        tensor, wanted = stored(tmp_path / "x", values, dtype), expected_of_bytes(values, BYTES[dtype])
        found = CompiledScanning(compiled, {"x": tensor}, threads=0).results()["x"]
        assert found == wanted if values.max() < 0x7C else found in {None, wanted}
        assert Scans().of(tensor, {"x": tensor}) == wanted


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("special", [float("nan"), 700.0, -0.25])
def test_a_value_is_found_wherever_it_lies(dtype: DType, special: float, tmp_path: Path) -> None:
    size = 192 // np.dtype(KINDS[dtype]).itemsize * 2 + 1
    for at in (0, 1, size // 2 - 1, size // 2, size - 1):
        values = np.full(size, -0.25, KINDS[dtype])
        values[at] = special
        tensor = stored(tmp_path / "x", values, dtype)
        assert Scans().of(tensor, {"x": tensor}) == expected(values)


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("ahead", [False, True])
def test_many_tensors_are_told_once_each(ahead: bool, tmp_path: Path) -> None:
    values: dict[str, Any] = {f"t{at}": np.full(50, at + 0.5, ml_dtypes.bfloat16) for at in range(40)}
    table = {name: stored(tmp_path / name, array, DType.BF16, name=name) for name, array in values.items()}
    told: list[int] = []
    scans = Scans(progress=told.append)
    if ahead:
        scans.begin(table)
        scans.begin(table)
    assert scans.of(table["t3"], table) == expected(values["t3"])
    assert scans.found == {name: expected(array) for name, array in values.items()}
    assert sum(told) == 40 * 100


@pytest.mark.usefixtures("used")
def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    table = {f"t{at}": stored(tmp_path / f"{at}", np.ones(100, np.float32), DType.F32, name=f"t{at}") for at in (1, 2)}
    (tmp_path / "2").write_bytes(bytes(40))
    with pytest.raises(SourceChanged, match="2 was truncated while it was read"):
        Scans().of(table["t1"], table)


@pytest.mark.usefixtures("used")
def test_the_rules_judge_by_what_was_read_ahead(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "causal-llama" / "adapter", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = open_adapter(folder)
    read_ahead(adapter)
    (begun,) = adapter.scans
    assert begun._begun is not None
    report = Judge(rules=(RULES["LT209"],)).adapter(adapter)
    assert [finding.subject for finding in report.findings] == [next(iter(tensors))]
    assert begun.found.keys() == adapter.tensors.keys()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("#define VERSION 2", "#define VERSION 99"),
        ("differing |= values[at] ^ first;", "differing |= values[at];"),
        ("magnitude > largest ? magnitude : largest", "magnitude"),
        ("mask = (BITS)piece->magnitude;", "mask = (BITS)(piece->magnitude >> 1);"),
        ("return 0;", "return 1;"),
    ],
    ids=["another version", "other bits", "the last one", "half of it", "does not see the end"],
)
def test_a_scan_that_is_wrong_is_not_used(wrongly_compiled: Wrong) -> None:
    assert library.loaded(wrongly_compiled("SCANNING", "scan.c", build_kernel.compile_scan)) is None


def test_python_scans_where_it_is_not_built_and_where_the_kernel_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.loaded(tmp_path / "scan.so") is None
    (tmp_path / "torn.so").write_bytes(b"\x7fELF")
    assert library.loaded(tmp_path / "torn.so") is None
    monkeypatch.setenv("LORA_TOOL_KERNEL", "off")
    assert library.compiled_scan() is None
