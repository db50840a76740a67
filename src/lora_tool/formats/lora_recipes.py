"""A LoRA run's settings as trainers record them next to its checkpoints: above all alpha, which no tensor stores.

`lora_train_meta.json` is verl's, `run_config.yaml` Megatron-Bridge's and `config.yaml` NeMo-RL's, `args.json`
ms-swift's; axolotl and LLaMA-Factory are given a YAML file, whatever it is called, and `training_args.bin` is the
pickle of whatever arguments a Trainer had. All of them are data here: YAML is loaded safely, and the pickle is read by
the machine that runs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.core.errors import CorruptFile, Defect
from lora_tool.formats.fields import is_number, shown
from lora_tool.formats.files import read_object, read_text
from lora_tool.formats.pickle_objects import Stub
from lora_tool.formats.torch_zip import read_torch_file

TRAINING_ARGS = "training_args.bin"
RUN_CONFIG = "run_config.yaml"
NAMED = ("lora_train_meta.json", RUN_CONFIG, "args.json")
"""Files that are nothing else."""
_YAML = (".yaml", ".yml")
_LARGEST = 4 << 20
_MOST_FILES = 64
"""YAML files of a folder that are read."""

_SAME = "use_rslora use_dora init_lora_weights base_model_name_or_path task_type alpha_pattern"
"""Fields of PEFT's config that programs call by the same name."""
_FLAT: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in _SAME.split()},
    "r": ("lora_r", "lora_rank"),
    "lora_alpha": ("lora_alpha",),
    "use_rslora": ("use_rslora", "peft_use_rslora"),
    "use_dora": ("use_dora", "peft_use_dora"),
    "init_lora_weights": ("init_lora_weights", "peft_init_lora_weights", "init_weights"),
    "bias": ("lora_bias", "bias"),
    "base_model_name_or_path": ("base_model_name_or_path", "base_model", "model_name_or_path", "model"),
}
"""Field of PEFT's config → its names in programs that keep it among all the settings of a run."""
_OWN: Mapping[str, tuple[str, ...]] = {**_FLAT, "r": ("r", "dim"), "lora_alpha": ("lora_alpha", "alpha")}
"""The same where all fields are about LoRA."""
_OF_VERL: Mapping[str, Any] = {"bias": "none"}
"""What verl gives every LoRA and does not write down."""
_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "seq_cls": "SEQ_CLS",
    "reward_model": "SEQ_CLS",
    "token_cls": "TOKEN_CLS",
    "seq_2_seq_lm": "SEQ_2_SEQ_LM",
    "feature_extraction": "FEATURE_EXTRACTION",
    "question_ans": "QUESTION_ANS",
}
"""What programs call PEFT's task types, in lower case."""


class Recipe(Struct, frozen=True, kw_only=True):
    """What one file says of the LoRA that was trained: fields of PEFT's config, those that it has."""

    path: Path
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        value: int | None = self.fields.get("r")
        return value

    @property
    def alpha(self) -> float | None:
        value: float | None = self.fields.get("lora_alpha")
        return value


def recipes_in(folder: Path) -> Iterator[Recipe]:
    """Yield the LoRA settings in the files of the folder, from files of known names first.

    Raises `CorruptFile` for one of those that cannot be read; other YAML and pickles are passed over.
    """
    for name in NAMED:
        if (folder / name).is_file() and (recipe := read_recipe(folder / name)) is not None:
            yield recipe
    yaml = sorted(path for path in _files(folder) if path.suffix in _YAML and path.name not in NAMED)
    for path in (folder / TRAINING_ARGS, *yaml[:_MOST_FILES]):
        with contextlib.suppress(CorruptFile):
            if path.is_file() and (recipe := read_recipe(path)) is not None:
                yield recipe


def recipes_near(near: Iterable[Path], ranks: Collection[int]) -> tuple[Recipe, ...]:
    """Return the settings for these ranks from the nearest folder that has any. Raises as `recipes_in`."""
    for folder in near:
        found = tuple(recipe for recipe in recipes_in(folder) if recipe.rank is None or recipe.rank in ranks)
        if found:
            return found
    return ()


