"""The operation that quantises merged numbers afresh: the codes of a weight, its scales, or what is stored of these."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lora_tool.choices import TextEnum
from lora_tool.formats.quantised.encodings import Bnb4, NestedScales
from lora_tool.formats.quantised.grids import Blockwise
from lora_tool.plan.core.operation import InputNames, Operation
from lora_tool.tensors import DType, StoredTensor

if TYPE_CHECKING:
    from lora_tool.plan.core.operation import Read, Values

Made = TypeVar("Made", bound=Operation)


@enum.unique
class FreshPart(TextEnum):
    """What of a weight that is quantised afresh is written."""

    CODES = "codes"
    SCALES = "scales"
    OUTER = "scales of scales"
    STATE = "mean of scales"


def rounded_to(encoding: Blockwise, weight: StoredTensor) -> DType:
    """Return the type that numbers are rounded to before they are quantised: that of the 16-bit model."""
    return encoding.spec.dtype if isinstance(encoding, Bnb4) else weight.dtype


class Quantise(Operation, Generic[Made], frozen=True, kw_only=True):
    """What `made` makes, rounded once to 16 bits and quantised as bitsandbytes does: see `formats.quantised.fresh`.

    Each part is a tensor of its own; whoever writes one of them computes the numbers of whole blocks, and of the whole
    weight where scales are quantised themselves, less their mean.
    """

    made: Made
    weight: StoredTensor
    """What ΔW is added to: the 16-bit original's weight, or the numbers that the base's codes stand for."""
    encoding: Blockwise
    """The base's, whose layout the output has."""
    part: FreshPart

    @property
    def source(self) -> StoredTensor:
        """The weight that ΔW is added to."""
        return self.weight

    @property
    def inputs(self) -> tuple[StoredTensor, ...]:
        record = self.encoding.record
        return (*self.made.inputs, *((record,) if record is not None and self.part is FreshPart.STATE else ()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers', whatever the shape is in which they are stored."""
        return self.encoding.spec.shape

    @property
    def is_by_block(self) -> bool:
        """Whether each block says alone what is written for it: of scales less their mean none does."""
        nested = isinstance(self.encoding, Bnb4) and isinstance(self.encoding.scales, NestedScales)
        return self.part is FreshPart.CODES or not nested

    @property
    def dtype(self) -> DType:
        """The type that numbers are rounded to before they are quantised."""
        return rounded_to(self.encoding, self.weight)

    def __str__(self) -> str:
        what = f"{self.made}, as" if self.part is FreshPart.CODES else f"{self.part} of"
        return f"{what} {self.encoding}, quantised afresh"

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        made = self.made.describe(input_names)
        return {
            "op": "Quantise",
            "part": self.part.value,
            **{k: v for k, v in made.items() if k != "op"},
            "made": made["op"],
        }

    def reference(self, read: Read) -> Values:
        """Return the numbers before they are quantised."""
        return self.made.reference(read)
