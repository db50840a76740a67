"""Who copies bytes: the system where pages match or a server does it, this process elsewhere; many short pieces at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_tool.actions import TensorAction
from lora_tool.execution import copying
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import CopyUnit, GatherUnit, units_of
from lora_tool.execution.worker import Worker
from lora_tool.plan.core.ops import Copy, Precision
from lora_tool.plan.core.steps import Shard, Step
from lora_tool.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec

NBYTES = 3 << 18


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(NBYTES + 8192))
    return path


@pytest.mark.parametrize(
    ("offset", "system", "by_the_system"),
    [(8192, "ext4", True), (64, "ext4", False), (64, "nfs4", True), (4096 + 7, "", True), (64, "", False)],
)
def test_who_copies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, system: str, *, by_the_system: bool
) -> None:
    copied: list[int] = []
    copy = os.copy_file_range

    def counted(one: int, other: int, count: int, *at: int) -> int:
        copied.append(count)
        return copy(one, other, count, *at)

    monkeypatch.setattr(os, "copy_file_range", counted)
    monkeypatch.setattr(copying, "_file_system", lambda _: system)
    begin = offset % 4096 if by_the_system else offset % 4096 + 1
    out = tmp_path / "out"
    with Sources([FileStamp.of(source)]) as sources, out.open("wb") as file:
        unit = CopyUnit(source=source, offset=offset, nbytes=NBYTES, begin=begin)
        Worker(sources, Precision.FLOAT32).write(unit, file.fileno())
    assert out.read_bytes()[begin:] == source.read_bytes()[offset : offset + NBYTES]
    assert bool(copied) == by_the_system


def test_the_file_system_of_a_folder_is_what_linux_calls_it() -> None:
    assert copying._file_system(Path("/proc").stat().st_dev) == "proc"
    assert copying._file_system(os.makedev(4000, 99)) == ""


def test_many_short_pieces_are_put_together_before_they_are_written(source: Path, tmp_path: Path) -> None:
    """A factor of LoRA on many ranks, with one long piece among them, and one short tensor alone."""
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
    assert [type(unit) for unit in units] == [GatherUnit, GatherUnit, CopyUnit, GatherUnit, CopyUnit]
    out = tmp_path / "out"
    with Sources([FileStamp.of(source)]) as sources, out.open("wb") as file:
        write_exactly(file.fileno(), memoryview(shard.header), 0)
        worker = Worker(sources, Precision.FLOAT32)
        for unit in units:
            worker.write(unit, file.fileno())
    data = source.read_bytes()
    expected = b"".join(data[span.offset : span.offset + span.nbytes] for each in tensors for span in each.spans)
    assert out.read_bytes()[len(shard.header) :] == expected
