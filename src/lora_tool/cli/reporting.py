"""Where a report goes: to stdout in one form, and to files in any others, so that weights are read once for all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from lora_tool.choices import suggestion
from lora_tool.report.forms import Form

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that names a GitHub Actions step's summary file, which steps add to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    """A form of the report, and the file that it is written to."""

    form: Form
    path: Path

    def write(self, text: str) -> None:
        """Write the file whole or not at all; a job summary is added to. Raises `OSError`, `ExecutionError`."""
        content = f"{text}\n".encode()
        if self._is_added_to():
            with self.path.open("ab") as file:
                file.write(content)
            return
        from lora_tool.execution.folder import replace_file  # noqa: PLC0415 - only for reports in files

        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, content)

    def _is_added_to(self) -> bool:
        """Whether the file is a job summary, or no plain file: a pipe, ``/dev/stderr``."""
        if os.environ.get(SUMMARY) and self.path == Path(os.environ[SUMMARY]):
            return True
        try:
            return not stat.S_ISREG(self.path.stat().st_mode)
        except FileNotFoundError:
            return False


def report_file(value: str, folder: Path | None = None) -> ReportFile:
    """Return what ``junit=report.xml`` means, relative to `folder`. Raises `click.BadParameter`."""
    name, equals, path = value.partition("=")
    known = [form.value for form in Form]
    option = "--report" if folder is None else "report"  # typed, or in the configuration
    if not equals or not path:
        raise click.BadParameter(f"{value!r} is not FORMAT=FILE, such as junit=report.xml", param_hint=option)
    if name not in known:
        raise click.BadParameter(f"unknown format {name!r}. {suggestion(name, known)}", param_hint=option)
    typed = Path(os.path.expanduser(path))  # noqa: PTH111 - Path raises where nobody lives
    at = typed if folder is None else folder / typed
    if at.is_dir():
        raise click.BadParameter(f"{at} is a folder", param_hint=option)
    return ReportFile(form=Form(name), path=at)


def require_different(files: Iterable[ReportFile]) -> None:
    """Return if no two reports go to one file. Raises `click.BadParameter`."""
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise click.BadParameter(f"two reports would be written to {file.path}")
        seen.add(file.path)
