"""What the merged model is for: a causal language model, or a sequence classifier with its head."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.plan.architectures import Architecture
from lora_tool.plan.modules import AdapterModules
from lora_tool.tensors import StoredTensor


@enum.unique
class Task(str, enum.Enum):
    """What `--task` takes. REWARD is SEQ_CLS with one label; AUTO is what adapter and base say."""

    AUTO = "auto"
    CAUSAL_LM = "causal-lm"
    SEQ_CLS = "seq-cls"
    REWARD = "reward"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The classification head of the merged model: the tensors that have no place in a causal LM."""

    module: str
    weight: StoredTensor
    num_labels: int


_LAST_LAYERS = ("", ".out_proj", ".summary", ".linear_out")
"""Where in a head its last layer is, whose rows are the labels: RoBERTa's and BART's is `out_proj`, XLM's `summary`."""


def head_names(arch: Architecture) -> tuple[str, ...]:
    """Return the names that the weight of the head's last layer may have."""
    return tuple(f"{arch.head}{last}.weight" for last in _LAST_LAYERS)


def is_classifier(class_names: tuple[str, ...]) -> bool:
    """Return whether `architectures` of a config names a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in class_names)


def decide_task(task: Task, adapter: AdapterDir, config: AdapterConfig, base: ModelDir, arch: Architecture) -> Task:
    """Return CAUSAL_LM, SEQ_CLS or REWARD: what was asked for, if adapter and base do not contradict it.

    Without being asked: the adapter's `task_type`, else a head among its tensors, else the base's own class.
    Raises `UnsupportedAdapter` on a contradiction and for tasks that are neither.
    """
    told = {"CAUSAL_LM": Task.CAUSAL_LM, "SEQ_CLS": Task.SEQ_CLS}.get(config.task_type or "")
    if config.task_type and told is None:
        raise UnsupportedAdapter(
            f"{config.path}: task_type: expected SEQ_CLS or CAUSAL_LM, found {config.task_type}",
            hint="merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()",
        )
    classifier_base = base.config is not None and is_classifier(base.config.architectures)
    has_head = arch.head is not None and any(
        key.module == arch.head or key.module.startswith(f"{arch.head}.") for key in adapter.keys.values()
    )
    seen = Task.SEQ_CLS if has_head or classifier_base else Task.CAUSAL_LM
    if task is Task.AUTO:
        if told is Task.CAUSAL_LM and seen is Task.SEQ_CLS:
            raise _contradiction(config, "CAUSAL_LM", f"the {'adapter' if has_head else 'base'} has a {arch.head} head")
        return told or seen
    asked = Task.CAUSAL_LM if task is Task.CAUSAL_LM else Task.SEQ_CLS
    if told is not None and told is not asked:
        raise _contradiction(config, config.task_type or "", f"--task {task} was asked for")
    if asked is Task.CAUSAL_LM and seen is Task.SEQ_CLS:
        raise _contradiction(config, config.task_type or "not set", f"a {arch.head} head is there")
    return task


def _contradiction(config: AdapterConfig, found: str, against: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"{config.path}: task_type is {found}, but {against}",
        hint='a reward model needs "task_type": "SEQ_CLS" in adapter_config.json, and its trained score head',
    )


def find_head(
    adapter: AdapterDir,
    modules: AdapterModules,
    base: ModelDir,
    arch: Architecture,
    *,
    num_labels: int | None,
) -> Head:
    """Return the head: from the adapter if it was saved or carried there, else from a base that has one.

    `num_labels` is what was asked for; the head's rows decide. Raises `IncompatibleBase` where they differ, and
    `UnsupportedAdapter` where there is no head: a merged model would then get a random one on every load.
    """
    if arch.head is None or arch.sequence_classification is None:
        raise UnsupportedAdapter(
            f"{base.root}: {arch.model_type} has no sequence classification class that is stored like its causal LM",
            hint="merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()",
        )
    names = head_names(arch)
    places = (modules.saved, modules.frozen_base, base.tensors)
    weight = next((place[name] for place in places for name in names if name in place), None)
    if weight is None:
        raise UnsupportedAdapter(
            f"{adapter.root}: no `{names[0]}` in the adapter nor in the base: {_why_headless(arch.head, modules)}",
            hint="look for it in the training checkpoint (global_step…), or train again with "
            f'task_type="SEQ_CLS" or modules_to_save=["{arch.head}"]',
        )
    rows = weight.shape[0]
    if num_labels is not None and rows != num_labels:
        raise IncompatibleBase(
            f"{weight.path}: `{weight.name}` has {rows} rows, so {rows} labels; asked for were {num_labels}",
            hint=f"leave --num-labels and --rm out, or give --num-labels {rows} with --task seq-cls",
        )
    return Head(module=arch.head, weight=weight, num_labels=rows)


def _why_headless(head: str, modules: AdapterModules) -> str:
    if head in modules.lora:
        return f"LoRA was put on a `{head}` whose frozen random base was never saved, so the rewards are lost"
    return "the trained head was not saved, and a new one would be random"
