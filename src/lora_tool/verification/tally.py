"""Counting over blocks: how many values are wrong, how far off they are, and how much of ΔW is in the change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tool.tensors import DType
from lora_tool.verification.bounds import Bound
from lora_tool.verification.elements import Array, Bytes, decode, half_ulps
from lora_tool.verification.recompute import Recomputed


@dataclass(slots=True)
class Tally:
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
        for name in ("compared", "outside", "wrong", "error_squares", "change_squares", "moved_squares", "dot"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.moved = self.moved or other.moved
        self.unknown = self.unknown or other.unknown
        firsts = [first for first in (self.first, other.first) if first is not None]
        self.first = min(firsts, default=None)
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


def tally_of(
    stored: Bytes, dtype: DType, expected: Recomputed, bounds: Sequence[Bound], half: Array | None = None
) -> Tally:
    """Return the tally of one block: `stored` are its bytes in the merged model, `first` counts from its beginning.

    `half` is half the distance to the next value that could be stored, by default that of `dtype`. `bounds` is the stated one, and a wider one that may explain the values too where the arithmetic is not known.
    """
    values = decode(stored, dtype, expected.base.dtype).reshape(expected.base.shape)
    half = half_ulps(values, dtype) if half is None else half
    moved = values - expected.base
    error = moved - expected.change
    np.abs(error, out=error)
    ratio = error / half
    moved_squares = _dot(moved, moved)
    tally = Tally(
        compared=error.size,
        ulps=float(ratio.max(initial=0.0)) / 2,
        moved=moved_squares != 0 or bool(moved.any()),
        error_squares=_dot(error, error),
        change_squares=_dot(expected.change, expected.change),
        moved_squares=moved_squares,
        dot=_dot(moved, expected.change),
    )
    if not tally.ulps <= bounds[0].of_result / 2:  # NaN too is a reason to look closer
        _look_closer(tally, values, error, ratio, expected, bounds)
    return tally


def _look_closer(
    tally: Tally, values: Array, error: Array, ratio: Array, expected: Recomputed, bounds: Sequence[Bound]
) -> None:
    """Count the values outside the bounds, each with its own size of change and product."""
    rows, columns = np.divmod(np.flatnonzero(~(ratio <= bounds[0].of_result)), ratio.shape[1])
    found, off = values[rows, columns], error[rows, columns]
    half = off / ratio[rows, columns]
    base, change = np.abs(expected.base[rows, columns]), np.abs(expected.change[rows, columns])
    products = expected.products(rows, columns)
    room = expected.room(rows, columns) if expected.room is not None else 0.0
    outside = [
        ~(off <= bound.of_result * half + bound.of_change * change + bound.of_product * products + room)
        for bound in bounds
    ]
    tally.outside, tally.wrong = int(np.count_nonzero(outside[0])), int(np.count_nonzero(outside[-1]))
    if tally.outside:
        at = int(np.flatnonzero(outside[0])[0])
        tally.first = int(rows[at]) * ratio.shape[1] + int(columns[at])
    # where what was added cancels, the neighbours of the small result are near; the size of what was added decides
    largest = np.maximum(np.maximum(np.abs(found), base), products)
    apart = np.maximum(half, half * largest / np.maximum(np.abs(found), np.finfo(half.dtype).tiny))
    ratio[rows, columns] = off / apart
    tally.ulps = float(ratio.max(initial=0.0)) / 2


def _dot(a: Array, b: Array) -> float:
    return float(np.dot(a.reshape(-1), b.reshape(-1)))
