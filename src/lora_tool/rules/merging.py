"""Asking the rules whether adapters may be merged into a base: what a plan of a merge asks before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.report import Report, Severity
from lora_tool.report.model import joined
from lora_tool.rules.engine.registry import RULES, Rule, chosen
from lora_tool.rules.judging import judge_adapter, unreadable

_NOT_TO_BE_IGNORED = "a merge has nothing to compute then, so ignoring the rule does not help"


def judge_merge(
    adapters: Sequence[AdapterDir],
    base: ModelDir,
    *,
    task: str | None = None,
    num_labels: int | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: Severity = Severity.ERROR,
) -> Report:
    """Return what the rules find in adapters that are to be merged into `base`, below `fail_on`.

    It is what `validate` says of each adapter beside its base. `task` and `num_labels` are what was asked for; `select`
    and `ignore` are codes of rules. Raises `FindingsFound` for findings of severity `fail_on` or worse, and for errors
    that leave nothing to compute even where their rules are ignored; `UnknownRule` for a code that no rule has.
    """
    wanted = 1 if task == "reward" and num_labels is None else num_labels

    def judged(rules: Sequence[Rule], *, deep: bool | None = None) -> Report:
        reports = (judge_adapter(each, rules, base=base, num_labels=wanted, task=task, deep=deep) for each in adapters)
        return joined(reports)

    rules = chosen(select, ignore)
    report = judged(rules)
    report.raise_at(fail_on)
    left = tuple(rule for rule in RULES.values() if rule not in rules)
    forced = [judged([rule for rule in left if rule.unmergeable], deep=False)] if left else []
    forced += [unreadable(each, left) for each in adapters] + [unreadable(base, left)]
    joined(forced).raise_at(Severity.ERROR, hint=_NOT_TO_BE_IGNORED)
    return report
