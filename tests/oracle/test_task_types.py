"""Adapters of PEFT's other task types, and of none, on the classes that they are for: PEFT's merge and ours, bit by bit.

A sample of every auto class, chosen for what is special about a model: heads of several layers, two towers, tied ends,
fused experts, names that differ on disk, computed positions. Each merged folder is verified too.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lora_tool import verify
from lora_tool.core.errors import FindingsFound
from tests.oracle.peft_merge import Table, different, layout, merge_with_ours, randomise, saved_tensors
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, tiny_config, tiny_model

# transformers and PEFT warn of tiny configs and of what a class leaves out: the merge is the test
pytestmark = pytest.mark.filterwarnings("ignore")

_HEADS = ["classifier", "score", "qa_outputs"]
"""What `all-linear` targets besides, and PEFT saves whole."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the class of `task`, made from a base of the class of `base_task`."""

    model_type: str
    task: Task
    base_task: Task
    task_type: str | None

    @property
    def name(self) -> str:
        made_from = "" if self.base_task == self.task else f"-from-{self.base_task}"
        return f"{self.model_type}-{self.task}{made_from}-as-{self.task_type}"


def cases(model_types: str, task: Task, task_type: str | None, base_task: Task | None = None) -> list[Case]:
    return [
        Case(model_type=each, task=task, base_task=base_task or task, task_type=task_type)
        for each in model_types.split()
    ]


CASES = [
    *cases("bert deberta-v2 gpt2 mixtral qwen2", "token-cls", "TOKEN_CLS"),
    *cases("qwen3 roberta", "token-cls", "TOKEN_CLS", "causal-lm"),
    *cases("bart distilbert xlnet", "question-ans", "QUESTION_ANS"),
    *cases("roberta", "question-ans", "QUESTION_ANS", "causal-lm"),
    *cases("bart marian nllb-moe t5", "seq-2-seq-lm", "SEQ_2_SEQ_LM"),
    *cases("bert deepseek_v3 modernbert t5 xlm-roberta", "feature-extraction", "FEATURE_EXTRACTION"),
    *cases("mistral qwen3", "feature-extraction", "FEATURE_EXTRACTION", "causal-lm"),
    *cases("clip qwen3 whisper", "feature-extraction", None),
    *cases("gemma3 llava mllama qwen2_5_vl qwen3_vl_moe", "image-text-to-text", "CAUSAL_LM"),
    *cases("paligemma qwen3_vl", "image-text-to-text", None),
]
_DTYPES = dict(
    zip((case.name for case in CASES), itertools.cycle((torch.bfloat16, torch.float16, torch.float32)), strict=False)
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_merge_is_pefts(case: Case, tmp_path: Path) -> None:
    model = tiny_model(case.model_type, case.base_task)
    save_base(model, tmp_path / "base", _DTYPES[case.name])

    def load() -> PreTrainedModel:
        labels = {"num_labels": NUM_LABELS} if case.task == "token-cls" else {}
        loaded: PreTrainedModel = AUTO[case.task].from_pretrained(tmp_path / "base", dtype="auto", **labels)
        return loaded

    target = load()
    save_adapter(target, tmp_path / "adapter", case.task_type)
    require_pefts(load(), tmp_path, type(target).__name__)


def save_base(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)


def save_adapter(model: PreTrainedModel, folder: Path, task_type: str | None, **choices: Any) -> None:
    """Write an adapter that PEFT made on all linear layers and experts but the heads, with random tensors."""
    lora = {"target_modules": "all-linear", "target_parameters": experts(model) or None, **choices}
    if task_type in ("TOKEN_CLS", "QUESTION_ANS"):
        lora["exclude_modules"] = _HEADS
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=7, task_type=task_type and TaskType(task_type), **lora))
    randomise(adapted, seed=20)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)


