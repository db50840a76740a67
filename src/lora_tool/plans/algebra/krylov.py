"""The nearest product of low rank to the difference of two stored matrices, which is never formed: four passes of blocks.

Block Krylov iteration (Musco and Musco, "Randomized block Krylov methods", NeurIPS 2015): three passes apply DᵀD to a
block of random vectors, and all three results are kept; the fourth multiplies D by an orthonormal basis K of them, and
the singular values of the thin Y = D·K are those of D as far as the basis holds it. With Y = U·S·Vᵀ the best product of
rank r in it is (U·S^½)·(S^½·Vᵀ·Kᵀ), and ‖D - that‖² is ‖D‖² - Σ_{i≤r} σᵢ² exactly, because K is orthonormal.
"""

from __future__ import annotations

import math
import shlex
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.stored_numbers import blocks as numbers_in
from lora_tool.formats.stored_numbers import row_blocks
from lora_tool.plans.algebra.ranks import enough

_Array = npt.NDArray[Any]

_PASSES = 3
_MORE = 8
"""Directions beyond the requested rank, so that the last singular values are accurate too."""
_BLOCK = 1 << 19
_SHORT = 1e-12
"""The square of a direction's length among columns of float32, below which it is rounding."""
_EXPONENTS = {DType.BF16: (7, 0xFF, 134), DType.F16: (10, 0x1F, 25), DType.F32: (23, 0xFF, 150)}
"""Bits below a type's exponent, the exponent's mask, and e: an ulp is 2^(exponent - e)."""


class TopSingular(Struct, frozen=True, kw_only=True):
    """A difference D as `b`·`a`, [out, r] and [r, in], and the size of the rest."""

    b: _Array
    a: _Array
    norm: float
    """‖D‖."""
    residual: float
    """‖D - B·A‖."""
    noise: float
    """The part of ‖D‖ that comes from rounding the weights to their type once."""
    largest: float
    """The largest singular value that was found."""
    enough: int | None
    """The rank that keeps 99 % of ‖D‖²; None where it is above the ranks that were computed."""

    @property
    def rank(self) -> int:
        """Columns of `b`."""
        return int(self.b.shape[1])

    @property
    def kept(self) -> float:
        """The share of ‖D‖² beyond the rounding noise that is kept, 1 at most."""
        return kept_share(self.norm, self.noise, self.norm**2 - self.residual**2)


def kept_share(norm: float, noise: float, energy: float) -> float:
    """Return the share that `energy` is of ‖D‖² without the rounding noise, 1 at most; 1 of nothing."""
    signal = norm**2 - noise**2
    return min(1.0, max(0.0, energy) / signal) if signal > 0 else 1.0


def nearest(tensor: StoredTensor, base: StoredTensor, *, rank: int, keep: float | None = None) -> TopSingular:
    """Return the nearest product of `rank` at most to tensor - base; with `keep` the least rank that keeps that share.

    Both are matrices of one shape and of float types, read in blocks of rows, four times. Raises `UnsupportedAdapter`
    where one holds NaN or infinity, `SourceChanged` and `CorruptFile` where a file cannot be read.
    """
    name, noise = f"{tensor.path}: `{tensor.name}` or the base's", math.sqrt(_rounding(tensor))
    try:
        return nearest_to(lambda: _differences(tensor, base), tensor.shape, name, noise=noise, rank=rank, keep=keep)
    except UnsupportedAdapter:
        require_finite(tensor)  # which of the two holds NaN
        require_finite(base)
        raise


