"""All checkpoints under a folder with step, metric, sizes and verdict."""

from __future__ import annotations

import enum
import os
import re
import string
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    RunDir,
    ShardedDir,
    is_frozen,
    open_checkpoint,
    open_sharded,
    other_formats,
)
from lora_tool.checkpoints.folders import Folder, is_numbered, listed
from lora_tool.checkpoints.kinds import matches, step_of
from lora_tool.checkpoints.registry import holds_pieces, is_save, is_step, saves_in, sharded_kinds
from lora_tool.core.choices import TextEnum
from lora_tool.core.errors import CheckpointError, LoraToolError, UnsupportedCheckpoint
from lora_tool.core.report.findings import RunCheckpoint
from lora_tool.formats.files import is_file
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.formats.trainer_state import TrainerState, without_history
from lora_tool.rules.bases import named_base
from lora_tool.rules.engine.registry import chosen, unopened
from lora_tool.rules.training.saves import FINISHED, Judged, judged, run_table
from lora_tool.verification.validating import Criteria, judge_checkpoint, validate


@enum.unique
class FileRole(TextEnum):
    """What a file of a checkpoint is for."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    RNG = "rng"
    OTHER = "other"


_CONTENTS = (
    (FileRole.RNG, re.compile(r"rng_state.*\.pth\Z|random_states_\d+\.pkl\Z")),
    (FileRole.OPTIMIZER, re.compile(r"(?:optimizer|scheduler|scaler)\w*\.(?:pt|bin)\Z")),
    (FileRole.WEIGHTS, re.compile(r".*\.safetensors\Z|(?:pytorch|adapter)_model.*\.bin\Z")),
)  # fmt: skip


class Listed(Struct, frozen=True, kw_only=True):
    """One checkpoint. `row` has its step, metric, size and verdict; `sizes` are bytes by kind of content."""

    root: Path
    kind: str
    adapters: tuple[str, ...]
    """The names of its adapters, where each lies in a folder of its own, with a word on those that were not trained."""
    row: RunCheckpoint
    sizes: Mapping[FileRole, int]
    best: bool = False
    """Whether it is the best complete checkpoint of its run by the metric, the latest where the run evaluated nothing."""
    pointed_at: bool = False
    """Whether a link under the listed folder leads to it: `best`, or another run's `checkpoint-N`."""
    newest: bool = False
    """Whether a file of the run names it as its newest: `latest`, `latest_checkpointed_iteration.txt`."""

    @property
    def verdict(self) -> str:
        """Whether it is good, and the codes of what was found."""
        return self.row.verdict + (f": {', '.join(self.row.codes)}" if self.row.codes else "")

    def name(self, root: Path) -> str:
        """Return its path below `root`."""
        return str(self.root.relative_to(root)) if self.root.is_relative_to(root) else str(self.root)


class Inventory(Struct, frozen=True, kw_only=True):
    """The checkpoints of one folder in the order of the run; `metric` is the one that `best` compares."""

    root: Path
    """The run's folder, where there is a run."""
    metric: str | None
    checkpoints: tuple[Listed, ...]

    @property
    def saves(self) -> tuple[Listed, ...]:
        """Those that are saves of a run, each in a folder of its own: `checkpoint-N`, `global_stepN`, `iter_N`."""
        return tuple(item for item in self.checkpoints if item.root != self.root)


def inventory(root: Path, criteria: Criteria = Criteria()) -> Iterator[Inventory]:
    """Yield the checkpoints under `root`, run by run; `criteria` judge each of them as `validate` judges its run.

    Reads names, JSON, headers and adapters' weights. Links are not followed. The saves of a run, `checkpoint-N` say,
    come together, finished weights beside them last; every other folder with weights is listed by itself. Raises
    `NotACheckpoint` where `root` is not a folder, `UnknownRule` for criteria that select no rule.
    """
    runs: dict[Path, _Run] = defaultdict(_Run)
    for folder in checkpoints_under(root):
        run = runs[folder.parent if is_save(folder) else folder]
        one = _judged(folder, run, criteria)
        if one is not None:
            run.add(*one)
    pointed_at = set(_link_targets(root))
    for parent, run in runs.items():
        found = sorted(run.found, key=lambda each: (each[0].root == parent, step_of(each[0].root.name)[0]))
        if not found:
            continue
        named = _named_by(parent) if any(not is_numbered(item.root.name) for item, _ in found) else frozenset()
        table = run_table(parent, [item for item, _ in found], log=run.furthest)
        yield Inventory(
            root=parent,
            metric=table.metric,
            checkpoints=tuple(
                Listed(
                    root=item.root,
                    kind=kind,
                    adapters=item.adapters,
                    row=row,
                    sizes=sizes_of(item.root),
                    best=row.path == table.best,
                    pointed_at=item.root.resolve() in pointed_at,
                    newest=item.root.name in named,
                )
                for row, (item, kind) in zip(table.checkpoints, found, strict=True)
            ),
        )


class _Run(Struct):
    """The judged checkpoints of one run, with their kinds.

    Each holds the run's log up to its step: of thousands, that of the `furthest` is kept.
    """

    found: list[tuple[Judged, str]] = field(default_factory=list)
    furthest: TrainerState | None = None
    base: ModelDir | Literal["unknown"] | None = "unknown"

    def base_of(self, parent: Path) -> ModelDir | None:
        """Return the base that the run's folder names, looked for once."""
        if self.base == "unknown":
            try:
                self.base = named_base(open_checkpoint(parent))[0]
            except (LoraToolError, PermissionError):
                self.base = None
        return self.base

    def add(self, item: Judged, kind: str) -> None:
        state = item.state
        if state is not None and (self.furthest is None or state.global_step > self.furthest.global_step):
            self.furthest = state
        self.found.append((item if state is None else replace(item, state=without_history(state)), kind))


