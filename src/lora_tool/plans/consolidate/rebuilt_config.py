"""The `adapter_config.json` of an adapter that has none: rank and targets from the tensors, alpha from the run's files.

Nothing is guessed. Fields that follow from the tensors come from them; a file that contradicts them is of another run.
The other fields come from the run's files, with their origin recorded. If no file has alpha, without which there is no
scaling, the user must give it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.checkpoints.states.frozen_heads import RANKED, is_new_head, outside_names, parsed_keys, part_of, saved_as
from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.core import keys
from lora_tool.core.display import named
from lora_tool.core.errors import IncompleteCheckpoint, UnsupportedCheckpoint, WrongValue
from lora_tool.core.keys import AdapterKey, Part
from lora_tool.core.progress import decided
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig, adapter_config, read_adapter_config
from lora_tool.formats.lora_recipes import NAMED, TRAINING_ARGS, Recipe, read_recipe, recipes_in, recipes_near
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.models.ends import ADDED_BY_PEFT

_TENSORS = "the tensors"
_ASK = "give it: `lora_alpha=N`"
_OF_BASE = frozenset({Part.PLAIN, Part.BASE_LAYER})
_MUST_AGREE = ("lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "alpha_pattern")
"""Fields that decide about ΔW and do not follow from the tensors."""


class FoundConfig(Struct, frozen=True, kw_only=True):
    """The config of the adapter in a checkpoint."""

    config: AdapterConfig
    raw: Mapping[str, Any] | None = None
    """The fields of one that was rebuilt; None where the file was there."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Field of one that was rebuilt → where it is from."""
    warnings: tuple[str, ...] = ()


def adapter_config_of(
    state: TrainingState,
    *,
    given: Path | None,
    lora_alpha: float | None,
) -> FoundConfig:
    """Return the config that was `given`, the one that lies near the checkpoint, in a folder of the adapter's name where
    it has one, or else one that is rebuilt.

    `given` may be a file in which a trainer wrote the run's arguments. Raises `IncompleteCheckpoint` where no file
    has alpha, `UnsupportedCheckpoint` for other fields that neither tensors nor files give, `WrongValue` for a
    `lora_alpha` that contradicts a file.
    """
    known = parsed_keys(state)
    parsed = {name: known[name] for name in state.entries}
    path = _config_path(given, state.near)
    chosen = None if path is not None else trained_adapter(state.entries, parsed)
    if given is None and chosen is not None:
        path = _config_path(None, (folder / chosen for folder in state.near))
    if path is not None:
        decided(f"adapter config: {path}, {'as requested' if given else 'the nearest'}")
        config = read_adapter_config(path)
        believed = given is not None or not config.problems
        if lora_alpha is not None and believed and config.lora_alpha != lora_alpha:
            raise WrongValue(f"lora_alpha: {path} says {config.lora_alpha:g}, found {lora_alpha:g}")
        return FoundConfig(config=config)
    outside = outside_names(known)
    own = {
        name: key
        for name, key in parsed.items()
        if key.adapter_name in (chosen, None) and name not in outside and state.entries[name].role is not Role.BUFFER
    }
    trained = _trained(state, own)
    tensors = dict(_of_tensors(state, own, trained))
    recipes = _recipes(state.near, given, tensors)
    decided("adapter config: none lies near the checkpoint, so it is rebuilt from the tensors and the run's files")
    found = _rebuilt(state, tensors, recipes, given, lora_alpha)
    known_biases = trained or "bias" in found.origins
    if known_biases:
        return found
    part = part_of(state.entries)
    wrapped = {name: key for name, key in own.items() if part is None or key.module.startswith(f"{part}.")}
    return replace(found, warnings=(*found.warnings, *_unknown_biases(wrapped, found.config)))


def _trained(state: TrainingState, own: Mapping[str, AdapterKey]) -> frozenset[str]:
    """Return the names of the tensors that were trained, by their roles or by the optimizer state saved with them.

    None where neither is there, or the optimizer has other names.
    """
    by_role = frozenset(name for name in own if state.entries[name].role is Role.TRAINED)
    trained = by_role or state.optimised()
    return trained if any(key.part in RANKED and name in trained for name, key in own.items()) else frozenset()


def _config_path(given: Path | None, near: Iterable[Path]) -> Path | None:
    if given is None:
        return next((folder / FILE_NAME for folder in near if (folder / FILE_NAME).is_file()), None)
    path = given / FILE_NAME if given.is_dir() else given
    return path if path.suffix == ".json" and path.name not in NAMED else None


def _recipes(near: Iterable[Path], given: Path | None, tensors: Mapping[str, Any]) -> tuple[Recipe, ...]:
    """Return the nearest files' settings that are of this run: with the rank of its tensors."""
    if given is not None:
        recipe = read_recipe(given)
        if recipe is None:
            raise UnsupportedCheckpoint(
                f"{given} describes no LoRA run: it has neither rank nor alpha",
                hint=f"give adapter_config.json, or the file of the run's arguments: {', '.join(NAMED)}, …",
            )
        if not _of_this_run(recipe, tensors):
            message = (
                f"{given} says rank {recipe.rank}, but the tensors have {tensors['r']}: the file is from another run"
            )
            raise UnsupportedCheckpoint(message, hint="give the file of this run: `adapter_config=FILE`")
        return (recipe,)
    return recipes_near(near, _ranks(tensors))


