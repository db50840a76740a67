"""The margins of a reward model's pairs as a picture: how far chosen and rejected are apart, before and after a merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lora_tool.core.display import counted, printable
from lora_tool.core.errors import MissingDependency
from lora_tool.core.version import __version__
from lora_tool.execution.folder import replace_file
from lora_tool.rules.merged.pairs import PairEvidence
from lora_tool_plot.grid import rounded_up
from lora_tool_plot.page import page
from lora_tool_plot.saving import in_folder, save
from lora_tool_plot.sheet import Drawn, sheet
from lora_tool_plot.theme import ONE, RULE, SOFT, themed

try:
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingDependency("matplotlib", extra="plot") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 60
_HEADING = "How far apart chosen and rejected are"
_SENTENCE = (
    "Right of the line the chosen text has the higher reward. Good: most pairs lie there, and the merge changed "
    "nothing."
)


def draw_margins(title: str, found: PairEvidence, path: Path) -> None:
    """Write the histogram of the margins of `found` under the `title`: a page or a picture, as `path` ends.

    It appears complete or not at all, and replaces a file of that name; in a folder it is `margins.png`. Raises
    `ExecutionError` where it cannot be written.
    """
    path = path if path.suffix else in_folder(path, "margins")
    drawn: tuple[Drawn, ...] = ((_HEADING, _SENTENCE, partial(_draw_histogram, found=found)),)
    facts, footer = _facts(found), f"lora-tool {__version__}"
    with themed():
        if path.suffix == ".html":
            text = page(printable(title), facts, (), (), {}, footer=footer, drawn=drawn)
            replace_file(path, text.encode())
        else:
            told = " · ".join(f"{name}: {value}" for name, value in facts)
            save(sheet(printable(title), told, (), (), {}, footer=footer, drawn=drawn), path)


def _facts(found: PairEvidence) -> list[tuple[str, str]]:
    """Return what is listed above the picture: names and values."""
    low, high = found.merged.interval
    listed = [("pairs", f"{len(found.lines):,} of {found.source}")]
    if found.unmerged is not None:
        listed.append(("accuracy of base + adapter", f"{found.unmerged.accuracy:.3f}"))
    listed.append(("accuracy of merged", f"{found.merged.accuracy:.3f} (95% {low:.3f} to {high:.3f})"))
    if found.unmerged is not None:
        listed.append(("ordered differently", counted(len(found.changed), "pair")))
    return listed


def _draw_histogram(axes: Axes, found: PairEvidence) -> None:
    """Draw the margins before the merge filled and after it as a line; one that is no number has no place."""
    drawn = {"base + adapter": found.unmerged, "merged": found.merged}
    shown = {
        name: [margin for margin in ranking.margins if math.isfinite(margin)]
        for name, ranking in drawn.items()
        if ranking is not None
    }
    edges = _edges([margin for margins in shown.values() for margin in margins], len(found.lines))
    for name, margins in shown.items():
        merged = name == "merged"
        # one filled, one an outline: they lie on each other where the merge is good
        kind: Literal["step", "stepfilled"] = "step" if merged else "stepfilled"
        colour, width = (ONE, 1.6) if merged else (RULE, 0.0)
        axes.hist(margins, bins=edges, label=name, histtype=kind, color=colour, linewidth=width)
    axes.axvline(0, color=SOFT, linewidth=1)
    axes.set_xlabel("reward of chosen - reward of rejected")
    axes.set_ylabel("pairs")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.legend()


def _edges(margins: Sequence[float], pairs: int) -> list[float]:
    """Return where the bars begin and end, round numbers: zero is among them, so that no bar holds pairs ranked right
    and wrong.
    """
    bars = min(_MOST_BARS, max(4, 2 * math.isqrt(pairs)))
    low, high = min(margins, default=0.0), max(margins, default=0.0)
    width = rounded_up((high - low) / bars, (1.0, 2.0, 2.5, 5.0, 10.0)) or 1.0
    return [at * width for at in range(math.floor(low / width), math.floor(high / width) + 2)]
