"""LoRA on embeddings: of A, which is as wide as the vocabulary, a worker reads the columns of its rows alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_tool.core.tensors import FileStamp, StoredTensor
from lora_tool.execution.backends.choosing import backend_for
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.safetensors import scan_file
from lora_tool.native.library import VARIABLE
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import LoraDelta, Precision


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_only_the_columns_of_the_rows_are_read(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernel)
    random = np.random.default_rng(0)
    held = {"w": (90, 8), "a": (3, 90), "b": (8, 3)}
    numbers = {name: random.integers(-9, 10, shape).astype(np.float32) for name, shape in held.items()}
    save_file(numbers, path := tmp_path / "held.safetensors")
    w, a, b = (scan_file(path).tensors[name] for name in held)
    read, of_a = Sources.read_into, []

    def counted(sources: Sources, tensor: StoredTensor, start: int, buffer: memoryview) -> None:
        of_a.append(len(buffer) if tensor is a else 0)
        read(sources, tensor, start, buffer)

    monkeypatch.setattr(Sources, "read_into", counted)
    op = LoraDelta(source=w, terms=(LoraTerm(a=a, b=b, scaling=2.0),), transposed=True)
    with Sources([FileStamp.of(path)]) as sources:
        backend = backend_for(Precision.FLOAT32, op)(sources, Precision.FLOAT32, lambda: False)
        assert isinstance(backend, NumpyBackend)
        found = backend.numbers(ComputeUnit(out=w.spec, op=op, is_new=True, first=40, last=50, at=0))
    expected = numbers["w"] + 2 * (numbers["b"] @ numbers["a"]).T
    assert np.array_equal(found.reshape(10, 8), expected[40:50])
    assert sum(of_a) == 3 * 10 * 4
