"""What was seen of a tensor: how many values are wrong, how far off they are, and how much of ΔW is in the change."""

from __future__ import annotations

import math

from msgspec import Struct


class CannotTellError(Exception):
    """No bound would be honest: the base's spectrum, say, lets float32 take out visibly different parts."""


class Tally(Struct):
    """What was seen of one tensor so far. `squares` and `dot` are sums over the values compared."""

    compared: int = 0
    outside: int = 0
    """Values outside of the bound of the arithmetic that is stated, or of lora-tool's where none is."""
    wrong: int = 0
    """Values outside of the widest bound that may explain them."""
    first: int | None = None
    ulps: float = 0.0
    moved: bool = False
    """Whether a value is not the base's."""
    error_squares: float = 0.0
    change_squares: float = 0.0
    moved_squares: float = 0.0
    dot: float = 0.0
    unknown: str | None = None
    """Why no honest bound was found; then nothing was compared."""

    def add(self, other: Tally) -> None:
        """Take in what was seen of another part of the same tensor."""
        self.compared += other.compared
        self.outside += other.outside
        self.wrong += other.wrong
        self.error_squares += other.error_squares
        self.change_squares += other.change_squares
        self.moved_squares += other.moved_squares
        self.dot += other.dot
        self.moved = self.moved or other.moved
        self.unknown = self.unknown or other.unknown
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
        self.ulps = max(self.ulps, other.ulps)

    @property
    def distance(self) -> float | None:
        """‖W' - (W + ΔW)‖ / ‖ΔW‖."""
        return math.sqrt(self.error_squares / self.change_squares) if self.change_squares else None

    @property
    def factor(self) -> float | None:
        """⟨W' - W, ΔW⟩ / ‖ΔW‖²."""
        return self.dot / self.change_squares if self.change_squares else None

    @property
    def cosine(self) -> float | None:
        """Between W' - W and ΔW."""
        norms = math.sqrt(self.change_squares) * math.sqrt(self.moved_squares)
        return self.dot / norms if norms else None
