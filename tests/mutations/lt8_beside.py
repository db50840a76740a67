"""LT801, LT802, LT804, LT805 and LT811: what few servers take beside plain LoRA."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import raw, tensors
from tests.mutations.registry import CAUSAL, REWARD, Edit, breaks, enter
from tests.mutations.served import plain, with_fields


@breaks("LT802", CAUSAL, servers=["vllm"])
@breaks("LT802 for SGLang", CAUSAL, servers=["sglang"])
@breaks("LT802 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_dora(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table.update(
            {
                name.replace("lora_B.weight", "lora_magnitude_vector"): raw(tensor.shape[0])
                for name, tensor in table.items()
                if "lora_B" in name
            }
        )
    with_fields(folder, use_dora=True)


@breaks("LT805", CAUSAL, servers=["vllm"])
@breaks("LT805 for SGLang", CAUSAL, servers=["sglang"])
@breaks("LT805 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_bias(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table.update(
            {name.replace(".weight", ".bias"): raw(t.shape[0]) for name, t in table.items() if "lora_B" in name}
        )
    with_fields(folder, lora_bias=True)


EDITS = {
    "LT801": Edit(
        CAUSAL,
        by=plain,
        config={"modules_to_save": ["model.norm"]},
        tensors={"{PREFIX}model.norm.weight": raw(16)},
        options={"servers": ["vllm"]},
    ),
    "LT801 head": Edit(REWARD, options={"servers": ["vllm"]}),
    "LT801 head for SGLang": Edit(REWARD, options={"servers": ["sglang"]}),
    "LT811": Edit(REWARD, quiet=True, options={"servers": ["peft"]}),
    "LT804": Edit(
        CAUSAL,
        by=plain,
        config={"trainable_token_indices": [3, 5]},
        tensors={"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": raw(2, 16)},
        options={"servers": ["vllm"]},
    ),
    "LT804 for SGLang": Edit(
        CAUSAL,
        by=plain,
        config={"trainable_token_indices": [3, 5]},
        tensors={"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": raw(2, 16)},
        options={"servers": ["sglang"]},
    ),
}
enter(__name__, EDITS)
