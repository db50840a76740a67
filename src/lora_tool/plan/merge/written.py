"""What a merge writes, once it is decided how its base is stored."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.merge.context import MergeContext


class Written(Struct, frozen=True, kw_only=True):
    """The tensors of the merged model on disk, and what the plan says of the base that they come from."""

    merge: MergeContext
    """With the config that is written."""
    steps: tuple[Step, ...]
    leftovers: tuple[InputRecord, ...]
    """Tensors of the base that are not written."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    metadata: Mapping[str, str] | None = None
    """The texts in the headers of the files; None for the usual."""
    options: Mapping[str, object] = field(default_factory=dict)
    """What the manifest records of the storage."""
