"""Writes `model_tensors.jsonl`: which tensors a class of transformers has, and their shapes by its config's fields.

    python -m tests.tensor_tables [MODEL_TYPE…]

Each class of a directly stored architecture is built on the meta device under many small configs: every field of the
config is changed by itself, switches in pairs with what they change. A name that is there under all of them is always
there; names that come and go together are one group. A dimension is the simplest product or sum of fields that gives
its size in all of the models; where there is none, it stays unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.utils import logging

from lora_tool.architectures import ARCHITECTURES, is_computed
from lora_tool.architectures.model_tensors import TABLE, model_tensors
from lora_tool.formats.model_config import model_config_of
from tests.oracle.tiny import AUTO, Task, buildable, tiny_config

_COMMON = frozenset(field.name for field in dataclasses.fields(PretrainedConfig)) - {
    "tie_word_embeddings",
    "is_decoder",
    "add_cross_attention",
    "chunk_size_feed_forward",
}
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention", "conv", "mamba",
                "attention", "recurrent", "hybrid", "global", "local")  # fmt: skip
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_PAIRS = 170
_NEARLY = 1.2
"""How many times the tensors of a class without the encoder the whole model has, at least."""
_LEFT_OUT = frozenset(
    {
        "blt",  # several models in one
        "funnel",  # lists of blocks of layers
        "perceiver",  # its config lists sizes
        "reformer",  # `attn_layers` says how many layers there are
    }
)
_SIZE = re.compile(r"inner|dim|size|rank|heads|layers|d_")

_BARE = frozenset(
    name for names in MODEL_MAPPING_NAMES.values() for name in ((names,) if isinstance(names, str) else names)
)
"""The classes of base models. Another class without a part of its prefix's name holds the base model's parts itself."""

Fields = Mapping[str, Any]
Shape = tuple[int, ...]
Dims = list[str | int | None]
Samples = dict[str, dict[int, list[tuple[Fields, int]]]]
Stacks = Mapping[str, str | None]
"""The path of each list of layers, and the field that is its length."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One model: the fields of its config, its tensors on disk, and which of them are other tensors' values."""

    class_name: str
    fields: Fields
    shapes: Mapping[str, Shape]
    optional: frozenset[str]
    ties: Mapping[str, str]
    prefix: str
    unexpected: tuple[str, ...]
    followed: frozenset[str] = frozenset()
    """Fields that were not given, and filled in from others."""


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            yield from flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, bool | int | str):
            yield prefix + name, value


