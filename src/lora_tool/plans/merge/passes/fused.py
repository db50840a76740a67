"""Parameters that are fused in memory and several tensors on disk, as the experts of a mixture are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from lora_tool.core.options import Options
    from lora_tool.plans.merge.draft import Draft


def on_layers(draft: Draft, _: Options) -> Draft:
    """Return the draft with the modules that are layers in memory, and with the ΔW of parts of fused parameters."""
    conversion = draft.model.conversion
    if conversion is None:
        return draft
    from lora_tool.plans.merge.fused.parts import parts_of_fused

    modules, per_expert = parts_of_fused(draft.model, conversion, draft.modules, draft.precision)
    return replace(draft, modules=modules, per_expert=per_expert)


def on_disk(draft: Draft, _: Options) -> Draft:
    """Return the draft with steps on the tensors that `save_pretrained` writes."""
    conversion = draft.model.conversion
    if conversion is None:
        return draft
    from lora_tool.plans.merge.fused.parts import steps_on_disk

    return replace(draft, steps=steps_on_disk(draft.model, conversion, draft.steps, draft.per_expert))
