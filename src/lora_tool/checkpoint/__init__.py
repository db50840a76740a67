"""What a folder is and holds, from names, JSON files and tensor headers: never a weight."""

from lora_tool.checkpoint.adapters import ADAPTER, ADAPTER_PICKLE, ADAPTER_WEIGHTS, TRAINED_ADAPTER, adapters_below
from lora_tool.checkpoint.deepspeed import ZERO
from lora_tool.checkpoint.folders import Folder
from lora_tool.checkpoint.fsdp import DCP
from lora_tool.checkpoint.kinds import (
    AdapterDir,
    Checkpoint,
    Claim,
    Kind,
    ModelDir,
    RunDir,
    ShardedDir,
    ShardedKind,
    unexpected,
)
from lora_tool.checkpoint.models import BASE_MODEL, MERGED_MODEL, TRAINED_MODEL
from lora_tool.checkpoint.opening import open_adapter, open_checkpoint, open_model, open_sharded, require_whole
from lora_tool.checkpoint.registry import KINDS
from lora_tool.checkpoint.runs import RUN

__all__ = [
    "ADAPTER",
    "ADAPTER_PICKLE",
    "ADAPTER_WEIGHTS",
    "BASE_MODEL",
    "DCP",
    "KINDS",
    "MERGED_MODEL",
    "RUN",
    "TRAINED_ADAPTER",
    "TRAINED_MODEL",
    "ZERO",
    "AdapterDir",
    "Checkpoint",
    "Claim",
    "Folder",
    "Kind",
    "ModelDir",
    "RunDir",
    "ShardedDir",
    "ShardedKind",
    "adapters_below",
    "open_adapter",
    "open_checkpoint",
    "open_model",
    "open_sharded",
    "require_whole",
    "unexpected",
]
