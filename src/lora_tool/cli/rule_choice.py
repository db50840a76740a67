"""Which rules judge, and from which severity on findings fail: `--select`, `--ignore`, `--fail-on`, and lora-tool.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from lora_tool.cli.configuration import Configuration
from lora_tool.report.findings import Severity
from lora_tool.report.model import Ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChoice:
    """What command line and configuration together ask of the rules."""

    select: tuple[str, ...]
    ignored: tuple[Ignored, ...]
    fail_on: Severity

    @property
    def ignore(self) -> tuple[str, ...]:
        """The codes of the ignored rules."""
        return tuple(ignored.code for ignored in self.ignored)

    def arguments(self) -> dict[str, Any]:
        """Return what `plan_merge` takes."""
        return {"select": self.select, "ignore": self.ignore, "fail_on": self.fail_on}


def rule_choice(ctx: click.Context, options: Mapping[str, Any], configured: Configuration) -> RuleChoice:
    """Return the rules that were chosen: the command line's before the configuration's, what both ignore together.

    `options` are the command's; without "select" the configuration's holds. Raises `UnknownRule`.
    """
    import lora_tool.rules.judging  # noqa: F401, PLC0415 - it registers the rules
    from lora_tool.rules.engine.registry import expand  # noqa: PLC0415

    reasons = dict.fromkeys(sorted(expand(options["ignore"]))) | {
        known: reason for code, reason in configured.ignore.items() for known in sorted(expand([code]))
    }
    select = options.get("select") or configured.select
    expand(select)
    silent = ctx.get_parameter_source("fail_on") in (ParameterSource.DEFAULT, None)
    configured_level = silent and "fail-on" not in configured.ci and configured.fail_on
    return RuleChoice(
        select=tuple(select),
        ignored=tuple(Ignored(code=code, reason=reason) for code, reason in sorted(reasons.items())),
        fail_on=Severity(configured_level or options["fail_on"]),
    )
