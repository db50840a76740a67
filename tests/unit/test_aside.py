"""Bytes that a plan carries in a file: they are the same bytes for everybody who asks, wherever the plan goes."""

from __future__ import annotations

import copy
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np
import pytest

from lora_tool.plans.core.aside import Aside, Carried
from lora_tool.plans.core.factor_ops import SmallMatrix


def test_a_matrix_in_a_file_is_the_matrix() -> None:
    aside = Aside()
    numbers = [np.random.default_rng(seed).standard_normal((seed, 5)) for seed in range(40)]
    with ThreadPoolExecutor(4) as workers:
        carried = list(workers.map(lambda each: SmallMatrix.of(each, aside), numbers))
    for values, matrix in zip(numbers, carried, strict=True):
        assert isinstance(matrix.data, Carried)
        assert np.array_equal(matrix.values, values)
        held = SmallMatrix.of(values)
        assert matrix == held
        assert held == matrix
        assert hash(matrix) == hash(held)
        assert matrix.describe() == held.describe()
        assert matrix.part(1, 3) == held.part(1, 3)
        moved = pickle.loads(pickle.dumps(matrix))
        assert moved == held
        assert isinstance(moved.data, bytes)
        assert copy.copy(matrix) == held
    assert carried[3] != carried[4]


def test_where_no_file_can_be_made_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> NoReturn:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryFile", none)
    assert Aside().put(b"abc") == b"abc"
