"""What a report consists of besides its findings."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from lora_tool.core.display import as_options
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report.findings import Severity


class Skipped(Struct, frozen=True, kw_only=True):
    """A rule that could not run on the folder `path`, and why."""

    code: str
    path: str
    reason: str


class Checked(Struct, frozen=True, kw_only=True):
    """A folder that was looked at, what it is, and the codes of the rules that ran on it."""

    path: str
    kind: str
    rules: tuple[str, ...] = ()


class Unread(Struct, frozen=True, kw_only=True):
    """A path that could not be opened or read at all, why, and what to do."""

    path: str
    message: str
    hint: str | None = None
    during: str | None = None
    """What could not be done, where that was not the reading: a stage of `ci`."""

    @classmethod
    def of(cls, path: str, error: LoraToolError) -> Unread:
        """Return the path that could not be read for this error, whose words name options."""
        return cls(path=path, message=as_options(str(error)), hint=error.hint and as_options(error.hint))


class Ignored(Struct, frozen=True, kw_only=True):
    """A rule that was switched off, and the reason that the configuration gives."""

    code: str
    reason: str | None = None


class Page(Protocol):
    """What reports say about a rule itself."""

    @property
    def code(self) -> str: ...
    @property
    def severity(self) -> Severity: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def hint(self) -> str | None: ...
