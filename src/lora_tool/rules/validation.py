"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

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
from lora_tool.errors import CheckpointError, LoraToolError, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig
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
    zero_values,
)
from lora_tool.rules.base_match import match_base
from lora_tool.rules.registry import RULES, Need, Rule, chosen
from lora_tool.rules.sharded import ShardedSubject, sharded_subject
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
    elif isinstance(checkpoint, ZeroDir | DcpDir):
        yield sharded_subject(checkpoint)
    else:
        yield Subject(checkpoint=checkpoint)
    if isinstance(checkpoint, AdapterDir | ModelDir) and checkpoint.folder.tags:
        yield from _beside(checkpoint)
    for name in checkpoint.folder.checkpoints if isinstance(checkpoint, RunDir) else ():
        path = checkpoint.root / name
        try:
            inner = open_checkpoint(path)
            yield from list(_subjects(inner, base=base, num_labels=num_labels, task=task))
        except (CheckpointError, UnsupportedCheckpoint) as error:
            yield _unopened(str(path), error)


def _beside(checkpoint: AdapterDir | ModelDir) -> Iterator[Subject | Report]:
    """Yield the training checkpoint that lies in the folder of an adapter or model, as HF Trainer writes it."""
    try:
        yield sharded_subject(open_sharded(checkpoint.root))
    except NotACheckpoint:  # folders of that name without rank files
        return
    except (CheckpointError, UnsupportedCheckpoint) as error:
        yield Report(skipped=(Skipped(code="LT402", path=str(checkpoint.root), reason=str(error)),))


def _unopened(path: str, error: LoraToolError) -> Report:
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
    skipped: list[Skipped] = []
    for rule in rules:
        has_values = bool(subject.tensors) or rule.on is ShardedSubject
        if not isinstance(subject, rule.on) or (rule.deep and (deep is False or not has_values)):
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
    if isinstance(subject, ShardedSubject) and rule.deep:
        return subject.why_no_values or (_too_large(subject.nbytes) if deep is None else None)
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
    return _too_large(checkpoint.weights.nbytes)


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
