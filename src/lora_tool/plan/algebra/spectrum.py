"""The singular values of a sum of LoRA deltas, and the best product of lower rank, from the factors alone.

ΔW = Σ cₖ·BₖAₖ = L·C·Rᵀ, with all B's beside one another in L, all Aᵀ in R, and the scalings in the diagonal C. With the
columns of L and R scaled to length 1, G = LᵀL = TᵀT (Cholesky) gives L = U·T with orthonormal columns U = L·T⁻¹, and R
likewise; the singular values of ΔW are those of the small matrix T_L·C·T_Rᵀ = P·S·Qᵀ, all of them. The best
approximation of rank r (Eckart and Young, Psychometrika 1, 1936) is (L·X)·(R·Y)ᵀ, X = T_L⁻¹·P·S^½ and
Y = T_R⁻¹·Q·S^½, which needs rows of L and R one at a time. √S on both sides keeps both factors small. Where columns
depend on one another, T is Λ^½Vᵀ of G = V·Λ·Vᵀ without what is zero.

Sums are in float64. A Gram matrix squares the singular values of a factor, so that what is below 1e-8 of the largest is
lost in it. Where that could be seen in ΔW, because its terms nearly cancel or a factor is nearly singular, T is taken
from the triangle of a QR factorisation instead, which does not square them.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.stored_numbers import BLOCK, Matrix, column_blocks, row_blocks, widened
from lora_tool.plan.algebra.terms import Factors
from lora_tool.plan.core.aside import Aside
from lora_tool.plan.core.factor_ops import SmallMatrix
from lora_tool.tensors import DType, StoredTensor

_EPSILON = float(np.finfo(np.float64).eps)
_CANCELLED = 1e-4
"""If ‖ΔW‖ is below this share of the sum of its terms' norms, they cancel too far for a Gram matrix."""
_CANCELLED_IF_DEPENDENT = 0.5
"""The same where columns of a factor are linearly dependent in a Gram matrix, which may be those that do not cancel."""
_NEARLY_SINGULAR = 1e-10
"""An eigenvalue below this share of the largest has lost six digits in a Gram matrix."""
_STEPS_READ = 2
"""How many blocks are read together: a block stays in the second-level cache, and a read costs as much as a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The best approximation of one module's ΔW at a rank, before anything is written."""

    module: str
    singular_values: npt.NDArray[np.float64]
    """Those of ΔW, falling; zeros are left out."""
    rank: int
    left: SmallMatrix
    """What the columns of all B's beside one another are turned by."""
    right: SmallMatrix
    """What the rows of all A's, one below the other, are turned by."""

    @property
    def energy(self) -> float:
        """‖ΔW‖²."""
        return math.fsum(np.square(self.singular_values).tolist())

    @property
    def discarded(self) -> float:
        """‖ΔW‖² of what the rank leaves out."""
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


def compressed(
    factors: Factors, *, rank: int | None = None, keep: float = 1.0, aside: Aside | None = None
) -> Compressed:
    """Return the best approximation of the module's ΔW at `rank`, or at the least that keeps `keep` of ‖ΔW‖².

    The small matrices lie `aside` where that is given. Reads the factors in blocks, once; twice where terms nearly
    cancel. Raises `UnsupportedAdapter` where one holds NaN or infinity, `OSError` where a file cannot be read.
    """
    scales = np.repeat([term.scale for term in factors.terms], [term.rank for term in factors.terms])
    total = len(scales)
    grams = _gram(factors.b_parts, total, below=False), _gram(factors.a_parts, total, below=True)
    if not all(np.isfinite(gram).all() for gram in grams):
        names = ", ".join(part.name for part in (*factors.b_parts, *factors.a_parts))
        raise UnsupportedAdapter(
            f"{factors.b_parts[0].path}: a factor of `{factors.module}` holds NaN or infinity, or its squares overflow: {names}",
            hint=f"lora-tool validate --deep {shlex.quote(str(factors.b_parts[0].path.parent))} names the tensor",
        )
    lengths = [np.sqrt(np.maximum(np.diag(gram), 0.0)) for gram in grams]
    inverse = [np.divide(1.0, each, out=np.zeros(total), where=each > 0) for each in lengths]
    roots = [_root_of_gram(gram * np.outer(each, each)) for gram, each in zip(grams, inverse, strict=True)]
    core = scales * lengths[0] * lengths[1]
    dependent = any(root.rank < np.count_nonzero(each) for root, each in zip(roots, lengths, strict=True) if root)
    least = _CANCELLED_IF_DEPENDENT if dependent else _CANCELLED
    if any(root is None for root in roots) or _left_of_terms(grams, scales, factors) < least:
        parts = ((factors.b_parts, False), (factors.a_parts, True))
        triangles = [_triangle(some, total, below=below) for some, below in parts]
        roots = [_root_of_triangle(t * each) for t, each in zip(triangles, inverse, strict=True)]
    root_l, root_r = (root for root in roots if root is not None)
    p, s, q = np.linalg.svd((root_l.square * core) @ root_r.square.T, full_matrices=False)
    found = s[s > float(np.abs(core).max()) * total * _EPSILON]  # what is left where terms cancel is rounding
    chosen = min(rank if rank is not None else rank_for(found, keep), max(1, len(found)))
    kept = min(chosen, len(found))
    half = np.sqrt(found[:kept])
    left = inverse[0][:, None] * (root_l.inverse @ (p[:, :kept] * half))
    right = inverse[1][:, None] * (root_r.inverse @ (q[:kept].T * half))
    pad = ((0, 0), (0, chosen - kept))  # a zero ΔW has a rank of 1, too: PEFT has no layer of rank 0
    return Compressed(
        module=factors.module,
        singular_values=found,
        rank=chosen,
        left=SmallMatrix.of(np.pad(left, pad), aside),
        right=SmallMatrix.of(np.pad(right, pad), aside),
    )


