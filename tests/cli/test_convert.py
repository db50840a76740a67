"""`lora-tool convert`, as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lora_tool.core.keys import PREFIX
from tests import checkpoint_edits as edit
from tests.cli.calling import FIXTURES, Caller


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """An adapter as prime-rl saves it, with an adapter's name in the tensors'."""
    folder = Path(shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "run" / "step_10"))
    edit.renamed(
        folder,
        lambda name: name.removeprefix(PREFIX).replace(".weight", ".policy.weight" if "lora_" in name else ".weight"),
    )
    return folder


def test_the_command_that_validate_names_mends_the_adapter(drifted: Path, call: Caller) -> None:
    found = call("validate", drifted, "--format", "json")
    assert found.code == 1
    hints = {each["hint"] for each in found.json["findings"] if each["code"] == "LT211"}
    assert hints == {f"lora-tool convert {drifted} --to peft"}
    done = call(*hints.pop().split()[1:])
    assert done.code == 0, done.err
    assert f"next: lora-tool merge {drifted}-peft" in done.out
    assert call("validate", f"{drifted}-peft").code == 0
    told = json.loads(Path(f"{drifted}-peft", "lora_tool.json").read_text())
    assert (told["operation"], told["to"]) == ("convert", "peft")
    assert told["inputs"]["adapter"]["path"] == str(drifted)
    assert "saved as model.layers.0.self_attn.q_proj.lora_A.policy.weight" in json.dumps(told["ledger"])
    assert call("convert", drifted, "--to", "peft").code == 6
    assert call("convert", drifted, "--to", "peft", "--overwrite").code == 0


def test_a_dry_run_writes_nothing(drifted: Path, call: Caller, tmp_path: Path) -> None:
    told = call("convert", drifted, "--to", "peft", "-o", tmp_path / "out", "--dry-run", "--json").json
    assert told["output"] == str(tmp_path / "out")
    steps = told["shards"][0]["steps"]
    assert all(step["name"].startswith(PREFIX) and not step["source"].startswith(PREFIX) for step in steps)
    shown = call("convert", drifted, "--to", "peft", "-o", tmp_path / "out", "--dry-run")
    assert f"would write {tmp_path / 'out'}" in shown.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["fixtures/causal-llama/base", "--to", "peft"], 3, "is a base model: expected an adapter"),
        (["fixtures/causal-llama/adapter", "--to", "pefft"], 2, "'pefft' is not"),
        (["fixtures/causal-llama/adapter"], 2, "--to is missing"),
        (["nowhere", "--to", "peft"], 3, "nowhere: no such folder"),
        (["fixtures/causal-llama/adapter", "--to", "peft", "--ignore", "LT9"], 2, "There is no rule 'LT9'"),
    ],
)
def test_what_is_refused(call: Caller, arguments: list[str], code: int, message: str) -> None:
    refused = call("convert", *arguments)
    assert refused.code == code
    assert message in refused.err


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "adapter", "--to", "peft"],
        ["combine", "adapter=0.5"],
        ["consolidate", "checkpoint"],
    ],
    ids=lambda command: command[0],
)
def test_named_chat_templates_are_copied(command: list[str], tmp_path: Path, call: Caller) -> None:
    inputs = {"adapter": "causal-llama/adapter", "checkpoint": "zero/stage3-frozen-head"}
    folder = Path(shutil.copytree(FIXTURES / inputs[command[1].partition("=")[0]], tmp_path / "input"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    arguments = [command[0], str(folder) + "=0.5" * ("=" in command[1]), *command[2:]]
    done = call(*arguments, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
