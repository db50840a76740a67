from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path

import pytest

from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec
from lora_tool.plans.core.steps import SideFile


def test_no_two_dtypes_are_one() -> None:
    assert len(list(DType)) == len(DType.__members__) == 22
    enum.unique(DType)
    assert str(DType.BF16) == "BF16"


def test_four_dtypes_can_be_merged() -> None:
    assert {dtype for dtype in DType if dtype.is_float} == {DType.F16, DType.BF16, DType.F32, DType.F64}


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        (DType.F32, (2, 3), 24),
        (DType.BF16, (), 2),
        (DType.F64, (0, 5), 0),
        (DType.F4, (2,), 1),
        (DType.F6_E2M3, (4,), 3),
        (DType.BOOL, (3,), 3),
    ],
)
def test_sizes(dtype: DType, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorSpec(name="x", dtype=dtype, shape=shape).nbytes == nbytes


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        (DType.F32, (-1,), "negative size"),
        (DType.F32, (2**62,), "overflows 63 bits"),
        (DType.F32, (2**62, 0, 4), "overflows 63 bits"),
        (DType.F4, (1,), "whole number of bytes"),
        (DType.F6_E3M2, (2,), "whole number of bytes"),
    ],
)
def test_a_spec_that_exists_is_possible(dtype: DType, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TensorSpec(name="x", dtype=dtype, shape=shape)


def test_spans_hold_exactly_the_tensor() -> None:
    spec = TensorSpec(name="x", dtype=DType.F32, shape=(4,))
    parts = tuple(Span(path=Path(name), offset=0, nbytes=8) for name in "ab")
    tensor = StoredTensor(spec=spec, spans=parts)
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) == ("x", DType.F32, (4,), 16)
    assert tensor.path == Path("a")
    with pytest.raises(ValueError, match="needs 16 bytes, its spans hold 8"):
        StoredTensor(spec=spec, spans=parts[:1])
    with pytest.raises(ValueError, match="negative"):
        Span(path=Path("a"), offset=-1, nbytes=8)


def test_a_stamp_tells_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("a")
    before = FileStamp.of(path)
    assert FileStamp.of(path) == before
    path.write_text("ab")
    assert FileStamp.of(path) != before


def test_a_side_file_has_one_origin() -> None:
    with pytest.raises(ValueError, match="either a source or a content"):
        SideFile(filename="x", reason="test")
    with pytest.raises(ValueError, match="either a source or a content"):
        SideFile(filename="x", reason="test", source=Path("x"), content=b"")


@pytest.mark.parametrize("sizes", [(), (0,), (4,), (2, 2), (0, 3, 0, 0, 1, 4), (1,) * 8])
def test_a_part_is_the_bytes_that_were_asked_for(sizes: tuple[int, ...]) -> None:
    spans = tuple(Span(path=Path(str(number)), offset=100, nbytes=size) for number, size in enumerate(sizes))
    spec = TensorSpec(name="x", dtype=DType.U8, shape=(sum(sizes),))
    stored = StoredTensor(spec=spec, spans=spans)

    def listed(found: Iterable[Span]) -> list[tuple[str, int]]:
        return [(str(span.path), span.offset + at) for span in found for at in range(span.nbytes)]

    for start in range(sum(sizes) + 2):
        for nbytes in range(sum(sizes) + 2):
            found = tuple(stored.part(start, nbytes))
            assert listed(found) == listed(spans)[start : start + nbytes]
            assert all(span.nbytes for span in found)
