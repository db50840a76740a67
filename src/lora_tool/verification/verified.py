"""What a verification found: the rules' report on a folder, and the evidence for every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.display import and_more
from lora_tool.core.errors import VerificationFailed
from lora_tool.core.report import Report, Severity, Skipped
from lora_tool.plans.core.ops import Precision
from lora_tool.rules.engine.registry import Rule
from lora_tool.rules.judging import Judge
from lora_tool.rules.merged.evidence import OutputEvidence, TensorEvidence
from lora_tool.rules.merged.pairs import PairEvidence
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.rules.merged.verdict import Verdict
from lora_tool.verification.level import Level

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
