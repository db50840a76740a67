"""What merged numbers were quantised to afresh: each code the nearest to its value, each scale the largest of its block.

The second formula gives W + ΔW, and its largest size in each block. A code is right where no other level is nearer to
its value, but for what rounding to 16 bits may move value and scale. Scales that are quantised themselves are right
where no other code is nearer, with the mean and the scales of scales that were written; those are compared with all of
the scales.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lora_tool.formats.quantised.encodings import Bnb4, BnbInt8, NestedScales, parts
from lora_tool.formats.quantised.grids import Blockwise, block_of, blocks_of, bytes_before, elements_of, rows_around
from lora_tool.formats.stored import read_part
from lora_tool.plan.core.ops import Computed, Precision, row_ops
from lora_tool.plan.core.quantise import FreshPart, Quantise
from lora_tool.tensors import DType, StoredTensor, TensorTable
from lora_tool.verification.bounds import sixteen_bit_bound, stated_bound
from lora_tool.verification.dequantised import floats_of
from lora_tool.verification.elements import FLOATS, Array, Files
from lora_tool.verification.pieces import PRODUCT_WEIGHTS, Compared, Rows
from lora_tool.verification.recompute import Products, Recomputer
from lora_tool.verification.tally import Tally

_OUTER = 256
_SINGLE = 2.0**-18
"""What sums in float32 and the comparison may be off by, relative to the largest value of a block."""
_LEAST = 2.0**-120
_SAMPLED = 4
_MEAN = "nested_offset"
_DOUBLE = np.dtype(np.float64)


def written_afresh(op: Quantise[Computed], tensors: TensorTable) -> Blockwise | None:
    """Return codes and scales that were written; None where one is not there as it was planned."""
    encoding = op.encoding
    planned = [each for each in parts(encoding) if each is not encoding.record]
    found = {each.name: tensors.get(each.name) for each in (*planned, *filter(None, [encoding.record]))}
    if any((now := found[each.name]) is None or now.spec != each.spec for each in planned):
        return None
    there = {name: tensor for name, tensor in found.items() if tensor is not None}
    if isinstance(encoding, BnbInt8):
        return replace(encoding, codes=there[encoding.codes.name], largest=there[encoding.largest.name])
    scales, record = encoding.scales, encoding.record and there.get(encoding.record.name)
    if isinstance(scales, StoredTensor):
        return replace(encoding, codes=there[encoding.codes.name], scales=there[scales.name])
    mean = _json(None if record is None else read_part(record, 0, record.nbytes)).get(_MEAN)
    if not isinstance(mean, float):
        return None
    inner = replace(scales, codes=there[scales.codes.name], scales=there[scales.scales.name], offset=mean)
    return replace(encoding, codes=there[encoding.codes.name], scales=inner, record=record)


def fresh_rows(part: Compared, *, all_of_them: bool) -> list[Rows]:
    """Return ranges of blocks, in place of rows: all, or some from everywhere; of a mean all together."""
    op = _op(part)
    blocks = blocks_of(op.encoding)
    if op.part is FreshPart.STATE:
        return [[(0, blocks)]] if all_of_them else [[(0, 0)]]
    step = max(1, PRODUCT_WEIGHTS // block_of(op.encoding) // _OUTER) * _OUTER
    if all_of_them:
        return [[(at, min(at + step, blocks))] for at in range(0, blocks, step)]
    starts = sorted({blocks * place // _SAMPLED // _OUTER * _OUTER for place in range(_SAMPLED)})
    some = min(step, _OUTER)
    return [[(at, min(at + some, blocks))] for at in starts]


def fresh_tally(
    part: Compared, first: int, last: int, files: Files, recomputer: Recomputer, precision: Precision | None
) -> Tally:
    """Return what was seen of these blocks of a weight that was quantised afresh."""
    op, written = _op(part), _written(part)
    look = _Look(op, written, files, recomputer, precision)
    match op.part:
        case FreshPart.CODES:
            return look.codes(first, last)
        case FreshPart.SCALES:
            return look.scales(first, last)
        case FreshPart.OUTER:
            return look.outer(first, last)
        case FreshPart.STATE:
            return look.state(first, last)


class _Sums(Struct, frozen=True):
    """W + ΔW, flat and float64, and how far what was rounded to 16 bits may be from it."""

    values: Array
    slack: Array
    begin: int
    """Where in its rows the first value is."""
    width: int
    terms: tuple[tuple[int, float, Products], ...]
    """Rows of each operation, with the bound's share of ‖b‖·‖a‖, and that."""

    def products(self, places: Array) -> Array:
        """Return how much farther these values may be off, by the sizes of what was multiplied."""
        rows, columns = np.divmod(places + self.begin, self.width)
        found, at = np.zeros(len(places)), 0
        for height, share, products in self.terms:
            own = (at <= rows) & (rows < at + height)
            found[own] = share * products(rows[own] - at, columns[own])
            at += height
        return found


