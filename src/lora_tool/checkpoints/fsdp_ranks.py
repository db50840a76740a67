"""What accelerate writes for FSDP without torch's distributed checkpoints: one torch file for each rank, or one in all."""

from __future__ import annotations

import re
from functools import partial

from lora_tool.checkpoints.kinds import ShardedKind, lies_here, open_here

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
