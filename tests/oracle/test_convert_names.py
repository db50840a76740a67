"""`convert --to peft` on the classes that no table has: transformers says which modules a name without a prefix means."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lora_tool.checkpoints import open_adapter, open_model
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.execution.engine import execute
from lora_tool.plans.convert import peft_names as base_modules
from lora_tool.plans.convert.plan_convert import plan_convert
from tests.oracle.test_convert_to_peft import FORMS, WEIGHTS, WITH_BASE, Rename, named
from tests.oracle.tiny import Task, tiny_model

CASES: dict[str, tuple[Task, dict[str, Any]]] = {
    "t5": ("seq-2-seq-lm", {"target_modules": ["q", "wo"], "task_type": "SEQ_2_SEQ_LM"}),
    "bart": ("seq-2-seq-lm", {"target_modules": ["q_proj"], "task_type": "SEQ_2_SEQ_LM"}),
    "gemma3": ("image-text-to-text", {"target_modules": r".*language_model.*\.q_proj", "task_type": "CAUSAL_LM"}),
    "qwen2_vl": ("image-text-to-text", {"target_modules": ["q_proj"]}),
    "qwen3_moe": (
        "causal-lm",
        {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"], "task_type": "CAUSAL_LM"},
    ),
    "gpt_neox": ("causal-lm", {"target_modules": ["query_key_value"], "use_dora": True, "task_type": "CAUSAL_LM"}),
    "bert": ("token-cls", {"target_modules": ["query"], "task_type": "TOKEN_CLS"}),
}


def made(root: Path, model_type: str) -> tuple[Path, Path, type[PreTrainedModel]]:
    """Return a base, a good adapter of it, and its class."""
    task, lora = CASES[model_type]
    model = tiny_model(model_type, task)
    model.save_pretrained(root / "base")
    trained = get_peft_model(model, LoraConfig(r=2, **lora))
    generator = torch.Generator().manual_seed(7)
    for parameter in (each for each in trained.parameters() if each.requires_grad):
        torch.nn.init.normal_(parameter, generator=generator)
    trained.save_pretrained(str(root / "good"))
    return root / "base", root / "good", type(model)


@pytest.mark.parametrize("model_type", CASES)
def test_every_form_of_names_beside_its_base(model_type: str, tmp_path: Path) -> None:
    base, good, model_class = made(tmp_path, model_type)
    opened, tensors = open_model(base), load_file(good / WEIGHTS)
    folder = Path(shutil.copytree(good, tmp_path / "renamed"))
    forms: dict[str, Rename] = {
        **FORMS,
        **WITH_BASE,
        "DDP over compile": lambda name: f"module._orig_mod.{named(name)}",
    }
    for form, rename in forms.items():
        save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
        plan = plan_convert(open_adapter(folder), to="peft", base=opened)
        assert {step.out.name: step.op.source.name for step in plan.steps} == {n: rename(n) for n in tensors}, form
    out = execute(plan, tmp_path / "out")
    model = PeftModel.from_pretrained(model_class.from_pretrained(base), out)
    again = model.load_adapter(out, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    held = model.state_dict()
    truth = PeftModel.from_pretrained(model_class.from_pretrained(base), good).state_dict()
    assert [name for name, tensor in truth.items() if not torch.equal(tensor, held[name])] == []


def test_without_transformers_a_name_with_two_meanings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, good, _ = made(tmp_path, "qwen2_vl")
    tensors = load_file(good / WEIGHTS)
    save_file({name.removeprefix(f"{PREFIX}model."): tensor for name, tensor in tensors.items()}, good / WEIGHTS)
    monkeypatch.setattr(base_modules, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedAdapter, match="the modules of the base model are not known") as refused:
        plan_convert(open_adapter(good), to="peft", base=open_model(base))
    assert (
        refused.value.hint
        == "install transformers, which knows the modules of a qwen2_vl: pip install 'lora-tool[merge]'"
    )
