"""The commands that messages name can be typed: each exists with its options, and a path is one word of it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import lora_tool
from lora_tool.cli.main import COMMANDS

SOURCE = Path(lora_tool.__file__).parent
FORWARDING = {"train", "guard"}
"""Commands that also take the options of the programs they run."""
_PATHS = frozenset({"root", "path", "folder", "checkpoint", "out", "source"})
"""What attributes and variables are called that hold a path."""
_VALUE = "\ufffc"
_COMMAND = re.compile(r"(?:lora-tool (?:" + "|".join(COMMANDS) + r")\b|\brm -r |\bcp |\bchmod \S+ )")
_TYPED = re.compile(_COMMAND.pattern + r"[^`;:,()]*?" + _VALUE)
"""A command up to the first value that is put into it."""
_NAMED = re.compile(r"lora-tool (?P<command>" + "|".join(COMMANDS) + r")\b(?P<words>[^`;:,()\n]*)")


def strings() -> Iterator[tuple[str, ast.stmt, ast.JoinedStr | ast.Constant]]:
    """Yield every string of the source that names a command, with its file and the outermost function around it."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for around in ast.parse(text).body if _COMMAND.search(text) else ():
            for node in ast.walk(around):
                if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", around, node


def text_of(node: ast.JoinedStr | ast.Constant) -> str:
    """Return the string with each value that is put into it as one mark."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else _VALUE for part in parts)


def is_bare_path(value: ast.expr, around: ast.stmt) -> bool:
    """Whether a value is a path as it stands: its name says so, and nothing has quoted it."""
    if isinstance(value, ast.Attribute):
        return value.attr in _PATHS
    if not isinstance(value, ast.Name) or value.id not in _PATHS:
        return False
    made = (each for each in ast.walk(around) if isinstance(each, ast.Assign))
    return not any(value.id in ast.unparse(each.targets[0]) and "shlex" in ast.unparse(each.value) for each in made)


def test_a_path_is_one_word_of_a_command() -> None:
    bare = []
    for where, around, node in strings():
        values = [each.value for each in getattr(node, "values", ()) if isinstance(each, ast.FormattedValue)]
        for command in _TYPED.finditer(text_of(node)):
            value = values[text_of(node)[: command.end()].count(_VALUE) - 1]
            if is_bare_path(value, around):
                bare.append(f"{where}: {ast.unparse(node)}")
    assert not bare, bare


def test_every_command_and_option_exists() -> None:
    unknown = []
    for where, _, node in strings():
        for named in _NAMED.finditer(text_of(node)):
            command = importlib.import_module(f"lora_tool.cli.{named['command']}").command
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            asked = {word.partition("=")[0] for word in named["words"].split() if re.match(r"--?[a-z]", word)}
            if named["command"] not in FORWARDING and not asked <= {*known, "--help"}:
                unknown.append(f"{where}: {named[0]!r} has {asked - known}")
    assert not unknown, unknown
