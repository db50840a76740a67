"""Replaying `from_pretrained` and `save_pretrained` on a checkpoint's names (transformers 5, `core_model_loading.py`).

The functions used are transformers' own and internal: `tests/contract/test_transformers_internals.py` guards what is
relied on. What is replayed are the loops of `convert_and_load_state_dict_in_model` and `revert_weight_conversion`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from transformers import PreTrainedModel

from lora_tool.core.errors import MissingDependency
from lora_tool.models.mapping.model import RowMapping, RowSlice, ShapeOnDisk, row_count
from lora_tool.models.mapping.order import in_natural_order
from lora_tool.models.mapping.rows import numbered, pieces_of

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        Transpose,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        rename_source_key,
    )
except ImportError as error:
    raise MissingDependency("transformers>=5.23", extra="merge") from error

_Shapes = Mapping[str, ShapeOnDisk]
Rename = Callable[[str], tuple[str, str | None]]
"""A name → its new name, and the pattern of the converter that made it."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")
_AROUND_NUMBERS = re.compile(r"(?<=\.)(\d+)(?=\.|\Z)")
_A_NUMBER = re.compile(r"(?<![\\\w])[0-9]+(?!\w)")
_FIRST_PLACE = 7_000_001


class Conversion:
    """A model's name rules; loading with them, then saving, as transformers does one after the other."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._rules: list[Any] = get_model_conversion_mapping(model)
        # looked up once per tensor, and its tensors are never read
        self._memory: dict[str, torch.Tensor] = dict(model.state_dict())
        self._renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]
        self._places: dict[str, tuple[str, str | None]] = {}
        self._with_prefix: dict[str, str] = {}
        self._plain = _are_plain(self._rules)
        self._by_rules = by_template(
            lambda name: rename_source_key(name, self._renamings, self._converters), self._rules
        )

    def place(self, disk_name: str) -> tuple[str, str | None]:
        """Return the parameter that a tensor on disk belongs to, and the pattern of the converter that makes it."""
        if disk_name not in self._places:  # every name is asked for several times
            self._places[disk_name] = self._place(disk_name)
        return self._places[disk_name]

    def _place(self, disk_name: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        ruled, pattern = self._by_rules(disk_name)
        if ruled not in self._with_prefix:  # all experts of a layer have one name after the rules
            # the last thing that transformers does with a name: the base model's prefix, where that makes it a parameter
            self._with_prefix[ruled] = rename_source_key(ruled, [], [], prefix, self._memory)[0]
        found: tuple[str, str | None] = (self._with_prefix[ruled], pattern)
        if found[0] not in self._memory and disk_name in self._memory:
            found = rename_source_key(disk_name, [], [], base_model_prefix=prefix, meta_state_dict=self._memory)
        return found

    def load(self, disk: _Shapes) -> tuple[dict[str, RowMapping], tuple[str, ...]]:
        """Return how every parameter is made of tensors on disk, and the tensors that belong to none."""
        by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        groups: dict[str, _Group] = {}
        unexpected = []
        for name in in_natural_order(disk):
            target, pattern = self.place(name)
            if target not in self._memory:
                unexpected.append(name)
            elif pattern is None:
                groups.setdefault(target, _Group(None, target)).add(name, name)
            else:
                groups.setdefault(target, _Group(by_pattern[pattern], target)).add(pattern, name)
        return self._made(groups.values(), disk, lambda name: name), tuple(unexpected)

    def save(self, memory: _Shapes) -> dict[str, RowMapping]:
        """Return how every tensor of the saved folder is made of parameters. Loading decided which rules are used."""
        used = [rule.reverse_transform() for rule in reversed(self._rules) if rule.was_used()]
        renamings = [rule for rule in used if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in used if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        rename = by_template(lambda name: (apply_renamings(name, renamings), None), used)
        groups: dict[str, _Group] = {}
        for name in in_natural_order(memory):
            target, pattern = apply_converters(name, converters)
            if pattern is None:
                target = apply_renamings(name, renamings)
                groups.setdefault(target, _Group(None, target)).add(name, name)
            else:
                groups.setdefault(target, _Group(by_pattern[pattern], target)).add(pattern, name)
        return self._made(groups.values(), memory, lambda name: rename(name)[0])

    def _made(self, groups: Iterable[_Group], shapes: _Shapes, rename: Callable[[str], str]) -> dict[str, RowMapping]:
        """Return what the groups' tensors become, under the names that `rename` gives them."""
        made: dict[str, RowMapping] = {}
        known: dict[Any, _Form] = {}
        for group in groups:
            if group.rule is None or self._keeps_its_shape(group, shapes):
                name = group.names[0]
                rows = row_count(shapes[name])
                pieces = (RowSlice(name=name, start=0, rows=rows),) if rows else ()
                target = group.target if group.rule is None else rename(group.target)
                made[target] = RowMapping(shape=tuple(shapes[name]), pieces=pieces, sources=(name,))
            else:
                made |= {rename(name): one for name, one in self._by_form(group, shapes, known).items()}
        return made

    def _keeps_its_shape(self, group: _Group, shapes: _Shapes) -> bool:
        """Return whether the rule transposes what is not as in memory, and this is."""
        operations = list(group.rule.operations) if group.rule else []
        lone = operations[0] if len(operations) == 1 == len(group.names) else None
        if not isinstance(lone, Transpose) or not lone.check_dims:
            return False
        held = self._memory.get(group.target)
        return held is not None and tuple(held.shape) == tuple(shapes[group.names[0]])

    def _by_form(self, group: _Group, shapes: _Shapes, known: dict[Any, _Form]) -> dict[str, RowMapping]:
        """Return what the group's tensors become; once for all layers that differ in their numbers alone.

        Not where a rule looks at a number: converting gets a layer's name, and may look at the layer's other
        parameters.
        """
        numbers = tuple(_NUMBER.finditer(group.target)) if self._plain else ()
        if not numbers:
            return self._converted(group, shapes)
        layer, rest = group.target[: numbers[-1].end()], group.target[numbers[-1].end() :]
        siblings = self._siblings.get(group.target[: numbers[0].end()], ())
        patterns = tuple(pattern for pattern, _ in group.members)
        held = tuple(shapes[name] for name in group.names)
        form = (id(group.rule), _NUMBER.sub("*", layer), rest, patterns, siblings, held)
        if form not in known:
            found = self._converted(group, shapes)
            if not all(name.startswith(f"{layer}.") for name in found):
                return found
            known[form] = _Form.of(found, layer, group.names)
        return known[form].named(layer, group.names)

    @cached_property
    def _siblings(self) -> dict[str, tuple[tuple[str, ShapeOnDisk], ...]]:
        """Path of a layer → names and shapes of its parameters, without the path."""
        under: dict[str, list[tuple[str, ShapeOnDisk]]] = {}
        for name, tensor in self._memory.items():
            number = _NUMBER.search(name)
            if number is not None:
                under.setdefault(name[: number.end()], []).append((name[number.end() :], tuple(tensor.shape)))
        return {path: tuple(names) for path, names in under.items()}

    def _converted(self, group: _Group, shapes: _Shapes) -> dict[str, RowMapping]:
        """Return what the rule makes of the group's tensors, under the names that it gives them."""
        held = {name: shapes[name] for name in group.names}
        rule = deepcopy(group.rule)
        if rule is None:
            raise AssertionError("a mere renaming converts nothing")
        turning = any(isinstance(operation, Transpose) for operation in rule.operations)
        tables = _real(held) if turning else numbered(held)
        for pattern, name in group.members:
            rule.add_tensor(group.target, name, pattern, tables[name])
        results = rule.convert(group.target, model=self._model, config=self._model.config)
        made = {}
        for name, table in results.items():
            tensor = table[0] if isinstance(table, list) else table
            if turning:
                shape = tuple(tensor.shape)
                transposed = _swaps_the_last(rule, shape) and len(group.names) == 1
                made[name] = RowMapping(shape=shape, pieces=None, sources=group.names, transposed=transposed)
                continue
            pieces = pieces_of(tensor, held)
            widths = {shapes[piece.name][-1:] for piece in pieces}
            vector = tensor.dim() <= 1
            shape = tuple(tensor.shape) if vector else (*tensor.shape[:-1], *next(iter(widths), (1,)))
            sound = vector or (len(widths) == 1 and tensor.shape[-1] == 1)
            made[name] = RowMapping(shape=shape, pieces=pieces if sound else None, sources=group.names)
        return made


