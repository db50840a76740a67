"""What is said of a tensor by what was seen of its parts."""

from __future__ import annotations

from collections.abc import Sequence

from lora_tool.core.actions import TensorAction
from lora_tool.plans.core.ops import LowRank
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.rules.merged.verdict import Verdict
from lora_tool.verification.pieces import Compared, why_not
from lora_tool.verification.tally import Tally


def evidence_of(step: Step, seen: Sequence[tuple[Compared, Tally]]) -> TensorEvidence:
    """Return the evidence of one tensor from what was seen of its parts."""
    total = Tally()
    for _, tally in seen:
        total.add(tally)
    unknown = next((reason for part, tally in seen if (reason := _why_unknown(part, tally))), None)
    wrong = [(part, tally) for part, tally in seen if tally.wrong and _why_unknown(part, tally) is None]
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
    terms = [term for part, _ in seen if isinstance(part.op, LowRank) for term in part.op.terms]
    copied = all(part.copied for part, _ in seen)
    return TensorEvidence(
        name=step.out.name,
        action=step.action,
        verdict=verdict,
        compared=total.compared,
        numel=step.out.numel,
        wrong=sum(tally.wrong for _, tally in wrong),
        first=total.first if wrong else None,
        ulps=None if copied else total.ulps,
        distance=total.distance,
        factor=factor,
        cosine=total.cosine,
        unmoved=step.action is TensorAction.MERGED and unknown is None and not total.moved,
        scaling=terms[0].scaling if len({term.scaling for term in terms}) == 1 else None,
        rank=terms[0].rank if len({term.rank for term in terms}) == 1 else None,
        reason=reason,
    )


def _why_unknown(part: Compared, tally: Tally) -> str | None:
    return None if part.copied else why_not(part.op) or tally.unknown
