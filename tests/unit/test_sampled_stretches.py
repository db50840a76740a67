"""Stretches of copies, plain and of matrices that lie transposed: what differs is found and counted."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lora_tool.core.errors import SourceChanged
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec, TransposedSpan
from lora_tool.plans.core.ops import Copy
from lora_tool.verification import copied
from lora_tool.verification.copied import Copies
from lora_tool.verification.pieces import Compared

TYPES = {1: DType.I8, 2: DType.BF16, 4: DType.F32, 8: DType.F64}
SHAPES = [(6, 40), (40, 6), (1, 9), (9, 1), (300, 11)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a stretch compared in several chunks."""
    monkeypatch.setattr(copied, "_CHUNK_BYTES", 56)


def compared(folder: Path, stored: np.ndarray, meant: np.ndarray, *, turned: bool) -> Compared:
    """Return the comparison of one matrix with what it should be, which may lie transposed in its file."""
    (folder / "stored").write_bytes(b"123" + stored.tobytes())
    (folder / "source").write_bytes(b"header" + (meant.T if turned else meant).tobytes())
    spec = TensorSpec(name="weight", dtype=TYPES[meant.itemsize], shape=meant.shape)
    span = Span(path=folder / "source", offset=6, nbytes=meant.nbytes)
    if turned:
        rows, columns = meant.shape
        span = TransposedSpan(
            path=span.path, offset=6, nbytes=meant.nbytes, rows=rows, columns=columns, itemsize=meant.itemsize
        )
    mine = Span(path=folder / "stored", offset=3, nbytes=stored.nbytes)
    op = Copy(source=StoredTensor(spec=spec, spans=(span,)))
    return Compared(name="weight", op=op, stored=StoredTensor(spec=spec, spans=(mine,)), begin=100)


@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "transposed"])
@pytest.mark.parametrize("width", list(TYPES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_differs_is_counted(tmp_path: Path, shape: tuple[int, int], width: int, *, turned: bool) -> None:
    chance = np.random.default_rng([*shape, width])
    meant = chance.integers(0, 200, shape).astype(f"<u{width}")
    stored = meant.copy()
    wrong = np.sort(chance.choice(meant.size, min(meant.size, 4), replace=False))
    stored.reshape(-1)[wrong] += 1
    part = compared(tmp_path, stored, meant, turned=turned)
    ends = sorted({0, 1, 2, shape[1] - 1, shape[1], 2 * shape[1] + 1, meant.size - 1, meant.size, *wrong})
    every = [(first, last) for first, last in product(ends, ends) if 0 <= first < last <= meant.size]
    asked = [(part, [(first * width, (last - first) * width)]) for first, last in every]
    with Copies() as files:
        found = [files.look(*each) for each in asked]
    for (first, last), tally in zip(every, found, strict=True):
        inside = [at for at in wrong if first <= at < last]
        known = (last - first, len(inside), inside[0] + 100 if inside else None, bool(inside))
        assert (tally.compared, tally.wrong, tally.first, tally.moved) == known
        assert tally.outside == tally.wrong


@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "transposed"])
@pytest.mark.parametrize("which", ["stored", "source"])
def test_a_file_that_ends_early_is_named(tmp_path: Path, which: str, *, turned: bool) -> None:
    meant = np.arange(60, dtype="<u2").reshape(6, 10)
    part = compared(tmp_path, meant, meant, turned=turned)
    (tmp_path / which).write_bytes((tmp_path / which).read_bytes()[:-1])
    with Copies() as files, pytest.raises(SourceChanged, match=which):
        files.look(part, [(0, 40), (40, 80)])
