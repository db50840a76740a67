"""Tied embeddings in a merge: one matrix on disk that is both the input embedding and the output layer.

Where an adapter saved one end whole, PEFT's merged model has two matrices and a config to match. Where it has LoRA
on an end, PEFT changes the shared matrix, and with it the end that was not trained, or the same end twice: that is
refused, unless the ends are to be untied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from lora_tool.adapters.support import UNMERGED
from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import StoredTensor, TensorAction, TensorSpec
from lora_tool.plans.core.ops import copied_as
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.draft import Draft, Model, TiedEmbeddings
from lora_tool.plans.merge.passes.ends import tied_copies, tied_ends, tied_under_one_name
from lora_tool.plans.merge.passes.steps import lora_step, own_dtype, recomputed_init, tokens_step

_UNTIE = "`untie=True` writes each end as it was trained, with tie_word_embeddings=false"


def require_no_lora_on_tied_ends(draft: Draft) -> None:
    """Raise `UnsupportedAdapter` for LoRA on an end of embeddings that stay tied, and where a tied tensor would be lost."""
    tied = draft.ends.tied
    if tied is None:
        _require_no_lora_on_the_one(draft)
        return
    _require_unchanged_by_init(draft, tied)
    _require_no_tokens_beside_lora(draft, tied)
    if draft.ends.untied:
        _require_nothing_lost(draft)
        return
    # a matrix with as many rows by chance is not an end: only embeddings have an embedding's LoRA
    modules = {tied.output.removesuffix(".weight"), *draft.modules.embeddings} & draft.modules.lora.keys()
    touched = sorted(tied.names & {f"{module}.weight" for module in modules})
    if touched and not draft.ends.trained_as_one:
        tensor = draft.modules.lora[touched[0].removesuffix(".weight")][0].b
        raise UnsupportedAdapter(_changes_both(tensor, touched[0]), hint=_UNTIE)
    if rows := _tokens_of_one_end(draft, tied):
        raise UnsupportedAdapter(_changes_both(rows, tied.embedding.name), hint=_UNTIE)


def _tokens_of_one_end(draft: Draft, tied: TiedEmbeddings) -> StoredTensor | None:
    """Return the trained rows of the shared embedding that PEFT did not train in the output layer, if there are any.

    PEFT trains them in both where the config of the whole model ties them, and it is the model's first embedding.
    """
    # a plainly stored base (no `facts`) has one embedding, tied by its config
    if draft.model.facts is None or not draft.modules.tokens:
        return None
    module = tied.embedding.name.removesuffix(".weight")
    return None if module == draft.model.facts.tokens_of_both else draft.modules.tokens.get(module)


def require_no_lora_on_tied_ends_in_memory(model: Model) -> None:
    """Raise `UnsupportedAdapter` where PEFT would merge a change of one end of tied embeddings, and so change both."""
    tied = tied_ends(model.base, model.arch, model.facts, tied_copies(model.base, model.arch, model.facts))
    if tied is None:
        return
    for adapter in model.adapters:
        if adapter.config is not None and adapter.config.is_of_another_kind:
            _require_ends_untouched(adapter, tied.names | {tied.output})
        for layer in view_of(adapter).layers:
            name = f"{layer.target}.weight"
            if name == tied.output or (layer.embedding and name in tied.names):
                raise UnsupportedAdapter(_changes_both(layer.any_tensor, name), hint=UNMERGED)


def _require_ends_untouched(adapter: AdapterDir, ends: Collection[str]) -> None:
    """Raise for a tensor of another method than LoRA in a module of `ends`; a module that was saved whole is none."""
    for tensor in adapter.tensors.values():
        place = tensor.name.removeprefix(PREFIX)
        end = next((end for end in ends if place.startswith(f"{end.removesuffix('.weight')}.")), None)
        if end is not None and place != end:
            raise UnsupportedAdapter(_changes_both(tensor, end), hint=UNMERGED)


def _changes_both(tensor: StoredTensor, name: str) -> str:
    return (
        f"{tensor.path}: `{tensor.name}` changes `{name}`, which this base ties to the other end of the model: PEFT's "
        "merge would change both ends, unlike the training"
    )


def untying_steps(draft: Draft) -> Iterator[Step]:
    """Yield the tensors that a formerly tied base lacked: the output layer, and others that the config tied."""
    if draft.ends.tied is not None and draft.ends.untied:
        for name, of in draft.ends.untied_tensors.items():
            yield _untied_step(draft, name, draft.base.tensors[of])
        yield _output_step(draft, draft.ends.tied)


def _output_step(draft: Draft, tied: TiedEmbeddings) -> Step:
    """Return the step of the output layer: the saved one, or made of the old embedding."""
    name, embedding = tied.output, tied.embedding
    module, rows = name.removesuffix(".weight"), embedding.name.removesuffix(".weight")
    saved = draft.modules.saved.get(name)
    shared = draft.modules.frozen_base.get(embedding.name, embedding)
    frozen = draft.modules.frozen_base.get(name, shared)
    dtype = draft.dtype or own_dtype(draft, embedding)
    if saved is None and module in draft.modules.lora:
        return lora_step(draft, frozen, name, module)
    if saved is None and rows in draft.modules.tokens and not _tokens_of_one_end(draft, tied):
        out = TensorSpec(name=name, dtype=dtype, shape=shared.shape)
        return replace(tokens_step(draft, embedding, rows), out=out)
    source = saved or frozen
    reason = "saved whole in the adapter" if saved else "the base's embedding, no longer tied to the trained one"
    out = TensorSpec(name=name, dtype=dtype, shape=source.shape)
    return Step(out=out, op=copied_as(dtype, source), action=TensorAction.ADDED, reason=reason)


def _untied_step(draft: Draft, name: str, of: StoredTensor) -> Step:
    """Return the step of a tensor that was tied to `of` too: transformers ties all of them or none."""
    # a module saved whole was a copy while it was trained: tensors that were tied to the original stayed as they were
    copied = any(part.config.saves(of.name.rpartition(".")[0]) for part in draft.adapted)
    source = of if copied else draft.modules.saved.get(of.name, of)
    dtype = draft.dtype or own_dtype(draft, of)
    reason = f"as {of.name}, to which it is no longer tied"
    out = TensorSpec(name=name, dtype=dtype, shape=source.shape)
    return Step(out=out, op=copied_as(dtype, source), action=TensorAction.ADDED, reason=reason)


def _require_no_tokens_beside_lora(draft: Draft, tied: TiedEmbeddings) -> None:
    """Raise `UnsupportedAdapter` for LoRA on the output layer with trained rows, which PEFT trains at both ends."""
    output = tied.output.removesuffix(".weight")
    if output not in draft.modules.lora or not draft.modules.tokens:
        return
    rows = draft.modules.tokens.get(tied.embedding.name.removesuffix(".weight"))
    if rows is not None:
        raise UnsupportedAdapter(
            f"{rows.path}: `{rows.name}`: rows of both ends were trained and `{output}` also has LoRA: the two "
            "changes cannot be separated",
            hint=UNMERGED,
        )


def _require_no_lora_on_the_one(draft: Draft) -> None:
    """Raise `UnsupportedAdapter` for LoRA on an output layer that is also stored as the embedding."""
    module = (draft.model.facts.output if draft.model.facts else None) or ""
    if module in draft.modules.lora and draft.head is None and tied_under_one_name(draft.base, draft.model.facts):
        raise UnsupportedAdapter(
            f"{draft.modules.lora[module][0].b.path}: LoRA on `{module}`, which is the embedding of this base too: PEFT's "
            "merge would change both ends, unlike the training",
            hint=UNMERGED,
        )


def _require_nothing_lost(draft: Draft) -> None:
    """Raise `UnsupportedAdapter` where PEFT's merge leaves out the tensors tied to an end that is saved whole."""
    lost = [f"`{name}` is no longer tied to `{of}`" for name, of in draft.ends.untied_unsaved.items()]
    if lost:
        raise UnsupportedAdapter(
            f"{draft.adapted[0].adapter.root}: `modules_to_save` has one of two tied ends, so {', and '.join(lost)}: PEFT's "
            "merge leaves out what was tied, and transformers re-initialises it at every load",
            hint="`untie=True` writes each of them as it was trained, with tie_word_embeddings=false",
        )


def _require_unchanged_by_init(draft: Draft, tied: TiedEmbeddings) -> None:
    """Raise `UnsupportedAdapter` where the init of one end's LoRA also changed the other end, before the training."""
    for name in sorted(tied.names):
        module = name.removesuffix(".weight")
        init = recomputed_init(draft, module)
        if init is not None and module in draft.modules.lora and module not in draft.modules.embeddings:
            raise UnsupportedAdapter(
                f"{draft.modules.lora[module][0].b.path}: `init_lora_weights` {init} on `{module}`, which this base "
                "ties to the other end of the model: the init changed both before the training",
                hint=UNMERGED,
            )
