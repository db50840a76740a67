"""Which tensors of a PEFT training module make its adapter, under which names, and whether the head is among them.

`save_pretrained` keeps LoRA tensors and `modules_to_save`. It loses a frozen head: a new `score` layer that has LoRA on
it, or none at all, is random, was never in the base model, and without it every reward is wrong. Where the checkpoint
has it, it goes into the adapter under the name that `PeftModel` gives it, and `PeftModel.from_pretrained` loads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool import keys
from lora_tool.checkpoint import ModelDir, open_checkpoint
from lora_tool.errors import CheckpointError, IncompleteCheckpoint, UnsupportedCheckpoint
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig, read_adapter_config
from lora_tool.formats.files import json_bytes, read_json
from lora_tool.formats.partitions import Entry, Role
from lora_tool.keys import AdapterKey, Part
from lora_tool.plan.architectures import ARCHITECTURES
from lora_tool.plan.model import SideFile
from lora_tool.plan.training_state import TrainingState
from lora_tool.report import Finding, Severity
from lora_tool.sources import resolve
from lora_tool.tensors import StoredTensor, TensorTable

HEADS = frozenset(
    {row.head.rpartition(".")[2] for row in ARCHITECTURES.values() if row.head}
    | {"score", "classifier", "classification_head", "value_head", "v_head", "reward_head", "regression_head"}
)
"""Components of the paths of modules that a base language model does not have: new and random when training begins."""

_LORA = frozenset(
    {Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B, Part.MAGNITUDE, Part.TOKENS_DELTA, Part.SAVED_MODULE}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSelection:
    """The tensors of an adapter and the config that goes with them."""

    names: Mapping[str, str]
    """Name in the adapter → name in the training module."""
    config: SideFile
    faults: tuple[Finding, ...]
    """LT415, where the head is lost."""
    notes: tuple[str, ...]


def has_lora(names: Mapping[str, Entry]) -> bool:
    """Return whether a training module's names are those of a PEFT model with LoRA."""
    return any(".lora_A." in name or ".lora_embedding_A." in name for name in names)


def find_adapter_config(given: Path | None, *, near: tuple[Path, ...]) -> AdapterConfig:
    """Return the config that was given, or the first in the folders `near`. Raises `IncompleteCheckpoint`."""
    paths = [given / FILE_NAME if given.is_dir() else given] if given else [folder / FILE_NAME for folder in near]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        places = ", ".join(str(place.parent) for place in paths)
        raise IncompleteCheckpoint(
            f"no {FILE_NAME} in {places}: rank, alpha and targets are not in the weights",
            hint="give the one that the run began with: --adapter-config FILE",
        )
    return read_adapter_config(path)


def select_adapter(state: TrainingState, config: AdapterConfig) -> AdapterSelection:
    """Return the adapter's tensors by their PEFT names, a frozen head among them.

    Raises `UnsupportedCheckpoint` where several adapters were trained, where the config is another run's, and for
    trained tensors that an adapter has no place for.
    """
    entries = state.entries
    known = _parsed(state)
    parsed = {name: known[name] for name in entries}
    chosen = _adapter_name(entries, parsed)
    names: dict[str, str] = {}
    for name, key in parsed.items():
        if key.part in _LORA and key.adapter_name in (chosen, None):
            if key.canonical in names:
                raise UnsupportedCheckpoint(f"`{name}` and `{names[key.canonical]}` would be one tensor of the adapter")
            names[key.canonical] = name
        elif key.part not in _LORA and entries[name].role is Role.TRAINED and not _is_bias(config, key):
            raise UnsupportedCheckpoint(
                f"`{name}` was trained, but is neither LoRA nor one of `modules_to_save`: an adapter has no place for it",
                hint="--what state writes every tensor",
            )
        elif key.part not in _LORA and entries[name].role is Role.TRAINED:
            names[key.canonical] = name
    _require_ranks(entries, {name: parsed[name] for name in names.values()}, config)
    heads = _heads(state, config, known)
    notes = tuple(
        f"{name.removeprefix(keys.PREFIX)} was frozen and random: put into the adapter" for name in heads.names
    )
    config_file = _config_file(config, heads.whole_modules)
    return AdapterSelection(names={**names, **heads.names}, config=config_file, faults=heads.faults, notes=notes)


