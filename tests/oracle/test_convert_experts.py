"""LoRA on experts in both layouts: the same ΔW, values that keep their bits there and back, and PEFT loads the fused one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool import Server, merge, prepare, validate, verify
from lora_tool.adapters.experts import PROJECTIONS
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.formats.files import read_json
from tests.cli.calling import Caller
from tests.oracle.peft_merge import different, saved_tensors
from tests.oracle.quantised_bases import Made, edit
from tests.oracle.test_combine import EXACT, adapters_of, deltas, farthest
from tests.oracle.test_quantised_bases import is_experts
from tests.typed import commands_in, type_it

pytestmark = pytest.mark.usefixtures("typed_hints")
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FUSED: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": PARAMETERS, "r": 2, "lora_alpha": 3}
Table = dict[str, torch.Tensor]


def converted(call: Caller, adapter: Path, form: str, base: Path, out: Path) -> Path:
    called = call("convert", adapter, "--to", form, "--base", base, "-o", out)
    assert called.code == 0, called.err
    return out


def of_experts(adapter: Path) -> Table:
    """Return the scaled ΔW of every expert's matrix, from an adapter that has them one by one."""
    config, table = read_json(adapter / "adapter_config.json"), load_file(adapter / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in table if ".experts." in name and "lora_A" in name]
    ranks = {name: table[f"{name}.lora_A.weight"].shape[0] for name in names}
    assert set(ranks.values()) == {config["r"]}
    scaling = config["lora_alpha"] / config["r"]
    return {
        name.removeprefix(PREFIX): scaling
        * (table[f"{name}.lora_B.weight"].double() @ table[f"{name}.lora_A.weight"].double())
        for name in names
    }


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # PEFT 0.21 looks at modules alone
@pytest.mark.parametrize(
    ("model_type", "lora"),
    [("mixtral", FUSED), ("qwen3_moe", FUSED), ("mixtral", FUSED | {"target_parameters": PARAMETERS[1:]})],
)
def test_fused_factors_are_those_of_each_expert(
    model_type: str, lora: dict[str, Any], call: Caller, tmp_path: Path
) -> None:
    base, (adapter,) = adapters_of(tmp_path, model_type, lora)
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    assert not [finding for finding in validate(single, base=base).findings if finding.code != "LT504"]
    ours, stored = of_experts(single), saved_tensors(base)
    assert all(tuple(delta.shape) == tuple(stored[f"{name}.weight"].shape) for name, delta in ours.items())
    theirs = {name: delta for name, delta in deltas(base, adapter).items() if "experts" in name}
    for name, delta in theirs.items():  # [experts, out, in]
        layer = name.partition(".layers.")[2].partition(".")[0]
        mine = {key: value for key, value in ours.items() if f".layers.{layer}." in key}
        for expert in range(delta.shape[0]):
            own = {key.rpartition(".")[2]: value for key, value in mine.items() if f".experts.{expert}." in key}
            parts = [own[key] for key in ("gate_proj", "up_proj", "w1", "w3") if key in own]
            down = next(value for key, value in own.items() if key in ("down_proj", "w2"))
            expected = torch.cat(parts) if name.endswith("base_layer") else down
            assert torch.allclose(expected, delta[expert].double(), rtol=1e-6, atol=1e-9), name
    assert farthest(deltas(base, single), deltas(base, adapter)) <= EXACT  # PEFT fuses them again while it loads
    back = converted(call, single, "peft-fused", base, tmp_path / "back")
    assert different(saved_tensors(back), saved_tensors(adapter)) == []
    assert read_json(back / "adapter_config.json")["rank_pattern"] == {}
    assert sorted(read_json(back / "adapter_config.json")["target_parameters"]) == sorted(lora["target_parameters"])


