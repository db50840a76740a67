"""Modules that several ranks of DeepSpeed share, trained by it: the bits of the training, and what is wrong with the files."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lora_tool.core.errors import FindingsFound, UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.plan_consolidate import plan_consolidate
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


def test_a_universal_checkpoint_of_slices_has_them_joined(made: Path, tmp_path: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(made / TP / TAG), "output_folder": str(tmp_path / "run" / f"{TAG}_universal")}
    ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=True))
    out = execute(plan_consolidate(tmp_path / "run", what="state"), tmp_path / "out")
    found, truth = load_file(out / "model.safetensors"), load_file(made / TP / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert [name for name, tensor in truth.items() if not torch.equal(found[name], tensor)] == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _swapped(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = torch.load(path, weights_only=False)
    change(table)
    torch.save(table, path)


def _optim(run: Path, rank: int, slice_: int) -> Path:
    return run / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_{slice_:02d}_optim_states.pt"


def _model(run: Path, slice_: int) -> Path:
    return run / TAG / f"mp_rank_{slice_:02d}_model_states.pt"


def _drop_slice(run: Path) -> None:
    for path in (run / TAG).glob("*mp_rank_01*"):
        path.unlink()


TP = "autotp-stage2"
FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a slice is missing": ("LT401", _drop_slice),
    "a slice's model file is missing": ("LT401", lambda run: _model(run, 1).unlink()),
    "a slice's masters are missing": ("LT401", lambda run: _optim(run, 1, 1).unlink()),
    "a slice is truncated": ("LT402", lambda run: _cut(_optim(run, 1, 1))),
    "slices are swapped": ("LT404", lambda run: _swapped(_optim(run, 0, 0), _optim(run, 0, 1))),
    "a slice is copied": ("LT404", lambda run: shutil.copy(_model(run, 0), _model(run, 1))),
    "a slice of another step": (
        "LT406",
        lambda run: _changed(_model(run, 1), lambda table: table.update(global_steps=9)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_refused(fault: str, made: Path, tmp_path: Path) -> None:
    code, injure = FAULTS[fault]
    run = Path(shutil.copytree(made / TP, tmp_path / "run"))
    injure(run)
    assert code in found_in(run)
    with pytest.raises(FindingsFound, match=code):
        execute(plan_consolidate(run, what="state"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _without_map(table: dict[str, Any]) -> None:
    table.pop("universal_checkpoint_info")


def _scaled(table: dict[str, Any]) -> None:
    cuts = table["universal_checkpoint_info"]["affine_map"]["params"]
    for piece in (piece for of in cuts[r"^model\.norm\.weight$"]["ranks"].values() for piece in of["pieces"]):
        piece["scale"] = 0.5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without_map, "does not record how its parameters were cut"),
        (_scaled, r"`model\.norm\.weight` cannot be put together from its slices: AutoTP stores it divided"),
    ],
)
def test_a_cut_that_is_not_known_is_refused(change: Any, why: str, made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made / TP, tmp_path / "run"))
    for slice_ in range(2):
        _changed(_model(run, slice_), change)
    with pytest.raises(UnsupportedCheckpoint, match=why):
        plan_consolidate(run, what="state")


def test_experts_under_autoep_are_refused(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made / "round-robin-stage2", tmp_path / "run"))
    _changed(_model(run, 0), lambda table: table.update(ds_autoep_layers=[{"moe_layer_id": 0}]))
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
