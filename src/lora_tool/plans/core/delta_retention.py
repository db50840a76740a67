"""How much of an adapter's change survives rounding to the type of the output.

A bfloat16 weight has 8 digits: a change of less than half a unit in the last place rounds to nothing. Of changes a
thousandth as large as the weights, about half arrives. Measured on samples, while they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from lora_tool.plans.core.plan import Plan

BAD_COSINE = 0.9
"""Below it the direction of the change itself is lost in rounding: |ΔW|/|W| is then about 3e-3 or less in bfloat16."""

_DIGITS = 4
_WEAKEST = 5


class DeltaRetention(Struct, frozen=True, kw_only=True):
    """Sums over sampled weights of Δ², E² and Δ·E: Δ the change that was meant, E the one that was written."""

    meant: float = 0.0
    written: float = 0.0
    shared: float = 0.0

    def __add__(self, other: DeltaRetention) -> DeltaRetention:
        return DeltaRetention(
            meant=self.meant + other.meant, written=self.written + other.written, shared=self.shared + other.shared
        )

    @property
    def kept(self) -> float | None:
        """The share of Δ that E has in its direction; None where nothing was meant to change."""
        return self.shared / self.meant if self.meant else None

    @property
    def cosine(self) -> float | None:
        """Between Δ and E: 0 where nothing was written, None where nothing was meant to change."""
        if not self.meant:
            return None
        return self.shared / math.sqrt(self.meant * self.written) if self.written else 0.0

    def as_json(self) -> dict[str, float | None]:
        """Return its entry in the manifest."""
        kept, cosine = self.kept, self.cosine
        return {
            "kept": None if kept is None else round(kept, _DIGITS),
            "cosine": None if cosine is None else round(cosine, _DIGITS),
        }


def summary(survived: Mapping[str, DeltaRetention]) -> dict[str, Any] | None:
    """Return the manifest's entry for all tensors together, with the names of the weakest; None without any."""
    if not survived:
        return None
    changed: list[tuple[float, str]] = []
    total = DeltaRetention()
    for name, each in sorted(survived.items()):
        if each.meant:
            total += each
            changed.append((each.cosine or 0.0, name))
    if not changed:
        return None
    weakest = {name: survived[name].as_json() for _, name in sorted(changed)[:_WEAKEST]}
    return {**total.as_json(), "weakest": weakest}


def advice(found: Mapping[str, Any] | None, plan: Plan) -> str | None:
    """Return advice if rounding changes ΔW's direction too much, else None."""
    if found is None or found["cosine"] is None or found["cosine"] >= BAD_COSINE:
        return None
    weakest = [step.out.dtype for step in plan.steps if step.out.name in found["weakest"]]
    dtypes = sorted({dtype.value for dtype in weakest})
    is_plain = all(dtype.is_float for dtype in weakest)
    wider = "--dtype float32 keeps all of it" if is_plain else "--store all-16bit keeps more of it"
    return (
        f"rounding to {', '.join(dtypes)} distorts ΔW, which is small relative to the weights: the change that is written "
        f"has cosine {found['cosine']:.2f} to it (1 is exact); {wider}, or serve the adapter unmerged"
    )


def line(found: Mapping[str, Any]) -> str:
    """Return the summary in a line."""
    name, worst = next(iter(found["weakest"].items()))
    return (
        f"ΔW after rounding: {found['kept']:.1%} kept, cosine {found['cosine']:.4f}; "
        f"the least in {name}, cosine {worst['cosine']:.4f}"
    )
