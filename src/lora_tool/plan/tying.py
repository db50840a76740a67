"""Tied embeddings: one matrix on disk that is both the input embedding and the output layer.

Where an adapter saved one end whole, PEFT's merged model has two matrices and says so in its config. Where it has LoRA
on one end, PEFT changes the shared matrix, and with it the end that was not trained: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_tool.checkpoint import ModelDir
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.stored import same_values
from lora_tool.plan.architectures import Architecture
from lora_tool.plan.model import Fate, Step
from lora_tool.plan.steps import MATRIX, Merge, copied_as
from lora_tool.tensors import StoredTensor, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedEnds:
    """Tensor names of the shared matrix: `embedding` is on disk, `output` is not."""

    embedding: StoredTensor
    output: str


def tied_copies(base: ModelDir, arch: Architecture) -> dict[str, str]:
    """Return tensor name → the tensor that it is a tied copy of, for what transformers ties again and saves once.

    Torch files hold both ends of tied embeddings, and some safetensors files do. transformers ties them where the
    config does not say otherwise and the values are the same (5.23, `PreTrainedModel.tie_weights`). Reads the two
    ends where they do not share their bytes.
    """
    if base.config is None or base.config.tie_word_embeddings is False:
        return {}
    copies = {}
    for name in arch.causal_only:
        copy = base.tensors.get(name)
        if copy is None:
            continue
        # `X.decoder.bias` of BERT's kin is tied to `X.bias`, the matrix to the embedding
        sibling = base.tensors.get(f"{name.removesuffix('.decoder.bias')}.bias")
        others = [t for t in base.tensors.values() if len(t.shape) == MATRIX and t.name not in arch.causal_only]
        candidates = [sibling] if sibling is not None and sibling is not copy else others
        source = next((other for other in candidates if same_values(copy, other)), None)
        if source is not None:
            copies[name] = source.name
    return copies


def tied_ends(merge: Merge) -> TiedEnds | None:
    """Return the two ends of a causal LM whose output layer is not on disk; None where it is, or there is none.

    Raises `UnsupportedAdapter` where the embedding cannot be told from its shape.
    """
    outputs = [name for name in merge.arch.causal_only if name.endswith(".weight")]
    if merge.head is not None or not outputs or outputs[0] in merge.base.tensors.keys() - merge.tied_copies.keys():
        return None
    if merge.facts is not None:
        shared = merge.base.tensors.get(merge.facts.tied.get(outputs[0], ""))
        return TiedEnds(embedding=shared, output=outputs[0]) if shared else None
    vocab_size = merge.base.config.vocab_size if merge.base.config else None
    matrices = (tensor for tensor in merge.base.tensors.values() if len(tensor.shape) == MATRIX)
    candidates = [tensor for tensor in matrices if tensor.shape[0] == vocab_size]
    if len(candidates) != 1:
        raise UnsupportedAdapter(
            f"{merge.base.root}: `{outputs[0]}` is tied, and {len(candidates)} tensors have {vocab_size} rows: "
            "which is the embedding cannot be told"
        )
    return TiedEnds(embedding=candidates[0], output=outputs[0])


def require_no_lora_on_tied_ends(merge: Merge) -> None:
    """Return unless LoRA was put on one end of tied embeddings. Raises `UnsupportedAdapter`."""
    config = merge.base.config
    says_tied = config is not None and bool(config.tie_word_embeddings) and merge.head is None
    touched = [f"{module}.weight" for module in merge.modules.lora]
    ends = [name for name in touched if _is_output(merge, name) or _has_vocabulary_rows(merge, name)]
    if ends and (says_tied or tied_ends(merge) is not None):
        tensor = merge.modules.lora[ends[0].removesuffix(".weight")][0].b
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` changes `{ends[0]}`, which this base ties to the other end of the model: "
            "PEFT's merge would change both, though only one was trained",
            hint="serve the adapter unmerged, or train it on a base saved with tie_word_embeddings=false",
        )


def _is_output(merge: Merge, name: str) -> bool:
    """Return whether it is the output layer itself, and not another layer of the language-modelling head."""
    tensor = merge.base.tensors.get(name)
    vocab_size = merge.base.config.vocab_size if merge.base.config else None
    return name in merge.arch.causal_only and (tensor is None or tensor.shape[0] == vocab_size)


def _has_vocabulary_rows(merge: Merge, name: str) -> bool:
    tensor = merge.base.tensors.get(name)
    is_embedding = name.removesuffix(".weight") in merge.modules.embeddings
    vocab_size = merge.base.config.vocab_size if merge.base.config else None
    return is_embedding and tensor is not None and tensor.shape[0] == vocab_size


def is_untied(merge: Merge) -> bool:
    """Return whether the adapter saved an end of tied embeddings whole, so that the merged model has two matrices."""
    if not any(_is_end(merge, name) for name in merge.modules.saved):
        return False
    return tied_ends(merge) is not None


def _is_end(merge: Merge, name: str) -> bool:
    tensor = merge.modules.saved[name]
    vocab_size = merge.base.config.vocab_size if merge.base.config else None
    return name in merge.arch.causal_only or (len(tensor.shape) == MATRIX and tensor.shape[0] == vocab_size)


def untying_steps(merge: Merge) -> Iterator[Step]:
    """Yield the output layer that a formerly tied base did not have: the saved one, else the base's old embedding."""
    ends = tied_ends(merge) if is_untied(merge) else None
    if ends is None:
        return
    saved = merge.modules.saved.get(ends.output)
    source = saved or ends.embedding
    dtype = merge.dtype or ends.embedding.dtype
    reason = "saved whole in the adapter" if saved else "the base's embedding, no longer tied to the trained one"
    out = TensorSpec(name=ends.output, dtype=dtype, shape=source.shape)
    yield Step(out=out, op=copied_as(dtype, source), fate=Fate.ADDED, reason=reason)
