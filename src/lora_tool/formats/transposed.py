"""Reading matrices that lie transposed in their file, as some published mixtures of experts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.tensors import TransposedSpan


def read_turned(span: TransposedSpan, read: Callable[[int, memoryview], None]) -> NDArray[Any]:
    """Return the bytes of the span. `read` fills a buffer from an offset of the span's file.

    The whole matrix is read, and some of its columns are taken.
    """
    stored = np.empty(span.stored_bytes, np.uint8)
    read(span.offset, stored.data)
    row_bytes = span.columns * span.itemsize
    first, last = span.start // row_bytes, -(-(span.start + span.nbytes) // row_bytes)
    matrix = stored.view(f"u{span.itemsize}").reshape(span.columns, span.rows)
    rows = np.ascontiguousarray(matrix[:, first:last].T).reshape(-1).view(np.uint8)
    return rows[span.start - first * row_bytes :][: span.nbytes]
