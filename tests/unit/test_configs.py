"""The typed readers of `adapter_config.json`, `config.json` and `trainer_state.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lora_tool.core.errors import BadConfig, CorruptFile
from lora_tool.formats.adapter_config import AdapterConfig, read_adapter_config
from lora_tool.formats.manifest import read_manifest
from lora_tool.formats.model_config import ModelConfig, read_model_config
from lora_tool.formats.trainer_state import read_trainer_state


def adapter(tmp_path: Path, **fields: Any) -> AdapterConfig:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **fields}))
    return read_adapter_config(path)


def model(tmp_path: Path, **fields: Any) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **fields}))
    return read_model_config(path)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"r": "8"}, '`r`: expected int, found "8"'),
        ({"r": True}, "`r`: expected int, found true"),
        ({"r": 8.0}, "`r`: expected int, found 8.0"),
        ({"r": 0}, "`r`: expected int of at least 1, found 0"),
        ({"r": None}, "`r`: expected int, found null"),
        ({"lora_alpha": "16"}, '`lora_alpha`: expected number, found "16"'),
        ({"use_rslora": "yes"}, '`use_rslora`: expected true or false, found "yes"'),
        ({"task_type": 3}, "`task_type`: expected string, found 3"),
        ({"bias": "some"}, '`bias`: expected none, all or lora_only, found "some"'),
        ({"target_modules": {"a": 1}}, '`target_modules`: expected list of strings, found {"a": 1}'),
        ({"target_modules": ["a", 1]}, '`target_modules`: expected list of strings, found ["a", 1]'),
        ({"modules_to_save": "score"}, '`modules_to_save`: expected list of strings, found "score"'),
        ({"rank_pattern": [1]}, "`rank_pattern`: expected object of numbers, found [1]"),
        ({"rank_pattern": {"q": "8"}}, '`rank_pattern["q"]`: expected int of at least 1, found "8"'),
        ({"alpha_pattern": {"q": None}}, '`alpha_pattern["q"]`: expected number, found null'),
        ({"layers_to_transform": "1"}, '`layers_to_transform`: expected int or list of ints, found "1"'),
        ({"layers_pattern": 3}, "`layers_pattern`: expected list of strings, found 3"),
        ({"init_lora_weights": 1}, "`init_lora_weights`: expected true, false or a string, found 1"),
        ({"init_lora_weights": "True"}, '`init_lora_weights`: expected true, found "True"'),
        ({"init_lora_weights": "PISSA"}, '`init_lora_weights`: expected "pissa", found "PISSA"'),
        ({"init_lora_weights": "loftq"}, "`init_lora_weights`: PEFT refuses loftq without `loftq_config`"),
        ({"lora_dropout": 1.5}, "`lora_dropout`: expected number of at most 1, found 1.5"),
        ({"lora_dropout": None}, "`lora_dropout`: expected number of at most 1, found null"),
        ({"bias": None}, "`bias`: expected none, all or lora_only, found null"),
        ({"rank_pattern": None}, "`rank_pattern`: expected object of numbers, found null"),
        ({"eva_config": 5}, "`eva_config`: expected object, found 5"),
        ({"use_bdlora": False}, "`use_bdlora`: expected object, found false"),
        ({"layers_pattern": "layers"}, "`layers_pattern`: PEFT refuses it without `layers_to_transform`"),
        (
            {"target_modules": "q_proj", "layers_to_transform": 1},
            "`layers_to_transform`: PEFT refuses it beside a `target_modules` that is one string",
        ),
        ({"lora_bias": True, "use_dora": True}, "`lora_bias`: PEFT refuses it beside `use_dora`"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected_and_found(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (found,) = adapter(tmp_path, **fields).problems
    assert str(found) == f"{tmp_path / 'adapter_config.json'}: {problem}"


def test_long_values_are_cut(tmp_path: Path) -> None:
    (found,) = adapter(tmp_path, r="8" * 500).problems
    assert len(found.message) < 100


def test_all_wrong_fields_are_told_at_once(tmp_path: Path) -> None:
    config = adapter(tmp_path, r="8", lora_alpha=None, bias=3, target_modules=5)
    assert {problem.subject for problem in config.problems} == {"r", "lora_alpha", "bias", "target_modules"}
    assert (config.r, config.lora_alpha, config.target_modules) == (8, 8, None)


def test_a_config_without_a_type_is_none(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text("{}")
    assert [problem.subject for problem in read_adapter_config(path).problems] == ["peft_type"]


@pytest.mark.parametrize("read", [read_adapter_config, read_model_config, read_trainer_state, read_manifest])
def test_what_is_no_object_is_refused(read: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]")
    with pytest.raises(BadConfig, match=r"x\.json: expected a"):
        read(path)
    path.write_text("{")
    with pytest.raises(CorruptFile, match=r"x\.json: is not valid JSON"):
        read(path)


def test_ranks_alphas_and_scalings_follow_the_first_pattern_that_matches(tmp_path: Path) -> None:
    config = adapter(
        tmp_path,
        r=8,
        lora_alpha=16,
        rank_pattern={"layers.1.q_proj": 2, "q_proj": 4},
        alpha_pattern={r".*\.0\.v_proj": 3},
    )
    assert [config.rank(f"m.layers.{n}.q_proj") for n in (0, 1, 11)] == [4, 2, 4]
    assert config.alpha("m.layers.0.v_proj") == 3
    assert config.alpha("m.layers.1.v_proj") == 16
    assert config.scaling("m.layers.1.q_proj") == 8
    stabilised = adapter(tmp_path, r=3, lora_alpha=7, use_rslora=True)
    assert stabilised.scaling("any") == 7 / math.sqrt(3)


@pytest.mark.parametrize(
    ("fields", "hits", "misses"),
    [
        ({"target_modules": ["q_proj"]}, ["q_proj", "a.q_proj"], ["a.xq_proj", "q_proj.a"]),
        ({"target_modules": ["a.q_proj"]}, ["b.a.q_proj"], ["b.q_proj"]),
        ({"target_modules": r".*\.(q|v)_proj"}, ["a.q_proj", "a.b.v_proj"], ["q_proj", "a.k_proj", "a.q_proj.x"]),
        ({"target_modules": ["q_proj"], "exclude_modules": ["a.q_proj"]}, ["b.q_proj"], ["a.q_proj", "x.a.q_proj"]),
        ({"target_modules": ["q_proj"], "exclude_modules": r"a\..*"}, ["b.q_proj"], ["a.q_proj"]),
        ({"target_modules": ["q_proj"], "modules_to_save": ["head"]}, ["q_proj"], ["head.q_proj", "x.head.q_proj"]),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
            ["m.layers.1.q_proj"],
            ["m.layers.0.q_proj", "m.layers.11.q_proj", "q_proj.x"],
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, ["m.h.0.q_proj"], ["m.h.1.q_proj", "m.q_proj"]),
        ({"target_modules": None}, [], ["q_proj"]),
    ],
)
def test_targets(fields: dict[str, Any], hits: list[str], misses: list[str], tmp_path: Path) -> None:
    config = adapter(tmp_path, **fields)
    assert not config.problems
    assert [name for name in hits + misses if config.targets(name)] == hits


def test_saved_modules_are_matched_by_the_end_of_their_text(tmp_path: Path) -> None:
    config = adapter(tmp_path, modules_to_save=["norm", "score"])
    for name in ("norm", "model.norm", "layers.0.input_layernorm", "score", "x.score.dense"):
        assert config.saves(name), name
    assert not config.saves("model.normal")


def test_unknown_and_refused_fields_are_listed(tmp_path: Path) -> None:
    config = adapter(tmp_path, use_qalora=True, megatron_config=None, from_the_future=1)
    assert config.refused == ("use_qalora",)
    assert adapter(tmp_path, kasa_config={}, megatron_config={}).refused == ("kasa_config",)
    assert config.unknown == ("from_the_future",)


def test_labels_are_counted(tmp_path: Path) -> None:
    assert model(tmp_path, id2label={"0": "a", "1": "b", "2": "c"}).num_labels == 3
    assert model(tmp_path, num_labels=1).num_labels == 1
    assert model(tmp_path).num_labels is None


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"n_layer": 4}, "num_hidden_layers", 4),
        ({"num_hidden_layers": {"vision": 5, "language": 9}}, "num_hidden_layers", None),
        ({"text_config": {"num_hidden_layers": 5, "vocab_size": 7}}, "num_hidden_layers", 5),
        ({"text_config": {"vocab_size": 7}}, "vocab_size", 7),
        ({"text_config": {"pad_token_id": 2}}, "pad_token_id", 2),
        ({"pad_token_id": 0}, "pad_token_id", 0),
        ({"tie_word_embeddings": False}, "tie_word_embeddings", False),
        ({}, "tie_word_embeddings", None),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization", "awq"),
        ({"quantization_config": {"bits": 4}}, "quantization", "unknown"),
        ({"quantization_config": {}}, "quantization", None),
        ({"auto_map": {"AutoModel": "x.Y"}}, "custom_code", True),
        ({"architectures": ["A"]}, "architectures", ("A",)),
        ({"dtype": {"text": "bf16"}}, "dtype", None),
    ],
)
def test_what_a_model_config_says(fields: dict[str, Any], name: str, value: object, tmp_path: Path) -> None:
    config = model(tmp_path, **fields)
    assert getattr(config, name) == value
    assert not config.problems


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"vocab_size": "7"}, '`vocab_size`: expected int, found "7"'),
        ({"text_config": {"vocab_size": "7"}}, '`text_config.vocab_size`: expected int, found "7"'),
        ({"id2label": ["a"]}, '`id2label`: expected object of labels, found ["a"]'),
        ({"architectures": "A"}, '`architectures`: expected list of strings, found "A"'),
        ({"model_type": 1}, "`model_type`: expected string, found 1"),
        ({"hidden_size": "32"}, '`hidden_size`: expected number, found "32"'),
        (
            {"vision_config": {"layer_norm_eps": "1e-6"}},
            '`vision_config.layer_norm_eps`: expected number, found "1e-6"',
        ),
        ({"num_labels": None}, "`num_labels`: expected int, found null"),
        ({"dtype": "bf16"}, '`dtype`: expected torch\'s name, "bfloat16", found "bf16"'),
        ({"torch_dtype": "torch.float32"}, '`torch_dtype`: expected torch\'s name, "float32", found "torch.float32"'),
    ],
)
def test_a_wrong_field_of_a_model_is_named(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (found,) = model(tmp_path, **fields).problems
    assert str(found).endswith(problem)


def test_a_trainer_state_tells_how_far_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(
        json.dumps({"global_step": 4, "epoch": 1, "log_history": [{"loss": 2}, {"loss": 1.5}, {"eval": 1}]})
    )
    state = read_trainer_state(path)
    assert (state.global_step, state.epoch, state.last_loss) == (4, 1.0, 1.5)
    path.write_text('{"global_step": "4", "log_history": 3}')
    broken = read_trainer_state(path)
    assert broken.last_loss is None
    assert "expected int" in broken.problems[0].message
    path.write_text("{")
    with pytest.raises(CorruptFile):
        read_trainer_state(path)


def test_a_manifest_lists_what_was_merged(tmp_path: Path) -> None:
    path = tmp_path / "lora_tool.json"
    path.write_text('{"merged_adapters": ["a", "b"]}')
    assert read_manifest(path).merged_adapters == ("a", "b")
    path.write_text('{"merged_adapters": [1]}')
    with pytest.raises(BadConfig, match="merged_adapters"):
        read_manifest(path)


def test_no_init_is_the_init_that_keeps_the_base(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "init_lora_weights": null}')
    config = read_adapter_config(path)
    assert (config.init_lora_weights, config.problems) == ("false", ())
