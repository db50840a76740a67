"""Adapters for llama.cpp: PEFT's ΔW in the file that `gguf`, llama.cpp's own package, reads, under the names that it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool import plan_prepare, prepare, validate, verify
from lora_tool.core.errors import LoraToolError, UnsupportedAdapter, UnsupportedCheckpoint
from lora_tool.core.keys import PREFIX
from lora_tool.core.report import Severity
from lora_tool.formats.files import read_json
from tests.cli.calling import Caller
from tests.oracle.test_combine import CONV1D, EMBEDDINGS, QV, adapters_of, deltas
from tests.oracle.test_convert_experts import FUSED
from tests.oracle.test_prepare import MIXED

ALL = {"target_modules": "all-linear", "r": 4}
SEVERAL = QV | {"use_rslora": True, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 5}}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
IN_PAIRS = {"llama", "mistral", "mixtral"}
HALF = 2


def changes_in(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return ΔW of every tensor of the base's file, as llama.cpp computes it."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    held = {tensor.name: tensor.data.astype(np.float64) for tensor in reader.tensors}
    found = {}
    for name in {name.rpartition(".lora_")[0] for name in held}:
        a, b = held[f"{name}.lora_a"], held[f"{name}.lora_b"]
        scale = fields["adapter.lora.alpha"] / b.shape[-1]
        found[name] = scale * (a @ b.T if name == "token_embd.weight" else b @ a)
    return found


def in_llama_cpp(base: Path, expected: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Return PEFT's ΔW under llama.cpp's names, in its order of rows; experts stacked."""
    config = read_json(base / "config.json")
    model_type, names = config["model_type"], {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(
        names[ARCHITECTURES.get(model_type, model_type)], config.get("num_hidden_layers", 2)
    )

    def named(module: str) -> str:
        return str(table.get_name(f"{module}.weight", (".weight",)))

    out: dict[str, np.ndarray[Any, Any]] = {}
    for path, delta in expected.items():
        module = path.removeprefix("base_model.model.")
        values = delta.numpy()
        if module.endswith((".experts", ".experts.base_layer")):
            experts = module.removesuffix(".base_layer")
            height = config.get("moe_intermediate_size", config["intermediate_size"])
            both = values.shape[1:] == (HALF * height, config["hidden_size"])
            parts = np.split(values, HALF, axis=1) if both else [values]
            for name, part in zip(("gate_proj", "up_proj") if both else ("down_proj",), parts, strict=True):
                out[named(f"{experts}.{name}")] = part
            continue
        if model_type in IN_PAIRS and module.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
            rows, width = values.shape
            values = values.reshape(heads, HALF, rows // heads // HALF, width).swapaxes(1, 2).reshape(values.shape)
        out[named(module)] = values.T if model_type == "gpt2" else values  # a Conv1D's
    return out


@pytest.mark.filterwarnings("ignore")  # of PEFT, about fused experts
@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("llama", MIXED),
        ("llama", EMBEDDINGS),
        ("mistral", ALL),
        ("qwen2", SEVERAL),
        ("qwen3", ALL),
        ("gemma", SEVERAL),
        ("gemma2", ALL),
        ("gemma3_text", ALL),
        ("phi3", ALL),
        ("gpt2", CONV1D),
        ("mixtral", FUSED),
        ("qwen3_moe", FUSED),
    ],
)
def test_pefts_delta_is_in_the_file(model_type: str, lora: dict[str, Any], tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, model_type, lora)
    out = prepare(adapter, "llama.cpp", base=base, out=tmp_path / "out").path
    found, expected = changes_in(out / "adapter.gguf"), in_llama_cpp(base, deltas(base, adapter))
    assert found.keys() == expected.keys()
    apart = {name: np.linalg.norm(found[name] - each) / np.linalg.norm(each) for name, each in expected.items()}
    assert max(apart.values()) <= 1e-6, apart
    assert not verify(out).report.findings
    assert not validate(out, base=base, deep=True).findings


def test_experts_that_have_lora_one_by_one_are_stacked(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED)
    assert call("convert", adapter, "--to", "peft-experts", "--base", base, "-o", tmp_path / "experts").code == 0
    found = [
        changes_in(prepare(each, "llama.cpp", base=base, out=tmp_path / f"out{at}").path / "adapter.gguf")
        for at, each in enumerate((adapter, tmp_path / "experts"))
    ]
    assert found[0].keys() == found[1].keys()
    assert all(np.allclose(found[0][name], found[1][name], rtol=0, atol=1e-7) for name in found[0])
    assert not verify(tmp_path / "out1").report.findings


