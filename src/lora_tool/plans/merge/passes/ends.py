"""The two ends of a language model, which have a row per token: the input embedding and the output layer.

Where they are tied there is one matrix on disk. An adapter may hold whole ends: because they were trained whole, or
because PEFT saves them on its own accord.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.adapters.targeting import add_the_same, saved_as_one
from lora_tool.checkpoints import ModelDir
from lora_tool.core.choices import flag
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.options import Options, Recorded, Section, option
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.stored import same_values
from lora_tool.models import Architecture
from lora_tool.models.ends import Vocabulary, embeddings, other_vocabulary, output_name, stored_twice
from lora_tool.plans.adapter.combine import Adapted, AdapterModules
from lora_tool.plans.merge.draft import Draft, Model, ModelEnds, TiedEmbeddings

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts


def has_untied(merged: ModelDir, base: ModelDir) -> bool:
    """Return whether the config of a merged model unties what that of its base ties."""
    tied = [config.tie_word_embeddings for config in (merged.config, base.config) if config is not None]
    return tied[:1] == [False] != tied[1:]


@dataclass(frozen=True, kw_only=True)
class Untie(Options):
    """The option of this pass."""

    section = Section.MODEL

    untie: bool = option(
        default=False,
        text="Write tied embeddings as two matrices, each as it was trained.",
        parse=flag,
        recorded=Recorded.ALWAYS,
        inferred=has_untied,
    )


def with_ends(draft: Draft, options: Untie) -> Draft:
    """Return the draft with the ends of the model settled, and every tied tensor of the adapters once, by its saved name.

    A classifier has one end. Raises `UnsupportedAdapter` where two adapters hold tied tensors with different values.
    """
    model, adapted, modules, classifies = draft.model, draft.adapted, draft.modules, draft.head is not None
    base, arch, facts = model.base, model.arch, model.facts
    copies = tied_copies(base, arch, facts) if facts is not None or not classifies else {}
    tied = None if classifies else tied_ends(base, arch, facts, copies)
    if facts is not None:
        adapted, modules = _with_tied_names(facts, adapted, modules)
    untied = tied is None and not classifies and _differ_in_the_base(model)
    as_one = False
    others: dict[str, str] = {}
    if tied is not None and (options.untie or _trained_apart(tied, adapted)):
        untied, others = True, _tied_to_others(model, tied, modules)
    elif tied is not None:
        as_one = trained_as_one(tied, adapted)
        adapted, modules = _without_tied_repeats(tied, adapted, modules, as_one=as_one)
    vocabulary = other_vocabulary(base, arch, {**modules.frozen_base, **modules.saved})
    if vocabulary is not None:
        base = with_vocabulary(base, vocabulary, {*copies, *(arch.causal_only if classifies else ())})
    ends = ModelEnds(
        tied=tied,
        copies=copies,
        trained_as_one=as_one,
        untied=untied,
        untied_tensors=others if options.untie else {},
        untied_unsaved={} if options.untie else others,
        vocabulary=vocabulary,
    )
    return replace(draft, base=base, adapted=adapted, modules=modules, ends=ends)


def _differ_in_the_base(model: Model) -> bool:
    """Return whether the base has two ends although its config ties them: transformers leaves two that differ on disk
    apart, and PEFT then corrects the config.
    """
    says_tied = model.base.whole_config.tie_word_embeddings is True
    return says_tied and bool(model.arch.causal_only) and not tied_under_one_name(model.base, model.facts)


def _tied_to_others(model: Model, tied: TiedEmbeddings, modules: AdapterModules) -> dict[str, str]:
    """Return the tensors besides the output layer that lose their tie with it, as transformers ties all or nothing."""
    return {
        name: of
        for name, of in model.tied_by_config.items()
        if name != tied.output and of in model.base.tensors and name not in modules.saved
    }


def tied_copies(base: ModelDir, arch: Architecture, facts: ModelFacts | None) -> dict[str, str]:
    """Return tensor name → the tensor that it is a tied copy of, for what transformers ties again and saves once.

    Torch files hold both ends of tied embeddings, and some safetensors files do. Reads the two ends where they do not
    share their bytes.
    """
    if facts is not None:
        both = {name: of for name, of in facts.tied.items() if name in base.tensors and of in base.tensors}
        return {name: of for name, of in both.items() if same_values(base.tensors[name], base.tensors[of])}
    return stored_twice(base, arch)


def tied_ends(
    base: ModelDir, arch: Architecture, facts: ModelFacts | None, copies: Mapping[str, str]
) -> TiedEmbeddings | None:
    """Return the ends of a causal LM whose output layer is not on disk, or is a tied copy; None for any other."""
    output = output_name(arch)
    if output is None or output in base.tensors.keys() - copies.keys():
        return None
    candidates = embeddings(base, arch)
    if facts is not None:
        if output not in facts.tied:
            return None
        candidates = [tensor for tensor in base.tensors.values() if tensor.name == facts.tied[output]]
    return TiedEmbeddings(output=output, candidates=tuple(candidates), root=base.root)


def tied_under_one_name(base: ModelDir, facts: ModelFacts | None) -> bool:
    """Return whether the output layer is on disk and stands for the embeddings too, which are not."""
    if facts is None:
        return False
    output = f"{facts.output}.weight"
    others = {facts.tied.get(output), *(name for name, of in facts.tied.items() if of == output)} - {None}
    return output in base.tensors and bool(others) and others.isdisjoint(base.tensors)


def _trained_apart(ends: TiedEmbeddings, adapted: Sequence[Adapted]) -> bool:
    """Return whether an end was trained whole, without the other: then the merged model has two matrices, as PEFT's has."""
    return any(
        part.config.saves(name.removesuffix(".weight"))
        and not saved_as_one(part.config, ends.output.removesuffix(".weight"), held=ends.output in part.modules.saved)
        for part in adapted
        for name in ends.names & part.modules.saved.keys()
    )


