"""Where a report goes: to stdout in one form, and to files in any others, so that weights are read once for all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from lora_tool.cli.configuration import Configuration
from lora_tool.cli.exit_codes import DONE, FAILED_CHECK, FINDINGS
from lora_tool.core.choices import suggestion
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form, rendered
from lora_tool.core.report.model import Report
from lora_tool.formats.files import expanded
from lora_tool.rules.engine.registry import RULES

if TYPE_CHECKING:
    from lora_tool.verification.verified import Verification

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that names a GitHub Actions step's summary file, which steps add to."""


class ReportFile(Struct, frozen=True, kw_only=True):
    """A form of the report, and the file that it is written to."""

    form: Form
    path: Path

    def write(self, text: str) -> None:
        """Write the file whole or not at all; a job summary is added to. Raises `LoraToolError`."""
        from lora_tool.execution.folder import replace_file  # only for reports in files

        content = f"{text}\n".encode()
        try:
            if self._is_added_to():
                with self.path.open("ab") as file:
                    file.write(content)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, content)
        except OSError as error:
            raise LoraToolError(f"{self.path}: the report cannot be written: {error.strerror}") from error

    def _is_added_to(self) -> bool:
        """Whether the file is a job summary, or no plain file: a pipe, ``/dev/stderr``."""
        if os.environ.get(SUMMARY) and self.path == Path(os.environ[SUMMARY]):
            return True
        try:
            return not stat.S_ISREG(self.path.stat().st_mode)
        except FileNotFoundError:
            return False


class Reporting(Struct, frozen=True, kw_only=True):
    """What a command does with its report: the form that is printed, the files, and what makes the command fail."""

    form: Form
    files: tuple[ReportFile, ...]
    fail_on: Severity
    strict: bool
    """Whether warnings fail whatever `fail_on` is, and rules that could not run."""

    @property
    def least(self) -> Severity:
        return Severity.WARNING if self.strict else self.fail_on

    def write_files(self, text: Callable[[Form], str]) -> None:
        """Write every file, with the `text` of its form. Raises `LoraToolError`."""
        for file in self.files:
            file.write(text(file.form))

    def fails(self, report: Report) -> bool:
        """Return whether the command fails: for a finding, and if `strict` for a rule that could not run."""
        return bool(report.at_least(self.least) or (self.strict and report.skipped))

    def code_of(self, verification: Verification) -> int:
        """Return the exit code of a folder that was verified."""
        if not self.fails(verification.report):
            return DONE
        failing = verification.report.at_least(self.least)
        return FINDINGS if failing and not verification.says_wrong(self.least) else FAILED_CHECK


def report_files(typed: Sequence[str], configured: Configuration | None = None) -> tuple[ReportFile, ...]:
    """Return the files that were typed, ``junit=report.xml``, else those of the configuration, relative to its folder.

    Raises `click.BadParameter`, for two reports in one file, too.
    """
    if typed or configured is None or configured.path is None:
        files = [_report_file(value, Path(), "--report") for value in typed]
    else:
        files = [_report_file(value, configured.path.parent, "report") for value in configured.reports]
    paths = [file.path for file in files]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"--report would write two reports to {twice}")
    return tuple(files)


def _report_file(value: str, folder: Path, option: str) -> ReportFile:
    name, equals, path = value.partition("=")
    known = [form.value for form in Form]
    if not equals or not path:
        raise click.BadParameter(f"{value!r} is not FORMAT=FILE, such as junit=report.xml", param_hint=option)
    if name not in known:
        raise click.BadParameter(f"unknown format {name!r}. {suggestion(name, known)}", param_hint=option)
    at = folder / expanded(path)
    if at.is_dir():
        raise click.BadParameter(f"{at} is a folder", param_hint=option)
    return ReportFile(form=Form(name), path=at)


def report_text(report: Report, form: Form, fail_on: Severity, *, color: bool = False) -> str:
    """Return the report in the form; only text is coloured."""
    return rendered(report, form, pages=RULES, fail_on=fail_on, color=color and form is Form.TEXT)
