"""What every operation states about itself, so that most code need not ask which operation it has."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.records import AbstractRecord
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import ExpertLayout

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Values: TypeAlias = NDArray[np.float64]
    ReadValues: TypeAlias = Callable[[StoredTensor], Values]
    """Gives a stored tensor's values."""


InputNames = Mapping[Path, str]
"""Folder → its name in the manifest's `inputs`, where several adapters have tensors of the same name."""


class Sums(Struct, frozen=True, kw_only=True):
    """The sums behind each value of an output, which bound its distance from the exact value."""

    deltas: int = 0
    """How many are added to the source, one after the other."""
    products: int = 0
    """How many products are added up in all of them: the ranks together."""
    squares: int = 0
    """How many squares are added up in the norm that it is divided by."""
    rounded: bool = False
    """Whether PEFT rounds each delta to the type of the source before it adds it."""


class Operation(Struct, frozen=True, kw_only=True, metaclass=AbstractRecord):
    """Makes the rows of an output, each from the same row of its `source` and of what `inputs` holds besides."""

    is_copy: ClassVar[bool] = False
    """Whether the output is the source's bytes."""
    keeps_values: ClassVar[bool] = False
    """Whether the output has the source's values, as far as its dtype holds them."""

    @property
    def inputs(self) -> tuple[StoredTensor, ...]:
        """The tensors that it computes with, the source first."""
        found: list[StoredTensor] = []
        _collect(self, found)
        return tuple(found)

    @abstractmethod
    def __str__(self) -> str:
        """Return its description, for the reason of a step."""

    @abstractmethod
    def describe(self, input_names: InputNames) -> dict[str, Any]:
        """Return it as JSON data, as the plan and the manifest's ledger have it. See `Plan.input_names`."""

    @abstractmethod
    def reference(self, read: ReadValues) -> Values:
        """Return the output's values by the formula that defines the operation, whole, in float64.

        `read` gives an input's values. Slow, and independent of the code that writes and verifies: both are tested
        against it.
        """

    @property
    def needs_all_rows(self) -> bool:
        """Whether a row of the output depends on other rows of the source: then it is made whole, by one worker."""
        return False

    @property
    def taken_out(self) -> str | None:
        """The init whose untrained factors are first taken out of the source, with torch; None without one."""
        return None

    @property
    def special_rows(self) -> tuple[int, ...]:
        """Rows of the output that are computed differently from the others, so that a sample must include them."""
        return ()


def rows_of(tensor: StoredTensor, start: int, rows: int) -> StoredTensor:
    """Return these rows of the tensor, [rows, last dimension], or elements of a vector, as a tensor of their own."""
    if len(tensor.shape) <= 2 and start == 0 and rows == math.prod(tensor.shape[:1]):  # noqa: PLR2004 - a matrix
        return tensor
    spec = replace(tensor.spec, shape=(rows, *tensor.shape[-1:]) if len(tensor.shape) > 1 else (rows,))
    each = spec.nbytes // rows if rows else 0
    return StoredTensor(spec=spec, spans=tuple(tensor.part(start * each, spec.nbytes)))


def _collect(value: object, found: list[StoredTensor]) -> None:
    """Add the tensors in the fields of an operation, and of those in it. A large plan has 50,000 operations."""
    if isinstance(value, StoredTensor):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found)
    else:
        for name in getattr(value, "__struct_fields__", ()):
            _collect(getattr(value, name), found)


def input_of(tensor: StoredTensor, input_names: InputNames) -> dict[str, str]:
    """Return the name of the input that a tensor is from, where the manifest has one for it."""
    name = input_names.get(tensor.path.parent) if input_names else None
    return {"input": name} if name else {}


# The terms of a delta: each is one adapter's addition to a weight or a bias.


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
