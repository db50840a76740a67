"""What a verification found: the rules' report on a folder, and the evidence for every tensor."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.choices import Choice
from lora_tool.core.display import and_more
from lora_tool.core.errors import VerificationFailed
from lora_tool.core.report import Report, Severity, Skipped
from lora_tool.core.tensors import TensorAction
from lora_tool.plans.core.ops import LowRank, Precision
from lora_tool.plans.core.steps import Step
from lora_tool.rules.engine.registry import Rule
from lora_tool.rules.judging import Judge
from lora_tool.rules.merged.evidence import OutputEvidence, TensorEvidence, Verdict
from lora_tool.rules.merged.pairs import PairEvidence
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.verification.pieces import Compared, why_not
from lora_tool.verification.tally import Tally

# How much of a folder a verification reads.


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


OWN_RULES = ("LT1", "LT6")
"""What decides about a folder just written: its files and its values. What its inputs lacked was said before."""


OF_USE = frozenset({"LT625"})
"""Rules on how much a model is worth, whoever wrote it: they find nothing wrong in how it was written."""


class Verification(Struct, frozen=True, kw_only=True):
    """The result of verifying one folder: the rules' report, and the evidence for every tensor."""

    merged: Path
    base: str
    adapters: tuple[str, ...]
    level: Level
    precision: Precision | None
    evidence: Mapping[str, TensorEvidence]
    report: Report
    outputs: OutputEvidence | None = None
    """The answers of both models, if `logits` was requested."""
    pairs: PairEvidence | None = None
    """How both models ranked the `pairs`, if any were given."""

    def __repr__(self) -> str:
        return f"Verification({str(self.merged)!r}: {len(self.evidence)} tensors, {self.report.counts()})"

    def says_wrong(self, least: Severity) -> bool:
        """Return whether findings of severity `least` or worse show that the folder is not what it should be."""
        return any(finding.code not in OF_USE for finding in self.report.at_least(least))

    def raise_for_errors(self) -> None:
        """Return if nothing is wrong. Raises `VerificationFailed` naming the first error and how many there are."""
        errors = self.report.at_least(Severity.ERROR)
        if errors:
            more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
            raise VerificationFailed(f"{errors[0]}{more}", hint=errors[0].hint)


def by_rules(
    subject: MergedSubject,
    rules: tuple[Rule, ...],
    level: Level,
    precision: Precision | None,
    *,
    adapters: tuple[str, ...] = (),
    skipped: tuple[Skipped, ...] = (),
) -> Verification:
    """Return the verification of a folder whose values were read, by the rules that read none."""
    merged, evidence = subject.checkpoint.root, subject.evidence
    by_reason: dict[str, list[str]] = {}
    for found in evidence.values():
        if found.verdict is Verdict.UNKNOWN:
            by_reason.setdefault(found.reason, []).append(found.name)
    for reason, (first, *others) in by_reason.items():
        why = f"`{first}`{and_more(len(others))} not recomputed: {reason}"
        skipped = (*skipped, Skipped(code="LT608", path=str(merged), reason=why))
    report = Judge(rules=rules, deep=False).folder(subject)
    return Verification(
        merged=merged,
        base=subject.base_name or "",
        adapters=adapters,
        level=level,
        precision=precision,
        evidence=evidence,
        report=replace(report, skipped=(*report.skipped, *skipped)),
        outputs=subject.outputs,
        pairs=subject.pairs,
    )


def summary_json(verification: Verification) -> dict[str, Any]:
    """Return what a manifest records of a verification: how much was compared, and the largest distances."""
    found = tuple(verification.evidence.values())
    ulps = [item.ulps for item in found if item.ulps is not None]
    return {
        "level": verification.level.value,
        "errors": verification.report.count(Severity.ERROR),
        "warnings": verification.report.count(Severity.WARNING),
        "tensors": len(found),
        "right": sum(item.verdict is Verdict.RIGHT for item in found),
        "not_recomputed": [item.name for item in found if item.verdict is Verdict.UNKNOWN],
        "values_compared": sum(item.compared for item in found),
        "values": sum(item.numel for item in found),
        "largest_ulps": round(max(ulps), 4) if ulps and math.isfinite(max(ulps)) else None,
    }
