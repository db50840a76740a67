"""Reassembling rank files: opened, judged, planned, and written, every byte checked while it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoints import ShardedDir, open_sharded
from lora_tool.core.choices import above_zero, codes, flag, number_of_bytes
from lora_tool.core.display import from_here
from lora_tool.core.options import Options, option
from lora_tool.core.tensors import DType
from lora_tool.plans.consolidate.plan_consolidate import What, plan_consolidate
from lora_tool.plans.core.options import FLOAT_DTYPE, OUTPUT, SHARD_SIZE, ResumableOptions, SpreadOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, require_apart, require_output, require_part


@dataclass(frozen=True, kw_only=True)
class RankFileOptions(Options):
    """What rank files do not say themselves."""

    tag: str | None = option(
        None,
        "Saved step to use, such as global_step500, or which module, if several were saved together, such as critic.  "
        "[default: the step in the file `latest`]",
    )
    adapter_config: str | os.PathLike[str] | None = option(
        None,
        "adapter_config.json, or the file with the run's arguments.  [default: beside the rank files]",
        metavar="PATH",
        existing=True,
    )
    lora_alpha: float | None = option(
        None,
        "lora_alpha of an adapter that has no adapter_config.json, if no file of the run records it.",
        parse=above_zero,
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class ConsolidateOptions(SpreadOptions, ResumableOptions, RankFileOptions):
    """The options of a consolidation."""

    out: str | os.PathLike[str] | None = option(
        None, "Folder to write.  [default: CKPT-adapter, CKPT-model or CKPT-state]", **OUTPUT
    )
    what: What | str = option(
        What.AUTO,
        "auto: an adapter if there are LoRA tensors, else a model; state: all tensors under their saved names.",
        parse=What,
    )
    dtype: DType | str | None = option(None, "Data type of all weights.  [default: as saved]", **FLOAT_DTYPE)
    ignore: Iterable[str] = option((), "Continue despite these findings: LT404,LT41.", parse=codes)
    max_shard_size: int | str | None = option(None, "Maximum size of a weights file.  [default: 5GB]", **SHARD_SIZE)
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
    opened = checkpoint if isinstance(checkpoint, ShardedDir) else open_sharded(checkpoint)
    if options.out is not None or options.what is not What.AUTO:
        require_apart(_output(opened, options, str(options.what)), options, opened.root)  # before hours of reading
    plan = plan_consolidate(
        opened,
        what=options.what,
        tag=options.tag,
        adapter_config=options.adapter_config,
        lora_alpha=options.lora_alpha,
        dtype=options.dtype,
        max_shard_bytes=None if options.max_shard_size is None else number_of_bytes(options.max_shard_size),
        ignore=options.ignore,
    )
    out = _output(opened, options, str(plan.manifest["what"]))
    require_apart(out, options, opened.root)
    return carry_out(plan, out, options, caller, spread)


def _output(opened: ShardedDir, options: ConsolidateOptions, what: str) -> Path:
    """Return the folder to write; by default a sibling that is called after `what` it holds."""
    if options.out is not None:
        return Path(options.out)
    folder = opened.root.resolve()
    return from_here(folder.parent / f"{folder.name}-{what}")
