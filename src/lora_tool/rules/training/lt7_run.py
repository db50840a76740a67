"""LT7xx: faults of the run that wrote a checkpoint, by the Trainer's own log.

The HF Trainer replaces a NaN loss by the mean so far (`logging_nan_inf_filter`, on by default), so a finite loss
proves nothing; and the loss of online RL is near 0 by construction. So loss, gradient and rewards are judged together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir
from lora_tool.core.report import Severity
from lora_tool.formats import trainer_state
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.engine.subjects import Matter, RunSubject, Subject, an_earlier_checkpoint
from lora_tool.rules.training.complete import incomplete_reason

_NO_GRADIENT = 1e-6
"""Norms of real gradients are above 0.001; DPO on pairs that do not differ gave 6e-8."""
_STUCK = 3
"""Log entries in a row without any gradient; supervised training has no such pause."""
_SUDDEN = 0.05
"""A loss that falls from above this to exactly 0 did not get there by learning."""
_MANY = 20
"""Log entries from which medians of a fifth of them are steady."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})\Z")

Entry = Mapping[str, float]


def _state(subject: Subject) -> TrainerState:
    """Return the state of the save, for rules about the Trainer's log."""
    state = subject.checkpoint.folder.trainer
    if state is None:
        raise TypeError("rules about a log run only where there is one")
    return state


def _losses(state: TrainerState) -> list[Entry]:
    return [entry for entry in state.log if "loss" in entry]


def _is_online(state: TrainerState) -> bool:
    """Whether the run is online RL (GRPO, RLOO, PPO), whose loss is near 0 however well it learns."""
    return any(
        name == "reward" or name.startswith(("completions/", "objective/")) for entry in state.log for name in entry
    )


def _is_masked(entry: Entry) -> bool:
    return entry["loss"] == 0 and not math.isfinite(entry.get("grad_norm", 0.0))


def _is_not_finite(entry: Entry) -> bool:
    return not (math.isfinite(entry["loss"]) and math.isfinite(entry.get("grad_norm", 0.0)))


def _at(entry: Entry) -> str:
    return f"at step {entry['step']:.0f}" if math.isfinite(entry.get("step", math.nan)) else "at some step"


@rule("LT701", Severity.ERROR, on=Subject, about=Matter.LOG)
def run_not_finite(subject: Subject) -> Iterator[Fault]:
    """The loss or the gradient was NaN or infinite.

    What it does: Reads `loss`, `eval_loss` and `grad_norm` in `trainer_state.json`. Values that were still not finite
    when the checkpoint was written are an error. A loss that recovered is a warning. A gradient that recovered is
    reported as info, because the loss scaler of fp16 skips such steps.
    Why it matters: One step with a NaN gradient makes every trained weight NaN, and the run continues regardless.
    Example: `grad_norm` is NaN from step 120 on, but the log still shows a loss of 0.69.
    What to do: Use a checkpoint from before that step; train in bf16, or with a smaller learning rate.
    """
    state = _state(subject)
    losses = _losses(state)
    bad = [entry for entry in losses if _is_not_finite(entry) and not _is_masked(entry)]
    if bad:
        yield replace(_not_finite(state, losses, bad), hint=an_earlier_checkpoint(subject, "then train in bf16"))
    evaluated = [entry for entry in state.log if "eval_loss" in entry]
    if evaluated and not math.isfinite(evaluated[-1]["eval_loss"]):
        message = f"is {evaluated[-1]['eval_loss']} {_at(evaluated[-1])}"
        yield Fault(subject="eval_loss", message=message, path=state.path, severity=Severity.WARNING)


def _not_finite(state: TrainerState, losses: Sequence[Entry], bad: Sequence[Entry]) -> Fault:
    first, last = bad[0], losses[-1]
    of_loss = any(not math.isfinite(entry["loss"]) for entry in bad)
    name = "loss" if of_loss else "grad_norm"
    value = next(entry[name] for entry in bad if not math.isfinite(entry[name]))
    # the scaler of fp16 training skips a step whose gradient overflowed; a NaN, or a second one, is no such step
    skipped = len(bad) == 1 and not of_loss and math.isinf(value)
    severity = None
    if bad[-1] is not last:
        severity = Severity.WARNING if of_loss else Severity.INFO
    elif skipped:
        severity = Severity.WARNING
    end = "to the end" if bad[-1] is last else f"then recovered by step {last.get('step', state.global_step):.0f}"
    message = f"is {value} {_at(first)}, in {len(bad)} of {len(losses)} log entries, {end}"
    return Fault(subject=name, message=message, path=state.path, severity=severity)


