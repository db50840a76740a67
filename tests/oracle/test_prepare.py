"""What servers read, against PEFT's ΔW; MLX-LM's own factors and logits where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from lora_tool import Server, combine, plan_merge, plan_prepare, prepare, validate, verify
from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.formats.files import read_json
from tests.checkpoint_edits import fields
from tests.oracle.peft_merge import load_model, save_adapter, save_base, saved_tensors
from tests.oracle.test_combine import (
    EMBEDDINGS,
    EXACT,
    PATTERNS,
    QV,
    RSLORA,
    adapters_of,
    deltas,
    farthest,
    least,
    summed,
)

pytestmark = pytest.mark.usefixtures("typed_hints")
ONE_RANK = [Server.VLLM, Server.SGLANG]
MIXED = RSLORA | {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}}


@pytest.mark.parametrize(
    ("server", "lora"),
    [
        (Server.PEFT, MIXED),
        (Server.VLLM, PATTERNS),
        (Server.VLLM, EMBEDDINGS),
        (Server.SGLANG, MIXED),
        (Server.SGLANG, QV | {"target_modules": r".*\.(q|v|gate)_proj"}),
    ],
)
def test_pefts_delta_stays_the_same(server: Server, lora: dict[str, Any], tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", lora)
    out = prepare(adapter, server, base=base if server is Server.SGLANG else None, out=tmp_path / "out").path
    expected, made = deltas(base, adapter), deltas(base, out)
    assert farthest({name: made[name] for name in expected}, expected) <= EXACT
    found = validate(out, base=base, servers=[server]).findings
    assert {finding.code for finding in found} <= {"LT804", "LT208"}  # LoRA on embeddings, for some models only; zeros
    assert not verify(out).report.findings
    config = read_json(out / "adapter_config.json")
    if server in ONE_RANK:
        several = "alpha_pattern" in lora or "rank_pattern" in lora
        assert config["lora_alpha"] == (config["r"] if several else LoraConfig(**lora).lora_alpha)
        assert config["use_rslora"] is False
        assert config["rank_pattern"] == config["alpha_pattern"] == {}
        assert {tensor.shape[0] for name, tensor in saved_tensors(out).items() if "_A" in name} == {config["r"]}
        assert not any("." in name for name in config["target_modules"])


ROOT_OF_16 = QV | {"r": 16, "lora_alpha": 3, "use_rslora": True}
TWICE = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}


@pytest.mark.parametrize(
    ("server", "lora", "said"),
    [
        (Server.VLLM, QV, (6, 7)),
        (Server.SGLANG, QV, (6, 7)),
        (Server.PEFT, ROOT_OF_16 | {"lora_bias": True}, (16, 12)),  # alpha / √r
        (Server.VLLM, ROOT_OF_16, (16, 12)),
    ],
)
def test_factors_stay_as_they_are_where_all_have_one_scaling(
    server: Server, lora: dict[str, Any], said: tuple[int, int], tmp_path: Path
) -> None:
    """7/6 in B would round every factor of 16 bits, or take twice the bytes."""
    base, (adapter,) = adapters_of(tmp_path, "qwen2", lora, dtype=torch.bfloat16)
    out = prepare(adapter, server, out=tmp_path / "out").path
    config = read_json(out / "adapter_config.json")
    assert ((config["r"], config["lora_alpha"]), config["use_rslora"]) == (said, False)
    expected, found = saved_tensors(adapter), saved_tensors(out)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype is torch.bfloat16 and found[name].equal(expected[name]) for name in found)
    assert farthest(deltas(base, out), deltas(base, adapter)) == 0
    assert not verify(out).report.findings
    name = next(name for name in found if name.endswith("lora_B.weight"))
    save_file(found | {name: found[name] * 2}, out / "adapter_model.safetensors", metadata={"format": "pt"})
    assert name in {finding.subject for finding in verify(out).report.findings}


@pytest.mark.parametrize(
    ("lora", "alpha"),
    [
        (TWICE | {"alpha_pattern": {"v_proj": 4}}, 8),  # 2 everywhere: v_proj is padded, and its B not scaled
        (TWICE, 4),  # two scalings
        (QV | {"use_rslora": True}, 6),  # 7 / √6, which no whole alpha gives
    ],
)
def test_a_scaling_that_alpha_cannot_say_is_in_b(lora: dict[str, Any], alpha: int, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", lora)
    out = prepare(adapter, "vllm", out=tmp_path / "out").path
    config = read_json(out / "adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (lora["r"], alpha)
    assert farthest(deltas(base, out), deltas(base, adapter)) <= EXACT
    assert not verify(out).report.findings


@pytest.mark.parametrize(
    "where",
    [
        {"layers_to_transform": [1]},
        {"exclude_modules": r".*\.0\.self_attn\.q_proj"},
        {"target_modules": r".*\.0\..*_proj|.*\.1\.mlp\.up_proj"},
        {"target_modules": ["layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"]},
    ],
)
def test_lora_on_some_of_the_modules_of_a_name_stays_on_those(where: dict[str, Any], tmp_path: Path) -> None:
    """Servers know a module by the last part of its name alone, and take whatever tensors there are."""
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | where)
    out = prepare(adapter, "vllm", base=base, out=tmp_path / "out").path
    assert farthest(deltas(base, out), deltas(base, adapter)) <= EXACT
    assert not validate(out, base=base, servers=[Server.VLLM]).findings


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "up_proj"])
def test_what_sglang_reads_only_together_gets_lora_of_zeros(name: str, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | {"target_modules": [name, "down_proj"]})
    with pytest.raises(UnsupportedAdapter, match=f"LoRA on `{name}` without") as refused:
        plan_prepare(adapter, "sglang")
    assert "--for sglang --base MODEL" in str(refused.value.hint)
    out = prepare(adapter, "sglang", base=base, out=tmp_path / "out").path
    assert not {each.code for each in validate(out, base=base, servers=[Server.SGLANG]).findings} - {"LT208"}
    expected, found = deltas(base, adapter), deltas(base, out)
    assert farthest({each: found[each] for each in expected}, expected) <= EXACT
    idle = found.keys() - expected.keys()
    assert {each.rpartition(".")[2] for each in idle} == {
        "q_proj": {"v_proj"},
        "k_proj": {"q_proj", "v_proj"},
        "v_proj": {"q_proj"},
        "up_proj": {"gate_proj"},
    }[name]
    assert not any(found[each].any() for each in idle)
    assert not verify(out).report.findings
    table = saved_tensors(out)
    (written, *_) = (f"{each}.lora_B.weight" for each in idle)
    table[written][0, 0] = 1e-3
    save_file(table, out / "adapter_model.safetensors")
    assert [finding.subject for finding in verify(out).report.findings] == [written]
    assert plan_prepare(adapter, "vllm").steps  # and llama.cpp, and MLX-LM, which have LoRA on each by itself


def test_trained_tokens_are_lora_on_an_embedding_of_any_name(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "modernbert", "seq-cls", torch.float32)
    lora = {"target_modules": ["Wqkv"], "r": 2, "trainable_token_indices": {"tok_embeddings": [3, 5]}}
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", lora)
    with fields(base, "config.json") as config:
        config["architectures"] = ["NewForSequenceClassification"]  # vLLM has no LoRA for ModernBERT
    out = prepare(adapter, "vllm", base=base, out=tmp_path / "out").path
    assert {name.rpartition(".")[2] for name in saved_tensors(out) if "tok_embeddings" in name} == {
        "lora_embedding_A",
        "lora_embedding_B",
    }


def test_a_head_that_peft_did_not_save_is_not_promised(tmp_path: Path) -> None:
    """PEFT names `classifier` and `score` in every config of a classifier; BART has neither."""
    base = save_base(tmp_path / "base", "bart", "seq-cls", torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", QV)
    out = prepare(adapter, "sglang", base=base, out=tmp_path / "out").path
    assert "LT801" not in {finding.code for finding in validate(out, servers=[Server.SGLANG]).findings}


@pytest.mark.parametrize("server", [Server.SGLANG, Server.LLAMA_CPP, Server.MLX])
def test_lora_on_a_head_is_refused_where_there_is_none(server: Server, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "seq-cls", torch.float32)
    lora = LoraConfig(**QV | {"target_modules": ["q_proj", "v_proj", "score"], "init_lora_weights": False})
    adapter = tmp_path / "adapter"
    get_peft_model(load_model(base, "seq-cls"), lora).save_pretrained(str(adapter))
    with pytest.raises(UnsupportedAdapter, match="LoRA on `score`, a head that .* does not have"):
        plan_prepare(adapter, server, base=base)
    found = validate(adapter, base=base, servers=[server]).findings
    assert ("LT801", "score") in {(finding.code, finding.subject) for finding in found}


def test_lora_of_zeros_beside_computed_factors_is_verified(tmp_path: Path) -> None:
    lora = QV | {"target_modules": ["q_proj"], "use_dora": True}
    base, (adapter,) = adapters_of(tmp_path, "llama", lora)
    out = prepare(adapter, "sglang", base=base, approximate=True, out=tmp_path / "out").path
    assert not verify(out).report.findings


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


@pytest.mark.parametrize(
    ("model_type", "targets", "layers", "theirs"),
    [
        ("llama", ["q_proj", "down_proj"], "layers", "model.layers"),
        ("gpt2", ["c_attn"], "h", "model.h"),
        ("gpt_neox", ["query_key_value"], "layers", "model.h"),
        ("gptj", ["q_proj", "fc_in"], "h", "model.h"),
    ],
)
def test_modules_are_where_mlx_lm_has_them(
    model_type: str, targets: list[str], layers: str, theirs: str, tmp_path: Path
) -> None:
    """MLX-LM's classes have an output layer; `test_mlx_lm_itself_gives_the_unmerged_logits` is of usual names."""
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32)
    lora: dict[str, Any] = {"target_modules": targets, "fan_in_fan_out": model_type == "gpt2"}
    bare: Any = get_peft_model(AutoModel.from_pretrained(base), LoraConfig(task_type="FEATURE_EXTRACTION", **lora))
    headed: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **lora))
    made = {}
    for name, model in (("bare", bare), ("headed", headed)):
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / name)
        out = prepare(tmp_path / name, "mlx", base=base, out=tmp_path / f"{name}-out").path
        assert not verify(out).report.findings
        made[name] = load_file(out / "adapters.safetensors")
        assert all(each.startswith(f"{theirs}.") for each in made[name])
    assert made["bare"].keys() == made["headed"].keys()
    with pytest.raises(UnsupportedAdapter, match=rf"`{layers}` is where some models have their layers") as refused:
        prepare(tmp_path / "bare", "mlx", out=tmp_path / "refused")
    assert "--for mlx --base MODEL" in str(refused.value.hint)


