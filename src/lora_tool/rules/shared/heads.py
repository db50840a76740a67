"""Finding the head of a classification or reward model among tensors, and how many labels a config means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lora_tool.architectures import CLASSIFICATION_HEADS
from lora_tool.checkpoint import ModelDir
from lora_tool.formats.model_config import TRANSFORMERS_LABELS
from lora_tool.keys import Part
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.shared.targeting import head_of
from lora_tool.tensors import StoredTensor

CLASSIFYING = ("ForSequenceClassification", "ForTokenClassification")
"""How the names of the classes end whose heads have one row per label."""
_MATRIX = 2
_LAST = ("weight", "out_proj.weight", "linear_out.weight", "dense.weight")
"""The tensor of a head that has one row per label, first match first: RoBERTa's and BART's heads are two layers."""


def saved_heads(subject: AdapterSubject) -> Mapping[str, StoredTensor]:
    """Return the head tensors that the adapter carries whole, by the model's own names."""
    whole = subject.view.parts(Part.PLAIN, Part.SAVED_MODULE)
    return {item.name: item.tensor for item in whole if head_of(item.module)}


def is_last_layer(module: str) -> bool:
    """Return whether a module path is that of a head's last layer, which has one row per label."""
    head, _, inner = module.partition(".")
    return head in CLASSIFICATION_HEADS and (not inner or f"{inner}.weight" in _LAST[:-1])


def head_weight(tensors: Mapping[str, StoredTensor], heads: Iterable[str]) -> StoredTensor | None:
    """Return the matrix among `tensors` that has one row per label, None where there is none."""
    for head in sorted(heads):
        for leaf in _LAST:
            tensor = tensors.get(f"{head}.{leaf}")
            if tensor is not None and len(tensor.shape) == _MATRIX and tensor.spec.numel:
                return tensor
    return None


def lora_heads(subject: AdapterSubject) -> Mapping[str, StoredTensor]:
    """Return the lora_B of each head that has LoRA on it, by module path."""
    return {layer.target: layer.b for layer in subject.layers if head_of(layer.target) and layer.b is not None}


def lora_head_rows(subject: AdapterSubject) -> StoredTensor | None:
    """Return the lora_B that has one row per label, None where no head is known to end in its module."""
    ends = frozenset(leaf.removesuffix(".weight") for leaf in _LAST if not leaf.startswith("dense"))
    for module, lora_b in lora_heads(subject).items():
        head, _, inner = module.partition(".")
        if head in CLASSIFICATION_HEADS and (not inner or inner in ends) and lora_b.shape:
            return lora_b
    return None


def is_classifier(model: ModelDir) -> bool:
    """Return whether the model's config names a sequence or token classifier."""
    return model.config is not None and any(name.endswith(CLASSIFYING) for name in model.config.architectures)


def labels_of(model: ModelDir) -> int | None:
    """Return how many labels a classifier's config means; None for a model that is none."""
    if model.config is None or not is_classifier(model):
        return None
    return TRANSFORMERS_LABELS if model.config.num_labels is None else model.config.num_labels
