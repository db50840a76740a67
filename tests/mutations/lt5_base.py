"""LT5xx: an adapter against its base, by names and shapes."""

from __future__ import annotations

from tests.checkpoint_edits import lora, raw, trained_tokens
from tests.mutations.registry import CAUSAL, REWARD, Edit, enter

EDITS = {
    "LT501": Edit(CAUSAL, tensors=lora("model.layers.0.cross_attn.q_proj", rows=16, columns=16), with_base=True),
    "LT501 output of a classifier": Edit(
        REWARD, target="lm_head", tensors=lora("lm_head", rows=304, columns=16), with_base=True
    ),
    "LT501 below another name": Edit(
        CAUSAL, renamed=lambda name: name.replace("base_model.model.", "base_model.model.thinker."), with_base=True
    ),
    "LT501 below the base model of another class": Edit(
        CAUSAL, renamed=lambda name: name.replace("base_model.model.", "base_model.model.transformer."), with_base=True
    ),
    "LT502": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.weight": raw(4, 24)}, with_base=True),
    "LT502 rows": Edit(REWARD, tensors={"{Q_PROJ}.lora_B.weight": raw(24, 4)}, with_base=True),
    "LT502 head": Edit(REWARD, tensors={"{SCORE}": raw(1, 24, dtype="BF16")}, with_base=True),
    "LT502 flat head": Edit(REWARD, tensors={"{SCORE}": raw(16, dtype="BF16")}, with_base=True),
    "LT502 norm": Edit(CAUSAL, target="model.norm", tensors=lora("model.norm", rows=16, columns=16), with_base=True),
    "LT502 tokens": Edit(CAUSAL, by=lambda folder: trained_tokens(folder, [1], rows=1, width=24), with_base=True),
    "LT503": Edit(CAUSAL, tensors=lora("model.layers.7.self_attn.q_proj", rows=16, columns=16), with_base=True),
    "LT503 of the config": Edit(CAUSAL, base={"num_hidden_layers": 1}, with_base=True),
    "LT506": Edit(
        CAUSAL,
        config={"modules_to_save": ["model.norm"]},
        tensors={"{PREFIX}model.norm.weight": raw(12)},
        with_base=True,
    ),
    "LT506 absent": Edit(
        CAUSAL,
        config={"modules_to_save": ["router"]},
        tensors={"{PREFIX}model.layers.0.mlp.router.weight": raw(4, 16)},
        with_base=True,
    ),
    "LT506 bias": Edit(CAUSAL, config={"bias": "all"}, tensors={"{Q_PROJ}.bias": raw(16)}, with_base=True),
    "LT506 output of a classifier": Edit(
        REWARD,
        config={"modules_to_save": ["score", "lm_head"]},
        tensors={"{PREFIX}lm_head.weight": raw(304, 16, dtype="BF16")},
        with_base=True,
    ),
    "LT506 output bias": Edit(CAUSAL, tensors={"{PREFIX}lm_head.bias": raw(304)}, with_base=True),
}
enter(__name__, EDITS)
