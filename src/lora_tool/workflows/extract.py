"""Extracting an adapter from a fine-tuned model: found, planned, written, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from pathlib import Path

from lora_tool.checkpoints import ModelDir, open_model
from lora_tool.checkpoints.sources import Reference, opened_model
from lora_tool.core.options import option
from lora_tool.plans.core.options import OUTPUT, RankOptions, WritingOptions
from lora_tool.rules.options import IgnoreOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.resize import require_one_rank
from lora_tool.workflows.writing import carry_out, hashing, require_apart, require_output


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(WritingOptions, IgnoreOptions, RankOptions):
    """The options of an extraction. Raises `WrongValue` unless the ranks are given in one way."""

    out: str | os.PathLike[str] = option(MISSING, "Folder to write.", **OUTPUT)
    save: Iterable[str] = option((), "Save this module whole. May be repeated.", metavar="MODULE", many=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_rank(self)


def extract(model: Reference, base: Reference | None, options: ExtractOptions, caller: Caller = LIBRARY) -> Done:
    """Write the adapter that turns its base into the fine-tuned `model`, as closely as its ranks allow.

    `base` is by default the one that the model's lora_tool.json or config.json names, if it is on this disk. The
    planning keeps its factors in a file near the output. Raises as `combine`, and `NotACheckpoint` without a base.
    """
    out = Path(options.out)
    require_output(out, options, model, *(() if base is None else (base,)))
    caller.spare_memory()
    tuned = opened_model(model, download=True)
    first = _base_of(tuned, caller) if base is None else opened_model(base, download=True)
    require_apart(out, options, tuned.root, first.root)
    from lora_tool.execution.folder import staging_folder  # after the inputs are known to be right
    from lora_tool.execution.spool import FileSpool
    from lora_tool.plans.algebra.plan_extract import plan_extract

    with staging_folder(out) as folder, hashing(caller, tuned, first):
        plan = plan_extract(
            tuned,
            first,
            FileSpool(folder),
            rank=options.rank,
            keep=options.keep,
            save=options.save,
            dtype=options.dtype,
            ignore=options.ignore,
        )
        return carry_out(plan, out, options, caller)


def _base_of(model: ModelDir, caller: Caller) -> ModelDir:
    """Return the base that the model's files name. Raises as `base_named_by`."""
    from lora_tool.plans.merge.provenance import base_named_by  # where no base is given

    found = base_named_by(model, hint="give the model that it was trained from: `base=MODEL`")
    caller.note(f"the base is {found}, which {model.root} names")
    return open_model(found)
