"""The terms of a delta: each is one adapter's addition to a weight or a bias."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.plans.core.operation import InputNames, input_of

if TYPE_CHECKING:
    from lora_tool.plans.core.operation import ReadValues, Values


class LoraTerm(Struct, frozen=True, kw_only=True):
    """One adapter's share of a delta: `scaling` · B·A, with A of shape [r, in] and B of shape [out, r]."""

    a: StoredTensor
    b: StoredTensor
    scaling: float
    experts: int = 1
    """How many experts' factors A and B hold: A [experts·r, in] one below the other, B [out, r·experts] by `layout`."""
    expert: int = 0
    layout: ExpertLayout = ExpertLayout.RANK_MAJOR
    first: int = 0
    """Which row of the delta, as W is stored, belongs to the first row of the operation's source."""

    @property
    def rank(self) -> int:
        """The rank of one expert's delta."""
        return self.a.shape[0] // self.experts

    def __str__(self) -> str:
        return _told(self.rank, self.experts, self.scaling)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        """Return the term as JSON data."""
        found = {"a": self.a.name, "b": self.b.name, "rank": self.rank, "scaling": self.scaling}
        if self.experts > 1:
            found |= {"experts": self.experts, "expert": self.expert, "layout": self.layout.value}
        if self.first:
            found["first"] = self.first
        return {**found, **input_of(self.a, input_names)}

    def reference(self, read: ReadValues, source: StoredTensor, *, transposed: bool) -> Values:
        """Return the rows of scaling·(B·A), as W is stored, that belong to the rows of `source`."""
        own = slice(self.expert * self.rank, (self.expert + 1) * self.rank)
        spread = slice(self.expert, None, self.experts)
        grouped = self.experts == 1 or self.layout is ExpertLayout.GROUPED_BY_EXPERT
        delta = self.scaling * (read(self.b)[:, own if grouped else spread] @ read(self.a)[own])
        return (delta.T if transposed else delta)[self.first : self.first + source.shape[0]]


@lru_cache
def _told(rank: int, experts: int, scaling: float) -> str:
    """Return a term in words: those of one adapter are mostly the same, and there may be 50,000."""
    return f"rank {rank}{f' on {experts} experts' if experts > 1 else ''}, scaling {scaling:g}"


class BiasTerm(Struct, frozen=True, kw_only=True):
    """One adapter's share of a bias: `scaling` · the bias of its lora_B."""

    bias: StoredTensor
    scaling: float

    def __str__(self) -> str:
        return f"scaling {self.scaling:g}"

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        """Return the term as JSON data."""
        return {"bias": self.bias.name, "scaling": self.scaling, **input_of(self.bias, input_names)}
