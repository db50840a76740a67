"""Steps that store merged numbers as the base's are stored, and how much of the change is left then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_tool.actions import TensorAction
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.quantised.encodings import ColumnIntegers, Encoding, dequantised
from lora_tool.formats.quantised.grids import Requantisable, grid_of, scales_of
from lora_tool.formats.stored import read_part
from lora_tool.plan.core.delta_retention import DeltaRetention, summary
from lora_tool.plan.core.operation import rows_of
from lora_tool.plan.core.ops import Assemble, Computed, Dequantise, DoraDelta, LoraDelta, LowRank, RowOp, row_ops
from lora_tool.plan.core.requantise import QuantisedPart, Requantise
from lora_tool.plan.core.steps import Step
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.tensors import StoredTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_tool.plan.core.operation import Values

LEAST_KEPT = 0.1
"""Share of ΔW below which what is stored is the base: of 0.23 that was left in fp8, 83% of the gain in loss was."""
_ALL_PLAIN = '`store="all-16bit"` and `store="touched-16bit"` merge exactly'
_SAMPLED_ROWS, _PLACES = 8, 2
_MOST = 4096
"""Weights that are sampled: a milliseconds each."""


def requantised_steps(step: Step, encoding: Encoding) -> tuple[Step, Step]:
    """Return the steps of the codes and of the scales of the weight that `step` changes.

    Raises `UnsupportedAdapter` for a format that is only read, and for changes that its codes cannot hold.
    """
    if not isinstance(encoding, Requantisable):
        raise UnsupportedAdapter(_only_read(step, encoding), hint=_ALL_PLAIN)
    made = _rows(step)
    odd = next((op for op in row_ops(made) if not isinstance(op, LowRank | Dequantise)), None)
    if odd is not None or any(op.needs_all_rows or op.taken_out for op in row_ops(made)):
        what = f"{encoding}: {step.reason}"
        raise UnsupportedAdapter(
            f"`{step.out.name}` cannot be quantised again as {what}",
            hint='`store="touched-16bit"` writes such weights in 16 bits',
        )
    codes, scales = encoding.codes, scales_of(encoding)
    of_codes = Requantise(made=made, encoding=encoding, part=QuantisedPart.CODES)
    of_scales = Requantise(made=made, encoding=encoding, part=QuantisedPart.SCALES)
    return (
        Step(out=codes.spec, op=of_codes, action=TensorAction.MERGED, reason=str(of_codes)),
        Step(out=scales.spec, op=of_scales, action=TensorAction.RESCALED, reason=str(of_scales)),
    )


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
    else:
        why = "rounding to four bits removes a change of 1% of the weights, or adds several times as much noise"
    return f"the adapter changes `{step.out.name}`, which is stored as {encoding}: {why}"


def kept_share(steps: Sequence[Step]) -> Mapping[str, Any] | None:
    """Return how much of ΔW is left in codes, as the manifest says it of what rounding leaves; None where none is made.

    Measured on a few rows of each weight, of every n-th where there are thousands. Raises as `read_part`.
    """
    made = {step.out.name: step.op for step in steps if isinstance(step.op, Requantise)}
    chosen = [name for name, op in made.items() if op.part is QuantisedPart.CODES]
    every = -(-len(chosen) // _MOST) or 1
    return summary({name: _kept(made[name]) for name in chosen[::every]})


def require_kept(kept: Mapping[str, Any] | None, what: str, *, allow_loss: bool) -> None:
    """Return if codes keep enough of ΔW, or `allow_loss` accepts less. Raises `UnsupportedAdapter`."""
    if kept is not None and not allow_loss and not kept["kept"] >= LEAST_KEPT:
        raise UnsupportedAdapter(
            f"{what} would keep only {kept['kept']:.1%} of ΔW: below {LEAST_KEPT:.0%} the merged model behaves like the base",
            hint=f"{_ALL_PLAIN}; `allow_loss=True` continues",
        )


def kept_line(kept: Mapping[str, Any] | None) -> str:
    """Return how much of ΔW codes keep, as the end of a note; "" where none are made."""
    if kept is None:
        return ""
    name, least = next(iter(kept["weakest"].items()))
    return f", {kept['kept']:.0%} of ΔW kept (cosine {kept['cosine']:.2f}; {least['kept']:.0%} in {name})"


def _kept(op: Requantise[Computed]) -> DeltaRetention:
    """Return what is left of the change in some rows of a weight."""
    import numpy as np  # noqa: PLC0415 - for few plans

    from lora_tool.formats.quantised.requantising import (  # noqa: PLC0415 - see above
        Rounding,
        numbers_of,
        raised,
        stored_scales,
    )

    encoding, grid, total = op.encoding, grid_of(op.encoding), DeltaRetention()
    weight, rounding = dequantised(encoding), Rounding()
    for place in range(_PLACES):
        row = grid.rows * (2 * place + 1) // (2 * _PLACES)
        at = grid.scales_at(row)
        count = (
            min(_SAMPLED_ROWS, grid.rows_of(at, at + 1)[1] - row)
            if grid.tile[0] > 1
            else min(_SAMPLED_ROWS, grid.rows - row)
        )
        of = at, at + (1 if grid.tile[0] > 1 else count)
        before = _values(rows_of(weight, row, count))
        after = np.concatenate([part.reference(_values) for part in _made(op.made, row, count)])
        values = after.astype(np.float32)
        scales = raised(encoding, stored_scales(encoding, *of, _bytes), *rounding.extremes(encoding, values, row, of))
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


def _made(made: Computed, first: int, rows: int) -> Iterator[RowOp]:
    """Yield what makes these rows, with the rows of its factors alone where they can be read alone."""
    at = 0
    for op in row_ops(made):
        height = math.prod(op.shape[:-1])
        begin, end = max(first - at, 0), min(first + rows - at, height)
        for part in op.cut(begin, end - begin) if begin < end else ():
            match part:
                case LoraDelta(transposed=False):
                    yield replace(part, terms=tuple(_narrow(term, end - begin) for term in part.terms))
                case DoraDelta(transposed=False):
                    yield replace(part, term=_narrow(part.term, end - begin))
                case _:
                    yield part
        at += height


def _narrow(term: LoraTerm, rows: int) -> LoraTerm:
    return replace(term, b=rows_of(term.b, term.first, rows), first=0)


def _values(tensor: StoredTensor) -> Values:
    import numpy as np  # noqa: PLC0415 - for few plans

    from lora_tool.formats.quantised.arrays import STORED  # noqa: PLC0415 - see above

    data = np.frombuffer(read_part(tensor, 0, tensor.nbytes), STORED[tensor.dtype])
    return data.astype(np.float64).reshape(tensor.shape)


def _bytes(tensor: StoredTensor, start: int, nbytes: int) -> NDArray[Any]:
    import numpy as np  # noqa: PLC0415 - for few plans

    return np.frombuffer(read_part(tensor, start, nbytes), np.uint8)
