"""The findings that can be fixed mechanically: where files beside the weights say what another of them must say.

Nothing is guessed: a finding has a fix where the folder itself, or what the user asked for, leaves one right value. All
others keep their hint. Weights are never changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.targeting import trained_for
from lora_tool.adapters.view import drift, view_of
from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, open_checkpoint
from lora_tool.checkpoints.sources import moved_to
from lora_tool.core.errors import CheckpointError, LoraToolError
from lora_tool.core.keys import PREFIX
from lora_tool.core.report import Finding, Report, Severity
from lora_tool.formats.generation_config import ends_of, read_generation_config
from lora_tool.formats.tokenizer import read_tokenizer, turn_end
from lora_tool.models.ends import CLASSIFICATION_TASKS, PEFT_CLASSIFIERS, head_of
from lora_tool.plans.base.task import Task
from lora_tool.rules.adapter.lt3_head import head_weight
from lora_tool.rules.changes import Change, FieldChange, FileDiff, NameChange, file_changes, may_change
from lora_tool.rules.model.lt3_model_ends import embedding_rows
from lora_tool.verification.validating import validate

_COMPARES = frozenset({"LT501", "LT502"})
"""Rules without which nobody has looked whether the adapter fits its base."""
_GENERIC = "LABEL_"
"""How transformers begins the names of labels that nobody named."""


class Fixes(Struct, frozen=True, kw_only=True):
    """The changes that answer findings, and where each file is kept as it was."""

    changes: tuple[FileDiff, ...]
    kept: tuple[Path, ...] = ()
    """One for each change, where they were written."""


def fix(report: Report, *, task: Task | str | None = None, apply: bool = False) -> Fixes:
    """Return the fixes of what the report found, written if `apply`. Raises `ExecutionError`."""
    changes = planned_changes(report, task=None if task is None else str(task))
    if not apply:
        return Fixes(changes=changes)
    from lora_tool.execution.fixing import apply_change  # only where something is written

    return Fixes(changes=changes, kept=tuple(map(apply_change, changes)))


def planned_changes(report: Report, *, task: str | None = None) -> tuple[FileDiff, ...]:
    """Return what would be written to answer those findings of the report that can be fixed mechanically.

    `task` is what the user asked for: "reward" decides what a head is that its name leaves open. Nothing is written.
    """
    return file_changes(_changes(report, task))


def _changes(report: Report, task: str | None) -> Iterator[tuple[str, Change]]:
    found: dict[tuple[Path, str], list[Finding]] = {}
    for finding in report.findings:
        if finding.code in _FIXES:
            path = Path(finding.path)
            found.setdefault((path if path.is_dir() else path.parent, finding.code), []).append(finding)
    for (folder, code), findings in found.items():
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError:
            continue
        for change in _FIXES[code](checkpoint, findings, task):
            if may_change(change.path):
                yield code, change


def _labels(checkpoint: Checkpoint, findings: Sequence[Finding], _task: str | None) -> Iterator[Change]:
    """Yield as many labels as the head has rows. Names that somebody gave are kept: which are meant, nobody can tell."""
    config = checkpoint.config if isinstance(checkpoint, ModelDir) else None
    weight = head_weight(checkpoint.tensors) if isinstance(checkpoint, ModelDir) else None
    if config is None or weight is None or all(finding.path != str(config.path) for finding in findings):
        return
    said = config.raw.get("id2label")
    names = said.values() if isinstance(said, dict) else ()
    rows = range(weight.shape[0])
    if len(names) != len(rows):
        if any(not str(name).startswith(_GENERIC) for name in names):
            return
        yield FieldChange(path=config.path, keys=("id2label",), value={str(row): f"{_GENERIC}{row}" for row in rows})
        yield FieldChange(path=config.path, keys=("label2id",), value={f"{_GENERIC}{row}": row for row in rows})
    if "num_labels" in config.raw:
        yield FieldChange(path=config.path, keys=("num_labels",), value=len(rows))


def _pad_token_id(checkpoint: Checkpoint, _findings: Sequence[Finding], _task: str | None) -> Iterator[Change]:
    """Yield the id of the pad token that the tokenizer beside the model names, if the embeddings have a row for it."""
    config = checkpoint.config if isinstance(checkpoint, ModelDir) else None
    if config is None or not isinstance(checkpoint, ModelDir) or config.raw.get("text_config"):
        return
    token = read_tokenizer(checkpoint.root, checkpoint.folder.files).special("pad_token")
    rows = max(embedding_rows(checkpoint.tensors).values(), default=0)
    if token is not None and token.id < rows:
        yield FieldChange(path=config.path, keys=("pad_token_id",), value=token.id)


def _turn_end(checkpoint: Checkpoint, findings: Sequence[Finding], _task: str | None) -> Iterator[Change]:
    if not isinstance(checkpoint, ModelDir) or checkpoint.config is None:
        return
    ends = ends_of(checkpoint.config, read_generation_config(checkpoint.root))
    end = turn_end(read_tokenizer(checkpoint.root, checkpoint.folder.files))
    if end is not None:
        yield FieldChange(path=Path(findings[0].path), keys=("eos_token_id",), value=[*ends, end.token.id])


def _task_type(checkpoint: Checkpoint, findings: Sequence[Finding], task: str | None) -> Iterator[Change]:
    """Yield what the class that was trained on says, else who asks, else a head of one row, which is a reward's."""
    if not isinstance(checkpoint, AdapterDir) or checkpoint.config is None:
        return
    head = head_weight(view_of(checkpoint).saved)
    if head is None or all(finding.severity is Severity.INFO for finding in findings):
        return
    said = trained_for(replace(checkpoint.config, task_type=None))
    asked = "SEQ_CLS" if task in ("reward", "seq-cls") or head.shape[0] == 1 else None
    right = said if said in CLASSIFICATION_TASKS else asked
    if right is not None and asked in (None, right) and head_of(head.name, PEFT_CLASSIFIERS):
        yield FieldChange(path=checkpoint.config.path, keys=("task_type",), value=right)


