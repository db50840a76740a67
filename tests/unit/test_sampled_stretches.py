"""Stretches of a matrix that lies transposed in its file: the same bytes, whatever little of the file is read for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lora_tool.tensors import DType, StoredTensor, TensorSpec, TransposedSpan
from lora_tool.verification import elements
from lora_tool.verification.elements import Files


@pytest.mark.parametrize(
    ("most_bytes", "most_lines"), [(1 << 19, 256), (64, 256), (0, 256), (0, 0)], ids=["lines", "few", "pieces", "whole"]
)
@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (1, 9), (9, 1)], ids=str)
def test_stretches_of_a_transposed_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], most_bytes: int, most_lines: int
) -> None:
    monkeypatch.setattr(elements, "_READ_BYTES", most_bytes)
    monkeypatch.setattr(elements, "_MOST_LINES", most_lines)
    meant = np.arange(shape[0] * shape[1], dtype="<u2").reshape(shape)
    path = tmp_path / "weights"
    path.write_bytes(b"header" + meant.T.tobytes())
    span = TransposedSpan(path=path, offset=6, nbytes=meant.nbytes, rows=shape[0], columns=shape[1], itemsize=2)
    tensor = StoredTensor(spec=TensorSpec(name="weight", dtype=DType.F16, shape=shape), spans=(span,))
    every = [(2 * at, 2 * count) for at in range(meant.size) for count in (1, 3, shape[1], meant.size)]
    within = [(start, nbytes) for start, nbytes in every if start + nbytes <= meant.nbytes]
    with Files() as files:
        found = list(files.stretches(tensor, within))
    assert [each.tobytes() for each in found] == [meant.tobytes()[start:][:nbytes] for start, nbytes in within]