def require_pefts(loaded: PreTrainedModel, folder: Path, class_name: str, **choices: Any) -> Table:
    """Merge base and adapter of `folder` with both, and return what both wrote; ours is of the class, and verified."""
    PeftModel.from_pretrained(loaded, folder / "adapter").merge_and_unload().save_pretrained(folder / "theirs")
    theirs = saved_tensors(folder / "theirs")
    merge_with_ours(folder / "base", folder / "adapter", folder / "ours", "peft", **choices)
    ours = saved_tensors(folder / "ours")
    assert layout(ours) == layout(theirs)
    assert not different(ours, theirs)
    config = json.loads((folder / "ours" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    labels = json.loads((folder / "theirs" / "config.json").read_text()).get("id2label")
    assert labels is None or config["id2label"] == labels
    verify(folder / "ours", level="sample").raise_for_errors()
    before = saved_tensors(folder / "base")
    assert any(name not in before or not torch.equal(before[name], tensor) for name, tensor in theirs.items())
    return theirs


OWN = {
    "bert": "BertForMaskedLM",
    "flaubert": "FlaubertWithLMHeadModel",
    "t5": "T5EncoderModel",
    "vit": "ViTForImageClassification",
    "wav2vec2": "Wav2Vec2ForCTC",
    "whisper": "WhisperForConditionalGeneration",
}
"""Classes that no task type of PEFT names: the adapter's config does."""


@pytest.mark.parametrize("model_type", OWN)
def test_an_adapter_without_a_task_is_of_the_class_that_it_was_trained_on(model_type: str, tmp_path: Path) -> None:
    own_class = getattr(transformers, OWN[model_type])
    save_base(own_class(tiny_config(model_type, "feature-extraction")), tmp_path / "base", torch.float32)
    save_adapter(own_class.from_pretrained(tmp_path / "base"), tmp_path / "adapter", None)
    require_pefts(own_class.from_pretrained(tmp_path / "base"), tmp_path, OWN[model_type])


def test_without_the_class_in_the_adapter_the_bases_own_decides(tmp_path: Path) -> None:
    model = tiny_model("bert", "token-cls")
    save_base(model, tmp_path / "base")
    save_adapter(AUTO["token-cls"].from_pretrained(tmp_path / "base", dtype="auto"), tmp_path / "adapter", None)
    forget_the_class(tmp_path / "adapter")
    require_pefts(AUTO["token-cls"].from_pretrained(tmp_path / "base", dtype="auto"), tmp_path, type(model).__name__)


def forget_the_class(adapter: Path) -> None:
    """Take `auto_mapping` out of the config, as tools leave it out that inject LoRA themselves."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_mapping": None}))


@pytest.mark.parametrize(("model_type", "task", "labels"), [("vit", None, 3), ("bert", "TOKEN_CLS", 3)])
def test_a_head_with_other_labels_takes_the_place_of_the_bases(
    model_type: str, task: str | None, labels: int, tmp_path: Path
) -> None:
    auto = transformers.AutoModelForImageClassification if task is None else AUTO["token-cls"]
    save_base(auto.from_config(tiny_config(model_type, "token-cls")), tmp_path / "base")

    def load() -> PreTrainedModel:
        loaded: PreTrainedModel = auto.from_pretrained(
            tmp_path / "base", num_labels=labels, ignore_mismatched_sizes=True, dtype="auto"
        )
        return loaded

    save_adapter(load(), tmp_path / "adapter", task, modules_to_save=["classifier"], exclude_modules=["classifier"])
    theirs = require_pefts(load(), tmp_path, type(load()).__name__)
    assert theirs["classifier.weight"].shape[0] == labels


def test_a_head_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    save_base(tiny_model("qwen2", "causal-lm"), tmp_path / "base")
    model = AUTO["token-cls"].from_pretrained(tmp_path / "base", num_labels=3)
    save_adapter(model, tmp_path / "adapter", None, target_modules=["q_proj"])
    with pytest.raises(FindingsFound, match="LT301 .*no trained head"):
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "peft")


def test_a_reward_model_without_task_and_head_is_no_causal_lm(tmp_path: Path) -> None:
    save_base(tiny_model("qwen2", "causal-lm"), tmp_path / "base")
    model = AUTO["seq-cls"].from_pretrained(tmp_path / "base", num_labels=1)
    save_adapter(model, tmp_path / "adapter", None, target_modules=["q_proj"])
    with pytest.raises(FindingsFound, match="LT301 .*no trained head"):
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "peft")


def test_what_was_asked_for_must_be_what_the_adapter_says(tmp_path: Path) -> None:
    save_base(tiny_model("bert", "token-cls"), tmp_path / "base")
    save_adapter(AUTO["token-cls"].from_pretrained(tmp_path / "base"), tmp_path / "adapter", "TOKEN_CLS")
    for asked in ("causal-lm", "reward", "question-ans"):
        with pytest.raises(FindingsFound, match="LT30[34] "):
            merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "peft", task=asked)
    with pytest.raises(FindingsFound, match=f"LT303 .*has {NUM_LABELS} rows, but 3 labels are requested"):
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "peft", num_labels=3)


def test_an_embedding_adapter_goes_into_the_language_model_where_that_is_asked_for(tmp_path: Path) -> None:
    save_base(tiny_model("qwen3", "causal-lm"), tmp_path / "base")
    save_adapter(
        AUTO["feature-extraction"].from_pretrained(tmp_path / "base", dtype="auto"), tmp_path / "adapter", None
    )
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    bare = saved_tensors(merge_with_ours(base, adapter, tmp_path / "bare", "float32"))
    whole = saved_tensors(merge_with_ours(base, adapter, tmp_path / "whole", "float32", task="causal-lm"))
    assert whole.keys() - {f"model.{name}" for name in bare} == {"lm_head.weight"}
    assert all(torch.equal(whole[f"model.{name}"], tensor) for name, tensor in bare.items())


@pytest.mark.parametrize("on", ["experts", "attention"])
def test_transposed_experts_of_a_published_base_are_written_as_transformers_writes_them(
    on: str, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_base(tiny_model("qwen3_vl_moe", "image-text-to-text"), base)
    choices = {} if on == "experts" else {"target_modules": ["q_proj"], "target_parameters": None}
    save_adapter(load_vlm(base), adapter, "CAUSAL_LM", **choices)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in saved_tensors(base).items()
    }
    save_file(turned, base / "model.safetensors", metadata={"format": "pt"})
    theirs = require_pefts(load_vlm(base), tmp_path, "Qwen3VLMoeForConditionalGeneration")
    stacks = [name for name in theirs if ".experts." in name]
    assert all(theirs[name].shape == turned[name].transpose(1, 2).shape != turned[name].shape for name in stacks)
    verify(tmp_path / "ours").raise_for_errors()
    for precision in ("float32", "float64"):
        near = saved_tensors(merge_with_ours(base, adapter, tmp_path / precision, precision))
        verify(tmp_path / precision).raise_for_errors()
        assert layout(near) == layout(theirs)
        assert all(torch.allclose(near[name], tensor, atol=0.02) for name, tensor in theirs.items())


def load_vlm(base: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AUTO["image-text-to-text"].from_pretrained(base, dtype="auto")
    return loaded
