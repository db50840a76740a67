"""What a config says of a merged model some of whose weights stay quantised, and bases that cannot be merged so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import open_model
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.formats.stored import read_part
from lora_tool.verification.validating import validate
from tests.judging import codes
from tests.oracle.peft_merge import different, merge_with_ours, save_adapter, save_base, saved_tensors
from tests.oracle.quantised_bases import ATTENTION, BF16, KINDS, Made, assert_rounded, delta, edit
from tests.oracle.test_quantised_bases import is_experts, is_linear, is_mlp
from tests.quantised_models import quantise

FREED = {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}
"""What becomes plain under ATTENTION."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT warns of LoRA on a tied end
@pytest.mark.parametrize("store", ["touched-16bit", "as-base"])
def test_an_output_layer_is_untied_beside_quantised_weights(store: str, tmp_path: Path) -> None:
    tied = save_base(tmp_path / "plain", "qwen3", "causal-lm", BF16, **KINDS["qwen3"], tie_word_embeddings=True)
    base, values = quantise(tied, tmp_path / "base", "fp8-block", is_mlp)
    adapter = save_adapter(tmp_path / "adapter", tied, "causal-lm", {"r": 4, "target_modules": ["lm_head", "o_proj"]})
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", store=store, untie=True)
    before, after = saved_tensors(base), saved_tensors(merged)
    assert_rounded(after["lm_head.weight"], before["model.embed_tokens.weight"].double() + delta(adapter, "lm_head"))
    assert not different(after, {name: before[name] for name in values})
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


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": {"+:.*": {"bits": 4}}}
EXTRA = {".*self_attn.*": {"bits": 4}, "lm_head": {"bits": 16, "data_type": "float"}}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize("table", [GPTQ, AUTO_ROUND | {"extra_config": EXTRA}], ids=["gptq", "auto-round"])
def test_gptq_and_auto_round_name_the_plain_modules_for_each_of_their_loaders(
    table: dict[str, Any], made: Made, tmp_path: Path
) -> None:
    _, base, values = made.base("qwen3", "gptq", is_linear)
    base = shutil.copytree(base, tmp_path / "base")
    edit(base / "config.json", quantization_config=table)
    lora = made.adapter("qwen3", ATTENTION)
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32", store="touched-16bit")
    found = json.loads((merged / "config.json").read_text())["quantization_config"]
    kept = {name.removesuffix(".weight") for name in values} - FREED
    assert {name.removesuffix(".qweight") for name in saved_tensors(merged) if name.endswith(".qweight")} == kept
    if table is GPTQ:
        assert {*found["modules_in_block_to_quantize"][0]} == kept
        assert [*found["dynamic"]][-1] == "+:.*", "the first pattern that matches counts"
        for module in kept | FREED:
            first = next(each for each in found["dynamic"] if re.match(each[2:], module))
            assert first.startswith("-:") == (module in FREED)
    else:
        of_freed = {module: {"bits": 16, "act_bits": 16} for module in FREED}
        assert found == {**AUTO_ROUND, "extra_config": {**EXTRA, **of_freed}}
    assert not codes(validate(merged))
    assert not verify(merged).report.findings


def test_what_transformers_saves_after_pefts_merge_is_called_broken(made: Made, tmp_path: Path) -> None:
    _, base, _ = made.base("gpt_oss", "mxfp4", is_experts)
    experts = AutoModelForCausalLM.from_pretrained(base, dtype=BF16)
    theirs = PeftModel.from_pretrained(experts, made.adapter("gpt_oss", ATTENTION)).merge_and_unload()
    theirs.save_pretrained(tmp_path / "random")
    errors = [found for found in validate(tmp_path / "random").findings if found.code == "LT322"]
    assert "_blocks`: is stored as a quantised weight (BF16), but config.json does not say so" in str(errors[0])


