"""How a training fails: traps, each with the code that `ignore` takes, and errors, with the exit code of their base."""

from __future__ import annotations

import re
from collections.abc import Collection

from lora_tool.core.errors import FindingsFound, LoraToolError, WrongValue
from lora_tool.core.report import Finding, Severity

ERRORS = {
    "task-type": "{why}",
    "adapter-as-base": "is an adapter, not a model: the new adapter would name the base model below it, and loaders "
    "would leave this adapter out",
    "padding-free-leak": "documents in one row see each other: {model} has no variable-length attention ({attention} is "
    "in effect); {how}",
    "no-rows": "has no rows",
    "chosen-equals-rejected": "{share} rows equal rejected: they give no preference and no gradient",
    "frozen-adapter": "its LoRA layers {why}: training cannot change the adapter",
    "nan-gradients": "{what}",
    "nan-logits": "{what}",
    "nan-loss": "{what}",
    "reward-head": "is a {model}, which has no reward head: transformers would give it a random one",
    "reward-none": "every reward function returned None or NaN ({functions})",
    "reward-infinite": "a reward is infinite ({functions}), so no completion of its prompt has an advantage",
    "reward-constant": "all completions of a prompt get the same reward (mean {reward:.3g}), so no advantage and no "
    "gradient",
    "reward-cancels": "the weighted sum of the rewards is {reward:.3g} for every completion, although {functions} varies",
    "all-masked": "every completion reaches max_completion_length, and mask_truncated_completions excludes them all "
    "from the loss",
    "no-gradient": "{why}",
    "no-margin": "chosen and rejected get the same reward in every row ({reward:.3g}); the loss falls without a preference",
    "never-moved": "none of {count} trained parameters changed in {steps} steps",
    "no-labels": "{share} rows that were read have no label (all are -100), so they teach nothing",
    "learning-rate": "{why}",
    "resume-differs": "{checkpoint} was saved with other options: {why}",
    "not-saved": "the first saved checkpoint lacks the trained weights: {why}",
    "bad-result": "{why}",
}
WARNINGS = {
    "peft-off": "is given without use_peft, so TRL ignores it and trains the whole model ({count} such options)",
    "fp16-weights": "{what} float16: one activation above 65504 makes the loss NaN, and loss scaling cannot prevent it",
    "unmatched-target": "{entry} names no module of the model, so nothing is trained for it",
    "eos-masked": "{token} is in {share} rows that were read, and a label in none ({why}): the model does not learn to stop",
    "one-label": "label is {label} in all of {count} rows: KTO learns from the difference",
    "signal-lost": "no signal since step {since}: {why}",
    "unusable-checkpoint": "passed over: {why}",
}
LOW = 2e-6
"""A learning rate below it is full training's: TRL's default for preferences and rewards is 1e-6."""
CODES = ERRORS | WARNINGS
"""Code → its message, in which what was seen takes its place. A run with one of `ERRORS` is refused, or stopped."""


def trap(
    code: str,
    hint: str | None,
    *,
    where: str = "",
    subject: str | None = None,
    severity: Severity | None = None,
    **seen: object,
) -> Finding:
    """Return the finding of a trap, with what was `seen` in its message.

    `where` is the file or stage of it, `subject` the option or column; `severity` None is the code's own.
    """
    message = CODES[code].format(**seen)
    severity = severity or (Severity.ERROR if code in ERRORS else Severity.WARNING)
    return Finding(code=code, severity=severity, path=where, subject=subject, message=message, hint=hint)


def as_typed(hint: str | None, typed: Collection[str]) -> str | None:
    """Return a hint with each option of YAML, ``name: value``, as it is `typed`: there it would win over the file."""
    names = "|".join(map(re.escape, typed))
    if not hint or not names:
        return hint
    option = rf"\b({names}): (\[[^\]]*\]|[^\s,;)]+)"
    return re.sub(option, lambda found: f"--{found[1]} {re.sub(r'[][,]', '', found[2])}", hint)


class BadRunConfig(WrongValue):
    """The configuration of a run cannot be read, or has an option that TRL, accelerate and lora-tool do not know."""


class TrainingStopped(FindingsFound):
    """A guard refused a run or stopped it, or its result is bad."""


class TrainingFailed(LoraToolError):
    """The run could not begin or continue: TRL, accelerate or the machine failed."""
