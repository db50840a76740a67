"""Modules that the config names and the weights do not have, or have only in part."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import raw, tensors
from tests.mutations.registry import CAUSAL, Edit, breaks, enter


@breaks("LT505", CAUSAL, with_base=True)
def _layer_lost(folder: Path) -> None:
    with tensors(folder) as table:
        for name in [name for name in table if "layers.1.mlp.down_proj" in name]:
            del table[name]


EDITS = {
    "LT505 output layer": Edit(
        CAUSAL, target="lm_head", tensors={"{PREFIX}lm_head.base_layer.weight": raw(304, 16)}, with_base=True
    ),
    "LT205": Edit(CAUSAL, target="c_attn"),
    "LT205 saved": Edit(CAUSAL, config={"modules_to_save": ["up_proj"]}, with_base=True),
    "LT205 saved inside": Edit(
        CAUSAL,
        config={"modules_to_save": ["vision", "merger"]},
        tensors={"{PREFIX}model.vision.merger.weight": raw(32, 16)},
    ),
    "LT505 saved in part": Edit(
        CAUSAL,
        config={"modules_to_save": ["input_layernorm"]},
        tensors={"{PREFIX}model.layers.0.input_layernorm.weight": raw(16)},
        with_base=True,
    ),
}
enter(__name__, EDITS)
