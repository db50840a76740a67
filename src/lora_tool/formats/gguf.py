"""GGUF files, llama.cpp's format for weights: the header read strictly, and laid out for a new file.

The format (ggml's `docs/gguf.md`, version 3), little-endian: "GGUF", the version, the numbers of tensors and of fields;
each field a name, a type and a value; each tensor a name, its sizes from the innermost, a type and where its data begin,
counted from the end of the header, which is filled up to `general.alignment` bytes (32 without that field), as every
tensor is.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, Defect, Problem
from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec
from lora_tool.formats.files import open_regular, read_at
from lora_tool.formats.safetensors import WeightsFile

ARCHITECTURE, KIND = "general.architecture", "general.type"
_MAGIC, _VERSION = b"GGUF", 3
_ALIGNMENT, _DEFAULT = "general.alignment", 32
_MAX_NAME, _MAX_DIMENSIONS = 64, 4
"""ggml's own bounds (`GGML_MAX_NAME`, `GGML_MAX_DIMS`)."""
_MAX_HEADER_BYTES = 100_000_000
_MAX_SHOWN = 64
"""Elements of an array that are kept: a vocabulary is of no use here."""
_TYPES = {
    DType.F32: 0,
    DType.F16: 1,
    DType.I8: 24,
    DType.I16: 25,
    DType.I32: 26,
    DType.I64: 27,
    DType.F64: 28,
    DType.BF16: 30,
}
_DTYPES = {number: dtype for dtype, number in _TYPES.items()}
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_U32, _F32, _TEXT, _ARRAY = 4, 6, 8, 9

Value = str | bool | int | float
GgufFields = Mapping[str, Value | tuple[Value, ...]]


class GgufFile(Struct, frozen=True, kw_only=True):
    """A GGUF file: its tensors with what is wrong with them, and its fields, of long arrays the first elements."""

    weights: WeightsFile
    fields: GgufFields


def scan_gguf(path: Path) -> GgufFile:
    """Return the header of `path` with its defects: the first in the header, and each of the tensors that follow.

    Only the header is read. Raises `CorruptFile` only where `path` is not a readable regular file.
    """
    with open_regular(path) as fd:
        stamp = FileStamp.from_stat(path, os.fstat(fd))
        reader = _Reader(path, fd, stamp.size)
        try:
            fields, entries = reader.header()
        except CorruptFile as error:
            return GgufFile(weights=WeightsFile(stamp=stamp, problems=(error.problem,)), fields={})
    alignment = fields.get(_ALIGNMENT, _DEFAULT)
    start = _padded(reader.at, alignment if type(alignment) is int and alignment > 0 else _DEFAULT)
    problems: list[Problem] = []
    tensors = dict(_placed(entries, start, stamp, problems))
    texts = {name: str(value) for name, value in fields.items()}
    weights = WeightsFile(stamp=stamp, tensors=tensors, problems=tuple(problems), metadata=texts, data_start=start)
    return GgufFile(weights=weights, fields=fields)


_Entry = tuple[str, tuple[int, ...], int, int]
"""Name, shape, number of the type, offset."""


