"""The operation that stores merged numbers as the base's are stored: the codes of a weight, their scales or zero points."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lora_tool.core.choices import TextEnum
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import BnbInt8
from lora_tool.formats.quantised.grids import INT8_MOST, WORD, Requantisable, grid_of, limits, scales_of, zeros_of
from lora_tool.plans.core.operation import InputNames, Operation

if TYPE_CHECKING:
    from lora_tool.plans.core.operation import ReadValues, Values

_Made = TypeVar("_Made", bound=Operation)


@enum.unique
class QuantisedPart(TextEnum):
    """The part of a quantised weight that is written."""

    CODES = "codes"
    SCALES = "scales"
    ZEROS = "zeros"


def stored_parts(encoding: Requantisable) -> dict[QuantisedPart, StoredTensor]:
    """Return the tensors of a weight that change with it, the codes first."""
    found = {QuantisedPart.CODES: encoding.codes, QuantisedPart.SCALES: scales_of(encoding)}
    zeros = zeros_of(encoding)
    return found if zeros is None else found | {QuantisedPart.ZEROS: zeros}


class Requantise(Operation, Generic[_Made], frozen=True, kw_only=True):
    """What `made` makes, stored as the base's weight is: see `formats.quantised.requantising`.

    Codes, scales and zero points are tensors of their own; whoever writes one of them computes the numbers of whole tiles.
    """

    made: _Made
    encoding: Requantisable
    part: QuantisedPart

    @property
    def source(self) -> StoredTensor:
        """The weight in the base, as numbers."""
        return self.made.inputs[0]

    @property
    def inputs(self) -> tuple[StoredTensor, ...]:
        return self.made.inputs

    @property
    def shape(self) -> tuple[int, int]:
        """The output's, its matrices one after the other."""
        grid = grid_of(self.encoding)
        return (grid.rows, grid.width) if self.part is QuantisedPart.CODES else (grid.down, grid.across)

    def __str__(self) -> str:
        match self.part:
            case QuantisedPart.CODES:
                what = f"{self.made}, as"
            case QuantisedPart.SCALES:
                what = "raised where a merged value does not fit:"
            case QuantisedPart.ZEROS:
                what = "moved where a merged value does not fit:"
        return f"{what} {self.encoding}"

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        made = self.made.describe(input_names)
        return {
            "op": "Requantise",
            "part": self.part.value,
            **{k: v for k, v in made.items() if k != "op"},
            "made": made["op"],
        }

    def reference(self, read: ReadValues) -> Values:
        """Return codes, scales or zero points as they are before they are rounded to their type."""
        import numpy as np  # only the formula needs it

        grid, (least, most) = grid_of(self.encoding), limits(self.encoding)
        values = self.made.reference(read).reshape(grid.rows, grid.width)
        scales = read(scales_of(self.encoding)).reshape(grid.down, grid.across).copy()
        scales /= INT8_MOST if isinstance(self.encoding, BnbInt8) else 1
        zeros = self._zeros(read)
        columns = [slice(at, at + grid.tile[1]) for at in range(0, grid.width, grid.tile[1])]
        for at, across in np.ndindex(scales.shape):
            tile = values[slice(*grid.rows_of(at, at + 1)), columns[across]]
            low, high, scale, zero = tile.min(), tile.max(), scales[at, across], zeros[at, across]
            spare = 0.5 if zeros_of(self.encoding) is not None else 0  # what rounds to a code fits
            if high > (most + spare - zero) * scale or low < (least - spare - zero) * scale:
                if spare:
                    low, high = min(low, 0), max(high, 0)
                    scales[at, across] = max(scale, (high - low) / (most - least))
                    zeros[at, across] = np.rint(least - low / scales[at, across])
                else:
                    scales[at, across] = max(high / most, low / least)
            tile /= scales[at, across] or 1
            tile += zeros[at, across]
        match self.part:
            case QuantisedPart.CODES:
                return values
            case QuantisedPart.SCALES:
                return scales * (INT8_MOST if isinstance(self.encoding, BnbInt8) else 1)
            case QuantisedPart.ZEROS:
                return zeros

    def _zeros(self, read: ReadValues) -> Values:
        """Return the zero point of each tile, 0 where the format has none."""
        import numpy as np

        grid, tensor = grid_of(self.encoding), zeros_of(self.encoding)
        if tensor is None:
            return np.zeros((grid.down, grid.across))
        stored = read(tensor).reshape(-1, grid.across)
        if tensor.dtype is DType.I8:
            return stored.copy()
        parts = [stored.astype(np.int64) >> 8 * at & 255 for at in range(WORD)]  # those of rows below each other
        return np.stack(parts, axis=1).reshape(-1, grid.across)[: grid.down] - 128.0
