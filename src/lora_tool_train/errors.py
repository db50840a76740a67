"""How a training fails. Each error has the exit code of the class below it."""

from __future__ import annotations

from lora_tool.core.errors import FindingsFound, LoraToolError, WrongValue


class BadRunConfig(WrongValue):
    """The configuration of a run cannot be read, or has an option that TRL, accelerate and lora-tool do not know."""


class TrainingStopped(FindingsFound):
    """A guard refused a run or stopped it, or its result is bad."""


class TrainingFailed(LoraToolError):
    """The run could not begin or continue: TRL, accelerate or the machine failed."""
