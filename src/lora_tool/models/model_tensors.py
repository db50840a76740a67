"""Which tensors a class of transformers has, and their shapes, told from its config.json without transformers.

`model_tensors.jsonl` has a line for each model type that is stored as it is in memory. It was made by building every
class of it on the meta device under hundreds of configs (`python -m tests.tensor_tables`): names that are always there,
names that come and go together, and each dimension as a product or sum of the config's fields. What depends on more
than that is unknown there, and the functions here say nothing about it. Nor do they about a config that has a value of
which no such model had one (`sampled`): there `why_unsure` names the field.

In the table ``@`` stands for what a class calls its base model (``model.``, ``transformer.``), and ``*`` for the number
of a layer; a checkpoint of the base model alone has no such beginning.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.core.keys import split_layer
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.sizes import Sizes, beyond_the_table
from lora_tool.models.table import Architecture, architecture_of, is_computed
from lora_tool.models.text_classes import TEXT_CLASSES

TABLE = Path(__file__).with_name("model_tensors.jsonl")
_MOST_LAYERS = 4096
_KNOWN_LISTS = frozenset({"attention_types", "attention_window", "moe_layers", "no_rope_layers", "type_vocab_sizes"})
"""Lists of numbers in configs that the table was made with."""
_LEGACY = {"gamma": "weight", "beta": "bias"}
"""What layer norms of TensorFlow's checkpoints call their parameters; transformers renames them."""


