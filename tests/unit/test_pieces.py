"""Tensors whose pieces lie in several files: what they make is what was cut, and a hole or an overlap is named."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lora_tool.core.errors import SourceChanged
from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorAction, TensorSpec, TiledSpan
from lora_tool.execution.local_engine import Worker
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import CopyUnit, GatherUnit, units_of
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.pieces import Piece, assembled, uncovered
from lora_tool.formats.stored import read_columns, read_part, same_values
from lora_tool.plans.core.ops import Copy, Precision
from lora_tool.plans.core.steps import Shard, Step

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def cut(shape: Sequence[int], chance: random.Random, deep: int = 3) -> Iterator[Rectangle]:
    """Cut a shape in two along some dimension, and each part again: rectangles that are in no grid."""
    todo = [((0,) * len(shape), tuple(shape), deep)]
    while todo:
        offsets, sizes, left = todo.pop()
        at = chance.randrange(len(shape)) if shape else 0
        if not shape or not left or sizes[at] < 2:
            yield offsets, sizes
            continue
        first = chance.randrange(1, sizes[at])
        todo.append((offsets, _with(sizes, at, first), left - 1))
        todo.append((_with(offsets, at, offsets[at] + first), _with(sizes, at, sizes[at] - first), left - 1))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def saved(folder: Path, whole: NDArray[np.uint16], rectangles: Sequence[Rectangle]) -> list[Piece]:
    """Write each rectangle into one of three files, behind some bytes of something else."""
    files = [bytearray(b"\xee" * 7 * (number + 1)) for number in range(3)]
    paths = [folder / f"{number}.bin" for number in range(3)]
    pieces = []
    for number, (offsets, sizes) in enumerate(rectangles):
        inside = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        data = whole[inside].tobytes()
        file = files[number % 3]
        pieces.append(Piece(offsets, sizes, Span(path=paths[number % 3], offset=len(file), nbytes=len(data))))
        file += data
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    return pieces


def spec_of(whole: NDArray[np.uint16]) -> TensorSpec:
    return TensorSpec(name="w", dtype=DType.BF16, shape=whole.shape)


SHAPES = [(), (1,), (17,), (6, 8), (7, 5), (3, 4, 5), (2, 3, 4, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_some_columns_of_a_matrix_are_those(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    whole = np.arange(7 * 9, dtype=np.uint16).reshape(7, 9)
    in_one_piece = assembled(spec_of(whole), saved(tmp_path, whole, [((0, 0), (7, 9))]))
    (tmp_path / "cut").mkdir()
    cut_up = assembled(spec_of(whole), saved(tmp_path / "cut", whole, list(cut((7, 9), chance))))
    with OpenFiles(lambda path: os.open(path, os.O_RDONLY)) as files:
        for tensor in (in_one_piece, cut_up):
            for first, last in ((0, 9), (0, 1), (2, 7), (8, 9)):
                columns = np.zeros((7, 9), np.uint16)[:, : last - first]
                read_columns(columns, tensor, first, files)
                assert np.array_equal(columns, whole[:, first:last])
        os.truncate(in_one_piece.path, 100)
        with pytest.raises(SourceChanged, match="was truncated"):
            read_columns(np.zeros((7, 9), np.uint16), in_one_piece, 0, files)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_what_was_cut(tmp_path: Path, shape: tuple[int, ...], seed: int) -> None:
    chance = random.Random(f"{shape} {seed}")
    whole = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    pieces = saved(tmp_path, whole, list(cut(shape, chance)))
    chance.shuffle(pieces)
    tensor = assembled(spec_of(whole), pieces)
    data = whole.tobytes()
    assert read_part(tensor, 0, len(data)) == data
    for _ in range(10):
        start = chance.randrange(len(data))
        nbytes = chance.randrange(1, len(data) - start + 1)
        assert read_part(tensor, start, nbytes) == data[start : start + nbytes]
    assert {place.path for place in tensor.places} == {piece.span.path for piece in pieces}
    assert sum(place.nbytes for place in tensor.places) == len(data)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_a_hole_and_an_overlap_are_seen(shape: tuple[int, ...], seed: int) -> None:
    chance = random.Random(f"{shape} {seed}")
    nothing = Span(path=Path("x"), offset=0, nbytes=0)
    pieces = [Piece(*rectangle, nothing) for rectangle in cut(shape, chance)]
    assert uncovered(shape, pieces) is None
    lost = chance.randrange(len(pieces))
    assert "no file" in str(uncovered(shape, pieces[:lost] + pieces[lost + 1 :]))
    assert "two places" in str(uncovered(shape, [*pieces, pieces[lost]]))
    moved = pieces[lost]._replace(offsets=tuple(offset + 1 for offset in pieces[lost].offsets))
    assert uncovered(shape, [*pieces[:lost], moved, *pieces[lost + 1 :]])


@pytest.mark.parametrize(
    ("rectangles", "message"),
    [
        ([((0, 0), (2, 6))], "rows 2 to 4 are in no file"),
        ([((0, 0), (4, 3))], "columns 3 to 6 are in no file"),
        ([((0, 0), (2, 6)), ((2, 0), (2, 4))], "rows 2 to 4, columns 4 to 6 are in no file"),
        ([((0, 0), (3, 6)), ((2, 0), (2, 6))], "rows 2 to 3 are in two places"),
        ([((0, 0), (5, 6))], "its parts have 5 rows, but the tensor has 4"),
        ([], "its elements are in no file"),
    ],
)
def test_where_it_is_is_said(rectangles: list[Rectangle], message: str) -> None:
    nothing = Span(path=Path("x"), offset=0, nbytes=0)
    found = uncovered((4, 6), [Piece(*rectangle, nothing) for rectangle in rectangles])
    assert found == message


def test_flat_slices_are_pieces_of_all_elements(tmp_path: Path) -> None:
    whole = np.arange(15, dtype=np.uint16).reshape(3, 5)
    pieces = saved(tmp_path, whole.reshape(-1), [((0,), (7,)), ((7,), (0,)), ((7,), (8,))])
    tensor = assembled(spec_of(whole), pieces, flat=True)
    assert read_part(tensor, 0, 30) == whole.tobytes()
    assert uncovered((3, 5), pieces[:2], flat=True) == "elements 7 to 15 are in no file"


def test_an_empty_tensor(tmp_path: Path) -> None:
    whole = np.empty((0, 4), np.uint16)
    tensor = assembled(spec_of(whole), saved(tmp_path, whole, [((0, 0), (0, 4))]))
    assert (tensor.shape, tensor.nbytes, tensor.path) == ((0, 4), 0, tmp_path / "0.bin")


def test_columns_are_one_span_and_long_rows_many(tmp_path: Path) -> None:
    """A matrix of thousands of rows is one span; where each row of a piece is long, the system copies them alone."""
    whole = np.arange(2000 * 12, dtype=np.uint16).reshape(2000, 12)
    tensor = assembled(spec_of(whole), saved(tmp_path, whole, [((0, 0), (2000, 8)), ((0, 8), (2000, 4))]))
    assert [type(span) for span in tensor.spans] == [TiledSpan]
    assert same_values(tensor, tensor)
    wide = np.zeros((3, 1 << 16), np.uint16)
    halves = saved(tmp_path, wide, [((0, 0), (3, 1 << 15)), ((0, 1 << 15), (3, 1 << 15))])
    assert [type(span) for span in assembled(spec_of(wide), halves).spans] == [Span] * 6


@pytest.mark.parametrize("columns", [(1200, 800), (1200, 796, 4)], ids=["wide", "and narrow"])
def test_a_few_long_rows_side_by_side(tmp_path: Path, columns: tuple[int, ...]) -> None:
    """A factor of LoRA that tensor parallelism cut: any part of it, from any byte."""
    whole = np.random.default_rng(1).integers(0, 1 << 16, (5, 2000), np.uint16)
    starts = [sum(columns[:at]) for at in range(len(columns))]
    pieces = saved(tmp_path, whole, [((0, start), (5, width)) for start, width in zip(starts, columns, strict=True)])
    tensor = assembled(spec_of(whole), pieces)
    for start, nbytes in ((0, 20_000), (1001, 5003), (3999, 2), (16_000, 4000)):
        assert read_part(tensor, start, nbytes) == whole.tobytes()[start : start + nbytes]


@pytest.mark.parametrize("gives", [None, 1, 700])
def test_more_rows_than_one_call_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: int | None) -> None:
    """Also where the system gives fewer bytes than were asked for, or cannot read several at once."""
    whole = np.random.default_rng(1).integers(0, 1 << 16, (2500, 700), np.uint16)
    tensor = assembled(spec_of(whole), saved(tmp_path, whole, [((0, 0), (2500, 300)), ((0, 300), (2500, 400))]))
    assert read_part(tensor, 0, 3_500_000) == whole.tobytes()
    if gives is None:
        monkeypatch.delattr(os, "preadv")
    else:
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, rows, at: preadv(fd, [rows[0][:gives]], at))
    assert read_part(tensor, 700_001, 5001) == whole.tobytes()[700_001:705_002]


def test_pieces_side_by_side_are_copied_as_they_are(tmp_path: Path) -> None:
    """Bit for bit, NaN with its payload included, and some MB at a time."""
    whole = np.random.default_rng(0).integers(0, 1 << 16, (700, 9000), np.uint16)
    tensor = assembled(spec_of(whole), saved(tmp_path, whole, [((0, 0), (700, 5000)), ((0, 5000), (700, 4000))]))
    step = Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="")
    shard = Shard(filename="out", steps=(step,))
    units = list(units_of(shard, whole=lambda _: False))
    assert {type(unit) for unit in units} == {GatherUnit}
    assert max(unit.nbytes for unit in units) <= 4 << 20
    out = tmp_path / "out"
    with Sources(FileStamp.of(path) for path in {place.path for place in tensor.places}) as sources:
        worker = Worker(sources, Precision.FLOAT32)
        with out.open("wb") as file:
            write_exactly(file.fileno(), memoryview(shard.header), 0)
            for unit in units:
                worker.write(unit, file.fileno())
    assert out.read_bytes()[len(shard.header) :] == whole.tobytes()


def test_many_short_pieces_are_put_together_before_they_are_written(tmp_path: Path) -> None:
    """A factor of LoRA on many ranks, with one long piece among them, and one short tensor alone."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(800_000))
    sizes = [2048] * 150 + [200_000] + [2048] * 100
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    spans = tuple(
        Span(path=source, offset=sum(sizes) - start - size, nbytes=size)
        for start, size in zip(starts, sizes, strict=True)
    )
    tensors = [
        StoredTensor(spec=TensorSpec(name=name, dtype=DType.U8, shape=(sum(span.nbytes for span in held),)), spans=held)
        for name, held in (("many", spans), ("one", spans[:1]))
    ]
    steps = tuple(Step(out=each.spec, op=Copy(source=each), action=TensorAction.COPIED, reason="") for each in tensors)
    shard = Shard(filename="out", steps=steps)
    units = list(units_of(shard, whole=lambda _: False))
    assert [type(unit) for unit in units] == [GatherUnit, CopyUnit, GatherUnit, CopyUnit]
    out = tmp_path / "out"
    with Sources([FileStamp.of(source)]) as sources, out.open("wb") as file:
        write_exactly(file.fileno(), memoryview(shard.header), 0)
        worker = Worker(sources, Precision.FLOAT32)
        for unit in units:
            worker.write(unit, file.fileno())
    data = source.read_bytes()
    expected = b"".join(data[span.offset : span.offset + span.nbytes] for each in tensors for span in each.spans)
    assert out.read_bytes()[len(shard.header) :] == expected


def test_pieces_in_no_order_do_not_take_hours() -> None:
    nothing = Span(path=Path("x"), offset=0, nbytes=0)
    pieces = [Piece((at,), (2,), nothing) for at in range(0, 40_000, 1)]
    assert "in no order" in str(uncovered((40_001,), pieces))


def test_a_type_of_half_a_byte_is_not_cut(tmp_path: Path) -> None:
    spec = TensorSpec(name="w", dtype=DType.F4, shape=(2, 2))
    pieces = [Piece((row, 0), (1, 2), Span(path=tmp_path, offset=row, nbytes=1)) for row in range(2)]
    with pytest.raises(ValueError, match="2 pieces are of F4"):
        assembled(spec, pieces)
    assert isinstance(assembled(spec, [Piece((0, 0), (2, 2), Span(path=tmp_path, offset=0, nbytes=2))]), StoredTensor)
