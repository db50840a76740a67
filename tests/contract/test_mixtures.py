"""The table of mixtures of experts, against the classes of the transformers that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from transformers.core_model_loading import revert_weight_conversion

from lora_tool.core.tensors import DType
from lora_tool.formats.model_config import ModelConfig, model_config_of
from lora_tool.models import mixtures
from lora_tool.models.mapping.mixture import mixture_mapping
from lora_tool.models.mapping.model import ShapeOnDisk
from lora_tool.models.mapping.weight_mapping import WeightMapping
from tests.contract.test_import_cost import CALL, loaded
from tests.oracle.tiny import tiny_config, tiny_model
from tests.tensor_tables.changes import fields_of

ROWS = mixtures._ROWS
TYPES = sorted({row.model_type for row in ROWS})
CLASSES = {row.model_type: row.causal_lm for row in ROWS}


def plain(model_type: str, **changed: Any) -> dict[str, Any]:
    """Return config.json of a tiny model, as transformers writes it."""
    made = tiny_config(model_type, "causal-lm", **changed)
    made.architectures = [CLASSES[model_type]]
    raw: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return raw


def changes(model_type: str) -> Iterator[dict[str, Any]]:
    """Yield configs with one field changed or left out."""
    raw = plain(model_type)
    for name in raw.keys() - {"architectures", "model_type"}:
        yield {other: value for other, value in raw.items() if other != name}
    for name, value in fields_of(tiny_config(model_type, "causal-lm")):
        if isinstance(value, bool):
            yield raw | {name: not value}
        elif isinstance(value, int):
            yield raw | {name: 2 * value}
        elif isinstance(value, list | None):
            yield raw | {name: [0]}
        if value is not None:
            yield raw | {name: None}


def config_of(raw: Mapping[str, Any]) -> ModelConfig:
    return model_config_of(raw, Path("config.json"))


def built(config: ModelConfig) -> transformers.PreTrainedModel | None:
    """Return the model that transformers makes of the config, None where it makes none."""
    made = getattr(transformers, config.architectures[0])
    try:
        with torch.device("meta"):
            model: transformers.PreTrainedModel = made(made.config_class.from_dict(dict(config.raw)))
    except Exception:  # noqa: BLE001 - what a wrong config raises cannot be listed
        return None
    return model


def saved(model: transformers.PreTrainedModel) -> dict[str, ShapeOnDisk]:
    """Return what transformers writes of the model."""
    return {
        name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items()
    }


def require_same(config: ModelConfig, disk: Mapping[str, ShapeOnDisk], dtype: DType) -> None:
    """Compare all that a plan asks, of the table and of transformers."""
    found = mixture_mapping(config, disk, dtype)
    assert found is not None
    told = WeightMapping(config, config.architectures[0], disk, dtype)
    assert list(found.facts.parameters) == list(told.facts.parameters)
    for name in ("class_name", "layers", "conv1d", "transposed", "tied", "output", "head", "unsaved"):
        assert getattr(found.facts, name) == getattr(told.facts, name), name
    assert found.facts.keep_in_fp32 == told.facts.keep_in_fp32
    assert list(found.facts.shapes.items()) == list(told.facts.shapes.items())
    bare = told.facts.modules - found.facts.modules
    assert found.facts.modules <= told.facts.modules
    assert not any(name.startswith(f"{module}.") for module in bare for name in told.facts.shapes)
    assert list(found.parameters.items()) == list(told.parameters.items())
    assert (found.unexpected, found.missing, found.outside) == (told.unexpected, told.missing, told.outside)
    assert found.tied_by_config == told.tied_by_config
    assert found.written(found.facts.shapes) == told.written(told.facts.shapes)
    for name in (*disk, *found.facts.shapes):
        assert found.place(name) == told.place(name)
    for name in found.facts.shapes:
        assert found.piece_names(name) == told.piece_names(name)
        assert found.is_written_as_in_memory(name) == told.is_written_as_in_memory(name)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_row_gives_a_class_the_parameters_that_transformers_gives_it(model_type: str) -> None:
    compared: set[frozenset[tuple[str, ShapeOnDisk]]] = set()
    for raw in (plain(model_type), *changes(model_type)):
        config = config_of(raw)
        shapes = next(filter(None, (row.shapes(config) for row in ROWS if row.model_type == model_type)), None)
        model = built(config) if shapes is not None else None
        if shapes is None or model is None:
            continue
        assert list(shapes.items()) == [(name, tuple(each.shape)) for name, each in model.state_dict().items()], raw
        if frozenset(shapes.items()) not in compared:
            compared.add(frozenset(shapes.items()))
            require_same(config, saved(model), DType.BF16)
    assert len(compared) > 5


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_base_of_another_type_tied_or_with_further_layers(model_type: str, dtype: DType) -> None:
    raw = plain(model_type, tie_word_embeddings=dtype is DType.F16, num_hidden_layers=3)
    config = config_of(raw)
    model = built(config)
    assert model is not None
    disk = saved(model)
    beyond = {"model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.mlp.experts.0.up_proj.weight": (24, 32)}
    require_same(config, disk | beyond, dtype)
    if dtype is DType.F16:
        require_same(config, {name: shape for name, shape in disk.items() if name != "lm_head.weight"}, dtype)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_base_that_is_not_its_class_is_for_transformers(model_type: str) -> None:
    config = config_of(plain(model_type))
    model = built(config)
    assert model is not None
    disk = saved(model)
    assert mixture_mapping(config, disk, DType.BF16) is not None
    part = next(name for name in disk if ".experts.3.up_proj" in name)
    others = [
        {name: shape for name, shape in disk.items() if name != part},
        disk | {part: (*disk[part][:-1], disk[part][-1] + 1)},
        disk | {part.replace(".experts.3.", ".experts.4."): disk[part]},
        disk | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)},
        disk | {"score.weight": (1, 32), f"model.layers.{'9' * 5000}.weight": (1,)},
        disk | {f"{part.partition('.3.')[0]}.gate_up_proj": (4, 48, 32)},
        {name.removeprefix("model."): shape for name, shape in disk.items()},
    ]
    assert [mixture_mapping(config, other, DType.BF16) for other in others] == [None] * len(others)
    raw = plain(model_type)
    experts = next(name for name in ("n_routed_experts", "num_experts", "num_local_experts") if name in raw)
    refused: tuple[dict[str, object], ...] = (
        {"architectures": []},
        {experts: 10**12},
        {"num_hidden_layers": 10**12},
    )
    for changed in refused:
        assert mixture_mapping(config_of(raw | changed), disk, DType.BF16) is None


def test_a_merge_into_a_mixture_needs_no_torch(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_model("qwen3_moe", "causal-lm").save_pretrained(base)
    adapter.mkdir()
    layers = {"self_attn.o_proj": (32, 32), "mlp.experts.1.up_proj": (24, 32)}
    factors = {
        f"base_model.model.model.layers.0.{name}.{part}.weight": np.ones(shape, np.float32)
        for name, (rows, columns) in layers.items()
        for part, shape in (("lora_A", (2, columns)), ("lora_B", (rows, 2)))
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": r".*layers\.0.*(o|1\.up)_proj"}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    asked = ["merge", str(adapter), "--base", str(base), "-o", str(tmp_path / "out")]
    assert not loaded(CALL.format(arguments=asked)) & {"torch", "transformers", "peft"}
