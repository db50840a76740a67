"""What a model is asked to go on with: the user's prompts, or ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_tool.core.errors import BadConfig, Defect
from lora_tool.formats.fields import shown
from lora_tool.formats.files import parse_json, read_text
from lora_tool.verification.pairs import at_line

OUR_PROMPTS = (
    "The capital of France is Paris, and the capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: Why is the sky blue?\nAnswer: Sunlight is scattered by",
    "Once upon a time, in a village at the edge of the forest, there lived",
    "Translate to German: The weather is nice today.",
    "12 * 7 = 84, 13 * 7 = 91, 14 * 7 =",
    "I am sorry, but I cannot help with that. Instead, you could",
    "The three laws of thermodynamics state that",
)
MOST = 64
"""Prompts of a file that are used; the report says how many there are."""
_LARGEST_FILE = 64 << 20
_FIELDS = ("prompt", "text", "input", "question", "instruction")


def asked_of(prompts: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    """Return the prompts that are used, ours where none are given, and how many they are, in words."""
    wanted = tuple(prompts or OUR_PROMPTS)[:MOST]
    of = f" of {len(prompts)}" if prompts is not None and len(prompts) > len(wanted) else ""
    return wanted, f"{len(wanted)}{of} {'given' if prompts is not None else 'built-in'} prompts"


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts in the file: one per line, or JSON lines with a `prompt`, `text` or `messages`.

    Raises `CorruptFile` or `BadConfig` for a file that holds none.
    """
    text = read_text(path, limit=_LARGEST_FILE).removeprefix("\ufeff")
    lines = [line for line in text.splitlines() if line.strip()]
    json_lines = path.suffix in (".jsonl", ".json", ".ndjson")
    prompts = tuple(_of_json(line, number, path) if json_lines else line for number, line in enumerate(lines, 1))
    if not prompts:
        raise BadConfig.of(path, Defect.BAD_FIELD, "holds no prompt")
    return prompts


def _of_json(line: str, number: int, path: Path) -> str:
    entry: Any = parse_json(line.encode(), path)
    if isinstance(entry, str):
        return entry
    text: str | None = None
    if isinstance(entry, dict):
        messages = entry.get("messages")
        contents = (
            [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
        )
        spoken = "\n".join(content for content in contents if isinstance(content, str))
        text = next((entry[name] for name in _FIELDS if isinstance(entry.get(name), str)), spoken or None)
    if text is None:
        message = f"expected a text, or an object with one of {', '.join(_FIELDS)} or `messages`; found {shown(entry)}"
        raise at_line(path, number, message)
    return text
