"""What quantised weights are taken for by those who read them wrongly: so that a wrong merge is told by its cause.

A misreading is the second formula on other bytes, or for another layout, than the weight has: the halves of a byte in
the other order, 1 for every scale, tiles inferred from shapes. Where that gives the values of a merged model, its name
says what went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from lora_tool.exhaustive import assert_never
from lora_tool.formats.quantised.encodings import (
    ORDER,
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
    in_type,
)
from lora_tool.tensors import DType, StoredTensor
from lora_tool.verification.dequantised import Array, Read, dequantised_again, rounded_to

Bytes = NDArray[np.uint8]
Change = Callable[[Bytes, int], Bytes]
"""What makes of a tensor's bytes, from one of them, what they are taken for."""

_NIBBLE = 4
_ONE = {DType.F32: 0x3F800000, DType.BF16: 0x3F80, DType.F16: 0x3C00, DType.F8_E4M3: 0x38}
"""The bits of 1 as a scale is stored; the others are powers of two in eight bits, byte - 127."""
_127 = 0x42FE0000
"""The bits of 127 as float32, by which LLM.int8() divides the scale of a row."""
_TOP = np.uint8(0x80)
_UNSCALED = "its scales were not applied"
_NO_ZEROS = "its zero points were left out"


class Misreading(Struct, frozen=True, kw_only=True):
    """One way to read a weight wrongly."""

    what: str
    """What was done, as a sentence."""
    encoding: Encoding
    """What the weight is taken for."""
    parts: Mapping[str, Change] = field(default_factory=dict)
    """Tensor on disk → what its bytes are taken for."""
    columns: Callable[[Array], Array] | None = None
    """Puts the columns in another order."""
    less: Misreading | None = None
    """What is subtracted, read by itself: a multiple of the scales."""

    @property
    def unscaled(self) -> bool:
        """Whether the codes were taken for the values."""
        return self.what is _UNSCALED

    def decode(self, _encoding: Encoding, first: int, last: int, read: Read) -> Array:
        """Return rows `first` to `last` of the weight as it was read, in the form of `dequantised_again`."""
        if self.less is None:
            values = self.taken_for(self.encoding, first, last, read)
        else:
            both = (each.taken_for(in_type(each.encoding, DType.F32), first, last, read) for each in (self, self.less))
            values = rounded_to(np.subtract(*both), self.encoding.spec.dtype)
        return values if self.columns is None else self.columns(values)

    def taken_for(self, encoding: Encoding, first: int, last: int, read: Read) -> Array:
        """Return the rows as they were read of a weight of this encoding, its columns and what is subtracted aside."""

        def taken(tensor: StoredTensor, start: int, nbytes: int) -> Bytes:
            raw = read(tensor, start, nbytes)
            change = self.parts.get(tensor.name)
            return raw if change is None else change(raw, start)

        return dequantised_again(encoding, first, last, taken)


def unscaled(encoding: Tiled | BnbInt8 | OffsetIntegers | PackedIntegers) -> Misreading:
    """Return the misreading that gives the codes themselves."""
    if isinstance(encoding, BnbInt8):
        parts = {encoding.largest.name: _all(DType.F32, _127)}
        return Misreading(what=_UNSCALED, encoding=encoding, parts=parts)
    return _unscaled(encoding, encoding.scales)


def misreadings(encoding: Encoding) -> Iterator[Misreading]:
    """Yield the ways in which a weight of this encoding is known to be read wrongly."""
    match encoding:
        case Tiled():
            yield unscaled(encoding)
            yield from _other_tiles(encoding)
            yield Misreading(
                what="it was divided by its scales, which multiply",
                encoding=encoding,
                parts={encoding.scales.name: _inverse(encoding.scales.dtype)},
            )
            if encoding.codes.dtype is DType.I8:
                yield _unsigned(encoding)
        case BnbInt8():
            yield unscaled(encoding)
            wide = {encoding.largest.name: lambda raw, _: (raw.view("<f4") * np.float32(127)).view(np.uint8)}
            yield Misreading(what="its scales were not divided by 127", encoding=encoding, parts=wide)
            yield _unsigned(encoding)
        case Bnb4():
            yield from _of_bnb4(encoding)
        case PackedIntegers() | OffsetIntegers():
            yield from _of_integers(encoding)
        case Fp4():
            yield from _of_fp4(encoding)
        case ColumnIntegers():
            yield from _of_columns(encoding)
        case RoundedAs():
            return  # a plain weight: who reads it otherwise leaves the rounding out
        case _:
            assert_never(encoding)


