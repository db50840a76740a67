"""What `lora_tool.json` records, and how an input is recognised later."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_tool.checkpoints import AdapterDir, computed_from
from lora_tool.checkpoints.sources import Source
from lora_tool.core.errors import BrokenFile
from lora_tool.core.report.findings import Severity
from lora_tool.core.version import __version__
from lora_tool.formats.adapter_config import FILE_NAME as CONFIG_NAME
from lora_tool.formats.files import json_records, read_json
from lora_tool.formats.manifest import FILE_NAME, SCHEMA_VERSION, read_manifest
from lora_tool.formats.weights import Weights
from lora_tool.plans.core.delta_retention import DeltaRetention, advice, summary
from lora_tool.plans.core.plan import Plan, step_json
from lora_tool.plans.core.steps import SideFile

_HASHED_BYTES = 2 << 20
"""Hashed at a time: for each, a thread waits twice for the interpreter lock, which whoever plans meanwhile holds."""


def sha256_of(path: Path, given_up: Callable[[], bool] = lambda: False) -> str:
    """Return the sha256 of a whole file, in hex; of a part of it once it is `given_up`."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_HASHED_BYTES))
    with path.open("rb", buffering=0) as file:
        while (count := file.readinto(piece)) and not given_up():
            digest.update(piece[:count])
    return digest.hexdigest()


def _hub_sha256(path: Path) -> str | None:
    """Return the sha256 that the Hub cache knows a file by (its blob is named so), or None outside the cache."""
    blob = Path(os.path.realpath(path))
    known = blob.parent.name == "blobs" and len(blob.name) == hashlib.sha256().digest_size * 2
    return blob.name if known else None


def describe_input(source: Source, weights: Weights, fingerprint: str) -> dict[str, Any]:
    """Return the manifest's entry of one input: its place, its revision, and its fingerprint."""
    return {
        "path": None if source.hub_id else str(source.path.resolve()),
        "hub_id": source.hub_id,
        "revision": source.revision,
        "fingerprint": fingerprint,
        "files": [
            {"name": file.path.name, "bytes": file.stamp.size, "sha256": _hub_sha256(file.path)}
            for file in weights.files
        ],
    }


def adapters_in(adapters: Iterable[tuple[AdapterDir, str]]) -> list[str]:
    """Return the fingerprints of adapters, given with each, and of all that they were computed from, each once."""
    found: list[str] = []
    for adapter, own in adapters:
        found += (own, *computed_from(adapter))
    return [*dict.fromkeys(found)]


def input_name(number: int) -> str:
    """Return the manifest's name for the adapter of that number: `adapter`, then `adapter 2` and so on."""
    return "adapter" if number == 1 else f"adapter {number}"


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return our version, and those of the packages that did the arithmetic: they are loaded."""
    found = {"lora-tool": __version__}
    for package in packages:
        if package in sys.modules:
            found[package] = str(sys.modules[package].__version__)
    return found


def _by_name(plan: Plan, hashes: Mapping[Path, str]) -> dict[str, str]:
    """Return file name → hash; with the input's name before it where several inputs have files of one name."""
    found = {}
    for path, digest in hashes.items():
        name = plan.input_names.get(path.parent) or (path.parent.name if path.name in found else None)
        found[f"{name}/{path.name}" if name else path.name] = digest
    return found


def _inputs(plan: Plan, hashes: Mapping[Path, str]) -> dict[str, Any]:
    """Return the manifest's inputs, each file of weights with its hash, or with the time of its last change."""
    digests = {_place(path): digest for path, digest in hashes.items()}
    changed = {_place(stamp.path): stamp.mtime_ns for stamp in plan.inputs}
    found = {}
    for name, entry in plan.manifest.get("inputs", {}).items():
        found[name] = dict(entry)
        for listed in ("files", "weights"):  # the files of a training checkpoint are a number
            if isinstance(entry.get(listed), list):
                found[name][listed] = [_identified(file, entry["path"], digests, changed) for file in entry[listed]]
    return found


