"""What the models of a type have in common: the names, which of them come together, and their shapes by fields."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import transformers
from transformers import PretrainedConfig

from lora_tool.models.sizes import kinds_of
from tests.tensor_tables.changes import fields_of, source_of
from tests.tensor_tables.expressions import fit
from tests.tensor_tables.models import Built, Fields, Shape, flat
from tests.tensor_tables.sampling import Sampled

_DIGITS = re.compile(r"\d+")
_POSITIVE = re.compile(r"(?!0$)[\d.][\d.e+-]*")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Dims = list[str | int | None]
Samples = dict[str, dict[int, list[tuple[Fields, int]]]]
Stacks = Mapping[str, str | None]
"""The path of each list of layers, and the field that is its length."""


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


def described(found: Sampled) -> dict[str, Any]:
    """Return the entry of one model type."""
    models = found.models
    stacks = stacks_of(models)
    tensors = shapes_of(models, stacks)
    by_class: dict[str, list[Built]] = defaultdict(list)
    for model in models:
        by_class[model.class_name].append(model)
    present = {name: presence(each, stacks) for name, each in by_class.items()}
    counted = {path: counts(path, by_class, stacks) for path, _ in paths_of(found.config)}
    loose = set().union(*counted.values())  # of things that are counted, none tells of another
    present = {
        name: (always, [group for group in groups if loose.isdisjoint(group)], names)
        for name, (always, groups, names) in present.items()
    }
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
        "classes": {name: class_entry(by_class[name], stacks, its, common, together) for name, its in present.items()},
        "follows": follows(models, used, tensors, stacks),
        **coverage(found, by_class, {path for path, names in counted.items() if names & sure}),
    }


def counts(path: str, by_class: Mapping[str, Sequence[Built]], stacks: Stacks) -> set[str]:
    """Return the names of the things whose number the field is, and that are no layers of a stack; none of another."""
    found: set[str] = set()
    for models in by_class.values():
        alike: dict[Any, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for model in models:
            value = model.fields.get(path)
            if type(value) is int and value > 0:
                others = frozenset(item for item in model.fields.items() if item[0] not in {path, *model.followed})
                alike[others][value].update(template(name, stacks)[0] for name in model.shapes)
        for names in alike.values():
            every = [names[value] for value in sorted(names)]
            for fewer, more in itertools.pairwise(every):
                forms = {_DIGITS.sub("#", name) for name in fewer}
                forms &= {_DIGITS.sub("#", name) for name in more - fewer}
                found |= {name for name in more if _DIGITS.sub("#", name) in forms}
    return found


def coverage(found: Sampled, by_class: Mapping[str, Sequence[Built]], exact: Collection[str]) -> dict[str, Any]:
    """Return for which values of the config's fields the entry is known to be right, the small config's first; of others
    it says nothing.

    Fields whose change changed nothing are not among them.
    """
    defaults = defaults_of(found.config)
    kinds: dict[str, list[str]] = defaultdict(list)
    absent = []
    for path, value in paths_of(found.config):
        by = [frozenset().union(*(one.kinds.get(path, ()) for one in its)) for its in by_class.values()]
        seen, varied = frozenset.intersection(*by), len(frozenset.union(*by)) > 1
        if not seen or (path not in found.deciding and (varied or seen == {"{}"})):
            continue
        known = seen if path in exact else in_words(seen)
        usual = in_words(kinds_of(value), known)
        kinds[" ".join([*sorted(usual & known), *sorted(known - usual)])].append(path)
        if path in defaults and not in_words(kinds_of(defaults[path]), known) <= known:
            absent.append(path)
    return {"sampled": {known: " ".join(paths) for known, paths in sorted(kinds.items())}, "absent": absent}


def in_words(seen: Iterable[str], known: Collection[str] = ()) -> set[str]:
    """Return the kinds of values as the table says them: two numbers stand for all."""
    numbers = {each for each in seen if _POSITIVE.fullmatch(each)}
    return {*seen} - numbers | ({"+"} if len(numbers) > 1 or (numbers and "+" in known) else numbers)


def paths_of(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a config and of those inside it, with their values."""
    for name, value in fields_of(config):
        yield prefix + name, {} if isinstance(value, PretrainedConfig) else value
        if isinstance(value, PretrainedConfig):
            yield f"{prefix}{name}.model_type", value.model_type
            yield from paths_of(value, f"{prefix}{name}.")


def defaults_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return what a field is, by its path, that a config.json leaves out."""
    found: dict[str, Any] = {}
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            found.update({f"{name}.{path}": inner for path, inner in defaults_of(value).items()})
    with contextlib.suppress(Exception):  # a config that must be given more
        found.update(flat(type(config)().to_dict()))
    return found


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
