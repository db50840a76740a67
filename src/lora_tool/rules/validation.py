"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    serving,
    training,
    weights,
    zero,
    zero_values,
)
from lora_tool.rules.base_match import match_base
from lora_tool.rules.registry import RULES, Need, Rule, chosen
from lora_tool.rules.runs import FINISHED, Judged, run_table
from lora_tool.rules.sharded import ShardedSubject, sharded_subject
from lora_tool.rules.subject import AdapterSubject, ModelSubject, RunSubject, Server, Subject, bare_path, layers_of

DEEP_BYTES = 256 << 20
"""Rank files up to this size have their values read without being asked; it takes about a tenth of a second."""

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
    servers: Iterable[Server] = (),
    checkpoints: bool = False,
    why_no_base: str = NO_BASE,
) -> Report:
    """Return everything that the rules find in `checkpoint`, from headers; nothing is changed, no code is run.

    `base` switches on the rules that compare with it; `why_no_base` is what the report says without one. `task`
    "reward" expects a reward model with one label, "seq-cls" and "causal-lm" such models; `num_labels` are the rows that
    the head must have. `deep` True reads all weights, False none, None those of adapters. `servers` switches on the
    rules of what serves the adapter unmerged. Rules that could not run are in `skipped`. The checkpoints of a run
    folder are judged one by one, with `checkpoints` also those beside finished weights, and put into one table of
    `runs`. Raises `UnknownRule` for a `select` or `ignore` that means no rule.
    """
    asked = _Asked(
        rules=chosen(select, ignore),
        base=base,
        num_labels=1 if task == "reward" and num_labels is None else num_labels,
        task=task,
        deep=deep,
        servers=frozenset(map(Server, servers)),
        why_no_base=why_no_base,
    )
    if not isinstance(checkpoint, RunDir) and not (checkpoints and checkpoint.folder.checkpoints):
        return _judged(checkpoint, asked)
    inner = [_checkpoint_judged(checkpoint.root / name, asked) for name in checkpoint.folder.checkpoints]
    if isinstance(checkpoint, RunDir):
        opened = tuple(found for _, found in inner if found is not None)
        own = _judge(RunSubject(checkpoint=checkpoint, inner=opened), asked)
        rows = [item for item, _ in inner]
    else:
        own = _judged(checkpoint, asked)
        finished = Judged(root=checkpoint.root, name=FINISHED, state=checkpoint.folder.trainer, report=own)
        rows = [*(item for item, _ in inner), finished]
    table = Report(runs=(run_table(checkpoint.root, rows),))
    return joined([own, *(item.report for item, _ in inner), table])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was asked of one check."""

    rules: tuple[Rule, ...]
    base: ModelDir | None
    num_labels: int | None
    task: str | None
    deep: bool | None
    servers: frozenset[Server]
    why_no_base: str


def _judged(checkpoint: Checkpoint, asked: _Asked) -> Report:
    return joined(
        subject if isinstance(subject, Report) else _judge(subject, asked) for subject in _subjects(checkpoint, asked)
    )


def _checkpoint_judged(path: Path, asked: _Asked) -> tuple[Judged, Checkpoint | None]:
    """Return what is said about one checkpoint of a run, and the checkpoint, where it can be opened."""
    try:
        opened = open_checkpoint(path)
        report = _judged(opened, asked)
    except LoraToolError as error:
        # a folder without weights, or a file that went away while it was read: the others are judged all the same
        report = unopened(str(path), error, asked.rules)
        return Judged(root=path, name=path.name, state=None, report=report), None
    return Judged(root=path, name=path.name, state=opened.folder.trainer, report=report), opened


def _subjects(checkpoint: Checkpoint, asked: _Asked) -> Iterator[Subject | Report]:
    """Yield what is to be judged: the folder, and the rank files in it; what cannot be judged has its report."""
    if isinstance(checkpoint, AdapterDir):
        yield adapter_subject(
            checkpoint, base=asked.base, num_labels=asked.num_labels, task=asked.task, servers=asked.servers
        )
    elif isinstance(checkpoint, ModelDir):
        yield ModelSubject(checkpoint=checkpoint, num_labels=asked.num_labels)
    elif isinstance(checkpoint, ZeroDir | DcpDir):
        yield sharded_subject(checkpoint)
    else:
        yield Subject(checkpoint=checkpoint)
    if isinstance(checkpoint, AdapterDir | ModelDir) and checkpoint.folder.training_state:
        yield from _beside(checkpoint, asked.rules)


def _beside(checkpoint: AdapterDir | ModelDir, rules: tuple[Rule, ...]) -> Iterator[Subject | Report]:
    """Yield the training checkpoint that lies in the folder of an adapter or model, as HF Trainer writes it."""
    try:
        yield sharded_subject(open_sharded(checkpoint.root))
    except NotACheckpoint:  # folders of that name without rank files
        return
    except (CheckpointError, UnsupportedCheckpoint) as error:
        unreadable = Skipped(code="LT402", path=str(checkpoint.root), reason=str(error))
        yield Report(skipped=(unreadable,) if RULES["LT402"] in rules else ())


def unopened(path: str, error: LoraToolError, rules: Iterable[Rule]) -> Report:
    """Return what is said of a folder that cannot be opened: no weights, with the reason."""
    no_weights = RULES["LT115"]
    finding = Finding(
        code=no_weights.code,
        severity=no_weights.severity,
        path=path,
        subject=None,
        message=f"cannot be opened: {error}",
        hint=no_weights.hint,
    )
    return Report(
        subjects=(Checked(path=path, kind="unknown folder", rules=(no_weights.code,)),),
        findings=(finding,) if no_weights in tuple(rules) else (),
    )


def adapter_subject(
    adapter: AdapterDir,
    *,
    base: ModelDir | None = None,
    num_labels: int | None = None,
    task: str | None = None,
    servers: frozenset[Server] = frozenset(),
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
        servers=servers,
    )


def _judge(subject: Subject, asked: _Asked) -> Report:
    path = str(subject.checkpoint.root)
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    ran: list[str] = []
    for rule in asked.rules:
        if not _concerns(rule, subject, asked):
            continue
        reason = _why_not(rule, subject, asked)
        if reason is None:
            findings.extend(rule.run(subject))
            ran.append(rule.code)
        else:
            skipped.append(Skipped(code=rule.code, path=path, reason=reason))
    checked = Checked(path=path, kind=str(subject.checkpoint.kind), rules=tuple(ran))
    return Report(subjects=(checked,), findings=tuple(findings), skipped=tuple(skipped))


def _concerns(rule: Rule, subject: Subject, asked: _Asked) -> bool:
    """Whether the rule is for such a folder, and was asked for."""
    if not isinstance(subject, rule.on) or (Need.SERVER in rule.needs and not asked.servers):
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
