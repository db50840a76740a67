"""What PiSSA and OLoRA take out of W before training, in float64, and how far float32 may be from it.

PiSSA takes W's best approximation of rank r, P = U·S·Vᵀ (Meng et al., 2024); OLoRA takes s·Q·Qᵀ·W, with Q an
orthonormal basis of W's first r columns (Büyükakyüz, 2024). PEFT computes both in float32 on every load.

A backward stable decomposition is that of W + E, ‖E‖ ≤ c·u·‖W‖ in Frobenius norm. To first order E moves P by parts
that couple direction i ≤ r with one beyond r, each times σᵢ/(σᵢ - σ_r+1) at most, so by Cauchy and Schwarz one value of
P moves by ‖E‖·(‖κ∘U_row‖ + ‖κ∘V_column‖) at most, κᵢ that quotient. The projector on the first r columns W_r moves by
‖E_r‖/σ_min(W_r) (Stewart and Sun, "Matrix Perturbation Theory", 1990, chapters III and V). `_STABLE` is c. Against
torch's float32 on CPUs, 32 to 1536 rows, flat and steep spectra, c = 1.4 would have been enough with the largest κ for
all directions.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from lora_tool.core.tensors import DType
from lora_tool.verification.elements import FLOATS, Array
from lora_tool.verification.pieces import CannotTellError

_STABLE = 16.0
_SINGLE = FLOATS[DType.F32].roundoff
_DOUBLE = FLOATS[DType.F64].roundoff
_TELLS = 0.5
"""A bound above this share of what is taken out tells nothing."""


class Taken(Struct, frozen=True):
    """What is taken out, `left` @ `right`, and `rows` ⊗ `of_rows` + `columns` ⊗ `of_columns`: how far float32 may be."""

    left: Array
    right: Array
    rows: Array
    of_rows: Array
    columns: Array
    of_columns: Array

    def room(self, rows: Array, columns: Array) -> Array:
        """Return how far the values at `rows` and `columns` may be from float64's."""
        rank = self.left.shape[1]
        products = np.linalg.norm(self.left[rows], axis=1) * np.linalg.norm(self.right[:, columns], axis=0)
        moved = self.rows[rows] * self.of_rows[columns] + self.columns[columns] * self.of_columns[rows]
        return np.asarray(moved + 4 * (rank + 4) * _SINGLE * products)


def taken(init: str, weight: Array, rank: int, scaling: float) -> Taken:
    """Return what the `init` takes out of the float64 `weight`. Raises `CannotTellError`."""
    rank = min(rank, *weight.shape)
    if not np.isfinite(weight).all():
        raise CannotTellError("the base weight has NaN or infinity")
    found = _principal(weight, rank) if init == "pissa" else _first_columns(weight, rank, scaling)
    room = np.outer(found.rows, found.of_rows) + np.outer(found.of_columns, found.columns)
    size = np.linalg.norm(found.left @ found.right)
    if not np.linalg.norm(room) <= _TELLS * size:
        raise CannotTellError(
            f"float32 cannot determine exactly what {init} takes out of this base: its singular directions are too "
            "close to those that stay"
        )
    return found


def _principal(weight: Array, rank: int) -> Taken:
    """By the eigenvectors of the smaller Gram matrix: a quarter of the time of a decomposition of W."""
    wide = weight.shape[0] <= weight.shape[1]
    squares, vectors = np.linalg.eigh(weight @ weight.T if wide else weight.T @ weight)
    values = np.sqrt(np.maximum(squares[::-1][: rank + 1], 0.0))
    basis = np.ascontiguousarray(vectors[:, ::-1][:, :rank])
    other = basis.T @ weight if wide else (weight @ basis).T
    kept, beyond = values[:rank], values[rank] if values.size > rank else 0.0
    if not kept[-1] > beyond:
        raise CannotTellError(
            "the base has equal singular values on both sides of the rank that PiSSA takes out, so "
            "its choice is arbitrary"
        )
    apart = kept / (kept - beyond)
    error = _STABLE * (_SINGLE * np.linalg.norm(weight) + max(weight.shape) * _DOUBLE * values[0] ** 2 / kept[-1])
    here = error * np.linalg.norm(basis * apart, axis=1)
    there = error * np.linalg.norm(other.T / kept * apart, axis=1)
    left, right = (basis, other) if wide else (other.T, basis.T)
    roots = np.sqrt(kept)
    left, right = (left * roots, right / roots[:, None]) if wide else (left / roots, right * roots[:, None])
    rows, columns = (here, there) if wide else (there, here)
    return Taken(left, right, rows, np.ones(weight.shape[1]), columns, np.ones(weight.shape[0]))


def _first_columns(weight: Array, rank: int, scaling: float) -> Taken:
    first = weight[:, :rank]
    least = np.linalg.svd(first, compute_uv=False)[-1]
    if not least > 0:
        raise CannotTellError("the base's first columns are linearly dependent, so OLoRA's basis of them is arbitrary")
    basis, _ = np.linalg.qr(first)
    inside = basis.T @ weight
    norms = np.linalg.norm(weight, axis=0)
    rest = np.sqrt(np.maximum(norms**2 - np.square(inside).sum(axis=0), 0.0))
    turned = np.linalg.norm(first) / least
    error = _STABLE * _SINGLE * abs(scaling)
    return Taken(
        basis * scaling,
        inside,
        np.full(weight.shape[0], error),
        turned * np.linalg.norm(inside, axis=0) + norms,
        error * turned * rest,
        np.linalg.norm(basis, axis=1),
    )