@rule("LT702", Severity.ERROR, on=Subject, about=Matter.LOG)
def run_nan_shown_as_zero(subject: Subject) -> Iterator[Fault]:
    """A logged loss of 0 that is really NaN.

    What it does: Looks in `trainer_state.json` for a loss of exactly 0 whose `grad_norm` is not finite. If no
    `grad_norm` was logged, a loss that drops suddenly to 0 and stays there is a warning. In online RL (GRPO), whose
    loss is 0 by construction, only the gradient counts.
    Why it matters: The Trainer's `logging_nan_inf_filter` replaces NaN by the mean so far, which becomes 0. The log
    looks perfect, and every trained weight is NaN.
    Example: `{"loss": 0.0, "grad_norm": NaN, "step": 20}` after an overflow in fp16.
    What to do: Use a checkpoint from before that step; train in bf16, and set `logging_nan_inf_filter=False`.
    """
    state = _state(subject)
    losses = _losses(state)
    if not losses:
        return
    masked = [entry for entry in losses if _is_masked(entry)]
    if masked:
        recovered = masked[-1] is not losses[-1]
        message = (
            f"is 0 with a gradient of {masked[0]['grad_norm']} {_at(masked[0])}: the loss is NaN, which the "
            "Trainer's log filters"
        )
        severity = Severity.WARNING if recovered else None
        hint = an_earlier_checkpoint(subject, "then train in bf16, with logging_nan_inf_filter=False")
        yield Fault(subject="loss", message=message, path=state.path, severity=severity, hint=hint)
    elif not any("grad_norm" in entry for entry in losses) and not _is_online(state):
        zeros = _zeros_at_the_end(losses)
        before = losses[-zeros - 1]["loss"] if zeros < len(losses) else math.inf
        if zeros > 1 and before > _SUDDEN:
            message = f"is exactly 0 in the last {zeros} log entries: this is how the Trainer's log shows NaN"
            yield Fault(subject="loss", message=message, path=state.path, severity=Severity.WARNING)


def _zeros_at_the_end(losses: Sequence[Entry]) -> int:
    return next((at for at, entry in enumerate(reversed(losses)) if entry["loss"] != 0), len(losses))


@rule("LT703", Severity.ERROR, on=Subject, about=Matter.LOG)
def run_without_gradient(subject: Subject) -> Iterator[Fault]:
    """The gradient was zero throughout, so nothing was learned.

    What it does: Looks in `trainer_state.json` for a `grad_norm` below 0.000001 in every log entry, or a learning rate
    that was always 0. A gradient that is exactly 0 only towards the end is a warning. A loss near 0 alone does not
    count, because it is normal in GRPO.
    Why it matters: Adam still moves the weights by noise, so the adapter looks trained although it learned nothing.
    Example: GRPO with a reward that is the same for every completion: `frac_reward_zero_std` is 1, `grad_norm` is 0.
    What to do: Look at what the message names: the rewards, the truncation, or the parameters that should train.
    """
    state = _state(subject)
    losses = _losses(state)
    if not losses:
        return
    norms = [entry["grad_norm"] for entry in losses if "grad_norm" in entry]
    zeros = next((at for at, norm in enumerate(reversed(norms)) if norm != 0), len(norms))
    if norms and all(norm < _NO_GRADIENT for norm in norms) and (len(norms) > 1 or norms[0] == 0):
        if not _improves(losses):
            message = f"is at most {max(norms):.1g} in all {len(norms)} log entries: {_why_no_gradient(losses)}"
            yield Fault(subject="grad_norm", message=message, path=state.path)
    elif zeros >= _STUCK and not _is_online(state) and not _improves(losses[-zeros:]):
        message = f"is exactly 0 in the last {zeros} of {len(norms)} log entries: the model no longer learns"
        yield Fault(subject="grad_norm", message=message, path=state.path, severity=Severity.WARNING)
    rates = [entry["learning_rate"] for entry in losses if "learning_rate" in entry]
    if len(rates) > 1 and not any(rates):
        yield Fault(subject="learning_rate", message=f"is 0 in all {len(rates)} log entries", path=state.path)


