"""The head of a classifier: where it is, and how many labels it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lora_tool.adapter.support import WITH_PEFT
from lora_tool.architectures import Architecture
from lora_tool.architectures.heads import last_weights
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.checkpoint.nearby import consolidate_command
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.names.model import LABELS, ModelFacts
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import CLASSIFIERS, Task
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.tensors import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The classification head of the merged model: the tensors that have no place in a causal LM."""

    module: str
    name: str
    """What the model calls the weight of the last layer, whose rows are the labels."""
    weight: StoredTensor
    """That weight, where it is: by its name in the adapter's file, if it comes from there."""
    num_labels: int


def head_and_labels(view: BaseView, modules: AdapterModules, *, asked: int | None) -> tuple[Head | None, int | None]:
    """Return the head of a sequence classifier, and how many labels the model has; None for each that it lacks.

    `asked` is the number of labels that the user gave. Raises as `find_head` and `count_labels` do, and
    `UnsupportedAdapter` where the architecture has no such class.
    """
    if view.task in CLASSIFIERS:
        wanted = 1 if view.task is Task.REWARD and asked is None else asked
        head = find_head(view.adapters[0], modules, view.base, view.arch, num_labels=wanted)
        return head, head.num_labels
    if view.task is Task.CAUSAL_LM and view.arch.causal_lm is None:
        raise UnsupportedAdapter(
            f"{view.base.root}: {view.arch.model_type} has no causal LM that is stored as it is in memory",
            hint=WITH_PEFT,
        )
    return None, count_labels(view.facts, modules.saved, view.base, asked=asked) if view.facts is not None else None


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
            hint=WITH_PEFT,
        )
    names = last_weights(arch.head)
    places = (modules.saved, modules.frozen_base, base.tensors)
    name, weight = next(((name, place[name]) for place in places for name in names if name in place), (names[0], None))
    if weight is None:
        raise UnsupportedAdapter(
            f"{adapter.root}: no `{names[0]}` in the adapter nor in the base: {_why_headless(arch.head, modules)}",
            hint=way_to_head(adapter, arch.head),
        )
    rows = weight.shape[0]
    if num_labels is not None and rows != num_labels:
        raise IncompatibleBase(
            f"{weight.path}: `{weight.name}` has {rows} rows, so {rows} labels; asked for were {num_labels}",
            hint=f'give `num_labels={rows}` with `task="seq-cls"`, or no number',
        )
    return Head(module=arch.head, name=name, weight=weight, num_labels=rows)


def way_to_head(adapter: AdapterDir, module: str) -> str:
    """Return what to do for a head that neither adapter nor base has."""
    command = consolidate_command(adapter.root)
    if command:
        return f"look for it in the training checkpoint: {command}"
    return (
        "look for it in the training checkpoint (global_step…), or train again with "
        f'task_type="SEQ_CLS" or modules_to_save=["{module}"]'
    )


def _why_headless(head: str, modules: AdapterModules) -> str:
    if head in modules.lora:
        return f"LoRA was put on a `{head}` whose frozen random base was never saved, so the rewards are lost"
    return "the trained head was not saved, and a new one would be random"


def count_labels(
    facts: ModelFacts, saved: Mapping[str, StoredTensor], base: ModelDir, *, asked: int | None
) -> int | None:
    """Return how many labels the tensors of a class have whose shapes depend on it; None for a class without any.

    What the adapter `saved` goes before the base's. Raises `IncompatibleBase` where tensors do not agree, with one
    another or with what was `asked` for.
    """
    found = dict(_label_sizes(facts, saved, base))
    if len(set(found.values())) > 1:
        sizes = ", ".join(f"`{name}` {size}" for name, size in sorted(found.items()))
        raise IncompatibleBase(f"{base.root}: adapter and base have different numbers of labels: {sizes}")
    labels = next(iter(found.values()), None)
    if asked is not None and asked != labels:
        raise IncompatibleBase(
            f"{base.root}: {facts.class_name} has {'no' if labels is None else labels} labels here; asked for were "
            f"{asked}",
            hint="give no number of labels",
        )
    return labels


def _label_sizes(facts: ModelFacts, saved: Mapping[str, StoredTensor], base: ModelDir) -> Iterator[tuple[str, int]]:
    for name, shape in facts.shapes.items():
        tensor = saved.get(name) or base.tensors.get(name)
        if LABELS in shape and tensor is not None and len(tensor.shape) == len(shape):
            yield name, tensor.shape[shape.index(LABELS)]
