"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lora_tool.checkpoint import (
    AdapterDir,
    Checkpoint,
    DcpDir,
    ModelDir,
    RunDir,
    ZeroDir,
    open_checkpoint,
    open_sharded,
)
from lora_tool.display import size
from lora_tool.errors import CheckpointError, NotACheckpoint
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig
from lora_tool.formats.zero import read_tag
from lora_tool.report import Checked, Finding, Report, Skipped
from lora_tool.report.model import joined
from lora_tool.rules import (  # noqa: F401 - importing a family registers its rules
    adapter_config,
    adapter_layers,
    adapter_names,
    against_base,
    containers,
    head,
    model_head,
    weights,
    zero,
)
from lora_tool.rules.base_match import match_base
from lora_tool.rules.registry import RULES, Need, Rule, chosen
from lora_tool.rules.subject import AdapterSubject, ModelSubject, Subject, bare_path, layers_of

DEEP_BYTES = 256 << 20
"""Adapters up to this size have their weights read without being asked; it takes about a tenth of a second."""

NO_BASE = "no base model was given (--base)"


def validate(
    checkpoint: Checkpoint,
    *,
    base: ModelDir | None = None,
    num_labels: int | None = None,
    task: str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    deep: bool | None = None,
    why_no_base: str = NO_BASE,
) -> Report:
    """Return everything that the rules find in `checkpoint`, from headers; nothing is changed, no code is run.

    `base` switches on the rules that compare with it; `why_no_base` is what the report says without one. `task`
    "reward" expects a reward model with one label, "seq-cls" and "causal-lm" such models; `num_labels` are the rows that
    the head must have. `deep` True reads all weights, False none, None
    those of adapters up to `DEEP_BYTES`. Rules that could not run are in `skipped`. The checkpoints of a run folder
    are judged one by one. Raises `UnknownRule` for a `select` or `ignore` that means no rule.
    """
    rules = chosen(select, ignore)
    if task == "reward" and num_labels is None:
        num_labels = 1
    reports = []
    for subject in _subjects(checkpoint, base=base, num_labels=num_labels, task=task):
        if isinstance(subject, Report):
            codes = {rule.code for rule in rules}
            reports.append(replace(subject, findings=tuple(f for f in subject.findings if f.code in codes)))
        else:
            reports.append(_judge(subject, rules, deep=deep, why_no_base=why_no_base))
    return joined(reports)


def _subjects(
    checkpoint: Checkpoint, *, base: ModelDir | None, num_labels: int | None, task: str | None
) -> Iterator[Subject | Report]:
    """Yield what is to be judged: the folder, and the checkpoints in it; a report where one cannot be opened."""
    if isinstance(checkpoint, AdapterDir):
        yield adapter_subject(checkpoint, base=base, num_labels=num_labels, task=task)
    elif isinstance(checkpoint, ModelDir):
        yield ModelSubject(checkpoint=checkpoint, num_labels=num_labels)
    elif isinstance(checkpoint, ZeroDir):
        yield _zero_subject(checkpoint)
    else:
        yield Subject(checkpoint=checkpoint)
    if isinstance(checkpoint, AdapterDir | ModelDir) and checkpoint.folder.tags:
        with contextlib.suppress(NotACheckpoint):  # folders of that name without rank files
            yield _zero_subject(open_sharded(checkpoint.root))
    for name in checkpoint.folder.checkpoints if isinstance(checkpoint, RunDir) else ():
        path = checkpoint.root / name
        try:
            inner = open_checkpoint(path)
        except CheckpointError as error:
            yield _unopened(str(path), error)
        else:
            yield from _subjects(inner, base=base, num_labels=num_labels, task=task)


def _zero_subject(checkpoint: ZeroDir | DcpDir) -> Subject:
    """Return the tag that would be used; the bare folder where it cannot be looked into."""
    if isinstance(checkpoint, DcpDir):
        return Subject(checkpoint=checkpoint)
    tags = list(checkpoint.rank_files)
    name = checkpoint.latest if checkpoint.latest is not None and checkpoint.latest in tags else tags[-1]
    folder = checkpoint.root if name == "." else checkpoint.root / name
    try:
        return zero.ZeroSubject(checkpoint=checkpoint, tag=read_tag(folder, name))
    except CheckpointError:
        return Subject(checkpoint=checkpoint)


