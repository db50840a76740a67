"""The factors of a LoRA layer as float64 matrices, and the norms of them and of their product, which is never formed.

‖BA‖² = tr((BA)ᵀ(BA)) = tr((BᵀB)(AAᵀ)): two r×r Gram matrices instead of an out×in matrix. The sums are in float64, so
that a product much smaller than its factors is not lost in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from lora_tool.adapters.view import LoraLayer
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored_numbers import BLOCK, READABLE, Matrix, values, widened
from lora_tool.workflows.inspection.model import Measured


def factors_of(layer: LoraLayer) -> tuple[StoredTensor, StoredTensor, int] | None:
    """Return A, B and their rank; None where the two do not fit together, or cannot be read as numbers.

    Where a grouped convolution splits B, the two are no factors of one product.
    """
    a, b, rank = layer.a, layer.b, layer.rank
    if not rank or a is None or b is None or b.shape[1] != rank or not {a.dtype, b.dtype} <= READABLE:
        return None
    return a, b, rank


def matrices(layer: LoraLayer) -> tuple[Matrix, Matrix] | None:
    """Return B, [out, r], and Aᵀ, [in, r]; None where `factors_of` has none. Raises `OSError`."""
    found = factors_of(layer)
    if found is None:
        return None
    a, b, rank = found
    return widened(values(b), b.dtype).reshape(-1, rank), widened(values(a), a.dtype).reshape(rank, -1).T


def triangle(factor: Matrix) -> Matrix:
    """Return R of the thin factorisation factor = Q·R, for factor [n, r]; NaN where the factor is not finite."""
    if not np.isfinite(factor).all():
        return np.full((1, factor.shape[1]), np.nan)
    return np.asarray(np.linalg.qr(factor, mode="r"))


def layer_norms(layers: Iterable[LoraLayer]) -> list[Measured | None]:
    """Return ‖A‖, ‖B‖, ‖scaling·B·A‖ of each layer; None for one whose two factors do not fit together.

    The last is None where the scaling is not known. Raises `OSError` where a file cannot be read.
    """
    factors = ((factors_of(layer), layer.scaling) for layer in layers)
    return [None if found is None else _norms(*found, scaling) for found, scaling in factors]


def _norms(a: StoredTensor, b: StoredTensor, rank: int, scaling: float | None) -> Measured:
    gram_a, gram_b = _gram(a, rank, rows=True), _gram(b, rank, rows=False)
    norm_a, norm_b = math.sqrt(float(np.trace(gram_a))), math.sqrt(float(np.trace(gram_b)))
    if scaling is None:
        return norm_a, norm_b, None
    product = float(np.sum(gram_a * gram_b))  # both are symmetric: the sum over all entries is the trace of the product
    delta = math.sqrt(product if math.isnan(product) else max(product, 0.0))
    return norm_a, norm_b, abs(scaling) * delta


def _gram(tensor: StoredTensor, rank: int, *, rows: bool) -> Matrix:
    """Return M·Mᵀ where `rows` are the rank (A), Mᵀ·M where columns are (B), in blocks along the other side."""
    stored = values(tensor)
    matrix = stored.reshape(rank, -1) if rows else stored.reshape(-1, rank)
    step = max(1, BLOCK // rank)
    gram = np.zeros((rank, rank))
    with np.errstate(all="ignore"):  # NaN and infinities are shown as what they are
        for at in range(0, matrix.shape[1 if rows else 0], step):
            block = widened(matrix[:, at : at + step] if rows else matrix[at : at + step], tensor.dtype)
            gram += block @ block.T if rows else block.T @ block
    return gram
