"""`verify --logits` against models that transformers and PEFT load whole, and against merges that answer otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool import verify
from lora_tool.core.errors import BadConfig, CorruptFile
from lora_tool.models.mapping.quiet import quiet
from lora_tool.plans.merge.provenance import find_inputs
from lora_tool.rules.merged.evidence import OutputEvidence
from lora_tool.verification import answers
from lora_tool.verification.answers import ask
from lora_tool.verification.prompts import read_prompts
from tests.mutations import copy_of, merged_in
from tests.oracle.adapter_cases import FEATURES
from tests.oracle.peft_merge import merge_with_ours, save_adapter, save_base
from tests.oracle.tiny import Task

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]
STREAMED = (
    "dora-conv1d",
    "embedding-and-lm-head",
    "tokens-tied",
    "saved-ends",
    "bias-all-phi",
)


def asking(base: Path, adapter: Path, merged: Path) -> answers._Asking:
    inputs = find_inputs(merged, base=str(base), adapters=[str(adapter)])
    return answers._Asking(inputs, inputs.plan(), None)


@pytest.mark.parametrize("feature", STREAMED)
def test_a_layer_at_a_time_is_what_peft_computes(tmp_path: Path, feature: str) -> None:
    base, adapter = FEATURES[feature].write(tmp_path, torch.bfloat16)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    with quiet(), torch.inference_mode():
        both = asking(base, adapter, merged)
        pairs = [
            (both._streamed_unmerged(None), both._loaded_unmerged(None)),
            (both._merged(streamed=True), both._merged(streamed=False)),
        ]
    for streamed, loaded in pairs:
        torch.testing.assert_close(streamed, loaded, rtol=1e-5, atol=1e-5 * float(loaded.abs().max()))
    found = verify(merged, logits=True).outputs
    assert found is not None
    assert found.streamed
    assert found.explained, found
    assert "random token ids" in found.inputs
    assert found.largest > 0


def test_experts_are_loaded_whole(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral", "causal-lm", torch.bfloat16)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    found = verify(merged, logits=True).outputs
    assert found is not None
    assert not found.streamed
    assert found.explained, found


@pytest.mark.parametrize(("model_type", "labels"), [("qwen2", 1), ("llama", 3), ("gpt2", 1), ("bert", 2)])
def test_classifiers(tmp_path: Path, model_type: str, labels: int) -> None:
    task: Task = "seq-cls" if model_type == "bert" else "causal-lm"
    overrides: dict[str, Any] = {"num_labels": labels} if task == "seq-cls" else {}
    base = save_base(tmp_path / "base", model_type, task, torch.bfloat16, **overrides)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "fan_in_fan_out": model_type == "gpt2"}
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", lora, num_labels=labels)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    found = verify(merged, logits=True).outputs
    assert found is not None
    assert found.what == "scores"
    assert found.explained, found
    assert (found.rank_agreement is None) == (labels > 1)
    assert found.rank_agreement is None or found.rank_agreement > 0.5


def test_float32_models_leave_next_to_nothing(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", {"r": 4, "target_modules": "all-linear"})
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    found = verify(merged, logits=True).outputs
    assert found is not None
    assert found.explained
    assert found.largest < 1e-4


def outputs_of(folder: Path) -> tuple[OutputEvidence, set[str]]:
    verification = verify(folder, logits=True)
    assert verification.outputs is not None
    return verification.outputs, {finding.code for finding in verification.report.findings}


def _other_rotary_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    (folder / "config.json").write_text(json.dumps(config))


def _half_the_adapter(folder: Path) -> None:
    path = folder.parent / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] / 2}))
    merged_in(folder.parent)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("fixture", ["reward-qwen2/merged", "causal-llama/merged"])
def test_fixtures_answer_the_same(tmp_path: Path, fixture: str) -> None:
    found, codes = outputs_of(copy_of(fixture, tmp_path))
    assert codes == set()
    assert found.explained
    assert found.inputs == "8 built-in prompts"


@pytest.mark.parametrize(("injure", "others"), [(_other_rotary_base, {"LT616"}), (_half_the_adapter, {"LT610"})])
def test_other_answers_are_named(tmp_path: Path, injure: Callable[[Path], None], others: set[str]) -> None:
    folder = copy_of("causal-llama/merged", tmp_path)
    injure(folder)
    found, codes = outputs_of(folder)
    assert not found.explained
    assert codes == {"LT620"} | others


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("One\n\nTwo words\n")
    assert read_prompts(lines) == ("One", "Two words")
    rows = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    rows.write_text(
        "\n".join(json.dumps(row) for row in ("plain", {"prompt": "P"}, {"text": "T"}, {"messages": messages}))
    )
    assert read_prompts(rows) == ("plain", "P", "T", "Hello\nHi")
    found = ask(find_inputs(copy_of("causal-llama/merged", tmp_path)), None, prompts=read_prompts(rows))
    assert found.inputs == "4 given prompts"
    rows.write_text('{"prompt": 3}')
    with pytest.raises(BadConfig, match="line 1"):
        read_prompts(rows)
    rows.write_text("{")
    with pytest.raises(CorruptFile):
        read_prompts(rows)
    lines.write_bytes(b"\xff\xfe\0")
    with pytest.raises(CorruptFile, match="UTF-8"):
        read_prompts(lines)
    lines.write_text("\n")
    with pytest.raises(BadConfig, match="no prompt"):
        read_prompts(lines)
