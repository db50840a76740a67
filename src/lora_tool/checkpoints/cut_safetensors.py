"""One safetensors file for each rank, as torch's HuggingFaceStorageWriter cuts a model; transformers calls it, too."""

from __future__ import annotations

import re
from functools import partial

from lora_tool.checkpoints.kinds import ShardedKind, lies_here, open_here

CUT_FILE = re.compile(r"shard-(?P<shard>\d{5})-model-\d{5}-of-\d{5}\.safetensors\Z")


CUT_SAFETENSORS: ShardedKind = ShardedKind(
    name="distributed safetensors checkpoint",
    sign="shard-00001-model-00001-of-00001.safetensors",
    landmarks=("shard-00001-model-00001-of-00001.safetensors",),
    weights=("shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors",),
    recognise=partial(lies_here, CUT_FILE),
    open=lambda folder: open_here(CUT_SAFETENSORS, CUT_FILE, folder),
)
