"""Files that name very much: what is said about it must cost no more than reading it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from lora_tool.core.errors import Defect
from lora_tool.formats.weights import read_sharded

_MANY = 30_000
_SECONDS = 20.0
"""A busy machine needs one; counting the tensors of each shard anew took minutes."""


def test_an_index_of_very_many_missing_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    table = {f"layers.{n}.{leaf}": f"model-{n}.safetensors" for n in range(_MANY) for leaf in ("weight", "bias")}
    index.write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": table}))
    began = time.monotonic()
    problems = read_sharded(index).problems
    assert time.monotonic() - began < _SECONDS
    missing = [problem for problem in problems if problem.defect is Defect.SHARD_MISSING]
    assert len(missing) == _MANY
    assert {problem.message for problem in missing} == {"is missing, and 2 tensors with it"}
