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
from tests.mutations.registry import CAUSAL, REWARD, SHARDED, breaks


@breaks("LT207", CAUSAL)
def _untargeted(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.0.mlp.up_proj", rows=32, columns=16))


@breaks("LT207 saved", CAUSAL)
def _saved_without_reason(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.mlp.up_proj.weight"] = raw(32, 16)


@breaks("LT207 bias", CAUSAL)
def _bias_without_reason(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.self_attn.k_proj.bias"] = raw(8)


@breaks("LT207 tokens", CAUSAL)
def _tokens_without_reason(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(2, 16)


@breaks("LT207 odd part", CAUSAL)
def _bias_of_lora_a(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_A.bias"] = raw(4)


@breaks("LT210", CAUSAL)
def _zero_alpha(folder: Path) -> None:
    with fields(folder) as config:
        config["lora_alpha"] = 0


@breaks("LT210 by pattern", CAUSAL)
def _zero_alpha_pattern(folder: Path) -> None:
    with fields(folder) as config:
        config["alpha_pattern"] = {"q_proj": 0}


@breaks("LT214", CAUSAL)
def _string_r(folder: Path) -> None:
    with fields(folder) as config:
        config["r"] = "4"


@breaks("LT214 task", REWARD)
def _lower_case_task(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = "seq_cls"


@breaks("LT214 no model type", SHARDED)
def _no_model_type(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        del config["model_type"]


@breaks("LT214 no peft_type", CAUSAL)
def _no_peft_type(folder: Path) -> None:
    with fields(folder) as config:
        del config["peft_type"]


@breaks("LT214 peft_type is null", CAUSAL)
def _null_peft_type(folder: Path) -> None:
    with fields(folder) as config:
        config["peft_type"] = None


@breaks("LT214 no config", CAUSAL)
def _no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


@breaks("LT214 model", SHARDED)
def _string_vocabulary(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["vocab_size"] = "304"


@breaks("LT214 unknown field", CAUSAL, quiet=True)
def _unknown_field(folder: Path) -> None:
    with fields(folder) as config:
        config["from_the_future"] = True


@breaks("LT215", CAUSAL, quiet=True)
def _corda(folder: Path) -> None:
    with fields(folder) as config:
        config["init_lora_weights"] = "corda"


@breaks("LT216", CAUSAL)
def _no_tensors(folder: Path) -> None:
    edit.write(folder / WEIGHTS, {})


@breaks("LT216 head alone", REWARD)
def _head_alone(folder: Path) -> None:
    edit.write(folder / WEIGHTS, {places.SCORE: edit.read(folder / WEIGHTS)[places.SCORE]})


@breaks("LT217", CAUSAL)
def _loha(folder: Path) -> None:
    with fields(folder) as config:
        config["peft_type"] = "LOHA"


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


@breaks("LT221 no order", CAUSAL)
def _unknown_order_of_experts(folder: Path) -> None:
    with fields(folder) as config:
        config["lora_B_layout"] = "sideways"


@breaks("LT226", CAUSAL)
def _fewer_rows_than_tokens(folder: Path) -> None:
    trained_tokens(folder, [3, 5, 7], rows=2)


@breaks("LT226 of no token", CAUSAL)
def _of_no_token(folder: Path) -> None:
    trained_tokens(folder, {"embed_tokens": []}, rows=0)


@breaks("LT226 no rows", CAUSAL)
def _rows_lost(folder: Path) -> None:
    with fields(folder) as config:
        config["trainable_token_indices"] = [3]


@breaks("LT226 twice", CAUSAL)
def _one_token_twice(folder: Path) -> None:
    trained_tokens(folder, [3, 3], rows=2)


@breaks("LT226 of another module", CAUSAL)
def _rows_of_another_module(folder: Path) -> None:
    trained_tokens(folder, [3], rows=1)
    with fields(folder) as config:
        config["trainable_token_indices"] = {"lm_head": [3]}


@breaks("LT226 whole as well", CAUSAL)
def _trained_whole_and_by_rows(folder: Path) -> None:
    trained_tokens(folder, [1], rows=1)
    with fields(folder) as config:
        config["modules_to_save"] = ["embed_tokens"]
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(304, 16)


@breaks("LT226 LoRA as well", CAUSAL)
def _lora_and_trained_rows(folder: Path) -> None:
    trained_tokens(folder, [1], rows=1)
    lora_on_embeddings(folder, rows=304)


@breaks("LT207 output layer", CAUSAL)
def _output_layer_without_lora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.base_layer.weight"] = raw(304, 16)


@breaks("LT215 bias", CAUSAL, with_base=True, quiet=True)
def _bias_of_lora_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in list(table.items()):
            if name.endswith(".lora_B.weight"):
                table[name.removesuffix("weight") + "bias"] = raw(tensor.shape[0])
    with fields(folder) as config:
        config["lora_bias"] = True
