"""The words for tensors on disk: a dtype, a shape, and the byte spans that hold the elements.

A tensor in a safetensors file is one span. The same three words describe tensors that are scattered over several
files, so every reader of a format returns a `TensorTable`, and every writer starts from one.
"""

from __future__ import annotations

import enum
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from lora_tool.core.choices import TextEnum, wrong_value

MAX_BYTES = 2**63 - 1
"""No file is larger than this, so no tensor is. A header whose shape needs more is wrong."""


@enum.unique
class DType(TextEnum):
    """Element types by their safetensors names (https://github.com/huggingface/safetensors#format)."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"

    bits: int
    """Size of one element in bits (sub-byte types exist)."""
    is_float: bool
    """Whether a merge can compute with it: F16, BF16, F32 or F64."""

    def __init__(self, name: str) -> None:
        number = re.search(r"\d+", name)
        self.bits = int(number[0]) if number else 8  # the name BOOL has no number
        self.is_float = name in ("F16", "BF16", "F32", "F64")


FLOAT_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32", DType.F64: "float64"}
"""The float types and their names in torch and in a transformers config."""


def float_type(value: object) -> DType:
    """Return the float type for a `DType`, a type of torch, or a name such as "bfloat16", "bf16", "fp16".

    Raises `WrongValue` for everything else.
    """
    word = str(value).lower().removeprefix("torch.").replace("float", "f").replace("fp", "f")
    found = next((dtype for dtype in FLOAT_NAMES if dtype.value.lower() == word), None)
    if found is None:
        raise wrong_value("dtype", value, FLOAT_NAMES.values())
    return found


class Span(Struct, frozen=True, kw_only=True):
    """`nbytes` bytes of the file `path`, from `offset`."""

    path: Path
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes < 0:
            raise ValueError(f"span of {self.path}: negative offset or size")

    def part(self, start: int, nbytes: int) -> Span:
        """Return the `nbytes` bytes from byte `start` of the span."""
        return Span(path=self.path, offset=self.offset + start, nbytes=nbytes)

    @property
    def places(self) -> tuple[Span, ...]:
        """The bytes of files that hold it, in any order: what has to be read for it, and whose files it needs."""
        return (self,)


class TransposedSpan(Span, frozen=True, kw_only=True):
    """Bytes of a matrix of `rows` and `columns` that lies transposed in the file, [columns, rows], at `offset`.

    They are the `nbytes` bytes from byte `start` of the matrix as it is meant.
    """

    rows: int
    columns: int
    itemsize: int
    start: int = 0

    @property
    def stored_bytes(self) -> int:
        """Size of the whole matrix in the file."""
        return self.rows * self.columns * self.itemsize

    def part(self, start: int, nbytes: int) -> Span:
        """Return the `nbytes` bytes from byte `start` of the span."""
        return replace(self, start=self.start + start, nbytes=nbytes)

    @property
    def places(self) -> tuple[Span, ...]:
        """The whole matrix in the file."""
        return (Span(path=self.path, offset=self.offset, nbytes=self.stored_bytes),)


class Tile(NamedTuple):
    """Bytes `begin` to `begin + width` of every row of some rows: one row after the other, from `offset` of `path`."""

    path: Path
    offset: int
    begin: int
    width: int


class TiledSpan(Span, frozen=True, kw_only=True):
    """Bytes of rows that lie in pieces side by side: a matrix that tensor parallelism cut along its columns.

    The tiles fill each row of `row_bytes`, in order; `path` and `offset` are those of the first. The span is the
    `nbytes` bytes from byte `start` of the rows.
    """

    tiles: tuple[Tile, ...]
    row_bytes: int
    start: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        """The first row that it needs, and the one after its last."""
        return self.start // self.row_bytes, -(-(self.start + self.nbytes) // self.row_bytes)

    def part(self, start: int, nbytes: int) -> Span:
        """Return the `nbytes` bytes from byte `start` of the span."""
        return replace(self, start=self.start + start, nbytes=nbytes)

    @property
    def places(self) -> tuple[Span, ...]:
        """The rows that it needs of each tile."""
        first, last = self.rows
        return tuple(
            Span(path=tile.path, offset=tile.offset + first * tile.width, nbytes=(last - first) * tile.width)
            for tile in self.tiles
        )


def is_tensor_name(text: str) -> bool:
    """Return whether a tensor can be called so in a safetensors file: whole Unicode, and not what its metadata is called.

    A pickle can hold half a surrogate pair, which no UTF-8 text can.
    """
    return text != "__metadata__" and (text.isascii() or text.encode(errors="ignore").decode() == text)


class TensorSpec(Struct, frozen=True, kw_only=True):
    """Name, element type and shape. An existing spec has a byte size that fits in 63 bits and is whole."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    nbytes: int = 0
    """Size in bytes, whatever is given for it; asked for so often that it is worked out once."""

    def __post_init__(self) -> None:
        force_setattr(self, "nbytes", _bytes_of(self.dtype, self.shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 if any size is 0."""
        return math.prod(self.shape)


@lru_cache(maxsize=1 << 12)
def _bytes_of(dtype: DType, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor; a model has a hundred thousand of them, and some dozen shapes. Raises ValueError."""
    nbits, empty = dtype.bits, False
    for n in shape:
        if n < 0:
            raise ValueError(f"shape {list(shape)} has a negative size")
        # a zero anywhere makes the product 0, yet the other sizes must still be possible ones
        empty = empty or n == 0
        nbits *= n or 1
        if nbits // 8 > MAX_BYTES:
            raise ValueError(f"shape {list(shape)} of {dtype} overflows 63 bits")
    nbytes, rest = divmod(0 if empty else nbits, 8)
    if rest:
        raise ValueError(f"shape {list(shape)} of {dtype} is not a whole number of bytes")
    return nbytes


class StoredTensor(Struct, frozen=True, kw_only=True):
    """A tensor and where its bytes are: the spans, in order, are its elements in row-major order."""

    spec: TensorSpec
    spans: tuple[Span, ...]
    _ends: tuple[int, ...] = ()
    """Where in the tensor each span ends: a stack of experts is hundreds of spans, and is asked for each of them.

    Empty for one span, as nearly all tensors have, of which there may be a million.
    """

    def __post_init__(self) -> None:
        one = len(self.spans) == 1
        ends = () if one else tuple(accumulate(span.nbytes for span in self.spans))
        force_setattr(self, "_ends", ends)
        held = self.spans[0].nbytes if one else ends[-1] if ends else 0
        if held != self.spec.nbytes:
            raise ValueError(f"`{self.spec.name}` needs {self.spec.nbytes} bytes, its spans hold {held}")

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def path(self) -> Path:
        """The file of its first span: what a message names."""
        return self.spans[0].path

    @property
    def is_transposed(self) -> bool:
        """Whether its matrices lie transposed in the file."""
        return any(isinstance(span, TransposedSpan) for span in self.spans)

    @property
    def places(self) -> tuple[Span, ...]:
        """The bytes of files that hold it, in any order; see `Span.places`."""
        return tuple(place for span in self.spans for place in span.places)

    def part(self, start: int, nbytes: int) -> Iterator[Span]:
        """Yield the spans of the `nbytes` bytes from byte `start`, or of those that there are."""
        end = start + nbytes
        ends = self._ends or (self.nbytes,)
        for at in range(bisect_right(ends, start), len(self.spans)):
            if start >= end:
                return
            span = self.spans[at]
            left = ends[at] - start
            taken = min(left, end - start)
            if taken:
                yield span if taken == span.nbytes else span.part(span.nbytes - left, taken)
            start += taken


TensorTable = Mapping[str, StoredTensor]
"""Tensor name → stored tensor, in file order."""


class FileStamp(Struct, frozen=True, kw_only=True):
    """What a file looked like when it was read; any later difference means that another program changed it."""

    path: Path
    size: int
    mtime_ns: int
    inode: int | None
    """None where it was seen on another machine, whose mount may number the same files differently."""

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Stamp of `path` as it is now. Raises OSError."""
        return cls.from_stat(path, path.stat())

    @classmethod
    def from_stat(cls, path: Path, stat: os.stat_result) -> FileStamp:
        return cls(path=path, size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino)

    def for_another_machine(self) -> FileStamp:
        """Return what of it holds on every machine that sees the file."""
        return replace(self, inode=None)

    def is_same(self, other: FileStamp) -> bool:
        """Return whether both are of one state of the file; inodes tell where both were taken on one machine."""
        one_machine = self.inode is not None and other.inode is not None
        return self == (other if one_machine else replace(other, inode=self.inode))

    def difference(self, now: FileStamp) -> str:
        """Return in words how the file is `now`, which is not as it was."""
        if self.size != now.size:
            return f"the plan saw {self.size:,} bytes, now it has {now.size:,}"
        if None in (self.inode, now.inode):  # of two machines, each may have a file of its own
            return f"it has {now.size:,} bytes, too, but was last written at another time"
        return f"it still has {now.size:,} bytes, but was {'written to' if self.inode == now.inode else 'replaced'}"


def contiguous(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the spans with those that lie one after the other in a file made one."""
    runs: list[tuple[Span, int]] = []  # the first span of each, and the bytes of all
    for span in spans:
        if runs:
            first, nbytes = runs[-1]
            follows = first.offset + nbytes == span.offset and type(first) is type(span) is Span
            if follows and (first.path is span.path or first.path == span.path):
                runs[-1] = first, nbytes + span.nbytes
                continue
        runs.append((span, span.nbytes))
    return tuple(
        first if first.nbytes == nbytes else Span(path=first.path, offset=first.offset, nbytes=nbytes)
        for first, nbytes in runs
    )


# What a plan does with a tensor, in one word. Rules read it without loading plans.


@enum.unique
class TensorAction(TextEnum):
    """What became of a tensor of the inputs or the output."""

    COPIED = "copied"
    CAST = "cast"
    DEQUANTISED = "dequantised"
    MERGED = "merged"
    RESCALED = "rescaled"
    REPLACED = "replaced"
    ADDED = "added"
    COMPUTED = "computed"
    DROPPED = "dropped"
    CONSUMED = "consumed"


NEW = frozenset({TensorAction.MERGED, TensorAction.REPLACED, TensorAction.ADDED, TensorAction.COMPUTED})
"""Actions that write values the base does not have; the writer checks each of them for NaN and overflow, and
what it dequantises."""
