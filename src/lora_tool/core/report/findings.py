"""A finding: one thing that is wrong, and how bad it is. Plans hold them too, and need nothing else of a report."""

from __future__ import annotations

import enum

from msgspec import Struct

from lora_tool.core.choices import Choice


@enum.unique
class Severity(Choice):
    """How bad a finding is. ERROR: the folder does not work, or does not do what was trained. Severities compare by
    weight.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """3 for an error, 2 for a warning, 1 for info."""
        return _WEIGHTS[self]

    def __lt__(self, other: str) -> bool:
        return self.weight < Severity(other).weight

    def __le__(self, other: str) -> bool:
        return self.weight <= Severity(other).weight

    def __gt__(self, other: str) -> bool:
        return self.weight > Severity(other).weight

    def __ge__(self, other: str) -> bool:
        return self.weight >= Severity(other).weight


_WEIGHTS = {Severity.ERROR: 3, Severity.WARNING: 2, Severity.INFO: 1}


class Finding(Struct, frozen=True, kw_only=True):
    """One fault: the rule's code, the file, the tensor or field in it, and what to do."""

    code: str
    severity: Severity
    path: str
    subject: str | None
    message: str
    hint: str | None

    def __str__(self) -> str:
        where = f"{self.path}: `{self.subject}`" if self.subject else self.path
        return f"{self.code} {where}: {self.message}"
