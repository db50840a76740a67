"""Taking this machine's paths out of what is published."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from lora_tool.formats import adapter_config, manifest
from lora_tool.formats.files import json_bytes, read_json
from lora_tool.hub.model import PushContent
from lora_tool.hub.origin import Origin, is_hub_id


def without_paths(content: PushContent, origin: Origin) -> PushContent:
    """Return the file without this machine's paths: they tell others nothing but who and where you are.

    In the manifest a path becomes its last name. In an adapter's config a path into the Hub cache becomes the Hub id.
    """
    if content.source is None or content.name not in (manifest.FILE_NAME, adapter_config.FILE_NAME):
        return content
    table = read_json(content.source)
    if content.name == manifest.FILE_NAME:
        cleaned = _cleaned(table, tuple(sorted(_absolute_paths(table), key=len, reverse=True)))
        data, reason = json_bytes(cleaned, indent=1), "without paths of this machine"
    else:
        named = table.get("base_model_name_or_path")
        replaced = {"base_model_name_or_path": origin.base} if origin.base and not is_hub_id(named) else {}
        cleaned = {**table, **replaced}
        data, reason = json_bytes(cleaned, indent=2, sort_keys=True), f"with {origin.base} as the base model"
    if cleaned == table:
        return content
    return PushContent(name=content.name, data=data, reason=f"{content.reason}, {reason}")


def _absolute_paths(value: Any) -> set[str]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {path for inner in value.values() for path in _absolute_paths(inner)}
    if isinstance(value, list):
        return {path for inner in value for path in _absolute_paths(inner)}
    return {value} if isinstance(value, str) and _is_absolute(value) else set()


def _is_absolute(text: str) -> bool:
    return bool(re.match(r"(?:/|~/|[A-Za-z]:\\)[^\0\n]*\Z", text)) and len(text) > 1


def _cleaned(value: Any, paths: tuple[str, ...]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {key: _cleaned(inner, paths) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner, paths) for inner in value]
    if not isinstance(value, str):
        return value
    for path in paths:
        # not inside another name: "/w" is no part of the id "me/w"
        name = PurePath(path).name.replace("\\", "\\\\")
        value = re.sub(rf"(?<![\w./~\-]){re.escape(path)}(?![\w\-])", name, value)
    return value
