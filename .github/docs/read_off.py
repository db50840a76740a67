"""Generate the pages on rules, exit codes, commands, schemas and the Python API from the program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import lora_tool
import lora_tool.verification.validating
from lora_tool.cli.exit_codes import MEANINGS
from lora_tool.cli.main import all_commands, cli
from lora_tool.rules.engine.registry import RULES, Rule

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FAMILIES = {
    "LT1": "The files themselves",
    "LT2": "An adapter",
    "LT3": "The head of a classifier or reward model",
    "LT4": "Rank files of DeepSpeed and FSDP",
    "LT5": "An adapter against its base",
    "LT6": "A merged model",
    "LT7": "A training run",
    "LT8": "An adapter for a server, with `--for`",
}
"""How the codes of a family begin → what its rules judge."""


def rules() -> Iterator[str]:
    """Yield the page of every rule, as Markdown, by family; each has its code as an anchor."""
    for family, about in FAMILIES.items():
        yield f"## {about}\n"
        for code in sorted(code for code in RULES if code.startswith(family)):
            yield from _rule(RULES[code])


def _rule(rule: Rule) -> Iterator[str]:
    yield f"({rule.code})=\n### {rule.code} {_plain(rule.title)}\n\n*{rule.severity.value}*\n"
    for heading, text in rule.sections().items():
        yield f"**{heading}.** {_plain(text)}\n"


def exit_codes() -> Iterator[str]:
    """Yield the table of exit codes."""
    yield "| exit code | means |\n|---|---|"
    yield from (f"| {code} | {meaning.replace('|', chr(92) + '|')} |" for code, meaning in MEANINGS.items())


def commands() -> Iterator[str]:
    """Yield a section for each command: its help, its options, its example."""
    for name in all_commands():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield f"```{{eval-rst}}\n.. click:: {command.callback.__module__}:command\n   :prog: lora-tool {name}\n```\n"


def schemas() -> Iterator[str]:
    """Yield the JSON schemas that are published with the package."""
    for path in (
        "core/report/report.schema.json",
        "workflows/ci/ci.schema.json",
        "workflows/ci/ci-each.schema.json",
        "workflows/inspection/inspect.schema.json",
    ):
        table = json.loads(resources.files(lora_tool).joinpath(path).read_text())
        yield f"## {table['title']}\n\n{table['description']}\n"
        yield "| field | holds |\n|---|---|"
        yield from (f"| `{field}` | {held} |" for field, held in _fields(table, ""))
        yield f"\n```json\n{json.dumps(table, indent=2)}\n```\n"


def _fields(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, entry in table.get("properties", {}).items():
        yield prefix + name, entry.get("description") or _type(entry)
        inner = entry.get("items", entry)
        if "$ref" not in inner:
            yield from _fields(inner, f"{prefix}{name}[]." if "items" in entry else f"{prefix}{name}.")


def _type(entry: Mapping[str, Any]) -> str:
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if "const" in entry:
        return f"always `{entry['const']}`"
    if "$ref" in entry:
        return "a report, as above" if entry["$ref"].startswith("urn:") else f"a {entry['$ref'].rpartition('/')[2]}"
    types = entry.get("type", "any value")
    return " or ".join(types) if isinstance(types, list) else types


def face() -> Iterator[str]:
    """Yield the documentation of every name that `from lora_tool import` gives, functions first."""
    names = [name for name in lora_tool.__all__ if name != "__version__"]
    functions = [name for name in names if name.islower()]
    yield "## Functions\n\n```{eval-rst}"
    yield from (f".. autofunction:: lora_tool.{name}\n" for name in functions)
    yield "```\n\n## Types\n\n```{eval-rst}"
    for name in sorted(set(names) - set(functions)):
        value = getattr(lora_tool, name)
        if isinstance(value, UnionType):
            yield f".. py:data:: lora_tool.{name}\n   :type: {' | '.join(each.__name__ for each in value.__args__)}\n"
            continue
        kind = "autoclass" if isinstance(value, type) else "autodata"
        yield f".. {kind}:: lora_tool.{name}\n   {':members:' if kind == 'autoclass' else ':no-value:'}\n"
    yield "```\n"


def _plain(text: str) -> str:
    """Return a page's text with what Markdown would take for markup, outside of code, escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]{}$#])", r"\\\1", part) for part in parts)


READ_OFF = {
    "rules": rules,
    "exit-codes": exit_codes,
    "commands": commands,
    "schemas": schemas,
    "python": face,
}


class ReadOff(SphinxDirective):
    """A directive `read-off` with the name of what is to be written here."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the Markdown that is read off the program."""
        text = "\n".join(READ_OFF[self.arguments[0]]())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _plain_help(_app: Sphinx, _context: click.Context, lines: list[str]) -> None:
    """Keep the asterisk of `plots/*.png` one, in what sphinx-click makes of a command's help."""
    lines[:] = [line.replace("*", "\\*") for line in lines]


def _said_once(_app: Sphinx, _context: click.Context, lines: list[str]) -> None:
    """Leave out the variable of every option, whose name is made of the option's."""
    lines.clear()


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt beside the pages: what each is called and answers, in the form of https://llmstxt.org."""
    if error is not None or app.builder.format != "html":
        return
    lines = ["# lora-tool", "", f"> {cli.help.splitlines()[0] if cli.help else ''}", ""]
    lines += ["- [SKILL.md](lora-tool/SKILL.md): the commands, exit codes and `--json` for an agent"]
    for page in app.env.toctree_includes["index"]:
        lines.append(f"- [{app.env.titles[page].astext()}]({page}.html)")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Enter the directive, and what is mended of sphinx-click's text."""
    app.add_directive("read-off", ReadOff)
    for part in ("description", "options", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _plain_help)
    app.connect("sphinx-click-process-envvars", _said_once)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True}
