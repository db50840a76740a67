"""Saving a trained adapter: beside its place, judged by the rules of `validate`, and moved there when it is good."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lora_tool.adapter.view import view_of
from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, open_checkpoint
from lora_tool.errors import CheckpointError
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.formats.training_record import FILE_NAME
from lora_tool.report import Finding, Severity
from lora_tool.rules.shared.heads import has_labels, head_weight
from lora_tool.sources import resolve
from lora_tool.tensors import StoredTensor
from lora_tool.train.methods import Method
from lora_tool.train.traps import trap
from lora_tool.validation.validating import validate
from lora_tool.version import __version__

REJECTED = "rejected"
SUPERSEDED = "superseded"
_STAGING = ".lora-tool-saving"
_WEIGHTS = ("adapter_model*", "model*.safetensors*", "pytorch_model*.bin*")
_DESCRIBING = ("adapter_config.json", "config.json", FILE_NAME)
"""Files beside the weights that say what those are."""


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weights files that lie directly in `folder`: those that make it look finished."""
    return sorted(path.name for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file())


def clear_output(output: Path) -> list[str]:
    """Move weights of an earlier run into `superseded/`, so that a run that fails leaves none that look like its own.

    Returns their names. What a run that died while saving left unfinished is removed.
    """
    shutil.rmtree(staging(output), ignore_errors=True)
    names = weight_files(output)
    if names:
        place = free_name(output / SUPERSEDED)
        place.mkdir()
        _move((output / name for name in (*_DESCRIBING, *names) if (output / name).is_file()), place)
    return names


def _move(paths: Iterable[Path], folder: Path) -> None:
    """Move files and folders into `folder`, in their order, each in the place of one of its name."""
    for path in paths:
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)


def free_name(path: Path) -> Path:
    """Return the path, or the first of ``path-2``, ``path-3``, … that is not taken."""
    names = (path.with_name(f"{path.name}-{number}") if number > 1 else path for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def staging(output: Path) -> Path:
    """Return the folder in which a result is saved before it is judged."""
    return output / _STAGING


def judge_saved(folder: Path, method: Method) -> list[Finding]:
    """Return what `lora-tool validate` finds in a saved result, errors first; every value of an adapter is read."""
    try:
        opened = open_checkpoint(folder)
    except CheckpointError as wrong:
        return [trap("bad-result", wrong.hint or "lora-tool validate", where=folder.name, why=wrong)]
    task = "reward" if method.name == "reward" else None
    found = validate(opened, task=task, deep=True if isinstance(opened, AdapterDir) else None).findings
    return sorted(found, key=lambda item: -item.severity.weight)


_LOST = frozenset({"LT206", "LT216", "LT227", "LT301", "LT302", "LT416"})
"""What says that trained weights are not in a checkpoint, whatever else is still being written by other ranks."""


def lost_in(checkpoint: Path) -> Finding | None:
    """Return what says that the weights trained are not in a checkpoint that was saved just now, None if nothing does."""
    try:
        findings = validate(checkpoint, select=_LOST).findings
    except CheckpointError:  # other ranks may not have written their files yet
        return None
    return next((found for found in findings if found.severity is Severity.ERROR), None)


def settle(output: Path, findings: list[Finding]) -> Path:
    """Move what was saved to where it belongs: into `output`, or with an error among the findings to `rejected/`."""
    place = staging(output)
    if any(item.severity is Severity.ERROR for item in findings):
        return place.rename(free_name(output / REJECTED))
    weights = weight_files(place)
    # the weights last: a folder without them does not look finished
    _move(sorted(place.iterdir(), key=lambda path: path.name in weights), output)
    place.rmdir()
    return output


def record(
    folder: Path, method: Method, *, base: str | None, revision: str | None, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Write beside the adapter what it was trained on and as, and return it: merge then needs no flags.

    It holds no path of this machine: a base is known again by its fingerprint, and by its Hub id if it has one.
    """
    classifies = method.task_type == "SEQ_CLS"
    versions = {"lora-tool": __version__}
    for package in ("trl", "transformers", "peft", "accelerate", "datasets", "torch", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    table: dict[str, Any] = {
        "schema_version": 1,
        "method": method.name,
        "task_type": method.task_type,
        "model_class": "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM",
        **_head(open_checkpoint(folder)),
        "base": _base(base, revision) if base else {},
        "versions": versions,
        **run,
    }
    (folder / FILE_NAME).write_text(json.dumps(table, indent=2, default=str) + "\n", encoding="utf-8")
    return table


def _head(opened: Checkpoint) -> dict[str, Any]:
    """Return module and rows of the last layer of the saved classification head, None where there is none."""
    tensors: Mapping[str, StoredTensor] = {}
    if isinstance(opened, ModelDir) and has_labels(opened):
        tensors = opened.tensors
    elif isinstance(opened, AdapterDir) and (opened.config is None or opened.config.task_type == "SEQ_CLS"):
        tensors = view_of(opened).saved
    weight = head_weight(tensors)
    name = next((name.removesuffix(".weight") for name, tensor in tensors.items() if tensor is weight), None)
    return {"head": name, "num_labels": weight.shape[0] if weight else None}


def _base(base: str, revision: str | None) -> dict[str, Any]:
    try:
        source = resolve(base, revision=revision)
        opened = open_checkpoint(source.path)
    except CheckpointError:
        return {"hub_id": None if Path(base).exists() else base, "revision": revision, "fingerprint": None}
    weights = opened.weights if isinstance(opened, ModelDir) else None
    known = fingerprint(weights) if weights is not None and weights.tensors else None
    return {"hub_id": source.hub_id, "revision": source.revision, "fingerprint": known}


def clean_card(folder: Path, base: str | None) -> bool:
    """Take the local path of the base model out of the README that TRL and PEFT write; return whether it was changed.

    The lines of metadata that name it go, its last name stays in the prose. A base from the Hub stays named as it is.
    """
    path = folder / "README.md"
    if not path.is_file() or not base or not (Path(base).is_dir() or base.startswith(("/", "./", "../", "~"))):
        return False
    text = path.read_text(encoding="utf-8")
    name = Path(base).name or "a local model"
    spelled = "|".join(
        sorted(map(re.escape, {base, str(Path(base).resolve()), base.rstrip("/")}), key=len, reverse=True)
    )
    metadata = rf"^(base_model(_relation)?:|- *['\"]?base_model:(adapter|finetune):) *['\"]?({spelled})['\"]? *\n"
    cleaned = re.sub(metadata, "", text, flags=re.MULTILINE)
    link = rf"\[({spelled}|None)\]\(https://huggingface\.co/({spelled}|None)\)"
    cleaned = re.sub(link, lambda _: f"`{name}`", cleaned)
    cleaned = re.sub(rf"(https://huggingface\.co/)?({spelled})", lambda _: name, cleaned)
    if cleaned != text:
        path.write_text(cleaned, encoding="utf-8")
    return cleaned != text