def build(config: PretrainedConfig, class_name: str) -> Built:
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        model = model_class(config)
    if get_model_conversion_mapping(model, add_legacy=False):
        raise ValueError("stored under other names")
    prefix = "" if model.base_model is model else f"{model_class.base_model_prefix}."
    own = {name: trunk_name(name, prefix) for name in model.state_dict()}
    shapes = {own[name]: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    buffers = {own[name] for name, _ in model.named_buffers() if name in own}
    missing = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    ignored = {own[name] for name in own.keys() & set(model._keys_to_ignore_on_save or ())} | buffers
    ignored |= {own[name] for name in own if is_computed(name) or any(p.search(name) for p in missing)}
    fields = dict(flat(config.to_dict()))
    fields["num_labels"] = config.num_labels
    return Built(
        class_name=class_name,
        fields=fields,
        shapes=shapes,
        optional=frozenset(ignored),
        ties={own.get(one, one): own.get(two, two) for one, two in model.all_tied_weights_keys.items()},
        prefix=model_class.base_model_prefix if prefix or class_name in _BARE else "",
        unexpected=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )


def trunk_name(name: str, prefix: str) -> str:
    """Return a name with what a class calls its base model written as ``@``."""
    return f"@{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def classes(model_type: str) -> Iterator[tuple[Task, str]]:
    """Yield the classes of a model type that auto classes load, those of the table of architectures first."""
    row = ARCHITECTURES[model_type]
    found: dict[str, Task] = {}
    tasks: tuple[Task, ...] = (
        "causal-lm",
        "seq-cls",
        "seq-2-seq-lm",
        "token-cls",
        "question-ans",
        "feature-extraction",
    )
    for task in tasks:
        with contextlib.suppress(Exception):
            if model_type in buildable(task):
                name = type_of(model_type, task)
                if task not in ("causal-lm", "seq-cls") or name in (row.causal_lm, row.sequence_classification):
                    found.setdefault(name, task)
    yield from ((task, name) for name, task in found.items())


def type_of(model_type: str, task: Task) -> str:
    found = AUTO[task]._model_mapping._model_mapping[model_type]
    return str(found if isinstance(found, str) else found[0])


def other_classes(model_type: str, known: Collection[str]) -> Iterator[PreTrainedModel]:
    """Yield the classes of a model type that are not `known`, each under its smallest config, without memory."""
    config_class = CONFIG_MAPPING[model_type]
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    modules = [each.name for each in pkgutil.iter_modules(package.__path__) if each.name.startswith("modeling_")]
    for module in modules:
        for name, found in vars(importlib.import_module(f"{package.__name__}.{module}")).items():
            own = isinstance(found, type) and issubclass(found, PreTrainedModel)
            own = own and getattr(found, "config_class", None) is config_class
            if not own or name in known or not hasattr(transformers, name):
                continue
            model: PreTrainedModel | None = None
            with contextlib.suppress(Exception), torch.device("meta"):  # a class that only others build
                model = found(tiny_config(model_type, "feature-extraction"))
            if model is not None:
                yield model


def lacks_what_all_have(model: PreTrainedModel) -> bool:
    """Return whether a class outside the table lacks a tensor that all classes in it have, or has it in another shape."""
    raw = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = model_tensors(model_config_of(raw, Path()), shapes)
    said = found.shapes.items() if found else ()
    others = [
        n
        for n, s in said
        if len(s) != len(shapes[n]) or any(a not in (None, b) for a, b in zip(s, shapes[n], strict=True))
    ]
    return bool(others or (found and found.missing))


def apart(model_type: str, known: Collection[str]) -> list[str]:
    """Return the classes outside the table that are not built like those in it: a decoder or an encoder alone."""
    return sorted(type(model).__name__ for model in other_classes(model_type, known) if lacks_what_all_have(model))


def source_of(class_name: str) -> tuple[str, ...]:
    """Return the lines of the modules of a class and its config."""
    model_class = getattr(transformers, class_name)
    sources = [inspect.getsource(sys.modules[each.__module__]) for each in (model_class, model_class.config_class)]
    return tuple("\n".join(sources).splitlines())


def words_of(name: str, lines: tuple[str, ...]) -> list[str]:
    """Return the words that stand in one line with a field: what it may say."""
    beside = [line for line in lines if re.search(rf"\b{name}\b", line)]
    found = re.findall(r"[\"']([a-z][a-z0-9_\-]{1,24})[\"']", "\n".join(beside))
    return list(dict.fromkeys(word for word in found if word != name))[:8]


def overrides(config: PretrainedConfig, lines: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield changes of one field each, in its own words, and of all biases together, which some types have so alone."""
    yield {name: not value for name, value in fields_of(config) if isinstance(value, bool) and "bias" in name}
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield from ({name: inner} for inner in overrides(value, lines))
            continue
        yield from ({name: other} for other in others(name, value, lines))


def fields_of(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(type(config)):
        if field.name not in _COMMON and not field.name.endswith(("_token_id", "_dropout", "_range", "_eps")):
            yield field.name, vars(config).get(field.name)  # which asks no config of single layers


def others(name: str, value: object, lines: tuple[str, ...]) -> Iterator[Any]:
    """Yield other values of a field."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from dict.fromkeys((value * 2, value * 4, 0))  # powers of two, so that heads divide sizes
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        yield from ([kind] * len(value) for kind in (*_LAYER_TYPES, *set(value)))
        yield value[::-1]
    elif isinstance(value, str | None) and "act" not in name:
        yield from words_of(name, lines)
        if value is None:
            yield from (True, 8)


def longer(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of a number of layers with the lists that have an entry per layer."""
    lists = {n: v for n, v in fields_of(config) if isinstance(v, list)}
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield from ({name: inner} for inner in longer(value))
        elif isinstance(value, int) and "layer" in name and not isinstance(value, bool):
            same = {n: v * 2 for n, v in lists.items() if len(v) == value or n == "attention_types"}
            yield {name: value * 2, **same}


def merged(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for name, value in two.items():
        both[name] = (
            merged(both[name], value) if isinstance(value, dict) and isinstance(both.get(name), dict) else value
        )
    return both


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


def changed(change: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if pinned.get(name) != value}


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
    return {n: v for n, v in fields_of(config) if declared.get(n, 0) is None and _whole(v)}


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


# ---- what the models have in common


def stacks_of(models: Sequence[Built]) -> dict[str, str | None]:
    """Return the paths of lists of layers, with the field that is their length."""
    lengths: dict[str, list[tuple[Fields, int]]] = defaultdict(list)
    for model in models:
        here: dict[str, set[int]] = defaultdict(set)
        for name in model.shapes:
            for match in _NUMBER.finditer(name):
                here[name[: match.start() - 1]].add(int(match[0]))
        for stack, numbers in here.items():
            if numbers == set(range(len(numbers))):
                lengths[stack].append((model.fields, len(numbers)))
    found: dict[str, str | None] = {}
    for stack, seen in sorted(lengths.items(), key=lambda item: len(item[0])):
        if any(stack.startswith(f"{outer}.") for outer in found):
            continue
        if len({count for _, count in seen}) > 1:
            expression = fit(seen)
            found[stack] = expression if isinstance(expression, str) else None
    return found


def template(name: str, stacks: Stacks) -> tuple[str, int | None]:
    for match in _NUMBER.finditer(name):
        if name[: match.start() - 1] in stacks:
            return f"{name[: match.start()]}*{name[match.end() :]}", int(match[0])
    return name, None


def described(models: Sequence[Built]) -> dict[str, Any]:
    """Return the entry of one model type."""
    stacks = stacks_of(models)
    tensors = shapes_of(models, stacks)
    by_class: dict[str, list[Built]] = defaultdict(list)
    for model in models:
        by_class[model.class_name].append(model)
    present = {name: presence(each, stacks) for name, each in by_class.items()}
    common = set.intersection(*(set(always) for always, _, _ in present.values()))
    together = set.intersection(*(set(groups) for _, groups, _ in present.values()))
    sure = set().union(*(always for always, _, _ in present.values()))
    for path in tensors.keys() - sure:  # a constant there may be a field's size that no model of such tensors changed
        tensors[path] = [None if isinstance(each, int) and each > 1 else each for each in tensors[path] or ()] or None
    used = {field for dim in (*tensors.values(), stacks.values()) for each in dim or () for field in fields_in(each)}
    return {
        "model_type": models[0].fields["model_type"],
        "stacks": stacks,
        "tensors": tensors,
        "always": sorted(common),
        "groups": sorted(map(list, together)),
        "alike": sorted(set(alike(models, stacks)) - common),
        "aliases": aliases_of(models[0].class_name),
        "undeclared": undeclared(models[0].class_name),
        "tie_word_embeddings": models[0].fields.get("tie_word_embeddings"),
        "classes": {
            name: class_entry(by_class[name], stacks, found, common, together) for name, found in present.items()
        },
        "follows": follows(models, used, tensors, stacks),
    }


def shapes_of(models: Sequence[Built], stacks: Stacks) -> dict[str, Dims | None]:
    """Return the shape of each tensor as expressions, None where layers, or models, differ in it."""
    dims: Samples = defaultdict(lambda: defaultdict(list))
    odd: set[str] = set()
    for model in models:
        sizes: dict[str, Shape] = {}
        for name, shape in model.shapes.items():
            path, _ = template(name, stacks)
            if sizes.setdefault(path, shape) != shape:
                odd.add(path)
        for path, shape in sizes.items():
            for at, size in enumerate((len(shape), *shape)):
                dims[path][at].append((model.fields, size))
    tensors: dict[str, Dims | None] = {}
    for path, of in sorted(dims.items()):
        ranks = {rank for _, rank in of[0]}
        one = path not in odd and len(ranks) == 1
        tensors[path] = [fit(of[at]) for at in range(1, ranks.pop() + 1)] if one else None
    moved = {field for dim in tensors.values() for each in dim or () for field in fields_in(each)}
    for path, dim in tensors.items():
        still = {f for f in moved if len({fields.get(f) for fields, _ in dims[path][0]}) < 2}
        if dim and still:  # not enough of such models to tell a constant from a field's size
            tensors[path] = [None if isinstance(each, int) or len(still) > 1 else each for each in dim]
    for path in [path for path in tensors if path.endswith(".bias")]:
        tensors[path] = of_weight(path, tensors, dims)
    return tensors


def class_entry(
    models: Sequence[Built],
    stacks: Stacks,
    present: tuple[list[str], list[tuple[str, ...]], set[str]],
    common: set[str],
    together: set[tuple[str, ...]],
) -> dict[str, Any]:
    """Return what one class has beside what all classes of its type have."""
    always, groups, names = present
    ties: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for model in models:
        found = {template(a, stacks)[0]: template(b, stacks)[0] for a, b in model.ties.items()}
        ties[model.fields.get("tie_word_embeddings") is not False].update(found)
    config_class = getattr(transformers, models[0].class_name).config_class
    stays_tied = config_class(tie_word_embeddings=False).tie_word_embeddings
    return {
        "prefix": models[0].prefix,
        "always": sorted(set(always) - common),
        "groups": sorted(map(list, set(groups) - together)),
        "others": sorted(names - set(always) - {each for group in groups for each in group}),
        "tied": dict(sorted((ties[True] | ties[False]).items())),
        "tied_anyway": dict(sorted((ties[True] if stays_tied else ties[False]).items())),
        "ignored": list(models[0].unexpected),
    }


def of_weight(path: str, tensors: Mapping[str, Dims | None], dims: Samples) -> Dims | None:
    """Return the shape of a bias: that of the side of its weight that is as long in every model, else its own."""
    weight = f"{path.removesuffix('.bias')}.weight"
    own = tensors[path]
    if own is None or len(own) != 1 or not (sides := tensors.get(weight)):
        return own
    for at, expression in enumerate(sides, start=1):
        sizes = {json.dumps(fields, default=str): size for fields, size in dims[weight][at]}
        if all(sizes.get(json.dumps(fields, default=str)) == size for fields, size in dims[path][1]):
            return [expression]
    return [None]


def fields_in(expression: str | int | None) -> list[str]:
    return re.findall(r"[A-Za-z_][\w.]*", str(expression or ""))


def alike(models: Sequence[Built], stacks: Stacks) -> set[str]:
    """Return the names that either all layers of a stack have or none, in every model."""
    seen: set[str] = set()
    uneven: set[str] = set()
    for model in models:
        layers: dict[str, set[int]] = defaultdict(set)
        for name in model.shapes:
            path, layer = template(name, stacks)
            if layer is not None:
                layers[path.partition(".*.")[0]].add(layer)
                if name not in model.optional:
                    layers[path].add(layer)
        paths = {path for path in layers if ".*." in path}
        uneven |= {path for path in paths if layers[path] != layers[path.partition(".*.")[0]]}
        seen |= paths
    return seen - uneven


def aliases_of(class_name: str) -> dict[str, str]:
    """Return the fields that a config may call otherwise."""
    config_class = getattr(transformers, class_name).config_class
    return {own: other for other, own in sorted(config_class.attribute_map.items())}


def undeclared(class_name: str) -> list[str]:
    """Return what a class reads from its config though the config has no such field: old files may have it."""
    declared = {field.name for field in dataclasses.fields(getattr(transformers, class_name).config_class)}
    read = re.findall(r"getattr\(\s*(?:self\.)?config,\s*\"(\w+)\"", "\n".join(source_of(class_name)))
    return sorted({name for name in read if name not in declared and not name.startswith("_")})


def presence(models: Sequence[Built], stacks: Stacks) -> tuple[list[str], list[tuple[str, ...]], set[str]]:
    """Return the names that a class always has, the groups of names that it has together, and all names."""
    seen: dict[str, set[tuple[int, int | None]]] = defaultdict(set)
    places: dict[str | None, set[tuple[int, int | None]]] = defaultdict(set)
    not_needed: set[str] = set()
    layers_of: dict[str, str | None] = {}
    for number, model in enumerate(models):
        places[None].add((number, None))
        for name in model.shapes:
            path, layer = template(name, stacks)
            stack = path.partition(".*.")[0] if layer is not None else None
            layers_of[path] = stack
            seen[path].add((number, layer))
            places[stack].add((number, layer))
            if name in model.optional:
                not_needed.add(path)
    needed = {path: where for path, where in seen.items() if path not in not_needed}
    always = [path for path, where in needed.items() if where == places[layers_of[path]]]
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for path, where in needed.items():
        if path not in always:
            groups[layers_of[path], frozenset(where)].append(path)
    together = [tuple(sorted(names)) for names in groups.values() if len(names) > 1]
    return always, together, set(seen)


def follows(
    models: Sequence[Built], used: set[str], tensors: Mapping[str, Dims | None], stacks: Stacks
) -> dict[str, str]:
    """Return what the fields that may be left out follow: other fields. Numbers are not given: files have old names."""
    config_class = getattr(transformers, models[0].class_name).config_class
    declared = {field.name: field.default for field in dataclasses.fields(config_class)}
    found: dict[str, str] = {}
    for name in sorted(used):
        if declared.get(name, 0) is None:
            tensor = next(((t, d.index(name)) for t, d in tensors.items() if d and name in d), None)
            loose = [(without(m, name), size) for m in models if (size := followed(m, name, tensor, stacks))]
            expression = fit(loose) if len(loose) > 3 else None
            if isinstance(expression, str):
                found[name] = expression
    return found


def without(model: Built, name: str) -> Fields:
    return {other: value for other, value in model.fields.items() if other != name and other not in model.followed}


def followed(model: Built, name: str, tensor: tuple[str, int] | None, stacks: Stacks) -> int | None:
    """Return the size that a field had which the config did not give."""
    if name in model.followed:
        return int(model.fields[name])
    if tensor is None or model.fields.get(name) is not None:
        return None
    sizes = (shape[tensor[1]] for path, shape in model.shapes.items() if template(path, stacks)[0] == tensor[0])
    return next(sizes, None)


# ---- arithmetic of dimensions


def fit(samples: Sequence[tuple[Fields, int]]) -> str | int | None:
    """Return the simplest expression over the fields that gives the size in every sample, None where there is none."""
    values = {value for _, value in samples}
    if len(values) == 1:
        return next(iter(values))
    names = moving(samples)
    if not names:
        return None
    known = [(f, v) for f, v in samples if all(_whole(f.get(n)) and f[n] for n in names)]  # 0 may mean "by default"
    if len(known) < 3 or len(known) < len(samples) * 0.5:
        return None
    terms = monomials(names)
    tables = {term: [evaluated(term, f) for f, _ in known] for term in terms}
    tables = {term: column for term, column in tables.items() if all(each is not None for each in column)}
    wanted = [Fraction(value) for _, value in known]
    for count in (1, 2, 3):
        if count == 3 and len(tables) > 40:
            break
        for chosen in itertools.combinations([*tables, ()] if count > 1 else tables, count):
            factors = solved([tables[t] if t else [Fraction(1)] * len(known) for t in chosen], wanted)
            if factors is not None:
                return written(chosen, factors)
    return None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def moving(samples: Sequence[tuple[Fields, int]]) -> list[str]:
    """Return the integer fields whose change alone changes the size."""
    first_fields, first = samples[0]
    found: dict[str, None] = {}
    for fields, value in samples[1:]:
        if value == first:
            continue
        differing = [n for n in fields if n in first_fields and fields[n] != first_fields[n]]
        numbers = [n for n in differing if _whole(fields[n]) and _whole(first_fields.get(n))]
        if len(numbers) == 1 == len(differing):
            found[numbers[0]] = None
    if not found:  # a field that another one follows
        for fields, value in samples[1:]:
            if value != first:
                found.update(
                    dict.fromkeys(
                        n for n in fields if fields[n] == value and first_fields.get(n) == first and _whole(fields[n])
                    )
                )
    return list(found)[:5]


Term = tuple[tuple[str, int], ...]


def monomials(names: Sequence[str]) -> list[Term]:
    found: list[Term] = []
    for size in range(1, min(3, len(names)) + 1):
        for chosen in itertools.combinations(names, size):
            signs = itertools.product((1, -1), repeat=size)
            found.extend(tuple(zip(chosen, powers, strict=True)) for powers in signs if 1 in powers)
    return sorted(found, key=lambda term: (len(term), sum(power < 0 for _, power in term)))


def evaluated(term: Term, fields: Fields) -> Fraction | None:
    if any(power < 0 and not fields[name] for name, power in term):
        return None
    return prod((Fraction(fields[name]) ** power for name, power in term), start=Fraction(1))


def solved(columns: Sequence[Sequence[Any]], wanted: Sequence[Fraction]) -> list[Fraction] | None:
    """Return the factors of the columns whose sum is `wanted` in every row, None where there are none."""
    rows = [[*(column[at] for column in columns), wanted[at]] for at in range(len(wanted))]
    size = len(columns)
    reduced: list[list[Fraction]] = []
    for row in rows:
        rest = row
        for pivot, done in enumerate(reduced):
            rest = [a - rest[pivot] * b for a, b in zip(rest, done, strict=True)]
        if len(reduced) < size and rest[len(reduced)]:
            lead = rest[len(reduced)]
            reduced.append([a / lead for a in rest])
        elif any(rest) and (len(reduced) == size or not any(rest[:size])):
            return None
    if len(reduced) < size:
        return None
    factors = [Fraction(0)] * size
    for at in reversed(range(size)):
        factors[at] = reduced[at][size] - sum((reduced[at][n] * factors[n] for n in range(at + 1, size)), Fraction(0))
    if any(not f or abs(f.numerator) > 64 or f.denominator > 8 for f in factors):
        return None
    checked = all(sum((f * row[n] for n, f in enumerate(factors)), Fraction(0)) == row[size] for row in rows)
    return factors if checked else None


def written(terms: Sequence[Term], factors: Sequence[Fraction]) -> str:
    return "+".join(_term(term, factor) for term, factor in zip(terms, factors, strict=True))


def _term(term: Term, factor: Fraction) -> str:
    above = [name for name, power in term if power > 0]
    below = [name for name, power in term if power < 0]
    if factor.numerator != 1 or not above:
        above.insert(0, str(factor.numerator))
    if factor.denominator != 1:
        below.append(str(factor.denominator))
    return "/".join(["*".join(above), *below])


def row(model_type: str) -> str:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        models = sampled(model_type)
        return json.dumps(described(models), separators=(",", ":")) if models else ""
    except Exception as error:  # noqa: BLE001 - a type that cannot be described has no row
        print(model_type, "is left out:", repr(error)[:300], file=sys.stderr)
        return ""


def main(asked: Sequence[str]) -> None:
    kept = (
        {} if not TABLE.exists() else {json.loads(line)["model_type"]: line for line in TABLE.read_text().splitlines()}
    )
    with ProcessPoolExecutor(2) as pool:
        wanted = [name for name in asked or ARCHITECTURES if name not in _LEFT_OUT]
        for model_type, line in zip(wanted, pool.map(row, wanted), strict=True):
            print(model_type, len(line), file=sys.stderr, flush=True)
            if line:
                kept[model_type] = line
            TABLE.write_text("".join(f"{kept[name]}\n" for name in sorted(kept)))
    for entry in [json.loads(kept[name]) for name in wanted if name in kept]:
        names = apart(entry["model_type"], entry["classes"])
        kept[entry["model_type"]] = json.dumps(entry | ({"apart": names} if names else {}), separators=(",", ":"))
    TABLE.write_text("".join(f"{kept[name]}\n" for name in sorted(kept)))


if __name__ == "__main__":
    main(sys.argv[1:])
