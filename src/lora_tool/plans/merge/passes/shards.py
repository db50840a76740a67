"""`max_shard_size`: the weight files that the steps are written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.core.choices import number_of_bytes
from lora_tool.core.options import Options, option
from lora_tool.plans.core import sharding
from lora_tool.plans.core.options import SHARD_SIZE

if TYPE_CHECKING:
    from lora_tool.plans.merge.draft import Draft


@dataclass(frozen=True, kw_only=True)
class Shards(Options):
    """The option of this pass."""

    max_shard_size: int | str | None = option(
        None, "Maximum size of a weights file.  [default: files as in the base]", **SHARD_SIZE
    )


def in_files(draft: Draft, options: Shards) -> Draft:
    """Return the draft with its steps in files of at most `max_shard_size`, else in those of the base, and their index."""
    size = None if options.max_shard_size is None else number_of_bytes(options.max_shard_size)
    homes = sharding.base_files(draft.steps, draft.inputs.stored.tensors)
    shards = sharding.lay_out(draft.steps, homes=homes, max_shard_bytes=size, metadata=draft.metadata)
    return replace(draft, shards=shards, side_files=(*draft.side_files, *sharding.index_files(shards)))
