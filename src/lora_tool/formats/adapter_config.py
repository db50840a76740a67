"""`adapter_config.json`: PEFT's LoraConfig, read with types, and how each of its fields affects a merge.

Every field of `peft.LoraConfig` is classed in `FIELD_USES`; a test compares that table with the installed PEFT, so a
field that a new PEFT adds fails a test here instead of being merged wrongly there.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.core.choices import Choice
from lora_tool.core.errors import Problem
from lora_tool.core.keys import is_under
from lora_tool.formats.fields import Fields, is_number, is_object, is_strings, shown
from lora_tool.formats.files import read_object
from lora_tool.formats.patterns import Patterns, compiled, ignores_numbers, is_path

FILE_NAME = "adapter_config.json"
_LAYOUT = "lora_B_layout"


@enum.unique
class ExpertLayout(Choice):
    """How the columns of a fused lora_B belong to experts. Both layouts have the same shape, so only its writer knows."""

    RANK_MAJOR = "rank_major"
    """Column c belongs to expert c mod experts: the layout of PEFT, vLLM and all other programs."""
    GROUPED_BY_EXPERT = "grouped_by_expert"
    """Column c belongs to expert c div r: the layout of Unsloth before 2026-09 (https://github.com/unslothai/unsloth-zoo/pull/1269)."""


@enum.unique
class FieldUse(str, enum.Enum):
    """How a field of LoraConfig affects a merge."""

    USED = "used"
    INERT = "inert"
    """Has no effect on the merged weights: training only, runtime only, or documentation."""
    REFUSED = "refused"
    """Any value but the default changes the result in a way that is refused by name."""


_USED = (
    "task_type peft_type base_model_name_or_path revision r target_modules exclude_modules lora_alpha fan_in_fan_out "
    "bias use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern "
    "trainable_token_indices use_dora lora_bias target_parameters ensure_weight_tying auto_mapping"
)
_INERT = (
    "peft_version inference_mode lora_dropout loftq_config eva_config corda_config lora_ga_config "
    "qalora_group_size runtime_config megatron_core"
)
_REFUSED = (
    "megatron_config velora_config alora_invocation_tokens use_qalora monteclora_config layer_replication use_bdlora "
    "arrow_config kasa_config"
)
FIELD_USES: Mapping[str, FieldUse] = {
    **dict.fromkeys(_USED.split(), FieldUse.USED),
    **dict.fromkeys(_INERT.split(), FieldUse.INERT),
    **dict.fromkeys(_REFUSED.split(), FieldUse.REFUSED),
}
"""Each of LoraConfig's fields. The configs of special inits are inert because `init_lora_weights` decides."""
_ON_BY_OBJECT = ("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config")
"""Fields whose feature any object enables; an empty object gives the feature's defaults."""

INITS_THAT_KEEP_THE_BASE = frozenset({"true", "false", "gaussian", "eva", "orthogonal"})
"""`init_lora_weights` values after which the base weights are still those on disk (peft 0.21, `LoraLayer`)."""

INITS_RECOMPUTED = frozenset({"pissa", "olora"})
"""Values after which they are not. The computation gives the same on every load, so a merge repeats it."""
INITS_OF_A_MATRIX = ("pissa", "olora")
"""How those begin that make the factors of the base's matrix, and never more columns than it has."""
_INITS = INITS_THAT_KEEP_THE_BASE | INITS_RECOMPUTED | {"loftq", "lora_ga", "corda", "mica"}
_INITS_IN_ANY_CASE = frozenset({"gaussian", "olora", "mica"})

TOKENS_ALONE = "TRAINABLE_TOKENS"
"""The `peft_type` of an adapter that trained rows of embeddings and nothing else."""
KNOWN_TYPES = frozenset({"LORA", TOKENS_ALONE})
TOKENS_FIELDS = frozenset({"token_indices", "init_weights"})
"""Fields of PEFT's `TrainableTokensConfig` that no LoraConfig has."""

_BIASES = ("none", "all", "lora_only")
_TASK_TYPES = ("CAUSAL_LM", "FEATURE_EXTRACTION", "QUESTION_ANS", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS")
"""PEFT's `TaskType`: for any other value PEFT builds a plain model, or fails."""


class AdapterConfig(Struct, frozen=True, kw_only=True, dict=True):
    """The fields of `adapter_config.json` that define an adapter, with PEFT's defaults for absent ones."""

    path: Path
    peft_type: str | None = "LORA"
    task_type: str | None = None
    base_model: str | None = None
    revision: str | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    dropout: float | None = None
    """`lora_dropout`, which only training uses; None if the field is not a number."""
    init_lora_weights: str = "true"
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    modules_to_save: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Embedding module (the end of its path; "" for the model's input embedding) → token rows that were trained."""
    expert_layout: str | None = None
    """`lora_B_layout`, which Unsloth writes since 2026-09: how the columns of a fused lora_B belong to experts."""
    by_unsloth: bool = False
    """Whether Unsloth wrote it: its `auto_mapping` has `unsloth_fixed`."""
    trained_class: str | None = None
    """The transformers class that the adapter was trained on; PEFT writes it only without a task type."""
    ensure_weight_tying: bool = False
    peft_version: str | None = None
    """The version of PEFT that wrote it, which the file names since PEFT 0.18."""
    refused: tuple[str, ...] = ()
    """Names of the fields whose values a merge refuses."""
    unknown: tuple[str, ...] = ()
    """Names of fields that no LoraConfig we know has. PEFT warns and ignores them."""
    problems: tuple[Problem, ...] = ()

    # cached: hundreds of modules are matched against hundreds of names

    @cached_property
    def target_names(self) -> frozenset[str]:
        return frozenset(self.target_modules if isinstance(self.target_modules, tuple) else ())

    @cached_property
    def excluded_names(self) -> frozenset[str]:
        return frozenset(self.exclude_modules if isinstance(self.exclude_modules, tuple) else ())

    @cached_property
    def _ranks(self) -> Patterns:
        return Patterns(self.rank_pattern)

    @cached_property
    def _alphas(self) -> Patterns:
        return Patterns(self.alpha_pattern)

    @property
    def has_known_type(self) -> bool:
        """Whether its tensors are those of PEFT's LoRA. Trained token rows count, with or without other tensors."""
        return self.peft_type in KNOWN_TYPES

    @property
    def is_of_another_kind(self) -> bool:
        """Whether it says that its tensors are those of another method."""
        return self.peft_type is not None and not self.has_known_type

    @property
    def ignores_numbers(self) -> bool:
        """Whether it treats modules the same whose paths differ only in layer and expert numbers."""
        lists = (self.target_modules, self.exclude_modules, self.modules_to_save, self.token_indices)
        named = [key for each in lists for key in ((each,) if isinstance(each, str) else each or ())]
        keys = filter(None, (*named, *self.rank_pattern, *self.alpha_pattern))
        return not self.layers_to_transform and not self.target_parameters and all(map(ignores_numbers, keys))

    def rank(self, module: str) -> int:
        """Return the rank that the config gives the module: the first `rank_pattern` that matches, else `r`."""
        pattern = self._ranks.first(module) if self.rank_pattern else None
        return self.r if pattern is None else int(self.rank_pattern[pattern])

    def alpha(self, module: str) -> float:
        """Return the alpha of the module: the first `alpha_pattern` that matches, else `lora_alpha`."""
        pattern = self.alpha_key(module)
        return self.lora_alpha if pattern is None else self.alpha_pattern[pattern]

    def alpha_key(self, module: str) -> str | None:
        """Return the entry of `alpha_pattern` that gives the module its alpha, None where `lora_alpha` does."""
        return self._alphas.first(module) if self.alpha_pattern else None

    def scaling(self, module: str) -> float:
        """Return the factor of ΔW = B·A: alpha/r, or alpha/√r with rsLoRA (https://arxiv.org/abs/2312.03732)."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return whether PEFT would put LoRA on the module (`tuners_utils.check_target_module_exists`)."""
        if self._excluded(module) or not _matches(self.target_modules, self.target_names, module):
            return False
        return isinstance(self.target_modules, str) or module in self.target_names or self._in_layers(module)

    def left_out_by(self, module: str) -> str | None:
        """Return the field that keeps LoRA off a module which `target_modules` names; None for one that it does not."""
        if not _matches(self.target_modules, self.target_names, module) or self.targets(module):
            return None
        if _matches(self.exclude_modules, self.excluded_names, module):
            return "exclude_modules"
        return "modules_to_save" if self._excluded(module) else "layers_to_transform"

    def saves(self, module: str) -> bool:
        """Return whether the module is, or lies in, one that PEFT saves whole: its path ends with one of the names.

        The ends of the text are compared, so "norm" means `input_layernorm` too (peft 0.21,
        `other.py::_set_trainable`).
        """
        return any(f"{name}." in f"{module}." for name in self.modules_to_save)

    def tokens(self, module: str) -> tuple[int, ...]:
        """Return the token rows of the embedding `module` that were trained."""
        for name, rows in self.token_indices.items():
            if not name or module == name or module.endswith(f".{name}"):
                return rows
        return ()

    def _excluded(self, module: str) -> bool:
        excluded = _matches(self.exclude_modules, self.excluded_names, module)
        return excluded or any(f".{name}." in f".{module}." for name in self.modules_to_save)

    def _in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        before = [rf"(?:^|.*?\.){re.escape(name)}" for name in self.layers_pattern] or [r".*?\.[^.]*"]
        matches = (re.match(rf"{pattern}\.(?P<idx>\d+)\.", module) for pattern in before)
        match = next(filter(None, matches), None)
        return match is not None and int(match["idx"]) in self.layers_to_transform


def _matches(selector: tuple[str, ...] | str | None, names: frozenset[str], module: str) -> bool:
    """Return whether a field selects the module: by its pattern, or by its listed `names`."""
    if isinstance(selector, str):
        return bool(selector) and compiled(selector).fullmatch(module) is not None
    return is_under(module, names)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Return the config in the file `path`; wrong fields are in `problems`. Raises `CorruptFile`, `BadConfig`."""
    return adapter_config(read_object(path), path)


def adapter_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Return the config that the object `raw` is, of the file `path`; wrong fields are in `problems`."""
    fields = Fields(raw, path)
    if raw.get("peft_type") is None:
        fields.note("peft_type", 'expected a string such as "LORA", found nothing')
    other = fields.text("peft_type")
    if other is not None and other.upper() not in KNOWN_TYPES:  # whose fields are other ones
        task_type, base = fields.text("task_type"), fields.text("base_model_name_or_path")
        return AdapterConfig(path=path, peft_type=other, task_type=task_type, base_model=base)
    tokens_only = raw.get("peft_type") == TOKENS_ALONE
    known = {*FIELD_USES, _LAYOUT} | (TOKENS_FIELDS if tokens_only else set())
    version = raw.get("peft_version")
    _note_refused(fields)
    return AdapterConfig(
        path=path,
        peft_type=fields.text("peft_type"),
        task_type=fields.text("task_type", _TASK_TYPES),
        base_model=fields.text("base_model_name_or_path"),
        revision=fields.text("revision"),
        r=fields.integer("r", 8, least=1),
        lora_alpha=fields.number("lora_alpha", 8),
        use_rslora=fields.boolean("use_rslora"),
        use_dora=fields.boolean("use_dora"),
        lora_bias=fields.boolean("lora_bias"),
        bias=fields.typed("bias", "none, all or lora_only", _BIASES.__contains__, "none", null=False),
        fan_in_fan_out=fields.boolean("fan_in_fan_out"),
        dropout=_dropout(fields),
        init_lora_weights=_init(fields),
        target_modules=() if tokens_only else _names_or_pattern(fields, "target_modules"),
        target_parameters=fields.names("target_parameters"),
        exclude_modules=_names_or_pattern(fields, "exclude_modules"),
        modules_to_save=fields.names("modules_to_save") or (),
        layers_to_transform=_layers(fields),
        layers_pattern=fields.listed("layers_pattern"),
        rank_pattern=_numbers_by_pattern(fields, "rank_pattern", least=1),
        alpha_pattern=_numbers_by_pattern(fields, "alpha_pattern"),
        token_indices=_token_indices(fields, "token_indices" if tokens_only else "trainable_token_indices"),
        expert_layout=fields.text(_LAYOUT),
        by_unsloth=isinstance(raw.get("auto_mapping"), dict) and bool(raw["auto_mapping"].get("unsloth_fixed")),
        trained_class=_trained_class(raw.get("auto_mapping")),
        ensure_weight_tying=fields.boolean("ensure_weight_tying"),
        # only displayed: another type is not a fault
        peft_version=version if isinstance(version, str) else None,
        refused=tuple(
            name
            for name in _REFUSED.split()
            if (isinstance(raw.get(name), dict) if name in _ON_BY_OBJECT else raw.get(name))
        ),
        unknown=tuple(name for name in raw if name not in known),
        problems=tuple(fields.problems),
    )


def _note_refused(fields: Fields) -> None:
    """Note what PEFT refuses: values that should be objects, and some pairs of fields (`LoraConfig.__post_init__`)."""
    for name in (*_ON_BY_OBJECT, "eva_config", "corda_config", "lora_ga_config"):
        fields.typed(name, "object", is_object)
    raw, pattern = fields.table, fields.table.get("layers_pattern")
    if isinstance(raw.get("target_modules"), str):
        for name in ("layers_to_transform", "layers_pattern"):
            if raw.get(name) is not None:
                fields.note(name, "PEFT refuses it beside a `target_modules` that is one string")
    elif raw.get("layers_to_transform") is None and pattern and (isinstance(pattern, str) or is_strings(pattern)):
        fields.note("layers_pattern", "PEFT refuses it without `layers_to_transform`")
    if raw.get("lora_bias") is True and raw.get("use_dora") is True:
        fields.note("lora_bias", "PEFT refuses it beside `use_dora`")
    if raw.get("lora_bias") is True and raw.get("init_lora_weights", True) not in (True, False):
        fields.note("lora_bias", "PEFT refuses it beside an `init_lora_weights` that is neither true nor false")
    if raw.get("init_lora_weights") == "loftq" and not raw.get("loftq_config"):
        fields.note("init_lora_weights", "PEFT refuses loftq without `loftq_config`")


def _names_or_pattern(fields: Fields, name: str) -> tuple[str, ...] | str | None:
    """Return a list of strings, or one string, which PEFT reads as a regular expression."""
    value = fields.table.get(name)
    if not isinstance(value, str):
        return fields.names(name)
    refused = _refusal(value)
    if refused:
        fields.note(name, f"{refused}; write the modules' names as a list")
    return None if refused else value


def _numbers_by_pattern(fields: Fields, name: str, *, least: int | None = None) -> dict[str, float]:
    """Return numbers by the patterns of their modules, {} where one of either is wrong; with `least` they are ints."""
    what, before = "number" if least is None else f"int of at least {least}", len(fields.problems)
    table: dict[str, float] = fields.typed(name, "object of numbers", is_object, {}, null=False)
    for key, number in table.items():
        refused = _refusal(key)
        if refused:
            fields.note(name, refused)
        if not is_number(number) or (least is not None and (number < least or type(number) is not int)):
            fields.expected(f"{name}[{shown(key)}]", what, number)
    return table if len(fields.problems) == before else {}


def _refusal(pattern: str) -> str | None:
    try:
        if not is_path(pattern):
            compiled(pattern)
    except ValueError as error:
        return str(error)
    return None


def _trained_class(mapping: object) -> str | None:
    """Return the class that `auto_mapping` names, if transformers has it; one of the user's own code says nothing."""
    if not isinstance(mapping, dict):
        return None
    name, library = mapping.get("base_model_class"), mapping.get("parent_library")
    own = isinstance(library, str) and library.partition(".")[0] == "transformers"
    return name if own and isinstance(name, str) else None


def _init(fields: Fields) -> str:
    def fits(value: object) -> bool:
        return isinstance(value, bool | str | None)

    value = fields.typed("init_lora_weights", "true, false or a string", fits, default=True, null=False)
    word = str(False if value is None else value).lower()
    if isinstance(value, str) and word in ("true", "false"):
        fields.expected("init_lora_weights", word, value)
    elif isinstance(value, str) and word in _INITS - _INITS_IN_ANY_CASE and word != value:
        fields.expected("init_lora_weights", shown(word), value)
    return word


def _dropout(fields: Fields) -> float | None:
    """Return the dropout, which decides nothing; one with which PEFT makes no layer is noted."""

    def fits(value: object) -> bool:
        return isinstance(value, int | float) and not value > 1

    value = fields.typed("lora_dropout", "number of at most 1", fits, null=False)
    return value if is_number(value) else None


def _layers(fields: Fields) -> tuple[int, ...] | None:
    def fits(value: object) -> bool:
        return type(value) is int or (isinstance(value, list) and all(type(layer) is int for layer in value))

    value = fields.typed("layers_to_transform", "int or list of ints", fits)
    return (value,) if type(value) is int else None if value is None else tuple(value)


def _token_indices(fields: Fields, name: str) -> dict[str, tuple[int, ...]]:
    def fits(value: object) -> bool:
        return not value or _is_rows(value) or (isinstance(value, dict) and all(map(_is_rows, value.values())))

    value = fields.typed(name, "list of ints, or object of such lists", fits) or {}
    return {module: tuple(rows) for module, rows in ({"": value} if isinstance(value, list) else value).items()}


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and all(type(row) is int and row >= 0 for row in value)
