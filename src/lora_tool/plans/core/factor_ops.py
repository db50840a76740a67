"""The operations that make LoRA factors of other factors: columns side by side, and products with a small matrix.

Both are in float64 and rounded once, at every precision of the plan: a factor is small, and a scaling or a rotation of
it must lose no more than its own dtype loses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import head_of
from lora_tool.plans.core.operation import InputNames, Operation, Sums, input_of, rows_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from lora_tool.plans.core.operation import ReadValues, Values


class SmallMatrix(Struct, frozen=True, kw_only=True):
    """A float64 matrix that a plan carries: plain data, compared and hashed by its bytes."""

    rows: int
    columns: int
    data: bytes
    """The elements, little-endian, row by row."""
    sha256: str
    """Of the data, in hex: a plan is described twice, and each matrix made by one of several workers."""

    def __post_init__(self) -> None:
        if len(self.data) != 8 * self.rows * self.columns:
            raise ValueError(f"{len(self.data)} bytes are not a float64 matrix of {self.rows} x {self.columns}")

    def __repr__(self) -> str:
        return f"SmallMatrix({self.rows} x {self.columns}, sha256 {self.sha256})"

    @classmethod
    def of(cls, values: npt.ArrayLike) -> SmallMatrix:
        """Return the matrix of these numbers, [rows, columns]."""
        import numpy as np  # a plan of copies needs none

        array = np.asarray(values, "<f8")
        rows, columns = array.shape
        data = array.tobytes()
        return cls(rows=rows, columns=columns, data=data, sha256=hashlib.sha256(data).hexdigest())

    @property
    def values(self) -> Values:
        """The elements, [rows, columns], not to be written to."""
        import numpy as np

        return np.frombuffer(self.data, "<f8").reshape(self.rows, self.columns)

    def part(self, first: int, columns: int) -> SmallMatrix:
        """Return some of the columns."""
        return SmallMatrix.of(self.values[:, first : first + columns])

    def describe(self) -> dict[str, Any]:
        """Return its size and digest, as JSON data."""
        return {"rows": self.rows, "columns": self.columns, "sha256": self.sha256}


class Columns(Struct, frozen=True, kw_only=True):
    """`count` columns of a matrix, from `first`, every `step`-th, each value times `scale`."""

    tensor: StoredTensor
    count: int
    scale: float = 1.0
    first: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        last = self.first + (self.count - 1) * self.step
        if self.count < 0 or self.first < 0 or self.step < 1 or (self.count and last >= self.tensor.shape[1]):
            raise ValueError(f"`{self.tensor.name}` {list(self.tensor.shape)} has no {self.count} columns like these")

    def of(self, rows: Values) -> Values:
        """Return the columns of rows of the tensor, unscaled."""
        return rows[:, self.first :: self.step][:, : self.count]

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        """Return it as JSON data."""
        where = {"first": self.first, "step": self.step} if self.first or self.step > 1 else {}
        part = {"source": self.tensor.name, "columns": self.count, "scale": self.scale, **where}
        return {**part, **input_of(self.tensor, input_names)}


class _FactorOperation(Operation, frozen=True, kw_only=True):
    """An operation whose output has another shape than its sources."""

    keeps_values: ClassVar[bool] = False


class Beside(_FactorOperation, frozen=True, kw_only=True):
    """[0 | c₁·P₁ | c₂·P₂ | … | 0]: scaled columns of several matrices side by side, between columns of zeros.

    A sum of deltas is one product of such a B and of the A's one below the other. With `in_turn` the first column of
    every part comes first, then the second of every part: PEFT's order of the experts in a fused lora_B.
    """

    parts: tuple[Columns, ...]
    zeros: int = 0
    leading: int = 0
    """How many columns of zeros come before the parts; `zeros` come after them."""
    in_turn: bool = False

    def __post_init__(self) -> None:
        if len({part.tensor.shape[0] for part in self.parts}) != 1:
            raise ValueError(f"parts of {[part.tensor.shape for part in self.parts]} do not stand beside one another")
        if self.in_turn and len({part.count for part in self.parts}) != 1:
            raise ValueError(f"{[part.count for part in self.parts]} columns cannot be taken in turn")

    @property
    def places(self) -> tuple[slice, ...]:
        """Which columns of the output each part is."""
        counts = [part.count for part in self.parts]
        if self.in_turn:
            end = self.leading + sum(counts)
            return tuple(slice(self.leading + at, end, len(counts)) for at in range(len(counts)))
        ends = [self.leading + sum(counts[: at + 1]) for at in range(len(counts))]
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

    @property
    def inputs(self) -> tuple[StoredTensor, ...]:
        return tuple(part.tensor for part in self.parts)

    @property
    def source(self) -> StoredTensor:
        """The first part's tensor, which messages name."""
        return self.parts[0].tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The output's."""
        return self.source.shape[0], self.leading + sum(part.count for part in self.parts) + self.zeros

    @property
    def sums(self) -> Sums:
        return Sums()

    def __str__(self) -> str:
        if self.in_turn:
            return f"columns of {len(self.parts)} experts in turn"
        scales = [f"{part.scale:g}" for part in self.parts if part.count]
        named = f"{len(scales)} factors beside one another, scaled by" if len(scales) > 1 else "scaled by"
        padded = f"padded with {self.zeros} zero columns" if self.zeros else ""
        same = all(part.scale == 1 for part in self.parts)
        return ", ".join(filter(None, ["" if same and padded else f"{named} {', '.join(scales)}", padded]))

    def cut(self, start: int, rows: int) -> tuple[Beside, ...]:
        """See `RowOp`."""
        return (
            replace(self, parts=tuple(replace(each, tensor=rows_of(each.tensor, start, rows)) for each in self.parts)),
        )

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        parts = [part.describe(input_names) for part in self.parts]
        order = {"leading": self.leading, "in_turn": True} if self.in_turn else {}
        return {"op": type(self).__name__, "file": self.source.path.name, "parts": parts, "zeros": self.zeros, **order}

    def reference(self, read: ReadValues) -> Values:
        import numpy as np  # only the formula needs it

        made = np.zeros(self.shape)
        for part, place in zip(self.parts, self.places, strict=True):
            made[:, place] = part.scale * part.of(read(part.tensor))
        return made


