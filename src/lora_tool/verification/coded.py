"""Comparing codes and scales, which are no numbers by themselves, with the operation that should have made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lora_tool.plan.core.ops import Coded, Precision
from lora_tool.plan.core.requantise import Requantise
from lora_tool.tensors import StoredTensor, TensorTable
from lora_tool.verification.elements import Files
from lora_tool.verification.pieces import Compared, Rows
from lora_tool.verification.quantised import fresh_rows, fresh_tally, written_afresh
from lora_tool.verification.recompute import Recomputer
from lora_tool.verification.requantised import requantised_parts, scale_rows, scale_tally, written_as
from lora_tool.verification.tally import Tally


def coded_parts(op: Coded, stored: StoredTensor, tensors: TensorTable) -> tuple[Compared, ...] | None:
    """Return what is compared of the `stored` codes or scales; None where a part of the weight is not there as planned."""
    if isinstance(op, Requantise):
        written = written_as(op, tensors)
        return None if written is None else tuple(requantised_parts(stored.name, op, written))
    afresh = written_afresh(op, tensors)
    return None if afresh is None else (Compared(name=stored.name, op=op, stored=stored, written=afresh),)


def coded_rows(part: Compared, *, all_of_them: bool) -> Sequence[Rows]:
    """Return what of the part is compared, one range at a time: all, or some from everywhere."""
    rows_of_part = scale_rows if isinstance(part.op, Requantise) else fresh_rows
    return rows_of_part(part, all_of_them=all_of_them)


def coded_tallies(
    part: Compared, rows: Sequence[Rows], files: Files, recomputer: Recomputer, precision: Precision | None
) -> Iterator[Tally]:
    """Yield what was seen of each range of the part."""
    for [(first, last)] in rows:
        with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
            if isinstance(part.op, Requantise):
                yield scale_tally(part, first, last, files)
            else:
                yield fresh_tally(part, first, last, files, recomputer, precision)
