"""The training methods: what each learns from, what its adapter is. Nothing of TRL is imported."""

from __future__ import annotations

import enum

from msgspec import Struct


@enum.unique
class Feedback(str, enum.Enum):
    """What a method learns from; it decides which signals mean that nothing is learned."""

    TEXT = "text"
    PREFERENCE = "preference"
    LABEL = "label"
    REWARD = "reward"


class Method(Struct, frozen=True, kw_only=True):
    """One method of `lora-tool train`."""

    name: str
    feedback: Feedback
    task_type: str = "CAUSAL_LM"
    experimental: bool = False
    """Whether TRL has a trainer and no command for it."""

    @property
    def script(self) -> str:
        return "lora_tool_train.experimental" if self.experimental else f"trl.scripts.{self.name}"

    @property
    def home(self) -> str:
        return f"trl.experimental.{self.name}" if self.experimental else "trl"

    @property
    def prefix(self) -> str:
        """How the names of TRL's classes begin: ``DPO`` of DPOTrainer and DPOConfig."""
        return "Reward" if self.name == "reward" else self.name.upper()


METHODS = {
    method.name: method
    for method in (
        Method(name="reward", feedback=Feedback.PREFERENCE, task_type="SEQ_CLS"),
        Method(name="sft", feedback=Feedback.TEXT),
        Method(name="dpo", feedback=Feedback.PREFERENCE),
        Method(name="kto", feedback=Feedback.LABEL),
        Method(name="grpo", feedback=Feedback.REWARD),
        Method(name="rloo", feedback=Feedback.REWARD),
        Method(name="cpo", feedback=Feedback.PREFERENCE, experimental=True),
        Method(name="orpo", feedback=Feedback.PREFERENCE, experimental=True),
    )
}
"""Name on the command line → method."""
GUARDED = {
    "distillation": "lora-tool guard -- trl distillation --config run.yaml",
    **dict.fromkeys(
        ("gkd", "gold", "ppo", "online_dpo", "xpo", "nash_md", "bco", "prm", "sdft", "sdpo", "tpo"),
        "lora-tool guard -- python SCRIPT",
    ),
}
"""Other methods of TRL → the command that trains by one under the guard."""