def _strangers(near: Iterable[Path], tensors: Mapping[str, Any]) -> Iterator[Recipe]:
    """Yield the settings in nearby files of another run."""
    return (recipe for folder in near for recipe in recipes_in(folder) if not _of_this_run(recipe, tensors))


def _of_this_run(recipe: Recipe, tensors: Mapping[str, Any]) -> bool:
    return recipe.rank is None or recipe.rank in _ranks(tensors)


def _ranks(tensors: Mapping[str, Any]) -> frozenset[int]:
    return frozenset((tensors["r"], *tensors.get("rank_pattern", {}).values()))


def _rebuilt(
    state: TrainingState,
    tensors: Mapping[str, Any],
    recipes: Collection[Recipe],
    given: Path | None,
    lora_alpha: float | None,
) -> FoundConfig:
    fields: dict[str, Any] = {"peft_type": "LORA", **tensors}
    origins = dict.fromkeys(tensors, _TENSORS)
    for recipe in recipes:
        for name, value in recipe.fields.items():
            if name in _MUST_AGREE and name in origins and fields[name] != value and origins[name] != _TENSORS:
                raise UnsupportedCheckpoint(
                    f"`{name}` is {fields[name]} in {origins[name]}, but {value} in {recipe.path}",
                    hint="give the file of this run: `adapter_config=FILE`",
                )
            if name not in origins:
                fields[name], origins[name] = value, str(recipe.path)
    if lora_alpha is not None:
        if fields.get("lora_alpha", lora_alpha) != lora_alpha:
            raise WrongValue(f"lora_alpha: {origins['lora_alpha']} says {fields['lora_alpha']:g}, found {lora_alpha:g}")
        fields["lora_alpha"] = int(lora_alpha) if float(lora_alpha).is_integer() else lora_alpha
        origins.setdefault("lora_alpha", "`lora_alpha`")
    if "lora_alpha" not in fields:
        places = ", ".join(map(str, (given,) if given else state.near))
        for stranger in () if given else _strangers(state.near, tensors):
            raise UnsupportedCheckpoint(
                f"{stranger.path} says rank {stranger.rank}, but the tensors have {tensors['r']}: the file is from another run, and "
                "no other file has alpha",
                hint=_ASK,
            )
        raise IncompleteCheckpoint(
            f"no {FILE_NAME} in {places}: the tensors tell rank and targets, but no file there has alpha "
            f"({', '.join((*NAMED, TRAINING_ARGS))}, a YAML file of the run)",
            hint=f"{_ASK}; or give the config that the run began with: `adapter_config=FILE`",
        )
    warnings = tuple(_unknown(fields))
    head = next(filter(is_new_head, tensors["target_modules"]), None)
    if head is not None and fields.get("task_type") in ADDED_BY_PEFT:
        said = f"{fields.pop('task_type')} from {origins.pop('task_type')}"
        text = f"task_type is left out: with {said} PEFT would save `{head}` whole, which has LoRA here"
        warnings = (*warnings, text)
    where = next((recipe.path.parent for recipe in recipes), state.folder)
    config = adapter_config(fields, where / FILE_NAME)
    return FoundConfig(config=config, raw=fields, origins=origins, warnings=warnings)


