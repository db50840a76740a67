"""What the rules of rank files look at: one tag of a DeepSpeed or verl checkpoint, or one of FSDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec import field

from lora_tool.adapter.half_pairs import HalfPair, half_pairs_among
from lora_tool.checkpoint import ShardedDir
from lora_tool.errors import CheckpointError, Problem
from lora_tool.progress import Watch
from lora_tool.report import Finding, Severity
from lora_tool.rules.engine.registry import Fault
from lora_tool.rules.engine.subjects import LoraSubject
from lora_tool.sharded.training_state import training_state

if TYPE_CHECKING:
    from lora_tool.sharded.state import TrainingState

_BROKEN = frozenset({"LT401", "LT402", "LT403", "LT405", "LT407", "LT408"})


class ShardedSubject(LoraSubject, frozen=True, kw_only=True, eq=False):
    """The state that would be used: of several tags the one that `latest` names, else the newest."""

    checkpoint: ShardedDir
    state: TrainingState
    looks: list[tuple[Finding, ...]] = field(default_factory=list)
    """What a look at the values has found; empty before it."""
    watch: Watch | None = None
    """Told of a look at the values."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """See `Subject`; and what is wrong with the config that lies near, or with the files that would make one."""
        from lora_tool.sharded.frozen_heads import config_problems  # slow to import, for few folders

        return (*self.checkpoint.problems, *config_problems(self.state))

    @property
    def nbytes(self) -> int:
        """Bytes that a look at the values reads, about."""
        return self.state.nbytes

    @property
    def why_no_values(self) -> str | None:
        """Why the values cannot be judged, None if they can."""
        broken = {fault.code for fault in self.state.faults if fault.severity is Severity.ERROR} & _BROKEN
        return "the rank files are incomplete; that is reported above" if broken else None

    def structure(self, code: str) -> Iterator[Fault]:
        """Yield what its files have wrong by the rule `code`."""
        yield from (as_fault(found) for found in self.state.faults if found.code == code)

    def values(self, code: str) -> Iterator[Fault]:
        """Yield what its values have wrong by the rule `code`; they are read at the first call."""
        if not self.looks:
            self.looks.append(tuple(self._look()))
        yield from (as_fault(found) for found in self.looks[0] if found.code == code)

    def half_pairs(self) -> Iterator[HalfPair]:
        """See `LoraSubject`; where files are missing or broken, what they hold is not known."""
        from lora_tool.sharded.frozen_heads import has_lora, parsed_keys  # slow to import, for few folders

        if has_lora(self.state.entries) and not self.why_no_values:
            yield from half_pairs_among(parsed_keys(self.state))

    def _look(self) -> list[Finding]:
        try:
            check = self.state.value_check(self.state.assemble(self.state.entries))
            with (self.watch or _unwatched)(check.nbytes) as advance:
                return check.run(advance)
        except CheckpointError as error:  # damage inside of a file whose outside is good
            path = str(self.state.folder)
            return [
                Finding(code="LT411", severity=Severity.ERROR, path=path, subject=None, message=str(error), hint=None)
            ]


def sharded_subject(checkpoint: ShardedDir, *, watch: Watch | None = None) -> ShardedSubject:
    """Return the subject for a checkpoint; `watch` is told of the reading of values. Raises what `training_state` raises."""
    # a `latest` that is missing or names nothing is LT409's to report
    return ShardedSubject(checkpoint=checkpoint, state=training_state(checkpoint, or_newest=True), watch=watch)


def _unwatched(_: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    return contextlib.nullcontext(lambda _: None)


def as_fault(found: Finding) -> Fault:
    """Return a finding of the checks as what a rule yields."""
    return Fault(
        message=found.message, subject=found.subject, path=found.path, hint=found.hint, severity=found.severity
    )