@pytest.mark.parametrize(("model_type", "stacks"), [("nemotron_h", "up_proj down_proj"), ("deepseek_v4", "w1+w3 w2")])
def test_experts_with_other_names_on_disk_are_taken_apart_and_put_back(
    model_type: str, stacks: str, call: Caller, tmp_path: Path
) -> None:
    names = [f"experts.{name}" for name in ("up_proj" if "+" not in stacks else "gate_up_proj", "down_proj")]
    base, (adapter,) = adapters_of(tmp_path, model_type, {**FUSED, "target_modules": [], "target_parameters": names})
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    assert not validate(single, base=base).findings
    ours, stored = of_experts(single), saved_tensors(base)
    assert ours.keys() == {name.removesuffix(".weight") for name in stored if re.search(r"\.experts\.\d+\.", name)}
    for name, delta in deltas(base, adapter).items():  # [experts, out, in]
        own = stacks.split()[not name.endswith("base_layer")].split("+")
        layer = f".layers.{name.partition('.layers.')[2].partition('.')[0]}."
        for expert, expected in enumerate(delta):
            ends = [f".experts.{expert}.{each}" for each in own]
            parts = [next(ours[key] for key in ours if layer in key and key.endswith(end)) for end in ends]
            assert torch.allclose(torch.cat(parts), expected.double(), rtol=1e-6, atol=1e-9), name
    back = converted(call, single, "peft-fused", base, tmp_path / "back")
    assert different(saved_tensors(back), saved_tensors(adapter)) == []
    assert not verify(single).report.findings
    assert not verify(back).report.findings


@pytest.mark.parametrize("form", [None, "mxfp4"])
def test_unsloths_names_of_gpt_oss_experts_become_pefts(form: str | None, call: Caller, made: Made) -> None:
    plain, adapter = made.plain("gpt_oss"), made.adapter("gpt_oss", {**FUSED, "target_parameters": None})
    base = plain if form is None else made.base("gpt_oss", form, is_experts)[1]
    theirs = shutil.copytree(adapter, adapter.parent / f"{adapter.name}-listed-{form}")
    edit(theirs / "adapter_config.json", target_modules=r".*\.(q_proj|(gate_up|down)_projs\.\d+)")
    table = saved_tensors(adapter)
    stacks = {name: each for name, each in saved_tensors(plain).items() if re.search(r"(gate_up|down)_proj\Z", name)}
    for name, (experts, width, height) in ((name, each.shape) for name, each in stacks.items()):
        for expert in range(experts):
            table[f"{PREFIX}{name}s.{expert}.lora_A.weight"] = 0.1 * torch.randn(2, width)
            table[f"{PREFIX}{name}s.{expert}.lora_B.weight"] = 0.1 * torch.randn(height, 2)
    save_file(table, theirs / "adapter_model.safetensors")
    findings = validate(theirs, base=base).findings
    assert [each.code for each in findings] == ["LT501"]
    (words,) = commands_in(findings[0].hint or "")
    out = theirs.parent / f"{theirs.name}-out"
    assert type_it(words, {"OUT": str(out)})[0] == 0
    assert not validate(out, base=base).findings
    assert not verify(out).report.findings
    found, of_module = deltas(plain, out), {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
    for name in stacks:
        path, _, leaf = name.rpartition(".")
        delta = found[f"{PREFIX}{path.removesuffix('experts')}{of_module[leaf]}"]
        for expert in range(len(delta)):
            a, b = (table[f"{PREFIX}{name}s.{expert}.lora_{factor}.weight"].double() for factor in "AB")
            expected = 3 / 2 * (b @ a).T  # PEFT computes in the type of the base
            assert (delta[expert].double() - expected).norm() < 0.01 * expected.norm()
    save_file(
        {name: each for name, each in table.items() if "_projs.1." not in name}, theirs / "adapter_model.safetensors"
    )
    called = call("convert", theirs, "--to", "peft-fused", "--base", base, "-o", f"{out}-2")
    assert (called.code, "a fused layer needs all of them" in called.err) == (3, True)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # PEFT 0.21 looks at modules alone
def test_ranks_of_the_two_fused_layers_and_a_router_come_back(call: Caller, tmp_path: Path) -> None:
    more = {"target_parameters": [*PARAMETERS, "mlp.gate.weight"], "rank_pattern": {"experts.gate_up_proj": 4}}
    base, (adapter,) = adapters_of(tmp_path, "qwen3_moe", FUSED | more | {"use_rslora": True})
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    back = converted(call, single, "peft-fused", base, tmp_path / "back")
    assert different(saved_tensors(back), saved_tensors(adapter)) == []
    expected, found = deltas(base, adapter), deltas(base, back)  # PEFT passes over what the config does not target
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], delta) for name, delta in expected.items())


