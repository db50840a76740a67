"""The second formula: what a plan's operation gives, in float64 products, with the terms of its bound beside it.

Nothing here is shared with the arithmetic that wrote the tensor. The factors are scaled before the product, the product
is formed in float64, and base and change are kept apart, so that a difference can be told from the change itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.choices import assert_never
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.stored import read_columns
from lora_tool.native.library import COMPARABLE, any_kernel
from lora_tool.plans.core.factor_ops import Beside, FactorOp, Mix
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import (
    BiasDelta,
    Cast,
    Copy,
    Dequantise,
    DoraDelta,
    LoraDelta,
    LowRank,
    OnSource,
    ReplaceRows,
    RowOp,
)
from lora_tool.verification.elements import FLOATS, Array, Files, decode, some_rows
from lora_tool.verification.initial import taken
from lora_tool.verification.pieces import Rows, row_blocks, rows_and_columns, split

_Kept = TypeVar("_Kept")
Products = Callable[[Array, Array], Array]

_NORM_WEIGHTS = 1 << 20
_STRIP = 1 << 11
_DOUBLE = np.dtype(np.float64)


class Recomputed(Struct, frozen=True):
    """Rows of a tensor as they should be: `base` + `change`, both [rows, columns], in the working type or wider."""

    base: Array
    change: Array
    products: Products
    """‖b‖·‖a‖ of the values at given rows and columns: asked for only where it decides."""
    room: Products | None = None
    """How much further the values at given rows and columns may be off: what an init took out was taken in float32."""
    stored_as: DType | None = None
    """The type of which `base` holds the stored bits; None where it holds numbers."""

    def widened(self, wide: np.dtype[Any]) -> Recomputed:
        """Return the same as numbers of the working type."""
        base, change = self.base, self.change.astype(wide, copy=False)
        if self.stored_as is not None:
            base = decode(np.ascontiguousarray(base).reshape(-1).view(np.uint8), self.stored_as, wide).reshape(
                base.shape
            )
        return replace(self, base=base, change=change, stored_as=None)

    def part(self, rows: Array, columns: Array) -> Recomputed:
        """Return the values at these rows and columns, one after the other."""
        return replace(self, base=self.base[rows, columns], change=self.change[rows, columns])


class Product(Struct, frozen=True):
    """Rows of ΔW in float64, and the factors (left, right) of each term."""

    values: Array
    factors: tuple[tuple[Array, Array], ...]

    def part(self, rows: slice) -> Product:
        """Return some of the rows, in the same memory."""
        return Product(self.values[rows], tuple((left[rows], right) for left, right in self.factors))

    def norms(self, rows: Array, columns: Array) -> Array:
        """Return Σ ‖b‖·‖a‖ of the values at `rows` and `columns`."""
        return np.asarray(
            sum(
                np.linalg.norm(left[rows], axis=1) * np.linalg.norm(right[:, columns], axis=0)
                for left, right in self.factors
            )
        )


def _no_products(rows: Array, _columns: Array) -> Array:
    return np.zeros(rows.shape)


class Recomputer:
    """One worker's second formula. It keeps the factor that was used last; not shared between threads."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._held: dict[str, tuple[object, int, Any]] = {}
        self._buffer: Array = np.empty(0)

    def blocks(self, op: RowOp, rows: Rows, wide: np.dtype[Any]) -> Iterator[tuple[Rows, Recomputed]]:
        """Yield the given rows of what `op` makes, a few at a time. Raises `SourceChanged` where a file ends early.

        What is yielded is valid until the next is asked for: the product's memory is used again.
        """
        width = rows_and_columns(op.shape)[1]
        if isinstance(op, FactorOp):
            for part in split(rows, width):
                yield part, self._factor(op, part, wide)
            return
        product, dtype = self._product(op, rows), op.source.dtype
        source, plain = self._files.rows(op.source, rows, place="source"), isinstance(op, LoraDelta) and op.init is None
        at_once = plain and dtype in COMPARABLE and any_kernel() is not None
        at = 0
        for part in [rows] if at_once else split(rows, width):
            height = sum(map(itemgetter(1), part)) - sum(map(itemgetter(0), part))
            inside = slice(at, at := at + height)
            stored, own = some_rows(source, inside, dtype, width), product.part(inside)
            numbers = Recomputed(
                stored.view(FLOATS[dtype].bits).reshape(-1, width), own.values, own.norms, stored_as=dtype
            )
            yield part, numbers if plain else self._changed(op, part, numbers.widened(wide).base, own, wide)

    def whole(self, op: RowOp, rows: Rows, wide: np.dtype[Any]) -> Recomputed:
        """Return the given rows of what `op` makes, all at once."""
        return self._expected(op, rows, self._product(op, rows), wide)

    def _expected(self, op: RowOp, rows: Rows, product: Product, wide: np.dtype[Any]) -> Recomputed:
        if isinstance(op, FactorOp):
            return self._factor(op, rows, wide)
        return self._changed(op, rows, self._files.matrix(op.source, rows, wide), product, wide)

    def _changed(self, op: OnSource, rows: Rows, base: Array, product: Product, wide: np.dtype[Any]) -> Recomputed:
        """Return rows of the source, `base`, and what the operation adds to them."""
        match op:
            case Copy() | Cast() | Dequantise():
                return Recomputed(base, np.zeros_like(base), _no_products)
            case LoraDelta():
                return self._lora(op, rows, base, product, wide)
            case DoraDelta():
                return self._dora(op, rows, base, product, wide)
            case BiasDelta():
                return self._biased(op, rows, base, wide)
            case ReplaceRows():
                return self._replaced(op, rows, base, wide)
            case _:
                return assert_never(op)

    def _factor(self, op: FactorOp, rows: Rows, wide: np.dtype[Any]) -> Recomputed:
        """Return rows of a factor that is made of factors: nothing of it is anybody's base."""
        products: Products
        match op:
            case Beside():
                pieces = [part.of(self._files.matrix(part.tensor, rows, _DOUBLE)) * part.scale for part in op.parts]
                made = np.zeros((len(pieces[0]), op.shape[1]))
                for piece, place in zip(pieces, op.places, strict=True):
                    made[:, place] = piece
                products = _no_products
            case Mix(below=True):
                made, products = self._turned_below(op, rows)
            case Mix():
                left = np.concatenate([self._files.matrix(part, rows, _DOUBLE) for part in op.parts], axis=1)
                right = op.matrix.values
                made, products = left @ right, Product(np.empty((0, 0)), ((left, right),)).norms
            case _:
                return assert_never(op)
        return Recomputed(made.astype(wide, copy=False), np.zeros(made.shape, wide), products)

    def _turned_below(self, op: Mix, rows: Rows) -> tuple[Array, Products]:
        """Return rows of Xᵀ·[P₁; P₂; …], some of the parts' columns at a time: a row needs all of their rows."""
        left = np.concatenate([op.matrix.values[:, first:last] for first, last in rows], axis=1).T
        made = np.zeros((len(left), op.shape[1]))
        begin = 0
        for part in op.parts:
            turned = left[:, begin : begin + part.shape[0]]
            for at, columns in self._strips(part):
                made[:, at : at + _STRIP] += turned @ columns
            begin += part.shape[0]

        def products(i: Array, j: Array) -> Array:
            squares = np.zeros(op.shape[1])
            for part in op.parts:
                for at, columns in self._strips(part):
                    squares[at : at + _STRIP] += np.square(columns).sum(axis=0)
            return np.asarray(np.linalg.norm(left[i], axis=1) * np.sqrt(squares)[j])

        return made, products

    def _strips(self, part: StoredTensor) -> Iterator[tuple[int, Array]]:
        """Yield the columns of a matrix in float64, `_STRIP` at a time, and where they begin."""
        for at in range(0, part.shape[1], _STRIP):
            stored = np.empty((part.shape[0], min(_STRIP, part.shape[1] - at)), FLOATS[part.dtype].bits)
            read_columns(stored, part, at, self._files)
            yield at, decode(stored.reshape(-1).view(np.uint8), part.dtype, _DOUBLE).reshape(stored.shape)

    def columns(self, op: Mix, columns: Array, wide: np.dtype[Any]) -> Recomputed:
        """Return some columns of Xᵀ·[P₁; P₂; …], all of their rows."""
        parts = [self._files.columns(part, columns) for part in op.parts]
        right = np.concatenate(
            [
                decode(each, part.dtype, _DOUBLE).reshape(-1, len(columns))
                for each, part in zip(parts, op.parts, strict=True)
            ]
        )
        left = op.matrix.values.T
        made = left @ right
        return Recomputed(
            made.astype(wide, copy=False),
            np.zeros(made.shape, wide),
            Product(np.empty((0, 0)), ((left, right),)).norms,
        )

    def transposed_change(self, op: LowRank, rows: Rows) -> Array | None:
        """Return the rows of ΔW stored the wrong way round, float64; None where the shape would show it."""
        if op.source.shape[0] != op.source.shape[1] or op.taken_out:
            return None
        return self._multiplied(op.terms, rows, transposed=not op.transposed).values

    def _product(self, op: RowOp, rows: Rows) -> Product:
        """Return what is added to the rows as products of low rank, an empty one where nothing is."""
        if isinstance(op, LowRank):
            return self._multiplied(op.terms, rows, transposed=op.transposed)
        return Product(np.empty((0, 0)), ())

    def _multiplied(self, terms: tuple[LoraTerm, ...], rows: Rows, *, transposed: bool) -> Product:
        factors = tuple(self._factors(at, term, rows, transposed=transposed) for at, term in enumerate(terms))
        left, right = factors[0]
        needed = left.shape[0] * right.shape[1]
        if self._buffer.size < needed:
            self._buffer = np.empty(needed)
        values = self._buffer[:needed].reshape(left.shape[0], right.shape[1])
        np.matmul(left, right, out=values)
        for left, right in factors[1:]:
            values += left @ right
        return Product(values, factors)

    def _factors(self, at: int, term: LoraTerm, rows: Rows, *, transposed: bool) -> tuple[Array, Array]:
        """Return s·B of the rows and A, or, where W is stored [in, out], s·Aᵀ of the rows and Bᵀ. Both float64."""
        inside = [(first + term.first, last + term.first) for first, last in rows] if term.first else rows
        if transposed:
            columns = self._a(f"left {at}", term)
            chosen = np.concatenate([columns[:, first:last] for first, last in inside], axis=1)
            return np.ascontiguousarray(chosen.T) * term.scaling, self._b(f"right {at}", term, None).T
        return self._b(f"left {at}", term, inside) * term.scaling, self._a(f"right {at}", term)

    def _a(self, place: str, term: LoraTerm) -> Array:
        """Return the rows of A that are the term's expert's, float64, and keep them."""
        first = term.expert * term.rank
        return self._kept(
            place, term.a, first, lambda: self._files.matrix(term.a, [(first, first + term.rank)], _DOUBLE)
        )

    def _b(self, place: str, term: LoraTerm, rows: Rows | None) -> Array:
        """Return rows of B (all without `rows`, and keep them), with the columns of the term's expert, float64."""
        if term.experts == 1:
            if rows is not None:
                return self._files.matrix(term.b, rows, _DOUBLE)
            return self._kept(place, term.b, 0, lambda: self._files.matrix(term.b, None, _DOUBLE))
        # the experts' columns are scattered over all of B, and its experts come one after the other
        height, width = rows_and_columns(term.b.shape)
        raw = self._kept(f"{place} stack", term.b, -1, lambda: self._files.rows(term.b, [(0, height)]))
        table = raw.reshape(height, width, -1)
        if term.layout is ExpertLayout.GROUPED_BY_EXPERT:
            own = table[:, term.expert * term.rank : (term.expert + 1) * term.rank]
        else:
            own = table[:, term.expert :: term.experts]
        chosen = own if rows is None else np.concatenate([own[first:last] for first, last in rows])
        return decode(np.ascontiguousarray(chosen).reshape(-1), term.b.dtype, _DOUBLE).reshape(-1, term.rank)

    def _kept(self, place: str, owner: object, what: int, make: Callable[[], _Kept]) -> _Kept:
        """Return what `make` gives for the owner, made again where the place holds something else."""
        held = self._held.get(place)
        if held is None or held[0] is not owner or held[1] != what:
            self._held[place] = held = (owner, what, make())
        kept: _Kept = held[2]
        return kept

    def _lora(self, op: LoraDelta, rows: Rows, base: Array, product: Product, wide: np.dtype[Any]) -> Recomputed:
        """Return W plus the delta; with an init W less what that takes out of it, which is rounded once more."""
        if op.init is None:
            return Recomputed(base, product.values.astype(wide, copy=False), product.norms)
        init, (term,) = op.init, op.terms
        weight = partial(self._files.matrix, op.source, None, _DOUBLE)
        out = self._kept("taken", op, 0, lambda: taken(init, weight(), term.rank, term.scaling))
        chosen = np.concatenate([np.arange(first, last) for first, last in rows])
        gone = out.left[chosen] @ out.right
        roundoff = FLOATS[op.source.dtype].roundoff

        def room(i: Array, j: Array) -> Array:
            left, whole = np.abs(base[i, j] - gone[i, j]), np.abs(base[i, j]) + np.abs(gone[i, j])
            return np.asarray(1.01 * roundoff * left + 2.0**-22 * whole + out.room(chosen[i], j))

        return Recomputed(base, (product.values - gone).astype(wide, copy=False), product.norms, room)

    def _dora(self, op: DoraDelta, rows: Rows, base: Array, product: Product, wide: np.dtype[Any]) -> Recomputed:
        moved = product.values + base
        if op.transposed:
            factor = self._kept("columns", op.magnitude, 0, lambda: self._column_factors(op))[None, :]
        else:
            magnitude = self._files.matrix(op.magnitude, rows, _DOUBLE)
            factor = magnitude / np.sqrt(np.square(moved).sum(axis=1, keepdims=True))
        change = (moved * factor - base).astype(wide, copy=False)
        sizes = np.broadcast_to(np.abs(factor), base.shape)
        return Recomputed(base, change, lambda i, j: product.norms(i, j) * sizes[i, j])

    def _biased(self, op: BiasDelta, rows: Rows, base: Array, wide: np.dtype[Any]) -> Recomputed:
        biases = [self._files.matrix(term.bias, rows, _DOUBLE) * term.scaling for term in op.terms]
        change = np.asarray(sum(biases)).astype(wide, copy=False)
        return Recomputed(base, change, lambda i, j: np.asarray(sum(np.abs(each[i, j]) for each in biases)))

    def _column_factors(self, op: DoraDelta) -> Array:
        """Return m/‖column of W + Δ‖ of a weight stored [in, out]: a pass over the whole tensor."""
        other = Recomputer(self._files)  # our own product is in use
        squares = np.zeros(rows_and_columns(op.source.shape)[1])
        for block in row_blocks(op.source, _NORM_WEIGHTS):
            moved = other._multiplied((op.term,), block, transposed=True).values
            moved += self._files.matrix(op.source, block, _DOUBLE)
            squares += np.square(moved).sum(axis=0)
        return self._files.matrix(op.magnitude, None, _DOUBLE).reshape(-1) / np.sqrt(squares)

    def _replaced(self, op: ReplaceRows, rows: Rows, base: Array, wide: np.dtype[Any]) -> Recomputed:
        change = np.zeros_like(base)
        begin = 0
        for first, last in rows:
            for at, row in enumerate(op.indices):
                if first <= row < last:
                    new = self._files.matrix(op.rows, [(at, at + 1)], wide)[0]
                    change[begin + row - first] = new - base[begin + row - first]
            begin += last - first
        return Recomputed(base, change, _no_products)
