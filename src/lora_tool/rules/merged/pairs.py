"""The models' rankings of pairs of a preferred and a rejected text, which LT625 judges."""

from __future__ import annotations

import math

from msgspec import Struct

_Z = 1.959964
"""Standard deviations within which 95% of a normal distribution lie."""


class Ranking(Struct, frozen=True, kw_only=True):
    """The rewards that one model gave the chosen and the rejected text of each pair."""

    chosen: tuple[float, ...]
    rejected: tuple[float, ...]

    @property
    def margins(self) -> tuple[float, ...]:
        """Reward of the chosen text minus that of the rejected one, pair by pair."""
        return tuple(one - other for one, other in zip(self.chosen, self.rejected, strict=True))

    @property
    def ties(self) -> int:
        """Pairs whose texts got the same reward."""
        return sum(margin == 0 for margin in self.margins)

    @property
    def without_number(self) -> int:
        """Pairs with a reward that is NaN or infinite: not ranked right."""
        return sum(not math.isfinite(margin) for margin in self.margins)

    @property
    def accuracy(self) -> float:
        """Share of pairs whose chosen text got the higher reward; a tie counts half."""
        right = sum(math.isfinite(margin) and margin > 0 for margin in self.margins)
        return (right + self.ties / 2) / len(self.chosen)

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95% interval, by Wilson (1927): it holds for few pairs, and near 0 and 1."""
        count, share = len(self.chosen), self.accuracy
        wide = 1 + _Z**2 / count
        middle = (share + _Z**2 / (2 * count)) / wide
        half = _Z * math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2) / wide
        return max(0.0, middle - half), min(1.0, middle + half)

    @property
    def mean_margin(self) -> float:
        """The mean margin of the pairs that have one; NaN where none has."""
        from statistics import fmean  # slow to import, and only where pairs were given

        return fmean(self._finite() or (math.nan,))

    @property
    def median_margin(self) -> float:
        """The median margin of the pairs that have one; NaN where none has."""
        from statistics import median

        return median(self._finite() or (math.nan,))

    def _finite(self) -> tuple[float, ...]:
        return tuple(margin for margin in self.margins if math.isfinite(margin))


class PairEvidence(Struct, frozen=True, kw_only=True):
    """How a merged model, and its base with the adapter unmerged, ranked the pairs of a file, both in float32."""

    source: str
    """The file, as it was named."""
    lines: tuple[int, ...]
    """Where in it each pair is."""
    merged: Ranking
    unmerged: Ranking | None
    """None of a model that was not merged from anything."""
    longest: int
    """Tokens of a text that are used: its last ones."""
    cut: int
    """Texts that have more."""
    least: float | None = None
    """The accuracy that the merged model must have; None where that was not asked."""
    streamed: bool = True
    """Whether only a layer at a time was in memory."""

    @property
    def changed(self) -> tuple[int, ...]:
        """The lines of the pairs that the two models order differently."""
        if self.unmerged is None:
            return ()
        ordered = zip(self.lines, self.unmerged.margins, self.merged.margins, strict=True)
        return tuple(line for line, one, other in ordered if (one > 0, one < 0) != (other > 0, other < 0))

    @property
    def largest(self) -> float | None:
        """The largest difference of a text's two rewards; None with one model."""
        if self.unmerged is None:
            return None
        one = (*self.unmerged.chosen, *self.unmerged.rejected)
        return max(abs(a - b) for a, b in zip(one, (*self.merged.chosen, *self.merged.rejected), strict=True))

    @property
    def enough(self) -> bool:
        """Whether the merged model has at least the requested accuracy."""
        return self.least is None or self.merged.accuracy >= self.least
