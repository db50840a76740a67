"""The traps: the word that `ignore` and trackers (``guard/<word>``) know each by, and what is said of it."""

from __future__ import annotations

from lora_tool.report import Finding, Severity

ERRORS = {
    "task-type": "{why}",
    "adapter-as-base": "is an adapter, not a model: the new adapter would name the base under both, and be loaded "
    "without the first",
    "attention-conflict": "is {outer}, but model_init_kwargs says {inner}, and TRL lets that win",
    "dtype-conflict": "is {outer}, but model_init_kwargs says {inner}, and TRL lets that win",
    "padding-free-leak": "documents in one row see each other: {model} has no variable-length attention ({attention} is "
    "in effect); {how}",
    "columns": "{method} reads {expected}; the data has {columns}",
    "values": "{why}",
    "no-rows": "{why}",
    "chosen-equals-rejected": "{share} rows equal rejected: they have no preference, and no gradient",
    "empty-completions": "{share} rows are empty: nothing is learned from them",
    "no-pad-token": "the tokenizer has neither a pad token nor an end token",
    "frozen-adapter": "its LoRA layers {why}: training cannot change the adapter",
    "nan-gradients": "{what}",
    "nan-logits": "{what}",
    "nan-loss": "{what}",
    "reward-head": "is a {model}, which has no head that gives a reward: it would get a random one",
    "reward-none": "every reward function returned None or NaN ({functions})",
    "reward-infinite": "a reward is infinite ({functions}), so no completion of its prompt has an advantage",
    "reward-constant": "all completions of a prompt get the same reward (mean {reward:.3g}), so no advantage and no "
    "gradient",
    "reward-cancels": "the sum of the rewards is {reward:.3g} for every completion, though each varies: {functions}",
    "all-masked": "every completion reaches max_completion_length, and mask_truncated_completions leaves out all of them",
    "no-gradient": "{why}",
    "no-margin": "chosen and rejected get the same reward in every row ({reward:.3g}); the loss falls without a preference",
    "never-moved": "none of {count} trained parameters changed in {steps} steps",
    "not-saved": "the first checkpoint that was saved is without what was trained: {why}",
    "bad-result": "{why}",
    "merge-output": "{folder} exists, and merge would not replace it when training has ended",
}
WARNINGS = {
    "peft-off": "is given without use_peft, so TRL ignores it and trains the whole model ({count} such options)",
    "fp16-weights": "{what} float16: one activation above 65504 makes the loss NaN, and no loss scaling helps against that",
    "nan-filter": "a NaN loss will be shown as 0.0 or as the mean so far; the guard watches the gradients instead",
    "no-clipping": "gradients are not clipped in float16, where one large step is enough to overflow",
    "attention-in-effect": "{asked} was requested, {used} is in effect",
    "padding-free-off": "padding_free was requested, but {who} pads: the memory and the speed are those of padding",
    "packing-wrapped": "documents are cut anywhere and joined without a border: each sees the one before it",
    "rows-dropped": "{share} rows were dropped: they are longer than max_length {limit}",
    "rows-truncated": "{share} rows are cut at max_length {limit}: {method} does not see their {what}",
    "one-label": "label is {label} in all of {count} rows: KTO learns from the difference",
    "signal-lost": "no signal since step {since}: {why}",
    "unusable-checkpoint": "passed over: {why}",
    "processes": "{asked} processes were requested, {running} run: the effective batch size differs",
    "no-token": "has no token, and will fail without one when training has ended",
    "old-checkpoints": "holds {last} of an earlier run, which --resume auto would later take for one of this run",
}
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
    """Return what is said of a trap, with what was `seen` in its message.

    `where` is the file or stage that it is about, `subject` the option or column; `severity` None is the code's own.
    """
    message = CODES[code].format(**seen)
    severity = severity or (Severity.ERROR if code in ERRORS else Severity.WARNING)
    return Finding(code=code, severity=severity, path=where, subject=subject, message=message, hint=hint)
