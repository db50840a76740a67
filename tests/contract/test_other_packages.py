"""What we say about PEFT and safetensors, against those that are installed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from safetensors import safe_open

from lora_tool.adapters import support
from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.adapter_config import FIELD_USES, FieldUse, read_adapter_config
from lora_tool.formats.safetensors import build_header


def test_every_field_of_pefts_config_is_classed() -> None:
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == FIELD_USES.keys()


def test_every_refused_field_has_words() -> None:
    assert {name for name, use in FIELD_USES.items() if use is FieldUse.REFUSED} == support._REFUSED_FIELDS.keys()


def test_what_peft_cannot_merge_is_not_sent_to_peft() -> None:
    without = {
        kind.value for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items() if not hasattr(tuner, "merge_and_unload")
    }
    assert without <= support._AT_RUN_TIME <= {kind.value for kind in peft.PeftType}


def test_our_defaults_are_pefts(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA"}')
    ours, theirs = read_adapter_config(path), peft.LoraConfig()
    assert not ours.problems
    for name in ("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "bias", "fan_in_fan_out", "target_modules"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.init_lora_weights == str(theirs.init_lora_weights).lower()


def test_what_peft_saves_is_read_without_complaint(tmp_path: Path) -> None:
    peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["score"], task_type="SEQ_CLS").save_pretrained(
        str(tmp_path)
    )
    config = read_adapter_config(tmp_path / "adapter_config.json")
    assert (config.problems, config.unknown, config.refused) == ((), (), ())


@pytest.mark.parametrize(
    "fields",
    [
        {"eva_config": 5},
        {"use_bdlora": False},
        {"layers_pattern": "layers"},
        {"target_modules": "q_proj", "layers_to_transform": 1},
        {"target_modules": "q_proj", "layers_pattern": []},
        {"lora_bias": True, "use_dora": True},
        {"lora_bias": True, "init_lora_weights": "gaussian"},
        {"init_lora_weights": "loftq"},
    ],
    ids=str,
)
def test_fields_that_peft_refuses_are_wrong(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError, ImportError)):
        peft.LoraConfig(**fields)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **fields}))
    assert read_adapter_config(path).problems


@pytest.mark.parametrize("dtype", list(DType))
def test_safetensors_knows_the_dtype_and_its_size(dtype: DType, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    spec = TensorSpec(name="x", dtype=dtype, shape=(8,))
    path.write_bytes(build_header([spec], {}) + bytes(spec.nbytes))
    with safe_open(path, framework="np") as file:
        assert file.get_slice("x").get_dtype() == dtype.value
        assert file.get_slice("x").get_shape() == [8]