@pytest.mark.filterwarnings("ignore:(The following .* keys did not match|Found missing adapter keys)")  # as above
@pytest.mark.parametrize(
    ("model_type", "lora", "code", "why"),
    [
        ("mixtral", {"target_parameters": PARAMETERS[:1]}, "LT814", "gate and up only beside down"),
        ("qwen3_moe", {"target_parameters": PARAMETERS[:1]}, "LT814", "gate and up only beside down"),
        ("qwen3_moe", {"rank_pattern": {"experts.gate_up_proj": 4}}, "LT806", "takes rank 2 for"),
        ("qwen3_moe", {"use_rslora": True}, "LT806", "by 3, not by 2.12"),
        ("mixtral", {"alpha_pattern": {"gate_up_proj": 8}}, "LT806", "by 2, not by 4"),
    ],
)
def test_what_peft_does_not_stack_is_told_and_prepared(
    model_type: str, lora: dict[str, Any], code: str, why: str, call: Caller, tmp_path: Path
) -> None:
    base, (adapter,) = adapters_of(tmp_path, model_type, FUSED | lora)
    called = call("convert", adapter, "--to", "peft-experts", "--base", base, "-o", tmp_path / "single")
    assert why in called.err
    codes = {each.code for each in validate(tmp_path / "single", base=base, servers=[Server.PEFT]).findings}
    assert code in codes
    expected = deltas(base, adapter)
    if numbers := re.fullmatch(r"by (\S+), not by (\S+)", why):  # what it says is what PEFT does
        stack = f"{PREFIX}model.layers.0.mlp.experts.base_layer"
        share = float(deltas(base, tmp_path / "single")[stack].norm() / expected[stack].norm())
        assert share == pytest.approx(float(numbers[1]) / float(numbers[2]), rel=1e-2)
    if "target_parameters" in lora:  # the experts' only parameter is not nested in another
        assert not any(delta.any() for name, delta in deltas(base, tmp_path / "single").items() if "experts" in name)
        expected = {f"{name}.base_layer" if "experts" in name else name: delta for name, delta in expected.items()}
    out = prepare(tmp_path / "single", "peft", base=base, out=tmp_path / "out").path
    found = deltas(base, out)
    assert farthest({name: found[name] for name in expected}, expected) <= EXACT
    assert not any(found[name].any() for name in found.keys() - expected.keys())
    assert code not in {each.code for each in validate(out, base=base, servers=[Server.PEFT]).findings}
    assert not verify(out).report.findings


@pytest.mark.filterwarnings("ignore:(The following .* keys did not match|Found missing adapter keys)")  # as above
@pytest.mark.parametrize("left", ["gate_proj", "down_proj"])
def test_a_part_of_the_experts_matrices_is_prepared_for_peft(left: str, call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "qwen3_moe", FUSED)
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    kept = {name: each for name, each in saved_tensors(single).items() if "experts" not in name or left in name}
    save_file(kept, single / "adapter_model.safetensors")
    path = single / "adapter_config.json"
    path.write_text(json.dumps(read_json(path) | {"target_modules": rf".*\.q_proj|.*\.experts\.(\d+\.)?{left}"}))
    out = prepare(single, "peft", base=base, out=tmp_path / "out").path
    assert not verify(out).report.findings
    expected, found = of_experts(single), deltas(base, out)
    for name, delta in expected.items():
        layer, expert = name.partition(".experts.")[0], int(name.split(".")[-2])
        whole = found[f"{PREFIX}{layer}.experts{'.base_layer' if left == 'gate_proj' else ''}"][expert].double()
        assert torch.allclose(whole[: len(delta)], delta, rtol=1e-5, atol=1e-8)
        assert not whole[len(delta) :].any()


