"""Hints and messages of the library name arguments, `base=MODEL`; the command line translates them into options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tool.core.display import as_options
from lora_tool.core.options import Options, declared

SOURCE = Path(__file__).parents[2] / "src" / "lora_tool"
NOT_OURS = ("cli",)
"""Rooms that speak to a command line only."""
OPTION = re.compile(r"(?<![\w`-])(?:--[a-z][\w-]*|-o\b)")
COMMAND = re.compile(
    r"\b(?:lora-tool [a-z]+|vllm serve|llama-server|hf [a-z]+|mlx_lm\.\w+|python -m|pip (?:un)?install|ulimit|wsl)\b"
)
"""A whole command, which is copied as it is: its options are those of a shell."""


def texts(node: ast.expr) -> Iterator[str]:
    """Yield what a hint says: a string, an f-string with ``{}`` for its names, each side of a choice, a sum as one."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        case ast.BinOp(left=left, right=right):
            yield "".join((*texts(left), *texts(right)))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*texts(body), *texts(orelse))
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in texts(value))


def hints(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every hint: a keyword `hint=`, or a name that is called so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            yield from ((node.value.lineno, text) for text in texts(node.value))
        elif isinstance(node, ast.Assign):
            names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            if any("hint" in name.lower() for name in names):
                yield from ((node.lineno, text) for text in texts(node.value))


def options_outside_commands(text: str) -> list[str]:
    """Return the options in the text that belong to no whole command before them."""
    command = COMMAND.search(text)
    before = text if command is None else text[: command.start()]
    return OPTION.findall(before)


def test_what_is_an_option_and_what_a_command() -> None:
    assert options_outside_commands("give the model: --base MODEL") == ["--base"]
    assert options_outside_commands("give another folder: -o OUT") == ["-o"]
    assert options_outside_commands("merge it: lora-tool merge {} --base MODEL -o OUT") == []
    assert options_outside_commands("`base=MODEL` names it, and a low-rank one too") == []


def test_no_hint_of_the_library_speaks_of_options() -> None:
    found = [
        f"{path}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in NOT_OURS
        for line, text in hints(ast.parse(path.read_text()))
        if options_outside_commands(text)
    ]
    assert found == []


def all_options(root: type[Options] = Options) -> Iterator[type[Options]]:
    for kind in root.__subclasses__():
        yield kind
        yield from all_options(kind)


def test_no_option_is_described_by_another_options_spelling() -> None:
    import lora_tool.workflows.library  # noqa: F401 - it declares them

    for kind in all_options():
        for name, (how, _) in declared(kind).items():
            assert not options_outside_commands(how.help), f"{kind.__name__}.{name}: {how.help}"


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("`base=MODEL`", "--base MODEL"),
        ("`out=OUT`", "-o OUT"),
        ("`overwrite=True`", "--overwrite"),
        ('`task="reward"`', "--task reward"),
        ("`expert_layout=rank-major`", "--moe-b-layout rank-major"),
        ("`adapters=A`", "--adapter A"),
        ("`a = b`", "`a = b`"),
    ],
)
def test_the_command_line_translates(argument: str, option: str) -> None:
    assert as_options(f"give {argument}, please") == f"give {option}, please"
