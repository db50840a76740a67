"""Merges into quantised bases, a table of forms, models and stores: what becomes plain, what stays, and its numbers by PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
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
from lora_tool.formats.safetensors import scan_file
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.rules.shared.same_model import same_model
from tests.oracle.peft_merge import different, merge_with_ours, save_adapter, save_base, saved_tensors
from tests.oracle.quantised_bases import ATTENTION, BF16, Made, assert_rounded, delta, edit, numbers_of
from tests.quantised_models import quantise

ALL_LINEAR: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "down_proj"]}
WHOLE: dict[str, Any] = {"r": 4, "use_dora": True, "target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}
DOWN: dict[str, Any] = {"r": 2, "target_modules": ["down_proj"]}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ON_STACKS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | {
    "target_parameters": [f"layers.1.feed_forward.{name}" for name in EXPERTS]
}
_OF_EXPERTS: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": []}
ALL_EXPERTS = _OF_EXPERTS | {"target_parameters": [f"mlp.{name}" for name in EXPERTS]}
LAST_EXPERTS = _OF_EXPERTS | {"target_parameters": ["layers.1.mlp.experts.down_proj"]}
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), EXPERTS]
"""What a server keeps in one matrix, so that it is quantised as one."""
LISTS = {
    **dict.fromkeys(("nf4-double", "bnb-int8"), "llm_int8_skip_modules"),
    **dict.fromkeys(("fp8-block", "fp4", "torchao-int8", "mxfp4", "stack-fbgemm"), "modules_to_not_convert"),
}
"""The config's list of plain modules, if it is not `ignore`."""


def is_mlp(module: str) -> bool:
    return ".mlp." in module


def is_linear(module: str) -> bool:
    return module.endswith("_proj")


def is_single_expert(module: str) -> bool:
    return ".experts." in module


def is_another_expert(module: str) -> bool:
    return ".experts." in module and ".experts.1." not in module


def is_experts(module: str) -> bool:
    return module.endswith(EXPERTS)


@dataclass(frozen=True)
class Case:
    """One merge: which weights of the model are quantised in which form, what is merged, and how it is stored."""

    form: str
    store: str | None
    loras: tuple[dict[str, Any], ...]
    chosen: Callable[[str], bool] = is_linear
    kind: str = "qwen3"

    def __str__(self) -> str:
        first = self.loras[0]
        return f"{self.kind}-{self.form}-{self.store}-{'+'.join(first['target_modules']) or 'experts'}"


