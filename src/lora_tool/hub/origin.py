"""Where a folder's weights come from, as a card may say it: Hub ids, never a path of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import CheckpointError
from lora_tool.formats.manifest import Manifest
from lora_tool.sources import resolve

_HUB_ID = re.compile(r"[\w][\w.\-]*(?:/[\w][\w.\-]*)?\Z")
_PIPELINES = {
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "LMHeadModel": "text-generation",
}
_TASKS = {
    "SEQ_CLS": "text-classification",
    "CAUSAL_LM": "text-generation",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "FEATURE_EXTRACTION": "feature-extraction",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is published and what it was made of, without a path."""

    adapter: bool
    merged: bool
    reward: bool
    pipeline: str | None
    base: str | None
    """The base model's Hub id; None where it is unknown or a folder of this machine."""
    base_folder: Path | None
    """The base model on this machine, for its licence."""
    local: str | None = None
    """What the folder calls its base where that is no Hub id: a path of some machine."""

    @property
    def relation(self) -> str | None:
        """`base_model_relation`, in the Hub's words: `merge` there means several models in one."""
        return "adapter" if self.adapter else "finetune" if self.merged else None


def origin_of(checkpoint: AdapterDir | ModelDir, manifest: Manifest | None) -> Origin:
    """Return where the checkpoint comes from, by its manifest first, then its config."""
    reference = _recorded_base(manifest)
    if isinstance(checkpoint, AdapterDir):
        config = checkpoint.config
        if reference is None and config is not None:
            reference = config.base_model
        task = config.task_type if config is not None else None
        pipeline = _TASKS.get(task or "") or ("text-classification" if _head_rows(checkpoint) else None)
        reward = pipeline == "text-classification" and _head_rows(checkpoint) in (None, 1)
    else:
        classes = checkpoint.config.architectures if checkpoint.config is not None else ()
        pipeline = next((p for name in classes for end, p in _PIPELINES.items() if name.endswith(end)), None)
        labels = checkpoint.config.num_labels if checkpoint.config is not None else None
        reward = pipeline == "text-classification" and labels == 1
    base, folder = _found(reference, checkpoint.root) if reference else (None, None)
    return Origin(
        adapter=isinstance(checkpoint, AdapterDir),
        merged=manifest is not None and bool(manifest.merged_adapters),
        reward=reward,
        pipeline=pipeline,
        base=base,
        base_folder=folder,
        local=reference if base is None else None,
    )


def _found(reference: str, near: Path) -> tuple[str | None, Path | None]:
    """Return the Hub id that `reference` means, if it does, and the folder where the model lies on this machine."""
    try:
        source = resolve(reference, near=near)
    except CheckpointError:
        return (reference if is_hub_id(reference) else None), None
    return source.hub_id, source.path


def is_hub_id(name: object) -> bool:
    """Return whether `name` can be a model's id on the Hub: `owner/name`, or one of the old names without owner."""
    return isinstance(name, str) and bool(_HUB_ID.match(name)) and ".." not in name


def _recorded_base(manifest: Manifest | None) -> str | None:
    """Return what the manifest calls the base model: its Hub id, else its path."""
    inputs = manifest.raw.get("inputs") if manifest is not None else None
    base: Any = inputs.get("base") if isinstance(inputs, Mapping) else None
    if not isinstance(base, Mapping):
        return None
    named = base.get("hub_id") or base.get("path")
    return named if isinstance(named, str) else None


def _head_rows(adapter: AdapterDir) -> int | None:
    """Return the labels of the score head that the adapter brings; None without one."""
    for name, tensor in adapter.tensors.items():
        if re.search(r"(?:^|\.)(?:score|classifier|classification_head\.out_proj)\.(?:\w+\.)?weight\Z", name):
            return tensor.shape[0] if tensor.shape else None
    return None
