"""What `lora_tool.models.mapping` takes from inside transformers and PEFT: a release that moves it fails here, and not in a merge."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from peft.utils import transformers_weight_conversion
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from transformers import LlamaConfig, PreTrainedModel, configuration_utils
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lora_tool.adapters.experts import STACKED_BY_PEFT, UNKNOWN_TO_PEFT
from lora_tool.checkpoints import open_model
from lora_tool.formats.model_config import NOT_NULL, NUMBERS, read_model_config
from lora_tool.models.mapping.conversion import Conversion, by_template
from lora_tool.models.mapping.model import RowMapping
from lora_tool.models.mapping.order import in_natural_order
from lora_tool.rules.adapter.lt2_weights import READ_PAST_LORA
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.engine.subjects import ModelSubject
from lora_tool.rules.model.lt3_functions import (
    ACTIVATIONS,
    ATTENTIONS,
    LAYERS,
    OWN_ACTIVATION,
    OWN_ROPES,
    ROPE_KEYS,
    ROPE_TYPES,
)
from tests.mutations import FIXTURES
from tests.oracle.tiny import Task, buildable, tiny_model

TESTED = "5.23"
"""The release that the oracle tests ran with; another is a reason to run them again and to change this line."""


def test_the_installed_transformers_is_the_tested_one() -> None:
    assert version("transformers").startswith(f"{TESTED}.")


@pytest.mark.parametrize(
    ("model_type", "layer"),
    [
        ("mamba", "mixer.dt_proj"),
        ("falcon_mamba", "mixer.dt_proj"),
        ("jamba", "mamba.dt_proj"),
        ("siglip_vision_model", "head.attention.out_proj"),
    ],
)
def test_lora_is_past_what_a_layer_is_called_for(model_type: str, layer: str) -> None:
    assert f".{layer}" in READ_PAST_LORA
    task: Task = "feature-extraction" if model_type == "siglip_vision_model" else "causal-lm"
    config = LoraConfig(r=2, target_modules=rf".*{re.escape(layer)}", init_lora_weights=False)
    model = get_peft_model(tiny_model(model_type, task), config)
    size = getattr(model.config, "image_size", None)
    asked = {"pixel_values": torch.ones(1, 3, size, size)} if size else {"input_ids": torch.arange(8)[None]}
    with torch.no_grad(), model.disable_adapter():
        without = model(**asked)[-1 if size else 0]
    assert torch.equal(model(**asked)[-1 if size else 0], without)


def test_no_class_takes_a_string_or_null_for_a_number() -> None:
    taken = {
        (field.name, config.model_type)
        for config in CONFIG_MAPPING.values()
        for field in dataclasses.fields(config)
        if (field.name in NUMBERS and _takes("str", field.type))
        or (field.name in NOT_NULL and _takes("None", field.type))
    }
    assert taken == set()
    assert NOT_NULL <= NUMBERS


def test_these_are_the_activations_and_rope_types() -> None:
    assert set(ACT2FN) == ACTIVATIONS
    assert {*ROPE_INIT_FUNCTIONS, "default"} == ROPE_TYPES


@pytest.mark.parametrize("kind", ROPE_KEYS)
def test_these_keys_are_what_a_rope_type_requires(kind: str) -> None:
    whole = {
        "rope_type": kind,
        "rope_theta": 1e4,
        **dict.fromkeys(ROPE_KEYS[kind], [1.0] * 4 if kind == "longrope" else 2.0),
    }
    LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=whole)
    for key in ROPE_KEYS[kind]:
        with pytest.raises(KeyError, match=key):
            LlamaConfig(rope_parameters={name: value for name, value in whole.items() if name != key})


def test_the_configs_of_transformers_name_what_it_has(tmp_path: Path) -> None:
    base = open_model(FIXTURES / "causal-llama/base")
    wrong: list[tuple[str, ...]] = []
    made = 0
    for model_type, config in CONFIG_MAPPING.items():
        try:
            config().to_json_file(tmp_path / "config.json", use_diff=False)
        except Exception:  # noqa: BLE001 - a config that must be given more
            continue
        made += 1
        subject = ModelSubject(checkpoint=replace(base, config=read_model_config(tmp_path / "config.json")))
        wrong += [(model_type, str(found)) for found in RULES["LT324"].run(subject)]
    assert not wrong, wrong[:20]
    assert made > 500


def test_these_are_the_kinds_of_layers_and_attention() -> None:
    legacy = set(configuration_utils._LEGACY_LAYER_TYPE_REMAP)
    assert {*configuration_utils.ALLOWED_ATTN_LAYER_TYPES, *legacy} == LAYERS["layer_types"]
    assert set(configuration_utils.ALLOWED_MLP_LAYER_TYPES) == LAYERS["mlp_layer_types"]
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert {"eager", *known} - {"paged|eager"} == ATTENTIONS


def test_classes_look_up_what_the_config_names() -> None:
    """But for those that are named apart, which load a model whatever stands there."""
    wrong: dict[str, list[str]] = {"activation": [], "rope": [], "attention": []}
    for model_type in buildable("causal-lm"):
        names = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
        acts: dict[str, Any] = {
            name: "swilu" for name in ("hidden_act", "hidden_activation", "activation_function") if name in names
        }
        ropes: dict[str, Any] = (
            {"rope_parameters": {"rope_type": "yarm", "rope_theta": 1e4}} if "rope_parameters" in names else {}
        )
        apart = {"activation": OWN_ACTIVATION, "rope": OWN_ROPES, "attention": frozenset[str]()}
        for kind, change in (("activation", acts), ("rope", ropes), ("attention", {"attn_implementation": "flasch"})):
            if change and _is_built(model_type, change) != (model_type in apart[kind]):
                wrong[kind].append(model_type)
    assert not any(wrong.values()), wrong


def _is_built(model_type: str, change: dict[str, Any]) -> bool:
    try:
        tiny_model(model_type, "causal-lm", device="meta", **change)
    except (KeyError, ValueError, StrictDataclassError):
        return False
    return True


def test_peft_stacks_the_experts_of_these_model_types() -> None:
    own: Any = transformers_weight_conversion
    stacks, names = own._MODEL_TO_CONVERSION_PATTERN, own._MOE_TARGET_MODULE_MAPPING
    expected = {
        kind: {*names[like]} - {"gate"} for kind, like in stacks.items() if like in names and kind in CONFIG_MAPPING
    }
    assert {kind: {*projections} for kind, projections in STACKED_BY_PEFT.items()} == expected
    stacked = {
        kind
        for kind in CONFIG_MAPPING
        for conversion in get_checkpoint_conversion_mapping(kind) or ()
        if isinstance(conversion, WeightConverter) and any("experts.*" in name for name in conversion.source_patterns)
    }
    assert stacked - STACKED_BY_PEFT.keys() == UNKNOWN_TO_PEFT


def _takes(what: str, kind: object) -> bool:
    if isinstance(kind, str):
        return what in kind
    return {"str": str, "None": type(None)}[what] in (kind, *typing.get_args(kind))


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (get_model_conversion_mapping, ["model", "key_mapping", "hf_quantizer", "add_legacy"]),
        (
            rename_source_key,
            [
                "source_key",
                "weight_renamings",
                "weight_converters",
                "base_model_prefix",
                "meta_state_dict",
                "reverse",
            ],
        ),
        (apply_renamings, ["source_key", "weight_renamings"]),
        (apply_converters, ["source_key", "weight_converters"]),
        (dot_natural_key, ["s"]),
        (build_glob_alternation, ["globs"]),
        (PreTrainedModel._get_dtype_plan, ["self", "dtype"]),
        (WeightConverter.add_tensor, ["self", "target_key", "source_key", "source_pattern", "future"]),
        (
            convert_peft_adapter_state_dict_for_transformers,
            ["model", "peft_config", "adapter_state_dict", "adapter_name"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_take_what_they_are_given(function: object, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gemma3", "olmo_hybrid", "hrm_text"])
def test_names_by_their_form_are_names_one_by_one(model_type: str) -> None:
    model = tiny_model(model_type, "causal-lm", device="meta")
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def one(name: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(name, renamings, converters)
        return found

    conversion = Conversion(model)
    conversion.load({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    disk = conversion.save({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    by_form = by_template(one, rules)
    for name in (*model.state_dict(), *disk):
        assert by_form(name) == one(name), name


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "qwen2_moe", "gpt_oss", "olmo_hybrid", "hrm_text"])
def test_layers_of_one_form_are_converted_as_one_by_one(model_type: str) -> None:
    model = tiny_model(model_type, "causal-lm", device="meta")
    memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def replayed(*, by_form: bool) -> list[dict[str, RowMapping]]:
        conversion = Conversion(model)
        conversion.load(memory)
        disk = {name: made.shape for name, made in conversion.save(memory).items()}
        conversion = Conversion(model)
        conversion._plain = conversion._plain and by_form
        return [conversion.load(disk)[0], conversion.save(memory)]

    assert replayed(by_form=True) == replayed(by_form=False)


def test_the_order_of_names_is_transformers_own() -> None:
    parts = ("layers", "layers_2", "layers_10", "2", "10", "02", "weight", "w2", "10b", "2_", "")
    names = [".".join(each) for length in (1, 2, 3) for each in product(parts, repeat=length)]
    assert in_natural_order(names) == sorted(names, key=dot_natural_key)


def test_rules_that_look_at_numbers_are_asked_name_by_name() -> None:
    rule = WeightRenaming("layers.0.", "first.")

    def one(name: str) -> tuple[str, str | None]:
        return apply_renamings(name, [rule]), None

    by_form = by_template(one, [rule])
    assert by_form("layers.0.weight") == ("first.weight", None)
    assert by_form("layers.1.weight") == ("layers.1.weight", None)


def test_using_a_rule_is_remembered() -> None:
    rule = PrefixChange(prefix_to_remove="model")
    assert not rule.was_used()
    assert rule.rename_source_key("model.norm.weight")[0] == "norm.weight"
    assert rule.was_used()
