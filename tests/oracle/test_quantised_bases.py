"""Merging into quantised bases: exact beside quantised weights, exact with the numbers that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import open_model
from lora_tool.core.errors import ExecutionError, UnsupportedAdapter
from lora_tool.execution.backends import numpy_backend
from lora_tool.execution.engine import execute
from lora_tool.formats import stored
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.quantised import encodings
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.stored import read_part
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.validating import validate
from tests.oracle.peft_merge import different, merge_with_ours, save_adapter, save_base, saved_tensors
from tests.quantised_models import FORMS, TILE, quantise

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
LINEAR = sorted(set(FORMS) - {"mxfp4"})
ATTENTION: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
ALL_LINEAR: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "down_proj"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("plain") / "base", "qwen3", "causal-lm", BF16, **SIZES)


@pytest.fixture(scope="module")
def adapter(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    made: dict[str, Path] = {}

    def of(lora: dict[str, Any]) -> Path:
        key = json.dumps(lora)
        if key not in made:
            folder = tmp_path_factory.mktemp("adapter") / "adapter"
            made[key] = save_adapter(folder, plain, "causal-lm", lora)
        return made[key]

    return of


def is_mlp(module: str) -> bool:
    return ".mlp." in module


def is_linear(module: str) -> bool:
    return module.endswith("_proj")


def delta(adapter: Path, module: str) -> torch.Tensor:
    """Return scaling·(B·A) of a module in float64."""
    table, config = saved_tensors(adapter), json.loads((adapter / "adapter_config.json").read_text())
    factors = [table[f"base_model.model.{module}.lora_{part}.weight"].double() for part in "BA"]
    scaled: torch.Tensor = (factors[0] @ factors[1]) * (config["lora_alpha"] / config["r"])
    return scaled


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that bfloat16 values are the nearest to the exact ones: one in a thousand may be the next."""
    nearest = exact.to(torch.float32).to(BF16) if exact.dtype is torch.float64 else exact.to(BF16)
    apart = (found.view(torch.int16).int() - nearest.view(torch.int16).int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) <= 0.001 + 1 / apart.numel()