@dataclass(frozen=True, slots=True)
class _Root:
    """Of a factor whose columns have length 1: orthonormal columns times `square`, without what is zero to working precision."""

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
    """Return what a Gram matrix is the square of; None where too many of its digits are lost."""
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

    Zero columns, which have no length, are no part of it: any length will do, for nothing comes of them.
    """
    try:
        square = np.asarray(np.linalg.cholesky(gram + np.diag(np.diag(gram) == 0)).T, np.float64)
    except np.linalg.LinAlgError:
        return None
    inverse = np.asarray(np.linalg.inv(square), np.float64)
    least = 1 / float(np.vdot(inverse, inverse))  # the smallest eigenvalue is not below it
    return _Root(square, inverse) if least > _NEARLY_SINGULAR * len(gram) else None


def _root_of_triangle(triangle: Matrix) -> _Root:
    _, roots, turned = np.linalg.svd(triangle, full_matrices=False)
    kept = roots > (roots[0] if roots.size else 0.0) * triangle.shape[1] * _EPSILON
    return _Root.of(roots[kept], turned[kept].T)


def _left_of_terms(grams: Sequence[Matrix], scales: npt.NDArray[np.float64], factors: Factors) -> float:
    """Return ‖ΔW‖ as a share of the sum of the norms of its terms: little where they cancel, 1 of a single term."""
    if len(factors.terms) == 1:
        return 1.0
    products = grams[0] * grams[1] * np.outer(scales, scales)
    alone, at = 0.0, 0
    for term in factors.terms:
        own = slice(at, at + term.rank)
        alone += math.sqrt(max(float(products[own, own].sum()), 0.0))
        at += term.rank
    return math.sqrt(max(float(products.sum()), 0.0)) / alone if alone else 1.0


def _gram(parts: Sequence[StoredTensor], total: int, *, below: bool) -> Matrix:
    gram = np.zeros((total, total))
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        for block in stacked_blocks(parts, total, below=below):
            gram += block.T @ block
    return gram


def _triangle(parts: Sequence[StoredTensor], total: int, *, below: bool) -> Matrix:
    """Return R of the thin factorisation, of all rows, some at a time."""
    triangle = np.zeros((0, total))
    for block in stacked_blocks(parts, total, below=below):
        triangle = np.asarray(np.linalg.qr(np.concatenate([triangle, block]), mode="r"))
    return triangle


def stacked_blocks(parts: Sequence[StoredTensor], total: int, *, below: bool) -> Iterator[Matrix]:
    """Yield float64 rows of [P₁ | P₂ | …], [rows, `total`]; `below`: of its transposed, the parts below one another.

    The block is used again for the next.
    """
    height = parts[0].shape[1 if below else 0]
    step = max(total, BLOCK // (16 * max(1, total)))
    held = np.empty((total, min(step, height)) if below else (min(step, height), total))
    with OpenFiles(opened_regular) as files:
        for some in _stored(parts, step, files, below=below):
            count = some[0].shape[1 if below else 0]
            block = held[:, :count] if below else held[:count]
            begin = 0
            for part, stored in zip(parts, some, strict=True):
                own = slice(begin, begin + part.shape[0 if below else 1])
                block[(own, slice(None)) if below else (slice(None), own)] = _wide(stored, part.dtype)
                begin = own.stop
            yield block.T if below else block


def _stored(
    parts: Sequence[StoredTensor], step: int, files: OpenFiles, *, below: bool
) -> Iterator[Sequence[npt.NDArray[Any]]]:
    """Yield `step` rows of every part at a time, `below` as many columns; of a file more are read at once."""
    read = column_blocks if below else row_blocks
    for wide in zip(*(read(part, _STEPS_READ * step, files) for part in parts), strict=True):
        for at in range(0, wide[0].shape[1 if below else 0], step):
            some = slice(at, at + step)
            yield [stored[:, some] if below else stored[some] for stored in wide]


def _wide(some: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    return widened(some, dtype) if dtype is DType.BF16 else some