def test_a_rank_that_the_server_does_not_take(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | {"r": 12})
    expected = deltas(base, adapter)
    with pytest.raises(UnsupportedAdapter, match=r"rank 12 and would keep \d+\.\d+% of ‖ΔW‖² at rank 4") as refused:
        plan_prepare(adapter, "vllm", max_rank=4)
    assert "`approximate=True`" in str(refused.value.hint)
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
    "norms": (QV | {"modules_to_save": ["norm"]}, Server.VLLM, "norm`.* saved whole"),
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
    with pytest.raises(UnsupportedAdapter, match="which vLLM reads as one tensor for each expert"):
        plan_prepare(adapter, "vllm")
    of_unknown_base(adapter)
    out = prepare(adapter, "vllm", out=tmp_path / "out").path
    assert read_json(out / "adapter_config.json")["target_modules"] == ["q_proj"]
    assert farthest(deltas(base, out), deltas(base, adapter)) <= EXACT
    with pytest.raises(UnsupportedAdapter, match="as one tensor for each expert"):
        plan_prepare(adapter, "mlx")


def of_unknown_base(adapter: Path) -> None:
    with fields(adapter) as config:
        config["base_model_name_or_path"] = "acme/unknown"


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # PEFT 0.21 looks at modules alone
def test_all_linear_on_a_mixture_of_experts_has_ranks_of_its_own(tmp_path: Path) -> None:
    """PEFT doubles rank and alpha of gate and up for `all-linear`, and says so in patterns of parameters."""
    base, (adapter,) = adapters_of(tmp_path, "mixtral", {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"})
    assert read_json(adapter / "adapter_config.json")["rank_pattern"] == {r".*\.gate_up_proj": 4}
    expected = deltas(base, adapter)
    of_unknown_base(adapter)
    for server in (Server.PEFT, Server.VLLM):
        out = prepare(adapter, server, out=tmp_path / server.value).path
        assert not verify(out).report.findings
        assert {found.code for found in validate(out, base=base, servers=[server]).findings} <= {"LT809", "LT820"}
        config = read_json(out / "adapter_config.json")
        if server is Server.VLLM:
            assert (config["r"], config["rank_pattern"]) == (4, {})
            assert sorted(config["target_parameters"]) == ["down_proj", "gate_up_proj"]
            experts = {name: delta for name, delta in deltas(base, out).items() if "experts" in name}
            assert farthest(experts, {name: expected[name] for name in experts}) <= EXACT
        else:
            assert farthest(deltas(base, out), expected) <= EXACT
    table = saved_tensors(tmp_path / "vllm")
    name = f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight"
    assert table[name].shape == (4 * 4, 48)  # experts · rank, the last two rows of each of zeros
    table[name][2, 5] = 1e-3
    save_file(table, tmp_path / "vllm" / "adapter_model.safetensors")
    assert [finding.subject for finding in verify(tmp_path / "vllm").report.findings] == [name]
    with pytest.raises(UnsupportedAdapter, match=r"experts.gate_up_proj` has rank 4 for each expert") as refused:
        plan_prepare(adapter, "vllm", max_rank=2)
    assert "--to peft-experts" in str(refused.value.hint)
    with pytest.raises(UnsupportedAdapter, match="as one tensor for each expert") as refused:
        plan_prepare(adapter, "mlx")
    assert "--to peft-experts" in str(refused.value.hint)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # as above
def test_a_matrix_among_the_parameters_is_a_module_to_servers(tmp_path: Path) -> None:
    lora = {"target_modules": [], "target_parameters": ["q_proj.weight", "mlp.up_proj.weight"], "r": 3}
    base, adapters = adapters_of(tmp_path, "llama", lora, lora | {"rank_pattern": {"up_proj.weight": 5}})
    expected = [deltas(base, each) for each in adapters]
    for server in ONE_RANK:
        out = prepare(adapters[1], server, base=base, out=tmp_path / server.value).path
        assert read_json(out / "adapter_config.json")["target_parameters"] is None
        made = deltas(base, out)  # for SGLang also on v and gate, of zeros
        assert farthest({name: made[name] for name in expected[1]}, expected[1]) <= EXACT
        assert not verify(out).report.findings
    both = combine(adapters, weights=[0.7, -0.3], out=tmp_path / "both").path
    assert farthest(deltas(base, both), summed([(0.7, expected[0]), (-0.3, expected[1])])) <= EXACT
    assert not verify(both).report.findings


def graded_base(folder: Path, **overrides: Any) -> Path:
    """Write a base whose matrices have singular values far apart, so that what PiSSA takes out is determined."""
    base = save_base(folder, "llama", "causal-lm", torch.float32, **overrides)
    table = saved_tensors(base)
    for path in base.glob("model*"):
        path.unlink()
    for name, weight in table.items():
        if weight.dim() == 2 and "proj" in name:
            left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
            table[name] = ((left * values[0] * 0.7 ** torch.arange(len(values))) @ right).float()
    save_file(table, base / "model.safetensors", metadata={"format": "pt"})
    return base


def logits_of(base: Path, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[5, 17, 3, 42, 8]])).logits[0]
    return found


