"""Planning a merge: base + adapter → every tensor and file of the merged model, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from lora_tool.adapter.support import require_mergeable, require_weightable
from lora_tool.adapter.view import view_of
from lora_tool.architectures.ends import end_names
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.checkpoint.quantised import in_full_precision
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.plan.adapter.combine import Adapted, join, require_saved_in_first, without_delta
from lora_tool.plan.adapter.modules import adapter_modules
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.quantise import Quantise
from lora_tool.plan.core.requantise import Requantise
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.plan.merge.build_plan import build_plan
from lora_tool.plan.merge.context import MergeContext, merge_context
from lora_tool.plan.merge.ledger import adapter_leftovers, dropped_from_base, require_all_consumed
from lora_tool.plan.merge.read_base import read_base
from lora_tool.plan.merge.steps import added_steps, base_steps, kept_step
from lora_tool.plan.merge.storages import Storage
from lora_tool.plan.merge.trained_as import as_trained, rounded_note, trained_on_quantised
from lora_tool.plan.merge.untie import require_no_lora_on_tied_ends, untying_steps
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
    original: Reference | None = None,
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
    a tenth of ΔW. `original` is the 16-bit model that a base of bitsandbytes was made from: "as-base" then quantises W
    + ΔW of that afresh. `base_as` rounds the linear layers of a 16-bit base to four bits and back, as QLoRA loaded it.
    `max_shard_bytes` None keeps the base's grouping into files. `expert_layout` says how a fused lora_B of experts is
    packed, if its config does not.

    `select` and `ignore` are codes of rules, or their beginnings. An ignored error still refuses the merge if nothing
    can be computed despite it. Findings below `fail_on` are in the plan. Raises `FindingsFound` for the other findings,
    `UnsupportedAdapter` for a feature that cannot be merged exactly, `IncompatibleBase` where transformers has no place
    for a tensor.
    """
    base = opened_model(base)
    names, factors = all_weighted(adapter, weights)
    adapters = tuple(map(opened_adapter, names))
    task, precision = Task(task), Precision(precision)
    store, base_as = _chosen(Storage, store), _chosen(TrainedAs, base_as)
    dtype = None if dtype is None else float_type(dtype)
    expert_layout = _chosen(ExpertLayout, expert_layout)
    judge = MergeJudge(
        task=task.expected,
        num_labels=num_labels,
        untie=untie,
        select=tuple(select),
        ignore=tuple(ignore),
        fail_on=Severity(fail_on),
    )
    report = judge.as_stored(adapters, base)
    for each in adapters:
        require_mergeable(view_of(each))
    require_weightable(adapters, factors)
    plain = in_full_precision(base, source_of(base.root).hub_id)
    plain = as_trained(plain, adapters, base_as) if base_as else plain
    with judge.reading(base):
        view = read_base(plain, adapters, task, exact=untie or precision is Precision.PEFT, text_only=text_only)
    if (match := view.in_memory()) is not None:
        report = joined([report, judge.in_memory(view.adapters, match)])
    adapted, modules = join(
        [_adapted(each, view, expert_layout, weight) for each, weight in zip(view.adapters, factors, strict=True)]
    )
    if head_alone:
        adapted, modules = join([without_delta(each) for each in adapted])
    if precision is Precision.PEFT:
        require_saved_in_first(adapted)
    modules, per_expert = view.parts_of_fused(modules, precision)
    merge = merge_context(view, adapted, modules, num_labels=num_labels, dtype=dtype, untie=untie)
    require_no_lora_on_tied_ends(merge)
    steps = view.on_disk((*base_steps(merge), *added_steps(merge), *untying_steps(merge)), per_expert)
    dropped, left = tuple(dropped_from_base(merge)), view.leftovers
    options: dict[str, object] = {"untie": untie, "expert_layout": expert_layout.value if expert_layout else None}
    options |= {name: True for name, is_asked in (("text_only", text_only), ("head_alone", head_alone)) if is_asked}
    options |= {"base_as": base_as.value} if base_as else {}
    rounded = (rounded_note(plain, base_as),) if base_as else ()
    notes = tuple(trained_on_quantised(adapters, base)) if plain is base else rounded
    whole = _original(original, base, is_quantised=plain is not base and base_as is None)
    if plain is not base and base_as is None:
        from lora_tool.plan.merge.storage import QuantisedBase  # noqa: PLC0415 - for quantised bases alone

        steps, left = (steps, left) if text_only else _with_what_no_class_has(steps, view, merge, plain)
        without = {item.name for item in (*dropped, *(left if merge.head is not None else ()))}
        cast = dtype not in (None, plain.dtype) or text_only
        stored = QuantisedBase(stored=base, plain=plain, original=whole).settle(
            steps, store, without, cast=cast, allow_loss=allow_loss
        )
        _require_numbers(stored.steps, precision)
        steps, notes = stored.steps, (stored.note,)
        # what the class computes stays with the rest
        left = left if stored.storage is Storage.ALL_16BIT or merge.head is not None else ()
        left, options = (*left, *stored.leftovers), {**options, "store": stored.storage.value}
        options |= {"requantised": stored.kept} if stored.kept else {}
        merge = replace(merge, base=replace(merge.base, config=stored.config))
    leftovers = (*dropped, *left, *adapter_leftovers(merge))
    require_all_consumed(merge, steps, leftovers)
    _require_same_everywhere(steps, precision)
    plan = build_plan(
        merge,
        steps,
        leftovers,
        base,
        original=whole,
        precision=precision,
        max_shard_bytes=max_shard_bytes,
        options=options,
    )
    return replace(plan, findings=report.findings, notes=(*plan.notes, *notes))


