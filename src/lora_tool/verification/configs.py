"""Whether the config of a computed adapter still says what was written, in all by which PEFT finds and scales its factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_tool.checkpoints import AdapterDir
from lora_tool.core.tensors import TensorAction
from lora_tool.formats.adapter_config import FILE_NAME
from lora_tool.formats.files import read_object
from lora_tool.formats.manifest import Manifest
from lora_tool.rules.merged.evidence import TensorEvidence, Verdict

_MAY_DIFFER = frozenset({"base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"})
"""Fields that say nothing of ΔW: a base may be moved, and PEFT writes its version."""
_NAMES = (
    "alpha_pattern bias exclude_modules fan_in_fan_out layers_pattern layers_to_transform lora_bias modules_to_save "
    "rank_pattern target_parameters trainable_token_indices"
)
_WHERE = frozenset(_NAMES.split())
"""Fields that change what is loaded even if none was written."""


def check_config(made: AdapterDir, manifest: Manifest) -> dict[str, TensorEvidence]:
    """Return the evidence of the config if a field has another value than was written; nothing of one that is right.

    A manifest of an earlier release says nothing of it.
    """
    written = next((file.get("config") for file in _side_files(manifest) if file.get("name") == FILE_NAME), None)
    if not isinstance(written, dict) or not (made.root / FILE_NAME).is_file():
        return {}
    found = read_object(made.root / FILE_NAME)
    names = sorted((written.keys() | _WHERE) - _MAY_DIFFER)
    other = [name for name in names if _comparable(found.get(name)) != _comparable(written.get(name))]
    if not other:
        return {}
    name, more = other[0], f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    reason = f"`{name}` is {found.get(name)!r}, but {written.get(name)!r} was written{more}"
    return {
        FILE_NAME: TensorEvidence(
            name=FILE_NAME,
            action=TensorAction.COMPUTED,
            verdict=Verdict.DIFFERENT,
            compared=len(names),
            numel=len(names),
            wrong=len(other),
            reason=reason,
        )
    }


def _side_files(manifest: Manifest) -> list[Mapping[str, Any]]:
    listed = manifest.raw.get("side_files")
    return [file for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []


def _comparable(value: object) -> object:
    """Return a field's value so that none, no and empty are one, and a list of names has no order."""
    return sorted(map(str, value)) if isinstance(value, list) and value else value or None
