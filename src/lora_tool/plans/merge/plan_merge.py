"""Planning a merge: base + adapters → every tensor and file of the merged model, from only headers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from lora_tool.adapters.weighted import all_weighted, averaged
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.sources import source_of
from lora_tool.core.display import counted, from_here
from lora_tool.core.options import recorded
from lora_tool.core.report.findings import Finding
from lora_tool.core.tensors import FileStamp, TensorAction
from lora_tool.formats.manifest import fingerprint
from lora_tool.plans.base.task import CLASSIFIERS, Task
from lora_tool.plans.core.manifest import adapters_in, describe_input, input_name
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord
from lora_tool.plans.merge.draft import Draft, MergeInputs, require_exact
from lora_tool.plans.merge.judged import judge_of, judged_in_memory
from lora_tool.plans.merge.model.reading import read_model
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.plans.merge.passes.base_as import rounded_base
from lora_tool.plans.merge.passes.deltas import on_layers, require_same_everywhere, with_deltas
from lora_tool.plans.merge.passes.ends import with_ends
from lora_tool.plans.merge.passes.head import with_head
from lora_tool.plans.merge.passes.side_files import in_files, with_side_files
from lora_tool.plans.merge.passes.steps import accounted_for, on_disk, with_steps
from lora_tool.plans.merge.passes.store import dequantised_base, stored_again
from lora_tool.plans.merge.passes.text_only import text_model
from lora_tool.plans.merge.passes.untied import require_own_ends, with_untied

ON_INPUTS: tuple[Callable[[MergeInputs, PlanOptions], MergeInputs], ...] = (
    require_exact,
    dequantised_base,
    rounded_base,
    text_model,
)
"""Passes on the base and the adapters as they are stored, before the names of the model's parameters are known."""
PASSES: tuple[Callable[[Draft, PlanOptions], Draft], ...] = (
    with_deltas,
    on_layers,
    with_head,
    with_ends,
    require_own_ends,
    with_steps,
    with_untied,
    on_disk,
    stored_again,
    accounted_for,
    require_same_everywhere,
    in_files,
    with_side_files,
)


def plan_merge(base: ModelDir, adapters: Sequence[AdapterDir], options: PlanOptions) -> Plan:
    """Return the plan that merges `adapters`, one or the sum of several, into `base`.

    Raises `FindingsFound` for what the rules find, `UnsupportedAdapter` for a feature that cannot be merged exactly,
    `IncompatibleBase` where transformers has no place for a tensor.
    """
    inputs, judge = inputs_of(base, adapters, options), judge_of(options)
    report = judge.as_stored(inputs.adapters, inputs.stored)
    with judge.reading(inputs.stored):
        for change in ON_INPUTS:
            inputs = change(inputs, options)
        exact = options.untie or options.precision is Precision.PEFT
        model = read_model(inputs.base, inputs.adapters, Task(options.task), exact=exact)
    report = judged_in_memory(judge, model, report)
    draft = Draft(inputs=inputs, model=model, base=model.base, notes=inputs.notes, recorded=recorded(options))
    for each in PASSES:
        draft = each(draft, options)
    return plan_of(draft, report.findings)


def inputs_of(base: ModelDir, adapters: Sequence[AdapterDir], options: PlanOptions) -> MergeInputs:
    """Return the inputs; weights None are 1 for each adapter. Raises `WrongValue` for weights that cannot be used."""
    _, weights = all_weighted(adapters, options.weights)
    factors = averaged(weights) if options.average else weights
    return MergeInputs(stored=base, base=base, adapters=tuple(adapters), weights=factors)


