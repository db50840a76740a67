"""The forms of a report by name, and one way to ask for any of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.core.choices import Choice
from lora_tool.core.display import json_text
from lora_tool.core.report.findings import Severity

if TYPE_CHECKING:
    from lora_tool.core.report.model import Page, Report


@enum.unique
class Form(Choice):
    """The forms in which a report can be written."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    """Annotations of a GitHub Actions step."""
    MARKDOWN = "markdown"
    """A job summary, or a comment."""
    JUNIT = "junit"
    SARIF = "sarif"


def rendered(
    report: Report,
    form: Form,
    *,
    pages: Mapping[str, Page],
    fail_on: Severity = Severity.ERROR,
    root: Path | None = None,
    color: bool = False,
) -> str:
    """Return the report in the form, without a line break at its end.

    `pages` are those of all rules, `fail_on` is the severity from which a JUnit test fails, and `root` the folder that
    GitHub's and SARIF's paths are relative to (the working directory).
    """
    where = Path.cwd() if root is None else root
    # each form is imported where it is asked for: a check in a terminal needs none but text
    if form is Form.TEXT:
        return report.text(color=color)
    if form is Form.JSON:
        return json_text(report.to_json(), spread=2)
    if form is Form.GITHUB:
        from lora_tool.core.report.github import report_github

        return report_github(report, pages=pages, root=where)
    if form is Form.MARKDOWN:
        from lora_tool.core.report.markdown import report_markdown

        return report_markdown(report, pages=pages)
    if form is Form.JUNIT:
        from lora_tool.core.report.junit import report_junit

        return report_junit(report, pages=pages, fail_on=fail_on)
    from lora_tool.core.report.sarif import report_sarif

    return json_text(report_sarif(report, pages=pages, root=where), spread=4)
