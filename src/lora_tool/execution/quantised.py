"""Writing what is quantised afresh: the numbers of whole blocks are computed, and their codes or scales written."""

from __future__ import annotations

import numpy as np

from lora_tool.execution.numbers import Numbers
from lora_tool.execution.output import write_exactly
from lora_tool.execution.units import QuantiseUnit
from lora_tool.exhaustive import assert_never
from lora_tool.float_mode import ieee_arithmetic
from lora_tool.formats.quantised.arrays import F32
from lora_tool.formats.quantised.bitsandbytes import with_mean
from lora_tool.formats.quantised.encodings import Bnb4, NestedScales
from lora_tool.formats.quantised.fresh import OfScales, codes_of, quantised_scales, scales_of_blocks
from lora_tool.formats.quantised.grids import block_of, rows_around
from lora_tool.plan.core.ops import Computed
from lora_tool.plan.core.quantise import FreshPart, Quantise

_AT_ONCE = 1 << 19
"""Weights that are computed together, at least one block."""


class Quantiser:
    """One worker's. It keeps the scales of the weight that was used last. Not shared between threads."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._held: tuple[Quantise[Computed], OfScales] | None = None

    def run(self, unit: QuantiseUnit, out: int) -> None:
        """Write the unit to the descriptor `out`. Raises as `Backend.run` does."""
        with ieee_arithmetic(), np.errstate(all="ignore"):
            if not unit.op.is_by_block:
                if (data := self._of_all(unit)) is not None:
                    write_exactly(out, memoryview(data), unit.begin)
                return
            at = unit.begin
            for first, last in self._stretches(unit.op, unit.first, unit.last):
                if self._numbers.stopped():
                    return
                values = self._flat(unit.out.name, unit.op, first, last)
                made = scales_of_blocks(unit.op.encoding, values)
                if unit.op.part is FreshPart.CODES:
                    data = codes_of(unit.op.encoding, values, made, self._numbers.bytes_of).tobytes()
                else:
                    data = made.astype("<f4").tobytes()
                write_exactly(out, memoryview(data), at)
                at += len(data)

    def _of_all(self, unit: QuantiseUnit) -> bytes | None:
        """Return what is written of scales that are quantised themselves; None where the run has been stopped."""
        found, encoding = self._scales(unit), unit.op.encoding
        if found is None:
            return None
        match unit.op.part:
            case FreshPart.SCALES:
                return found.codes.tobytes()
            case FreshPart.OUTER:
                return found.outer.astype("<f4").tobytes()
            case FreshPart.STATE:
                if encoding.record is None:
                    raise AssertionError(f"{encoding} has no record of its scales' mean")
                return with_mean(encoding.record, float(found.mean))
            case FreshPart.CODES:
                raise AssertionError("codes are written block by block")
            case _:
                return assert_never(unit.op.part)

    def _scales(self, unit: QuantiseUnit) -> OfScales | None:
        op, encoding = unit.op, unit.op.encoding
        if not isinstance(encoding, Bnb4) or not isinstance(encoding.scales, NestedScales):
            raise TypeError(f"the scales of {encoding} are not quantised")
        if self._held is None or self._held[0].made is not op.made:
            parts: list[F32] = []
            for first, last in self._stretches(op, unit.first, unit.last):
                if self._numbers.stopped():
                    return None
                parts.append(scales_of_blocks(encoding, self._flat(unit.out.name, op, first, last)))
            self._held = op, quantised_scales(encoding.scales, np.concatenate(parts), self._numbers.bytes_of)
        return self._held[1]

    def _stretches(self, op: Quantise[Computed], first: int, last: int) -> list[tuple[int, int]]:
        step = max(1, _AT_ONCE // block_of(op.encoding))
        return [(at, min(at + step, last)) for at in range(first, last, step)]

    def _flat(self, name: str, op: Quantise[Computed], first: int, last: int) -> F32:
        """Return the values in these blocks of the flattened weight, rounded to 16 bits, as float32."""
        top, bottom, part = rows_around(op.encoding, first, last)
        rows = self._numbers.rows(name, op, top, bottom, op.dtype)
        return np.asarray(rows.reshape(-1)[part].astype(np.float32))
