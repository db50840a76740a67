"""LT801, LT802, LT804, LT805 and LT811: what few servers take beside plain LoRA."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import PREFIX, raw, tensors
from tests.mutations.registry import CAUSAL, REWARD, breaks
from tests.mutations.served import plain, with_fields


@breaks("LT801", CAUSAL, servers=["vllm"])
def _served_embedding(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16)
    with_fields(folder, modules_to_save=["model.norm"])


@breaks("LT801 head", REWARD, servers=["vllm"])
@breaks("LT801 head for SGLang", REWARD, servers=["sglang"])
@breaks("LT811", REWARD, servers=["peft"], quiet=True)
def _served_head(folder: Path) -> None:
    assert folder.is_dir()  # every reward adapter has one


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


@breaks("LT804", CAUSAL, servers=["vllm"])
@breaks("LT804 for SGLang", CAUSAL, servers=["sglang"])
def _served_tokens(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(2, 16)
    with_fields(folder, trainable_token_indices=[3, 5])


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
