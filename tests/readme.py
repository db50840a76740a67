"""What of the README the program knows itself, tables and transcripts; `python -m tests.readme` writes it anew."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
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


def with_transcripts(text: str) -> str:
    """Return the README with what its commands print now, run one after the other beside a copy of the fixtures."""
    parts = re.split(r"(^```console\n.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(README.parent / "fixtures", Path(folder, "fixtures"))
        for at in range(1, len(parts), 2):
            lines = re.findall(r"^\$ (lora-tool .+)$", parts[at], re.MULTILINE)
            parts[at] = "```console\n" + "".join(f"$ {line}\n{_printed(line, folder)}" for line in lines) + "```"
    return "".join(parts)


def _printed(line: str, folder: str) -> str:
    command = [sys.executable, "-m", "lora_tool", *shlex.split(line)[1:]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    README.write_text(with_transcripts(rewritten(README.read_text())))
