"""Steps that store merged numbers as the base's are stored, and how much of the change is left then."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec.structs import replace

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import DType, TensorAction
from lora_tool.formats.quantised.encodings import (
    ColumnIntegers,
    Encoding,
    OffsetIntegers,
    PackedIntegers,
    Tiled,
    dequantised,
    in_type,
    rounded,
)
from lora_tool.formats.quantised.grids import Requantisable, grid_of, is_requantisable, scales_of
from lora_tool.plans.core.delta_retention import DeltaRetention, summary
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, Computed, Dequantise, LoraDelta, LowRank, RowOp, row_ops
from lora_tool.plans.core.requantise import QuantisedPart, Requantise, stored_parts
from lora_tool.plans.core.steps import Step

LEAST_KEPT = 0.1
"""Share of ΔW below which the stored weight is the base: of 0.23 that was left in fp8, 83% of the gain in loss was."""
LEAST_COSINE = 0.15
"""Cosine of ΔW and its stored part below which the rest is noise: a model with 0.15 did worse than its base."""
_MOST_MEASURED = 32
"""At most so many weights are measured, by some rows: two milliseconds each, on one core, before writing starts."""
_FEW_BITS = 4
_ALL_PLAIN = '`store="all-16bit"` and `store="touched-16bit"` merge exactly'
_ELSEWHERE = f"{_ALL_PLAIN}; merge to 16 bits and quantise the result with the tool that made the base"


def coded_steps(step: Step, encoding: Encoding) -> Iterable[Step]:
    """Return the steps of the stored tensors of the weight that `step` changes: codes, scales, and zero points.

    Raises `UnsupportedAdapter` for a format that is only read, and for changes that its codes cannot hold.
    """
    if not is_requantisable(encoding):
        raise UnsupportedAdapter(_only_read(step, encoding), hint=_ELSEWHERE)
    return _with_kept_scales(step, in_type(encoding, DType.F32))


def _with_kept_scales(step: Step, encoding: Requantisable) -> Iterable[Step]:
    """Yield the steps of codes, scales and zero points; the latter two stay the base's where the numbers fit."""
    made = _in_float32(_rows(step))
    odd = next((op for op in row_ops(made) if not isinstance(op, LowRank | Dequantise)), None)
    if odd is not None or any(op.needs_all_rows or op.taken_out for op in row_ops(made)):
        what = f"{encoding}: {step.reason}"
        raise UnsupportedAdapter(
            f"`{step.out.name}` cannot be quantised again as {what}",
            hint='`store="touched-16bit"` writes such weights in 16 bits',
        )
    scales = scales_of(encoding)
    if len(set(scales.spans)) < len(scales.spans):
        raise UnsupportedAdapter(
            f"`{step.out.name}` is stored as {encoding}, with one scale for all of its matrices: it cannot be raised for one",
            hint='`store="touched-16bit"` writes such weights in 16 bits',
        )
    for part, tensor in stored_parts(encoding).items():
        op = Requantise(made=made, encoding=encoding, part=part)
        action = TensorAction.MERGED if part is QuantisedPart.CODES else TensorAction.RESCALED
        yield Step(out=tensor.spec, op=op, action=action, reason=str(op))


def _in_float32(made: Computed) -> Computed:
    """Return what makes the same of what codes stand for before it is rounded to 16 bits, which may be beyond the last code."""
    if isinstance(made, Assemble):
        return Assemble(parts=tuple(_of_float32(part) for part in made.parts))
    return _of_float32(made)


def _of_float32(op: RowOp) -> RowOp:
    return op if isinstance(op, FactorOp) else replace(op, source=rounded(op.source, DType.F32))


def _rows(step: Step) -> Computed:
    """Return what makes the weight's numbers, its matrices one after the other."""
    op = step.op
    if isinstance(op, Requantise):
        raise AssertionError(f"`{step.out.name}` is requantised twice")  # noqa: TRY004 - ours
    if isinstance(op, LoraDelta) and len(op.shape) > 2:  # noqa: PLR2004 - a stack of matrices
        return Assemble(parts=op.cut(0, math.prod(op.shape[:-1])))
    return op


def _only_read(step: Step, encoding: Encoding) -> str:
    """Return why a changed weight is not stored in its format."""
    if isinstance(encoding, ColumnIntegers):
        why = "its codes were calibrated one after the other, and part of its scales may be in the layers before it"
    elif isinstance(encoding, PackedIntegers | OffsetIntegers | Tiled) and encoding.bits > _FEW_BITS:
        ordered = isinstance(encoding, PackedIntegers) and encoding.groups is not None
        how = "in the order of activations" if ordered else "stored so"
        why = f"lora-tool does not round to integers of {encoding.bits} bits {how}"
    else:
        why = (
            "rounding to four bits or fewer removes a change of 1% of the weights, or adds several times as much noise"
        )
    return f"the adapter changes `{step.out.name}`, which is stored as {encoding}: {why}"


