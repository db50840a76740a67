"""Several adapters in one merge, against PEFT's `merge_and_unload(adapter_names=[…])` and against the exact sum."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import FindingsFound
from lora_tool.execution.engine import execute
from lora_tool.plans.core.plan import Plan
from tests.oracle.peft_merge import different, layout, load_model, save_adapter, save_base, saved_tensors
from tests.oracle.test_merge_against_peft import exact_inputs, exact_sum, round_exactly
from tests.oracle.tiny import Task

ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
QV: dict[str, Any] = {"r": 6, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]}


def plan(base: Path, *adapters: Path, **choices: Any) -> Plan:
    opened = [open_checkpoint(adapter) for adapter in adapters]
    return plan_merge(open_model(base), [each for each in opened if isinstance(each, AdapterDir)], **choices)


def with_peft(base: Path, adapters: list[Path], out: Path, task: Task) -> Path:
    model = PeftModel.from_pretrained(load_model(base, task), adapters[0])
    names = ["default", *(str(number) for number in range(1, len(adapters)))]
    for name, adapter in zip(names[1:], adapters[1:], strict=True):
        model.load_adapter(adapter, adapter_name=name)
    model.merge_and_unload(adapter_names=names).save_pretrained(out)
    return out


def two_adapters(folder: Path, model_type: str, task: Task, *loras: dict[str, Any]) -> tuple[Path, list[Path]]:
    base = save_base(folder / "base", model_type, task, torch.bfloat16)
    made = [save_adapter(folder / f"adapter-{at}", base, task, lora) for at, lora in enumerate(loras)]
    return base, made


CASES: dict[str, tuple[str, Task, list[dict[str, Any]]]] = {
    "two": ("llama", "causal-lm", [ALL, QV]),
    "three": ("llama", "causal-lm", [QV, {**ALL, "lora_alpha": 3}, {**QV, "r": 2, "use_rslora": True}]),
    "conv1d": (
        "gpt2",
        "causal-lm",
        [ALL | {"fan_in_fan_out": True}, {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}],
    ),
    "embeddings": (
        "llama",
        "causal-lm",
        [{"r": 2, "target_modules": ["embed_tokens"]}, {"r": 3, "target_modules": ["embed_tokens", "q_proj"]}],
    ),
    "biases": ("qwen2", "causal-lm", [QV | {"lora_bias": True}, QV | {"lora_bias": True, "r": 2}]),
    "one-saves-a-norm": ("llama", "causal-lm", [QV | {"modules_to_save": ["norm"]}, ALL]),
    "dora-apart": ("llama", "causal-lm", [QV | {"use_dora": True}, {"r": 2, "target_modules": ["up_proj"]}]),
    "reward-with-one-head": ("llama", "seq-cls", [QV, ALL]),
}


@pytest.mark.parametrize("name", CASES)
def test_precision_peft_writes_pefts_bits(name: str, tmp_path: Path) -> None:
    model_type, task, loras = CASES[name]
    base, adapters = two_adapters(tmp_path, model_type, task, *loras)
    if task == "seq-cls":  # adapters of one reward model share its head
        share_head(adapters)
    theirs = saved_tensors(with_peft(base, adapters, tmp_path / "theirs", task))
    ours = saved_tensors(execute(plan(base, *adapters, precision="peft"), tmp_path / "ours"))
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []


def share_head(adapters: list[Path]) -> None:
    first, second = (saved_tensors(adapter) for adapter in adapters)
    second["base_model.model.score.weight"] = first["base_model.model.score.weight"]
    save_file(second, adapters[1] / "adapter_model.safetensors")


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_sum_is_rounded_once(precision: str, tmp_path: Path) -> None:
    lora = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    base, adapters = two_adapters(tmp_path, "llama", "causal-lm", lora, lora | {"r": 5, "lora_alpha": 5})
    shutil.rmtree(adapters[1])
    other = {**lora, "r": 5, "lora_alpha": 5, "init_lora_weights": False}
    torch.manual_seed(3)
    save_adapter(adapters[1], base, "causal-lm", other)
    ours = saved_tensors(execute(plan(base, *adapters, precision=precision), tmp_path / "ours"))
    once = [exact_inputs(base, adapter) for adapter in adapters]
    assert len(once[0]) == len(once[1]) == 4
    wrong = total = 0
    for name, (weight, a, b, scaling) in once[0].items():
        _, a2, b2, scaling2 = once[1][name]
        both = exact_sum(weight, torch.cat([scaling * a, scaling2 * a2]), torch.cat([b, b2], dim=1), 1.0)
        expected = torch.tensor([round_exactly(value, torch.bfloat16) for value in both]).reshape(weight.shape)
        wrong += int((ours[name].double() != expected.double()).sum())
        total += expected.numel()
    assert wrong == 0 if precision == "float64" else wrong <= total // 1000


def test_the_manifest_tells_every_adapter_apart(tmp_path: Path) -> None:
    base, adapters = two_adapters(tmp_path, "llama", "causal-lm", ALL, QV)
    made = plan(base, *adapters)
    inputs = made.manifest["inputs"]
    assert [inputs[name]["path"] for name in ("adapter", "adapter 2")] == [str(path) for path in adapters]
    assert len(set(made.manifest["merged_adapters"])) == 2
    assert set(made.input_names.values()) == {"base", "adapter", "adapter 2"}


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "saved-by-both": (
        [QV | {"modules_to_save": ["norm"]}] * 2,
        r"norm\.weight`: has different values in the two adapters",
    ),
    "saved-and-lora": (
        [QV | {"modules_to_save": ["lm_head"]}, {"r": 2, "target_modules": ["lm_head"]}],
        r"`lm_head\.weight`: is saved whole in one adapter and has LoRA",
    ),
    "dora-and-lora": ([QV | {"use_dora": True}, QV], r"q_proj`: has DoRA"),
    "tokens-of-both": ([QV | {"trainable_token_indices": [1, 2]}, QV | {"trainable_token_indices": [3]}], "in both"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_refused_by_name(name: str, tmp_path: Path) -> None:
    loras, pattern = REFUSED[name]
    base, adapters = two_adapters(tmp_path, "llama", "causal-lm", *loras)
    make_different(adapters[1])
    with pytest.raises(FindingsFound, match=f"LT512 .*{pattern}"):
        plan(base, *adapters)


def make_different(adapter: Path) -> None:
    halved = {name: tensor * 0.5 for name, tensor in saved_tensors(adapter).items()}
    save_file(halved, adapter / "adapter_model.safetensors")


def test_heads_that_differ_and_the_same_adapter_twice(tmp_path: Path) -> None:
    base, adapters = two_adapters(tmp_path, "llama", "seq-cls", QV, ALL)
    make_different(adapters[1])
    with pytest.raises(FindingsFound, match=r"LT512 .*`score\.weight`: has different values in the two adapters"):
        plan(base, *adapters)
    with pytest.raises(FindingsFound, match="LT512 .*holds the same weights"):
        plan(base, adapters[0], adapters[0])