PLAIN = ("bnb-int8", "fp4", "fp8-block", "fp8-channel", "gptq", "int4", "nf4-double", "nvfp4", "torchao-int8")
CASES = [
    *(Case(form, None, (ATTENTION,), is_mlp) for form in ("fp8-block", "gptq", "nf4-double", "torchao-int8")),
    *(Case(form, "all-16bit", (ALL_LINEAR,)) for form in PLAIN),
    *(Case(form, "touched-16bit", (ATTENTION,)) for form in PLAIN if form != "gptq"),
    Case("torchao-int8", "as-base", (ATTENTION,)),
    *(
        Case(form, store, (WHOLE, DOWN))
        for form, store in (("nf4-double", "all-16bit"), ("fp8-block", "touched-16bit"))
    ),
    *(Case(form, "all-16bit", (ON_STACKS,), is_experts, "llama4_text") for form in ("stack-fp8", "stack-nvfp4")),
    *(Case(f"stack-{form}", "touched-16bit", (ON_STACKS,), is_experts, "llama4_text") for form in ("fbgemm", "fp8")),
    Case("stack-fbgemm", "as-base", (ON_STACKS,), is_experts, "llama4_text"),
    Case("mxfp4", None, (ATTENTION,), is_experts, "gpt_oss"),
    Case(
        "mxfp4",
        "all-16bit",
        (ALL_EXPERTS,),
        is_experts,
        "gpt_oss",
    ),
    Case(
        "mxfp4",
        "touched-16bit",
        (LAST_EXPERTS,),
        is_experts,
        "gpt_oss",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_merge_has_pefts_numbers_and_leaves_the_rest_as_it_was(case: Case, made: Made, tmp_path: Path) -> None:
    plain, base, values = made.base(case.kind, case.form, case.chosen)
    start, wanted = made.merged_by_peft(case.kind, case.form, case.chosen, case.loras)
    adapters = [made.adapter(case.kind, lora) for lora in case.loras]
    merged = execute(plan_merge(base, adapters, store=case.store), tmp_path / "merged")
    before, after = saved_tensors(base), saved_tensors(merged)
    touched = {name for name, weight in start.items() if not torch.equal(weight, wanted[name])}
    freed = {None: set(), "as-base": set(), "all-16bit": {*values}}.get(case.store)
    if freed is None:
        freed = {name for name in values if touched & fused_with(name)}
    parts = {part for name in freed for part in parts_of(name, before.keys() - (start.keys() - values.keys()))}
    assert touched
    assert after.keys() == before.keys() - parts | freed
    assert same_model(open_model(plain), open_model(base))

    again = touched & values.keys() - freed
    for name in touched - again:
        assert_rounded(after[name], wanted[name])
    assert all(torch.equal(after[name], values[name].to(BF16)) for name in freed - touched)
    for name in again:
        assert_near(numbers_of(merged, name), wanted[name])
    same = after.keys() - freed - touched - {part for name in again for part in parts_of(name, after.keys())}
    assert not [name for name in same if not torch.equal(raw(after[name]), raw(before[name]))]
    assert_config(case, plain, base, merged, {name.removesuffix(".weight") for name in freed})
    assert not verify(merged).report.findings
    if case.store == "touched-16bit" and case.form in (
        "fp8-block",
        "mxfp4",
    ):  # on a CPU transformers loads it dequantised
        model, info = AutoModelForCausalLM.from_pretrained(merged, dtype=BF16, output_loading_info=True)
        assert not any(info.values())
        plain_now = {
            name: after.get(name, values[name].to(BF16)) if name in freed else start[name].to(BF16) for name in start
        }
        assert not different(model.state_dict(), plain_now)


def parts_of(name: str, stored: AbstractSet[str]) -> set[str]:
    """Return the tensors that a quantised weight is stored as."""
    return {part for part in stored if part.startswith(name.removesuffix("weight"))}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def fused_with(name: str) -> set[str]:
    return {name} | {name.replace(part, each) for group in FUSED for part in group if part in name for each in group}


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that values are what eight bits keep of the exact ones."""
    assert float((found.double() - exact).norm() / exact.norm()) < 2**-5


def assert_config(case: Case, plain: Path, base: Path, merged: Path, freed: set[str]) -> None:
    """Assert that the config, and the metadata of torchao's files, say which modules are quantised."""
    if case.store == "all-16bit":
        assert json.loads((merged / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
    elif case.store != "touched-16bit":
        assert (merged / "config.json").read_bytes() == (base / "config.json").read_bytes()
    else:
        before, after = (
            json.loads((each / "config.json").read_text())["quantization_config"] for each in (base, merged)
        )
        of = LISTS.get(case.form, "ignore")
        held, listed = before.pop(of, []), after.pop(of)
        assert before == after
        assert listed[: len(held)] == held
        modules = {each if "experts" not in each else f"{each.partition('.experts')[0]}.experts" for each in freed}
        assert {each.strip("*") for each in listed[len(held) :]} - {"lm_head"} == modules
    if case.form.startswith("torchao"):
        was = scan_file(base / "model-00001-of-00002.safetensors").metadata
        for file in merged.glob("*.safetensors"):  # torchao's loader reads the metadata of all, one upon the other
            said = scan_file(file).metadata
            if case.store != "all-16bit":
                names = json.loads(was["tensor_names"])
                assert {*json.loads(said["tensor_names"])} == {*names}
                for name in names:
                    plain_now = name.removesuffix(".weight") in freed
                    assert said[name] == ('{"_type": "Tensor"}' if plain_now else was[name])


@pytest.mark.parametrize("form", ["fp4", "fp8-block", "fp8-block-bf16", "fp8-powers", "mxfp4"])
def test_transformers_reads_the_same_numbers_and_peft_merges_to_the_same_bits(
    form: str, made: Made, tmp_path: Path
) -> None:
    kind, chosen, lora = "qwen3", is_linear, ALL_LINEAR
    if form == "mxfp4":
        kind, chosen, lora = (
            "gpt_oss",
            is_experts,
            ALL_EXPERTS,
        )
    _, base, values = made.base(kind, form, chosen)
    model, info = AutoModelForCausalLM.from_pretrained(base, dtype=BF16, output_loading_info=True)
    assert not any(info.values())
    assert not different(model.state_dict(), {name: weight.to(BF16) for name, weight in values.items()})
    theirs = PeftModel.from_pretrained(model, made.adapter(kind, lora)).merge_and_unload().state_dict()
    merged = merge_with_ours(base, made.adapter(kind, lora), tmp_path / "merged", "peft", store="all-16bit")
    assert not different(saved_tensors(merged), theirs)
    evidence = verify(merged).evidence.values()
    assert all(found.verdict is Verdict.RIGHT and found.compared == found.numel for found in evidence)


@pytest.mark.parametrize("store", ["all-16bit", "touched-16bit", "as-base"])
def test_lora_on_single_experts_of_a_quantised_model(store: str, made: Made, tmp_path: Path) -> None:
    """PEFT can no longer make or merge it: its factors are written by hand."""
    _, base, values = made.base("qwen3_moe", "fp8-block", is_single_expert)
    lora = shutil.copytree(
        made.adapter("qwen3_moe", {"r": 2, "lora_alpha": 40, "target_modules": ["q_proj"]}), tmp_path / "lora"
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
    targets = ["q_proj", *(f"experts.1.{part}_proj" for part in ("gate", "up", "down"))]
    edit(lora / "adapter_config.json", target_modules=targets)
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32", store=store)
    after = saved_tensors(merged)
    assert names
    for name in names:
        exact = values[name].double() + delta(lora, name.removesuffix(".weight"))
        if store == "as-base":
            assert_near(numbers_of(merged, name), exact)
        else:
            assert_rounded(after[name], exact)
    assert not verify(merged).report.findings


def test_experts_of_which_one_is_not_quantised_are_left_as_they_are(made: Made, tmp_path: Path) -> None:
    _, base, values = made.base("qwen3_moe", "fp8-block", is_another_expert)
    beside = made.adapter("qwen3_moe", {"r": 2, "target_modules": ["q_proj"]})
    before = saved_tensors(base)
    stays = saved_tensors(merge_with_ours(base, beside, tmp_path / "stays", "float32"))
    assert stays.keys() == before.keys()
    assert all("q_proj" in name for name in different(stays, before))
    after = saved_tensors(merge_with_ours(base, beside, tmp_path / "plain16", "float32", store="all-16bit"))
    assert not different(after, {name: value.to(BF16) for name, value in values.items()})
    assert not verify(tmp_path / "plain16").report.findings
    lora = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    with pytest.raises(
        UnsupportedAdapter, match=r"changes `\S+experts.down_proj`, .* some are quantised and some are not"
    ):
        plan_merge(base, made.adapter("qwen3_moe", lora))


@pytest.mark.parametrize("form", ["gptq", "mxfp4"])
def test_what_lies_in_columns_is_read_once(
    form: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, chosen, lora = ("qwen3", is_linear, ALL_LINEAR) if form == "gptq" else ("gpt_oss", is_experts, ALL_EXPERTS)
    base, adapter = made.base(kind, form, chosen)[1], made.adapter(kind, lora)
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


@pytest.mark.parametrize(("form", "part"), [("fp8-block", "weight"), ("fp8-powers", "weight_scale_inv")])
def test_a_weight_that_is_only_dequantised_has_to_be_finite(form: str, part: str, made: Made, tmp_path: Path) -> None:
    base = shutil.copytree(made.base("qwen3", form, is_linear)[1], tmp_path / "base")
    lora = made.adapter("qwen3", ATTENTION)
    name = f"model.layers.1.mlp.up_proj.{part}"
    (path,) = {each.path for each in open_model(base).tensors.values() if each.name == name}
    table = load_file(path)
    table[name].view(torch.uint8)[0, 0] = 0x7F if part == "weight" else 0xFF  # the NaN of E4M3, and of E8M0
    save_file(table, path, {"format": "pt"})
    with pytest.raises(ExecutionError, match=r"`model.layers.1.mlp.up_proj.weight` would hold NaN or infinity"):
        merge_with_ours(base, lora, tmp_path / "merged", "float32", store="all-16bit")
    assert not (tmp_path / "merged").exists()
    merged = merge_with_ours(base, lora, tmp_path / "kept", "float32", store="touched-16bit")
    assert not verify(merged).report.findings
