"""Whether factors computed from a base multiply to the adapter's change: value by value, in float64, block by block.

Each module's change is computed as a whole matrix, a few rows at a time: s·B·A less what an init took out (`initial`),
the rows of an embedding less the base's, or W scaled as DoRA scales it. The product that was written is taken from it,
and the norm of the difference is compared with the recorded one. The planner decomposes instead: it never forms ΔW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.checkpoints import ModelDir
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import TensorAction
from lora_tool.formats.adapter_config import INITS_RECOMPUTED
from lora_tool.models import architecture_of
from lora_tool.plans.algebra.from_base import ChangedRows, base_weight, rows_that_differ
from lora_tool.plans.algebra.provenance import ExtractInputs, SumInputs
from lora_tool.plans.algebra.terms import Factors, Term
from lora_tool.plans.core.ops import Copy
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.verification.elements import FLOATS, Array, Files
from lora_tool.verification.initial import taken
from lora_tool.verification.pieces import CannotTellError, row_blocks
from lora_tool.verification.products import evidence_of_each, evidence_of_factors, spanned, unknown_of_factors

_DOUBLE = np.dtype(np.float64)
_BLOCK = 1 << 19
_RECORDED_WITHIN = 1e-3
"""How far the difference may be from the recorded one, which the planner computes in float32 for DoRA, relative."""
_SINGLE = 2e-6
_IN_DOUBLE = 2.0**-24
"""What float64 leaves of a bound for float32, and five digits to spare."""

RowsOf: TypeAlias = Callable[[int, int], Array]
"""Gives rows of a matrix, from the first to the last (not included)."""


class _Expected(Struct, frozen=True, kw_only=True):
    """A change as a matrix [out, in], and what rounding may do to it."""

    rows: RowsOf
    room: float = 0.0
    recorded: float = 0.0
    """The recorded distance of the product from the change, as a share of its norm."""


def computed_modules(inputs: SumInputs, view: AdapterView) -> frozenset[str]:
    """Return the modules whose change was computed from the base, by the adapter that it was made of."""
    if inputs.base is None:
        return frozenset()
    if view.config.init_lora_weights in INITS_RECOMPUTED:
        return frozenset(layer.module for layer in view.layers)
    dora = {layer.module for layer in view.layers if layer.magnitude is not None}
    return frozenset(dora | {each.module for each in _rows(inputs.base, view)})


def check_computed(
    inputs: SumInputs, view: AdapterView, made: tuple[Factors, ...], *, progress: Progress
) -> dict[str, TensorEvidence]:
    """Return the evidence of every module of `made`, each of which was computed from the base of `inputs`.

    It is named by the written lora_B. Raises `OSError`, `SourceChanged`.
    """
    base = inputs.base
    if base is None:
        return {}
    rows = {each.module: each for each in _rows(base, view)}
    layers, recorded = {layer.module: layer for layer in view.layers}, inputs.discarded

    def one(pair: tuple[Factors, Term], files: Files) -> TensorEvidence:
        module, written = pair[0].module, pair[1]
        try:
            if module in rows:
                expected = _of_rows(rows[module], embedding=pair[0].embedding, files=files)
            else:
                expected = _of_layer(layers[module], view, base, recorded.get(module, 0.0), files)
        except CannotTellError as error:
            return unknown_of_factors(written, str(error))
        return _compared(expected, written, files)

    return evidence_of_each(((each, each.terms[0]) for each in made), one, progress)


def _rows(base: ModelDir, view: AdapterView) -> Iterator[ChangedRows]:
    return (each for each in rows_that_differ(view, base) if each.places)


def _compared(expected: _Expected, written: Term, files: Files) -> TensorEvidence:
    left, right = (files.matrix(each, None, _DOUBLE) for each in (written.b, written.a))
    left = left * written.scale
    norm = squares = size = 0.0
    step = max(1, _BLOCK // max(1, right.shape[1]))
    for at in range(0, len(left), step):
        block = expected.rows(at, min(at + step, len(left)))
        product = left[at : at + step] @ right
        norm += float(np.vdot(block, block))
        size += float(np.vdot(product, product))
        block = block - product
        squares += float(np.vdot(block, block))
    found, norm = math.sqrt(squares), math.sqrt(norm)
    unit = max(FLOATS[each.dtype].roundoff for each in (written.a, written.b))
    factors = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    recorded = expected.recorded * norm
    allowed = (
        recorded * (1 + _RECORDED_WITHIN)
        + expected.room
        + 4 * unit * (norm + factors)
        + (_SINGLE * norm if recorded else 0.0)
    )
    reason = (
        ""
        if found <= allowed
        else f"ΔW is {found:.6g} away from what the base and the adapter give, but {recorded:.6g} is recorded"
    )
    return evidence_of_factors(written, reason, found / norm if norm else 0.0)


def _of_rows(changed: ChangedRows, *, embedding: bool, files: Files) -> _Expected:
    ours, theirs = (
        files.matrix(tensor, [(row, row + 1) for row in rows], _DOUBLE)
        for tensor, rows in ((changed.tensor, changed.rows), (changed.base, changed.places))
    )
    whole = np.zeros(changed.base.shape)
    whole[list(changed.places)] = ours - theirs
    change = whole.T if embedding else whole  # PEFT's embedding ΔW is [width, vocabulary]
    return _Expected(rows=lambda first, last: change[first:last])


def _of_layer(layer: LoraLayer, view: AdapterView, base: ModelDir, recorded: float, files: Files) -> _Expected:
    if layer.a is None or layer.b is None or layer.scaling is None:
        raise AssertionError("what was computed from half a pair would not have been written")
    left, right = files.matrix(layer.b, None, _DOUBLE) * layer.scaling, files.matrix(layer.a, None, _DOUBLE)
    weight = base_weight(base, layer.target)
    if layer.magnitude is not None:
        sizes = files.matrix(layer.magnitude, None, _DOUBLE).reshape(-1, 1)

        def scaled(first: int, last: int) -> Array:
            before = files.matrix(weight, [(first, last)], _DOUBLE)
            moved = before + left[first:last] @ right
            moved *= sizes[first:last] / np.sqrt(np.square(moved).sum(axis=1, keepdims=True))
            return np.asarray(moved - before)

        return _Expected(rows=scaled, recorded=recorded)
    arch = architecture_of(base.whole_config.model_type or "")
    whole = files.matrix(weight, None, _DOUBLE)
    transposed = arch is not None and layer.target.rpartition(".")[2] in arch.conv1d
    out = taken(view.config.init_lora_weights, whole.T if transposed else whole, right.shape[0], layer.scaling)
    room = np.linalg.norm(out.rows) * np.linalg.norm(out.of_rows)
    room += np.linalg.norm(out.columns) * np.linalg.norm(out.of_columns)
    size = FLOATS[layer.b.dtype].roundoff * np.linalg.norm(out.left) * np.linalg.norm(out.right)
    return _Expected(
        rows=lambda first, last: left[first:last] @ right - out.left[first:last] @ out.right,
        room=float(room * _IN_DOUBLE + 4 * size),
        recorded=recorded,
    )


# Whether an extracted adapter is as near to the difference of its two models as its manifest says: by that difference.


def copied_steps(inputs: ExtractInputs) -> Iterator[Step]:
    """Yield the copies that the adapter's whole tensors must be."""
    for saved, name in inputs.whole.items():
        tensor = inputs.model.tensors[name]
        out = inputs.made.tensors[saved].spec
        yield Step(out=out, op=Copy(source=tensor), action=TensorAction.COPIED, reason=f"copied from {tensor.path}")