def require_finite(tensor: StoredTensor) -> None:
    """Return if the tensor holds neither NaN nor infinity. Raises `UnsupportedAdapter`, and as `nearest`."""
    if tensor.dtype.is_float and not all(np.isfinite(block).all() for block in numbers_in(tensor)):
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` holds NaN or infinity",
            hint=f"lora-tool validate --deep {shlex.quote(str(tensor.path.parent))}",
        )


def nearest_to(
    blocks: Callable[[], Iterator[_Array]],
    shape: Sequence[int],
    name: str,
    *,
    noise: float = 0.0,
    rank: int,
    keep: float | None = None,
) -> TopSingular:
    """Return the nearest product of `rank` at most to the matrix whose rows `blocks` yields in float32, four times.

    `name` stands for it in messages; see `nearest`. Raises `UnsupportedAdapter` where it holds NaN or infinity.
    """
    height, width = shape
    basis, norm = _basis_and_norm(blocks, shape, name, min(rank + _MORE, width, height))
    thin, at = np.empty((height, basis.shape[1])), 0
    for difference in blocks():
        np.matmul(difference.astype(np.float64), basis, out=thin[at : at + len(difference)])
        at += len(difference)
    eigenvalues, vectors = np.linalg.eigh(thin.T @ thin)
    squares, directions = np.maximum(eigenvalues[::-1], 0.0), vectors[:, ::-1]
    chosen = min(rank, int(np.count_nonzero(squares > squares[0] * width * np.finfo(np.float32).eps ** 2)) or 1)
    if keep is not None:
        shares = np.cumsum(squares[:chosen]) / max(norm - noise**2, np.finfo(np.float64).tiny)
        chosen = min(chosen, int(np.searchsorted(np.minimum(shares, 1.0), keep)) + 1)
    sizes = squares[:chosen] ** 0.25
    inverse = np.divide(1.0, sizes, out=np.zeros(chosen), where=sizes > 0)
    b, a = np.empty((height, chosen), np.float32), np.empty((chosen, width), np.float32)
    for rows in _rows_of(thin):
        b[rows] = thin[rows] @ (directions[:, :chosen] * inverse)
    for rows in _rows_of(basis):
        a[:, rows] = (basis[rows] @ (directions[:, :chosen] * sizes)).T
    left = max(0.0, norm - math.fsum(squares[:chosen].tolist()))
    return TopSingular(
        b=b,
        a=a,
        norm=math.sqrt(norm),
        residual=math.sqrt(left),
        noise=noise,
        largest=math.sqrt(float(squares[0])),
        enough=_enough(squares, norm),
    )


def memory_of(shape: Sequence[int], rank: int) -> int:
    """Return about how many bytes `nearest` takes for a matrix of this shape."""
    height, width = shape
    count = min(rank + _MORE, width, height)
    return 8 * (height + width) * _PASSES * count + 4 * 3 * width * count + 16 * _BLOCK


def _basis_and_norm(
    blocks: Callable[[], Iterator[_Array]], shape: Sequence[int], name: str, count: int
) -> tuple[_Array, float]:
    """Return an orthonormal basis of three passes from `count` random vectors, and ‖D‖². Raises as `nearest_to`."""
    width = shape[1]
    chance = np.random.default_rng(zlib.crc32(name.encode("utf-8", "surrogatepass")))
    block = np.linalg.qr(chance.standard_normal((width, count), dtype=np.float32)).Q
    # in float64, because the residual is the difference of two sums of squares
    kept = np.empty((width, _PASSES * count))
    norm = 0.0
    for number in range(_PASSES):
        applied = np.zeros((width, count), np.float32)
        for difference in blocks():
            if number == 0:
                wide = difference.reshape(-1).astype(np.float64)
                norm += float(np.dot(wide, wide))
            with np.errstate(all="ignore"):  # what overflows is refused by name
                applied += difference.T @ (difference @ block)
        if not (math.isfinite(norm) and np.isfinite(applied).all()):
            raise UnsupportedAdapter(
                f"{name} holds NaN or infinity, or the squares of their difference overflow",
                hint="lora-tool validate --deep MODEL BASE names the tensor",
            )
        block = np.linalg.qr(applied).Q
        kept[:, number * count : (number + 1) * count] = block
    return _orthonormal(kept), norm


def _orthonormal(columns: _Array) -> _Array:
    """Return an orthonormal basis of the span of columns of length 1, in place: a QR takes four times their memory.

    By eigenvalues of their Gram matrix, twice: the first time leaves rounding errors in short directions.
    """
    for _ in range(2):
        eigenvalues, vectors = np.linalg.eigh(columns.T @ columns)
        long = eigenvalues > _SHORT * eigenvalues[-1]
        turn = vectors[:, long] / np.sqrt(eigenvalues[long])
        for rows in _rows_of(columns):
            columns[rows, : turn.shape[1]] = columns[rows] @ turn
        columns = columns[:, : turn.shape[1]]
    return columns


def _rows_of(matrix: _Array) -> Iterator[slice]:
    """Yield slices of its rows, each small enough to compute with at once."""
    step = max(1, _BLOCK // max(1, matrix.shape[1]))
    return (slice(at, at + step) for at in range(0, len(matrix), step))


def _enough(squares: _Array, norm: float) -> int | None:
    at = int(np.searchsorted(np.cumsum(squares), enough() * norm))
    return at + 1 if at < len(squares) else None


def _differences(tensor: StoredTensor, base: StoredTensor) -> Iterator[_Array]:
    """Yield rows of tensor - base in float32, which holds the difference of two 16-bit numbers that are near."""
    step = _rows_in_block(tensor)
    for ours, theirs in zip(row_blocks(tensor, step), row_blocks(base, step), strict=True):
        with np.errstate(all="ignore"):  # NaN and infinity are refused by name
            yield single(ours, tensor.dtype) - single(theirs, base.dtype)


def _rows_in_block(tensor: StoredTensor) -> int:
    return max(1, _BLOCK // max(1, tensor.shape[1]))


def single(stored: _Array, dtype: DType) -> _Array:
    """Return stored elements as float32."""
    if dtype is DType.BF16:  # bfloat16 is the upper half of a float32
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)


def _rounding(tensor: StoredTensor) -> float:
    """Return Σ ulp²/12: the square of what rounding every element once adds, on average, if errors are even."""
    if tensor.dtype not in _EXPONENTS:
        return 0.0
    place, mask, bias = _EXPONENTS[tensor.dtype]
    counts = np.zeros(mask + 1, np.int64)
    for rows in row_blocks(tensor, _rows_in_block(tensor)):
        bits = rows.reshape(-1).view("<u4" if tensor.dtype is DType.F32 else "<u2")
        counts += np.bincount((bits >> place) & mask, minlength=mask + 1)
    spacing = np.exp2(2.0 * (np.maximum(np.arange(mask + 1), 1) - bias))
    return float((counts * spacing).sum() / 12)
