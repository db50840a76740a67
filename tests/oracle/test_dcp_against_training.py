"""FSDP2 checkpoints against what the training gathered, and what is wrong with them found by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lora_tool.checkpoints import open_checkpoint, open_sharded
from lora_tool.checkpoints.states.dcp_state import copied_files
from lora_tool.core.errors import UnsupportedCheckpoint
from lora_tool.core.report.model import refuse_errors
from lora_tool.execution.engine import execute
from lora_tool.formats.dcp import StoredChunk
from lora_tool.formats.torch_zip import read_torch_file
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.core.plan import Plan
from lora_tool.verification.validating import validate

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
BASE = FIXTURES / "reward-qwen2" / "base"


def plan(folder: Path, what: str = "auto") -> Plan:
    planned = plan_consolidate(folder, what=what)
    assert planned.values is not None
    refuse_errors(planned.values.run(lambda _: None), planned.values.ignored)
    return planned


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "fsdp2-full", tmp_path / "full"))


@pytest.mark.parametrize("name", ["fsdp2-full", "fsdp2-reward"])
def test_the_state_is_what_was_trained(tmp_path: Path, name: str) -> None:
    execute(plan(FIXTURES / name, "state"), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(FIXTURES / name / "truth.safetensors")
    assert found.keys() == truth.keys()
    for key, tensor in truth.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


def test_the_adapter_gives_the_trained_rewards(tmp_path: Path) -> None:
    execute(plan(FIXTURES / "fsdp2-reward"), tmp_path / "adapter")
    told = json.loads((FIXTURES / "fsdp2-reward" / "rewards.json").read_text())
    torch.manual_seed(99)
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, pad_token_id=0, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        rewards = model(input_ids=torch.tensor(told["prompts"])).logits.squeeze(-1)
    torch.testing.assert_close(rewards, torch.tensor(told["rewards"]), atol=1e-4, rtol=1e-4)


def test_the_model_loads_in_transformers(tmp_path: Path) -> None:
    execute(plan(FIXTURES / "fsdp2-full"), tmp_path / "model")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize(
    ("first", "second", "copies"),
    [
        (torch.arange(6.0), torch.arange(6.0), 1),
        (torch.arange(6.0), torch.arange(6.0) + 1, 0),
        (torch.ones(6), torch.ones(6), 0),  # rows of a norm that was never trained
    ],
)
def test_a_file_copied_over_another_ranks(
    tmp_path: Path, first: torch.Tensor, second: torch.Tensor, copies: int
) -> None:
    pieces = []
    for rank, rows in enumerate((first, second)):
        torch.save(rows, tmp_path / f"__{rank}_0.distcp")
        file = read_torch_file(tmp_path / f"__{rank}_0.distcp")
        pieces.append(StoredChunk(file.stored(file.value, "w"), file.record(file.value)))
    found = list(copied_files({"w": tuple(pieces)}))
    assert [(path.name, other.name) for path, other in found] == [("__1_0.distcp", "__0_0.distcp")] * copies


def saved_state(folder: Path, state: dict[str, Any]) -> Path:
    """Save with torch's own writer, as a training would."""
    save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def saved(folder: Path, name: str) -> Path:
    return saved_state(folder, {"model": {name: torch.ones(5, 3)}})


