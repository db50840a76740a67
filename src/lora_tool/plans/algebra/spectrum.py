"""The singular values of a sum of LoRA deltas, and the best product of lower rank, from only the factors.

ΔW = Σ cₖ·BₖAₖ = L·C·Rᵀ, with all B's side by side in L, all Aᵀ in R, and the scalings in the diagonal C. With the
columns of L and R scaled to length 1, G = LᵀL = TᵀT (Cholesky) gives L = U·T with orthonormal columns U = L·T⁻¹, and R
likewise; the singular values of ΔW are those of the small matrix T_L·C·T_Rᵀ = P·S·Qᵀ, all of them. The best
approximation of rank r (Eckart and Young, Psychometrika 1, 1936) is (L·X)·(R·Y)ᵀ, X = T_L⁻¹·P·S^½ and
Y = T_R⁻¹·Q·S^½, which needs rows of L and R one at a time. √S on both sides keeps both factors small. Where columns
depend on one another, T is Λ^½Vᵀ of G = V·Λ·Vᵀ without the zero eigenvalues.

Sums are in float64. A Gram matrix squares the singular values of a factor, so that those below 1e-8 of the largest
are lost. Where that could be seen in ΔW, because its terms nearly cancel or a factor is nearly singular, T is taken
from the triangle of a QR factorisation instead, which does not square them. Where much is left out, and that is not so,
the eigenvectors of (ΔW)ᵀΔW tell the best approximation in half the time (`_by_eigenvalues`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from numpy.typing import NDArray

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.open_files import OpenFiles, Room
from lora_tool.formats.stored_numbers import STORED, Matrix, pieces, widened
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.core.factor_ops import SmallMatrix

Stored = tuple[NDArray[Any], DType]
"""Stored elements, [rows, columns], whichever way round they lie in memory, and their type."""

_BLOCK = 1 << 16
"""Elements that numpy widens at a time, so that they stay in the second-level cache."""


class Reader(Struct, kw_only=True, eq=False):
    """One worker's memory for the factors of one module after the other, from `files` that all may share."""

    files: OpenFiles
    _room: Room = field(default_factory=Room)

    def gram(self, parts: Sequence[StoredTensor], *, below: bool) -> Matrix:
        """Return PᵀP of P = [P₁ | P₂ | …]; `below`: of its transposed, the parts below one another.

        Raises `SourceChanged`, `CorruptFile`.
        """
        total = sum(part.shape[0 if below else 1] for part in parts)
        gram = np.zeros((total, total))
        with np.errstate(all="ignore"):  # NaN and infinity are refused by name
            for block in self._blocks(parts, total, below=below):
                gram += block.T @ block
        return gram

    def triangle(self, parts: Sequence[StoredTensor], *, below: bool) -> Matrix:
        """Return R of the thin factorisation of what `gram` is the square of."""
        total = sum(part.shape[0 if below else 1] for part in parts)
        triangle = np.zeros((0, total))
        for block in self._blocks(parts, total, below=below):
            triangle = np.asarray(np.linalg.qr(np.concatenate([triangle, block]), mode="r"))
        return triangle

    def _blocks(self, parts: Sequence[StoredTensor], total: int, *, below: bool) -> Iterator[Matrix]:
        """Yield rows of the parts side by side in float64, at least as many as there are columns, but the last.

        The block is used again for the next.
        """
        step = max(total, _BLOCK // max(1, total))
        for some in self._pieces(parts, below=below):
            height = len(some[0][0])
            for at in range(0, height, step):
                rows = slice(at, min(at + step, height))
                # as the parts lie in memory, so that both are gone through in one direction
                shape = (rows.stop - at, total)
                block = self._room.of("block", shape[::-1] if below else shape, np.dtype(np.float64))
                block = block.T if below else block
                begin = 0
                for stored, dtype in some:
                    block[:, begin : begin + stored.shape[1]] = _wide(stored[rows], dtype)
                    begin += stored.shape[1]
                yield block

    def _pieces(self, parts: Sequence[StoredTensor], *, below: bool) -> Iterator[Sequence[Stored]]:
        for some in pieces(parts, self.files, self._room, below=below):
            yield [(stored.view(STORED[part.dtype]), part.dtype) for stored, part in zip(some, parts, strict=True)]


def _wide(some: NDArray[Any], dtype: DType) -> NDArray[Any]:
    return widened(some, dtype) if dtype is DType.BF16 else some


_EPSILON = float(np.finfo(np.float64).eps)
_CANCELLED = 1e-4
"""If ‖ΔW‖ is below this share of the sum of its terms' norms, they cancel too far for a Gram matrix."""
_CANCELLED_IF_DEPENDENT = 0.5
"""The same where columns of a factor are linearly dependent in a Gram matrix, which may be those that do not cancel."""
_NEARLY_SINGULAR = 1e-10
"""An eigenvalue below this share of the largest has lost six digits in a Gram matrix."""
_LEFT_OUT = 1e-5
"""A share of ‖ΔW‖² that eigenvalues of (ΔW)ᵀΔW still tell to ten digits; less is left to the singular values of ΔW."""


class Compressed(Struct, frozen=True, kw_only=True):
    """The best approximation of one module's ΔW at a rank, before anything is written."""

    module: str
    singular_values: npt.NDArray[np.float64]
    """Those of ΔW, falling; zeros are left out."""
    rank: int
    left: SmallMatrix
    """X, [all ranks, rank]: the new B is L·X."""
    right: SmallMatrix
    """Y, [all ranks, rank]: the new A is (R·Y)ᵀ."""

    @property
    def energy(self) -> float:
        """‖ΔW‖²."""
        return math.fsum(np.square(self.singular_values).tolist())

    @property
    def discarded(self) -> float:
        """The part of ‖ΔW‖² that the rank leaves out."""
        return math.fsum(np.square(self.singular_values[self.rank :]).tolist())

    def rank_for(self, share: float) -> int:
        """Return the smallest rank that keeps this share of ‖ΔW‖², at least 1."""
        return rank_for(self.singular_values, share)


def rank_for(singular_values: npt.NDArray[np.float64], share: float) -> int:
    """Return how many of the falling values hold this share of the sum of their squares, at least 1."""
    squares = np.square(singular_values)
    left = np.append(np.cumsum(squares[::-1])[::-1], 0.0)  # what each rank leaves out, summed from the smallest
    total = left[0]
    if not total:
        return 1
    return max(1, int(np.flatnonzero(left <= (1 - share) * total)[0]))


def compressed(factors: Factors, reader: Reader, *, rank: int | None = None, keep: float = 1.0) -> Compressed:
    """Return the best approximation of the module's ΔW at `rank`, or at the least that keeps `keep` of ‖ΔW‖².

    Reads the factors once; twice where terms nearly cancel. Raises `UnsupportedAdapter` where one holds NaN
    or infinity, `OSError` where a file cannot be read.
    """
    grams, scales = grams_and_scales(factors, reader)
    if not all(np.isfinite(gram).all() for gram in grams):
        names = ", ".join(part.name for part in (*factors.b_parts, *factors.a_parts))
        raise UnsupportedAdapter(
            f"{factors.b_parts[0].path}: a factor of `{factors.module}` holds NaN or infinity, or its squares overflow: {names}",
            hint=f"lora-tool validate --deep {shlex.quote(str(factors.b_parts[0].path.parent))} names the tensor",
        )
    sides = _Sides.of(grams, scales)
    goal = _Goal(rank, keep)
    left = left_of_terms(grams, scales, factors)
    found = _by_eigenvalues(sides, goal) if left > _CANCELLED_IF_DEPENDENT else None
    if found is None:
        found = _by_singular_values(sides, goal, *_roots(sides, left, factors, reader))
    return Compressed(
        module=factors.module,
        singular_values=found.values,
        rank=found.left.shape[1],
        left=SmallMatrix.of(found.left),
        right=SmallMatrix.of(found.right),
    )


class _Goal(Struct, frozen=True):
    """A rank, or the least that keeps a share of ‖ΔW‖²."""

    rank: int | None
    keep: float

    def of(self, values: npt.NDArray[np.float64]) -> int:
        """Return the rank among these singular values. A zero ΔW has a rank of 1, too: PEFT has no layer of rank 0."""
        return min(self.rank if self.rank is not None else rank_for(values, self.keep), max(1, len(values)))


class _Sides(Struct, frozen=True):
    """L and R with columns of length 1, by their Gram matrices: ΔW = L·diag(core)·Rᵀ."""

    grams: tuple[Matrix, Matrix]
    inverse: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
    """One over the lengths that the columns had; 0 of zeros."""
    core: npt.NDArray[np.float64]
    scaled: npt.NDArray[np.float64]
    """The core times the first of `inverse`, computed without dividing by the length of a zero column."""

    @classmethod
    def of(cls, grams: tuple[Matrix, Matrix], scales: npt.NDArray[np.float64]) -> _Sides:
        left, right = (np.sqrt(np.maximum(np.diag(gram), 0.0)) for gram in grams)
        inverse = _one_over(left), _one_over(right)
        of_one = grams[0] * np.outer(inverse[0], inverse[0]), grams[1] * np.outer(inverse[1], inverse[1])
        return cls(of_one, inverse, scales * left * right, scales * right)


def _one_over(lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.divide(1.0, lengths, out=np.zeros(len(lengths)), where=lengths > 0)


class _Found(Struct, frozen=True):
    """Singular values, and the matrices X and Y that L and R are multiplied by."""

    values: npt.NDArray[np.float64]
    left: Matrix
    right: Matrix


def _by_eigenvalues(sides: _Sides, goal: _Goal) -> _Found | None:
    """Return the decomposition by the eigenvectors of (ΔW)ᵀΔW; None where the discarded part loses too many digits.

    With Ĝ_R = TᵀT, orthonormal V = R·T⁻¹·Q and Q of T·C·Ĝ_L·C·Tᵀ = Q·Λ·Qᵀ, ΔW·V·Vᵀ is the best approximation. The
    eigenvalues of a symmetric matrix take half the time of singular values, and only one side needs a triangle.
    """
    root = _root_of_whole(sides.grams[1])
    if root is None:
        return None
    small = root.square * sides.core
    eigenvalues, vectors = np.linalg.eigh(small @ sides.grams[0] @ small.T)
    squares = np.maximum(eigenvalues[::-1], 0.0)
    energy = float(squares.sum())
    if not energy:
        return None
    values = np.sqrt(squares[squares > len(squares) * _EPSILON * squares[0]])
    rank = goal.of(values)
    if float(squares[rank:].sum()) < _LEFT_OUT * energy:
        return None
    kept = vectors[:, ::-1][:, :rank]
    half = np.sqrt(values[:rank])
    return _Found(
        values,
        sides.scaled[:, None] * (root.square.T @ (kept / half)),
        sides.inverse[1][:, None] * (root.inverse @ (kept * half)),
    )


def _by_singular_values(sides: _Sides, goal: _Goal, root_l: _Root, root_r: _Root) -> _Found:
    """Return the decomposition by the singular values of the small matrix."""
    p, s, q = np.linalg.svd((root_l.square * sides.core) @ root_r.square.T, full_matrices=False)
    # smaller values are rounding noise, left where terms cancel
    found = s[s > float(np.abs(sides.core).max()) * len(sides.core) * _EPSILON]
    chosen = goal.of(found)
    kept = min(chosen, len(found))
    half = np.sqrt(found[:kept])
    left = sides.inverse[0][:, None] * (root_l.inverse @ (p[:, :kept] * half))
    right = sides.inverse[1][:, None] * (root_r.inverse @ (q[:kept].T * half))
    pad = ((0, 0), (0, chosen - kept))
    return _Found(found, np.pad(left, pad), np.pad(right, pad))


def _roots(sides: _Sides, left: float, factors: Factors, reader: Reader) -> tuple[_Root, _Root]:
    """Return the roots of both sides: of their Gram matrices, or of their triangles where those would be wrong.

    `left` is what `left_of_terms` says.
    """
    root_l, root_r = map(_root_of_gram, sides.grams)
    if root_l is not None and root_r is not None:
        pairs = zip((root_l, root_r), sides.inverse, strict=True)
        dependent = any(root.rank < np.count_nonzero(inverse) for root, inverse in pairs)
        if left >= (_CANCELLED_IF_DEPENDENT if dependent else _CANCELLED):
            return root_l, root_r
    of_b, of_a = reader.triangle(factors.b_parts, below=False), reader.triangle(factors.a_parts, below=True)
    return _root_of_triangle(of_b * sides.inverse[0]), _root_of_triangle(of_a * sides.inverse[1])


class _Root(Struct, frozen=True):
    """A factor with columns of length 1 as orthonormal columns times `square`, without numerically zero ones."""

    square: Matrix
    """[rank, columns]: squareᵀ·square is the Gram matrix."""
    inverse: Matrix
    """[columns, rank]: the factor times it has orthonormal columns."""

    @property
    def rank(self) -> int:
        return len(self.square)

    @classmethod
    def of(cls, roots: npt.NDArray[np.float64], vectors: Matrix) -> _Root:
        """Return that of singular values and right singular vectors, in columns."""
        return cls(roots[:, None] * vectors.T, vectors / roots)


def _root_of_gram(gram: Matrix) -> _Root | None:
    """Return the square root of a Gram matrix; None where too many of its digits are lost."""
    if (whole := _root_of_whole(gram)) is not None:
        return whole
    eigenvalues, vectors = np.linalg.eigh(gram)
    largest = max(float(eigenvalues[-1]), 0.0) if eigenvalues.size else 0.0
    noise = 4 * len(gram) * _EPSILON * largest
    kept = eigenvalues > noise
    if np.any(eigenvalues[kept] < _NEARLY_SINGULAR * largest):
        return None
    return _Root.of(np.sqrt(eigenvalues[kept]), vectors[:, kept])


def _root_of_whole(gram: Matrix) -> _Root | None:
    """Return the triangle of a Gram matrix that is far from singular, which is several times faster than eigenvalues.

    Zero columns get a 1 on the diagonal, so that Cholesky does not fail: `core` and `inverse` of `_Sides` are 0 there.
    """
    try:
        square = np.asarray(np.linalg.cholesky(gram + np.diag(np.diag(gram) == 0)).T, np.float64)
    except np.linalg.LinAlgError:
        return None
    inverse = np.asarray(np.linalg.inv(square), np.float64)
    least = 1 / float(np.vdot(inverse, inverse))  # the smallest eigenvalue is not below it
    return _Root(square, inverse) if least > _NEARLY_SINGULAR * len(gram) else None


def _root_of_triangle(triangle: Matrix) -> _Root:
    _, roots, right = np.linalg.svd(triangle, full_matrices=False)
    kept = roots > (roots[0] if roots.size else 0.0) * triangle.shape[1] * _EPSILON
    return _Root.of(roots[kept], right[kept].T)


def grams_and_scales(factors: Factors, reader: Reader) -> tuple[tuple[Matrix, Matrix], npt.NDArray[np.float64]]:
    """Return the Gram matrices of B's columns and of A's rows, and the scale of each column. Raises as `Reader.gram`."""
    grams = reader.gram(factors.b_parts, below=False), reader.gram(factors.a_parts, below=True)
    return grams, np.repeat([term.scale for term in factors.terms], [term.rank for term in factors.terms])


def left_of_terms(grams: Sequence[Matrix], scales: npt.NDArray[np.float64], factors: Factors) -> float:
    """Return ‖ΔW‖ as a share of the sum of the norms of its terms, or of its columns' if that is less: little where they cancel."""
    products = grams[0] * grams[1] * np.outer(scales, scales)
    norm, separate, at = math.sqrt(max(float(products.sum()), 0.0)), 0.0, 0
    for term in factors.terms:
        own = slice(at, at + term.rank)
        separate += math.sqrt(max(float(products[own, own].sum()), 0.0))
        at += term.rank
    # one adapter may be a sum itself, whose terms are its columns
    separate = max(separate, math.sqrt(float(np.diag(products).sum())))
    return norm / separate if separate else 1.0
