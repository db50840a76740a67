"""LT507, LT520 and LT521: which model the adapter was trained on, as its files say, and whether the base is that one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from lora_tool.checkpoints import ModelDir, open_model
from lora_tool.checkpoints.sources import local_folder, moved_to, resolve, source_of
from lora_tool.core.display import from_here
from lora_tool.core.errors import BadConfig, CheckpointError, CorruptFile
from lora_tool.core.hub_names import hub_id_of
from lora_tool.core.report import Severity
from lora_tool.formats import model_config, training_record
from lora_tool.formats.files import inside
from lora_tool.formats.model_config import ModelConfig, read_model_config
from lora_tool.formats.quantised.names import full_precision_name
from lora_tool.formats.training_record import TrainingRecord, read_training_record
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, rule
from lora_tool.rules.engine.subjects import AdapterSubject


@rule("LT507", Severity.ERROR, on=AdapterSubject)
def other_base(subject: AdapterSubject) -> Iterator[Fault | Unchecked]:
    """Not the base that the adapter was trained on.

    What it does: Compares the base with the fingerprint that `lora-tool train` recorded in `lora_tool_train.json`:
    names, dtypes, shapes and samples of all weights.
    Why it matters: Models of one family have the same names and shapes. PEFT silently loads the adapter onto any of
    them, and the result is garbage that looks fluent.
    Example: The adapter was trained on `Qwen2.5-7B-Instruct`, but `--base` is `Qwen2.5-7B`.
    What to do: Give the model that the adapter was trained on: `--base MODEL`. If `--base` is that model converted to
    another dtype, which this rule cannot know: `--ignore LT507`.
    """
    path = _record_of(subject)
    if path is None:
        return
    try:
        record = read_training_record(path)
    except (CorruptFile, BadConfig) as error:
        problem = error.problem
        yield Fault(subject=problem.subject, message=problem.message, path=path, severity=Severity.WARNING)
        return
    base = subject.base
    if base is None and record.base_fingerprint is not None:
        yield Unchecked(reason=subject.why_no_base)
    if base is None or record.base_fingerprint is None or base.is_broken:
        return
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for trained records only

    if not base.tensors or fingerprint(base.weights) == record.base_fingerprint:
        return
    trained = _recorded_model(subject, record)
    if trained is not None and _same_model(trained, base):
        return
    if trained is None and base.config is not None and base.config.quantization:
        reason = f"{base.root} is quantised, and the model that the adapter was trained on{_named(record)} is not on this disk to compare it with"
        yield Unchecked(reason=reason)
        return
    message = f"was not trained on {base.root}{_named(record)}"
    command = ["lora-tool", "validate", "--base", record.base_id or "MODEL", str(subject.checkpoint.root)]
    hint = shlex.join(command) if record.base_id else None
    yield Fault(subject="base.fingerprint", message=message, path=path, hint=hint)


def _recorded_model(subject: AdapterSubject, record: TrainingRecord) -> ModelDir | None:
    """Return the model that the adapter was trained on, if record or config name it and it is on this disk."""
    from lora_tool.formats.manifest import fingerprint

    for name in filter(None, (record.base_id, subject.config.base_model)):
        try:
            model = open_model(resolve(name, near=subject.checkpoint.root).path)
        except CheckpointError:
            continue
        if fingerprint(model.weights) == record.base_fingerprint:
            return model
    return None


@rule("LT520", Severity.WARNING, on=AdapterSubject, needs={Need.NAMES})
def base_not_named(subject: AdapterSubject) -> Iterator[Fault | Unchecked]:
    """The adapter names another base.

    What it does: Compares the base with the one that `adapter_config.json` names, if that one is on this disk, by names,
    shapes and samples of the weights: a copy, a link, the Hub cache, a quantised or a 16-bit form, and one with added
    tokens count as the same model. If it is not on this disk, compares what the adapter's folder says of it: the type
    and the sizes in a `config.json`, the class that it was trained on, and two Hub ids. What no more than a name
    says is reported as such. If nothing contradicts the base, the rule is skipped, unless LT507 can tell.
    Why it matters: Models of one family have the same names and shapes. PEFT silently loads the adapter onto any of
    them, and the result is garbage that looks fluent.
    Example: `base_model_name_or_path` is `Qwen/Qwen2.5-7B-Instruct`, but `--base` is `Qwen/Qwen2.5-7B`.
    What to do: Omit `--base` to use the named model, or correct `base_model_name_or_path`.

    If `--base` is right and the named model cannot be had: `--ignore LT520`.
    """
    base, named = subject.base, subject.config.base_model
    if base is None or not named or base.is_broken:
        return
    given, near, hub_id = source_of(base.root), subject.checkpoint.root, hub_id_of(named)
    try:
        if hub_id is not None and hub_id == given.hub_id and local_folder(named, near) is None:
            return  # without asking the cache, which takes a while
        found = resolve(named, near=near)
        if found.path.samefile(base.root) or (found.hub_id is not None and found.hub_id == given.hub_id):
            return
        same = _same_model(open_model(found.path), base)
        why = f"{found.path} has other tensors"
    except CheckpointError as error:
        same, why = None, str(error)
    if same is False:
        there = f" ({found.path})" if str(found.path) != named else ""
        message = f"is {named}{there}, but the base is {given.hub_id or base.root}, whose weights differ"
        yield Fault(subject="base_model_name_or_path", message=message, path=subject.config_path)
    elif same is None:
        faults = [*_contradictions(subject, base, given.hub_id)]
        yield from faults[:1]
        if not faults and not _is_fingerprinted(subject):
            yield Unchecked(reason=_not_compared(base, why))


def _same_model(one: ModelDir, other: ModelDir) -> bool | None:
    from lora_tool.rules.shared.same_model import same_model  # slow to import, and for two bases only

    return same_model(one, other)


_WHEN_NOT_HERE = "give the model that the adapter was trained on: `--base MODEL`; if this is it: `--ignore LT520`"
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_CLASS = re.compile(r"(?P<family>\w+?)(?:For[A-Z]\w*|LMHeadModel|Model)\Z")
_FAMILIES = ("gemma", "llama", "mistral", "qwen")
"""Families whose models are called so. Of others (Phi, Falcon, Yi) there are many in Llama's architecture."""


