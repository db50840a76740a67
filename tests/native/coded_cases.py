"""Cases for the compiled kernel where W is codes with their scales: what goes in, and what must come out."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec
from lora_tool.execution.kernels import STORAGE
from lora_tool.formats.quantised.coded import Code, Scaled, Table, eight_bits, int8
from lora_tool.formats.quantised.decoding import Arithmetic
from lora_tool.formats.quantised.encodings import BnbInt8, Tiled
from lora_tool.formats.quantised.grids import Requantisable
from lora_tool.native.library import TYPES, Kernel, KernelLevel
from lora_tool.native.rows import KINDS, CodedRows
from lora_tool.native.structures import KernelTerm
from tests.native.cases import Array, Case, Factor, assert_right, drawn_factor, packed

OF_CODES = 16
"""Instead of the type of W: see `driver.c`."""


@dataclass(frozen=True)
class CodedCase:
    """Rows of codes whose numbers are of a `dtype`, what is added to them, and the type of the result."""

    part: Scaled
    dtype: DType
    out_type: DType
    terms: tuple[tuple[Factor, Factor, float], ...]

    def numbers(self) -> Array:
        found = np.empty((len(self.part.codes), self.part.columns), np.float32)
        with np.errstate(all="ignore"):
            Arithmetic().scale(self.part, found)
        return found

    def merged(self) -> Case:
        """Return the case in which the numbers are what is stored."""
        with np.errstate(all="ignore"):
            stored = self.numbers().astype(STORAGE[self.dtype])
        return Case(stored, self.dtype, self.out_type, self.terms)

    def run(self, kernel: Kernel) -> tuple[Array, bool]:
        out = np.empty((len(self.part.codes), self.part.columns), STORAGE[self.out_type])
        kept = [(packed(kernel, b, kernel.rows), packed(kernel, a, kernel.columns)) for b, a, _ in self.terms]
        terms = tuple(
            KernelTerm(b.ctypes.data, a.ctypes.data, left.size[1], scaling)
            for (b, a), (left, _, scaling) in zip(kept, self.terms, strict=True)
        )
        fine = CodedRows(kernel, self.part, self.dtype).write(slice(None), out, self.out_type, terms)
        return out, fine

    def assert_right(self, found: Array, fine: bool) -> None:
        assert_right(self.merged(), found, fine)

    def written(self, level: KernelLevel) -> bytes:
        """Return the case as `driver.c` reads it."""
        part = self.part
        head = (level.number, OF_CODES, TYPES[self.out_type], *self.numbers().shape, len(self.terms))
        numbers = (KINDS.index(part.table.code), TYPES[self.dtype], part.codes.shape[1], *part.scales.shape)
        table = np.resize(part.table.numbers, 512).astype(np.float32)
        plain = Case(self.merged().source, self.dtype, self.out_type, self.terms).written(level)
        factors = plain[struct.calcsize("<6q") + self.merged().source.nbytes :]
        return b"".join(
            [
                struct.pack("<6q", *head),
                struct.pack("<8qd", *numbers, part.group, part.tall, part.above, float(part.again)),
                *(np.ascontiguousarray(each).tobytes() for each in (table, part.scales, part.codes)),
                factors,
            ]
        )


def drawn(seed: int, code: Code, rows: int, columns: int, tall: int) -> CodedCase:
    """Return a case of this size; its codes lie in larger rows, and its first row is one of `tall`."""
    random = np.random.default_rng(seed)
    group = int(random.integers(1, columns + 8))
    group, width = (2 * group, -(-columns // 2)) if code is Code.HALVES else (group, columns)
    above = int(random.integers(0, tall))
    table = {Code.E4M3: eight_bits(), Code.INT8: int8()}.get(code) or Table(
        code=code, numbers=random.standard_normal((256, 2), np.float32)
    )
    codes = random.integers(0, 256, (rows, width + 3), dtype=np.uint8)
    if code is Code.E4M3:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    scales = random.standard_normal((-(-(rows + above) // tall), -(-columns // group)), np.float32)
    part = Scaled(
        codes=codes[:, 1 : 1 + width],
        table=table,
        scales=scales,
        group=group,
        columns=columns,
        tall=tall,
        above=above,
        again=np.float32(random.choice([1, 1 / 127])),
    )
    types: list[Any] = [list(TYPES)[at] for at in random.integers(0, 3, 3)]
    terms = []
    for _ in range(int(random.integers(0, 3))):
        rank = int(random.integers(0, 9))
        factors = (drawn_factor(random, (length, rank), "plain", types[2]) for length in (rows, columns))
        terms.append((*factors, float(random.choice([1.0, 0.3]))))
    return CodedCase(part=part, dtype=types[0], out_type=types[1], terms=tuple(terms))  # type: ignore[arg-type]


def coded_cases() -> st.SearchStrategy[CodedCase]:
    """Return cases of every kind of codes."""
    return st.builds(
        drawn,
        st.integers(0, 2**32 - 1),
        st.sampled_from(list(Code)),
        st.integers(1, 30),
        st.integers(1, 70) | st.integers(500, 1100),
        st.integers(1, 20),
    )


def weight_of(rows: int, columns: int, tile: tuple[int, int], dtype: DType | None) -> Requantisable:
    """Return a weight of the type of codes, of bitsandbytes' int8 without one, whose tensors lie nowhere."""

    def tensor(name: str, kind: DType, *shape: int) -> StoredTensor:
        spec = TensorSpec(name=name, dtype=kind, shape=shape)
        return StoredTensor(spec=spec, spans=(Span(path=Path("nowhere"), offset=0, nbytes=spec.nbytes),))

    spec = TensorSpec(name="m.weight", dtype=DType.F32, shape=(rows, columns))
    codes = tensor("m.weight", dtype or DType.I8, rows, columns)
    if dtype is None:
        return BnbInt8(spec=spec, codes=codes, label="int8", largest=tensor("m.SCB", DType.F32, rows))
    scales = tensor("m.weight_scale", DType.F32, -(-rows // tile[0]), -(-columns // tile[1]))
    return Tiled(spec=spec, codes=codes, label="tiles", scales=scales, tile=tile)
