"""What a report says about the saves of a training run."""

from __future__ import annotations

from msgspec import Struct


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
        if self.errors:
            return "broken"
        return "incomplete" if self.incomplete else "warned" if self.warnings else "good"


class Run(Struct, frozen=True, kw_only=True):
    """A run folder: its checkpoints by step, and the best good one."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    metric: str | None = None
    """The name of the metric that checkpoints are compared by, ``eval_loss``; None where nothing was evaluated."""
    best: str | None = None
    """The path of the best good checkpoint."""
    why_best: str | None = None
