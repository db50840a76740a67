"""LT803, LT806 to LT810 and LT812 to LT814: a good adapter in a form that the server does not read."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields, raw, tensors
from tests.mutations.registry import CAUSAL, Edit, breaks, enter
from tests.mutations.served import for_servers, plain, with_fields


@breaks("LT803", CAUSAL, servers=["vllm"])
def _served_rank(folder: Path) -> None:
    rank = 1024
    with tensors(folder) as table:
        for name, tensor in table.items():
            at = 0 if ".lora_A." in name else 1
            table[name] = raw(*(rank if index == at else side for index, side in enumerate(tensor.shape)))
    with_fields(folder, rank_pattern={}, alpha_pattern={}, use_rslora=False, r=rank)


@breaks("LT809", CAUSAL, servers=["sglang"])
def _served_regex(folder: Path) -> None:
    plain(folder)
    with fields(folder) as config:
        config["target_modules"] = rf".*\.({'|'.join(config['target_modules'])})"


@breaks("LT812", CAUSAL, servers=["vllm"], with_base=True)
def _served_text_names(folder: Path) -> None:
    plain(folder)
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        text = {**config, "model_type": "llama4_text"}
        config.update(model_type="llama4", architectures=["Llama4ForConditionalGeneration"], text_config=text)
    with fields(base, "model.safetensors.index.json") as index:
        index["weight_map"] = {f"language_model.{name}": file for name, file in index["weight_map"].items()}
        index["weight_map"]["vision_model.norm.weight"] = next(iter(index["weight_map"].values()))
    for path in base.glob("*.safetensors"):
        with tensors(base, path.name) as table:
            held = {f"language_model.{name}": tensor for name, tensor in table.items()}
            table.clear()
            table.update(held)
            if path.name == index["weight_map"]["vision_model.norm.weight"]:
                table["vision_model.norm.weight"] = raw(16)


@breaks("LT814", CAUSAL, servers=["sglang"], with_base=True)
def _served_together(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:  # LoRA on v alone
        for name in [name for name in table if ".q_proj." in name]:
            del table[name]
    with fields(folder) as config:
        config["target_modules"] = [name for name in config["target_modules"] if name != "q_proj"]


@breaks("LT815", CAUSAL, servers=["vllm"])
@breaks("LT815 for SGLang", CAUSAL, servers=["sglang"])
@breaks("LT815 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_left_out(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:  # an encoder's
        held = {name.replace(".layers.", ".vision_tower.layers."): tensor for name, tensor in table.items()}
        table.clear()
        table.update(held)


@breaks("LT815 for multi-query attention", CAUSAL, servers=["vllm"])
def _served_packed_queries(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        held = {name.replace(".self_attn.q_proj.", ".attn.c_attn."): tensor for name, tensor in table.items()}
        table.clear()
        table.update(held)
    with fields(folder) as config:
        config["target_modules"] = ["c_attn" if name == "q_proj" else name for name in config["target_modules"]]


EDITS = {
    "LT814 for vLLM": Edit(
        CAUSAL,
        by=plain,
        renamed=lambda name: name.replace(".mlp.down_proj.", ".mlp.experts.0.down_proj."),
        options={"servers": ["vllm"], "select": ("LT814",)},
    ),
    "LT813": Edit(CAUSAL, by=plain, options={"servers": ["mlx"]}),
    **for_servers("LT806", Edit(CAUSAL, config={"use_rslora": False}), "vllm@0.27", "sglang"),
    **for_servers("LT807", Edit(CAUSAL, by=plain, config={"use_rslora": True}), "sglang", "llama.cpp"),
    **for_servers(
        "LT808", Edit(CAUSAL, by=plain, config={"init_lora_weights": "pissa_niter_4"}), "vllm", "sglang", "peft"
    ),
    "LT808 for LoRA-GA": Edit(CAUSAL, by=plain, config={"init_lora_weights": "lora_ga"}, options={"servers": ["peft"]}),
    "LT808 for CorDA": Edit(CAUSAL, by=plain, config={"init_lora_weights": "corda"}, options={"servers": ["peft"]}),
    **for_servers("LT810", Edit(CAUSAL, by=plain, config={"alora_invocation_tokens": [1, 2]}), "vllm", "sglang"),
}
enter(__name__, EDITS)
