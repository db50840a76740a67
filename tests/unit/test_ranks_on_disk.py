"""Checkpoints that ranks left in pieces, without the trainer that wrote them: put together, and what is told of faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from lora_tool import execute, plan_consolidate, validate
from lora_tool.core.errors import FindingsFound, IncompleteCheckpoint
from lora_tool.core.report import Severity
from tests.checkpoint_edits import Raw, Tensors, read, read_parts, write, write_parts
from tests.cli.calling import FIXTURES

BASE = FIXTURES / "causal-llama" / "base"
MEGATRON = FIXTURES / "megatron-lora"


def test_megatrons_lora_is_where_transformers_has_it(tmp_path: Path) -> None:
    run = MEGATRON / "iter_0000007"
    assert validate(run, deep=True).at_least(Severity.WARNING) == ()
    out = execute(plan_consolidate(run), tmp_path / "out")
    assert read(out / "adapter_model.safetensors") == read(MEGATRON / "truth.safetensors")
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6)


def cut(folder: Path, tensors: Mapping[str, Raw], ranks: int) -> list[Path]:
    """Write each tensor's rows over the files of `ranks` ranks, as torch's HuggingFaceStorageWriter does."""
    paths = []
    for rank in range(ranks):
        held: Tensors = {}
        info: dict[str, dict[str, list[int]]] = {}
        for name, tensor in tensors.items():
            rows, width = tensor.shape[0], len(tensor.data) // tensor.shape[0]
            first, last = rows * rank // ranks, rows * (rank + 1) // ranks
            if first < last:
                shape = (last - first, *tensor.shape[1:])
                held[name] = Raw(tensor.dtype, shape, tensor.data[first * width : last * width])
                info[name] = {"saved_offsets": [first] + [0] * (len(shape) - 1)}
        path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        write(path, held)
        header, data = read_parts(path)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        write_parts(path, header, data)
        paths.append(path)
    return paths


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    """The base model as three ranks save it, rows uneven."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(BASE / "config.json", folder)
    return cut(folder, whole(), 3)


def whole() -> Tensors:
    return {name: tensor for path in sorted(BASE.glob("*.safetensors")) for name, tensor in read(path).items()}


def test_rectangles_of_rows_are_put_together(ranks: list[Path], tmp_path: Path) -> None:
    folder = ranks[0].parent
    assert validate(folder, deep=True).at_least(Severity.WARNING) == ()
    out = execute(plan_consolidate(folder, what="model"), tmp_path / "out")
    assert read(out / "model.safetensors") == whole()


def test_a_rank_that_is_missing_is_told(ranks: list[Path]) -> None:
    ranks[1].unlink()
    assert "LT401" in {found.code for found in validate(ranks[0].parent).findings}
    with pytest.raises((FindingsFound, IncompleteCheckpoint)):
        plan_consolidate(ranks[0].parent, what="model")


def test_a_rank_that_is_there_twice_is_told(ranks: list[Path]) -> None:
    shutil.copy(ranks[0], ranks[1])
    assert "LT405" in {found.code for found in validate(ranks[0].parent).findings}


def test_a_file_that_does_not_say_where_it_lies_is_told(ranks: list[Path]) -> None:
    header, data = read_parts(ranks[2])
    del header["__metadata__"]["DCP_SHARDING_INFO"]
    write_parts(ranks[2], header, data)
    assert "LT402" in {found.code for found in validate(ranks[0].parent).findings}


def test_an_offset_that_leaves_a_hole_is_told(ranks: list[Path]) -> None:
    header, data = read_parts(ranks[2])
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    name = next(iter(info))
    info[name]["saved_offsets"][0] += 1
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
    write_parts(ranks[2], header, data)
    assert validate(ranks[0].parent).worst is Severity.ERROR
