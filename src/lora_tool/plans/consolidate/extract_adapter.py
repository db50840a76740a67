"""Which tensors of a PEFT training module make its adapter, under which names, and whether the head is among them.

`save_pretrained` keeps LoRA tensors and `modules_to_save`. It loses a frozen head: a new `score` layer that has LoRA on
it, or none at all, is random, was never in the base model, and without it every reward is wrong. Where the checkpoint
has it, it goes into the adapter under the name that `PeftModel` gives it, and `PeftModel.from_pretrained` loads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from lora_tool.checkpoints import VALUE_HEAD
from lora_tool.checkpoints.states.frozen_heads import (
    RANKED,
    Heads,
    heads_of,
    is_new_head,
    outside_names,
    parsed_keys,
    part_of,
    saved_as,
)
from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.core import keys
from lora_tool.core.errors import UnsupportedCheckpoint
from lora_tool.core.keys import AdapterKey, Part
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.plans.adapter.config_file import config_file
from lora_tool.plans.consolidate.rebuilt_config import FoundConfig, trained_adapter
from lora_tool.plans.core.steps import SideFile

_LORA = frozenset(
    {Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B, Part.MAGNITUDE, Part.TOKENS_DELTA, Part.SAVED_MODULE}
)


class Selection(Struct, frozen=True, kw_only=True):
    """The tensors of a training module that are written, the files next to them, notes and warnings."""

    names: Mapping[str, str]
    """Name in the output → name in the training module."""
    value_head: Mapping[str, str] = field(default_factory=dict)
    """The same of a value head around the PEFT model, which goes into a file of its own."""
    leftovers: tuple[tuple[str, str], ...] = ()
    """Names that stay behind, each with the reason."""
    side_files: tuple[SideFile, ...] = ()
    heads: Heads | None = None
    """The heads of an adapter's model that `save_pretrained` would not save; None where no adapter is written."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Field of a rebuilt config → where it is from."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def select_adapter(state: TrainingState, found: FoundConfig) -> Selection:
    """Return the adapter's tensors by their PEFT names, a frozen head among them, and the config that was found.

    Raises `UnsupportedCheckpoint` where several adapters were trained, where the config is another run's, and for
    trained tensors that an adapter has no place for.
    """
    entries, config = state.entries, found.config
    known = parsed_keys(state)
    parsed = {name: known[name] for name in entries}
    chosen = trained_adapter(entries, parsed, config.path if found.raw is None else None)
    names: dict[str, str] = {}
    outside = outside_names(known)
    whole: list[str] = []
    only_adapter = bool(state.without_values)  # saved without the base, so that every saved tensor is the adapter's
    for name, key in parsed.items():
        role = entries[name].role
        if name in outside:
            if role is Role.TRAINED and not is_new_head(key.module):
                raise _no_place(name, "lies outside of the PEFT model")
        elif key.part in _LORA and key.adapter_name in (chosen, None):
            if key.canonical in names:
                raise UnsupportedCheckpoint(f"`{name}` and `{names[key.canonical]}` would be one tensor of the adapter")
            names[key.canonical] = name
        elif key.part in _LORA or key.part is Part.ORIGINAL_MODULE:
            continue
        elif role is Role.TRAINED and not _is_bias(config, key):
            if not _can_be_saved_whole(key, known):
                raise _no_place(name, "is neither LoRA nor in `modules_to_save`")
            whole.append(key.module)
        elif role is Role.TRAINED or (role is Role.SAVED and (only_adapter or _may_be_trained(config, key))):
            names[key.canonical] = name
    names |= {key.canonical: name for name, key in parsed.items() if key.part is Part.PLAIN and key.module in whole}
    _require_ranks(entries, {name: parsed[name] for name in names.values()}, config)
    heads = heads_of(state, config, known)
    rescued = [name for name in heads.names if name not in names]
    names |= heads.names
    value_head = {
        parsed[name].tensor: name for name in sorted(outside & entries.keys()) if is_new_head(parsed[name].module)
    }
    return Selection(
        names=names,
        value_head=value_head,
        leftovers=tuple(_left_behind(entries, known, frozenset((*names.values(), *value_head.values())), outside)),
        side_files=(_config_file(found, _unnamed(config, heads, names, whole), _targets_in_whole(entries, names)),),
        heads=heads,
        origins=found.origins,
        notes=(
            *(f"{name.removeprefix(keys.PREFIX)} was frozen and random: put into the adapter" for name in rescued),
            *(
                f"{module} was trained whole: put into modules_to_save"
                for module in dict.fromkeys(whole)
                if not config.saves(module)
            ),
            *(f"{name} lies outside of the PEFT model: written into {VALUE_HEAD}" for name in value_head),
        ),
        warnings=(*found.warnings, *_left_beside_part(entries, known, names)),
    )


def _left_beside_part(
    entries: Mapping[str, StateEntry], known: Mapping[str, AdapterKey], names: Mapping[str, str]
) -> Iterator[str]:
    """Yield a warning if PEFT was around a part of a model, and the saved file has the other parts, trained or not."""
    part = part_of(entries)
    left = [name for name in entries.keys() - set(names.values()) if entries[name].role is Role.SAVED]
    others = sorted(known[name].module for name in left if not known[name].module.startswith(f"{part}."))
    if part is not None and others:
        depth = 2 if all(module.startswith("model.") for module in others) else 1
        modules = dict.fromkeys(".".join(module.split(".")[:depth]) for module in others)
        yield (
            f"PEFT was around {part}, and the checkpoint does not say whether the run trained what is beside it: "
            f"{', '.join(modules)} stay behind; if it trained one of them whole, such as a projector, name it in "
            "modules_to_save of the config of `adapter_config=FILE`"
        )


