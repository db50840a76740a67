"""The judge of a merge: whether the rules allow adapters and base to be merged, before the plan is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import IncompatibleBase
from lora_tool.core.report import Report, Severity
from lora_tool.core.report.model import joined
from lora_tool.rules.engine.registry import Need, chosen
from lora_tool.rules.engine.subjects import BaseMatch, ModelSubject
from lora_tool.rules.judging import Judge

if TYPE_CHECKING:
    from lora_tool.rules.engine.subjects import AskClass

_LARGE = 64 << 20
"""Bytes of adapters whose values are worth an import before they are read."""
_NO_HELP = "ignoring the rule does not help, because nothing could be computed"
_OF_SHAPES = "LT317"
"""The rule about a config that its weights contradict."""
_OF_TIED = "LT514"
"""The rule about two values for one matrix; `untie` makes two matrices of it."""
_OF_METHOD = "LT217"
"""The rule about adapters that are not LoRA; PEFT merges most of them."""


class MergeJudge(Struct, frozen=True, kw_only=True):
    """The options of a merge, and the rules that judge it. Codes are checked when the rules first run.

    `task` and `num_labels` are the given ones, None where adapter and base state them; `untie` makes tied ends two
    matrices; `by_peft` allows PEFT's other methods; `ask` is `Judge`'s. An error of an ignored rule refuses all the same where it leaves nothing to compute.
    """

    task: str | None = None
    num_labels: int | None = None
    untie: bool = False
    by_peft: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.ERROR
    ask: AskClass | None = None

    def as_stored(
        self,
        adapters: Sequence[AdapterDir],
        base: ModelDir | None,
        *,
        beside: Sequence[AdapterDir] | None = None,
        computing: bool = True,
    ) -> Report:
        """Return the findings about adapters and their base, the same as of `validate`, below `fail_on`.

        Without a base nothing is compared with one. `beside` are the adapters for the rules about
        several, where those see only part of each; `computing` is False where the plan mostly copies.
        Raises `FindingsFound` for findings from `fail_on` on, `UnknownRule` for a code that no rule has.
        """
        if computing and sum(tensor.nbytes for each in adapters for tensor in each.tensors.values()) >= _LARGE:
            import numpy  # noqa: F401, ICN001 - what computes is imported while values are read

        def judged(judge: Judge) -> Report:
            files = map(judge.unreadable, adapters) if judge.ignored else ()
            return joined([*map(judge.adapter, adapters), judge.together(beside or adapters), *files])

        return self._refuse(judged, base)

    @contextlib.contextmanager
    def reading(self, base: ModelDir) -> Iterator[None]:
        """Report an `IncompatibleBase` of transformers, raised by the work inside, as a finding about the base.

        Raises as `as_stored`, or the error itself where no selected rule reports it.
        """
        try:
            yield
        except IncompatibleBase as error:
            if error.problem is not None:
                subject = ModelSubject(checkpoint=base, contradiction=error.problem)
                self._refuse(lambda judge: judge.only(_OF_SHAPES).folder(subject), None)
            raise

    def in_memory(self, adapters: Sequence[AdapterDir], match: BaseMatch) -> Report:
        """Return the findings of the rules that compare with a base, once transformers has determined its class.

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
        moot = {_OF_TIED} if self.untie else {_OF_METHOD} if self.by_peft else set()
        rules = tuple(each for each in chosen(self.select, self.ignore) if each.code not in moot)
        judge = Judge(rules=rules, base=base, num_labels=self.num_labels, task=self.task, ask=self.ask)
        report = judged(judge)
        report.raise_at(self.fail_on)
        if self.select or self.ignore:
            left_out = tuple(each for each in chosen() if each.code not in moot and each not in rules)
            judged(replace(judge, rules=left_out, deep=False, ignored=True)).raise_at(Severity.ERROR, hint=_NO_HELP)
        return report
