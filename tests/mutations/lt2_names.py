"""The names of an adapter's tensors, and the modules that its config names."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import PREFIX, fields, raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, breaks


@breaks("LT211", CAUSAL)
def _no_prefix(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.removeprefix(PREFIX))


@breaks("LT211 reward", REWARD)
def _no_prefix_reward(folder: Path) -> None:
    _no_prefix(folder)


@breaks("LT211 compiled", CAUSAL)
def _compiled(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."))


@breaks("LT211 compiled outside", CAUSAL)
def _compiled_outside(folder: Path) -> None:
    edit.renamed(folder, lambda name: f"_orig_mod.{name}")


@breaks("LT211 DDP", CAUSAL)
def _distributed(folder: Path) -> None:
    edit.renamed(folder, lambda name: f"module.{name}")


@breaks("LT211 FSDP", CAUSAL)
def _sharded(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module."))


@breaks("LT211 another name", CAUSAL)
def _named_adapter(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace(".weight", ".policy.weight"))


@breaks("LT211 two adapters", CAUSAL)
def _two_adapters(folder: Path) -> None:
    with tensors(folder) as table:
        table |= {name.replace(".weight", ".second.weight"): tensor for name, tensor in table.items()}


@breaks("LT211 raw state beside the saved", CAUSAL)
def _raw_beside_saved(folder: Path) -> None:
    with tensors(folder) as table:
        table |= {name.replace(".weight", ".default.weight"): tensor for name, tensor in table.items()}


@breaks("LT211 doubled", CAUSAL)
def _doubled(folder: Path) -> None:
    edit.renamed(folder, lambda name: PREFIX + name)


@breaks("LT213", REWARD)
def _original_module(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.original_module.weight"] = table[places.SCORE]


@breaks("LT213 both copies", REWARD)
def _raw_state(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.modules_to_save.default.weight"] = table[places.SCORE]
        table[f"{PREFIX}score.original_module.weight"] = table[places.SCORE]


@breaks("LT213 other values", REWARD)
def _another_copy_of_the_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.modules_to_save.default.weight"] = raw(1, 16, dtype="BF16")


@breaks("LT213 base layers", CAUSAL)
def _base_layers(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.base_layer.weight"] = raw(16, 16)


@breaks("LT222", CAUSAL)
def _projector_beside(folder: Path) -> None:
    (folder / "non_lora_trainables.bin").write_bytes(b"PK")


@breaks("LT222 value head", CAUSAL)
def _value_head_of_trl(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"PK")


@breaks("LT205", CAUSAL)
def _target_without_tensors(folder: Path) -> None:
    with fields(folder) as config:
        config["target_modules"].append("c_attn")


@breaks("LT205 saved", CAUSAL, with_base=True)
def _saved_module_of_the_base_without_tensors(folder: Path) -> None:
    with fields(folder) as config:
        config["modules_to_save"] = ["up_proj"]


@breaks("LT205 saved inside", CAUSAL)
def _saved_inside_what_is_saved(folder: Path) -> None:
    with fields(folder) as config:
        config["modules_to_save"] = ["vision", "merger"]
    with tensors(folder) as table:
        table[f"{PREFIX}model.vision.merger.weight"] = raw(32, 16)


@breaks("LT505", CAUSAL, with_base=True)
def _layer_lost(folder: Path) -> None:
    with tensors(folder) as table:
        for name in [name for name in table if "layers.1.mlp.down_proj" in name]:
            del table[name]


@breaks("LT505 saved in part", CAUSAL, with_base=True)
def _one_norm_lost(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.input_layernorm.weight"] = raw(16)
    with fields(folder) as config:
        config["modules_to_save"] = ["input_layernorm"]


@breaks("LT505 output layer", CAUSAL, with_base=True)
def _output_layer_without_its_lora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.base_layer.weight"] = raw(304, 16)
    with fields(folder) as config:
        config["target_modules"] = [*config["target_modules"], "lm_head"]
