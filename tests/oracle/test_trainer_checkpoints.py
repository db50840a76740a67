"""What trainers save, by their own functions, against what the training gathered: every tensor, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_tool.checkpoint import open_sharded
from lora_tool.execution.engine import execute
from lora_tool.plan.consolidate.plan_consolidate import plan_consolidate
from lora_tool.validation.validating import validate
from tests.oracle import trainer_saves


def equal(found: Path, truth: Path) -> bool:
    """Return whether both files have the same tensors, of the same type, bit for bit."""
    one, other = load_file(found), load_file(truth)
    return one.keys() == other.keys() and all(
        one[name].dtype == tensor.dtype and torch.equal(one[name], tensor) for name, tensor in other.items()
    )


def dtype_of(name: str) -> str:
    return "bf16" if "bf16" in name else "fp32"


@pytest.mark.parametrize("name", trainer_saves.KINDS)
def test_it_is_what_was_gathered(trainers: Path, tmp_path: Path, name: str) -> None:
    folder = trainers / name
    assert validate(open_sharded(folder), deep=True).findings == ()
    truth = f"truth-{dtype_of(name)}.safetensors"
    execute(plan_consolidate(folder, what="state"), tmp_path / "state")
    assert equal(tmp_path / "state" / "model.safetensors", trainers / truth)
    adapter = trainers / f"adapter-{dtype_of(name)}"
    execute(plan_consolidate(folder, adapter_config=adapter), tmp_path / "adapter")
    weights = "adapter_model.safetensors"
    assert equal(tmp_path / "adapter" / weights, adapter / weights)