def trained_as_one(ends: TiedEmbeddings, adapted: Sequence[Adapted]) -> bool:
    """Return whether each adapter with LoRA on an end adds the same to both, as one does under `ensure_weight_tying`."""
    output = ends.output.removesuffix(".weight")
    if len(ends.candidates) != 1 or not any(output in part.modules.lora for part in adapted):
        return False
    both = (ends.embedding.name.removesuffix(".weight"), output)
    touching = [part for part in adapted if part.modules.lora.keys() & {*both}]
    return all(add_the_same(part.view, *both) for part in touching)


def _without_tied_repeats(
    ends: TiedEmbeddings, adapted: Sequence[Adapted], modules: AdapterModules, *, as_one: bool
) -> tuple[tuple[Adapted, ...], AdapterModules]:
    """Return adapters and modules without their second copies for the tied output layer.

    So are written: both ends after the vocabulary was resized, both ends under `ensure_weight_tying`, whole or,
    `as_one`, their LoRA, and the rows of trained tokens. PEFT loads both into the one matrix. Raises
    `UnsupportedAdapter` where two adapters differ.
    """
    output = ends.output.removesuffix(".weight")
    repeats = []
    if ends.output in modules.saved:
        repeats.append(modules.saved[ends.output])
        _require_one(modules.saved.get(ends.embedding.name, ends.embedding), repeats[-1])
    if output in modules.tokens:
        embedding = ends.embedding.name.removesuffix(".weight")
        rows = {part.tokens.get(module) for part in adapted for module in (embedding, output)} - {None}
        repeats.append(modules.tokens[output])
        _require_one(modules.tokens.get(embedding) if len(rows) == 1 else None, repeats[-1])
    if (output in modules.tokens or as_one) and ends.output in modules.frozen_base:
        repeats.append(modules.frozen_base[ends.output])
        _require_one(modules.frozen_base.get(ends.embedding.name, ends.embedding), repeats[-1])
    reason = f"the same as for {ends.output}'s tied end, the embedding"
    adapted, modules = tuple(part.without(repeats, reason) for part in adapted), modules.without(repeats)
    if as_one:
        adapted = tuple(part.without_lora(output, reason) for part in adapted)
        modules = modules.without_lora(output)
    return adapted, modules


def _with_tied_names(
    facts: ModelFacts, adapted: Sequence[Adapted], modules: AdapterModules
) -> tuple[tuple[Adapted, ...], AdapterModules]:
    """Return adapters and modules with a whole tensor that is tied to another under the other's name, once.

    BERT's kin have `X.decoder.bias` and `X.bias`, which is the one that is saved with a model; the embeddings of an
    encoder and a decoder may be one. The output layer's weight is another pass's, and a module that PEFT saves
    whole is tied no longer. Raises `UnsupportedAdapter` where two adapters differ.
    """
    saved, repeats = dict(modules.saved), []
    frozen = dict(modules.frozen_base)
    for name, of in facts.tied.items():
        if name == f"{facts.output}.weight" or any(_saves_one(part.config, name, of) for part in adapted):
            continue
        if name.endswith(".bias") and name in frozen and name not in saved:  # under the LoRA of an output layer
            saved[name] = frozen.pop(name)
        if name not in saved:
            continue
        tensor = saved.pop(name)
        if saved.setdefault(of, tensor) is tensor:
            continue
        _require_one(saved[of], tensor)
        repeats.append(tensor)
    reason = "the same as the tensor that it is tied to"
    return tuple(part.without(repeats, reason) for part in adapted), replace(modules, saved=saved, frozen_base=frozen)


def _saves_one(config: AdapterConfig, name: str, of: str) -> bool:
    """Return whether a module with the one tensor is saved whole, and the other is outside it."""
    entries = (f"{entry}." for entry in config.modules_to_save)
    return any(entry in name and entry not in of for entry in entries)


def _require_one(one: StoredTensor | None, other: StoredTensor) -> None:
    """Return if what two adapters hold for tied tensors is the same; the rules have compared what one adapter holds."""
    if one is None or not same_values(one, other):
        what = f"other values than `{one.name}`" if one else "other tokens than the embedding"
        raise UnsupportedAdapter(
            f"{other.path}: `{other.name}` has {what}, but this base ties the two",
            hint="give a base saved with tie_word_embeddings=false",
        )


def with_vocabulary(base: ModelDir, vocabulary: Vocabulary, dropped: Collection[str]) -> ModelDir:
    """Return the base as `resize_token_embeddings` would make it, as far as the adapter does not bring the rows itself.

    Fewer rows are the first ones; the rules let no new rows pass that are nowhere.
    """
    tensors = dict(base.tensors)
    for name in vocabulary.names.difference(vocabulary.brought, dropped):
        spec = replace(tensors[name].spec, shape=(vocabulary.size, *tensors[name].shape[1:]))
        tensors[name] = StoredTensor(spec=spec, spans=tuple(tensors[name].part(0, spec.nbytes)))
    return replace(base, weights=replace(base.weights, tensors=tensors))
