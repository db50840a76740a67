"""The task of the merged model, the head that it has for it, and the labels of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.adapters.support import WITH_PEFT
from lora_tool.core.choices import positive
from lora_tool.core.display import counted
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.core.options import Options, Recorded, Section, option
from lora_tool.core.progress import decided
from lora_tool.models.ends import last_weights
from lora_tool.plans.base.task import CLASSIFIERS, Task
from lora_tool.plans.merge.draft import Draft, Head

if TYPE_CHECKING:
    from lora_tool.checkpoints import ModelDir
    from lora_tool.core.tensors import StoredTensor
    from lora_tool.models.mapping.model import ModelFacts
    from lora_tool.plans.adapter.combine import AdapterModules
    from lora_tool.plans.merge.draft import Model


@dataclass(frozen=True, kw_only=True)
class ForTask(Options):
    """The options of this pass."""

    section = Section.MODEL

    task: Task | str = option(
        Task.AUTO,
        "Task of the merged model: reward is seq-cls with one label, as-trained the class that the adapter or base names.",
        parse=Task,
        recorded=Recorded.AS_DECIDED,
    )
    num_labels: int | None = option(
        None, "Number of labels that the head must have.", parse=positive, recorded=Recorded.AS_DECIDED
    )


def with_head(draft: Draft, options: ForTask) -> Draft:
    """Return the draft with the head of a sequence classifier, and how many labels the model has.

    Raises `UnsupportedAdapter` where the architecture has no class for the task, `WrongValue` where its class has no
    labels.
    """
    head, labels = _head_and_labels(draft.model, draft.modules, wanted=options.num_labels)
    return replace(draft, head=head, labels=labels)


def _head_and_labels(model: Model, modules: AdapterModules, *, wanted: int | None) -> tuple[Head | None, int | None]:
    """Return the head of a sequence classifier, and how many labels the model has; None for each that it lacks.

    `wanted` is the number of labels that the user gave, which the rules have compared with those that there are.
    """
    if model.task in CLASSIFIERS:
        head = _find_head(model, modules)
        return head, head.num_labels
    if model.task is Task.CAUSAL_LM and model.arch.causal_lm is None:
        raise UnsupportedAdapter(
            f"{model.base.root}: {model.arch.model_type} has no causal LM whose tensors on disk are those in memory",
            hint=WITH_PEFT,
        )
    labels = count_labels(model.facts, modules.saved, model.base) if model.facts is not None else None
    if wanted is not None and labels is None:
        class_name = model.facts.class_name if model.facts is not None else model.arch.causal_lm
        raise WrongValue(
            f"{model.base.root}: a {class_name} has no labels, but num_labels is {wanted}",
            hint="leave out `num_labels`",
        )
    return None, labels


def _find_head(model: Model, modules: AdapterModules) -> Head:
    """Return the head: from the adapter if it was saved or carried there, else from a base that has one."""
    arch = model.arch
    if arch.head is None or arch.sequence_classification is None:
        raise UnsupportedAdapter(
            f"{model.base.root}: {arch.model_type} has no sequence classifier that is stored like its causal LM",
            hint=WITH_PEFT,
        )
    places = {
        "the adapter, which saved it whole": modules.saved,
        "the adapter, which carries it under its LoRA": modules.frozen_base,
        "the base": model.base.tensors,
    }
    found = None
    for source, place in places.items():
        for name in last_weights(arch.head):
            if name in place and found is None:
                found = source, name, place[name]
    if found is None:
        raise AssertionError("the rules let no classifier without its head pass")
    source, name, weight = found
    decided(f"head: `{name}` of {source}, {counted(weight.shape[0], 'row')}")
    return Head(module=arch.head, name=name, weight=weight, num_labels=weight.shape[0])


def count_labels(facts: ModelFacts, saved: Mapping[str, StoredTensor], base: ModelDir) -> int | None:
    """Return how many labels the tensors of a class have whose shapes depend on it; None for a class without any.

    Tensors that the adapter `saved` go before the base's; the rules saw that they agree.
    """
    held = ((saved.get(name) or base.tensors.get(name), axis) for name, axis in facts.label_axes.items())
    return next((tensor.shape[axis] for tensor, axis in held if tensor is not None and len(tensor.shape) > axis), None)
