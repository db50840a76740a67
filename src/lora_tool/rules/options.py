"""The options that choose rules: what `validate` needs of options that several use cases share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lora_tool.core.choices import codes, wrong_value
from lora_tool.core.options import Options, Section, option
from lora_tool.core.report.findings import Severity


def severity(given: object) -> Severity:
    """Return the severity at which findings fail. Raises `WrongValue` for everything but "error" and "warning"."""
    if given not in (Severity.ERROR, Severity.WARNING):
        raise wrong_value("severity", given, [Severity.ERROR.value, Severity.WARNING.value])
    return Severity(given)


@dataclass(frozen=True, kw_only=True)
class IgnoreOptions(Options):
    """Which rules do not run."""

    common: ClassVar[bool] = True
    section = Section.CHECKS

    ignore: Iterable[str] = option((), "Rules not to run.", parse=codes)


@dataclass(frozen=True, kw_only=True)
class SelectOptions(IgnoreOptions):
    """Which rules run."""

    common: ClassVar[bool] = True
    section = Section.CHECKS

    select: Iterable[str] = option((), "Run only these rules: LT206, or LT2 for all LT2xx.", parse=codes)


@dataclass(frozen=True, kw_only=True)
class RuleOptions(SelectOptions):
    """Which rules run, and from which severity on their findings fail."""

    common: ClassVar[bool] = True
    section = Section.CHECKS

    fail_on: Severity | str = option(
        Severity.ERROR, "Fail on findings of this severity or worse.", parse=severity, metavar="[error|warning]"
    )
