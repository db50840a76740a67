"""Reading and laying out safetensors files: only the header, strictly, without the safetensors package.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of
JSON, then the data. The JSON maps names to dtype, shape and `data_offsets` counted from the end of the header. The
tensors must cover the data exactly: no holes, no overlaps. We read headers ourselves because the package stops at
the first defect and gives no offsets, and a report wants all defects and the writer wants the offsets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from msgspec import Struct, field

from lora_tool.core.errors import CorruptFile, Defect, Problem
from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec
from lora_tool.formats.files import instead_of_weights, open_regular, parse_names, read_at

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound (`safetensors/src/tensor.rs`, MAX_HEADER_SIZE)."""

_LENGTH_BYTES = 8
_KNOWN_DTYPES = {dtype.value: dtype for dtype in DType}


class WeightsFile(Struct, frozen=True, kw_only=True):
    """What one file of weights holds, a safetensors or torch file, and everything that is wrong with it."""

    stamp: FileStamp
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """A safetensors file's own texts."""
    data_start: int = 0
    """Where the tensors of a safetensors file begin."""

    @property
    def path(self) -> Path:
        return self.stamp.path


def scan_file(path: Path) -> WeightsFile:
    """Return the header of `path` with all its defects; tensors whose entry makes no sense are left out.

    Only the header is read. Raises `CorruptFile` only where `path` is not a readable regular file.
    """
    with open_regular(path) as fd:
        stamp = FileStamp.from_stat(path, os.fstat(fd))
        try:
            header, data_start = _read_header(fd, stamp)
        except CorruptFile as error:
            return WeightsFile(stamp=stamp, problems=(error.problem,))
    return _interpret(header, stamp=stamp, data_start=data_start)


def _read_header(fd: int, stamp: FileStamp) -> tuple[dict[str, Any], int]:
    corrupt = partial(CorruptFile.of, stamp.path)
    if stamp.size < _LENGTH_BYTES:
        raise corrupt(Defect.TRUNCATED, f"is {stamp.size} bytes: too short for a safetensors file")
    beginning = read_at(stamp.path, fd, 0, 16)
    instead = instead_of_weights(beginning)
    if instead is not None:
        raise corrupt(Defect.BAD_HEADER, instead)
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise corrupt(Defect.BAD_HEADER, f"header claims {length:,} bytes, the format allows {MAX_HEADER_BYTES:,}")
    held = stamp.size - _LENGTH_BYTES
    if length > held:
        raise corrupt(Defect.TRUNCATED, f"header claims {length:,} bytes, the file holds {held:,} after it: truncated?")
    text = read_at(stamp.path, fd, _LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise corrupt(Defect.BAD_HEADER, "header does not start with `{`: not a safetensors file")
    try:
        header = parse_names(text, stamp.path)
    except CorruptFile as error:
        if error.problem.defect is Defect.BAD_JSON:
            raise corrupt(Defect.BAD_HEADER, f"header {error.problem.message}") from error
        raise
    if not isinstance(header, dict):
        raise corrupt(Defect.BAD_HEADER, "header is not a JSON object")
    return header, _LENGTH_BYTES + length


def _interpret(header: dict[str, Any], *, stamp: FileStamp, data_start: int) -> WeightsFile:
    problems: list[Problem] = []

    def defect(kind: Defect, message: str, subject: str | None = None) -> None:
        problems.append(Problem(defect=kind, path=str(stamp.path), subject=subject, message=message))

    metadata = header.pop("__metadata__", None)
    if metadata is None:  # MLX writes null
        metadata = {}
    if not _is_text_map(metadata):
        defect(Defect.BAD_HEADER, "`__metadata__` is not an object of strings", "__metadata__")
        metadata = {}
    data_bytes = stamp.size - data_start
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    forms: _Forms = {}
    for name, entry in header.items():
        try:
            spec, begin, end = _entry(name, entry, forms)
        except ValueError as error:
            defect(Defect.BAD_HEADER, str(error), name)
            continue
        ranges.append((begin, end, name))
        if end > data_bytes:
            defect(
                Defect.TRUNCATED, f"ends at byte {end:,} of the data, the file holds {data_bytes:,}: truncated?", name
            )
        elif end - begin != spec.nbytes:
            shape = f"{spec.dtype} {list(spec.shape)}"
            defect(Defect.WRONG_SIZE, f"{shape} needs {spec.nbytes:,} bytes, the header gives it {end - begin:,}", name)
        else:
            span = Span(path=stamp.path, offset=data_start + begin, nbytes=end - begin)
            tensors[name] = StoredTensor(spec=spec, spans=(span,))
    for kind, message, subject in _cover(sorted(ranges), data_bytes):
        defect(kind, message, subject)
    return WeightsFile(stamp=stamp, data_start=data_start, tensors=tensors, metadata=metadata, problems=tuple(problems))


_Forms: TypeAlias = dict[tuple[object, str], tuple[DType, tuple[int, ...]]]
"""Type and shape as a header has them → parsed; tens of thousands of tensors share some dozen."""


def _entry(name: str, entry: object, forms: _Forms) -> tuple[TensorSpec, int, int]:
    """Return the spec and data range of one header entry. Raises ValueError with a sentence about it."""
    if not isinstance(entry, dict):
        raise ValueError("header entry is not an object")  # noqa: TRY004 - callers collect ValueErrors
    form = str(entry.get("dtype")), repr(entry.get("shape"))
    if form not in forms:
        forms[form] = _form(entry)
    dtype, shape = forms[form]
    offsets = entry.get("data_offsets")
    if not _is_sizes(offsets) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
        raise ValueError(f"data_offsets {offsets!r} is not a pair of offsets")
    begin, end = offsets
    if end < begin:
        raise ValueError(f"data_offsets {offsets!r} end before they begin")
    return TensorSpec(name=name, dtype=dtype, shape=shape), begin, end


def _form(entry: Mapping[str, Any]) -> tuple[DType, tuple[int, ...]]:
    dtype, shape = _KNOWN_DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
    if dtype is None:
        raise ValueError(f"dtype {entry.get('dtype')!r} is not a dtype of safetensors")
    if not _is_sizes(shape):
        raise ValueError(f"shape {shape!r} is not a list of sizes")
    return dtype, tuple(shape)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110 - two lists of every tensor, and a generator costs three times their check
        if type(n) is not int or n < 0:
            return False
    return True


def _is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _cover(ranges: Iterable[tuple[int, int, str]], data_bytes: int) -> Iterator[tuple[Defect, str, str | None]]:
    """Yield holes and overlaps of the sorted ranges over `data_bytes` bytes."""
    at, before = 0, "the start of the data"
    for begin, end, name in ranges:
        if begin > at:
            yield Defect.HOLE, f"{begin - at:,} bytes between {before} and this tensor belong to no tensor", name
        elif begin < at and end > begin:
            yield Defect.OVERLAP, f"shares {min(at, end) - begin:,} bytes with {before}", name
        if end > at:
            at, before = end, f"`{name}`"
    if at < data_bytes:
        yield Defect.HOLE, f"{data_bytes - at:,} bytes after {before} belong to no tensor", None


def build_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return length and JSON of a file that holds `specs` one after the other, as `scan_file` reads it back.

    Padded with spaces to 8 bytes, as the reference writer does, so that the data is aligned.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
