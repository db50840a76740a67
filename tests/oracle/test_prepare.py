"""What servers read, against PEFT's ΔW; MLX-LM's own factors and logits where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_tool import Server, plan_merge, plan_prepare, prepare, validate, verify
from lora_tool.errors import FindingsFound, UnsupportedAdapter
from lora_tool.formats.files import read_json
from lora_tool.keys import PREFIX
from tests.oracle.peft_merge import load_model, save_adapter, save_base, saved_tensors
from tests.oracle.test_combine import EMBEDDINGS, EXACT, PATTERNS, QV, RSLORA, adapters_of, deltas, farthest, least

ONE_RANK = [Server.VLLM, Server.SGLANG, Server.LLAMA_CPP]
MIXED = RSLORA | {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}}


@pytest.mark.parametrize(
    ("server", "lora"),
    [
        (Server.PEFT, MIXED),
        (Server.VLLM, PATTERNS),
        (Server.VLLM, EMBEDDINGS),
        (Server.SGLANG, MIXED),
        (Server.SGLANG, QV | {"target_modules": r".*\.(q|up)_proj"}),
        (Server.LLAMA_CPP, MIXED),
    ],
)
def test_pefts_delta_stays_the_same(server: Server, lora: dict[str, Any], tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", lora)
    out = prepare(adapter, server, out=tmp_path / "out").path
    assert farthest(deltas(base, out), deltas(base, adapter)) <= EXACT
    found = validate(out, base=base, servers=[server]).findings
    assert {finding.code for finding in found} <= {"LT804"}  # LoRA on embeddings, for some models only
    assert not verify(out).report.findings
    config = read_json(out / "adapter_config.json")
    if server in ONE_RANK:
        assert config["r"] == config["lora_alpha"]
        assert config["rank_pattern"] == config["alpha_pattern"] == {}
        assert {tensor.shape[0] for name, tensor in saved_tensors(out).items() if "_A" in name} == {config["r"]}
        assert not any("." in name for name in config["target_modules"])


def in_mlx(folder: Path) -> dict[str, torch.Tensor]:
    """Return ΔW of every module as MLX-LM computes it: scale·(x·lora_a)·lora_b."""
    parameters = read_json(folder / "adapter_config.json")["lora_parameters"]
    table = load_file(folder / "adapters.safetensors")
    modules = [name.removesuffix(".lora_a") for name in table if name.endswith(".lora_a")]
    assert len(table) == 2 * len(modules)
    assert {table[f"{module}.lora_a"].shape[1] for module in modules} == {parameters["rank"]}
    return {
        module: parameters["scale"] * (table[f"{module}.lora_a"].double() @ table[f"{module}.lora_b"].double())
        for module in modules
    }


@pytest.mark.parametrize("lora", [PATTERNS, MIXED, EMBEDDINGS])
def test_mlx_gets_the_same_delta_transposed(lora: dict[str, Any], tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", lora)
    out = prepare(adapter, "mlx", out=tmp_path / "out").path
    expected = {name.removeprefix("base_model.model."): delta for name, delta in deltas(base, adapter).items()}
    # PEFT's embedding is [vocabulary, dimension], as MLX-LM's; a linear layer's W is [out, in]
    turned = {name: delta if "embed" in name else delta.T for name, delta in expected.items()}
    assert farthest(in_mlx(out), turned) <= EXACT
    config = read_json(out / "adapter_config.json")
    assert config["num_layers"] == -1  # all of them
    assert {key.rpartition(".")[2] for key in config["lora_parameters"]["keys"]} == {
        n.rpartition(".")[2] for n in expected
    }


def test_mlx_lm_itself_gives_the_unmerged_logits(tmp_path: Path) -> None:
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'mlx[cpu]' mlx-lm")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    base, (adapter,) = adapters_of(tmp_path, "llama", MIXED)
    config = json.loads((base / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (base / "config.json").write_text(json.dumps(config))
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)
    tokens = [5, 17, 3, 42, 8]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
        without = model.get_base_model()
    out = prepare(adapter, "mlx", base=base, out=tmp_path / "out").path
    loaded, _ = utils.load_model(base)
    served = utils.load_adapters(loaded, str(out))
    found = torch.tensor(served(mlx.array([tokens]))[0].tolist())
    assert float((found - expected).abs().max()) <= 2e-5
    assert without is not None


def test_a_rank_that_the_server_does_not_take(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | {"r": 12})
    expected = deltas(base, adapter)
    with pytest.raises(UnsupportedAdapter, match=r"rank 12 and would keep \d+\.\d+% of ‖ΔW‖² at rank 4") as refused:
        plan_prepare(adapter, "vllm", max_rank=4)
    assert "--approximate" in str(refused.value.hint)
    out = prepare(adapter, "vllm", max_rank=4, approximate=True, out=tmp_path / "near").path
    for name, found in deltas(base, out).items():
        best = least(expected[name], 4)
        assert float((found - expected[name]).norm()) <= best * (1 + 1e-6) + EXACT * float(expected[name].norm())
    assert not verify(out).report.findings
    # rows that are zero cost nothing
    table = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in table.items():
        if "lora_A" in name:
            tensor[4:] = tensor[:4].repeat(2, 1)
    save_file(table, adapter / "adapter_model.safetensors")
    exact = prepare(adapter, "vllm", max_rank=4, out=tmp_path / "exact").path
    assert farthest(deltas(base, exact), deltas(base, adapter)) <= EXACT


REFUSED: dict[str, tuple[dict[str, Any], Server, str]] = {
    "dora": (QV | {"use_dora": True}, Server.VLLM, "DoRA"),
    "lora-bias": (QV | {"lora_bias": True}, Server.LLAMA_CPP, "lora_bias"),
    "bias": (QV | {"bias": "all"}, Server.SGLANG, '`bias` "all"'),
    "norms": (QV | {"modules_to_save": ["norm"]}, Server.VLLM, "norm. saved whole"),
    "tokens": (QV | {"trainable_token_indices": [3, 5]}, Server.MLX, "single trained tokens"),
    "pissa": (QV | {"init_lora_weights": "pissa"}, Server.VLLM, "pissa"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_form_is_refused_by_name(name: str, tmp_path: Path) -> None:
    lora, server, message = REFUSED[name]
    _, (adapter,) = adapters_of(tmp_path, "qwen2", lora)
    with pytest.raises((UnsupportedAdapter, FindingsFound), match=message) as refused:
        plan_prepare(adapter, server)
    assert refused.value.hint


def test_a_reward_adapter_and_the_base_that_vllm_needs(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    adapter = save_adapter(tmp_path / "rm", base, "seq-cls", QV | {"use_rslora": True}, num_labels=1)
    out, classifier = tmp_path / "out", tmp_path / "classifier"
    prepare(adapter, "vllm", base=base, out=out, reward_base=classifier)
    head = saved_tensors(adapter)[f"{PREFIX}score.weight"]
    assert torch.equal(saved_tensors(out)[f"{PREFIX}score.weight"], head)
    served = saved_tensors(classifier)
    assert torch.equal(served["score.weight"], head)
    known = saved_tensors(base)
    assert {name for name in known if name not in served} == {"lm_head.weight"}
    assert all(torch.equal(tensor, served[name]) for name, tensor in known.items() if name in served)
    assert read_json(classifier / "config.json")["architectures"] == ["LlamaForSequenceClassification"]
    tokens = torch.tensor([[5, 17, 3, 42, 8]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(load_model(base, "seq-cls", 1), adapter)(tokens).logits
        found = PeftModel.from_pretrained(load_model(classifier, "seq-cls", 1), out)(tokens).logits
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert verify(classifier).report.findings == ()
    assert plan_merge(classifier, adapter).steps  # its ΔW is not in it, so a merge is not the second one
    with pytest.raises(UnsupportedAdapter, match="modules|saved whole"):
        plan_prepare(adapter, "sglang")


def test_fused_experts_keep_their_layout_for_vllm(tmp_path: Path) -> None:
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 2, "lora_alpha": 3}
    base, (adapter,) = adapters_of(tmp_path, "mixtral", {"target_modules": ["q_proj"], **experts})
    out = prepare(adapter, "vllm", out=tmp_path / "out").path
    assert read_json(out / "adapter_config.json")["target_modules"] == ["q_proj"]
    assert farthest(deltas(base, out), deltas(base, adapter)) <= EXACT
    with pytest.raises(UnsupportedAdapter, match="as one tensor for each expert"):
        plan_prepare(adapter, "llama.cpp")
