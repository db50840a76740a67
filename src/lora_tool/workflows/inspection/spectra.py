"""Singular values of an adapter's ΔW = scaling·B·A, exactly and without forming it, and what they say.

With the thin factorisations B = Q_B·R_B and Aᵀ = Q_A·R_A, ΔW = scaling·Q_B·(R_B·R_Aᵀ)·Q_Aᵀ, so its singular values are
those of the r×r matrix in the middle (Golub and Van Loan, Matrix Computations, 4th ed., §5.4). All in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from lora_tool.adapters.view import LoraLayer, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.keys import split_layer
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored_numbers import READABLE, Matrix, rounded, square_sum, values, widened
from lora_tool.workflows.inspection.factors import matrices, triangle


class Spectrum(Struct, frozen=True, kw_only=True):
    """One module's ΔW. `singular_values` fall; they are those of scaling·B·A, for DoRA before its magnitudes."""

    module: str
    target: str
    """The module's path without its layer."""
    layer: int | None
    rank: int
    singular_values: tuple[float, ...]
    base_norm: float | None
    """‖W‖ of the base's weight, where the base is at hand."""
    kept: float | None = None
    """The cosine of ΔW and what the rounding of W + ΔW to the base's type leaves of it, on sampled rows: 1 is all."""

    @property
    def norm(self) -> float:
        return math.sqrt(math.fsum(value * value for value in self.singular_values))

    @property
    def relative_norm(self) -> float | None:
        """‖ΔW‖/‖W‖; None without a base, or where W is zero."""
        return self.norm / self.base_norm if self.base_norm else None

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of the singular values' shares of their sum; 0 for a zero ΔW.

        Roy and Vetterli, "The effective rank", EUSIPCO 2007.
        """
        total = math.fsum(self.singular_values)
        if not total or not math.isfinite(total):
            return 0.0 if total == 0 else math.nan
        shares = (value / total for value in self.singular_values)
        return math.exp(-math.fsum(share * math.log(share) for share in shares if share > 0))

    def energy(self, k: int) -> float:
        """Return the share of ‖ΔW‖² in the first `k` singular values, from 0 to 1; NaN for a zero ΔW."""
        squares = [value * value for value in self.singular_values]
        total = math.fsum(squares)
        return math.fsum(squares[:k]) / total if total else math.nan


def spectra(adapter: AdapterDir, base: ModelDir | None = None) -> Iterator[Spectrum]:
    """Yield the spectrum of every LoRA module whose two factors fit together and whose scaling is known.

    Reads the adapter's factors and, with `base`, the weights under them, block by block. Raises `OSError`.
    """
    for layer in view_of(adapter).layers:
        found = spectrum(layer, base)
        if found is not None:
            yield found


def spectrum(lora: LoraLayer, base: ModelDir | None = None) -> Spectrum | None:
    """Return the layer's spectrum; None where its factors do not fit together, or cannot be read as numbers."""
    found = matrices(lora)
    if found is None or lora.scaling is None:
        return None
    left, right = found
    weight = base.tensors.get(f"{lora.module}.weight") if base else None
    if weight is not None and weight.dtype not in READABLE:
        weight = None
    number, target = split_layer(lora.module)
    return Spectrum(
        module=lora.module,
        target=target + (f" ({lora.adapter_name})" if lora.adapter_name else ""),
        layer=number,
        rank=left.shape[1],
        singular_values=tuple(abs(lora.scaling) * _singular_values(left, right)),
        base_norm=math.sqrt(square_sum(weight)) if weight is not None else None,
        kept=_kept(weight, left, right, lora.scaling) if weight is not None else None,
    )


_SAMPLED_ROWS = 64


def _kept(weight: StoredTensor, left: Matrix, right: Matrix, scaling: float) -> float | None:
    """Return how much of ΔW survives; None where W is not [out, in] as B·A is, or where nothing is to be kept."""
    if weight.shape != (len(left), len(right)):
        return None
    rows = np.unique(np.linspace(0, len(left) - 1, _SAMPLED_ROWS).round().astype(int))
    delta = scaling * (left[rows] @ right.T)
    before = widened(values(weight).reshape(weight.shape)[rows], weight.dtype)
    change = rounded(before + delta, weight.dtype) - before
    lengths = np.linalg.norm(delta) * np.linalg.norm(change)
    if not np.isfinite(lengths):
        return math.nan
    return float(np.sum(delta * change) / lengths) if lengths else 0.0 if delta.any() else None


def _singular_values(left: Matrix, right: Matrix) -> npt.NDArray[np.float64]:
    """Return the singular values of left·rightᵀ, largest first; NaN where the factors hold NaN or infinity."""
    triangles = triangle(left), triangle(right)
    rank = left.shape[1]
    if not all(np.isfinite(each).all() for each in triangles):
        return np.full(rank, np.nan)
    found = np.linalg.svd(triangles[0] @ triangles[1].T, compute_uv=False)
    return np.pad(found, (0, rank - len(found)))