def _contradictions(subject: AdapterSubject, base: ModelDir, hub_id: str | None) -> Iterator[Fault]:
    """Yield what contradicts that the base, of this id on the Hub, is the named one: the adapter's files, then names."""
    config, folder = base.config, subject.checkpoint.folder
    if config is None:
        return
    if model_config.FILE_NAME in folder.files and inside(folder.root, folder.root / model_config.FILE_NAME):
        yield from _of_config_beside(folder.root / model_config.FILE_NAME, config)
    trained, own = subject.config.trained_class or "", next(iter(config.architectures), "")
    families = [found["family"] for name in (trained, own) if (found := _CLASS.match(name))]
    plain = not config.custom_code and len(_types(config.raw)) == 1
    if plain and len(families) > 1 and not _is_part(*families):
        message = f"names {trained}, but the base is a {own}"
        yield Fault(subject="auto_mapping", message=message, path=subject.config_path, hint=_WHEN_NOT_HERE)
    named = subject.config.base_model or ""
    if other := _other_by_name(named, config, hub_id):
        yield Fault(subject="base_model_name_or_path", message=other, path=subject.config_path, hint=_WHEN_NOT_HERE)


def _of_config_beside(path: Path, config: ModelConfig) -> Iterator[Fault]:
    """Compare the `config.json` beside the adapter with the base's."""
    try:
        beside = read_model_config(path)
    except (CorruptFile, BadConfig):  # LT113 reports it
        return
    mine, its = _types(beside.raw), _types(config.raw)
    if mine and its and not any(_is_part(one, other) for one in mine for other in its):
        message = f"is {beside.model_type}, but the base's is {config.model_type}"
        yield Fault(subject="model_type", message=message, path=path, hint=_WHEN_NOT_HERE)
    for name in _SIZES:
        size, held = (_text(each.raw).get(name) for each in (beside, config))
        if type(size) is int and type(held) is int and size != held:
            message = f"is {size:,}, but the base's is {held:,}"
            yield Fault(subject=name, message=message, path=path, hint=_WHEN_NOT_HERE)


