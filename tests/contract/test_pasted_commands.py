"""A command in a message can be pasted: it has the options that it is given, and whatever is put into it is quoted for the
shell, as a folder's name may have spaces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from lora_tool.cli.main import all_commands, cli

SOURCE = Path(__file__).parents[2] / "src"
_BEGINS = re.compile(rf"\blora-tool ({'|'.join(all_commands())})\b|\b(cp|rm -r) ")
_NO_PATHS = {
    "code",  # of a rule
    "listed",  # the beginning of a code
    "method",
    "method.name",
    "form.word",
    "options",
    "option",
    "more",
    "reward",  # "--rm " or nothing
    "result",  # of `ci`, in words
    "' '.join(parts)",  # quoted where they were gathered
    "models[0]",
}
"""What is put into commands besides paths, and paths that were quoted elsewhere."""


def _unquoted(tree: ast.Module) -> Iterator[str]:
    """What f-strings put into a command as it is."""
    quoted = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "shlex." in ast.unparse(node.value)
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }
    for text in ast.walk(tree):
        if not isinstance(text, ast.JoinedStr):
            continue
        before = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif isinstance(part, ast.FormattedValue) and _in_command(before):
                value = ast.unparse(part.value)
                if "shlex." not in value and value not in quoted | _NO_PATHS:
                    yield f"line {text.lineno}: {value}"


def _in_command(before: str) -> bool:
    """Whether what follows belongs to a command: no punctuation or bracket has ended it."""
    begun = [match.end() for match in _BEGINS.finditer(before)]
    return bool(begun) and not re.search(r"[;,:`)]", before[begun[-1] :])


def test_what_is_put_into_a_command_is_quoted() -> None:
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text()
        if _BEGINS.search(text):
            found += [f"{file.relative_to(SOURCE)}, {each}" for each in _unquoted(ast.parse(text))]
    assert not found


_FORWARDING = {"train", "guard"}
"""Commands that also take the options of the programs that they run."""
_TYPED = re.compile(rf"lora-tool (?P<command>{'|'.join(all_commands())})\b(?P<words>[^`;:,()\n]*)")


def _strings(tree: ast.Module) -> Iterator[str]:
    """Every string of a module, without what is put into it."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_command_is_given_options_that_exist_and_those_that_it_needs() -> None:
    unknown = []
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text()
        for string in _strings(ast.parse(text)) if _BEGINS.search(text) else ():
            for typed in _TYPED.finditer(string):
                command = cli.get_command(click.Context(cli), typed["command"])
                assert command is not None
                known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
                asked = {word.partition("=")[0] for word in typed["words"].split() if re.match(r"--?[a-z]", word)}
                if typed["command"] not in _FORWARDING and not asked <= {*known, "--help"}:
                    unknown.append(f"{file.relative_to(SOURCE)}: {typed[0]!r} has {asked - known}")
                needed = [each.opts for each in command.params if isinstance(each, click.Option) and each.required]
                goes_on = string[typed.end() :].startswith("\n")  # in the next line of a docstring
                if asked and not goes_on and any(not asked & {*options} for options in needed):
                    unknown.append(f"{file.relative_to(SOURCE)}: {typed[0]!r} lacks one of {needed}")
    assert not unknown, "\n".join(unknown)
