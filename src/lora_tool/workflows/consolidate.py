"""Reassembling rank files: opened, judged, planned, and written, every byte checked while it is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoints import ShardedDir, open_sharded
from lora_tool.checkpoints.sources import Wanted, beside, located, source_of
from lora_tool.core.choices import flag
from lora_tool.core.options import Options, option
from lora_tool.plans.consolidate.plan_consolidate import StateOptions, What, plan_consolidate
from lora_tool.plans.core.options import OUTPUT, ResumableOptions, SpreadOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, require_apart, require_output, require_part


@dataclass(frozen=True, kw_only=True)
class _Place(Options):
    """Where a consolidation writes."""

    out: str | os.PathLike[str] | None = option(
        None, "Folder to write.  [default: CKPT-adapter, CKPT-model or CKPT-state]", **OUTPUT
    )


# the fields of the last base come first
@dataclass(frozen=True, kw_only=True)
class ConsolidateOptions(SpreadOptions, ResumableOptions, StateOptions, _Place):
    """The options of a consolidation."""

    verify: bool = option(
        default=False,
        text="Read samples back and check them before the output gets its name.",
        parse=flag,
        off="no-verify",
    )


def consolidate(
    checkpoint: str | os.PathLike[str] | ShardedDir, options: ConsolidateOptions, caller: Caller = LIBRARY
) -> Done:
    """Reassemble the rank files of `checkpoint`, a path or an opened checkpoint, in a new folder.

    Every byte that is used is checked while it is read. Raises `FindingsFound`, `CheckpointError`, `PlanError`,
    `ExecutionError`, `WrongValue`.
    """
    spread = options.spread
    spread.require()
    require_part(caller, options, spread)
    if options.out is not None:
        require_output(Path(options.out), options, checkpoint)
    everything = Wanted.EVERYTHING
    opened = checkpoint if isinstance(checkpoint, ShardedDir) else open_sharded(located(checkpoint, everything).path)
    if options.out is not None or options.what is not What.AUTO:
        require_apart(_output(opened, options, str(options.what)), options, opened.root)  # before hours of reading
    plan = plan_consolidate(opened, options)
    out = _output(opened, options, str(plan.manifest["what"]))
    require_apart(out, options, opened.root)
    return carry_out(plan, out, options, caller, spread)


def _output(opened: ShardedDir, options: ConsolidateOptions, what: str) -> Path:
    """Return the folder to write; by default a sibling that is called after `what` it holds."""
    if options.out is not None:
        return Path(options.out)
    return beside(source_of(opened.root), what)
