"""What of the README the program knows itself, tables and transcripts; `python -m tests.readme` writes it anew."""

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
from lora_tool.cli.main import COMMANDS, cli
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import RULES, Rule
from lora_tool.validation.validating import validate

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


FAMILIES = {
    "LT1": "the files themselves",
    "LT2": "an adapter",
    "LT3": "the head of a classifier or reward model",
    "LT4": "rank files of DeepSpeed and FSDP",
    "LT5": "an adapter against its base",
    "LT6": "a merged model",
    "LT7": "a training run",
    "LT8": "an adapter for a server, with `--for`",
}
"""How the codes of a family begin → what its rules judge."""


def rule_table() -> str:
    """Return every rule with its title, by family; those that are no errors say so."""
    assert validate.__module__ == "lora_tool.validation.validating"  # importing it registers every rule
    lines = ["| about | rules |", "|---|---|"]
    for family, about in FAMILIES.items():
        rules = [rule for code, rule in sorted(RULES.items()) if code.startswith(family)]
        lines.append(f"| {about} | {' · '.join(map(_rule, rules))} |")
    assert sum(text.count("**LT") for text in lines) == len(RULES), "a family is missing"
    return "\n".join(lines)


def _rule(rule: Rule) -> str:
    mark = "" if rule.severity is Severity.ERROR else f" ({rule.severity.value})"
    return f"**{rule.code}** {rule.title}{mark}"


def exit_code_table() -> str:
    """Return every exit code with its meaning, as `lora-tool --help` has it."""
    rows = [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| exit code | means |", "|---|---|", *rows])


TABLES = {"commands": command_table, "exit codes": exit_code_table, "rules": rule_table}


def rewritten(text: str) -> str:
    """Return the README with its generated tables as they should be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        assert text.count(begin) == 1, name
        head, _, rest = text.partition(begin)
        text = head + begin + table() + end + rest.partition(end)[2]
    return text


JOURNEY = "<!-- journey -->\n"
"""Stands before the transcript of the whole way, from training to a model that is loaded from the Hub."""
_BLOCK = re.compile(r"(^```console\n.*?^```$)", re.MULTILINE | re.DOTALL)
HUB = "https://huggingface.co"


def transcripts(text: str) -> list[list[tuple[str, str]]]:
    """Return for each transcript, the journey's first, its commands and what they print."""
    parts = _BLOCK.split(text)
    blocks = [(not before.endswith(JOURNEY), block) for before, block in zip(parts[::2], parts[1::2], strict=False)]
    split = [
        re.split(r"^\$ (.+)\n", block[len("```console\n") : -len("```")], flags=re.MULTILINE)
        for _, block in sorted(blocks, key=lambda pair: pair[0])
    ]
    return [list(zip(lines[1::2], lines[2::2], strict=True)) for lines in split]


def with_transcripts(text: str) -> str:
    """Return the README with what its commands print now, run one after the other beside a copy of the fixtures."""
    parts = _BLOCK.split(text)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(README.parent / "fixtures", Path(folder, "fixtures"))
        for at in range(1, len(parts), 2):
            lines = re.findall(r"^\$ (.+)$", parts[at], re.MULTILINE)
            # loopback Hub and pytest are for the journey alone, and only when it is travelled
            with _hub(Path(folder)) if parts[at - 1].endswith(JOURNEY) else nullcontext() as environment:
                printed = [f"$ {line}\n{_printed(line, Path(folder), environment)}" for line in lines]
            parts[at] = f"```console\n{''.join(printed)}```"
    return "".join(parts)


@contextmanager
def _hub(folder: Path) -> Iterator[Mapping[str, str]]:
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


def as_shown(printed: str, folder: Path, endpoint: str) -> str:
    """Return what a command printed as a reader sees it: no paths of this machine, and the Hub's own address."""
    return printed.replace(f"{folder}/", "").replace(endpoint, HUB)


if __name__ == "__main__":
    README.write_text(with_transcripts(rewritten(README.read_text())))
