"""Reading the bytes of stored tensors, whatever spans they lie in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from lora_tool.core.errors import SourceChanged, UnsupportedAdapter
from lora_tool.core.tensors import Span, StoredTensor, Tile, TiledSpan, TransposedSpan
from lora_tool.formats.files import open_regular, read_rows
from lora_tool.formats.quantised.encodings import Encoding, QuantisedSpan

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from lora_tool.formats.open_files import OpenFiles

    Decode: TypeAlias = Callable[[Encoding, int, int, Callable[[StoredTensor, int, int], NDArray[Any]]], NDArray[Any]]
    """Returns rows of the decoded weight, from the first to the last, by a function that reads bytes of its tensors."""

_READ_BYTES = 4 << 20
_WIDE = 1 << 9
"""Bytes of a row of a tile that are read right into their place: more of them would take longer than a copy."""
_DECODED_WEIGHTS = 1 << 19
"""Quantised weights that are decoded together: a row of a stack of experts is a whole matrix."""


class ReadSpan(Protocol):
    """Fills buffers, one after the other, with the bytes of a file from an offset. Raises where it ends before."""

    def __call__(self, path: Path, offset: int, /, *buffers: memoryview) -> None:
        """Fill them."""


def read_part(tensor: StoredTensor, start: int, nbytes: int) -> bytes:
    """Return the tensor's `nbytes` bytes from byte `start`.

    Raises `SourceChanged` where a file ends before them, `CorruptFile` where one cannot be opened.
    """
    data = bytearray(nbytes)
    read_into(tensor, start, memoryview(data))
    return bytes(data)


def read_into(tensor: StoredTensor, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with the tensor's bytes from byte `start`. Raises as `read_part`."""
    fill(buffer, tensor, start, _read_opened)


def _read_opened(path: Path, offset: int, *buffers: memoryview) -> None:
    with open_regular(path) as fd:
        if read_rows(path, fd, offset, buffers) < sum(map(len, buffers)):
            raise SourceChanged(f"{path} was truncated while it was read")


def as_in_the_file(part: StoredTensor) -> tuple[StoredTensor, bool]:
    """Return the matrix as it lies in the file, and whether that is the transposed of the one that is meant."""
    span = part.spans[0] if len(part.spans) == 1 else None
    if not isinstance(span, TransposedSpan) or span.nbytes != span.stored_bytes:
        return part, False
    spec = replace(part.spec, shape=(span.columns, span.rows))
    return StoredTensor(spec=spec, spans=(Span(path=span.path, offset=span.offset, nbytes=span.nbytes),)), True


def fill(
    buffer: memoryview,
    tensor: StoredTensor,
    start: int,
    read: ReadSpan,
    decode: Decode | None = None,
) -> None:
    """Fill `buffer` with the tensor's bytes from byte `start`.

    `decode` makes numbers of quantised weights, by default as those who write do.
    """
    filled = 0
    for span in tensor.part(start, len(buffer)):
        part = buffer[filled : filled + span.nbytes]
        if type(span) is Span:  # nearly always
            read(span.path, span.offset, part)
        elif isinstance(span, TransposedSpan):
            part[:] = _read_transposed(span, read).data
        elif isinstance(span, TiledSpan):
            _read_tiles(span, part, read)
        elif isinstance(span, QuantisedSpan):
            _read_quantised(span, part, read, decode)
        filled += span.nbytes


def read_columns(columns: NDArray[Any], tensor: StoredTensor, first: int, files: OpenFiles) -> None:
    """Fill `columns`, [rows, some], with those columns of a matrix from its `first`, as they are stored.

    Of a matrix that lies in one piece nothing else is read.
    """
    if not tensor.nbytes:
        return
    span = tensor.spans[0]
    if len(tensor.spans) == 1 and type(span) is Span:
        down, begin = span.nbytes // len(columns), span.offset + first * columns.itemsize
        rows = enumerate(columns.view("u1"))
        files.read_pieces(span.path, ((begin + at * down, row.data) for at, row in rows))
        return
    import numpy as np  # for few checkpoints

    whole = np.empty(tensor.shape, columns.dtype)
    fill(whole.reshape(-1).view("u1").data, tensor, 0, files.read_exactly)
    columns[:] = whole[:, first : first + columns.shape[1]]


def _read_transposed(span: TransposedSpan, read: ReadSpan) -> NDArray[Any]:
    """Return the bytes of the span: the whole matrix is read, and some of its columns are taken."""
    import numpy as np  # for few checkpoints

    stored = np.empty(span.stored_bytes, np.uint8)
    read(span.path, span.offset, stored.data)
    row_bytes = span.columns * span.itemsize
    first, last = span.start // row_bytes, -(-(span.start + span.nbytes) // row_bytes)
    matrix = stored.view(f"u{span.itemsize}").reshape(span.columns, span.rows)
    rows = np.ascontiguousarray(matrix[:, first:last].T).reshape(-1).view(np.uint8)
    return rows[span.start - first * row_bytes :][: span.nbytes]


