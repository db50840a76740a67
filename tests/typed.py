"""The commands that a hint names, typed as a reader would: in this process, with folders for what stands in capitals."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from lora_tool.cli.main import all_commands, main
from lora_tool.core.display import as_options
from lora_tool.core.errors import FindingsFound, LoraToolError

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


_TYPED: set[str] = set()
"""The commands of hints that were typed in this process, without their paths."""


@contextlib.contextmanager
def hints_typed(folder: Path) -> Iterator[None]:
    """Type each command that the hint of an error names which is raised meanwhile, in a copy of the folder then left.

    Commands that differ in their paths alone are typed once. Placeholders stand for the adapters and the base there.
    """
    hints: list[str] = []
    init = LoraToolError.__init__

    def noted(self: LoraToolError, message: str, *, hint: str | None = None) -> None:
        init(self, message, hint=hint)
        if not isinstance(self, FindingsFound):  # whose hints are typed after each rule's injury
            hints.append(hint or "")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LoraToolError, "__init__", noted)
        yield
    copy = folder.with_name(f"{folder.name}-typed")
    for hint in dict.fromkeys(hints):
        for words in commands_in(hint):
            form = " ".join("PATH" if "/" in word else word for word in words)
            if form in _TYPED:
                continue
            _TYPED.add(form)
            shutil.copytree(folder, copy)
            code, printed = type_it([word.replace(str(folder), str(copy)) for word in words], _stands_for(copy))
            shutil.rmtree(copy)
            checked = words[0] in ("validate", "verify") and code in (1, 5)
            assert code == 0 or checked, f"{hint}\n{printed}"


def _stands_for(folder: Path) -> dict[str, str]:
    """Return the folders that words in capitals mean: the adapters below, the base, and one to write."""
    found = sorted(path.parent for path in folder.rglob("adapter_config.json"))
    models = sorted(path.parent for path in folder.rglob("config.json") if path.parent not in found)
    base = next((path for path in models if path.name == "base"), folder)
    names = {"ADAPTER": found[:1], "A": found[:1], "B": found[1:2], "BASE": [base], "MODEL": [base]}
    out = dict.fromkeys(("OUT", "PLAIN", "EXPERTS", "MERGED"), str(folder / "typed"))
    return {name: str(paths[0]) for name, paths in names.items() if paths} | out


def type_it(words: Sequence[str], folders: Mapping[str, str]) -> tuple[int, str]:
    """Run the command with the `folders` for what stands in capitals; return its exit code, and what it printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main([folders.get(word, word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0), printed.getvalue()