def _require_same_everywhere(steps: Sequence[Step], precision: Precision) -> None:
    inits = [step.op.taken_out for step in steps if step.op.taken_out]
    if inits and precision is Precision.FLOAT64:
        raise UnsupportedAdapter(
            f"`init_lora_weights` {inits[0]} is recomputed with torch, whose bits depend on the machine, "
            'but `precision="float64"` promises the same bytes on every machine',
            hint='`precision="peft"` gives the bits of PEFT on this machine',
        )


def _with_what_no_class_has(
    steps: tuple[Step, ...], view: BaseView, merge: MergeContext, plain: ModelDir
) -> tuple[tuple[Step, ...], tuple[InputRecord, ...]]:
    """Return the steps and one for each weight of a quantised base that its class has no place for, in the base's order,
    and what is left out still: of a classifier, all of these.

    Servers use such weights: the layers that predict further tokens.
    """
    names = view.of_no_class
    if not names or merge.head is not None:
        return steps, view.leftovers
    beside = (kept_step(merge, tensor) for name, tensor in plain.tensors.items() if name in names)
    places = {name: at for at, name in enumerate(plain.tensors)}
    ordered = sorted((*steps, *beside), key=lambda step: places.get(step.out.name, len(places)))
    return tuple(ordered), tuple(item for item in view.leftovers if item.name not in names)


def _chosen(kind: type[Word], asked: Word | str | None) -> Word | None:
    return None if asked is None else kind(asked)


def _original(given: Reference | None, base: ModelDir, *, is_quantised: bool) -> ModelDir | None:
    """Return the model that a quantised base was made from, opened. Raises `UnsupportedAdapter` for a plain base."""
    if given is None:
        return None
    if not is_quantised:
        raise UnsupportedAdapter(
            f"{base.root} is not quantised, so that it has no original", hint="leave out `original`"
        )
    return opened_model(given)


def _require_numbers(steps: Sequence[Step], precision: Precision) -> None:
    """Raise `UnsupportedAdapter` where quantised weights are to be written with PEFT's arithmetic."""
    if precision is Precision.PEFT and any(isinstance(step.op, Requantise | Quantise) for step in steps):
        raise UnsupportedAdapter(
            '`store="as-base"`: PEFT can round merged weights only to formats of bitsandbytes, and damages them',
            hint='`precision="float32"` writes them, and `store="all-16bit"` merges as PEFT does',
        )


def _adapted(adapter: AdapterDir, view: BaseView, expert_layout: ExpertLayout | None, weight: float) -> Adapted:
    own, ends = view_of(adapter), end_names(view.base, view.arch)
    modules = adapter_modules(
        own, facts=view.facts, expert_layout=expert_layout, ends=ends, base=view.base.tensors, weight=weight
    )
    return Adapted(view=own, modules=modules, weight=weight)