def _of_bnb4(encoding: Bnb4) -> Iterator[Misreading]:
    scales = encoding.scales
    if isinstance(scales, NestedScales):
        plain = replace(encoding, scales=replace(scales, offset=0.0))
        yield _unscaled(plain, scales.levels, scales.scales)
        yield Misreading(what="`nested_offset` was left out of its scales", encoding=plain)
    else:
        yield _unscaled(encoding, scales)
    yield _swapped(encoding)


def _of_integers(encoding: PackedIntegers | OffsetIntegers) -> Iterator[Misreading]:
    yield _unscaled(encoding, encoding.scales)
    if isinstance(encoding, OffsetIntegers):
        yield Misreading(what=_NO_ZEROS, encoding=encoding, parts={encoding.zeros.name: _none})
        yield _raw(encoding)
        yield _unsigned(encoding)
        return
    yield other_sign(encoding)
    scales = Misreading(what="", encoding=replace(encoding, zeros=None), parts={encoding.codes.name: _none})
    yield Misreading(what=f"2^{encoding.bits - 1} was not subtracted from its codes", encoding=encoding, less=scales)
    if encoding.bits == _NIBBLE:
        yield _swapped(encoding)
    if encoding.zeros is not None:
        yield Misreading(what=_NO_ZEROS, encoding=replace(encoding, zeros=None))
    if encoding.groups is not None:
        yield Misreading(
            what="its groups were taken in order, ignoring `weight_g_idx`", encoding=replace(encoding, groups=None)
        )


def _raw(encoding: OffsetIntegers) -> Misreading:
    """Return the misreading of codes as the numbers."""
    ones = _unscaled(encoding, encoding.scales)
    zeros = {encoding.zeros.name: _none}
    return replace(ones, what="neither its scales nor its zero points were applied", parts={**ones.parts, **zeros})


def other_sign(encoding: Tiled | BnbInt8 | OffsetIntegers | PackedIntegers) -> Misreading:
    """Return the misreading of integers with an offset as two's complement, or the other way round."""
    if not isinstance(encoding, PackedIntegers):
        what = "its codes were read with an offset, but are stored in two's complement"
        return Misreading(what=what, encoding=encoding, parts={encoding.codes.name: lambda raw, _: raw ^ _TOP})
    row, bits = 4 * encoding.codes.shape[-1], encoding.bits
    highest = np.packbits(np.arange(8 * row) % bits == bits - 1, bitorder="little")
    return Misreading(
        what="its codes were read as two's complement, but are stored with an offset",
        encoding=encoding,
        parts={encoding.codes.name: lambda raw, start: raw ^ highest[(start + np.arange(raw.size)) % row]},
    )


def _unsigned(encoding: Tiled | BnbInt8 | OffsetIntegers) -> Misreading:
    """Return the misreading of bytes without a sign: 128 more than of those whose sign is turned."""
    parts: dict[str, Change] = {encoding.codes.name: lambda raw, _: np.full_like(raw, _TOP)}
    if isinstance(encoding, OffsetIntegers):
        parts[encoding.zeros.name] = _none
    scales = Misreading(what="", encoding=encoding, parts=parts)
    return replace(other_sign(encoding), what="its codes were read without a sign", less=scales)


def _none(raw: Bytes, _start: int) -> Bytes:
    return np.zeros_like(raw)


def _of_columns(encoding: ColumnIntegers) -> Iterator[Misreading]:
    yield _unscaled(encoding, encoding.scales)
    ones = sum(1 << at for at in range(0, 32, encoding.bits))
    yield Misreading(
        what="its zero points were taken as off by one", encoding=replace(encoding, added=ones - encoding.added)
    )
    middle = (ones << encoding.bits - 1) - encoding.added
    yield Misreading(
        what="its zero points were taken for the middle of the codes",
        encoding=encoding,
        parts={encoding.zeros.name: _all(DType.I32, middle)},
    )
    if encoding.bits == _NIBBLE:
        yield _swapped(encoding)
    if encoding.across:
        parts = {encoding.codes.name: _in_order, encoding.zeros.name: _in_order}
        yield Misreading(what="its codes were read in order, but AWQ interleaves them", encoding=encoding, parts=parts)
    if encoding.groups is not None:
        yield Misreading(
            what="its groups were taken in order, ignoring `g_idx`", encoding=replace(encoding, groups=None)
        )


