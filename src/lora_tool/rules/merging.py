"""Asking the rules whether adapters may be merged into a base: what a plan of a merge asks before it begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import IncompatibleBase
from lora_tool.core.report import Report, Severity
from lora_tool.core.report.model import joined
from lora_tool.rules.engine.registry import Need, chosen
from lora_tool.rules.engine.subjects import BaseMatch, ModelSubject
from lora_tool.rules.judging import Judge

_LARGE = 64 << 20
"""Bytes of adapters whose values are worth an import before they are read."""
_NO_HELP = "ignoring the rule does not help, because nothing could be computed"
_OF_SHAPES = "LT317"
"""What a config says that its weights contradict."""
_OF_TIED = "LT514"
"""What two values for one matrix are called; `untie` makes two matrices of it."""


class MergeJudge(Struct, frozen=True, kw_only=True):
    """What is asked of a merge, and of the rules that judge it. Codes are checked by the first question.

    `task` and `num_labels` are what was asked for, None where adapter and base say it; `untie` that tied ends become
    two matrices. An error of an ignored rule refuses all the same where it leaves nothing to compute.
    """

    task: str | None = None
    num_labels: int | None = None
    untie: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.ERROR

    def as_stored(
        self,
        adapters: Sequence[AdapterDir],
        base: ModelDir | None,
        *,
        beside: Sequence[AdapterDir] | None = None,
        computing: bool = True,
    ) -> Report:
        """Return what the rules find in adapters beside their base, as `validate` says it, below `fail_on`.

        Without a base nothing is compared with one. `beside` are the same adapters as they are looked at together,
        where less than all of them counts; `computing` says that what is planned will most often be more than copies.
        Raises `FindingsFound` for what is worse, `UnknownRule` for a code that no rule has.
        """
        if computing and sum(tensor.nbytes for each in adapters for tensor in each.tensors.values()) >= _LARGE:
            import numpy  # noqa: F401, ICN001 - what computes is imported while values are read

        def judged(judge: Judge) -> Report:
            files = map(judge.unreadable, adapters) if judge.ignored else ()
            return joined([*map(judge.adapter, adapters), judge.together(beside or adapters), *files])

        return self._refuse(judged, base)

    @contextlib.contextmanager
    def reading(self, base: ModelDir) -> Iterator[None]:
        """Judge what transformers finds wrong with the base itself while the work inside asks it. Raises as
        `as_stored`, or the error of the work where no rule that was asked for says it.
        """
        try:
            yield
        except IncompatibleBase as error:
            if error.problem is not None:
                subject = ModelSubject(checkpoint=base, contradiction=error.problem)
                self._refuse(lambda judge: judge.only(_OF_SHAPES).folder(subject), None)
            raise

    def in_memory(self, adapters: Sequence[AdapterDir], match: BaseMatch) -> Report:
        """Return what the rules that compare with a base find where transformers said what its class is.

        Adapters and the base of `match` are in the names of memory. Raises as `as_stored`.
        """

        def judged(judge: Judge) -> Report:
            comparing = replace(
                judge, rules=tuple(each for each in judge.rules if Need.BASE in each.needs and not each.deep)
            )
            subjects = (replace(judge.subject(each), base=match.base, match=match) for each in adapters)
            return joined([judge.together(adapters), *map(comparing.folder, subjects)])

        return self._refuse(judged, None)

    def _refuse(self, judged: Callable[[Judge], Report], base: ModelDir | None) -> Report:
        fitting = [each for each in chosen() if not (self.untie and each.code == _OF_TIED)]
        asked = chosen(self.select, self.ignore)
        rules = tuple(each for each in fitting if each in asked)
        judge = Judge(rules=rules, base=base, num_labels=self.num_labels, task=self.task)
        report = judged(judge)
        report.raise_at(self.fail_on)
        if self.select or self.ignore:
            left_out = tuple(each for each in fitting if each not in rules)
            judged(replace(judge, rules=left_out, deep=False, ignored=True)).raise_at(Severity.ERROR, hint=_NO_HELP)
        return report
