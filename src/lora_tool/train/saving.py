"""Saving a trained adapter: beside its place, judged by the rules of `validate`, and moved there when it is good."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lora_tool.adapter.view import view_of
from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, open_checkpoint
from lora_tool.errors import CheckpointError
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.formats.training_record import FILE_NAME
from lora_tool.formats.weights import Weights
from lora_tool.report import Finding, Severity
from lora_tool.rules.shared.heads import has_labels, head_weight
from lora_tool.sources import Source, resolve
from lora_tool.tensors import StoredTensor
from lora_tool.train.codes import error
from lora_tool.train.methods import Method
from lora_tool.validation.validating import validate
from lora_tool.version import __version__

REJECTED = "rejected"
SUPERSEDED = "superseded"
_STAGING = ".lora-tool-saving"
_WEIGHTS = ("adapter_model*", "model*.safetensors*", "pytorch_model*.bin*")


def weight_files(folder: Path) -> list[Path]:
    """Return the weights files that lie directly in `folder`: those that make it look finished."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file())


def set_aside(output: Path) -> list[str]:
    """Move weights of an earlier run into `superseded/`, so that a run that fails leaves none that look like its own."""
    names = [path.name for path in weight_files(output)]
    if names:
        place = free_name(output / SUPERSEDED)
        place.mkdir()
        for name in (*names, "adapter_config.json", "config.json", FILE_NAME):
            if (output / name).is_file():
                (output / name).rename(place / name)
    return names


def free_name(path: Path) -> Path:
    """Return the path, or the first of ``path-2``, ``path-3``, … that is not taken."""
    names = (path.with_name(f"{path.name}-{number}") if number > 1 else path for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def staging(output: Path) -> Path:
    """Return the folder in which a result is saved before it is judged."""
    return output / _STAGING


def clear_staging(output: Path) -> None:
    """Remove what a run that died while saving left unfinished."""
    shutil.rmtree(staging(output), ignore_errors=True)


def judge(folder: Path, method: Method) -> list[Finding]:
    """Return what `lora-tool validate` finds in a saved result, errors first; every value of an adapter is read."""
    try:
        opened = open_checkpoint(folder)
    except CheckpointError as wrong:
        return [error("bad-result", str(wrong), hint=wrong.hint or "lora-tool validate", where=folder.name)]
    adapter = isinstance(opened, AdapterDir)
    task = "reward" if method.name == "reward" else None
    found = validate(opened, task=task, deep=True if adapter else None).findings
    return sorted(found, key=lambda item: -item.severity.weight)


def settle(output: Path, findings: list[Finding]) -> Path:
    """Move what was saved to where it belongs: into `output`, or with an error among the findings to `rejected/`."""
    place = staging(output)
    if any(item.severity is Severity.ERROR for item in findings):
        return place.rename(free_name(output / REJECTED))
    weights = {path.name for path in weight_files(place)}
    # the weights last: a folder without them does not look finished
    for path in sorted(place.iterdir(), key=lambda path: path.name in weights):
        target = output / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    place.rmdir()
    return output


def record(
    folder: Path, method: Method, *, base: str | None, revision: str | None, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Write beside the adapter what it was trained on and as, and return it: merge then needs no flags.

    It holds no path of this machine: a base is known again by its fingerprint, and by its Hub id if it has one.
    """
    opened = open_checkpoint(folder)
    head = _head(opened)
    table: dict[str, Any] = {
        "schema_version": 1,
        "method": method.name,
        "task_type": method.task_type,
        "model_class": method.model_class,
        "head": None if head is None else head[0],
        "num_labels": None if head is None else head[1],
        "base": _base(base, revision),
        "versions": _versions(),
        **run,
    }
    (folder / FILE_NAME).write_text(json.dumps(table, indent=2, default=str) + "\n", encoding="utf-8")
    return table


def _versions() -> dict[str, str]:
    versions = {"lora-tool": __version__}
    for package in ("trl", "transformers", "peft", "accelerate", "datasets", "torch", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _head(opened: Checkpoint) -> tuple[str, int] | None:
    """Return module and rows of the last layer of the saved classification head, None where there is none."""
    tensors: Mapping[str, StoredTensor] = {}
    if isinstance(opened, ModelDir) and has_labels(opened):
        tensors = opened.tensors
    elif isinstance(opened, AdapterDir) and (opened.config is None or opened.config.task_type == "SEQ_CLS"):
        tensors = view_of(opened).saved
    weight = head_weight(tensors)
    return next(((name.removesuffix(".weight"), it.shape[0]) for name, it in tensors.items() if it is weight), None)


def _base(base: str | None, revision: str | None) -> dict[str, Any]:
    if base is None:
        return {}
    try:
        source: Source = resolve(base, revision=revision)
        opened = open_checkpoint(source.path)
    except CheckpointError:
        return {"hub_id": None if Path(base).exists() else base, "revision": revision, "fingerprint": None}
    weights: Weights | None = opened.weights if isinstance(opened, ModelDir) else None
    return {
        "hub_id": source.hub_id,
        "revision": source.revision,
        "fingerprint": fingerprint(weights) if weights is not None and weights.tensors else None,
    }
