"""What a worker reads of tensors and of the factors of terms: rows and columns, as they are stored."""

from __future__ import annotations

import numpy as np

from lora_tool.core.tensors import StoredTensor
from lora_tool.execution import kernels
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.kernels import bytes_of
from lora_tool.execution.reading import Sources
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.open_files import Room
from lora_tool.plans.core.terms import LoraTerm


class StoredRows:
    """Rows of the tensors of `sources`, in new arrays or in the worker's `room`."""

    def __init__(self, sources: Sources, room: Room) -> None:
        self._sources = sources
        self._room = room
        self._stack: tuple[StoredTensor, Array] | None = None

    def rows(self, tensor: StoredTensor, first: int, last: int, place: str = "") -> Array:
        """Return rows `first` to `last` of the tensor in its storage type, [last - first, ...].

        The array is new, or the worker's buffer `place` where one is named: the system clears the pages of a new one.
        """
        shape, storage = (last - first, *tensor.shape[1:]), kernels.STORAGE[tensor.dtype]
        out = self._room.of(place, shape, storage) if place else np.empty(shape, storage)
        row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
        self._sources.read_into(tensor, first * row_bytes, bytes_of(out))
        return out

    def a(self, term: LoraTerm, place: str = "") -> Array:
        """Return the rows of A that are the term's expert's, as they are stored; see `rows`."""
        return self.rows(term.a, term.expert * term.rank, (term.expert + 1) * term.rank, place)

    def columns_of_a(self, term: LoraTerm, columns: slice) -> Array:
        """Return columns of A's rows as they are stored: of an embedding's, as wide as the vocabulary, no others are read."""
        some = self._room.of("columns", (term.rank, columns.stop - columns.start), kernels.STORAGE[term.a.dtype])
        for at, row in enumerate(some, start=term.expert * term.rank):
            self._sources.read_into(term.a, (at * term.a.shape[1] + columns.start) * some.itemsize, bytes_of(row))
        return some

    def b(self, term: LoraTerm, rows: slice, place: str = "") -> Array:
        """Return these rows of B as they are stored, with the columns of the term's expert; see `rows`."""
        if term.experts == 1:
            return self.rows(term.b, rows.start, rows.stop, place)
        if self._stack is None or self._stack[0] is not term.b:
            # every expert's columns are scattered over all of B, and its experts come one after the other
            self._stack = (term.b, self.rows(term.b, 0, term.b.shape[0]))
        grouped = term.layout is ExpertLayout.GROUPED_BY_EXPERT
        own = slice(term.expert * term.rank, (term.expert + 1) * term.rank)
        columns = own if grouped else slice(term.expert, None, term.experts)
        return np.asarray(self._stack[1][rows, columns])