@pytest.mark.filterwarnings("ignore:(The following .* keys did not match|Found missing adapter keys)")  # as above
def test_lora_on_shared_experts_that_peft_leaves_out_is_refused(call: Caller, tmp_path: Path) -> None:
    """As transformers 4 trained it: PEFT looks at `up_proj`, and takes it for the stacks that transformers 5 has."""
    base, (adapter,) = adapters_of(tmp_path, "deepseek_v3", FUSED | {"target_modules": ["o_proj"]})
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    shared = "model.layers.1.mlp.shared_experts.up_proj"
    out, width = saved_tensors(base)[f"{shared}.weight"].shape
    pair = {"lora_A": torch.randn(2, width), "lora_B": torch.randn(out, 2)}
    table = saved_tensors(single) | {f"{PREFIX}{shared}.{name}.weight": factor for name, factor in pair.items()}
    save_file(table, single / "adapter_model.safetensors")
    path = single / "adapter_config.json"
    names = ["o_proj", *PROJECTIONS[0]]
    exclude = r".*layers\.0\.mlp\..*|.*shared_experts\.(gate|down)_proj"
    path.write_text(json.dumps(read_json(path) | {"target_modules": names, "exclude_modules": exclude}))
    assert not [name for name in deltas(base, single) if "shared" in name]
    with pytest.raises(UnsupportedAdapter, match=f"LoRA on `{shared}`, which PEFT .* leaves out"):
        prepare(single, "peft", base=base, out=tmp_path / "out")
    (found,) = (each for each in validate(single, base=base, servers=[Server.PEFT]).findings if each.code == "LT815")
    assert shared in found.message
    merged = saved_tensors(merge(single, base=base, out=tmp_path / "merged").path)[f"{shared}.weight"]
    delta = 1.5 * pair["lora_B"].double() @ pair["lora_A"].double()
    assert torch.allclose(merged.double(), saved_tensors(base)[f"{shared}.weight"].double() + delta, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_single_experts_that_peft_does_not_find_are_refused(model_type: str, call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, model_type, FUSED)
    called = call("convert", adapter, "--to", "peft-experts", "--base", base, "-o", tmp_path / "single")
    assert (called.code, f"finds no LoRA on single experts of a {model_type}" in called.err) == (0, True)
    single = tmp_path / "single"
    assert not [name for name in deltas(base, single) if "experts" in name]
    with pytest.raises(UnsupportedAdapter, match="none of which PEFT finds") as refused:
        prepare(single, "peft", base=base, out=tmp_path / "out")
    (found,) = (each for each in validate(single, base=base, servers=[Server.PEFT]).findings if each.code == "LT815")
    assert "--to peft-fused" in str(found.hint)
    assert "--to peft-fused" in str(refused.value.hint)
    back = converted(call, single, "peft-fused", base, tmp_path / "back")
    assert farthest(deltas(base, back), deltas(base, adapter)) <= EXACT


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # PEFT 0.21 looks at modules alone
@pytest.mark.parametrize("rslora", [False, True])
def test_single_experts_become_fused_at_twice_the_rank_and_come_back(
    rslora: bool, call: Caller, tmp_path: Path
) -> None:
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED | {"use_rslora": rslora})
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    path = single / "adapter_model.safetensors"
    torch.manual_seed(3)
    table = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in load_file(path).items()}
    save_file(table, path, metadata={"format": "pt"})
    fused = converted(call, single, "peft-fused", base, tmp_path / "fused")
    assert read_json(fused / "adapter_config.json")["rank_pattern"] == {"experts.gate_up_proj": 4}
    assert not [finding for finding in validate(fused, base=base).findings if finding.code != "LT504"]
    found = deltas(base, fused)  # PEFT finds rank and scaling by the patterns
    scale = 2**0.5 if rslora else 1.0  # `of_experts` has alpha / r, rsLoRA alpha / √r
    for name, delta in of_experts(single).items():
        layer, expert = name.split(".")[2], int(name.split(".")[-2])
        module = f"{PREFIX}model.layers.{layer}.mlp.experts"
        whole = found[module if name.endswith("w2") else f"{module}.base_layer"][expert].double()
        half = whole.shape[0] // 2
        expected = whole if name.endswith("w2") else whole[:half] if name.endswith("w1") else whole[half:]
        assert torch.allclose(scale * delta, expected, rtol=1e-6, atol=1e-9)
    back = converted(call, fused, "peft-experts", base, tmp_path / "back")
    assert different(saved_tensors(back), saved_tensors(single)) == []
    assert read_json(back / "adapter_config.json")["alpha_pattern"] == {}
    if not rslora:
        merged = [merge(each, base=base, out=tmp_path / f"merged-{each.name}").path for each in (single, fused)]
        one, other = map(saved_tensors, merged)
        assert all(torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one)


