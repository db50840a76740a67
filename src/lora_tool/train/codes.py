"""The codes of the guards: words, because they are typed into `ignore` and shown in trackers as ``guard/<code>``."""

from __future__ import annotations

from typing import Any

from lora_tool.report import Finding, Severity

CODES = {
    "task-type": "the adapter's task type is not the method's; a reward model's head would not be saved",
    "peft-off": "LoRA options are given, and LoRA is off",
    "adapter-as-base": "the base model is itself an adapter, which the result would not name",
    "fp16-weights": "weights are trained in float16, where activations above 65504 become infinite",
    "nan-filter": "NaN losses are shown as 0.0",
    "no-clipping": "float16 without gradient clipping",
    "attention-conflict": "two different attention implementations are asked for",
    "attention-in-effect": "another attention implementation is in effect than was asked for",
    "dtype-conflict": "two different dtypes are asked for",
    "padding-free-leak": "documents in one row see each other",
    "padding-free-off": "padding-free was asked for and is not in effect",
    "packing-wrapped": "documents are cut and joined without a border",
    "columns": "the data has other columns than the method reads",
    "values": "a column holds values that the method cannot read",
    "no-rows": "there are no rows to train on",
    "rows-dropped": "rows were dropped because they are longer than max_length",
    "rows-truncated": "rows are cut at max_length",
    "chosen-equals-rejected": "chosen and rejected are the same",
    "empty-completions": "completions are empty",
    "one-label": "every label is the same",
    "no-pad-token": "there is no pad token, and no end token to take its place",
    "frozen-adapter": "the adapter is frozen or switched off",
    "nan-gradients": "gradients are NaN or infinite",
    "nan-logits": "the model's answers are NaN or infinite, so no completion can be drawn",
    "nan-loss": "the loss is NaN or infinite",
    "reward-head": "the reward model has no head, so its rewards would be random",
    "reward-none": "no reward function returned a reward",
    "reward-infinite": "a reward function returned infinity, which takes the advantage from its whole group",
    "reward-constant": "all completions of a prompt get the same reward",
    "reward-cancels": "reward functions cancel each other",
    "all-masked": "every completion is truncated, and truncated ones are masked",
    "no-gradient": "no gradient reaches the adapter",
    "no-margin": "the model never distinguishes chosen from rejected",
    "signal-lost": "there was a gradient, and there is none any more",
    "never-moved": "no trained parameter changed",
    "bad-result": "what was saved does not pass `lora-tool validate`",
    "unusable-checkpoint": "a checkpoint cannot be resumed from",
    "processes": "another number of processes runs than was asked for",
    "merge-output": "the folder that the merged model is to be written to exists",
    "no-token": "there is no token to push with",
    "old-checkpoints": "the output folder has checkpoints of an earlier run",
}
"""Code → what it means, in one line."""


def finding(
    code: str, severity: Severity, message: str, *, hint: str, where: str = "", subject: str | None = None
) -> Finding:
    """Return a finding of a guard. `where` is the file or stage that it is about, `subject` the option or column."""
    if code not in CODES:
        raise ValueError(f"{code} is not in the table of codes")
    return Finding(code=code, severity=severity, path=where, subject=subject, message=message, hint=hint)


def error(code: str, message: str, **rest: Any) -> Finding:
    """Return a finding that stops a run; `rest` as of `finding`."""
    return finding(code, Severity.ERROR, message, **rest)


def warning(code: str, message: str, **rest: Any) -> Finding:
    """Return a finding that does not stop a run; `rest` as of `finding`."""
    return finding(code, Severity.WARNING, message, **rest)


def adapter_as_base(line: str, *, adapter: str = "ADAPTER") -> Finding:
    """Return the finding that a new adapter is trained on top of another: `line` names the merged model instead."""
    message = (
        "is an adapter, not a model: the new adapter would name the base under both, and be loaded without the first"
    )
    hint = f"lora-tool merge {adapter} -o MERGED, then {line}"
    return error("adapter-as-base", message, hint=hint, where="model", subject="model_name_or_path")
