"""What accelerate writes for FSDP without torch's distributed checkpoints: one torch file for each rank, or one in all."""

from __future__ import annotations

import re

from lora_tool.checkpoint.folders import Folder
from lora_tool.checkpoint.kinds import Claim, ShardedDir, ShardedKind

RANK_FILE = re.compile(r"pytorch_model_fsdp_(?:(?P<model>\d{1,3})_)?rank(?P<rank>\d{1,6})\.bin\Z")
"""LOCAL_STATE_DICT, and SHARDED_STATE_DICT with `use_dcp=False`."""
FULL_FILE = re.compile(r"pytorch_model_fsdp(?:_(?P<model>\d{1,3}))?\.bin\Z")
"""FULL_STATE_DICT."""


def _recognise_ranks(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if any(map(RANK_FILE.match, folder.files)) else None


def _open_ranks(folder: Folder) -> ShardedDir:
    names = tuple(filter(RANK_FILE.match, folder.files))
    return ShardedDir(kind=FSDP_RANKS, folder=folder, rank_files={".": names}, problems=folder.problems)


def _recognise_full(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if any(map(FULL_FILE.match, folder.files)) else None


def _open_full(folder: Folder) -> ShardedDir:
    names = tuple(filter(FULL_FILE.match, folder.files))
    return ShardedDir(kind=FSDP_FULL, folder=folder, rank_files={".": names}, problems=folder.problems)


FSDP_RANKS = ShardedKind(
    name="FSDP checkpoint of rank files",
    article="an",
    sign="pytorch_model_fsdp_rankN.bin",
    landmarks=("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank0.bin"),
    weights=("pytorch_model_fsdp_*rank[0-9]*.bin",),
    optimizer=("optimizer_*rank[0-9]*.bin",),
    state="lora_tool.sharded.rank_state:fsdp_ranks_state",
    recognise=_recognise_ranks,
    open=_open_ranks,
)
FSDP_FULL = ShardedKind(
    name="FSDP full state dict",
    article="an",
    sign="pytorch_model_fsdp.bin",
    landmarks=("pytorch_model_fsdp.bin",),
    weights=("pytorch_model_fsdp.bin", "pytorch_model_fsdp_[0-9].bin"),
    optimizer=("optimizer.bin",),
    state="lora_tool.sharded.rank_state:fsdp_full_state",
    recognise=_recognise_full,
    open=_open_full,
)