def _unopened(path: str, error: CheckpointError) -> Report:
    no_weights = RULES["LT115"]
    finding = Finding(
        code=no_weights.code,
        severity=no_weights.severity,
        path=path,
        subject=None,
        message=f"cannot be opened: {error}",
        hint=no_weights.hint,
    )
    return Report(subjects=(Checked(path=path, kind="unknown folder"),), findings=(finding,))


def adapter_subject(
    adapter: AdapterDir, *, base: ModelDir | None = None, num_labels: int | None = None, task: str | None = None
) -> AdapterSubject:
    """Return what the adapter's rules look at: its layers, and its match with the base where names can tell."""
    paths = {name: bare_path(key.module) for name, key in adapter.keys.items()}
    layers = layers_of(adapter, paths)
    config = adapter.config or AdapterConfig(path=adapter.root / FILE_NAME)
    match = None if base is None else match_base(base, config, [layer.target for layer in layers])
    return AdapterSubject(
        checkpoint=adapter,
        config=config,
        layers=layers,
        paths=paths,
        base=base,
        match=match,
        num_labels=num_labels,
        task=task,
    )


def _judge(subject: Subject, rules: Iterable[Rule], *, deep: bool | None, why_no_base: str) -> Report:
    path = str(subject.checkpoint.root)
    findings: list[Finding] = []
    skipped: list[Skipped] = list(_unread(subject))
    for rule in rules:
        if not isinstance(subject, rule.on) or (rule.deep and (deep is False or not subject.tensors)):
            continue
        reason = _why_not(rule, subject, deep=deep, why_no_base=why_no_base)
        if reason is None:
            findings.extend(rule.run(subject))
        else:
            skipped.append(Skipped(code=rule.code, path=path, reason=reason))
    checked = Checked(path=path, kind=str(subject.checkpoint.kind))
    return Report(subjects=(checked,), findings=tuple(findings), skipped=tuple(skipped))


def _why_not(rule: Rule, subject: Subject, *, deep: bool | None, why_no_base: str) -> str | None:
    """Return why the rule would say nothing true about the subject; None if it can run."""
    checkpoint = subject.checkpoint
    if isinstance(checkpoint, AdapterDir | ModelDir):
        if Need.WEIGHTS in rule.needs and any(problem.fatal for problem in checkpoint.weights.problems):
            return "the weights cannot be read; that is reported above"
        reason = _why_no_config(checkpoint) if Need.CONFIG in rule.needs else None
        if reason is None and Need.BASE in rule.needs and isinstance(subject, AdapterSubject):
            reason = why_no_base if subject.base is None else subject.why_no_match
        return _why_not_deep(checkpoint) if reason is None and rule.deep and deep is None else reason
    return None


def _why_not_deep(checkpoint: AdapterDir | ModelDir) -> str | None:
    if isinstance(checkpoint, ModelDir):
        return "a model's weights are read only with --deep"
    nbytes = checkpoint.weights.nbytes
    return f"weights of {size(nbytes)} are read only with --deep" if nbytes > DEEP_BYTES else None


def _why_no_config(checkpoint: AdapterDir | ModelDir) -> str | None:
    config = checkpoint.config
    if config is None or config.problems:
        name = config.path.name if config else "the config"
        return f"{name} is missing or has wrong fields; that is reported above"
    if isinstance(config, AdapterConfig) and config.peft_type != "LORA":
        return f"peft_type is {config.peft_type}, not LORA"
    return None


def _unread(subject: Subject) -> Iterator[Skipped]:
    """Say of the folders whose contents no rule reads that nothing in them was checked."""
    if isinstance(subject.checkpoint, ZeroDir | DcpDir) and not isinstance(subject, zero.ZeroSubject):
        reason = f"the contents of this {subject.checkpoint.kind} are not checked; `lora-tool consolidate` reads them"
        yield Skipped(code="LT402", path=str(subject.checkpoint.root), reason=reason)
