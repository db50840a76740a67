"""A model with quantised weights, as the matrices that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from lora_tool.checkpoints.kinds import ModelDir
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.records import kept
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.quantised.encodings import dequantised, parts
from lora_tool.formats.quantised.layouts import QuantisedWeights, is_sign, read_quantised
from lora_tool.formats.quantised.names import give_full_precision, require_read
from lora_tool.formats.quantised.parts import LayoutError

_TABLE = "quantization_config"


def in_full_precision(model: ModelDir, hub_id: str | None = None) -> ModelDir:
    """Return the model with a matrix for each quantised weight, decoded when it is read, and a plain config.

    Scales of inputs and caches, which only fit the quantised model, are left out. A model without quantised weights
    is returned as it is. `hub_id` is the model's, for the hint. Raises `UnsupportedAdapter` for a format that is not
    read, or weights that are not stored as it says.
    """
    config = model.whole_config
    require_read(config, hub_id)
    if not quantisation_table(config) and sign_of(model) is None:
        return model
    try:
        return _plain(model)
    except LayoutError as error:
        raise UnsupportedAdapter(str(error), hint=give_full_precision(hub_id, config, model.root)) from error


@kept
def _plain(model: ModelDir) -> ModelDir:
    """Return a quantised model with a matrix for each weight. Raises `LayoutError`."""
    found = quantised_weights(model)
    by_place = {encoding.codes.name: dequantised(encoding) for encoding in found.weights.values()}
    of_weights = {part.name for encoding in found.weights.values() for part in parts(encoding)}
    consumed = {*of_weights, *found.calibrated}
    tensors = {}
    for name, tensor in model.tensors.items():
        if name in by_place:
            tensors[by_place[name].name] = by_place[name]
        elif name not in consumed:
            tensors[name] = tensor
    weights = replace(model.weights, tensors=tensors)
    config = replace(with_table(model.whole_config, None), quantization=None)
    return replace(model, config=config, weights=weights)


@kept
def sign_of(model: ModelDir) -> StoredTensor | None:
    """Return the first tensor that shows that the model is quantised, whatever its config says."""
    return next(filter(is_sign, model.tensors.values()), None)


@kept
def as_matrices(model: ModelDir) -> ModelDir:
    """Return the model as `in_full_precision` does, and as it is stored where its weights are not read."""
    try:
        return model if model.config is None else in_full_precision(model)
    except (UnsupportedAdapter, OSError):
        return model


def with_table(config: ModelConfig, table: Mapping[str, Any] | None) -> ModelConfig:
    """Return the config with this quantisation table wherever it has one; without any where it is None."""
    return replace(config, raw=_with_table(config.raw, table), edited=True)


def _with_table(raw: Mapping[str, Any], table: Mapping[str, Any] | None) -> dict[str, Any]:
    kept = {name: value for name, value in raw.items() if name != _TABLE or table is not None}
    inner = {
        name: _with_table(value, table) for name, value in kept.items() if isinstance(value, dict) and name != _TABLE
    }
    return kept | inner | ({_TABLE: dict(table)} if _TABLE in raw and table is not None else {})


@kept
def quantised_weights(model: ModelDir) -> QuantisedWeights:
    """Return the quantised weights of a model. Raises `LayoutError` for weights that do not follow their format."""
    table = {} if model.config is None else quantisation_table(model.config)
    if not table and sign_of(model) is None:
        return QuantisedWeights(weights={}, calibrated=())
    return read_quantised(model.tensors, table, metadata_in_files(model))


def metadata_in_files(model: ModelDir) -> Mapping[str, str]:
    """Return the texts in the headers of a model's files, one upon the other."""
    return {name: text for file in model.weights.files for name, text in file.metadata.items()}


def quantisation_table(config: ModelConfig) -> Mapping[str, Any]:
    """Return a config's quantisation table, also one of a config inside it (`text_config`); {} without one."""
    inner = (value.get(_TABLE) for value in config.raw.values() if isinstance(value, dict))
    found = config.raw.get(_TABLE) or next(filter(None, inner), None)
    return found if isinstance(found, dict) else {}