def _identified(
    file: Mapping[str, Any], folder: str | None, digests: Mapping[str, str], changed: Mapping[str, int]
) -> dict[str, Any]:
    """Return the entry of a file with its hash; of one that was not hashed it says when it was changed last."""
    path = str(Path(folder or "", file["name"]))
    digest = digests.get(path, file["sha256"])
    modified = {} if digest or path not in changed else {"modified": _time(changed[path])}
    return {**file, "sha256": digest, **modified}


def _place(path: Path) -> str:
    """Return the path of the file, which may itself be a link, in its real folder."""
    return str(path.parent.resolve() / path.name)


def _time(nanoseconds: int) -> str:
    return dt.datetime.fromtimestamp(nanoseconds / 1e9, dt.timezone.utc).isoformat(timespec="microseconds")


def _named(reason: str, plan: Plan) -> str:
    """Return the reason with an input's name in the manifest for its folder."""
    for folder, name in plan.input_names.items():
        reason = reason.replace(f"from the adapter {folder}", f"from {name}")
    return reason


def manifest_bytes(
    plan: Plan,
    hashes: Mapping[Path, str],
    survived: Mapping[str, DeltaRetention],
    arithmetic: str | None = None,
    verification: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the content of `lora_tool.json`: the same plan gives the same bytes.

    `hashes` are those of `plan.hashed`; `survived` says how much of each tensor's change survives rounding;
    `arithmetic` names the backends that computed values, None if every tensor was copied; `verification` is the result
    of a check of the written folder, None without one.
    """
    fidelity = summary(survived)
    in_spite_of = (str(finding) for finding in plan.findings if finding.severity is Severity.ERROR)
    table = {
        "schema_version": SCHEMA_VERSION,
        **plan.manifest,
        "inputs": _inputs(plan, hashes),
        "sha256": _by_name(plan, hashes),
        "precision": plan.precision.value,
        "arithmetic": arithmetic,
        "versions": _versions(() if plan.only_copies else plan.precision.packages),
        "warnings": [*in_spite_of, *plan.warnings, *filter(None, [advice(fidelity, plan)])],
        "fidelity": fidelity,
        "verification": None if verification is None else dict(verification),
        **_of_tensors(plan, survived),
    }
    return json_records(table)


def _values(file: SideFile) -> dict[str, Any]:
    """Return an adapter's config, copied or written here: verify compares the file with it."""
    if file.filename != CONFIG_NAME:
        return {}
    return {"config": read_json(file.source) if file.source else json.loads(file.content or b"{}")}


def _of_tensors(plan: Plan, survived: Mapping[str, DeltaRetention]) -> dict[str, Any]:
    """Return the manifest's entries for every tensor and file."""
    ledger = []
    for shard in plan.shards:
        for step in shard.steps:
            entry = {**step_json(step, plan.input_names), "shard": shard.filename}
            if step.out.name in survived:
                entry["fidelity"] = survived[step.out.name].as_json()
            ledger.append(entry)
    return {
        "counts": plan.counts(),
        "side_files": [
            {"name": file.filename, "reason": _named(file.reason, plan), **_values(file)} for file in plan.side_files
        ],
        "ledger": ledger,
        "leftovers": [
            {"file": item.path.name, "name": item.name, "fate": item.action.value, "reason": item.reason}
            for item in plan.leftovers
        ],
    }


def is_written(plan: Plan, folder: Path) -> bool:
    """Return whether `folder` is what this version writes from the plan, by its manifest and the sizes of its weights."""
    try:
        raw = read_manifest(folder / FILE_NAME).raw
        sizes = [(folder / shard.filename).stat().st_size for shard in plan.shards]
    except (BrokenFile, OSError):
        return False
    if sizes != [shard.nbytes for shard in plan.shards]:
        return False
    hashes = {path: sha256_of(path) for path in plan.hashed}
    known = {
        **plan.manifest,
        **_of_tensors(plan, {}),
        "precision": plan.precision.value,
        "inputs": _inputs(plan, hashes),
        "sha256": _by_name(plan, hashes),
    }
    ledger = raw.get("ledger")
    for entry in ledger if isinstance(ledger, list) else ():
        if isinstance(entry, dict):
            entry.pop("fidelity", None)
    versions = raw.get("versions")
    same = isinstance(versions, dict) and versions.get("lora-tool") == __version__
    return same and {key: raw.get(key) for key in known} == json.loads(json_records(known))
