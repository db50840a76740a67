from __future__ import annotations

import pytest

from lora_tool.core import keys
from lora_tool.core.keys import Part

P = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "module", "part", "leaf", "adapter"),
    [
        (f"{P}{Q}.lora_A.weight", Q, Part.LORA_A, "weight", None),
        (f"{P}{Q}.lora_B.default.weight", Q, Part.LORA_B, "weight", "default"),
        (f"{P}{Q}.lora_B.bias", Q, Part.LORA_B, "bias", None),
        (f"{P}{Q}.lora_B.my.adapter.bias", Q, Part.LORA_B, "bias", "my.adapter"),
        (f"{P}model.embed_tokens.lora_embedding_A", "model.embed_tokens", Part.EMBEDDING_A, None, None),
        (f"{P}model.embed_tokens.lora_embedding_B.default", "model.embed_tokens", Part.EMBEDDING_B, None, "default"),
        (f"{P}{Q}.lora_magnitude_vector", Q, Part.MAGNITUDE, None, None),
        (f"{P}{Q}.lora_magnitude_vector.default.weight", Q, Part.MAGNITUDE, "weight", "default"),
        (
            f"{P}model.embed_tokens.token_adapter.trainable_tokens_delta",
            "model.embed_tokens",
            Part.TOKENS_DELTA,
            None,
            None,
        ),
        (
            f"{P}model.embed_tokens.trainable_tokens_delta.default",
            "model.embed_tokens",
            Part.TOKENS_DELTA,
            None,
            "default",
        ),
        (f"{P}score.modules_to_save.default.weight", "score", Part.SAVED_MODULE, "weight", "default"),
        (f"{P}score.modules_to_save.weight", "score", Part.SAVED_MODULE, "weight", None),
        (
            f"{P}classifier.modules_to_save.default.out_proj.weight",
            "classifier",
            Part.SAVED_MODULE,
            "out_proj.weight",
            "default",
        ),
        (f"{P}score.original_module.weight", "score", Part.ORIGINAL_MODULE, "weight", None),
        (f"{P}score.base_layer.weight", "score", Part.BASE_LAYER, "weight", None),
        (f"{P}score.weight", "score", Part.PLAIN, "weight", None),
        ("weight", "", Part.PLAIN, "weight", None),
        ("", "", Part.PLAIN, "", None),
    ],
)
def test_a_name_is_taken_apart(name: str, module: str, part: Part, leaf: str | None, adapter: str | None) -> None:
    key = keys.parse(name)
    assert (key.module, key.part, key.leaf, key.adapter_name) == (module, part, leaf, adapter)
    assert key.text == name
    assert key.prefixed == name.startswith(P)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        (f"{Q}.lora_A.default.weight", f"{P}{Q}.lora_A.weight"),
        (f"{P}{Q}.lora_magnitude_vector.default.weight", f"{P}{Q}.lora_magnitude_vector"),
        (f"{P}x.trainable_tokens_delta.default", f"{P}x.token_adapter.trainable_tokens_delta"),
        (f"{P}score.modules_to_save.default.weight", f"{P}score.weight"),
        ("score.base_layer.weight", f"{P}score.base_layer.weight"),
        ("score.weight", f"{P}score.weight"),
        ("weight", f"{P}weight"),
    ],
)
def test_the_canonical_name_is_what_peft_saves(name: str, canonical: str) -> None:
    assert keys.parse(name).canonical == canonical


def test_the_tensor_of_a_plain_name_is_the_models_own() -> None:
    assert keys.parse(f"{P}score.weight").tensor == "score.weight"
    assert keys.parse("weight").tensor == "weight"
    assert keys.parse("").tensor == ""
