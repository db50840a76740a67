"""Whether an adapter is the sum that it was computed as: by QR of its factors and of its inputs', in float64.

With L = [B₁ … Bₙ | B'], R = [A₁ᵀ … Aₙᵀ | A'ᵀ] and their thin factorisations L = Q_L·T_L, R = Q_R·T_R, the difference
Σ sₖ·BₖAₖ - s'·B'A' is Q_L·(T_L·C·T_Rᵀ)·Q_Rᵀ, so its norm is that of the small matrix in the middle (Golub and Van Loan,
Matrix Computations, 4th ed., §5.4); the singular values of the sum alone say how near an adapter of this rank can be.
Gram matrices and eigenvalues, which wrote the adapter, are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from lora_tool.core.machine import available_cores
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import StoredTensor, TensorAction
from lora_tool.plans.algebra.terms import Factors, Term
from lora_tool.rules.merged.evidence import TensorEvidence, Verdict
from lora_tool.verification.elements import FLOATS, Array, Files
from lora_tool.verification.pieces import CannotTellError, rows_and_columns

_DOUBLE = np.dtype(np.float64)
_EPSILON = float(np.finfo(np.float64).eps)
_FROM_THE_BEST = 1e-6
"""How much farther than the best approximation of its rank an adapter may be, relative to that."""
_ROWS = 4096


class FactorDifference(Struct, frozen=True, kw_only=True):
    """How far what was written is from the sum, and how far it had to be."""

    norm: float
    """‖ΔW‖ of the sum."""
    found: float
    """‖ΔW' - ΔW‖."""
    best: float
    """That of the best approximation of the rank that was written."""
    rounding: float
    """What storing the factors, and computing here, may add."""
    apart: float = 0.0
    """How far ΔW' is from ΔW projected onto what B' spans, or A', if that is farther: nothing in a best approximation."""

    @property
    def near(self) -> bool:
        """Whether nothing but rank and rounding keeps the two apart."""
        return self.found <= self.best * (1 + _FROM_THE_BEST) + self.rounding

    @property
    def fitted(self) -> bool:
        """Whether it has the best values in its own directions: the first digits that are wrong show here, not in `found`."""
        return self.apart <= _FROM_THE_BEST * self.norm + 2 * self.rounding


def check_products(
    sums: Sequence[Factors], made: Sequence[Factors], *, least: float | None, exact: bool, progress: Progress
) -> dict[str, TensorEvidence]:
    """Return the evidence of every module of an adapter: `made` as it is written, `sums` what it was computed from.

    `least` is the share of ‖ΔW‖² that each was to keep, `exact` that nothing was to be left out. The evidence is named
    by the written lora_B. Raises `OSError`, `SourceChanged`.
    """
    written = {each.module: each for each in made}
    pairs = [(each, written[each.module].terms[0]) for each in sums if each.module in written]
    share = 0.0 if least is None else least
    return evidence_of_each(pairs, lambda pair, files: _evidence(*pair, files, least=share, exact=exact), progress)


def evidence_of_each(
    modules: Iterable[tuple[Factors, Term]],
    evidence: Callable[[tuple[Factors, Term], Files], TensorEvidence],
    progress: Progress,
) -> dict[str, TensorEvidence]:
    """Return the evidence of every module by its name, found in parallel; each has its written factors last."""
    with Files() as files, threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(available_cores()) as pool:

        def one(pair: tuple[Factors, Term]) -> TensorEvidence:
            found = evidence(pair, files)
            progress(pair[1].a.nbytes + pair[1].b.nbytes)
            return found

        return {found.name: found for found in pool.map(one, modules)}


def evidence_of_factors(written: Term, reason: str, distance: float | None) -> TensorEvidence:
    """Return the evidence of the factors that were written: they are wrong for a `reason`, right without one."""
    numel = written.a.spec.numel + written.b.spec.numel
    return TensorEvidence(
        name=written.b.name,
        action=TensorAction.COMPUTED,
        verdict=Verdict.DIFFERENT if reason else Verdict.RIGHT,
        compared=numel,
        numel=numel,
        wrong=numel if reason else 0,
        distance=distance,
        rank=written.rank,
        reason=reason,
    )


def unknown_of_factors(written: Term, reason: str) -> TensorEvidence:
    """Return the evidence of factors that nothing can be said of, for a `reason`."""
    return replace(evidence_of_factors(written, reason, None), verdict=Verdict.UNKNOWN, compared=0, wrong=0)


