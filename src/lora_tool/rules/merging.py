"""Asking the rules whether adapters may be merged into a base: what a plan of a merge asks before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_tool.adapter.view import view_of
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.report import Report, Severity
from lora_tool.report.model import joined
from lora_tool.rules.engine.registry import RULES, Need, Rule, chosen
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch
from lora_tool.rules.judging import judge, judge_adapter, judge_together, unreadable

_NO_HELP = "a merge has nothing to compute then, so ignoring the rule does not help"
_OF_TIED = "LT514"
"""What two values for one matrix are called; `untie` makes two matrices of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeJudge:
    """What is asked of a merge, and of the rules that judge it. Codes are checked by the first question.

    `task` and `num_labels` are what was asked for, None where adapter and base say it; `untie` that tied ends become two
    matrices. An error of an ignored rule refuses all the same where it leaves nothing to compute.
    """

    task: str | None = None
    num_labels: int | None = None
    untie: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.ERROR

    def as_stored(self, adapters: Sequence[AdapterDir], base: ModelDir) -> Report:
        """Return what the rules find in adapters beside their base, as `validate` says it, below `fail_on`.

        Raises `FindingsFound` for what is worse, `UnknownRule` for a code that no rule has.
        """

        def judged(rules: Sequence[Rule], *, ignored: bool) -> Report:
            reports = [
                judge_adapter(
                    each,
                    rules,
                    base=base,
                    num_labels=self._labels,
                    task=self.task,
                    deep=False if ignored else None,
                    ignored=ignored,
                )
                for each in adapters
            ]
            files = [unreadable(each, self._ignored(of_files=True)) for each in adapters] if ignored else []
            base_files = [unreadable(base, self._ignored(of_files=True))] if ignored else []
            return joined([*reports, judge_together(adapters, rules), *files, *base_files])

        return self._refuse(judged)

    def in_memory(self, adapters: Sequence[AdapterDir], match: BaseMatch) -> Report:
        """Return what the rules that compare with a base find where transformers said what its class is.

        Adapters and the base of `match` are in the names of memory. Raises as `as_stored`.
        """

        def judged(rules: Sequence[Rule], *, ignored: bool) -> Report:
            del ignored
            comparing = [rule for rule in rules if Need.BASE in rule.needs and not rule.deep]
            subjects = (
                AdapterSubject(
                    checkpoint=each,
                    view=view_of(each),
                    base=match.base,
                    match=match,
                    num_labels=self._labels,
                    task=self.task,
                )
                for each in adapters
            )
            return joined([judge_together(adapters, rules), *(judge(subject, comparing) for subject in subjects)])

        return self._refuse(judged)

    @property
    def _labels(self) -> int | None:
        return 1 if self.task == "reward" and self.num_labels is None else self.num_labels

    def _ignored(self, *, of_files: bool = False) -> tuple[Rule, ...]:
        rules = chosen(self.select, self.ignore)
        return tuple(rule for rule in self._fitting if rule not in rules and (of_files or rule.unmergeable))

    @property
    def _fitting(self) -> tuple[Rule, ...]:
        """The rules that can be broken by what was asked for."""
        return tuple(rule for rule in RULES.values() if not (self.untie and rule.code == _OF_TIED))

    def _refuse(self, judged: Callable[..., Report]) -> Report:
        rules = chosen(self.select, self.ignore)
        report = judged([rule for rule in self._fitting if rule in rules], ignored=False)
        report.raise_at(self.fail_on)
        if self.select or self.ignore:
            judged(self._ignored(), ignored=True).raise_at(Severity.ERROR, hint=_NO_HELP)
        return report
