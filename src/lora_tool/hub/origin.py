"""Where a folder's weights come from, as a card may say it: Hub ids, never a path of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.sources import resolve
from lora_tool.core.errors import CheckpointError
from lora_tool.formats.manifest import Manifest
from lora_tool.models.ends import is_last_layer

_HUB_ID = re.compile(r"[\w][\w.\-]*(?:/[\w][\w.\-]*)?\Z")
_CLASSIFIES = "text-classification"
_BY_CLASS = {
    "ForSequenceClassification": _CLASSIFIES,
    "ForCausalLM": "text-generation",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "LMHeadModel": "text-generation",
}
"""How the name of a class ends → the Hub's word for what it does."""
_BY_TASK_TYPE = {
    "SEQ_CLS": _CLASSIFIES,
    "CAUSAL_LM": "text-generation",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "FEATURE_EXTRACTION": "feature-extraction",
}


class Origin(Struct, frozen=True, kw_only=True):
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
    recorded = manifest.input("base") if manifest is not None else {}
    named = recorded.get("hub_id") or recorded.get("path")
    reference = named if isinstance(named, str) else None
    if isinstance(checkpoint, AdapterDir):
        reference = reference or (checkpoint.config.base_model if checkpoint.config is not None else None)
        labels = _head_rows(checkpoint)
        task = checkpoint.config.task_type if checkpoint.config is not None else None
        pipeline = _BY_TASK_TYPE.get(task or "") or (_CLASSIFIES if labels else None)
        reward = pipeline == _CLASSIFIES and labels in (None, 1)
    else:
        classes = checkpoint.config.architectures if checkpoint.config is not None else ()
        pipeline = next((p for name in classes for end, p in _BY_CLASS.items() if name.endswith(end)), None)
        reward = pipeline == _CLASSIFIES and checkpoint.config is not None and checkpoint.config.num_labels == 1
    base, folder = _found(reference, checkpoint.root) if reference else (None, None)
    return Origin(
        adapter=isinstance(checkpoint, AdapterDir),
        merged=isinstance(checkpoint, ModelDir) and manifest is not None and bool(manifest.merged_adapters),
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


def _head_rows(adapter: AdapterDir) -> int | None:
    saved = view_of(adapter).saved.items()
    heads = (tensor for name, tensor in saved if is_last_layer(name.removesuffix(".weight")) and tensor.shape)
    return next((tensor.shape[0] for tensor in heads), None)
