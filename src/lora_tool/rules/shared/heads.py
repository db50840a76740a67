"""Finding the head of a classification or reward model among tensors, and how many labels a config means."""

from __future__ import annotations

from collections.abc import Mapping

from lora_tool.checkpoints import ModelDir
from lora_tool.core.keys import Part
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.model_config import TRANSFORMERS_LABELS
from lora_tool.models.ends import (
    CLASSIFICATION_HEADS,
    MATRIX,
    VALUE_HEADS,
    head_of,
    is_end,
    is_last_layer,
    last_weights,
)
from lora_tool.rules.engine.subjects import AdapterSubject

CLASSIFYING = ("ForSequenceClassification", "ForTokenClassification")
"""How the names of the classes end whose heads have one row per label."""


def saved_heads(subject: AdapterSubject) -> Mapping[str, StoredTensor]:
    """Return the head tensors that the adapter carries whole, by the model's own names."""
    whole = subject.view.parts(Part.PLAIN, Part.SAVED_MODULE)
    return {item.name: item.tensor for item in whole if head_of(item.module)}


def carries_head(subject: AdapterSubject) -> bool:
    """Return whether a head is saved: one of the known names, or a top-level module outside the adapted trunk."""
    if any(head_of(name) in CLASSIFICATION_HEADS for name in saved_heads(subject)):
        return True
    trunks = {layer.target.partition(".")[0] for layer in subject.layers}
    tops = {item.module.partition(".")[0] for item in subject.view.parts(Part.PLAIN) if not is_end(item.module)}
    return bool(tops - trunks - VALUE_HEADS)


def head_weight(tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the matrix among `tensors` that has one row per label, None where there is none."""
    for head in sorted(CLASSIFICATION_HEADS):
        for name in last_weights(head):
            tensor = tensors.get(name)
            if tensor is not None and len(tensor.shape) == MATRIX and tensor.spec.numel:
                return tensor
    return None


def lora_heads(subject: AdapterSubject) -> Mapping[str, StoredTensor]:
    """Return the lora_B of each head that has LoRA on it, by module path."""
    of_heads = subject.view.found(lambda layer: [layer] if head_of(layer.target) else [])
    return {layer.target: layer.b for layer in of_heads if layer.b is not None}


def lora_head_rows(subject: AdapterSubject) -> StoredTensor | None:
    """Return the lora_B that has one row per label, None where no head is known to end in its module.

    That is the base's head where it has one: XLNet has its labels behind what XLM's head is called.
    """
    own = head_weight(subject.base.tensors) if subject.base is not None else None
    for module, lora_b in lora_heads(subject).items():
        if lora_b.shape and (is_last_layer(module) if own is None else own.name == f"{module}.weight"):
            return lora_b
    return None


def has_labels(model: ModelDir) -> bool:
    """Return whether the model's config names a sequence or token classifier."""
    return model.config is not None and any(name.endswith(CLASSIFYING) for name in model.config.architectures)


def labels_of(model: ModelDir) -> int | None:
    """Return how many labels a classifier's config means; None for a model that is none."""
    if model.config is None or not has_labels(model):
        return None
    return TRANSFORMERS_LABELS if model.config.num_labels is None else model.config.num_labels
