"""Removing the checkpoints of runs that are neither the last nor the best."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.path_suggestions import probably_meant
from lora_tool.checkpoints.sources import unfetched
from lora_tool.core.choices import count, flag
from lora_tool.core.errors import NotACheckpoint, WrongValue
from lora_tool.core.options import Options, option
from lora_tool.execution.folder import remove, require_room
from lora_tool.rules.training.complete import incomplete_reason
from lora_tool.verification.validating import Criteria
from lora_tool.workflows.inventory import Inventory, Listed, PruneChoice, choose, inventory


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

    `criteria` say which are valid; of saves for the sake of which others go, every byte of the optimizer's and the other
    states is read. `gone` is called with each as it is removed. A run whose files change meanwhile is judged again before
    anything more of it is removed. Raises `NotACheckpoint` where `root` is no folder of this disk,
    `ExecutionError` for what cannot be removed, `OutputExists` for what the trash holds already.
    """
    trash, root = None if options.trash is None else Path(options.trash), _on_this_disk(os.fspath(root))

    def chosen(folder: Path) -> Iterator[PruneChoice]:
        for choice in _choices(tuple(inventory(folder, criteria)), options):
            if trash is None or not choice.checkpoint.root.resolve().is_relative_to(trash.resolve()):
                yield choice

    choices = {choice.checkpoint.root: choice for choice in chosen(root)}
    going = [folder for folder, choice in choices.items() if choice.goes and options.apply]
    # runs have folders of the same names: in the trash each keeps its place below the root
    places = {folder: trash / folder.parent.relative_to(root) for folder in going if trash is not None}
    for folder, place in places.items():
        require_room(folder, place)
    for run in dict.fromkeys(folder.parent for folder in going):
        for choice in _once_more(run, [folder for folder in going if folder.parent == run], chosen):
            folder = choice.checkpoint.root
            choices[folder] = choice
            if choice.goes:
                remove(folder, trash=places.get(folder))
                gone(folder)
    return tuple(choices.values())


def _choices(runs: Sequence[Inventory], options: PruneOptions) -> tuple[PruneChoice, ...]:
    """Return the choices among the saves of `runs`, none of which goes for the sake of one with a damaged state."""
    lacking: dict[Path, str | None] = {}
    while True:
        judged = [replace(run, checkpoints=tuple(map(partial(_with, lacking), run.checkpoints))) for run in runs]
        choices = tuple(choose(judged, keep_last=options.keep_last, keep_best=options.keep_best))
        busy = {choice.checkpoint.root.parent for choice in choices if choice.goes}
        stay = [choice.checkpoint for choice in choices if not choice.goes and choice.checkpoint.root.parent in busy]
        unread = [item.root for item in stay if item.row.complete and item.root not in lacking]
        if not unread:
            return choices
        lacking |= {root: incomplete_reason(read_folder(root), deep=True) for root in unread}


def _with(lacking: Mapping[Path, str | None], item: Listed) -> Listed:
    reason = lacking.get(item.root)
    return item if reason is None else replace(item, row=replace(item.row, incomplete=reason, unresumable=reason))


def _once_more(
    run: Path, going: Sequence[Path], chosen: Callable[[Path], Iterable[PruneChoice]]
) -> Iterator[PruneChoice]:
    """Yield the choice on each save of a run that was to go, judged again where other files of the run have changed.

    A training may be writing a save, or removing one for the sake of which these go. What has gone is left out.
    """
    seen, choices = None, {}
    for folder in going:
        now = _files(run, going)
        if now != seen:
            seen, choices = now, {choice.checkpoint.root: choice for choice in chosen(run)}
        if folder in choices:
            yield choices[folder]


def _files(run: Path, without: Collection[Path]) -> frozenset[tuple[Path, int, int]]:
    """Return the files in the folder `run` and below with size and time of change, those in the folders `without` left out."""
    found = set()
    for where, folders, names in os.walk(run):
        folders[:] = [name for name in folders if Path(where, name) not in without]
        for path in (Path(where, name) for name in names):
            with contextlib.suppress(OSError):  # it went away
                stat = path.lstat()
                found.add((path, stat.st_size, stat.st_mtime_ns))
    return frozenset(found)


def _on_this_disk(root: str) -> Path:
    """Return the folder. Raises `NotACheckpoint` for what can only be on the Hub, where nothing is removed."""
    source = unfetched(root)
    if source.hub_id is not None:
        message = f"{root}: no such folder, and prune removes nothing on the Hub"
        raise NotACheckpoint(message, hint=probably_meant(root) or f"lora-tool ls {shlex.quote(root)}")
    return source.path
