"""The training methods: which script of TRL runs each one, what its adapter is, which columns it reads.

Nothing of TRL is imported here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@enum.unique
class Feedback(str, enum.Enum):
    """What a method learns from; it decides which signals mean that nothing is learned."""

    TEXT = "text"
    PREFERENCE = "preference"
    LABEL = "label"
    REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of `lora-tool train`. `prefix` begins the names of TRL's classes: ``DPO`` of DPOTrainer and DPOConfig."""

    name: str
    prefix: str
    feedback: Feedback
    columns: tuple[tuple[str, ...], ...]
    """Sets of columns, one of which the data must have."""
    task_type: str = "CAUSAL_LM"
    home: str = "trl"
    """The module that has the trainer and its config."""

    @property
    def trainer(self) -> str:
        return f"{self.prefix}Trainer"

    @property
    def config(self) -> str:
        return f"{self.prefix}Config"

    @property
    def has_script(self) -> bool:
        """Whether TRL has a command for the method. cpo and orpo train by the script of dpo, which reads the same data."""
        return self.home == "trl"

    @property
    def model_class(self) -> str:
        """The auto class that trains: what the adapter will be loaded with."""
        return "AutoModelForSequenceClassification" if self.task_type == "SEQ_CLS" else "AutoModelForCausalLM"


_PAIRS = (("chosen", "rejected"), ("prompt", "chosen", "rejected"))
_TEXTS = (("messages",), ("text",), ("prompt", "completion"))
_LABELLED = (("prompt", "completion", "label"), *_PAIRS)
_PROMPTS = (("prompt",),)

METHODS = {
    method.name: method
    for method in (
        Method(name="reward", prefix="Reward", feedback=Feedback.PREFERENCE, columns=_PAIRS, task_type="SEQ_CLS"),
        Method(name="sft", prefix="SFT", feedback=Feedback.TEXT, columns=_TEXTS),
        Method(name="dpo", prefix="DPO", feedback=Feedback.PREFERENCE, columns=_PAIRS),
        Method(name="kto", prefix="KTO", feedback=Feedback.LABEL, columns=_LABELLED),
        Method(name="grpo", prefix="GRPO", feedback=Feedback.REWARD, columns=_PROMPTS),
        Method(name="rloo", prefix="RLOO", feedback=Feedback.REWARD, columns=_PROMPTS),
        Method(name="cpo", prefix="CPO", feedback=Feedback.PREFERENCE, columns=_PAIRS, home="trl.experimental.cpo"),
        Method(name="orpo", prefix="ORPO", feedback=Feedback.PREFERENCE, columns=_PAIRS, home="trl.experimental.orpo"),
    )
}
"""Name on the command line → method."""
