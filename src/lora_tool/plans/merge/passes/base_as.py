"""`base_as`: a 16-bit base with the weights that it had when it was loaded in four bits for training (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.core.options import Options, Recorded, option
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.formats.quantised.names import full_precision_name

if TYPE_CHECKING:
    from lora_tool.plans.merge.draft import MergeInputs


@dataclass(frozen=True, kw_only=True)
class BaseAs(Options):
    """The option of this pass."""

    base_as: TrainedAs | str | None = option(
        None,
        "Round the linear layers of a 16-bit base to four bits and back, as QLoRA training loaded them.",
        parse=TrainedAs,
        recorded=Recorded.IF_GIVEN,
    )


def rounded_base(inputs: MergeInputs, options: BaseAs) -> MergeInputs:
    """Return the inputs with the base as it was in training. Raises `UnsupportedAdapter` as `as_trained` does."""
    if options.base_as is None:
        return inputs if inputs.is_quantised else replace(inputs, notes=(*inputs.notes, *_trained_on_quantised(inputs)))
    from lora_tool.plans.merge.quantised.trained_as import as_trained, rounded_note

    how = TrainedAs(options.base_as)
    base = as_trained(inputs.base, inputs.adapters, how)
    return replace(inputs, base=base, notes=(*inputs.notes, rounded_note(base, how)))


def _trained_on_quantised(inputs: MergeInputs) -> Iterator[str]:
    """Yield a note for each adapter that was trained on a base whose name says that it is quantised."""
    for adapter in inputs.adapters:
        named = (adapter.config.base_model if adapter.config else None) or ""
        if full_precision_name(named.rpartition("/")[2]) is not None:
            yield (
                f"{adapter.root} was trained on {named}, whose name says that it is quantised: the weights of "
                f"{inputs.stored.root} differ from it by the rounding error; merge into the named model, or round this one "
                "with `base_as`, to get what was trained"
            )
