"""Verifying real merges: PEFT's, in the ways that tools call it, and our own in every precision; and what is wrong in them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils.warning import PeftWarning
from safetensors.torch import load_file, save_file

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import NotACheckpoint
from lora_tool.core.tensors import DType
from lora_tool.execution.engine import execute
from lora_tool.rules.merged.evidence import Verdict
from tests.oracle.adapter_cases import FEATURES
from tests.oracle.peft_merge import (
    load_model,
    merge_with_ours,
    merge_with_peft,
    save_adapter,
    save_base,
    saved_tensors,
)
from tests.oracle.test_merge_against_peft import proven
from tests.oracle.test_verify_inits import with_equal_singular_values
from tests.oracle.tiny import Task

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]
PRECISIONS = ("float32", "peft", "float64")


def made(folder: Path, feature: str, dtype: torch.dtype) -> tuple[Path, Path]:
    return FEATURES[feature].write(folder, dtype)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "safe": ({}, {"safe_merge": True}),
    "16-bit adapter": ({"autocast_adapter_dtype": False}, {}),
    "16-bit adapter, safe": ({"autocast_adapter_dtype": False}, {"safe_merge": True}),
}


@pytest.mark.parametrize(
    ("feature", "way"),
    [
        ("dora", "safe"),
        ("dora", "16-bit adapter"),
        ("bias-all", "16-bit adapter, safe"),
        ("embedding-and-lm-head", "16-bit adapter"),
        ("saved-both-of-tied", "safe"),
    ],
)
def test_peft_called_otherwise(tmp_path: Path, feature: str, way: str) -> None:
    base, adapter = made(tmp_path, feature, torch.bfloat16)
    loading, merging = WAYS[way]
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter, **loading)
    model.merge_and_unload(**merging).save_pretrained(tmp_path / "merged")
    proven(verify(tmp_path / "merged", base=base, adapters=[adapter]))


@pytest.mark.parametrize(
    ("loaded", "saved"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_loaded_in_one_type_and_saved_in_another(tmp_path: Path, loaded: str, saved: str) -> None:
    base, adapter = made(tmp_path, "bias-all", torch.bfloat16)
    model = load_model(base, "causal-lm").to(getattr(torch, loaded))
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().to(getattr(torch, saved))
    merged.save_pretrained(tmp_path / "merged")
    verification = verify(tmp_path / "merged", base=base, adapters=[adapter])
    assert all(found.verdict is Verdict.RIGHT for found in verification.evidence.values())
    assert [finding.code for finding in verification.report.findings] == ([] if saved == "bfloat16" else ["LT604"])


def test_a_reward_adapter_that_peft_merged_into_a_language_model(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(
        tmp_path / "adapter", base, "seq-cls", {"r": 4, "target_modules": "all-linear"}, num_labels=1
    )
    good = merge_with_peft(base, adapter, tmp_path / "good", "seq-cls", num_labels=1)
    proven(verify(good, base=base, adapters=[adapter]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeftWarning)
        warnings.simplefilter("ignore", UserWarning)
        model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)
    model.merge_and_unload().save_pretrained(tmp_path / "headless")
    report = verify(tmp_path / "headless", base=base, adapters=[adapter]).report
    assert [finding.code for finding in report.findings] == ["LT613"]


def test_merged_twice_by_peft(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, "bias-lora-only", torch.bfloat16)
    once = merge_with_peft(base, adapter, tmp_path / "once", "causal-lm")
    twice = merge_with_peft(once, adapter, tmp_path / "twice", "causal-lm")
    verification = verify(twice, base=base, adapters=[adapter])
    assert {finding.code for finding in verification.report.findings} == {"LT609"}
    for found in verification.report.findings:
        assert "2.0" in found.message or "1.9" in found.message


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.5, "the scaling of 2 was left out"),
        (2**0.5 * 2**0.5 / 4, "was left out"),
        (-1.0, "was subtracted"),
        (1.3, "1.3"),
    ],
)
def test_scalings_are_measured(tmp_path: Path, factor: float, words: str) -> None:
    base, adapter = made(tmp_path, "bias-lora-only", torch.float16)
    other = shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * factor}))
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), other)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    verification = verify(tmp_path / "merged", base=base, adapters=[adapter])
    assert {finding.code for finding in verification.report.findings} == {"LT610"}
    assert all(words in finding.message for finding in verification.report.findings)
    for found in verification.evidence.values():
        if found.verdict is Verdict.SCALED:
            assert found.factor == pytest.approx(factor, rel=0.02)


def test_what_cannot_be_planned_is_said_and_not_passed(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, "bias-lora-only", torch.bfloat16)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": "corda"}))
    report = verify(base, base=base, adapters=[adapter]).report
    skipped = {item.code: item.reason for item in report.skipped}
    assert "corda" in skipped["LT608"]
    assert "corda" in skipped["LT607"]


def test_what_cannot_be_recomputed_is_said_and_asked_all_the_same(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    for name in [name for name in saved_tensors(base) if name.endswith("q_proj.weight")]:
        with_equal_singular_values(base, name)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    merged = merge_with_peft(base, adapter, tmp_path / "merged", "causal-lm")
    verification = verify(merged, base=base, adapters=[adapter], logits=True)
    verdicts = {found.verdict for found in verification.evidence.values() if "q_proj" in found.name}
    assert verdicts == {Verdict.UNKNOWN}
    (skipped,) = (each for each in verification.report.skipped if each.code != "LT320")  # which asks the tokenizer
    assert "equal singular values" in skipped.reason
    assert "q_proj" in skipped.reason
    assert verification.outputs is not None
    assert verification.outputs.explained, verification.outputs
    assert not verification.report.findings
    (finding,) = verify(base, base=base, adapters=[adapter]).report.findings
    assert finding.code == "LT607"


def axolotls(base: Path, adapter: Path, out: Path) -> Path:
    """Write what axolotl's `merge_lora_sharded_efficient` (067b021c8) writes, reduced to its dense path.

    Shard by shard, `.weight` pairs only, so that heads are left out; the index's total_size is the number of tensors.
    """
    shutil.copytree(base, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    for shard in sorted(out.glob("*.safetensors")):
        table = load_file(shard)
        for name, tensor in table.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in factors:
                a, b = factors[f"{stem}.lora_A.weight"].float(), factors[f"{stem}.lora_B.weight"].float()
                table[name] = (tensor.float() + config["lora_alpha"] / config["r"] * (b @ a)).to(tensor.dtype)
        save_file(table, shard, metadata={"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] = len(index["weight_map"])
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


@pytest.mark.parametrize(("task", "expected"), [("causal-lm", ["LT111"]), ("seq-cls", ["LT111", "LT613"])])
def test_what_axolotl_writes(tmp_path: Path, task: Task, expected: list[str]) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, task, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    merged = axolotls(base, adapter, tmp_path / "merged")
    verification = verify(merged, base=base, adapters=[adapter])
    assert [finding.code for finding in verification.report.findings] == expected
    assert {found.verdict for found in verification.evidence.values()} == {Verdict.RIGHT}


def test_the_base_is_found_where_it_is_named(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, "bias-lora-only", torch.bfloat16)
    merged = merge_with_peft(base, adapter, tmp_path / "merged", "causal-lm")
    proven(verify(merged, adapters=[adapter]))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(NotACheckpoint, match="neither this model nor the adapter names the base model"):
        verify(merged, adapters=[adapter])
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps({**config, "_name_or_path": str(base)}))
    proven(verify(merged, adapters=[adapter]))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_on_disk_and_fused_in_memory(tmp_path: Path, model_type: str) -> None:
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.bfloat16)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": parameters}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm")
    proven(verify(theirs, base=base, adapters=[adapter]))
    for precision in PRECISIONS:
        proven(verify(merge_with_ours(base, adapter, tmp_path / f"ours-{precision}", precision)))
    one = next(name for name in load_file(next((theirs).glob("*.safetensors"))) if "experts" in name)
    for shard in theirs.glob("*.safetensors"):
        table = load_file(shard)
        if one in table:
            table[one] = saved_tensors(base)[one]
            save_file(table, shard, metadata={"format": "pt"})
    (finding,) = verify(theirs, base=base, adapters=[adapter]).report.findings
    assert (finding.code, finding.subject) == ("LT606", one)


def test_two_adapters_merged_at_once(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    lora = {"lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    first = save_adapter(tmp_path / "first", base, "causal-lm", {"r": 4, **lora})
    second = save_adapter(tmp_path / "second", base, "causal-lm", {"r": 8, **lora, "target_modules": ["v_proj"]})
    opened = [open_checkpoint(first), open_checkpoint(second)]
    merged = execute(
        plan_merge(open_model(base), [each for each in opened if isinstance(each, AdapterDir)]), tmp_path / "m"
    )
    proven(verify(merged))
    report = verify(merged, adapters=[first]).report
    assert {finding.code for finding in report.findings} <= {"LT608", "LT610", "LT612"}
    assert report.findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_adapters_are_proven_in_every_precision_and_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """PEFT rounds after each of them; a scaling that is no power of two rounds the product, of a bias too."""
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", dtype)
    biased = {"r": 3, "lora_bias": True, "target_modules": ["q_proj", "k_proj"]}
    plain = {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}
    loras = [biased | {"lora_alpha": 7}, biased | {"r": 5, "lora_alpha": -4}, plain | {"lora_alpha": 3}]
    made_of = [save_adapter(tmp_path / str(at), base, "causal-lm", lora) for at, lora in enumerate(loras)]
    adapters = [opened for each in made_of if isinstance(opened := open_checkpoint(each), AdapterDir)]
    for precision in PRECISIONS:
        for out in (None, DType.F16):
            plan = plan_merge(open_model(base), adapters, precision=precision, dtype=out)
            proven(verify(execute(plan, tmp_path / f"{precision}-{out}")))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_in_the_base_is_written_as_it_is(value: float, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3", "causal-lm", torch.bfloat16)
    (file,) = (each for each in base.glob("*.safetensors") if "model.norm.weight" in load_file(each))
    table = load_file(file)
    table["model.norm.weight"][1] = value
    save_file(table, file, {"format": "pt"})
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", {"r": 2, "target_modules": ["q_proj"]})
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", dtype=DType.F32)
    proven(verify(merged))
