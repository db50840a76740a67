"""What a report consists of besides its findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lora_tool.report.findings import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A rule that could not run on the folder `path`, and why."""

    code: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A folder that was looked at, what it is, and the codes of the rules that ran on it."""

    path: str
    kind: str
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A path that could not be opened or read at all, why, and what to do."""

    path: str
    message: str
    hint: str | None = None
    during: str | None = None
    """What could not be done, where that was not the reading: a stage of `ci`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A rule that was switched off, and the reason that the configuration gives."""

    code: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """One checkpoint of a training run. `loss` and `metric` are those of its step, None where none was logged."""

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

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong with it that would keep it from being used."""
        return not self.errors

    @property
    def verdict(self) -> str:
        """``good``, ``warned`` or ``broken``."""
        return "broken" if self.errors else "warned" if self.warnings else "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder: its checkpoints by step, and the best one that is whole."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    metric: str | None = None
    """The name of the metric that checkpoints are compared by, ``eval_loss``; None where nothing was evaluated."""
    best: str | None = None
    """The path of the best checkpoint that is whole."""
    why_best: str | None = None


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
