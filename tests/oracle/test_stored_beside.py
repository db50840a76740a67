"""What lies beside the weights of a quantised base, under each `--store`: scales of inputs and caches, tied heads, MTP layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_tool import verify
from lora_tool.verification.validating import validate
from tests.oracle.peft_merge import merge_with_ours, save_adapter, save_base, saved_tensors
from tests.oracle.quantised_bases import BF16, KINDS
from tests.oracle.test_quantised_bases import raw
from tests.quantised_models import Table, fp8_channel, nvfp4

LAYER = "model.layers.0"
CACHES = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
METHODS = {
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        "ignore": [],
        **CACHES,
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], **CACHES},
}
FATES = {
    # tensor: all-16bit, touched-16bit, as-base
    f"{LAYER}.self_attn.q_proj.weight": ("16-bit", "16-bit", "changed"),
    f"{LAYER}.self_attn.k_proj.weight": ("16-bit", "16-bit", "same"),  # fused with it
    f"{LAYER}.mlp.up_proj.weight": ("16-bit", "same", "same"),
    f"{LAYER}.self_attn.q_proj.weight_scale": ("gone", "gone", None),  # raised, or not
    f"{LAYER}.mlp.up_proj.weight_scale": ("gone", "same", "same"),
    f"{LAYER}.self_attn.q_proj.input_scale": ("gone", "gone", "same"),
    f"{LAYER}.mlp.up_proj.input_scale": ("gone", "same", "same"),
    f"{LAYER}.self_attn.k_proj.k_scale": ("gone", "same", "same"),
    f"{LAYER}.self_attn.v_proj.v_scale": ("gone", "same", "same"),
    "lm_head.weight": ("16-bit", "same", "same"),
    "model.embed_tokens.weight": ("same", "same", "same"),
    "mtp.fc.weight": ("16-bit", "same", "same"),  # transformers has no place for it, and servers have
    "mtp.fc.weight_scale": ("gone", "same", "same"),
}
STORES = ("all-16bit", "touched-16bit", "as-base")


def modelopt(name: str, weight: torch.Tensor) -> tuple[Table, None]:
    """Return a weight in NVFP4 as modelopt stores it."""
    made, _ = nvfp4(name, weight)
    return {
        f"{name}.weight": made[f"{name}.weight_packed"],
        f"{name}.weight_scale": made[f"{name}.weight_scale"],
        f"{name}.weight_scale_2": (1 / made[f"{name}.weight_global_scale"]).reshape(()),
        f"{name}.input_scale": torch.tensor(0.5),
    }, None


def furnished(folder: Path, method: str, *, tied: bool, nested: bool) -> tuple[Path, Path]:
    """Return a quantised base with all that may lie beside its weights, and an adapter of it."""
    plain = save_base(folder / "plain", "qwen3", "causal-lm", BF16, tie_word_embeddings=tied, **KINDS["qwen3-one"])
    lora = {"r": 4, "lora_alpha": 60, "target_modules": ["q_proj"]}
    adapter = save_adapter(folder / "adapter", plain, "causal-lm", lora)
    table = saved_tensors(plain)
    stored: Table = {}
    table["lm_head.weight"] = torch.randn(table["model.embed_tokens.weight"].shape).to(BF16)
    table["mtp.fc.weight"] = torch.randn((64, 128)).to(BF16)
    for name, tensor in table.items():
        module = name.removesuffix(".weight")
        make = fp8_channel if method == "fp8" else modelopt
        parts = make(module, tensor)[0] if module.endswith(("_proj", "lm_head", "mtp.fc")) else {name: tensor}
        stored |= {each: part.contiguous().clone() for each, part in parts.items()}
    stored |= {f"{LAYER}.self_attn.{part}_proj.{part}_scale": torch.tensor(0.25) for part in "kv"}
    base = folder / "base"
    base.mkdir()
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    said: dict[str, Any] = {"quantization_config": METHODS[method]}
    config |= {"text_config": {**said, "model_type": "other"}} if nested else said
    (base / "config.json").write_text(json.dumps(config))
    if method == "modelopt":
        said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["vision*"]}
        (base / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    return base, adapter


def fate(name: str, before: Table, after: Table) -> str:
    if name not in after:
        return "gone"
    if after[name].dtype is BF16 is not before[name].dtype:
        return "16-bit"
    same = before[name].dtype is after[name].dtype and torch.equal(raw(before[name]), raw(after[name]))
    return "same" if same else "changed"


@pytest.mark.parametrize(
    ("method", "store", "tied", "nested"),
    [
        ("fp8", "all-16bit", True, False),
        ("fp8", "touched-16bit", False, True),
        ("fp8", "as-base", True, True),
        ("modelopt", "all-16bit", False, True),
        ("modelopt", "touched-16bit", True, False),
    ],
)
def test_what_lies_beside_quantised_weights(method: str, store: str, tied: bool, nested: bool, tmp_path: Path) -> None:
    base, adapter = furnished(tmp_path, method, tied=tied, nested=nested)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", store=store)
    before, after = saved_tensors(base), saved_tensors(merged)
    wanted = {name: fates[STORES.index(store)] for name, fates in FATES.items()}
    assert {name: fate(name, before, after) for name, want in wanted.items() if want} == {
        name: want for name, want in wanted.items() if want
    }
    if store == "all-16bit" and method == "fp8":
        values = before["mtp.fc.weight"].float() * before["mtp.fc.weight_scale"].float()
        assert torch.equal(after["mtp.fc.weight"], values.to(BF16))
    record = json.loads((merged / "lora_tool.json").read_text())
    dropped = {item["name"] for item in record["leftovers"] if item["fate"] == "dropped"}
    assert before.keys() - after.keys() - dropped <= {name for name in before if name.endswith(("_scale", "_scale_2"))}
    config = json.loads((merged / "config.json").read_text())
    table = (config.get("text_config", {}) if nested else config).get("quantization_config")
    freed = {f"{LAYER}.self_attn.{part}_proj" for part in "qkv"}
    if store == "all-16bit":
        assert table is None
        assert config.get("text_config") == ({"model_type": "other"} if nested else None)
    elif store == "touched-16bit":
        assert {*table["ignore"]} >= freed
        assert table["kv_cache_scheme"] == CACHES["kv_cache_scheme"]
    else:
        assert table == METHODS[method]
    beside = merged / "hf_quant_config.json"
    assert beside.exists() == (method == "modelopt" and store != "all-16bit")
    if beside.exists():
        excluded = json.loads(beside.read_text())["quantization"]["exclude_modules"]
        assert excluded[0] == "vision*"
        assert {*excluded} >= freed
    assert not [found for found in verify(merged).report.findings if found.code.startswith("LT6")]
    assert not [found for found in validate(merged).findings if found.code in ("LT322", "LT323")]
