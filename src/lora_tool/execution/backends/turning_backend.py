"""Matrices that lie transposed in a file, compiled: they go from file to file in one call, and need no numpy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from lora_tool.execution.native.library import kernel
from lora_tool.execution.native.turned_files import InFile, turn_on, turned
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.room import Room
from lora_tool.plan.core.delta_retention import DeltaRetention
from lora_tool.plan.core.ops import Precision

if TYPE_CHECKING:
    from lora_tool.execution.backends.native_backend import NativeBackend


class TurningBackend:
    """See `Backend`. What is not finite is left to `NativeBackend`."""

    whole_tensors: ClassVar[bool] = False

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        found = kernel()
        if found is None:
            raise AssertionError("no kernel: `backend_for` should have chosen another backend")
        self._kernel = found
        self._sources = sources
        self._precision = precision
        self._stopped = stopped
        self._room = Room()
        self._native: NativeBackend | None = None

    @staticmethod
    def one_thread() -> contextlib.AbstractContextManager[None]:
        """Return what does nothing: no library has threads here."""
        return contextlib.nullcontext()

    def run(self, unit: ComputeUnit, out: int) -> DeltaRetention | None:
        """See `Backend`."""
        if self._turned_on(unit, out):
            return None
        if self._native is None:
            from lora_tool.execution.backends.native_backend import NativeBackend

            self._native = NativeBackend(self._sources, self._precision, self._stopped)
        return self._native.run(unit, out)

    def _turned_on(self, unit: ComputeUnit, out: int) -> bool:
        """Write the unit from file to file; return whether that was possible."""
        found = turned(unit.op)
        if found is None:
            return False
        stored, part = found
        place = self._sources.place(stored, 0, stored.nbytes)
        if place is None:
            return False
        path, begin = place
        rows, columns = stored.shape
        size = unit.last - unit.first, math.prod(unit.out.shape[1:])
        result = InFile(descriptor=out, begin=unit.begin, shape=size, dtype=unit.out.dtype)
        with self._sources.descriptor(path) as source:
            matrix = InFile(descriptor=source, begin=begin, shape=(rows, columns), dtype=stored.dtype)
            return turn_on(self._kernel, matrix, result, unit.first, part.scale, self._room)
