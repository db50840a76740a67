"""The names in a ZeRO checkpoint's tables, which do not always agree, and the tensors that have two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_tool.checkpoints import ShardedDir, open_sharded
from lora_tool.core.errors import FindingsFound
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.core.plan import Plan
from lora_tool.verification.validating import validate
from tests.bench.zero_checkpoints import Shapes, write

ZERO = Path(__file__).resolve().parents[2] / "fixtures" / "zero"
Table = dict[str, Any]


def plan(folder: Path, **choices: Any) -> Plan:
    checkpoint = open_sharded(folder)
    assert isinstance(checkpoint, ShardedDir)
    return plan_consolidate(checkpoint, **choices)


def changed(folder: Path, name: str, change: Callable[[Table], None]) -> Path:
    """Return a copy of the fixture `name` whose model files say something else."""
    copy = Path(shutil.copytree(ZERO / name, folder / name))
    for path in copy.rglob("*model_states.pt"):
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)
    return copy


def wrapped(name: str) -> str:
    return name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.")


def wrap_layer(value: Table) -> None:
    """As DeepSpeed sees activation checkpointing: `state_dict` takes the wrapper out of its names, nothing else does."""
    value["param_shapes"] = [{wrapped(name): s for name, s in group.items()} for group in value["param_shapes"]]
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if value[key]:
            value[key] = {wrapped(name): found for name, found in value[key].items()}


def name_twice(value: Table) -> None:
    """A module with two names, whose parameters DeepSpeed's `shared_params` do not list."""
    for name in [name for name in value["module"] if "layers.1.self_attn." in name]:
        value["module"][name.replace("layers.1.self_attn", "shared")] = value["module"][name]


WITH_TABLES = ["stage1-reward", "stage2-reward", "stage3-reward", "stage3-full"]


@pytest.mark.parametrize(
    ("name", "change"),
    [*((name, wrap_layer) for name in WITH_TABLES), *((name, name_twice) for name in [*WITH_TABLES, "stage0-reward"])],
)
def test_every_tensor_is_written_once(tmp_path: Path, name: str, change: Callable[[Table], None]) -> None:
    copy = changed(tmp_path, name, change)
    execute(plan(copy, what="state"), tmp_path / "out")
    found, truth = load_file(tmp_path / "out" / "model.safetensors"), load_file(ZERO / name / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert all(found[key].dtype == truth[key].dtype and torch.equal(found[key], truth[key]) for key in truth)
    assert "LT410" not in {finding.code for finding in validate(open_sharded(copy)).findings}
    assert plan(copy).data_bytes == plan(ZERO / name).data_bytes


def test_wrappers_inside_of_names_are_taken_out_of_a_model(tmp_path: Path) -> None:
    trained: Shapes = {"model.layers.0._orig_mod.mlp.weight": (7, 3), "model.norm.weight": (5,)}
    write(tmp_path / "run", trained, {}, ranks=2)
    names = {step.out.name for step in plan(tmp_path / "run").steps}
    assert names == {"model.layers.0.mlp.weight", "model.norm.weight"}
    assert {step.out.name for step in plan(tmp_path / "run", what="state").steps} == trained.keys()


def without_a_fragment(value: Table) -> None:
    value["frozen_param_shapes"] = value["frozen_param_fragments"] = None


def test_a_model_that_would_lack_frozen_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", {"model.norm.weight": (5,)}, {"model.embed.weight": (10,)}, ranks=2)
    assert len(list(plan(tmp_path / "run").steps)) == 2
    for path in (tmp_path / "run").rglob("*model_states.pt"):
        value = torch.load(path, weights_only=False)
        without_a_fragment(value)
        torch.save(value, path)
    with pytest.raises(FindingsFound, match=r"LT410 .*`model\.embed\.weight`: the model would lack it"):
        plan(tmp_path / "run")
    assert len(list(plan(tmp_path / "run", ignore=["LT410"]).steps)) == 1


def test_frozen_tensors_that_nothing_names_are_warned_of(tmp_path: Path) -> None:
    copy = changed(tmp_path, "stage3-full", without_a_fragment)
    assert any("exclude_frozen_parameters" in str(found) for found in plan(copy).findings)
    assert not any("exclude_frozen_parameters" in str(found) for found in plan(ZERO / "stage3-full").findings)


def test_lora_on_a_stack_of_experts(tmp_path: Path) -> None:
    """PEFT's `target_parameters`: lora_A has the rank once for each expert, the base its own parameter's name."""
    stem = "base_model.model.model.layers.0.mlp.experts"
    trained: Shapes = {f"{stem}.lora_A.default.weight": (9, 4), f"{stem}.lora_B.default.weight": (6, 9)}
    write(tmp_path / "run", trained, {f"{stem}.base_layer.down_proj": (3, 6, 4)}, ranks=2)
    config: Table = {"peft_type": "LORA", "r": 3, "target_modules": [], "target_parameters": ["experts.down_proj"]}
    (tmp_path / "run" / "adapter_config.json").write_text(json.dumps(config))
    assert {step.out.name for step in plan(tmp_path / "run").steps} == {
        f"{stem}.lora_A.weight",
        f"{stem}.lora_B.weight",
    }
    assert "LT410" not in {finding.code for finding in validate(open_sharded(tmp_path / "run")).findings}
