"""The names of an adapter's tensors, and what its files hold besides."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import PREFIX, raw, tensors
from tests.mutations.registry import CAUSAL, REWARD, Edit, breaks, enter


@breaks("LT211", CAUSAL)
def _no_prefix(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.removeprefix(PREFIX))


@breaks("LT211 two adapters", CAUSAL)
def _two_adapters(folder: Path) -> None:
    with tensors(folder) as table:
        table |= {name.replace(".weight", ".second.weight"): tensor for name, tensor in table.items()}


@breaks("LT211 raw state beside the saved", CAUSAL)
def _raw_beside_saved(folder: Path) -> None:
    with tensors(folder) as table:
        table |= {name.replace(".weight", ".default.weight"): tensor for name, tensor in table.items()}


EDITS = {
    "LT235": Edit(
        CAUSAL, target="unembed_tokens", tensors=edit.lora("model.unembed_tokens", rows=304, columns=16), with_base=True
    ),
    "LT235 linear attention": Edit(
        CAUSAL, renamed=lambda name: name.replace("self_attn.q_proj", "linear_attn.in_proj_q")
    ),
    "LT235 native experts": Edit(
        CAUSAL, tensors={"{PREFIX}model.layers.0.mlp.experts.lora_gate_and_up_A": raw(2, 16, 4)}
    ),
    "LT213": Edit(REWARD, copied={"{PREFIX}score.original_module.weight": "{SCORE}"}),
    "LT213 both copies": Edit(
        REWARD,
        copied={
            "{PREFIX}score.modules_to_save.default.weight": "{SCORE}",
            "{PREFIX}score.original_module.weight": "{SCORE}",
        },
    ),
    "LT211 reward": Edit(REWARD, by=_no_prefix),
    "LT211 compiled": Edit(CAUSAL, renamed=lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod.")),
    "LT211 compiled outside": Edit(CAUSAL, renamed=lambda name: f"_orig_mod.{name}"),
    "LT211 DDP": Edit(CAUSAL, renamed=lambda name: f"module.{name}"),
    "LT211 FSDP": Edit(CAUSAL, renamed=lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module.")),
    "LT211 another name": Edit(CAUSAL, renamed=lambda name: name.replace(".weight", ".policy.weight")),
    "LT211 doubled": Edit(CAUSAL, renamed=lambda name: PREFIX + name),
    "LT213 other values": Edit(
        REWARD, tensors={"{PREFIX}score.modules_to_save.default.weight": raw(1, 16, dtype="BF16")}
    ),
    "LT213 base layers": Edit(CAUSAL, tensors={"{Q_PROJ}.base_layer.weight": raw(16, 16)}),
    "LT222": Edit(CAUSAL, written={"non_lora_trainables.bin": "PK"}),
    "LT222 value head": Edit(CAUSAL, written={"pytorch_model.bin": "PK"}),
}
enter(__name__, EDITS)
