"""`lora-tool merge --each`: every adapter on its own, with one table at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from msgspec.structs import replace

from lora_tool.cli.exit_codes import DONE, exit_code
from lora_tool.cli.terminal import say, show_error, show_findings, warn
from lora_tool.cli.writing import caller
from lora_tool.core.display import as_cell, duration, printable, size
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report.findings import Finding
from lora_tool.plans.merge.options import MergeArguments
from lora_tool.workflows.merge_each import MergedOne, merge_each


def show_each(adapters: Sequence[str], options: MergeArguments, typed: Mapping[str, Any]) -> int:
    """Merge, or plan, each adapter on its own; return the exit code of the worst. Raises as `merge_each` does."""
    dry_run, as_json, quiet = typed["dry_run"], typed["as_json"], typed["quiet"]
    shown = _Shown()
    how = replace(caller(typed), findings=shown.findings)
    done = merge_each(adapters, options, how, shown.ended)
    codes = [DONE if one.error is None else exit_code(one.error) for one in done]
    if as_json:
        outputs = [{**one.to_json(), "exit_code": code} for one, code in zip(done, codes, strict=True)]
        click.echo(json.dumps({"schema_version": 1, "outputs": outputs}, indent=2))
    elif not quiet:
        from lora_tool.cli.tables import show_table  # rich, only where it is shown

        columns = ("name", "verdict", "size>", "time>", "why not")
        show_table(columns, (_row(one, dry_run=dry_run) for one in done))
        written = sum(one.passed and not one.finished_before for one in done)
        say(f"{'would write' if dry_run else 'wrote'} {written} of {len(done)}: {printable(str(options.out))}")
    return max(codes)


class _Shown:
    """Prints to stderr while the work goes on. A finding or warning that several adapters share is printed once."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def findings(self, found: Sequence[Finding]) -> None:
        """Show those that were not shown before."""
        show_findings(each for each in found if self._is_new(each))

    def ended(self, one: MergedOne) -> None:
        """Say what is to be known of an adapter besides its row."""
        for note in one.notes:
            click.echo(printable(f"{one.name}: {note}"), err=True)
        if one.error is not None:
            click.echo(printable(f"{one.name}: refused"), err=True)
            show_error(one.error)
        elif one.plan is not None:
            self.findings(one.plan.findings)
            known = {str(finding) for finding in one.plan.findings}
            for warning in one.written.warnings if one.written is not None else one.plan.warnings:
                if warning not in known and self._is_new(warning):
                    warn(f"{one.name}: {warning}")

    def _is_new(self, what: object) -> bool:
        is_new = what not in self._said
        self._said.add(what)
        return is_new


def _row(one: MergedOne, *, dry_run: bool) -> Iterator[str]:
    yield one.name
    if one.error is not None:
        yield "refused"
    elif one.finished_before:
        yield "finished before"
    elif dry_run:
        yield "would be written"
    else:
        yield "verified" if one.written is not None and one.written.verification is not None else "written"
    yield "" if one.data_bytes is None or one.error is not None else size(one.data_bytes)
    yield duration(one.seconds)
    report = one.error.report if isinstance(one.error, FindingsFound) else None
    first = report.findings[0] if report is not None and report.findings else one.error
    yield "" if first is None else as_cell(str(first))
