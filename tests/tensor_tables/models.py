"""One model of a class, built on the meta device under a small config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from lora_tool.models import is_computed
from lora_tool.models.sizes import kinds_of

Fields = Mapping[str, Any]
Shape = tuple[int, ...]

NO_GENERATION = mock.patch.object(PreTrainedModel, "can_generate", classmethod(lambda _: False))
"""Without which a quarter of the time goes into configs of generation."""
_BARE = frozenset(
    name for names in MODEL_MAPPING_NAMES.values() for name in ((names,) if isinstance(names, str) else names)
)
"""The classes of base models. Another class without a part of its prefix's name holds the base model's parts itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One model: the fields of its config, its tensors on disk, and which of them are other tensors' values."""

    class_name: str
    fields: Fields
    kinds: Mapping[str, frozenset[str]]
    """What each field of the config holds, in the words of the table."""
    shapes: Mapping[str, Shape]
    optional: frozenset[str]
    ties: Mapping[str, str]
    prefix: str
    unexpected: tuple[str, ...]
    followed: frozenset[str] = frozenset()
    """Fields that were not given, and filled in from others."""


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a config and of those inside it, by their paths."""
    for name, value in config.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            yield prefix + name, {}
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def build(config: PretrainedConfig, class_name: str) -> Built:
    model_class = getattr(transformers, class_name)
    with torch.device("meta"), no_init_weights(), NO_GENERATION:
        model = model_class(config)
    if get_model_conversion_mapping(model, add_legacy=False):
        raise ValueError("stored under other names")
    prefix = "" if model.base_model is model else f"{model_class.base_model_prefix}."
    own = {name: trunk_name(name, prefix) for name in model.state_dict()}
    shapes = {own[name]: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    buffers = {own[name] for name, _ in model.named_buffers() if name in own}
    missing = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    ignored = {own[name] for name in own.keys() & set(model._keys_to_ignore_on_save or ())} | buffers
    ignored |= {own[name] for name in own if is_computed(name) or any(p.search(name) for p in missing)}
    every = dict(flat(config.to_dict()))
    fields = {name: value for name, value in every.items() if value is None or isinstance(value, bool | int | str)}
    fields["num_labels"] = config.num_labels
    return Built(
        class_name=class_name,
        fields=fields,
        kinds={name: kinds_of(value) for name, value in every.items()},
        shapes=shapes,
        optional=frozenset(ignored),
        ties={own.get(one, one): own.get(two, two) for one, two in model.all_tied_weights_keys.items()},
        prefix=model_class.base_model_prefix if prefix or class_name in _BARE else "",
        unexpected=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )


def trunk_name(name: str, prefix: str) -> str:
    """Return a name with what a class calls its base model written as ``@``."""
    return f"@{name.removeprefix(prefix)}" if name.startswith(prefix) else name
