"""A check of the values that a plan reads, in parts that can run at the same time as the writing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec import Struct

from lora_tool.machine import available_cores
from lora_tool.progress import Progress
from lora_tool.report.findings import Finding
from lora_tool.tensors import TensorTable

if TYPE_CHECKING:
    from lora_tool.sharded.state import TrainingState
    from lora_tool.sharded.value_facts import ValueFact, ValueReader

F = TypeVar("F")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reading(Protocol[T_co]):
    """Anything that reads values in a thread of its own."""

    def run(self, advance: Progress) -> Sequence[T_co]:
        """Return what the values show. `advance` is called with the bytes, and may raise to stop it."""


class ValuePart(Protocol):
    """A part of the check: plain data, which can be sent to any machine that sees the same files."""

    @property
    def name(self) -> str:
        """What is looked at, for whoever reads that it failed."""

    @property
    def nbytes(self) -> int:
        """How many bytes it reports."""

    def run(self, advance: Progress) -> list[Finding]:
        """Read the values and return what is wrong with them. `advance` is called with the bytes, and may raise to stop it."""


class ValueFacts(Struct, frozen=True, kw_only=True):
    """What reading values has shown, for the rules about values."""

    facts: tuple[ValueFact, ...]

    def values(self, kind: type[F]) -> Iterator[F]:
        """Yield the facts of one kind."""
        return (fact for fact in self.facts if isinstance(fact, kind))


class JudgedValues(Struct, frozen=True, kw_only=True):
    """One reader of values and the rules about what it shows: a `ValuePart`."""

    reader: ValueReader

    @property
    def name(self) -> str:
        return self.reader.name

    @property
    def nbytes(self) -> int:
        return self.reader.nbytes

    def run(self, advance: Progress) -> list[Finding]:
        """Return what the rules find in the values."""
        from lora_tool.rules.training.lt4_values import judge_values  # plans do not run

        return judge_values(ValueFacts(facts=tuple(self.reader.run(advance))))


class ValueCheck(Struct, frozen=True, kw_only=True):
    """A check of the values of tensors that has not run yet."""

    nbytes: int
    """How many bytes it reads."""
    parts: tuple[ValuePart, ...]
    """Its parts, which may run at the same time."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the codes of errors that do not stop the plan."""

    def run(self, advance: Progress) -> list[Finding]:
        """Run all parts and return what they find, in their order. Raises what they raise."""
        return run_parts(self.parts, advance)


def run_parts(parts: Sequence[Reading[T]], advance: Progress) -> list[T]:
    """Run all parts, some at the same time, and return their results in the order of the parts. Raises what they raise."""
    from concurrent.futures import CancelledError, ThreadPoolExecutor  # slow, and plans do not run

    stop = threading.Event()

    def go_on(nbytes: int) -> None:
        if stop.is_set():
            raise CancelledError
        advance(nbytes)

    with ThreadPoolExecutor(min(4, available_cores())) as workers:
        try:
            found = [*workers.map(lambda part: part.run(go_on), parts)]
        except BaseException:
            stop.set()
            raise
    return [result for part in found for result in part]


def value_check(state: TrainingState, tensors: TensorTable, *, ignored: tuple[str, ...] = ()) -> ValueCheck:
    """Return the check of the values of `tensors`, some of the state's, without running it."""
    parts = tuple(JudgedValues(reader=reader) for reader in state.value_readers(tensors))
    return ValueCheck(nbytes=sum(part.nbytes for part in parts), parts=parts, ignored=ignored)