def plan_of(draft: Draft, findings: tuple[Finding, ...]) -> Plan:
    """Return the plan; `findings` are those of the rules about its inputs."""
    base = draft.inputs.stored
    read: dict[str, AdapterDir | ModelDir] = {"base": base}
    weights, merged, hashed = {}, [], []
    for number, part in enumerate(draft.adapted, start=1):
        read[input_name(number)] = part.adapter
        hashed += [file.path for file in part.adapter.weights.files]
        if part.weight != 1:
            weights[input_name(number)] = {"weight": part.weight}
    inputs = {}
    for name, each in read.items():
        found = fingerprint(each.weights)
        inputs[name] = describe_input(source_of(each.root), each.weights, found) | weights.get(name, {})
        if isinstance(each, AdapterDir):
            merged.append((each, found))
    earlier = base.manifest.merged_adapters if base.manifest else ()
    return Plan(
        shards=draft.shards,
        side_files=draft.side_files,
        leftovers=draft.leftovers,
        inputs=_stamps(draft, read.values()),
        precision=draft.precision,
        findings=findings,
        warnings=draft.warnings,
        notes=(
            _task_note(draft),
            *_weight_note(draft),
            *_one_delta_note(draft),
            *_left_out_notes(draft.leftovers, base),
            *draft.notes,
        ),
        # the tensors of one adapter need no telling apart
        input_names={each.root: name for name, each in read.items()} if read.keys() - {"base", "adapter"} else {},
        hashed=tuple(hashed),
        manifest={
            "operation": "merge",
            "task": (Task.SEQ_CLS if draft.model.task in CLASSIFIERS else draft.model.task).value,
            "num_labels": draft.labels,
            "dtype": draft.dtype.value if draft.dtype else "as in the base",
            **draft.recorded,
            "merged_adapters": [*earlier, *([] if draft.recorded.get("head_alone") else adapters_in(merged))],
            "inputs": inputs,
        },
    )


def _left_out_notes(leftovers: Sequence[InputRecord], base: ModelDir) -> Iterator[str]:
    """Yield a line for each reason why tensors of the base are not in the output."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for item in leftovers:
        if (
            item.action is TensorAction.DROPPED
            and item.name in base.tensors
            and item.path == base.tensors[item.name].path
        ):
            by_reason[item.reason].append(item.name)
    for reason, names in by_reason.items():
        others = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
        yield f"left out of the base: {names[0]}{others}: {reason}"


def _one_delta_note(draft: Draft) -> Iterator[str]:
    tied = draft.ends.tied
    if tied is not None and draft.ends.trained_as_one:
        output, embedding = (name.removesuffix(".weight") for name in (tied.output, tied.embedding.name))
        yield (
            f"`{output}` and `{embedding}` are one matrix and were trained with one ΔW, which the merge adds once; PEFT's merge "
            "adds it twice"
        )


def _task_note(draft: Draft) -> str:
    sources = " + ".join(
        str(part.adapter.root) if part.weight == 1 else f"{part.weight:g}·{part.adapter.root}" for part in draft.adapted
    )
    labels = "" if draft.labels is None else counted(draft.labels, "label")
    if draft.head is None:
        model = f"{draft.model.arch.causal_lm}, {labels}" if draft.labels is not None else draft.model.arch.causal_lm
        return f"merging {sources} into {from_here(draft.base.root)} as {model}"
    head = (
        "their heads averaged"
        if draft.head.name in draft.modules.means
        else f"head from {draft.head.weight.path.parent}"
    )
    return f"merging {sources} into {from_here(draft.base.root)} as {draft.model.arch.sequence_classification}, {labels}, {head}"


def _weight_note(draft: Draft) -> Iterator[str]:
    """Yield a note on the tensors that a weight does not scale."""
    for part in draft.adapted:
        whole = [name for name in (*part.modules.saved, *part.modules.tokens) if name not in draft.modules.means]
        if part.weight != 1 and whole:
            others = f" and {counted(len(whole) - 1, 'other')}" if len(whole) > 1 else ""
            yield f"the weight {part.weight:g} scales only ΔW: {whole[0]}{others} of {part.adapter.root} stay as trained"


def _stamps(draft: Draft, read: Iterable[AdapterDir | ModelDir]) -> tuple[FileStamp, ...]:
    found: dict[str, FileStamp] = {}
    for each in (draft.base, *(part.adapter for part in draft.adapted), *read):
        for stamp in each.weights.stamps:
            found[str(stamp.path)] = stamp
    for file in draft.side_files:
        if file.source is not None:
            found[str(file.source)] = FileStamp.of(file.source)
    return tuple(found.values())
