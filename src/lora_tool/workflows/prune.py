"""Removing the checkpoints of runs that are neither the last nor the best."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoints.path_suggestions import probably_meant
from lora_tool.checkpoints.sources import unfetched
from lora_tool.core.choices import count, flag
from lora_tool.core.errors import NotACheckpoint, WrongValue
from lora_tool.core.options import Options, option
from lora_tool.execution.folder import remove, require_room
from lora_tool.verification.validating import Criteria
from lora_tool.workflows.inventory import PruneChoice, choose, inventory


@dataclass(frozen=True, kw_only=True)
class PruneOptions(Options):
    """Which checkpoints stay, and where the others go. Raises `WrongValue` for a trash that nothing is moved to."""

    keep_last: int = option(1, "Number of last complete checkpoints to keep per run.", parse=count)
    keep_best: int = option(1, "Number of best checkpoints to keep per run; the best one always stays.", parse=count)
    apply: bool = option(default=False, text="Remove them. Without `apply` nothing is touched.", parse=flag)
    trash: str | os.PathLike[str] | None = option(
        None, "With `apply`: move them to this folder instead.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trash is not None and not self.apply:
            raise WrongValue("`trash=DIR` needs `apply=True`: nothing is moved without it")


def prune(
    root: str | os.PathLike[str],
    options: PruneOptions,
    criteria: Criteria,
    *,
    gone: Callable[[Path], None] = lambda _: None,
) -> tuple[PruneChoice, ...]:
    """Return which checkpoints of the runs under `root` stay and which go, and with `apply` remove or move these.

    `criteria` say which are valid; `gone` is called with each as it is removed. Raises `NotACheckpoint` where `root` is
    no folder of this disk, `ExecutionError` for what cannot be removed, `OutputExists` for what the trash holds already.
    """
    trash, root = None if options.trash is None else Path(options.trash), _on_this_disk(os.fspath(root))
    listed = inventory(root, criteria)
    choices = tuple(
        choice
        for choice in choose(listed, keep_last=options.keep_last, keep_best=options.keep_best)
        if trash is None or not choice.checkpoint.root.resolve().is_relative_to(trash.resolve())
    )
    going = [choice.checkpoint.root for choice in choices if choice.goes and options.apply]
    # runs have folders of the same names: in the trash each keeps its place below the root
    places = {folder: trash / folder.parent.relative_to(root) for folder in going if trash is not None}
    for folder, place in places.items():
        require_room(folder, place)
    for folder in going:
        remove(folder, trash=places.get(folder))
        gone(folder)
    return choices


def _on_this_disk(root: str) -> Path:
    """Return the folder. Raises `NotACheckpoint` for what can only be on the Hub, where nothing is removed."""
    source = unfetched(root)
    if source.hub_id is not None:
        message = f"{root}: no such folder, and prune removes nothing on the Hub"
        raise NotACheckpoint(message, hint=probably_meant(root) or f"lora-tool ls {shlex.quote(root)}")
    return source.path
