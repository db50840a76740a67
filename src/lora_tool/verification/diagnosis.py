"""What is wrong with a merged tensor that is not W + ΔW: not merged, merged twice, scaled, transposed, or another's."""

from __future__ import annotations

import math

import numpy as np

from lora_tool.plan.model import DoraDelta, LoraDelta, Step
from lora_tool.rules.evidence import Verdict
from lora_tool.tensors import StoredTensor
from lora_tool.verification.bounds import sixteen_bit_bound, working_type
from lora_tool.verification.elements import Array, decode, half_ulps
from lora_tool.verification.files import Files, Rows
from lora_tool.verification.pieces import BLOCK_WEIGHTS, sampled_rows
from lora_tool.verification.recompute import Recomputer
from lora_tool.verification.tally import Tally

_EXPLAINED = 0.995
"""Share of the values that a diagnosis must account for."""
_AS_ASKED = 0.02
"""A factor nearer to 1 than this is no other scaling."""
_UNRELATED = 0.3
"""Cosine below which W' - W has another direction than ΔW."""
_ROUNDING = 1 / math.sqrt(3)
"""Root of the mean square of a rounding error, in half units in the last place."""


def diagnose(step: Step, stored: StoredTensor, tally: Tally, files: Files) -> tuple[Verdict, float | None]:
    """Return what became of a tensor with values outside its bound, and the factor of ΔW in it where that tells."""
    if not isinstance(step.op, LoraDelta | DoraDelta):
        return (Verdict.UNCHANGED if not tally.moved else Verdict.DIFFERENT), None
    if not tally.moved:
        return Verdict.UNCHANGED, 0.0
    rows = _a_sample(stored, step)
    wide = working_type(step.op, stored.dtype)
    recomputer = Recomputer(files)
    expected = recomputer.whole(step.op, rows, wide)
    values = decode(files.rows(stored, rows), stored.dtype, wide).reshape(expected.base.shape)
    half = half_ulps(values, stored.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = values - expected.base
        bound = sixteen_bit_bound(step.op, stored.dtype)
        margin = bound.of_result * half * 2

        def explains(change: Array, factor: float) -> bool:
            # two roundings where the adapter was merged twice, and the factor is an estimate
            room = margin + (abs(factor) * bound.of_change + 0.01 * abs(factor)) * np.abs(change)
            return float(np.mean(np.abs(moved - factor * change) <= room)) >= _EXPLAINED

        factor = _projected(moved, expected.change)
        if factor is not None and math.isfinite(factor):
            noise = float(np.linalg.norm(half)) * _ROUNDING / math.sqrt(half.size)
            doubt = 4 * noise / max(float(np.linalg.norm(expected.change)), 1e-300)
            if abs(factor - 1) > max(_AS_ASKED, doubt) and explains(expected.change, factor):
                return Verdict.SCALED, factor
        turned = recomputer.transposed_change(step.op, rows)
        if turned is not None:
            share = _projected(moved, turned.astype(wide))
            if share is not None and abs(share - 1) < 0.25 and explains(turned.astype(wide), 1.0):  # noqa: PLR2004
                return Verdict.TRANSPOSED, factor
    wrong = tally.wrong > tally.compared // 2
    unrelated = tally.cosine is not None and abs(tally.cosine) < _UNRELATED
    return (Verdict.UNRELATED if wrong and unrelated else Verdict.DIFFERENT), factor


def _projected(moved: Array, change: Array) -> float | None:
    squares = float(np.vdot(change, change))
    return float(np.vdot(moved, change)) / squares if squares else None


def _a_sample(stored: StoredTensor, step: Step) -> Rows:
    """Return rows from everywhere, as many as are recomputed together; all of a small tensor."""
    height = stored.shape[0]
    fit = max(1, BLOCK_WEIGHTS // max(1, stored.shape[-1]))
    if height <= fit:
        return [(0, height)]
    rows = {row for group in sampled_rows(stored, step.op) for row, _ in group}
    rows |= set(range(0, height, math.ceil(height / fit)))
    return [(row, row + 1) for row in sorted(rows)[: 2 * fit]]
