"""LT816: modules that servers do not find by their names."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields, lora, tensors
from tests.mutations.registry import CAUSAL, Edit, breaks, enter
from tests.mutations.served import plain


@breaks("LT816", CAUSAL, servers=["vllm"])
@breaks("LT816 for PEFT", CAUSAL, servers=["peft"])
def _trained_by_tinker(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table.update(lora("model.unembed_tokens", rows=304, columns=16))
    with fields(folder) as config:
        config["target_modules"].append("unembed_tokens")


EDITS = {
    "LT816 of a Mamba": Edit(
        CAUSAL,
        by=plain,
        renamed=lambda name: name.replace(".self_attn.q_proj", ".mixer.out_proj"),
        base={"model_type": "nemotron_h"},
        with_base=True,
        options={"servers": ["peft"], "select": ("LT816",)},
    ),
}
enter(__name__, EDITS)
