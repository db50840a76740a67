"""Looking at what lies on the disk: what a folder holds, which checkpoints there are."""

from __future__ import annotations

import os
from pathlib import Path

from lora_tool.inspection.folders import inspect_checkpoint
from lora_tool.inspection.model import Inspection
from lora_tool.inventory import Inventory, inventory
from lora_tool.sources import Reference, opened
from lora_tool.validation.validating import Criteria


def inspect(checkpoint: Reference, *, norms: bool | None = None, spectra: bool = False) -> Inspection:
    """Return what `checkpoint`, a path, a Hub id or an opened checkpoint, holds.

    `norms` True computes the norms of an adapter, None only those of an adapter up to 512 MiB; `spectra` also computes
    the singular values of ΔW for its modules. Raises `CheckpointError`.
    """
    return inspect_checkpoint(opened(checkpoint), norms=norms, spectra=spectra)


def ls(root: str | os.PathLike[str] = ".", *, criteria: Criteria | None = None) -> tuple[Inventory, ...]:
    """Return every checkpoint under `root`, run by run, each with its verdict under the `criteria`, by default all rules.

    Raises `NotACheckpoint` where `root` is not a folder.
    """
    return tuple(inventory(Path(root), criteria or Criteria()))
