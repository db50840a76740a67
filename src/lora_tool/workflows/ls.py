"""Listing checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from lora_tool.verification.validating import Criteria
from lora_tool.workflows.inventory import Inventory, inventory


def ls(root: str | os.PathLike[str] = ".", *, criteria: Criteria | None = None) -> tuple[Inventory, ...]:
    """Return every checkpoint under `root`, run by run, each with its verdict under the `criteria`, by default all rules.

    Raises `NotACheckpoint` where `root` is not a folder.
    """
    return tuple(inventory(Path(root), criteria or Criteria()))