class ModelTensors(Struct, frozen=True, kw_only=True):
    """The tensors of one checkpoint beside those that its class has. Names are those of the checkpoint."""

    class_name: str | None
    """The config's class, None where only what all classes of its type share is known."""
    missing: tuple[str, ...]
    """What the class has and the checkpoint lacks: transformers would initialise it at random."""
    unexpected: tuple[str, ...]
    """What the checkpoint has and no class of its type: transformers would leave it out."""
    of_other_classes: tuple[str, ...]
    """What the checkpoint has and another class of its type has, too."""
    shapes: Mapping[str, tuple[int | None, ...]]
    """The shape that the config gives each of the checkpoint's tensors; None for a dimension that is not known."""
    left_out: tuple[str, ...] = ()
    """Fields of the config that decide these shapes, or how many layers there are, and have no number in it."""
    doubt: str | None = None
    """Why `missing`, `unexpected` and `shapes` may be wrong about this config; None where the table covers it."""

    def accuses(self, held: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether it says that anything is wrong with tensors of these shapes."""
        return bool(self.missing or self.unexpected) or any(
            map(differs, self.shapes.values(), map(held.get, self.shapes))
        )


def differs(wanted: tuple[int | None, ...], shape: tuple[int, ...] | None) -> bool:
    """Return whether a shape contradicts the one that the config gives."""
    return (
        shape is None
        or len(wanted) != len(shape)
        or any(a not in (None, b) for a, b in zip(wanted, shape, strict=True))
    )


def model_tensors(config: ModelConfig, names: Collection[str]) -> ModelTensors | None:
    """Return what the class of `config` has beside the tensors `names` of a checkpoint.

    None where headers cannot tell: `why_unknown` says why.
    """
    row = _row(config.model_type or "")
    if row is None or _why_no_row(config) is not None or why_unsure(config) is not None:
        return None
    known = next(filter(row["classes"].__contains__, config.architectures[:1]), None)
    return _Compared(row, known, config, names).result()


def has_tensors(model_type: str, names: Collection[str]) -> bool:
    """Return whether every class of the model type has these tensors, by their names in the table."""
    row = _row(model_type)
    return row is not None and row["tensors"].keys() >= set(names)


def own_tensors(model_type: str, class_name: str) -> frozenset[str] | None:
    """Return the names of what a class may have beside its base model, a head and an output layer; None if no table
    knows it.
    """
    row = _row(model_type)
    if row is None or class_name not in row["classes"]:
        return None
    own = row["classes"][class_name]
    names = {*row["always"], *own["always"], *own["others"]}.union(*row["groups"], *own["groups"])
    return frozenset(name for name in names if not name.startswith("@"))


def prefixes_of(model_type: str) -> Mapping[str, str]:
    """Return the classes of a model type, each with what those that have a head call their base model.

    That is empty for a class that holds the parts of the base model itself, as T5ForConditionalGeneration does.
    """
    row = _row(model_type)
    return {name: str(entry["prefix"]) for name, entry in row["classes"].items()} if row else {}


@cache
def tied_modules(model_type: str) -> Mapping[str, str]:
    """Return modules whose weight is another's in some class of the model type → that other one.

    Both have the paths of that class, and those of a checkpoint of the base model alone. An output layer is not among
    them.
    """
    row = _row(model_type)
    found: dict[str, str] = {}
    for entry in row["classes"].values() if row else ():
        for one, other in entry["tied"].items():
            for trunk in (f"{entry['prefix']}." if entry["prefix"] else "", ""):
                if one.startswith("@") and one.endswith(".weight") and other.startswith("@"):
                    found[trunk + one[1:].removesuffix(".weight")] = trunk + other[1:].removesuffix(".weight")
    return found


@cache
def base_prefixes() -> frozenset[str]:
    """Return what all classes of the table that have a head call their base models."""
    return frozenset(re.findall(r'"prefix":"(\w+)"', TABLE.read_text(encoding="utf-8")))


def why_unknown(config: ModelConfig) -> str:
    """Return why `model_tensors` cannot tell what the class of `config` has, for a config of which it cannot."""
    return (
        _why_no_row(config)
        or why_unsure(config)
        or "the weights hold less than half of the tensors of its class under their names"
    )


def why_unsure(config: ModelConfig) -> str | None:
    """Return why the table may be wrong about a class that it has: a field of `config` has a value that none of the
    models had that the table was made with. None of a class that it lacks, and where it is right.
    """
    row = _row(config.model_type or "")
    field = None if row is None or _why_no_row(config) else beyond_the_table(row, config.raw)
    return field and f"lora-tool's table of {config.model_type} models does not cover the `{field}` of this config.json"


def _why_no_row(config: ModelConfig) -> str | None:
    if config.custom_code:
        return "the model's class is custom code, so lora-tool does not know its tensors"
    if config.quantization:
        return f"the weights are quantised ({config.quantization}): their names and shapes are not those of the class"
    row = _row(config.model_type or "")
    if row is None:
        return f"lora-tool has no table of the tensors of {config.model_type or 'untyped'} models"
    for name in config.architectures[:1]:
        if name in row.get("apart", ()):  # a decoder alone, whose encoder is not lost
            return f"lora-tool has no table of the tensors of a {name}"
    return (
        "config.json lists layers of several kinds, so lora-tool does not know their tensors"
        if lists_layers(config.raw)
        else None
    )


@cache
def _row(model_type: str) -> Mapping[str, Any] | None:
    with TABLE.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f'{{"model_type":"{model_type}",'):
                row: Mapping[str, Any] = json.loads(line)
                return row
    return None


def lists_layers(config: Mapping[str, Any]) -> bool:
    """Return whether a field of a config lists numbers, which may be layers of another kind."""
    return any(
        isinstance(value, list) and any(isinstance(each, int | list) for each in value)
        for name, value in config.items()
        if name not in _KNOWN_LISTS and not name.endswith(("token_id", "token_ids", "tokens"))
    )


def _any_class(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what may be said of a class that is not in the row: what is tied in one may be tied in another."""
    tied = {name: of for entry in row["classes"].values() for name, of in entry["tied"].items()}
    return {"always": [], "groups": [], "others": [], "tied": tied, "tied_anyway": tied, "ignored": []}


class _Compared:
    """The names of a checkpoint as the table has them, and what of its class they are."""

    def __init__(
        self, row: Mapping[str, Any], class_name: str | None, config: ModelConfig, names: Collection[str]
    ) -> None:
        self._row = row
        self._class = class_name
        self._own = _any_class(row) if class_name is None else row["classes"][class_name]
        self._sizes = Sizes(row, config)
        self._lengths = {stack: self._sizes.value(length) for stack, length in row["stacks"].items()}
        self._tied = self._own["tied"] if self._sizes.tied is not False else self._own["tied_anyway"]
        self._groups = [*row["groups"], *self._own["groups"]]
        prefixes = {entry["prefix"] for entry in row["classes"].values()} if class_name is None else ()
        tried = [f"{prefix}." for prefix in (prefixes or (self._own["prefix"],))]
        counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in tried}
        self._prefix = max(counts, key=counts.__getitem__)
        """What the checkpoint puts before the base model's names."""
        self._bare = not counts[self._prefix]
        self._held: dict[str, str] = {}
        """Name in the table's words → name in the checkpoint."""
        self._placed: dict[str, tuple[str, int | None]] = {}
        """The same names → path in the table and number of the layer."""
        self._layers: dict[str, set[int]] = {stack: set() for stack in row["stacks"]}
        for on_disk in names:
            name = self._in_table(on_disk)
            path, layer = self._placed[name] = self._template(name)
            self._held[name] = on_disk
            if layer is not None:
                self._layers[path.partition(".*.")[0]].add(layer)

    def _in_table(self, name: str) -> str:
        rest, _, leaf = name.rpartition(".")
        if leaf in _LEGACY and rest.endswith("LayerNorm"):
            name = f"{rest}.{_LEGACY[leaf]}"
        if name.startswith(self._prefix):
            return f"@{name.removeprefix(self._prefix)}"
        return f"@{name}" if self._bare and self._template(name)[0] not in self._row["tensors"] else name

    def _template(self, name: str) -> tuple[str, int | None]:
        for stack in self._lengths:
            if name.startswith(stack) and name[len(stack) : len(stack) + 1] == ".":
                number, dot, rest = name[len(stack) + 1 :].partition(".")
                if dot and number.isdecimal() and len(number) < 6:  # noqa: PLR2004 - no model has so many layers
                    return f"{stack}.*.{rest}", int(number)
        return name, None

    def result(self) -> ModelTensors | None:
        """Return the comparison; None where the checkpoint has less than half of what its model always has."""
        without = {stack for stack, length in self._lengths.items() if not length and not self._layers[stack]}
        always = [path for path in self._row["always"] if path.partition(".*.")[0] not in without]
        paths = {path for path, _ in self._placed.values()}
        if not paths or 2 * len(paths.intersection(always)) < len(always):
            return None
        unexpected, of_others = self._strange() if self._class else ((), ())
        shapes, left_out = self._shapes()
        doubtful = self._sizes.doubtful
        return ModelTensors(
            class_name=self._class,
            missing=self._missing(),
            unexpected=() if doubtful else tuple(unexpected),
            of_other_classes=tuple(of_others),
            shapes={} if doubtful else shapes,
            left_out=() if doubtful else tuple(left_out),
            doubt=self._sizes.untried,
        )

    def _strange(self) -> tuple[list[str], list[str]]:
        """Return the names that no class of the type has, and those that another class of it has."""
        tensors = self._row["tensors"]
        mine = {*self._row["always"], *self._own["always"], *self._own["others"]}.union(*self._groups)
        lists = {rest for layer, rest in map(split_layer, tensors) if layer is not None}
        unexpected: list[str] = []
        of_others: list[str] = []
        for name, on_disk in self._held.items():
            path, layer = self._placed[name]
            length = None if layer is None else self._lengths[path.partition(".*.")[0]]
            is_beyond = layer is not None and length is not None and layer >= length
            if not is_beyond and (path in mine or split_layer(path)[1] in lists):
                continue
            if is_computed(on_disk) or any(re.search(pattern, on_disk) for pattern in self._own["ignored"]):
                continue
            (of_others if path in tensors and not is_beyond else unexpected).append(on_disk)
        return unexpected, of_others

    def _missing(self) -> tuple[str, ...]:
        """Return the names that the class has under this config and the checkpoint lacks."""
        found: list[str] = []
        for path in (*self._row["always"], *self._own["always"]):
            found += [name for _, name, is_lost in self._instances(path) if is_lost]
        for group in self._groups:
            by_layer: dict[int | None, list[tuple[str, bool]]] = defaultdict(list)
            for path in group:
                for layer, name, is_lost in self._instances(path):
                    by_layer[layer].append((name, is_lost))
            for members in by_layer.values():
                lost = [name for name, is_lost in members if is_lost]
                found += lost if len(lost) < len(members) else ()
        for path in self._row["alike"]:
            instances = list(self._instances(path))
            lost = [name for _, name, is_lost in instances if is_lost]
            found += lost if 2 * len(lost) <= len(instances) else ()
        before = "" if self._bare else self._prefix
        return tuple(before + name[1:] if name.startswith("@") else name for name in dict.fromkeys(found))

    def _instances(self, path: str) -> Iterator[tuple[int | None, str, bool]]:
        """Yield the layers that have a path of the table, each with the name there, and whether that is lost: the
        checkpoint has neither the name nor one that is tied to it.
        """
        of = self._tied.get(path, path)
        same = {path, of, *(other for other, its in self._tied.items() if its == of)}
        stack, star, rest = path.partition(".*.")
        if not star:
            yield None, path, same.isdisjoint(self._held)
            return
        length, held = self._lengths[stack], self._layers[stack]
        # of a layer that is lost as a whole LT310 tells
        layers = sorted(held) if length is None else range(min(length, _MOST_LAYERS))
        for layer in layers:
            if layer in held or not held:
                names = {each.replace(".*.", f".{layer}.") for each in same}
                yield layer, f"{stack}.{layer}.{rest}", names.isdisjoint(self._held)

    def _shapes(self) -> tuple[dict[str, tuple[int | None, ...]], list[str]]:
        """Return the shapes of the checkpoint's tensors, and the fields without a number that decide them."""
        shapes: dict[str, tuple[int | None, ...]] = {}
        found: dict[str, tuple[int | None, ...]] = {}
        deciding = [*self._row["stacks"].values()]
        for name, on_disk in self._held.items():
            path = self._placed[name][0]
            dims = self._row["tensors"].get(path)
            if dims is None:
                continue
            if path not in shapes:
                shapes[path] = tuple(map(self._sizes.value, dims))
                deciding += dims
            found[on_disk] = shapes[path]
        return found, self._sizes.left_out(deciding)


