"""Planning a merge: base + adapter → every tensor and file of the merged model, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_tool.adapter.support import OTHER_BASE, WITH_PEFT, require_mergeable
from lora_tool.architectures import Architecture
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig, ExpertLayout
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.plan.adapter.combine import Adapted, join, require_saved_in_first
from lora_tool.plan.adapter.modules import AdapterModules, adapter_modules
from lora_tool.plan.base.task import CLASSIFIERS, Task, decide_task, other_task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import Step
from lora_tool.plan.merge.build_plan import LOCAL, HubOrigin, assembled
from lora_tool.plan.merge.direct_base import (
    DirectBase,
    direct_base,
    must_ask,
    plainly_stored,
    require_full_precision,
    require_transformers,
)
from lora_tool.plan.merge.head import Head, count_labels, find_head
from lora_tool.plan.merge.ledger import adapter_leftovers, dropped_from_base, require_all_consumed
from lora_tool.plan.merge.steps import MergeContext, added_steps, base_steps
from lora_tool.plan.merge.tied_embeddings import (
    end_names,
    other_vocabulary,
    tied_copies,
    tied_ends,
    tied_under_one_name,
    trained_apart,
    with_tied_names,
    with_vocabulary,
    without_tied_repeats,
)
from lora_tool.plan.merge.untie import require_no_lora_on_tied_ends, untying_steps
from lora_tool.report.findings import Severity
from lora_tool.rules.merging import judge_merge
from lora_tool.sources import Reference, opened_adapter, opened_model, several
from lora_tool.tensors import DType, float_type

if TYPE_CHECKING:
    from lora_tool.plan.merge.converted_base import ConvertedBase


def plan_merge(
    base: Reference,
    adapter: Reference | Sequence[Reference],
    *,
    task: Task | str = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | str | None = None,
    precision: Precision | str = Precision.FLOAT32,
    untie: bool = False,
    max_shard_bytes: int | None = None,
    expert_layout: ExpertLayout | str | None = None,
    base_origin: HubOrigin = LOCAL,
    adapter_origin: HubOrigin | Sequence[HubOrigin] = LOCAL,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: Severity | str = Severity.ERROR,
) -> Plan:
    """Return the plan that merges `adapter`, or several of them, into `base`. The rules judge the adapters first, as
    `validate` does. Reads headers, the adapters' values, and a few KB of samples; writes nothing.

    Both may be paths, Hub ids or opened checkpoints. The deltas of several adapters are summed, in their order. `task` "reward" means one label. `dtype` None keeps
    every tensor's own; `num_labels` are the labels that a head must have, and `precision` is the arithmetic. `untie` gives tied embeddings two matrices, each as it was trained. `max_shard_bytes` None keeps
    the base's grouping into files. `expert_layout` says how a fused lora_B of experts is packed, where its config does
    not. Every tensor of all inputs is in the plan, as a step or as a leftover with its reason. `base_origin` and
    `adapter_origin`, one for each adapter where there are several, are what the manifest says of the Hub. `select` and `ignore` are codes of rules, or their beginnings; an ignored
    rule refuses all the same where nothing can be computed otherwise. Findings below `fail_on` are in the plan. Raises
    `FindingsFound` for the others, `UnsupportedAdapter` for a feature that cannot be merged exactly, `IncompatibleBase`
    where transformers finds no place for a tensor.
    """
    base = opened_model(base)
    adapters = tuple(map(opened_adapter, several(adapter)))
    dtype = None if dtype is None else float_type(dtype)
    expert_layout = None if expert_layout is None else ExpertLayout(expert_layout)
    report = judge_merge(
        adapters,
        base,
        task=Task(task).expected,
        num_labels=num_labels,
        select=select,
        ignore=ignore,
        fail_on=Severity(fail_on),
    )
    for each in adapters:
        require_mergeable(config_of_adapter(each))
    require_full_precision(base)
    found = named(base, adapters, Task(task), exact=untie or Precision(precision) is Precision.PEFT)
    arch, decided = found.arch, found.task
    adapted, modules = join([_adapted(each, found, expert_layout) for each in found.adapters])
    if Precision(precision) is Precision.PEFT:
        require_saved_in_first(adapted)
    wanted = 1 if decided is Task.REWARD and num_labels is None else num_labels
    head = None
    if decided is Task.CAUSAL_LM and arch.causal_lm is None:
        raise UnsupportedAdapter(
            f"{base.root}: {arch.model_type} has no causal LM that is stored as it is in memory", hint=WITH_PEFT
        )
    if decided in CLASSIFIERS:
        head = find_head(adapters[0], modules, found.base, arch, num_labels=wanted)
    modules, per_expert = found.parts_of_fused(modules, Precision(precision))
    labels = head.num_labels if head else None
    if head is None and found.facts is not None:
        labels = count_labels(found.facts, modules.saved, found.base, asked=num_labels)
    merge = _merge(found, adapted, modules, head=head, labels=labels, dtype=dtype, untie=untie)
    prints = require_not_merged_before(base, adapters)
    require_no_lora_on_tied_ends(merge)
    steps = found.on_disk((*base_steps(merge), *added_steps(merge), *untying_steps(merge)), per_expert)
    leftovers = (*dropped_from_base(merge), *found.leftovers, *adapter_leftovers(merge))
    require_all_consumed(merge, steps, leftovers)
    _require_same_everywhere(steps, Precision(precision))
    plan = assembled(
        merge,
        steps,
        leftovers,
        base=base,
        adapters=adapters,
        task=decided,
        precision=Precision(precision),
        max_shard_bytes=max_shard_bytes,
        base_origin=base_origin,
        adapter_origin=adapter_origin,
        prints=prints,
        options={"untie": untie, "expert_layout": expert_layout.value if expert_layout else None},
    )
    return replace(plan, findings=report.findings)


def _require_same_everywhere(steps: Sequence[Step], precision: Precision) -> None:
    inits = [step.op.taken_out for step in steps if step.op.taken_out]
    if inits and precision is Precision.FLOAT64:
        raise UnsupportedAdapter(
            f"`init_lora_weights` {inits[0]} is recomputed with torch, whose bits depend on the machine: "
            "--precision float64 promises the same bytes everywhere",
            hint="--precision peft gives PEFT's own bits on this machine",
        )


def named(
    base: ModelDir, adapters: Sequence[AdapterDir], task: Task, *, exact: bool = False
) -> DirectBase | ConvertedBase:
    """Return the inputs in the names of memory: as they are, or by transformers' mapping, for which it is imported.

    `exact` asks transformers wherever it is installed: only it knows every name that a model has.
    """
    other = other_task(task, adapters, base)
    if other is not None:
        require_transformers()
        from lora_tool.plan.merge.converted_base import mapped  # noqa: PLC0415 - imports torch and transformers
        from lora_tool.plan.merge.model_class import class_for_task  # noqa: PLC0415

        return mapped(class_for_task(base, adapters, other), adapters, other)
    arch = plainly_stored(base, adapters, task)
    decided = _decide_task(task, adapters, base, arch) if arch is not None else None
    if arch is not None and decided is not None and not must_ask(base, adapters, arch, decided, exact=exact):
        return direct_base(base, adapters, arch, decided)
    from lora_tool.plan.merge.converted_base import mapped  # noqa: PLC0415 - imports torch and transformers
    from lora_tool.plan.merge.model_class import class_candidates  # noqa: PLC0415

    try:
        readings = class_candidates(base, adapters, task)
    except (IncompatibleBase, UnsupportedAdapter):
        if arch is None or decided is None:
            raise
        return direct_base(base, adapters, arch, decided)  # no transformers loads it, so it has nothing to say
    decided = _decide_task(task, adapters, base, readings.architecture)
    return mapped(readings, adapters, decided, plain=arch is not None)


def _merge(
    named: DirectBase | ConvertedBase,
    adapted: tuple[Adapted, ...],
    modules: AdapterModules,
    *,
    head: Head | None,
    labels: int | None,
    dtype: DType | None,
    untie: bool,
) -> MergeContext:
    """Return everything that the steps are made from, with the ends of the model settled."""
    base, arch, facts = named.base, named.arch, named.facts
    copies = tied_copies(base, arch, facts) if head is None or facts is not None else {}
    ends = tied_ends(base, arch, facts, copies) if head is None else None
    if facts is not None:
        adapted, modules = with_tied_names(facts, adapted, modules)
    freed: Mapping[str, str] = {}
    says_tied = base.config is not None and base.config.tie_word_embeddings is True
    # transformers leaves two ends that differ on disk apart, whatever the config says, and PEFT then corrects it
    untied = head is None and says_tied and ends is None and bool(arch.causal_only)
    untied = untied and not tied_under_one_name(base, facts)
    if ends is not None:
        apart = trained_apart(ends, adapted)
        untied = untie or apart
        if untied:
            freed = {name: of for name, of in named.freed.items() if name != ends.output and of in base.tensors}
        if not untied:
            adapted, modules = without_tied_repeats(ends, adapted, modules)
    freed = {name: of for name, of in freed.items() if name not in modules.saved}
    vocabulary = other_vocabulary(base, arch, modules)
    if vocabulary is not None:
        dropped = frozenset(copies) | (frozenset(arch.causal_only) if head is not None else frozenset())
        base = with_vocabulary(base, vocabulary, modules, dropped)
    return MergeContext(
        base=base,
        adapted=adapted,
        arch=arch,
        modules=modules,
        head=head,
        labels=labels,
        dtype=dtype,
        tied_copies=copies,
        facts=facts,
        fresh=named.fresh,
        ends=ends,
        untied=untied,
        freed=freed if untie else {},
        lost={} if untie else freed,
        vocabulary=vocabulary,
    )


def _adapted(adapter: AdapterDir, named: DirectBase | ConvertedBase, expert_layout: ExpertLayout | None) -> Adapted:
    config = config_of_adapter(adapter)
    ends = end_names(named.base, named.arch)
    modules = adapter_modules(
        adapter, config, facts=named.facts, expert_layout=expert_layout, ends=ends, base=named.base.tensors
    )
    if not modules.lora and not modules.parameters and not modules.saved:
        raise UnsupportedAdapter(
            f"{adapter.root}: the adapter holds no LoRA tensors: there is nothing to merge",
            hint=f"lora-tool validate {adapter.root}",
        )
    return Adapted(adapter=adapter, config=config, modules=modules)


def _decide_task(task: Task, adapters: Sequence[AdapterDir], base: ModelDir, arch: Architecture) -> Task:
    """Return what all adapters say; one that says nothing follows the others. Raises `UnsupportedAdapter`."""
    configs = [config_of_adapter(adapter) for adapter in adapters]
    votes = [decide_task(task, each, config, base, arch) for each, config in zip(adapters, configs, strict=True)]
    silent = [vote is Task.CAUSAL_LM and not config.task_type for vote, config in zip(votes, configs, strict=True)]
    heard = {vote for vote, says_nothing in zip(votes, silent, strict=True) if not says_nothing} or set(votes)
    if len(heard) > 1:
        tasks = ", ".join(f"{each.root}: {vote}" for each, vote in zip(adapters, votes, strict=True))
        raise UnsupportedAdapter(f"the adapters are for different tasks ({tasks}), so one model cannot hold them")
    return heard.pop()


def config_of_adapter(adapter: AdapterDir) -> AdapterConfig:
    """Return the config, which a whole adapter has."""
    if adapter.config is None:
        raise AssertionError("a whole adapter has a config")
    return adapter.config


def require_not_merged_before(base: ModelDir, adapters: Sequence[AdapterDir]) -> list[str]:
    """Return the adapters' fingerprints. Raises `IncompatibleBase` where one is in the base, or given twice."""
    prints = [fingerprint(each.weights) for each in adapters]
    for at, (adapter, print_) in enumerate(zip(adapters, prints, strict=True)):
        if print_ in prints[:at]:
            raise IncompatibleBase(
                f"{adapter.root} holds the same weights as {adapters[prints.index(print_)].root}: "
                "they would be merged twice",
                hint="give each adapter once",
            )
        if base.manifest is not None and print_ in base.manifest.merged_adapters:
            raise IncompatibleBase(
                f"{base.root} is a merged model that holds this very adapter already ({adapter.root}): "
                "merging again would apply it twice",
                hint=OTHER_BASE,
            )
    return prints
