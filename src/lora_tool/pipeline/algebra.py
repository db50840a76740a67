"""New adapters from adapters, the whole way: judged, planned, written, and read back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_tool.adapter.view import view_of
from lora_tool.architectures.heads import head_of
from lora_tool.checkpoint import AdapterDir
from lora_tool.errors import UnsupportedAdapter
from lora_tool.pipeline.writing import Written, write
from lora_tool.plan.algebra.plan_combine import plan_combine, plan_resize
from lora_tool.plan.algebra.spool import Spool
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.plan import Plan
from lora_tool.rules.engine.subjects import Server
from lora_tool.sources import Reference, opened_adapter
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
    """Write the adapter whose ΔW is the weighted sum of the ΔW of `adapters` to `out`, and return the result.

    `weights`, `rank`, `keep`, `head_of`, `base`, `dtype` and `ignore` are those of `plan_combine`. With `verify`
    samples are read back before the folder gets its name; `jobs`, `overwrite` and `resume` are those of `execute`.
    Raises `FindingsFound`, `CheckpointError`, `PlanError`, `ExecutionError`, `VerificationFailed`, `WrongValue`.
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
    """Write the closest adapter to `adapter` of lower ranks to `out`, and return the result.

    `rank`, `keep`, `dtype` and `ignore` are those of `plan_resize`. With `verify` samples are read back before the
    folder gets its name; `jobs`, `overwrite` and `resume` are those of `execute`. Raises as `combine`.
    """
    plan = plan_resize(adapter, rank=rank, keep=keep, dtype=dtype, ignore=ignore)
    return write(plan, out, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume)


def plan_reward_base(adapter: AdapterDir, base: Reference | None) -> Plan:
    """Return the plan of the classifier that vLLM serves a reward adapter on: its base, with the adapter's head.

    Raises `UnsupportedAdapter` for an adapter without a head, and as `merge_inputs` and `plan_merge`.
    """
    if not any(head_of(name.rpartition(".")[0]) for name in view_of(adapter).saved):
        raise UnsupportedAdapter(f"{adapter.root} has no classifier head, so it needs no base with one")
    from lora_tool.pipeline.merging import merge_inputs  # a merge's plan, only where asked for
    from lora_tool.plan.merge.options import PlanOptions
    from lora_tool.plan.merge.plan_merge import plan_merge

    inputs = merge_inputs(adapter, base)
    return plan_merge(inputs.base, inputs.adapters, PlanOptions(head_alone=True, task=Task.SEQ_CLS))


def prepare(
    adapter: Reference,
    server: Server | str,
    *,
    out: str | os.PathLike[str],
    base: Reference | None = None,
    max_rank: int | None = None,
    approximate: bool = False,
    reward_base: str | os.PathLike[str] | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Written:
    """Write `adapter` to `out` in the form that `server` reads, with the same ΔW, and return the result.

    `base`, `max_rank`, `approximate`, `dtype` and `ignore` are those of `plan_prepare`. `reward_base` is where the base
    with the adapter's head goes, which vLLM needs beside a reward adapter; None writes none. With `verify` samples are
    read back before a folder gets its name; `jobs`, `overwrite` and `resume` are those of `execute`. Raises as
    `combine`.
    """
    opened = opened_adapter(adapter)
    asked: dict[str, Any] = {"max_rank": max_rank, "approximate": approximate, "dtype": dtype, "ignore": ignore}
    with preparation(opened, server, Path(out), base=base, **asked) as plan:
        # both are planned before either is written
        beside = None if reward_base is None else plan_reward_base(opened, base)
        done = write(plan, out, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume)
    if beside is not None and reward_base is not None:
        write(beside, reward_base, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume)
    return done


@contextlib.contextmanager
def preparation(adapter: Reference, server: Server | str, out: Path, **asked: Any) -> Iterator[Plan]:
    """Yield the plan of what is to be written to `out` for a server; what is computed lies beside it as long as this lasts.

    `asked` are the other arguments of `plan_prepare`. Raises as that does.
    """
    from lora_tool.plan.algebra.plan_prepare import plan_prepare  # one plan of several

    with contextlib.ExitStack() as stack:

        def spool() -> Spool:
            from lora_tool.execution.folder import staging_folder
            from lora_tool.execution.spool import FileSpool

            return FileSpool(stack.enter_context(staging_folder(out)))

        yield plan_prepare(adapter, server, spool=spool, **asked)


@contextlib.contextmanager
def extraction(model: Reference, base: Reference, out: Path, **asked: Any) -> Iterator[Plan]:
    """Yield the plan of an extraction that is to be written to `out`, whose factors lie beside it as long as this lasts.

    `asked` are the other arguments of `plan_extract`. Raises as that does.
    """
    from lora_tool.execution.folder import staging_folder
    from lora_tool.execution.spool import FileSpool
    from lora_tool.plan.algebra.plan_extract import plan_extract  # one plan of several

    with staging_folder(out) as folder:
        yield plan_extract(model, base, FileSpool(folder), **asked)


def extract(
    model: Reference,
    base: Reference,
    *,
    out: str | os.PathLike[str],
    rank: int | None = None,
    keep: float | None = None,
    save: Iterable[str] = (),
    dtype: DType | str | None = None,
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
) -> Written:
    """Write the adapter that turns `base` into the fine-tuned `model` to `out`, and return the result.

    `rank`, `keep`, `save` and `dtype` are those of `plan_extract`. The planning keeps its factors in a file beside
    `out`. With `verify` samples are read back before the folder gets its name; `jobs` and `overwrite` are those of
    `execute`. Raises as `combine`.
    """
    with extraction(model, base, Path(out), rank=rank, keep=keep, save=save, dtype=dtype) as plan:
        return write(plan, out, verify=verify, jobs=jobs, overwrite=overwrite)
