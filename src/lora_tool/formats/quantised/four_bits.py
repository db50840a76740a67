"""How a 16-bit base was quantised when it was loaded for QLoRA: the kinds that bitsandbytes has, and their levels."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from lora_tool.core.choices import Choice

if TYPE_CHECKING:
    from lora_tool.core.tensors import StoredTensor

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_SIZES = (0.0052083334885537624, 0.1666666716337204, 0.25, 0.3333333432674408, 0.5, 0.6666666865348816, 1.0)
_FP4 = (*(-size for size in reversed(_FP4_SIZES)), 0.0, *_FP4_SIZES)


@enum.unique
class TrainedAs(Choice):
    """How the base was quantised while the adapter was trained."""

    NF4 = "nf4"
    NF4_DOUBLE = "nf4-double"
    FP4 = "fp4"

    def rounded(self, weight: StoredTensor) -> StoredTensor:
        """Return a plain weight with the values that the base had in training, computed when it is read."""
        from lora_tool.formats.quantised.encodings import RoundedAs, dequantised  # the names are options

        levels = _FP4 if self is TrainedAs.FP4 else _NF4
        return dequantised(
            RoundedAs(
                spec=weight.spec,
                codes=weight,
                label=f"{self} of bitsandbytes",
                levels=levels,
                nested=self is TrainedAs.NF4_DOUBLE,
            )
        )