def _read_quantised(span: QuantisedSpan, buffer: memoryview, read: ReadSpan, decode: Decode | None) -> None:
    """Fill `buffer` with the bytes of the span: the rows that they lie in are decoded."""
    import numpy as np  # for few checkpoints

    from lora_tool.formats.quantised.decoding import decoded

    def bytes_of(tensor: StoredTensor, start: int, nbytes: int) -> NDArray[Any]:
        out = np.empty(nbytes, np.uint8)
        fill(out.data, tensor, start, read)
        return out

    spec = span.encoding.spec
    row_bytes = spec.shape[-1] * spec.dtype.bits // 8
    first, last = span.start // row_bytes, -(-(span.start + span.nbytes) // row_bytes)
    is_whole = (span.start, span.nbytes) == (first * row_bytes, (last - first) * row_bytes)
    out = np.frombuffer(buffer, np.uint8) if is_whole else np.empty((last - first) * row_bytes, np.uint8)
    step = max(1, _DECODED_WEIGHTS // spec.shape[-1])
    for row in range(first, last, step):
        rows = (decode or decoded)(span.encoding, row, min(row + step, last), bytes_of)
        part = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        out[(row - first) * row_bytes :][: part.size] = part
    if not is_whole:
        buffer[:] = out[span.start - first * row_bytes :][: span.nbytes].data


def _read_tiles(span: TiledSpan, buffer: memoryview, read: ReadSpan) -> None:
    """Fill `buffer` with the bytes of the span: of each tile the rows that it needs are read, and laid side by side."""
    first, last = span.rows
    begin = first * span.row_bytes
    is_whole = (span.start, span.nbytes) == (begin, (last - first) * span.row_bytes)
    rows = buffer if is_whole else memoryview(bytearray((last - first) * span.row_bytes))
    for tile in span.tiles:
        offset = tile.offset + first * tile.width
        if tile.width >= _WIDE:
            places = range(tile.begin, len(rows), span.row_bytes)
            read(tile.path, offset, *(rows[place : place + tile.width] for place in places))
        else:
            held = memoryview(bytearray((last - first) * tile.width))
            read(tile.path, offset, held)
            _lay(held, tile, rows, span.row_bytes)
    if not is_whole:
        buffer[:] = rows[span.start - begin :][: span.nbytes]


def _lay(held: memoryview, tile: Tile, rows: memoryview, row_bytes: int) -> None:
    """Copy the held part of a tile into its place in every row."""
    import numpy as np  # for few checkpoints

    matrix = np.frombuffer(rows, np.uint8).reshape(-1, row_bytes)
    matrix[:, tile.begin : tile.begin + tile.width] = np.frombuffer(held, np.uint8).reshape(-1, tile.width)


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether both have the same type, shape and bytes; those that share their bytes are not read.

    A few MB are in memory at a time. Raises as `read_part`.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.spans == other.spans or all(
        read_part(one, at, min(_READ_BYTES, one.nbytes - at)) == read_part(other, at, min(_READ_BYTES, one.nbytes - at))
        for at in range(0, one.nbytes, _READ_BYTES)
    )


def same_transposed(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether the matrix `other` is `one` transposed, byte by byte in one type.

    `other` is in memory whole, a row of `one` at a time. Raises as `read_part`.
    """
    is_matrix = len(one.shape) == len(other.shape) == 2 and one.nbytes and not one.dtype.bits % 8  # noqa: PLR2004
    if not is_matrix or one.dtype is not other.dtype or one.shape != other.shape[::-1]:
        return False
    import numpy as np  # for few adapters

    width = one.dtype.bits // 8
    columns = np.frombuffer(read_part(other, 0, other.nbytes), f"V{width}").reshape(other.shape).T
    row = width * one.shape[1]
    return all(read_part(one, at * row, row) == columns[at].tobytes() for at in range(one.shape[0]))


def transposed(tensor: StoredTensor) -> StoredTensor:
    """Return the transposed of a matrix that is one span of a file, as it is meant or transposed already.

    Raises `UnsupportedAdapter` for any other.
    """
    rows, columns = tensor.shape
    spec = replace(tensor.spec, shape=(columns, rows))
    match tensor.spans:
        case (TransposedSpan() as span,) if span.nbytes == span.stored_bytes:
            return StoredTensor(spec=spec, spans=span.places)
        case (Span() as span,) if type(span) is Span:
            span_as_transposed = TransposedSpan(
                path=span.path,
                offset=span.offset,
                nbytes=span.nbytes,
                rows=columns,
                columns=rows,
                itemsize=tensor.dtype.bits // 8,
            )
            return StoredTensor(spec=spec, spans=(span_as_transposed,))
    raise UnsupportedAdapter(
        f"{tensor.path}: `{tensor.name}` lies in pieces, which lora-tool does not transpose",
        hint="save the adapter again with PEFT: model.save_pretrained(folder)",
    )