def test_what_has_no_other_layout_is_refused_by_name(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED)
    plain = adapters_of(tmp_path / "plain", "llama", {"target_modules": ["q_proj"]})[1][0]
    called = call("convert", plain, "--to", "peft-fused", "-o", tmp_path / "out")
    assert (called.code, "no LoRA on experts" in called.err) == (3, True)
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    path = single / "adapter_model.safetensors"
    table = {name: tensor for name, tensor in load_file(path).items() if ".experts.1.w1." not in name}
    save_file(table, path, metadata={"format": "pt"})
    called = call("convert", single, "--to", "peft-fused", "-o", tmp_path / "out")
    assert called.code in (1, 3)
    assert "experts" in called.err
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # as above
def test_scalings_by_the_names_of_parameters_are_those_of_their_experts(call: Caller, tmp_path: Path) -> None:
    patterns = {"alpha_pattern": {"experts.gate_up_proj": 5}, "rank_pattern": {"experts.down_proj": 4}}
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED | patterns)
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    one, other = (
        saved_tensors(merge(each, base=base, out=tmp_path / each.name / "merged").path) for each in (adapter, single)
    )
    assert all(torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one)
    assert not verify(single).report.findings


def test_columns_in_an_order_that_nothing_tells_are_refused(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED)
    path = adapter / "adapter_config.json"
    config = read_json(path)
    path.write_text(json.dumps({**config, "auto_mapping": {"unsloth_fixed": True}}))
    called = call("convert", adapter, "--to", "peft-experts", "--base", base, "-o", tmp_path / "out")
    assert (called.code, "lora_B_layout" in called.err) == (3, True)
    path.write_text(json.dumps({**config, "lora_B_layout": "grouped_by_expert"}))
    called = call("prepare", adapter, "--for", "vllm", "-o", tmp_path / "out")
    assert (called.code, "columns in turn" in called.err) == (3, True)
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    assert not verify(single).report.findings


def test_unsloths_adapters_record_their_order_of_columns(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED)
    single = converted(call, adapter, "peft-experts", base, tmp_path / "single")
    path = single / "adapter_config.json"
    path.write_text(json.dumps(read_json(path) | {"auto_mapping": {"unsloth_fixed": True}}))
    fused = converted(call, single, "peft-fused", base, tmp_path / "fused")
    assert read_json(fused / "adapter_config.json")["lora_B_layout"] == "rank_major"
    back = converted(call, fused, "peft-experts", base, tmp_path / "back")
    assert different(saved_tensors(back), saved_tensors(single)) == []
