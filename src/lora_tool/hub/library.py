"""`plan_push` as the library has it: its options are keywords."""

from __future__ import annotations

from lora_tool.core.options import called_with
from lora_tool.hub.options import PushOptions
from lora_tool.hub.planning import plan_push as _plan_push

plan_push = called_with(PushOptions)(_plan_push)
