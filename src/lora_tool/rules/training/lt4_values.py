"""LT411 to LT415: the values in checkpoints of rank files, and the head that must be among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lora_tool.core.report import Finding, Severity
from lora_tool.rules.engine.registry import RULES, Fault, rule
from lora_tool.rules.training.sharded_subject import ShardedSubject, another_save

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.file_values import ValueFact

F = TypeVar("F")


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
    from lora_tool.checkpoints.states.file_values import Damaged, Unreadable  # for few folders

    for found in subject.values(Damaged):
        crcs = f"its CRC32 is {found.crc:08x}, but the archive says {found.saved_crc:08x}"
        yield Fault(
            path=found.path,
            message=f"{crcs}: the file was damaged after saving",
            subject=found.record,
            hint=f"copy the file again from where it was saved, or {another_save(found.path)}",
        )
    for broken in subject.values(Unreadable):
        yield Fault(path=broken.path, message=broken.why)


@rule("LT412", Severity.ERROR, on=ShardedSubject, deep=True)
def saved_not_finite(subject: ShardedSubject) -> Iterator[Fault]:
    """NaN or infinity in the saved weights.

    What it does: Reads every weight, but not the padding, which is uninitialised memory.
    Why it matters: The run had diverged when it saved this checkpoint, so every model made from it answers with NaN.
    Example: `…q_proj.lora_A.default.weight` holds NaN, from the step at which the loss became NaN.
    What to do: Use an earlier save: `lora-tool consolidate CKPT --tag T`, or an earlier `checkpoint-N`.
    """
    from lora_tool.checkpoints.states.file_values import NotFinite  # for few folders

    for found in subject.values(NotFinite):
        hint = f"the run had diverged; {another_save(found.path, earlier=True)}"
        yield Fault(path=found.path, message="holds NaN or infinity", subject=found.name, hint=hint)


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
    from lora_tool.checkpoints.states.file_values import AllZero  # for few folders

    for found in subject.values(AllZero):
        what = "every trained weight of this rank" if found.trained else "every weight in it"
        hint = f"copy the file again from the original, or {another_save(found.path)}"
        yield Fault(path=found.path, message=f"{what} is zero: the rank never wrote them", hint=hint)


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
    from lora_tool.checkpoints.states.file_values import NotRounded  # for few folders

    for found in subject.values(NotRounded):
        why = "it is from another run or step"
        hint = f"copy this rank's file again, or {another_save(found.path)}"
        if found.by_zenflow:
            why = "ZenFlow updates some of those without their masters"
            way = f"copy {found.copy} alone into an empty folder as state.pt, and consolidate that"
            hint = f"for the weights that training went on from, {way}"
        yield Fault(
            path=found.path,
            message=f"does not round to the {found.dtype} weights in {found.copy}: {why}",
            subject=found.name,
            hint=hint,
            severity=None if found.same_step else Severity.WARNING,
        )


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
    heads, path = subject.heads, str(subject.state.folder)
    if heads is None:
        return
    for head in heads.lost:
        elsewhere = "no base model is known"
        if head.base:
            missing = "has none of that shape" if head.base_is_here else "is not on this disk"
            elsewhere = f"the base model {head.base} {missing}"
        yield Fault(
            path=path,
            message=f"the head is lost: {head.why}, and {elsewhere}. Every reward would be wrong",
            subject=head.module,
            hint="look for a tag that was saved without exclude_frozen_parameters, or train again with the head in modules_to_save",
        )
    for unsaved in heads.unsaved:
        yield Fault(
            path=path,
            message="was trained whole (`modules_to_save`), but the checkpoint holds none of its tensors",
            subject=unsaved.module,
            hint="look for a step whose checkpoint holds it; verl leaves it out under `save_lora_only`",
            severity=None if unsaved.is_head else Severity.WARNING,
        )


class _ValuesRead(NamedTuple):
    """The facts in the place of a whole subject: those rules read nothing else of it."""

    facts: tuple[ValueFact, ...]

    def values(self, kind: type[F]) -> Iterator[F]:
        """See `ShardedSubject`."""
        return (fact for fact in self.facts if isinstance(fact, kind))


def judge_values(facts: tuple[ValueFact, ...]) -> list[Finding]:
    """Return what the rules about values find in the facts."""
    found: list[Finding] = []
    for _, each in sorted(RULES.items()) if facts else ():
        if each.on is ShardedSubject and each.deep:
            found += [each.finding(fault) for fault in each.check(_ValuesRead(facts)) if isinstance(fault, Fault)]
    return found
