"""Ends of a model that were tied: LoRA on one of them, and the tensors of both once they are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from lora_tool.core.options import Options
    from lora_tool.plans.merge.draft import Draft


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
