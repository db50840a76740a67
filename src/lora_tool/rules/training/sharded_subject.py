"""The subject of the rules of rank files: one tag of a DeepSpeed or verl checkpoint, or one of FSDP."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lora_tool.adapters.view import HalfPair, half_pairs_among
from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.folders import is_numbered, listed
from lora_tool.checkpoints.kinds import stem_of, step_of
from lora_tool.checkpoints.registry import is_save, is_step
from lora_tool.checkpoints.states.training_state import training_state
from lora_tool.core.display import from_here
from lora_tool.core.errors import CheckpointError, Defect, LoraToolError, Problem
from lora_tool.core.progress import Watch
from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.engine.subjects import LoraSubject

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.file_values import ValueFact
    from lora_tool.checkpoints.states.frozen_heads import Heads
    from lora_tool.checkpoints.states.state import TrainingState


F = TypeVar("F")

_VALUES_NEED = ("LT401", "LT402", "LT403", "LT405", "LT407", "LT408")
"""Rules whose errors leave no values to judge."""
_NAMES_NEED = ("LT401", "LT402")
"""Rules whose errors hide tensors."""


class ShardedSubject(LoraSubject, frozen=True, kw_only=True, eq=False, dict=True):
    """The state that would be used: of several tags the one that `latest` names, else the newest."""

    checkpoint: ShardedDir
    state: TrainingState
    watch: Watch | None = None
    """Called with the bytes of the values that are read."""
    chosen: Collection[str] | None = None
    """The names of the state's tensors that are to be written as an adapter; None where nothing was chosen."""
    chosen_heads: Heads | None = None
    """The heads by the config that the adapter will have; None: by the config near the checkpoint."""
    as_model: bool = False
    """Whether the state is to be written as a model, which needs its frozen tensors."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """See `Subject`; and the problems of the config near it, or of the files that one is derived from, and the
        rank files' pickles that call what no checkpoint needs.
        """
        from lora_tool.checkpoints.states.frozen_heads import config_problems  # slow to import, for few folders

        called = (problem for problem in self.state.problems if problem.defect is Defect.FOREIGN_CALL)
        return (*self.checkpoint.problems, *config_problems(self.state), *called)

    @property
    def read_files(self) -> frozenset[Path]:
        """See `Subject`."""
        return frozenset(self.state.stamps) - {Path(problem.path) for problem in self.state.broken}

    @property
    def places(self) -> Iterator[Path]:
        """See `Subject`; and the folder of the save that is used."""
        yield from dict.fromkeys((self.checkpoint.root, self.state.folder))

    @property
    def nbytes(self) -> int:
        """Bytes that reading the values takes, about."""
        return self.state.nbytes

    @cached_property
    def why_no_values(self) -> str | None:
        """Why the values cannot be judged, None if they can."""
        return "the rank files are incomplete; that is reported above" if self._has_errors(_VALUES_NEED) else None

    @cached_property
    def why_in_part(self) -> str | None:
        """Why names and shapes show only a part of the tensors, None if they show all."""
        broken = self._has_errors(_NAMES_NEED)
        return "rank files are missing or cannot be read; that is reported above" if broken else None

    def _has_errors(self, codes: Iterable[str]) -> bool:
        found = (finding for code in codes for finding in RULES[code].findings(self))
        return any(finding.severity is Severity.ERROR for finding in found)

    def values(self, kind: type[F]) -> Iterator[F]:
        """Yield the facts of one kind that the values show; all are read at the first call."""
        return (fact for fact in self._values if isinstance(fact, kind))

    @cached_property
    def heads(self) -> Heads | None:
        """The heads that `save_pretrained` would not save; None without LoRA."""
        from lora_tool.checkpoints.states.frozen_heads import (  # slow to import, for few folders
            has_lora,
            heads_of,
            near_adapter_config,
            parsed_keys,
        )

        if self.chosen_heads is not None or not has_lora(self.state.entries):
            return self.chosen_heads
        try:
            config = near_adapter_config(self.state.near)
        except LoraToolError:
            config = None
        return heads_of(self.state, config, parsed_keys(self.state))

    def half_pairs(self) -> Iterator[HalfPair]:
        """See `LoraSubject`."""
        from lora_tool.checkpoints.states.frozen_heads import has_lora, parsed_keys  # slow to import, for few folders

        if has_lora(self.state.entries):
            parsed = parsed_keys(self.state)
            names = parsed if self.chosen is None else self.chosen
            yield from half_pairs_among({name: parsed[name] for name in names})

    @cached_property
    def _values(self) -> Sequence[ValueFact]:
        from lora_tool.checkpoints.states.file_values import Unreadable, run_parts  # slow to import, for few folders

        try:
            readers = self.state.value_readers(self.state.assemble(self.state.entries))
            with (self.watch or _unwatched)(sum(reader.nbytes for reader in readers)) as advance:
                return run_parts([reader.run for reader in readers], advance)
        except CheckpointError as error:
            return [Unreadable(path=self.state.folder, why=str(error))]


def sharded_subject(checkpoint: ShardedDir, *, watch: Watch | None = None, whole: bool = False) -> ShardedSubject:
    """Return the subject for a checkpoint; `watch` is called with the bytes read. Raises as `training_state`."""
    # a `latest` that is missing or names nothing is LT409's to report
    state = training_state(checkpoint, or_newest=True)
    return ShardedSubject(checkpoint=checkpoint, state=state, watch=watch, whole=whole)


def _unwatched(_: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    return contextlib.nullcontext(lambda _: None)


# The advice of findings about the files of a training checkpoint.


COPY = "copy each rank's files from the machine that wrote them: every node saves those of its own ranks"
_DEEPEST = 4
"""Folders from a rank file up to the save that it belongs to: `iter_N/actor/model/dist_ckpt` lies deepest."""


@lru_cache(maxsize=64)  # a file may have a million faults, each with this hint
def another_save(path: Path, *, earlier: bool = False) -> str:
    """Return what to do instead of using the save of a run that the file or folder `path` belongs to.

    It names the save that lies nearest before it, else the next one unless it has to be `earlier`; only what kind of
    save to look for, where none lies there.
    """
    for folder in itertools.islice((path.absolute(), *path.absolute().parents), _DEEPEST + 1):
        if not is_save(folder):
            continue
        step = step_of(folder.name)[0]
        saves = sorted((step_of(name)[0], name) for name in _alike(folder))
        before = [name for number, name in saves if number < step]
        after = [name for number, name in saves if number > step]
        name = before[-1] if before else None if earlier or not after else after[0]
        if name is not None:
            # a tag belongs to the checkpoint around it, which has the adapter's config
            is_tag = is_step(name) and not is_numbered(name)
            where = (from_here(folder.parent), "--tag", name) if is_tag else (from_here(folder.parent / name),)
            return f"use {name}: {shlex.join(['lora-tool', 'consolidate', *map(str, where)])}"
    return f"use {'an earlier' if earlier else 'another'} save of the run"


def _alike(save: Path) -> Iterator[str]:
    """Yield the names of the save's sibling folders that differ from its name only in the number."""
    stem = stem_of(save.name)
    for name in listed(save.parent):
        if name != save.name and stem_of(name) == stem and is_save(save.parent / name):
            yield name