def _unknown(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each field that decides about ΔW and that neither tensors nor files give."""
    if "use_rslora" not in fields:
        factor = fields["r"] ** 0.5
        yield (
            f"{FILE_NAME} is rebuilt, and no file says whether the run used rsLoRA: use_rslora is set to false; with rsLoRA every "
            f"ΔW would be {factor:.3g} times as large"
        )
    if "rank_pattern" in fields and "alpha_pattern" not in fields:
        yield (
            f"{FILE_NAME} is rebuilt: ranks differ by module, and no file says whether alpha does too; "
            f"all modules get {fields['lora_alpha']}"
        )


def _unknown_biases(own: Mapping[str, AdapterKey], config: AdapterConfig) -> Iterator[str]:
    """Yield a warning if a whole model was saved and its biases may have been trained."""
    biases = [name for name, key in own.items() if _is_bias(key)]
    if biases and config.bias == "none":
        yield (
            f"{FILE_NAME} is rebuilt, and no file says whether the run trained biases: {named(biases, 1)} stay behind; "
            "if it did, give the config that the run began with"
        )


def _is_bias(key: AdapterKey) -> bool:
    """Return whether it is a bias of the base model's."""
    return key.part in _OF_BASE and key.leaf == "bias" and not is_new_head(key.module)


def _of_tensors(
    state: TrainingState, parsed: Mapping[str, AdapterKey], trained: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the config that follow from the tensors, and from which of them were `trained`.

    Raises `UnsupportedCheckpoint` for LoRA whose config does not follow from them: trained tokens, bare parameters.
    """
    shapes = {name: state.entries[name].shape for name in parsed}
    ranks = {key.module: shapes[name][0] for name, key in parsed.items() if key.part in RANKED and shapes[name]}
    parts = {key.part for key in parsed.values()}
    if Part.TOKENS_DELTA in parts:
        _refuse("which tokens were trained", "`trainable_token_indices`")
    stacked = next(
        (module for module in ranks if f".{Part.BASE_LAYER.value}" in f"{module}." or _is_stack(module)), None
    )
    if stacked is not None:
        _refuse(f"which parameters of `{stacked}` have LoRA", "`target_parameters`")
    commonest = Counter(ranks.values()).most_common(1)[0][0]
    yield "r", commonest
    others = {module: rank for module, rank in sorted(ranks.items()) if rank != commonest}
    if others:
        yield "rank_pattern", others
    yield "target_modules", sorted(_targets(state, parsed, frozenset(ranks)))
    yield from _beside_lora(parsed, frozenset(ranks), trained)
    yield "use_dora", Part.MAGNITUDE in parts
    if any(key.part is Part.LORA_B and key.leaf == "bias" for key in parsed.values()):
        yield "lora_bias", True


def _beside_lora(
    parsed: Mapping[str, AdapterKey], adapted: frozenset[str], trained: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields for trained tensors that are not factors: whole modules, and biases."""
    saved = {key.module for key in parsed.values() if key.part is Part.SAVED_MODULE}
    biases: set[str] = set()
    held = [key for key in parsed.values() if key.part is Part.BASE_LAYER]
    if all(key.leaf == "bias" for key in held):  # without the base, every saved tensor was trained
        plain = [key for key in parsed.values() if key.part is Part.PLAIN]
        saved |= {saved_as(key.module, adapted) for key in plain if key.leaf != "bias"}
        heads = {key.module: saved_as(key.module, adapted) for key in (*plain, *held) if key.leaf == "bias"}
        biases = {module for module, head in heads.items() if saved.isdisjoint((module, head))}
    else:
        own = [key for name, key in parsed.items() if name in trained and key.part in _OF_BASE]
        biases = {key.module for key in own if _is_bias(key)} - {key.module for key in own if key.leaf == "weight"}
    if saved:
        yield "modules_to_save", sorted(saved)
    if biases:
        yield "bias", "lora_only" if biases <= adapted else "all"


def _is_stack(module: str) -> bool:
    return module.rpartition(".")[2] == "experts"


def _refuse(what: str, name: str) -> None:
    raise UnsupportedCheckpoint(
        f"no {FILE_NAME} beside the checkpoint, and neither tensors nor files tell {what}",
        hint=f"give the config that the run began with, which has {name}: `adapter_config=FILE`",
    )


def _targets(state: TrainingState, parsed: Mapping[str, AdapterKey], adapted: frozenset[str]) -> Iterator[str]:
    """Yield the `target_modules` with which PEFT puts LoRA on the `adapted` modules and on no others.

    The last part of the paths where the checkpoint has the base and all modules of that name are adapted; else the
    whole paths, for without the base it is not known which others there are.
    """
    left_out = [keys.parse(name) for name in state.without_values]
    names = [*parsed.values(), *left_out]
    plain = {key.module for key in names if key.part in (Part.PLAIN, Part.BASE_LAYER) and key.leaf == "weight"}
    # names saved without values: `base_layer` shows only layers under LoRA, a plain one that the others are listed too
    whole = any(key.part is Part.BASE_LAYER for key in parsed.values()) or any(
        key.part is Part.PLAIN for key in left_out
    )
    by_name: dict[str, set[str]] = defaultdict(set)
    for module in plain | adapted:
        by_name[module.rpartition(".")[2]].add(module)
    for name, modules in by_name.items():
        if whole and modules <= adapted and not name.isdecimal():
            yield name
        else:
            yield from modules & adapted


def trained_adapter(
    entries: Mapping[str, StateEntry], parsed: Mapping[str, AdapterKey], config: Path | None = None
) -> str | None:
    """Return the name of the one adapter that was trained, None where tensors have none in theirs.

    Of several, `config` is that of one of them: PEFT saves the adapter `default` into the folder itself, and any other
    into a folder of its name. Raises `UnsupportedCheckpoint` where there are none, or several and no config.
    """
    all_names = {key.adapter_name for key in parsed.values() if key.part is Part.LORA_A or key.part is Part.EMBEDDING_A}
    trained = {
        key.adapter_name
        for name, key in parsed.items()
        if key.adapter_name in all_names and entries[name].role is not Role.FROZEN
    }
    if len(trained) > 1 and config is not None:
        own = config.absolute().parent.name
        named = own if own in trained else "default" if "default" in trained else None
        trained = {named} if named else trained
    if len(trained) != 1:
        listed = ", ".join(sorted(map(str, trained or all_names))) or "none"
        raise UnsupportedCheckpoint(
            f"expected one trained adapter, found {len(trained)}: {listed}",
            hint="for one of several, give its config in a folder of the adapter's name: `adapter_config=FOLDER`; "
            '`what="state"` writes every tensor',
        )
    return trained.pop()