def _types(config: Mapping[str, Any]) -> set[str]:
    """Return the model types of a config and of those in it."""
    tables = [config, *(value for value in config.values() if isinstance(value, dict))]
    named = (table.get("model_type") for table in tables)
    return {each.replace("-", "_") for each in named if isinstance(each, str)}


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _is_part(one: str, other: str) -> bool:
    """Return whether one name is the other, or goes on where a word of it ends: `gemma3` and `gemma3_text`."""
    short, long = sorted((one, other), key=len)
    after = long[len(short) : len(short) + 1]
    return long.startswith(short) and (not after or after == "_" or after.isupper())


def _other_by_name(named: str, config: ModelConfig, hub_id: str | None) -> str | None:
    """Return how the names of both, or the base's type, say that it is not the named model; None where they do not."""
    hub_name = hub_id_of(named) or source_of(Path(named)).hub_id
    if hub_name and hub_id and _plain_name(hub_name) != _plain_name(hub_id):
        return f"is {named}, but the base is {hub_id}"
    word, types = _plain_name(hub_name or named), _types(config.raw)
    by_name = {family for family in _FAMILIES if family in word}
    own = {family for family in _FAMILIES if any(family in each for each in types)}
    if not (by_name and own) or by_name & own:
        return None
    return f"is {named}, by its name of the {min(by_name)} family, but the base is of type {config.model_type}"


def _plain_name(name: str) -> str:
    """Return a model's name without its owner and the words for its quantised form: mirrors keep the rest."""
    last = PureWindowsPath(name).name
    return (full_precision_name(last) or last).lower().removeprefix("meta-").removesuffix("-hf")


@rule("LT521", Severity.INFO, on=AdapterSubject)
def base_moved(subject: AdapterSubject) -> Iterator[Fault]:
    """The path of the base in the adapter's config does not exist.

    What it does: If `base_model_name_or_path` is a path that does not exist and no `--base` is given, looks for a model
    in a folder of that name: in or beside the adapter's folder, beside its parent, or in the working directory.
    Why it matters: PEFT records the path as it was typed for training. On another machine, or from another folder, that
    path does not exist, and loading the adapter fails although the base is there.
    Example: `base_model_name_or_path` is `/workspace/llama-base`, but `llama-base` lies beside the adapter.
    What to do: Write the path into `adapter_config.json`: `lora-tool validate ADAPTER --fix` does it if the model fits.
    Or give the base each time: `--base MODEL`.
    """
    named, root = subject.config.base_model, subject.checkpoint.root
    if subject.base is not None or not named:
        return
    try:
        lost = hub_id_of(named) is None and local_folder(named, root) is None
    except CheckpointError:  # it means two folders
        return
    moved = moved_to(named, root) if lost else None
    if moved is not None:
        found = from_here(moved)
        message = f"is {named}, which holds no model; one of that name is at {found}"
        hint = (
            f"if it is the same model: lora-tool validate --fix {shlex.quote(str(root))}, or lora-tool validate "
            f"{shlex.quote(str(root))} --base {shlex.quote(str(found))}"
        )
        yield Fault(subject="base_model_name_or_path", message=message, path=subject.config_path, hint=hint)


def _not_compared(base: ModelDir, why: str) -> str:
    """Return that the base was not compared with the one that the adapter names, and why."""
    return f"whether {base.root} is the base that the adapter names was not checked ({why}); if it is: --ignore LT520"


def _is_fingerprinted(subject: AdapterSubject) -> bool:
    """Whether `lora-tool train` recorded the base's fingerprint, so that LT507 compares the base."""
    path = _record_of(subject)
    try:
        return path is not None and read_training_record(path).base_fingerprint is not None
    except (CorruptFile, BadConfig):
        return False


def _record_of(subject: AdapterSubject) -> Path | None:
    """Return the record in the adapter's folder, or in that of the run that it is a checkpoint of."""
    root = subject.checkpoint.root
    for folder in (root, root.resolve().parent) if subject.checkpoint.folder.trainer else (root,):
        path = folder / training_record.FILE_NAME
        if path.is_file() and inside(folder, path):
            return path
    return None


def _named(record: TrainingRecord) -> str:
    if record.base_id is None:
        return ""
    revision = f"@{record.base_revision}" if record.base_revision else ""
    return f": {record.base_id}{revision}"