def test_trained_tokens_become_lora_on_the_embedding(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | {"trainable_token_indices": {"embed_tokens": [3, 5]}})
    out = prepare(adapter, "llama.cpp", base=base, out=tmp_path / "out").path
    change = changes_in(out / "adapter.gguf")["token_embd.weight"]
    assert set(np.flatnonzero(np.abs(change).sum(axis=1))) == {3, 5}
    assert not verify(out).report.findings


def test_a_lower_rank_and_a_type_of_16_bits(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | {"r": 8})
    words = ("--for", "llama.cpp", "--base", base, "--max-rank", "2", "--approximate", "--dtype", "bfloat16")
    done = call("prepare", adapter, *words, "-o", tmp_path / "out")
    assert (done.code, "llama.cpp rounds activations to bfloat16, too" in done.out) == (0, True)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out" / "adapter.gguf").tensors} == {
        "BF16"
    }
    assert not verify(tmp_path / "out").report.findings


@pytest.mark.parametrize(
    ("model_type", "lora", "said"),
    [
        ("granite", QV, "only for llama, mistral"),
        ("qwen2", QV | {"modules_to_save": ["input_layernorm", "norm"]}, "norm` and 2 more saved whole"),
        ("qwen2", QV | {"bias": "all"}, "trained biases"),
    ],
)
def test_what_has_no_form_is_refused_by_name(model_type: str, lora: dict[str, Any], said: str, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, model_type, lora)
    with pytest.raises(UnsupportedAdapter, match=said):
        plan_prepare(adapter, "llama.cpp", base=base)


def test_without_its_base_it_is_asked_for(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UnsupportedAdapter, match="without its base") as error:
        plan_prepare(adapter, "llama.cpp")
    assert "--base MODEL" in str(error.value.hint)


def test_only_llama_cpp_takes_the_file(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV)
    out = prepare(adapter, "llama.cpp", base=base, out=tmp_path / "out").path
    for words in (("merge", out, "--base", base), ("diff", out, adapter), ("resize", out, "--rank", "1")):
        done = call(*words, *(() if words[0] == "diff" else ("-o", tmp_path / "no")))
        assert (done.code, "only for llama.cpp" in done.err) == (3, True), words
    assert "GGUF adapter" in call("inspect", out).out
    found = validate(out, servers=["vllm", "peft", "llama.cpp"]).findings
    assert [(each.code, each.message.partition(" ")[0]) for each in found] == [("LT813", "PEFT"), ("LT813", "vLLM")]
    assert "adapter.gguf" in call("push", out, "owner/name", "--dry-run").out


@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
def test_names_without_pefts_prefix_are_written_with_it_where_the_server_reads_them(
    server: str, tmp_path: Path
) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV)
    good = prepare(adapter, server, base=base, out=tmp_path / "good").path
    tensors = load_file(adapter / "adapter_model.safetensors")
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    save_file(bare, adapter / "adapter_model.safetensors")
    out = prepare(adapter, server, base=base, out=tmp_path / "out").path
    name = "adapter.gguf" if server == "llama.cpp" else "adapter_model.safetensors"
    assert (out / name).read_bytes() == (good / name).read_bytes()
    assert not verify(out).report.findings
    assert not validate(adapter, base=base, servers=[server]).at_least(Severity.WARNING)
    with pytest.raises(LoraToolError, match="LT211"):
        plan_prepare(adapter, "peft", base=base)


def test_a_broken_file_is_found(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV)
    path = prepare(adapter, "llama.cpp", base=base, out=tmp_path / "out").path / "adapter.gguf"
    whole = path.read_bytes()
    for data in (
        *(whole[:size] for size in (0, 3, 30, 200, len(whole) - 5)),
        b"GGUF" + b"\xff" * 200,
        whole[:8] + b"\xff" * 40,
    ):
        path.write_bytes(data)
        assert validate(path.parent).at_least(Severity.ERROR)
        with pytest.raises(LoraToolError):
            verify(path.parent).report.raise_for_errors()
    path.write_bytes(whole.replace(b"adapter", b"amodelx", 1))
    with pytest.raises(UnsupportedCheckpoint, match="llama.cpp's format GGUF"):
        validate(path.parent)
