"""What a merge writes of a quantised base: its steps in the storage that was asked for, and what stays beside them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from lora_tool.checkpoint import ModelDir
from lora_tool.errors import UnsupportedAdapter
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.requantise import Requantise
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.merge.asked import Asked
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.plan.merge.context import MergeContext
from lora_tool.plan.merge.ledger import dropped_from_base
from lora_tool.plan.merge.steps import kept_step
from lora_tool.plan.merge.storage import QuantisedBase
from lora_tool.plan.merge.storages import Storage
from lora_tool.plan.merge.written import Written


def written_of_quantised(
    view: BaseView, merge: MergeContext, steps: tuple[Step, ...], base: QuantisedBase, asked: Asked
) -> Written:
    """Return what is written in the storage that was asked for, or by default.

    `steps` are planned on the matrices that its weights stand for. Raises `UnsupportedAdapter` where the storage cannot
    have the changes, or `Precision.PEFT` the storage.
    """
    planned, unplaced = (
        (steps, view.leftovers) if asked.text_only else _with_what_no_class_has(steps, view, merge, base.plain)
    )
    dropped = tuple(dropped_from_base(merge))
    unplaced_of_classifier = () if merge.head is None else unplaced
    stored = base.settle(
        planned,
        asked.store,
        {item.name for item in (*dropped, *unplaced_of_classifier)},
        cast=asked.dtype not in (None, base.plain.dtype) or asked.text_only,
        allow_loss=asked.allow_loss,
    )
    _require_numbers(stored.steps, asked.precision)
    # a buffer that the class computes stays where weights stay as they are stored
    left = unplaced if stored.storage is Storage.ALL_16BIT else unplaced_of_classifier
    return Written(
        merge=replace(merge, base=replace(merge.base, config=stored.config)),
        steps=stored.steps,
        leftovers=(*dropped, *left, *stored.leftovers),
        notes=(stored.note,),
        warnings=stored.warnings,
        metadata=base.metadata(stored.steps),
        options={"store": stored.storage.value, **({"requantised": stored.kept} if stored.kept else {})},
    )


def _with_what_no_class_has(
    steps: tuple[Step, ...], view: BaseView, merge: MergeContext, plain: ModelDir
) -> tuple[tuple[Step, ...], tuple[InputRecord, ...]]:
    """Return the steps and one for each weight of a quantised base that its class has no place for, in the base's order,
    and what is left out still: of a classifier, all of these.

    Servers use such weights: the layers that predict further tokens.
    """
    names = view.of_no_class
    if not names or merge.head is not None:
        return steps, view.leftovers
    beside = (kept_step(merge, tensor) for name, tensor in plain.tensors.items() if name in names)
    places = {name: at for at, name in enumerate(plain.tensors)}
    ordered = sorted((*steps, *beside), key=lambda step: places.get(step.out.name, len(places)))
    return tuple(ordered), tuple(item for item in view.leftovers if item.name not in names)


def _require_numbers(steps: Sequence[Step], precision: Precision) -> None:
    """Raise `UnsupportedAdapter` where quantised weights are to be written with PEFT's arithmetic."""
    if precision is Precision.PEFT and any(isinstance(step.op, Requantise) for step in steps):
        raise UnsupportedAdapter(
            '`store="as-base"`: PEFT can round merged weights only to formats of bitsandbytes, and damages them',
            hint='`precision="float32"` writes them, and `store="all-16bit"` merges as PEFT does',
        )
