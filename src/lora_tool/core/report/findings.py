"""What a report consists of: findings, the folders and rules that were checked or skipped, and the saves of a run.

Plans hold findings, too, and need nothing else of a report.
"""

from __future__ import annotations

import enum
from typing import Protocol

from msgspec import Struct

from lora_tool.core.choices import Choice
from lora_tool.core.display import as_options
from lora_tool.core.errors import LoraToolError


@enum.unique
class Severity(Choice):
    """How bad a finding is. ERROR: the folder does not work, or does not do what was trained. Severities compare by
    weight.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """3 for an error, 2 for a warning, 1 for info."""
        return _WEIGHTS[self]

    def __lt__(self, other: str) -> bool:
        return self.weight < Severity(other).weight

    def __le__(self, other: str) -> bool:
        return self.weight <= Severity(other).weight

    def __gt__(self, other: str) -> bool:
        return self.weight > Severity(other).weight

    def __ge__(self, other: str) -> bool:
        return self.weight >= Severity(other).weight


_WEIGHTS = {Severity.ERROR: 3, Severity.WARNING: 2, Severity.INFO: 1}


class Finding(Struct, frozen=True, kw_only=True):
    """One fault: the rule's code, the file, the tensor or field in it, and what to do."""

    code: str
    severity: Severity
    path: str
    subject: str | None
    message: str
    hint: str | None

    def __str__(self) -> str:
        where = f"{self.path}: `{self.subject}`" if self.subject else self.path
        return f"{self.code} {where}: {self.message}"


class Skipped(Struct, frozen=True, kw_only=True):
    """A rule that could not run on the folder `path`, and why."""

    code: str
    path: str
    reason: str


class Checked(Struct, frozen=True, kw_only=True):
    """A folder that was looked at, what it is, and the codes of the rules that ran on it."""

    path: str
    kind: str
    command: str = ""
    """The one that takes such a folder."""
    rules: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    """What its quantised weights are stored as."""


class Unread(Struct, frozen=True, kw_only=True):
    """A path that could not be opened or read at all, why, and what to do."""

    path: str
    message: str
    hint: str | None = None
    during: str | None = None
    """What could not be done, where that was not the reading: a stage of `ci`."""

    @classmethod
    def of(cls, path: str, error: LoraToolError) -> Unread:
        """Return the path that could not be read for this error, whose words name options."""
        return cls(path=path, message=as_options(str(error)), hint=error.hint and as_options(error.hint))


class Ignored(Struct, frozen=True, kw_only=True):
    """A rule that was switched off, and the reason that the configuration gives."""

    code: str
    reason: str | None = None


class Page(Protocol):
    """What reports say about a rule itself."""

    @property
    def code(self) -> str: ...
    @property
    def severity(self) -> Severity: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def hint(self) -> str | None: ...


# The saves of a training run.


class RunCheckpoint(Struct, frozen=True, kw_only=True):
    """One save of a training run, and what it is worth. `loss` and `metric` are those of its step, None where none was logged."""

    path: str
    name: str
    step: int | None
    epoch: float | None
    loss: float | None
    metric: float | None
    nbytes: int
    """Bytes of all files in the folder, optimizer and all."""
    errors: int
    warnings: int
    codes: tuple[str, ...] = ()
    """The rules that found something, worst first; notes are left out."""
    judged: bool = True
    """Whether lora-tool can tell: it reads neither every layout nor the tensors of every method."""

    incomplete: str | None = None
    """Why not all that its program writes is there, whole; None where it is. The weights may be whole all the same."""
    unresumable: str | None = None
    """Why no training can go on from it; None where one can."""
    unloadable: str | None = None
    """Why its weights cannot be used; None where they can."""
    bad: str | None = None
    """Why it is not good: an error, in its files or in its run's log, or a save that ended before its end."""
    only_values: bool = False
    """Whether it was saved to its end, and the values of its weights alone are wrong: nothing is written to it any more."""
    rank: int | None = None
    """Its place among the good saves by the run's metric, 1 for the best; None where it has none."""

    @property
    def complete(self) -> bool:
        """Whether all of it was saved, without errors: what `prune` counts."""
        return self.bad is None and self.incomplete is None

    @property
    def resumable(self) -> bool:
        """Whether a training can go on from it."""
        return self.unresumable is None

    @property
    def loadable(self) -> bool:
        """Whether its weights can be used."""
        return self.unloadable is None

    @property
    def good(self) -> bool:
        """Whether its weights were saved to the end and nothing is wrong with them or with the run so far."""
        return self.bad is None

    @property
    def verdict(self) -> str:
        """``good``, ``warned``, ``incomplete``, ``broken`` or ``not judged``."""
        if not self.judged:
            return "not judged"
        if self.incomplete and self.loadable:
            return "incomplete"
        return "broken" if self.errors else "warned" if self.warnings else "good"


class Run(Struct, frozen=True, kw_only=True):
    """A run folder: its checkpoints by step, and the best complete one."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    metric: str | None = None
    """The name of the metric that checkpoints are compared by, ``eval_loss``; None where nothing was evaluated."""
    best: str | None = None
    """The path of the best complete checkpoint."""
    why_best: str | None = None
