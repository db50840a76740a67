"""Lowering the ranks of an adapter: found, judged, planned, written, and read back."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass
from pathlib import Path

from lora_tool.checkpoints.sources import Reference, opened_adapter
from lora_tool.core.errors import WrongValue
from lora_tool.core.options import option
from lora_tool.plans.core.options import OUTPUT, RankOptions, ResumableOptions
from lora_tool.rules.options import IgnoreOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, hashing, require_apart, require_output


@dataclass(frozen=True, kw_only=True)
class ResizeOptions(ResumableOptions, IgnoreOptions, RankOptions):
    """The options of an adapter of lower ranks. Raises `WrongValue` unless the ranks are given in one way."""

    out: str | os.PathLike[str] = option(MISSING, "Folder to write.", **OUTPUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_rank(self)


def require_one_rank(options: RankOptions) -> None:
    """Return if the options give either a rank or a share. Raises `WrongValue`."""
    if (options.rank is None) == (options.keep is None):
        raise WrongValue("give either `rank=R` or `keep=SHARE`", hint="`keep=0.99`" if options.rank is None else None)


def resize(adapter: Reference, options: ResizeOptions, caller: Caller = LIBRARY) -> Done:
    """Write `adapter` at lower ranks: each module gets the closest ΔW of its new rank. Raises as `combine`."""
    out = Path(options.out)
    require_output(out, options, adapter)
    caller.spare_memory()
    opened = opened_adapter(adapter)
    require_apart(out, options, opened.root)
    with hashing(caller, opened):
        from lora_tool.plans.algebra.plan_combine import plan_resize  # slow to import, and the hashes have begun

        plan = plan_resize(opened, rank=options.rank, keep=options.keep, dtype=options.dtype, ignore=options.ignore)
        return carry_out(plan, out, options, caller)
