"""How much of a folder a verification reads, and the evidence that it gives for one tensor."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from operator import attrgetter

from lora_tool.core.choices import Choice
from lora_tool.core.tensors import TensorAction
from lora_tool.plans.core.ops import LowRank
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence, Verdict
from lora_tool.verification.pieces import Compared, Tally, why_not


@enum.unique
class Level(Choice):
    """How much is read."""

    SAMPLE = "sample"
    """Rows of what was changed and pieces of what was copied, from everywhere: a small part of the merge's time."""
    FULL = "full"
    """Every value of every tensor."""


# What is said of a tensor by what was seen of its parts.


def evidence_of(step: Step, seen: Sequence[tuple[Compared, Tally]]) -> TensorEvidence:
    """Return the evidence of one tensor from what was seen of its parts."""
    total, unknown, copied = Tally(), None, True
    wrong: list[tuple[Compared, Tally]] = []
    scalings, ranks = set[float](), set[int]()
    for part, tally in seen:
        total.add(tally)
        why = None if part.copied else why_not(part.op) or tally.unknown
        unknown, copied = unknown or why, copied and part.copied
        if tally.wrong and why is None:
            wrong.append((part, tally))
        if isinstance(part.op, LowRank):
            scalings.update(map(attrgetter("scaling"), part.op.terms))
            ranks.update(map(attrgetter("rank"), part.op.terms))
    verdict, factor, reason = Verdict.RIGHT, total.factor, ""
    if wrong:
        from lora_tool.verification.diagnosis import Diagnosis, diagnosed  # where something is wrong alone
        from lora_tool.verification.elements import Files

        with Files() as files:
            found = [diagnosed(part, tally, files) for part, tally in wrong]
        alike = len({(each.verdict, each.reason) for each in found}) == 1
        first = found[0] if alike else Diagnosis(Verdict.DIFFERENT)
        verdict, factor, reason = first.verdict, first.factor, first.reason
        changed = [part for part, _ in seen if not part.copied]
        if verdict is Verdict.UNCHANGED and len(wrong) < len(changed):
            verdict = Verdict.DIFFERENT  # some of its experts carry the adapter
    elif unknown is not None:
        same = step.action is TensorAction.MERGED and total.compared == step.out.numel and not total.moved
        verdict, reason = (Verdict.UNCHANGED, "") if same else (Verdict.UNKNOWN, unknown)
    elif total.outside:
        reason = "within what 16-bit arithmetic explains"
    return TensorEvidence(
        name=step.out.name,
        action=step.action,
        verdict=verdict,
        compared=total.compared,
        numel=step.out.numel,
        wrong=sum(tally.wrong for _, tally in wrong) if wrong else 0,
        first=total.first if wrong else None,
        ulps=None if copied else total.ulps,
        distance=total.distance,
        factor=factor,
        cosine=total.cosine,
        unmoved=step.action is TensorAction.MERGED and unknown is None and not total.moved,
        scaling=scalings.pop() if len(scalings) == 1 else None,
        rank=ranks.pop() if len(ranks) == 1 else None,
        reason=reason,
    )
