"""What differs between two adapters or models, as heat maps."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.keys import split_layer
from lora_tool.workflows.inspection.comparison import Comparison, Difference
from lora_tool_plot.grid import PanelGrid, laid_out, span

_UNRELATED = 0.5
"""1 − cosine from which the colours show all that there can be, and not what little turned."""


class _Change(Struct, frozen=True):
    """A difference at its place."""

    target: str
    layer: int | None
    item: Difference


def change_grids(comparison: Comparison) -> tuple[PanelGrid, ...]:
    """Return how far the second is from the first, how far its direction turned and how much longer it is.

    Of LoRA the modules alone, where there are any; of models the tensors of which any changed. None where nothing is in
    both.
    """
    measured = [item for item in comparison.differences if item.relative is not None]
    lora = [item for item in measured if item.kind == "LoRA"]
    turned = {item.target for item in measured if item.apart}
    shown = lora or [item for item in measured if item.target in turned] or measured
    if not shown:
        return ()
    what = "ΔW" if lora else "W"
    changes = [_Change(item.target, split_layer(item.name)[0], item) for item in shown]
    apart = f"‖{what}₂ − {what}₁‖ / ‖{what}₁‖"
    far = laid_out(
        changes,
        lambda change: change.item.relative,
        title="How far apart the two are",
        unit=apart,
        sentence=f"{apart} of every module. 0: the same; 1: as far from the first as a ΔW of zero. Late checkpoints "
        "of one run are close to each other.",
        flat=lambda least, most: (
            f"About as far apart everywhere: {apart} is {span(least, most)}."
            if most
            else "The two are equal everywhere."
        ),
    )
    if not far.most:
        return (far,)
    cosine = laid_out(
        changes,
        lambda change: change.item.turned,
        title="How far the direction turned",
        unit="1 − cosine",
        sentence=f"1 − cosine of the angle between {what}₁ and {what}₂. 0: the same direction, longer or shorter; "
        "1: nothing in common; 2: opposite.",
        flat=lambda least, most: (
            f"The direction turned by about the same amount everywhere: 1 − cosine is {span(least, most)}."
        ),
    )
    longer = laid_out(
        changes,
        lambda change: change.item.second / change.item.first if change.item.first and change.item.second else None,
        title="How much longer the second is",
        unit=f"‖{what}₂‖ / ‖{what}₁‖",
        sentence=f"‖{what}₂‖ / ‖{what}₁‖. Above 1 the second moved further than the first, below 1 less far.",
        flat=lambda least, most: f"About as long everywhere: ‖{what}₂‖ / ‖{what}₁‖ is {span(least, most)}.",
    )
    if cosine.most > _UNRELATED:
        cosine = replace(cosine, centre=1.0, limits=(0.0, 2.0))
    return far, cosine, replace(longer, centre=1.0)
