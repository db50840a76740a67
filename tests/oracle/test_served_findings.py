"""What LT8xx findings name as the way out: the command is typed as it stands, and the finding is gone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool import validate, verify
from lora_tool.core.report import Finding
from tests.cli.calling import Caller
from tests.oracle.peft_merge import save_adapter, save_base, saved_tensors
from tests.oracle.test_combine import QV, RSLORA, adapters_of
from tests.oracle.test_prepare import graded_base
from tests.oracle.test_text_on_multimodal import LAYER, load_text, save_whole
from tests.oracle.test_text_on_multimodal import save_adapter as save_text_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about tiny configs

UNTIED = {"tie_word_embeddings": False}
PATTERN = QV | {"alpha_pattern": {"v_proj": 5}}
ROWS = QV | {"modules_to_save": ["lm_head"]}
TOKENS = QV | {"trainable_token_indices": {"embed_tokens": [3, 5]}}
FUSED = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "r": 2,
}
ALL_LINEAR = {
    "r": 2,
    "lora_alpha": 3,
    "target_modules": "all-linear",
}  # the router, too, and the rank of gate and up doubled
ROUTER = QV | {"target_parameters": ["mlp.gate.weight"]}
NEOX = {"r": 2, "target_modules": ["query_key_value"], "use_rslora": True}
CASES: list[tuple[str, str, str, Mapping[str, Any]]] = [
    ("LT801", "mlx", "llama", ROWS),
    ("LT801", "llama.cpp", "llama", ROWS),
    ("LT802", "vllm", "llama", QV | {"use_dora": True}),
    ("LT802", "llama.cpp", "llama", QV | {"use_dora": True}),
    ("LT803", "vllm", "llama", QV | {"r": 20}),
    ("LT803", "vllm", "llama", QV | {"r": 520}),
    ("LT804", "sglang", "llama", TOKENS),
    ("LT805", "vllm", "llama", QV | {"bias": "all"}),  # of a model without biases
    ("LT806", "vllm@0.27", "llama", PATTERN),
    ("LT806", "sglang", "llama", PATTERN),
    ("LT806", "mlx", "llama", PATTERN),
    ("LT807", "sglang", "llama", RSLORA),
    ("LT807", "llama.cpp", "llama", RSLORA),
    ("LT808", "vllm", "llama", QV | {"init_lora_weights": "pissa"}),
    ("LT808", "sglang", "llama", QV | {"init_lora_weights": "olora"}),
    ("LT809", "sglang", "llama", QV | {"target_modules": r".*\.(q|up)_proj"}),
    ("LT809", "vllm", "mixtral", FUSED),
    ("LT809", "vllm", "qwen3_moe", FUSED),
    ("LT809", "mlx", "mixtral", FUSED),
    ("LT806", "vllm@0.27", "mixtral", ALL_LINEAR),
    ("LT809", "vllm", "mixtral", ALL_LINEAR),
    ("LT809", "llama.cpp", "mixtral", ALL_LINEAR),
    ("LT820", "vllm", "mixtral", ROUTER),
    ("LT812", "vllm", "qwen3_5", LAYER),
    ("LT812", "vllm", "llama4", LAYER),
    ("LT812", "vllm", "qwen3_5_moe", LAYER),  # its experts are on disk one by one
    ("LT813", "mlx", "llama", QV),
    ("LT813", "mlx", "llama", TOKENS),
    ("LT813", "mlx", "llama", QV | {"use_dora": True}),
    ("LT813", "mlx", "gpt_neox", NEOX),
    ("LT813", "mlx", "qwen3_moe", ALL_LINEAR),
    ("LT813", "mlx", "mixtral", ROUTER),
    ("LT814", "sglang", "llama", {"r": 2, "target_modules": ["k_proj", "up_proj"]}),
]


def made(folder: Path, model_type: str, lora: Mapping[str, Any]) -> tuple[Path, Path]:
    if lora is LAYER:
        base = save_whole(folder / "base", model_type)
        return base, save_text_adapter(load_text(base), folder / "adapter", **lora)
    if "init_lora_weights" in lora:
        base = graded_base(folder / "base")
    elif model_type in ("mixtral", "qwen3_moe"):
        return adapters_of(folder, model_type, dict(lora))[0], folder / "adapter-0"
    else:
        base = save_base(folder / "base", model_type, "causal-lm", torch.float32, **UNTIED)
    adapter = save_adapter(folder / "adapter", base, "causal-lm", lora)
    if lora is ROWS:  # only some rows of the output layer were trained
        path = adapter / "adapter_model.safetensors"
        table = load_file(path)
        (name,) = (name for name in table if "lm_head" in name)
        whole = saved_tensors(base)["lm_head.weight"].clone()
        whole[[4, 9]] += 0.5
        save_file({**table, name: whole}, path, metadata={"format": "pt"})
    return base, adapter


def commands(finding: Finding, places: Mapping[str, Path]) -> list[list[str]]:
    """Return the commands that prepare the adapter, as the hint has them, with folders in the places of its capitals."""
    typed = re.findall(r"lora-tool (?:prepare|convert) .*?(?=;|, then|$)", str(finding.hint))
    return [[str(places.get(word, word)) for word in shlex.split(each)[1:]] for each in typed]


@pytest.mark.parametrize(
    ("code", "server", "model_type", "lora"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_command_that_a_finding_names_mends_it(
    code: str, server: str, model_type: str, lora: Mapping[str, Any], call: Caller, tmp_path: Path
) -> None:
    base, adapter = made(tmp_path, model_type, lora)
    out = tmp_path / "out"
    places = {"BASE": base, "OUT": out, "EXPERTS": tmp_path / "experts"}
    found = [each for each in validate(adapter, base=base, servers=[server]).findings if each.code == code]
    assert found
    for finding in found:
        assert f"--for {server}" in str(finding.hint)
    for command in commands(found[0], places):
        called = call(*command)
        assert called.code == 0, called.err
    assert not verify(out).report.findings
    if server != "mlx":  # what MLX-LM reads is no adapter of PEFT's any more
        after = {(each.code, each.severity) for each in validate(out, base=base, servers=[server]).findings}
        # a warning may stay: of a rank above the default, of LoRA on an embedding
        assert not after & {(each.code, each.severity) for each in found}


PACKED = {"r": 2, "target_modules": ["c_attn"]}
BIASES = QV | {"bias": "all", "use_rslora": True}


@pytest.mark.parametrize(
    ("server", "lora", "way"),
    [
        ("llama.cpp", QV | {"target_modules": ["q_proj", "lm_head"]}, "merge --untie"),
        ("mlx", QV | {"target_modules": ["q_proj", "embed_tokens"]}, "merge --untie"),
        ("mlx", QV | {"modules_to_save": ["embed_tokens"]}, "merge"),  # PEFT's output layer stays as it is
        ("vllm", QV | {"modules_to_save": ["lm_head"]}, "merge"),
        ("sglang", TOKENS, "merge"),
        ("llama.cpp", BIASES, "merge"),
        ("mlx", BIASES, "merge"),
        ("vllm", PACKED, "merge"),
    ],
)
def test_where_no_command_prepares_it_no_finding_names_one(
    server: str, lora: Mapping[str, Any], way: str, call: Caller, tmp_path: Path
) -> None:
    model_type = "gpt_bigcode" if lora is PACKED else "llama"
    biased = {"attention_bias": True} if lora is BIASES else {}
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32, tie_word_embeddings=True, **biased)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    found = [each for each in validate(adapter, base=base, servers=[server]).findings if "LT8" in each.code]
    assert {each.code for each in found} - {"LT813"}
    assert all("lora-tool prepare" not in str(each.hint) for each in found)
    assert all(f"lora-tool {way}" in str(each.hint) for each in found)
    called = call("prepare", adapter, "--for", server, "--base", base, "-o", tmp_path / "out")
    assert called.code == 3
    assert f"lora-tool {way}" in called.err
