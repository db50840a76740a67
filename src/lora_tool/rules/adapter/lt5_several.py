"""LT512: adapters that are to be merged together, or added up to one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import combinations

from lora_tool.adapters.targeting import trained_for
from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import computed_from
from lora_tool.core.display import some
from lora_tool.core.report import Severity
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import CLASSIFICATION_HEADS, head_of
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.engine.subjects import Subject


class SeveralAdapters(Subject, frozen=True, kw_only=True, eq=False):
    """Adapters whose sum is to be merged into one base, or written; the folder is the first one's."""

    views: tuple[AdapterView, ...]


OF_SEVERAL = "LT512"
"""The rule about several adapters together."""


@rule(OF_SEVERAL, Severity.ERROR, on=SeveralAdapters, unmergeable=True)
def contradict_each_other(subject: SeveralAdapters) -> Iterator[Fault]:
    """Adapters that cannot be merged or combined together.

    What it does: Compares the adapters of one merge or sum pairwise: their tasks (by `task_type`, trained class or
    head), their weights, what they were computed from, and how each changes the modules that both touch.
    Why it matters: LoRA deltas add up. Modules that both saved whole, DoRA magnitudes, trained tokens and heads do not:
    one of the two would be lost, or their order would matter. An adapter given twice is applied twice; so is one beside
    a sum that `lora-tool combine` made of it, which is only a warning, since its weight may take it off the sum.
    Example: Both adapters contain a whole `lm_head`, with different values.
    What to do: Give each adapter once. Merge one, then the other into the result: `lora-tool merge ADAPTER2 --base
    MERGED`. To keep one adapter's head: `lora-tool combine ADAPTER1 ADAPTER2 --head-of ADAPTER1 -o OUT`, and merge OUT.
    """
    for one, other in combinations(subject.views, 2):
        path, second = str(one.adapter.root), str(other.adapter.root)
        tasks = (_task_of(one, other), _task_of(other, one))
        if None not in tasks and tasks[0] != tasks[1]:
            message = f"is {tasks[0]}, but that of {second} is {tasks[1]}"
            hint = f"make a model of each: lora-tool merge --each {shlex.join([path, second])} -o OUT"
            yield Fault(message=message, subject="task_type", path=path, hint=hint)
            continue
        if _are_the_same(one, other):
            message = f"holds the same weights as {second}: together they would be applied twice"
            yield Fault(message=message, path=path, hint="give each adapter once, with the weight of both")
            continue
        if shared := _in_both(one, other):
            message = f"{shared} in both {path} and {second}: together they apply it twice"
            hint = "give the adapters that they were computed from instead, each once"
            yield Fault(message=message, path=path, hint=hint, severity=Severity.WARNING)
        for name, what in _clashes(one, other):
            yield Fault(
                message=f"{what}; the other adapter is {second}",
                subject=name,
                path=path,
                hint=_one_by_one(path, second),
            )


def _one_by_one(one: str, other: str) -> str:
    """Return the commands that merge two adapters after each other, or keep the head of the first."""
    first, second = shlex.quote(one), shlex.quote(other)
    return (
        f"merge one, then the other into the result: lora-tool merge {first} -o MERGED, then lora-tool merge {second} "
        f"--base MERGED; to keep one adapter's head: lora-tool combine {first} {second} --head-of {first} -o OUT"
    )


def _task_of(view: AdapterView, other: AdapterView) -> str | None:
    """Return the adapter's task by its config; if the other is a causal LM's, by the head that it carries."""
    said = trained_for(view.config)
    if said is None and trained_for(other.config) == "CAUSAL_LM":
        paths = (*view.saved, *(layer.target for layer in view.layers))
        return "SEQ_CLS" if any(head_of(path, CLASSIFICATION_HEADS) for path in paths) else None
    return said


def _are_the_same(one: AdapterView, other: AdapterView) -> bool:
    from lora_tool.formats.manifest import fingerprint  # slow to import

    return bool(one.adapter.tensors) and fingerprint(one.adapter.weights) == fingerprint(other.adapter.weights)


def _in_both(one: AdapterView, other: AdapterView) -> str:
    """Return what says which adapters both are, or were computed from; "" for none."""
    held = [computed_from(view.adapter) for view in (one, other)]
    if not any(held):
        return ""
    from lora_tool.formats.manifest import fingerprint  # slow to import

    first, second = (
        {fingerprint(view.adapter.weights): str(view.adapter.root), **inside}
        for view, inside in zip((one, other), held, strict=True)
    )
    places = sorted({first[each] or second[each] for each in first.keys() & second.keys()} - {""})
    if places:
        return f"the ΔW of {some(places, 3)} is"
    return "the ΔW of an adapter is" if first.keys() & second.keys() else ""


def _clashes(one: AdapterView, other: AdapterView) -> Iterator[tuple[str, str]]:
    """Yield module or tensor and sentence for everything that both do and that cannot be done twice."""
    yield from _one_sided(one, other)
    yield from _one_sided(other, one)
    for module in sorted(one.tokens.keys() & other.tokens.keys()):
        yield module, "has trained tokens in both adapters"
    mine, theirs = ({layer.module: layer.embedding for layer in view.layers} for view in (one, other))
    for module in sorted(mine.keys() & theirs.keys()):
        if mine[module] != theirs[module]:
            yield module, "is an embedding in one adapter and a linear layer in the other"
    for whole, others in ((one.saved, other.saved), (one.frozen, other.frozen)):
        for name in sorted(whole.keys() & others.keys()):
            if not same_values(whole[name], others[name]):
                yield name, "has different values in the two adapters"


def _one_sided(left: AdapterView, right: AdapterView) -> Iterator[tuple[str, str]]:
    """Yield what `left` does that leaves no place for the LoRA of `right`."""
    adapted = {layer.module for layer in right.layers}
    for module in sorted({layer.module for layer in left.layers if layer.magnitude is not None} & adapted):
        yield module, "has DoRA, which scales the whole weight, so the order of the two adapters would matter"
    touched = {f"{module}.weight" for module in (*adapted, *right.tokens)}
    touched |= {f"{layer.module}.bias" for layer in right.layers if layer.bias is not None}
    for name in sorted(left.saved.keys() & touched):
        yield name, "is saved whole in one adapter and has LoRA or trained tokens in the other"
    for module in sorted(left.tokens.keys() & adapted):
        yield module, "has trained tokens in one adapter and LoRA in the other"
