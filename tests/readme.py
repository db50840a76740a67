"""What of README and documentation the program knows itself, table and transcripts; `python -m tests.readme` writes it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from lora_tool.cli.exit_codes import MEANINGS
from lora_tool.cli.main import all_commands, cli, listed_commands

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTATION = ROOT / ".github" / "docs"
SKILL = ROOT / ".github" / "skills" / "lora-tool" / "SKILL.md"
"""What an agent reads that is to use the program."""
PAGES = (README, SKILL, *sorted(DOCUMENTATION.rglob("*.md")))
"""Whatever a user reads: each transcript in it is typed, each command held against the program's own."""
TUTORIAL = DOCUMENTATION / "tasks" / "zero3-reward-model.md"
"""The whole way from training to a model that is loaded from the Hub; a test of its own, in tests/hub, travels it."""


def command_table(*headings: str) -> str:
    """Return the commands of these headings of `lora-tool --help`, or all: arguments, and the line that it has for each."""
    context = click.Context(cli, info_name="lora-tool", **cli.context_settings)
    lines = ["| command | what it does |", "|---|---|"]
    listed = [row for heading in headings for row in listed_commands()[heading].items()]
    for name, line in listed or all_commands().items():
        command = _command(name)
        usage = command.collect_usage_pieces(click.Context(command, info_name=name, parent=context))
        arguments = " ".join(piece.replace("...", "…").replace("|", "\\|") for piece in usage if piece != "[OPTIONS]")
        lines.append(f"| `{' '.join(filter(None, ('lora-tool', name, arguments)))}` | {line} |")
    return "\n".join(lines)


def json_line() -> str:
    """Return which commands have no `--json`."""
    lacking = [f"`{name}`" for name in all_commands() if not any("--json" in one.opts for one in _command(name).params)]
    return f"Every command has `--json` but {', '.join(lacking)}."


def exit_codes() -> str:
    """Return every exit code with what it means."""
    rows = (f"| {code} | {meaning.replace('|', chr(92) + '|')} |" for code, meaning in MEANINGS.items())
    return "\n".join(("| exit code | means |", "|---|---|", *rows))


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


TABLES = {
    "commands": command_table,
    "start": lambda: command_table("Start here"),
    "json": json_line,
    "exit-codes": exit_codes,
}


def rewritten(text: str) -> str:
    """Return a page with its generated tables as they should be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        if begin not in text:
            continue
        head, _, rest = text.partition(begin)
        text = head + begin + table() + end + rest.partition(end)[2]
    return text


_BLOCK = re.compile(r"(^```console\n.*?^```$)", re.MULTILINE | re.DOTALL)
HUB = "https://huggingface.co"


def transcripts(text: str) -> list[list[tuple[str, str]]]:
    """Return for each transcript of a page its commands and what they print."""
    split = [
        re.split(r"^\$ (.+)\n", block[len("```console\n") : -len("```")], flags=re.MULTILINE)
        for block in _BLOCK.findall(text)
    ]
    return [list(zip(lines[1::2], lines[2::2], strict=True)) for lines in split]


def with_transcripts(page: Path) -> str:
    """Return a page with what its commands print now, run one after the other beside a copy of the fixtures."""
    parts = _BLOCK.split(page.read_text())
    with (
        tempfile.TemporaryDirectory() as folder,
        local_hub(Path(folder)) if page == TUTORIAL else nullcontext() as environment,
    ):
        shutil.copytree(ROOT / "fixtures", Path(folder, "fixtures"))
        for at in range(1, len(parts), 2):
            lines = re.findall(r"^\$ (.+)$", parts[at], re.MULTILINE)
            printed = [f"$ {line}\n{_printed(line, Path(folder), environment)}" for line in lines]
            parts[at] = f"```console\n{''.join(printed)}```"
    return "".join(parts)


@contextmanager
def local_hub(folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield the environment of a program whose Hub is one of this process."""
    # loopback Hub and pytest are for the tutorial alone
    from tests.hub.conftest import environment
    from tests.hub.server import Hub

    with Hub() as hub:
        yield environment(hub, folder / "home")


def _printed(line: str, folder: Path, environment: Mapping[str, str] | None) -> str:
    program, *arguments = shlex.split(line)
    command = [sys.executable, *(["-m", "lora_tool"] if program == "lora-tool" else []), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(f"{line}: {done.stderr}")
    return as_shown(done.stdout, folder, (environment or {}).get("HF_ENDPOINT", HUB))


def as_shown(printed: str, folder: Path, endpoint: str = HUB) -> str:
    """Return what a command printed as a reader sees it: no paths of this machine, and the Hub's own address."""
    return printed.replace(f"{folder}/", "").replace(endpoint, HUB)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(with_transcripts(page)))
