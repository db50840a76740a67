# SEE NOTICE.txt IN THIS FOLDER (from the lead): who of the helpers owns which files; read it before you write.
"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

from collections.abc import Iterable

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, RunDir, open_checkpoint
from lora_tool.display import size
from lora_tool.errors import CheckpointError
from lora_tool.report.model import Finding, Report, Severity, Skipped, Subject
from lora_tool.rules.registry import Case, Rule, chosen

DEEP_BYTES = 512 << 20
"""Adapters up to this size have their weights read without being asked; it takes a quarter of a second."""


def validate(
    checkpoint: Checkpoint,
    *,
    base: ModelDir | None = None,
    num_labels: int | None = None,
    reward: bool = False,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    deep: bool | None = None,
    why_no_base: str = "no base model was given (--base)",
) -> Report:
    """Return everything that the rules find in `checkpoint`, from headers; nothing is changed, no code is run.

    `base` switches on the rules that compare with it. `deep` True reads all weights, False none, None those of small
    adapters. Checks that could not run are in `skipped`. Raises `UnknownCode` for a `select` or `ignore` that matches
    no rule.
    """
    rules = chosen(select, ignore)
    case = Case(checkpoint=checkpoint, base=base, num_labels=num_labels, reward=reward)
    report = _judge(case, rules, deep=deep, why_no_base=why_no_base)
    if isinstance(checkpoint, RunDir):
        for name in checkpoint.folder.checkpoints:
            report = report.joined(_inside_run(checkpoint, name, case, rules, deep=deep, why_no_base=why_no_base))
    return report


def _inside_run(
    run: RunDir, name: str, case: Case, rules: tuple[Rule, ...], *, deep: bool | None, why_no_base: str
) -> Report:
    path = run.root / name
    try:
        inner = open_checkpoint(path)
    except CheckpointError as error:
        finding = Finding(code="LT115", severity=Severity.ERROR, path=str(path), message=str(error), hint=error.hint)
        return Report(subjects=(Subject(path=str(path), kind="unknown"),), findings=(finding,))
    inner_case = Case(checkpoint=inner, base=case.base, num_labels=case.num_labels, reward=case.reward)
    return _judge(inner_case, rules, deep=deep, why_no_base=why_no_base)


def _judge(case: Case, rules: tuple[Rule, ...], *, deep: bool | None, why_no_base: str) -> Report:
    said: list[Finding | Skipped] = []
    for rule in rules:
        reason = _why_not(rule, case, deep=deep, why_no_base=why_no_base)
        if reason is None:
            said.extend(rule.run(case))
        elif reason:
            said.append(Skipped(code=rule.code, reason=reason))
    findings = [item for item in said if isinstance(item, Finding)]
    return Report(
        subjects=(Subject(path=case.root, kind=str(case.checkpoint.kind)),),
        findings=tuple(sorted(findings, key=lambda finding: finding.severity.rank)),
        skipped=tuple(dict.fromkeys(item for item in said if isinstance(item, Skipped))),
    )


def _why_not(rule: Rule, case: Case, *, deep: bool | None, why_no_base: str) -> str | None:
    """Return None to run the rule, "" where it has no business with this kind of checkpoint, else why it cannot run."""
    checkpoint = case.checkpoint
    if rule.needs_base:
        if not isinstance(checkpoint, AdapterDir):
            return ""
        return None if case.base is not None else why_no_base
    if not rule.deep:
        return None
    if not isinstance(checkpoint, AdapterDir | ModelDir):
        return ""
    if deep is None and isinstance(checkpoint, AdapterDir):
        large = checkpoint.weights.nbytes > DEEP_BYTES
        return f"weights of {size(checkpoint.weights.nbytes)} are read only with --deep" if large else None
    if deep is None:
        return "" if isinstance(checkpoint, ModelDir) else None
    return None if deep else "--headers-only: weights were not read"
