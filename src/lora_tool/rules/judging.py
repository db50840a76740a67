"""Asking every rule about one subject: the judge that all commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lora_tool.adapter.view import view_of
from lora_tool.checkpoint import AdapterDir, ModelDir, open_sharded
from lora_tool.checkpoint.registry import piece_folders
from lora_tool.display import size
from lora_tool.errors import CheckpointError, NotACheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.progress import Watch
from lora_tool.report import Checked, Finding, Report, Skipped
from lora_tool.report.model import joined
from lora_tool.rules.adapter import (  # noqa: F401 - importing a family registers its rules
    lt2_config,
    lt2_layers,
    lt2_names,
    lt2_weights,
    lt3_head,
    lt5_base,
    lt5_hazards,
    lt5_model,
)
from lora_tool.rules.adapter.lt5_several import SeveralAdapters
from lora_tool.rules.engine.registry import RULES, Need, Rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Server, Subject
from lora_tool.rules.files import lt1_containers  # noqa: F401
from lora_tool.rules.merged import lt6_base, lt6_headers, lt6_outputs, lt6_values  # noqa: F401
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.rules.model import lt3_model_head, lt3_tensors, lt3_vocabulary  # noqa: F401
from lora_tool.rules.serving import lt8_serving  # noqa: F401
from lora_tool.rules.shared.base_match import match_base
from lora_tool.rules.training import lt4_rank_files, lt4_values, lt7_run  # noqa: F401
from lora_tool.rules.training.sharded_subject import ShardedSubject, sharded_subject

DEEP_BYTES = 256 << 20
"""Rank files up to this size have their values read without being asked; it takes about a tenth of a second."""

NO_BASE = "no base model was given (--base)"


def unopened(path: str, message: str, rules: Iterable[Rule], *, code: str = "LT115") -> Report:
    """Return the one finding about a folder that is not looked into: by default that it has no weights."""
    broken = RULES[code]
    finding = Finding(code=code, severity=broken.severity, path=path, subject=None, message=message, hint=broken.hint)
    return Report(
        subjects=(Checked(path=path, kind="unknown folder", rules=(code,)),),
        findings=(finding,) if broken in tuple(rules) else (),
    )


def adapter_subject(
    adapter: AdapterDir,
    *,
    base: ModelDir | None = None,
    num_labels: int | None = None,
    task: str | None = None,
    servers: frozenset[Server] = frozenset(),
) -> AdapterSubject:
    """Return what the adapter's rules look at: its view, and its match with the base where names can tell."""
    view = view_of(adapter)
    match = None if base is None else match_base(base, view.config, [layer.target for layer in view.layers])
    return AdapterSubject(
        checkpoint=adapter,
        view=view,
        base=base,
        match=match,
        num_labels=num_labels,
        task=task,
        servers=servers,
    )


def judge_adapter(
    adapter: AdapterDir,
    rules: Iterable[Rule],
    *,
    base: ModelDir | None = None,
    num_labels: int | None = None,
    task: str | None = None,
    servers: frozenset[Server] = frozenset(),
    deep: bool | None = None,
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    why_no_base: str = NO_BASE,
    ignored: bool = False,
) -> Report:
    """Return what the rules find in an adapter's folder: in the adapter, in a base that cannot be read, in rank files
    beside. Whoever validates or merges an adapter asks this, so that all of them say the same.

    `num_labels` and `task` ("reward", "seq-cls", …) are what is expected of it; `watch` is asked, with their number,
    for what is told of the bytes of rank files; the others are those of `judge`.
    """
    asked = tuple(rules)
    subject = adapter_subject(adapter, base=base, num_labels=num_labels, task=task, servers=servers)
    own = judge(subject, asked, deep=deep, servers=servers, progress=progress, why_no_base=why_no_base, ignored=ignored)
    beside = (
        found if isinstance(found, Report) else judge(found, asked, deep=deep, progress=progress)
        for found in rank_files_beside(adapter, asked, watch)
    )
    return joined([own, *([unreadable(base, asked)] if base else []), *beside])


def judge_together(adapters: Sequence[AdapterDir], rules: Iterable[Rule]) -> Report:
    """Return what the rules find in adapters that are to be merged into one base, beside what each is by itself."""
    subjects = tuple(map(adapter_subject, adapters))
    of_several = [rule for rule in rules if rule.on is SeveralAdapters]
    if len(subjects) == 1 or not of_several:
        return Report()
    report = judge(SeveralAdapters(checkpoint=adapters[0], adapters=subjects), of_several)
    return replace(report, subjects=())


