"""The frozen random heads of a PEFT module under training, which `save_pretrained` would not save.

A new `score` layer that has LoRA on it, or none at all, is random, was never in the base model, and without it every
reward is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import ModelDir, open_checkpoint
from lora_tool.checkpoints.sources import resolve
from lora_tool.checkpoints.states.state import TrainingState, wrapper_of
from lora_tool.core import keys
from lora_tool.core.errors import BrokenFile, CheckpointError, Problem, UnsupportedCheckpoint
from lora_tool.core.keys import AdapterKey, Part, has_lora_factor
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig, read_adapter_config
from lora_tool.formats.files import read_json
from lora_tool.formats.lora_recipes import recipes_near
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.models.ends import NEW_MODULES, head_of, head_path

RANKED = frozenset({Part.LORA_A, Part.EMBEDDING_A})
"""Factors whose first axis is the rank."""


def has_lora(names: Mapping[str, StateEntry]) -> bool:
    """Return whether a training module's names are those of a PEFT model with LoRA."""
    return any(map(has_lora_factor, names))


def near_adapter_config(near: tuple[Path, ...]) -> AdapterConfig | None:
    """Return the config in the first of the folders that has one. Raises `CorruptFile`, `BadConfig`."""
    path = next((folder / FILE_NAME for folder in near if (folder / FILE_NAME).is_file()), None)
    return None if path is None else read_adapter_config(path)


def config_problems(state: TrainingState) -> tuple[Problem, ...]:
    """Return the faults in the adapter's config, or in the run's files from which the config would be rebuilt."""
    if not has_lora(state.entries):
        return ()
    try:
        config = near_adapter_config(state.near)
        if config is not None:
            return config.problems
        keys_of = parsed_keys(state)
        shapes = [state.entries[name].shape for name in state.entries if keys_of[name].part in RANKED]
        recipes_near(state.near, {shape[0] for shape in shapes if shape})
    except BrokenFile as error:
        return (error.problem,)
    return ()


def unwrapped_name(name: str) -> str:
    """Return a name without the parts that wrappers add: DataParallel, torch.compile, activation checkpointing.

    A `PeftModel` around another has PEFT's prefix twice; the model's names follow the last one.
    """
    name = _bare(name)
    _, prefix, module = f".{name}".rpartition(f".{keys.PREFIX}")
    return keys.PREFIX + module if prefix else name


def _bare(name: str) -> str:
    """Return a name without torch.compile's part, activation checkpointing's, and DataParallel's at its beginning."""
    bare = keys.unwrapped(name)
    while bare.startswith("module."):
        bare = bare.removeprefix("module.")
    return bare


_PARTS_OF_MODELS = re.compile(
    r"(?:^|\.)(?:language_model|text_model|llm|thinker|talker|visual|(?:vision|audio|speech|image|text)_\w+)(?=\.|\Z)"
)


def part_of(names: Iterable[str]) -> str | None:
    """Return the path of the one part of a model that PEFT was put around, as ``model.language_model``; None where it is
    around the whole.
    """
    found = next((name for name in names if f".{keys.PREFIX}" in name), "")
    path = _bare(found).rpartition(f".{keys.PREFIX}")[0]
    return path if _PARTS_OF_MODELS.search(path) else None


def _in_whole_model(name: str, part: str) -> str:
    """Return the name of a tensor as if PEFT were around the whole model, of which it is around a `part`."""
    return keys.PREFIX + _bare(name).replace(f"{part}.{keys.PREFIX}", f"{part}.", 1)


class LostHead(Struct, frozen=True, kw_only=True):
    """A head whose weights are neither in the checkpoint nor in the base model."""

    module: str
    why: str
    """What shows that the module has it, and that its weights are gone."""
    base: str | None
    """The name of the base model, as far as it is known."""
    base_is_here: bool


