"""Torch's distributed checkpoints: `.metadata` and `.distcp` files of each process.

FSDP1 and FSDP2 write them under SHARDED_STATE_DICT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, ShardedDir, ShardedKind, step_of

_METADATA = ".metadata"
STEP = re.compile(r"(?:global_?)?(?:step|iter|iteration|epoch|checkpoint|ckpt)[-_=]?\d{1,18}\Z", re.IGNORECASE)
"""What training programs call the folders of a run: torchtitan's `step-500`, torchtune's `epoch_2`."""


def _recognise(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if any(holds_pieces(folder.names_in(name)) for name in (".", *folder.folders)) else None


def holds_pieces(names: Iterable[str]) -> bool:
    """Return whether one of the names is `.metadata` or a `.distcp` file: one alone may be all that a copy has."""
    return any(name == _METADATA or name.endswith(".distcp") for name in names)


def _open(folder: Folder) -> ShardedDir:
    listed = {name: folder.names_in(name) for name in (".", *sorted(folder.folders, key=step_of))}
    files = {
        name: tuple(sorted(file for file in names if file.endswith(".distcp")))
        for name, names in listed.items()
        if holds_pieces(names)
    }
    return ShardedDir(kind=DCP, folder=folder, rank_files=files, problems=folder.problems)


DCP = ShardedKind(
    name="FSDP checkpoint",
    article="an",
    sign=_METADATA,
    landmarks=(_METADATA, f"__0{_METADATA}"),
    weights=("*.distcp",),
    others=(_METADATA, f"__*{_METADATA}"),
    folders=("pytorch_model_fsdp*", "optimizer_[0-9]*"),
    common_steps=STEP,
    resumed_by_trainer=True,
    recognise=_recognise,
    open=_open,
)