def rank_files_beside(
    checkpoint: AdapterDir | ModelDir, rules: tuple[Rule, ...], watch: Watch | None = None
) -> Iterator[Subject | Report]:
    """Yield the training checkpoint in the folder of an adapter or model, as HF Trainer writes it, or why it cannot be
    opened.
    """
    if not piece_folders(checkpoint.folder):
        return
    try:
        yield sharded_subject(open_sharded(checkpoint.root), watch=watch)
    except NotACheckpoint:  # folders of that name without rank files
        return
    except (CheckpointError, UnsupportedCheckpoint) as error:
        reason = Skipped(code="LT402", path=str(checkpoint.root), reason=str(error))
        yield Report(skipped=(reason,) if RULES["LT402"] in rules else ())


def unreadable(checkpoint: AdapterDir | ModelDir, rules: Iterable[Rule]) -> Report:
    """Return the findings that keep a folder's config and weights from being believed, and nothing else about it."""
    wrong = fatal_problems(checkpoint)
    if not wrong:
        return Report()
    of_files = [rule for rule in rules if rule.code.startswith("LT1") or rule.code == "LT214"]
    report = judge(Subject(checkpoint=replace(checkpoint, problems=wrong)), of_files, deep=False)
    return replace(report, subjects=())


def fatal_problems(checkpoint: AdapterDir | ModelDir) -> tuple[Problem, ...]:
    """Return the problems of config and weights after which nothing can be computed from them."""
    beside = checkpoint.folder.problems
    return tuple(problem for problem in checkpoint.problems if problem.fatal and problem not in beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """How the weights may be read, and for whom the folder is meant."""

    deep: bool | None
    servers: frozenset[Server]
    why_no_base: str


def judge(
    subject: Subject,
    rules: Iterable[Rule],
    *,
    deep: bool | None = None,
    servers: frozenset[Server] = frozenset(),
    progress: Callable[[int], None] | None = None,
    why_no_base: str = NO_BASE,
    ignored: bool = False,
) -> Report:
    """Return what the rules find in one subject.

    `deep` True reads all weights, False none, None those of adapters; `servers` switches on the rules of serving;
    `progress` is called with the bytes that were read; `why_no_base` is why rules that compare with a base are skipped;
    `ignored` that a merge is to go on in spite of these rules, so that only what it cannot go on with is found.
    """
    asked = _Asked(deep=deep, servers=servers, why_no_base=why_no_base)
    subject.scans.progress = progress
    path = str(subject.checkpoint.root)
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    ran: list[str] = []
    for rule in rules:
        if not _concerns(rule, subject, asked):
            continue
        reason = _why_not(rule, subject, asked)
        if reason is None:
            findings.extend(rule.run(subject, ignored=ignored))
            ran.append(rule.code)
        else:
            skipped.append(Skipped(code=rule.code, path=path, reason=reason))
    checked = Checked(path=path, kind=subject.kind, rules=tuple(ran))
    return Report(subjects=(checked,), findings=tuple(findings), skipped=tuple(skipped))


def _concerns(rule: Rule, subject: Subject, asked: _Asked) -> bool:
    """Whether the rule is for such a folder, and was asked for."""
    if not isinstance(subject, rule.on) or (Need.SERVER in rule.needs and not asked.servers):
        return False
    if Need.BASE in rule.needs and isinstance(subject, ModelSubject) and subject.base is None:
        return False
    if Need.OUTPUTS in rule.needs and (not isinstance(subject, MergedSubject) or subject.outputs is None):
        return False
    has_values = bool(subject.tensors) or rule.on is ShardedSubject
    return not rule.deep or (asked.deep is not False and has_values)


def _why_not(rule: Rule, subject: Subject, asked: _Asked) -> str | None:
    """Return why the rule would say nothing true about the subject; None if it can run."""
    checkpoint = subject.checkpoint
    if isinstance(subject, ShardedSubject) and rule.deep:
        return subject.why_no_values or (_too_large(subject.nbytes) if asked.deep is None else None)
    if isinstance(checkpoint, AdapterDir | ModelDir):
        if Need.WEIGHTS in rule.needs and any(problem.fatal for problem in checkpoint.weights.problems):
            return "the weights cannot be read; that is reported above"
        reason = _why_no_config(checkpoint) if Need.CONFIG in rule.needs else None
        if reason is None and Need.BASE in rule.needs and isinstance(subject, AdapterSubject):
            reason = asked.why_no_base if subject.base is None else subject.why_no_match
        if reason is None and isinstance(subject, MergedSubject):
            reason = subject.why_not(rule.needs)
        if reason is None and rule.deep and asked.deep is None and isinstance(checkpoint, ModelDir):
            return "a model's weights are read only with --deep"
        return reason
    return None


def _too_large(nbytes: int) -> str | None:
    return f"weights of {size(nbytes)} are read only with --deep" if nbytes > DEEP_BYTES else None


def _why_no_config(checkpoint: AdapterDir | ModelDir) -> str | None:
    config = checkpoint.config
    if config is None or config.problems:
        name = config.path.name if config else "the config"
        return f"{name} is missing or has wrong fields; that is reported above"
    if isinstance(config, AdapterConfig) and config.peft_type != "LORA":
        return f"peft_type is {config.peft_type}, not LORA"
    return None
