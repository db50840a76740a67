"""The judge that all commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.dialects import foreign_in
from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, open_sharded
from lora_tool.checkpoints.registry import holds_rank_files
from lora_tool.core.display import size
from lora_tool.core.errors import CheckpointError, IncompatibleBase, NotACheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.core.progress import Progress, Watch, decided
from lora_tool.core.report import Checked, Finding, Report, Severity, Skipped
from lora_tool.core.report.model import joined
from lora_tool.core.report.text import by_reason, spans
from lora_tool.formats import generation_config
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.rules import families  # noqa: F401 - importing it registers all rules
from lora_tool.rules.adapter.lt5_several import OF_SEVERAL, SeveralAdapters
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import RULES, Need, Rule, Unchecked, chosen
from lora_tool.rules.engine.scan import scans_of
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Subject
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.rules.model.lt3_tensors import is_wrapped
from lora_tool.rules.shared.base_match import (
    as_in_memory,
    match_base,
    of_unknown_class,
    same_names,
    with_names_in_memory,
)
from lora_tool.rules.training.sharded_subject import ShardedSubject, sharded_subject

if TYPE_CHECKING:
    from lora_tool.rules.engine.subjects import AskClass
    from lora_tool.rules.shared.base_match import AskNames

DEEP_BYTES = 256 << 20
"""Rank files up to this size have their values read without being asked; it takes about a tenth of a second."""

NO_BASE = "no base model was given (use --base)"

OF_LOADING = ("LT2", "LT501", "LT502", "LT503", "LT505", "LT506", "LT509")
"""The rules that decide whether PEFT loads an adapter without missing or unexpected tensors."""
WEIGHTS_BESIDE = "LT222"
"""The rule that reports weights in other files than the adapter's."""
NOT_MERGED = "LT215"
"""The rule about what a plain merge refuses."""

FOREIGN_CALL = "LT116"
"""The rule about pickles that call what no checkpoint needs."""
_OF_FILES = ("LT1", "LT214")
"""The rules about the files themselves, and their fields."""
_OF_BASES = frozenset({FOREIGN_CALL, "LT309", "LT310", "LT317", "LT318", "LT322", "LT324"})
"""What is wrong with a base and would be wrong with everything that is merged into it. LT515 tells of what is lost where
the adapter's names are the base's.
"""


def broken_files(checkpoint: Checkpoint, problems: tuple[Problem, ...]) -> Report:
    """Return the findings about the files of a folder with these problems."""
    found = Judge(rules=chosen(_OF_FILES)).folder(Subject(checkpoint=replace(checkpoint, problems=problems)))
    paths = {problem.path for problem in problems}
    return replace(found, findings=tuple(finding for finding in found.findings if finding.path in paths))


