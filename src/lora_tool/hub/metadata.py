"""The YAML block of a model card, changed key by key: what the user wrote stays as it was written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.errors import BadConfig, Defect, Problem

# the Hub's own pattern (huggingface_hub/repocard.py, REGEX_YAML_BLOCK)
_BLOCK = re.compile(
    r"\A(?P<open>\s*---(?:\r\n|\r|\n))(?P<yaml>.*?)(?P<close>(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|\Z))", re.DOTALL
)
_LARGEST = 1 << 20


class Card(Struct, frozen=True, kw_only=True):
    """A README: its YAML text (None where it has no block) and everything after it."""

    yaml: str | None
    body: str
    newline: str = "\n"

    def text(self) -> str:
        """Return the whole README."""
        if self.yaml is None:
            return self.body
        end = self.newline
        return f"---{end}{self.yaml}{end}---{end}{self.body}"


def read_card(data: bytes, where: str) -> tuple[Card, dict[str, Any]]:
    """Return the README `data`, split, and its metadata. Raises `BadConfig` where they are no YAML mapping."""
    if len(data) > _LARGEST:
        raise _bad(where, f"is {len(data):,} bytes, more than the {_LARGEST:,} of a model card")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(where, f"is not UTF-8: {error.reason} at byte {error.start}") from error
    newline = "\r\n" if "\r\n" in text else "\n"
    match = _BLOCK.match(text)
    if match is None:
        return Card(yaml=None, body=text, newline=newline), {}
    card = Card(yaml=match["yaml"], body=text[match.end() :], newline=newline)
    return card, _parsed(match["yaml"], where)


def changed(card: Card, changes: Mapping[str, Any], where: str) -> Card:
    """Return the card with the keys of `changes` set, or taken out where the value is None; all else is as it was."""
    if not changes:
        return card
    before = _parsed(card.yaml or "", where)
    wanted = {key: value for key, value in {**before, **changes}.items() if value is not None or key not in changes}
    text = _spliced(card, changes)
    try:
        kept = text is not None and _parsed(text, where) == wanted
    except BadConfig:
        kept = False
    # else it is a flow mapping, an anchor, or another form without one key per line
    return replace(card, yaml=text if kept else _dump(wanted, card.newline))


def _spliced(card: Card, changes: Mapping[str, Any]) -> str | None:
    """Return the block with the lines of the changed keys replaced; None where its keys are not one per line."""
    block = yaml.compose(card.yaml or "", yaml.SafeLoader)
    if isinstance(block, yaml.MappingNode) and block.flow_style:
        return None
    lines = (card.yaml or "").split(card.newline)
    keys = [(key.value, key.start_mark.line) for key, _ in block.value] if block is not None else []
    ends = [line for _, line in keys[1:]] + [len(lines)]
    written = {key: _dump({key: value}, card.newline) for key, value in changes.items() if value is not None}
    parts = [card.newline.join(lines[: keys[0][1]])] if keys else [card.yaml or ""]
    for (key, begin), end in zip(keys, ends, strict=False):
        own = card.newline.join(lines[begin:end])
        parts.append(written.pop(key, "") if key in changes else own)
    return card.newline.join(part for part in (*parts, *written.values()) if part)


def _dump(table: Mapping[str, Any], newline: str) -> str:
    text: str = yaml.safe_dump(dict(table), allow_unicode=True, sort_keys=False, default_flow_style=False, width=1000)
    return text.rstrip("\n").replace("\n", newline)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(f"{text}\n")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 2}" if mark is not None else ""
        raise _bad(where, f"has metadata that is not YAML{line}: {getattr(error, 'problem', None) or error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise _bad(where, f"has metadata of type {type(data).__name__}; expected a mapping of keys to values")
    return data


def _bad(where: str, message: str) -> BadConfig:
    problem = Problem(defect=Defect.BAD_FIELD, path=where, message=message)
    return BadConfig(problem, hint="correct README.md, or move it away and push writes one")
