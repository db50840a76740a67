"""The arithmetic of `--precision float32`, compiled: read a block of rows, change it in place, and write it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.execution import kernels
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.kernels import bytes_of
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.quantised.grids import Requantisable, grid_of, is_requantisable
from lora_tool.native.library import TYPES, KernelLevel, kernel
from lora_tool.native.rows import WRITE_BYTES, CodedRows, FileRows, PlainRows
from lora_tool.native.structures import KernelTerm
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import Cast, Copy, Dequantise, DoraDelta, LoraDelta, LowRank, Precision, RowOp

if TYPE_CHECKING:
    from lora_tool.formats.quantised.arrays import F32
    from lora_tool.formats.quantised.requantising import StoredAgain
    from lora_tool.native.quantised import Panel

Rows = PlainRows | CodedRows

_PASSED = (Copy, Cast, Dequantise, LoraDelta)
_STEPS = 1 << 29, 1 << 25
"""Multiplications of a call, and of one without vector instructions: a run that fails waits for it."""
_LEAST_COLUMNS = 1 << 11
"""Of rows whose packed factors fit in the cache together."""


class NativeBackend(NumpyBackend):
    """See `Backend`. Numpy computes what the kernel cannot, and computes again what it flags, to name what is wrong."""

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        super().__init__(sources, precision, stopped)
        found = kernel()
        if found is None:
            raise AssertionError("no kernel: `backend_for` should have chosen another backend")
        self._kernel = found
        self._rights: dict[int, tuple[StoredTensor, int, Array]] = {}

    def _block_weights(self, op: RowOp) -> int:
        """See `NumpyBackend`. Codes of eight bits are half as many bytes as 16-bit weights, and decoded in the cache."""
        is_narrow = not isinstance(op, FactorOp) and is_requantisable(encoding_of(op.source))
        return super()._block_weights(op) << is_narrow

    def _write(self, unit: ComputeUnit, out: int) -> None:
        """See `NumpyBackend`. Rows that lie in one piece go from file to file in one call, without the interpreter lock."""
        passed = isinstance(unit.op, _PASSED) and unit.out.dtype in TYPES
        rows = self._rows_in_file(unit.op.source, unit.first, unit.last) if passed else None
        if rows is None:
            super()._write(unit, out)
            return
        blocks = self._blocks_of_memory(rows, unit)
        some = self._whole_tiles(rows.columns, kernels.CACHE_BLOCK) if isinstance(unit.op, LoraDelta) else 0
        at = unit.first
        while at < unit.last and not self._stopped():
            sampled = at < unit.first + some
            done = 0 if sampled else self._passed_on(unit, rows, at, blocks, out)
            if not done:  # a sample, or what ended the call: here it is written after all, or named
                done = min(some if sampled else len(blocks[0]), unit.last - at)
                made = self._block(unit, at, at + done, sampled=sampled)
                self.write(made, out, unit.at + at * unit.row_bytes)
            at += done

    def _rows_in_file(self, tensor: StoredTensor, first: int, last: int) -> FileRows | None:
        """Return rows of a weight where they lie; None where that is not in one piece of a file."""
        columns = tensor.spec.numel // tensor.shape[0] if tensor.shape else 1
        row_bytes = columns * tensor.dtype.bits // 8
        place, coded = self._sources.place(tensor, first * row_bytes, (last - first) * row_bytes), None
        if place is None and (found := self._sources.coded_in_file(tensor, first, last)) is not None:
            coded, place = found
            row_bytes = coded.codes.shape[1]
        if place is None:
            return None
        return FileRows(
            path=place[0],
            begin=place[1],
            row_bytes=row_bytes,
            first=first,
            last=last,
            columns=columns,
            dtype=tensor.dtype,
            coded=coded,
        )

    def _passed_on(self, unit: ComputeUnit, rows: FileRows, first: int, blocks: tuple[Array, Array], out: int) -> int:
        """Write rows from `first` on from file to file, and return how many."""
        op, last = unit.op, self._last_of_call(unit, first, len(blocks[0]))
        terms = self._terms(op, first, last) if isinstance(op, LoraDelta) else ()
        begin = unit.at + first * unit.row_bytes
        with self._sources.descriptor(rows.path) as source:
            return rows.part(first, last).pass_on(
                self._kernel, terms, source=source, out=out, begin=begin, dtype=unit.out.dtype, blocks=blocks
            )

    def _last_of_call(self, unit: ComputeUnit, first: int, block: int) -> int:
        """Return up to where rows from `first` on are one call: blocks that take no more than some hundredths of a second."""
        op, columns = unit.op, math.prod(unit.out.shape[1:])
        depth = sum(term.rank for term in op.terms) if isinstance(op, LoraDelta) else 0
        together = _STEPS[self._kernel.level is KernelLevel.SCALAR] // (1 + depth) // max(columns, _LEAST_COLUMNS)
        return min(unit.last, first + max(block, together // block * block))

    def _blocks_of_memory(self, rows: FileRows, unit: ComputeUnit) -> tuple[Array, Array]:
        """Return the memory of a block of rows as they are read, and as they are written."""
        count = min(self._whole_tiles(rows.columns, self._block_weights(unit.op)), unit.last - unit.first)
        read = self._room.of("read", (count, rows.row_bytes), np.dtype(np.uint8))
        if rows.coded is None and rows.row_bytes == unit.row_bytes:
            return read, read
        return read, self._room.of("result", (count, unit.row_bytes), read.dtype)

    def _block(self, unit: ComputeUnit, first: int, last: int, *, sampled: bool) -> Array:
        result = self._computed(unit, first, last, sampled=sampled)
        return super()._block(unit, first, last, sampled=sampled) if result is None else result

    def _computed(self, unit: ComputeUnit, first: int, last: int, *, sampled: bool) -> Array | None:
        """Return the rows, flat; None where the kernel does not compute them, or one is not finite."""
        if unit.out.dtype is DType.F64:  # it is computed in float32
            single = self._computed(replace(unit, out=replace(unit.out, dtype=DType.F32)), first, last, sampled=sampled)
            return None if single is None else self._wider(single)
        match unit.op:
            case Copy() | Cast() | Dequantise():
                return self._converted(unit, first, last)
            case LoraDelta():
                return self._changed(unit, unit.op, first, last, sampled=sampled)
            case _:
                return None

    def _wider(self, single: Array) -> Array:
        wide = self._room.of("wider", single.shape, np.dtype(np.float64))
        np.copyto(wide, single)
        return wide

    def write(self, result: Array, out: int, offset: int) -> None:
        """See `NumpyBackend`. All in one call, which needs the interpreter lock once, not for every few bytes."""
        done = self._kernel.write(out, result.ctypes.data, result.nbytes, offset, WRITE_BYTES)
        if done < result.nbytes:
            write_exactly(out, bytes_of(result)[done:], offset + done)

    def _converted(self, unit: ComputeUnit, first: int, last: int) -> Array | None:
        """Return rows of the source in the type of the output, flat; None where one is not finite."""
        rows = self._weight(unit.op.source, first, last)
        out = self._place(rows, unit, last - first)
        return out.reshape(-1) if rows.write(slice(None), out, unit.out.dtype) else None

    def _changed(self, unit: ComputeUnit, op: LoraDelta, first: int, last: int, *, sampled: bool) -> Array | None:
        """Return rows of W + Δ in the type of the output, flat; None where one is not finite."""
        rows, count = self._weight(op.source, first, last), last - first
        terms = self._terms(op, first, last)
        out = self._place(rows, unit, count)
        at = 0
        if sampled:
            at = min(self._whole_tiles(op.source.shape[1], kernels.CACHE_BLOCK), count)
            if not self._change_and_sample(rows, out[:at], unit.out.dtype, terms):
                return None
        if at < count:
            later = tuple(term.from_row(at) for term in terms)
            if not rows.write(slice(at, None), out[at:], unit.out.dtype, later):
                return None
        return out.reshape(-1)

    def _whole_tiles(self, width: int, weights: int) -> int:
        """Return how many rows hold so many weights, in whole tiles: packed factors begin at these."""
        return -(-weights // max(1, width * self._kernel.rows)) * self._kernel.rows

    def _change_and_sample(self, rows: Rows, out: Array, dtype: DType, terms: tuple[KernelTerm, ...]) -> bool:
        """Write rows of W + Δ by way of float32, and keep what rounding left of Δ; False where one is not finite."""
        some = slice(0, len(out))
        before = self._room.of("before", out.shape, kernels.STORAGE[rows.dtype])
        meant = self._room.of("meant", out.shape, np.dtype(np.float32))
        fine = rows.write(some, before, rows.dtype) and rows.write(some, meant, DType.F32, terms)
        fine = fine and PlainRows(self._kernel, meant, DType.F32).write(some, out, dtype)
        if fine:
            part = slice(0, kernels.CACHE_BLOCK)
            flat = before.reshape(-1), meant.reshape(-1), out.reshape(-1)
            self._retained = kernels.retention(flat[0][part], flat[1][part], flat[2][part])
        return fine

    def _moved(self, op: DoraDelta, first: int, last: int) -> Array:
        rows, terms = self._weight(op.source, first, last), self._terms(op, first, last)
        moved = self._room.of("moved", (last - first, op.source.shape[1]), self._wide)
        fine = rows.write(slice(None), moved, DType.F32, terms)
        return moved if fine else super()._moved(op, first, last)

    def passed_again(self, unit: ComputeUnit, encoding: Requantisable, kept: int, out: int) -> StoredAgain | None:
        """Write the unit's values as codes with the scales of `encoding`, from file to file, without the interpreter lock.

        A scale too small for its values is raised. The unit's rows are whole rows of tiles. Returned are the scales of the
        rows that were written, fewer than the unit's where the rest is better done in a call of its own; and the first
        `kept` rows as codes and as numbers. None where nothing could be written: a row of tiles does not fit the cache, a
        result is not finite, or the rows do not lie in one piece.
        """
        from lora_tool.formats.quantised.requantising import StoredAgain
        from lora_tool.native.quantised import panel_of, storing_of  # only for quantised weights

        grid, op = grid_of(encoding), unit.op
        panel = panel_of(self._kernel, grid, unit.last - unit.first)
        if panel is None or not isinstance(op, LoraDelta):
            return None
        rows = self._rows_in_file(op.source, unit.first, unit.last)
        if rows is None or rows.coded is None or rows.coded.above:
            return None
        count = max(1, kernels.CACHE_BLOCK // (panel.rows * grid.width)) * panel.rows
        block = self._room.of("codes", (count, grid.width), np.dtype(np.uint8))
        part = rows.part(unit.first, self._last_of_call(unit, unit.first, count))
        scales = np.empty(rows.coded.scales.shape, np.float32)
        before, meant = (np.empty((min(kept, count), grid.width), np.float32) for _ in range(2))
        storing = storing_of(encoding, panel, scales, self._scratch(panel), meant)
        with self._ready_for(unit), self._sources.descriptor(rows.path) as source:
            self._weight(op.source, unit.first, unit.first + len(before)).write(slice(None), before, DType.F32)
            terms = self._terms(op, part.first, part.last, panel.rows)
            done = part.pass_on(
                self._kernel,
                terms,
                source=source,
                out=out,
                begin=unit.begin,
                dtype=unit.out.dtype,
                blocks=(block, block),
                storing=storing,
            )
        if not done:
            return None
        codes = np.frombuffer(os.pread(out, before.size, unit.begin), np.uint8).reshape(before.shape)
        return StoredAgain(codes=codes, scales=scales[: -(-done // grid.tile[0])], before=before, meant=meant)

    def _scratch(self, panel: Panel) -> F32:
        return self._room.of("scratch", (panel.rows, panel.columns), np.dtype(np.float32))

    def _weight(self, tensor: StoredTensor, first: int, last: int) -> Rows:
        """Return rows of a weight as they are read: quantised ones as they are stored."""
        part = self._sources.coded(tensor, first, last)
        if part is not None:
            return CodedRows(self._kernel, part, tensor.dtype)
        return PlainRows(self._kernel, self._stored(tensor, first, last).reshape(last - first, -1), tensor.dtype)

    def _place(self, rows: Rows, unit: ComputeUnit, count: int) -> Array:
        """Return where `count` rows are written, [rows, columns]: where they were read, if they are of one size."""
        storage = kernels.STORAGE[unit.out.dtype]
        if isinstance(rows, PlainRows) and rows.stored.itemsize == storage.itemsize:
            return rows.stored.view(storage)
        return self._room.of("result", (count, math.prod(unit.op.source.shape[1:])), storage)

    def _terms(self, op: LowRank, first: int, last: int, together: int | None = None) -> tuple[KernelTerm, ...]:
        """Return the terms of rows `first` to `last`, their factors packed, those of so many rows `together`."""
        made = []
        for at, term in enumerate(op.terms):
            # W stored [in, out] has columns of A for its rows, and its delta is Aᵀ·Bᵀ
            inner = slice(first + term.first, last + term.first)
            rows = self._columns_of_a(term, inner).T if op.transposed else self._rows_of_b(term, inner, "factor")
            left = self._packed(f"left {at}", rows, self._kernel.rows, together)
            right = self._right_packed(at, op, term)
            made.append(KernelTerm(left.ctypes.data, right.ctypes.data, term.rank, term.scaling))
        return tuple(made)

    def _right_packed(self, at: int, op: LowRank, term: LoraTerm) -> Array:
        """Return the right factor of the term `at`, kept from one block to the next."""
        tensor = term.b if op.transposed else term.a
        held = self._rights.get(at)
        if held is None or held[0] is not tensor or held[1] != term.expert:
            whole = slice(0, tensor.shape[0])
            columns = self._rows_of_b(term, whole, "factor") if op.transposed else self._rows_of_a(term, "factor").T
            packed = self._packed(f"right {at}", columns, self._kernel.columns)
            self._rights[at] = held = (tensor, term.expert, packed)
        return held[2]

    def _packed(self, place: str, factor: Array, width: int, together: int | None = None) -> Array:
        """Return the factor, [length, rank], in panels of `width`, in this worker's buffer.

        The first panel of each `together` rows begins with the first of them.
        """
        length, depth = factor.shape
        factor = factor.astype(np.float32) if factor.dtype == np.float64 else factor
        each = max(1, min(together or length, length))
        starts = range(0, length, each)
        panels = -(-each // width) * width * depth
        packed = self._room.of(place, (len(starts), panels), np.dtype(np.float32))
        along, down = factor.strides[0] // factor.itemsize, factor.strides[1] // factor.itemsize
        dtype = next(dtype for dtype in TYPES if kernels.STORAGE[dtype] == factor.dtype)
        for at, first in enumerate(starts):
            part = factor[first : first + each]
            size = len(part), depth
            self._kernel.pack(packed[at].ctypes.data, width, part.ctypes.data, dtype, size, (along, down))
        return packed
