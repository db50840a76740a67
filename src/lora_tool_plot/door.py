"""The entry point of these pictures: what draws them is imported only to draw, because matplotlib takes a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.core.errors import require_packages
from lora_tool.workflows.drawing import Drawer

if TYPE_CHECKING:
    from lora_tool.checkpoints import Checkpoint, ModelDir
    from lora_tool.rules.merged.pairs import PairEvidence
    from lora_tool.workflows.inspection.comparison import Comparison


def _require() -> None:
    require_packages(("matplotlib", "jinja2"), extra="plot")


def _checkpoint(checkpoint: Checkpoint, path: Path, *, base: ModelDir | None, facts: Iterable[tuple[str, str]]) -> None:
    from lora_tool_plot.drawing import draw

    draw(checkpoint, path, base=base, facts=facts)


def _comparison(comparison: Comparison, path: Path, *, names: tuple[str, str]) -> None:
    from lora_tool_plot.drawing import draw_comparison

    draw_comparison(comparison, path, names=names)


def _margins(title: str, found: PairEvidence, path: Path) -> None:
    from lora_tool_plot.margins import draw_margins

    draw_margins(title, found, path)


DRAWER = Drawer(require=_require, checkpoint=_checkpoint, comparison=_comparison, margins=_margins)
