"""A check of the values that a plan reads, in parts that can run at the same time as the writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from lora_tool.core.progress import Progress
from lora_tool.core.report.findings import Finding
from lora_tool.core.tensors import TensorTable

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.file_values import ValueReader
    from lora_tool.checkpoints.states.state import TrainingState


class ValuePart(Protocol):
    """A part of the check: plain data, which can be sent to any machine that sees the same files."""

    @property
    def name(self) -> str:
        """The name of the part, for error messages."""

    @property
    def nbytes(self) -> int:
        """How many bytes it reports."""

    def run(self, advance: Progress) -> list[Finding]:
        """Read the values and return the findings. `advance` is called with the bytes, and may raise to stop it."""


class JudgedValues(Struct, frozen=True, kw_only=True):
    """A `ValuePart` of one reader of values and the rules that judge them."""

    name: str
    nbytes: int
    reader: ValueReader

    def run(self, advance: Progress) -> list[Finding]:
        """Return the rules' findings in the values."""
        from lora_tool.rules.training.lt4_values import judge_values  # plans do not run

        return judge_values(tuple(self.reader.run(advance)))


class ValueCheck(Struct, frozen=True, kw_only=True):
    """A check of the values of tensors that has not run yet."""

    nbytes: int
    """How many bytes it reads."""
    parts: tuple[ValuePart, ...]
    """Its parts, which may run at the same time."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the codes of errors that do not stop the plan."""

    def run(self, advance: Progress) -> list[Finding]:
        """Run all parts and return their findings, in order. Raises what the parts raise."""
        from lora_tool.checkpoints.states.file_values import run_parts  # plans do not run

        return run_parts([part.run for part in self.parts], advance)


def value_check(state: TrainingState, tensors: TensorTable, *, ignored: tuple[str, ...] = ()) -> ValueCheck:
    """Return the check of the values of `tensors`, some of the state's, without running it."""
    parts = tuple(
        JudgedValues(name=reader.name, nbytes=reader.nbytes, reader=reader) for reader in state.value_readers(tensors)
    )
    return ValueCheck(nbytes=sum(part.nbytes for part in parts), parts=parts, ignored=ignored)
