"""LT321: an adapter left in the folder of a model."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.mutations.registry import FIXTURES, SHARDED, breaks


@breaks("LT321", SHARDED)
def _merged_by_verl(folder: Path) -> None:
    shutil.copytree(FIXTURES / "causal-llama" / "adapter", folder / "lora_adapter")