class _Look(Struct, frozen=True):
    """What one stretch of blocks is compared with."""

    op: Quantise[Computed]
    written: Blockwise
    files: Files
    recomputer: Recomputer
    precision: Precision | None

    def codes(self, first: int, last: int) -> Tally:
        """Compare codes with their values."""
        begin, _ = elements_of(self.written, first, last)
        sums = self._sums(first, last)
        values, codes = sums.values, self.written.codes
        sizes = np.repeat(self._largest(values), block_of(self.written))[: len(values)]
        raw, base = (self._raw(tensor, first, last) for tensor in (codes, self.op.encoding.codes))
        levels = self._levels()
        ascending, own = np.unique(levels), levels[self._split(raw)[: len(values)]]
        at = np.searchsorted(ascending, own)
        side = np.where(values > own * sizes, 1, -1)
        side = np.where((at + side < 0) | (at + side >= len(ascending)), -side, side)
        step = np.abs(ascending[at + side] - own) * sizes
        room = step / 2 + sums.slack + np.abs(own) * self._tolerance() * sizes + _LEAST
        error = np.abs(own * sizes - values)
        wrong = ~(error <= room)
        if (places := np.flatnonzero(wrong)).size:
            wrong[places] = ~(error[places] <= room[places] + sums.products(places))
        ulps = float(np.max(error / np.maximum(step, _LEAST), initial=0, where=~wrong))
        compared = len(raw) // (codes.dtype.bits // 8)
        return _counted(Tally(compared=compared, moved=not np.array_equal(raw, base), ulps=ulps), wrong, begin)

    def scales(self, first: int, last: int) -> Tally:
        """Compare scales with the largest values of their blocks."""
        sizes = self._largest(self._sums(first, last).values)
        scales = self.written.largest if isinstance(self.written, BnbInt8) else self.written.scales
        room = self._tolerance() * sizes + _LEAST
        if isinstance(scales, StoredTensor):
            found = floats_of(scales, first, last, self.files.read)
        else:
            levels = floats_of(scales.levels, 0, _OUTER, self.files.read)
            codes = self.files.read(scales.codes, first, last - first)
            outer = self._outer_scales(scales, first, last)[np.arange(first, last) // _OUTER - first // _OUTER]
            found = levels[codes] * outer + scales.offset
            ascending = np.sort(levels)
            at = np.searchsorted(ascending, levels[codes])
            gaps = np.diff(ascending)
            half = np.maximum(gaps[np.minimum(at, len(gaps) - 1)], gaps[np.maximum(at - 1, 0)]) / 2
            room += half * outer + _SINGLE * (np.abs(scales.offset) + outer)
        tally = Tally(compared=last - first, moved=True)
        return _counted(tally, ~(np.abs(found - sizes) <= room), first)

    def outer(self, first: int, last: int) -> Tally:
        """Compare scales of scales with the largest distance of a scale from their mean."""
        scales = _nested(self.written)
        sizes = self._largest(self._sums(first, last).values)
        starts = np.arange(0, len(sizes), _OUTER)
        expected = np.maximum.reduceat(np.abs(sizes - scales.offset), starts)
        room = (self._tolerance() + _SINGLE) * (np.maximum.reduceat(sizes, starts) + abs(scales.offset)) + _LEAST
        found = self._outer_scales(scales, first, last)
        return _counted(Tally(compared=len(starts), moved=True), ~(np.abs(found - expected) <= room), first // _OUTER)

    def state(self, first: int, last: int) -> Tally:
        """Compare the JSON object with the base's, and its mean with that of these scales, which are all or none."""
        before, now = (
            _json(None if each.record is None else self.files.read(each.record, 0, each.record.nbytes).tobytes())
            for each in (self.op.encoding, self.written)
        )
        mean = now.pop(_MEAN, None)
        before.pop(_MEAN, None)
        total, largest = 0.0, 0.0
        step = max(1, PRODUCT_WEIGHTS // block_of(self.written))
        for at in range(first, last, step):
            sizes = self._largest(self._sums(at, min(at + step, last)).values)
            total, largest = total + float(sizes.sum()), max(largest, float(sizes.max(initial=0)))
        off = now != before or not isinstance(mean, float)
        if not off and last > first:
            off = not abs(mean - total / (last - first)) <= (self._tolerance() + _SINGLE) * largest + _LEAST
        record = self.written.record
        return _counted(Tally(compared=0 if record is None else record.spec.numel, moved=True), np.array([off]), 0)

    def _sums(self, first: int, last: int) -> _Sums:
        """Return W + ΔW in these blocks."""
        top, bottom, part = rows_around(self.written, first, last)
        dtype, at = self.op.dtype, 0
        unit = FLOATS[dtype].roundoff
        halves = FLOATS[DType.F16].roundoff if isinstance(self.written, BnbInt8) else 0.0
        values, slack, products = [], [], []
        for op in row_ops(self.op):
            height = int(np.prod(op.shape[:-1]))
            rows = max(top - at, 0), min(bottom - at, height)
            at += height
            if rows[0] >= rows[1]:
                continue
            made = self.recomputer.whole(op, [rows], _DOUBLE).widened(_DOUBLE)
            bound = stated_bound(op, dtype, self.precision or Precision.FLOAT32)
            bound = bound if self.precision is not None else sixteen_bit_bound(op, dtype)
            values.append(made.base + made.change)
            sizes = np.abs(values[-1])
            slack.append((unit * bound.of_result + halves) * sizes + bound.of_change * np.abs(made.change))
            products.append((len(made.base), bound.of_product, made.products))
        return _Sums(
            values=np.concatenate(values).reshape(-1)[part],
            slack=np.concatenate(slack).reshape(-1)[part],
            begin=part.start,
            width=self.written.spec.shape[-1],
            terms=tuple(products),
        )

    def _largest(self, values: Array) -> Array:
        """Return the largest size of each block, rounded to 16 bits as the values were."""
        sizes = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), block_of(self.written)))
        return _nearest(sizes, self.op.dtype)

    def _tolerance(self) -> float:
        """Return how far the largest of a block may be from what was computed again, relative to it."""
        halves = FLOATS[DType.F16].roundoff if isinstance(self.written, BnbInt8) else 0.0
        return 2 * FLOATS[self.op.dtype].roundoff + halves + _SINGLE

    def _levels(self) -> Array:
        if isinstance(self.written, BnbInt8):
            return np.concatenate([np.arange(128), np.arange(-128, 0)]) / 127
        return floats_of(self.written.levels, 0, 16, self.files.read)

    def _raw(self, tensor: StoredTensor, first: int, last: int) -> Array:
        begin, end = bytes_before(self.written, first), bytes_before(self.written, last)
        return self.files.read(tensor, begin, end - begin)

    def _split(self, raw: Array) -> Array:
        if isinstance(self.written, BnbInt8):
            return raw.astype(np.intp)
        return np.stack([raw // 16, raw % 16], axis=1).reshape(-1).astype(np.intp)

    def _outer_scales(self, scales: NestedScales, first: int, last: int) -> Array:
        return floats_of(scales.scales, first // _OUTER, -(-last // _OUTER), self.files.read)


def _nearest(sizes: Array, dtype: DType) -> Array:
    """Return positive numbers rounded to a type, float64."""
    digits = FLOATS[dtype].digits
    fraction, power = np.frexp(sizes)
    return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, digits)), power - digits))


def _counted(tally: Tally, wrong: Array, first: int) -> Tally:
    places = np.flatnonzero(wrong)
    tally.outside = tally.wrong = len(places)
    tally.first = first + int(places[0]) if len(places) else None
    return tally


def _json(data: bytes | None) -> dict[str, Any]:
    """Return a JSON object; {} for what is none."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _nested(written: Blockwise) -> NestedScales:
    if not isinstance(written, Bnb4) or not isinstance(written.scales, NestedScales):
        raise TypeError(f"the scales of {written} are not quantised")
    return written.scales


def _op(part: Compared) -> Quantise[Computed]:
    if not isinstance(part.op, Quantise):
        raise TypeError(f"`{part.name}` is not quantised afresh")
    return part.op


def _written(part: Compared) -> Blockwise:
    if not isinstance(part.written, Blockwise):
        raise TypeError(f"`{part.name}` holds no codes")
    return part.written
