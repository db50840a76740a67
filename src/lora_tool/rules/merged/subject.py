"""A merged model with the plan of its merge and the evidence from reading its values."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import field

from lora_tool.checkpoints import MERGED_MODEL
from lora_tool.core.errors import Defect
from lora_tool.core.tensors import TensorAction, TensorSpec
from lora_tool.formats.quantised.encodings import encoding_of, parts
from lora_tool.rules.engine.registry import Need
from lora_tool.rules.engine.subjects import Matter, ModelSubject
from lora_tool.rules.merged.evidence import MOSTLY_LOST, Expected, Verdict

if TYPE_CHECKING:
    from lora_tool.rules.merged.evidence import OutputEvidence, TensorEvidence
    from lora_tool.rules.merged.pairs import PairEvidence


class MergedSubject(ModelSubject, frozen=True, kw_only=True, eq=False, dict=True):
    """A merged model with the plan that base and adapter give, made now; `evidence` by tensor name."""

    planned: Expected | None
    """What the plan of the same merge, made now, would write; None where none can be made."""
    why_no_plan: str = ""
    evidence: Mapping[str, TensorEvidence] = field(default_factory=dict)
    recomputed: bool = False
    """Whether the changed tensors were computed a second time, not only compared with the base's bytes."""
    outputs: OutputEvidence | None = None
    """What both models answered, where they were asked."""
    pairs: PairEvidence | None = None
    """How both models ranked pairs of texts, where there were any."""
    base_name: str | None = None
    """What the base is called in messages."""
    adapter_names: tuple[str, ...] = ()
    """What the adapters are called in commands."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the inputs that the plan was made from, by the manifest's names."""

    @property
    def kind(self) -> str:
        """A merged model, whoever merged it."""
        return str(MERGED_MODEL)

    @property
    def expected(self) -> Mapping[str, TensorSpec] | None:
        """The tensors that the folder should hold, by the plan."""
        return None if self.planned is None else self.planned.tensors

    @property
    def named(self) -> Mapping[str, str]:
        """See `Subject`."""
        adapters = {"ADAPTER": shlex.join(self.adapter_names)} if self.adapter_names else {}
        if self.base_name is None:  # just written, and still under another name
            return adapters
        base = dict.fromkeys(("BASE", "QUANTISED"), shlex.quote(self.base_name))
        return {**super().named, "MERGED": shlex.quote(str(self.checkpoint.root)), **base, **adapters}

    def why_not(self, needs: frozenset[Need]) -> str | None:
        """Return why a rule with these needs would say nothing true; None if it can run."""
        if self.planned is None and needs & {Need.PLAN, Need.COMPARED, Need.RECOMPUTED}:
            return self.why_no_plan
        if not self.evidence and needs & {Need.COMPARED, Need.RECOMPUTED}:
            return "the values were not compared; lora-tool verify compares them"
        if not self.recomputed and Need.RECOMPUTED in needs:
            return "the merged values were not computed again; lora-tool verify computes them"
        return None

    def has(self, matter: Matter | Defect) -> bool:
        """See `Subject`."""
        return self._deviates if matter is Matter.DEVIATION else super().has(matter)

    @cached_property
    def _deviates(self) -> bool:
        return any(
            found.verdict is not Verdict.RIGHT or (found.distance is not None and (found.cosine or 0.0) < MOSTLY_LOST)
            for found in self.evidence.values()
        )

    def merged(self) -> Iterator[TensorEvidence]:
        """Yield the evidence of the tensors that the adapter changes."""
        for found in self.evidence.values():
            if found.action is TensorAction.MERGED:
                yield found

    def kept(self) -> Iterator[TensorEvidence]:
        """Yield the evidence of the base's tensors that the adapter does not change."""
        for found in self.evidence.values():
            if found.action in _KEPT:
                yield found

    @cached_property
    def quantised_parts(self) -> Mapping[str, str]:
        """Tensor on disk → the quantised weight that it is a part of."""
        found = [each for tensor in self.matrices.values() if (each := encoding_of(tensor)) is not None]
        return {part.name: each.spec.name for each in found for part in parts(each)}

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
        """Whether most tensors that the adapter does not change differ from the base's; never in models that we wrote.

        Where all unquantised ones are the base's, the base is right, and the others were only quantised again.
        """
        if self.base_name is None:
            return False
        kept = tuple(self.kept())
        plain = [found for found in kept if found.name not in self.quantised_parts]
        if len(plain) < len(kept) and plain and all(found.verdict is Verdict.RIGHT for found in plain):
            return False
        other = sum(found.verdict not in (Verdict.RIGHT, Verdict.MISREAD) for found in kept)
        return other >= _SEVERAL and 2 * other > len(kept)


class ComputedAdapter(MergedSubject, frozen=True, kw_only=True, eq=False, dict=True):
    """An adapter that was computed from others, with the adapter expected from them."""

    @property
    def kind(self) -> str:
        """An adapter, which rules of models say nothing about."""
        return "adapter"


_KEPT = frozenset({TensorAction.COPIED, TensorAction.CAST, TensorAction.DEQUANTISED, TensorAction.RESCALED})
_SEVERAL = 2
