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
    """Weights that changed after they were saved.

    What it does: Computes the CRC32 of every weight record and compares it with the one that torch stored in the file.

    Why it matters: torch and zero_to_fp32 never check it. One flipped bit in an exponent turns 0.01 into 10^30.

    Example: `zero_pp_rank_3…_optim_states.pt` was copied over a bad network: it has the right size, but 64 KB of wrong
    bytes.

    What to do: Copy the file again from the original, or use another save: `lora-tool consolidate CKPT --tag T`, or
    another `checkpoint-N`.
    """
    yield from subject.values("LT411")


@rule("LT412", Severity.ERROR, on=ShardedSubject, deep=True)
def saved_not_finite(subject: ShardedSubject) -> Iterator[Fault]:
    """NaN or infinity in the saved weights.

    What it does: Reads every weight, but not the padding, which is uninitialised memory.

    Why it matters: The run had diverged when it saved this checkpoint, so every model made from it answers with NaN.

    Example: `…q_proj.lora_A.default.weight` holds NaN, from the step at which the loss became NaN.

    What to do: Use an earlier save: `lora-tool consolidate CKPT --tag T`, or an earlier `checkpoint-N`.
    """
    yield from subject.values("LT412")


@rule("LT413", Severity.ERROR, on=ShardedSubject, deep=True)
def all_zero(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank whose weights are all zero.

    What it does: Looks for optimizer files whose float32 master weights are all zero, and for rank files whose lora_A
    are all zero.

    Why it matters: Trained weights are not zero, so the rank's part of every weight was never written.

    Example: A node failed while saving; its file has the right size and holds zeros.

    What to do: Copy the file again from the original, or use another save: `lora-tool consolidate CKPT --tag T`, or
    another `checkpoint-N`.
    """
    yield from subject.values("LT413")


@rule("LT414", Severity.ERROR, on=ShardedSubject, deep=True)
def not_rounded(subject: ShardedSubject) -> Iterator[Fault]:
    """Master weights that do not match the 16-bit weights saved with them.

    What it does: Compares a sample of every rank's master weights with the 16-bit weights of the same save: those in
    the model file (stages 1 and 2), or the gathered ones that the HF Trainer writes beside the checkpoint (stage 3).

    Why it matters: A file from another run or step with the same shapes passes all other checks, but the model would be
    nonsense.

    Example: The optimizer file of rank 1 was overwritten by that of a second run with the same config.

    What to do: Copy the rank's file again, or use another save: `lora-tool consolidate CKPT --tag T`, or another
    `checkpoint-N`.

    Without a `trainer_state.json` of the same step it is unknown when the weights beside the checkpoint were written,
    so the finding is only a warning.

    ZenFlow updates some of the 16-bit weights without their masters. The finding then says how to take these weights.
    """
    yield from subject.values("LT414")


@rule("LT415", Severity.ERROR, on=ShardedSubject)
def head_lost(subject: ShardedSubject) -> Iterator[Fault]:
    """A new head that is neither trained nor saved.

    What it does: Looks for a head (`score`, `classifier`) that has LoRA or is frozen, and whose own weights are neither
    in the checkpoint nor in the base model.

    Why it matters: The head of a fresh reward model is random. LoRA on it trains a difference to these random numbers,
    so without them every reward is wrong.

    Example: `target_modules` contains `score`, and the HF Trainer saved with `exclude_frozen_parameters=True`.

    What to do: Use a tag that was saved with its frozen parameters. Next time, put the head into `modules_to_save`.
    """
    state = subject.state
    from lora_tool.sharded.frozen_heads import has_lora, heads_of, parsed_keys  # slow to import, for few folders

    if has_lora(state.entries):
        yield from map(as_fault, heads_of(state, _config(subject), parsed_keys(state)).faults)


def _config(subject: ShardedSubject) -> AdapterConfig | None:
    from lora_tool.sharded.frozen_heads import near_adapter_config

    try:
        return near_adapter_config(subject.state.near)
    except LoraToolError:
        return None