def _improves(entries: Sequence[Entry]) -> bool:
    """Whether the loss falls so clearly that a logged gradient of 0 cannot be true, as DeepSpeed has logged it."""
    losses = [entry["loss"] for entry in entries]
    third = len(losses) // 3
    return third > 0 and 0 <= _median(losses[-third:]) < 0.9 * _median(losses[:third])


def _why_no_gradient(losses: Sequence[Entry]) -> str:
    if any(entry.get("frac_reward_zero_std", 0) >= 1 or entry.get("reward_std") == 0 for entry in losses):
        return "every completion got the same reward"
    clipped = [entry["completions/clipped_ratio"] for entry in losses if "completions/clipped_ratio" in entry]
    if clipped and min(clipped) >= 1:
        return "every completion was cut off, and the loss may ignore completions that were cut off"
    if any("rewards/margins" in entry and entry["rewards/margins"] == 0 for entry in losses):
        return "chosen and rejected do not differ"
    return "the adapter may be frozen, disabled, or not part of what is computed"


@rule("LT704", Severity.ERROR, on=Subject, about=Matter.LOG)
def run_diverged(subject: Subject) -> Iterator[Fault]:
    """The training diverged.

    What it does: Compares the loss at the end of the log in `trainer_state.json` with the loss at its beginning and at
    its best, each the median of a fifth of the log. In a log of fewer than 20 entries, the last loss must be ten times
    the first. Online RL (GRPO) is not judged, as its loss says little.
    Why it matters: The final model is worse than the one that the run started from.
    Example: The loss falls from 2.1 to 1.3 and ends at 9.8.
    What to do: Use a checkpoint from before the loss rose (`lora-tool validate RUN`), and train with a lower learning
    rate or a warmup.
    """
    state = _state(subject)
    if _is_online(state):
        return
    losses = [entry["loss"] for entry in _losses(state) if math.isfinite(entry["loss"])]
    found = _divergence(losses)
    if found:
        first, low, last = found
        message = f"began at {first:.3g}, was {low:.3g} at best and ended at {last:.3g}"
        hint = an_earlier_checkpoint(subject, "then train with a smaller learning rate, or a warmup")
        yield Fault(subject="loss", message=message, path=state.path, hint=hint)


def _divergence(losses: Sequence[float]) -> tuple[float, float, float] | None:
    """Return loss at the beginning, at best and at the end of a log that says the run diverged."""
    count = len(losses)
    if count < 3:  # noqa: PLR2004 - two points make no trend
        return None
    width = count // 5 if count >= _MANY else 1
    windows = [_median(losses[at : at + width]) for at in range(0, count - width + 1, width)]
    first, low, last = windows[0], min(windows), _median(losses[-width:])
    # a run may diverge within its first steps, so that all medians are large
    diverged = last > 10 * max(abs(losses[0]), 0.1) + 1
    if count >= _MANY:
        diverged = diverged or last > 2 * abs(first) + 0.5 or (last > first and last > 3 * abs(low) + 1)
    return (min(losses[0], first), min(losses[0], low), last) if diverged else None