def _unwrapped(name: str) -> str:
    """Take away what wrappers put in front of or into a name: DataParallel, torch.compile, checkpointing."""
    name = keys.unwrapped(name)
    at = name.find(keys.PREFIX)
    return name[at:] if at > 0 else name


def _adapter_name(entries: Mapping[str, Entry], parsed: Mapping[str, AdapterKey]) -> str | None:
    all_names = {key.adapter_name for key in parsed.values() if key.part is Part.LORA_A or key.part is Part.EMBEDDING_A}
    trained = {
        key.adapter_name
        for name, key in parsed.items()
        if key.part in _LORA and key.adapter_name in all_names and entries[name].role is not Role.FROZEN
    }
    if len(trained) != 1:
        listed = ", ".join(sorted(map(str, trained or all_names))) or "none"
        raise UnsupportedCheckpoint(
            f"one trained adapter is expected, there are {len(trained)}: {listed}",
            hint="--what state writes every tensor",
        )
    return trained.pop()


def _is_bias(config: AdapterConfig, key: AdapterKey) -> bool:
    return config.bias != "none" and key.leaf == "bias"


def _require_ranks(entries: Mapping[str, Entry], parsed: Mapping[str, AdapterKey], config: AdapterConfig) -> None:
    for name, key in parsed.items():
        shape = entries[name].shape
        if key.part is Part.LORA_A and shape and not _has_rank(shape[0], key.module, config):
            raise UnsupportedCheckpoint(
                f"`{name}` has rank {shape[0]}, {config.path} says {config.rank(key.module)}: it is of another run",
                hint="give the right one: --adapter-config FILE",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The frozen random heads of a PEFT module: where they are, and which are lost."""

    names: Mapping[str, str]
    """Name in the adapter → name in the training module."""
    whole_modules: tuple[str, ...]
    """Modules among them without LoRA: PEFT loads them only if `modules_to_save` names them."""
    faults: tuple[Finding, ...]
    """LT415, for each head that is nowhere."""


def find_heads(state: TrainingState, config: AdapterConfig | None) -> Heads:
    """Return the heads that `save_pretrained` would not save; `config` None is an adapter of which nothing is known."""
    return _heads(state, config, _parsed(state))


def _parsed(state: TrainingState) -> dict[str, AdapterKey]:
    return {name: keys.parse(_unwrapped(name)) for name in (*state.entries, *state.without_values)}


def _heads(state: TrainingState, config: AdapterConfig | None, parsed: Mapping[str, AdapterKey]) -> Heads:
    trained = {key.module for key in parsed.values() if key.part is Part.SAVED_MODULE}
    adapted = {key.module for key in parsed.values() if key.part is Part.LORA_A and _is_head(key.module)}
    plain = {key.module for key in parsed.values() if key.part is Part.PLAIN and _is_head(key.module)} - trained
    base = _base_tensors(config)
    names: dict[str, str] = {}
    faults: list[Finding] = []
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
            faults.append(_lost(state, config, module, f"{what}, and its weights were not saved with the checkpoint"))
    in_base = base is not None and any(_is_head(name.rpartition(".")[0]) for name in base)
    has_head = adapted or plain or in_base or any(map(_is_head, trained))
    if config is not None and not has_head and (kind := _classifier(config)):
        faults.append(_lost(state, config, "score", f"{config.path} says {kind}, and the checkpoint has no head"))
    whole = tuple(sorted(module for module in plain if f"{keys.PREFIX}{module}.weight" in names))
    return Heads(names=names, whole_modules=whole, faults=tuple(faults))


def _classifier(config: AdapterConfig) -> str | None:
    """Return what in the config says that the model has a head of its own: the task, or without one the class."""
    if config.task_type:
        return config.task_type if config.task_type in ("SEQ_CLS", "TOKEN_CLS") else None
    mapping = read_json(config.path).get("auto_mapping")  # PEFT writes it where there is no task type
    name = str(mapping.get("base_model_class")) if isinstance(mapping, dict) else ""
    return name if name.endswith(("ForSequenceClassification", "ForTokenClassification")) else None


def _is_head(module: str) -> bool:
    # a head may have layers of its own: classifier.dense
    return not HEADS.isdisjoint(module.split("."))


def _fits(
    weight: StoredTensor | None, module: str, parsed: Mapping[str, AdapterKey], entries: Mapping[str, Entry]
) -> bool:
    """Return whether the base's weight of the head can be the trained model's: a new head may have other labels."""
    if weight is None:
        return False
    shapes = {key.part: entries[name].shape for name, key in parsed.items() if key.module == module and name in entries}
    own = shapes.get(Part.BASE_LAYER) or shapes.get(Part.PLAIN)
    if own is None and len(shapes.get(Part.LORA_A, ())) == len(shapes.get(Part.LORA_B, ())) == 2:  # noqa: PLR2004 - matrices
        own = (shapes[Part.LORA_B][0], shapes[Part.LORA_A][1])
    return own is None or own == weight.shape


def _lost(state: TrainingState, config: AdapterConfig | None, module: str, why: str) -> Finding:
    named = config.base_model if config else None
    elsewhere = "no base model is known"
    if named:
        missing = "is not on this disk" if _base_tensors(config) is None else "has none that fits"
        elsewhere = f"the base model {named} {missing}"
    return Finding(
        code="LT415",
        severity=Severity.ERROR,
        path=str(state.folder),
        subject=module,
        message=f"the head is lost: {why}, and {elsewhere}. Every reward would be wrong",
        hint="look for a tag that was saved without exclude_frozen_parameters, or train again with the head in modules_to_save",
    )


def _base_tensors(config: AdapterConfig | None) -> TensorTable | None:
    """Return the base model's tensors, None if it is not on this disk."""
    if config is None or not config.base_model:
        return None
    try:
        base = open_checkpoint(resolve(config.base_model, near=config.path.parent, revision=config.revision).path)
    except (CheckpointError, UnsupportedCheckpoint):
        return None
    return base.tensors if isinstance(base, ModelDir) else None


def _config_file(config: AdapterConfig, saved: tuple[str, ...]) -> SideFile:
    """Return the config, changed only where it would not be true in another folder or with the head beside it."""
    changes: dict[str, Any] = {}
    why = []
    if saved:
        changes["modules_to_save"] = [*config.modules_to_save, *saved]
        why.append(f"{', '.join(saved)} in modules_to_save")
    base = config.path.parent / (config.base_model or "")
    if config.base_model and not Path(config.base_model).is_absolute() and base.is_dir():
        changes["base_model_name_or_path"] = str(base.resolve())
        why.append("the whole path of the base model")
    if not changes:
        return SideFile(filename=FILE_NAME, source=config.path, reason=f"copied from {config.path.parent}")
    content = json_bytes({**read_json(config.path), **changes}, indent=2)
    reason = f"that of {config.path.parent}, with {' and '.join(why)}"
    return SideFile(filename=FILE_NAME, content=content, reason=reason)


def left_behind(entries: Mapping[str, Entry], taken: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that are not in the adapter, each with the reason."""
    for name in entries:
        if name not in taken:
            part = keys.parse(_unwrapped(name)).part
            if part is Part.ORIGINAL_MODULE:
                yield name, "the frozen original of a module that was trained whole"
            elif part in _LORA:
                yield name, "of another, frozen adapter"
            elif entries[name].role is Role.SAVED:
                yield name, "not LoRA: the base model has it, unless it was trained, which the checkpoint does not say"
            else:
                yield name, "frozen: the base model has it"
