"""What is wrong with a merged tensor that is not W + ΔW: not merged, merged twice, scaled, transposed, of codes, or another's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from lora_tool.core.choices import assert_never
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import (
    Bnb4,
    BnbInt8,
    ColumnIntegers,
    Encoding,
    Fp4,
    NestedScales,
    OffsetIntegers,
    PackedIntegers,
    RoundedAs,
    Tiled,
    encoding_of,
)
from lora_tool.formats.quantised.grids import Requantisable, is_requantisable, limits, type_of_codes
from lora_tool.plans.core.ops import LowRank, RowOp
from lora_tool.plans.core.requantise import Requantise
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.bounds import sixteen_bit_bound, working_type
from lora_tool.verification.dequantised import ReadBytes, dequantised_again
from lora_tool.verification.elements import FLOATS, Array, Files, decode, half_ulps
from lora_tool.verification.pieces import Compared, Rows, Tally, rows_and_columns, rows_at_once, sampled_rows
from lora_tool.verification.recompute import Recomputer
from lora_tool.verification.requantised import half_steps, step_bound

_EXPLAINED = 0.995
"""Share of the values that a diagnosis must account for."""
_AS_ASKED = 0.02
"""A factor nearer to 1 than this is no other scaling."""
_AS_CODED = 0.25
"""The same where ΔW was rounded to the steps of codes, which takes some of it away."""
_UNRELATED = 0.3
"""Cosine below which W' - W has another direction than ΔW."""
_ROUNDING = 1 / math.sqrt(3)
"""Root of the mean square of a rounding error, in half units in the last place."""


class Diagnosis(Struct, frozen=True):
    """What became of a part; the factor of ΔW in it, and how it was misread, where those tell."""

    verdict: Verdict
    factor: float | None = None
    reason: str = ""


def diagnosed(part: Compared, tally: Tally, files: Files) -> Diagnosis:
    """Return what became of a part with values outside its bound."""
    op, stored = part.op, part.stored
    if part.copied or isinstance(op, Requantise):  # codes and scales by themselves are no numbers
        return Diagnosis(Verdict.DIFFERENT)
    if not tally.moved and not op.keeps_values:
        return Diagnosis(Verdict.UNCHANGED, 0.0 if isinstance(op, LowRank) else None)
    rows = _a_sample(part)
    wide = working_type(op, stored.dtype)
    how = _misread(op, part, files) if part.written is None else _misstored(op, part, files)
    if how or not isinstance(op, LowRank):
        return Diagnosis(Verdict.MISREAD if how else Verdict.DIFFERENT, reason=how)
    recomputer = Recomputer(files)
    expected = recomputer.whole(op, rows, wide)
    values = decode(files.rows(stored, rows), stored.dtype, wide).reshape(expected.base.shape)
    half = half_ulps(values, stored.dtype) if part.written is None else half_steps(part, rows, files)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = values - expected.base
        bound = sixteen_bit_bound(op, stored.dtype)
        bound = bound if part.written is None else step_bound(bound)
        margin = 2 * (bound.of_result * half + bound.of_value * np.abs(values))

        def explains(change: Array, factor: float) -> bool:
            # two roundings where the adapter was merged twice, and the factor is an estimate
            room = margin + (abs(factor) * bound.of_change + 0.01 * abs(factor)) * np.abs(change)
            return float(np.mean(np.abs(moved - factor * change) <= room)) >= _EXPLAINED

        factor = _projected(moved, expected.change)
        if factor is not None and math.isfinite(factor):
            noise = float(np.linalg.norm(half)) * _ROUNDING / math.sqrt(half.size)
            doubt = 4 * noise / max(float(np.linalg.norm(expected.change)), 1e-300)
            least = _AS_ASKED if part.written is None else _AS_CODED
            if abs(factor - 1) > max(least, doubt) and explains(expected.change, factor):
                return Diagnosis(Verdict.SCALED, factor)
        turned = recomputer.transposed_change(op, rows)
        if turned is not None:
            share = _projected(moved, turned.astype(wide))
            if share is not None and abs(share - 1) < 0.25 and explains(turned.astype(wide), 1.0):  # noqa: PLR2004
                return Diagnosis(Verdict.TRANSPOSED, factor)
    wrong = tally.outside > tally.compared // 2
    unrelated = tally.cosine is not None and abs(tally.cosine) < _UNRELATED
    return Diagnosis(Verdict.UNRELATED if wrong and unrelated else Verdict.DIFFERENT, factor)


def _misread(op: RowOp, part: Compared, files: Files) -> str:
    """Return what was left out of the base's quantised weight, where that gives the values of the part; "" elsewhere."""
    stored = part.stored
    encoding = encoding_of(op.source)
    if encoding is None:
        return ""
    rows = _a_sample(part)
    wide = working_type(op, stored.dtype)
    expected = Recomputer(files).whole(op, rows, wide)
    values = decode(files.rows(stored, rows), stored.dtype, wide).reshape(expected.base.shape)
    unit = 4 * max(FLOATS[stored.dtype].roundoff, FLOATS[op.source.dtype].roundoff)
    changes = bool(expected.change.any())
    for what, reading in readings_without_scales(encoding):
        with np.errstate(all="ignore"):  # values that are wrong may be beyond all bounds
            base = files.matrix(op.source, rows, wide, reading)
            for change in (expected.change, 0 * expected.change) if changes else (expected.change,):
                room = unit * (np.abs(base) + np.abs(change))
                if float(np.mean(np.abs(values - base - change) <= room)) >= _EXPLAINED:
                    if change.any():
                        return f"is ΔW added to the codes of the base's {encoding}: {what}"
                    return f"is the base's {encoding} misread: {what}" + (", and ΔW is not in it" if changes else "")
    return ""