def _of_fp4(encoding: Fp4) -> Iterator[Misreading]:
    yield _unscaled(replace(encoding, overall=None), encoding.scales)
    yield _swapped(encoding)
    if encoding.overall is not None:
        yield replace(_unscaled(encoding, encoding.scales), what="the scales of its groups were not applied")
        yield Misreading(what="the scale of the whole tensor was left out", encoding=replace(encoding, overall=None))
        wrong, right = ("multiplied", "divides") if encoding.divides else ("divided", "multiplies")
        yield Misreading(
            what=f"it was {wrong} by the scale of the whole tensor, which {right}",
            encoding=replace(encoding, divides=not encoding.divides),
        )
    if encoding.transposed and encoding.spec.name.endswith("gate_up_proj"):
        what = "gate and up were put one after the other, but are interleaved"
        yield Misreading(what=what, encoding=encoding, columns=_one_after_the_other)


def _one_after_the_other(values: Array) -> Array:
    """Return columns that alternate between gate and up as all of the one and then all of the other."""
    return np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1)


def _unscaled(encoding: Encoding, *scales: StoredTensor) -> Misreading:
    ones = {each.name: _all(each.dtype, _ONE.get(each.dtype, 127)) for each in scales}
    return Misreading(what=_UNSCALED, encoding=encoding, parts=ones)


def _all(dtype: DType, bits: int) -> Change:
    size = dtype.bits // 8
    return lambda raw, _: np.full(raw.size // size, bits, f"<u{size}").view(np.uint8)


def _swapped(encoding: Bnb4 | PackedIntegers | Fp4 | ColumnIntegers) -> Misreading:
    return Misreading(
        what="the halves of its bytes were swapped",
        encoding=encoding,
        parts={encoding.codes.name: _halves_swapped},
    )


def _halves_swapped(raw: Bytes, _start: int) -> Bytes:
    return np.asarray(raw << _NIBBLE | raw >> _NIBBLE, np.uint8)


def _in_order(raw: Bytes, _start: int) -> Bytes:
    """Return AWQ's words as a right reader must find them to take the codes that lie in order for those of outputs."""
    words = raw.view("<u4")
    codes = (
        ((words >> np.uint32(_NIBBLE * output)) & 15) << np.uint32(_NIBBLE * at) for at, output in enumerate(ORDER)
    )
    return np.asarray(sum(codes, np.zeros_like(words)), "<u4").view(np.uint8)


def _inverse(dtype: DType) -> Change:
    """Return what makes 1 / x of stored scales, rounded to their type."""
    if dtype is DType.BF16:
        return lambda raw, _: _upper_halves(np.float32(1) / (raw.view("<u2").astype("<u4") << 16).view(np.float32))
    if dtype in (DType.F32, DType.F16):
        kind = f"<f{dtype.bits // 8}"
        return lambda raw, _: np.divide(1, raw.view(kind), dtype=kind).view(np.uint8)
    return lambda raw, _: np.subtract(254, raw, dtype=np.uint8)  # powers of two


def _upper_halves(values: NDArray[np.float32]) -> Bytes:
    return ((values.view("<u4") + 0x8000) >> 16).astype("<u2").view(np.uint8)


def _other_tiles(encoding: Tiled) -> Iterator[Misreading]:
    """Yield the tiles that the shapes of weight and scales suggest, where the config's are others."""
    sizes = encoding.spec.shape[-2:]
    grid = tuple(math.ceil(size / side) for size, side in zip(sizes, encoding.tile, strict=True))
    sides = [{size // count, math.ceil(size / count)} for size, count in zip(sizes, grid, strict=True)]
    for tile in sorted((down, across) for down in sides[0] for across in sides[1]):
        if tile != encoding.tile and all(
            math.ceil(n / side) == count for n, side, count in zip(sizes, tile, grid, strict=True)
        ):
            said = " by ".join(map(str, encoding.tile))
            what = f"tiles of {tile[0]} by {tile[1]} were inferred from the shapes, but the config says {said}"
            yield Misreading(what=what, encoding=replace(encoding, tile=tile))
