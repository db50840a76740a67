"""Planning a merge: base + adapters → every tensor and file of the merged model, from only headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.options import recorded
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.draft import Draft
from lora_tool.plans.merge.finish import plan_of
from lora_tool.plans.merge.inputs import MergeInputs, inputs_of, require_exact
from lora_tool.plans.merge.judged import judge_of, judged_in_memory
from lora_tool.plans.merge.model.reading import read_model
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.plans.merge.passes.base_as import rounded_base
from lora_tool.plans.merge.passes.deltas import require_same_everywhere, with_deltas
from lora_tool.plans.merge.passes.ends import with_ends
from lora_tool.plans.merge.passes.fused import on_disk, on_layers
from lora_tool.plans.merge.passes.head import with_head
from lora_tool.plans.merge.passes.ledger import accounted_for
from lora_tool.plans.merge.passes.shards import in_files
from lora_tool.plans.merge.passes.side_files import with_side_files
from lora_tool.plans.merge.passes.steps import with_steps
from lora_tool.plans.merge.passes.store import dequantised_base, stored_again
from lora_tool.plans.merge.passes.text_only import text_model
from lora_tool.plans.merge.passes.untie import require_own_ends, with_untied

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
    inputs, judge = inputs_of(base, adapters, options.weights), judge_of(options)
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
