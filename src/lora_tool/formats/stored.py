"""Reading stored tensors without numpy: enough to tell whether two hold the same bytes."""

from __future__ import annotations

from lora_tool.errors import SourceChanged
from lora_tool.formats.files import open_regular, read_at
from lora_tool.tensors import StoredTensor, TransposedSpan

_READ_BYTES = 4 << 20


def read_part(tensor: StoredTensor, start: int, nbytes: int) -> bytes:
    """Return the tensor's `nbytes` bytes from byte `start`.

    Raises `SourceChanged` where a file ends before them, `CorruptFile` where one cannot be opened.
    """
    pieces = []
    for span in tensor.part(start, nbytes):
        if isinstance(span, TransposedSpan):
            raise NotImplementedError(f"`{tensor.name}` lies transposed in {span.path}")
        with open_regular(span.path) as fd:
            piece = read_at(span.path, fd, span.offset, span.nbytes)
        if len(piece) != span.nbytes:
            raise SourceChanged(f"{span.path} became shorter while it was read")
        pieces.append(piece)
    return b"".join(pieces)


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
