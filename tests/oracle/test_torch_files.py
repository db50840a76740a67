"""Bases and adapters in torch files, against PEFT's merge of the same files: names, types and bits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lora_tool.checkpoints import open_checkpoint, open_model
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report import Severity
from lora_tool.workflows.inspection.folders import inspect_checkpoint
from lora_tool.workflows.inspection.model import AdapterInspection
from tests.judging import judge
from tests.oracle.peft_merge import (
    load_model,
    merge_with_ours,
    require_pefts,
    save_adapter,
    save_base,
    saved_tensors,
)
from tests.oracle.tiny import Task

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def as_torch_files(base: Path, task: Task, *, shards: int) -> Path:
    """Replace the weights of `base` by what `torch.save` of its state dict gives, tied weights twice."""
    state = load_model(base, task).state_dict()
    for path in base.glob("*.safetensors*"):
        path.unlink()
    if shards == 1:
        torch.save(state, base / "pytorch_model.bin")
        return base
    names = list(state)
    weight_map = {name: f"pytorch_model-{1 + at % shards:05d}-of-{shards:05d}.bin" for at, name in enumerate(names)}
    for shard in set(weight_map.values()):
        torch.save({name: state[name] for name in names if weight_map[name] == shard}, base / shard)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return base


def as_torch_adapter(adapter: Path) -> Path:
    """Replace the adapter's safetensors file by a torch file."""
    torch.save(saved_tensors(adapter), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    return adapter


@pytest.mark.parametrize(
    ("model_type", "task", "tied", "shards"),
    [
        ("llama", "causal-lm", False, 3),
        ("qwen2", "causal-lm", True, 1),
        ("gpt2", "causal-lm", True, 3),
        ("qwen2", "seq-cls", True, 3),
        ("bert", "seq-cls", True, 1),
        ("bart", "seq-cls", True, 3),
    ],
)
def test_torch_files_give_pefts_bits(model_type: str, task: Task, tied: bool, shards: int, tmp_path: Path) -> None:
    lora = LORA | ({"fan_in_fan_out": True} if model_type == "gpt2" else {})
    base = save_base(tmp_path / "base", model_type, task, torch.bfloat16, tie_word_embeddings=tied)
    adapter = as_torch_adapter(save_adapter(tmp_path / "adapter", base, task, lora))
    as_torch_files(base, task, shards=shards)
    require_pefts(base, adapter, lambda: load_model(base, task))
    assert {path.suffix for path in (tmp_path / "ours").iterdir()} <= {".safetensors", ".json"}


def test_a_safetensors_base_that_holds_both_tied_ends(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=False)
    embedding = saved_tensors(base)["model.embed_tokens.weight"]
    model = AutoModelForCausalLM.from_pretrained(base)
    model.lm_head.weight.data = embedding.clone()
    model.save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= open_model(base).tensors.keys()
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", LORA)
    require_pefts(base, adapter, lambda: load_model(base, "causal-lm"))


def test_validate_and_inspect_read_them_too(tmp_path: Path) -> None:
    base = as_torch_files(save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16), "causal-lm", shards=2)
    adapter = as_torch_adapter(save_adapter(tmp_path / "adapter", base, "causal-lm", LORA))
    report = judge(adapter, base=base)
    assert {(finding.code, finding.severity) for finding in report.findings} == {("LT110", Severity.WARNING)}
    seen = inspect_checkpoint(open_checkpoint(adapter))
    assert isinstance(seen, AdapterInspection)
    assert {target.name for target in seen.targets} >= {"q_proj", "down_proj"}


def test_no_code_of_a_torch_file_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", LORA)
    torch.save({**saved_tensors(adapter), "trap": Trap()}, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FindingsFound, match=r"LT102 .*adapter_model\.bin: `trap`: is a mkdir, expected a tensor"):
        merge_with_ours(base, adapter, tmp_path / "out", "float32")
    assert not (tmp_path / "ran").exists()
