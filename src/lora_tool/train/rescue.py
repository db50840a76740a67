"""An adapter saved without values (`save_pretrained` under ZeRO-3): found, and reassembled from the rank files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoint import open_checkpoint, open_sharded
from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import CheckpointError
from lora_tool.report import Finding, Severity
from lora_tool.validation.validating import validate

EMPTY = "LT206"
"""Tensors without values, saved under DeepSpeed ZeRO-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A folder with weights that a training left, and what is wrong with them."""

    path: Path
    errors: tuple[Finding, ...]

    @property
    def empty(self) -> bool:
        return any(found.code == EMPTY for found in self.errors)


def saved_in(outputs: Iterable[Path], *, since: float = 0.0) -> Iterator[Saved]:
    """Yield each adapter or model that lies in the folders or one level below, written at `since` or later."""
    for output in outputs:
        for folder in (output, *(path for path in sorted(output.glob("*")) if path.is_dir())):
            weights = [
                path for pattern in ("adapter_model.safetensors", "model*.safetensors") for path in folder.glob(pattern)
            ]
            if not any(path.stat().st_mtime >= since for path in weights):
                continue
            try:
                report = validate(open_checkpoint(folder))
            except CheckpointError:
                continue
            yield Saved(path=folder, errors=report.at_least(Severity.ERROR))


def newest_rank_files(output: Path) -> Path | None:
    """Return the newest checkpoint in or below `output` that holds the weights in pieces."""
    below = [output / name for name in reversed(read_folder(output).checkpoints)]
    for folder in (*below, output):
        try:
            open_sharded(folder)
        except CheckpointError:
            continue
        return folder
    return None


def consolidate(checkpoint: Path, out: Path) -> bool:
    """Reassemble an adapter from rank files into `out`, as `lora-tool consolidate` does; return whether it is good."""
    arguments = ["consolidate", str(checkpoint), "-o", str(out), "--what", "adapter", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "lora_tool", *arguments], check=False, stdout=sys.stderr)  # noqa: S603
    return done.returncode == 0 and not validate(open_checkpoint(out), deep=True).at_least(Severity.ERROR)
