"""Reading stored tensors without numpy: enough to tell whether two hold the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.tensors import StoredTensor

_READ_BYTES = 4 << 20


def chunks(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the tensor's bytes in order, a few MB at a time. Raises `OSError`."""
    for span in tensor.spans:
        with span.path.open("rb") as file:
            file.seek(span.offset)
            for at in range(0, span.nbytes, _READ_BYTES):
                yield file.read(min(_READ_BYTES, span.nbytes - at))


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether both have the same type, shape and bytes; those that share their bytes are not read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.spans == other.spans:
        return True
    if len(one.spans) == len(other.spans) == 1:
        return all(left == right for left, right in zip(chunks(one), chunks(other), strict=True))
    return b"".join(chunks(one)) == b"".join(chunks(other))
