"""What reading the values of a merged model showed, tensor by tensor: data that the LT6xx rules judge."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from lora_tool.core.choices import TextEnum
from lora_tool.core.tensors import TensorAction, TensorSpec

# What verification found a tensor to be, in one word. Rules read it without loading the evidence.


@enum.unique
class Verdict(TextEnum):
    """The result of comparing a tensor of a merged model."""

    RIGHT = "right"
    """As planned: the bytes of its source, or within the stated bound of the recomputed values."""
    DIFFERENT = "different"
    """Not as planned, and none of the causes below explains it."""
    UNCHANGED = "unchanged"
    """Still the base's values, although the adapter changes the tensor."""
    SCALED = "scaled"
    """W + factor · ΔW, with a factor that is not 1."""
    TRANSPOSED = "transposed"
    """W + ΔWᵀ."""
    MISREAD = "misread"
    """What the base's quantised weight gives where it is read wrongly; `reason` says how."""
    UNRELATED = "unrelated"
    """Changed in another direction than ΔW."""
    UNKNOWN = "unknown"
    """Not recomputed; `reason` says why."""


# The expected model, as a plan hands it to the rules. Not in the plans' own records: few plans are verified.


class ExpectedFile(Protocol):
    """A file next to the weights: copied from `source`, or with `content`."""

    @property
    def filename(self) -> str: ...
    @property
    def source(self) -> Path | None: ...
    @property
    def content(self) -> bytes | None: ...


class Expected(Struct, frozen=True, kw_only=True, eq=False):
    """The model expected from base and adapter: its tensors by name, and its other files."""

    tensors: Mapping[str, TensorSpec]
    files: tuple[ExpectedFile, ...]


MOSTLY_LOST = 0.5
"""A cosine between W' - W and ΔW below this says that rounding left little of ΔW."""


class TensorEvidence(Struct, frozen=True, kw_only=True):
    """One tensor: how it was made (`action`), whether it is right (`verdict`), and how far the two are apart."""

    name: str
    action: TensorAction
    verdict: Verdict
    compared: int
    """Values compared; fewer than the tensor has where only samples were."""
    numel: int
    wrong: int = 0
    """Values outside the bound."""
    first: int | None = None
    """Flat index of the first of them."""
    ulps: float | None = None
    """Largest distance from the recomputation, in ulps of the stored type."""
    distance: float | None = None
    """‖W' - (W + ΔW)‖ / ‖ΔW‖; None where ΔW is zero."""
    factor: float | None = None
    """How often ΔW is in W' - W, by projection: ⟨W' - W, ΔW⟩ / ‖ΔW‖²."""
    cosine: float | None = None
    """Between W' - W and ΔW."""
    unmoved: bool = False
    """Whether every value compared is the base's."""
    scaling: float | None = None
    """The scaling that the adapter gives this tensor's ΔW."""
    rank: int | None = None
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Whether every value was compared."""
        return self.compared == self.numel


class OutputEvidence(Struct, frozen=True, kw_only=True):
    """What merged model and base with unmerged adapter answered to the same inputs, both computed in float32.

    `explained_` figures are of a third run: the unmerged model with every changed weight moved at random by up to half
    a unit in the last place of the merged model's type, which is what storing it may cost.
    """

    what: str
    """"logits" of a language model, "scores" of a classifier."""
    inputs: str
    """What was asked, in words."""
    values: int
    largest: float
    mean: float
    explained_largest: float
    explained_mean: float
    divergence: float | None = None
    """Mean Kullback-Leibler divergence of the next token's distribution, merged from unmerged, in nats."""
    explained_divergence: float | None = None
    same_choice: float | None = None
    """Share of positions, or of texts of a classifier with several labels, with the same first choice."""
    rank_agreement: float | None = None
    """Kendall's tau-b between the two orders that the rewards put the texts in."""
    streamed: bool = True
    """Whether only a layer at a time was in memory."""

    @property
    def allowed_largest(self) -> float:
        """The largest difference that rounding explains: four times that of the third run."""
        return 4 * self.explained_largest + self.noise

    @property
    def allowed_mean(self) -> float:
        """The mean difference that rounding explains: three times that of the third run."""
        return 3 * self.explained_mean + self.noise

    noise: float = 0.0
    """What two float32 runs of one model may differ by."""

    @property
    def explained(self) -> bool:
        """Whether the type of the merged weights explains the differences. NaN is not explained."""
        return self.largest <= self.allowed_largest and self.mean <= self.allowed_mean
