"""One number per module, laid out as targets by layers: the data of a heat map."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_tool.inspection.naming import short_names
from lora_tool.inspection.spectra import Spectrum


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`cells[row][column]` is the number of target `rows[row]` in layer `columns[column]`; None where there is none."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]

    @property
    def most(self) -> float:
        """The largest finite number, 1 where there is none or it is zero: the end of the colour scale."""
        finite = [cell for row in self.cells for cell in row if cell is not None and math.isfinite(cell)]
        return max(finite, default=1.0) or 1.0


def grids(spectra: Iterable[Spectrum]) -> tuple[Grid, ...]:
    """Return the heat maps of an adapter: how far each module moved, and in how many directions.

    The first is ‖ΔW‖/‖W‖ where the base's norms are known for every module, else ‖ΔW‖. With a base there is a third:
    how much of ΔW is left after rounding to the base's type.
    """
    listed = tuple(spectra)
    relative = bool(listed) and all(item.relative_norm is not None for item in listed)
    kept = any(item.kept is not None for item in listed)
    return (
        _grid("‖ΔW‖ / ‖W‖", listed, lambda item: item.relative_norm)
        if relative
        else _grid("‖ΔW‖", listed, lambda item: item.norm),
        _grid("effective rank of ΔW", listed, lambda item: item.effective_rank),
        *([_grid("share of ΔW left after rounding (cosine)", listed, lambda item: item.kept)] if kept else []),
    )


def _grid(title: str, spectra: tuple[Spectrum, ...], value: Callable[[Spectrum], float | None]) -> Grid:
    names = short_names({item.target for item in spectra})
    layers = sorted({item.layer for item in spectra if item.layer is not None})
    columns: tuple[int | None, ...] = (*layers, *([None] if any(item.layer is None for item in spectra) else []))
    held: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for item in spectra:
        number = value(item)
        if number is not None:
            held[item.target, item.layer].append(number)
    most = {row: max((len(held[row, column]) for column in columns), default=1) for row in names}
    rows = tuple(dict.fromkeys(item.target for item in spectra))
    return Grid(
        title=title,
        rows=tuple(names[row] + (f" (largest of {most[row]})" if most[row] > 1 else "") for row in rows),
        columns=tuple("–" if column is None else str(column) for column in columns),
        cells=tuple(tuple(max(held[row, column], default=None) for column in columns) for row in rows),
    )
