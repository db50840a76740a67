"""LT8xx: a good adapter that the server cannot take unmerged."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import PREFIX, fields, lora, raw, tensors
from tests.mutations.registry import CAUSAL, REWARD, breaks


def _set(folder: Path, **values: object) -> None:
    with fields(folder) as config:
        config.update(values)


def plain(folder: Path) -> None:
    """Make it an adapter that every server takes: one rank, one alpha, no rsLoRA."""
    with tensors(folder) as table:
        table.update(lora("model.layers.1.self_attn.v_proj", rows=8, columns=16))
    _set(folder, rank_pattern={}, alpha_pattern={}, use_rslora=False)


@breaks("LT801", CAUSAL, servers=["vllm"])
def _served_embedding(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16)
    _set(folder, modules_to_save=["model.norm"])


@breaks("LT801 head", REWARD, servers=["vllm"])
@breaks("LT801 head for SGLang", REWARD, servers=["sglang"])
@breaks("LT811", REWARD, servers=["peft"], quiet=True)
def _served_head(folder: Path) -> None:
    assert folder.is_dir()  # every reward adapter has one


@breaks("LT813", CAUSAL, servers=["mlx"])
def _served_by_mlx(folder: Path) -> None:
    plain(folder)  # whatever PEFT saves


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
    _set(folder, use_dora=True)


@breaks("LT803", CAUSAL, servers=["vllm"])
def _served_rank(folder: Path) -> None:
    rank = 1024
    with tensors(folder) as table:
        for name, tensor in table.items():
            at = 0 if ".lora_A." in name else 1
            table[name] = raw(*(rank if index == at else side for index, side in enumerate(tensor.shape)))
    _set(folder, rank_pattern={}, alpha_pattern={}, use_rslora=False, r=rank)


@breaks("LT804", CAUSAL, servers=["vllm"])
@breaks("LT804 for SGLang", CAUSAL, servers=["sglang"])
def _served_tokens(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(2, 16)
    _set(folder, trainable_token_indices=[3, 5])


@breaks("LT805", CAUSAL, servers=["vllm"])
@breaks("LT805 for SGLang", CAUSAL, servers=["sglang"])
@breaks("LT805 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_bias(folder: Path) -> None:
    plain(folder)
    with tensors(folder) as table:
        table.update(
            {name.replace(".weight", ".bias"): raw(t.shape[0]) for name, t in table.items() if "lora_B" in name}
        )
    _set(folder, lora_bias=True)


@breaks("LT806", CAUSAL, servers=["vllm"])
@breaks("LT806 for SGLang", CAUSAL, servers=["sglang"])
def _served_patterns(folder: Path) -> None:
    _set(folder, use_rslora=False)  # it has ranks per module


@breaks("LT807", CAUSAL, servers=["sglang"])
@breaks("LT807 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_rslora(folder: Path) -> None:
    plain(folder)
    _set(folder, use_rslora=True)


@breaks("LT808", CAUSAL, servers=["vllm"])
@breaks("LT808 for SGLang", CAUSAL, servers=["sglang"])
@breaks("LT808 for PEFT", CAUSAL, servers=["peft"])
def _served_init(folder: Path) -> None:
    plain(folder)
    _set(folder, init_lora_weights="pissa_niter_4")


@breaks("LT808 for LoRA-GA", CAUSAL, servers=["peft"])
def _served_lora_ga(folder: Path) -> None:
    plain(folder)
    _set(folder, init_lora_weights="lora_ga")


@breaks("LT808 for CorDA", CAUSAL, servers=["peft"])
def _served_corda(folder: Path) -> None:
    plain(folder)
    _set(folder, init_lora_weights="corda")


@breaks("LT809", CAUSAL, servers=["sglang"])
def _served_regex(folder: Path) -> None:
    plain(folder)
    with fields(folder) as config:
        config["target_modules"] = rf".*\.({'|'.join(config['target_modules'])})"


@breaks("LT810", CAUSAL, servers=["vllm"])
@breaks("LT810 for SGLang", CAUSAL, servers=["sglang"])
def _served_alora(folder: Path) -> None:
    plain(folder)
    _set(folder, alora_invocation_tokens=[1, 2])


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