class UnsavedModule(Struct, frozen=True, kw_only=True):
    """A module that was trained whole and not saved."""

    module: str
    is_head: bool
    """Whether it is certainly the model's head: `modules_to_save` may name modules that no model has."""


class Heads(Struct, frozen=True, kw_only=True):
    """The frozen random heads of a PEFT module: where they are, and which are lost."""

    names: Mapping[str, str]
    """Name in the adapter → name in the training module."""
    whole_modules: tuple[str, ...]
    """Modules among them without LoRA: PEFT loads them only if `modules_to_save` names them."""
    lost: tuple[LostHead, ...]
    unsaved: tuple[UnsavedModule, ...]


def parsed_keys(state: TrainingState) -> dict[str, AdapterKey]:
    """Return the tensors' names, and those without values, each parsed without the parts that wrappers add.

    The weight and the bias of a module under LoRA are those of its base layer, also where, as prime-rl saves them,
    their names lack `base_layer`.
    """
    saved = (*state.entries, *state.without_values)
    part = part_of(saved)
    names = {name: unwrapped_name(name) if part is None else _in_whole_model(name, part) for name in saved}
    wrapper = "" if any(keys.PREFIX in name for name in saved) else wrapper_of(names.values())
    parsed = {name: keys.parse(unwrapped.removeprefix(wrapper)) for name, unwrapped in names.items()}
    adapted: set[str] = set()
    weights: set[str] = set()
    for key in parsed.values():
        if key.part is Part.LORA_A:
            adapted.add(key.module)
        elif key.part is Part.PLAIN and key.leaf == "weight":
            weights.add(key.module)
    bare = adapted & weights
    if not bare:
        return parsed
    return {
        name: replace(key, part=Part.BASE_LAYER) if key.part is Part.PLAIN and key.module in bare else key
        for name, key in parsed.items()
    }


def outside_names(parsed: Mapping[str, AdapterKey]) -> frozenset[str]:
    """Return the names that are not below PEFT's prefix where those of LoRA are: of a network around the PEFT model.

    TRL's and LLaMA-Factory's value heads are such: ``v_head.summary`` next to ``pretrained_model.base_model.model``.
    """
    if not any(key.prefixed and key.part in RANKED for key in parsed.values()):
        return frozenset()
    return frozenset(name for name, key in parsed.items() if not key.prefixed)


def heads_of(state: TrainingState, config: AdapterConfig | None, parsed: Mapping[str, AdapterKey]) -> Heads:
    """Return the heads that `save_pretrained` would not save; `parsed` are the `parsed_keys` of the state.

    `config` is None where the adapter has none.
    """
    outside = outside_names(parsed)
    parsed = {name: key for name, key in parsed.items() if name not in outside}
    modules: dict[Part, set[str]] = {part: set() for part in Part}
    for key in parsed.values():
        if key.part is Part.SAVED_MODULE or is_new_head(key.module):
            modules[key.part].add(key.module)
    trained, adapted = modules[Part.SAVED_MODULE], modules[Part.LORA_A]
    plain = modules[Part.PLAIN] - trained
    base = _base_tensors(config)
    names: dict[str, str] = {}
    lost: list[LostHead] = []
    for module in sorted(adapted | plain):
        part = Part.BASE_LAYER if module in adapted else Part.PLAIN
        held = {
            key.canonical: name
            for name, key in parsed.items()
            if key.module == module and key.part is part and name in state.entries
        }
        if base is not None and _fits(base.get(f"{module}.weight"), module, parsed, state.entries):
            continue
        if any(name.endswith(".weight") for name in held):
            names |= held
        else:
            what = "LoRA was put on it" if module in adapted else "it was frozen"
            lost.append(_lost(config, module, f"{what}, but the checkpoint does not hold its weights"))
    unsaved = tuple(_unsaved(state, config, parsed))
    in_base = base is not None and any(is_new_head(name.rpartition(".")[0]) for name in base)
    has_head = adapted or plain or in_base or any(map(is_new_head, trained))
    if config is not None and not has_head and not unsaved and (kind := _classifier(config)):
        lost.append(_lost(config, "score", f"{config.path} says {kind}, but the checkpoint has no head"))
    whole = tuple(sorted(module for module in plain if f"{keys.PREFIX}{module}.weight" in names))
    return Heads(names=names, whole_modules=whole, lost=tuple(lost), unsaved=unsaved)