def _no_place(name: str, why: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"`{name}` was trained, but {why}: an adapter has no place for it", hint='`what="state"` writes every tensor'
    )


def _can_be_saved_whole(key: AdapterKey, parsed: Mapping[str, AdapterKey]) -> bool:
    """Return whether `modules_to_save` can name the tensor's module by its path, and no other with it.

    PEFT compares the ends of paths as text, so that ``model.norm`` would mean ``vision_model.norm`` too.
    """
    if key.part is not Part.PLAIN or key.leaf not in ("weight", "bias") or not key.module:
        return False
    return all(other.module == key.module or not other.module.endswith(key.module) for other in parsed.values())


def _unnamed(config: AdapterConfig, heads: Heads, names: Mapping[str, str], whole: Collection[str]) -> tuple[str, ...]:
    """Return the heads among `names` and the `whole` modules that PEFT would not load, as `modules_to_save` does not
    name them.
    """
    parsed = [keys.parse(name) for name in names]
    plain = {key.module for key in parsed if key.part is Part.PLAIN and key.leaf == "weight"}
    adapted = {key.module for key in parsed if key.part is Part.LORA_A}
    found = {*heads.whole_modules, *whole, *filter(is_new_head, plain)}
    return tuple(sorted({saved_as(module, adapted) for module in found if not config.saves(module)}))


def _is_bias(config: AdapterConfig, key: AdapterKey) -> bool:
    return config.bias != "none" and key.leaf == "bias"


def _may_be_trained(config: AdapterConfig, key: AdapterKey) -> bool:
    """Whether the config says that it was trained: a module without LoRA, or a bias, "lora_only" under LoRA."""
    if key.part is Part.PLAIN and config.saves(key.module) and not is_new_head(key.module):
        return True
    return _is_bias(config, key) and (config.bias == "all" or key.part is Part.BASE_LAYER)


def _require_ranks(entries: Mapping[str, StateEntry], parsed: Mapping[str, AdapterKey], config: AdapterConfig) -> None:
    for name, key in parsed.items():
        shape = entries[name].shape
        if key.part is Part.LORA_A and shape and not _has_rank(shape[0], key.module, config):
            raise UnsupportedCheckpoint(
                f"`{name}` has rank {shape[0]}, but {config.path} says {config.rank(key.module)}: that config is from another run",
                hint="give the config of this run: `adapter_config=FILE`",
            )


def _has_rank(rows: int, module: str, config: AdapterConfig) -> bool:
    """Return whether the config gives the module's lora_A so many rows: a stack of experts has its rank for each."""
    path = module.partition(".base_layer")[0]
    stacks = (
        entry.rpartition(".")[2]
        for entry in config.target_parameters or ()
        if keys.is_under(path, frozenset({entry.rpartition(".")[0]}))
    )
    return rows == config.rank(module) or any(rows % max(1, config.rank(f"{path}.{name}")) == 0 for name in stacks)


def _targets_in_whole(entries: Mapping[str, StateEntry], names: Iterable[str]) -> list[str]:
    """Return the modules with LoRA where PEFT was around a part of the model: other parts may have modules of the same
    names. Nothing where it was around the whole.
    """
    parsed = map(keys.parse, names) if part_of(entries) is not None else ()
    return sorted(key.module for key in parsed if key.part in RANKED)


def _config_file(found: FoundConfig, saved: tuple[str, ...], targets: list[str]) -> SideFile:
    """Return the config, with the `saved` heads in `modules_to_save`: PEFT would not load them otherwise; and with the
    whole paths of its `targets`, if any are given.
    """
    named: dict[str, Any] = {"modules_to_save": [*found.config.modules_to_save, *saved]} if saved else {}
    why = (f"{', '.join(saved)} in modules_to_save",) if saved else ()
    if targets:
        named |= {"target_modules": targets, "layers_to_transform": None, "exclude_modules": None}
        why = (*why, "the whole paths of its target_modules")
    origins: dict[str, list[str]] = {}
    for name, origin in found.origins.items():
        origins.setdefault(origin, []).append(name)
    from_where = tuple(f"{', '.join(names)} from {origin}" for origin, names in origins.items())
    return config_file(found.config, named, (*from_where, *why), rebuilt=found.raw)


def _left_behind(
    entries: Mapping[str, StateEntry], known: Mapping[str, AdapterKey], taken: frozenset[str], outside: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Yield the names that are not in the adapter, each with the reason."""
    for name in entries:
        if name not in taken:
            part = known[name].part
            if name in outside:
                yield name, "outside of the PEFT model"
            elif part is Part.ORIGINAL_MODULE:
                yield name, "the frozen original of a module that was trained whole"
            elif part in _LORA:
                yield name, "belongs to another adapter"
            elif entries[name].role is Role.SAVED:
                yield name, "not LoRA: the base model has it; the checkpoint does not say whether it was trained"
            else:
                yield name, "frozen: the base model has it"
