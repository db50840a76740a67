"""LT5xx: an adapter against its base, by names and shapes."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import PREFIX, fields, lora, raw, tensors, trained_tokens
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, breaks


@breaks("LT501", CAUSAL, with_base=True)
def _absent_module(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.0.cross_attn.q_proj", rows=16, columns=16))


@breaks("LT501 output of a classifier", REWARD, with_base=True)
def _lora_on_the_output_of_a_classifier(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("lm_head", rows=304, columns=16))
    with fields(folder) as config:
        config["target_modules"].append("lm_head")


@breaks("LT502", CAUSAL, with_base=True)
def _other_width(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_A.weight"] = raw(4, 24)


@breaks("LT502 rows", REWARD, with_base=True)
def _other_height(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_B.weight"] = raw(24, 4)


@breaks("LT502 head", REWARD, with_base=True)
def _head_of_another_width(folder: Path) -> None:
    with tensors(folder) as table:
        table[places.SCORE] = raw(1, 24, dtype="BF16")


@breaks("LT502 flat head", REWARD, with_base=True)
def _head_of_one_dimension(folder: Path) -> None:
    with tensors(folder) as table:
        table[places.SCORE] = raw(16, dtype="BF16")


@breaks("LT502 norm", CAUSAL, with_base=True)
def _lora_on_a_vector(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.norm", rows=16, columns=16))
    with fields(folder) as config:
        config["target_modules"].append("model.norm")


@breaks("LT502 tokens", CAUSAL, with_base=True)
def _tokens_of_another_width(folder: Path) -> None:
    trained_tokens(folder, [1], rows=1, width=24)


@breaks("LT503", CAUSAL, with_base=True)
def _layer_beyond(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.7.self_attn.q_proj", rows=16, columns=16))


@breaks("LT503 of the config", CAUSAL, with_base=True)
def _layer_beyond_the_config(folder: Path) -> None:
    with fields(folder.parent / "base", "config.json") as config:
        config["num_hidden_layers"] = 1


@breaks("LT506", CAUSAL, with_base=True)
def _saved_of_other_shape(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(12)
    with fields(folder) as config:
        config["modules_to_save"] = ["model.norm"]


@breaks("LT506 absent", CAUSAL, with_base=True)
def _saved_nowhere(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.mlp.router.weight"] = raw(4, 16)
    with fields(folder) as config:
        config["modules_to_save"] = ["router"]


@breaks("LT506 bias", CAUSAL, with_base=True)
def _bias_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.bias"] = raw(16)
    with fields(folder) as config:
        config["bias"] = "all"


@breaks("LT506 output of a classifier", REWARD, with_base=True)
def _output_layer_beside_the_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.weight"] = raw(304, 16, dtype="BF16")
    with fields(folder) as config:
        config["modules_to_save"] = ["score", "lm_head"]


@breaks("LT506 output bias", CAUSAL, with_base=True)
def _output_bias_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.bias"] = raw(304)
