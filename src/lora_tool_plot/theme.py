"""The look of all pictures: few colours, each with a name by which a page shows another one in the dark."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lora_tool.core.display import printable
from lora_tool.core.errors import MissingDependency

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.colors import to_hex
    from matplotlib.font_manager import fontManager
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
except ImportError as error:
    raise MissingDependency("matplotlib", extra="plot") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAT = colormaps["viridis"]
"""Read by people who see no red or no green, and in grey."""
AROUND = colormaps["RdBu_r"]
"""Blue below the centre of a scale and red above it, pale at it."""
DEPTHS = 16
"""Shades that tell early layers from late ones."""
INK, SOFT, RULE, ONE, TWO, SHADE = "#1a1d21", "#5c6570", "#e1e5ea", "#2a6fb5", "#d9662b", "#eef0f3"
"""Text, what explains it, grid lines, the first and the second curve of a panel, the range behind lines."""
NOT_A_NUMBER = "#9aa3ad"

_DARK = {INK: "#e8eaed", SOFT: "#9aa4b0", RULE: "#333a42", ONE: "#6cb0f2", TWO: "#f39a68", SHADE: "#242a31"}
_NAMES = {INK: "ink", SOFT: "soft", RULE: "rule", ONE: "one", TWO: "two", SHADE: "shade"}
_OTHER_LETTERS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "WenQuanYi Micro Hei", "Arial Unicode MS",
)  # fmt: skip
"""Fonts for letters that DejaVu Sans lacks, where one is installed."""
_MOST_TICKS = 5
_LETTERS = 11.5
"""Letters of a title to an inch."""
SETTINGS: Mapping[str, object] = {
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 6,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": SOFT,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


@contextlib.contextmanager
def themed() -> Iterator[None]:
    """Make matplotlib draw so within the block; letters that no font has become boxes, without a warning."""
    there = {font.name for font in fontManager.ttflist}
    family = ["DejaVu Sans", *(name for name in _OTHER_LETTERS if name in there)]
    with rc_context({**SETTINGS, "font.family": family}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def depth_colours(*, dark: bool = False) -> tuple[str, ...]:
    """Return the shades from the first layer to the last; on dark ground none is too dark, on white none too pale."""
    low, high = (0.22, 1.0) if dark else (0.0, 0.9)
    return tuple(str(to_hex(HEAT(low + (high - low) * at / (DEPTHS - 1)))) for at in range(DEPTHS))


def depth_colour(share: float) -> str:
    """Return the shade of a layer by its place, from 0 for the first to 1 for the last."""
    return depth_colours()[round(share * (DEPTHS - 1))]


def heat_colour(position: float | None, *, around: bool = False) -> str:
    """Return the colour of a heat map at a `position` from 0 to 1 as ``#rrggbb``, and grey for None.

    `around` a centre it is one of two colours.
    """
    return NOT_A_NUMBER if position is None else str(to_hex((AROUND if around else HEAT)(position)))


def variables(*, dark: bool) -> dict[str, str]:
    """Return the names of a page's colours and what they are on white or on dark ground."""
    named = {name: _DARK[colour] if dark else colour for colour, name in _NAMES.items()}
    return named | {f"d{at}": colour for at, colour in enumerate(depth_colours(dark=dark))}


def by_name(svg: str) -> str:
    """Return an SVG with every colour of ours by its name in the page, ``var(--ink)``, so that it follows the reader's
    choice of light and dark.
    """
    names = _NAMES | {colour: f"d{at}" for at, colour in enumerate(depth_colours())}
    for colour, name in names.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def plain(text: str) -> str:
    """Return a name from a file as matplotlib draws it as it stands: a pair of dollar signs would be mathematics."""
    return printable(text).replace("$", r"\$")


def short_number(value: float, _position: object = None) -> str:
    """Return a tick's number as people write it: ``0.0002``, ``12``, ``4.5M``."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.2g}"  # noqa: PLR2004 - as people read them


def number_axis(axes: Axes, which: str, ticks: int = 5, *, whole: bool = False) -> None:
    """Give an axis few round ticks, with their numbers written out; `whole` ones for what is counted."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(short_number))


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers from `low` to `high`, both above 0: powers of ten, else 1, 2 and 5 of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    if len(powers) > 1:
        return powers[:: math.ceil(len(powers) / _MOST_TICKS)]
    between = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [tick for tick in between if low <= tick <= high][:_MOST_TICKS] or [low, high]


def cut(name: str, most: int) -> str:
    """Return a name of at most so many letters: of a longer one its end, which tells it from others."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def title(axes: Axes, name: str) -> None:
    """Write the name over a panel, no longer than it is wide."""
    figure = axes.get_figure(root=True)
    wide = axes.get_position().width * figure.get_figwidth() if figure is not None else 0.0
    axes.set_title(plain(cut(name, max(8, int(wide * _LETTERS)))))
