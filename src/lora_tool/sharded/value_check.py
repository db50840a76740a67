"""A check of the values that a plan reads, in parts that can run beside the writing."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from lora_tool.machine import available_cores
from lora_tool.progress import Progress
from lora_tool.report import Finding, Severity


class ValuePart(Protocol):
    """A part of the check: plain data, which can be sent to any machine that sees the same files."""

    @property
    def name(self) -> str:
        """What is looked at, for whoever reads that it failed."""

    @property
    def nbytes(self) -> int:
        """How many bytes it reports."""

    def run(self, advance: Progress) -> list[Finding]:
        """Read the values and return what is wrong with them. `advance` is called with the bytes, and may raise to stop it."""


class ValueCheck(Struct, frozen=True, kw_only=True):
    """A check of the values of tensors that has not run yet."""

    nbytes: int
    """How many bytes it reads."""
    parts: tuple[ValuePart, ...]
    """Its parts, which may run at the same time."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the codes of errors that do not stop the plan."""

    def run(self, advance: Progress) -> list[Finding]:
        """Run all parts and return what they find, in their order. Raises what they raise."""
        from concurrent.futures import CancelledError, ThreadPoolExecutor  # slow, and plans do not run

        stop = threading.Event()

        def go_on(nbytes: int) -> None:
            if stop.is_set():
                raise CancelledError
            advance(nbytes)

        with ThreadPoolExecutor(min(4, available_cores())) as workers:
            try:
                found = [*workers.map(lambda part: part.run(go_on), self.parts)]
            except BaseException:
                stop.set()
                raise
        return [fault for part in found for fault in part]


def refuse_errors(found: Iterable[Finding], ignored: tuple[str, ...]) -> tuple[Finding, ...]:
    """Return the findings if none of them is an error, or all errors are `ignored`, by the beginnings of their codes.
    Raises `FindingsFound` with the other errors.
    """
    kept = tuple(found)
    errors = tuple(f for f in kept if f.severity is Severity.ERROR and not (ignored and f.code.startswith(ignored)))
    if errors:
        from lora_tool.report import Report  # what a whole report is made of, for errors alone

        codes = ",".join(sorted({error.code for error in errors}))
        Report(findings=errors).raise_at(Severity.ERROR, hint=f'to continue despite these errors: `ignore="{codes}"`')
    return kept
