"""The fields of `adapter_config.json` that PEFT refuses (peft 0.21, `LoraConfig.__post_init__`)."""

from __future__ import annotations

from lora_tool.formats.fields import Fields, is_object, is_strings

ON_BY_OBJECT = frozenset({"velora_config", "kasa_config", "arrow_config", "use_bdlora", "monteclora_config"})
"""Fields whose feature any object enables; an empty object gives the feature's defaults."""
_OBJECTS = (*sorted(ON_BY_OBJECT), "eva_config", "corda_config", "lora_ga_config")


def note_refused(fields: Fields) -> None:
    """Note values that should be objects and are not, and combinations of fields that PEFT refuses."""
    for name in _OBJECTS:
        fields.typed(name, "object", is_object)
    raw = fields.table
    if isinstance(raw.get("target_modules"), str):
        for name in ("layers_to_transform", "layers_pattern"):
            if raw.get(name) is not None:
                fields.note(name, "PEFT refuses it beside a `target_modules` that is one string")
    elif raw.get("layers_to_transform") is None and _names_something(raw.get("layers_pattern")):
        fields.note("layers_pattern", "PEFT refuses it without `layers_to_transform`")
    if raw.get("lora_bias") is True and raw.get("use_dora") is True:
        fields.note("lora_bias", "PEFT refuses it beside `use_dora`")
    if raw.get("lora_bias") is True and raw.get("init_lora_weights", True) not in (True, False):
        fields.note("lora_bias", "PEFT refuses it beside an `init_lora_weights` that is neither true nor false")
    if raw.get("init_lora_weights") == "loftq" and not raw.get("loftq_config"):
        fields.note("init_lora_weights", "PEFT refuses loftq without `loftq_config`")


def _names_something(pattern: object) -> bool:
    return bool(pattern) and (isinstance(pattern, str) or is_strings(pattern))
