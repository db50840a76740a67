"""Cases for the compiled kernel: what goes in, and what must come out, by the definition in `merge.c` and other code."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_tool.core.tensors import DType
from lora_tool.execution.kernels import STORAGE
from lora_tool.native.library import TYPES, Kernel, KernelLevel
from lora_tool.native.structures import KernelTerm

Array = np.ndarray[Any, Any]

KINDS = ("plain", "ties", "subnormal", "patterns", "anything")


@dataclass(frozen=True)
class Factor:
    """A factor [length, rank] as it lies in memory: `memory`, and where its element (i, k) is."""

    memory: Array
    dtype: DType
    size: tuple[int, int]
    strides: tuple[int, int]
    begin: int = 0

    @property
    def values(self) -> Array:
        i, k = np.indices(self.size)
        return np.asarray(self.memory[self.begin + i * self.strides[0] + k * self.strides[1]].astype(np.float32))

    def packed(self, width: int) -> int:
        """How many floats it is in panels of that width."""
        return -(-self.size[0] // width) * width * self.size[1]


@dataclass(frozen=True)
class Case:
    """W [rows, columns], what is added to it, and the type of the result; no factors at all for a mere conversion."""

    source: Array
    source_type: DType
    out_type: DType
    terms: tuple[tuple[Factor, Factor, float], ...]

    @property
    def in_place(self) -> bool:
        return self.source_type.bits == self.out_type.bits

    def expected(self) -> tuple[Array, bool]:
        """Return the elements as they are stored, and whether all are finite."""
        with np.errstate(all="ignore"):
            total = self.source.astype(np.float32)
            delta: Array | None = None
            for left, right, scaling in self.terms:
                chain = np.zeros(total.shape, np.float32)
                b, a = left.values, right.values
                for k in range(left.size[1]):
                    chain = fma(b[:, k, None], a[None, :, k], chain)
                scaled = np.float32(scaling) * chain
                delta = scaled if delta is None else delta + scaled
            total = total if delta is None else total + delta
            stored = total.astype(STORAGE[self.out_type])
            return stored, bool(np.isfinite(stored.astype(np.float32)).all())

    def run(self, kernel: Kernel) -> tuple[Array, bool]:
        """Return what the kernel makes of it, in the memory of W where that is possible."""
        source = self.source.copy()
        out = source if self.in_place else np.empty(source.shape, STORAGE[self.out_type])
        addresses = source.ctypes.data, self.source_type, out.ctypes.data, self.out_type
        if not self.terms:
            fine = kernel.convert(*addresses, source.size)
        else:
            kept = [(packed(kernel, b, kernel.rows), packed(kernel, a, kernel.columns)) for b, a, _ in self.terms]
            terms = tuple(
                KernelTerm(b.ctypes.data, a.ctypes.data, left.size[1], scaling)
                for (b, a), (left, _, scaling) in zip(kept, self.terms, strict=True)
            )
            rows, columns = source.shape
            fine = kernel.merge(*addresses, (rows, columns), terms)
        return out.view(STORAGE[self.out_type]), fine

    def written(self, level: KernelLevel) -> bytes:
        """Return the case as `driver.c` reads it."""
        rows, columns = self.source.shape
        head = (level.number, TYPES[self.source_type], TYPES[self.out_type], rows, columns, len(self.terms))
        parts = [struct.pack("<6q", *head), self.source.tobytes()]
        for left, right, scaling in self.terms:
            parts.append(struct.pack("<d", scaling))
            for factor in (left, right):
                numbers = (TYPES[factor.dtype], len(factor.memory), factor.begin, *factor.size, *factor.strides)
                parts += [struct.pack("<7q", *numbers), factor.memory.tobytes()]
        return b"".join(parts)


def packed(kernel: Kernel, factor: Factor, width: int) -> Array:
    out = np.empty(factor.packed(width), np.float32)
    begin = factor.memory.ctypes.data + factor.begin * factor.memory.itemsize
    kernel.pack(out.ctypes.data, width, begin, factor.dtype, factor.size, factor.strides)
    return out


def fma(x: Array, y: Array, z: Array) -> Array:
    """Return x·y + z of float32 arrays, rounded once.

    The product is exact in float64; the sum is rounded to odd there, from which rounding to float32 is exact.
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    odd = bits + np.where((error > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def drawn_case(
    seed: int, *, size: tuple[int, int], ranks: tuple[int, ...], kind: str, types: tuple[DType, DType, DType]
) -> Case:
    """Return a case of this size whose numbers are of one kind; W, the factors and the result have the `types`."""
    rng = np.random.default_rng(seed)
    source_type, factor_type, out_type = types
    rows, columns = size
    terms = []
    for rank in ranks:
        left = drawn_factor(rng, (rows, rank), kind, factor_type)
        right = drawn_factor(rng, (columns, rank), kind, factor_type)
        terms.append((left, right, float(rng.choice([1.0, 2.0, 0.3, 1.7, -0.5]))))
    source = numbers(rng, rows * columns, kind, source_type).reshape(size)
    return Case(source=source, source_type=source_type, out_type=out_type, terms=tuple(terms))


def drawn_factor(rng: np.random.Generator, size: tuple[int, int], kind: str, dtype: DType) -> Factor:
    """Return a factor that lies along its length, along its rank, or scattered in a larger one."""
    length, rank = size
    apart, begin = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    strides = [(rank, 1), (1, length + begin), (rank * apart, apart)][int(rng.integers(3))]
    held = begin + max(0, length - 1) * strides[0] + max(0, rank - 1) * strides[1] + 1
    return Factor(numbers(rng, held, kind, dtype), dtype, size, strides, begin)


def numbers(rng: np.random.Generator, count: int, kind: str, dtype: DType) -> Array:
    """Return numbers of the kind as they are stored."""
    match kind:
        case "plain":
            values = rng.standard_normal(count)
        case "ties":  # sums that lie half way between neighbours of 16 bits, and of 24
            values = rng.integers(-512, 513, count) * 2.0 ** rng.choice([-24, -16, -9, -8, -1, 0], count)
        case "subnormal":  # of float16 and of float32, and products that become so
            values = rng.integers(-9, 10, count) * 2.0 ** rng.choice([-149, -140, -126, -75, -70, -24, -15], count)
        case "patterns":
            values = rng.integers(0, 2**32, count, np.uint32).view(np.float32)
            values = np.where(np.abs(values) < 2.0**60, values, 1.5)
        case _:
            values = rng.integers(0, 2**32, count, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        return values.astype(np.float32).astype(STORAGE[dtype])


def assert_right(case: Case, found: Array, fine: bool) -> None:
    stored, finite = case.expected()
    assert fine == finite
    if finite:
        assert found.tobytes() == stored.tobytes()
