"""The models of a type under many configs: every field changed by itself, switches in pairs with what they change."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from lora_tool.models.sizes import kinds_of
from tests.oracle.tiny import Task, tiny_config
from tests.tensor_tables.changes import (
    all_of,
    changed,
    companions,
    fields_of,
    longer,
    merged,
    overrides,
    rebalanced,
    source_of,
)
from tests.tensor_tables.classes import classes
from tests.tensor_tables.expressions import whole
from tests.tensor_tables.models import Built, build, flat

_MOST_PAIRS = 120
_SWITCHES = 16
_SEVERAL = 40
_REBALANCED = 4
_Result = tuple[dict[str, Any], Built]
_NEARLY = 1.2
"""How many times the tensors of a class without the encoder the whole model has, at least."""
_SIZE = re.compile(r"inner|dim|size|rank|heads|layers|d_")


def bases(model_type: str) -> list[tuple[Task, PretrainedConfig, Built]]:
    """Return every class of a type under its base config, first one that has the parts of the others."""
    found = []
    for task, class_name in classes(model_type):
        try:
            config = tiny_config(model_type, task)
            found.append((task, config, build(config, class_name)))
        except Exception as error:  # noqa: BLE001 - a class that cannot be built has no entry
            print(model_type, class_name, "is left out:", str(error)[:100], file=sys.stderr)
    largest = max((len(base.shapes) for _, _, base in found), default=0)
    return sorted(found, key=lambda item: len(item[2].shapes) * _NEARLY < largest)


class Sampled(NamedTuple):
    """The models of a type, and the fields (by their paths) whose change alone changed the tensors of one of them."""

    models: list[Built]
    deciding: frozenset[str]
    config: PretrainedConfig


def sampled(model_type: str) -> Sampled | None:
    """Return the models of a type: the largest class under all changes, the others under those that tell something."""
    found: list[Built] = []
    telling: list[dict[str, Any]] = []
    inert: list[dict[str, Any]] = []
    deciding: set[str] = set()
    whole: PretrainedConfig | None = None
    for task, config, base in bases(model_type):
        tried = _Tried(model_type, task, base.class_name)
        pinned = derived(config) | silent(model_type, task, base.class_name, base)
        found.extend(one for _, one in tried([pinned, {}]))
        if whole is not None:
            found.extend(one for _, one in tried([*telling, *_labels(config)]))
            under = _together(tried, {}, base, inert)
            found.extend(one for _, one in under)
            deciding |= {leaf for change, one in under if one.shapes != base.shapes for leaf in _leaves(change)}
            continue
        whole = config
        loose = [*longer(config), *overrides(config, source_of(base.class_name)), *_labels(config)]
        changes = [merged(pinned, change) for change in loose]
        singles = _singles(tried, config, [*changes, *(loose if pinned else ())])
        differing = [(change, one) for change, one in singles if one.shapes != base.shapes or one.ties != base.ties]
        deciding |= {leaf for change, _ in differing for leaf in _leaves(_without_lists(changed(change, pinned)))}
        found.extend(one for _, one in singles)
        structures: dict[Any, dict[str, Any]] = {}
        for change, one in differing:
            alike_as = frozenset(one.shapes if _sizes(changed(change, pinned)) else one.shapes.items())
            structures.setdefault(alike_as, change)
        sizes = _one_per_field([change for change, _ in differing if _sizes(changed(change, pinned))], pinned)
        switches = sorted(structures.values(), key=lambda change: _sizes(changed(change, pinned)))
        inert = [changed(change, pinned) for change, one in singles if one.shapes == base.shapes]
        alone = {leaf for change, _ in differing if (leaf := _only_leaf(changed(change, pinned)))}
        inert = [change for change in inert if _only_leaf(change) not in alone]
        for switch, its in tried(switches[:_SWITCHES]):
            under = _together(tried, switch, its, inert)
            found.extend(one for _, one in under)
            woken = [change for change, one in under if one.shapes != its.shapes]
            deciding |= {leaf for change in woken for leaf in _leaves(changed(change, pinned | switch))}
            telling.extend(woken)
            switches.extend(woken[:4])
        paired = tried(_pairs(sizes, switches[:16], [change for change, _ in differing]))
        found.extend(one for _, one in paired)
        kept: dict[Any, dict[str, Any]] = {}
        for change, one in paired:
            kept.setdefault(frozenset(one.shapes), change)
        telling = [*(change for change, _ in differing), *telling[:40], *list(kept.values())[:12]]
    return Sampled(found, frozenset(deciding), whole) if whole is not None else None


def _only_leaf(change: Mapping[str, Any]) -> str | None:
    """Return the path of the one field that is changed; None where there are several."""
    leaves = [*_leaves(change)]
    return leaves[0] if len(leaves) == 1 else None


def _without_lists(change: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the change without lists that only follow a number of layers."""
    return change if len(change) == 1 else {n: value for n, value in change.items() if not isinstance(value, list)}


