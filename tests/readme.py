"""The tables of the README that the program knows itself; `python -m tests.readme` writes them anew."""

from __future__ import annotations

from pathlib import Path

import click

from lora_tool.cli.main import COMMANDS, cli
from lora_tool.rules.registry import RULES
from lora_tool.rules.validation import validate

README = Path(__file__).parents[1] / "README.md"


def command_table() -> str:
    """Return every command with its arguments and the line that `lora-tool --help` has for it."""
    context = click.Context(cli, info_name="lora-tool")
    lines = ["| command | what it does |", "|---|---|"]
    for name, line in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        usage = command.collect_usage_pieces(click.Context(command, info_name=name, parent=context))
        arguments = " ".join(piece.replace("...", "…").replace("|", "\\|") for piece in usage if piece != "[OPTIONS]")
        lines.append(f"| `{' '.join(filter(None, ('lora-tool', name, arguments)))}` | {line} |")
    return "\n".join(lines)


def rule_table() -> str:
    """Return every rule with its severity and title."""
    assert validate.__module__ == "lora_tool.rules.validation"  # importing it registers every rule
    rows = [f"| {rule.code} | {rule.severity.value} | {rule.title} |" for _, rule in sorted(RULES.items())]
    return "\n".join(["| code | severity | what it means |", "|---|---|---|", *rows])


TABLES = {"commands": command_table, "rules": rule_table}


def rewritten(text: str) -> str:
    """Return the README with its generated tables as they should be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        assert text.count(begin) == 1, name
        head, _, rest = text.partition(begin)
        text = head + begin + table() + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
