"""A text on which language models are measured, and what was measured: nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from lora_tool.errors import BadConfig, Defect
from lora_tool.formats.fields import shown
from lora_tool.formats.files import read_text
from lora_tool.verification.pairs import LARGEST_FILE, at_line, json_lines


class Texts(Struct, frozen=True, kw_only=True):
    """The texts of a file, each with the line that it begins in."""

    path: Path
    rows: tuple[tuple[int, str], ...]


class LossEvidence(Struct, frozen=True, kw_only=True):
    """The loss per token in nats of a merged model, of its base with the adapter unmerged, and of the base alone."""

    source: str
    """The file, as it was named."""
    texts: int
    tokens: int
    """Tokens that were predicted: all but the first of each window."""
    window: int
    """Tokens that a model sees at once; a longer text is cut into several."""
    merged: float
    unmerged: float
    base: float | None
    """None where the base has no row for a token of the text."""
    streamed: bool = True
    """Whether only a layer at a time was in memory."""

    @property
    def difference(self) -> float:
        """What the merge costs: the merged model's loss minus that of base + adapter."""
        return self.merged - self.unmerged


def read_texts(path: Path) -> Texts:
    """Return the texts in the file `path`: of JSON lines each `text`, of any other file the whole.

    Raises `CorruptFile` or `BadConfig`, which name file and line, what was found and what was expected.
    """
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = tuple((line, _text(row, line, path)) for line, row in json_lines(path))
    else:
        rows = ((1, read_text(path, limit=LARGEST_FILE).removeprefix("\ufeff")),)
    rows = tuple((line, text) for line, text in rows if text.strip())
    if not rows:
        raise BadConfig.of(path, Defect.BAD_FIELD, "holds no text")
    return Texts(path=path, rows=rows)


def _text(row: object, line: int, path: Path) -> str:
    text = row.get("text") if isinstance(row, dict) else row
    if isinstance(text, str):
        return text
    raise at_line(path, line, f"expected a text, or an object with a `text`; found {shown(row)}")
