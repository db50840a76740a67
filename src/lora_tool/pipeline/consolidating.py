"""Putting rank files together, the whole way: planned, checked while they are read, written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lora_tool.checkpoint import ShardedDir, open_sharded
from lora_tool.choices import number_of_bytes
from lora_tool.cluster.spread import EngineName, spread_over
from lora_tool.display import from_here
from lora_tool.pipeline.writing import Written, write
from lora_tool.plan.consolidate.plan_consolidate import What, plan_consolidate
from lora_tool.tensors import DType


def default_output(opened: ShardedDir, what: str) -> Path:
    """Return where `what` ("adapter", "model" or "state") of the checkpoint goes if nobody says: a sibling."""
    folder = opened.root.resolve()
    return from_here(folder.parent / f"{folder.name}-{what}")


def consolidate(
    checkpoint: str | os.PathLike[str] | ShardedDir,
    *,
    out: str | os.PathLike[str] | None = None,
    what: What | str = What.AUTO,
    tag: str | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    lora_alpha: float | None = None,
    dtype: DType | str | None = None,
    max_shard_size: int | str | None = None,
    ignore: Iterable[str] = (),
    verify: bool = False,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    engine: EngineName | str = EngineName.LOCAL,
    address: str | None = None,
    workers: int | None = None,
) -> Written:
    """Reassemble the rank files of `checkpoint`, a path or an opened checkpoint, in the folder `out`; return the
    result.

    `out` None is a sibling of the checkpoint. `what`, `tag`, `adapter_config`, `lora_alpha`, `dtype` and `ignore` are
    those of `plan_consolidate`; `max_shard_size` is the maximum size of a weights file, 5 GB by default. Every byte
    that is used is checked while it is read. With `verify` samples are read back; `jobs`, `overwrite` and `resume` are
    those of `execute`; `engine` "ray" has a running cluster do the work: `address` is HOST:PORT, `workers` how many
    tasks it does at a time. Raises `FindingsFound`, `CheckpointError`, `PlanError` and `ExecutionError`, and
    `WrongValue` for an argument.
    """
    spread = spread_over(engine, address, workers)
    opened = checkpoint if isinstance(checkpoint, ShardedDir) else open_sharded(checkpoint)
    plan = plan_consolidate(
        opened,
        what=what,
        tag=tag,
        adapter_config=adapter_config,
        lora_alpha=lora_alpha,
        dtype=dtype,
        max_shard_bytes=None if max_shard_size is None else number_of_bytes(max_shard_size),
        ignore=ignore,
    )
    target = Path(out) if out else default_output(opened, str(plan.manifest["what"]))
    return write(plan, target, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume, spread=spread)