def _names(checkpoint: Checkpoint, _findings: Sequence[Finding], _task: str | None) -> Iterator[Change]:
    """Yield names without what torch.compile, FSDP and DistributedDataParallel put into them.

    Where PEFT's own beginning is lost, its place has to be found out: that is what `convert` does.
    """
    if not isinstance(checkpoint, AdapterDir):
        return
    paths = view_of(checkpoint).paths
    right = {name: replace(key, module=paths[key.module]).canonical for name, key in checkpoint.keys.items()}
    count = Counter(right.values())
    for name, new in right.items():
        # two tensors for one name: which is meant, nobody can tell
        if PREFIX in name and drift(checkpoint.keys[name]) and count[new] == 1:
            yield NameChange(path=checkpoint.tensors[name].path, old=name, new=new)


def _total_size(checkpoint: Checkpoint, findings: Sequence[Finding], _task: str | None) -> Iterator[Change]:
    if isinstance(checkpoint, AdapterDir | ModelDir):
        keys = ("metadata", "total_size")
        yield FieldChange(path=Path(findings[0].path), keys=keys, value=checkpoint.weights.nbytes)


def _base(checkpoint: Checkpoint, _findings: Sequence[Finding], _task: str | None) -> Iterator[Change]:
    """Yield the whole path of the base, from which PEFT loads it wherever it runs; nothing if it does not fit."""
    if not isinstance(checkpoint, AdapterDir) or checkpoint.config is None or not checkpoint.config.base_model:
        return
    found = moved_to(checkpoint.config.base_model, checkpoint.root)
    if found is None:
        return
    try:
        report = validate(checkpoint, base=found, select=("LT5",))
    except LoraToolError:
        return  # it cannot be opened as a model
    compared = _COMPARES.isdisjoint(skipped.code for skipped in report.skipped)
    if compared and not report.at_least(Severity.WARNING):
        keys = ("base_model_name_or_path",)
        yield FieldChange(path=checkpoint.config.path, keys=keys, value=str(found.resolve()))


_Fix = Callable[[Checkpoint, Sequence[Finding], str | None], Iterator[Change]]
_FIXES: Mapping[str, _Fix] = {
    "LT111": _total_size,
    "LT211": _names,
    "LT304": _task_type,
    "LT306": _pad_token_id,
    "LT308": _labels,
    "LT309": _pad_token_id,
    "LT320": _turn_end,
    "LT521": _base,
}
"""Rule → what answers its findings."""
