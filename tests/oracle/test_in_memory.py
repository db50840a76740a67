"""`--allow-in-memory`: what only PEFT merges is refused without it, and with it gives PEFT's bits."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
)
from peft.tuners.lora.config import KasaConfig
from safetensors.torch import load_file, save_file
from transformers import SiglipVisionConfig

from lora_tool import validate
from lora_tool.execution import in_memory
from tests.cli.calling import Caller
from tests.oracle.peft_merge import (
    load_model,
    merge_with_peft,
    require_same,
    save_base,
    save_model,
    saved_tensors,
    train,
)
from tests.oracle.tiny import AUTO, Task, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Q: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ONLY_PEFT: dict[str, dict[str, Any]] = {
    "mica": Q | {"init_lora_weights": "mica"},
    "kasa": Q | {"kasa_config": KasaConfig()},
    "pissa-dora": Q | {"init_lora_weights": "pissa", "use_dora": True},
}


_VISION: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
METHODS: dict[str, PeftConfig] = {
    "adalora": AdaLoraConfig(init_r=6, target_r=4, target_modules=Q["target_modules"], total_step=10),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(r=4, alpha=8, target_modules=Q["target_modules"]),
    "lokr": LoKrConfig(r=4, alpha=8, target_modules=Q["target_modules"]),
    "oft": OFTConfig(oft_block_size=4, target_modules=Q["target_modules"]),
    "vera": VeraConfig(r=4, target_modules=["q_proj"]),
}


def adapter_of(base: Path, folder: Path, method: PeftConfig, task: Task) -> Path:
    method.task_type = TaskType.CAUSAL_LM if task == "causal-lm" else TaskType.SEQ_CLS
    train(load_model(base, task), folder, method)
    return folder


@pytest.fixture(scope="session", name="made")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("llama") / "base", "llama", "causal-lm", torch.bfloat16)


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "base"))


@pytest.mark.parametrize(
    ("name", "task"),
    [("mica", "causal-lm"), ("kasa", "seq-cls"), ("pissa-dora", "causal-lm"), ("pissa-dora", "seq-cls")],
)
def test_it_gives_pefts_bits_and_only_when_asked(
    name: str, task: Task, base: Path, tmp_path: Path, call: Caller
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", LoraConfig(**ONLY_PEFT[name]), task)
    arguments = ("merge", adapter, "--base", base, "-o", tmp_path / "ours")
    refused = call(*arguments)
    assert refused.code == 3
    assert "--allow-in-memory" in refused.err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
    done = call(*arguments, "--allow-in-memory")
    assert done.code == 0, done.err
    assert "takes about" in done.err
    ours = require_same(tmp_path / "ours", merge_with_peft(base, adapter, tmp_path / "theirs", task))
    manifest = json.loads((tmp_path / "ours" / "lora_tool.json").read_text())
    assert (manifest["precision"], manifest["tier"]) == ("peft", "in memory")
    assert manifest["counts"]["merged"] == 4
    assert len(manifest["ledger"]) == len(ours)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == json.loads((tmp_path / "theirs" / "config.json").read_text())["architectures"]
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "ours", "theirs"}


@pytest.mark.parametrize(("name", "task"), [*zip(METHODS, itertools.cycle(("causal-lm", "seq-cls")), strict=False)])
def test_other_methods_of_peft(name: str, task: Task, base: Path, tmp_path: Path, call: Caller) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", replace(METHODS[name]), task)
    arguments = ("merge", adapter, "--base", base, "-o", tmp_path / "ours")
    refused = call(*arguments)
    assert refused.code == 1
    assert "LT217" in refused.err
    assert "--allow-in-memory" in refused.err
    done = call(*arguments, "--allow-in-memory")
    assert done.code == 0, done.err
    require_same(tmp_path / "ours", merge_with_peft(base, adapter, tmp_path / "theirs", task))
    manifest = json.loads((tmp_path / "ours" / "lora_tool.json").read_text())
    assert manifest["counts"]["merged"] >= 2
    checked = call("verify", tmp_path / "ours")
    assert checked.code == 0, checked.err
    assert f"peft_type {name.upper()}, which is not LoRA" in checked.out + checked.err


def test_a_method_without_a_change_of_weights_stays_refused(base: Path, tmp_path: Path, call: Caller) -> None:
    prompts = PromptTuningConfig(num_virtual_tokens=2)
    adapter = adapter_of(base, tmp_path / "adapter", prompts, "causal-lm")
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert done.code == 3
    assert "PROMPT_TUNING, which acts while the model runs" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.filterwarnings("ignore")
def test_other_methods_on_tied_ends_stay_refused(tmp_path: Path, call: Caller) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=True)
    adapter = adapter_of(base, tmp_path / "adapter", LoHaConfig(r=4, target_modules=["q_proj", "lm_head"]), "causal-lm")
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert done.code == 3
    assert "PEFT's merge would change both ends" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.filterwarnings("ignore")
def test_lora_on_attention_as_a_whole_and_on_a_kernel_is_pefts(tmp_path: Path, call: Caller) -> None:
    """PEFT's merge adds twice ΔW to the out_proj of an nn.MultiheadAttention, as its forward pass does."""
    base, adapter, ours = (tmp_path / name for name in ("base", "adapter", "ours"))
    save_model(AUTO["feature-extraction"].from_config(SiglipVisionConfig(**_VISION)), base, torch.float32)
    targets = r".*(head\.attention|patch_embedding|layers\.0\.self_attn\.q_proj)"
    adapted = train(load_model(base, "feature-extraction"), adapter, target_modules=targets).eval()
    pixels = torch.rand(1, 3, 28, 28)
    trained = adapted(pixel_values=pixels).pooler_output
    found = [finding for finding in validate(adapter, base=base).findings if finding.code == "LT215"]
    for why, finding in zip(("convolutions", "an nn.MultiheadAttention as a whole"), found, strict=True):
        assert why in finding.message
        assert "--allow-in-memory" in (finding.hint or "")
    refused = call("merge", adapter, "--base", base, "-o", ours)
    assert (refused.code, "--allow-in-memory merges it with PEFT" in refused.err) == (3, True)
    done = call("merge", adapter, "--base", base, "-o", ours, "--allow-in-memory")
    assert done.code == 0, done.err
    require_same(ours, merge_with_peft(base, adapter, tmp_path / "theirs", "feature-extraction"))
    merged = load_model(ours, "feature-extraction").eval()
    assert torch.allclose(merged(pixel_values=pixels).pooler_output, trained, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_kernel_in_groups_is_refused_before_memory_is_spoken_of(tmp_path: Path, call: Caller) -> None:
    base, adapter = save_base(tmp_path / "base", "bamba", "causal-lm", torch.float32), tmp_path / "adapter"
    train(load_model(base, "causal-lm"), adapter, r=96, target_modules=["conv1d"], task_type="CAUSAL_LM")
    assert {finding.code for finding in validate(adapter, base=base).findings} == {"LT215"}
    assert "next:" not in call("validate", adapter, "--base", base).out
    refused = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert (refused.code, "a convolution in 96 groups" in refused.err) == (3, True)
    assert "--allow-in-memory" not in refused.err
    tensors = saved_tensors(adapter)  # as a PEFT wrote it that knew no groups
    old = {name: torch.ones(96, 96, 1) if "lora_B" in name else each for name, each in tensors.items()}
    save_file(old, adapter / "adapter_model.safetensors")
    (first, *_) = (finding for finding in validate(adapter, base=base).findings if finding.code == "LT502")
    assert "lora_B·lora_A is [96, 96, 4], but the base's `model.layers.0.mamba.conv1d.weight` is [96, 1, 4]" in str(
        first
    )
    refused = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert (refused.code, "LT502" in refused.err) == (1, True)


def test_too_little_memory_and_dry_run(base: Path, tmp_path: Path, call: Caller) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", LoraConfig(**ONLY_PEFT["mica"]), "causal-lm")
    arguments = ("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    with mock.patch.object(in_memory, "available_bytes", lambda: 1 << 20):
        refused = call(*arguments)
    assert refused.code == 3
    assert "this machine has 1 MiB free" in refused.err
    with mock.patch.object(in_memory, "merge_with_peft", side_effect=AssertionError):
        dry = call(*arguments, "--dry-run")
    assert dry.code == 0, dry.err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_a_tensor_that_peft_would_leave_out_is_an_error(base: Path, tmp_path: Path, call: Caller) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", LoraConfig(**ONLY_PEFT["mica"]), "causal-lm")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(
        {**tensors, name.replace("q_proj", "k_proj"): tensors[name].clone()}, adapter / "adapter_model.safetensors"
    )
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert done.code == 1
    assert "LT201" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_what_peft_merges_wrongly_stays_refused(base: Path, tmp_path: Path, call: Caller) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", LoraConfig(**Q), "causal-lm")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for field, value in {"init_lora_weights": "lora_ga", "alora_invocation_tokens": [1], "use_qalora": True}.items():
        (adapter / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        done = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
        assert done.code == 3
        assert f"`{field}`" in done.err
        assert "--allow-in-memory" not in done.err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_one_matrix_for_two_ends_stays_refused(end: str, tmp_path: Path, call: Caller) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=True)
    lora = Q | {"target_modules": ["q_proj", end], "init_lora_weights": "mica"}
    adapter = adapter_of(base, tmp_path / "adapter", LoraConfig(**lora), "causal-lm")
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert done.code == 3
    assert f"`base_model.model.{'model.' if end == 'embed_tokens' else ''}{end}." in done.err
    assert "PEFT's merge would change both ends" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_transformers_writes_back_transposed(tmp_path: Path, call: Caller) -> None:
    base, adapter, ours = tmp_path / "base", tmp_path / "adapter", tmp_path / "ours"
    config = tiny_config("ernie4_5_vl_moe", "image-text-to-text")
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, "mrope_section": [1, 1, 2]}
    save_model(AUTO["image-text-to-text"].from_config(config), base)
    choices: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "target_parameters": ["text_moe.gate.weight"],
        "task_type": "CAUSAL_LM",
    }
    train(load_model(base, "image-text-to-text"), adapter, save=False, **choices)
    done = call("merge", adapter, "--base", base, "-o", ours, "--precision", "peft")
    assert done.code == 0, done.err
    require_same(ours, merge_with_peft(base, adapter, tmp_path / "theirs", "image-text-to-text"))


@pytest.mark.parametrize("form", ["raw-names", "torch-file"])
def test_an_adapter_that_peft_would_not_read_whole(form: str, base: Path, tmp_path: Path, call: Caller) -> None:
    """Of a raw state dict, or in a torch file, with the embeddings that PEFT saves beside it."""
    lora = ONLY_PEFT["pissa-dora"] | {"target_modules": ["q_proj", "embed_tokens"]}
    adapter = adapter_of(base, tmp_path / "adapter", LoraConfig(**lora), "causal-lm")
    theirs = merge_with_peft(base, adapter, tmp_path / "theirs", "causal-lm")
    tensors = saved_tensors(adapter)
    weights = adapter / "adapter_model.safetensors"
    if form == "torch-file":
        weights.unlink()
        torch.save(tensors, adapter / "adapter_model.bin")
    else:
        renamed = {
            re.sub(
                r"\.(lora_embedding_[AB])$", r".\1.default", re.sub(r"\.(lora_[AB])\.", r".\1.default.", name)
            ).replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight"): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, weights)
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "ours", "--allow-in-memory")
    assert done.code == 0, done.err
    require_same(tmp_path / "ours", theirs)
