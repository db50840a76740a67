"""What a verification found: the rules' report on a folder and the evidence for every tensor, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from lora_tool.core.display import and_more, counted, finite, from_here, json_data, printable, some
from lora_tool.core.errors import VerificationFailed
from lora_tool.core.records import Shown
from lora_tool.core.report import Report, Severity, Skipped
from lora_tool.core.tensors import TensorAction
from lora_tool.plans.core.ops import Precision
from lora_tool.rules.engine.registry import Rule
from lora_tool.rules.judging import Judge
from lora_tool.rules.merged.evidence import OutputEvidence, TensorEvidence, Verdict
from lora_tool.rules.merged.pairs import PairEvidence, Ranking
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.rules.serving.asked import ServedEvidence
from lora_tool.verification.levels import Level

OWN_RULES = ("LT1", "LT6")
"""What decides about a folder just written: its files and its values. What its inputs lacked was said before."""


OF_USE = frozenset({"LT625"})
"""Rules on how much a model is worth, whoever wrote it: they find nothing wrong in how it was written."""


class Verification(Shown, Struct, frozen=True, kw_only=True):
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
    served: ServedEvidence | None = None
    """What a server answered with the adapter in the folder; nothing else is compared then."""

    def __repr__(self) -> str:
        return f"Verification({str(self.merged)!r}: {len(self.evidence)} tensors, {self.report.counts()})"

    def __str__(self) -> str:
        return "\n".join((*verification_lines(self), self.report.text()))

    def to_json(self) -> dict[str, Any]:
        """Return the report as `validate` gives it, with `verification`: the summary and every tensor's evidence."""
        return {
            **self.report.to_json(),
            "verification": {
                **summary_json(self),
                "merged": printable(str(self.merged)),
                "base": printable(self.base),
                "adapters": [printable(adapter) for adapter in self.adapters],
                "precision": self.precision.value if self.precision else None,
                "outputs": _outputs_json(self.outputs),
                "pairs": _pairs_json(self.pairs),
                "served": None if self.served is None else _served_json(self.served),
                "per_tensor": [_tensor_json(found) for found in self.evidence.values()],
            },
        }

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


_KEPT = {
    TensorAction.COPIED: "have the base's bytes",
    TensorAction.CAST: "have the base's values, rounded",
    TensorAction.DEQUANTISED: "have the values of the base's codes and scales, rounded",
    TensorAction.RESCALED: "are the base's scales, raised only where a merged value did not fit",
    TensorAction.REPLACED: "have the adapter's values",
    TensorAction.ADDED: "have the values of their source",
    TensorAction.COMPUTED: "match their inputs",
}


def verification_lines(verification: Verification, *, tensors: bool = False) -> Iterator[str]:
    """Yield what was compared and how near it is; with `tensors` a line for each tensor."""
    if verification.served is not None:
        yield from _served_lines(verification.served)
        return
    how = "every value" if verification.level is Level.FULL else "samples"
    inputs = [str(from_here(Path(each))) for each in (verification.base, *verification.adapters) if each]
    against = f" with {' + '.join(inputs)}" if verification.base else ""
    yield printable(f"compared {verification.merged}{against}: {how}")
    kept = _KEPT if verification.base else _KEPT | {TensorAction.COPIED: "have the bytes of their source"}
    for action in dict.fromkeys(found.action for found in verification.evidence.values()):
        of_it = [found for found in verification.evidence.values() if found.action is action]
        yield "  " + _action_line(action, of_it, kept.get(action, "are as planned"))
    if verification.outputs is not None:
        yield from (f"  {line}" for line in _output_lines(verification.outputs))
    if verification.pairs is not None:
        yield from (f"  {line}" for line in _pair_lines(verification.pairs))
    if tensors:
        width = max((len(printable(name)) for name in verification.evidence), default=0)
        yield from (f"  {_tensor_line(found, width)}" for found in verification.evidence.values())


def _action_line(action: TensorAction, found: list[TensorEvidence], kept: str) -> str:
    right = [item for item in found if item.verdict is Verdict.RIGHT]
    count = f"{len(right)} of {len(found)}" if len(right) < len(found) else f"{len(found)}"
    if action is not TensorAction.MERGED:
        return f"{count} {action} {kept}"
    if not right:
        return f"none of the {len(found)} merged is W + ΔW"
    ulps = max(item.ulps or 0.0 for item in right)
    loose = sum(bool(item.reason) for item in right)
    rounded = f", {loose} of them as rounded by 16-bit arithmetic" if loose else ""
    cosines = [item.cosine for item in right if item.cosine is not None]
    direction = f"; cosine of W' - W with ΔW at least {min(cosines):.4f}" if cosines else ""
    return f"{count} merged are W + ΔW, max error {ulps:.3f} ulp{rounded}{direction}"


