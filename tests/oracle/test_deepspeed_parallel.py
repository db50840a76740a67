"""Modules that several ranks of DeepSpeed share, trained by it: the bits of the training, and what is wrong with the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lora_tool.core.errors import UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.verification.validating import validate
from tests.made_once import made_once
from tests.oracle.deepspeed_saves import KINDS, TAG, make

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "deepspeed", make)


def found_in(run: Path) -> dict[str, str]:
    """Return what the rules find in the values and the structure of the checkpoint."""
    found = validate(run, deep=True, select=["LT4"]).at_least(Severity.WARNING)
    return {finding.code: str(finding) for finding in found}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_the_bits_of_the_training(kind: str, made: Path, tmp_path: Path) -> None:
    found = load_file(execute(plan_consolidate(made / kind, what="state"), tmp_path / "out") / "model.safetensors")
    truth = load_file(made / kind / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert [name for name, tensor in truth.items() if found[name].dtype != tensor.dtype] == []
    assert [name for name, tensor in truth.items() if not torch.equal(found[name], tensor)] == []
    assert found_in(made / kind) == {}


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = torch.load(path, weights_only=False)
    change(table)
    torch.save(table, path)


def test_experts_under_autoep_are_refused(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made / "round-robin-stage2", tmp_path / "run"))
    _changed(
        run / TAG / "mp_rank_00_model_states.pt", lambda table: table.update(ds_autoep_layers=[{"moe_layer_id": 0}])
    )
    with pytest.raises(UnsupportedCheckpoint, match="AutoEP replaced its mixtures"):
        plan_consolidate(run, what="state")


def test_a_value_head_around_the_adapter_and_norms_that_were_trained(made: Path, tmp_path: Path) -> None:
    """The head goes into LLaMA-Factory's file beside the adapter, and the norms into `modules_to_save`: PEFT loads them."""
    run = made / "value-head-stage3"
    truth = load_file(run / "truth.safetensors")
    out = execute(plan_consolidate(run, lora_alpha=6), tmp_path / "out")
    head = load_file(out / "value_head.safetensors")
    assert head.keys() == {"v_head.summary.weight", "v_head.summary.bias"}
    assert all(torch.equal(head[name], truth[name]) for name in head)
    base = AutoModelForCausalLM.from_pretrained(run / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, out)
    again = model.load_adapter(out, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    held = model.state_dict()
    trained = {
        name.removeprefix("pretrained_model."): tensor
        for name, tensor in truth.items()
        if ".lora_" in name or "norm" in name
    }
    places = {name: name.replace("norm.weight", "norm.modules_to_save.default.weight") for name in trained}
    assert all(torch.equal(held[places[name]], tensor) for name, tensor in trained.items())
    found = {finding.code for finding in validate(out, base=run / "base").at_least(Severity.WARNING)}
    assert found == {"LT222"}, "which says how the head becomes a score head"