@pytest.mark.parametrize("form", ["int4", "fp8-channel"])  # the second measures inputs, too
def test_a_classifier_beside_quantised_weights_leaves_the_output_layer_out_with_its_scales(
    form: str, made: Made, tmp_path: Path
) -> None:
    plain = made.plain("qwen3")
    base, _ = quantise(plain, tmp_path / "base", form, lambda module: is_mlp(module) or module == "lm_head")
    adapter = save_adapter(tmp_path / "adapter", plain, "seq-cls", ATTENTION)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", task="seq-cls")
    before, after = saved_tensors(base), saved_tensors(merged)
    of_output = {name for name in before if name.startswith("lm_head.")}
    assert before.keys() - after.keys() == of_output
    assert after.keys() - before.keys() == {"score.weight"}
    leftovers = json.loads((merged / "lora_tool.json").read_text())["leftovers"]
    assert {item["name"] for item in leftovers if item["fate"] == "dropped"} >= of_output - {"lm_head.weight"}
    assert not verify(merged).report.findings


@pytest.mark.parametrize("precision", ["float32", "peft"])
def test_a_16_bit_base_is_rounded_as_training_loaded_it(precision: str, made: Made, tmp_path: Path) -> None:
    plain, lora = made.plain("qwen3"), made.adapter("qwen3", ATTENTION)
    merged = merge_with_ours(plain, lora, tmp_path / "merged", precision, base_as="nf4-double")
    rounded, after = saved_tensors(plain), saved_tensors(merged)
    for name, tensor in open_model(plain).tensors.items():
        if is_linear(name.removesuffix(".weight")):
            raw = read_part(TrainedAs.NF4_DOUBLE.rounded(tensor), 0, tensor.nbytes)
            rounded[name] = torch.frombuffer(bytearray(raw), dtype=BF16).reshape(tensor.shape)
    changed = {f"{module}.weight" for module in FREED if "k_proj" not in module}
    assert not different(after, {name: rounded[name] for name in rounded.keys() - changed})
    if precision == "peft":
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=BF16)
        model.load_state_dict({name: rounded[name] for name in model.state_dict()})
        theirs = PeftModel.from_pretrained(model, lora).merge_and_unload().state_dict()
        assert not different(after, {name: theirs[name] for name in changed})
    for name in changed:
        assert_rounded(after[name], rounded[name].double() + delta(lora, name.removesuffix(".weight")))
    assert (merged / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    assert not verify(merged).report.findings


@pytest.mark.parametrize(
    ("kind", "form", "target", "choices", "words"),
    [
        ("qwen3", "fp8-block", "q_proj", {"base_as": "nf4"}, "already quantised, so `base_as` has nothing to round"),
        ("gpt2", None, "attn.c_proj", {"base_as": "fp4"}, "gpt2 stores linear layers transposed"),
        ("gpt2", "nf4-double", "attn.c_proj", {}, "gpt2 stores .* transposed, and bitsandbytes transposes them"),
        ("qwen3", "fp8-channel", "q_proj", {"store": "touched-16bit"}, "no quantization_config with a list of plain"),
    ],
)
def test_a_base_that_cannot_be_merged_so_is_refused(
    kind: str, form: str | None, target: str, choices: dict[str, Any], words: str, tmp_path: Path
) -> None:
    sizes = {"n_embd": 64, "n_inner": 64} if kind == "gpt2" else KINDS[kind]
    base = plain = save_base(tmp_path / "plain", kind, "causal-lm", BF16, **sizes)
    if form:
        base, _ = quantise(plain, tmp_path / "base", form, is_linear)
    if form == "fp8-channel":  # as modelopt says it
        edit(base / "config.json", quantization_config=None)
        (base / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    lora = {"r": 2, "target_modules": [target], "fan_in_fan_out": kind == "gpt2"}
    adapter = save_adapter(tmp_path / "adapter", plain, "causal-lm", lora)
    with pytest.raises(UnsupportedAdapter, match=words):
        plan_merge(base, adapter, **choices)
