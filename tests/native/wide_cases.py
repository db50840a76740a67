"""Cases for the compiled kernel's factors in float64: a product of packed parts, and columns times a scale."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from lora_tool.execution.kernels import STORAGE, round_to
from lora_tool.execution.native.library import WIDE_TYPES, Kernel, Level
from lora_tool.execution.native.products import GramSum, Stored, mix, turn
from lora_tool.formats.room import Room
from lora_tool.tensors import DType
from tests.native.cases import Array, Factor, numbers

OF_FACTORS = 17
"""Instead of the type of W: see `driver.c`."""
SCALE = 0.3


@dataclass(frozen=True)
class WideCase:
    """Parts of a left factor, [rows, depth], and of a right one, [columns, depth], side by side; the result's type."""

    parts: tuple[tuple[Factor, Factor], ...]
    size: tuple[int, int]
    out_type: DType

    @property
    def depth(self) -> int:
        return sum(left.size[1] for left, _ in self.parts)

    def expected(self) -> tuple[Array, bool]:
        """Return the elements as they are stored, each a chain of fma in float64, and whether all are finite."""
        left, right = (
            np.concatenate([_wide(pair[side]) for pair in self.parts] or [np.zeros((self.size[side], 0))], axis=1)
            for side in (0, 1)
        )
        total = np.array([[_chain(b, a) for a in right] for b in left]).reshape(self.size)
        return self.stored(total)

    def gram(self) -> Array:
        """Return the Gram matrix of the columns of the left parts, each element a chain of fma over the rows."""
        left = np.concatenate([_wide(pair[0]) for pair in self.parts] or [np.zeros((self.size[0], 0))], axis=1)
        return np.array([[_chain(one, other) for other in left.T] for one in left.T]).reshape(self.depth, self.depth)

    def stored(self, values: Array) -> tuple[Array, bool]:
        """Return float64 values as the result's type has them, and whether all are finite."""
        with np.errstate(all="ignore"):
            stored = round_to(values.astype(np.float64), self.out_type, np.empty(self.size, STORAGE[self.out_type]))
            return stored, bool(np.isfinite(stored.astype(np.float64)).all())

    def scaled(self, found: Array) -> tuple[Array, bool]:
        """Return every column of the result times `SCALE`, in every second column of rows twice as wide, elsewhere 0."""
        some, fine = self.stored(SCALE * found.astype(np.float64))
        whole = np.zeros((self.size[0], 2 * self.size[1]), STORAGE[self.out_type])
        whole[:, ::2] = some
        return whole, fine

    def turned(self, found: Array) -> tuple[Array, bool]:
        """Return the result times `SCALE`, transposed."""
        some, fine = self.stored(SCALE * found.astype(np.float64))
        return np.ascontiguousarray(some.T), fine

    def run_turned(self, kernel: Kernel, found: Array) -> tuple[Array, bool]:
        out = np.empty(self.size[::-1], STORAGE[self.out_type])
        return out, turn(kernel, found, self.out_type, out, self.out_type, SCALE)

    def run(self, kernel: Kernel) -> tuple[Array, bool]:
        wide = kernel.wide_columns
        panels = [np.full(-(-length // wide) * wide * self.depth, np.nan) for length in self.size]
        deep = 0
        for pair in self.parts:
            for factor, packed in zip(pair, panels, strict=True):
                begin = factor.memory.ctypes.data + factor.begin * factor.memory.itemsize
                place = self.depth, deep
                kernel.pack_wide(packed.ctypes.data, place, begin, factor.dtype, factor.size, factor.strides)
            deep += pair[0].size[1]
        out = np.empty(self.size, STORAGE[self.out_type])
        left, right, made = (each.ctypes.data for each in (*panels, out))
        fine = kernel.product_wide(left, right, self.depth, made, self.out_type, self.size[1], self.size)
        return out, fine

    def run_whole(self, kernel: Kernel, *, below: bool) -> tuple[Array, bool]:
        """Return the same product of factors as they are stored, `below` turned round."""
        right = np.concatenate([_wide(pair[1]) for pair in self.parts] or [np.zeros((self.size[1], 0))], axis=1)
        out = np.empty(self.size[::-1] if below else self.size, STORAGE[self.out_type])
        fine = mix(kernel, self._left, np.ascontiguousarray(right.T), out, self.out_type, Room(), below=below)
        return np.ascontiguousarray(out.T) if below else out, fine

    def run_gram(self, kernel: Kernel, cut: int) -> Array:
        """Return the Gram matrix of the left parts, of so many rows and then of the others."""
        sums = GramSum(kernel, self.depth, Room())
        for rows in (slice(0, cut), slice(cut, None)):
            sums.add([(stored[rows], dtype) for stored, dtype in self._left])
        return sums.matrix()

    @property
    def _left(self) -> list[Stored]:
        return [(_as_it_lies(pair[0]), pair[0].dtype) for pair in self.parts]

    def run_scaled(self, kernel: Kernel, found: Array) -> tuple[Array, bool]:
        rows, columns = self.size
        whole = np.zeros((rows, 2 * columns), STORAGE[self.out_type])
        addresses = found.ctypes.data, whole.ctypes.data
        fine = kernel.scale(
            addresses[0], self.out_type, (columns, 1), addresses[1], self.out_type, (2 * columns, 2), self.size, SCALE
        )
        return whole, fine

    def written(self, level: Level) -> bytes:
        """Return the case as `driver.c` reads it."""
        head = (level.number, OF_FACTORS, WIDE_TYPES[self.out_type], *self.size, len(self.parts), self.depth)
        parts = [struct.pack("<7q", *head)]
        for factor in (factor for pair in self.parts for factor in pair):
            fields = (WIDE_TYPES[factor.dtype], len(factor.memory), factor.begin, *factor.size, *factor.strides)
            parts += [struct.pack("<7q", *fields), factor.memory.tobytes()]
        return b"".join(parts)


def _wide(factor: Factor) -> Array:
    i, k = np.indices(factor.size)
    return np.asarray(factor.memory[factor.begin + i * factor.strides[0] + k * factor.strides[1]].astype(np.float64))


def _as_it_lies(factor: Factor) -> Array:
    size = factor.memory.itemsize
    strides = [stride * size for stride in factor.strides]
    return np.lib.stride_tricks.as_strided(factor.memory[factor.begin :], factor.size, strides)


def _chain(b: Array, a: Array) -> float:
    total = 0.0
    for one, other in zip(b.tolist(), a.tolist(), strict=True):
        total = float(Fraction(one) * Fraction(other) + Fraction(total))
    return total


def drawn_wide(seed: int, *, size: tuple[int, int], ranks: tuple[int, ...], out_type: DType) -> WideCase:
    """Return a case of this size, with a part of each rank."""
    rng = np.random.default_rng(seed)
    types = list(WIDE_TYPES)
    parts = []
    for rank in ranks:
        dtype = types[int(rng.integers(len(types)))]
        left, right = (_drawn(rng, (length, rank), dtype) for length in size)
        parts.append((left, right))
    return WideCase(parts=tuple(parts), size=size, out_type=out_type)


def _drawn(rng: np.random.Generator, size: tuple[int, int], dtype: DType) -> Factor:
    """Return a factor that lies along its length or along its rank."""
    length, rank = size
    strides = [(rank, 1), (1, length)][int(rng.integers(2))]
    if dtype is DType.F64:
        return Factor(rng.standard_normal(length * rank), dtype, size, strides)
    return Factor(numbers(rng, length * rank, "plain", dtype), dtype, size, strides)