class Judge(Struct, frozen=True, kw_only=True, eq=False):
    """Runs the rules on a folder; validate, merge, verify and push use it, so that all report the same.

    Adapters and models are compared with `base`; `why_no_base` is reported without one. `num_labels` and `task`
    ("reward", "seq-cls", …) are the expected ones, `servers` those that will serve an adapter unmerged. `deep` True reads
    all weights, False none, None those of adapters; `progress` is called with the bytes read, `watch` with the size of
    rank files. `ignored`: a merge goes on in spite of these rules, so only findings that make it impossible are returned.
    `average`: several adapters are averaged, not added up. `ask` answers for classes of which no table is certain, `names` for their names.
    """

    rules: tuple[Rule, ...]
    base: ModelDir | None = None
    why_no_base: str = NO_BASE
    num_labels: int | None = None
    task: str | None = None
    servers: frozenset[str] = frozenset()
    deep: bool | None = None
    ignored: bool = False
    progress: Progress | None = None
    watch: Watch | None = None
    ask: AskClass | None = None
    names: AskNames | None = None
    average: bool = False

    @property
    def labels(self) -> int | None:
        """How many labels a head must have; a reward model has one."""
        return 1 if self.task == "reward" and self.num_labels is None else self.num_labels

    def adapter(self, adapter: AdapterDir) -> Report:
        """Return the findings about an adapter's folder, its base's files, and rank files in the folder."""
        subject = self.subject(adapter)
        base = [] if self.base is None else [self.unreadable(self.base), self._copied_files(subject, self.base)]
        found = self.folder(subject)
        known = () if found.count(Severity.ERROR) else self._of_unknown_class(subject)
        return joined([found, *known, *base, self._base_of(subject), *self.rank_files_beside(adapter)])

    def _of_unknown_class(self, subject: AdapterSubject) -> Iterator[Report]:
        """Yield what a merge finds about an adapter that makes a class which no table knows, or why that is unknown."""
        memory = None if self.names is None else of_unknown_class(subject, self.names)
        if isinstance(memory, AdapterSubject):
            yield replace(self.comparing.folder(memory), subjects=())
        elif memory is not None:
            path, needy = str(subject.checkpoint.root), (rule.code for rule in self.rules if Need.CLASS in rule.needs)
            yield Report(skipped=tuple(Skipped(code=code, path=path, reason=memory) for code in needy))

    def together(self, adapters: Sequence[AdapterDir]) -> Report:
        """Return the findings about the combination of adapters that are merged into one base; not those about each."""
        if len(adapters) == 1:
            return Report()
        several = SeveralAdapters(checkpoint=adapters[0], views=tuple(map(view_of, adapters)), average=self.average)
        return replace(self.only(*OF_SEVERAL).folder(several), subjects=())

    def rank_files_beside(self, checkpoint: AdapterDir | ModelDir) -> Iterator[Report]:
        """Yield the findings about rank files in the folder of an adapter or model, or why they cannot be opened."""
        if not holds_rank_files(checkpoint.folder):
            return
        opened = None
        try:
            opened = open_sharded(checkpoint.root)
            found = sharded_subject(opened, watch=self.watch)
        except NotACheckpoint:  # folders of that name without rank files
            return
        except (CheckpointError, UnsupportedCheckpoint) as error:
            if opened is not None:
                yield self.only(FOREIGN_CALL).folder(Subject(checkpoint=opened))
            reason = Skipped(code="LT402", path=str(checkpoint.root), reason=str(error))
            yield Report(skipped=(reason,) if RULES["LT402"] in self.rules else ())
        else:
            yield self.folder(found)

    def unreadable(self, checkpoint: AdapterDir | ModelDir) -> Report:
        """Return what keeps a folder's config and weights from being believed, and nothing else about it."""
        of_folder = checkpoint.folder.problems
        wrong = tuple(problem for problem in checkpoint.problems if problem.fatal and problem not in of_folder)
        if not wrong:
            return Report()
        subject = Subject(checkpoint=replace(checkpoint, problems=wrong))
        return replace(replace(self.only(*_OF_FILES), ignored=False).folder(subject), subjects=())

    def _copied_files(self, subject: AdapterSubject, base: ModelDir) -> Report:
        """Return the findings about the JSON files that a merge copies from the base because the adapter has none."""
        own = {*subject.checkpoint.folder.files, *((generation_config.FILE_NAME,) if subject.is_reward() else ())}
        files = tuple(sorted(set(base.folder.files) - own))
        copied = replace(base, folder=replace(base.folder, files=files), problems=())
        return replace(self.only("LT113").folder(ModelSubject(checkpoint=copied)), subjects=())

    def _base_of(self, subject: AdapterSubject) -> Report:
        """Return the findings about tensors that its base lacks or has wrong, without those that the adapter brings."""
        if subject.stored_base is None:
            return Report()
        match = subject.match
        compared = isinstance(match, BaseMatch) and not match.outside and not is_wrapped(match.add)
        codes = _OF_BASES - ({"LT318"} if compared else set())
        found = self.only(*codes).folder(subject.stored_base)
        findings = (finding for finding in found.findings if finding.subject not in subject.view.saved)
        return Report(findings=tuple(findings), skipped=found.skipped)

    def subject(self, adapter: AdapterDir) -> AdapterSubject:
        """Return the subject of an adapter's rules: its view, and its match with the base where names determine one."""
        view = view_of(adapter)
        modules, whole = [layer.target for layer in view.layers], self.deep is True
        match = None if self.base is None else match_base(self.base, view.config, modules)
        unmatched = self.base if isinstance(match, str) else None
        adapted = (*modules, *view.tokens, *(name.rpartition(".")[0] for name in view.saved))
        found = AdapterSubject(
            checkpoint=adapter,
            scans=scans_of(adapter),
            whole=whole,
            view=view,
            base=self.base,
            stored_base=None if self.base is None else ModelSubject(checkpoint=self.base, ask=self.ask, whole=whole),
            match=match,
            same_names=None if unmatched is None else same_names(unmatched, view.config, adapted),
            num_labels=self.labels,
            task=self.task,
            servers=self.servers,
            why_no_base=self.why_no_base,
        )
        return found if self.names is None else with_names_in_memory(found, self.names)

    @property
    def comparing(self) -> Judge:
        """The same judge with only those of its rules that compare an adapter with its base."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule.compares))

    def only(self, *beginnings: str) -> Judge:
        """Return the same judge with only those of its rules whose codes begin like this."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule.code.startswith(beginnings)))

    def folder(self, subject: Subject) -> Report:
        """Return the findings of the rules in one subject, without its base or rank files."""
        subject.scans.progress = self.progress
        path = str(subject.checkpoint.root)
        findings: list[Finding] = []
        skipped: list[Skipped] = []
        ran: list[str] = []
        for rule in self.rules:
            if not self._concerns(rule, subject):
                continue
            seen = rule.seen(subject)
            reason = self._why_not(rule, seen)
            found: tuple[Finding | Unchecked, ...] = ()
            if reason is None:
                try:
                    found = tuple(rule.run(seen, ignored=self.ignored))
                except CheckpointError as error:  # of rank files, whose readers raise while a rule compares them
                    if not isinstance(subject, ShardedSubject):
                        raise
                    reason = str(error)
                else:
                    ran.append(rule.code)
                    reason = self._why_in_part(rule, seen)
            reasons = [reason, *(each.reason for each in found if isinstance(each, Unchecked))]
            skipped += [Skipped(code=rule.code, path=path, reason=each) for each in reasons if each is not None]
            findings += [each for each in found if isinstance(each, Finding)]
        for codes, paths, why in by_reason(skipped):  # a report only counts them where they are many
            decided(f"skipped {spans(codes)} on {paths[0]}: {why}")
        of, command = subject.kind, subject.checkpoint.kind.command
        checked = Checked(path=path, kind=of, command=command, rules=tuple(ran), formats=subject.formats)
        return Report(subjects=(checked,), findings=tuple(findings), skipped=tuple(skipped))

    def _concerns(self, rule: Rule, subject: Subject) -> bool:
        """Whether the rule is for such a folder, and its options were given."""
        if not isinstance(subject, rule.on) or (self.ignored and not rule.unmergeable):
            return False
        if Need.SERVER in rule.needs and not self.servers:
            return False
        if Need.BASE in rule.needs and isinstance(subject, ModelSubject) and subject.base is None:
            return False
        if Need.OUTPUTS in rule.needs and (not isinstance(subject, MergedSubject) or subject.outputs is None):
            return False
        if Need.PAIRS in rule.needs and (not isinstance(subject, MergedSubject) or subject.pairs is None):
            return False
        return not rule.deep or (self.deep is not False and (bool(subject.tensors) or rule.on is ShardedSubject))

    def _why_not(self, rule: Rule, subject: Subject) -> str | None:
        """Return why the rule would say nothing true about the subject; None if it can run."""
        checkpoint = subject.checkpoint
        if isinstance(subject, ShardedSubject) and Need.WEIGHTS in rule.needs:
            too_large = rule.deep and self.deep is None and subject.nbytes > DEEP_BYTES
            only_deep = f"weights of {size(subject.nbytes)} are read only with --deep" if too_large else None
            return subject.why_no_values or only_deep
        if isinstance(checkpoint, AdapterDir | ModelDir):
            if Need.WEIGHTS in rule.needs and checkpoint.weights.is_broken:
                return "the weights cannot be read; that is reported above"
            reason = _why_no_config(checkpoint, rule.needs)
            if reason is None and Need.WEIGHTS in rule.needs and isinstance(subject, AdapterSubject):
                reason = next(
                    (f"its names are {each.dialect.program}'s" for each in foreign_in(subject.checkpoint)), None
                )
            if reason is None and rule.needs & {Need.BASE, Need.NAMES} and isinstance(subject, AdapterSubject):
                partly = Need.SAME_NAMES in rule.needs and subject.same_names is not None
                matched = Need.BASE not in rule.needs or partly
                no_match = None if matched else subject.why_no_match
                reason = self.why_no_base if subject.base is None else no_match
            if reason is None and isinstance(subject, MergedSubject):
                reason = subject.why_not(rule.needs)
            if reason is None and rule.deep and self.deep is None and isinstance(checkpoint, ModelDir):
                return "a model's weights are read only with --deep"
            return reason
        return None

    def _why_in_part(self, rule: Rule, subject: Subject) -> str | None:
        """Return why a rule that ran could not see everything; None if it did."""
        if isinstance(subject, ShardedSubject):
            return subject.why_in_part if Need.ALL_NAMES in rule.needs else None
        if isinstance(subject, AdapterSubject):
            if Need.BASE_IN_PART in rule.needs and subject.base is None:
                return self.why_no_base
            if Need.SAME_NAMES in rule.needs and subject.why_no_match:
                return f"{subject.why_no_match}: only what has the same name in both was compared"
        model = subject.stored_base if isinstance(subject, AdapterSubject) else subject
        return model.why_no_class if Need.CLASS in rule.needs and isinstance(model, ModelSubject) else None


