"""What a report says of the checkpoints of a training run."""

from __future__ import annotations

from msgspec import Struct


class RunCheckpoint(Struct, frozen=True, kw_only=True):
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
    judged: bool = True
    """Whether lora-tool can tell: it reads neither every layout nor the tensors of every method."""

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong with it that would keep it from being used."""
        return not self.errors

    @property
    def verdict(self) -> str:
        """``good``, ``warned``, ``broken`` or ``not judged``."""
        return "not judged" if not self.judged else "broken" if self.errors else "warned" if self.warnings else "good"


class Run(Struct, frozen=True, kw_only=True):
    """A run folder: its checkpoints by step, and the best one that is whole."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    metric: str | None = None
    """The name of the metric that checkpoints are compared by, ``eval_loss``; None where nothing was evaluated."""
    best: str | None = None
    """The path of the best checkpoint that is whole."""
    why_best: str | None = None
