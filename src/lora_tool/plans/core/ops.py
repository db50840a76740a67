"""The operations that make output tensors: frozen data that state their own inputs, rows, text and formula.

`Op` is a closed union. Code that computes or recomputes matches it exhaustively, so that mypy names each forgotten
case; all other code asks what `Operation` states.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, cast

from msgspec.structs import replace

from lora_tool.core.choices import Choice
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.operation import BiasTerm, InputNames, LoraTerm, Operation, Sums, input_of, rows_of
from lora_tool.plans.core.requantise import Requantise

if TYPE_CHECKING:
    from lora_tool.plans.core.operation import ReadValues, Values

_STACK = 3
"""Dimensions of a parameter that holds one matrix per expert."""


@enum.unique
class Precision(Choice):
    """The arithmetic of a merge; the manifest records it."""

    FLOAT32 = "float32"
    """W + s·(B·A) accumulated in float32 and rounded once: by the compiled kernel, else in numpy."""
    PEFT = "peft"
    """PEFT's own order of operations in torch: bit for bit its default `merge_and_unload` on the same machine."""
    FLOAT64 = "float64"
    """Accumulated in float64 without depending on the order of summation, rounded once: the same on every machine."""

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that compute with it, whose versions determine the bits."""
        return ("numpy", "torch") if self is Precision.PEFT else ("numpy",)


class _RowOperation(Operation, frozen=True, kw_only=True):
    """An operation on one source."""

    source: StoredTensor

    @property
    def sums(self) -> Sums:
        """The sums that bound the output's rounding error; with nothing added it is one rounding of the source's value."""
        return Sums()

    @property
    def shape(self) -> tuple[int, ...]:
        """The output's: the source's."""
        return self.source.shape

    @abstractmethod
    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        """Return what makes rows `start` to `start + rows` of the output: its `inputs` are what those rows need.

        One operation; one per expert of a stack, whose rows are those of all its matrices.
        """


class _Kept(_RowOperation, frozen=True, kw_only=True):
    """The source's values, as far as the output's dtype holds them."""

    keeps_values: ClassVar[bool] = True

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        return _described(self, input_names)

    def reference(self, read: ReadValues) -> Values:
        return read(self.source)

    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        return (cast("Copy | Cast | Dequantise", replace(self, source=rows_of(self.source, start, rows))),)


class Copy(_Kept, frozen=True, kw_only=True):
    """The source's bytes, unchanged."""

    is_copy: ClassVar[bool] = True

    def __str__(self) -> str:
        return "copied"


class Cast(_Kept, frozen=True, kw_only=True):
    """The source's values, rounded to the output's dtype."""

    def __str__(self) -> str:
        return f"cast from {self.source.dtype}"


class Dequantise(_Kept, frozen=True, kw_only=True):
    """The values that a quantised source stands for, rounded to the output's dtype."""

    def __str__(self) -> str:
        return f"dequantised from {encoding_of(self.source)}"


def copied_as(dtype: DType, source: StoredTensor) -> Copy | Cast | Dequantise:
    """Return the operation that writes a tensor as `dtype`: a copy of its bytes if it has that dtype, else a cast."""
    if encoding_of(source) is not None:
        return Dequantise(source=source)
    return Copy(source=source) if source.dtype is dtype and not source.is_transposed else Cast(source=source)


