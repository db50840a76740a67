"""What a folder is and holds, from names, JSON files and tensor headers: never a weight."""

from lora_tool.checkpoint.folders import (
    AdapterDir,
    Checkpoint,
    DcpDir,
    Folder,
    Kind,
    ModelDir,
    RunDir,
    ZeroDir,
    unexpected,
)
from lora_tool.checkpoint.opening import (
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    adapters_below,
    open_adapter,
    open_checkpoint,
    open_model,
    open_sharded,
    require_whole,
)

__all__ = [
    "ADAPTER_PICKLE",
    "ADAPTER_WEIGHTS",
    "AdapterDir",
    "Checkpoint",
    "DcpDir",
    "Folder",
    "Kind",
    "ModelDir",
    "RunDir",
    "ZeroDir",
    "adapters_below",
    "open_adapter",
    "open_checkpoint",
    "open_model",
    "open_sharded",
    "require_whole",
    "unexpected",
]
