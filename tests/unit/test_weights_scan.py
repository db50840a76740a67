"""Both ways of scanning weights against numpy's own arithmetic, on every float type and where blocks meet."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lora_tool.core.errors import SourceChanged
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec
from lora_tool.formats.files import open_regular, opened_regular
from lora_tool.rules.engine import scan as scanning
from lora_tool.rules.engine.scan import LARGE, LAYOUTS, Scans, WeightScan, scan, scan_exactly

KINDS: dict[DType, Any] = {
    DType.F64: np.float64,
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
}
NAN, INF = float("nan"), float("inf")


def stored(
    path: Path, values: NDArray[Any], dtype: DType, *, cuts: tuple[int, ...] = (), name: str = "x"
) -> StoredTensor:
    """Write the values at an odd place of a file, in spans cut after these elements, with rubbish in between."""
    size = values.dtype.itemsize
    data, spans, content = values.tobytes(), [], b"rub"
    edges = [0, *(cut * size for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        spans.append(Span(path=path, offset=len(content), nbytes=end - begin))
        content += data[begin:end] + b"\xff\x7f" * 3
    path.write_bytes(content)
    return StoredTensor(spec=TensorSpec(name=name, dtype=dtype, shape=values.shape), spans=tuple(spans))


def expected(values: NDArray[Any]) -> WeightScan:
    """Say by numpy's arithmetic on float64 what a scan must say by bits."""
    wide = np.abs(values.astype(np.float64))
    bad = ~np.isfinite(wide)
    largest = float(wide[~bad].max(initial=0.0))
    zero = values.size > 0 and not bad.any() and largest == 0
    same = values.size > 1 and len({value.tobytes() for value in values.ravel()}) == 1
    return WeightScan(
        nonfinite=int(bad.sum()),
        first=int(bad.argmax()) if bad.any() else None,
        all_zero=zero,
        constant=same and not zero and not bad.any(),
        largest=largest if largest >= LARGE else 0.0,
    )


def exactly(tensor: StoredTensor) -> WeightScan:
    return scan_exactly(tensor, LAYOUTS[tensor.dtype], open_regular)


def both(tensor: StoredTensor) -> WeightScan:
    found = scan(tensor)
    assert tensor.dtype not in LAYOUTS or exactly(tensor) == found
    return found


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.02, 511.0, 512.0, -512.0, 600.0, 65504.0, 1e-8, NAN, INF, -INF, 3e38]


@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
def test_scans_say_what_numpy_says(dtype: DType, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    numbers = data.draw(st.lists(st.sampled_from(SPECIAL) | st.floats(-1, 1, width=32), max_size=40))
    with np.errstate(over="ignore"):
        values = np.array(numbers, np.float64).astype(KINDS[dtype])
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3))))
    tensor = stored(tmp_path_factory.getbasetemp() / f"{dtype}", values, dtype, cuts=cuts)
    assert both(tensor) == expected(values)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("special", [NAN, -INF, 700.0])
def test_a_value_is_found_wherever_it_lies(
    dtype: DType, special: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "CHUNK_BYTES", 64)
    size = 64 // np.dtype(KINDS[dtype]).itemsize * 3 + 1
    for at in (0, 1, size // 3 - 1, size // 3, size // 3 + 1, size - 1):
        values = np.full(size, -0.25, KINDS[dtype])
        values[at] = special
        found = both(stored(tmp_path / "x", values, dtype))
        assert found == expected(values)
        assert found.first == (at if not math.isfinite(special) else None)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -0.5, NAN, 1000.0])
def test_the_same_value_everywhere(dtype: DType, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "CHUNK_BYTES", 64)
    for size in (0, 1, 2, 100):
        values = np.full(size, value, KINDS[dtype])
        assert both(stored(tmp_path / "x", values, dtype)) == expected(values)
        if size:
            values[-1] = 0.125
            assert both(stored(tmp_path / "x", values, dtype)) == expected(values)


BYTES = {
    DType.F8_E4M3: ml_dtypes.float8_e4m3fn,
    DType.F8_E5M2: ml_dtypes.float8_e5m2,
    DType.F8_E8M0: ml_dtypes.float8_e8m0fnu,
    DType.F8_E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    DType.F8_E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}


