"""An adapter without `adapter_config.json`: rebuilt from tensors and the run's files, loaded by PEFT, the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import TrainingArguments

from lora_tool import validate
from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.core.errors import FindingsFound, IncompleteCheckpoint, UnsupportedCheckpoint, WrongValue
from lora_tool.core.tensors import StoredTensor
from lora_tool.execution.engine import execute
from lora_tool.formats.adapter_config import FILE_NAME, read_adapter_config
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.consolidate.rebuilt_config import adapter_config_of
from tests.cli.calling import FIXTURES, Caller
from tests.oracle.peft_merge import load_model

RUN = FIXTURES / "fsdp2-reward"
"""Rank 3, alpha 6, on all linear layers and the head."""


@dataclass
class LlavaArguments(TrainingArguments):  # type: ignore[misc] # transformers is not typed here
    """A Trainer's arguments with those of LoRA among them, as LLaVA has them."""

    lora_enable: bool = True
    lora_r: int = 3
    lora_alpha: int = 6


def _llava(path: Path) -> None:
    torch.save(LlavaArguments(output_dir="out", use_cpu=True), path)


def _as_json(**fields: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json.dumps(fields))

    return write


def _as_yaml(**fields: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(yaml.safe_dump(fields))

    return write


RECIPES: Mapping[str, tuple[str, Callable[[Path], None], Mapping[str, Any]]] = {
    "verl": ("lora_train_meta.json", _as_json(r=3, lora_alpha=6, task_type="SEQ_CLS"), {"task_type": None}),
    "ms-swift": (
        "args.json",
        _as_json(
            tuner_type="lora",
            model="org/base",
            lora_rank=3,
            lora_alpha=6,
            use_rslora=True,
            task_type="reward_model",
            alpha=0.5,
        ),
        {"use_rslora": True, "task_type": None, "base_model": "org/base"},
    ),
    "Megatron-Bridge": (
        "run_config.yaml",
        _as_yaml(model={"dim": 8}, peft={"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 3, "alpha": 6}),
        {"use_rslora": False},
    ),
    "NeMo-RL": (
        "config.yaml",
        _as_yaml(
            policy={"model_name": "org/base", "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 3, "alpha": 6}}}
        ),
        {"base_model": "org/base"},
    ),
    "axolotl": (
        "my-run.yml",
        _as_yaml(
            base_model="org/base", adapter="qlora", task_type="CAUSAL_LM", lora_r=3, lora_alpha=6, peft_use_rslora=False
        ),
        {"base_model": "org/base", "use_rslora": False, "task_type": "CAUSAL_LM"},
    ),
    "LLaMA-Factory": (
        "llama3_lora_reward.yaml",
        _as_yaml(stage="rm", finetuning_type="lora", lora_rank=3, lora_alpha=6, model_name_or_path="org/base"),
        {"base_model": "org/base"},
    ),
    "Trainer": ("training_args.bin", _llava, {}),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint without a config, in a folder where nothing else lies."""
    folder = Path(shutil.copytree(RUN, tmp_path / "run" / "checkpoint-2"))
    (folder / FILE_NAME).unlink()
    return folder


@pytest.mark.parametrize("program", RECIPES)
@pytest.mark.parametrize("given", [False, True])
def test_alpha_is_from_the_files_of_the_run(program: str, run: Path, tmp_path: Path, *, given: bool) -> None:
    name, write, expected = RECIPES[program]
    path = (tmp_path if given else run) / name
    write(path)
    plan = plan_consolidate(run, adapter_config=path if given else None)
    written = execute(plan, tmp_path / "out") / FILE_NAME
    config, truth = read_adapter_config(written), read_adapter_config(RUN / FILE_NAME)
    assert not config.problems
    found = {
        field: getattr(config, field) for field in ("r", "lora_alpha", "target_modules", "rank_pattern", "use_dora")
    }
    assert found == {field: getattr(truth, field) for field in found}
    assert {field: getattr(config, field) for field in expected} == expected
    origins = json.loads((written.parent / "lora_tool.json").read_text())["adapter_config"]
    assert origins["r"] == origins["target_modules"] == "the tensors"
    assert origins["lora_alpha"] == str(path)
    assert any("task_type is left out" in warning for warning in plan.warnings) is (
        "task_type" in expected and config.task_type is None
    )
    assert any("rsLoRA" in warning for warning in plan.warnings) is ("use_rslora" not in expected)


def test_peft_loads_it_with_nothing_missing_and_the_same_bits(run: Path, tmp_path: Path) -> None:
    (run / "lora_train_meta.json").write_text(json.dumps({"r": 3, "lora_alpha": 6, "task_type": "SEQ_CLS"}))
    ours = execute(plan_consolidate(run), tmp_path / "ours")
    theirs = execute(plan_consolidate(RUN), tmp_path / "theirs")
    base = FIXTURES / "reward-qwen2" / "base"
    models = [PeftModel.from_pretrained(load_model(base, "seq-cls", 1), folder) for folder in (ours, theirs)]
    again = models[0].load_adapter(ours, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    models[0].delete_adapter("again")
    states = [model.merge_and_unload().state_dict() for model in models]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert states[0].keys() == states[1].keys()


def test_alpha_is_asked_for_by_name(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = Caller(capsys)
    refused = call("consolidate", run, "-o", tmp_path / "out")
    assert refused.code == 3
    assert "no file there has alpha" in refused.err
    assert "--lora-alpha N" in refused.err
    done = call("consolidate", run, "-o", tmp_path / "out", "--lora-alpha", "6")
    assert done.code == 0
    assert "lora_alpha from `lora_alpha`" in done.out
    assert read_adapter_config(tmp_path / "out" / FILE_NAME).lora_alpha == 6
    (run / "lora_train_meta.json").write_text(json.dumps({"r": 3, "lora_alpha": 8}))
    refused = call("consolidate", run, "-o", tmp_path / "other", "--lora-alpha", "6")
    assert refused.code == 2
    assert "says 8, found 6" in refused.err


def test_what_is_of_another_run(run: Path) -> None:
    (run / "lora_train_meta.json").write_text(json.dumps({"r": 16, "lora_alpha": 6}))
    with pytest.raises(
        UnsupportedCheckpoint, match="says rank 16, but the tensors have 3: the file is from another run"
    ):
        plan_consolidate(run)
    with pytest.raises(
        UnsupportedCheckpoint, match="says rank 16, but the tensors have 3: the file is from another run"
    ):
        plan_consolidate(run, adapter_config=run / "lora_train_meta.json")
    assert plan_consolidate(run, lora_alpha=6)
    with pytest.raises(WrongValue, match="says 6, found 7"):
        plan_consolidate(RUN, lora_alpha=7)


def test_files_that_say_two_things(run: Path) -> None:
    RECIPES["verl"][1](run / "lora_train_meta.json")
    _as_yaml(adapter="lora", lora_r=3, lora_alpha=12)(run / "config.yaml")
    with pytest.raises(UnsupportedCheckpoint, match=r"`lora_alpha` is 6 in .*meta.json, but 12 in .*config.yaml"):
        plan_consolidate(run)
    # what lies nearest is of this run
    (run / "config.yaml").rename(run.parent / "config.yaml")
    assert plan_consolidate(run)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("lora_train_meta.json", b'{"r": 3, "lora_alpha": "six"}', FindingsFound),
        ("lora_train_meta.json", b'{"r": 3,', FindingsFound),
        ("args.json", b"[]", FindingsFound),
        ("run_config.yaml", b"peft: [", FindingsFound),
        ("run_config.yaml", b"!!python/object/apply:os.system ['true']", FindingsFound),
        (FILE_NAME, b'{"peft_type": "LORA", "r": "3"}', FindingsFound),
        ("other.yaml", b"peft: [", IncompleteCheckpoint),
        ("other.yaml", b"alpha: 6\nr: 3\nadapter: ia3\n", IncompleteCheckpoint),
        ("training_args.bin", b"\x80\x04c", IncompleteCheckpoint),
        ("args.json", b'{"tuner_type": "full", "lora_rank": 3, "lora_alpha": 6}', IncompleteCheckpoint),
    ],
)
def test_files_that_say_nothing(name: str, content: bytes, error: type[Exception], run: Path) -> None:
    (run / name).write_bytes(content)
    with pytest.raises(error) as refused:
        plan_consolidate(run)
    found = [finding for finding in validate(run).findings if finding.path == str(run / name)]
    assert found == (list(refused.value.report.findings) if isinstance(refused.value, FindingsFound) else [])


class Roles(TrainingState, frozen=True, kw_only=True):
    """A state that says of each tensor what it was to the training, as DeepSpeed's files do."""

    def assemble(self, wanted: object) -> dict[str, StoredTensor]:
        raise NotImplementedError


BIASES = (".norm.bias", ".q_proj.base_layer.bias")


@pytest.mark.parametrize(("trained", "bias"), [(BIASES, "all"), (BIASES[1:], "lora_only"), ((), None)])
@pytest.mark.parametrize("alone", [True, False])
def test_what_roles_tell(trained: tuple[str, ...], bias: str | None, tmp_path: Path, *, alone: bool) -> None:
    """Which biases were trained, with the frozen weights and without; buffers are no modules that were trained whole."""
    prefix = "base_model.model"
    buffers = (f"{prefix}.scale", f"{prefix}.rotary.inv_freq", f"{prefix}.norm.running_mean")
    roles = dict.fromkeys((f"{prefix}.q_proj.lora_{half}.default.weight" for half in "AB"), Role.TRAINED)
    roles |= dict.fromkeys(buffers, Role.BUFFER) | dict.fromkeys((prefix + name for name in trained), Role.TRAINED)
    frozen = (".q_proj.base_layer.weight", ".norm.weight", ".score.weight", *BIASES)
    roles = roles if alone else dict.fromkeys((prefix + name for name in frozen), Role.FROZEN) | roles
    entries = {name: StateEntry(role=role, shape=(4, 4)) for name, role in roles.items()}
    state = Roles(root=tmp_path, folder=tmp_path, title="", entries=entries, stamps={})
    found = adapter_config_of(state, given=None, lora_alpha=6)
    assert found.raw is not None
    assert (found.raw.get("bias"), found.raw.get("modules_to_save")) == (bias, None)
    assert not [warning for warning in found.warnings if "biases" in warning]