def _evidence(factors: Factors, written: Term, files: Files, *, least: float, exact: bool) -> TensorEvidence:
    fits = (written.b.shape[0], written.a.shape[1]) == (factors.out, factors.width)
    try:
        found = difference(factors, written, files, exact=exact) if fits else None
    except CannotTellError as error:
        return unknown_of_factors(written, str(error))
    share = 1.0 if found is None or not found.norm else found.found / found.norm
    if found is not None and not math.isfinite(found.found):
        reason = "holds NaN or infinity, or values whose products overflow"
    elif found is None:
        reason = f"is [{written.b.shape[0]}, {written.a.shape[1]}], but the sum is [{factors.out}, {factors.width}]"
    elif not found.near:
        nearest = "no difference" if exact else f"{found.best:.6g}, the least at rank {written.rank}"
        reason = f"ΔW is {found.found:.6g} away from what its inputs give, {share:.3g} of it; expected {nearest}"
    elif not found.fitted:
        reason = f"ΔW is {found.apart:.6g} away from what its inputs give in the directions that its factors span"
    elif found.norm and share**2 > (1 - least) * (1 + _FROM_THE_BEST) + found.rounding / found.norm:
        reason = f"keeps {1 - share**2:.4%} of ‖ΔW‖², but should keep at least {least:.4%}"
    else:
        reason = ""
    return evidence_of_factors(written, reason, None if found is None else share)


def difference(factors: Factors, written: Term, files: Files, *, exact: bool) -> FactorDifference:
    """Return how far `written` is from the sum, and how near it could be; at its own rank, or, `exact`, at any.

    Raises `CannotTellError` where the sum is of no numbers.
    """
    terms = (*factors.terms, written)
    scales = np.concatenate([np.full(each.rank, each.scale) for each in factors.terms])
    signed = np.concatenate([scales, np.full(written.rank, -written.scale)])
    left = _triangle([each.b for each in terms], files, below=False)
    right = _triangle([each.a for each in terms], files, below=True)
    own = len(scales)
    if not all(np.isfinite(each[:, :own]).all() for each in (left, right)):
        raise CannotTellError("a factor of its inputs holds NaN or infinity")
    values = np.linalg.svd((left[:, :own] * scales) @ right[:, :own].T, compute_uv=False)
    rest = values[len(values) if exact else written.rank :]
    sizes = np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=0) * np.abs(signed)
    whole, own_b, own_a = (left[:, :own] * scales) @ right[:, :own].T, left[:, own:], right[:, own:]
    made = written.scale * own_b @ own_a.T
    apart = 0.0
    if not exact and np.isfinite(made).all():
        of_b, of_a = projected(whole, own_b), projected(whole.T, own_a).T
        apart = float(max(np.linalg.norm(made - of_b), np.linalg.norm(made - of_a)))
    b, a = float(np.linalg.norm(own_b)), float(np.linalg.norm(own_a))
    stored = abs(written.scale) * (_rounding(written.b, b) * a + _rounding(written.a, a) * b)
    return FactorDifference(
        norm=float(np.linalg.norm(values)),
        found=float(np.linalg.norm((left * signed) @ right.T)),
        best=float(np.linalg.norm(rest)),
        rounding=1.1 * stored + 64 * _EPSILON * float(sizes.sum()),
        apart=apart,
    )


def projected(matrix: Array, columns: Array) -> Array:
    """Return the orthogonal projection of a matrix's columns onto what others span, whatever the lengths of those."""
    basis = spanned(columns)
    return np.asarray(basis @ (basis.T @ matrix))


def spanned(columns: Array) -> Array:
    """Return orthonormal columns that span the same; those of zeros span nothing."""
    lengths = np.linalg.norm(columns, axis=0)
    unit = np.asarray(columns[:, lengths > 0] / lengths[lengths > 0])
    if not unit.size:
        return unit
    vectors, sizes, _ = np.linalg.svd(unit, full_matrices=False)
    return np.asarray(vectors[:, sizes > len(unit) * _EPSILON * sizes[0]])


def _rounding(factor: StoredTensor, norm: float) -> float:
    """Return how far rounding each element once may take a factor of this norm."""
    layout = FLOATS[factor.dtype]
    return layout.roundoff * norm + 2.0 ** (layout.smallest - layout.digits) * math.sqrt(factor.spec.numel)


def _triangle(parts: Sequence[StoredTensor], files: Files, *, below: bool) -> Array:
    """Return T of the thin factorisation of the parts beside one another, some rows at a time."""
    made = np.zeros((0, sum(part.shape[0 if below else 1] for part in parts)))
    for block in _blocks(parts, files, below=below):
        made = np.asarray(np.linalg.qr(np.concatenate([made, block]), mode="r"))
    return made


def _blocks(parts: Sequence[StoredTensor], files: Files, *, below: bool) -> Iterator[Array]:
    if below:  # a row of Aᵀ is a column in the file
        whole = [files.matrix(part, None, _DOUBLE) for part in parts]
        for at in range(0, whole[0].shape[1], _ROWS):
            yield np.concatenate([part[:, at : at + _ROWS] for part in whole]).T
        return
    height = rows_and_columns(parts[0].shape)[0]
    for at in range(0, height, _ROWS):
        rows = [(at, min(at + _ROWS, height))]
        yield np.concatenate([files.matrix(part, rows, _DOUBLE) for part in parts], axis=1)
