"""LT411 to LT415: the values in checkpoints of rank files, and the head that must be among them."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.errors import LoraToolError
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.training.sharded_subject import ShardedSubject, as_fault


@rule("LT411", Severity.ERROR, on=ShardedSubject, deep=True)
def damaged(subject: ShardedSubject) -> Iterator[Fault]:
    """Weights that are not the bytes that were saved.

    What it does: Computes the CRC32 of every record of weights and compares it with torch's own in the file.

    Why it matters: torch and zero_to_fp32 never compare it. One flipped bit in an exponent makes 10^30 of 0.01.

    Example: `zero_pp_rank_3…_optim_states.pt` was copied over a bad network: the same size, and 64 KB of other bytes.

    What to do: Copy the file again from where it was saved, or use another tag: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.values("LT411")


@rule("LT412", Severity.ERROR, on=ShardedSubject, deep=True)
def saved_not_finite(subject: ShardedSubject) -> Iterator[Fault]:
    """NaN or infinity in the saved weights.

    What it does: Reads every weight; never the padding, which is whatever was in memory.

    Why it matters: The run had diverged when this was saved: each model made of it answers with NaN.

    Example: `…q_proj.lora_A.default.weight` holds NaN from the step on at which the loss became NaN.

    What to do: Take an earlier tag: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.values("LT412")


@rule("LT413", Severity.ERROR, on=ShardedSubject, deep=True)
def all_zero(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank whose weights are all zero.

    What it does: Looks for optimizer files in which every float32 master weight is zero, and for rank files in which
    every lora_A is.

    Why it matters: Trained weights are not zero. The rank's part of every weight was never written.

    Example: A node failed while saving; its file has the right size and holds zeros.

    What to do: Copy the file again from where it was saved, or use another tag: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.values("LT413")


@rule("LT414", Severity.ERROR, on=ShardedSubject, deep=True)
def not_rounded(subject: ShardedSubject) -> Iterator[Fault]:
    """Master weights that do not belong to the weights saved with them.

    What it does: Compares a sample of every rank's masters with the 16-bit weights of the same save: those in the model
    file (stages 1 and 2), or the gathered ones that the HF Trainer writes beside the checkpoint (stage 3).

    Why it matters: A file of another run or step, of the same shapes, fits in all else and makes nonsense of the model.

    Example: The optimizer file of rank 1 was overwritten by that of a second run with the same config.

    What to do: Copy the rank's file again, or use another tag: `lora-tool consolidate CKPT --tag T`.

    Without a `trainer_state.json` of the same step nobody knows when the weights beside were written: a warning.
    """
    yield from subject.values("LT414")


@rule("LT415", Severity.ERROR, on=ShardedSubject)
def head_lost(subject: ShardedSubject) -> Iterator[Fault]:
    """A new head that is neither trained nor saved.

    What it does: Looks for a head (`score`, `classifier`) that is under LoRA or frozen, and whose own weights are
    neither in the checkpoint nor in the base model.

    Why it matters: The head of a fresh reward model is random. LoRA on it trains a difference to these random numbers;
    without them every reward is wrong.

    Example: `target_modules` contains `score`, and the HF Trainer saved with `exclude_frozen_parameters=True`.

    What to do: Look for a tag saved with its frozen parameters; next time, put the head into `modules_to_save`.
    """
    state = subject.state
    from lora_tool.sharded.frozen_heads import has_lora, heads_of, parsed_keys  # noqa: PLC0415 - slow to import, for few folders

    if has_lora(state.entries):
        yield from map(as_fault, heads_of(state, _config(subject), parsed_keys(state)).faults)


def _config(subject: ShardedSubject) -> AdapterConfig | None:
    from lora_tool.sharded.frozen_heads import near_adapter_config  # noqa: PLC0415 - as above

    try:
        return near_adapter_config(subject.state.near)
    except LoraToolError:
        return None