# Where the modules of a base model are in memory: a class with a head has the base model below a name of its own, and a
# checkpoint of the base model alone (the published `gpt2`) has its tensors without it.


_WRITING = frozenset({"CAUSAL_LM", "SEQ_2_SEQ_LM"})
"""PEFT's task types of models that write text."""
_ENDINGS = {"QUESTION_ANS": "ForQuestionAnswering", "SEQ_2_SEQ_LM": "ForConditionalGeneration"}
"""How their classes end that may hold the parts of the base model themselves."""


class ModuleNames(Struct, frozen=True, kw_only=True):
    """The modules of a model type: of its classes with a head, and of the base model's own class."""

    prefix: str
    """What the classes with a head call the base model."""
    headed: frozenset[str]
    bare: frozenset[str]


def module_names(config: ModelConfig, held: frozenset[str], adapter: AdapterConfig) -> ModuleNames | None:
    """Return where the modules `held`, by their paths on disk, are in memory; None where no table knows.

    `config` is the base's. An `adapter` of an encoder and decoder that writes text is of a class that no table has, and
    some classes hold the parts of the base model themselves.
    """
    arch, text = architecture_of(config.model_type or ""), TEXT_CLASSES.get(config.model_type or "")
    if config.custom_code or (arch is None and text is None):
        return None
    if text is not None:
        inner = frozenset(text.strip + name.removeprefix(text.add) for name in held if name.startswith(text.add))
        whole = frozenset(map(text.in_whole, held))
        return ModuleNames(prefix="model", headed=inner | whole, bare=_below("model", inner))
    prefixes = prefixes_of(config.model_type or "")
    without = {name for name, prefix in prefixes.items() if not prefix}
    known = [prefix for prefix, _ in Counter(filter(None, prefixes.values())).most_common()]
    prefix = next((each for each in known if any(name.startswith(f"{each}.") for name in held)), None)
    bare = held if prefix is None else _below(prefix, held)
    if _is_one_of(without, adapter):
        return ModuleNames(prefix="", headed=bare, bare=bare)
    own = config.architectures[:1]
    sure = prefix is not None or any(name in prefixes or name.endswith("EncoderModel") for name in own)
    if not sure or not known or (adapter.task_type in _WRITING and not _has_class(arch, prefixes, adapter)):
        return None
    headed = held if prefix is not None else frozenset(f"{known[0]}.{name}" for name in held)
    return ModuleNames(prefix=prefix or known[0], headed=headed, bare=bare)


def _has_class(arch: Architecture | None, classes: Iterable[str], adapter: AdapterConfig) -> bool:
    """Return whether a table has the class of an adapter that writes text."""
    of_task = _ENDINGS.get(adapter.task_type or "", "no class")
    return (arch is not None and arch.causal_lm is not None) or any(name.endswith(of_task) for name in classes)


def _is_one_of(classes: Iterable[str], adapter: AdapterConfig) -> bool:
    """Return whether an adapter is for one of the classes, by the class that it was trained on, else by its task."""
    if adapter.trained_class is not None:
        return adapter.trained_class in classes
    of_task = _ENDINGS.get(adapter.task_type or "")
    return of_task is not None and any(name.endswith(of_task) for name in classes)


def _below(prefix: str, modules: Iterable[str]) -> frozenset[str]:
    """Return the modules of the base model, without what the classes with a head call it."""
    return frozenset(name.removeprefix(f"{prefix}.") for name in modules if name.startswith(f"{prefix}."))
