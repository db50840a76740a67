"""The scan of weights by the kernel: what it sees at every level is what numpy sees, and what it leaves is counted and named."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.files import open_regular
from lora_tool.native import library
from lora_tool.native.library import VARIABLE, Kernel, Seen
from lora_tool.rules.engine import scan as scanning
from lora_tool.rules.engine.scan import Scans, WeightScan, scan_compiled
from tests.unit.test_weights_scan import BYTES, KINDS, SPECIAL, expected, expected_of_bytes, stored


@pytest.fixture(autouse=True)
def always_compiled(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything scanned by the kernel, in calls for a few elements."""
    monkeypatch.setattr(library, "FILE", compiled)
    monkeypatch.setattr(scanning, "_LITTLE", 0)
    monkeypatch.setattr(scanning, "_MUCH", 0)
    monkeypatch.setattr(scanning, "_CALL_BYTES", 192)


def scanned(kernel: Kernel, tensor: StoredTensor) -> WeightScan | None:
    return scan_compiled(kernel, tensor, open_regular, threading.Event())


@pytest.mark.parametrize("dtype", [*KINDS, DType.I8])
@given(data=st.data())
def test_it_sees_what_numpy_sees(
    kernels: tuple[Kernel, ...], dtype: DType, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    numbers = data.draw(st.lists(st.sampled_from(SPECIAL) | st.floats(-1, 1, width=32), max_size=40))
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.array(numbers, np.float64).astype(KINDS.get(dtype, np.int8))
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3))))
    tensor = stored(tmp_path_factory.getbasetemp() / f"compiled-{dtype}", values, dtype, cuts=cuts)
    wanted = expected(values) if dtype in KINDS else WeightScan(all_zero=values.size > 0 and not values.any())
    for kernel in kernels:
        assert scanned(kernel, tensor) == (None if wanted.nonfinite else wanted)


@pytest.mark.parametrize("dtype", BYTES)
def test_it_sees_the_nan_of_eight_bits(kernels: tuple[Kernel, ...], dtype: DType, tmp_path: Path) -> None:
    every = np.arange(256, dtype=np.uint8)
    below = [every[:0x7C], every[1:0x7C], np.zeros(100, np.uint8)]
    for values in (*below, every, every[::-1].copy(), np.full(100, 0x80, np.uint8)):
        tensor, wanted = stored(tmp_path / "x", values, dtype), expected_of_bytes(values, BYTES[dtype])
        for kernel in kernels:
            found = scanned(kernel, tensor)
            assert found == wanted if values.max() < 0x7C else found in {None, wanted}
        assert Scans().of(tensor, {"x": tensor}) == wanted


def test_one_call_reads_more_than_its_block(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    values = np.full(100_000, 0.25, np.float32)  # 0x3E800000
    for at in (0, 16_383, 16_384, 99_999):
        values[at] = 3.0
        (tmp_path / "x").write_bytes(b"head" + values.tobytes())
        largest, first = (int(value.view(np.uint32)) for value in (np.float32(3.0), values[0]))
        with (tmp_path / "x").open("rb") as file:
            for kernel in kernels:
                seen = kernel.scan(file.fileno(), 4, values.nbytes, 4, 0x7FFFFFFF)
                assert seen == Seen(first, largest, 0x3E800000 ^ largest)
                assert kernel.scan(file.fileno(), 5, values.nbytes, 4, 0x7FFFFFFF) is None
        values[at] = 0.25


def test_every_tensor_is_reported_once(tmp_path: Path) -> None:
    values: dict[str, Any] = {f"t{at}": np.full(50, at + 0.5, ml_dtypes.bfloat16) for at in range(40)}
    table = {name: stored(tmp_path / name, array, DType.BF16, name=name) for name, array in values.items()}
    reported: list[int] = []
    scans = Scans(progress=reported.append)
    assert scans.of(table["t3"], table) == expected(values["t3"])
    assert scans.found == {name: expected(array) for name, array in values.items()}
    assert reported == [100] * 40


@pytest.mark.parametrize("setting", ["off", "no such level"])
def test_values_are_scanned_whatever_the_setting(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    values = np.array([1.0, np.nan], np.float32)
    tensor = stored(tmp_path / "x", values, DType.F32)
    assert scanning._kernel() is None
    assert Scans().of(tensor, {"x": tensor}) == expected(values)