def by_template(rename: Rename, rules: Sequence[Any]) -> Rename:
    """Return `rename`, called once for all names that differ in their numbers alone, where no rule looks at a number.

    A model of a thousand experts has a hundred thousand names and some dozens of forms.
    """
    if not _are_plain(rules):
        return rename
    known: dict[tuple[str, ...], tuple[list[str], list[int], str | None]] = {}

    def renamed(name: str) -> tuple[str, str | None]:
        parts = _AROUND_NUMBERS.split(name)  # texts, and the numbers between them
        texts, numbers = tuple(parts[::2]), parts[1::2]
        if texts not in known:
            parts[1::2] = map(str, range(_FIRST_PLACE, _FIRST_PLACE + len(numbers)))
            made, pattern = rename("".join(parts))
            around = _AROUND_NUMBERS.split(made)
            known[texts] = around, [int(place) - _FIRST_PLACE for place in around[1::2]], pattern
        around, places, pattern = known[texts]
        parts = around.copy()
        parts[1::2] = [numbers[place] for place in places]
        return "".join(parts), pattern

    return renamed


def _swaps_the_last(rule: WeightConverter, shape: ShapeOnDisk) -> bool:
    """Return whether the rule does nothing but swap the last two dimensions."""
    operations = list(rule.operations)
    lone = operations[0] if len(operations) == 1 else None
    return isinstance(lone, Transpose) and {lone.dim0, lone.dim1} == {len(shape) - 2, len(shape) - 1}


