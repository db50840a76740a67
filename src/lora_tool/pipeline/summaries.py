"""What a stage of a pipeline says of its work, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.display import counted, size
from lora_tool.plan.core.plan import Plan

if TYPE_CHECKING:
    from lora_tool.verification.verified import Verification


def counts_of(plan: Plan, folder: Path) -> str:
    """Return what becomes of the tensors, where, and how large that is."""
    counts = ", ".join(f"{count} {action}" for action, count in plan.counts().items() if action != "consumed")
    return f"{counts}: {folder}, {size(plan.data_bytes)}"


def ranking_of(found: Verification) -> str:
    """Return how well the pairs were ranked, where there were any."""
    pairs = found.pairs
    if pairs is None:
        return ""
    before = "" if pairs.unmerged is None else f", base + adapter {pairs.unmerged.accuracy:.3f}"
    return f"; {pairs.merged.accuracy:.3f} of {counted(len(pairs.lines), 'pair')} ranked right{before}"
