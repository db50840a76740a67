"""A merged model beside what it should be: the plan of its merge, and what reading its values showed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_tool.checkpoint import Kind
from lora_tool.plan.fates import Fate
from lora_tool.rules.evidence import OutputEvidence, TensorEvidence, Verdict
from lora_tool.rules.registry import Need
from lora_tool.rules.subject import ModelSubject
from lora_tool.tensors import TensorSpec

if TYPE_CHECKING:
    from lora_tool.plan.model import Plan, Step  # slow to import, and for merged models only


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSubject(ModelSubject):
    """A merged model with the plan that base and adapter give, made now; `evidence` by tensor name."""

    plan: Plan | None
    why_no_plan: str = ""
    evidence: Mapping[str, TensorEvidence] = field(default_factory=dict)
    recomputed: bool = False
    """Whether the changed tensors were computed a second time, not only compared with the base's bytes."""
    outputs: OutputEvidence | None = None
    """What both models answered, where they were asked."""
    base: str | None = None
    """What the base is called in messages."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the inputs that the plan was made from, by the manifest's names."""

    @property
    def kind(self) -> str:
        """A merged model, whoever merged it."""
        return str(Kind.MERGED_MODEL)

    @property
    def expected(self) -> Mapping[str, TensorSpec] | None:
        """The tensors that the folder should hold, by the plan."""
        return None if self.plan is None else {step.out.name: step.out for step in self.plan.steps}

    def why_not(self, needs: frozenset[Need]) -> str | None:
        """Return why a rule with these needs would say nothing true; None if it can run."""
        if self.plan is None and needs & {Need.PLAN, Need.COMPARED, Need.RECOMPUTED}:
            return self.why_no_plan
        if not self.evidence and needs & {Need.COMPARED, Need.RECOMPUTED}:
            return "the values were not compared: lora-tool verify does"
        if not self.recomputed and Need.RECOMPUTED in needs:
            return "the merged values were not computed again: lora-tool verify does"
        return None

    def steps(self) -> Iterator[Step]:
        """Yield the plan's steps."""
        if self.plan is not None:
            yield from self.plan.steps

    def merged(self) -> Iterator[TensorEvidence]:
        """Yield the evidence of the tensors that the adapter changes."""
        return (found for found in self.evidence.values() if found.fate is Fate.MERGED)

    def kept(self) -> Iterator[TensorEvidence]:
        """Yield the evidence of the base's tensors that the adapter leaves alone."""
        return (found for found in self.evidence.values() if found.fate in (Fate.COPIED, Fate.CAST))

    @property
    def carries_nothing(self) -> bool:
        """Whether every tensor that the adapter changes is the base's."""
        merged = tuple(self.merged())
        return bool(merged) and all(found.verdict is Verdict.UNCHANGED for found in merged)

    @property
    def another_adapter(self) -> bool:
        """Whether every tensor that the adapter changes was changed, each in another direction than the adapter's."""
        merged = tuple(self.merged())
        return bool(merged) and all(found.verdict is Verdict.UNRELATED for found in merged)

    @property
    def another_base(self) -> bool:
        """Whether most of the tensors that the adapter leaves alone are not the base's; what we wrote has no other."""
        if self.base is None:
            return False
        kept = tuple(self.kept())
        other = sum(found.verdict is not Verdict.RIGHT for found in kept)
        return other >= _SEVERAL and 2 * other > len(kept)


_SEVERAL = 2
