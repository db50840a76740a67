"""The margins of a reward model's pairs as a picture: how far chosen and rejected are apart, before and after a merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lora_tool.display import counted, printable
from lora_tool.errors import MissingDependency
from lora_tool.execution.folder import replace_file
from lora_tool.pictures.page import page
from lora_tool.pictures.saving import save
from lora_tool.pictures.theme import ONE, RULE, SOFT, plain, themed
from lora_tool.rules.merged.pairs import PairEvidence
from lora_tool.version import __version__

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingDependency("matplotlib", extra="plot") from error

_MOST_BARS = 60
_SENTENCE = (
    "Right of the line the chosen text has the higher reward. Good: most pairs are there, and merging changed nothing."
)


def draw_margins(title: str, found: PairEvidence, path: Path) -> None:
    """Write the histogram of the margins of `found` under the `title`: a page or a picture, as `path` ends.

    It appears complete or not at all, and replaces a file of that name. Raises `OSError` where it cannot be written.
    """
    with themed():
        figure = margins_figure(found)
        if path.suffix == ".html":
            drawn = (("How far apart chosen and rejected are", _SENTENCE, figure),)
            text = page(printable(title), _facts(found), (), (), {}, footer=f"lora-tool {__version__}", drawn=drawn)
            replace_file(path, text.encode())
            return
        figure.suptitle(plain(title), x=0.01, ha="left", weight="bold", fontsize=13)
        figure.axes[0].set_title(_SENTENCE, fontsize=8.5, fontweight="normal", color=SOFT)
        save(figure, path)


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


def margins_figure(found: PairEvidence) -> Figure:
    """Return the histogram; a margin that is no number has no place in it."""
    drawn = {"base + adapter": found.unmerged, "merged": found.merged}
    shown = {
        name: [margin for margin in ranking.margins if math.isfinite(margin)]
        for name, ranking in drawn.items()
        if ranking is not None
    }
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    edges = _edges([margin for margins in shown.values() for margin in margins], len(found.lines))
    for name, margins in shown.items():
        merged = name == "merged"
        # one filled, one an outline: they lie on each other where the merge is good
        look = {"histtype": "step", "color": ONE, "linewidth": 1.6} if merged else {"color": RULE}
        axes.hist(margins, bins=edges, label=name, **look)
    axes.axvline(0, color=SOFT, linewidth=1)
    axes.set_xlabel("reward of chosen - reward of rejected")
    axes.set_ylabel("pairs")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.legend()
    return figure


def _edges(margins: Sequence[float], pairs: int) -> list[float]:
    """Return where the bars begin and end: zero is among them, so that no bar holds pairs ranked right and wrong."""
    bars = min(_MOST_BARS, max(10, 2 * math.isqrt(pairs)))
    low, high = min(margins, default=0.0), max(margins, default=0.0)
    width = (high - low) / bars or 1.0
    return [at * width for at in range(math.floor(low / width), math.floor(high / width) + 2)]
