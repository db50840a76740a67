"""Looks at the values of a plan's inputs, each taken once for one folder, whoever writes into it."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from lora_tool.core.progress import Progress
from lora_tool.core.report import Finding
from lora_tool.execution.journal import Journal
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.training.value_check import ValuePart


class RecordedLook(Struct, frozen=True, kw_only=True):
    """A part of the check of values that is taken once, and recorded: a `ValuePart` itself."""

    look: ValuePart
    number: int
    folder: Path
    digest: str

    @property
    def name(self) -> str:
        return self.look.name

    @property
    def nbytes(self) -> int:
        return self.look.nbytes

    def run(self, advance: Progress) -> list[Finding]:
        """Return what the look finds, or has found before."""
        journal = Journal(self.folder, self.digest)
        found = journal.looked(self.number)
        if found is not None:
            advance(self.nbytes)
            return list(found)
        findings = self.look.run(advance)
        journal.add_look(self.number, findings)
        return findings


def recorded_looks(plan: Plan, journal: Journal) -> tuple[RecordedLook, ...]:
    """Return the parts of the check of the plan's values, each of which is taken once for the journal's folder."""
    looks = plan.values.parts if plan.values else ()
    return tuple(
        RecordedLook(look=look, number=number, folder=journal.folder, digest=journal.digest)
        for number, look in enumerate(looks)
    )
