"""A table of texts, for people: as lines of text, as HTML for a notebook, or drawn by a terminal."""

from __future__ import annotations

from msgspec import Struct

from lora_tool.core.display import printable, shortened

_MOST_ROWS = 200
"""Rows that a notebook shows."""
_LONGEST = 1_500
"""Letters of a cell."""


class TextTable(Struct, frozen=True, kw_only=True):
    """Rows under their columns, of which those stand to the right whose name ends in ``>``.

    Both forms leave out a column in which no row has anything, and rows beyond 200; no text in them acts on anything.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        header, *lines = self._shown()
        right = [name.endswith(">") for name in header]
        header = [name.removesuffix(">") for name in header]
        width = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        return "\n".join(
            "  ".join(
                text.rjust(wide) if to_right else text.ljust(wide)
                for text, wide, to_right in zip(line, width, right, strict=True)
            ).rstrip()
            for line in (header, *lines)
        )

    def html(self) -> str:
        """Return the table as HTML."""
        import html  # only in notebooks

        header, *lines = self._shown()
        style = ["right" if name.endswith(">") else "left" for name in header]
        head = "".join(f"<th>{html.escape(name.removesuffix('>'))}</th>" for name in header)
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align: {to}">{html.escape(text)}</td>' for text, to in zip(line, style, strict=True)
            )
            + "</tr>"
            for line in lines
        )
        return f"<table><tr>{head}</tr>{body}</table>"

    def _shown(self) -> list[list[str]]:
        kept = [at for at in range(len(self.columns)) if any(row[at] for row in self.rows)]
        shown = [[shortened(printable(row[at]), _LONGEST) for at in kept] for row in self.rows[:_MOST_ROWS]]
        left = len(self.rows) - _MOST_ROWS
        more = [[f"… and {left:,} more", *[""] * (len(kept) - 1)]] if left > 0 else []
        return [[self.columns[at] for at in kept], *shown, *more]
