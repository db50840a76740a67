"""Removing the checkpoints of runs that are neither the last nor the best."""

from __future__ import annotations

import contextlib
import enum
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.kinds import counts_epochs
from lora_tool.checkpoints.path_suggestions import probably_meant
from lora_tool.checkpoints.sources import unfetched
from lora_tool.core.choices import TextEnum, count, flag
from lora_tool.core.errors import NotACheckpoint, WrongValue
from lora_tool.core.options import Options, option
from lora_tool.core.progress import StageWatch, unwatched
from lora_tool.execution.folder import remove, require_room
from lora_tool.formats.files import is_file
from lora_tool.rules.training.complete import incomplete_reason, state_bytes
from lora_tool.verification.validating import Criteria
from lora_tool.workflows.inventory import Inventory, Listed, inventory


@enum.unique
class Why(TextEnum):
    """Why prune keeps or removes a checkpoint."""

    BEST = "one of the best"
    LAST = "one of the last"
    FIRST = "the best; prune always keeps it"
    RESUMABLE = "the newest from which training can go on; prune always keeps it"
    NONE_VALID = "no checkpoint of the run is complete, but consolidate may still rescue one"
    NEWER = "newer than the last complete one: it may still be being written"
    LINK = "a link"
    UNREADABLE = "you may not read it, so prune cannot tell whether it is broken"
    NEWEST = "the run's own pointer names it"
    REFUSED = "lora-tool does not read its layout or method, so prune cannot tell whether it is broken"
    POINTED_AT = "a link leads to it"
    INVALID = "broken"
    INCOMPLETE = "not saved completely"
    OLDER = "neither among the last nor among the best"


KEPT = frozenset(Why) - {Why.INVALID, Why.INCOMPLETE, Why.OLDER}


class PruneChoice(Struct, frozen=True, kw_only=True):
    """What prune does with one checkpoint."""

    checkpoint: Listed
    why: Why

    @property
    def goes(self) -> bool:
        return self.why not in KEPT

    @property
    def because(self) -> str:
        """Why, with what its save lacks."""
        lacks = self.checkpoint.row.incomplete
        return f"{self.why}; it {lacks}" if lacks else str(self.why)


def choose(runs: Iterable[Inventory], *, keep_last: int, keep_best: int) -> Iterator[PruneChoice]:
    """Yield for each save of a run whether it is kept and why.

    Every run keeps its last complete saves and its best good ones: the best one always, and always the newest one that
    training can go on from. A run without a complete save keeps all of them, any other all that are newer than the last
    complete one but those with wrong values in their weights. Only the saves of runs are chosen.
    """
    for run in runs:
        listed = run.saves
        own = [item for item in listed if not item.root.is_symlink()]
        complete = [item for item in own if item.row.complete]
        newest = listed.index(complete[-1]) if complete else 0
        kept = {
            Why.BEST: _best(own, keep_best),
            Why.FIRST: _best(own, 1),
            Why.LAST: _last(complete, keep_last),
            Why.RESUMABLE: [item for item in complete if item.row.resumable][-1:],
            Why.NEWER: [item for item in listed[newest:] if not item.row.only_values],
        }
        roots = {why: {item.root for item in items} for why, items in kept.items()}
        for item in listed:
            yield PruneChoice(checkpoint=item, why=_why(item, roots, any_complete=bool(complete)))


def _last(complete: Sequence[Listed], count: int) -> list[Listed]:
    """Return the last `count` complete saves, of epochs and of steps: nothing tells whether `epoch_2` is after `step_500`."""
    counted: dict[bool, list[Listed]] = defaultdict(list)
    for item in complete:
        counted[counts_epochs(item.root.name)].append(item)
    return [item for items in counted.values() for item in items[max(0, len(items) - count) :]]


def _best(saves: Sequence[Listed], count: int) -> list[Listed]:
    """Return the `count` best complete saves by the run's metric, and the incomplete ones that it puts before them.

    Where no complete save has a place, the latest is the best.
    """
    places = sorted((item.row.rank, at) for at, item in enumerate(saves) if item.row.rank is not None)
    complete = [item for item in saves if item.row.complete]
    ranked = [*(saves[at] for _, at in places), *complete[-1:]]
    best = [item for item in ranked if item.row.complete][:count]
    return ranked[: ranked.index(best[-1]) + 1] if best else []


def _why(item: Listed, roots: Mapping[Why, set[Path]], *, any_complete: bool) -> Why:
    reasons = {
        Why.LINK: item.root.is_symlink(),
        Why.NONE_VALID: not any_complete,
        Why.BEST: item.root in roots[Why.BEST],
        Why.LAST: item.root in roots[Why.LAST],
        Why.FIRST: item.root in roots[Why.FIRST],
        Why.RESUMABLE: item.root in roots[Why.RESUMABLE],
        Why.POINTED_AT: item.pointed_at,
        Why.NEWEST: item.newest,
        Why.OLDER: item.row.complete,
        Why.REFUSED: not item.row.judged,
        Why.UNREADABLE: not item.row.complete and not _may_be_read(item.root),
        Why.NEWER: item.root in roots[Why.NEWER],
        Why.INCOMPLETE: item.row.incomplete is not None,
    }
    return next((why for why, holds in reasons.items() if holds), Why.INVALID)


def _may_be_read(folder: Path) -> bool:
    """Return whether this user may read every file in the folder."""
    refused: list[OSError] = []
    for where, _, names in os.walk(folder, onerror=refused.append):
        paths = (Path(where, name) for name in names)
        if not all(os.access(path, os.R_OK) for path in paths if is_file(path)):
            return False
    return not refused


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
    progress: StageWatch = unwatched,
) -> tuple[PruneChoice, ...]:
    """Return which checkpoints of the runs under `root` stay and which go, and with `apply` remove or move these.

    `criteria` say which are valid; of saves for the sake of which others go, every byte of the optimizer's and the other
    states is read, under `progress`. `gone` is called with each as it is removed. A run whose files change meanwhile is
    judged again before anything more of it is removed. Raises `NotACheckpoint` where `root` is no folder of this disk,
    `ExecutionError` for what cannot be removed, `OutputExists` for what the trash holds already.
    """
    trash, root = None if options.trash is None else Path(options.trash), _on_this_disk(os.fspath(root))
    states = _States(progress=progress)

    def chosen(folder: Path) -> Iterator[PruneChoice]:
        for choice in _choices(tuple(inventory(folder, criteria)), options, states):
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


class _States(Struct, kw_only=True):
    """What the saves lack whose states were read to the last byte: no file is read again while it does not change."""

    progress: StageWatch
    known: dict[tuple[Path, frozenset[tuple[Path, int, int]]], str | None] = field(default_factory=dict)

    def lacking(self, saves: Sequence[Path]) -> dict[Path, str | None]:
        keys = {save: (save, _files(save, ())) for save in saves}
        unread = {key: read_folder(save) for save, key in keys.items() if key not in self.known}
        with self.progress("reading the states of kept checkpoints", sum(map(state_bytes, unread.values()))) as done:
            for key, folder in unread.items():
                self.known[key] = incomplete_reason(folder, deep=True, progress=done)
        return {save: self.known[key] for save, key in keys.items()}


def _choices(runs: Sequence[Inventory], options: PruneOptions, states: _States) -> tuple[PruneChoice, ...]:
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
        lacking |= states.lacking(unread)


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
