"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from lora_tool.formats.files import inside
from lora_tool.progress import Watch
from lora_tool.report import Checked, Finding, Report, Skipped
from lora_tool.report.model import joined
from lora_tool.rules import (  # noqa: F401 - importing a family registers its rules
    adapter_config,
    adapter_layers,
    adapter_names,
    against_base,
    base_hazards,
    containers,
    head,
    merged_headers,
    merged_outputs,
    merged_values,
    model_head,
    serving,
    training,
    vocabulary,
    weights,
    zero,
    zero_values,
)
from lora_tool.rules.base_match import match_base
from lora_tool.rules.merged_subject import MergedSubject
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
    adapters: Sequence[AdapterDir] = (),
    num_labels: int | None = None,
    task: str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    deep: bool | None = None,
    servers: Iterable[Server] = (),
    checkpoints: bool = False,
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    why_no_base: str = NO_BASE,
) -> Report:
    """Return everything that the rules find in `checkpoint`, from headers; nothing is changed, no code is run.

    `base` switches on the rules that compare with it; `why_no_base` is what the report says without one. `adapters` are
    those that a model was merged with: with `base` it is compared with what they give. `task`
    "reward" expects a reward model with one label, "seq-cls" and "causal-lm" such models; `num_labels` are the rows that
    the head must have. `deep` True reads all weights, False none, None those of adapters. `servers` switches on the
    rules of what serves the adapter unmerged. Rules that could not run are in `skipped`. The checkpoints of a run
    folder are judged one by one, with `checkpoints` also those beside finished weights, and put into one table of
    `runs`. `progress` is called with the bytes that were read, where they are many;
    `watch` is asked, with their number, for what is told of the bytes of rank files. Raises `UnknownRule` for a `select` or `ignore` that means no rule.
    """
    asked = _Asked(
        rules=chosen(select, ignore),
        base=base,
        adapters=tuple(adapters),
        num_labels=1 if task == "reward" and num_labels is None else num_labels,
        task=task,
        deep=deep,
        servers=frozenset(map(Server, servers)),
        progress=progress,
        watch=watch,
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
    adapters: tuple[AdapterDir, ...]
    num_labels: int | None
    task: str | None
    deep: bool | None
    servers: frozenset[Server]
    progress: Callable[[int], None] | None
    watch: Watch | None
    why_no_base: str


def _judged(checkpoint: Checkpoint, asked: _Asked) -> Report:
    return joined(
        subject if isinstance(subject, Report) else _judge(subject, asked) for subject in _subjects(checkpoint, asked)
    )


def _checkpoint_judged(path: Path, asked: _Asked) -> tuple[Judged, Checkpoint | None]:
    """Return what is said about one checkpoint of a run, and the checkpoint, where it can be opened."""
    if not inside(path.parent, path):
        report = unopened(str(path), "is a link out of the run's folder", asked.rules, code="LT112")
        return Judged(root=path, name=path.name, state=None, report=report), None
    try:
        opened = open_checkpoint(path)
        if isinstance(opened, RunDir):  # a link to the run itself would never end
            raise NotACheckpoint(f"{path} is a run with checkpoints in it, and no checkpoint")
        report = _judged(opened, asked)
    except LoraToolError as error:
        # a folder without weights, or a file that went away while it was read: the others are judged all the same
        report = unopened(str(path), f"cannot be opened: {error}", asked.rules)
        return Judged(root=path, name=path.name, state=None, report=report), None
    return Judged(root=path, name=path.name, state=opened.folder.trainer, report=report), opened


def _subjects(checkpoint: Checkpoint, asked: _Asked) -> Iterator[Subject | Report]:
    """Yield what is to be judged: the folder, and the rank files in it; what cannot be judged has its report."""
    if isinstance(checkpoint, AdapterDir):
        yield adapter_subject(
            checkpoint, base=asked.base, num_labels=asked.num_labels, task=asked.task, servers=asked.servers
        )
    elif isinstance(checkpoint, ModelDir) and asked.base is not None and asked.adapters:
        # the planner, only for merged models: importing it takes a fifth of the time of a check
        from lora_tool.plan.provenance import Provenance  # noqa: PLC0415
        from lora_tool.rules.merged_bytes import merged_subject  # noqa: PLC0415

        provenance = Provenance(merged=checkpoint, base=asked.base, adapters=asked.adapters)
        yield merged_subject(provenance, num_labels=asked.num_labels, task=asked.task, read=asked.deep is not False)
    elif isinstance(checkpoint, ModelDir):
        yield ModelSubject(checkpoint=checkpoint, num_labels=asked.num_labels, task=asked.task)
    elif isinstance(checkpoint, ZeroDir | DcpDir):
        yield sharded_subject(checkpoint, watch=asked.watch)
    else:
        yield Subject(checkpoint=checkpoint)
    if isinstance(checkpoint, AdapterDir | ModelDir) and checkpoint.folder.training_state:
        yield from _beside(checkpoint, asked)


def _beside(checkpoint: AdapterDir | ModelDir, asked: _Asked) -> Iterator[Subject | Report]:
    """Yield the training checkpoint that lies in the folder of an adapter or model, as HF Trainer writes it."""
    try:
        yield sharded_subject(open_sharded(checkpoint.root), watch=asked.watch)
    except NotACheckpoint:  # folders of that name without rank files
        return
    except (CheckpointError, UnsupportedCheckpoint) as error:
        unreadable = Skipped(code="LT402", path=str(checkpoint.root), reason=str(error))
        yield Report(skipped=(unreadable,) if RULES["LT402"] in asked.rules else ())


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
    """Return what the adapter's rules look at: its layers, and its match with the base where names can tell."""
    bare = {module: bare_path(module) for module in {key.module for key in adapter.keys.values()}}
    paths = {name: bare[key.module] for name, key in adapter.keys.items()}
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


def judge(subject: Subject, rules: Iterable[Rule]) -> Report:
    """Return what the rules find in one subject that was put together elsewhere, from headers and what it brings."""
    return _judge(
        subject,
        _Asked(
            rules=tuple(rules),
            base=None,
            adapters=(),
            num_labels=None,
            task=None,
            deep=None,
            servers=frozenset(),
            progress=None,
            watch=None,
            why_no_base=NO_BASE,
        ),
    )


def _judge(subject: Subject, asked: _Asked) -> Report:
    subject.scans.progress = asked.progress
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
    checked = Checked(path=path, kind=subject.kind, rules=tuple(ran))
    return Report(subjects=(checked,), findings=tuple(findings), skipped=tuple(skipped))


def _concerns(rule: Rule, subject: Subject, asked: _Asked) -> bool:
    """Whether the rule is for such a folder, and was asked for."""
    if not isinstance(subject, rule.on) or (Need.SERVER in rule.needs and not asked.servers):
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
