"""`plan_consolidate` as the library has it: it opens the checkpoint, and its options are keywords."""

from __future__ import annotations

import os

from lora_tool.checkpoints import ShardedDir, open_sharded
from lora_tool.core.options import called_with
from lora_tool.plans.consolidate import plan_consolidate as opened
from lora_tool.plans.consolidate.plan_consolidate import StateOptions
from lora_tool.plans.core.plan import Plan


@called_with(StateOptions)
def plan_consolidate(checkpoint: ShardedDir | str | os.PathLike[str], options: StateOptions) -> Plan:
    """Return the plan that reassembles the tensors of `checkpoint`, a path or an opened one, from headers only.

    An adapter's config that is nowhere is rebuilt: rank and targets from the tensors, alpha from the run's files. Every
    tensor keeps its dtype by default: float32 for trained ones, the model's for frozen ones. Ignored errors stay among
    the plan's findings. The execution checks every byte that it uses (CRC32, NaN, all-zero parts, rounding), unless
    `ignore` covers all of these checks. Raises `FindingsFound` for errors, as the execution does for errors in the
    values; `UnknownRule`; `UnsupportedCheckpoint` and `CheckpointError` for a checkpoint that cannot be consolidated.
    """
    return opened.plan_consolidate(
        checkpoint if isinstance(checkpoint, ShardedDir) else open_sharded(checkpoint), options
    )
