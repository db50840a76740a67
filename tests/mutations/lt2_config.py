"""LT2xx: the config of an adapter does not say what its tensors are."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    fields,
    lora,
    lora_on_embeddings,
    raw,
    tensors,
    trained_tokens,
)
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, SHARDED, Edit, breaks, enter


@breaks("LT217 prompt", CAUSAL)
def _prefix_tuning(folder: Path) -> None:
    with fields(folder) as config:
        config["peft_type"] = "PREFIX_TUNING"
    with tensors(folder) as table:
        table.clear()
        table["prompt_embeddings"] = raw(4, 64)


@breaks("LT221", CAUSAL)
def _unsaid_order_of_experts(folder: Path) -> None:
    experts = f"{PREFIX}model.layers.0.mlp.experts"
    with tensors(folder) as table, fields(folder) as config:
        rank = config["r"]
        table |= {f"{experts}.lora_A.weight": raw(4 * rank, 16), f"{experts}.lora_B.weight": raw(24, 4 * rank)}
        config["target_parameters"] = ["mlp.experts.down_proj"]
        config["auto_mapping"] = {"base_model_class": "MixtralForCausalLM", "unsloth_fixed": True}


@breaks("LT226 LoRA as well", CAUSAL)
def _lora_and_trained_rows(folder: Path) -> None:
    trained_tokens(folder, [1], rows=1)
    lora_on_embeddings(folder, rows=304)


@breaks("LT215 bias", CAUSAL, with_base=True, quiet=True)
def _bias_of_lora_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in list(table.items()):
            if name.endswith(".lora_B.weight"):
                table[name.removesuffix("weight") + "bias"] = raw(tensor.shape[0])
    with fields(folder) as config:
        config["lora_bias"] = True


EDITS = {
    "LT207": Edit(CAUSAL, tensors=lora("model.layers.0.mlp.up_proj", rows=32, columns=16)),
    "LT207 saved": Edit(CAUSAL, tensors={"{PREFIX}model.layers.0.mlp.up_proj.weight": raw(32, 16)}),
    "LT207 bias": Edit(CAUSAL, tensors={"{PREFIX}model.layers.0.self_attn.k_proj.bias": raw(8)}),
    "LT207 tokens": Edit(
        CAUSAL, tensors={"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": raw(2, 16)}
    ),
    "LT207 odd part": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.bias": raw(4)}),
    "LT210": Edit(CAUSAL, config={"lora_alpha": 0}),
    "LT210 by pattern": Edit(CAUSAL, config={"alpha_pattern": {"q_proj": 0}}),
    "LT214": Edit(CAUSAL, config={"r": "4"}),
    "LT214 task": Edit(REWARD, config={"task_type": "seq_cls"}),
    "LT214 no model type": Edit(SHARDED, file="config.json", without=["model_type"]),
    "LT214 no peft_type": Edit(CAUSAL, without=["peft_type"]),
    "LT214 peft_type is null": Edit(CAUSAL, config={"peft_type": None}),
    "LT214 no config": Edit(CAUSAL, gone=[CONFIG]),
    "LT214 model": Edit(SHARDED, file="config.json", config={"vocab_size": "304"}),
    "LT214 unknown field": Edit(CAUSAL, config={"from_the_future": True}, quiet=True),
    "LT215": Edit(CAUSAL, config={"init_lora_weights": "corda"}, quiet=True),
    "LT216": Edit(CAUSAL, by=lambda folder: edit.write(folder / WEIGHTS, {})),
    "LT216 head alone": Edit(
        REWARD,
        by=lambda folder: edit.write(folder / WEIGHTS, {places.SCORE: edit.read(folder / WEIGHTS)[places.SCORE]}),
    ),
    "LT217": Edit(CAUSAL, config={"peft_type": "LOHA"}),
    "LT221 no order": Edit(CAUSAL, config={"lora_B_layout": "sideways"}),
    "LT226": Edit(CAUSAL, by=lambda folder: trained_tokens(folder, [3, 5, 7], rows=2)),
    "LT226 of no token": Edit(CAUSAL, by=lambda folder: trained_tokens(folder, {"embed_tokens": []}, rows=0)),
    "LT226 no rows": Edit(CAUSAL, config={"trainable_token_indices": [3]}),
    "LT226 twice": Edit(CAUSAL, by=lambda folder: trained_tokens(folder, [3, 3], rows=2)),
    "LT226 of another module": Edit(
        CAUSAL,
        by=lambda folder: trained_tokens(folder, [3], rows=1),
        config={"trainable_token_indices": {"lm_head": [3]}},
    ),
    "LT226 whole as well": Edit(
        CAUSAL,
        by=lambda folder: trained_tokens(folder, [1], rows=1),
        config={"modules_to_save": ["embed_tokens"]},
        tensors={"{PREFIX}model.embed_tokens.weight": raw(304, 16)},
    ),
    "LT207 output layer": Edit(CAUSAL, tensors={"{PREFIX}lm_head.base_layer.weight": raw(304, 16)}),
}
enter(__name__, EDITS)