def kept_share(steps: Sequence[Step]) -> Mapping[str, Any] | None:
    """Return how much of ΔW is left in codes, as the manifest says it of what rounding leaves; None where none is made.

    Measured on a few rows of each weight, of some where there are many. Raises as `read_part`.
    """
    made = {step.out.name: step.op for step in steps if isinstance(step.op, Requantise)}
    chosen = [name for name, op in made.items() if op.part is QuantisedPart.CODES]
    if len(chosen) > _MOST_MEASURED:  # not every n-th, which may be the same layer of each block
        chosen = sorted(chosen, key=lambda name: zlib.crc32(name.encode()))[:_MOST_MEASURED]
    return summary({name: _kept(made[name]) for name in chosen})


def require_kept(kept: Mapping[str, Any] | None, what: str, *, allow_loss: bool) -> None:
    """Return if codes keep enough of ΔW, with little noise, or `allow_loss` accepts it. Raises `UnsupportedAdapter`."""
    if kept is not None and not allow_loss and not kept["kept"] >= LEAST_KEPT:
        raise UnsupportedAdapter(
            f"{what} would keep only {kept['kept']:.1%} of ΔW: below {LEAST_KEPT:.0%} the merged model behaves like the base",
            hint=f"{_ALL_PLAIN}; `allow_loss=True` continues",
        )
    if kept is not None and not allow_loss and not kept["cosine"] >= LEAST_COSINE:
        noise = (
            math.sqrt(max((kept["kept"] / kept["cosine"]) ** 2 - 2 * kept["kept"] + 1, 0))
            if kept["cosine"]
            else math.inf
        )
        name, least = next(iter(kept["weakest"].items()))
        raise UnsupportedAdapter(
            f"{what} would add {noise:.0f} times as much noise as ΔW (cosine {kept['cosine']:.2f}; {least['cosine']:.2f} in "
            f"{name}): a merged value that does not fit makes all codes of its scale coarser",
            hint=f"{_ALL_PLAIN}; `allow_loss=True` continues",
        )


def kept_line(kept: Mapping[str, Any] | None) -> str:
    """Return how much of ΔW codes keep, as the end of a note; "" where none are made."""
    if kept is None:
        return ""
    name, least = next(iter(kept["weakest"].items()))
    return f", {kept['kept']:.0%} of ΔW kept (cosine {kept['cosine']:.2f}; {least['kept']:.0%} in {name})"


def _kept(op: Requantise[Computed]) -> DeltaRetention:
    """Return how much of the change is left in some rows of a weight."""
    import numpy as np  # for few plans

    from lora_tool.formats.quantised.requantising import Rounding, numbers_of, settled
    from lora_tool.plans.merge.quantised.samples import (
        PLACES,
        SAMPLED_ROWS,
        extremes_of,
        is_tall,
        made_rows,
        numbers,
        raw,
    )

    encoding, grid, total = op.encoding, grid_of(op.encoding), DeltaRetention()
    weight, rounding, tall = dequantised(encoding), Rounding(), cache(lambda at: extremes_of(op, at, rounding))
    for place in range(PLACES):
        row = grid.rows * (2 * place + 1) // (2 * PLACES)
        at = grid.scales_at(row)
        shared = grid.tile[0] > 1  # rows share one row of scales
        count = min(SAMPLED_ROWS, (grid.rows_of(at, at + 1)[1] if shared else grid.rows) - row)
        of = at, at + (1 if shared else count)
        before = numbers(rows_of(weight, row, count))
        after = made_rows(op.made, row, count)
        values = after.astype(np.float32)
        ends = tall(at) if is_tall(encoding) else rounding.extremes(encoding, values, row, of)
        scales = settled(encoding, of, *ends, raw)
        delta = after - before
        effect = numbers_of(encoding, rounding.codes(encoding, values, scales, row, at), scales, row, at) - before
        if not np.isfinite(delta).all():
            return DeltaRetention()  # refused by name when it is written
        total += DeltaRetention(
            meant=float(np.vdot(delta, delta)),
            written=float(np.vdot(effect, effect)),
            shared=float(np.vdot(delta, effect)),
        )
    return total
