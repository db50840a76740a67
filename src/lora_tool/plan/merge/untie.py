"""Tied embeddings in a merge: one matrix on disk that is both the input embedding and the output layer.

Where an adapter saved one end whole, PEFT's merged model has two matrices and says so in its config. Where it has LoRA
on an end, PEFT changes the shared matrix, and with it the end that was not trained, or the same end twice: that is
refused, unless the ends are to be untied.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.adapter.support import UNMERGED
from lora_tool.adapter.view import view_of
from lora_tool.errors import UnsupportedAdapter
from lora_tool.plan.core.ops import copied_as
from lora_tool.plan.core.steps import Step
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.plan.merge.context import MergeContext
from lora_tool.plan.merge.steps import lora_step, own_dtype, recomputed_init, tokens_step
from lora_tool.plan.merge.tied_embeddings import TiedEmbeddings, tied_copies, tied_ends, tied_under_one_name
from lora_tool.tensors import StoredTensor, TensorSpec

_UNTIE = "`untie=True` writes each end as it was trained, with tie_word_embeddings=false"


def require_no_lora_on_tied_ends(merge: MergeContext) -> None:
    """Raise `UnsupportedAdapter` for LoRA on an end of embeddings that stay tied, and where a tied tensor would be lost."""
    tied = merge.ends.tied
    if tied is None:
        _require_no_lora_on_the_one(merge)
        return
    _require_unchanged_by_init(merge, tied)
    _require_no_tokens_beside_lora(merge, tied)
    if merge.ends.untied:
        _require_nothing_lost(merge)
        return
    # a matrix with as many rows by chance is no end: only embeddings have an embedding's LoRA
    modules = {tied.output.removesuffix(".weight"), *merge.modules.embeddings} & merge.modules.lora.keys()
    touched = sorted(tied.names & {f"{module}.weight" for module in modules})
    if touched and not merge.ends.trained_as_one:
        tensor = merge.modules.lora[touched[0].removesuffix(".weight")][0].b
        raise UnsupportedAdapter(_changes_both(tensor, touched[0]), hint=_UNTIE)
    if rows := _tokens_of_one_end(merge, tied):
        raise UnsupportedAdapter(_changes_both(rows, tied.embedding.name), hint=_UNTIE)


def _tokens_of_one_end(merge: MergeContext, tied: TiedEmbeddings) -> StoredTensor | None:
    """Return the trained rows of the shared embedding that PEFT did not train in the output layer, if there are any.

    PEFT trains them in both where the config of the whole model ties them, and it is the model's first embedding.
    """
    if merge.facts is None or not merge.modules.tokens:  # what is plainly stored has one embedding, tied by its config
        return None
    module = tied.embedding.name.removesuffix(".weight")
    return None if module == merge.facts.tokens_of_both else merge.modules.tokens.get(module)


def require_no_lora_on_tied_ends_in_memory(view: BaseView) -> None:
    """Raise `UnsupportedAdapter` where PEFT would merge LoRA into an end of tied embeddings, and so into both."""
    tied = tied_ends(view.base, view.arch, view.facts, tied_copies(view.base, view.arch, view.facts))
    for layer in (layer for adapter in view.adapters for layer in view_of(adapter).layers) if tied else ():
        name = f"{layer.target}.weight"
        if tied is not None and (name == tied.output or (layer.embedding and name in tied.names)):
            raise UnsupportedAdapter(_changes_both(layer.any_tensor, name), hint=UNMERGED)


def _changes_both(tensor: StoredTensor, name: str) -> str:
    return (
        f"{tensor.path}: `{tensor.name}` changes `{name}`, which this base ties to the other end of the model: PEFT's "
        "merge would change both ends, unlike the training"
    )


def untying_steps(merge: MergeContext) -> Iterator[Step]:
    """Yield the tensors that a formerly tied base did not have: the output layer, and what the config tied besides."""
    if merge.ends.tied is not None and merge.ends.untied:
        for name, of in merge.ends.untied_tensors.items():
            yield _untied_step(merge, name, merge.base.tensors[of])
        yield _output_step(merge, merge.ends.tied)


def _output_step(merge: MergeContext, tied: TiedEmbeddings) -> Step:
    """Return the step of the output layer: the saved one, or made of the old embedding."""
    name, embedding = tied.output, tied.embedding
    module, rows = name.removesuffix(".weight"), embedding.name.removesuffix(".weight")
    saved = merge.modules.saved.get(name)
    shared = merge.modules.frozen_base.get(embedding.name, embedding)
    frozen = merge.modules.frozen_base.get(name, shared)
    dtype = merge.dtype or own_dtype(merge, embedding)
    if saved is None and module in merge.modules.lora:
        return lora_step(merge, frozen, name, module)
    if saved is None and rows in merge.modules.tokens and not _tokens_of_one_end(merge, tied):
        out = TensorSpec(name=name, dtype=dtype, shape=shared.shape)
        return replace(tokens_step(merge, embedding, rows), out=out)
    source = saved or frozen
    reason = "saved whole in the adapter" if saved else "the base's embedding, no longer tied to the trained one"
    out = TensorSpec(name=name, dtype=dtype, shape=source.shape)
    return Step(out=out, op=copied_as(dtype, source), action=TensorAction.ADDED, reason=reason)


def _untied_step(merge: MergeContext, name: str, of: StoredTensor) -> Step:
    """Return the step of what was one with `of` as well: transformers ties all that the config says, or nothing."""
    # a module saved whole was a copy while it was trained: what was one with it stayed as it was
    copied = any(part.config.saves(of.name.rpartition(".")[0]) for part in merge.adapted)
    source = of if copied else merge.modules.saved.get(of.name, of)
    dtype = merge.dtype or own_dtype(merge, of)
    reason = f"as {of.name}, to which it is no longer tied"
    out = TensorSpec(name=name, dtype=dtype, shape=source.shape)
    return Step(out=out, op=copied_as(dtype, source), action=TensorAction.ADDED, reason=reason)


def _require_no_tokens_beside_lora(merge: MergeContext, tied: TiedEmbeddings) -> None:
    """Raise `UnsupportedAdapter` for LoRA on the output layer beside trained rows, which PEFT trains at both ends."""
    output = tied.output.removesuffix(".weight")
    if output not in merge.modules.lora or not merge.modules.tokens:
        return
    rows = merge.modules.tokens.get(tied.embedding.name.removesuffix(".weight"))
    if rows is not None:
        raise UnsupportedAdapter(
            f"{rows.path}: `{rows.name}`: rows of both ends were trained and `{output}` also has LoRA: the two "
            "changes cannot be separated",
            hint=UNMERGED,
        )


def _require_no_lora_on_the_one(merge: MergeContext) -> None:
    """Raise `UnsupportedAdapter` for LoRA on an output layer that is also stored as the embedding."""
    module = (merge.facts.output if merge.facts else None) or ""
    if module in merge.modules.lora and merge.head is None and tied_under_one_name(merge.base, merge.facts):
        raise UnsupportedAdapter(
            f"{merge.modules.lora[module][0].b.path}: LoRA on `{module}`, which is the embedding of this base too: PEFT's "
            "merge would change both ends, unlike the training",
            hint=UNMERGED,
        )


def _require_nothing_lost(merge: MergeContext) -> None:
    """Raise `UnsupportedAdapter` where PEFT's merge leaves out what was tied beside an end that is saved whole."""
    lost = [f"`{name}` is no longer tied to `{of}`" for name, of in merge.ends.untied_unsaved.items()]
    if lost:
        raise UnsupportedAdapter(
            f"{merge.adapted[0].adapter.root}: `modules_to_save` has one of two tied ends, so {', and '.join(lost)}: PEFT's "
            "merge leaves out what was tied, and transformers re-initialises it at every load",
            hint="`untie=True` writes each of them as it was trained, with tie_word_embeddings=false",
        )


def _require_unchanged_by_init(merge: MergeContext, tied: TiedEmbeddings) -> None:
    """Raise `UnsupportedAdapter` where the init of one end's LoRA also changed the other end, before the training."""
    for name in sorted(tied.names):
        module = name.removesuffix(".weight")
        init = recomputed_init(merge, module)
        if init is not None and module in merge.modules.lora and module not in merge.modules.embeddings:
            raise UnsupportedAdapter(
                f"{merge.modules.lora[module][0].b.path}: `init_lora_weights` {init} on `{module}`, which this base "
                "ties to the other end of the model: the init changed both before the training",
                hint=UNMERGED,
            )
