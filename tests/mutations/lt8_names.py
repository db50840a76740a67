"""LT816: modules that servers do not find by their names."""

from __future__ import annotations

from tests.mutations.registry import CAUSAL, Edit, enter
from tests.mutations.served import plain

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
