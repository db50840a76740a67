"""`store`: which weights of a quantised base stay quantised in the merged model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.checkpoints.quantised import in_full_precision
from lora_tool.checkpoints.sources import source_of
from lora_tool.core.choices import flag
from lora_tool.core.options import Options, Recorded, Section, option
from lora_tool.plans.merge.storages import Storage

if TYPE_CHECKING:
    from lora_tool.checkpoints import ModelDir
    from lora_tool.plans.merge.draft import Draft, MergeInputs


def storage_of(merged: ModelDir, base: ModelDir) -> Storage:
    """Return the storage that the config and the weights of a merged model show."""
    if merged.config is not None and merged.config.quantization is None:
        return Storage.ALL_16BIT
    from lora_tool.checkpoints.quantised import as_matrices
    from lora_tool.formats.quantised.encodings import encoding_of

    matrices = (each for each in as_matrices(base).tensors.values() if encoding_of(each) is not None)
    found = ((each.shape, merged.tensors.get(each.name)) for each in matrices)
    some = any(now is not None and now.dtype.is_float and now.shape == shape for shape, now in found)
    return Storage.TOUCHED_16BIT if some else Storage.AS_BASE


@dataclass(frozen=True, kw_only=True)
class Store(Options):
    """The options of this pass."""

    section = Section.QUANTISED

    store: Storage | str | None = option(
        None,
        "Weights of a quantised base: all in 16 bits, only those that the adapter changes, or none.  "
        "[default: as-base where the adapter changes no quantised weight, else all-16bit]",
        parse=Storage,
        recorded=Recorded.AS_DECIDED,
        inferred=storage_of,
    )
    allow_loss: bool = option(
        default=False,
        text="Write the model even if rounding to the base's format keeps less than a tenth of ΔW.",
        parse=flag,
    )


def dequantised_base(inputs: MergeInputs, _: Store) -> MergeInputs:
    """Return the inputs with a matrix for each quantised weight, which is decoded when it is read.

    Raises `UnsupportedAdapter` for a format that is not read.
    """
    base = in_full_precision(inputs.stored, source_of(inputs.stored.root).hub_id)
    return inputs if base is inputs.stored else replace(inputs, base=base, is_quantised=True)


def stored_again(draft: Draft, options: Store) -> Draft:
    """Return the draft with the weights of a quantised base as `store` says, by default as they can be stored exactly.

    Raises `UnsupportedAdapter` where the storage cannot have the changes, or PEFT's arithmetic the storage.
    """
    if not draft.inputs.is_quantised:
        return draft
    from lora_tool.plans.merge.quantised.storage import in_storage

    storage = None if options.store is None else Storage(options.store)
    return in_storage(draft, storage, allow_loss=options.allow_loss)
