"""LT820: modules that a server has under other names, or applies no LoRA to."""

from __future__ import annotations

from tests.mutations.registry import CAUSAL, Edit, enter
from tests.mutations.served import plain

EDITS = {
    "LT820": Edit(
        CAUSAL,
        by=plain,
        renamed=lambda name: name.replace(".self_attn.q_proj.", ".mlp.gate."),
        base={"model_type": "mixtral"},
        with_base=True,
        options={"servers": ["vllm"], "select": ("LT820",)},
    ),
    "LT820 for llama.cpp": Edit(
        CAUSAL,
        by=plain,
        renamed=lambda name: name.replace(".q_proj.", ".kv_a_proj_with_mqa."),
        options={"servers": ["llama.cpp"], "select": ("LT820",)},
    ),
}
enter(__name__, EDITS)
