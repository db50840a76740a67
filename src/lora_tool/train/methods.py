"""The training methods: what each learns from, what its adapter is, which columns it reads. Nothing of TRL is imported."""

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
    columns: tuple[tuple[str, ...], ...]
    """Sets of columns, one of which the data must have."""
    task_type: str = "CAUSAL_LM"
    experimental: bool = False
    """Whether TRL has no command for it: such a method trains by the script of dpo, which reads the same data."""

    @property
    def home(self) -> str:
        """The module that has the trainer and its config."""
        return f"trl.experimental.{self.name}" if self.experimental else "trl"

    @property
    def prefix(self) -> str:
        """How the names of TRL's classes begin: ``DPO`` of DPOTrainer and DPOConfig."""
        return "Reward" if self.name == "reward" else self.name.upper()


_PAIRS = (("chosen", "rejected"), ("prompt", "chosen", "rejected"))
_TEXTS = (("messages",), ("text",), ("prompt", "completion"))
_LABELLED = (("prompt", "completion", "label"), *_PAIRS)
_PROMPTS = (("prompt",),)

METHODS = {
    method.name: method
    for method in (
        Method(name="reward", feedback=Feedback.PREFERENCE, columns=_PAIRS, task_type="SEQ_CLS"),
        Method(name="sft", feedback=Feedback.TEXT, columns=_TEXTS),
        Method(name="dpo", feedback=Feedback.PREFERENCE, columns=_PAIRS),
        Method(name="kto", feedback=Feedback.LABEL, columns=_LABELLED),
        Method(name="grpo", feedback=Feedback.REWARD, columns=_PROMPTS),
        Method(name="rloo", feedback=Feedback.REWARD, columns=_PROMPTS),
        Method(name="cpo", feedback=Feedback.PREFERENCE, columns=_PAIRS, experimental=True),
        Method(name="orpo", feedback=Feedback.PREFERENCE, columns=_PAIRS, experimental=True),
    )
}
"""Name on the command line → method."""
