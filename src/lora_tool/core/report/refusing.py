"""Refusing to go on with errors that nobody ignores."""

from __future__ import annotations

from collections.abc import Iterable

from lora_tool.core.report.findings import Finding, Severity


def refuse_errors(found: Iterable[Finding], ignored: tuple[str, ...]) -> tuple[Finding, ...]:
    """Return the findings if none of them is an error, or all errors are `ignored`, by the beginnings of their codes.
    Raises `FindingsFound` with the other errors.
    """
    kept = tuple(found)
    errors = tuple(f for f in kept if f.severity is Severity.ERROR and not (ignored and f.code.startswith(ignored)))
    if errors:
        from lora_tool.core.report.model import Report  # for errors alone: it draws every form of a report

        codes = ",".join(sorted({error.code for error in errors}))
        Report(findings=errors).raise_at(Severity.ERROR, hint=f'to continue despite these errors: `ignore="{codes}"`')
    return kept