def _together(tried: _Tried, switch: dict[str, Any], alone: Built, changes: Sequence[dict[str, Any]]) -> list[_Result]:
    """Return the models of all these changes where a switch is set, which change nothing by themselves: several in one
    model as long as it has the tensors that the switch alone gives.
    """
    rows: list[list[dict[str, Any]]] = []
    for change in changes:  # no field twice in one model
        row = next((row for row in rows if all(other.keys().isdisjoint(change) for other in row)), None)
        if row is None:
            rows.append([change])
        else:
            row.append(change)
    return [each for row in rows for each in _halved(tried, switch, alone, row)]


def _halved(tried: _Tried, switch: dict[str, Any], alone: Built, row: Sequence[dict[str, Any]]) -> list[_Result]:
    found = tried([all_of([*row, switch])])
    if len(row) == 1 or (found and found[0][1].shapes == alone.shapes):
        return found
    half = len(row) // 2
    return [*_halved(tried, switch, alone, row[:half]), *_halved(tried, switch, alone, row[half:])]


def _labels(config: PretrainedConfig) -> list[dict[str, Any]]:
    tied = getattr(config, "tie_word_embeddings", True)
    return [*({"num_labels": number} for number in (5, 3, 2, 1, 12)), {"tie_word_embeddings": not tied}]


def _singles(tried: _Tried, config: PretrainedConfig, changes: Sequence[dict[str, Any]]) -> list[_Result]:
    """Return the models of changes of one field; one that cannot be built so with what it may need, and with another
    size against it.
    """
    found = []
    needed = [*companions(config)]
    for change in changes:
        some = tried([change])
        for more in () if some else needed:
            some = some or tried([merged(more, change)])
        found.extend(some)
    moved = {leaf for change, _ in found for leaf in _leaves(change)}
    count: Counter[tuple[str, ...]] = Counter()
    for path, change in rebalanced(config):
        if ".".join(path) not in moved and count[path] < _REBALANCED:
            some = tried([change])
            count[path] += len(some)
            found.extend(some)
    return found


def _pairs(
    sizes: Sequence[dict[str, Any]], switches: Sequence[dict[str, Any]], every: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what is tried of two changes at once, and some of more."""
    pairs = [merged(one, two) for one, two in itertools.combinations(switches[:8], 2)]
    pairs += [merged(size, switch) for switch in switches[:12] for size in sizes]
    pairs += [merged(one, two) for one, two in itertools.combinations(sizes, 2)]
    chance = random.Random(len(every))
    several = [all_of(chance.sample(every, min(len(every), 2 + at % 3))) for at in range(_SEVERAL)]
    return pairs[:_MOST_PAIRS] + several


def _one_per_field(changes: Sequence[dict[str, Any]], pinned: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return at most two changes of each field."""
    count: dict[str, int] = defaultdict(int)
    found = []
    for change in changes:
        name = json.dumps(sorted(_leaves(changed(change, pinned))))
        count[name] += 1
        if count[name] <= 1 and (not pinned or pinned.keys() <= change.keys()):
            found.append(change)
    return found


def _leaves(change: Mapping[str, Any]) -> Iterator[str]:
    for name, value in change.items():
        yield from (f"{name}.{leaf}" for leaf in _leaves(value)) if isinstance(value, dict) else (name,)


def silent(model_type: str, task: Task, class_name: str, base: Built) -> dict[str, Any]:
    """Return the fields that stay None and stand for a size all the same, with the size that the base has."""
    config = tiny_config(model_type, task)
    declared = {field.name: field.default for field in dataclasses.fields(type(config))}
    sizes = sorted({size for shape in base.shapes.values() for size in shape if size > 2})
    found = {}
    for name, value in fields_of(config):
        if value is None and declared.get(name, 0) is None and _SIZE.search(name):
            tried = _Tried(model_type, task, class_name)([{name: size} for size in (*sizes, 40)])
            same = [change[name] for change, one in tried if one.shapes == base.shapes]
            if len(same) == 1 < len(tried):
                found[name] = same[0]
    return found


def derived(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields that are None by default, and that the config has filled in from others."""
    declared = {field.name: field.default for field in dataclasses.fields(type(config))}
    return {n: v for n, v in fields_of(config) if declared.get(n, 0) is None and whole(v)}


def _sizes(change: Mapping[str, Any]) -> bool:
    return all(
        _sizes(value) if isinstance(value, dict) else isinstance(value, int) and not isinstance(value, bool)
        for value in change.values()
    )


class _Tried(NamedTuple):
    """One class of a type, which is built under changes of its tiny config."""

    model_type: str
    task: Task
    class_name: str

    def __call__(self, changes: Iterable[dict[str, Any]]) -> list[_Result]:
        """Return the models that can be built, each with its change."""
        found = []
        for change in changes:
            with contextlib.suppress(Exception):
                config = tiny_config(self.model_type, self.task, **change)
                given = [*flat(config.to_dict()), *flat(change)]  # of which config and class may set some otherwise
                built = build(config, self.class_name)
                followed = frozenset(derived(config).keys() - change.keys())
                kinds = dict(built.kinds)
                for path, value in given:
                    kinds[path] = kinds.get(path, frozenset()) | kinds_of(value)
                found.append((change, dataclasses.replace(built, followed=followed, kinds=kinds)))
        return found
