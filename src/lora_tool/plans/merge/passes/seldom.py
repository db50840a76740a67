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


def require_own_ends(draft: Draft, _: Options) -> Draft:
    """Return the draft. Raises `UnsupportedAdapter` for LoRA on one end of embeddings that stay tied."""
    if draft.ends.tied is None and draft.model.facts is None:
        return draft
    from lora_tool.plans.merge.untying import require_no_lora_on_tied_ends

    require_no_lora_on_tied_ends(draft)
    return draft


def with_untied(draft: Draft, _: Options) -> Draft:
    """Return the draft with the tensors that a formerly tied base did not have."""
    if draft.ends.tied is None or not draft.ends.untied:
        return draft
    from lora_tool.plans.merge.untying import untying_steps

    return replace(draft, steps=(*draft.steps, *untying_steps(draft)))
