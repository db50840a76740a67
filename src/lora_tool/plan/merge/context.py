"""Everything that the steps of a merge need, decided once: the model, what the adapters do, the head and the ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.adapter.support import WITH_PEFT
from lora_tool.architectures import Architecture
from lora_tool.architectures.heads import last_weights
from lora_tool.checkpoint import ModelDir
from lora_tool.display import counted
from lora_tool.errors import UnsupportedAdapter, WrongValue
from lora_tool.plan.adapter.combine import Adapted
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import CLASSIFIERS, Task
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.plan.merge.tied_embeddings import ModelEnds, settled_ends, with_vocabulary
from lora_tool.progress import decided
from lora_tool.tensors import DType, StoredTensor

if TYPE_CHECKING:
    from lora_tool.names.model import ModelFacts


class Head(Struct, frozen=True, kw_only=True):
    """The classification head of the merged model: the tensors that have no place in a causal LM."""

    module: str
    name: str
    """What the model calls the weight of the last layer, whose rows are the labels."""
    weight: StoredTensor
    """That weight, where it is: by its name in the adapter's file, if it comes from there."""
    num_labels: int


class MergeContext(Struct, frozen=True, kw_only=True):
    """Everything that the steps are made from."""

    base: ModelDir
    """The base in the names of memory, with as many rows per token as the merged model."""
    adapted: tuple[Adapted, ...]
    arch: Architecture
    task: Task
    modules: AdapterModules
    """What all adapters do together."""
    head: Head | None
    """A sequence classifier's; other classes' heads are parameters like any other."""
    labels: int | None
    """How many labels the merged model has; None for a class without any."""
    dtype: DType | None
    facts: ModelFacts | None = None
    """What transformers says of the model, where it was asked."""
    missing_keys: frozenset[str] = frozenset()
    """Parameters that the merged model's class has and the base does not."""
    ends: ModelEnds


def merge_context(
    view: BaseView,
    adapted: Sequence[Adapted],
    modules: AdapterModules,
    *,
    num_labels: int | None,
    dtype: DType | None,
    untie: bool,
) -> MergeContext:
    """Return what the steps are made from, with the head and the ends of the model settled.

    `modules` are those of all `adapted` together. `num_labels` is what the user asked for, `untie` gives tied
    embeddings two matrices. Raises `UnsupportedAdapter` where the architecture has no class for the task or adapters
    hold tied tensors with different values, `WrongValue` where its class has no labels.
    """
    head, labels = _head_and_labels(view, modules, asked=num_labels)
    ends, adapted, modules = settled_ends(view, adapted, modules, classifies=head is not None, untie=untie)
    base = view.base
    if ends.vocabulary is not None:
        dropped = {*ends.copies, *(view.arch.causal_only if head is not None else ())}
        base = with_vocabulary(base, ends.vocabulary, dropped)
    return MergeContext(
        base=base,
        adapted=adapted,
        arch=view.arch,
        task=view.task,
        modules=modules,
        head=head,
        labels=labels,
        dtype=dtype,
        facts=view.facts,
        missing_keys=view.missing_keys,
        ends=ends,
    )


def _head_and_labels(view: BaseView, modules: AdapterModules, *, asked: int | None) -> tuple[Head | None, int | None]:
    """Return the head of a sequence classifier, and how many labels the model has; None for each that it lacks.

    `asked` is the number of labels that the user gave, which the rules have compared with those that there are. Raises
    `UnsupportedAdapter` where the architecture has no class for the task, `WrongValue` where its class has no labels.
    """
    if view.task in CLASSIFIERS:
        head = _find_head(view, modules)
        return head, head.num_labels
    if view.task is Task.CAUSAL_LM and view.arch.causal_lm is None:
        raise UnsupportedAdapter(
            f"{view.base.root}: {view.arch.model_type} has no causal LM whose tensors on disk are those in memory",
            hint=WITH_PEFT,
        )
    labels = count_labels(view.facts, modules.saved, view.base) if view.facts is not None else None
    if asked is not None and labels is None:
        class_name = view.facts.class_name if view.facts is not None else view.arch.causal_lm
        raise WrongValue(
            f"{view.base.root}: a {class_name} has no labels, but num_labels is {asked}", hint="leave out `num_labels`"
        )
    return None, labels


def _find_head(view: BaseView, modules: AdapterModules) -> Head:
    """Return the head: from the adapter if it was saved or carried there, else from a base that has one."""
    arch = view.arch
    if arch.head is None or arch.sequence_classification is None:
        raise UnsupportedAdapter(
            f"{view.base.root}: {arch.model_type} has no sequence classifier that is stored like its causal LM",
            hint=WITH_PEFT,
        )
    places = {
        "the adapter, which saved it whole": modules.saved,
        "the adapter, which carries it under its LoRA": modules.frozen_base,
        "the base": view.base.tensors,
    }
    found = (
        (source, name, place[name])
        for source, place in places.items()
        for name in last_weights(arch.head)
        if name in place
    )
    source, name, weight = next(found, (None, None, None))
    if name is None or weight is None:
        raise AssertionError("the rules let no classifier without its head pass")
    decided(f"head: `{name}` of {source}, {counted(weight.shape[0], 'row')}")
    return Head(module=arch.head, name=name, weight=weight, num_labels=weight.shape[0])


def count_labels(facts: ModelFacts, saved: Mapping[str, StoredTensor], base: ModelDir) -> int | None:
    """Return how many labels the tensors of a class have whose shapes depend on it; None for a class without any.

    What the adapter `saved` goes before the base's; the rules saw that they agree.
    """
    held = ((saved.get(name) or base.tensors.get(name), axis) for name, axis in facts.label_axes.items())
    return next((tensor.shape[axis] for tensor, axis in held if tensor is not None and len(tensor.shape) > axis), None)