class Mix(_FactorOperation, frozen=True, kw_only=True):
    """[P₁ | P₂ | …]·X, the parts side by side; `below`: Xᵀ·[P₁; P₂; …], one below the other.

    Recompression multiplies the columns of all B's, and the rows of all A's, by small matrices.
    """

    parts: tuple[StoredTensor, ...]
    matrix: SmallMatrix
    below: bool = False

    def __post_init__(self) -> None:
        along, across = (0, 1) if self.below else (1, 0)
        fits = sum(part.shape[along] for part in self.parts) == self.matrix.rows
        if not fits or len({part.shape[across] for part in self.parts}) != 1:
            shapes = [part.shape for part in self.parts]
            raise ValueError(f"{shapes} do not fit a matrix of {self.matrix.rows} x {self.matrix.columns}")

    @property
    def inputs(self) -> tuple[StoredTensor, ...]:
        return self.parts

    @property
    def source(self) -> StoredTensor:
        """The first part, which messages name."""
        return self.parts[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The output's."""
        if self.below:
            return self.matrix.columns, self.source.shape[1]
        return self.source.shape[0], self.matrix.columns

    @property
    def needs_all_rows(self) -> bool:
        return self.below

    @property
    def sums(self) -> Sums:
        return Sums(deltas=1, products=self.matrix.rows)

    def __str__(self) -> str:
        return f"recompressed from rank {self.matrix.rows} to rank {self.matrix.columns}"

    def cut(self, start: int, rows: int) -> tuple[Mix, ...]:
        """See `RowOp`."""
        if self.below:
            return (replace(self, matrix=self.matrix.part(start, rows)),)
        return (replace(self, parts=tuple(rows_of(part, start, rows) for part in self.parts)),)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        parts = [{"source": part.name, **input_of(part, input_names)} for part in self.parts]
        matrix = {"matrix": self.matrix.describe(), "below": self.below}
        return {"op": type(self).__name__, "file": self.source.path.name, "parts": parts, **matrix}

    def reference(self, read: ReadValues) -> Values:
        import numpy as np  # only the formula needs it

        whole = np.concatenate([read(part) for part in self.parts], axis=0 if self.below else 1)
        return self.matrix.values.T @ whole if self.below else whole @ self.matrix.values


FactorOp = Beside | Mix
"""The operations that make factors of factors."""


def as_matrix(tensor: StoredTensor) -> StoredTensor:
    """Return the same bytes as a matrix of as many rows as the first dimension: kernels become rows of B and A."""
    height = tensor.shape[0]
    spec = replace(tensor.spec, shape=(height, prod(tensor.shape) // max(1, height)))
    return tensor if spec.shape == tensor.shape else StoredTensor(spec=spec, spans=tensor.spans)


def averaged_heads(tables: Sequence[TensorTable]) -> Iterator[tuple[str, list[StoredTensor]]]:
    """Yield the tensors of heads that all tables have under one name, and whose values differ. Reads their values."""
    first, *others = tables
    for name, tensor in first.items():
        held = [tensor, *(table[name] for table in others if name in table)]
        in_all = len(held) == len(tables) and head_of(name.rpartition(".")[0])
        if in_all and not all(same_values(tensor, other) for other in held[1:]):
            yield name, held


def mean_of(tensors: Sequence[StoredTensor], weights: Sequence[float]) -> Mix:
    """Return the operation that makes Σ weight·tensor, of heads or their biases, which have one shape."""
    import numpy as np

    parts, column = tuple(map(as_matrix, tensors)), np.asarray(weights)[:, None]
    if len(tensors[0].shape) == 1:
        return Mix(parts=parts, matrix=SmallMatrix.of(column))
    each_row = np.kron(column, np.eye(tensors[0].shape[0]))
    return Mix(parts=parts, matrix=SmallMatrix.of(each_row), below=True)
