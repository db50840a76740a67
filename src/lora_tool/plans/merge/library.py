"""`plan_merge` as the library has it: it opens its inputs, and its options are keywords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_tool.adapters.weighted import all_weighted
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model
from lora_tool.core.options import called_with
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge import plan_merge as opened
from lora_tool.plans.merge.options import PlanOptions


@called_with(PlanOptions)
def plan_merge(base: Reference, adapters: Reference | Sequence[Reference], options: PlanOptions) -> Plan:
    """Return the plan that merges `adapters`, one or the sum of several, into `base`.

    The rules judge the adapters first, as `validate` does. Reads headers, the adapters' values, and a few KB of
    samples; writes nothing. Every tensor of all inputs is in the plan, as a step or as a leftover with its reason. The
    manifest records the Hub id and commit of inputs in the Hub's cache.

    All inputs may be paths, Hub ids or opened checkpoints. An ignored error still refuses the merge if nothing can be
    computed despite it. Findings below `fail_on` are in the plan. Raises `FindingsFound` for the other findings,
    `UnsupportedAdapter` for a feature that cannot be merged exactly, `IncompatibleBase` where transformers has no place
    for a tensor.
    """
    names, weights = all_weighted(adapters, options.weights)
    return opened.plan_merge(opened_model(base), tuple(map(opened_adapter, names)), replace(options, weights=weights))