def _unsaved(
    state: TrainingState, config: AdapterConfig | None, parsed: Mapping[str, AdapterKey]
) -> Iterator[UnsavedModule]:
    """Yield each module that was trained whole where only LoRA was saved, as by verl's `save_lora_only`.

    PEFT names both `classifier` and `score` for a classifier, which has one of them.
    """
    others = (Part.SAVED_MODULE, Part.PLAIN, Part.BASE_LAYER)
    whole = any(name in state.entries and key.part in others for name, key in parsed.items())
    if config is None or whole or any(entry.role is not Role.SAVED for entry in state.entries.values()):
        return
    heads = [name for name in config.modules_to_save if is_new_head(name)]
    named = [name for name in config.modules_to_save if name not in heads]
    for module in [*named, *heads[-1:]]:
        yield UnsavedModule(module=module, is_head=module in heads and _classifier(config) is not None)


def _classifier(config: AdapterConfig) -> str | None:
    """Return the sign in the config that the model has a separate head: the task, or without one the class."""
    if config.task_type:
        return config.task_type if config.task_type in ("SEQ_CLS", "TOKEN_CLS") else None
    if not config.path.is_file():
        return None  # it is rebuilt
    mapping = read_json(config.path).get("auto_mapping")  # PEFT only writes it without a task type
    name = str(mapping.get("base_model_class")) if isinstance(mapping, dict) else ""
    return name if name.endswith(("ForSequenceClassification", "ForTokenClassification")) else None


def saved_as(module: str, adapted: Collection[str]) -> str:
    """Return the name for `modules_to_save` with which PEFT loads a module whole: the head that it lies in, maybe
    several layers deep, unless one of the `adapted` modules, those with LoRA, lies in there too.
    """
    head = head_path(module, NEW_MODULES)
    return module if any(f"{each}.".startswith(f"{head}.") for each in adapted) else head


def is_new_head(module: str) -> bool:
    """Return whether a module is a head that a base model does not have."""
    return head_of(module, NEW_MODULES) is not None


def _fits(
    weight: StoredTensor | None, module: str, parsed: Mapping[str, AdapterKey], entries: Mapping[str, StateEntry]
) -> bool:
    """Return whether the base's weight of the head can be the trained model's: a new head may have other labels."""
    if weight is None:
        return False
    shapes = {key.part: entries[name].shape for name, key in parsed.items() if key.module == module and name in entries}
    own = shapes.get(Part.BASE_LAYER) or shapes.get(Part.PLAIN)
    if own is None and len(shapes.get(Part.LORA_A, ())) == len(shapes.get(Part.LORA_B, ())) == 2:  # noqa: PLR2004 - matrices
        own = (shapes[Part.LORA_B][0], shapes[Part.LORA_A][1])
    return own is None or own == weight.shape


def _lost(config: AdapterConfig | None, module: str, why: str) -> LostHead:
    base = config.base_model if config else None
    return LostHead(module=module, why=why, base=base, base_is_here=_base_tensors(config) is not None)


def _base_tensors(config: AdapterConfig | None) -> TensorTable | None:
    """Return the base model's tensors, None if it is not on this disk."""
    if config is None or not config.base_model:
        return None
    try:
        base = open_checkpoint(resolve(config.base_model, near=config.path.parent, revision=config.revision).path)
    except (CheckpointError, UnsupportedCheckpoint):
        return None
    return base.tensors if isinstance(base, ModelDir) else None
