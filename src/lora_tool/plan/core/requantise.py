"""The operation that stores merged numbers as the base's are stored: the codes of a weight, or their scales."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lora_tool.choices import TextEnum
from lora_tool.formats.quantised.encodings import BnbInt8
from lora_tool.formats.quantised.grids import INT8_MOST, Requantisable, grid_of, limits, scales_of
from lora_tool.plan.core.operation import InputNames, Operation
from lora_tool.tensors import StoredTensor

if TYPE_CHECKING:
    from lora_tool.plan.core.operation import Read, Values

Made = TypeVar("Made", bound=Operation)


@enum.unique
class QuantisedPart(TextEnum):
    """What of a quantised weight is written."""

    CODES = "codes"
    SCALES = "scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requantise(Operation, Generic[Made]):
    """What `made` makes, stored as the base's weight is: see `formats.quantised.requantising`.

    Codes and scales are tensors of their own; whoever writes one of them computes the numbers of whole tiles.
    """

    made: Made
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
        what = f"{self.made}, as" if self.part is QuantisedPart.CODES else "raised where a merged value does not fit:"
        return f"{what} {self.encoding}"

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        made = self.made.describe(input_names)
        return {
            "op": "Requantise",
            "part": self.part.value,
            **{k: v for k, v in made.items() if k != "op"},
            "made": made["op"],
        }

    def reference(self, read: Read) -> Values:
        """Return codes or scales as they are before they are rounded to their type."""
        import numpy as np  # noqa: PLC0415 - the formula alone needs it

        grid, (least, most) = grid_of(self.encoding), limits(self.encoding)
        values = self.made.reference(read).reshape(grid.rows, grid.width)
        of_codes = read(scales_of(self.encoding)).reshape(grid.down, grid.across).copy()
        of_codes /= INT8_MOST if isinstance(self.encoding, BnbInt8) else 1
        columns = [slice(at, at + grid.tile[1]) for at in range(0, grid.width, grid.tile[1])]
        for at, across in np.ndindex(of_codes.shape):
            tile = values[slice(*grid.rows_of(at, at + 1)), columns[across]]
            if tile.max() > most * of_codes[at, across] or tile.min() < least * of_codes[at, across]:
                of_codes[at, across] = max(tile.max() / most, tile.min() / least)
            tile /= of_codes[at, across] or 1
        if self.part is QuantisedPart.CODES:
            return values
        return of_codes * (INT8_MOST if isinstance(self.encoding, BnbInt8) else 1)