def _why_no_config(checkpoint: AdapterDir | ModelDir, needs: frozenset[Need]) -> str | None:
    """Return why the config is not what a rule with these needs has to have; None where it is."""
    config = checkpoint.config
    if Need.CONFIG in needs and (config is None or config.problems):
        name = config.path.name if config else "the config"
        return f"{name} is missing or has wrong fields; that is reported above"
    if isinstance(config, AdapterConfig):
        other = Need.CONFIG in needs and not config.has_known_type
        if other or (Need.LORA in needs and config.is_of_another_kind):
            return f"peft_type is {config.peft_type}, not LORA"
    return None


# The judge of a merge: whether the rules allow adapters and base to be merged, before the plan is made.

_LARGE = 64 << 20
"""Bytes of adapters whose values are worth an import before they are read."""
_NO_HELP = "ignoring the rule does not help, because nothing could be computed"
_OF_SHAPES = "LT317"
"""The rule about a config that its weights contradict."""
OF_TIED = frozenset({"LT508", "LT514"})
"""The rules about two values for one matrix; `untie` makes two matrices of it."""
_OF_METHOD = "LT217"
"""The rule about adapters that are not LoRA; PEFT merges most of them."""


class MergeJudge(Struct, frozen=True, kw_only=True):
    """The options of a merge, and the rules that judge it. Codes are checked when the rules first run.

    `task` and `num_labels` are the given ones, None where adapter and base state them; `untie` makes tied ends two
    matrices; `by_peft` allows PEFT's other methods; `ask` and `average` are `Judge`'s. An error of an ignored rule refuses all the same where it leaves nothing to compute.
    """

    task: str | None = None
    num_labels: int | None = None
    untie: bool = False
    by_peft: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.ERROR
    ask: AskClass | None = None
    average: bool = False

    def as_stored(
        self,
        adapters: Sequence[AdapterDir],
        base: ModelDir | None,
        *,
        beside: Sequence[AdapterDir] | None = None,
        computing: bool = True,
    ) -> Report:
        """Return the findings about adapters and their base, the same as of `validate`, below `fail_on`.

        Without a base nothing is compared with one. `beside` are the adapters for the rules about several, where those see
        only part of each; `computing` is False where the plan mostly copies. Raises `FindingsFound`, `UnknownRule`.
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
            subjects = (as_in_memory(judge.subject(each), each, match) for each in adapters)
            return joined([judge.together(adapters), *map(judge.comparing.folder, subjects)])

        return self._refuse(judged, None)

    def of_models(self, models: Sequence[ModelDir]) -> Report:
        """Return the findings about the files of models that are computed with. Raises as `as_stored`."""
        subjects = tuple(ModelSubject(checkpoint=each) for each in models)

        def judged(judge: Judge) -> Report:
            return joined([*map(judge.unreadable, models), *map(judge.only(FOREIGN_CALL).folder, subjects)])

        return self._refuse(judged, None)

    def _refuse(self, judged: Callable[[Judge], Report], base: ModelDir | None) -> Report:
        moot = OF_TIED if self.untie else {_OF_METHOD} if self.by_peft else set()
        rules = tuple(each for each in chosen(self.select, self.ignore) if each.code not in moot)
        judge = Judge(rules=rules, base=base, num_labels=self.num_labels, task=self.task, ask=self.ask)
        judge = replace(judge, average=self.average)
        report = judged(judge)
        report.raise_at(self.fail_on)
        if self.select or self.ignore:
            left_out = tuple(each for each in chosen() if each.code not in moot and each not in rules)
            judged(replace(judge, rules=left_out, deep=False, ignored=True)).raise_at(Severity.ERROR, hint=_NO_HELP)
        return report
