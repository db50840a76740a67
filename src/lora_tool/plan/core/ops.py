"""The operations that make output tensors: frozen data, a closed union."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lora_tool.choices import Choice
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.tensors import StoredTensor


@enum.unique
class Precision(Choice):
    """The arithmetic of a merge; the manifest states it."""

    FLOAT32 = "float32"
    """W + s·(B·A) accumulated in float32 and rounded once, in numpy."""
    PEFT = "peft"
    """PEFT's own order of operations in torch: bit for bit its default `merge_and_unload` on the same machine."""
    FLOAT64 = "float64"
    """Accumulated in float64 without depending on the order of summation, rounded once: the same on every machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The source's bytes, unchanged."""

    source: StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The source's values, rounded to the output's dtype."""

    source: StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTerm:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDelta:
    """W + Σ scaling·(B·A). `transposed` where W is stored [in, out], as transformers' Conv1D and embeddings do.

    `rounded` where PEFT rounds the delta to the type of W before it adds it, as it does for embeddings and bare
    parameters; only `Precision.PEFT` does so too. A source of three dimensions is a stack of experts.
    `init` "pissa" or "olora" where PEFT first takes the untrained factors out of W, when it builds the layer; it needs
    all of W at once, and torch.
    """

    source: StoredTensor
    terms: tuple[LoraTerm, ...]
    transposed: bool = False
    rounded: bool = False
    init: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoraDelta:
    """m/‖W + Δ‖ · (W + Δ), the norm of each output's row; `magnitude` m has one value per output.

    DoRA (https://arxiv.org/abs/2402.09353) as PEFT merges it: the norm is that of the unmerged base plus the delta.
    """

    source: StoredTensor
    term: LoraTerm
    magnitude: StoredTensor
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRows:
    """W with the rows `indices` replaced by those of `rows`, in that order: trained tokens of an embedding."""

    source: StoredTensor
    rows: StoredTensor
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.indices) != self.rows.shape[0] or not all(0 <= row < self.source.shape[0] for row in self.indices):
            raise ValueError(f"`{self.rows.name}` does not hold the rows {self.indices} of `{self.source.name}`")


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasTerm:
    """One adapter's share of a bias: `scaling` · the bias of its lora_B."""

    bias: StoredTensor
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasDelta:
    """b + Σ scaling·(lora_B.bias): what `lora_bias=True` adds to the module's bias."""

    source: StoredTensor
    terms: tuple[BiasTerm, ...]


Part = Copy | Cast | LoraDelta | DoraDelta | BiasDelta | ReplaceRows
"""What can be done to one source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assemble:
    """What the parts make of their sources, one below the other: an output whose rows have different deltas."""

    parts: tuple[Part, ...]

    @property
    def source(self) -> StoredTensor:
        """The first part's source: what a message names."""
        return self.parts[0].source


Op = Part | Assemble
"""Everything that can be done to make an output tensor. A closed union: whoever takes one handles all."""