def _are_plain(rules: Sequence[Any]) -> bool:
    """Whether the rules treat names alike that differ in their numbers alone."""
    patterns = (pattern for rule in rules for pattern in (*rule.source_patterns, *rule.target_patterns))
    return all(type(rule) in (WeightRenaming, PrefixChange, WeightConverter) for rule in rules) and not any(
        _A_NUMBER.search(pattern) for pattern in patterns
    )


class _Form(Struct, frozen=True):
    """What a rule makes of one layer's tensors, without the layer's path, the tensors by their place in the group."""

    made: tuple[tuple[str, RowMapping, tuple[tuple[int, int, int], ...] | None], ...]

    @classmethod
    def of(cls, made: Mapping[str, RowMapping], layer: str, names: Sequence[str]) -> _Form:
        place = {name: at for at, name in enumerate(names)}
        return cls(
            tuple(
                (
                    name.removeprefix(layer),
                    replace(one, pieces=None),
                    None if one.pieces is None else tuple((place[p.name], p.start, p.rows) for p in one.pieces),
                )
                for name, one in made.items()
            )
        )

    def named(self, layer: str, names: tuple[str, ...]) -> dict[str, RowMapping]:
        """Return the same of the layer at the path `layer`, made of the tensors `names`."""
        return {
            layer + rest: RowMapping(
                shape=one.shape,
                pieces=None
                if pieces is None
                else tuple(RowSlice(name=names[at], start=start, rows=rows) for at, start, rows in pieces),
                sources=names,
                transposed=one.transposed,
            )
            for rest, one, pieces in self.made
        }


class _Group:
    """Tensors that one rule turns into others; no rule for a mere renaming."""

    def __init__(self, rule: WeightConverter | None, target: str) -> None:
        self.rule = rule
        self.target = target
        self.members: list[tuple[str, str]] = []

    def add(self, pattern: str, name: str) -> None:
        self.members.append((pattern, name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, once all are added."""
        return tuple(name for _, name in self.members)


def _real(shapes: _Shapes) -> dict[str, torch.Tensor]:
    """Return tensors without values, of the whole shapes: transposing changes the last dimension."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
