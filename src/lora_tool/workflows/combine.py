"""Combining adapters: found, judged, planned, written, and read back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from lora_tool.adapters.weighted import all_weighted, place_of
from lora_tool.checkpoints.sources import Reference, opened_adapter
from lora_tool.core.choices import flag
from lora_tool.core.errors import WrongValue
from lora_tool.core.hub_names import ANYWHERE
from lora_tool.core.options import option
from lora_tool.plans.core.options import OUTPUT, RankOptions, ResumableOptions
from lora_tool.rules.options import IgnoreOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, hashing, require_apart, require_output


@dataclass(frozen=True, kw_only=True)
class CombineOptions(ResumableOptions, IgnoreOptions, RankOptions):
    """The options of a combination of adapters."""

    out: str | os.PathLike[str] = option(MISSING, "Folder to write.", **OUTPUT)
    weights: Sequence[float] | None = option(
        None, "Weight of each adapter, by default that in its name (A=0.7), or 1.", library_only=True
    )
    head_of: Reference | None = option(
        None, "Adapter to take the head and other whole tensors from if the adapters' differ.", metavar="ADAPTER"
    )
    average: bool = option(
        default=False,
        text="Write the weighted mean: the weights are divided by their sum, and heads are averaged, too.",
        parse=flag,
    )
    stack: bool = option(
        default=False,
        text="Write the rows of all heads as one head, for adapters with the same ΔW.",
        parse=flag,
    )
    base: Reference | None = option(
        None, f"Base model of all adapters: {ANYWHERE}.  [default: the one in their configs]", metavar="MODEL"
    )


def combine(adapters: Reference | Sequence[Reference], options: CombineOptions, caller: Caller = LIBRARY) -> Done:
    """Write the adapter whose ΔW is the weighted sum of the ΔW of `adapters`.

    Without `rank` and `keep` the sum is exact, and its ranks add up. Raises `FindingsFound`, `CheckpointError`,
    `PlanError`, `ExecutionError`, `VerificationFailed`, `WrongValue`.
    """
    names, weights = all_weighted(adapters, options.weights)
    out = Path(options.out)
    require_output(out, options, *names)
    caller.spare_memory()
    opened = tuple(map(opened_adapter, names))
    require_apart(out, options, *(each.root for each in opened))
    if options.stack:
        _require_alone(options, weights)
        with hashing(caller, *opened):
            from lora_tool.plans.algebra.plan_stack import plan_stack  # as below

            return carry_out(plan_stack(opened, base=options.base, ignore=options.ignore), out, options, caller)
    with hashing(caller, *opened):
        from lora_tool.plans.algebra.plan_combine import plan_combine  # slow to import, and the hashes have begun

        plan = plan_combine(
            opened,
            weights=weights,
            rank=options.rank,
            keep=options.keep,
            average=options.average,
            head_of=None if options.head_of is None else opened[place_of(options.head_of, names)],
            base=options.base,
            dtype=options.dtype,
            ignore=options.ignore,
        )
        return carry_out(plan, out, options, caller)


def _require_alone(options: CombineOptions, weights: Sequence[float]) -> None:
    """Raise `WrongValue` for options that change ΔW or the head, which a stack of heads leaves as they are."""
    given = ("rank", "keep", "dtype", "average", "head_of")
    wrong = [name for name in given if getattr(options, name)] + ["weights"] * any(weight != 1 for weight in weights)
    if wrong:
        raise WrongValue(f"stack: ΔW and the rows of heads stay as they are, so {wrong[0]} has no meaning")
