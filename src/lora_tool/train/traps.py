"""The traps: the word that `ignore` and trackers (``guard/<word>``) know each by, and what is said of it."""

from __future__ import annotations

from lora_tool.report import Finding, Severity

ERRORS = {
    "task-type": "{why}",
    "adapter-as-base": "is an adapter, not a model: the new adapter would name the base model below it, and loaders "
    "would leave this adapter out",
    "attention-conflict": "is {outer}, but model_init_kwargs says {inner}, and TRL lets that win",
    "dtype-conflict": "is {outer}, but model_init_kwargs says {inner}, and TRL lets that win",
    "padding-free-leak": "documents in one row see each other: {model} has no variable-length attention ({attention} is "
    "in effect); {how}",
    "columns": "{method} reads {expected}; the data has {columns}",
    "values": "{why}",
    "no-rows": "{why}",
    "chosen-equals-rejected": "{share} rows equal rejected: they give no preference and no gradient",
    "empty-completions": "{share} rows are empty: nothing is learned from them",
    "no-pad-token": "the tokenizer has neither a pad token nor an end token",
    "frozen-adapter": "its LoRA layers {why}: training cannot change the adapter",
    "nan-gradients": "{what}",
    "nan-logits": "{what}",
    "nan-loss": "{what}",
    "reward-head": "is a {model}, which has no reward head: transformers would give it a random one",
    "reward-none": "every reward function returned None or NaN ({functions})",
    "reward-infinite": "a reward is infinite ({functions}), so no completion of its prompt has an advantage",
    "reward-constant": "all completions of a prompt get the same reward (mean {reward:.3g}), so no advantage and no "
    "gradient",
    "reward-cancels": "the weighted sum of the rewards is {reward:.3g} for every completion, although each reward "
    "varies: {functions}",
    "all-masked": "every completion reaches max_completion_length, and mask_truncated_completions excludes them all "
    "from the loss",
    "no-gradient": "{why}",
    "no-margin": "chosen and rejected get the same reward in every row ({reward:.3g}); the loss falls without a preference",
    "never-moved": "none of {count} trained parameters changed in {steps} steps",
    "not-saved": "the first saved checkpoint lacks the trained weights: {why}",
    "bad-result": "{why}",
    "merge-output": "{folder} exists, and the merge after training would not replace it",
}
WARNINGS = {
    "peft-off": "is given without use_peft, so TRL ignores it and trains the whole model ({count} such options)",
    "fp16-weights": "{what} float16: one activation above 65504 makes the loss NaN, and loss scaling cannot prevent it",
    "nan-filter": "a NaN loss will be shown as 0.0 or as the mean so far; the guard watches the gradients instead",
    "no-clipping": "gradients are not clipped in float16, where one large step is enough to overflow",
    "attention-in-effect": "{asked} was requested, {used} is in effect",
    "padding-free-off": "padding_free was requested, but {who} pads, so it saves no memory and no time",
    "packing-wrapped": "documents are cut at arbitrary places and joined without a boundary: each sees the one before "
    "it",
    "rows-dropped": "{share} rows were dropped: they are longer than max_length {limit}",
    "rows-truncated": "{share} rows are cut at max_length {limit}: {method} does not see their {what}",
    "one-label": "label is {label} in all of {count} rows: KTO learns from the difference",
    "signal-lost": "no signal since step {since}: {why}",
    "unusable-checkpoint": "passed over: {why}",
    "processes": "{asked} processes were requested, but {running} run, so the effective batch size differs",
    "no-token": "needs a token after training, and none is set",
    "old-checkpoints": "holds {last} of an earlier run, which --resume auto would later mistake for a checkpoint of "
    "this run",
}
CODES = ERRORS | WARNINGS
"""Code → its message, in which what was seen takes its place. A run with one of `ERRORS` is refused, or stopped."""
PAGES = {
    "task-type": "PEFT saves the score head only under lora_task_type SEQ_CLS, and loaders build the class that it "
    "names. Use SEQ_CLS for reward, CAUSAL_LM for every other method.",
    "adapter-as-base": "model_name_or_path is itself an adapter. Merge it first and train on the merged model.",
    "attention-conflict": "Two options name different attention implementations, and the one in model_init_kwargs wins. "
    "Keep one.",
    "dtype-conflict": "Two options name different dtypes, and the one in model_init_kwargs wins. Keep one.",
    "padding-free-leak": "Padding-free and packed rows hold several documents. Without variable-length attention each "
    "reads the one before it; two forward passes showed that. Turn padding_free or packing off, or use flash attention.",
    "columns": "The data lacks the columns that the method reads. Rename columns, or choose the method that fits them.",
    "values": "A column holds values of another type than the method reads: lists for text, numbers for booleans.",
    "no-rows": "The data has no rows, or the length filter dropped them all. Raise max_length or check the data.",
    "chosen-equals-rejected": "Pairs with two equal answers have no gradient. Remove them from the data.",
    "empty-completions": "An empty answer has no token to learn from. Remove such rows.",
    "no-pad-token": "The trainer cannot pad a batch. Set pad_token in the base model's tokenizer.",
    "frozen-adapter": "No LoRA weight is trained: all are frozen, or their product stays zero. Check the "
    "initialisation, and whether other code freezes parameters.",
    "nan-gradients": "A gradient is NaN or infinite; one optimizer step would make every weight NaN. Use bfloat16 instead "
    "of float16, or a lower learning rate.",
    "nan-logits": "The model's logits are NaN or infinite, so no completion can be drawn. Use bfloat16 or float32.",
    "nan-loss": "The logged loss is NaN or infinite. Use bfloat16 instead of float16, or a lower learning rate.",
    "reward-head": "The reward model is a language model without a head: transformers would give it a random one. Name a "
    "sequence classifier; lora-tool merge --rm makes one of an adapter.",
    "reward-none": "Every reward function returned None or NaN, so no completion is better than another. Check their "
    "return values, and for which rows this happens.",
    "reward-infinite": "An infinite reward makes the mean of its group infinite and every advantage NaN. Bound it.",
    "reward-constant": "All completions of a prompt got the same reward, so their advantages and the gradient are "
    "zero. "
    "Use a reward that tells them apart, more generations, or a higher temperature.",
    "reward-cancels": "Each reward varies, but their weighted sum does not. Change reward_weights.",
    "all-masked": "Every completion is cut at max_completion_length and then excluded from the loss. Raise the limit, "
    "or set mask_truncated_completions to false.",
    "no-gradient": "The gradient is zero step after step, so the run learns nothing. The message names the cause that "
    "the logged figures show.",
    "no-margin": "The reward model gives chosen and rejected the same score. Check that the two columns differ after they "
    "are cut to max_length.",
    "never-moved": "At the end every trained parameter still has its initial value. Use a learning_rate above 0 and "
    "more steps than warmup_steps.",
    "bad-result": "The saved result cannot be opened as an adapter or model. It is kept in rejected/.",
    "not-saved": "The first checkpoint lacks the LoRA weights, or holds one rank's rows of them: PEFT 0.21 under FSDP1 "
    "saves none. Train with `fsdp_version: 2`, gather when saving, or use another PEFT; `lora-tool validate` gives "
    "details.",
    "merge-output": "`after: merge:` would fail after training, because its output exists. Name another output or set "
    "overwrite: true.",
    "peft-off": "TRL reads its lora_ options only with use_peft: true; without it the whole model is trained.",
    "fp16-weights": "float16 ends at 65504, and weights in it get no loss scaling. Use dtype: bfloat16 or auto.",
    "nan-filter": "logging_nan_inf_filter: true shows a NaN loss as 0.0. Set it to false.",
    "no-clipping": "Without max_grad_norm one large float16 gradient is enough to overflow. Set max_grad_norm: 1.0.",
    "attention-in-effect": "The requested attention implementation is not available, so the model uses another. "
    "Install it, or request the one in use.",
    "padding-free-off": "The trainer still pads, so padding_free saves nothing.",
    "packing-wrapped": "The strategy `wrapped` cuts documents at arbitrary places and joins them without a boundary. "
    "Use bfd.",
    "rows-dropped": "Rows longer than max_length are dropped. Raise it, or shorten the rows.",
    "rows-truncated": "Rows are cut at max_length, and the model does not learn the part that is cut off. Raise it, "
    "or shorten the rows.",
    "one-label": "KTO learns from the difference between wanted and unwanted answers, but the data has only one kind.",
    "signal-lost": "The gradient became zero during the run and stayed zero. A checkpoint from before that step is as "
    "good as the last.",
    "unusable-checkpoint": "A checkpoint is damaged or incomplete, so --resume auto takes an earlier one.",
    "processes": "The number of running processes is not the requested one, so the batch size differs. Check the launcher and "
    "the visible GPUs.",
    "no-token": "`after: push:` needs a Hub token after training. Log in: hf auth login.",
    "old-checkpoints": "The folder holds an earlier run's checkpoints, which --resume auto would take for this run's. Use "
    "another output_dir, or move them away.",
}
"""Code → its page: what it means, why that matters, what to do."""


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
