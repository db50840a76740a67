"""LoRA checkpoints: open, judge, plan, merge, push. Names are loaded when they are first used, so importing costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_tool.checkpoint import open_checkpoint
    from lora_tool.execution.engine import execute
    from lora_tool.hub.planning import plan_push
    from lora_tool.hub.pushing import push
    from lora_tool.plan.merge import plan_merge
    from lora_tool.rules.validation import validate
    from lora_tool.verification.verifying import verify

__all__ = ["execute", "open_checkpoint", "plan_merge", "plan_push", "push", "validate", "verify"]

_HOMES = {
    "execute": "lora_tool.execution.engine",
    "open_checkpoint": "lora_tool.checkpoint",
    "plan_merge": "lora_tool.plan.merge",
    "plan_push": "lora_tool.hub.planning",
    "push": "lora_tool.hub.pushing",
    "validate": "lora_tool.rules.validation",
    "verify": "lora_tool.verification.verifying",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562: whatever the name is
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