class LoraDelta(_RowOperation, frozen=True, kw_only=True):
    """W + Σ scaling·(B·A). `transposed` where W is stored [in, out], as transformers' Conv1D and embeddings do.

    `rounded` where PEFT rounds the delta to the type of W before it adds it, as it does for embeddings and bare
    parameters; only `Precision.PEFT` does so too. A source of three dimensions is a stack of experts.
    `init` "pissa" or "olora" where PEFT first takes the untrained factors out of W, when it builds the layer; it needs
    all of W at once, and torch.
    """

    terms: tuple[LoraTerm, ...]
    transposed: bool = False
    rounded: bool = False
    init: str | None = None

    @property
    def inputs(self) -> tuple[StoredTensor, ...]:
        """The source, and both factors of each term: named here, because a large plan asks 50,000 times."""
        found = [self.source]
        for term in self.terms:
            found += (term.a, term.b)
        return tuple(found)

    @property
    def sums(self) -> Sums:
        products = sum(map(attrgetter("rank"), self.terms))
        return Sums(deltas=len(self.terms), products=products, rounded=self.rounded)

    @property
    def needs_all_rows(self) -> bool:
        return self.init is not None

    @property
    def taken_out(self) -> str | None:
        return self.init

    def __str__(self) -> str:
        first = f", after the change of the base that {self.init} makes" if self.init else ""
        return " + ".join(map("LoRA {}".format, self.terms)) + first

    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        if len(self.source.shape) < _STACK:
            moved = tuple(replace(term, first=term.first + start) for term in self.terms)
            return (replace(self, source=rows_of(self.source, start, rows), terms=moved),)
        height, made = self.source.shape[1], []
        while rows:
            expert, first = divmod(start, height)
            some = min(rows, height - first)
            own = tuple(replace(term, expert=expert, first=first) for term in self.terms)
            made.append(replace(self, source=rows_of(self.source, start, some), terms=own))
            start, rows = start + some, rows - some
        return tuple(made)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        terms = [term.describe(input_names) for term in self.terms]
        init = {"init": self.init} if self.init else {}
        return _described(self, input_names, transposed=self.transposed, terms=terms, **init)

    def reference(self, read: ReadValues) -> Values:
        shape = self.source.shape
        if len(shape) == _STACK:
            return Assemble(parts=self.cut(0, shape[0] * shape[1])).reference(read).reshape(shape)
        weight = read(self.source)
        if self.init is not None:
            wide = _residual(weight.T if self.transposed else weight, self.init, self.terms[0])
            weight = wide.T if self.transposed else wide
        for term in self.terms:
            weight = weight + term.reference(read, self.source, transposed=self.transposed)
        return weight


def _residual(weight: Values, init: str, term: LoraTerm) -> Values:
    """Return a float64 W [out, in] without what PiSSA or OLoRA takes out of it (peft 0.21, `pissa_init`, `olora_init`)."""
    import numpy as np  # only the formula needs it

    if init == "pissa":
        left, values, right = np.linalg.svd(weight, full_matrices=False)
        out = (left[:, : term.rank] * values[: term.rank]) @ right[: term.rank]
    else:
        basis, inside = np.linalg.qr(weight)
        out = term.scaling * (basis[:, : term.rank] @ inside[: term.rank])
    return np.asarray(weight - out)


class DoraDelta(_RowOperation, frozen=True, kw_only=True):
    """m/‖W + Δ‖ · (W + Δ), the norm of each output's row; `magnitude` m has one value per output.

    DoRA (https://arxiv.org/abs/2402.09353) as PEFT merges it: the norm is that of the unmerged base plus the delta.
    """

    term: LoraTerm
    magnitude: StoredTensor
    transposed: bool = False

    @property
    def terms(self) -> tuple[LoraTerm, ...]:
        """The one term."""
        return (self.term,)

    @property
    def sums(self) -> Sums:
        squares = self.source.shape[0] if self.transposed else self.source.shape[-1]
        return Sums(deltas=1, products=self.term.rank, squares=squares)

    @property
    def needs_all_rows(self) -> bool:
        return self.transposed  # an output's values are a column then

    def __str__(self) -> str:
        return f"DoRA {self.term}"

    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        magnitude = self.magnitude if self.transposed else rows_of(self.magnitude, start, rows)
        term = replace(self.term, first=self.term.first + start)
        return (replace(self, source=rows_of(self.source, start, rows), magnitude=magnitude, term=term),)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        terms = [self.term.describe(input_names)]
        factors = {"transposed": self.transposed, "terms": terms, "magnitude": self.magnitude.name}
        return _described(self, input_names, **factors)

    def reference(self, read: ReadValues) -> Values:
        moved = read(self.source) + self.term.reference(read, self.source, transposed=self.transposed)
        outputs = moved.T if self.transposed else moved
        norms = (outputs**2).sum(axis=1) ** 0.5
        scaled: Values = (read(self.magnitude).reshape(-1) / norms)[:, None] * outputs
        return scaled.T if self.transposed else scaled


