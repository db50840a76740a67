"""The training state of a checkpoint, whatever sort of rank files it has."""

from __future__ import annotations

from lora_tool.checkpoint import DcpDir, ZeroDir
from lora_tool.sharded.state import TrainingState


def training_state(checkpoint: ZeroDir | DcpDir, *, tag: str | None = None) -> TrainingState:
    """Return the state of a checkpoint of either sort; see `zero_state` and `dcp_state`."""
    if isinstance(checkpoint, DcpDir):
        from lora_tool.sharded.dcp_state import dcp_state  # noqa: PLC0415 - half as much to import for each sort

        return dcp_state(checkpoint, part=tag)
    from lora_tool.sharded.zero_state import zero_state  # noqa: PLC0415 - as above

    return zero_state(checkpoint, tag=tag)
