"""One worker: it copies units, and computes them with a backend of its own for each kind of arithmetic."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_tool.core.batches import batches_of_bytes
from lora_tool.core.exhaustive import assert_never
from lora_tool.execution.backends.backend import Backend
from lora_tool.execution.backends.choosing import ChooseBackend, backend_for
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit, CopyUnit, GatherUnit, RequantiseUnit, Unit, units_of
from lora_tool.execution.work import Sample
from lora_tool.formats.room import PageBuffer
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.steps import Shard

if TYPE_CHECKING:
    from lora_tool.execution.requantised import Requantiser

_BATCH_BYTES = 4 << 20


def batches_of(
    shard: Shard, precision: Precision, *, choose: ChooseBackend = backend_for
) -> tuple[tuple[Unit, ...], ...]:
    """Return the units that write a file's data, in batches worth handing out, as its arithmetic needs them."""
    units = units_of(shard, whole=lambda op: choose(precision, op).whole_tensors)
    return tuple(batches_of_bytes(units, _BATCH_BYTES))


class Worker:
    """Writes units of a plan of this precision, read from `sources`. Not shared between threads."""

    def __init__(
        self,
        sources: Sources,
        precision: Precision,
        *,
        choose: ChooseBackend = backend_for,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sources = sources
        self._room = PageBuffer()
        self._precision = precision
        self._choose = choose
        self._stopped = stopped
        self._backends: dict[type[Backend], Backend] = {}
        self._requantiser: Requantiser | None = None

    def write(self, unit: Unit, out: int) -> Sample | None:
        """Write the unit to its place in the descriptor `out`; return a sample of what rounding left of its change.

        Raises `ExecutionError` for values that must not be written, `SourceChanged`, OSError.
        """
        match unit:
            case CopyUnit():
                _copy(unit, self._sources, out)
                return None
            case GatherUnit():
                gathered = self._room.of(unit.nbytes)
                self._sources.read_into(unit.source, unit.start, gathered)
                write_exactly(out, gathered, unit.begin)
                return None
            case ComputeUnit():
                retained = self._backend(unit).run(unit, out)
                return None if retained is None else (unit.out.name, unit.begin, retained)
            case RequantiseUnit():
                retained = self._of_codes.run(unit, out)
                return None if retained is None else (unit.out.name, unit.begin, retained)
            case _:
                return assert_never(unit)

    @property
    def _of_codes(self) -> Requantiser:
        if self._requantiser is None:
            from lora_tool.execution.numbers import Numbers  # numpy, for few plans
            from lora_tool.execution.requantised import Requantiser

            self._requantiser = Requantiser(Numbers(self._sources, self._precision, self._stopped))
        return self._requantiser

    def _backend(self, unit: ComputeUnit) -> Backend:
        chosen = self._choose(self._precision, unit.op)
        if chosen not in self._backends:
            self._backends[chosen] = chosen(self._sources, self._precision, self._stopped)
        return self._backends[chosen]


def _copy(unit: CopyUnit, sources: Sources, out: int) -> None:
    with sources.descriptor(unit.source) as source:
        done = _copy_in_kernel(unit, source, out)
    if done < unit.nbytes:
        rest = memoryview(bytearray(unit.nbytes - done))
        sources.read_exactly(unit.source, unit.offset + done, rest)
        write_exactly(out, rest, unit.begin + done)


def _copy_in_kernel(unit: CopyUnit, source: int, out: int) -> int:
    """Copy without passing through this process, and return how many bytes the system copied that way."""
    done = 0
    while hasattr(os, "copy_file_range") and done < unit.nbytes:
        try:
            count = os.copy_file_range(source, out, unit.nbytes - done, unit.offset + done, unit.begin + done)
        except OSError:
            break  # file systems, containers and old kernels refuse in various ways; a real error comes again, named
        if count == 0:
            break
        done += count
    return done
