"""Frobenius norms of LoRA factors and of their product, without ever forming the product.

‖BA‖² = tr((BA)ᵀ(BA)) = tr((BᵀB)(AAᵀ)): two r×r Gram matrices instead of an out×in matrix. The sums are in float64, so
that a product much smaller than its factors is not lost in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from lora_tool.inspection.factors import BLOCK, READABLE, Matrix, values, widened
from lora_tool.inspection.model import LoraModule
from lora_tool.tensors import StoredTensor


def module_norms(modules: Iterable[LoraModule]) -> Mapping[LoraModule, tuple[float, float, float | None]]:
    """Return module → ‖A‖, ‖B‖, ‖scaling·B·A‖, for the modules whose two factors fit together.

    The last is None where the scaling is not known. Raises `OSError` where a file cannot be read.
    """
    norms = {}
    for module in modules:
        a, b, rank = module.a, module.b, module.rank
        if rank and a is not None and b is not None and {a.dtype, b.dtype} <= READABLE:
            norms[module] = _norms(a, b, rank, module.scaling)
    return norms


def _norms(a: StoredTensor, b: StoredTensor, rank: int, scaling: float | None) -> tuple[float, float, float | None]:
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
