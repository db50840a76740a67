"""The models of a type under many configs: every field changed by itself, switches in pairs with what they change."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from tests.oracle.tiny import Task, tiny_config
from tests.tensor_tables.changes import changed, fields_of, longer, merged, overrides, source_of
from tests.tensor_tables.classes import classes
from tests.tensor_tables.expressions import whole
from tests.tensor_tables.models import Built, build

_MOST_PAIRS = 170
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


def sampled(model_type: str) -> list[Built]:
    """Return the models of a type: the largest class under all changes, the others under those that tell something."""
    found: list[Built] = []
    telling: list[dict[str, Any]] = []
    for task, config, base in bases(model_type):
        name = base.class_name
        pinned = derived(config) | silent(model_type, task, name, base)
        found.extend(one for _, one in _tried(model_type, task, name, [pinned, {}]))
        labels: list[dict[str, Any]] = [
            {"num_labels": 5},
            {"num_labels": 3},
            {"tie_word_embeddings": not getattr(config, "tie_word_embeddings", True)},
        ]
        if telling:
            found.extend(one for _, one in _tried(model_type, task, name, [*telling, *labels]))
            continue
        loose = [*longer(config), *overrides(config, source_of(name)), *labels]
        changes = [merged(pinned, change) for change in loose]
        singles = _tried(model_type, task, name, [*changes, *(loose if pinned else ())])
        telling = [change for change, one in singles if one.shapes != base.shapes or one.ties != base.ties]
        structures: dict[Any, dict[str, Any]] = {}
        for change, one in singles:
            alike_as = frozenset(one.shapes if _sizes(changed(change, pinned)) else one.shapes.items())
            structures.setdefault(alike_as, change)
        sizes = _one_per_field([change for change in telling if _sizes(changed(change, pinned))], pinned)
        switches = list(structures.values())[1:13]
        pairs = [merged(size, switch) for switch in switches for size in sizes]
        pairs += [merged(one, two) for one, two in itertools.combinations(sizes, 2)]
        pairs += [merged(one, two) for one, two in itertools.combinations(switches[:6], 2)]
        paired = _tried(model_type, task, name, pairs[:_MOST_PAIRS])
        found.extend(one for _, one in (*singles, *paired))
        kept: dict[Any, dict[str, Any]] = {}
        for change, one in paired:
            kept.setdefault(frozenset(one.shapes), change)
        telling = [*switches, *sizes, *list(kept.values())[:20]]
    return found


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
            tried = _tried(model_type, task, class_name, [{name: size} for size in (*sizes, 40)])
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


def _tried(
    model_type: str, task: Task, class_name: str, changes: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], Built]]:
    found = []
    for change in changes:
        with contextlib.suppress(Exception):
            config = tiny_config(model_type, task, **change)
            built = build(config, class_name)
            followed = frozenset(derived(config).keys() - change.keys())
            found.append((change, dataclasses.replace(built, followed=followed)))
    return found