def _placed(
    entries: Iterable[_Entry], start: int, stamp: FileStamp, problems: list[Problem]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors that are whole in the file; note what is wrong with the others."""
    for name, shape, number, offset in entries:
        dtype = _DTYPES.get(number)
        if dtype is None:
            message, kind = f"has the type {number} of ggml, which is none of {', '.join(_TYPES)}", Defect.BAD_HEADER
        else:
            spec = TensorSpec(name=name, dtype=dtype, shape=shape)
            if start + offset + spec.nbytes <= stamp.size:
                span = Span(path=stamp.path, offset=start + offset, nbytes=spec.nbytes)
                yield name, StoredTensor(spec=spec, spans=(span,))
                continue
            end, kind = start + offset + spec.nbytes, Defect.TRUNCATED
            message = f"ends at byte {end:,}, the file holds {stamp.size:,}: truncated?"
        problems.append(Problem(defect=kind, path=str(stamp.path), subject=name, message=message))


class _Reader:
    """Reads a header from its beginning. Every method raises `CorruptFile`."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.at = 0
        self._path, self._fd, self._size = path, fd, min(size, _MAX_HEADER_BYTES)
        self._held, self._first = b"", 0
        self._corrupt = partial(CorruptFile.of, path)

    def header(self) -> tuple[GgufFields, list[_Entry]]:
        if self._take(4) != _MAGIC:
            raise self._corrupt(Defect.BAD_HEADER, "does not start with GGUF")
        version = self._number("<I")
        if version not in (2, _VERSION):
            raise self._corrupt(Defect.BAD_HEADER, f"is version {version} of GGUF: expected {_VERSION}")
        tensors, count = self._number("<Q"), self._number("<Q")
        fields = {self._text(): self._value(self._number("<I")) for _ in self._counted(count)}
        return fields, [self._entry() for _ in self._counted(tensors)]

    def _counted(self, count: int) -> range:
        if count > self._size:
            raise self._corrupt(Defect.BAD_HEADER, f"claims {count:,} entries, more than it has bytes: truncated?")
        return range(count)

    def _entry(self) -> _Entry:
        name = self._text()
        dimensions = self._number("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._corrupt(
                Defect.BAD_HEADER, f"claims {dimensions} dimensions: expected {_MAX_DIMENSIONS} at most", name
            )
        sizes = tuple(self._number("<Q") for _ in range(dimensions))
        number, offset = self._number("<I"), self._number("<Q")
        try:
            TensorSpec(name=name, dtype=_DTYPES.get(number, DType.U8), shape=sizes)
        except ValueError as error:
            raise self._corrupt(Defect.BAD_HEADER, str(error), name) from None
        return name, sizes[::-1], number, offset

    def _value(self, kind: int) -> Value | tuple[Value, ...]:
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            kept: list[Value] = []
            for at in self._counted(count):
                value = self._scalar(inner)
                if at < _MAX_SHOWN:
                    kept.append(value)
            return tuple(kept)
        return self._scalar(kind)

    def _scalar(self, kind: int) -> Value:
        if kind == _TEXT:
            return self._text()
        if kind not in _NUMBERS:
            raise self._corrupt(Defect.BAD_HEADER, f"has a field of type {kind}, which GGUF does not have")
        (value,) = struct.unpack(_NUMBERS[kind], self._take(struct.calcsize(_NUMBERS[kind])))
        found: Value = value
        return found

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode(errors="replace")

    def _take(self, nbytes: int) -> bytes:
        if self.at + nbytes > self._size:
            raise self._corrupt(Defect.TRUNCATED, f"its header goes on after byte {self._size:,}: truncated?")
        if not self._first <= self.at <= self.at + nbytes <= self._first + len(self._held):
            self._first = self.at
            self._held = read_at(self._path, self._fd, self.at, min(max(nbytes, 1 << 16), self._size - self.at))
        start = self.at - self._first
        self.at += nbytes
        return self._held[start : start + nbytes]


def gguf_header(specs: Sequence[TensorSpec], fields: GgufFields) -> bytes:
    """Return the header of a file that holds `specs` one after the other without gaps, as `scan_gguf` reads it back.

    The alignment is the largest that all their sizes have, 32 at most. Raises ValueError for a name, a type or a number
    of dimensions that GGUF does not have.
    """
    alignment = _DEFAULT
    while any(spec.nbytes % alignment for spec in specs):
        alignment //= 2
    said = {**fields, **({} if alignment == _DEFAULT else {_ALIGNMENT: alignment})}
    out = bytearray(_MAGIC + struct.pack("<IQQ", _VERSION, len(specs), len(said)))
    for name, value in said.items():
        out += _text(name) + _field(value)
    at = 0
    for spec in specs:
        if len(spec.name.encode()) >= _MAX_NAME or spec.dtype not in _TYPES or len(spec.shape) > _MAX_DIMENSIONS:
            raise ValueError(f"GGUF has no tensor `{spec.name}` of {spec.dtype} {list(spec.shape)}")
        out += _text(spec.name) + struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *reversed(spec.shape))
        out += struct.pack("<IQ", _TYPES[spec.dtype], at)
        at += spec.nbytes
    return bytes(out.ljust(_padded(len(out), alignment), b"\0"))


def _field(value: Value | tuple[Value, ...]) -> bytes:
    match value:
        case tuple():
            inner = [_field(each) for each in value]
            return (
                struct.pack("<I", _ARRAY)
                + inner[0][:4]
                + struct.pack("<Q", len(inner))
                + b"".join(each[4:] for each in inner)
            )
        case str():
            return struct.pack("<I", _TEXT) + _text(value)
        case float():
            return struct.pack("<If", _F32, value)
        case _:
            return struct.pack("<II", _U32, value)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
