"""The training methods: where TRL keeps each one's classes, what its adapter is, which columns it reads.

TRL moves methods between `trl` and `trl.experimental`; each is looked for where it may be. Nothing of TRL is imported.
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
    """One method of `lora-tool train`. `trainer` and `config` are TRL's class names, `homes` modules that may have them."""

    name: str
    trainer: str
    config: str
    homes: tuple[str, ...]
    feedback: Feedback
    columns: tuple[tuple[str, ...], ...]
    """Sets of columns, one of which the data must have."""
    task_type: str = "CAUSAL_LM"
    needs_tokenizer: bool = False
    script: str | None = None
    """Module and class of script arguments that have more than the dataset's (`trl.scripts.grpo.GRPOScriptArguments`)."""

    @property
    def model_class(self) -> str:
        """The auto class that trains: what the adapter will be loaded with."""
        return "AutoModelForSequenceClassification" if self.task_type == "SEQ_CLS" else "AutoModelForCausalLM"


_PAIRS = (("chosen", "rejected"), ("prompt", "chosen", "rejected"))


def _stable(name: str, prefix: str, feedback: Feedback, columns: tuple[tuple[str, ...], ...], **more: str) -> Method:
    return Method(
        name=name,
        trainer=f"{prefix}Trainer",
        config=f"{prefix}Config",
        homes=("trl", f"trl.experimental.{name}"),
        feedback=feedback,
        columns=columns,
        **more,  # type: ignore[arg-type] # task_type and script are strings
    )


def _experimental(name: str, prefix: str) -> Method:
    return Method(
        name=name,
        trainer=f"{prefix}Trainer",
        config=f"{prefix}Config",
        homes=(f"trl.experimental.{name}", "trl"),
        feedback=Feedback.PREFERENCE,
        columns=_PAIRS,
        needs_tokenizer=True,  # their collators are made before TRL would set a pad token
    )


METHODS = {
    method.name: method
    for method in (
        _stable("reward", "Reward", Feedback.PREFERENCE, _PAIRS, task_type="SEQ_CLS"),
        _stable("sft", "SFT", Feedback.TEXT, (("messages",), ("text",), ("prompt", "completion"))),
        _stable("dpo", "DPO", Feedback.PREFERENCE, _PAIRS),
        _stable("kto", "KTO", Feedback.LABEL, (("prompt", "completion", "label"), *_PAIRS)),
        _stable("grpo", "GRPO", Feedback.REWARD, (("prompt",),), script="trl.scripts.grpo.GRPOScriptArguments"),
        _stable("rloo", "RLOO", Feedback.REWARD, (("prompt",),), script="trl.scripts.rloo.RLOOScriptArguments"),
        _experimental("cpo", "CPO"),
        _experimental("orpo", "ORPO"),
    )
}
"""Name on the command line → method."""