WEIGHTS = {"norm.weight": torch.ones(5, 3), "model.embed.weight": torch.ones(2)}
MOMENTS = {"state": {"norm.weight": {"step": torch.tensor(2.0), "exp_avg": torch.zeros(5, 3)}}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "state",
    [
        {"app": {"model": WEIGHTS, "optim": MOMENTS}},  # torch's own tutorial
        {**WEIGHTS, "optimizer": MOMENTS, "train_state": {"step": torch.tensor(3)}},  # torchtitan
        {"model": WEIGHTS, "ema": WEIGHTS, "optimizer": MOMENTS},
        WEIGHTS,
    ],
)
def test_the_weights_are_found_beside_other_states(tmp_path: Path, state: dict[str, Any]) -> None:
    found = plan(saved_state(tmp_path / "run", state), "state")
    assert {step.out.name for step in found.steps} == WEIGHTS.keys()
    others = {"optim", "ema"} & {
        *state,
        *(inner for table in state.values() if isinstance(table, dict) for inner in table),
    }
    assert all(other in " ".join(found.notes) for other in others), "what is left behind is told"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "state", [{"actor": WEIGHTS, "ref": WEIGHTS}, {"a": {"model": WEIGHTS}, "b": {"model": WEIGHTS}}]
)
def test_several_modules_are_refused_by_name(tmp_path: Path, state: dict[str, Any]) -> None:
    folder = saved_state(tmp_path / "run", state)
    with pytest.raises(UnsupportedCheckpoint, match="the states of 2 modules: a") as refused:
        plan(folder)
    tag = str(refused.value.hint).rpartition(" ")[2]
    torch.save(state, tmp_path / "all.pt")
    for place in (folder, tmp_path):
        chosen = plan_consolidate(open_sharded(place), what="state", tag=tag)
        assert {step.out.name for step in chosen.steps} == WEIGHTS.keys()
        with pytest.raises(UnsupportedCheckpoint, match="holds no module `other`, but a"):
            plan_consolidate(open_sharded(place), what="state", tag="other")


@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_of_fsdp1_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "layers.0._flat_param")
    with pytest.raises(UnsupportedCheckpoint, match="flat parameter of FSDP1"):
        plan(folder)
    with pytest.raises(UnsupportedCheckpoint, match="flat parameter of FSDP1"):
        validate(open_sharded(folder))


def test_beside_an_adapter_it_is_judged_too(tmp_path: Path) -> None:
    """As the HF Trainer writes both into one folder."""
    folder = Path(shutil.copytree(FIXTURES / "fsdp2-reward", tmp_path / "checkpoint-2"))
    shutil.copy(FIXTURES / "reward-run" / "checkpoint-2" / "adapter_model.safetensors", folder)
    next(folder.rglob("__0_0.distcp")).unlink()
    found = {finding.code for finding in validate(open_checkpoint(folder)).findings}
    assert "LT401" in found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("extension", "hint"),
    [
        ("stream.zstd/1", "where the package zstandard is installed, .* dcp_to_torch"),
        ("stream.own/1", "without that extension"),
    ],
)
def test_chunks_that_an_extension_changed_are_refused_by_name(extension: str, hint: str, tmp_path: Path) -> None:
    """Torch's own compresses; others are registered by programs."""

    class Changed(StreamTransformExtension):
        def get_descriptor(self) -> str:
            return extension

        def transform_to(self, output: Any) -> Any:
            return output

        def transform_from(self, input: Any) -> Any:  # noqa: A002 - torch's name
            raise NotImplementedError

        @staticmethod
        def registry_name() -> str:
            return extension

        @staticmethod
        def from_descriptor(_: str) -> Any:
            raise NotImplementedError

    writer = FileSystemWriter(tmp_path / "run", _extensions=[Changed()])
    save({"model": {"a.weight": torch.ones(4, 4)}}, storage_writer=writer, no_dist=True)
    with pytest.raises(
        UnsupportedCheckpoint, match=rf"`model\.a\.weight` is stored compressed \({extension}\)"
    ) as refused:
        plan_consolidate(tmp_path / "run", what="state")
    assert re.search(hint, str(refused.value.hint))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_chunks_in_safetensors_are_refused(tmp_path: Path) -> None:
    """Torch writes them on request, and loads none."""
    writer = FileSystemWriter(tmp_path / "run", serialization_format=SerializationFormat.SAFETENSORS)
    save({"model": {"a.weight": torch.ones(4, 4)}, "run": "first"}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedCheckpoint, match=r"__0_0\.distcp: its tensors are in safetensors") as refused:
        plan_consolidate(tmp_path / "run", what="state")
    assert "SerializationFormat.TORCH_SAVE" in str(refused.value.hint)
