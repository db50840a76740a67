"""How quantised weights are stored: each encoding is codes with their scales, and stands for one matrix of numbers.

`Encoding` is a closed union: `decoding` makes the numbers for those who write, `verification` makes them again in its
own way. Both round where the library of the format rounds, so that a matrix has one value only.
"""

from __future__ import annotations

from typing import TypeVar, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec


class _Stored(Struct, frozen=True, kw_only=True):
    """Codes, and the matrix that they stand for: `spec` has its name, its shape and the type of its values."""

    spec: TensorSpec
    codes: StoredTensor
    label: str
    """The format's name."""
    record: StoredTensor | None = None
    """The tensor that says shape or order of the codes, or zero points that are all 0, where one does."""

    def __str__(self) -> str:
        return self.label


class Tiled(_Stored, frozen=True, kw_only=True):
    """One scale per tile of `tile` rows and columns: value = code · scale in float32.

    Codes are F8_E4M3 or I8, [.., out, in]; scales are floats, or powers of two in eight bits (E8M0, byte - 127). The
    last tile of a row or column may be cut off: the grid is rounded up. One tile may be a row, or all of a matrix.
    """

    scales: StoredTensor
    tile: tuple[int, int]
    bits: int = 8
    """How many of the eight there are codes for."""


class OffsetIntegers(_Stored, frozen=True, kw_only=True):
    """Integers of eight bits, [.., out, in], with a scale and a zero for each tile: value = (code - zero) · scale in float32."""

    scales: StoredTensor
    zeros: StoredTensor
    """In the grid of the scales, int8."""
    tile: tuple[int, int]
    bits: int = 8
    """How many of the eight there are codes for."""


class BnbInt8(_Stored, frozen=True, kw_only=True):
    """LLM.int8() of bitsandbytes: value = (code · largest of the row) / 127 in float32, in this order."""

    largest: StoredTensor
    """`SCB`, [out]."""


class NestedScales(Struct, frozen=True, kw_only=True):
    """Scales that are quantised themselves: scale = level of its code · scale of its block + `offset`, in float32."""

    codes: StoredTensor
    levels: StoredTensor
    scales: StoredTensor
    block: int
    offset: float


class Bnb4(_Stored, frozen=True, kw_only=True):
    """Four bits of bitsandbytes, nf4 or fp4: value = level of the code · scale of its block, in float32, then rounded
    to the type of `spec`.

    The first of two values is in the high half of a byte; blocks run over the flattened matrix.
    """

    levels: StoredTensor
    scales: StoredTensor | NestedScales
    block: int


class PackedIntegers(_Stored, frozen=True, kw_only=True):
    """`pack-quantized` of compressed-tensors: value = (code - zero) · scale, rounded to the scale's type.

    Each row is a stream of `bits` per code in words of 32, the lowest bits first; a code is stored plus 2^(bits - 1).
    `groups` says the group of each input where they are not in order; where it has a -1, they are.
    """

    scales: StoredTensor
    """[out, groups]"""
    zeros: StoredTensor | None
    """[out, groups] as int8, or packed as the codes are, along the first dimension; or one, as int8, where there is one scale."""
    bits: int
    group: int
    groups: StoredTensor | None = None


class Fp4(_Stored, frozen=True, kw_only=True):
    """Floats of four bits (E2M1), the first of two in the low half of a byte, with a scale for each `group` of a row.

    Scales are E4M3 (NVFP4) or powers of two (MX); with `overall` each is first multiplied with it, or divided by it, in
    float32. `transposed` where the file stores the matrices transposed: GPT-OSS's experts. `below` where the two
    values of a byte, and those with one scale, lie below each other: modelopt's stacks of experts.
    """

    scales: StoredTensor
    group: int
    overall: StoredTensor | None = None
    divides: bool = False
    transposed: bool = False
    below: bool = False


class ColumnIntegers(_Stored, frozen=True, kw_only=True):
    """Integers of GPTQ and AWQ, stored [in, out] with a scale and a zero for each group of inputs and each output.

    value = (code - zero) · scale, rounded to the scale's type. Words of 32 bits hold neighbouring inputs (GPTQ), or
    neighbouring outputs in the order of `ORDER` (AWQ, `across`), the lowest bits first; zeros always lie across. Their
    words are stored less `added`. `groups` says the group of each input where they are not in order.
    """

    scales: StoredTensor
    """[groups, out]"""
    zeros: StoredTensor
    bits: int
    group: int
    groups: StoredTensor | None = None
    across: bool = False
    added: int = 0


class Means(Struct):
    """The mean of a weight's scales, computed on first use. It follows from the weight, so any two compare equal."""

    decoded: float | None = None
    """As it was worked out for those who write."""
    verified: float | None = None
    """As `verification` worked it out."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Means)

    def __hash__(self) -> int:
        return 0


class RoundedAs(_Stored, frozen=True, kw_only=True):
    """A plain weight, `codes`, as bitsandbytes rounds it to four bits and back: QLoRA trained on these values.

    Each block of 64 values, over the flattened matrix, is divided by its largest and takes the nearest of 16 `levels`.
    With `nested` the largest values are rounded to eight bits themselves, less their mean over the whole weight.
    """

    levels: tuple[float, ...]
    nested: bool = False
    means: Means = field(default_factory=Means)


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each part of AWQ's words is, the lowest first."""

