"""Preparing an adapter for a server: found, judged, planned, written, and read back."""

from __future__ import annotations

import contextlib
import os
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.checkpoints.sources import Reference, opened_adapter
from lora_tool.core.choices import flag, positive
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.core.hub_names import ANYWHERE
from lora_tool.core.options import option
from lora_tool.core.tensors import DType
from lora_tool.models.ends import head_of
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.options import FLOAT_DTYPE, OUTPUT, ResumableOptions
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.options import IgnoreOptions
from lora_tool.rules.serving.named import server_named
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, hashing, require_apart, require_output

if TYPE_CHECKING:
    from lora_tool.plans.algebra.spool import Spool


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(ResumableOptions, IgnoreOptions):
    """The options of an adapter for a server."""

    out: str | os.PathLike[str] = option(MISSING, "Folder to write.", **OUTPUT)
    base: Reference | None = option(
        None, f"Base model to compute with, and to check the adapter against: {ANYWHERE}.", metavar="MODEL"
    )
    max_rank: int | None = option(None, "Maximum rank that the server accepts.", parse=positive)
    approximate: bool = option(
        default=False, text="Accept an approximation of DoRA, and of modules whose rank exceeds `max_rank`.", parse=flag
    )
    reward_base: str | os.PathLike[str] | None = option(
        None, "Also write the base with the adapter's head, which vLLM needs beside a reward adapter.", metavar="PATH"
    )
    dtype: DType | str | None = option(
        None, "Data type of the factors.  [default: float32; unchanged if the result is exact]", **FLOAT_DTYPE
    )


def prepare(adapter: Reference, server: str, options: PrepareOptions, caller: Caller = LIBRARY) -> Done:
    """Write `adapter` in the form that `server` reads, with the same ΔW. Raises as `combine`.

    With `reward_base` the base with the adapter's head is written as well, once both are planned; the result is that of
    the adapter.
    """
    server, out = server_named(server), Path(options.out)
    if options.reward_base is not None:
        _require_heads(server)
    head_out = None if options.reward_base is None else Path(options.reward_base)
    for folder in (out, head_out):
        if folder is not None:
            require_output(folder, options, adapter)
    opened = opened_adapter(adapter)
    require_apart(out, options, opened.root)
    with contextlib.ExitStack() as stack, hashing(caller, opened):
        from lora_tool.plans.algebra.plan_prepare import plan_prepare  # slow to import, and the hashes have begun

        plan = plan_prepare(
            opened,
            server,
            base=options.base,
            max_rank=options.max_rank,
            approximate=options.approximate,
            dtype=options.dtype,
            ignore=options.ignore,
            spool=lambda: _spool(out, stack),
        )
        head_plan = None if head_out is None else _plan_reward_base(opened, options.base)
        if head_plan is not None and head_out is not None:
            require_apart(head_out, options, opened.root, *head_plan.folders)
        done = carry_out(plan, out, options, caller)
    if head_plan is not None and head_out is not None:
        carry_out(head_plan, head_out, options, caller)
    return done


def _require_heads(server: str) -> None:
    from lora_tool.rules.serving.forms import form_of  # what a form needs is slow to import

    form = form_of(server)
    if form.whole or not form.heads:
        raise WrongValue(
            f"`reward_base=PATH` is only for vLLM: {form.name} does not serve an adapter's head; merge the adapter "
            "instead: lora-tool merge --rm ADAPTER"
        )


def _spool(out: Path, stack: contextlib.ExitStack) -> Spool:
    """Return the file near `out` that keeps what is computed, as long as `stack` lasts."""
    from lora_tool.execution.folder import staging_folder  # for adapters that are computed
    from lora_tool.execution.spool import FileSpool

    return FileSpool(stack.enter_context(staging_folder(out)))


def _plan_reward_base(adapter: AdapterDir, base: Reference | None) -> Plan:
    """Return the plan of the classifier that vLLM serves a reward adapter on: its base, with the adapter's head.

    Raises `UnsupportedAdapter` for an adapter without a head, and as `merge_inputs` and `plan_merge`.
    """
    if not any(head_of(name.rpartition(".")[0]) for name in view_of(adapter).saved):
        raise UnsupportedAdapter(f"{adapter.root} has no classifier head, so it needs no base with one")
    from lora_tool.plans.merge.options import PlanOptions  # a merge's plan, only where one is written
    from lora_tool.plans.merge.plan_merge import plan_merge
    from lora_tool.workflows.merge import merge_inputs

    inputs = merge_inputs(adapter, base)
    return plan_merge(inputs.base, inputs.adapters, PlanOptions(head_alone=True, task=Task.SEQ_CLS))