def _output_lines(found: OutputEvidence) -> Iterator[str]:
    """Yield what both models answered."""
    how = "a layer at a time" if found.streamed else "each model loaded whole"
    yield f"{found.what} in float32 on {printable(found.inputs)}, {how}:"
    yield (
        f"  differ by {found.largest:.3g} at most, {found.mean:.3g} on average: "
        f"{'within' if found.explained else 'BEYOND'} the limits {found.allowed_largest:.3g} and "
        f"{found.allowed_mean:.3g}, for which rounding alone gives {found.explained_largest:.3g} and "
        f"{found.explained_mean:.3g}"
    )
    agreement = _figures(
        {
            "KL divergence": found.divergence,
            "rounding alone gives": found.explained_divergence,
            "same first choice": found.same_choice,
            "rank agreement (Kendall)": found.rank_agreement,
        }
    )
    if agreement:
        yield "  " + ", ".join(agreement)


def _pair_lines(found: PairEvidence) -> Iterator[str]:
    """Yield how the models ranked the pairs of a file."""
    how = "a layer at a time" if found.streamed else "each model loaded whole"
    yield printable(f"rewards in float32 of {counted(len(found.lines), 'pair')} in {found.source}, {how}:")
    for name, ranking in (("base + adapter", found.unmerged), ("merged", found.merged)):
        if ranking is not None:
            yield f"  {name:<14} {_ranking_line(ranking)}"
    if found.unmerged is not None:
        where = f": line {some(found.changed)}" if found.changed else ""
        changed = counted(len(found.changed), "pair")
        yield f"  {changed} ordered differently{where}; rewards differ by {found.largest:.3g} at most"
    if found.cut:
        yield f"  {counted(found.cut, 'text')} cut to the last {found.longest:,} tokens"


def _ranking_line(ranking: Ranking) -> str:
    low, high = ranking.interval
    ties = f"; {counted(ranking.ties, 'tie')}, counted half" if ranking.ties else ""
    lost = f"; {counted(ranking.without_number, 'pair')} without a finite reward" if ranking.without_number else ""
    margin = f"margin {ranking.mean_margin:.4g} on average, median {ranking.median_margin:.4g}"
    return f"accuracy {ranking.accuracy:.3f} (95% {low:.3f} to {high:.3f}), {margin}{ties}{lost}"


def _served_lines(found: ServedEvidence) -> Iterator[str]:
    """Yield what a server answered with an adapter and without it."""
    yield printable(
        f"asked {found.url} for {found.what} with {found.inputs}: `{found.adapter}`, and its base `{found.base}`"
    )
    yield (
        f"  {found.values} {found.what} differ by {found.moved:.3g}, those of two answers to one request by "
        f"{found.noise:.3g}"
    )
    if found.peft is not None:
        near = "within" if found.peft.adapter <= found.peft.allowed else "BEYOND"
        yield (
            f"  PEFT's differ by {found.peft.expected:.3g}; the server's are {found.peft.adapter:.3g} from PEFT's at "
            f"most, {near} {found.peft.allowed:.2g}"
        )


def _tensor_line(found: TensorEvidence, width: int) -> str:
    """Return one tensor's evidence in a line, its name in `width` columns."""
    figures = [f"{text:<17}" for text in _figures(_distances(found))] if found.action is TensorAction.MERGED else []
    wrong = [f"{found.wrong} of {found.compared} wrong"] if found.wrong else []
    return printable(
        "  ".join(
            [f"{found.verdict.value:<10}", f"{found.action.value:<8}", f"{found.name:<{width}}", *wrong, *figures]
        )
    ).rstrip()


def _distances(found: TensorEvidence) -> dict[str, float | None]:
    return {name: getattr(found, name) for name in ("ulps", "distance", "factor", "cosine")}


def _figures(named: Mapping[str, float | None]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in named.items() if value is not None]


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


def _tensor_json(found: TensorEvidence) -> dict[str, Any]:
    return {
        "name": printable(found.name),
        "fate": found.action.value,
        "verdict": found.verdict.value,
        "compared": found.compared,
        "values": found.numel,
        "wrong": found.wrong,
        **{name: finite(value) for name, value in _distances(found).items()},
        "reason": found.reason or None,
    }


def _outputs_json(found: OutputEvidence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    derived = {name: getattr(found, name) for name in ("allowed_largest", "allowed_mean", "explained")}
    table = {**asdict(found), **derived}
    return {name: finite(value) if isinstance(value, float) else value for name, value in table.items()}


def _pairs_json(found: PairEvidence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    table: dict[str, Any] = json_data(
        {
            "source": found.source,
            "pairs": len(found.lines),
            "merged": _ranking_json(found.merged),
            "unmerged": None if found.unmerged is None else _ranking_json(found.unmerged),
            "changed_lines": found.changed,
            "largest_difference": found.largest,
            "min_accuracy": found.least,
            "longest": found.longest,
            "cut": found.cut,
            "streamed": found.streamed,
            "lines": found.lines,
        }
    )
    return table


def _served_json(found: ServedEvidence) -> dict[str, Any]:
    peft = None if found.peft is None else asdict(found.peft) | {"allowed": found.peft.allowed}
    table: dict[str, Any] = json_data(asdict(found) | {"applied": found.applied, "peft": peft})
    return table


def _ranking_json(ranking: Ranking) -> dict[str, Any]:
    names = ("accuracy", "interval", "ties", "without_number", "mean_margin", "median_margin", "chosen", "rejected")
    return {name: getattr(ranking, name) for name in names}