_WHOLE = 32
"""Rows of a weight that are whole words, and whole groups of MX, where they are columns on disk."""

Encoding = Tiled | OffsetIntegers | BnbInt8 | Bnb4 | PackedIntegers | Fp4 | ColumnIntegers | RoundedAs
"""A closed union: whoever decodes one decodes all."""
Quantised = TypeVar("Quantised", bound=_Stored)


def parts(encoding: Encoding) -> tuple[StoredTensor, ...]:
    """Return the tensors on disk that the matrix is made of, the codes first."""
    found: list[StoredTensor] = []
    for name in _HOLDING_TENSORS[type(encoding)]:
        value = getattr(encoding, name)
        if isinstance(value, StoredTensor):
            found.append(value)
        elif isinstance(value, NestedScales):
            found += (value.codes, value.levels, value.scales)
    return tuple(found)


def _holding_tensors(kind: type[_Stored]) -> tuple[str, ...]:
    declared = {
        name: text for each in reversed(kind.__mro__) for name, text in getattr(each, "__annotations__", {}).items()
    }
    return tuple(name for name in kind.__struct_fields__ if StoredTensor.__name__ in declared[name])


_HOLDING_TENSORS: dict[type, tuple[str, ...]] = {kind: _holding_tensors(kind) for kind in get_args(Encoding)}
"""Class of encoding → its fields that may hold tensors."""


class QuantisedSpan(Span, frozen=True, kw_only=True):
    """The `nbytes` bytes from byte `start` of the matrix that an encoding stands for; `path` and `offset` are its codes'."""

    encoding: Encoding
    start: int = 0

    def part(self, start: int, nbytes: int) -> Span:
        """Return the `nbytes` bytes from byte `start` of the span."""
        return replace(self, start=self.start + start, nbytes=nbytes)

    @property
    def places(self) -> tuple[Span, ...]:
        """The codes and scales of the whole matrix."""
        return tuple(span for part in parts(self.encoding) for span in part.spans)


def dequantised(encoding: Encoding) -> StoredTensor:
    """Return the matrix that an encoding stands for, as a tensor that is decoded when it is read."""
    place = encoding.codes.spans[0]
    span = QuantisedSpan(path=place.path, offset=place.offset, nbytes=encoding.spec.nbytes, encoding=encoding)
    return StoredTensor(spec=encoding.spec, spans=(span,))


def rounded(tensor: StoredTensor, dtype: DType) -> StoredTensor:
    """Return rows of quantised weights rounded to a type when they are read; another tensor as it is."""
    spans = tuple(_in_type(span, dtype) for span in tensor.spans if isinstance(span, QuantisedSpan))
    if tensor.dtype is dtype or not spans or len(spans) < len(tensor.spans):
        return tensor
    return StoredTensor(spec=replace(tensor.spec, dtype=dtype), spans=spans)


def in_type(encoding: Quantised, dtype: DType) -> Quantised:
    """Return how a weight is stored, as numbers of another type."""
    return replace(encoding, spec=replace(encoding.spec, dtype=dtype))


def _in_type(span: QuantisedSpan, dtype: DType) -> QuantisedSpan:
    before, after = span.encoding.spec.dtype.bits, dtype.bits
    start, nbytes = (size * after // before for size in (span.start, span.nbytes))
    return replace(span, start=start, nbytes=nbytes, encoding=in_type(span.encoding, dtype))


_STRIP_WEIGHTS = 1 << 24


def rows_together(encoding: Encoding) -> int | None:
    """Return how many rows of a matrix are worth reading together, because they are columns on disk; None elsewhere.

    They are whole words and groups; all codes of them are a few MB.
    """
    if not isinstance(encoding, ColumnIntegers) and not (isinstance(encoding, Fp4) and encoding.transposed):
        return None
    return max(1, _STRIP_WEIGHTS // encoding.spec.shape[-1] // _WHOLE) * _WHOLE


def encoding_of(tensor: StoredTensor) -> Encoding | None:
    """Return how a tensor, or its first rows, are quantised on disk; None where they are not."""
    return next((span.encoding for span in tensor.spans if isinstance(span, QuantisedSpan)), None)


def rows_within(tensor: StoredTensor, first: int, last: int) -> tuple[Encoding, int, int] | None:
    """Return the encoding that rows `first` to `last` of a matrix are decoded from, and which of its rows they are.

    None where they are not quantised, or not all rows of one encoding.
    """
    if len(tensor.shape) != 2 or encoding_of(tensor) is None:  # noqa: PLR2004 - a matrix
        return None
    row_bytes = tensor.nbytes // tensor.shape[0]
    spans = tuple(tensor.part(first * row_bytes, (last - first) * row_bytes))
    if len(spans) != 1 or not isinstance(spans[0], QuantisedSpan):
        return None
    spec = spans[0].encoding.spec
    row, rest = divmod(spans[0].start, row_bytes)
    if rest or row_bytes != spec.shape[-1] * spec.dtype.bits // 8:
        return None
    return spans[0].encoding, row, row + last - first
