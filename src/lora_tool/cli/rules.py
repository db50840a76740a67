"""`lora-tool rules`: the table of all rules, or the page of one."""

from __future__ import annotations

import json
from typing import Any

import click

import lora_tool.verification.validating  # noqa: F401 - importing it registers every rule
from lora_tool.cli.options import json_option, rule_codes
from lora_tool.cli.terminal import wants_colour
from lora_tool.core.report.findings import Severity
from lora_tool.rules.engine.registry import RULES, Need, Rule, expand

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "blue"}


@click.command("rules", epilog="Example: lora-tool rules LT206")
@click.argument("code", required=False, shell_complete=rule_codes)
@json_option
def command(code: str | None, *, as_json: bool) -> None:
    """List the rules of `validate`, or explain the one called CODE."""
    rules = [RULES[known] for known in sorted(RULES if code is None else expand([code]))]
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "rules": [_json(rule) for rule in rules]}, indent=2))
    elif code is not None and len(rules) == 1:
        click.echo(_page(rules[0]), color=wants_colour())
    else:
        for rule in rules:
            click.echo(_row(rule), color=wants_colour())
        click.echo(
            "\n`lora-tool rules CODE` explains one.\n"
            "`base`: needs the base model; `deep`: reads the weights; `for`: runs with `--for` only."
        )


def _marks(rule: Rule) -> list[str]:
    marks = (("base", Need.BASE in rule.needs), ("deep", rule.deep), ("for", Need.SERVER in rule.needs))
    return [mark for mark, there in marks if there]


def _row(rule: Rule) -> str:
    severity = click.style(f"{rule.severity.value:<7}", fg=_COLOURS[rule.severity])
    return f"{rule.code}  {severity}  {','.join(_marks(rule)):<4}  {rule.title}"


def _page(rule: Rule) -> str:
    severity = click.style(rule.severity.value, fg=_COLOURS[rule.severity])
    marks = {"base": "needs the base model", "deep": "reads the weights", "for": "runs with --for only"}
    notes = "".join(f", {marks[mark]}" for mark in _marks(rule))
    parts = [f"{click.style(rule.code, bold=True)}  {rule.title}", f"{severity}{notes}"]
    parts += [f"{click.style(heading, bold=True)}\n{text}" for heading, text in rule.sections().items()]
    return "\n\n".join(parts)


def _json(rule: Rule) -> dict[str, Any]:
    return {
        "code": rule.code,
        "severity": rule.severity.value,
        "title": rule.title,
        "deep": rule.deep,
        "needs_base": Need.BASE in rule.needs,
        "needs_server": Need.SERVER in rule.needs,
        "page": dict(rule.sections()),
    }
