"""Everything that the steps of a merge are made from: the model, what the adapters do, and its ends, settled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lora_tool.architectures import Architecture
from lora_tool.architectures.vocabulary import Vocabulary, other_vocabulary
from lora_tool.checkpoint import ModelDir
from lora_tool.names.model import ModelFacts
from lora_tool.plan.adapter.combine import Adapted
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import Task
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.plan.merge.head import Head
from lora_tool.plan.merge.tied_embeddings import (
    TiedEmbeddings,
    tied_copies,
    tied_ends,
    tied_under_one_name,
    trained_apart,
    with_tied_names,
    with_vocabulary,
    without_tied_repeats,
)
from lora_tool.tensors import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnds:
    """The input embedding and the output layer of the merged model, and what is tied to them."""

    tied: TiedEmbeddings | None = None
    """The shared matrix of a causal LM with tied embeddings."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the base that are tied copies of another, by name: the output has them once."""
    untied: bool = False
    """Whether the output has two matrices and a config that says so."""
    untied_tensors: Mapping[str, str] = field(default_factory=dict)
    """Other tensors that the config alone tied, which are written besides, and the base's tensors that they equal."""
    untied_unsaved: Mapping[str, str] = field(default_factory=dict)
    """The same where PEFT's merge leaves them out, and transformers makes them up on loading."""
    vocabulary: Vocabulary | None = None
    """Where the adapter brings another number of tokens than the base has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeContext:
    """Everything that the steps are made from."""

    base: ModelDir
    """The base in the names of memory, with as many rows per token as the merged model."""
    adapted: tuple[Adapted, ...]
    arch: Architecture
    task: Task
    modules: AdapterModules
    """What all adapters do together."""
    head: Head | None
    """A sequence classifier's; other classes' heads are parameters like any other."""
    labels: int | None
    """How many labels the merged model has; None for a class without any."""
    dtype: DType | None
    facts: ModelFacts | None = None
    """What transformers says of the model, where it was asked."""
    missing_keys: frozenset[str] = frozenset()
    """Parameters that the merged model's class has and the base does not."""
    ends: ModelEnds = ModelEnds()


def merge_context(
    view: BaseView,
    adapted: Sequence[Adapted],
    modules: AdapterModules,
    *,
    head: Head | None,
    labels: int | None,
    dtype: DType | None,
    untie: bool,
) -> MergeContext:
    """Return what the steps are made from, with the ends of the model settled.

    `modules` are those of all `adapted` together. `untie` gives tied embeddings two matrices. Raises
    `UnsupportedAdapter` where an adapter holds tied tensors with different values, `IncompatibleBase` where the rows of
    new tokens are missing.
    """
    base, arch, facts = view.base, view.arch, view.facts
    copies = tied_copies(base, arch, facts) if head is None or facts is not None else {}
    tied = tied_ends(base, arch, facts, copies) if head is None else None
    if facts is not None:
        adapted, modules = with_tied_names(facts, adapted, modules)
    untied = _differ_in_the_base(view) if tied is None and head is None else False
    untied_tensors: Mapping[str, str] = {}
    if tied is not None:
        untied = untie or trained_apart(tied, adapted)
        if untied:
            untied_tensors = _tied_to_others(view, tied, modules)
        else:
            adapted, modules = without_tied_repeats(tied, adapted, modules)
    vocabulary = other_vocabulary(base, arch, {**modules.frozen_base, **modules.saved})
    if vocabulary is not None:
        dropped = frozenset(copies) | (frozenset(arch.causal_only) if head is not None else frozenset())
        base = with_vocabulary(base, vocabulary, dropped)
    return MergeContext(
        base=base,
        adapted=tuple(adapted),
        arch=arch,
        task=view.task,
        modules=modules,
        head=head,
        labels=labels,
        dtype=dtype,
        facts=facts,
        missing_keys=view.missing_keys,
        ends=ModelEnds(
            tied=tied,
            copies=copies,
            untied=untied,
            untied_tensors=untied_tensors if untie else {},
            untied_unsaved={} if untie else untied_tensors,
            vocabulary=vocabulary,
        ),
    )


def _differ_in_the_base(view: BaseView) -> bool:
    """Return whether the base has two ends although its config ties them: transformers leaves two that differ on disk
    apart, and PEFT then corrects the config.
    """
    says_tied = view.base.config is not None and view.base.config.tie_word_embeddings is True
    return says_tied and bool(view.arch.causal_only) and not tied_under_one_name(view.base, view.facts)


def _tied_to_others(view: BaseView, tied: TiedEmbeddings, modules: AdapterModules) -> dict[str, str]:
    """Return the tensors besides the output layer that lose their tie with it, as transformers ties all or nothing."""
    return {
        name: of
        for name, of in view.tied_by_config.items()
        if name != tied.output and of in view.base.tensors and name not in modules.saved
    }