def expected_of_bytes(values: NDArray[Any], kind: type) -> WeightScan:
    """Say by ml_dtypes' arithmetic what a scan must say by codes; the power 0 of a scale is not zero."""
    wide = values.view(kind).astype(np.float32)
    bad = ~np.isfinite(wide)
    zeros = values == 0 if kind is ml_dtypes.float8_e8m0fnu else wide == 0
    return WeightScan(
        nonfinite=int(bad.sum()), first=int(bad.argmax()) if bad.any() else None, all_zero=bool(zeros.all())
    )


@pytest.mark.parametrize("dtype", BYTES)
def test_floats_of_eight_bits_have_nan_looked_for(
    dtype: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "CHUNK_BYTES", 64)
    every = np.arange(256, dtype=np.uint8)
    same = [np.full(100, code, np.uint8) for code in (0, 0x80, 0x7E, 0x7F, 0xFF)]
    for values in (every, every[:0x7C], every[::-1], np.tile(every, 3)[::7], *same):
        held = np.ascontiguousarray(values)
        tensor = stored(tmp_path / "x", held, dtype, cuts=(len(held) // 3,))
        assert both(tensor) == expected_of_bytes(held, BYTES[dtype])


@pytest.mark.parametrize("dtype", [DType.I8, DType.F4, DType.I64])
def test_other_types_have_zeros_looked_for(dtype: DType, tmp_path: Path) -> None:
    for value in (0, 1, 0x80, 0xFF):
        tensor = stored(tmp_path / "x", np.full(64, value, np.uint8), DType.U8)
        spec = TensorSpec(name="x", dtype=dtype, shape=(64 * 8 // dtype.bits,))
        assert both(StoredTensor(spec=spec, spans=tensor.spans)) == WeightScan(all_zero=value == 0)


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "x", np.ones(100, np.float32), DType.F32)
    (tmp_path / "x").write_bytes(bytes(40))
    for look in (scan, exactly, lambda tensor: Scans().of(tensor, {"x": tensor})):
        with pytest.raises(SourceChanged, match="was truncated while it was read"):
            look(tensor)


@pytest.mark.parametrize("much", [1, 1 << 30], ids=["threads", "one"])
def test_many_bytes_are_read_at_once_and_told(much: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"t{at}": np.full(50, at + 0.5, np.float32) for at in range(20)}
    table = {name: stored(tmp_path / name, array, DType.F32, name=name) for name, array in values.items()}
    told: list[int] = []
    small = Scans(progress=told.append)
    assert small.of(table["t3"], table) == expected(values["t3"])
    assert told == []
    monkeypatch.setattr(scanning, "_LITTLE", 1000)
    monkeypatch.setattr(scanning, "_MUCH", much)
    large = Scans(progress=told.append)
    assert large.of(table["t3"], table) == expected(values["t3"])
    assert told == [200] * 20
    assert large.found == {name: expected(array) for name, array in values.items()}


@pytest.mark.parametrize(("little", "much"), [(1, 1), (1, 1 << 30), (1 << 30, 1)], ids=["threads", "one", "plain"])
def test_a_file_is_opened_once_however_many_tensors_it_holds(
    little: int, much: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(1, 101, dtype=np.float32)
    whole = stored(tmp_path / "x", values, DType.F32)
    table = {
        f"t{at}": StoredTensor(spec=TensorSpec(name=f"t{at}", dtype=DType.F32, shape=(1,)), spans=(span,))
        for at in range(100)
        for span in whole.part(4 * at, 4)
    }
    opened: list[Path] = []

    def counted(path: Path) -> int:
        opened.append(path)
        return opened_regular(path)

    monkeypatch.setattr(scanning, "opened_regular", counted)
    monkeypatch.setattr(scanning, "_LITTLE", little)
    monkeypatch.setattr(scanning, "_MUCH", much)
    scans = Scans()
    assert [scans.of(tensor, table) for tensor in table.values()] == [
        expected(values[at : at + 1]) for at in range(100)
    ]
    assert opened == [tmp_path / "x"]
