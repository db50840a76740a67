"""What a verification found: the rules' report on a folder, and the evidence for every tensor."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
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
from lora_tool.verification.pieces import Compared, Tally, why_not

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
    right = compared = total = 0
    unknown, ulps = [], []
    for found in verification.evidence.values():
        right += found.verdict is Verdict.RIGHT
        compared, total = compared + found.compared, total + found.numel
        if found.verdict is Verdict.UNKNOWN:
            unknown.append(found.name)
        if found.ulps is not None:
            ulps.append(found.ulps)
    return {
        "level": verification.level.value,
        "errors": verification.report.count(Severity.ERROR),
        "warnings": verification.report.count(Severity.WARNING),
        "tensors": len(verification.evidence),
        "right": right,
        "not_recomputed": unknown,
        "values_compared": compared,
        "values": total,
        "largest_ulps": round(max(ulps), 4) if ulps and math.isfinite(max(ulps)) else None,
    }
