"""`text_only`: the text model of a multimodal base, without the rest of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.core.choices import flag
from lora_tool.core.options import Options, Recorded, Section, option

if TYPE_CHECKING:
    from lora_tool.checkpoints import ModelDir
    from lora_tool.plans.merge.draft import MergeInputs


def is_text_of(merged: ModelDir, base: ModelDir) -> bool:
    """Return whether the config of a merged model is that of the text model of its base."""
    text = base.config.raw.get("text_config") if base.config else None
    own = merged.config.model_type if merged.config else None
    whole = base.config.model_type if base.config else None
    return own is not None and isinstance(text, dict) and own == text.get("model_type") != whole


@dataclass(frozen=True, kw_only=True)
class TextOnly(Options):
    """The option of this pass."""

    section = Section.MODEL

    text_only: bool = option(
        default=False,
        text="Write only the text model of a multimodal base, as PEFT does.",
        parse=flag,
        recorded=Recorded.IF_GIVEN,
        inferred=is_text_of,
    )


def text_model(inputs: MergeInputs, options: TextOnly) -> MergeInputs:
    """Return the inputs with only the text model of the base.

    Raises `UnsupportedAdapter` where transformers has no class for that, `MissingDependency` without transformers.
    """
    if not options.text_only:
        return inputs
    from lora_tool.plans.merge.model.classes import text_base
    from lora_tool.plans.merge.model.reading import require_transformers

    require_transformers()
    return replace(inputs, base=text_base(inputs.base), is_text_only=True)
