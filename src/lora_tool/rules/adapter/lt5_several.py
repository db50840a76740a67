"""LT512, LT530: adapters that are to be merged together, added up to one, or averaged."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from itertools import combinations

from lora_tool.adapters.targeting import trained_for
from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import computed_from
from lora_tool.core.display import some
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import CLASSIFICATION_HEADS, MATRIX, head_of
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import Subject


class SeveralAdapters(Subject, frozen=True, kw_only=True, eq=False):
    """Adapters whose sum is to be merged into one base, or written; the folder is the first one's."""

    views: tuple[AdapterView, ...]
    average: bool = False
    """Whether their mean is wanted, of ΔW and of heads."""


OF_SEVERAL = ("LT512", "LT530")
"""The rules about several adapters together."""


@rule("LT512", Severity.ERROR, on=SeveralAdapters, unmergeable=True)
def contradict_each_other(subject: SeveralAdapters) -> Iterator[Fault]:
    """Adapters that cannot be merged or combined together.

    What it does: Compares the adapters of one merge or sum pairwise: their tasks (by `task_type`, trained class or
    head), their weights, what they were computed from, and how each changes the modules that both touch.
    Why it matters: LoRA deltas add up. Modules that both saved whole, DoRA magnitudes, trained tokens and heads do not:
    one of the two would be lost, or their order would matter. With `--average`, heads of one shape have a mean; what only
    some of the adapters saved whole has none. An adapter given twice is applied twice; so is one beside
    a sum that `lora-tool combine` made of it, which is only a warning, since its weight may take it off the sum.
    Example: Both adapters contain a whole `lm_head`, with different values.
    What to do: Give each adapter once. Reward models are averaged with their heads: `lora-tool combine ADAPTER1 ADAPTER2
    --average -o OUT`. To keep one adapter's head: `lora-tool combine ADAPTER1 ADAPTER2 --head-of ADAPTER1 -o OUT`. To apply
    both in turn, merge one, then the other into the result: `lora-tool merge ADAPTER2 --base MERGED`.
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
        for name, what in _clashes(one, other, average=subject.average):
            yield Fault(
                message=f"{what}; the other adapter is {second}",
                subject=name,
                path=path,
                hint=_way_out(subject, one, other, name),
            )


@rule("LT530", Severity.ERROR, on=SeveralAdapters, needs=[Need.WEIGHTS])
def average_heads_of_other_beginnings(subject: SeveralAdapters) -> Iterator[Fault]:
    """Heads that are averaged, but began as different random ones.

    What it does: For a mean of adapters, computes the cosine of the angle between every two heads. Heads that began with
    the same values stay near 1, heads that each run drew for itself near 0. Below 0.5 they may not be averaged.
    Why it matters: Each trunk learned to write for its own head. The mean of two such models is no better than one of
    them, with margins a third smaller, although the mean of their scores is better than either. If the heads began alike,
    the mean of the weights is better than each.
    Example: The cosine of the two `score.weight` is 0.02.
    What to do: Begin all runs with one head (a common `score`, saved in the base). To average only ΔW and keep one head:
    `lora-tool combine ADAPTER1 ADAPTER2 --average --head-of ADAPTER1 -o OUT`. To average nevertheless: `--ignore LT530`.
    """
    pairs = combinations(subject.views, 2) if subject.average else ()
    for one, other in pairs:
        path, second = str(one.adapter.root), str(other.adapter.root)
        for name in _heads_of_both(one, other):
            found = cosine_of_heads(one.saved[name], other.saved[name])
            if found is not None and found < _ALIKE:
                yield Fault(
                    message=f"the cosine of the heads of {path} and {second} is {found:.2f}, expected {_ALIKE} or more: each "
                    "run began with a random head of its own, and their mean scores no better than one of them",
                    subject=one.saved[name].name,
                    path=path,
                    hint=f"average ΔW with one head: {_of_all(subject, one)}; average the heads nevertheless: "
                    f"{_combined(subject, '--average', '--ignore', 'LT530')}",
                )


_ALIKE = 0.5
"""The cosine of two heads; those of one beginning have about 1, those of two about 0 ± 1/√width."""


def cosine_of_heads(one: StoredTensor, other: StoredTensor) -> float | None:
    """Return the cosine of two tensors of one shape; None of what is no matrix of numbers, or of zeros."""
    from lora_tool.formats.stored_numbers import READABLE, numbers  # numpy, only where values are read

    if not {one.dtype, other.dtype} <= READABLE or len(one.shape) != MATRIX:
        return None
    left, right = numbers(one).reshape(-1), numbers(other).reshape(-1)
    sizes = float(left @ left) * float(right @ right)
    return float(left @ right) / math.sqrt(sizes) if sizes > 0 else None


def _heads_of_both(one: AdapterView, other: AdapterView) -> list[str]:
    """Return the names of the heads' tensors that both have, in one shape."""
    return [
        name
        for name in sorted(one.saved.keys() & other.saved.keys())
        if head_of(name.rpartition(".")[0]) and one.saved[name].shape == other.saved[name].shape
    ]


def _of_all(subject: SeveralAdapters, kept: AdapterView, *, average: bool = True) -> str:
    """Return the command that combines all of the adapters, with the head of one."""
    mean = ["--average"] if average else []
    return _combined(subject, *mean, "--head-of", str(kept.adapter.root))


def _combined(subject: SeveralAdapters, *options: str) -> str:
    paths = (str(view.adapter.root) for view in subject.views)
    return shlex.join(["lora-tool", "combine", *paths, *options, "-o", "OUT"])


def _way_out(subject: SeveralAdapters, one: AdapterView, other: AdapterView, name: str) -> str | None:
    """Return the commands that keep one adapter's head, average both, or merge two adapters after each other."""
    keep = _of_all(subject, one if name in one.saved else other, average=subject.average)
    if subject.average:
        return (
            f"average ΔW, and keep what one adapter saved whole: {keep}"
            if name in {**one.saved, **other.saved}
            else None
        )
    if name in _heads_of_both(one, other):
        paths = shlex.join(str(view.adapter.root) for view in subject.views)
        return f"the mean of the models: lora-tool combine {paths} --average -o OUT; their sum with one head: {keep}"
    first, second = (shlex.quote(str(view.adapter.root)) for view in (one, other))
    return (
        f"merge one, then the other into the result: lora-tool merge {first} -o MERGED, then lora-tool merge {second} "
        f"--base MERGED; to keep what one of them saved whole: {keep}"
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


def _clashes(one: AdapterView, other: AdapterView, *, average: bool) -> Iterator[tuple[str, str]]:
    """Yield module or tensor and sentence for everything that both do and that cannot be done twice, or has no mean."""
    averaged = frozenset(_heads_of_both(one, other)) if average else frozenset()
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
            if whole[name].shape != others[name].shape:
                yield name, f"is {list(whole[name].shape)} in one adapter and {list(others[name].shape)} in the other"
            elif name not in averaged and not same_values(whole[name], others[name]):
                yield name, "has different values in the two adapters"
    if average:
        yield from _without_mean(one, other)
        yield from _without_mean(other, one)


def _without_mean(has: AdapterView, lacks: AdapterView) -> Iterator[tuple[str, str]]:
    """Yield what only one of two adapters holds whole: the other has the base's values, which no adapter holds."""
    for name in sorted(has.saved.keys() - lacks.saved.keys()):
        yield name, "is saved whole in only one of the two adapters, and cannot be averaged"
    for module in sorted(has.tokens.keys() - lacks.tokens.keys()) if not lacks.config.token_indices else ():
        yield module, "has trained tokens in only one of the two adapters, and cannot be averaged"


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