class ReplaceRows(_RowOperation, frozen=True, kw_only=True):
    """W with the rows `indices` replaced by those of `rows`, in that order: trained tokens of an embedding."""

    rows: StoredTensor
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.indices) != self.rows.shape[0] or not all(0 <= row < self.source.shape[0] for row in self.indices):
            raise ValueError(f"`{self.rows.name}` does not hold the rows {self.indices} of `{self.source.name}`")

    @property
    def special_rows(self) -> tuple[int, ...]:
        return self.indices

    def __str__(self) -> str:
        return f"{len(self.indices)} trained token rows"

    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        source = rows_of(self.source, start, rows)
        inside = [at for at, row in enumerate(self.indices) if start <= row < start + rows]
        if not inside:
            return (Copy(source=source),)
        spans = tuple(span for at in inside for span in rows_of(self.rows, at, 1).spans)
        spec = replace(self.rows.spec, shape=(len(inside), *self.rows.shape[1:]))
        moved = tuple(self.indices[at] - start for at in inside)
        return (ReplaceRows(source=source, rows=StoredTensor(spec=spec, spans=spans), indices=moved),)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        rows = {"rows": self.rows.name, **input_of(self.rows, input_names)}
        return {**_described(self, input_names), **rows, "indices": list(self.indices)}

    def reference(self, read: ReadValues) -> Values:
        values = read(self.source).copy()
        for row, trained in zip(self.indices, read(self.rows), strict=True):
            values[row] = trained
        return values


class BiasDelta(_RowOperation, frozen=True, kw_only=True):
    """b + Σ scaling·(lora_B.bias): what `lora_bias=True` adds to the module's bias."""

    terms: tuple[BiasTerm, ...]

    @property
    def sums(self) -> Sums:
        return Sums(deltas=len(self.terms), products=len(self.terms))

    def __str__(self) -> str:
        return " + ".join(f"lora_B bias, {term}" for term in self.terms)

    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        terms = tuple(replace(term, bias=rows_of(term.bias, start, rows)) for term in self.terms)
        return (BiasDelta(source=rows_of(self.source, start, rows), terms=terms),)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        return _described(self, input_names, terms=[term.describe(input_names) for term in self.terms])

    def reference(self, read: ReadValues) -> Values:
        values = read(self.source)
        for term in self.terms:
            values = values + term.scaling * read(term.bias)
        return values


LowRank = LoraDelta | DoraDelta
"""The operations that add products of low rank."""

OnSource = Copy | Cast | Dequantise | LoraDelta | DoraDelta | BiasDelta | ReplaceRows
"""The operations on one source whose rows are the output's rows."""
RowOp = OnSource | FactorOp
"""The operations that make rows of an output. A closed union: code that computes one handles all."""


class Assemble(Operation, frozen=True, kw_only=True):
    """The results of the parts, one below the other: an output whose rows have different deltas."""

    parts: tuple[RowOp, ...]

    @property
    def source(self) -> StoredTensor:
        """The first part's source, which messages name."""
        return self.parts[0].source

    @property
    def taken_out(self) -> str | None:
        return next((part.taken_out for part in self.parts if part.taken_out), None)

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(map(str, self.parts)))

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        parts = [{"rows": part.shape[0], **part.describe(input_names)} for part in self.parts]
        return _described(self, input_names, parts=parts)

    def reference(self, read: ReadValues) -> Values:
        import numpy as np  # only the formula needs it

        return np.concatenate([part.reference(read) for part in self.parts])


Computed = RowOp | Assemble
"""All operations that compute numbers."""
Op = Computed | Requantise[Computed]
"""All operations that make an output tensor."""


def row_ops(op: Op) -> tuple[RowOp, ...]:
    """Return the operations that make the output's rows from top to bottom, mostly one; of codes, their numbers'."""
    made = op.made if isinstance(op, Requantise) else op
    return made.parts if isinstance(made, Assemble) else (made,)


def _described(op: _RowOperation | Assemble, input_names: InputNames, **details: Any) -> dict[str, Any]:
    where = {"source": op.source.name, "file": op.source.path.name, **input_of(op.source, input_names)}
    encoding = encoding_of(op.source)
    where |= {"format": str(encoding)} if encoding is not None else {}
    return {"op": type(op).__name__, **where, **details}
