"""Several inspections side by side on a terminal: what they have in common once, then what differs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import fits_folded, new_table, print_all
from lora_tool.core.display import as_cell, counted, number, printable, shortened
from lora_tool.workflows.inspection.model import AdapterInspection, Inspection
from lora_tool.workflows.inspection.targets import place, short_names, spread

Column = Mapping[str, str]
"""What stands in each row of one folder."""


def show_several(inspections: Sequence[Inspection], out: TextIO) -> None:
    """Write the inspections to `out`, a column for each; where they do not fit side by side, a few at a time."""
    titles = [printable(title) for title in _titles([inspection.path for inspection in inspections])]
    columns = [dict(_rows(inspection)) for inspection in inspections]
    names = list(dict.fromkeys(itertools.chain.from_iterable(columns)))
    common = [name for name in names if len({column.get(name, "") for column in columns}) == 1]
    parts: list[RenderableType] = [Text(counted(len(inspections), "folder"), style="bold")]
    if common:
        table = new_table(("the same in all", ""), [(name, shortened(columns[0][name])) for name in common])
        table.columns[1].no_wrap = False
        parts.append(table)
    different = [name for name in names if name not in common]
    parts += _side_by_side("different", titles, different, columns, out)
    norms = [_norms(inspection) for inspection in inspections]
    moved = sorted(dict.fromkeys(itertools.chain.from_iterable(norms)), key=place)
    parts += _side_by_side("median ‖ΔW‖", [f"{title}>" for title in titles], moved, norms, out)
    print_all(parts, out)


def _side_by_side(
    what: str, titles: Sequence[str], rows: Sequence[str], columns: Sequence[Column], out: TextIO
) -> Iterator[Table]:

    def table(begin: int, end: int) -> Table:
        shown = ((row, *(as_cell(each.get(row, "-")) for each in columns[begin:end])) for row in rows)
        return new_table((what, *titles[begin:end]), shown)

    begin = 0
    while begin < len(columns) and rows:
        end = len(columns)
        while end > begin + 1 and not fits_folded(table(begin, end), out):
            end -= 1
        yield table(begin, end)
        begin = end


def _rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts, each in one line, and for an adapter what its table would have."""
    yield "kind", inspection.kind
    for name, value in inspection.facts():
        if name == "tokenizer":  # the names are the same everywhere
            yield name, counted(len(inspection.tokenizer_files), "file")
        elif value:
            yield name, ", ".join(value.splitlines())
    if isinstance(inspection, AdapterInspection):
        targets = sorted(inspection.targets, key=lambda target: place(target.name))
        yield "targets", ", ".join(dict.fromkeys(target.name for target in targets))
        yield "modules", str(len(inspection.modules))
        yield "rank", _values(target.rank for target in targets)
        yield "alpha", _values(target.alpha for target in targets)
        yield "scaling", _values(target.scaling for target in targets)


def _values(values: Iterable[float | None]) -> str:
    found = set(values)
    listed = [f"{value:.4g}" for value in sorted((value for value in found if value is not None), reverse=True)]
    return ", ".join([*listed, *(["?"] if None in found else [])])


def _norms(inspection: Inspection) -> dict[str, str]:
    found: dict[str, list[float]] = defaultdict(list)
    for module in inspection.modules if isinstance(inspection, AdapterInspection) else ():
        if module.norm_delta is not None:
            found[module.target].append(module.norm_delta)
    return {target: number(spread(values).median) for target, values in found.items()}


def _titles(paths: Sequence[str]) -> list[str]:
    """Return the shortest end of each path that no other has; equal ones are numbered."""
    dotted = {path: ".".join(part.replace(".", "\0") for part in PurePath(path).parts) for path in paths}
    short = short_names(dotted.values())
    ends = [short[dotted[path]].replace(".", "/").replace("\0", ".") for path in paths]
    return [end if ends.count(end) == 1 else f"{end} ({ends[: at + 1].count(end)})" for at, end in enumerate(ends)]