@pytest.mark.parametrize(("init", "server"), [("pissa", Server.VLLM), ("olora", Server.PEFT), ("pissa", Server.MLX)])
def test_an_init_that_changed_the_base_becomes_plain_lora_of_twice_the_rank(
    init: str, server: Server, tmp_path: Path
) -> None:
    base = graded_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", QV | {"r": 3, "init_lora_weights": init})
    with pytest.raises(UnsupportedAdapter, match="takes a part out of the base first") as refused:
        plan_prepare(adapter, server)
    assert "--base MODEL" in str(refused.value.hint)
    out = prepare(adapter, server, base=base, out=tmp_path / "out").path
    assert not verify(out).report.findings
    name = "adapters.safetensors" if server is Server.MLX else "adapter_model.safetensors"
    table = load_file(out / name)
    assert {min(tensor.shape) for tensor in table.values()} == {6}
    if server is not Server.MLX:
        assert read_json(out / "adapter_config.json")["init_lora_weights"] is True
        assert torch.allclose(logits_of(base, out), logits_of(base, adapter), rtol=0, atol=2e-5)
    name = next(each for each in table if each.lower().endswith(("lora_b", "lora_b.weight")))
    table[name][0] *= 1.01
    save_file(table, out / ("adapters.safetensors" if server is Server.MLX else "adapter_model.safetensors"))
    assert [finding.code for finding in verify(out).report.findings] == ["LT626"]