def _misstored(op: RowOp, part: Compared, files: Files) -> str:
    """Return how merged numbers were made codes wrongly, where that gives the codes of the part; "" elsewhere."""
    base, written = encoding_of(op.source), part.written
    if not isinstance(written, Requantisable) or not is_requantisable(base):
        return ""
    rows, wide = _a_sample(part), working_type(op, part.stored.dtype)
    expected = Recomputer(files).whole(op, rows, wide)
    codes, before = (
        files.matrix(tensor, rows, wide, codes_of(of)) for tensor, of in ((part.stored, written), (op.source, base))
    )
    least, most = limits(written)
    step = np.full(codes.shape, 0.5) if type_of_codes(written) is DType.I8 else np.maximum(np.abs(codes) / 16, 2.0**-10)
    ways = (
        (before, f"is ΔW added to the codes of the base's {base}: its scales were not applied"),
        (expected.base, f"is W + ΔW stored as {written} without being divided by its scales"),
    )
    for weight, how in ways:
        with np.errstate(all="ignore"):  # what is wrong may be beyond all bounds
            error = np.abs(codes - np.clip(weight + expected.change, least, most))
            if float(np.mean(error <= 1.01 * step)) >= _EXPLAINED:
                return how
    return ""


def _projected(moved: Array, change: Array) -> float | None:
    squares = float(np.vdot(change, change))
    return float(np.vdot(moved, change)) / squares if squares else None


def _a_sample(part: Compared) -> Rows:
    """Return rows from everywhere, as many as are recomputed together; all of a small tensor."""
    height, width = rows_and_columns(part.stored.shape)
    fit = rows_at_once(width)
    if height <= fit:
        return [(0, height)]
    rows = {row for group in sampled_rows(part.stored, part.op) for row, _ in group}
    rows |= set(range(0, height, math.ceil(height / fit)))
    return [(row, row + 1) for row in sorted(rows)[: 2 * fit]]


# What quantised weights are to those who take their codes for numbers: so that a wrong merge is told by its cause.
#
# Such a reading is the second formula with 1 in the place of every scale. Where that gives the values of a merged model,
# another tool added ΔW to the codes, or copied them.


_Bytes = NDArray[np.uint8]
Decode = Callable[[Encoding, int, int, ReadBytes], Array]
"""Returns rows of a weight, in the form of `dequantised_again`; the encoding that it is called with does not count."""

_ONE = {DType.F32: 0x3F800000, DType.BF16: 0x3F80, DType.F16: 0x3C00, DType.F8_E4M3: 0x38}
"""The bits of 1 as a scale is stored; the others are powers of two in eight bits, byte - 127."""
_127 = 0x42FE0000
"""The bits of 127 as float32, by which LLM.int8() divides the scale of a row."""
_SCALES = "its scales were not applied"


def codes_of(encoding: Requantisable) -> Decode:
    """Return what reads the codes of a weight as numbers, less their zero points."""
    if isinstance(encoding, BnbInt8):
        return _reading(encoding, {encoding.largest.name: _all(DType.F32, _127)})
    return _reading(encoding, _ones(encoding.scales))


def readings_without_scales(encoding: Encoding) -> Iterator[tuple[str, Decode]]:
    """Yield the ways to misread a quantised weight, each with its description: without scales, then without zero points too."""
    match encoding:
        case OffsetIntegers():
            yield _SCALES, codes_of(encoding)
            raw = {**_ones(encoding.scales), encoding.zeros.name: _none}
            yield "neither its scales nor its zero points were applied", _reading(encoding, raw)
        case Tiled() | BnbInt8() | PackedIntegers():
            yield _SCALES, codes_of(encoding)
        case ColumnIntegers():
            yield _SCALES, _reading(encoding, _ones(encoding.scales))
        case Fp4():
            yield _SCALES, _reading(replace(encoding, overall=None), _ones(encoding.scales))
            if encoding.overall is not None:
                yield _SCALES, _reading(encoding, _ones(encoding.scales))
        case Bnb4():
            yield _SCALES, _levels_of(encoding)
        case RoundedAs():
            return  # a plain weight, which has no scales
        case _:
            assert_never(encoding)


def _levels_of(encoding: Bnb4) -> Decode:
    scales = encoding.scales
    if isinstance(scales, NestedScales):
        plain = replace(encoding, scales=replace(scales, offset=0.0))
        return _reading(plain, _ones(scales.levels, scales.scales))
    return _reading(encoding, _ones(scales))


_Changes = Mapping[str, Callable[[_Bytes], _Bytes]]
"""Tensor on disk → what makes of its bytes what they are taken for."""


def _reading(encoding: Encoding, changes: _Changes) -> Decode:
    def decode(_encoding: Encoding, first: int, last: int, read: ReadBytes) -> Array:
        def taken(tensor: StoredTensor, start: int, nbytes: int) -> _Bytes:
            raw = read(tensor, start, nbytes)
            change = changes.get(tensor.name)
            return raw if change is None else change(raw)

        return dequantised_again(encoding, first, last, taken)

    return decode


def _ones(*scales: StoredTensor) -> _Changes:
    return {each.name: _all(each.dtype, _ONE.get(each.dtype, 127)) for each in scales}


def _all(dtype: DType, bits: int) -> Callable[[_Bytes], _Bytes]:
    size = dtype.bits // 8
    return lambda raw: np.full(raw.size // size, bits, f"<u{size}").view(np.uint8)


def _none(raw: _Bytes) -> _Bytes:
    return np.zeros_like(raw)