def _files(folder: Path) -> Iterable[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:
        return ()


def read_recipe(path: Path) -> Recipe | None:
    """Return the LoRA settings in the file, None where it has none. Raises `CorruptFile`, `BadConfig`."""
    table = _READERS.get(path.suffix, read_object)(path)
    section = _section(table)
    if section is not None:
        fields = {**_implied(section), **dict(_fields(section, _OWN, path))}
    elif path.name == NAMED[0]:
        fields = {**_OF_VERL, **dict(_fields(table, _OWN, path))}
    else:
        fields = dict(_fields(table, _FLAT, path)) if _is_lora(table) else {}
    if "lora_alpha" not in fields and "r" not in fields:
        return None
    base = _base(table)
    return Recipe(path=path, fields=fields if base is None else {"base_model_name_or_path": base, **fields})


def _section(table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of a file that is about LoRA, None where it has none of its own."""
    if isinstance(peft := table.get("peft"), Mapping):  # Megatron-Bridge
        return peft
    policy = table.get("policy")
    parts = [policy.get("megatron_cfg"), policy.get("dtensor_cfg")] if isinstance(policy, Mapping) else []  # NeMo-RL
    found = [part.get(name) for part in parts if isinstance(part, Mapping) for name in ("peft", "lora_cfg")]
    return next((each for each in found if isinstance(each, Mapping) and each.get("enabled")), None)


def _implied(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings implied by the program: Megatron-Bridge scales every LoRA by alpha / r, with one alpha."""
    bridge = str(section.get("_target_") or "").startswith("megatron.bridge.")
    return {"use_rslora": False, "alpha_pattern": {}} if bridge else {}


def _is_lora(table: Mapping[str, Any]) -> bool:
    """Return whether the run trained LoRA, as far as the file has a word for that."""
    words = [table.get(name) for name in ("finetuning_type", "adapter", "tuner_type", "train_type", "sft_type")]
    stated = [word for word in words if isinstance(word, str)]
    return not stated or any(word in ("lora", "qlora", "longlora") for word in stated)


def _fields(section: Mapping[str, Any], known: Mapping[str, tuple[str, ...]], path: Path) -> Iterator[tuple[str, Any]]:
    for name, words in known.items():
        value = next((section[word] for word in words if section.get(word) is not None), None)
        if value is None:
            continue
        if name == "task_type":
            value = _TASKS.get(str(value).lower())
        elif not _FITS[name](value):
            if name in ("r", "lora_alpha"):
                message = f"expected a number, found {shown(value)}"
                raise CorruptFile.of(path, Defect.BAD_FIELD, message, name)
            continue
        if value is not None and value not in ({}, []):
            yield name, value
    if section.get("pissa_init") is True:  # LLaMA-Factory
        rounds = section.get("pissa_iter", 16)
        yield "init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}"


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and is_number(each) for key, each in value.items())


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "r": lambda value: type(value) is int and value > 0,
    "lora_alpha": is_number,
    "use_rslora": _is_bool,
    "use_dora": _is_bool,
    "init_lora_weights": lambda value: isinstance(value, bool | str),
    "bias": lambda value: value in ("none", "all", "lora_only"),
    "base_model_name_or_path": _is_text,
    "alpha_pattern": _is_numbers,
}


def _base(table: Mapping[str, Any]) -> str | None:
    """Return the base model that a file names outside its LoRA section."""
    policy, model = table.get("policy"), table.get("model")
    metadata = model.get("extra_checkpoint_metadata") if isinstance(model, Mapping) else None
    places = ((policy, "model_name"), (model, "hf_model_id"), (metadata, "hf_model_id"))
    names = (place.get(name) for place, name in places if isinstance(place, Mapping))
    return next((name for name in names if isinstance(name, str) and name), None)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file, {} where it holds something else. Raises `CorruptFile`; no tag runs code."""
    import yaml  # for few checkpoints

    try:
        table = yaml.load(read_text(path, limit=_LARGEST), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - safe loaders both
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = f"is not valid YAML: {' '.join(str(error).split())[:200]}"
        raise CorruptFile.of(path, Defect.BAD_FIELD, message) from error
    return table if isinstance(table, Mapping) else {}


def _read_arguments(path: Path) -> Mapping[str, Any]:
    """Return the attributes of the pickled arguments."""
    value = read_torch_file(path).value
    if not isinstance(value, Stub):
        return {}
    states = value.state if isinstance(value.state, tuple) else (value.state,)
    return next((state for state in states if isinstance(state, dict)), {})


_READERS: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".bin": _read_arguments,
}
"""How a file is read, by its ending; the others are JSON."""
