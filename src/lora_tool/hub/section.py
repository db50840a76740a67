"""The part of a model card that lora-tool writes: what was merged into what, how exactly, and how it was checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.display import printable
from lora_tool.formats.manifest import Manifest
from lora_tool.hub.origin import Origin

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")
_LONGEST = 200
_FINGERPRINT = 16


def section_text(checkpoint: AdapterDir | ModelDir, manifest: Manifest | None, origin: Origin) -> str:
    """Return the section as Markdown: the same folder gives the same text, wherever and whenever it is made."""
    rows = list(_merge_rows(manifest) if manifest is not None and origin.merged else _plain_rows(checkpoint, origin))
    if manifest is not None and not origin.merged:
        rows += [row for row in _merge_rows(manifest) if row[0] in ("checkpoint", "made with")]
    title = "## How this model was made" if origin.merged else "## What is in this repository"
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([title, "", _sentence(origin), "", *table])


def _sentence(origin: Origin) -> str:
    base = f"[{_md(origin.base)}](https://huggingface.co/{origin.base})" if origin.base else ""
    model = "reward model" if origin.reward else "model"
    if origin.merged:
        into = base or "its base model"
        return f"A {model}: a LoRA adapter merged into {into} by lora-tool. `lora_tool.json` records every tensor."
    trained = f" trained on {base}" if base else ""
    if origin.adapter and origin.reward:
        return f"A LoRA adapter of a reward model{trained}, for PEFT; its score head is in the adapter."
    return f"A LoRA adapter{trained}, for PEFT." if origin.adapter else f"A {model}."


def _plain_rows(checkpoint: AdapterDir | ModelDir, origin: Origin) -> Iterator[tuple[str, str]]:
    if isinstance(checkpoint, AdapterDir) and checkpoint.config is not None:
        config = checkpoint.config
        kind = "DoRA" if config.use_dora else "rsLoRA" if config.use_rslora else "LoRA"
        yield "adapter", f"{kind}, rank {config.r}, alpha {config.lora_alpha:g}"
        targets = config.target_modules
        ends = sorted({name.rpartition(".")[2] for name in targets or ()})
        yield "targets", _md(targets if isinstance(targets, str) else ", ".join(ends) or "none")
        if config.modules_to_save:
            yield "trained whole", _md(", ".join(config.modules_to_save))
    elif isinstance(checkpoint, ModelDir) and checkpoint.config is not None:
        yield "architecture", _md(", ".join(checkpoint.config.architectures) or "unknown")
    if origin.pipeline is not None:
        yield "task", origin.pipeline
    yield "tensors", str(len(checkpoint.tensors))
    yield "stored as", ", ".join(sorted({str(tensor.dtype) for tensor in checkpoint.tensors.values()})) or "none"


def _merge_rows(manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    raw = manifest.raw if manifest is not None else {}
    inputs = raw.get("inputs")
    for name, entry in inputs.items() if isinstance(inputs, Mapping) else ():
        if isinstance(entry, Mapping):
            yield _md(name), _input(entry)
    counts = raw.get("counts")
    if isinstance(counts, Mapping):
        yield "tensors", _md(", ".join(f"{count} {action}" for action, count in counts.items()))
    for key, shown in (("task", "task"), ("num_labels", "labels"), ("precision", "precision"), ("dtype", "stored as")):
        if raw.get(key) is not None:
            yield shown, _md(raw[key])
    versions = raw.get("versions")
    if isinstance(versions, Mapping):
        yield "made with", _md(", ".join(f"{name} {number}" for name, number in versions.items()))
    yield "verification", _verification(raw.get("verification"))


def _input(entry: Mapping[str, Any]) -> str:
    hub_id, revision, path = entry.get("hub_id"), entry.get("revision"), entry.get("path")
    if isinstance(hub_id, str):
        shown = f"[{_md(hub_id)}](https://huggingface.co/{_md(hub_id)})"
        if isinstance(revision, str):
            shown += f" at `{_code(revision)}`"
    else:
        shown = f"a local folder `{_code(PurePath(path).name)}`" if isinstance(path, str) else "unknown"
    known = entry.get("fingerprint")
    return f"{shown}, fingerprint `{_code(known)[:_FINGERPRINT]}`" if isinstance(known, str) else shown


def _verification(entry: object) -> str:
    """Return the manifest's record of a check as a sentence; what is not of the form we know is shown as it is."""
    if entry is None:
        return "not recorded"
    if not isinstance(entry, Mapping):
        return _md(entry)
    total, right, errors = (entry.get(key) for key in ("tensors", "right", "errors"))
    if not all(isinstance(number, int) for number in (total, right, errors)):
        shown = [f"{name} {value}" for name, value in entry.items() if isinstance(value, str | int | float)]
        return _md(", ".join(shown) or "recorded in lora_tool.json")
    verdict = "passed" if errors == 0 else f"FAILED with {errors} errors"
    details = [f"{right} of {total} tensors match a second, independent computation"]
    if entry.get("largest_ulps") is not None:
        details.append(f"at most {entry['largest_ulps']} ulp apart")
    if entry.get("values_compared") is not None:
        details.append(f"{entry['values_compared']} of {entry.get('values')} values compared")
    return _md(f"{verdict}: {', '.join(details)}")


def _code(text: object) -> str:
    return printable(str(text))[:_LONGEST].replace("`", "")


def _md(text: object) -> str:
    """Return `text` so that Markdown shows it as it is: names come from files, and could be links or HTML."""
    return _SPECIAL.sub(r"\\\1", printable(str(text))[:_LONGEST])
