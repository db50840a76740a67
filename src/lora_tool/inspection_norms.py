"""Frobenius norms of LoRA factors and of their product, without ever forming the product.

‖BA‖² = tr((BA)ᵀ(BA)) = tr((BᵀB)(AAᵀ)): two r×r Gram matrices instead of an out×in matrix. The sums are in float64, so
that a product much smaller than its factors is not lost in rounding.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from lora_tool.inspection_model import LoraModule
from lora_tool.tensors import DType, StoredTensor

Matrix = npt.NDArray[np.float64]

_STORED = {DType.BF16: "<u2", DType.F16: "<f2", DType.F32: "<f4", DType.F64: "<f8"}
_BLOCK = 1 << 20
"""Elements that are widened to float64 at a time."""


def module_norms(modules: Iterable[LoraModule]) -> Mapping[LoraModule, tuple[float, float, float | None]]:
    """Return module → ‖A‖, ‖B‖, ‖scaling·B·A‖, for the modules whose two factors fit together.

    The last is None where the scaling is not known. Raises `OSError` where a file cannot be read.
    """
    norms = {}
    for module in modules:
        a, b, rank = module.a, module.b, module.rank
        if rank and a is not None and b is not None and {a.dtype, b.dtype} <= _STORED.keys():
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
    values = _values(tensor)
    matrix = values.reshape(rank, -1) if rows else values.reshape(-1, rank)
    step = max(1, _BLOCK // rank)
    gram = np.zeros((rank, rank))
    with np.errstate(all="ignore"):  # NaN and infinities are shown as what they are
        for at in range(0, matrix.shape[1 if rows else 0], step):
            block = _widened(matrix[:, at : at + step] if rows else matrix[at : at + step], tensor.dtype)
            gram += block @ block.T if rows else block.T @ block
    return gram


def _values(tensor: StoredTensor) -> npt.NDArray[np.generic]:
    """Return the stored elements, mapped from the file where they are one span."""
    kind = np.dtype(_STORED[tensor.dtype])
    parts = []
    for span in tensor.spans:
        descriptor = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            begin = span.offset - span.offset % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(descriptor, span.offset + span.nbytes - begin, access=mmap.ACCESS_READ, offset=begin)
        finally:
            os.close(descriptor)
        parts.append(np.frombuffer(mapped, dtype=kind, count=span.nbytes // kind.itemsize, offset=span.offset - begin))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _widened(block: npt.NDArray[np.generic], dtype: DType) -> Matrix:
    if dtype is DType.BF16:  # bfloat16 is the upper half of a float32
        return (block.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return block.astype(np.float64)
