"""What a stage of a pipeline says of its work, in one line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, open_checkpoint
from lora_tool.core.display import counted, size
from lora_tool.plans.core.plan import Plan

if TYPE_CHECKING:
    from lora_tool.core.report.runs import Run
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


def better_than(finished: Checkpoint, run: Run) -> str:
    """Return that a checkpoint of the run is better than its `finished` weights, which are taken; "" where none is."""
    if run.metric is None or run.best in (None, run.path):
        return ""
    best = Path(str(run.best))
    if _weights_of(finished) == _weights_of(open_checkpoint(best)):  # the Trainer's load_best_model_at_end
        return ""
    command = f"lora-tool ci {shlex.quote(str(best))}"
    return f": taking its finished weights; the best is {best.name} ({run.why_best}): {command}"


def _weights_of(checkpoint: Checkpoint) -> str | None:
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for runs with finished weights only

    return fingerprint(checkpoint.weights) if isinstance(checkpoint, AdapterDir | ModelDir) else None
