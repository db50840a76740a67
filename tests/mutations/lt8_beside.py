"""LT801, LT802, LT804, LT805 and LT811: what few servers take beside plain LoRA."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import raw, tensors
from tests.mutations.registry import CAUSAL, REWARD, Edit, enter
from tests.mutations.served import for_servers, plain


def _beside_each_b(folder: Path, ending: str) -> None:
    """Put a vector of its rows beside each lora_B of an adapter that every server takes."""
    plain(folder)
    with tensors(folder) as table:
        rows = {name: tensor.shape[0] for name, tensor in table.items() if ".lora_B." in name}
        table.update({name.replace("lora_B.weight", ending): raw(count) for name, count in rows.items()})


def _magnitudes(folder: Path) -> None:
    _beside_each_b(folder, "lora_magnitude_vector")


def _biases(folder: Path) -> None:
    _beside_each_b(folder, "lora_B.bias")


EDITS = {
    "LT801": Edit(
        CAUSAL,
        by=plain,
        config={"modules_to_save": ["model.norm"]},
        tensors={"{PREFIX}model.norm.weight": raw(16)},
        options={"servers": ["vllm"]},
    ),
    **for_servers("LT801 head", Edit(REWARD), "vllm", "sglang"),
    "LT801 of three labels": Edit(REWARD, tensors={"{SCORE}": raw(3, 16, dtype="BF16")}, options={"servers": ["vllm"]}),
    "LT811": Edit(REWARD, quiet=True, options={"servers": ["peft"]}),
    "LT811 of three labels": Edit(
        REWARD, tensors={"{SCORE}": raw(3, 16, dtype="BF16")}, quiet=True, options={"servers": ["peft"]}
    ),
    **for_servers("LT802", Edit(CAUSAL, by=_magnitudes, config={"use_dora": True}), "vllm", "sglang", "llama.cpp"),
    **for_servers(
        "LT804",
        Edit(
            CAUSAL,
            by=plain,
            config={"trainable_token_indices": [3, 5]},
            tensors={"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": raw(2, 16)},
        ),
        "vllm",
        "sglang",
    ),
    **for_servers("LT805", Edit(CAUSAL, by=_biases, config={"lora_bias": True}), "vllm", "sglang", "llama.cpp"),
}
enter(__name__, EDITS)