TRAINED_ROWS = {"trainable_token_indices": {"embed_tokens": [3, 5]}}


@pytest.mark.parametrize(
    ("lora", "server"),
    [
        (QV | TRAINED_ROWS, Server.VLLM),
        (QV | {"modules_to_save": ["embed_tokens", "lm_head"]}, Server.VLLM),
        ({"peft_type": "TRAINABLE_TOKENS"}, Server.VLLM),
    ],
)
def test_trained_rows_are_lora_on_the_embedding(lora: dict[str, Any], server: Server, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32, tie_word_embeddings=False)
    if "peft_type" in lora:
        model = get_peft_model(load_model(base, "causal-lm"), TrainableTokensConfig(token_indices=[3, 5]))
        model.save_pretrained(str(tmp_path / "adapter"))
        adapter = tmp_path / "adapter"
        path = adapter / "adapter_model.safetensors"
        table = {name: tensor + 0.3 if "delta" in name else tensor for name, tensor in load_file(path).items()}
        save_file(table, path, metadata={"format": "pt"})
    else:
        adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    for name, tensor in whole.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            before = saved_tensors(base)[name.removeprefix(PREFIX)]
            whole[name] = before.clone()
            whole[name][[4, 9]] = tensor[[4, 9]] + 0.5
    save_file(whole, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedAdapter, match="embed") as refused:
        plan_prepare(adapter, server)
    assert "--base MODEL" in str(refused.value.hint)
    out = prepare(adapter, server, base=base, out=tmp_path / "out").path
    assert not verify(out).report.findings
    table = load_file(out / "adapter_model.safetensors")
    assert all("lora_" in name for name in table)
    assert torch.allclose(logits_of(base, out), logits_of(base, adapter), rtol=0, atol=2e-5)
    name = f"{PREFIX}model.embed_tokens.lora_embedding_B"
    table[name][0] *= 1.01
    save_file(table, out / "adapter_model.safetensors")
    assert [finding.code for finding in verify(out).report.findings] == ["LT626"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_rows_that_a_server_would_not_have(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", QV | TRAINED_ROWS)
    with pytest.raises(UnsupportedAdapter, match="output layer, too"):
        prepare(adapter, "vllm", base=base, out=tmp_path / "out")
    saved = save_adapter(tmp_path / "saved", base, "causal-lm", QV | {"modules_to_save": ["lm_head"]})
    with pytest.raises(
        UnsupportedAdapter, match=r"lm_head.weight` was trained whole, but .* uses its embedding as its output"
    ):
        plan_prepare(saved, "vllm", base=base)
    untied = save_base(tmp_path / "untied", "llama", "causal-lm", torch.float32, tie_word_embeddings=False)
    grown = save_adapter(tmp_path / "grown", untied, "causal-lm", QV | {"modules_to_save": ["embed_tokens"]})
    table = load_file(grown / "adapter_model.safetensors")
    name = next(name for name in table if "embed_tokens" in name)
    table[name] = torch.cat([table[name], table[name][:2]])
    save_file(table, grown / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises((UnsupportedAdapter, FindingsFound), match="vocabulary grew|rows"):
        prepare(grown, "vllm", base=untied, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*lora-tool*"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("server", [Server.MLX, Server.LLAMA_CPP])
def test_one_matrix_for_both_ends_takes_no_lora_on_one(server: Server, end: str, tmp_path: Path) -> None:
    bases = {
        tied: save_base(tmp_path / str(tied), "llama", "causal-lm", torch.float32, tie_word_embeddings=tied)
        for tied in (True, False)
    }
    adapter = save_adapter(tmp_path / "adapter", bases[True], "causal-lm", QV | {"target_modules": [end, "q_proj"]})
    with pytest.raises(UnsupportedAdapter, match=f"has one matrix for both: it cannot have LoRA on .*{end}"):
        plan_prepare(adapter, server, base=bases[True])
    assert "only if the base has an output layer of its own" in str(plan_prepare(adapter, server))
    assert "only if" not in str(plan_prepare(adapter, server, base=bases[False]))
    assert plan_prepare(adapter, "vllm", base=bases[True]).steps  # it has LoRA on each end by itself


def test_what_peft_reads_as_it_is_and_many_saved_modules(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.float32)
    model = get_peft_model(load_model(base, "causal-lm"), TrainableTokensConfig(token_indices=[3, 5]))
    model.save_pretrained(str(tmp_path / "tokens"))
    with pytest.raises(UnsupportedAdapter, match="no LoRA layers, and PEFT reads its trained tokens as they are"):
        plan_prepare(tmp_path / "tokens", "peft")
    many = save_adapter(tmp_path / "many", base, "causal-lm", {"target_modules": ["q_proj"], "bias": "all"})
    with pytest.raises(UnsupportedAdapter, match=r"trained biases, `.*`, `.*`, `.*` and 3 more"):
        plan_prepare(many, "sglang")


def test_dora_stays_dora_for_peft(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    lora = {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "rank_pattern": {"down_proj": 3}}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora | {"use_dora": True, "use_rslora": True})
    out = prepare(adapter, "peft", out=tmp_path / "out").path
    assert not validate(out, base=base).findings
    assert not verify(out).report.findings
    assert torch.allclose(logits_of(base, out), logits_of(base, adapter), rtol=0, atol=1e-6)
    table = load_file(out / "adapter_model.safetensors")
    name = next(name for name in table if "down_proj.lora_magnitude" in name)
    table[name][0] *= 1.01
    save_file(table, out / "adapter_model.safetensors")
    assert [finding.subject for finding in verify(out).report.findings] == [name]


def test_dora_is_taken_as_near_as_its_rank_allows(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", QV | {"use_dora": True})
    with pytest.raises(UnsupportedAdapter, match="DoRA") as refused:
        plan_prepare(adapter, "vllm", base=base)
    assert "--base MODEL --approximate" in str(refused.value.hint)
    done = prepare(adapter, "vllm", base=base, approximate=True, max_rank=8, out=tmp_path / "out")
    assert not verify(done).report.findings
    merged = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter).merge_and_unload().state_dict()
    before, found = saved_tensors(base), deltas(base, done.path)
    for each in done.plan.manifest["modules"]:
        name = each["module"]
        change = merged[f"{name}.weight"].double() - before[f"{name}.weight"].double()
        left = float((found[f"base_model.model.{name}"] - change).norm())
        assert left <= least(change, 8) * 1.002 + 1e-6 * float(change.norm())
        assert each["error"] == pytest.approx(left / float(change.norm()), rel=2e-3)
    exact = prepare(adapter, "vllm", base=base, approximate=True, max_rank=64, out=tmp_path / "exact").path
    assert torch.allclose(logits_of(base, exact), logits_of(base, adapter), rtol=0, atol=1e-4)
