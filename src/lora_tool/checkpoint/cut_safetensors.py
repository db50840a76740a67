"""One safetensors file for each rank, as torch's HuggingFaceStorageWriter cuts a model; transformers calls it, too."""

from __future__ import annotations

import re

from lora_tool.checkpoint.folders import Folder
from lora_tool.checkpoint.kinds import Claim, ShardedDir, ShardedKind

CUT_FILE = re.compile(r"shard-(?P<shard>\d{5})-model-\d{5}-of-\d{5}\.safetensors\Z")


def _recognise(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if any(map(CUT_FILE.match, folder.files)) else None


def _open(folder: Folder) -> ShardedDir:
    names = tuple(filter(CUT_FILE.match, folder.files))
    return ShardedDir(kind=CUT_SAFETENSORS, folder=folder, rank_files={".": names}, problems=folder.problems)


CUT_SAFETENSORS = ShardedKind(
    name="distributed safetensors checkpoint",
    sign="shard-00001-model-00001-of-00001.safetensors",
    landmarks=("shard-00001-model-00001-of-00001.safetensors",),
    weights=("shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors",),
    state="lora_tool.sharded.cut_state:cut_state",
    recognise=_recognise,
    open=_open,
)