def check_extracted(
    inputs: ExtractInputs, made: tuple[Factors, ...], *, progress: Progress
) -> dict[str, TensorEvidence]:
    """Return the evidence of every module: ‖W₁ - W₀ - ΔW‖, summed over all values, and the one in the manifest.

    It is named by the written lora_B. Raises `OSError`, `SourceChanged`.
    """
    recorded = inputs.residuals
    pairs = ((factors, factors.terms[0]) for factors in made)
    return evidence_of_each(pairs, lambda pair, files: _evidence(*pair, inputs, recorded, files), progress)


def _evidence(
    factors: Factors, term: Term, inputs: ExtractInputs, recorded: Mapping[str, float], files: Files
) -> TensorEvidence:
    ours, theirs = (model.tensors.get(f"{factors.module}.weight") for model in (inputs.model, inputs.base))
    reason, share = "", None
    if ours is None or theirs is None or factors.module not in recorded:
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
        if not found <= recorded[factors.module] * (1 + _RECORDED_WITHIN) + rounding:
            reason = f"ΔW is {found:.6g} away from W₁ - W₀, but {recorded[factors.module]:.6g} is recorded"
        elif not math.sqrt(wrong) <= rounding:  # B is what W₁ - W₀ does in the directions of A
            reason = f"ΔW is {math.sqrt(wrong):.6g} away from W₁ - W₀ in the directions that lora_A spans"
    return evidence_of_factors(term, reason, share)
