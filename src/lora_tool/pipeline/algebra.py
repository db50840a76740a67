"""New adapters from adapters, the whole way: judged, planned, written, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lora_tool.pipeline.writing import Written, write
from lora_tool.plan.algebra.plan_combine import plan_combine, plan_resize
from lora_tool.sources import Reference
from lora_tool.tensors import DType


def combine(
    adapters: Reference | Sequence[Reference],
    *,
    out: str | os.PathLike[str],
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    keep: float | None = None,
    head_of: Reference | None = None,
    base: Reference | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Written:
    """Write the adapter whose ΔW is the weighted sum of that of `adapters` as `out`, and return what was done.

    `weights`, `rank`, `keep`, `head_of`, `base`, `dtype` and `ignore` are those of `plan_combine`. With `verify` samples
    are read back before the folder gets its name; `jobs`, `overwrite` and `resume` are those of `execute`. Raises
    `FindingsFound`, `CheckpointError`, `PlanError`, `ExecutionError`, `VerificationFailed`, `WrongValue`.
    """
    plan = plan_combine(
        adapters, weights=weights, rank=rank, keep=keep, head_of=head_of, base=base, dtype=dtype, ignore=ignore
    )
    return write(plan, out, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume)


def resize(
    adapter: Reference,
    *,
    out: str | os.PathLike[str],
    rank: int | None = None,
    keep: float | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Written:
    """Write `adapter` with lower ranks as `out`, the nearest that there is, and return what was done.

    `rank`, `keep`, `dtype` and `ignore` are those of `plan_resize`. With `verify` samples are read back before the
    folder gets its name; `jobs`, `overwrite` and `resume` are those of `execute`. Raises as `combine`.
    """
    plan = plan_resize(adapter, rank=rank, keep=keep, dtype=dtype, ignore=ignore)
    return write(plan, out, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume)
