"""What both models are asked: the user's prompts, ours, or random token ids where no tokenizer was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.core.errors import BadConfig, Defect, MissingDependency
from lora_tool.formats.fields import shown
from lora_tool.formats.files import is_file, parse_json, read_text
from lora_tool.formats.tokenizer import FILE_NAMES
from lora_tool.verification.pairs import at_line

try:
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoTokenizer
except ImportError as error:
    raise MissingDependency("transformers", extra="merge") from error

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
LONGEST = 64
"""Tokens of a prompt that are used: its last ones."""
_LARGEST_FILE = 64 << 20
_FIELDS = ("prompt", "text", "input", "question", "instruction")


class Inputs(Struct, frozen=True, kw_only=True):
    """Token ids, right-padded, [prompts, tokens]; `mask` is 1 where there is a token. `what` says it in words."""

    ids: torch.Tensor
    mask: torch.Tensor
    what: str


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


def tokenized(folders: Sequence[Path], prompts: Sequence[str] | None, *, vocab_size: int, pad_id: int) -> Inputs:
    """Return the inputs by the first tokenizer that is in one of the folders; without one, random ids."""
    wanted = list(prompts or OUR_PROMPTS)[:MOST]
    of = f" of {len(prompts)}" if prompts is not None and len(prompts) > len(wanted) else ""
    whose = f"{len(wanted)}{of} {'given' if prompts is not None else 'built-in'} prompts"
    tokenizer = tokenizer_in(folders)
    rows: list[list[int]] = []
    if tokenizer is not None:
        rows = [[i for i in tokenizer(text)["input_ids"][-LONGEST:] if 0 <= i < vocab_size] for text in wanted]
    if not rows or not all(rows):
        shape = (len(wanted), min(16, LONGEST))
        ids = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
        ids[ids == pad_id] = (pad_id + 1) % vocab_size
        why = (
            "no tokenizer was found"
            if tokenizer is None
            else "the tokenizer's tokens are not in the model's vocabulary"
        )
        return Inputs(ids=ids, mask=torch.ones_like(ids), what=f"random token ids instead of {whose}: {why}")
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return Inputs(ids=ids, mask=mask, what=whose)


def tokenizer_in(folders: Sequence[Path]) -> Any:
    """Return the first tokenizer that is in one of the folders and can be loaded without its code; None without one."""
    for folder in folders:
        if not any(is_file(folder / name) for name in FILE_NAMES):
            continue  # transformers would make one without words
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # noqa: BLE001, S112 - whatever is wrong with it, there is another, or random ids
            continue
    return None
