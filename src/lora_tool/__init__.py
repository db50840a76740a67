"""LoRA checkpoints: open, judge, plan, merge, prove, push.

    base, adapter = open_checkpoint("base"), open_checkpoint("adapter")
    validate(adapter, base=base).raise_for_errors()
    execute(plan_merge(base, adapter), "merged")
    verify("merged").raise_for_errors()

Rank files of a training run, which may lie beside an adapter, are opened by `open_sharded` and planned by
`plan_consolidate`. Whatever goes wrong on purpose is a `LoraToolError`; its `hint` says what to do, and
`lora_tool.errors` draws the tree of its classes. Names are loaded when they are first used: importing costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_tool.checkpoint import open_checkpoint, open_sharded
    from lora_tool.errors import LoraToolError
    from lora_tool.execution.engine import execute
    from lora_tool.hub.planning import plan_push
    from lora_tool.hub.pushing import push
    from lora_tool.plan.consolidate.plan_consolidate import plan_consolidate
    from lora_tool.plan.merge.plan_merge import plan_merge
    from lora_tool.validation.validating import validate
    from lora_tool.verification.verifying import verify
    from lora_tool.version import __version__

__all__ = [
    "LoraToolError",
    "__version__",
    "execute",
    "open_checkpoint",
    "open_sharded",
    "plan_consolidate",
    "plan_merge",
    "plan_push",
    "push",
    "validate",
    "verify",
]

_HOMES = {
    "LoraToolError": "lora_tool.errors",
    "__version__": "lora_tool.version",
    "execute": "lora_tool.execution.engine",
    "open_checkpoint": "lora_tool.checkpoint",
    "open_sharded": "lora_tool.checkpoint",
    "plan_consolidate": "lora_tool.plan.consolidate.plan_consolidate",
    "plan_merge": "lora_tool.plan.merge.plan_merge",
    "plan_push": "lora_tool.hub.planning",
    "push": "lora_tool.hub.pushing",
    "validate": "lora_tool.validation.validating",
    "verify": "lora_tool.verification.verifying",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562: whatever the name is
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
