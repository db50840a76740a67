"""Making bases and adapters with transformers and PEFT, merging them with PEFT, and comparing the files bit by bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.utils.warning import PeftWarning
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.execution.engine import execute
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, tiny_model

Table = dict[str, torch.Tensor]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {BF16: torch.int16, FP16: torch.int16, FP32: torch.int32}
_TASK_TYPES = {"causal-lm": TaskType.CAUSAL_LM, "seq-cls": TaskType.SEQ_CLS}
# peft 0.21 takes the bias of a lora_B, a vector by nature, for a tensor that ZeRO-3 cut
_VECTORS = ".*have invalid shape.*lora_B.bias"


def save_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype = BF16, *, shard: str = "20KB") -> Path:
    """Write a model in a type, in several shards, and return its folder."""
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def save_base(folder: Path, model_type: str, task: Task, dtype: torch.dtype, **overrides: Any) -> Path:
    """Write a tiny base model and return its folder."""
    return save_model(tiny_model(model_type, task, **overrides), folder, dtype)


def load_model(base: Path, task: Task, num_labels: int = NUM_LABELS) -> PreTrainedModel:
    """Return the base as PEFT's users load it: in its own dtype."""
    labels = {"num_labels": num_labels} if task in ("seq-cls", "token-cls") else {}
    model: PreTrainedModel = AUTO[task].from_pretrained(base, dtype="auto", **labels)
    return model


def randomise(model: torch.nn.Module, *, seed: int = 20) -> None:
    """Give every trainable parameter random values: of an adapter that PEFT makes half of the factors are zero.

    Vectors stay near what they were, as norms and biases do.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + parameter.float() if parameter.dim() == 1 else noise)


def train(
    model: torch.nn.Module,
    folder: Path,
    config: PeftConfig | None = None,
    *,
    save: bool | str = "auto",
    options: Mapping[str, Any] | None = None,
    **lora: Any,
) -> PeftModel:
    """Write an adapter with random tensors as PEFT saves it, and return the model that has it.

    `save` says whether PEFT saves the embeddings too; it chooses by itself where that is "auto". `options` are of
    `get_peft_model`.
    """
    config = config or LoraConfig(**{"r": 4, "lora_alpha": 7, **lora})
    adapted = get_peft_model(model, config, **(options or {}))
    randomise(adapted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_VECTORS, category=PeftWarning)
        adapted.save_pretrained(str(folder), save_embedding_layers=save)
    trained: PeftModel = adapted
    return trained


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
    train(load_model(base, task, num_labels), folder, LoraConfig(task_type=_TASK_TYPES[task], **lora), save=False)
    if dtype is not None:
        weights = folder / "adapter_model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in saved_tensors(folder).items()}, weights)
    return folder


def merged_by_peft(model: PreTrainedModel, adapter: Path, out: Path) -> Path:
    """Write what PEFT's defaults give: load, `merge_and_unload`, `save_pretrained`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_VECTORS, category=PeftWarning)
        loaded = PeftModel.from_pretrained(model, adapter)
    loaded.merge_and_unload().save_pretrained(out)
    return out


def merge_with_peft(base: Path, adapter: Path, out: Path, task: Task, num_labels: int = NUM_LABELS) -> Path:
    return merged_by_peft(load_model(base, task, num_labels), adapter, out)


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


def rewrite(folder: Path, table: Table) -> Path:
    """Replace the weights of a model by one file with other tensors."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(table, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def layout(table: Table) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return name → dtype and shape."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in table.items()}


def different(ours: Table, theirs: Table) -> list[str]:
    """Return the names of tensors that are not the same bits."""
    return [name for name, tensor in theirs.items() if not torch.equal(_bits(ours[name]), _bits(tensor))]


def changed(before: Table, after: Table) -> list[str]:
    """Return the names of tensors that a base does not have, or has otherwise."""
    held, wanted = layout(before), layout(after)
    same = {name: tensor for name, tensor in after.items() if held.get(name) == wanted[name]}
    return [*(after.keys() - same.keys()), *different(before, same)]


def require_same(ours: Path, theirs: Path) -> Table:
    """Assert that both folders hold the same tensors, of the same types and bit for bit; return them."""
    wanted = saved_tensors(theirs)
    require_tensors(saved_tensors(ours), wanted)
    return wanted


def require_tensors(ours: Table, theirs: Table) -> None:
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []


def require_pefts(base: Path, adapter: Path, load: Callable[[], PreTrainedModel], **choices: Any) -> Table:
    """Assert that PEFT's merge into what `load` returns and ours are the same, and change the base; return it.

    Both are written beside the adapter, as `theirs` and `ours`.
    """
    theirs = merged_by_peft(load(), adapter, adapter.parent / "theirs")
    ours = merge_with_ours(base, adapter, adapter.parent / "ours", "peft", **choices)
    wanted = require_same(ours, theirs)
    assert changed(saved_tensors(base), wanted)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
    for field in ("architectures", "tie_word_embeddings", "vocab_size", "id2label"):
        assert configs[0].get(field) == configs[1].get(field), field
    return wanted


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS.get(tensor.dtype, tensor.dtype))