@pytest.mark.parametrize("form", LINEAR)
def test_an_adapter_beside_quantised_weights_leaves_them_as_they_are(
    form: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", form, is_mlp)
    lora = adapter(ATTENTION)
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32")
    before, after = saved_tensors(base), saved_tensors(merged)
    assert after.keys() == before.keys()
    changed = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qv"}
    bits = {name: tensor.view(torch.uint8) for name, tensor in before.items() if tensor.ndim}
    assert {name for name, raw in bits.items() if not torch.equal(raw, after[name].view(torch.uint8))} == changed
    assert (merged / "config.json").read_bytes() == (base / "config.json").read_bytes()
    twin = merge_with_ours(plain, lora, tmp_path / "twin", "float32")
    assert not different(after, {name: saved_tensors(twin)[name] for name in changed})
    assert not verify(merged).report.findings


@pytest.mark.parametrize("form", LINEAR)
def test_what_is_merged_into_quantised_weights_is_rounded_once(
    form: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", form, is_linear)
    lora = adapter(ALL_LINEAR)
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32")
    after = saved_tensors(merged)
    config = json.loads((merged / "config.json").read_text())
    assert "quantization_config" not in config
    assert config == json.loads((plain / "config.json").read_text())
    assert after.keys() == saved_tensors(plain).keys()
    for name, weight in values.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ALL_LINEAR["target_modules"]:
            assert_rounded(after[name], weight.double() + delta(lora, module))
        else:
            assert torch.equal(after[name], weight.to(BF16))
    assert not verify(merged).report.findings
    _, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values())


LISTS = {
    "nf4-double": "llm_int8_skip_modules",
    "bnb-int8": "llm_int8_skip_modules",
    "fp8-block": "modules_to_not_convert",
    "fp4": "modules_to_not_convert",
    "torchao-int8": "modules_to_not_convert",
}


@pytest.mark.parametrize("form", sorted(set(LINEAR) - {"gptq"}))
def test_only_what_changes_and_what_is_fused_with_it_becomes_plain(
    form: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", form, is_linear)
    lora = adapter(ATTENTION)
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32", store="touched-16bit")
    whole = saved_tensors(merge_with_ours(base, lora, tmp_path / "whole", "float32"))
    before, after = saved_tensors(base), saved_tensors(merged)
    freed = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}
    assert {name for name in after if name.rpartition(".")[0] in freed} == {f"{module}.weight" for module in freed}
    assert not different(after, {f"{module}.weight": whole[f"{module}.weight"] for module in freed})
    others = {name: tensor for name, tensor in before.items() if not name.startswith(tuple(freed))}
    assert {name for name in after if name.rpartition(".")[0] not in freed} == others.keys()
    for name, tensor in others.items():
        assert torch.equal(after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    table = json.loads((merged / "config.json").read_text())["quantization_config"]
    assert set(table.pop(LISTS.get(form, "ignore"))) == {"lm_head", *freed}
    assert table == {k: v for k, v in FORMS[form][1].items() if k != "ignore"}
    assert not verify(merged).report.findings
    if form == "fp8-block":  # on a CPU transformers loads it dequantised
        model, info = AutoModelForCausalLM.from_pretrained(merged, dtype=BF16, output_loading_info=True)
        assert not any(info.values())
        assert not different(model.state_dict(), whole)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT warns of LoRA on a tied end
@pytest.mark.parametrize("store", ["touched-16bit", "as-base"])
def test_an_output_layer_is_untied_beside_quantised_weights(store: str, tmp_path: Path) -> None:
    tied = save_base(tmp_path / "plain", "qwen3", "causal-lm", BF16, **SIZES, tie_word_embeddings=True)
    base, values = quantise(tied, tmp_path / "base", "fp8-block", is_mlp)
    adapter = save_adapter(tmp_path / "adapter", tied, "causal-lm", {"r": 4, "target_modules": ["lm_head", "o_proj"]})
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", store=store, untie=True)
    before, after = saved_tensors(base), saved_tensors(merged)
    assert_rounded(after["lm_head.weight"], before["model.embed_tokens.weight"].double() + delta(adapter, "lm_head"))
    assert not different({name: after[name] for name in values}, {name: before[name] for name in values})
    assert not verify(merged).report.findings


def test_the_list_has_the_names_on_disk_and_those_in_memory(tmp_path: Path) -> None:
    mixtral = save_base(tmp_path / "plain", "mixtral", "causal-lm", BF16)
    base, _ = quantise(
        mixtral, tmp_path / "base", "fp8-channel", lambda module: "experts." in module or "o_proj" in module
    )
    lora = {"r": 2, "target_modules": [], "target_parameters": ["0.mlp.experts.down_proj"]}
    adapter = save_adapter(tmp_path / "adapter", mixtral, "causal-lm", lora)
    config = plan_merge(base, adapter, store="touched-16bit").side_files[0]
    listed = json.loads(config.content or b"")["quantization_config"]["ignore"]
    assert listed[1:] == [rf"re:model\.layers\.0\.{module}\.experts\..*" for module in ("block_sparse_moe", "mlp")]


@pytest.mark.parametrize(("form", "warned"), [("int4", True), ("fp8-channel", False)])
def test_plain_experts_among_packed_ones_are_warned_of(form: str, warned: bool, tmp_path: Path) -> None:
    """The loader of transformers 5.23 unpacks all experts of a packed model, and has none left where they are plain."""
    mixture = save_base(tmp_path / "plain", "qwen3_moe", "causal-lm", BF16, hidden_size=64, moe_intermediate_size=32)
    base, _ = quantise(mixture, tmp_path / "base", form, lambda module: ".experts." in module)
    lora = {"r": 2, "target_modules": [], "target_parameters": ["1.mlp.experts.down_proj"]}
    adapter = save_adapter(tmp_path / "adapter", mixture, "causal-lm", lora)
    plans = [plan_merge(base, adapter, store=store) for store in ("touched-16bit", "all-16bit")]
    assert [any("transformers cannot load" in line for line in plan.warnings) for plan in plans] == [warned, False]


@pytest.mark.parametrize("store", ["touched-16bit", "as-base", None])
def test_the_files_of_torchao_say_what_each_weight_is(
    store: str | None, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", "torchao-int8", is_mlp if store is None else is_linear)
    merged = merge_with_ours(base, adapter(ATTENTION), tmp_path / "merged", "float32", store=store)
    after = saved_tensors(merged)
    stay = {name for name in values if f"{name.removesuffix('weight')}_weight_qdata" in after}
    assert stay == (
        {name for name in values if ".mlp." in name or "o_proj" in name} if store == "touched-16bit" else {*values}
    )
    before = scan_file(base / "model-00001-of-00002.safetensors").metadata
    for file in sorted(merged.glob("*.safetensors")):  # torchao's loader reads the metadata of all, one upon the other
        said = scan_file(file).metadata
        names = json.loads(said["tensor_names"])
        assert {*names} == {*saved_tensors(plain)}
        assert {name: said[name] for name in stay} == {name: before[name] for name in stay}
        assert {said[name] for name in names if name not in stay} == {'{"_type": "Tensor"}'}


@pytest.mark.parametrize("form", ["fp8-block", "int4"])
def test_a_table_inside_another_config_is_edited_where_it_is(
    form: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", form, is_linear)
    config = json.loads((base / "config.json").read_text())
    inner = {"quantization_config": config.pop("quantization_config"), "model_type": "other"}
    (base / "config.json").write_text(json.dumps({**config, "text_config": inner}))
    found = {
        store: plan_merge(base, adapter(ATTENTION), store=store).side_files for store in ("touched-16bit", "all-16bit")
    }
    written = {store: json.loads(files[0].content or b"") for store, files in found.items()}
    listed = written["touched-16bit"]["text_config"]["quantization_config"][LISTS.get(form, "ignore")]
    assert "model.layers.1.self_attn.q_proj" in listed
    assert "quantization_config" not in written["touched-16bit"]
    assert written["all-16bit"]["text_config"] == {"model_type": "other"}


def test_a_format_without_a_list_of_plain_modules_is_refused(
    plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", "fp8-channel", is_linear)
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (base / "config.json").write_text(json.dumps(config))
    (base / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(
        UnsupportedAdapter, match=r"config.json has no quantization_config with a list of plain modules"
    ):
        merge_with_ours(base, adapter(ALL_LINEAR), tmp_path / "merged", "float32", store="touched-16bit")


def test_what_bitsandbytes_transposed_before_quantising_is_refused(tmp_path: Path) -> None:
    gpt2 = save_base(tmp_path / "gpt2", "gpt2", "causal-lm", BF16, n_embd=64)
    base, _ = quantise(gpt2, tmp_path / "base", "nf4-double", lambda module: module.endswith("attn.c_proj"))
    lora = {"r": 2, "target_modules": ["attn.c_proj"], "fan_in_fan_out": True}
    adapter = save_adapter(tmp_path / "adapter", gpt2, "causal-lm", lora)
    with pytest.raises(
        UnsupportedAdapter, match=r"gpt2 stores linear layers transposed, and bitsandbytes transposes them"
    ):
        plan_merge(base, adapter)


def test_gptq_names_the_plain_modules_for_each_of_its_loaders(
    plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", "gptq", is_linear)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"+:.*": {"bits": 4}}
    (base / "config.json").write_text(json.dumps(config))
    merged = merge_with_ours(base, adapter(ATTENTION), tmp_path / "merged", "float32", store="touched-16bit")
    freed = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}
    table = json.loads((merged / "config.json").read_text())["quantization_config"]
    (kept,) = table["modules_in_block_to_quantize"]
    assert {*kept} == {name.removesuffix(".weight") for name in values} - freed
    assert [*table["dynamic"]][-1] == "+:.*", "the first pattern that matches counts"
    for name in values:
        module = name.removesuffix(".weight")
        first = next(each for each in table["dynamic"] if re.match(each[2:], module))
        assert first.startswith("-:") == (module in freed)
    assert not validate(merged).findings
    assert not verify(merged).report.findings


def test_auto_round_names_the_plain_modules_one_by_one(
    plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", "gptq", is_linear)
    config = json.loads((base / "config.json").read_text())
    extra = {".*self_attn.*": {"bits": 4}, "lm_head": {"bits": 16, "data_type": "float"}}
    table = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {**table, "extra_config": extra}}))
    merged = merge_with_ours(base, adapter(ATTENTION), tmp_path / "merged", "float32", store="touched-16bit")
    found = json.loads((merged / "config.json").read_text())["quantization_config"]
    freed = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}
    assert found == {**table, "extra_config": {**extra, **{each: {"bits": 16, "act_bits": 16} for each in freed}}}
    assert {name.removesuffix(".qweight") for name in saved_tensors(merged) if name.endswith(".qweight")} == {
        name.removesuffix(".weight") for name in values
    } - freed
    assert not validate(merged).findings
    assert not verify(merged).report.findings


EXPERTS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Return a small GPT-OSS, the same with its experts in MXFP4, and the numbers of those."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    base = save_base(folder / "plain", "gpt_oss", "causal-lm", BF16, **EXPERTS)
    return base, *quantise(base, folder / "base", "mxfp4", lambda module: module.endswith(tuple(FUSED)))


def test_attention_beside_mxfp4_experts(gpt_oss: tuple[Path, Path, Any], tmp_path: Path) -> None:
    plain, base, _ = gpt_oss
    adapter = save_adapter(tmp_path / "adapter", plain, "causal-lm", ATTENTION)
    before = saved_tensors(base)
    after = saved_tensors(merge_with_ours(base, adapter, tmp_path / "merged", "float32"))
    twin = saved_tensors(merge_with_ours(plain, adapter, tmp_path / "twin", "float32"))
    assert after.keys() == before.keys()
    changed = set(different(before, after))
    assert changed == {name for name in before if name.endswith(("q_proj.weight", "v_proj.weight"))}
    assert not different(after, {name: twin[name] for name in changed})
    assert (tmp_path / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert not verify(tmp_path / "merged").report.findings


@pytest.mark.parametrize(
    "targets", [{"target_modules": ["q_proj"]}, {"target_modules": [], "target_parameters": FUSED}]
)
def test_mxfp4_experts_become_the_matrices_that_transformers_loads(
    targets: dict[str, Any], gpt_oss: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    plain, base, values = gpt_oss
    adapter = save_adapter(tmp_path / "adapter", plain, "causal-lm", {"r": 4, "lora_alpha": 6, **targets})
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", store="all-16bit")
    after = saved_tensors(merged)
    assert after.keys() == saved_tensors(plain).keys()
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=BF16)
    loaded = model.state_dict()
    for name, weight in values.items():
        assert torch.equal(loaded[name], weight.to(BF16))
        if "target_parameters" not in targets:
            assert torch.equal(after[name], loaded[name])
    theirs = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    assert not different(
        saved_tensors(merge_with_ours(base, adapter, tmp_path / "peft", "peft", store="all-16bit")), theirs
    )
    evidence = verify(merged).evidence.values()
    assert all(found.verdict is Verdict.RIGHT and found.compared == found.numel for found in evidence)


def test_experts_of_a_layer_that_changes_become_plain_and_are_listed(
    gpt_oss: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    plain, base, values = gpt_oss
    lora = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": ["layers.1.mlp.experts.down_proj"]}
    adapter = save_adapter(tmp_path / "adapter", plain, "causal-lm", lora)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", store="touched-16bit")
    whole = saved_tensors(merge_with_ours(base, adapter, tmp_path / "whole", "float32"))
    before, after = saved_tensors(base), saved_tensors(merged)
    freed = {name for name in values if ".layers.1." in name}
    assert len(freed) == 2
    assert not different(after, {name: whole[name] for name in freed})
    assert after.keys() - before.keys() == freed
    assert not different(after, {name: before[name] for name in before.keys() & after.keys()})
    table = json.loads((merged / "config.json").read_text())["quantization_config"]
    held = json.loads((base / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert table["modules_to_not_convert"] == [*held, "model.layers.1.mlp.experts"]
    model, info = AutoModelForCausalLM.from_pretrained(merged, dtype=BF16, output_loading_info=True)
    assert not any(info.values())
    assert not different(model.state_dict(), whole)
    assert not verify(merged).report.findings


def test_what_transformers_saves_after_pefts_merge_is_called_broken(
    plain: Path, adapter: Callable[[dict[str, Any]], Path], gpt_oss: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    fp8, _ = quantise(plain, tmp_path / "fp8", "fp8-block", is_linear)
    model = AutoModelForCausalLM.from_pretrained(fp8, dtype=BF16)
    PeftModel.from_pretrained(model, adapter(ATTENTION)).merge_and_unload().save_pretrained(tmp_path / "broken")
    errors = [found for found in validate(tmp_path / "broken").findings if found.code == "LT322"]
    assert "a quantised weight (F8_E4M3), but config.json does not say so" in errors[0].message

    lora = save_adapter(tmp_path / "adapter", gpt_oss[0], "causal-lm", ATTENTION)
    experts = AutoModelForCausalLM.from_pretrained(gpt_oss[1], dtype=BF16)
    PeftModel.from_pretrained(experts, lora).merge_and_unload().save_pretrained(tmp_path / "random")
    errors = [found for found in validate(tmp_path / "random").findings if found.code == "LT322"]
    assert "_blocks`: is stored as a quantised weight (BF16), but config.json does not say so" in str(errors[0])


@pytest.mark.parametrize("form", ["int4", "fp8-channel"])  # the second measures inputs, too
def test_a_classifier_beside_quantised_weights_leaves_the_output_layer_out_with_its_scales(
    form: str, plain: Path, tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", form, lambda module: is_mlp(module) or module == "lm_head")
    adapter = save_adapter(tmp_path / "adapter", plain, "seq-cls", ATTENTION)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", task="seq-cls")
    before, after = saved_tensors(base), saved_tensors(merged)
    assert before.keys() - after.keys() == {name for name in before if name.startswith("lm_head.")}
    assert after.keys() - before.keys() == {"score.weight"}
    leftovers = json.loads((merged / "lora_tool.json").read_text())["leftovers"]
    told = {item["name"] for item in leftovers if item["fate"] == "dropped"}
    assert told >= {name for name in before if name.startswith("lm_head.")} - {"lm_head.weight"}
    assert not verify(merged).report.findings


@pytest.mark.parametrize("precision", ["float32", "peft"])
def test_a_16_bit_base_is_rounded_as_training_loaded_it(
    precision: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    lora = adapter(ATTENTION)
    merged = merge_with_ours(plain, lora, tmp_path / "merged", precision, base_as="nf4-double")
    before, after = saved_tensors(plain), saved_tensors(merged)
    rounded = dict(before)
    for name, tensor in open_model(plain).tensors.items():
        if is_linear(name.removesuffix(".weight")):
            raw = read_part(TrainedAs.NF4_DOUBLE.rounded(tensor), 0, tensor.nbytes)
            rounded[name] = torch.frombuffer(bytearray(raw), dtype=BF16).reshape(tensor.shape)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=BF16)
    model.load_state_dict({name: rounded[name] for name in model.state_dict()})
    theirs = PeftModel.from_pretrained(model, lora).merge_and_unload().state_dict()
    changed = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qv"}
    assert not different(after, {name: theirs[name] for name in (changed if precision == "peft" else ())})
    assert not different(after, {name: rounded[name] for name in before.keys() - changed})
    for name in changed:
        assert_rounded(after[name], rounded[name].double() + delta(lora, name.removesuffix(".weight")))
    assert (merged / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    assert not verify(merged).report.findings


def test_what_cannot_be_rounded_as_in_training_is_refused(
    plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", "fp8-block", is_linear)
    with pytest.raises(UnsupportedAdapter, match=r"the base is already quantised, so `base_as` has nothing to round"):
        merge_with_ours(base, adapter(ATTENTION), tmp_path / "merged", "float32", base_as="nf4")
    gpt2 = save_base(tmp_path / "gpt2", "gpt2", "causal-lm", BF16)
    lora = save_adapter(
        tmp_path / "adapter", gpt2, "causal-lm", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    )
    with pytest.raises(UnsupportedAdapter, match=r"gpt2 stores linear layers transposed"):
        merge_with_ours(gpt2, lora, tmp_path / "merged", "float32", base_as="fp4")


@pytest.mark.parametrize("store", ["all-16bit", "touched-16bit"])
@pytest.mark.parametrize("form", ["nf4-double", "fp8-block"])
def test_dora_whole_layers_and_several_adapters_are_added_to_the_numbers(
    form: str, store: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", form, is_linear)
    first = adapter({"r": 4, "use_dora": True, "target_modules": ["q_proj"], "modules_to_save": ["up_proj"]})
    second = adapter({"r": 2, "target_modules": ["down_proj"]})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.load_state_dict({**model.state_dict(), **{name: value.float() for name, value in values.items()}})
    for lora in (first, second):
        model = PeftModel.from_pretrained(model, lora).merge_and_unload()
    theirs = model.state_dict()
    execute(plan_merge(base, [first, second], store=store), tmp_path / "merged")
    after = saved_tensors(tmp_path / "merged")
    for name in values:
        if name.split(".")[-2] in ("q_proj", "up_proj", "down_proj"):
            assert_rounded(after[name], theirs[name])
    assert not verify(tmp_path / "merged").report.findings


@pytest.mark.parametrize("store", ["all-16bit", "touched-16bit", "as-base"])
def test_lora_on_single_experts_of_a_quantised_model(store: str, tmp_path: Path) -> None:
    plain = save_base(tmp_path / "plain", "qwen3_moe", "causal-lm", BF16, hidden_size=64, head_dim=16)
    base, values = quantise(plain, tmp_path / "base", "fp8-block", lambda module: ".experts." in module)
    lora = save_adapter(
        tmp_path / "adapter", plain, "causal-lm", {"r": 2, "lora_alpha": 40, "target_modules": ["q_proj"]}
    )
    table = saved_tensors(lora)
    generator = torch.Generator().manual_seed(3)
    names = [name for name in values if ".experts.1." in name]
    for name in names:
        rows, columns = values[name].shape
        stem = f"base_model.model.{name.removesuffix('weight')}"
        table[f"{stem}lora_A.weight"] = torch.randn((2, columns), generator=generator)
        table[f"{stem}lora_B.weight"] = torch.randn((rows, 2), generator=generator) / 50
    save_file(table, lora / "adapter_model.safetensors")
    config = json.loads((lora / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", *(f"experts.1.{part}_proj" for part in ("gate", "up", "down"))]
    (lora / "adapter_config.json").write_text(json.dumps(config))
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32", store=store)
    after = saved_tensors(merged)
    assert names
    for name in names:
        exact = values[name].double() + delta(lora, name.removesuffix(".weight"))
        if store == "as-base":
            wide = after[f"{name}_scale_inv"].repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
            found = after[name].double() * wide[: exact.shape[0], : exact.shape[1]].double()
            assert float((found - exact).norm() / exact.norm()) < 2**-4
        else:
            assert_rounded(after[name], exact)
    assert not verify(merged).report.findings


@pytest.mark.parametrize("form", ["gptq", "mxfp4"])
def test_what_lies_in_columns_is_read_once(
    form: str,
    plain: Path,
    gpt_oss: tuple[Path, Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if form == "gptq":
        base, lora = quantise(plain, tmp_path / "base", form, is_linear)[0], ALL_LINEAR
    else:
        base, lora = gpt_oss[1], {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": FUSED}
    adapter = save_adapter(tmp_path / "adapter", plain if form == "gptq" else gpt_oss[0], "causal-lm", lora)
    whole = saved_tensors(merge_with_ours(base, adapter, tmp_path / "whole", "float32", store="all-16bit"))
    monkeypatch.setattr(encodings, "_STRIP_WEIGHTS", 1)  # 32 rows
    monkeypatch.setattr(stored, "_DECODED_WEIGHTS", 5 * 64)
    monkeypatch.setattr(numpy_backend, "BLOCK_WEIGHTS", 16 * 64)
    read: list[int] = []
    exactly = OpenFiles.read_exactly

    def counted(self: OpenFiles, path: Path, offset: int, buffer: memoryview) -> None:
        read.append(len(buffer) if path.parent == base else 0)
        exactly(self, path, offset, buffer)

    monkeypatch.setattr(OpenFiles, "read_exactly", counted)
    merged = tmp_path / "merged"
    plan = plan_merge(base, adapter, store="all-16bit")
    read.clear()  # the fingerprint of tensors as small as these reads all of them
    execute(plan, merged, jobs=1)
    assert not different(saved_tensors(merged), whole)
    packed = open_model(base).weights.nbytes
    assert sum(read) < 1.1 * packed
    read.clear()
    assert not verify(merged).report.findings
    assert sum(read) < 3.2 * packed  # once for the values, once for samples, once for fingerprints


@pytest.mark.parametrize(
    ("kind", "store"), [("deepseek_v3", "all-16bit"), ("deepseek_v3", "touched-16bit"), ("llama", "as-base")]
)
def test_layers_for_further_tokens_stay_and_are_dequantised_like_the_others(
    kind: str, store: str, tmp_path: Path
) -> None:
    plain = save_base(tmp_path / "plain", kind, "causal-lm", BF16, hidden_size=64, intermediate_size=96)
    adapter = save_adapter(tmp_path / "adapter", plain, "causal-lm", {"r": 2, "target_modules": ["o_proj"]})
    tensors = saved_tensors(plain)
    of_last = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
    further = {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in of_last.items()}
    further["model.layers.2.eh_proj.weight"] = torch.randn(64, 128).to(BF16)
    further |= {f"model.layers.2.{norm}.weight": torch.ones(64, dtype=BF16) for norm in ("enorm", "hnorm")}
    for file in plain.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors | further, plain / "model.safetensors", {"format": "pt"})
    base, values = quantise(plain, tmp_path / "base", "fp8-block", lambda name: name.endswith(("_proj", "_mqa")))
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", store=store, allow_loss=True)
    before, after = saved_tensors(base), saved_tensors(merged)
    for name in further:
        kept = {name, f"{name}_scale_inv"} & before.keys()
        if store == "all-16bit" and name in values:
            before[name], kept = values[name].to(BF16), {name}
        assert not different(after, {each: before[each] for each in kept})
    assert not [found for found in verify(merged).report.findings if found.code != "LT319"]


def test_experts_of_which_one_is_not_quantised_are_left_as_they_are(tmp_path: Path) -> None:
    plain = save_base(tmp_path / "plain", "qwen3_moe", "causal-lm", BF16, hidden_size=64)
    base, values = quantise(
        plain, tmp_path / "base", "fp8-block", lambda name: ".experts." in name and ".experts.1." not in name
    )
    beside = save_adapter(tmp_path / "beside", plain, "causal-lm", {"r": 2, "target_modules": ["q_proj"]})
    before = saved_tensors(base)
    stays = saved_tensors(merge_with_ours(base, beside, tmp_path / "stays", "float32"))
    assert stays.keys() == before.keys()
    assert all("q_proj" in name for name in different(stays, before))
    after = saved_tensors(merge_with_ours(base, beside, tmp_path / "plain16", "float32", store="all-16bit"))
    assert not different(after, {name: value.to(BF16) for name, value in values.items()})
    assert not verify(tmp_path / "plain16").report.findings
    lora = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    on_them = save_adapter(tmp_path / "on-them", plain, "causal-lm", lora)
    with pytest.raises(
        UnsupportedAdapter, match=r"changes `\S+experts.down_proj`, .* some are quantised and some are not"
    ):
        plan_merge(base, on_them)


@pytest.mark.parametrize(("form", "part"), [("fp8-block", "weight"), ("fp8-powers", "weight_scale_inv")])
def test_a_weight_that_is_only_dequantised_has_to_be_finite(
    form: str, part: str, plain: Path, adapter: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", form, is_linear)
    name = f"model.layers.1.mlp.up_proj.{part}"
    (path,) = {each.path for each in open_model(base).tensors.values() if each.name == name}
    table = load_file(path)
    table[name].view(torch.uint8)[0, 0] = 0x7F if part == "weight" else 0xFF  # the NaN of E4M3, and of E8M0
    save_file(table, path, {"format": "pt"})
    with pytest.raises(ExecutionError, match=r"`model.layers.1.mlp.up_proj.weight` would hold NaN or infinity"):
        merge_with_ours(base, adapter(ATTENTION), tmp_path / "merged", "float32", store="all-16bit")
    assert not (tmp_path / "merged").exists()
    merged = merge_with_ours(base, adapter(ATTENTION), tmp_path / "kept", "float32", store="touched-16bit")
    assert not verify(merged).report.findings
