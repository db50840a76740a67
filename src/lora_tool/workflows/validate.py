"""Validating folders: each opened and judged by the rules; what can be fixed mechanically is shown, or written."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir
from lora_tool.checkpoints.sources import Reference, opened, opened_adapter, opened_model
from lora_tool.core.choices import flag
from lora_tool.core.errors import LoraToolError, WrongValue, of_system
from lora_tool.core.options import option
from lora_tool.core.progress import Progress, unwatched
from lora_tool.core.report.model import Report, Unread, joined
from lora_tool.verification.validating import ValidateOptions, findings_on
from lora_tool.workflows.caller import LIBRARY, Caller

if TYPE_CHECKING:
    from lora_tool.workflows.fixes import Fixes

_LONG = 1 << 30
"""Bytes that take half a second to read from the page cache, and long from a disk."""


@dataclass(frozen=True, kw_only=True)
class ValidateFolderOptions(ValidateOptions):
    """How a folder is judged with all that is in it."""

    checkpoints: bool = option(
        default=True, text="Judge the checkpoints beside finished weights, too.", parse=flag, library_only=True
    )


@dataclass(frozen=True, kw_only=True)
class ValidateEachOptions(ValidateFolderOptions):
    """How several folders are judged, and whether they are fixed. Raises `WrongValue` for applying what is not shown."""

    fix: bool = option(
        default=False,
        text="Show a diff of the mechanical fixes to configs and names; weights are never changed.",
        parse=flag,
    )
    apply: bool = option(
        default=False, text="Make the changes that `fix` shows; each original is kept as FILE.orig.", parse=flag
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apply and not self.fix:
            raise WrongValue("`apply=True` needs `fix=True`")


class ValidatedOne(Struct, frozen=True, kw_only=True):
    """One folder of several, as it was given: its report, and the `error` where it could not be opened."""

    path: str
    report: Report
    error: LoraToolError | None = None


class Validated(Struct, frozen=True, kw_only=True):
    """The folders that were judged, and the fixes where they were wanted."""

    folders: tuple[ValidatedOne, ...]
    fixes: Fixes | None = None


def validate(checkpoint: Reference, options: ValidateFolderOptions, caller: Caller = LIBRARY) -> Report:
    """Return all findings of the rules on `checkpoint`; nothing is changed, and no code is run.

    Every checkpoint may be a path, a Hub id or an opened checkpoint; a base is never downloaded. A base enables the
    rules that compare with it. A model is compared with what base and `adapters` give; an adapter is judged for a merge
    together with them. Rules that could not run are in `skipped`. The checkpoints of a run are judged one by one and put
    into one table of `runs`. Raises `CheckpointError` for what cannot be opened, `UnknownRule` for a `select` or
    `ignore` that means no rule, `WrongValue` for another argument.
    """
    found = opened(checkpoint)

    def watch(nbytes: int) -> contextlib.AbstractContextManager[Progress]:
        return caller.progress("reading rank files", nbytes) if nbytes >= _LONG else unwatched("", nbytes)

    with _reading(found, options, caller) as progress:
        return findings_on(found, options, progress=progress, watch=None if progress else watch)


def _reading(
    found: Checkpoint, options: ValidateOptions, caller: Caller
) -> contextlib.AbstractContextManager[Progress | None]:
    if isinstance(found, AdapterDir | ModelDir):
        total = found.weights.nbytes
        read = options.deep or (options.deep is None and isinstance(found, AdapterDir))
        if read and total >= _LONG:
            return caller.progress("reading weights", total)
    return contextlib.nullcontext()


def validate_each(paths: Sequence[str], options: ValidateEachOptions, caller: Caller = LIBRARY) -> Validated:
    """Return what was found in each folder: base and adapters are opened once, and what stops one stops no other.

    With `apply` the folders are judged again once they are fixed. Raises `CheckpointError` for a base or an adapter that
    cannot be read, `ExecutionError` for a fix that cannot be written.
    """
    options = replace(
        options,
        base=None if options.base is None else opened_model(options.base, download=False),
        adapters=tuple(map(opened_adapter, options.adapters)),
    )
    folders = tuple(_validated(path, options, caller) for path in paths)
    if not options.fix:
        return Validated(folders=folders)
    from lora_tool.workflows.fixes import fix  # only where wanted

    fixes = fix(joined(each.report for each in folders), task=options.task, apply=options.apply)
    if fixes.kept:
        folders = tuple(_validated(path, options, caller) for path in paths)
    return Validated(folders=folders, fixes=fixes)


def _validated(path: str, options: ValidateFolderOptions, caller: Caller) -> ValidatedOne:
    try:
        return ValidatedOne(path=path, report=validate(path, options, caller))
    except LoraToolError as refused:
        error = refused
    except OSError as failed:
        error = of_system(failed, path)
    return ValidatedOne(path=path, report=Report(unread=(Unread.of(path, error),)), error=error)