def checkpoints_under(root: Path, *, signs: Container[str] = (), links: bool = False) -> Iterator[Path]:
    """Yield every folder that may be a checkpoint, those of a run by step; what lies inside one is part of it.

    A folder with a file of `signs` may be one, too, besides those with weights. Of `links` only those that are called
    like a run's saves are yielded without; none is followed. Raises `NotACheckpoint` where `root` is not a folder.
    """
    if not root.is_dir():
        open_checkpoint(root)  # says what it is instead
    if _may_be_one(root, signs):
        yield root
    if is_save(root) and not is_numbered(root.name):
        return
    for where, folders, _ in os.walk(root):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_by_step)
        saves = _saves_in(where, folders)
        inside = [name for name in folders if name in saves or not holds_pieces(name)]
        paths = [path for name in inside if _may_be_one(path := Path(where, name), signs)]
        yield from (path for path in paths if links or path.name in saves or not path.is_symlink())
        # a run's own folder may hold finished weights beside its checkpoints: look further, but not into a checkpoint
        folders[:] = [name for name in inside if name not in saves]


def _saves_in(where: str, folders: Iterable[str]) -> set[str]:
    """Return which of the folders in `where` are saves of a run: not DeepSpeed's tag in a save of the HF Trainer."""
    saves = {name for name in folders if is_save(Path(where, name))}
    is_trainers = is_numbered(Path(where).name) or is_file(Path(where, TRAINER_STATE))
    return {name for name in saves if not holds_pieces(name)} if is_trainers else saves


def _named_by(run: Path) -> frozenset[str]:
    """Return the names of the saves that the files of a run point at, where its framework writes such files."""
    try:
        opened = open_sharded(run)
    except (LoraToolError, PermissionError):
        return frozenset()
    return frozenset(tag.partition("/")[0] for tag in (opened.latest, opened.latest_universal) if tag)


def _link_targets(root: Path) -> Iterator[Path]:
    for where, folders, _ in os.walk(root):
        yield from (path.resolve() for name in folders if (path := Path(where, name)).is_symlink())
        folders[:] = [name for name in folders if not is_step(name)]


def _by_step(name: str) -> tuple[str, int]:
    number = step_of(name)[0]
    return (name.rstrip(string.digits), number) if number else (name, 0)


def _may_be_one(folder: Path, signs: Container[str]) -> bool:
    if is_save(folder):
        return True
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
        return any(
            name in signs
            or other_formats.is_known(name)
            or _content(name) is FileRole.WEIGHTS
            or (holds_pieces(name) and not is_step(name))
            for name in names
        )
    except PermissionError:
        return True  # nobody can tell: it is listed as unreadable
    except OSError:
        return False


def _judged(folder: Path, run: _Run, criteria: Criteria) -> tuple[Judged, str] | None:
    if is_save(folder):
        item, opened = judge_checkpoint(folder, criteria, run.base_of(folder.parent))
        return item, "unreadable" if opened is None else _kind_of(opened)
    name = FINISHED if saves_in(Folder(root=folder, files=(), folders=listed(folder))) else folder.name
    try:
        whole: Checkpoint = open_checkpoint(folder)
        if isinstance(whole, RunDir) or _is_root_of_saves(whole):
            return None
        report = validate(
            whole, select=criteria.select, ignore=criteria.ignore, deep=criteria.deep, servers=criteria.servers
        )
    except (CheckpointError, UnsupportedCheckpoint, PermissionError) as error:
        report = unopened(str(folder), f"cannot be opened: {error}", chosen(criteria.select, criteria.ignore))
        return judged(folder, name, report, None, refused=isinstance(error, UnsupportedCheckpoint)), "unreadable"
    except LoraToolError:
        return None
    return judged(folder, name, report, whole), _kind_of(whole)


def _kind_of(opened: Checkpoint) -> str:
    """Return the kind of a checkpoint; an adapter that its run did not train is none of the run's results."""
    return "frozen adapter" if isinstance(opened, AdapterDir) and is_frozen(opened) else str(opened.kind)


def _is_root_of_saves(opened: Checkpoint) -> bool:
    """Return whether a checkpoint is nothing but saves, which are listed one by one."""
    if not isinstance(opened, ShardedDir):
        return False
    folders = {tag.partition("/")[0] for tag in opened.rank_files}
    return folders <= _saves_in(str(opened.root), folders)


def sizes_of(folder: Path) -> dict[FileRole, int]:
    """Return the bytes in the folder by kind of content, other runs' folders in it left out. Links are not followed."""
    sizes = dict.fromkeys(FileRole, 0)
    for where, folders, names in os.walk(folder):
        others = _saves_in(where, folders)
        folders[:] = [name for name in folders if name not in others]
        for name in names:
            try:
                nbytes = os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118 - half the time of Path
            except OSError:  # it went away
                continue
            inside_optimizer = re.search(r"\boptim(?:izers?)?(?:_\d+)?\Z", where) is not None
            sizes[FileRole.OPTIMIZER if inside_optimizer else _content(name)] += nbytes
    return sizes


def _content(name: str) -> FileRole:
    for content, pattern in _CONTENTS:
        if pattern.match(name):
            return content
    for kind in sharded_kinds():
        if matches(name, kind.weights):
            return FileRole.WEIGHTS
        if matches(name, kind.optimizer):
            return FileRole.OPTIMIZER
    return FileRole.OTHER
