"""Making bases and adapters with transformers and PEFT, merging them with PEFT, and comparing the files bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.utils.warning import PeftWarning
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.execution.engine import execute
from tests.oracle.tiny import NUM_LABELS, Task, tiny_model

Table = dict[str, torch.Tensor]

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_TASK_TYPES = {"causal-lm": TaskType.CAUSAL_LM, "seq-cls": TaskType.SEQ_CLS}


def save_base(folder: Path, model_type: str, task: Task, dtype: torch.dtype, **overrides: Any) -> Path:
    """Write a tiny base model, in several shards, and return its folder."""
    model = tiny_model(model_type, task, **overrides).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def load_model(base: Path, task: Task, num_labels: int = NUM_LABELS) -> PreTrainedModel:
    """Return the base as PEFT's users load it: in its own dtype."""
    if task == "causal-lm":
        return AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return AutoModelForSequenceClassification.from_pretrained(base, dtype="auto", num_labels=num_labels)


def randomise(model: torch.nn.Module, *, seed: int) -> None:
    """Give every trainable parameter random values: of an adapter that PEFT makes half of the factors are zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def save_adapter(
    folder: Path,
    base: Path,
    task: Task,
    lora: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    num_labels: int = NUM_LABELS,
) -> Path:
    """Write an adapter that PEFT made, with every trainable tensor random, and return its folder.

    `dtype` casts the tensors of the file; None leaves them as PEFT saves them.
    """
    config = LoraConfig(task_type=_TASK_TYPES[task], **lora)
    model = get_peft_model(load_model(base, task, num_labels), config)
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + parameter.float() if parameter.dim() == 1 else noise)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*have invalid shape.*lora_B.bias", category=PeftWarning)
        model.save_pretrained(str(folder), save_embedding_layers=False)
    if dtype is not None:
        weights = folder / "adapter_model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in saved_tensors(folder).items()}, weights)
    return folder


def merge_with_peft(base: Path, adapter: Path, out: Path, task: Task, num_labels: int = NUM_LABELS) -> Path:
    """Write what PEFT's defaults give: load, `merge_and_unload`, `save_pretrained`."""
    with warnings.catch_warnings():
        # peft 0.21 takes the bias of a lora_B, a vector by nature, for a tensor that ZeRO-3 cut
        warnings.filterwarnings("ignore", message=".*have invalid shape.*lora_B.bias", category=PeftWarning)
        model = PeftModel.from_pretrained(load_model(base, task, num_labels), adapter)
    model.merge_and_unload().save_pretrained(out)
    return out


def merge_with_ours(base: Path, adapter: Path, out: Path, precision: str, **choices: Any) -> Path:
    """Write what lora-tool gives."""
    opened = open_checkpoint(adapter)
    assert isinstance(opened, AdapterDir)
    return execute(plan_merge(open_model(base), opened, precision=precision, **choices), out)


def saved_tensors(folder: Path) -> Table:
    """Return every tensor of every safetensors file in the folder, read by the reference package."""
    table: Table = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            table |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return table


def layout(table: Table) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return name → dtype and shape."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in table.items()}


def different(ours: Table, theirs: Table) -> list[str]:
    """Return the names of tensors that are not the same bits."""
    return [name for name, tensor in theirs.items() if not torch.equal(_bits(ours[name]), _bits(tensor))]


def require_same(ours: Path, theirs: Path) -> Table:
    """Assert that both folders hold the same tensors, of the same types and bit for bit; return them."""
    found, wanted = saved_tensors(ours), saved_tensors(theirs)
    assert layout(found) == layout(wanted)
    assert different(found, wanted) == []
    return wanted


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS.get(tensor.dtype, tensor.dtype))