def _median(values: Sequence[float]) -> float:
    # the module `statistics` takes longer to import than a whole header takes to check
    return sorted(values)[len(values) // 2]


@rule("LT705", Severity.WARNING, on=Subject, about=Matter.RUN)
def run_stopped_early(subject: Subject) -> Iterator[Fault]:
    """The run stopped before its last step.

    What it does: In a run folder without finished weights, compares the step of the last checkpoint with `max_steps` in
    its `trainer_state.json`. A run that was told to stop, for example by early stopping, is reported as info.
    Why it matters: The job was killed or is still running. Its learning rate had not finished decaying, and it never
    saw part of the data.
    Example: The last checkpoint is `checkpoint-400` and `max_steps` is 1000.
    What to do: Resume it from the last complete checkpoint: `resume_from_checkpoint="RUN/checkpoint-N"`.
    """
    single = not isinstance(subject, RunSubject)
    state = _last_state(subject) if isinstance(subject, RunSubject) else _state(subject)
    if state is None or state.max_steps is None or state.global_step >= state.max_steps:
        return
    if state.stopped:
        message = f"a callback stopped the run at step {state.global_step:,} of {state.max_steps:,}"
        yield Fault(subject="global_step", message=message, path=state.path, severity=Severity.INFO)
    elif not single:
        message = (
            f"the last checkpoint is from step {state.global_step:,} of {state.max_steps:,}, and the folder has "
            "no finished weights"
        )
        yield Fault(subject="global_step", message=message, path=state.path)


def _last_state(subject: RunSubject) -> TrainerState | None:
    states = [inner.folder.trainer for inner in subject.inner if inner.folder.trainer]
    return max(states, key=lambda state: state.global_step, default=None)


@rule("LT706", Severity.WARNING, on=Subject, about=Matter.LOG)
def run_other_step(subject: Subject) -> Iterator[Fault]:
    """A checkpoint whose trainer state is from another step.

    What it does: Compares the number in the folder's name with `global_step` in its `trainer_state.json`.
    Why it matters: The folder holds files of two checkpoints, or it was renamed. Resuming would skip or repeat data.
    Example: `checkpoint-500/trainer_state.json` says `"global_step": 400`.
    What to do: Use another checkpoint, or rename the folder back if only its name is wrong.
    """
    state = _state(subject)
    named = _CHECKPOINT.match(subject.checkpoint.folder.name)
    if named and int(named[1]) != state.global_step and not state.problems:
        message = f"is {state.global_step:,}, but the folder is {subject.checkpoint.folder.name}"
        yield Fault(subject="global_step", message=message, path=state.path)


@rule("LT707", Severity.INFO, on=Subject, about=Matter.LOG)
def run_never_ends(subject: Subject) -> Iterator[Fault]:
    """Every completion was cut off.

    What it does: Looks for `completions/clipped_ratio` of 1 in every log entry of an online RL run.
    Why it matters: The model never ended a text. With `mask_truncated_completions` it learns nothing; without it, it
    learns to fill the maximum length.
    Example: `max_completion_length` is 64, and every answer is longer.
    What to do: Raise `max_completion_length`, or check that the tokenizer has the right end-of-text token.
    """
    state = _state(subject)
    ratios = [entry["completions/clipped_ratio"] for entry in state.log if "completions/clipped_ratio" in entry]
    if len(ratios) > 1 and min(ratios) >= 1:
        message = f"is 1 in all {len(ratios)} log entries"
        yield Fault(subject="completions/clipped_ratio", message=message, path=state.path)


@rule("LT708", Severity.WARNING, on=RunSubject)
def run_stood_still(subject: RunSubject) -> Iterator[Fault]:
    """Two checkpoints hold the same weights.

    What it does: Compares the adapters of a run's checkpoints: their names, shapes and samples of their values.
    Why it matters: Either nothing was trained between the two steps, or one checkpoint is a copy of the other.
    Example: `checkpoint-200` and `checkpoint-400` hold the same adapter.
    What to do: Look at `grad_norm` and `learning_rate` between the two steps, and check that the adapter is trainable.
    """
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for run folders only

    seen: dict[str, str] = {}
    for inner in subject.inner:
        if not isinstance(inner, AdapterDir) or not inner.tensors or inner.is_broken:
            continue
        earlier = seen.setdefault(fingerprint(inner.weights), inner.root.name)
        if earlier != inner.root.name:
            path = str(inner.weights.files[0].path)
            yield Fault(message=f"holds the same weights as {earlier}", path=path)


@rule("LT709", Severity.WARNING, on=Subject, about=Matter.SAVE)
def save_incomplete(subject: Subject) -> Iterator[Fault]:
    """A checkpoint that was not saved completely.

    What it does: Looks in a save of a run for what the HF Trainer and accelerate write after the weights: the
    optimizer's, the scheduler's and the random states as whole torch files, those of every rank, the tag that `latest`
    names, and in a `checkpoint-N` at last `trainer_state.json`. With `--deep` their checksums are compared. What the other checkpoints of the run do not
    have either is not missed.
    Why it matters: The run was killed, or the disk was full, while it saved. The weights may load, but no training can
    go on from it. `prune` does not count it among the last, and it is never the best.
    Example: `checkpoint-60` has `adapter_model.safetensors` and no `trainer_state.json`, which `checkpoint-40` has.
    What to do: Resume from an earlier checkpoint: `resume_from_checkpoint="RUN/checkpoint-N"`.
    """
    folder = subject.checkpoint.folder
    if folder.trainer is None and trainer_state.FILE_NAME in folder.files:
        return  # LT113 names a state that cannot be read
    reason = incomplete_reason(folder, deep=subject.whole)
    if reason is not None:
        hint = an_earlier_checkpoint(subject, "resume from that one")
        yield Fault(message=reason, path=subject.checkpoint.root, hint=hint)
