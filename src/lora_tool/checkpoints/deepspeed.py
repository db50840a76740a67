"""DeepSpeed's checkpoints: tags with one pair of rank files for each process, and the file `latest`."""

from __future__ import annotations

import re

from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, ShardedDir, ShardedKind, read_pointer, step_of

_LATEST = "latest"
_LATEST_UNIVERSAL = "latest_universal"
_TAG = re.compile(r"global_step\d+(?:_universal)?\Z")
_RANK_FILE = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt\Z")


def _recognise(folder: Folder) -> Claim | None:
    names = (name for tag in (".", *folder.folders) for name in folder.names_in(tag))
    return Claim.WEIGHTS if any(map(_RANK_FILE.match, names)) else None


def _open(folder: Folder) -> ShardedDir:
    is_tag = any(map(_RANK_FILE.match, folder.files))
    tags = (".",) if is_tag else sorted(folder.folders, key=step_of)
    found = {tag: files for tag in tags if (files := tuple(sorted(filter(_RANK_FILE.match, folder.names_in(tag)))))}
    latest, universal = (None, None) if is_tag else (_latest(folder, _LATEST), _latest(folder, _LATEST_UNIVERSAL))
    if latest not in found and universal in found:  # a universal checkpoint may be all that is left
        latest = universal
    return ShardedDir(
        kind=ZERO, folder=folder, rank_files=found, latest=latest, latest_universal=universal, problems=folder.problems
    )


def _latest(folder: Folder, name: str) -> str | None:
    return read_pointer(folder.root / name) if name in folder.files else None


ZERO = ShardedKind(
    name="DeepSpeed checkpoint",
    sign="global_stepN",
    landmarks=("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"),
    weights=("*_model_states.pt", "fp32.pt"),
    optimizer=("*_optim_states.pt", "exp_avg.pt", "exp_avg_sq.pt"),
    others=(_LATEST, _LATEST_UNIVERSAL, "zero_to_fp32.py"),
    folders=("global_step*",),
    steps=_TAG,
    resumed_by_trainer=True,
    recognise=_recognise,
    open=_open,
)
