"""LT507 and LT508: an adapter that fits its base by names and shapes, and is wrong for it all the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from lora_tool.errors import BadConfig, CorruptFile
from lora_tool.formats import training_record
from lora_tool.formats.files import inside
from lora_tool.formats.training_record import TrainingRecord, read_training_record
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch
from lora_tool.rules.shared import targeting

_ALL = frozenset({Need.WEIGHTS, Need.CONFIG, Need.BASE})


@rule("LT507", Severity.ERROR, on=AdapterSubject)
def other_base(subject: AdapterSubject) -> Iterator[Fault]:
    """Another base than the one that was trained on.

    ## What it does
    Compares the base with the fingerprint that `lora-tool train` recorded in `lora_tool_train.json`: names, types,
    shapes and samples of all weights.

    ## Why it matters
    Models of one family have the same names and shapes. PEFT loads the adapter onto any of them without a word, and
    what comes out is garbage that looks fluent.

    ## Example
    The adapter was trained on `Qwen2.5-7B-Instruct` and `--base` is `Qwen2.5-7B`.

    ## What to do
    Give the model that the adapter was trained on: `--base MODEL`. The same model converted to another type is another
    one to this rule: `--ignore LT507`.
    """
    path = _record_of(subject)
    if path is None:
        return
    try:
        record = read_training_record(path)
    except (CorruptFile, BadConfig) as error:
        problem = error.problem
        yield Fault(subject=problem.subject, message=problem.message, path=str(path), severity=Severity.WARNING)
        return
    base = subject.base
    if base is None or record.base_fingerprint is None or any(problem.fatal for problem in base.problems):
        return
    from lora_tool.formats.fingerprint import fingerprint  # noqa: PLC0415 - slow to import, and for trained records only

    if base.tensors and fingerprint(base.weights) != record.base_fingerprint:
        message = f"was trained on another base than {base.root}{_named(record)}"
        command = ["lora-tool", "validate", "--base", record.base_id or "MODEL", str(subject.checkpoint.root)]
        hint = shlex.join(command) if record.base_id else None
        yield Fault(subject="base.fingerprint", message=message, path=str(path), hint=hint)


def _record_of(subject: AdapterSubject) -> Path | None:
    """Return the record beside the adapter, or beside the run that it is a checkpoint of."""
    root = subject.checkpoint.root
    folders = [root, root.resolve().parent] if subject.checkpoint.folder.trainer else [root]
    paths = (folder / training_record.FILE_NAME for folder in folders)
    return next((path for path in paths if path.is_file() and inside(path.parent, path)), None)


def _named(record: TrainingRecord) -> str:
    if record.base_id is None:
        return ""
    revision = f"@{record.base_revision}" if record.base_revision else ""
    return f": {record.base_id}{revision}"


@rule("LT508", Severity.INFO, on=AdapterSubject, needs=_ALL)
def lora_on_tied_end(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on one end of tied embeddings.

    ## What it does
    Looks for LoRA on the output layer or the embeddings of a base that has one matrix for both.

    ## Why it matters
    Unmerged, the adapter works. PEFT's merge changes the shared matrix, and with it the end that was not trained;
    `lora-tool merge` refuses.

    ## Example
    `target_modules` names `lm_head`, and the base's config has `"tie_word_embeddings": true`.

    ## What to do
    Serve it unmerged; next time train on a base that was saved with `tie_word_embeddings=False`.
    """
    match = subject.match
    if not isinstance(match, BaseMatch) or subject.is_reward() or not _is_tied(match):
        return
    for layer in subject.layers:
        output = f"{match.name(layer.target)}.weight" in match.arch.causal_only
        if output or (layer.embedding and targeting.is_end(layer.target)):
            tensor = layer.any_tensor
            message = (
                f"adapts `{layer.target}`, which {match.base.root} ties to the other end: it cannot be merged exactly"
            )
            yield Fault(subject=tensor.name, message=message)


def _is_tied(match: BaseMatch) -> bool:
    config = match.base.config
    outputs = [name for name in match.arch.causal_only if name.endswith(".weight")]
    absent = bool(outputs) and outputs[0] not in match.base.tensors
    return absent or (config is not None and bool(config.tie_word_embeddings))
