"""The commands that a hint names, typed as a reader would: in this process, with folders for what stands in capitals."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from lora_tool.cli.main import all_commands, main
from lora_tool.core.display import as_options

_COMMAND = re.compile(rf"lora-tool (?:{'|'.join(all_commands())})\b[^;:`]*")
_ENDS = re.compile(
    r", (?:or|then|and|which|merges)\b|[)]| (?:says|names|gives|lists|writes|merges|looks|takes) |[.,]?\Z"
)


def commands_in(hint: str) -> Iterator[list[str]]:
    """Yield the words of each command that has a folder to work on."""
    for found in _COMMAND.finditer(as_options(hint)):
        words = shlex.split(_ENDS.split(found[0])[0])[1:]
        if len(words) > 1:
            yield words


def type_it(words: Sequence[str], folders: Mapping[str, str]) -> tuple[int, str]:
    """Run the command with the `folders` for what stands in capitals; return its exit code, and what it printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main([folders.get(word, word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0), printed.getvalue()
