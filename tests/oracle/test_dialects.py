"""Adapters under the names that training programs have: PEFT's names give the same bits, and PEFT loads them all.

The files are made after the programs' sources: of Tinker no adapter was at hand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_tool import convert, validate, verify
from lora_tool.core.errors import UnsupportedAdapter
from tests.oracle.peft_merge import different, load_model, saved_tensors
from tests.oracle.quantised_bases import edit
from tests.oracle.test_combine import adapters_of
from tests.oracle.test_convert_experts import FUSED

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
Table = dict[str, torch.Tensor]


def as_tinker(table: Table, base: Table) -> tuple[Table, Table]:
    """Return an adapter under Tinker's names, with LoRA on experts of which w1 and w3 share A and w2 shares B, and the
    same with a pair for each expert.
    """
    theirs = {name.replace("model.lm_head", "model.model.unembed_tokens"): tensor for name, tensor in table.items()}
    ours = dict(table)
    layers = {name.partition(".experts.")[0] for name in base if ".experts." in name}
    for layer in sorted(layers):
        count = sum(name.startswith(f"{layer}.experts.") and name.endswith(".gate_proj.weight") for name in base)
        for matrix, projection in MATRICES.items():
            rows, columns = base[f"{layer}.experts.0.{projection}.weight"].shape
            a, b = (count, 1) if matrix == "w2" else (1, count)
            for part, tensor in (("A", torch.randn(a, 2, columns)), ("B", torch.randn(b, rows, 2))):
                theirs[f"base_model.model.{layer}.experts.{matrix}.lora_{part}.weight"] = tensor
                for expert, one in enumerate(tensor.expand(count, -1, -1)):
                    name = f"base_model.model.{layer}.experts.{expert}.{projection}.lora_{part}.weight"
                    ours[name] = one.contiguous()
    return theirs, ours


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # PEFT 0.21 looks at modules alone
def test_an_adapter_of_tinker_is_pefts_bit_for_bit(tmp_path: Path) -> None:
    lora = {"target_modules": ["q_proj", "lm_head"], "r": 2, "lora_alpha": 3}
    base, (adapter,) = adapters_of(tmp_path, "qwen3_moe", lora)
    assert not [found for found in validate(adapter, base=base).findings if found.code == "LT235"]
    theirs, truth = as_tinker(saved_tensors(adapter), saved_tensors(base))
    save_file(theirs, adapter / WEIGHTS)
    edit(adapter / CONFIG, target_modules="all-linear")
    found = validate(adapter, base=base).findings
    assert {finding.code for finding in found} == {"LT235"}
    assert {finding.hint for finding in found} == {f"lora-tool convert {adapter} --to peft --base {base}"}
    out = convert(adapter, "peft", base=base, out=tmp_path / "out").path
    assert different(saved_tensors(out), truth) == []
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), out)
    again = model.load_adapter(out, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    assert not verify(out).report.findings
    name = next(name for name in theirs if ".experts.w1.lora_B" in name)
    save_file({**theirs, name: theirs[name][:-1].contiguous()}, adapter / WEIGHTS)
    with pytest.raises(UnsupportedAdapter, match="is of 3 experts, and other factors of .* of 4"):
        convert(adapter, "peft", base=base, out=tmp_path / "part")


def test_swapped_factors_of_experts_are_named(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "qwen3_moe", FUSED)
    assert not [found for found in validate(adapter, base=base).findings if found.code == "LT502"]
    swapped = shutil.copytree(adapter, tmp_path / "swapped")
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    table = {}
    for name, tensor in load_file(adapter / WEIGHTS).items():
        module, part, leaf = name.rsplit(".", 2)
        is_of_experts = ".experts" in name
        table[f"{module}.{other[part] if is_of_experts else part}.{leaf}"] = (
            tensor.T.contiguous() if is_of_experts else tensor
        )
    save_file(table, swapped / WEIGHTS)
    found = [finding for finding in validate(swapped, base=base).findings if finding.code == "LT502"]
    assert found
    assert all("lora_A and lora_B are swapped" in finding.message for finding in found)
