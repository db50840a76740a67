"""Pairs of texts of which one was preferred, in the columns of TRL's reward data: read, and checked row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.core.errors import BadConfig, BrokenFile, CorruptFile, Defect
from lora_tool.formats.fields import shown
from lora_tool.formats.files import parse_json, read_text

Text = str | list[dict[str, Any]]
"""A plain text, or the messages of a conversation."""

_LARGEST_FILE = 256 << 20
_EXPECTED = "an object with `chosen` and `rejected`, and a `prompt` where they do not begin with it"


class Pair(Struct, frozen=True, kw_only=True):
    """Two texts, each with its prompt, and the line that they stand in."""

    line: int
    chosen: Text
    rejected: Text
    template: Mapping[str, Any] = field(default_factory=dict)
    """What TRL hands to the chat template: `tools` and `chat_template_kwargs`."""


class Pairs(Struct, frozen=True, kw_only=True):
    """The pairs of a file, and the accuracy that the merged model must have on them, if any."""

    path: Path
    rows: tuple[Pair, ...]
    least: float | None = None


def read_pairs(path: Path, *, least: float | None = None) -> Pairs:
    """Return the pairs in the file `path` of JSON lines; `least` is the accuracy that is asked for.

    Texts are put together as TRL's `RewardTrainer` does: prompt + chosen, both strings or both lists of messages.
    Raises `CorruptFile` or `BadConfig`, which name file and line, what was found and what was expected.
    """
    rows = tuple(_pair(row, line, path) for line, row in _json_lines(path))
    if not rows:
        raise BadConfig.of(path, Defect.BAD_FIELD, f"holds no pair; expected in each line {_EXPECTED}")
    return Pairs(path=path, rows=rows, least=least)


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line that is not blank, and the JSON in it. Raises `CorruptFile`."""
    # a line ends at \n alone: JSON may hold the other separators that `splitlines` knows
    for number, line in enumerate(read_text(path, limit=_LARGEST_FILE).split("\n"), 1):
        if line.strip("\ufeff \t\r"):
            try:
                yield number, parse_json(line.encode(), path)
            except CorruptFile as error:
                raise at_line(path, number, error.problem.message, kind=CorruptFile) from error


def at_line(path: Path, line: int, message: str, *, kind: type[BrokenFile] = BadConfig) -> BrokenFile:
    """Return the error of the `kind` about a `line` of the file `path`."""
    return kind.of(path, Defect.BAD_FIELD, message, f"line {line}")


def _pair(row: Any, line: int, path: Path) -> Pair:  # noqa: ANN401 - JSON
    if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
        found = f"the columns {', '.join(sorted(row))}" if isinstance(row, dict) and row else shown(row)
        raise at_line(path, line, f"expected {_EXPECTED}; found {found}")
    chosen, rejected, prompt = (_text(row.get(name), name, line, path) for name in ("chosen", "rejected", "prompt"))
    if chosen is None or rejected is None or type(chosen) is not type(rejected):
        raise at_line(
            path, line, f"expected `chosen` and `rejected` both as texts or both as messages; found {shown(row)}"
        )
    if isinstance(chosen, list) and isinstance(prompt, str):
        # whole conversations beside their question, as TRL's `maybe_extract_prompt` takes them
        if not all(_holds(side, prompt) for side in (chosen, rejected)):
            raise at_line(path, line, "the `prompt` is a text, and no message of `chosen` and `rejected` is that text")
        prompt = None
    if prompt is not None and type(prompt) is not type(chosen):
        raise at_line(path, line, f"expected `prompt` as messages or none, as `chosen` is; found {shown(prompt)}")
    return Pair(
        line=line,
        chosen=_joined(prompt, chosen),
        rejected=_joined(prompt, rejected),
        template=_template(row, line, path),
    )


def _holds(side: Text, prompt: str) -> bool:
    return isinstance(side, list) and any(message.get("content") == prompt for message in side)


def _joined(prompt: Any, answer: Any) -> Text:  # noqa: ANN401 - of one type, which was checked
    joined: Text = answer if prompt is None else prompt + answer
    return joined


def _text(value: object, name: str, line: int, path: Path) -> Text | None:
    """Return a text or messages as they are, None for null. Raises `BadConfig` for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value):
        return value
    raise at_line(path, line, f"expected `{name}` as a text or as messages with a `role`; found {shown(value)}")


def _template(row: Mapping[str, Any], line: int, path: Path) -> dict[str, Any]:
    tools, more = row.get("tools"), row.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = parse_json(tools.encode(), path)
        except CorruptFile as error:
            raise at_line(path, line, f"`tools` {error.problem.message}", kind=CorruptFile) from error
    if not isinstance(more, dict):
        raise at_line(path, line, f"expected `chat_template_kwargs` as an object; found {shown(more)}")
    return {**({"tools": tools} if tools else {}), **more}
