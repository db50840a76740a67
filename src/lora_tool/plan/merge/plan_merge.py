"""Planning a merge: base + adapter → every tensor and file of the merged model, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

from msgspec.structs import replace

from lora_tool.adapter.support import require_mergeable, require_weightable
from lora_tool.adapter.view import view_of
from lora_tool.architectures.ends import end_names
from lora_tool.checkpoint.quantised import in_full_precision
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.plan.adapter.combine import Adapted, join, require_saved_in_first, without_delta
from lora_tool.plan.adapter.modules import AdapterModules, adapter_modules
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import Step
from lora_tool.plan.merge.asked import Asked
from lora_tool.plan.merge.base_view import BaseView, PerExpert
from lora_tool.plan.merge.build_plan import build_plan
from lora_tool.plan.merge.context import MergeContext, merge_context
from lora_tool.plan.merge.ledger import adapter_leftovers, dropped_from_base, require_all_consumed
from lora_tool.plan.merge.read_base import read_base
from lora_tool.plan.merge.steps import added_steps, base_steps
from lora_tool.plan.merge.storages import Storage
from lora_tool.plan.merge.trained_as import as_trained, rounded_note, trained_on_quantised
from lora_tool.plan.merge.untie import require_no_lora_on_tied_ends, untying_steps
from lora_tool.plan.merge.written import Written
from lora_tool.report.findings import Severity
from lora_tool.report.model import joined
from lora_tool.rules.merging import MergeJudge
from lora_tool.sources import Reference, opened_adapter, opened_model, source_of
from lora_tool.tensors import DType, float_type
from lora_tool.weighted import all_weighted

Word = TypeVar("Word", bound=Enum)


def plan_merge(
    base: Reference,
    adapter: Reference | Sequence[Reference],
    *,
    weights: Sequence[float] | None = None,
    head_alone: bool = False,
    task: Task | str = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | str | None = None,
    precision: Precision | str = Precision.FLOAT32,
    untie: bool = False,
    text_only: bool = False,
    store: Storage | str | None = None,
    allow_loss: bool = False,
    base_as: TrainedAs | str | None = None,
    max_shard_bytes: int | None = None,
    expert_layout: ExpertLayout | str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: Severity | str = Severity.ERROR,
) -> Plan:
    """Return the plan that merges `adapter`, or several of them, into `base`.

    The rules judge the adapters first, as `validate` does. Reads headers, the adapters' values, and a few KB of
    samples; writes nothing. Every tensor of all inputs is in the plan, as a step or as a leftover with its reason. The
    manifest records the Hub id and commit of inputs in the Hub's cache.

    All inputs may be paths, Hub ids or opened checkpoints. The merge sums the ΔW of several adapters in their order,
    each times its weight: one of `weights`, by default the number in its name ("A=0.7"), or 1. `head_alone` leaves ΔW
    out and writes the base with the adapter's head, for a server that adds ΔW itself. `task` "reward" means one label;
    `num_labels` is the number of labels that the head must have. `dtype` None keeps the dtype of each tensor;
    `precision` is the arithmetic. `untie` writes tied embeddings as two matrices, each as it was trained. `text_only`
    writes only the text model of a multimodal base. `store` says which weights of a quantised base stay quantised: by
    default all of them if the adapters change none, else none. `allow_loss` writes "as-base" even if it keeps less than
    a tenth of ΔW. `base_as` rounds the linear layers of a 16-bit base to four bits and back, as QLoRA loaded it.
    `max_shard_bytes` None keeps the base's grouping into files. `expert_layout` says how a fused lora_B of experts is
    packed, if its config does not.

    `select` and `ignore` are codes of rules, or their beginnings. An ignored error still refuses the merge if nothing
    can be computed despite it. Findings below `fail_on` are in the plan. Raises `FindingsFound` for the other findings,
    `UnsupportedAdapter` for a feature that cannot be merged exactly, `IncompatibleBase` where transformers has no place
    for a tensor.
    """
    stored = opened_model(base)
    names, factors = all_weighted(adapter, weights)
    adapters = tuple(map(opened_adapter, names))
    asked = Asked(
        task=Task(task),
        precision=Precision(precision),
        store=_chosen(Storage, store),
        base_as=_chosen(TrainedAs, base_as),
        dtype=None if dtype is None else float_type(dtype),
        expert_layout=_chosen(ExpertLayout, expert_layout),
        num_labels=num_labels,
        untie=untie,
        text_only=text_only,
        head_alone=head_alone,
        allow_loss=allow_loss,
    )
    judge = MergeJudge(
        task=asked.task.expected,
        num_labels=num_labels,
        untie=untie,
        select=tuple(select),
        ignore=tuple(ignore),
        fail_on=Severity(fail_on),
    )
    on_disk = judge.as_stored(adapters, stored)
    for each in adapters:
        require_mergeable(view_of(each))
    require_weightable(adapters, factors)
    full = in_full_precision(stored, source_of(stored.root).hub_id)
    plain = as_trained(full, adapters, asked.base_as) if asked.base_as else full
    exact = untie or asked.precision is Precision.PEFT
    with judge.reading(stored):
        view = read_base(plain, adapters, asked.task, exact=exact, text_only=text_only)
    match = view.in_memory()
    report = on_disk if match is None else joined([on_disk, judge.in_memory(view.adapters, match)])
    merge, per_expert = _merge(view, factors, asked)
    steps = view.on_disk((*base_steps(merge), *added_steps(merge), *untying_steps(merge)), per_expert)
    is_quantised = full is not stored and asked.base_as is None
    if is_quantised:
        from lora_tool.plan.merge.storage import QuantisedBase  # for quantised bases alone
        from lora_tool.plan.merge.written_of_quantised import written_of_quantised

        quantised = QuantisedBase(stored=stored, plain=plain, parameter_of=view.parameter_of)
        written = written_of_quantised(view, merge, steps, quantised, asked)
    else:
        notes = (rounded_note(plain, asked.base_as),) if asked.base_as else trained_on_quantised(adapters, stored)
        left = (*dropped_from_base(merge), *view.leftovers)
        written = Written(merge=merge, steps=steps, leftovers=left, notes=tuple(notes))
    leftovers = (*written.leftovers, *adapter_leftovers(merge))
    require_all_consumed(merge, written.steps, leftovers)
    _require_same_everywhere(written.steps, asked.precision)
    plan = build_plan(
        written.merge,
        written.steps,
        leftovers,
        stored,
        precision=asked.precision,
        max_shard_bytes=max_shard_bytes,
        metadata=written.metadata,
        options={**asked.recorded(), **written.options},
    )
    return replace(
        plan,
        findings=report.findings,
        notes=(*plan.notes, *written.notes),
        warnings=(*plan.warnings, *written.warnings),
    )


def _chosen(kind: type[Word], asked: Word | str | None) -> Word | None:
    return None if asked is None else kind(asked)


def _merge(view: BaseView, weights: Sequence[float], asked: Asked) -> tuple[MergeContext, PerExpert]:
    """Return everything that the steps are made from, and the deltas on parts of fused parameters.

    Raises `UnsupportedAdapter` for what cannot be merged exactly.
    """
    adapted, all_modules = _adapted(view, weights, asked)
    if asked.precision is Precision.PEFT:
        require_saved_in_first(adapted)
    modules, per_expert = view.parts_of_fused(all_modules, asked.precision)
    merge = merge_context(view, adapted, modules, num_labels=asked.num_labels, dtype=asked.dtype, untie=asked.untie)
    require_no_lora_on_tied_ends(merge)
    return merge, per_expert


def _adapted(view: BaseView, weights: Sequence[float], asked: Asked) -> tuple[tuple[Adapted, ...], AdapterModules]:
    """Return each adapter with what it does, without its ΔW if that was asked for, and what all of them do together."""
    ends = end_names(view.base, view.arch)
    apart = []
    for adapter, weight in zip(view.adapters, weights, strict=True):
        own = view_of(adapter)
        modules = adapter_modules(
            own,
            facts=view.facts,
            expert_layout=asked.expert_layout,
            ends=ends,
            base=view.base.tensors,
            weight=weight,
        )
        apart.append(Adapted(view=own, modules=modules, weight=weight))
    together = join(apart)
    return join([without_delta(each) for each in together[0]]) if asked.head_alone else together


def _require_same_everywhere(steps: Sequence[Step], precision: Precision) -> None:
    """Raise `UnsupportedAdapter` where torch computes a part of what is to be the same on every machine."""
    inits = [step.op.taken_out for step in steps if step.op.taken_out]
    if inits and precision is Precision.FLOAT64:
        raise UnsupportedAdapter(
            f"`init_lora_weights` {inits[0]} is recomputed with torch, whose bits depend on the machine, "
            'but `precision="float64"` promises the same bytes on every machine',
            hint='`precision="peft"` gives the bits of PEFT on this machine',
        )
