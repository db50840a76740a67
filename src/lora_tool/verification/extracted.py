"""Whether an extracted adapter is as near to the difference of its two models as its manifest says: by that difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from lora_tool.core.actions import TensorAction
from lora_tool.core.progress import Progress
from lora_tool.plans.algebra.provenance import ExtractInputs
from lora_tool.plans.algebra.terms import Factors, Term
from lora_tool.plans.core.ops import Copy
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.verification.elements import FLOATS, Files
from lora_tool.verification.pieces import row_blocks
from lora_tool.verification.products import evidence_of_each, evidence_of_factors, spanned

_DOUBLE = np.dtype(np.float64)
_TOLD = 1e-3
"""How far the residual may be from the one that was told, which was found in float32 without the difference itself. What
the factors hold is told to more digits: A is orthogonal to all that is left out."""
_SINGLE = 2e-6


def copied_steps(inputs: ExtractInputs) -> Iterator[Step]:
    """Yield the copies that the adapter's whole tensors must be."""
    for saved, name in inputs.whole.items():
        tensor = inputs.model.tensors[name]
        out = inputs.made.tensors[saved].spec
        yield Step(out=out, op=Copy(source=tensor), action=TensorAction.COPIED, reason=f"copied from {tensor.path}")


def check_extracted(
    inputs: ExtractInputs, made: tuple[Factors, ...], *, progress: Progress
) -> dict[str, TensorEvidence]:
    """Return the evidence of every module: ‖W₁ - W₀ - ΔW‖, summed over all values, beside what the manifest says of it.

    It is named by the written lora_B. Raises `OSError`, `SourceChanged`.
    """
    told = inputs.residuals
    pairs = ((factors, factors.terms[0]) for factors in made)
    return evidence_of_each(pairs, lambda pair, files: _evidence(*pair, inputs, told, files), progress)


def _evidence(
    factors: Factors, term: Term, inputs: ExtractInputs, told: Mapping[str, float], files: Files
) -> TensorEvidence:
    ours, theirs = (model.tensors.get(f"{factors.module}.weight") for model in (inputs.model, inputs.base))
    reason, share = "", None
    if ours is None or theirs is None or factors.module not in told:
        reason = "has LoRA on a module that one of the models lacks or that the manifest does not name"
    else:
        b, a = (files.matrix(each, None, _DOUBLE) for each in (term.b, term.a))
        left, right = (a.T * term.scale, b.T) if inputs.transposed else (b * term.scale, a)
        if (len(left), right.shape[1]) != ours.shape:
            return evidence_of_factors(
                term, f"is [{len(left)}, {right.shape[1]}], but the difference is {list(ours.shape)}", None
            )
        basis = spanned(right.T) if np.isfinite(right).all() else np.empty((len(right.T), 0))
        squares = norm = wrong = 0.0
        for rows in row_blocks(ours):
            (first, last) = rows[0]
            difference = files.matrix(ours, rows, _DOUBLE) - files.matrix(theirs, rows, _DOUBLE)
            norm += float(np.vdot(difference, difference))
            difference -= left[first:last] @ right
            squares += float(np.vdot(difference, difference))
            wrong += float(np.square(difference @ basis).sum())
        found, norm = math.sqrt(squares), math.sqrt(norm)
        unit = max(FLOATS[each.dtype].roundoff for each in (term.a, term.b))
        rounding = (_SINGLE + 4 * unit) * norm
        share = found / norm if norm else 0.0
        if not found <= told[factors.module] * (1 + _TOLD) + rounding:
            reason = f"ΔW is {found:.6g} away from W₁ - W₀, but {told[factors.module]:.6g} is recorded"
        elif not math.sqrt(wrong) <= rounding:  # B is what W₁ - W₀ does in the directions of A
            reason = f"ΔW is {math.sqrt(wrong):.6g} away from W₁ - W₀ in the directions that lora_A spans"
    return evidence_of_factors(term, reason, share)
