"""Torch's distributed checkpoints: `.metadata` and `.distcp` files of each process.

FSDP1 and FSDP2 write them under SHARDED_STATE_DICT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, ShardedDir, ShardedKind, lies_here, open_here, step_of

_METADATA = ".metadata"


def _recognise(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if any(holds_pieces(folder.names_in(name)) for name in (".", *folder.folders)) else None


def holds_pieces(names: Iterable[str]) -> bool:
    """Return whether one of the names is `.metadata` or a `.distcp` file. One is enough: a copy may lack the others."""
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
    resumed_by_trainer=True,
    recognise=_recognise,
    open=_open,
)


# What accelerate writes for FSDP without torch's distributed checkpoints: one torch file for each rank, or one in all.


RANK_FILE = re.compile(r"pytorch_model_fsdp_(?:(?P<model>\d{1,3})_)?rank(?P<rank>\d{1,6})\.bin\Z")
"""LOCAL_STATE_DICT, and SHARDED_STATE_DICT with `use_dcp=False`."""
FULL_FILE = re.compile(r"pytorch_model_fsdp(?:_(?P<model>\d{1,3}))?\.bin\Z")
"""FULL_STATE_DICT."""


FSDP_RANKS: ShardedKind = ShardedKind(
    name="FSDP checkpoint of rank files",
    article="an",
    sign="pytorch_model_fsdp_rankN.bin",
    landmarks=("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank0.bin"),
    weights=("pytorch_model_fsdp_*rank[0-9]*.bin",),
    optimizer=("optimizer_*rank[0-9]*.bin",),
    recognise=partial(lies_here, RANK_FILE),
    open=lambda folder: open_here(FSDP_RANKS, RANK_FILE, folder),
)
FSDP_FULL: ShardedKind = ShardedKind(
    name="FSDP full state dict",
    article="an",
    sign="pytorch_model_fsdp.bin",
    landmarks=("pytorch_model_fsdp.bin",),
    weights=("pytorch_model_fsdp.bin", "pytorch_model_fsdp_[0-9].bin"),
    optimizer=("optimizer.bin",),
    resumed_by_trainer=True,
    recognise=partial(lies_here, FULL_FILE),
    open=lambda folder: open_here(FSDP_FULL, FULL_FILE, folder),
)


# One safetensors file for each rank, as torch's HuggingFaceStorageWriter cuts a model; transformers calls it, too.


CUT_FILE = re.compile(r"shard-(?P<shard>\d{5})-model-\d{5}-of-\d{5}\.safetensors\Z")

CUT_SAFETENSORS: ShardedKind = ShardedKind(
    name="distributed safetensors checkpoint",
    sign="shard-00001-model-00001-of-00001.safetensors",
    landmarks=("shard-00001-model-00001-of-00001.safetensors",),
    weights=("shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors",),
    recognise=partial(lies_here, CUT_FILE),
    open=lambda folder: open_here(CUT_SAFETENSORS, CUT_FILE, folder),
)
